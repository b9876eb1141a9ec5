// The products, each as the one loop nest that defines it. Sums of integers are exact in s32; sums of floats are taken
// in f64, so that the result is the central value that a faster kernel's error is measured from.
#include <algorithm>
#include <cmath>
#include <optional>

#include "base/access.h"
#include "plan/cost.h"
#include "plan/either.h"
#include "plan/packed_weight.h"

namespace octile::reference {

namespace {

// Term t of group g of row j of b, less its zero point, and its scale, packed or not. Without groups, a row is one.
class Weight {
 public:
  Weight(const GemmProblem& p, const GemmOperands& o) : p_(p), o_(o), group_(p.grouped() ? p.b.group : o.a.cols()) {
    if (p.b_packed) packed_.emplace(p, o.b.data);
  }

  std::int64_t group() const { return group_; }

  std::int32_t value(std::int64_t j, std::int64_t g, std::int64_t t) const {
    if (packed_) return packed_->value(j, g, t);
    return load_integer(o_.b, j, g * group_ + t) - (p_.b.zero_point ? load_integer(o_.zero_point, j, g) : 0);
  }
  template <class Real>
  Real scale(std::int64_t j, std::int64_t g) const {
    return packed_ ? static_cast<Real>(packed_->scale(j, g)) : load<Real>(o_.b_scale, j, g);
  }

 private:
  const GemmProblem& p_;
  const GemmOperands& o_;
  std::int64_t group_;
  std::optional<PackedWeight> packed_;
};

// Stores to y, or adds to what it holds.
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
      for (std::int64_t c = 0; c < o.a.cols(); ++c) acc += load_integer(o.a, i, c) * b.value(j, 0, c);
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
      for (std::int64_t g = 0; g * b.group() < o.a.cols(); ++g) {
        std::int32_t acc = 0;
        for (std::int64_t t = 0; t < b.group(); ++t) acc += load_integer(o.a, i, g * b.group() + t) * b.value(j, g, t);
        total = std::fma(static_cast<Real>(acc), b.scale<Real>(j, g), total);
      }
      const Real scale = load<Real>(o.a_scale, i);
      store(o.y, i, j, p.bias ? std::fma(total, scale, load<Real>(o.bias, j)) : total * scale);
    }
  }
}

// y[i, j] = t, the fold over the blocks g of a of fma(Real(acc_g), a_scale[i, g], t) from 0.
template <class Real>
void in_blocks(const GemmProblem& p, const GemmOperands& o) {
  for (std::int64_t i = 0; i < o.y.rows(); ++i) {
    for (std::int64_t j = 0; j < o.y.cols(); ++j) {
      Real total = 0;
      for (std::int64_t first = 0; first < o.a.cols(); first += p.a_block) {
        std::int32_t acc = 0;
        for (std::int64_t c = first; c < std::min(first + p.a_block, o.a.cols()); ++c) {
          acc += load_integer(o.a, i, c) * load_integer(o.b, j, c);
        }
        total = std::fma(static_cast<Real>(acc), load<Real>(o.a_scale, i, first / p.a_block), total);
      }
      put(p, o, i, j, total);
    }
  }
}

// y[i, j] = sum_c a[i, c] * (b[j, c] * b_scale) + bias[j], the scale of (j, c).
template <class Real>
void float_sum(const GemmProblem& p, const GemmOperands& o) {
  const Weight b(p, o);
  const bool one_per_term = p.b.granularity == Granularity::column;
  for (std::int64_t i = 0; i < o.y.rows(); ++i) {
    for (std::int64_t j = 0; j < o.y.cols(); ++j) {
      double sum = p.bias ? load<double>(o.bias, j) : 0.0;
      for (std::int64_t g = 0; g * b.group() < o.a.cols(); ++g) {
        const double scale = one_per_term ? 0 : b.scale<double>(j, g);
        for (std::int64_t t = 0; t < b.group(); ++t) {
          const double s = one_per_term ? load<double>(o.b_scale, t) : scale;
          sum += load<double>(o.a, i, g * b.group() + t) * (b.value(j, g, t) * s);
        }
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

using LaunchOf = decltype(GemmKernel::launch);
constexpr LaunchOf launch_integer = either<integer_gemm<float>, integer_gemm<double>>;
constexpr LaunchOf launch_float = either<float_sum<float>, float_sum<double>>;

Cost reference_cost(const GemmProblem& p) { return gemm_cost(p, 0.3e9, 1e9); }

constexpr GemmKernel row(std::string_view name, Task task, Bound bound, LaunchOf launch) {
  return {.name = name, .task = task, .cost = reference_cost, .launch = launch, .bound = bound};
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_reference =
    row("w8a8_gemm_reference", {Operation::gemm, kW8A8}, Bound::exact, launch_integer);
extern constinit const GemmKernel w8a8_blocked_gemm_reference =
    row("w8a8_blocked_gemm_reference", {Operation::blocked_gemm}, Bound::exact,
        either<in_blocks<float>, in_blocks<double>>);
extern constinit const GemmKernel w8a16_gemm_reference =
    row("w8a16_gemm_reference", {Operation::gemm, kW8A16}, Bound::sum, launch_float);
extern constinit const GemmKernel w4a16_gemm_reference =
    row("w4a16_gemm_reference", {Operation::gemm, kW4A16}, Bound::sum, launch_float);
extern constinit const GemmKernel w4a8_gemm_reference =
    row("w4a8_gemm_reference", {Operation::gemm, kW4A8}, Bound::exact, launch_integer);
extern constinit const GemmKernel column_sum_reference =
    row("column_sum_reference", {Operation::column_sum}, Bound::sum, either<column_sum<float>, column_sum<double>>);

}  // namespace octile::reference
