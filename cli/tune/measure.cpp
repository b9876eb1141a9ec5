#include "cli/tune/measure.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <random>

#include "cli/bench/peaks.h"
#include "cli/support/machine.h"
#include "plan/choose.h"
#include "plan/plan.h"

namespace octile::cli {

namespace {

// Memory of the device, for as long as a product is timed.
class Memory {
 public:
  explicit Memory(const check::Gpu* gpu) : gpu_(gpu) {}

  std::byte* allocate(std::size_t bytes) {
    if (gpu_) return gpu_memory_.emplace_back(gpu_->allocate(bytes)).get();
    constexpr std::size_t kLine = 64;
    void* const data = std::aligned_alloc(kLine, std::max(bytes, std::size_t{1}) / kLine * kLine + kLine);
    if (!data) throw std::bad_alloc();
    return host_memory_.emplace_back(static_cast<std::byte*>(data)).get();
  }
  // `values` over and over: copied once, then the copy is doubled.
  template <class T>
  std::byte* filled(const std::vector<T>& values, std::size_t bytes) {
    std::byte* const data = allocate(bytes);
    std::size_t done = std::min(bytes, values.size() * sizeof(T));
    copy(data, values.data(), done);
    for (; done < bytes; done += std::min(done, bytes - done)) copy(data + done, data, std::min(done, bytes - done));
    if (gpu_) gpu_->wait();
    return data;
  }
  void copy(void* to, const void* from, std::size_t bytes) const {
    gpu_ ? gpu_->copy(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  const check::Gpu* gpu_;
  std::vector<check::GpuBytes> gpu_memory_;
  std::vector<std::unique_ptr<std::byte, Free>> host_memory_;
};

// As quantizers make them of a bell curve: kernels have slower ways for levels that are large or evenly spread. `max`
// represents 4.2 times the standard deviation.
std::int8_t level(std::mt19937& random, float max) {
  std::normal_distribution<float> curve(0, max / 4.2f);
  return static_cast<std::int8_t>(std::clamp(std::rint(curve(random)), -max, max));
}

std::vector<std::int8_t> random_levels(DType type) {
  constexpr std::size_t kCount = 1'048'573;  // prime, so that no row repeats another
  std::vector<std::int8_t> drawn(kCount);
  std::mt19937 random(1);
  const int width = bits(type), mask = (1 << width) - 1;
  for (std::int8_t& byte : drawn) {
    int levels = 0;
    for (int at = 0; at < 8; at += width) levels |= (level(random, static_cast<float>(mask / 2)) & mask) << at;
    byte = static_cast<std::int8_t>(levels);
  }
  return drawn;
}

// Numbers of either sign from 1 to below 2, as bits of the type.
template <class Bits>
std::vector<Bits> random_floats(Bits one, Bits fraction, Bits sign) {
  std::vector<Bits> values;
  std::mt19937 random(2);
  for (std::size_t i = 0; i < 65'521; ++i) {
    const std::uint32_t drawn = random();
    values.push_back(static_cast<Bits>(one | (drawn & fraction) | (drawn >> 31 ? sign : 0)));
  }
  return values;
}

std::byte* filled(Memory& memory, DType type, std::int64_t elements) {
  const auto bytes = static_cast<std::size_t>((elements * bits(type) + 7) / 8);
  switch (type) {
    case DType::f16:
      return memory.filled(random_floats<std::uint16_t>(0x3c00, 0x3ff, 0x8000), bytes);
    case DType::bf16:
      return memory.filled(random_floats<std::uint16_t>(0x3f80, 0x7f, 0x8000), bytes);
    case DType::f32:
      return memory.filled(random_floats<std::uint32_t>(0x3f800000, 0x7fffff, 0x80000000), bytes);
    default: {
      static std::map<DType, std::vector<std::int8_t>> levels;
      if (levels[type].empty()) levels[type] = random_levels(type);
      return memory.filled(levels[type], bytes);
    }
  }
}

Tensor tensor(std::byte* data, DType type, Device device, std::int64_t rows, std::int64_t cols) {
  return on(device, matrix_of<void>(type, data, rows, cols));
}
Tensor tensor(std::byte* data, DType type, Device device, std::int64_t size) {
  return {data, type, device, 1, {size, 0}, {1, 0}};
}

// The operands of a layer, of every plan for it.
LinearArgs operands_of(const LinearDescription& d, Memory& memory, const Stand& stand) {
  const Device device = stand.device();
  const std::int64_t row = row_elements(d.weight.type, d.k);
  const bool grouped = d.weight.granularity == Granularity::group;
  const std::int64_t groups = grouped && d.weight.group > 0 ? d.k / d.weight.group : 1;
  LinearArgs args;
  args.x = tensor(filled(memory, d.x, d.m * d.k), d.x, device, d.m, d.k);
  if (d.x == DType::s8) args.x_scale = tensor(filled(memory, DType::f32, d.m), DType::f32, device, d.m);
  args.y = tensor(memory.allocate(static_cast<std::size_t>(d.m * d.n * bits(d.y) / 8)), d.y, device, d.m, d.n);
  if (!d.packed_weight) {
    args.weight = tensor(filled(memory, d.weight.type, d.n * row), d.weight.type, device, d.n, d.k);
    std::byte* const scale = filled(memory, DType::f32, d.n * groups);
    args.weight_scale =
        grouped ? tensor(scale, DType::f32, device, d.n, groups) : tensor(scale, DType::f32, device, d.n);
    return args;
  }
  Memory host(nullptr);
  const LinearPlan plan = LinearPlan::select(d);
  const auto size = static_cast<std::int64_t>(plan.packed_weight_size());
  std::byte* const packed = host.allocate(plan.packed_weight_size());
  std::byte* const scale = filled(host, DType::f32, d.n * groups);
  plan.pack({tensor(filled(host, d.weight.type, d.n * row), d.weight.type, {}, d.n, d.k),
             grouped ? tensor(scale, DType::f32, {}, d.n, groups) : tensor(scale, DType::f32, {}, d.n),
             {},
             tensor(packed, DType::u8, {}, size)});
  std::byte* const there = memory.allocate(plan.packed_weight_size());
  memory.copy(there, packed, plan.packed_weight_size());
  if (stand.gpu()) stand.gpu()->wait();
  args.weight = tensor(there, DType::u8, device, size);
  return args;
}

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds = {};

  // The lower quartile: what else the machine does only adds to a time.
  double time() const {
    std::vector<double> sorted = seconds;
    const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 4);
    std::nth_element(sorted.begin(), at, sorted.end());
    return *at;
  }
};

Candidate candidate(std::string name, const LinearDescription& d, const LinearArgs& args, Memory& memory,
                    Stream stream) {
  const LinearPlan plan = LinearPlan::select(d);
  const Workspace workspace = {memory.allocate(plan.workspace_size()), plan.workspace_size()};
  return {std::move(name), [plan, args, workspace, stream] { plan.run(args, workspace, stream); }};
}

// In turns, so that all see the same machine: at least this many rounds, and more while there is time.
void time_in_turns(const std::vector<Candidate*>& candidates, Stand& stand) {
  constexpr int kMinRounds = 3;
  constexpr int kMaxRounds = 9;
  constexpr double kSeconds = 0.5;
  const double end = seconds_now() + kSeconds;
  for (int round = 0; round < kMaxRounds && (round < kMinRounds || seconds_now() < end); ++round) {
    for (Candidate* c : candidates) stand.time(c->run, c->seconds);
  }
}

// The fastest, and beside it the cost model's choice.
TunedChoice fastest(std::vector<Candidate>& candidates, const std::string& model, Stand& stand) {
  constexpr double kHopeless = 1.5;  // after two rounds
  // What is hardly faster, or not in most turns, does not replace the model's choice.
  constexpr double kGain = 0.95;
  constexpr double kTurns = 0.75;
  const auto is_faster = [](const Candidate* a, const Candidate* b) { return a->time() < b->time(); };
  std::vector<Candidate*> left;
  Candidate* of_model = nullptr;
  for (Candidate& c : candidates) {
    c.run();  // touches its memory, loads its code
    left.push_back(&c);
    if (c.name == model) of_model = &c;
  }
  for (int round = 0; round < 2 && left.size() > 1; ++round) {
    for (Candidate* c : left) stand.time(c->run, c->seconds);
  }
  if (left.size() > 1) {
    const double limit = kHopeless * (*std::min_element(left.begin(), left.end(), is_faster))->time();
    std::erase_if(left, [&](const Candidate* c) { return c != of_model && c->time() > limit; });
  }
  time_in_turns(left, stand);
  Candidate* best = *std::min_element(left.begin(), left.end(), is_faster);
  if (best != of_model) {
    // Once more and by themselves: the fastest of several has been lucky.
    best->seconds.clear();
    of_model->seconds.clear();
    time_in_turns({best, of_model}, stand);
    const auto turns = static_cast<double>(best->seconds.size());
    double won = 0;
    for (std::size_t i = 0; i < best->seconds.size(); ++i) won += best->seconds[i] < of_model->seconds[i];
    if (best->time() > kGain * of_model->time() || won < kTurns * turns) best = of_model;
  }
  return {0, best->name, best->time(), model, of_model->time()};
}

// The rows that can do it, without those of which the model is sure that they are far slower, and its choice.
std::vector<const GemmKernel*> rows_for(const GemmProblem& p, std::string& model) {
  constexpr double kFarSlower = 8;
  std::vector<const GemmKernel*> rows;
  const auto seconds = [&](const GemmKernel* row) { return row->cost(p).seconds; };
  for (const GemmKernel* row : gemm_kernels()) {
    if (row->task == task_of(p) && row->device == p.device.type && refusal(*row, p).empty()) rows.push_back(row);
  }
  if (rows.empty()) return rows;
  const auto cheapest = std::min_element(
      rows.begin(), rows.end(), [&](const GemmKernel* a, const GemmKernel* b) { return seconds(a) < seconds(b); });
  model = (*cheapest)->name;
  std::erase_if(rows, [&, limit = kFarSlower * seconds(*cheapest)](const auto* row) { return seconds(row) > limit; });
  return rows;
}

}  // namespace

Stand::Stand(bool on_gpu, bool cold, int threads) : cold_(cold), threads_(threads) {
  if (on_gpu) {
    gpu_.emplace(0);
  } else if (cold_) {
    constexpr std::int64_t kMinBytes = std::int64_t{32} << 20;
    evictor_.assign(static_cast<std::size_t>(std::max(kMinBytes, 2 * this_machine().last_cache_bytes())), 1);
  }
}

void Stand::time(const std::function<void()>& work, std::vector<double>& seconds) {
  if (gpu_) {
    constexpr int kRuns = 8;
    constexpr std::size_t kFlush = std::size_t{256} << 20;
    if (!flush_) flush_ = gpu_->allocate(kFlush);
    const auto flush = [&] {
      if (cold_) gpu_->fill(flush_.get(), std::byte{1}, kFlush);
    };
    const std::vector<double> more = gpu_->time(kRuns, flush, work);
    seconds.insert(seconds.end(), more.begin(), more.end());
    return;
  }
  if (cold_) parallel_read(threads_, evictor_.data(), evictor_.size());
  const double start = seconds_now();
  work();
  seconds.push_back(seconds_now() - start);
}

Measured measure(LinearDescription d, Stand& stand) {
  if (d.activation != Activation::none) d.x = DType::s8;
  LinearPlan::select(d);  // throws where no row can do it, and says why
  const GemmProblem p = gemm_problem(d);
  Memory memory(stand.gpu());
  std::string model;
  const std::vector<const GemmKernel*> rows = rows_for(p, model);
  const LinearArgs args = operands_of(d, memory, stand);
  std::vector<Candidate> candidates;
  for (const GemmKernel* row : rows) {
    d.kernel = row->name;
    candidates.push_back(candidate(d.kernel, d, args, memory, stand.stream()));
  }
  TunedChoice choice = fastest(candidates, model, stand);
  choice.m = p.m;
  return {tuning_key(p), std::move(choice)};
}

}  // namespace octile::cli
