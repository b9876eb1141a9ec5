// The products, forward and backward, compared with the f32 product of the BLAS.
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>

#include "bench/blas.h"
#include "cli/bench/cases.h"
#include "cli/bench/data.h"

namespace octile::cli::bench {

namespace {

constexpr std::int64_t kGroup = 128;

// What Y = X * W^T + bias or one of its gradients reads and writes.
struct Operands {
  std::vector<float> x, w, dy, bias, out;
  std::vector<BFloat16> narrow_x;
  QuantizedMatrix quantized;                                                                // of W or X
  PackedMatrix packed;                                                                      // of W
  std::unique_ptr<std::uint8_t, decltype(&std::free)> packed_for_run{nullptr, &std::free};  // by the plan
  std::vector<float> float_out;
  std::vector<std::byte> workspace;
};
using SharedOperands = std::shared_ptr<Operands>;

// c (m, n) = a * b, summed over k: a is (m, k), or (k, m) to be transposed; b is (k, n), or (n, k) to be transposed.
struct FloatProduct {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  const float* a = nullptr;
  bool transpose_a = false;
  const float* b = nullptr;
  bool transpose_b = false;
};

int blas_size(std::int64_t size) {
  if (size > std::numeric_limits<int>::max()) {
    throw std::runtime_error("a size of " + std::to_string(size) + " is too large for the BLAS baseline");
  }
  return static_cast<int>(size);
}

std::function<void()> blas_run(const FloatProduct& p, float* c) {
  const int m = blas_size(p.m), n = blas_size(p.n), k = blas_size(p.k);
  return [=, sgemm = blas().sgemm] {
    sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans, p.transpose_b ? CblasTrans : CblasNoTrans, m, n, k,
          1.0f, p.a, p.transpose_a ? m : k, p.b, p.transpose_b ? k : n, 0.0f, c, n);
  };
}

double product(std::int64_t a, std::int64_t b) { return static_cast<double>(a) * static_cast<double>(b); }

// Everything but what is counted.
template <class Plan, class Args>
Prepared against_blas(const Plan& plan, const Args& args, const SharedOperands& operands, const FloatProduct& twin,
                      int threads) {
  operands->workspace.resize(plan.workspace_size());
  operands->float_out = zeros<float>(twin.m, twin.n);
  blas().use_threads(threads);
  Prepared p;
  p.sku = plan.sku();
  p.run = [=] { plan.run(args, {operands->workspace.data(), operands->workspace.size()}); };
  p.baseline = blas().set_num_threads ? "openblas_sgemm" : "blas_sgemm";
  p.run_baseline = blas_run(twin, operands->float_out.data());
  p.operations = 2 * product(twin.m, twin.n) * static_cast<double>(twin.k);
  return p;
}

SharedOperands forward_operands(const Shape& s) {
  auto o = std::make_shared<Operands>();
  o->x = normal(s.m, s.k, 1);
  o->w = normal(s.n, s.k, 2);
  o->bias = normal(1, s.n, 3);
  o->out = zeros<float>(s.m, s.n);
  return o;
}

Prepared forward(const Benchmark& b, LinearDescription d, const SharedOperands& o, LinearArgs args, int threads) {
  const Shape s = b.shape;
  d.m = s.m, d.n = s.n, d.k = s.k;
  d.bias = true;
  d.threads = threads;
  d.kernel = b.kernel;
  args.x = matrix(o->x.data(), s.m, s.k);
  if (d.x == DType::bf16) {
    o->narrow_x = {o->x.begin(), o->x.end()};
    args.x = matrix(o->narrow_x.data(), s.m, s.k);
  }
  args.bias = vector(o->bias.data(), s.n);
  args.y = matrix(o->out.data(), s.m, s.n);
  const LinearPlan plan = LinearPlan::select(d);
  if (d.packed_weight) {
    const auto size = static_cast<std::int64_t>(plan.packed_weight_size());
    o->packed_for_run.reset(static_cast<std::uint8_t*>(std::aligned_alloc(64, plan.packed_weight_size())));
    if (!o->packed_for_run) throw std::bad_alloc();
    plan.pack({args.weight, args.weight_scale, args.weight_zero_point, vector(o->packed_for_run.get(), size)});
    args.weight = vector(o->packed_for_run.get(), size);
    args.weight_scale = args.weight_zero_point = {};
  }
  const FloatProduct twin = {.m = s.m, .n = s.n, .k = s.k, .a = o->x.data(), .b = o->w.data(), .transpose_b = true};
  return against_blas(plan, args, o, twin, threads);
}

}  // namespace

// dX, from the weight (n, k), or dW, from x (m, k): the operand that is quantized.
Prepared backward(const Benchmark& b, int threads, bool dx, Product arithmetic, std::int64_t block) {
  const Shape s = b.shape;
  const std::int64_t terms = dx ? s.n : s.m, rows = dx ? s.m : s.n;
  const LinearBackwardDescription d = {.m = s.m,
                                       .n = s.n,
                                       .k = s.k,
                                       .dx = dx ? arithmetic : Product::none,
                                       .dw = dx ? Product::none : arithmetic,
                                       .gradient_block = block,
                                       .threads = threads,
                                       .kernel = b.kernel};
  const auto o = std::make_shared<Operands>();
  o->dy = normal(s.m, s.n, 1);
  o->x = normal(terms, s.k, 2);
  o->quantized = quantized_rows(o->x, terms, s.k);
  o->out = zeros<float>(rows, s.k);
  LinearBackwardArgs args = {.dy = matrix(o->dy.data(), s.m, s.n)};
  (dx ? args.weight : args.x) = matrix(o->quantized.values.data(), terms, s.k);
  (dx ? args.weight_scale : args.x_scale) = vector(o->quantized.scale.data(), terms);
  (dx ? args.dx : args.dw) = matrix(o->out.data(), rows, s.k);
  const FloatProduct twin = {.m = rows, .n = s.k, .k = terms, .a = o->dy.data(), .transpose_a = !dx, .b = o->x.data()};
  Prepared p = against_blas(LinearBackwardPlan::select(d), args, o, twin, threads);
  p.arithmetic = arithmetic == Product::int8 ? Arithmetic::s8 : Arithmetic::floats;
  p.bytes = 4 * product(s.m, s.n) + product(terms, s.k) + 4 * product(rows, s.k);
  return p;
}

Prepared forward_s8(const Benchmark& b, int threads, bool packed) {
  const Shape s = b.shape;
  const SharedOperands o = forward_operands(s);
  o->quantized = quantized_rows(o->w, s.n, s.k);
  LinearArgs args;
  args.weight = matrix(o->quantized.values.data(), s.n, s.k);
  args.weight_scale = vector(o->quantized.scale.data(), s.n);
  Prepared p = forward(b, {.packed_weight = packed}, o, args, threads);
  p.arithmetic = Arithmetic::s8;
  p.bytes = 4 * product(s.m, s.k) + product(s.n, s.k) + 4 * product(s.m, s.n);
  return p;
}

Prepared forward_s4(const Benchmark& b, int threads, Activation activation, bool packed) {
  const Shape s = b.shape;
  const std::int64_t group = s.k % kGroup == 0 ? kGroup : s.k;
  const SharedOperands o = forward_operands(s);
  o->packed = quantized_groups(o->w, s.n, s.k, group);
  LinearArgs args;
  args.weight = matrix_s4(o->packed.values.data(), s.n, s.k);
  args.weight_scale = matrix(o->packed.scale.data(), s.n, s.k / group);
  LinearDescription choices{.activation = activation, .weight = WeightFormat::s4_group, .packed_weight = packed};
  choices.weight.group = group == kGroup ? kGroup : 0;  // 0: a whole row
  Prepared p = forward(b, choices, o, args, threads);
  p.arithmetic = activation == Activation::none ? Arithmetic::floats : Arithmetic::s8;
  p.bytes = 4 * product(s.m, s.k) + product(s.n, s.k) / 2 + 4 * product(s.n, s.k / group) + 4 * product(s.m, s.n);
  return p;
}

Prepared forward_bf16(const Benchmark& b, int threads, DType weight, bool packed) {
  const Shape s = b.shape;
  const SharedOperands o = forward_operands(s);
  LinearDescription choices{.x = DType::bf16, .activation = Activation::none, .packed_weight = packed};
  LinearArgs args;
  if (weight == DType::s4) {
    const std::int64_t group = s.k % kGroup == 0 ? kGroup : s.k;
    o->packed = quantized_groups(o->w, s.n, s.k, group);
    args.weight = matrix_s4(o->packed.values.data(), s.n, s.k);
    args.weight_scale = matrix(o->packed.scale.data(), s.n, s.k / group);
    choices.weight = WeightFormat::s4_group;
    choices.weight.group = group == kGroup ? kGroup : 0;
  } else {
    o->quantized = quantized_rows(o->w, s.n, s.k);
    args.weight = matrix(o->quantized.values.data(), s.n, s.k);
    args.weight_scale = vector(o->quantized.scale.data(), s.n);
  }
  Prepared p = forward(b, choices, o, args, threads);
  p.arithmetic = Arithmetic::bf16;
  p.bytes = 2 * product(s.m, s.k) + product(s.n, s.k) * bits(weight) / 8 + 4 * product(s.m, s.n);
  return p;
}

}  // namespace octile::cli::bench
