// GroupedLinearPlan: X is quantized once. On a GPU one grouped_gemm has all experts' rows, and a second kernel sums
// them over slots. On the CPU each expert's rows are gathered, and go through a LinearPlan of the expert's shape.
// Experts with few rows are shared out among the threads, one expert a thread at a time, so that each weight is read
// once and no thread waits for another between experts; those that would leave threads idle go first, each with all
// threads.
#include "octile/grouped_linear.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "base/access.h"
#include "base/ceil_div.h"
#include "base/fields.h"
#include "base/float_environment.h"
#include "base/message.h"
#include "base/thread_pool.h"
#include "base/validate.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/grouped.h"
#include "plan/packed_weight.h"
#include "plan/plan.h"

namespace octile {

namespace {

constexpr std::string_view kSelect = "GroupedLinearPlan::select";
constexpr std::string_view kPack = "GroupedLinearPlan::pack";

struct GroupedLinearImpl : Plan::Impl {
  GroupedLinearDescription description;
  StaticScale static_scale;
  QuantizeStep quantize;           // where X is float and the products take it as s8
  std::optional<LinearPlan> many;  // an expert on the CPU with all threads; for a GPU it packs weights
  std::int64_t expert_bytes = 0;   // of a packed weight
  std::size_t xq_at = 0;           // (rows of X, xq_pitch) s8
  std::size_t x_scale_at = 0;
  std::size_t z_at = 0;  // (m, z_pitch)
  std::int64_t xq_pitch = 0;
  std::int64_t z_pitch = 0;
  // On a GPU.
  GemmStep product;
  // On the CPU.
  std::optional<LinearPlan> few;  // an expert of at most kFewGroupedRows rows with one thread
  // An expert's rows of X or Xq: m of them for all threads, and kFewGroupedRows for each thread.
  std::size_t gathered_at = 0;
  std::size_t gathered_scale_at = 0;
  std::size_t bias_at = 0;  // (experts, n) in z's type
  std::size_t order_at = 0;
  std::int64_t gathered_pitch = 0;
};

bool quantizes(const GroupedLinearDescription& d) { return d.activation != Activation::none && d.x != DType::s8; }
DType z_type(const GroupedLinearDescription& d) { return d.slots > 0 ? scale_type(d.y) : d.y; }
std::int64_t rows_of_x(const GroupedLinearDescription& d) { return d.gather ? d.tokens : d.m; }

// One expert's layer of X as the caller gives it.
LinearDescription expert_of(const GroupedLinearDescription& d) {
  return with_fields<LinearDescription>(OCTILE_FIELDS(a.m, a.n, a.k, a.x, a.y, a.activation, a.static_scale, a.weight,
                                                      a.packed_weight, a.bias, a.device, a.threads, a.kernel),
                                        d);
}

// The same for rows that are quantized.
LinearDescription product_of(const GroupedLinearDescription& d) {
  LinearDescription product = expert_of(d);
  product.y = z_type(d);
  if (!quantizes(d)) return product;
  product.x = DType::s8;
  product.activation = Activation::dynamic_per_token;
  return product;
}

// The same for all experts, on a GPU.
GemmProblem grouped_problem(const GroupedLinearDescription& d) {
  GemmProblem p = gemm_problem(product_of(d));
  p.operation = Operation::grouped_gemm;
  p.experts = d.experts;
  p.gather = d.gather;
  return p;
}

void check(const GroupedLinearDescription& d) {
  check_size(kSelect, "tokens", d.tokens);
  check_size(kSelect, "slots", d.slots);
  LinearDescription expert = expert_of(d);
  const bool on_gpu = d.device.type == DeviceType::cuda;
  if (on_gpu) expert.kernel = {};  // other rows' names
  check_linear(kSelect, expert);
  const GemmProblem product = grouped_problem(d);
  if (on_gpu) {
    const Task task = task_of(product);
    check_requested_kernel(kSelect, {d.kernel, d.device, {quantizes(d) ? Task{Operation::quantize} : task, task}});
  }
  if (d.tokens > kMaxGroupedRows) {
    fail(Status::unsupported, kSelect, ": tokens = ", d.tokens, ", expected at most ", kMaxGroupedRows);
  }
  check_grouped(kSelect, d);
  check_bytes(kSelect, "place", d.tokens, d.slots);
  if (d.clear_rest && d.slots > 0) {
    fail(Status::unsupported, kSelect, ": clear_rest with slots = ", d.slots, ": all rows of y are tokens'");
  }
}

// One expert's, not packed.
LinearPackArgs weight_of(const GroupedLinearDescription& d, const LinearPackArgs& all, std::int64_t e) {
  LinearPackArgs one;
  one.weight = expert_rows(all.weight, e, d.n);
  one.weight_scale = expert_rows(all.weight_scale, e, d.weight.granularity == Granularity::tensor ? 1 : d.n);
  if (d.weight.zero_point) one.weight_zero_point = expert_rows(all.weight_zero_point, e, d.n);
  return one;
}

// The weights before they are packed.
LinearPackArgs bind_weights(const GroupedLinearImpl& impl, const LinearPackArgs& args, TensorChecks& checks) {
  const GroupedLinearDescription& d = impl.description;
  const std::int64_t rows = d.experts * d.n;
  LinearPackArgs bound;
  bound.weight = checks.matrix("weight", args.weight, d.weight.type, {rows, d.k});
  const std::int64_t group = d.weight.group > 0 ? d.weight.group : std::max<std::int64_t>(d.k, 1);
  const DType scale = scale_type(d.y);
  if (d.weight.granularity == Granularity::group) {
    bound.weight_scale = checks.matrix("weight_scale", args.weight_scale, scale, {rows, d.k / group});
  } else {
    const bool per_channel = d.weight.granularity == Granularity::row;
    bound.weight_scale = checks.vector("weight_scale", args.weight_scale, scale, per_channel ? rows : d.experts);
  }
  if (d.weight.zero_point) {
    const ConstTensor z = checks.matrix("weight_zero_point", args.weight_zero_point, DType::s32, {rows, d.k / group});
    if (z.device.type == DeviceType::cpu) check_values_within(checks, "weight_zero_point", z, -8, 7);
    bound.weight_zero_point = z;
  } else {
    checks.absent("weight_zero_point", args.weight_zero_point);
  }
  return bound;
}

std::int64_t rows_of(const GroupedLinearDescription& d, const GroupedLinearArgs& args) {
  return d.gather ? args.token.rows() : args.x.rows();
}

// The caller's tensors, checked.
GroupedLinearArgs bind(const GroupedLinearImpl& impl, const GroupedLinearArgs& args, TensorChecks& checks) {
  const GroupedLinearDescription& d = impl.description;
  const auto at_most = [&](std::string_view what, const ConstTensor& t, int rank, std::int64_t maximum) {
    if (t.rank == rank && t.rows() >= 0 && t.rows() <= maximum) return t.rows();
    fail(Status::shape_mismatch, impl.function, ": ", what, " is ", t, ", expected at most ", maximum, " rows");
  };
  const std::int64_t x_rows = at_most("x", args.x, 2, rows_of_x(d));
  const std::int64_t m = d.gather ? at_most("token", args.token, 1, d.m) : x_rows;
  const std::int64_t tokens = d.slots > 0 ? at_most("place", args.place, 2, d.tokens) : 0;
  const DType scale = scale_type(d.y);
  GroupedLinearArgs bound;
  bound.x = checks.matrix("x", args.x, d.x, {x_rows, d.k});
  const bool x_scaled = d.x == DType::s8 && d.activation != Activation::static_per_tensor;
  bound.x_scale = checks.vector("x_scale", args.x_scale, scale, x_rows, x_scaled);
  bound.offsets = checks.vector("offsets", args.offsets, DType::s32, d.experts + 1);
  const bool on_cpu = d.device.type == DeviceType::cpu;
  if (on_cpu) check_offsets(checks, bound.offsets, m);
  bound.token = checks.vector("token", args.token, DType::s32, m, d.gather);
  if (d.gather && on_cpu) check_values_within(checks, "token", bound.token, 0, static_cast<int>(x_rows) - 1);
  if (d.packed_weight) {
    bound.weight = checks.vector("weight", args.weight, DType::u8, d.experts * impl.expert_bytes);
    check_alignment(impl.function, "weight", bound.weight.data);
    checks.absent("weight_scale", args.weight_scale);
    checks.absent("weight_zero_point", args.weight_zero_point);
  } else {
    const LinearPackArgs weights =
        bind_weights(impl, {args.weight, args.weight_scale, args.weight_zero_point, {}}, checks);
    bound.weight = weights.weight;
    bound.weight_scale = weights.weight_scale;
    bound.weight_zero_point = weights.weight_zero_point;
  }
  const bool sums = d.slots > 0;
  bound.bias = checks.matrix("bias", args.bias, d.y, {d.experts, d.n}, d.bias);
  bound.place = checks.matrix("place", args.place, DType::s32, {tokens, d.slots}, sums);
  bound.router_weight = checks.matrix("router_weight", args.router_weight, scale, {tokens, d.slots}, sums);
  bound.y = checks.matrix("y", args.y, d.y, {sums ? tokens : m, d.n});
  return bound;
}

struct QuantizedX {
  ConstTensor x, x_scale;
};

// X as the products take it, in the workspace.
QuantizedX quantize(const GroupedLinearImpl& impl, const GroupedLinearArgs& args, std::byte* memory, Stream stream) {
  const GroupedLinearDescription& d = impl.description;
  const std::int64_t m = args.x.rows();
  auto* const q = reinterpret_cast<std::int8_t*>(memory + impl.xq_at);
  QuantizeOperands o{.x = args.x, .q = on(d.device, matrix(q, m, d.k, impl.xq_pitch))};
  o.scale = {memory + impl.x_scale_at, 1, 0, d.k};
  o.given_scale = {const_cast<void*>(impl.static_scale.data()), 0, 0, d.k, true};  // only read
  o.next_reads_early = d.device.type == DeviceType::cuda && impl.product.kernel->reads_b_early;
  if (m > 0) launch(impl, impl.quantize, o, memory, stream);
  return {o.q, on(d.device, scale_vector(memory + impl.x_scale_at, scale_type(d.x), m, 1))};
}

// ---- On a GPU ----

// b, b_scale and zero_point of expert 0, and how far it is to the next one's.
void bind_experts(const GroupedLinearImpl& impl, const GroupedLinearArgs& args, GemmOperands& o) {
  const GroupedLinearDescription& d = impl.description;
  const GemmProblem& p = impl.product.problem;
  o.experts.offsets = args.offsets;
  o.experts.token = args.token;
  if (d.bias) {
    o.bias = as_vector(rows_at(args.bias, 0, 1));
    o.bias.strides[0] = args.bias.strides[1];
    o.experts.bias_stride = args.bias.strides[0];
  }
  if (d.packed_weight) {
    o.b = rows_at(args.weight, 0, impl.expert_bytes);
    o.experts.b_stride = impl.expert_bytes;
    return;
  }
  const std::int64_t rows_of_scale = d.weight.granularity == Granularity::tensor ? 1 : d.n;
  o.b = rows_at(args.weight, 0, d.n);
  o.b_scale = rows_at(args.weight_scale, 0, rows_of_scale);
  o.experts.b_stride = d.n * args.weight.strides[0];
  o.experts.b_scale_stride = rows_of_scale * args.weight_scale.strides[0];
  if (d.weight.granularity != Granularity::group) {
    if (rows_of_scale == 1) o.b_scale = repeated(o.b_scale, d.n);
    if (p.grouped()) o.b_scale = as_column(o.b_scale);
  }
  if (d.weight.zero_point) {
    o.zero_point = rows_at(args.weight_zero_point, 0, d.n);
    o.experts.zero_point_stride = d.n * args.weight_zero_point.strides[0];
  }
}

void run_on_gpu(const GroupedLinearImpl& impl, const GroupedLinearArgs& args, std::byte* memory, Stream stream) {
  const GroupedLinearDescription& d = impl.description;
  const std::int64_t m = rows_of(d, args);
  GemmOperands o;
  bind_experts(impl, args, o);
  o.y = args.y;
  if (d.slots > 0) o.y = on(d.device, Tensor{memory + impl.z_at, z_type(d), {}, 2, {m, d.n}, {impl.z_pitch, 1}});
  if (d.k == 0) {
    if (m > 0 && d.experts > 0) write_empty_sum(o, d.device, stream);
  } else {
    o.a = args.x;
    o.a_scale = args.x_scale;
    if (d.x == DType::s8 && d.activation == Activation::static_per_tensor) {
      o.a_scale = scale_vector(impl.static_scale.data(), impl.static_scale.type(), args.x.rows(), 0);
    }
    if (impl.quantize.kernel) {
      const QuantizedX x = quantize(impl, args, memory, stream);
      o.a = x.x;
      o.a_scale = x.x_scale;
      o.only_a_pending = impl.product.kernel->reads_b_early;
    }
    launch(impl, impl.product, o, memory, stream);
  }
  const cuda::OnDevice current(d.device);
  if (d.clear_rest && m > 0) cuda::clear_rest(args.offsets, args.y, stream);
  if (d.slots > 0) cuda::sum_slots({o.y, args.offsets, args.place, args.router_weight, args.y}, stream);
}

// ---- Rows in and out, on the CPU ----

constexpr std::int64_t kSummedColumns = 256;  // of a sum, at a time

void gather_rows(const ConstTensor& x, const ConstTensor& token, const Tensor& out, int threads) {
  const std::int64_t row_bytes = x.cols() * bits(x.dtype) / 8;
  if (row_bytes == 0) return;
  const std::int64_t step = std::max<std::int64_t>(kPartBytes / row_bytes, 1);
  cpu::parallel_for(threads, ceil_div(token.rows(), step), [&](std::int64_t part) {
    for (std::int64_t r = part * step; r < std::min(token.rows(), (part + 1) * step); ++r) {
      std::memcpy(rows_at(out, r, 1).data, rows_at(x, load_integer(token, r), 1).data,
                  static_cast<std::size_t>(row_bytes));
    }
  });
}

template <class Real, class Out>
struct SumRun {
  const Real* z;  // column 0 of the columns summed
  std::int64_t z_stride;
  const std::int32_t* place;
  const Real* weight;
  std::int64_t slots;
  std::int32_t begin, end;  // rows of experts
  std::int64_t columns;     // at most kSummedColumns
  Out* y;
};

struct SumSlots {
  template <cpu::Isa, class Real, class Out>
  OCTILE_INLINE static void run(SumRun<Real, Out> p) {
    Real sum[kSummedColumns] = {};
    for (std::int64_t s = 0; s < p.slots; ++s) {
      if (p.place[s] < p.begin || p.place[s] >= p.end) continue;
      const Real* __restrict z = p.z + p.place[s] * p.z_stride;
      const Real weight = p.weight[s];
      for (std::int64_t j = 0; j < p.columns; ++j) sum[j] = std::fma(weight, z[j], sum[j]);
    }
    for (std::int64_t j = 0; j < p.columns; ++j) p.y[j] = Out(sum[j]);
  }
};

template <class Real>
void sum_slots(const GroupedLinearArgs& args, const ConstTensor& z, int threads) {
  const std::int64_t columns = ceil_div(z.cols(), kSummedColumns);
  const std::int64_t experts = args.offsets.rows() - 1;
  const std::int64_t slots = args.place.cols();
  const std::int32_t begin = load_integer(args.offsets, 0), end = load_integer(args.offsets, experts);
  cpu::parallel_for(threads, args.y.rows(), [&](std::int64_t t) {
    visit_floats(args.y, t * args.y.strides[0], [&]<class Out>(Out* y) {
      if constexpr (std::is_same_v<Real, double> == std::is_same_v<Out, double>) {
        SumRun<Real, Out> run{nullptr,
                              z.strides[0],
                              static_cast<const std::int32_t*>(args.place.data) + t * args.place.strides[0],
                              static_cast<const Real*>(args.router_weight.data) + t * args.router_weight.strides[0],
                              slots,
                              begin,
                              end,
                              0,
                              nullptr};
        for (std::int64_t c = 0; c < columns; ++c) {
          const std::int64_t first = c * kSummedColumns;
          run.z = static_cast<const Real*>(z.data) + first;
          run.columns = std::min(kSummedColumns, z.cols() - first);
          run.y = y + first;
          cpu::multiversion<SumSlots>(run);
        }
      }
    });
  });
}

struct Run {
  const GroupedLinearImpl& impl;
  const GroupedLinearArgs& args;  // bound
  std::byte* memory;
  struct {
    ConstTensor x, x_scale, bias;
    Tensor y;
  } rows = {};  // of all experts

  // The rows of one expert, or of one thread's expert, in memory that is used again for the next one: it stays in the
  // caches.
  void gather(LinearArgs& one, std::int64_t first, std::int64_t count, std::int64_t place, int threads) const {
    const GroupedLinearDescription& d = impl.description;
    const ConstTensor token = rows_at(args.token, first, count);
    const auto from = [&](std::size_t at, DType type, std::int64_t pitch) {
      return memory + at + static_cast<std::size_t>(place * pitch * bits(type) / 8);
    };
    const Tensor x{from(impl.gathered_at, rows.x.dtype, impl.gathered_pitch),
                   rows.x.dtype,
                   {},
                   2,
                   {count, d.k},
                   {impl.gathered_pitch, 1}};
    gather_rows(rows.x, token, x, threads);
    one.x = x;
    if (!rows.x_scale.present()) return;
    const Tensor scale{
        from(impl.gathered_scale_at, rows.x_scale.dtype, 1), rows.x_scale.dtype, {}, 1, {count, 0}, {1, 0}};
    for (std::int64_t r = 0; r < count; ++r) {
      store(scale, r, 0, load<double>(rows.x_scale, load_integer(token, r)));
    }
    one.x_scale = scale;
  }

  // place: which of the gathered rows are its.
  LinearArgs of(std::int64_t e, std::int64_t place, int threads) const {
    const std::int64_t first = load_integer(args.offsets, e);
    const std::int64_t count = load_integer(args.offsets, e + 1) - first;
    LinearArgs one;
    if (impl.description.gather) {
      gather(one, first, count, place, threads);
    } else {
      one.x = rows_at(rows.x, first, count);
      if (rows.x_scale.present()) one.x_scale = rows_at(rows.x_scale, first, count);
    }
    if (impl.description.packed_weight) {
      one.weight = rows_at(args.weight, e * impl.expert_bytes, impl.expert_bytes);
    } else {
      const auto weight = weight_of(impl.description, {args.weight, args.weight_scale, args.weight_zero_point, {}}, e);
      one.weight = weight.weight;
      one.weight_scale = weight.weight_scale;
      one.weight_zero_point = weight.weight_zero_point;
    }
    if (impl.description.bias) one.bias = as_vector(rows_at(rows.bias, e, 1));
    one.y = rows_at(rows.y, first, count);
    return one;
  }
};

void select_on_gpu(GroupedLinearImpl& impl) {
  const GroupedLinearDescription& d = impl.description;
  const GemmProblem p = grouped_problem(d);
  impl.product = choose(gemm_kernels(), task_of(p), p, kSelect, d.kernel);
  impl.add("product", impl.product);
  const cuda::OnDevice current(d.device);
  if (d.clear_rest) cuda::prepare_clear_rest();
  if (d.slots > 0) {
    cuda::prepare_sum_slots(d.y);
    impl.explanation += "sum over slots: slot_sum_sm80\n";
  }
  LinearDescription packs = product_of(d);  // on the CPU
  packs.m = 1;
  packs.device = {};
  packs.kernel = {};
  impl.many = select_expert<LinearPlan>(kSelect, packs);
  impl.guarantee = guarantee_of(impl.product, "K");
  impl.reserve_scratch(std::max(impl.product.workspace, impl.quantize.workspace));
}

void select_on_cpu(GroupedLinearImpl& impl) {
  const GroupedLinearDescription& d = impl.description;
  const LinearDescription product = product_of(d);
  impl.many = select_expert<LinearPlan>(kSelect, product);
  LinearDescription few = product;
  few.m = std::min(d.m, kFewGroupedRows);
  few.threads = 1;
  impl.few = select_expert<LinearPlan>(kSelect, few);
  impl.sku += (impl.sku.empty() ? "" : " + ") + impl.many->sku();
  impl.explanation += message("an expert with all threads\n", impl.many->explain(), "an expert of at most ",
                              kFewGroupedRows, " rows, with one thread: ", impl.few->sku(), "\n");
  impl.order_at = impl.reserve(1, d.experts, DType::s32);
  if (d.gather) {
    impl.gathered_pitch = operand_pitch(d.k);
    const std::int64_t rows = d.m + few.m * threads_of_groups(d.threads);
    check_bytes(kSelect, "the gathered rows", rows, impl.gathered_pitch);
    impl.gathered_at = impl.reserve(rows, impl.gathered_pitch, product.x);
    impl.gathered_scale_at = impl.reserve(1, rows, scale_type(d.y));
  }
  if (d.slots > 0 && d.bias) impl.bias_at = impl.reserve(d.experts, d.n, z_type(d));
  impl.guarantee = impl.many->precision_guarantee();
  impl.reserve_scratch(std::max({impl.quantize.workspace, impl.many->workspace_size(),
                                 impl.few->workspace_size() * static_cast<std::size_t>(threads_of_groups(d.threads))}));
}

}  // namespace

GroupedLinearPlan GroupedLinearPlan::select(const GroupedLinearDescription& description) {
  const cpu::FloatEnvironment environment;
  check(description);
  const GroupedLinearDescription& d = description;
  auto impl = std::make_shared<GroupedLinearImpl>();
  impl->description = d;
  impl->function = "GroupedLinearPlan::run";
  impl->static_scale = StaticScale(d.static_scale, scale_type(d.y));
  impl->explanation = message("grouped linear, ", d.experts, " experts, ", d.m, " rows",
                              d.gather ? message(" gathered from ", d.tokens, " tokens") : "",
                              d.slots > 0 ? message(" summed over ", d.slots, " slots") : "", "\n");
  if (quantizes(d)) {
    QuantizeProblem x = quantize_problem(expert_of(d));
    x.rows = rows_of_x(d);
    impl->quantize = choose(quantize_kernels(), {Operation::quantize}, x, kSelect, d.kernel);
    impl->add("quantize X", impl->quantize);
    impl->xq_pitch = operand_pitch(d.k);
    impl->xq_at = impl->reserve(x.rows, impl->xq_pitch, DType::s8);
    impl->x_scale_at = impl->reserve(1, x.rows, scale_type(d.x));
  }
  const bool on_gpu = d.device.type == DeviceType::cuda;
  impl->z_pitch = ceil_div(d.n, std::int64_t{4}) * 4;  // a GPU reads four columns at a time
  if (d.slots > 0) impl->z_at = impl->reserve(d.m, impl->z_pitch, z_type(d));
  on_gpu ? select_on_gpu(*impl) : select_on_cpu(*impl);
  impl->expert_bytes = static_cast<std::int64_t>(impl->many->packed_weight_size());
  if (on_gpu) impl->describe_times(d.device, d.threads);
  return GroupedLinearPlan(std::move(impl));
}

std::size_t GroupedLinearPlan::packed_weight_size() const {
  const GroupedLinearImpl& impl = impl_->as<GroupedLinearImpl>();
  return static_cast<std::size_t>(impl.description.experts * impl.expert_bytes);
}

void GroupedLinearPlan::pack(const LinearPackArgs& args) const {
  const cpu::FloatEnvironment environment;
  const GroupedLinearImpl& impl = impl_->as<GroupedLinearImpl>();
  if (!impl.description.packed_weight) {
    fail(Status::unsupported, kPack, ": the plan was selected with packed_weight = false");
  }
  TensorChecks checks(kPack, {});
  LinearPackArgs all = bind_weights(impl, args, checks);
  const Tensor packed =
      checks.vector("packed", args.packed, DType::u8, static_cast<std::int64_t>(packed_weight_size()));
  check_alignment(kPack, "packed", packed.data);
  checks.no_overlap();
  for (std::int64_t e = 0; e < impl.description.experts; ++e) {
    LinearPackArgs one = weight_of(impl.description, all, e);
    one.packed = rows_at(packed, e * impl.expert_bytes, impl.expert_bytes);
    impl.many->pack(one);
  }
}

Verdict GroupedLinearPlan::can_implement(const GroupedLinearArgs& args) const {
  const GroupedLinearImpl& impl = impl_->as<GroupedLinearImpl>();
  return verdict_on(impl, impl.description.device, args);
}

void GroupedLinearPlan::run(const GroupedLinearArgs& args, Workspace workspace, Stream stream) const {
  const cpu::FloatEnvironment environment;
  const GroupedLinearImpl& impl = impl_->as<GroupedLinearImpl>();
  const GroupedLinearDescription& d = impl.description;
  TensorChecks checks(impl.function, d.device);
  const GroupedLinearArgs bound = bind(impl, args, checks);
  std::byte* const memory = finish_checks(checks, impl, workspace);
  const std::int64_t m = rows_of(d, bound);
  if (d.n == 0) return;
  if (d.device.type == DeviceType::cuda) return run_on_gpu(impl, bound, memory, stream);

  Schedule schedule{bound.offsets, {d.threads, d.n, d.k}, reinterpret_cast<std::int32_t*>(memory + impl.order_at)};
  Run run{impl, bound, memory};
  run.rows = {.x = bound.x, .x_scale = bound.x_scale, .bias = bound.bias, .y = bound.y};
  if (impl.quantize.kernel) {
    const QuantizedX x = quantize(impl, bound, memory, stream);
    run.rows.x = x.x;
    run.rows.x_scale = x.x_scale;
  }
  if (d.slots > 0) {
    run.rows.y = Tensor{memory + impl.z_at, z_type(d), {}, 2, {m, d.n}, {impl.z_pitch, 1}};
    if (d.bias) {
      const Tensor bias{memory + impl.bias_at, z_type(d), {}, 2, {d.experts, d.n}, {d.n, 1}};
      for (const std::int32_t e : schedule.all()) {
        for (std::int64_t j = 0; j < d.n; ++j) store(bias, e, j, load<double>(bound.bias, e, j));
      }
      run.rows.bias = bias;
    }
  }
  const std::size_t one = impl.few->workspace_size();
  std::byte* const scratch = memory + impl.scratch;
  schedule.run(
      [&](std::int64_t e) {
        impl.many->run(run.of(e, 0, schedule.threads()), {scratch, impl.many->workspace_size()});
      },
      [&](std::int64_t e, int thread) {
        const std::int64_t place = d.m + thread * std::min(d.m, kFewGroupedRows);
        impl.few->run(run.of(e, place, 1), {scratch + static_cast<std::size_t>(thread) * one, one});
      });
  if (d.clear_rest) clear_rest(bound.offsets, bound.y, schedule.threads());
  if (d.slots == 0) return;
  z_type(d) == DType::f64 ? sum_slots<double>(bound, run.rows.y, schedule.threads())
                          : sum_slots<float>(bound, run.rows.y, schedule.threads());
}

}  // namespace octile
