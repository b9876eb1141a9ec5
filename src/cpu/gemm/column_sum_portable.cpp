// y[j] = sum_i a[i, j]. Blocks of 256 rows are summed, then the blocks: an order that no thread count changes, and an
// error that grows with rows / 256 instead of rows.
#include "cpu/support/cost.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/either.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kBlockRows = 256;
constexpr std::int64_t kStripe = 1024;  // columns at a time: their sums stay in the L1 cache

// sum[j] = ((sum[j] + x[0][j]) + x[1][j]) + ..., `rows` rows. Four at a time, so that a sum is loaded and stored once
// for each four.
struct AddRows {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* __restrict x, std::int64_t stride, std::int64_t rows, std::int64_t n,
                                Real* __restrict sum) {
    constexpr int kLines = kAheadStep * sizeof(Real) / 64;
    for (; rows >= 4; rows -= 4, x += 4 * stride) {
      for (std::int64_t i = 0; i < n; i += kAheadStep) {
        for (int r = 4; r < 8; ++r) Ahead(x + i, r * stride, kLines).prefetch();
        for (std::int64_t j = i; j < std::min(n, i + kAheadStep); ++j) {
          sum[j] = (((sum[j] + x[j]) + x[stride + j]) + x[2 * stride + j]) + x[3 * stride + j];
        }
      }
    }
    for (; rows > 0; --rows, x += stride) {
      for (std::int64_t j = 0; j < n; ++j) sum[j] += x[j];
    }
  }
};

// A stripe of one block of rows.
template <class Real>
void sum_block(const ConstTensor& a, std::int64_t r0, std::int64_t rows, std::int64_t c, std::int64_t n, Real* sum) {
  const std::int64_t stride = a.strides[0];
  if (a.dtype == DTypeOf<Real>::value) {
    return multiversion<AddRows>(static_cast<const Real*>(a.data) + r0 * stride + c, stride, rows, n, sum);
  }
  if constexpr (sizeof(Real) == 4) {  // f64 comes as it is
    constexpr std::int64_t kFew = 4;
    Real buffer[kFew * kStripe];
    for (std::int64_t r = 0; r < rows; r += kFew) {
      const std::int64_t count = std::min(kFew, rows - r);
      for (std::int64_t i = 0; i < count; ++i)
        widen(a.dtype, a.data, (r0 + r + i) * stride + c, n, buffer + i * kStripe);
      multiversion<AddRows>(static_cast<const Real*>(buffer), kStripe, count, n, sum);
    }
  }
}

template <class Real>
void sum_stripe(const GemmOperands& o, std::int64_t c, std::int64_t n) {
  Real total[kStripe] = {};
  for (std::int64_t first = 0; first < o.a.rows(); first += kBlockRows) {
    Real block[kStripe] = {};
    sum_block(o.a, first, std::min(kBlockRows, o.a.rows() - first), c, n, static_cast<Real*>(block));
    multiversion<AddRows>(static_cast<const Real*>(block), std::int64_t{0}, std::int64_t{1}, n,
                          static_cast<Real*>(total));
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

extern constinit const GemmKernel column_sum_portable = {
    .name = "column_sum_portable",
    .task = {Operation::column_sum},
    .cost = portable_float_cost,
    .launch = either<column_sum<float>, column_sum<double>>,
    .bound = Bound::sum,
};

}  // namespace octile::cpu
