// y[i, j] = fma(Real(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k) and b (n, k) s8.
//
// Dot products along k of 4 x 4 rows at a time. The compiler turns the innermost statement into a dot-product
// instruction if its operands have the right types: s16 x s8 gives pmaddwd, u8 x s8 gives vpdpbusd. So one operand, the
// left one, is packed once per run: to s16, or, where there is VNNI, to u8 by adding 128, which is subtracted again as
// 128 * sum_c b[j, c], the product of a row of zeros packed the same way.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/access.h"
#include "cpu/support/cost.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/kernel.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kBlock = 64;         // rows of left and of right per part: (kBlock, kBlock) sums on the stack
constexpr std::int64_t kPackedRows = 2048;  // rows of left packed at a time, which bounds the workspace
constexpr std::int64_t kLine = 64;          // bytes; packed rows begin on one

template <Isa isa>
using PackedFor = std::conditional_t<isa == Isa::avx512vnni, std::uint8_t, std::int16_t>;

// Elements from one packed row to the next. An odd number of lines: rows a power of two apart share their places in the
// first-level cache.
std::int64_t packed_stride(std::int64_t k) { return (ceil_div(k, kLine) | 1) * kLine; }

std::size_t packed_size() { return isa() >= Isa::avx512vnni ? sizeof(std::uint8_t) : sizeof(std::int16_t); }

// y is written along its contiguous dimension: if that is i, then a and b exchange their parts.
struct Product {
  ConstTensor left, right;  // (rows, k), (cols, k)
  ConstTensor left_scale, right_scale;
  ConstTensor bias;
  bool bias_per_row = false;
  bool accumulate = false;
  Tensor y;  // (rows, cols), contiguous along a row
  std::int64_t rows = 0, cols = 0, k = 0;
};

Product oriented(const GemmProblem& problem, const GemmOperands& o) {
  Product p{o.a, o.b, o.a_scale, o.b_scale, o.bias, false, problem.accumulate, o.y, o.y.rows(), o.y.cols(), o.a.cols()};
  // By the problem, as the workspace is: the strides of a single column would do either way.
  if (problem.y_major == Major::contraction) return p;
  std::swap(p.left, p.right);
  std::swap(p.left_scale, p.right_scale);
  std::swap(p.rows, p.cols);
  std::swap(p.y.shape[0], p.y.shape[1]);
  std::swap(p.y.strides[0], p.y.strides[1]);
  p.bias_per_row = true;
  return p;
}

const std::uint8_t* bytes(const ConstTensor& t) { return static_cast<const std::uint8_t*>(t.data); }

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

struct Range {
  std::int64_t first, count;
};

// A block of an operand that is contiguous along its rows' numbers, into `turned` (kBlock, kBlock), contiguous along k.
void turn(const ConstTensor& t, Range rows, Range terms, std::uint8_t* turned) {
  transpose({bytes(t) + terms.first * t.strides[1] + rows.first, t.strides[1]}, {turned, kBlock}, terms.count,
            rows.count);
}

// Packs rows `first` .. of left.
void pack_left(const Product& p, std::int64_t first, std::int64_t rows, Bytes packed) {
  if (p.left.strides[1] == 1) {
    for (std::int64_t r = 0; r < rows; ++r) {
      multiversion<PackRow>(bytes(p.left) + (first + r) * p.left.strides[0], p.k,
                            static_cast<void*>(packed.data + r * packed.stride));
    }
    return;
  }
  std::uint8_t turned[kBlock * kBlock];
  for (std::int64_t c = 0; c < p.k; c += kBlock) {
    const std::int64_t terms = std::min(kBlock, p.k - c);
    turn(p.left, {first, rows}, {c, terms}, turned);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::uint8_t* out = packed.data + r * packed.stride + c * static_cast<std::int64_t>(packed_size());
      multiversion<PackRow>(static_cast<const std::uint8_t*>(turned + r * kBlock), terms, static_cast<void*>(out));
    }
  }
}

// Turns rows `first` .. of right into rows along k.
void turn_right(const Product& p, std::int64_t first, std::int64_t rows, Bytes out) {
  std::uint8_t turned[kBlock * kBlock];
  for (std::int64_t c = 0; c < p.k; c += kBlock) {
    const std::int64_t terms = std::min(kBlock, p.k - c);
    turn(p.right, {first, rows}, {c, terms}, turned);
    for (std::int64_t r = 0; r < rows; ++r)
      std::memcpy(out.data + r * out.stride + c, turned + r * kBlock, static_cast<std::size_t>(terms));
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

template <class Real>
struct FinishRun {
  const std::int32_t* sums;
  Real left_scale;
  const Real* right_scale;
  const Real* bias;  // one per column
  std::int64_t n;
  Real* y;
};

template <bool with_bias>
struct FinishRow {
  template <Isa, class Real>
  OCTILE_INLINE static void run(FinishRun<Real> p) {
    const std::int32_t* __restrict sums = p.sums;
    const Real* __restrict right_scale = p.right_scale;
    const Real* __restrict bias = p.bias;
    Real* __restrict y = p.y;
    for (std::int64_t j = 0; j < p.n; ++j) {
      const Real scale = p.left_scale * right_scale[j];
      if constexpr (with_bias) {
        y[j] = std::fma(static_cast<Real>(sums[j]), scale, bias[j]);
      } else {
        y[j] = static_cast<Real>(sums[j]) * scale;
      }
    }
  }
};

// Scales and bias of one block, and its rows of y.
template <class Real>
void finish(const Product& p, std::int64_t first_row, std::int64_t first_col, const std::int32_t* sums) {
  const std::int64_t rows = std::min(kBlock, p.rows - first_row);
  const std::int64_t cols = std::min(kBlock, p.cols - first_col);
  const bool with_bias = p.bias.present();
  Real right_scale[kBlock];
  Real bias[kBlock];
  Real buffer[kBlock];
  for (std::int64_t j = 0; j < cols; ++j) {
    right_scale[j] = p.k == 0 ? Real{0} : load<Real>(p.right_scale, first_col + j);
    if (with_bias && !p.bias_per_row) bias[j] = load<Real>(p.bias, first_col + j);
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const Real left_scale = p.k == 0 ? Real{0} : load<Real>(p.left_scale, first_row + i);
    if (with_bias && p.bias_per_row) std::fill_n(bias, cols, load<Real>(p.bias, first_row + i));
    const std::int64_t at = (first_row + i) * p.y.strides[0] + first_col;
    Real* y = p.accumulate ? buffer : narrowing_target(p.y.dtype, p.y.data, at, buffer);
    const FinishRun<Real> run{sums + i * kBlock, left_scale, right_scale, bias, cols, y};
    with_bias ? multiversion<FinishRow<true>>(run) : multiversion<FinishRow<false>>(run);
    if (p.accumulate) {
      add<Real>(p.y.data, at, cols, buffer);
    } else {
      narrow<Real>(p.y.dtype, p.y.data, at, cols, y);
    }
  }
}

// Workspace: kLine-aligned packed rows of left, one of zeros, then right turned, if it has to be.
template <class Real>
void multiply(const GemmProblem& problem, const Product& p, std::uint8_t* workspace) {
  const std::int64_t stride = packed_stride(p.k);
  const auto size = static_cast<std::int64_t>(packed_size());
  const bool must_turn = p.right.strides[1] != 1;
  std::uint8_t* zero = workspace;
  std::uint8_t* turned = zero + stride * static_cast<std::int64_t>(sizeof(std::int16_t));
  std::uint8_t* packed = turned + (must_turn ? p.cols * stride : 0);
  const double k = static_cast<double>(p.k);
  const double products = static_cast<double>(p.rows) * static_cast<double>(p.cols) * k;
  const int threads = useful_threads(problem.threads, products / 64);

  std::fill_n(zero, stride * size, packed_size() == 1 ? std::uint8_t{0x80} : std::uint8_t{0});
  if (must_turn) {
    parallel_for(threads, ceil_div(p.cols, kBlock), [&](std::int64_t part) {
      const std::int64_t j = part * kBlock;
      turn_right(p, j, std::min(kBlock, p.cols - j), {turned + j * stride, stride});
    });
  }
  const ConstBytes right = must_turn ? ConstBytes{turned, stride} : ConstBytes{bytes(p.right), p.right.strides[0]};
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
      alignas(64) std::int32_t sums[kBlock * kBlock];
      multiversion<Sums>(SumsRun{packed + i * stride * size, stride, zero,
                                 reinterpret_cast<const std::int8_t*>(right.data) + j * right.stride, right.stride,
                                 std::min(kBlock, rows - i), std::min(kBlock, p.cols - j), p.k, sums});
      finish<Real>(p, first + i, j, sums);
    });
  }
}

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  const Product product = oriented(problem, operands);
  auto* workspace = static_cast<std::uint8_t*>(launch.workspace.data);
  problem.scale == DType::f64 ? multiply<double>(problem, product, workspace)
                              : multiply<float>(problem, product, workspace);
}

std::string supports(const GemmProblem& p) {
  if (p.grouped()) return "takes one scale per channel, not groups";
  return p.b_packed ? "takes the weight as it is, not packed" : "";
}

Cost cost(const GemmProblem& p) {
  const double threads = thread_count(p.threads);
  Cost cost = gemm_cost(p, with_isa(75e9, 140e9, 265e9, 490e9) * threads, kBytesPerSecond * threads);
  if (p.b_major == Major::outer) cost.seconds += weight_bytes(p) / (0.5e9 * threads);  // transposed first
  return cost;
}

std::size_t workspace(const GemmProblem& p) {
  const bool exchanged = p.y_major == Major::outer;
  const std::int64_t stride = packed_stride(p.k);
  const std::int64_t left_rows = std::min(kPackedRows, exchanged ? p.n : p.m);
  const bool turn = (exchanged ? p.a_major : p.b_major) == Major::outer;
  const std::int64_t right_rows = turn ? (exchanged ? p.m : p.n) : 0;
  return static_cast<std::size_t>(stride * (2 * (left_rows + 1) + right_rows));
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_portable = {
    .name = "w8a8_gemm_portable",
    .task = {Operation::gemm, kW8A8},
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace octile::cpu
