// Right-looking, in blocks of rows of V: the block's triangle, its rows to the right, and the update of the rest, which
// takes most of the time.
#include "calibration/cholesky.h"

#include <algorithm>
#include <cmath>

#include "base/thread_pool.h"
#include "calibration/outer_sum.h"
#include "cpu/support/multiversion.h"

namespace octile {

namespace {

constexpr std::int64_t kBlock = 128;  // rows of V
constexpr std::int64_t kChunk = 512;  // columns per task

struct Block {
  double* g;
  std::int64_t k, begin, end;  // of the rows
};

// Columns from..to of the block's rows, once its triangle is known.
struct SolveColumns {
  template <cpu::Isa>
  OCTILE_INLINE static void run(Block b, std::int64_t from, std::int64_t to) {
    for (std::int64_t c = b.begin; c < b.end; ++c) {
      double* __restrict row = b.g + c * b.k;
      for (std::int64_t above = b.begin; above < c; ++above) {
        const double* __restrict other = b.g + above * b.k;
        const double factor = other[c];
        for (std::int64_t i = from; i < to; ++i) row[i] -= factor * other[i];
      }
      const double root = row[c];
      for (std::int64_t i = from; i < to; ++i) row[i] /= root;
    }
  }
};

// The triangle itself. `diagonal` is the original G's.
BadPivot factor_triangle(const Block& b, const double* diagonal) {
  for (std::int64_t c = b.begin; c < b.end; ++c) {
    double* row = b.g + c * b.k;
    for (std::int64_t above = b.begin; above < c; ++above) {
      const double* other = b.g + above * b.k;
      for (std::int64_t i = c; i < b.end; ++i) row[i] -= other[c] * other[i];
    }
    if (!(row[c] > static_cast<double>(b.k) * 0x1p-52 * diagonal[c])) return {c, row[c]};
    const double root = std::sqrt(row[c]);
    row[c] = root;
    for (std::int64_t i = c + 1; i < b.end; ++i) row[i] /= root;
  }
  return {};
}

}  // namespace

BadPivot factor_cholesky(double* g, std::int64_t k, int threads) {
  std::vector<double> diagonal(static_cast<std::size_t>(k));
  for (std::int64_t c = 0; c < k; ++c) diagonal[static_cast<std::size_t>(c)] = g[c * k + c];
  std::vector<double> negated(static_cast<std::size_t>(kBlock * k));
  for (std::int64_t begin = 0; begin < k; begin += kBlock) {
    const Block block = {g, k, begin, std::min(k, begin + kBlock)};
    const BadPivot bad = factor_triangle(block, diagonal.data());
    if (bad.column >= 0) return bad;
    const std::int64_t rest = k - block.end;
    cpu::parallel_for(threads, (rest + kChunk - 1) / kChunk, [&](std::int64_t part) {
      const std::int64_t from = block.end + part * kChunk;
      const std::int64_t to = std::min(k, from + kChunk);
      cpu::multiversion<SolveColumns>(block, from, to);
      for (std::int64_t c = begin; c < block.end; ++c) {
        for (std::int64_t i = from; i < to; ++i) negated[static_cast<std::size_t>((c - begin) * k + i)] = -g[c * k + i];
      }
    });
    cpu::parallel_for(threads, (rest + kBlock - 1) / kBlock, [&](std::int64_t part) {
      const std::int64_t from = block.end + part * kBlock;
      add_outer({negated.data() + from, k, g + begin * k + from, k, g + from * k + from, k, block.end - begin,
                 std::min(kBlock, k - from), k - from});
    });
  }
  return {};
}

}  // namespace octile
