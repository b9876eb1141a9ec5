// Fuzz target: any bytes become a plan's description and the arguments of one run, mostly legal, sometimes not.
//
// What must hold, whatever the bytes:
//   - nothing but octile::Error is thrown, and never with Status::internal;
//   - the C++ and the C interface give the same answer;
//   - legal arguments are accepted; can_implement and run agree;
//   - nothing is read or written outside the tensors: their memory is exactly as large as they are, for ASan;
//   - only the outputs' elements change, and not even those when the run is refused;
//   - the result equals the reference's bit for bit where the plan promises that, and a second run repeats it.
//
// The kernels run at each of the instruction sets that this machine has, so the bits are compared across them too.
//
// It is linked with libFuzzer, or with standalone.cpp.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/access.h"
#include "bytes.h"
#include "check/operands.h"
#include "cpu/support/isa.h"
#include "octile/octile.h"
#include "octile/octile.hpp"
#include "plan_kinds.h"
#include "plan_memory.h"
#include "target.h"

namespace octile::fuzz {

namespace {

constexpr std::int64_t kMaxMultiplications = 1 << 17;  // of one run: milliseconds, even under sanitizers

// The operands of a legal run. Optional ones are present at random.
template <class Args, class Description>
Operands operands_of(const Description& d, std::int64_t rows, Bytes& in) {
  Operands all;
  for (const check::Operand& o : described<Args>(d, rows, in)) {
    Operand& operand = all.emplace_back(Operand{o});
    if (!o.present() || (o.optional && in.below(2) == 0)) continue;
    const std::int64_t cols = o.size.cols.value_or(0);
    const std::int64_t pitch = o.dtype == DType::s4 ? cols + cols % 2 : cols;
    operand.view = {nullptr, o.dtype, d.device, o.size.cols ? 2 : 1, {o.size.rows, cols}, {1, 0}};
    if (o.size.cols) operand.view.strides = {pitch, 1};
  }
  return all;
}

template <class Args>
Args args_of(const Operands& operands, std::uint64_t seed) {
  std::vector<Tensor> views;
  for (const Operand& o : operands) views.push_back(o.view);
  return check::args_of<Args>(views, seed);
}

// ---- The C interface ----

octile_device c_device(Device device) {
  return {device.type == DeviceType::cpu    ? OCTILE_DEVICE_CPU
          : device.type == DeviceType::cuda ? OCTILE_DEVICE_CUDA
                                            : static_cast<std::int32_t>(device.type) + 1,
          device.index};
}

// A tensor for C. Its shape and strides are on the heap, exactly as long as the rank, for ASan.
struct CTensor {
  octile_tensor tensor{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;

  explicit CTensor(const Tensor& t) {
    const std::size_t rank = t.rank == 1 || t.rank == 2 ? static_cast<std::size_t>(t.rank) : 0;
    shape.assign(t.shape.begin(), t.shape.begin() + static_cast<std::ptrdiff_t>(rank));
    strides.assign(t.strides.begin(), t.strides.begin() + static_cast<std::ptrdiff_t>(rank));
    shape.shrink_to_fit();
    strides.shrink_to_fit();
    const std::uint8_t code = is_float(t.dtype)      ? t.dtype == DType::bf16 ? 4 : 2
                              : t.dtype == DType::u8 ? 1
                              : bits(t.dtype) != 0   ? 0
                                                     : 9;
    tensor.data = t.data;
    tensor.device = c_device(t.device);
    tensor.ndim = t.rank;
    tensor.dtype = {code, static_cast<std::uint8_t>(bits(t.dtype)), 1};
    tensor.shape = shape.data();
    tensor.strides = strides.data();
  }
};

struct CPlan {
  octile_plan* plan = nullptr;
  ~CPlan() { octile_plan_destroy(plan); }
};

// The same plan through C, which must be refused with the same status.
template <class K, class Description>
void create(const Description& d, Status expected, CPlan& plan) {
  typename K::CDescription c;
  REQUIRE(K::init(&c, sizeof c) == OCTILE_OK, octile_last_error());
  describe(d, c);
  c.threads = d.threads;
  c.device = c_device(d.device);
  c.kernel = d.kernel.c_str();
  const octile_status status = K::create(&c, &plan.plan);
  // A NUL ends a C string early, so the request may differ.
  if (d.kernel.find('\0') != std::string::npos) return;
  // With several mistakes each interface may report a different one: C checks the device and the weight before the plan
  // checks anything.
  bool known = d.device.type <= DeviceType::cuda;
  if constexpr (requires { d.weight; }) known = known && number(d.weight) < std::ssize(kFormats);
  REQUIRE(known ? status == number(expected) : status != OCTILE_OK, std::string(K::name) + ": " + octile_last_error());
  REQUIRE((status == OCTILE_OK) == (plan.plan != nullptr), K::name);
}

// A description of any size and content gives an answer, and nothing beyond it is read.
template <class K>
void create_from_bytes(Bytes& in) {
  typename K::CDescription c;
  K::init(&c, sizeof c);
  const std::size_t size = in.rarely(4) ? in.word() : in.byte() % 16 * 8;
  std::vector<std::uint8_t> bytes(std::clamp<std::size_t>(size, sizeof(std::size_t), 4096));
  std::copy_n(reinterpret_cast<const std::uint8_t*>(&c), std::min(sizeof c, bytes.size()), bytes.begin());
  for (int i = in.below(6); i > 0; --i) {
    const std::size_t at = in.byte() % bytes.size();
    // Not the pointer: it could be any address, and only ours may be read.
    if (at < offsetof(typename K::CDescription, kernel) || at >= sizeof c) bytes[at] = in.byte();
  }
  std::memcpy(bytes.data(), &size, sizeof size);
  const auto given = block_of(bytes.size());
  std::copy(bytes.begin(), bytes.end(), given.bytes.get());
  CPlan plan;
  void* const memory = given.bytes.get();
  const octile_status status = K::create(static_cast<const typename K::CDescription*>(memory), &plan.plan);
  REQUIRE((status == OCTILE_OK) == (plan.plan != nullptr), K::name);
  REQUIRE(status != OCTILE_INTERNAL, octile_last_error());
}

// ---- One input ----

// How far the inputs got.
struct Counts {
  std::uint64_t plans = 0;
  std::uint64_t refused = 0;
  std::uint64_t ran = 0;
  std::uint64_t compared = 0;
} counts;

template <class Body>
Status status_of(const Body& body) {
  try {
    body();
    return Status::ok;
  } catch (const Error& error) {
    REQUIRE(error.status() != Status::ok && error.status() != Status::internal, error.what());
    REQUIRE(std::strlen(error.what()) > 0, "an error without a text");
    return error.status();
  }
}

struct Outcome {
  Status verdict = Status::ok;
  Status run = Status::ok;
};

template <class Args>
Outcome run_cpp(const typename Kind<Args>::Plan& plan, const Operands& operands, Workspace workspace,
                std::uint64_t seed) {
  const auto args = args_of<Args>(operands, seed);
  const Verdict verdict = plan.can_implement(args);
  REQUIRE(static_cast<bool>(verdict) == verdict.reason.empty(), verdict.reason);
  return {verdict.status, status_of([&] { plan.run(args, workspace); })};
}

template <class Args>
Outcome run_c(const octile_plan* plan, const Operands& operands, Workspace workspace, std::uint64_t seed) {
  std::vector<CTensor> tensors;
  for (const Operand& o : operands) tensors.emplace_back(o.view);
  // The structure is a size, one pointer per operand and, for some plans, the seed.
  typename Kind<Args>::CArgs args{};
  std::vector<std::uint64_t> words = {sizeof args};
  for (std::size_t i = 0; i < operands.size(); ++i) {
    words.push_back(operands[i].view.rank == 0 ? 0 : reinterpret_cast<std::uintptr_t>(&tensors[i].tensor));
  }
  if constexpr (requires { args.seed; }) {
    const auto at = reinterpret_cast<const char*>(&args.seed) - reinterpret_cast<const char*>(&args);
    words.insert(words.begin() + at / 8, seed);
  }
  REQUIRE(sizeof args == words.size() * 8, Kind<Args>::name);
  std::memcpy(&args, words.data(), sizeof args);
  const auto verdict = static_cast<Status>(Kind<Args>::can_implement(plan, &args));
  const auto run = static_cast<Status>(Kind<Args>::run(plan, &args, workspace.data, workspace.size, nullptr));
  REQUIRE(verdict != Status::internal && run != Status::internal, octile_last_error());
  return {verdict, run};
}

// Which bytes a run may change.
std::vector<std::vector<bool>> writable(const Operands& operands, const Memory& memory) {
  std::vector<std::vector<bool>> may(memory.blocks.size());
  for (std::size_t b = 0; b < may.size(); ++b) may[b].resize(memory.blocks[b].size);
  for (const Operand& o : operands) {
    if (!o.output || o.block == kNoBlock) continue;
    for_each_element(o.view, [&](std::size_t at) {
      for (std::size_t i = 0; i < element_bytes(o.view.dtype); ++i) may[o.block][o.offset + at + i] = true;
    });
  }
  return may;
}

void require_untouched(const char* kind, const Operands& operands, const Memory& before, const Memory& after,
                       bool refused) {
  const auto may = writable(operands, after);
  for (std::size_t b = 0; b < may.size(); ++b) {
    for (std::size_t i = 0; i < may[b].size(); ++i) {
      if (before.blocks[b].bytes[i] == after.blocks[b].bytes[i]) continue;
      REQUIRE(!refused, std::string(kind) + ": a refused run wrote");
      REQUIRE(may[b][i], std::string(kind) + ": wrote outside its outputs");
    }
  }
}

bool is_nan(const std::uint8_t* at, DType dtype) {
  if (!is_float(dtype)) return false;
  Element element(dtype);
  std::memcpy(element.bytes, at, element.size());
  return std::isnan(load<double>(ConstTensor(element.view), 0));
}

// A NaN's payload is not in the contract.
void require_same(const std::string& what, const Operands& operands, const Memory& a, const Memory& b) {
  for (std::size_t index = 0; index < operands.size(); ++index) {
    const Operand& o = operands[index];
    if (!o.output || o.block == kNoBlock) continue;
    for_each_element(o.view, [&](std::size_t at) {
      const std::uint8_t* const x = a.blocks[o.block].bytes.get() + o.offset + at;
      const std::uint8_t* const y = b.blocks[o.block].bytes.get() + o.offset + at;
      if (std::memcmp(x, y, element_bytes(o.view.dtype)) == 0) return;
      if (is_nan(x, o.view.dtype) && is_nan(y, o.view.dtype)) return;
      char text[96];
      std::snprintf(text, sizeof text, "operand %zu, byte %zu: %02x.. and %02x..", index, at, x[0], y[0]);
      REQUIRE(false, what + ": " + text);
    });
  }
}

template <class Args>
void fuzz_one(Bytes& in) {
  using K = Kind<Args>;
  if (in.rarely(30)) return create_from_bytes<K>(in);

  const auto description = K::describe(in);
  std::optional<typename K::Plan> plan;
  const Status selected = status_of([&] { plan = K::Plan::select(description); });
  CPlan c_plan;
  create<K>(description, selected, c_plan);
  if (!plan) return;
  ++counts.plans;
  const PrecisionGuarantee guarantee = plan->precision_guarantee();
  REQUIRE(!plan->sku().empty() || std::string(K::name).ends_with("linear_backward"), "a plan without kernels");
  REQUIRE(!plan->explain().empty(), "a plan that explains nothing");

  std::int64_t rows = rows_of(description);
  if (rows > 64 || in.rarely(4)) rows = std::min<std::int64_t>(rows, in.below(20));
  if (plan->workspace_size() > kMaxBytes || work_of(description, rows) > kMaxMultiplications) return;
  Operands operands = operands_of<Args>(description, rows, in);
  Mistakes mistakes;
  for (Operand& o : operands) {
    const std::optional<std::size_t> size = extent(o.view);
    if (o.view.present() && (!size || *size > kMaxBytes / 8)) return;
    vary_layout(o, in);
  }
  const Operands wanted_operands = operands;
  if (in.rarely(3)) {
    mistakes.any = true;
    for (int i = 1 + in.below(2); i > 0; --i) spoil(operands[in.byte() % operands.size()], in);
  }
  Memory memory = allocate(operands, in, mistakes);
  mistakes.wild_values = in.rarely(6);
  memory.bind(operands);
  for (const Operand& o : operands) {
    if (o.block != kNoBlock) fill(o, in, mistakes.wild_values);
  }
  const std::uint64_t seed = in.word();

  std::size_t workspace_size = plan->workspace_size();
  mistakes.short_workspace = workspace_size > 0 && in.rarely(10);
  if (mistakes.short_workspace) workspace_size -= 1 + in.byte() % workspace_size;
  mistakes.null_workspace = workspace_size > 0 && in.rarely(30);
  const std::size_t shift = in.byte() % 4;
  const Block scratch = block_of(workspace_size + shift);
  std::memset(scratch.bytes.get(), 0xa5, scratch.size);
  const Workspace workspace = {mistakes.null_workspace ? nullptr : scratch.bytes.get() + shift, workspace_size};

  const Memory before = memory.copy();
  const bool through_c = c_plan.plan != nullptr && in.below(2) == 1;
  const auto run_on = [&](Memory& on) {
    on.bind(operands);
    return through_c ? run_c<Args>(c_plan.plan, operands, workspace, seed)
                     : run_cpp<Args>(*plan, operands, workspace, seed);
  };
  const Outcome outcome = run_on(memory);
  const bool refused = outcome.run != Status::ok;
  bool illegal = overlapping(operands, memory);
  for (std::size_t i = 0; i < operands.size(); ++i) illegal |= forbidden(operands[i], wanted_operands[i].view);
  REQUIRE(!illegal || outcome.verdict != Status::ok, std::string(K::name) + ": forbidden arguments were taken");
  ++(refused ? counts.refused : counts.ran);
  require_untouched(K::name, operands, before, memory, refused);
  if (outcome.verdict != Status::ok) {
    REQUIRE(outcome.run == outcome.verdict, std::string(K::name) + ": can_implement and run differ");
    REQUIRE(mistakes.any || mistakes.wild_values, std::string(K::name) + ": legal arguments refused: " +
                                                      plan->can_implement(args_of<Args>(operands, seed)).reason);
    return;
  }
  if (mistakes.short_workspace || mistakes.null_workspace) {
    REQUIRE(outcome.run == Status::workspace_too_small, std::string(K::name) + ": a short workspace was taken");
    return;
  }
  REQUIRE(!refused, std::string(K::name) + ": can_implement says yes, run says no");

  Memory again = before.copy();
  REQUIRE(run_on(again).run == Status::ok, K::name);
  require_same(plan->sku() + " twice", operands, memory, again);
  if (!guarantee.bit_stable) return;
  auto reference = description;
  reference.kernel = "reference";
  const auto oracle = K::Plan::select(reference);
  if (oracle.workspace_size() > kMaxBytes) return;
  Memory wanted = before.copy();
  wanted.bind(operands);
  std::vector<std::uint8_t> oracle_scratch(oracle.workspace_size());
  oracle.run(args_of<Args>(operands, seed), {oracle_scratch.data(), oracle_scratch.size()});
  require_same(plan->sku() + " and " + oracle.sku(), operands, memory, wanted);
  ++counts.compared;
}

}  // namespace

}  // namespace octile::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace octile;
  using namespace octile::fuzz;
  using cpu::Isa;
  Bytes in(data, size);
  cpu::isa_ceiling =
      in.pick<Isa>({Isa::amx, Isa::baseline, Isa::avx2, Isa::avxvnni, Isa::avx512, Isa::avx512vnni, Isa::avx512bf16});
  switch (in.below(10)) {
    case 0:
      fuzz_one<LinearArgs>(in);
      break;
    case 1:
      fuzz_one<LinearBackwardArgs>(in);
      break;
    case 2:
      fuzz_one<QuantizeArgs>(in);
      break;
    case 3:
      fuzz_one<DequantizeArgs>(in);
      break;
    case 4:
      fuzz_one<QuantizeBackwardArgs>(in);
      break;
    case 5:
      fuzz_one<DequantizeBackwardArgs>(in);
      break;
    case 6:
      fuzz_one<FakeQuantizeArgs>(in);
      break;
    case 7:
      fuzz_one<GroupedLinearArgs>(in);
      break;
    case 8:
      fuzz_one<GroupedLinearBackwardArgs>(in);
      break;
    default:
      fuzz_one<FakeQuantizeBackwardArgs>(in);
      break;
  }
  return 0;
}

std::string octile::fuzz::reached(std::uint64_t) {
  return "plans " + std::to_string(counts.plans) + ", runs refused " + std::to_string(counts.refused) + ", done " +
         std::to_string(counts.ran) + ", compared with the reference " + std::to_string(counts.compared);
}
