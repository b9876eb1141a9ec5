// Benchmarks that move data: the quantizers, their gradients and the sum of dY, beside a memcpy of as many bytes.
// Only necessary bytes count: a matrix that does not fit the caches is read twice if
// its scale is known only after the last row.
#include <cstring>
#include <memory>
#include <type_traits>

#include "cli/bench/cases.h"
#include "cli/bench/data.h"
#include "cli/bench/peaks.h"
#include "cli/support/machine.h"

namespace octile::cli::bench {

namespace {

// Memory that begins at a cache line, as that of frameworks does.
class Memory {
 public:
  void resize(std::size_t bytes) { lines_.resize((bytes + sizeof(Line) - 1) / sizeof(Line)); }
  std::uint8_t* data() { return reinterpret_cast<std::uint8_t*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };
  std::vector<Line> lines_;
};

// An array of the benchmark's float type.
class Floats {
 public:
  Floats() = default;
  Floats(DType dtype, const std::vector<float>& values) : dtype_(dtype) {
    memory_.resize(values.size() * sizeof(float));
    std::uint8_t* to = memory_.data();
    for (const float value : values) {
      if (dtype == DType::f16) {
        append(to, Half(value));
      } else if (dtype == DType::bf16) {
        append(to, BFloat16(value));
      } else {
        append(to, value);
      }
    }
  }
  Tensor matrix(std::int64_t rows, std::int64_t cols) {
    return {memory_.data(), dtype_, {}, 2, {rows, cols}, {cols, 1}};
  }
  Tensor vector(std::int64_t size) { return {memory_.data(), dtype_, {}, 1, {size, 0}, {1, 0}}; }

 private:
  template <class T>
  static void append(std::uint8_t*& to, T value) {
    std::memcpy(to, &value, sizeof value);
    to += sizeof value;
  }

  DType dtype_ = DType::f32;
  Memory memory_;
};

struct Operands {
  Floats x, dy, out;
  Memory q, q_transposed, workspace, copied_from, copied_to;  // the last two are the memcpy's
  std::vector<float> scale, multiplier;
  std::vector<std::int32_t> zero_point;
};
using SharedOperands = std::shared_ptr<Operands>;

constexpr float kScale = 4.2f / 127;

// A whole row where 128 does not divide it.
std::int64_t group_of(const Shape& s) { return s.k % 128 == 0 ? 128 : s.k; }

double elements(const Shape& s) { return static_cast<double>(s.m) * static_cast<double>(s.k); }

template <class Plan, class Args>
Prepared against_memcpy(const Plan& plan, const Args& args, const SharedOperands& operands, double bytes, int threads) {
  const std::size_t size = plan.workspace_size();
  const auto half = static_cast<std::size_t>(bytes / 2);
  operands->workspace.resize(size);
  operands->copied_from.resize(half);
  operands->copied_to.resize(half);
  // A page that was never written is the same zero page wherever it is read.
  std::memset(operands->copied_from.data(), 1, half);
  std::memset(operands->copied_to.data(), 2, half);
  Prepared p;
  p.sku = plan.sku();
  p.run = [=] { plan.run(args, {operands->workspace.data(), size}); };
  p.baseline = "memcpy";
  p.run_baseline = [=] { parallel_copy(threads, operands->copied_to.data(), operands->copied_from.data(), half); };
  p.bytes = bytes;
  return p;
}

double second_reading(const Benchmark& b, const Quantizing& q) {
  const bool whole =
      q.scale == ScaleSource::dynamic && (q.granularity == Granularity::tensor || q.granularity == Granularity::column);
  const double bytes = elements(b.shape) * bits(b.dtype) / 8;
  return whole && bytes > static_cast<double>(this_machine().last_cache_bytes()) ? bytes : 0;
}

QuantizeDescription description(const Benchmark& b, const Quantizing& q, int threads) {
  return {.rows = b.shape.m,
          .cols = b.shape.k,
          .x = b.dtype,
          .q = q.q,
          .granularity = q.granularity,
          .group = q.granularity == Granularity::group ? group_of(b.shape) : 0,
          .scale = q.scale,
          .mapping = q.mapping,
          .orientation = q.orientation,
          .multiplier = q.smoothed ? Multiplier::per_column : Multiplier::none,
          .threads = threads,
          .kernel = b.kernel,
          .prologue = q.prologue,
          .gated = q.gated};
}

// One scale or zero point for each segment: 127 of them represent 4.2 times the standard deviation of x.
template <class T>
TensorOf<T> of_segments(std::vector<T>& values, const Shape& s, Granularity granularity, T value) {
  const bool groups = granularity == Granularity::group;
  const std::int64_t size = granularity == Granularity::row ? s.m : granularity == Granularity::column ? s.k : 1;
  values.assign(static_cast<std::size_t>(groups ? s.m * (s.k / group_of(s)) : size), value);
  return groups ? matrix(values.data(), s.m, s.k / group_of(s)) : vector(values.data(), size);
}

Tensor integers(Memory& memory, DType dtype, std::int64_t rows, std::int64_t cols) {
  const std::int64_t row_bytes = (cols * bits(dtype) + 7) / 8;
  memory.resize(static_cast<std::size_t>(rows * row_bytes));
  for (std::int64_t i = 0; i < rows * row_bytes; ++i)
    memory.data()[i] = static_cast<std::uint8_t>(i * 2654435761 >> 24);
  return {memory.data(), dtype, {}, 2, {rows, cols}, {row_bytes * 8 / bits(dtype), 1}};
}

double bytes_of(const Tensor& t) {
  return t.present() ? static_cast<double>(t.rows()) * static_cast<double>(t.cols()) * bits(t.dtype) / 8 : 0;
}

// dB, and dY quantized for both products where one step does that: with K = 0 there are no others.
LinearBackwardDescription dy_alone(const Benchmark& b, Product products, int threads) {
  return {.m = b.shape.m,
          .n = b.shape.n,
          .dy = b.dtype,
          .dx = products,
          .dw = products,
          .db = true,
          .threads = threads,
          .kernel = b.kernel};
}

Prepared quantize_gradient(const Benchmark& b, std::int64_t block, int threads) {
  const Shape s = b.shape;
  const auto o = std::make_shared<Operands>();
  o->dy = Floats(b.dtype, normal(s.m, s.n, 1));
  o->out = Floats(b.dtype, zeros<float>(1, s.n));
  o->scale.assign(static_cast<std::size_t>(std::max(s.m, s.n)), 1.0f);
  const std::int8_t nothing = 0;
  LinearBackwardArgs args = {.dy = o->dy.matrix(s.m, s.n), .db = o->out.vector(s.n)};
  args.weight = matrix(&nothing, s.n, 0);
  args.weight_scale = vector(o->scale.data(), s.n);
  args.x = matrix(&nothing, s.m, 0);
  args.x_scale = vector(o->scale.data(), s.m);
  args.dx = o->out.matrix(s.m, 0);
  args.dw = o->out.matrix(s.n, 0);
  LinearBackwardDescription d = dy_alone(b, Product::int8, threads);
  d.gradient_block = block;
  const double outputs = 2 * static_cast<double>(s.m) * static_cast<double>(s.n);
  return against_memcpy(LinearBackwardPlan::select(d), args, o, bytes_of(o->dy.matrix(s.m, s.n)) + outputs, threads);
}

}  // namespace

Prepared quantize(const Benchmark& b, int threads, Quantizing q) {
  const Shape s = b.shape;
  const auto o = std::make_shared<Operands>();
  o->x = Floats(b.dtype, normal(s.m, s.k, 1));
  QuantizeArgs args = {.x = o->x.matrix(s.m, s.k)};
  if (q.orientation != Orientation::transposed) args.q = integers(o->q, q.q, s.m, s.k);
  if (q.orientation != Orientation::row_major) args.q_transposed = integers(o->q_transposed, q.q, s.k, s.m);
  const Tensor scale = of_segments(o->scale, s, q.granularity, kScale);
  q.scale == ScaleSource::given ? args.given_scale = scale : args.scale = scale;
  if (q.mapping == Mapping::affine) args.zero_point = of_segments(o->zero_point, s, q.granularity, 0);
  if (q.smoothed) {
    o->multiplier.assign(static_cast<std::size_t>(s.k), 0.75f);
    args.multiplier = vector(o->multiplier.data(), s.k);
  }
  double bytes = bytes_of(args.q) + bytes_of(args.q_transposed) + second_reading(b, q);
  bytes += bytes_of(o->x.matrix(s.m, s.k)) * (q.gated ? 2 : 1);
  if (q.gated) {
    o->dy = Floats(b.dtype, normal(s.m, s.k, 2));
    args.up = o->dy.matrix(s.m, s.k);
  }
  if (q.prologue == Prologue::rms_norm) {
    o->multiplier.assign(static_cast<std::size_t>(s.k), 1.0f);
    args.norm_weight = vector(o->multiplier.data(), s.k);
  }
  return against_memcpy(QuantizePlan::select(description(b, q, threads)), args, o, bytes, threads);
}

template <class Args>
Prepared elementwise(const Benchmark& b, int threads, Quantizing q) {
  const Shape s = b.shape;
  const auto o = std::make_shared<Operands>();
  o->x = Floats(b.dtype, normal(s.m, s.k, 1));
  o->dy = Floats(b.dtype, normal(s.m, s.k, 2));
  o->out = Floats(b.dtype, zeros<float>(s.m, s.k));
  Args args;
  double bytes = 0;
  const auto is = [&](auto& argument, const Tensor& tensor) {
    argument = tensor;
    bytes += bytes_of(tensor);
  };
  if constexpr (requires { args.q; }) is(args.q, integers(o->q, q.q, s.m, s.k));
  if constexpr (requires { args.dy; }) is(args.dy, o->dy.matrix(s.m, s.k));
  if constexpr (requires { args.dx; }) is(args.dx, o->out.matrix(s.m, s.k));
  if constexpr (requires { args.dq; }) is(args.dq, o->out.matrix(s.m, s.k));
  if constexpr (requires { args.y; }) is(args.y, o->out.matrix(s.m, s.k));
  if constexpr (requires { args.x; }) {
    is(args.x, (std::is_same_v<decltype(args.x), Tensor> ? o->out : o->x).matrix(s.m, s.k));
  }
  args.scale = of_segments(o->scale, s, q.granularity, kScale);
  if constexpr (requires { args.zero_point; }) {
    if (q.mapping == Mapping::affine) args.zero_point = of_segments(o->zero_point, s, q.granularity, 3);
  }
  if constexpr (std::is_same_v<Args, FakeQuantizeArgs>) bytes += second_reading(b, q);
  const auto plan = QuantizerPlan<Args>::select(description(b, q, threads));
  return against_memcpy(plan, args, o, bytes, threads);
}

template Prepared elementwise<DequantizeArgs>(const Benchmark&, int threads, Quantizing q);
template Prepared elementwise<QuantizeBackwardArgs>(const Benchmark&, int threads, Quantizing q);
template Prepared elementwise<DequantizeBackwardArgs>(const Benchmark&, int threads, Quantizing q);
template Prepared elementwise<FakeQuantizeArgs>(const Benchmark&, int threads, Quantizing q);
template Prepared elementwise<FakeQuantizeBackwardArgs>(const Benchmark&, int threads, Quantizing q);

Prepared gradient_quantize(const Benchmark& b, int threads) { return quantize_gradient(b, 0, threads); }
Prepared blocked_gradient_quantize(const Benchmark& b, int threads) { return quantize_gradient(b, 128, threads); }

// The copy reads half of what the sum reads, and writes as much.
Prepared backward_db(const Benchmark& b, int threads) {
  const Shape s = b.shape;
  const auto o = std::make_shared<Operands>();
  o->dy = Floats(b.dtype, normal(s.m, s.n, 1));
  o->out = Floats(b.dtype, zeros<float>(1, s.n));
  const LinearBackwardArgs args = {.dy = o->dy.matrix(s.m, s.n), .db = o->out.vector(s.n)};
  return against_memcpy(LinearBackwardPlan::select(dy_alone(b, Product::none, threads)), args, o,
                        bytes_of(o->dy.matrix(s.m, s.n)), threads);
}

}  // namespace octile::cli::bench
