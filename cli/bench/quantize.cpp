// What moves data: the quantizers, their gradients and the sum of dY, compared with a memcpy that moves as many bytes.
// The bytes are those that the algorithm cannot do without: a matrix that does not fit the caches is read twice where
// its scale is known only after the last row.
#include <memory>
#include <type_traits>

#include "cli/bench/cases.h"
#include "cli/bench/data.h"
#include "cli/bench/peaks.h"
#include "cli/support/machine.h"

namespace octile::cli::bench {

namespace {

struct Operands {
  std::vector<float> x, dy, out, scale;
  std::vector<std::int8_t> q, q_transposed;
  std::vector<std::byte> workspace, copied_from, copied_to;  // the last two are the memcpy's
};
using SharedOperands = std::shared_ptr<Operands>;

double elements(const Shape& s) { return static_cast<double>(s.m) * static_cast<double>(s.k); }

template <class Plan, class Args>
Prepared against_memcpy(const Plan& plan, const Args& args, const SharedOperands& operands, double bytes, int threads) {
  operands->workspace.resize(plan.workspace_size());
  // Not zeros: a page that was never written is the same zero page wherever it is read.
  operands->copied_from.assign(static_cast<std::size_t>(bytes / 2), std::byte{1});
  operands->copied_to.assign(operands->copied_from.size(), std::byte{2});
  Prepared p;
  p.sku = plan.sku();
  p.run = [=] { plan.run(args, {operands->workspace.data(), operands->workspace.size()}); };
  p.baseline = "memcpy";
  p.run_baseline = [=] {
    parallel_copy(threads, operands->copied_to.data(), operands->copied_from.data(), operands->copied_from.size());
  };
  p.bytes = bytes;
  return p;
}

double second_reading(const Shape& s, Granularity granularity) {
  const bool whole = granularity == Granularity::tensor || granularity == Granularity::column;
  const double bytes = elements(s) * 4;
  return whole && bytes > static_cast<double>(this_machine().last_cache_bytes()) ? bytes : 0;
}

QuantizeDescription description(const Benchmark& b, int threads) {
  QuantizeDescription d;
  d.rows = b.shape.m;
  d.cols = b.shape.k;
  d.threads = threads;
  d.kernel = b.kernel;
  return d;
}

SharedOperands matrix_operands(const Shape& s) {
  const auto o = std::make_shared<Operands>();
  o->x = normal(s.m, s.k, 1);
  return o;
}

// x with its integers and scales, a gradient and an output, for everything that comes after the quantizer.
SharedOperands quantized_operands(const Shape& s) {
  const SharedOperands o = matrix_operands(s);
  QuantizedMatrix quantized = quantized_rows(o->x, s.m, s.k);
  o->q = std::move(quantized.values);
  o->scale = std::move(quantized.scale);
  o->dy = normal(s.m, s.k, 2);
  o->out = zeros<float>(s.m, s.k);
  return o;
}

// dB, and what both products have to do with dY: with K = 0 nothing comes after.
LinearBackwardDescription dy_alone(const Benchmark& b, Product products, int threads) {
  LinearBackwardDescription d;
  d.m = b.shape.m;
  d.n = b.shape.n;
  d.dx = products;
  d.dw = products;
  d.db = true;
  d.threads = threads;
  d.kernel = b.kernel;
  return d;
}

Prepared quantize_gradient(const Benchmark& b, std::int64_t block, int threads) {
  const Shape s = b.shape;
  const auto o = std::make_shared<Operands>();
  o->dy = normal(s.m, s.n, 1);
  o->out = zeros<float>(1, s.n);
  o->scale.assign(static_cast<std::size_t>(std::max(s.m, s.n)), 1.0f);
  const std::int8_t nothing = 0;
  LinearBackwardArgs args = {.dy = matrix(o->dy.data(), s.m, s.n), .db = vector(o->out.data(), s.n)};
  args.weight = matrix(&nothing, s.n, 0);
  args.weight_scale = vector(o->scale.data(), s.n);
  args.x = matrix(&nothing, s.m, 0);
  args.x_scale = vector(o->scale.data(), s.m);
  args.dx = matrix(o->out.data(), s.m, 0);
  args.dw = matrix(o->out.data(), s.n, 0);
  const double elements = static_cast<double>(s.m) * static_cast<double>(s.n);
  LinearBackwardDescription d = dy_alone(b, Product::int8, threads);
  d.gradient_block = block;
  return against_memcpy(LinearBackwardPlan::select(d), args, o, 6 * elements, threads);
}

}  // namespace

Prepared quantize(const Benchmark& b, int threads, Granularity granularity, Orientation orientation) {
  const Shape s = b.shape;
  QuantizeDescription d = description(b, threads);
  d.granularity = granularity;
  d.orientation = orientation;
  const SharedOperands o = matrix_operands(s);
  const std::int64_t segments = granularity == Granularity::row ? s.m : granularity == Granularity::column ? s.k : 1;
  o->q = zeros<std::int8_t>(s.m, s.k);
  o->scale = zeros<float>(segments, 1);
  QuantizeArgs args = {.x = matrix(o->x.data(), s.m, s.k),
                       .q = matrix(o->q.data(), s.m, s.k),
                       .scale = vector(o->scale.data(), segments)};
  double bytes = elements(s) * 5 + second_reading(s, granularity);
  if (orientation == Orientation::both) {
    o->q_transposed = zeros<std::int8_t>(s.k, s.m);
    args.q_transposed = matrix(o->q_transposed.data(), s.k, s.m);
    bytes += elements(s);
  }
  return against_memcpy(QuantizePlan::select(d), args, o, bytes, threads);
}

template <class Args>
Prepared elementwise(const Benchmark& b, int threads) {
  const Shape s = b.shape;
  const SharedOperands o = quantized_operands(s);
  Args args;
  double bytes_each = 0;
  const auto is = [&](auto& tensor, auto& values) {
    tensor = matrix(values.data(), s.m, s.k);
    bytes_each += sizeof values[0];
  };
  if constexpr (requires { args.q; }) is(args.q, o->q);
  if constexpr (requires { args.dy; }) is(args.dy, o->dy);
  if constexpr (requires { args.dx; }) is(args.dx, o->out);
  if constexpr (requires { args.dq; }) is(args.dq, o->out);
  if constexpr (requires { args.y; }) is(args.y, o->out);
  if constexpr (requires { args.x; }) is(args.x, std::is_same_v<decltype(args.x), Tensor> ? o->out : o->x);
  args.scale = vector(o->scale.data(), s.m);
  const auto plan = QuantizerPlan<Args>::select(description(b, threads));
  return against_memcpy(plan, args, o, elements(s) * bytes_each, threads);
}

template Prepared elementwise<DequantizeArgs>(const Benchmark&, int threads);
template Prepared elementwise<QuantizeBackwardArgs>(const Benchmark&, int threads);
template Prepared elementwise<DequantizeBackwardArgs>(const Benchmark&, int threads);
template Prepared elementwise<FakeQuantizeArgs>(const Benchmark&, int threads);
template Prepared elementwise<FakeQuantizeBackwardArgs>(const Benchmark&, int threads);

Prepared gradient_quantize(const Benchmark& b, int threads) { return quantize_gradient(b, 0, threads); }
Prepared blocked_gradient_quantize(const Benchmark& b, int threads) { return quantize_gradient(b, 128, threads); }

// The copy reads half of what the sum reads, and writes as much.
Prepared backward_db(const Benchmark& b, int threads) {
  const Shape s = b.shape;
  const auto o = std::make_shared<Operands>();
  o->dy = normal(s.m, s.n, 1);
  o->out = zeros<float>(1, s.n);
  const LinearBackwardArgs args = {.dy = matrix(o->dy.data(), s.m, s.n), .db = vector(o->out.data(), s.n)};
  const double elements = static_cast<double>(s.m) * static_cast<double>(s.n);
  return against_memcpy(LinearBackwardPlan::select(dy_alone(b, Product::none, threads)), args, o, 4 * elements,
                        threads);
}

}  // namespace octile::cli::bench
