// y[j] = sum_i a[i, j]. Blocks of 256 rows are summed, then the blocks: an order that no thread count changes, and an
// error that grows with rows / 256 instead of rows.
#include "cpu/multiversion.h"
#include "cpu/rows.h"
#include "kernels.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kBlockRows = 256;
constexpr std::int64_t kStripe = 256;  // columns at a time

struct Add {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* __restrict x, std::int64_t n, Real* __restrict sum) {
    for (std::int64_t i = 0; i < n; ++i) sum[i] += x[i];
  }
};

template <class Real>
void sum_stripe(const GemmOperands& o, std::int64_t c, std::int64_t n) {
  Real total[kStripe] = {};
  Real buffer[kStripe];
  for (std::int64_t first = 0; first < o.a.rows(); first += kBlockRows) {
    Real block[kStripe] = {};
    for (std::int64_t r = first; r < std::min(o.a.rows(), first + kBlockRows); ++r) {
      multiversion<Add>(widened(o.a.dtype, o.a.data, r * o.a.strides[0] + c, n, buffer), n, static_cast<Real*>(block));
    }
    multiversion<Add>(static_cast<const Real*>(block), n, static_cast<Real*>(total));
  }
  const std::int64_t stride = o.y.rank == 1 ? o.y.strides[0] : o.y.strides[1];
  if (stride == 1) return narrow<Real>(o.y.dtype, o.y.data, c, n, total);
  for (std::int64_t i = 0; i < n; ++i) narrow<Real>(o.y.dtype, o.y.data, (c + i) * stride, 1, total + i);
}

template <class Real>
void column_sum(const GemmProblem& p, const GemmOperands& o) {
  const std::int64_t cols = o.a.cols();
  const int threads = useful_threads(p.threads, static_cast<double>(o.a.rows()) * static_cast<double>(cols));
  const std::int64_t stripe = std::clamp(round_up(ceil_div(cols, threads), 32), std::int64_t{32}, kStripe);
  parallel_for(threads, ceil_div(cols, stripe),
               [&](std::int64_t part) { sum_stripe<Real>(o, part * stripe, std::min(stripe, cols - part * stripe)); });
}

}  // namespace

void column_sum_portable(const GemmProblem& p, const GemmOperands& o, const Launch&) {
  p.scale == DType::f64 ? column_sum<double>(p, o) : column_sum<float>(p, o);
}

}  // namespace octile::cpu
