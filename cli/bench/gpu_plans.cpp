// The plans in device memory, in f16: random normal values, and integers that fill the range as quantizing those does.
#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "cli/bench/cases.h"
#include "cli/bench/data.h"

namespace octile::cli::bench {

namespace {

constexpr float kScale = 1 / 30.0f;        // 127 represents 4.2 times the standard deviation
constexpr float kNibbleScale = 1 / 1.65f;  // so does 7
constexpr std::int64_t kGroup = 128;

// Prime, so that no row of a usual matrix repeats another.
constexpr std::int64_t kDrawn = 1'048'573;

struct Drawn {
  std::vector<Half> f16;
  std::vector<std::int8_t> s8;
  std::vector<std::uint8_t> s4;  // two a byte
};

std::int8_t level(float x, float scale, float max) {
  return static_cast<std::int8_t>(std::clamp(std::rint(x / scale), -max, max));
}

const Drawn& drawn() {
  static const Drawn values = [] {
    Drawn v;
    float before = 0;
    for (const float x : normal(1, kDrawn, 1)) {
      v.f16.push_back(Half(x));
      v.s8.push_back(level(x, kScale, 127));
      const int low = level(before, kNibbleScale, 7) & 15;
      v.s4.push_back(static_cast<std::uint8_t>(low | (level(x, kNibbleScale, 7) & 15) << 4));
      before = x;
    }
    return v;
  }();
  return values;
}

double product(std::int64_t a, std::int64_t b) { return static_cast<double>(a) * static_cast<double>(b); }

// Memory that lives as long as the benchmark.
class Operands {
 public:
  explicit Operands(const Gpu& gpu) : gpu_(gpu) {}

  Tensor f16(std::int64_t rows, std::int64_t cols) { return repeated(drawn().f16, rows, cols); }
  Tensor s8(std::int64_t rows, std::int64_t cols) { return repeated(drawn().s8, rows, cols); }
  Tensor f16(std::int64_t size) { return flat(f16(1, size)); }
  Tensor scales(std::int64_t size) { return flat(repeated(std::vector<float>(64, kScale), 1, size)); }
  Tensor scales(std::int64_t rows, std::int64_t groups) {
    return repeated(std::vector<float>(64, kScale), rows, groups);
  }
  // As many of m rows for each expert.
  Tensor offsets(std::int64_t experts, std::int64_t m) {
    std::vector<std::int32_t> values;
    for (std::int64_t e = 0; e <= experts; ++e) values.push_back(static_cast<std::int32_t>(e * m / experts));
    return flat(repeated(values, 1, experts + 1));
  }
  // (n, k) of 4 bits, and their scales.
  template <class Args>
  void nibbles(std::int64_t n, std::int64_t k, std::int64_t groups, Args& args) {
    args.weight = repeated(drawn().s4, n, (k + 1) / 2);
    args.weight = on(gpu_.device(), matrix_s4(static_cast<const std::uint8_t*>(args.weight.data), n, k));
    args.weight_scale = repeated(std::vector<float>(64, kNibbleScale), n, groups);
  }
  // The same as a plan packs them, on the host.
  void packed_nibbles(const LinearPlan& plan, std::int64_t n, std::int64_t k, std::int64_t groups, LinearArgs& args) {
    const std::vector<std::uint8_t>& values = drawn().s4;
    std::vector<std::uint8_t> plain(static_cast<std::size_t>(n * ((k + 1) / 2)));
    for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = values[i % values.size()];
    const std::vector<float> scale(static_cast<std::size_t>(n * groups), kNibbleScale);
    const auto size = static_cast<std::int64_t>(plan.packed_weight_size());
    const GpuBytes packed = gpu_.allocate_on_host(plan.packed_weight_size());
    plan.pack({matrix_s4(plain.data(), n, k),
               matrix(scale.data(), n, groups),
               {},
               vector(reinterpret_cast<std::uint8_t*>(packed.get()), size)});
    const Tensor there = flat(empty<std::uint8_t>(1, size));
    gpu_.copy(there.data, packed.get(), plan.packed_weight_size());
    gpu_.wait();
    args.weight = there;
  }
  template <class T>
  Tensor empty(std::int64_t rows, std::int64_t cols) {
    void* const data = allocate(static_cast<std::size_t>(rows * cols) * sizeof(T));
    return on(gpu_.device(), matrix(static_cast<T*>(data), rows, cols));
  }
  Tensor empty_f16(std::int64_t size) { return flat(empty<Half>(1, size)); }
  Tensor empty_scales(std::int64_t size) { return flat(empty<float>(1, size)); }
  Workspace workspace(std::size_t size) { return {allocate(size), size}; }

 private:
  std::byte* allocate(std::size_t size) {
    memory_.push_back(gpu_.allocate(size));
    return memory_.back().get();
  }
  static Tensor flat(Tensor row) {
    row.rank = 1;
    row.shape = {row.shape[1], 0};
    row.strides = {1, 0};
    return row;
  }
  // The values over and over: copied once, then the copy is doubled.
  template <class T>
  Tensor repeated(const std::vector<T>& values, std::int64_t rows, std::int64_t cols) {
    const Tensor t = empty<T>(rows, cols);
    const std::size_t bytes = static_cast<std::size_t>(rows * cols) * sizeof(T);
    std::size_t done = std::min(bytes, values.size() * sizeof(T));
    gpu_.copy(t.data, values.data(), done);
    while (done < bytes) {
      const std::size_t more = std::min(done, bytes - done);
      gpu_.copy(static_cast<std::byte*>(t.data) + done, t.data, more);
      done += more;
    }
    gpu_.wait();
    return t;
  }

  const Gpu& gpu_;
  std::vector<GpuBytes> memory_;
};
using SharedOperands = std::shared_ptr<Operands>;

template <class Plan, class Args>
Prepared prepared(const Plan& plan, const Args& args, const SharedOperands& o, const Gpu& gpu) {
  Prepared p;
  p.sku = plan.sku();
  const Workspace workspace = o->workspace(plan.workspace_size());
  const Stream stream = gpu.stream();
  p.run = [plan, args, workspace, stream, o] { plan.run(args, workspace, stream); };  // o: its memory
  return p;
}

LinearDescription linear(const Benchmark& b, const Gpu& gpu) {
  return {.m = b.shape.m,
          .n = b.shape.n,
          .k = b.shape.k,
          .y = DType::f16,
          .bias = true,
          .device = gpu.device(),
          .kernel = b.kernel};
}

QuantizeDescription quantizer(const Benchmark& b, const Gpu& gpu) {
  return {.rows = b.shape.m, .cols = b.shape.k, .x = DType::f16, .device = gpu.device(), .kernel = b.kernel};
}

}  // namespace

Prepared gpu_forward(const Benchmark& b, const Gpu& gpu, DType x) {
  const auto [m, k, n] = b.shape;
  LinearDescription d = linear(b, gpu);
  d.x = x;
  const LinearPlan plan = LinearPlan::select(d);
  const auto o = std::make_shared<Operands>(gpu);
  LinearArgs args = {.x = x == DType::s8 ? o->s8(m, k) : o->f16(m, k)};
  if (x == DType::s8) args.x_scale = o->scales(m);
  args.weight = o->s8(n, k);
  args.weight_scale = o->scales(n);
  args.bias = o->f16(n);
  args.y = o->empty<Half>(m, n);
  Prepared p = prepared(plan, args, o, gpu);
  p.arithmetic = Arithmetic::s8;
  p.operations = 2 * product(m, n) * static_cast<double>(k);
  p.bytes = product(m, k) * bits(x) / 8 + product(n, k) + 2 * product(m, n);
  return p;
}

Prepared gpu_forward_s4(const Benchmark& b, const Gpu& gpu, Activation activation, bool packed) {
  const auto [m, k, n] = b.shape;
  LinearDescription d = linear(b, gpu);
  d.x = DType::f16;
  d.activation = activation;
  d.weight = WeightFormat::s4_group;
  d.weight.group = k % kGroup == 0 ? kGroup : 0;  // 0: a whole row
  d.packed_weight = packed;
  const LinearPlan plan = LinearPlan::select(d);
  const std::int64_t groups = d.weight.group > 0 ? k / d.weight.group : 1;
  const auto o = std::make_shared<Operands>(gpu);
  LinearArgs args = {.x = o->f16(m, k)};
  packed ? o->packed_nibbles(plan, n, k, groups, args) : o->nibbles(n, k, groups, args);
  args.bias = o->f16(n);
  args.y = o->empty<Half>(m, n);
  Prepared p = prepared(plan, args, o, gpu);
  p.arithmetic = activation == Activation::none ? Arithmetic::floats : Arithmetic::s8;
  p.operations = 2 * product(m, n) * static_cast<double>(k);
  p.bytes = 2 * product(m, k) + product(n, k) / 2 + 4 * product(n, groups) + 2 * product(m, n);
  return p;
}

constexpr std::int64_t kExperts = 8;

Prepared gpu_experts(const Benchmark& b, const Gpu& gpu, Activation activation, DType weight, std::int64_t group) {
  const auto [m, k, n] = b.shape;
  GroupedLinearDescription d;
  d.experts = kExperts;
  d.m = m, d.n = n, d.k = k;
  d.x = d.y = DType::f16;
  d.activation = activation;
  d.weight = weight == DType::s4 ? WeightFormat::s4_group
             : group == 0        ? WeightFormat::s8_per_channel
                                 : WeightFormat::s8_group;
  if (group > 0) d.weight.group = k % group == 0 ? group : 0;  // 0: a whole row
  d.device = gpu.device();
  d.kernel = b.kernel;
  const GroupedLinearPlan plan = GroupedLinearPlan::select(d);
  const std::int64_t groups = d.weight.group > 0 ? k / d.weight.group : 1;
  const auto o = std::make_shared<Operands>(gpu);
  GroupedLinearArgs args = {.x = o->f16(m, k)};
  args.offsets = o->offsets(kExperts, m);
  if (weight == DType::s4) {
    o->nibbles(kExperts * n, k, groups, args);
  } else {
    args.weight = o->s8(kExperts * n, k);
    args.weight_scale = group == 0 ? o->scales(kExperts * n) : o->scales(kExperts * n, groups);
  }
  args.y = o->empty<Half>(m, n);
  Prepared p = prepared(plan, args, o, gpu);
  p.arithmetic = activation == Activation::none ? Arithmetic::floats : Arithmetic::s8;
  p.operations = 2 * product(m, n) * static_cast<double>(k);
  p.bytes = 2 * product(m, k) + product(kExperts * n, k) * bits(weight) / 8 + 2 * product(m, n);
  if (group > 0) p.bytes += 4 * product(kExperts * n, groups);
  return p;
}

namespace {

// Gradients in f16 as training has them. `d` has what is one plan's own. With K = 0 nothing follows the pass over dY:
// two reads, and two writes of a byte. In blocks one read is enough.
template <class Plan, class Args, class Description>
Prepared gradients_of(Description d, const Benchmark& b, const Gpu& gpu, const Gradients& gradients) {
  constexpr bool kGrouped = requires { d.experts; };
  const auto [m, k, n] = b.shape;
  d.m = m, d.n = n, d.k = k;
  d.dy = DType::f16;
  d.dx = gradients.dx;
  d.dw = gradients.dw;
  d.db = gradients.db;
  d.gradient_block = gradients.block;
  d.device = gpu.device();
  d.kernel = b.kernel;
  const Plan plan = Plan::select(d);
  const auto o = std::make_shared<Operands>(gpu);
  Args args = {.dy = o->f16(m, n)};
  std::int64_t channels = n;
  if constexpr (kGrouped) {
    channels *= d.experts;
    args.offsets = o->offsets(d.experts, m);
  }
  const int products = (d.dx != Product::none) + (d.dw != Product::none);
  const bool pass_alone = products > 0 && k == 0;
  double bytes = 2 * product(m, n) * (!pass_alone ? 1 : d.gradient_block != 0 ? 2 : 3);
  if (d.dx != Product::none) {
    args.weight = kGrouped ? o->s8(channels, k) : o->s8(k, n);
    args.weight_scale = o->scales(channels);
    args.dx = o->empty<Half>(m, k);
    bytes += product(channels, k) + 2 * product(m, k);
  }
  if (d.dw != Product::none) {
    args.x = kGrouped ? o->s8(m, k) : o->s8(k, m);
    args.x_scale = o->scales(m);
    args.dw = o->empty<Half>(channels, k);
    bytes += product(m, k) + 2 * product(channels, k);
  }
  if (d.db) args.db = kGrouped ? o->empty<Half>(kExperts, n) : o->empty_f16(n);
  Prepared p = prepared(plan, args, o, gpu);
  p.operations = 2.0 * products * product(m, n) * static_cast<double>(k);
  const bool int8 = d.dx == Product::int8 || d.dw == Product::int8;
  if (p.operations > 0) p.arithmetic = int8 ? Arithmetic::s8 : Arithmetic::floats;
  p.bytes = bytes;
  return p;
}

}  // namespace

// W kept as (IN, OUT) for dX, X transposed for dW, which is (OUT, IN).
Prepared gpu_backward(const Benchmark& b, const Gpu& gpu, const Gradients& gradients) {
  LinearBackwardDescription d;
  d.x_transposed = true;
  d.weight_layout = WeightLayout::in_out;
  d.dw_layout = WeightLayout::out_in;
  return gradients_of<LinearBackwardPlan, LinearBackwardArgs>(d, b, gpu, gradients);
}

Prepared gpu_experts_backward(const Benchmark& b, const Gpu& gpu, const Gradients& gradients) {
  GroupedLinearBackwardDescription d;
  d.experts = kExperts;
  return gradients_of<GroupedLinearBackwardPlan, GroupedLinearBackwardArgs>(d, b, gpu, gradients);
}

Prepared gpu_quantize(const Benchmark& b, const Gpu& gpu, Quantizing q) {
  const auto [rows, cols, unused] = b.shape;
  QuantizeDescription d = quantizer(b, gpu);
  d.granularity = q.granularity;
  d.orientation = q.orientation;
  d.prologue = q.prologue;
  d.gated = q.gated;
  const QuantizePlan plan = QuantizePlan::select(d);
  const auto o = std::make_shared<Operands>(gpu);
  QuantizeArgs args = {.x = o->f16(rows, cols)};
  args.q = o->empty<std::int8_t>(rows, cols);
  if (q.orientation == Orientation::both) args.q_transposed = o->empty<std::int8_t>(cols, rows);
  args.scale = o->empty_scales(q.granularity == Granularity::row      ? rows
                               : q.granularity == Granularity::column ? cols
                                                                      : 1);
  if (q.gated) args.up = o->f16(rows, cols);
  if (q.prologue == Prologue::rms_norm) args.norm_weight = o->scales(cols);
  Prepared p = prepared(plan, args, o, gpu);
  const double elements = product(rows, cols);
  const bool whole = q.granularity == Granularity::tensor || q.granularity == Granularity::column;
  const bool twice = whole && 2 * elements > static_cast<double>(gpu.facts().l2_bytes);
  p.bytes = elements * ((q.orientation == Orientation::both ? 4 : 3) + (q.gated ? 2 : 0) + (twice ? 2 : 0));
  return p;
}

template <class Args>
Prepared gpu_elementwise(const Benchmark& b, const Gpu& gpu) {
  const auto [rows, cols, unused] = b.shape;
  const auto plan = QuantizerPlan<Args>::select(quantizer(b, gpu));
  const auto o = std::make_shared<Operands>(gpu);
  Args args;
  int halves = 0;
  const auto filled = [&](auto& tensor) {
    ++halves;
    if constexpr (std::is_same_v<std::remove_reference_t<decltype(tensor)>, Tensor>) {
      tensor = o->empty<Half>(rows, cols);
    } else {
      tensor = o->f16(rows, cols);
    }
  };
  if constexpr (requires { args.q; }) args.q = o->s8(rows, cols);
  if constexpr (requires { args.dy; }) filled(args.dy);
  if constexpr (requires { args.x; }) filled(args.x);
  if constexpr (requires { args.dx; }) filled(args.dx);
  if constexpr (requires { args.dq; }) filled(args.dq);
  if constexpr (requires { args.y; }) filled(args.y);
  args.scale = std::is_same_v<decltype(args.scale), Tensor> ? o->empty_scales(rows) : o->scales(rows);
  Prepared p = prepared(plan, args, o, gpu);
  p.bytes = product(rows, cols) * (2 * halves + (std::is_same_v<Args, DequantizeArgs> ? 1 : 0));
  return p;
}

template Prepared gpu_elementwise<DequantizeArgs>(const Benchmark&, const Gpu&);
template Prepared gpu_elementwise<QuantizeBackwardArgs>(const Benchmark&, const Gpu&);
template Prepared gpu_elementwise<DequantizeBackwardArgs>(const Benchmark&, const Gpu&);
template Prepared gpu_elementwise<FakeQuantizeArgs>(const Benchmark&, const Gpu&);
template Prepared gpu_elementwise<FakeQuantizeBackwardArgs>(const Benchmark&, const Gpu&);

}  // namespace octile::cli::bench
