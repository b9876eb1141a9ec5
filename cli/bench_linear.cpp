// The products: forward and backward, compared with the f32 product of the BLAS that the command is linked with.
#include <cblas.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>

#include "bench_cases.h"
#include "bench_data.h"
#include "octile/linear.h"

// Absent in other BLAS libraries.
extern "C" __attribute__((weak)) void openblas_set_num_threads(int threads);

namespace octile::cli::bench {

namespace {

constexpr std::int64_t kGroup = 128;

std::string baseline_name() { return openblas_set_num_threads ? "openblas_sgemm" : "blas_sgemm"; }

int blas_size(std::int64_t size) {
  if (size > std::numeric_limits<int>::max()) throw std::runtime_error("a size over 2^31 - 1 is none for the BLAS");
  return static_cast<int>(size);
}

// c (m, n) = a (m, k) * b, row-major; b is (n, k) if it is transposed, else (k, n), and so on.
struct FloatProduct {
  CBLAS_TRANSPOSE a_transpose = CblasNoTrans;
  CBLAS_TRANSPOSE b_transpose = CblasNoTrans;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
};

void multiply(const FloatProduct& p, const float* a, const float* b, float* c) {
  const int m = blas_size(p.m), n = blas_size(p.n), k = blas_size(p.k);
  cblas_sgemm(CblasRowMajor, p.a_transpose, p.b_transpose, m, n, k, 1.0f, a, p.a_transpose == CblasNoTrans ? k : m, b,
              p.b_transpose == CblasNoTrans ? n : k, 0.0f, c, n);
}

void set_blas_threads(int threads) {
  if (openblas_set_num_threads) openblas_set_num_threads(threads);
}

template <class Plan>
std::vector<std::byte> workspace_of(const Plan& plan) {
  return std::vector<std::byte>(plan.workspace_size());
}

double product(std::int64_t a, std::int64_t b) { return static_cast<double>(a) * static_cast<double>(b); }

double operations(const Shape& s) { return 2 * product(s.m, s.k) * static_cast<double>(s.n); }

// The float operands of Y = X * W^T + bias and of its gradients.
struct Floats {
  std::vector<float> x, w, dy, bias, out, baseline_out;
};

LinearBackwardDescription backward_description(const Benchmark& b, int threads) {
  LinearBackwardDescription d;
  d.m = b.shape.m;
  d.n = b.shape.n;
  d.k = b.shape.k;
  d.threads = threads;
  d.kernel = b.kernel;
  return d;
}

Prepared backward_dx(const Benchmark& b, Product arithmetic, int threads) {
  const Shape s = b.shape;
  LinearBackwardDescription d = backward_description(b, threads);
  d.dx = arithmetic;
  const auto plan = LinearBackwardPlan::select(d);

  struct State {
    Floats f;
    QuantizedMatrix w;
    std::vector<std::byte> workspace;
  };
  auto state = std::make_shared<State>();
  state->f.dy = normal(s.m, s.n, 1);
  state->f.w = normal(s.n, s.k, 2);
  state->f.out = state->f.baseline_out = zeros<float>(s.m, s.k);
  state->w = quantized_rows(state->f.w, s.n, s.k);
  state->workspace = workspace_of(plan);
  const LinearBackwardArgs args = {.dy = matrix(state->f.dy.data(), s.m, s.n),
                                   .weight = matrix(state->w.values.data(), s.n, s.k),
                                   .weight_scale = vector(state->w.scale.data(), s.n),
                                   .dx = matrix(state->f.out.data(), s.m, s.k)};
  set_blas_threads(threads);
  return {.sku = plan.sku(),
          .run = [=] { plan.run(args, {state->workspace.data(), state->workspace.size()}); },
          .baseline = baseline_name(),
          .run_baseline =
              [=] {
                multiply({.m = s.m, .n = s.k, .k = s.n}, state->f.dy.data(), state->f.w.data(),
                         state->f.baseline_out.data());
              },
          .arithmetic = arithmetic == Product::int8 ? Arithmetic::s8 : Arithmetic::f32,
          .operations = operations(s),
          .bytes = 4 * product(s.m, s.n) + product(s.n, s.k) + 4 * product(s.m, s.k)};
}

Prepared backward_dw(const Benchmark& b, Product arithmetic, int threads) {
  const Shape s = b.shape;
  LinearBackwardDescription d = backward_description(b, threads);
  d.dw = arithmetic;
  const auto plan = LinearBackwardPlan::select(d);

  struct State {
    Floats f;
    QuantizedMatrix x;
    std::vector<std::byte> workspace;
  };
  auto state = std::make_shared<State>();
  state->f.dy = normal(s.m, s.n, 1);
  state->f.x = normal(s.m, s.k, 2);
  state->f.out = state->f.baseline_out = zeros<float>(s.n, s.k);
  state->x = quantized_rows(state->f.x, s.m, s.k);
  state->workspace = workspace_of(plan);
  const LinearBackwardArgs args = {.dy = matrix(state->f.dy.data(), s.m, s.n),
                                   .x = matrix(state->x.values.data(), s.m, s.k),
                                   .x_scale = vector(state->x.scale.data(), s.m),
                                   .dw = matrix(state->f.out.data(), s.n, s.k)};
  set_blas_threads(threads);
  return {.sku = plan.sku(),
          .run = [=] { plan.run(args, {state->workspace.data(), state->workspace.size()}); },
          .baseline = baseline_name(),
          .run_baseline =
              [=] {
                multiply({.a_transpose = CblasTrans, .m = s.n, .n = s.k, .k = s.m}, state->f.dy.data(),
                         state->f.x.data(), state->f.baseline_out.data());
              },
          .arithmetic = arithmetic == Product::int8 ? Arithmetic::s8 : Arithmetic::f32,
          .operations = operations(s),
          .bytes = 4 * product(s.m, s.n) + product(s.m, s.k) + 4 * product(s.n, s.k)};
}

}  // namespace

Prepared forward_w8a8(const Benchmark& b, int threads) {
  const Shape s = b.shape;
  const auto plan = LinearPlan::select(
      {.m = s.m, .n = s.n, .k = s.k, .bias = true, .threads = threads, .kernel = b.kernel});

  struct State {
    Floats f;
    QuantizedMatrix w;
    std::vector<std::byte> workspace;
  };
  auto state = std::make_shared<State>();
  state->f.x = normal(s.m, s.k, 1);
  state->f.w = normal(s.n, s.k, 2);
  state->f.bias = normal(1, s.n, 3);
  state->f.out = state->f.baseline_out = zeros<float>(s.m, s.n);
  state->w = quantized_rows(state->f.w, s.n, s.k);
  state->workspace = workspace_of(plan);
  const LinearArgs args = {.x = matrix(state->f.x.data(), s.m, s.k),
                           .weight = matrix(state->w.values.data(), s.n, s.k),
                           .weight_scale = vector(state->w.scale.data(), s.n),
                           .bias = vector(state->f.bias.data(), s.n),
                           .y = matrix(state->f.out.data(), s.m, s.n)};
  set_blas_threads(threads);
  return {.sku = plan.sku(),
          .run = [=] { plan.run(args, {state->workspace.data(), state->workspace.size()}); },
          .baseline = baseline_name(),
          .run_baseline =
              [=] {
                multiply({.b_transpose = CblasTrans, .m = s.m, .n = s.n, .k = s.k}, state->f.x.data(),
                         state->f.w.data(), state->f.baseline_out.data());
              },
          .arithmetic = Arithmetic::s8,
          .operations = operations(s),
          .bytes = 4 * product(s.m, s.k) + product(s.n, s.k) + 4 * product(s.m, s.n)};
}

Prepared forward_w4a16(const Benchmark& b, int threads) {
  const Shape s = b.shape;
  const std::int64_t group = s.k % kGroup == 0 ? kGroup : s.k;
  const auto plan = LinearPlan::select({.m = s.m,
                                        .n = s.n,
                                        .k = s.k,
                                        .activation = Activation::none,
                                        .weight = WeightFormat::s4_group,
                                        .group = group == kGroup ? kGroup : 0,
                                        .bias = true,
                                        .threads = threads,
                                        .kernel = b.kernel});

  struct State {
    Floats f;
    PackedMatrix w;
    std::vector<std::byte> workspace;
  };
  auto state = std::make_shared<State>();
  state->f.x = normal(s.m, s.k, 1);
  state->f.w = normal(s.n, s.k, 2);
  state->f.bias = normal(1, s.n, 3);
  state->f.out = state->f.baseline_out = zeros<float>(s.m, s.n);
  state->w = quantized_groups(state->f.w, s.n, s.k, group);
  state->workspace = workspace_of(plan);
  const LinearArgs args = {.x = matrix(state->f.x.data(), s.m, s.k),
                           .weight = matrix_s4<const std::uint8_t>(state->w.values.data(), s.n, s.k),
                           .weight_scale = matrix(state->w.scale.data(), s.n, s.k / group),
                           .bias = vector(state->f.bias.data(), s.n),
                           .y = matrix(state->f.out.data(), s.m, s.n)};
  set_blas_threads(threads);
  return {.sku = plan.sku(),
          .run = [=] { plan.run(args, {state->workspace.data(), state->workspace.size()}); },
          .baseline = baseline_name(),
          .run_baseline =
              [=] {
                multiply({.b_transpose = CblasTrans, .m = s.m, .n = s.n, .k = s.k}, state->f.x.data(),
                         state->f.w.data(), state->f.baseline_out.data());
              },
          .arithmetic = Arithmetic::f32,
          .operations = operations(s),
          .bytes = 4 * product(s.m, s.k) + product(s.n, s.k) * (0.5 + 4.0 / static_cast<double>(group)) +
                   4 * product(s.m, s.n)};
}

Prepared backward_dx_int8(const Benchmark& b, int threads) { return backward_dx(b, Product::int8, threads); }
Prepared backward_dw_int8(const Benchmark& b, int threads) { return backward_dw(b, Product::int8, threads); }
Prepared backward_dx_dequantized(const Benchmark& b, int threads) {
  return backward_dx(b, Product::dequantized, threads);
}
Prepared backward_dw_dequantized(const Benchmark& b, int threads) {
  return backward_dw(b, Product::dequantized, threads);
}

}  // namespace octile::cli::bench
