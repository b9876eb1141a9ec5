// y[i, j] = fma(Real(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k) and b (n, k) s8. Also with b
// in groups, and with a in blocks, which have a scale each.
//
// Dot products along k of 4 x 4 rows at a time. The compiler turns the innermost statement into a dot-product
// instruction if its operands have the right types: s16 x s8 gives pmaddwd, u8 x s8 gives vpdpbusd. So one operand, the
// left one, is packed once per run: to s16, or, where there is VNNI, to u8 by adding 128, which is subtracted again as
// 128 * sum_c b[j, c], the product of a row of zeros packed the same way.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/access.h"
#include "cpu/gemm/finish.h"
#include "cpu/support/cost.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/either.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kBlock = 64;         // rows of left and of right per part: (kBlock, kBlock) sums on the stack
constexpr std::int64_t kPackedRows = 2048;  // rows of left packed at a time, which bounds the workspace

template <Isa isa>
using PackedFor = std::conditional_t<isa == Isa::avx512vnni, std::uint8_t, std::int16_t>;

std::size_t packed_size() { return isa() >= Isa::avx512vnni ? sizeof(std::uint8_t) : sizeof(std::int16_t); }

struct PackRow {
  struct Vnni {};
  template <Isa isa>
  OCTILE_INLINE static void run(const std::uint8_t* __restrict in, std::int64_t n, void* out) {
    auto* __restrict packed = static_cast<PackedFor<isa>*>(out);
    for (std::int64_t i = 0; i < n; ++i) {
      if constexpr (isa == Isa::avx512vnni) {
        packed[i] = in[i] ^ 0x80;
      } else {
        packed[i] = static_cast<std::int8_t>(in[i]);
      }
    }
  }
};

// A block of an operand that is contiguous along its rows' numbers, into `transposed` (kBlock, kBlock).
void transpose_block(const ConstTensor& t, Range rows, Range terms, std::uint8_t* transposed) {
  transpose({bytes(t) + terms.first * t.strides[1] + rows.first, t.strides[1]}, {transposed, kBlock}, terms.count,
            rows.count);
}

// Packs rows `first` .. of left.
void pack_left(const GemmView& p, std::int64_t first, std::int64_t rows, Bytes packed) {
  if (p.left.strides[1] == 1) {
    for (std::int64_t r = 0; r < rows; ++r) {
      multiversion<PackRow>(bytes(p.left) + (first + r) * p.left.strides[0], p.k,
                            static_cast<void*>(packed.data + r * packed.stride));
    }
    return;
  }
  std::uint8_t transposed[kBlock * kBlock];
  for (std::int64_t c = 0; c < p.k; c += kBlock) {
    const std::int64_t terms = std::min(kBlock, p.k - c);
    transpose_block(p.left, {first, rows}, {c, terms}, transposed);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::uint8_t* out = packed.data + r * packed.stride + c * static_cast<std::int64_t>(packed_size());
      multiversion<PackRow>(static_cast<const std::uint8_t*>(transposed + r * kBlock), terms, static_cast<void*>(out));
    }
  }
}

// Rows `first` .. of right, contiguous along k.
void transpose_right(const GemmView& p, std::int64_t first, std::int64_t rows, Bytes out) {
  std::uint8_t transposed[kBlock * kBlock];
  for (std::int64_t c = 0; c < p.k; c += kBlock) {
    const std::int64_t terms = std::min(kBlock, p.k - c);
    transpose_block(p.right, {first, rows}, {c, terms}, transposed);
    for (std::int64_t r = 0; r < rows; ++r)
      std::memcpy(out.data + r * out.stride + c, transposed + r * kBlock, static_cast<std::size_t>(terms));
  }
}

struct SumsRun {
  const void* left;  // packed, (rows, k)
  std::int64_t left_stride;
  const void* zero;          // a packed row of zeros
  const std::int8_t* right;  // (cols, k)
  std::int64_t right_stride;
  std::int64_t rows, cols, k;
  std::int32_t* sums;  // (kBlock, kBlock)
};

struct Sums {
  struct Vnni {};

  // (m, n) sums in registers.
  template <int m, int n, class Packed>
  OCTILE_INLINE static void tile(const Packed* __restrict left, std::int64_t left_stride,
                                 const std::int8_t* __restrict right, std::int64_t right_stride, std::int64_t k,
                                 std::uint32_t (&sums)[m][n]) {
    std::uint32_t sum[m][n] = {};  // unsigned: 128 * sum_c b may wrap, and wraps back when it is subtracted
    for (std::int64_t c = 0; c < k; ++c) {
#pragma GCC unroll 8
      for (int i = 0; i < m; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < n; ++j) {
          const int product = left[i * left_stride + c] * right[j * right_stride + c];
          sum[i][j] += static_cast<std::uint32_t>(product);
        }
      }
    }
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) sums[i][j] = sum[i][j];
    }
  }

  template <int m, int n, class Packed>
  OCTILE_INLINE static void store_tile(const SumsRun& p, std::int64_t i, std::int64_t j,
                                       const std::uint32_t (&correction)[1][n]) {
    std::uint32_t sums[m][n];
    tile<m, n>(static_cast<const Packed*>(p.left) + i * p.left_stride, p.left_stride, p.right + j * p.right_stride,
               p.right_stride, p.k, sums);
    for (int r = 0; r < m; ++r) {
      for (int c = 0; c < n; ++c) {
        p.sums[(i + r) * kBlock + j + c] = static_cast<std::int32_t>(sums[r][c] - correction[0][c]);
      }
    }
  }

  template <Isa isa, int m, int n>
  OCTILE_INLINE static void columns(const SumsRun& p, std::int64_t j) {
    using Packed = PackedFor<isa>;
    std::uint32_t correction[1][n] = {};
    if constexpr (isa == Isa::avx512vnni) {
      tile<1, n>(static_cast<const Packed*>(p.zero), 0, p.right + j * p.right_stride, p.right_stride, p.k, correction);
    }
    std::int64_t i = 0;
    for (; i + m <= p.rows; i += m) store_tile<m, n, Packed>(p, i, j, correction);
    for (; i < p.rows; ++i) store_tile<1, n, Packed>(p, i, j, correction);
  }

  template <Isa isa>
  OCTILE_INLINE static void run(SumsRun p) {
    // Sums, operands and a temporary fill 32 registers, or 16.
    constexpr int n = isa >= Isa::avx512 ? 4 : 2;
    std::int64_t j = 0;
    for (; j + n <= p.cols; j += n) columns<isa, 4, n>(p, j);
    for (; j < p.cols; ++j) columns<isa, 4, 1>(p, j);
  }
};

// totals = fma(Real(sums), scale, totals), for one group of (rows, cols), whose scales are those of its columns or
// rows.
template <bool of_rows>
struct FoldGroup {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const std::int32_t* __restrict sums, const Real* __restrict scale, std::int64_t rows,
                                std::int64_t cols, Real* __restrict totals) {
    for (std::int64_t i = 0; i < rows; ++i, sums += kBlock, totals += kBlock) {
      const Real of_row = of_rows ? scale[i] : Real{0};
      for (std::int64_t j = 0; j < cols; ++j) {
        totals[j] = std::fma(static_cast<Real>(sums[j]), of_rows ? of_row : scale[j], totals[j]);
      }
    }
  }
};

template <class Real>
void multiply_block(const GemmView& p, SumsRun run, std::int64_t group, Finish<Real, kBlock, kBlock>& finish) {
  alignas(64) std::int32_t sums[kBlock * kBlock];
  run.sums = sums;
  if (group == 0) {
    for (std::int64_t j = 0; j < run.cols; ++j)
      finish.right_scale[j] = load<Real>(p.right_scale, finish.cols.first + j);
    multiversion<Sums>(run);
    constexpr std::int32_t kNoCorrection[kBlock] = {};
    return finish.write(sums, kBlock, kNoCorrection);
  }
  alignas(64) Real totals[kBlock * kBlock] = {};
  Real scale[kBlock];
  const bool of_rows = p.block > 0 && !p.right_has_blocks;
  const ConstTensor& scales = p.block > 0 ? p.block_scale : p.right_scale;
  const Range segments = of_rows ? finish.rows : finish.cols;
  for (std::int64_t g = 0; g < ceil_div(p.k, group); ++g) {
    run.k = std::min(group, p.k - g * group);
    for (std::int64_t s = 0; s < segments.count; ++s) scale[s] = load<Real>(scales, segments.first + s, g);
    multiversion<Sums>(run);
    const auto fold = [&](auto kernel) {
      multiversion<decltype(kernel)>(static_cast<const std::int32_t*>(sums), static_cast<const Real*>(scale), run.rows,
                                     run.cols, static_cast<Real*>(totals));
    };
    of_rows ? fold(FoldGroup<true>()) : fold(FoldGroup<false>());
    run.left = static_cast<const std::uint8_t*>(run.left) + group * static_cast<std::int64_t>(packed_size());
    run.right += group;
  }
  finish.write(totals, kBlock, nullptr);
}

// Workspace: packed rows of left, each on a cache line, one of zeros, then right transposed, where it has to be.
template <class Real>
void multiply(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  const GemmView p(problem, operands);
  const std::int64_t stride = row_stride(p.k);
  const auto size = static_cast<std::int64_t>(packed_size());
  const bool transposes = p.right.strides[1] != 1;
  auto* const zero = static_cast<std::uint8_t*>(launch.workspace.data);
  std::uint8_t* transposed = zero + stride * static_cast<std::int64_t>(sizeof(std::int16_t));
  std::uint8_t* packed = transposed + (transposes ? p.cols * stride : 0);
  const double k = static_cast<double>(p.k);
  const double products = static_cast<double>(p.rows) * static_cast<double>(p.cols) * k;
  const int threads = useful_threads(problem.threads, products / 64);

  std::fill_n(zero, stride * size, packed_size() == 1 ? std::uint8_t{0x80} : std::uint8_t{0});
  if (transposes) {
    parallel_for(threads, ceil_div(p.cols, kBlock), [&](std::int64_t part) {
      const std::int64_t j = part * kBlock;
      transpose_right(p, j, std::min(kBlock, p.cols - j), {transposed + j * stride, stride});
    });
  }
  const ConstBytes right = transposes ? ConstBytes{transposed, stride} : ConstBytes{bytes(p.right), p.right.strides[0]};
  for (std::int64_t first = 0; first < p.rows; first += kPackedRows) {
    const std::int64_t rows = std::min(kPackedRows, p.rows - first);
    const std::int64_t row_blocks = ceil_div(rows, kBlock);
    parallel_for(threads, row_blocks, [&](std::int64_t part) {
      const std::int64_t i = part * kBlock;
      pack_left(p, first + i, std::min(kBlock, rows - i), {packed + i * stride * size, stride * size});
    });
    parallel_for(threads, row_blocks * ceil_div(p.cols, kBlock), [&](std::int64_t part) {
      const std::int64_t i = part % row_blocks * kBlock;
      const std::int64_t j = part / row_blocks * kBlock;
      const SumsRun run{packed + i * stride * size,
                        stride,
                        zero,
                        reinterpret_cast<const std::int8_t*>(right.data) + j * right.stride,
                        right.stride,
                        std::min(kBlock, rows - i),
                        std::min(kBlock, p.cols - j),
                        p.k,
                        nullptr};
      Finish<Real, kBlock, kBlock> finish(p, {first + i, run.rows}, {j, run.cols});
      multiply_block(p, run, problem.grouped() ? problem.b.group : problem.a_block, finish);
    });
  }
}

std::string supports(const GemmProblem& p) { return p.b_packed ? "takes the weight as it is, not packed" : ""; }

Cost cost(const GemmProblem& p) {
  const double threads = thread_count(p.threads);
  // Each block ends with sums across vectors, which a block of 128 terms hardly pays for.
  const double rate = p.a_block > 0 ? with_isa(40e9, 105e9, 120e9, 210e9) : with_isa(75e9, 140e9, 265e9, 490e9);
  Cost cost = gemm_cost(p, rate * threads, kBytesPerSecond * threads);
  if (p.b_major == Major::outer) cost.seconds += weight_bytes(p) / (0.5e9 * threads);  // transposed first
  return cost;
}

std::size_t workspace(const GemmProblem& p) {
  const GemmExtent extent(p);
  const bool transposes = (p.y_major == Major::outer ? p.a_major : p.b_major) == Major::outer;
  const std::int64_t rows = 2 * (std::min(kPackedRows, extent.rows) + 1) + (transposes ? extent.cols : 0);
  return static_cast<std::size_t>(row_stride(p.k) * rows);
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_portable = {
    .name = "w8a8_gemm_portable",
    .task = {Operation::gemm, kW8A8},
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = either<multiply<float>, multiply<double>>,
};

extern constinit const GemmKernel w8a8_blocked_gemm_portable = {
    .name = "w8a8_blocked_gemm_portable",
    .task = {Operation::blocked_gemm},
    .cost = cost,
    .workspace = workspace,
    .launch = either<multiply<float>, multiply<double>>,
};

}  // namespace octile::cpu
