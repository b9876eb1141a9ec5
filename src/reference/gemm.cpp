// The products, each as the one loop nest that defines it. Sums of integers are exact in s32; sums of floats are taken
// in f64, so that the result is the central value that a faster kernel's error is measured from.
#include <cmath>

#include "base/access.h"
#include "plan/cost.h"
#include "plan/kernel.h"
#include "plan/packed_weight.h"

namespace octile::reference {

namespace {

// Value (j, c) of b less its zero point, and its scale, packed or not.
class Weight {
 public:
  Weight(const GemmProblem& p, const GemmOperands& o) : p_(p), o_(o) {}

  std::int32_t value(std::int64_t j, std::int64_t c) const {
    if (p_.b_packed) return packed_value(p_, o_.b.data, j, c);
    return load_integer(o_.b, j, c) - (p_.b.zero_point ? load_integer(o_.zero_point, j, c / p_.b.group) : 0);
  }
  template <class Real>
  Real scale(std::int64_t j, std::int64_t c) const {
    if (p_.b_packed) return static_cast<Real>(packed_scale(p_, o_.b.data, j, c));
    if (p_.b.granularity == Granularity::column) return load<Real>(o_.b_scale, c);
    return load<Real>(o_.b_scale, j, p_.grouped() ? c / p_.b.group : 0);
  }

 private:
  const GemmProblem& p_;
  const GemmOperands& o_;
};

// Into y, or onto what it holds.
template <class Real>
void put(const GemmProblem& p, const GemmOperands& o, std::int64_t i, std::int64_t j, Real value) {
  store(o.y, i, j, p.accumulate ? load<Real>(o.y, i, j) + value : value);
}

// y[i, j] = fma(Real(acc), a_scale[i] * b_scale[j], bias[j]), acc = sum_c a[i, c] * b[j, c].
template <class Real>
void per_channel(const GemmProblem& p, const GemmOperands& o) {
  const Weight b(p, o);
  for (std::int64_t i = 0; i < o.y.rows(); ++i) {
    for (std::int64_t j = 0; j < o.y.cols(); ++j) {
      std::int32_t acc = 0;
      for (std::int64_t c = 0; c < o.a.cols(); ++c) acc += load_integer(o.a, i, c) * b.value(j, c);
      const Real scale = load<Real>(o.a_scale, i) * b.scale<Real>(j, 0);
      const Real sum = static_cast<Real>(acc);
      put(p, o, i, j, p.bias ? std::fma(sum, scale, load<Real>(o.bias, j)) : sum * scale);
    }
  }
}

// y[i, j] = fma(t, a_scale[i], bias[j]), t the fold over the groups g of fma(Real(acc_g), b_scale[j, g], t) from 0.
template <class Real>
void in_groups(const GemmProblem& p, const GemmOperands& o) {
  const Weight b(p, o);
  for (std::int64_t i = 0; i < o.y.rows(); ++i) {
    for (std::int64_t j = 0; j < o.y.cols(); ++j) {
      Real total = 0;
      for (std::int64_t first = 0; first < o.a.cols(); first += p.b.group) {
        std::int32_t acc = 0;
        for (std::int64_t c = first; c < first + p.b.group; ++c) acc += load_integer(o.a, i, c) * b.value(j, c);
        total = std::fma(static_cast<Real>(acc), b.scale<Real>(j, first), total);
      }
      const Real scale = load<Real>(o.a_scale, i);
      store(o.y, i, j, p.bias ? std::fma(total, scale, load<Real>(o.bias, j)) : total * scale);
    }
  }
}

// y[i, j] = sum_c a[i, c] * (b[j, c] * b_scale) + bias[j], the scale of (j, c).
template <class Real>
void float_sum(const GemmProblem& p, const GemmOperands& o) {
  const Weight b(p, o);
  for (std::int64_t i = 0; i < o.y.rows(); ++i) {
    for (std::int64_t j = 0; j < o.y.cols(); ++j) {
      double sum = p.bias ? load<double>(o.bias, j) : 0.0;
      for (std::int64_t c = 0; c < o.a.cols(); ++c) {
        sum += load<double>(o.a, i, c) * (b.value(j, c) * b.scale<double>(j, c));
      }
      put(p, o, i, j, static_cast<Real>(sum));
    }
  }
}

template <class Real>
void column_sum(const GemmProblem&, const GemmOperands& o) {
  for (std::int64_t j = 0; j < o.a.cols(); ++j) {
    double sum = 0;
    for (std::int64_t i = 0; i < o.a.rows(); ++i) sum += load<double>(o.a, i, j);
    store(o.y, j, 0, static_cast<Real>(sum));
  }
}

template <class Real>
void integer_gemm(const GemmProblem& p, const GemmOperands& o) {
  p.grouped() ? in_groups<Real>(p, o) : per_channel<Real>(p, o);
}

using Loop = void (*)(const GemmProblem&, const GemmOperands&);

// In f64 where the scales are.
template <Loop kFloat, Loop kDouble>
void either(const GemmProblem& p, const GemmOperands& o, const Launch&) {
  p.scale == DType::f64 ? kDouble(p, o) : kFloat(p, o);
}
constexpr auto launch_integer = either<integer_gemm<float>, integer_gemm<double>>;
constexpr auto launch_float = either<float_sum<float>, float_sum<double>>;

Cost reference_cost(const GemmProblem& p) { return gemm_cost(p, 0.3e9, 1e9); }

constexpr GemmKernel row(std::string_view name, Task task, Bound bound, decltype(GemmKernel::launch) launch) {
  return {.name = name, .task = task, .cost = reference_cost, .launch = launch, .bound = bound};
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_reference =
    row("w8a8_gemm_reference", {Operation::gemm, kW8A8}, Bound::exact, launch_integer);
extern constinit const GemmKernel w8a16_gemm_reference =
    row("w8a16_gemm_reference", {Operation::gemm, kW8A16}, Bound::sum, launch_float);
extern constinit const GemmKernel w4a16_gemm_reference =
    row("w4a16_gemm_reference", {Operation::gemm, kW4A16}, Bound::sum, launch_float);
extern constinit const GemmKernel w4a8_gemm_reference =
    row("w4a8_gemm_reference", {Operation::gemm, kW4A8}, Bound::exact, launch_integer);
extern constinit const GemmKernel column_sum_reference =
    row("column_sum_reference", {Operation::column_sum}, Bound::sum, either<column_sum<float>, column_sum<double>>);

}  // namespace octile::reference
