// Products on the ordinary arithmetic units: a float or s8 a by a weight with a scale per group, for every type, stride
// and alignment.
//
// A block of 16 x 16 threads computes a tile of 64 x 64 elements of y, 32 terms at a time. The tiles of a and b lie in
// shared memory with their rows contiguous, and the next ones are on their way in registers. A codec says how the
// weight is read; FloatProduct and ByteProduct say what an element of a tile is and how it is multiplied.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "cuda/device/experts.cuh"
#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/output.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

constexpr int kSimtTile = 64;
constexpr int kSimtTerms = 32;  // of a step
constexpr int kSimtSide = 16;   // threads of a block, in both directions
constexpr int kSimtThreads = kSimtSide * kSimtSide;
constexpr int kSimtEach = kSimtTile / kSimtSide;  // rows and columns of a thread
constexpr int kSimtPitch = kSimtTile + 4;
constexpr int kSimtRun = kSimtTile * kSimtTerms / kSimtThreads;  // terms of one row that a thread loads
static_assert(kSimtRun == 8, "within one group, and one lane of a packed weight");

// ---- The weight (rows, terms), a scale for each of its groups. A codec has `group`, and
//   stored(j, c), offset(j, g)   the value is stored less offset
//   scale_at<Real>(j, g)

struct NibbleCodec : NibbleWeight {
  static NibbleCodec of(const GemmProblem& problem, const GemmOperands& o) { return {nibble_weight(problem, o)}; }
  __device__ void move_to(const Experts& experts, std::int64_t e) { move_to_expert(*this, experts, e); }

  __device__ int stored(std::int64_t j, int c) const { return nibble(j, c); }
  template <class Real>
  __device__ Real scale_at(std::int64_t j, int g) const {
    return __ldcg(static_cast<const Real*>(scales) + scale.at(j, g));
  }
};

// s8, as it is. A scale per channel is one for a group that is the whole row.
struct ByteCodec {
  const std::int8_t* values = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 0;
  const void* scales = nullptr;
  std::int64_t scale_row_stride = 0;
  std::int64_t scale_col_stride = 0;
  int group = 0;

  static ByteCodec of(const GemmProblem& problem, const GemmOperands& o) {
    return {static_cast<const std::int8_t*>(o.b.data),
            o.b.strides[0],
            o.b.strides[1],
            o.b_scale.data,
            o.b_scale.strides[0],
            o.b_scale.strides[1],
            static_cast<int>(problem.b.group)};
  }

  __device__ void move_to(const Experts& experts, std::int64_t e) {
    values += e * experts.b;
    scales = static_cast<const std::uint8_t*>(scales) + e * experts.b_scale;
  }
  __device__ int stored(std::int64_t j, int c) const { return __ldcg(values + j * row_stride + c * col_stride); }
  __device__ static int offset(std::int64_t, int) { return 0; }
  template <class Real>
  __device__ Real scale_at(std::int64_t j, int g) const {
    return __ldcg(static_cast<const Real*>(scales) + j * scale_row_stride + g * scale_col_stride);
  }
};

// ---- The products. Element: of a tile in shared memory, kTerms terms. read_a and read_b bring a run of one row, zeros
// for what lies outside.

template <class T, class Codec>
struct SimtOperands {
  Codec b;
  const T* a = nullptr;
  std::int64_t a_row_stride = 0;
  std::int64_t a_col_stride = 0;
  int m = 0;
  int n = 0;
  int k = 0;
  const void* bias = nullptr;  // null: none
  std::int64_t bias_stride = 0;
  void* y = nullptr;
  std::int64_t y_row_stride = 0;
  std::int64_t y_col_stride = 0;
  DType y_type = DType::f32;

  __device__ static int row_of_a(int row) { return row; }
  __device__ T load_a(std::int64_t row, std::int64_t c) const {
    return __ldcg(a + row * a_row_stride + c * a_col_stride);
  }
  template <class Y>
  __device__ RealOf<Y> bias_at(std::int64_t col) const {
    return widen(__ldcg(static_cast<const Y*>(bias) + col * bias_stride));
  }
};

// Of one expert of several: m is the end of its rows of y.
template <class T, class Codec>
struct ExpertSimtOperands : SimtOperands<T, Codec> {
  Experts experts;
  DType bias_type = DType::f32;

  __device__ void move_to(const ExpertTile& t) {
    this->m = t.end;
    this->b.move_to(experts, t.expert);
    if (this->bias) this->bias = static_cast<const std::uint8_t*>(this->bias) + t.expert * experts.bias;
  }
  __device__ int row_of_a(int row) const { return row < this->m ? experts.row_of_a(row) : 0; }
  template <class Y>
  __device__ RealOf<Y> bias_at(std::int64_t col) const {
    const std::int64_t i = col * this->bias_stride;
    if constexpr (std::is_same_v<Y, double>) {
      return __ldcg(static_cast<const double*>(this->bias) + i);
    } else {
      return load_float(this->bias, i, bias_type);
    }
  }
};

// y (m, n) = round_to_y(sum_c a[i, c] * ((q[j, c] - z[j, c / g]) * s[j, c / g]) + bias[j])
template <class T, class Codec, class Operands = SimtOperands<T, Codec>>
struct FloatProduct : Operands {
  using Element = RealOf<T>;
  using Sum = Element;
  using Total = Element;
  static constexpr int kTerms = 1;
  static constexpr bool kFolds = false;

  __device__ static Sum multiply_add(Element a, Element b, Sum sum) { return fma(a, b, sum); }

  __device__ void read_a(int row, int c, Element (&run)[kSimtRun]) const {
    const int row_of_a = this->row_of_a(row);
#pragma unroll
    for (int i = 0; i < kSimtRun; ++i) {
      run[i] = row < this->m && c + i < this->k ? widen(this->load_a(row_of_a, c + i)) : Element(0);
    }
  }
  __device__ void read_b(int row, int c, Element (&run)[kSimtRun]) const {
    const bool inside = row < this->n && c < this->k;
    const int group = inside ? c / this->b.group : 0;
    const int offset = inside ? this->b.offset(row, group) : 0;
    const Element scale = inside ? this->b.template scale_at<Element>(row, group) : Element(0);
#pragma unroll
    for (int i = 0; i < kSimtRun; ++i) {
      const bool valid = inside && c + i < this->k;
      run[i] = valid ? static_cast<Element>(this->b.stored(row, c + i) - offset) * scale : Element(0);
    }
  }
  template <class Y>
  __device__ Total finish(int, std::int64_t col, Total sum) const {
    return this->bias ? sum + this->template bias_at<Y>(col) : sum;
  }
};

// t = fma(f32(sum_{c in g} a[i, c] * (q[j, c] - z[j, g])), s[j, g], t) over the groups g in order, from t = 0
// y[i, j] = round_to_y(fma(t, a_scale[i], bias[j]))
//
// Four terms an instruction. The terms of a step lie within one group.
template <class Real, class Codec, class Operands = SimtOperands<std::int8_t, Codec>>
struct ByteProduct : Operands {
  using Element = int;
  using Sum = int;
  using Total = Real;
  static constexpr int kTerms = 4;
  static constexpr bool kFolds = true;

  RowScale<Real> a_scale;

  __device__ static Sum multiply_add(Element a, Element b, Sum sum) { return __dp4a(a, b, sum); }

  __device__ void read_a(int row, int c, int (&run)[kSimtRun / 4]) const {
    const int row_of_a = this->row_of_a(row);
    pack(run, [&](int i) { return row < this->m && c + i < this->k ? this->load_a(row_of_a, c + i) : 0; });
  }
  __device__ void read_b(int row, int c, int (&run)[kSimtRun / 4]) const {
    const bool inside = row < this->n && c < this->k;
    const int offset = inside ? this->b.offset(row, c / this->b.group) : 0;
    pack(run, [&](int i) { return inside && c + i < this->k ? this->b.stored(row, c + i) - offset : 0; });
  }
  template <class Y>
  __device__ Real finish(int row, std::int64_t col, Real total) const {
    const Real scale = a_scale[this->row_of_a(row)];
    return this->bias ? fma(total, scale, Real(this->template bias_at<Y>(col))) : total * scale;
  }

 private:
  template <class Value>
  __device__ static void pack(int (&words)[kSimtRun / 4], const Value& value) {
    words[0] = words[1] = 0;
#pragma unroll
    for (int i = 0; i < kSimtRun; ++i) words[i / 4] |= (value(i) & 255) << i % 4 * 8;
  }
};

// ---- The kernel.

template <class Product>
__device__ void store(const Product& p, int row, std::int64_t col, typename Product::Total total) {
  const auto as = [&]<class Y>(Y) {
    Y* const y = static_cast<Y*>(p.y) + std::int64_t{row} * p.y_row_stride + col * p.y_col_stride;
    *y = narrow<Y>(p.template finish<Y>(row, col, total));
  };
  if constexpr (sizeof(total) == 8) {
    as(double());
  } else if (p.y_type == DType::f16) {
    as(__half());
  } else if (p.y_type == DType::bf16) {
    as(__nv_bfloat16());
  } else {
    as(float());
  }
}

// A block's tile, from this row and column of y on.
template <class Product>
__device__ void simt_tile(const Product& p, int first_row, int first_col) {
  using Element = typename Product::Element;
  using Total = typename Product::Total;
  constexpr int kStep = kSimtTerms / Product::kTerms;  // elements
  constexpr int kRun = kSimtRun / Product::kTerms;
  __shared__ __align__(16) Element a_tile[kStep][kSimtPitch];
  __shared__ __align__(16) Element b_tile[kStep][kSimtPitch];
  const int down = static_cast<int>(threadIdx.x) / kSimtSide * kSimtEach;
  const int across = static_cast<int>(threadIdx.x) % kSimtSide * kSimtEach;
  // What a thread loads: a run of one row of each tile.
  const int line = static_cast<int>(threadIdx.x) / (kStep / kRun);
  const int place = static_cast<int>(threadIdx.x) % (kStep / kRun) * kRun;
  Element a_run[kRun];
  Element b_run[kRun];
  const auto read = [&](int term) {
    p.read_a(first_row + line, term + place * Product::kTerms, a_run);
    p.read_b(first_col + line, term + place * Product::kTerms, b_run);
  };
  typename Product::Sum sums[kSimtEach][kSimtEach] = {};
  Total totals[kSimtEach][kSimtEach] = {};

  wait_for_previous();
  let_next_start();
  read(0);
#pragma unroll 1
  for (int term = 0; term < p.k; term += kSimtTerms) {
    const int next = term + kSimtTerms;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      a_tile[place + i][line] = a_run[i];
      b_tile[place + i][line] = b_run[i];
    }
    __syncthreads();
    if (next < p.k) read(next);
#pragma unroll 8
    for (int c = 0; c < kStep; ++c) {
      Element a[kSimtEach];
      Element b[kSimtEach];
#pragma unroll
      for (int i = 0; i < kSimtEach; ++i) {
        a[i] = a_tile[c][down + i];
        b[i] = b_tile[c][across + i];
      }
#pragma unroll
      for (int i = 0; i < kSimtEach; ++i) {
#pragma unroll
        for (int j = 0; j < kSimtEach; ++j) sums[i][j] = Product::multiply_add(a[i], b[j], sums[i][j]);
      }
    }
    if constexpr (Product::kFolds) {
      if (next >= p.k || next % p.b.group == 0) {
#pragma unroll
        for (int j = 0; j < kSimtEach; ++j) {
          const int col = min(first_col + across + j, p.n - 1);
          const Total scale = p.b.template scale_at<Total>(col, term / p.b.group);
#pragma unroll
          for (int i = 0; i < kSimtEach; ++i) {
            totals[i][j] = fma(static_cast<Total>(sums[i][j]), scale, totals[i][j]);
            sums[i][j] = 0;
          }
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kSimtEach; ++i) {
#pragma unroll
    for (int j = 0; j < kSimtEach; ++j) {
      const int row = first_row + down + i;
      const int col = first_col + across + j;
      if (row < p.m && col < p.n) store(p, row, col, Product::kFolds ? totals[i][j] : sums[i][j]);
    }
  }
}

template <class Product>
constexpr int kSimtBlocks = sizeof(typename Product::Total) == 8 ? 2 : 3;  // on an SM

template <class Product>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<Product>)
    simt_gemm_kernel(const __grid_constant__ Product p) {
  const int tiles = (p.n + kSimtTile - 1) / kSimtTile;
  const int tile = static_cast<int>(blockIdx.x);
  simt_tile(p, tile / tiles * kSimtTile, tile % tiles * kSimtTile);
}

// Of experts: Product has ExpertSimtOperands.
template <class Product>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<Product>)
    simt_grouped_gemm_kernel(const __grid_constant__ Product all) {
  const int tiles = (all.n + kSimtTile - 1) / kSimtTile;
  const int tile = static_cast<int>(blockIdx.x);
  wait_for_previous();
  const ExpertTile t = find_tile<kSimtTile>(all.experts, tile / tiles);
  if (t.expert < 0) return;
  Product p = all;
  p.move_to(t);
  simt_tile(p, t.first + t.tile * kSimtTile, tile % tiles * kSimtTile);
}

// ---- The rows' host side.

inline std::int64_t simt_tiles(std::int64_t m, std::int64_t n) {
  return ceil_div(m, kSimtTile) * ceil_div(n, kSimtTile);
}

// Tiles of y; of experts as many as they can have, or as they are expected to.
inline std::int64_t simt_tiles(const GemmProblem& p, std::int64_t m) {
  return p.experts > 0 ? max_tiles(p, m, kSimtTile) * ceil_div(p.n, kSimtTile) : simt_tiles(m, p.n);
}

inline std::string simt_supports(const GemmProblem& p) {
  if (!p.grouped()) return "takes scales of groups of a row";
  if (p.b_packed && p.b.type == DType::s8) return "takes an s8 weight as it is, not packed";
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or terms";
  if (simt_tiles(p, p.m) > std::int64_t{1} << 30) return "takes at most 2^30 tiles of y";
  return reason_against(p.device, 80);
}

// On an H200.
inline Cost simt_cost(const GemmProblem& p) {
  const bool experts = p.operation == Operation::grouped_gemm;
  const double tiles = experts ? expected_tiles(p, p.m, kSimtTile) * static_cast<double>(ceil_div(p.n, kSimtTile))
                               : static_cast<double>(simt_tiles(p.m, p.n));
  const double rounds = std::ceil(tiles / (4 * properties(p.device).sms));
  const double per_second = p.a == DType::f64 ? 0.06e12 : 0.12e12;
  Cost cost = experts ? grouped_work(p) : gemm_work(p);
  cost.seconds = 5e-6 + rounds * static_cast<double>(p.k) * 4 * kSimtTile * kSimtTile * 2 / per_second;
  return cost;
}

template <class Product>
constexpr bool kOfExperts = requires(Product p) {
  p.experts;
};

template <class Product>
auto* simt_kernel() {
  if constexpr (kOfExperts<Product>) {
    return simt_grouped_gemm_kernel<Product>;
  } else {
    return simt_gemm_kernel<Product>;
  }
}

template <class Product>
void enqueue_simt(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  if (o.y.rows() == 0 || problem.n == 0) return;
  Product p;
  p.b = decltype(p.b)::of(problem, o);
  p.a = static_cast<decltype(p.a)>(o.a.data);
  p.a_row_stride = o.a.strides[0];
  p.a_col_stride = o.a.strides[1];
  if constexpr (Product::kFolds) p.a_scale = row_scale<typename Product::Total>(o.a_scale);
  p.m = static_cast<int>(o.y.rows());
  p.n = static_cast<int>(problem.n);
  p.k = static_cast<int>(problem.k);
  if (problem.bias) {
    p.bias = o.bias.data;
    p.bias_stride = o.bias.strides[0];
  }
  p.y = o.y.data;
  p.y_row_stride = o.y.strides[0];
  p.y_col_stride = o.y.strides[1];
  p.y_type = problem.y;
  if constexpr (kOfExperts<Product>) {
    if (problem.experts == 0) return;
    p.experts = experts_of(problem, o);
    p.bias_type = o.bias.dtype;
  }
  const LaunchShape shape{static_cast<unsigned>(simt_tiles(problem, o.y.rows())), kSimtThreads};
  enqueue(kernel, simt_kernel<Product>(), shape, stream, p);
}

template <class T, class Codec, bool kExperts>
using OperandsOf = std::conditional_t<kExperts, ExpertSimtOperands<T, Codec>, SimtOperands<T, Codec>>;

// Calls body.operator()<Product>() with the product of a float a, or an s8 one, in the problem's types.
template <class Codec, bool kFloat, bool kExperts, class Body>
void with_simt_product(const GemmProblem& p, const Body& body) {
  if constexpr (kFloat) {
    with_float_type(
        p.a, [&]<class T>(T) { body.template operator()<FloatProduct<T, Codec, OperandsOf<T, Codec, kExperts>>>(); });
  } else {
    using Operands = OperandsOf<std::int8_t, Codec, kExperts>;
    p.scale == DType::f64 ? body.template operator()<ByteProduct<double, Codec, Operands>>()
                          : body.template operator()<ByteProduct<float, Codec, Operands>>();
  }
}

template <class Codec, bool kFloat, const std::string_view& kName, bool kExperts>
void load_simt(const GemmProblem& p) {
  with_simt_product<Codec, kFloat, kExperts>(p, [&]<class Product>() { prepare(kName, simt_kernel<Product>()); });
}

template <class Codec, bool kFloat, const std::string_view& kName, bool kExperts>
void launch_simt(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  with_simt_product<Codec, kFloat, kExperts>(
      p, [&]<class Product>() { enqueue_simt<Product>(kName, p, o, launch.stream); });
}

// The row of a format whose weight Codec reads; kExperts: of each expert's rows.
template <class Codec, const GemmFormat& kFormat, const std::string_view& kName, bool kExperts = false>
constexpr GemmKernel simt_row() {
  return {.name = kName,
          .task = {kExperts ? Operation::grouped_gemm : Operation::gemm, kFormat},
          .device = DeviceType::cuda,
          .supports = simt_supports,
          .cost = simt_cost,
          .launch = launch_simt<Codec, kFormat.float_a, kName, kExperts>,
          .prepare = load_simt<Codec, kFormat.float_a, kName, kExperts>,
          .bound = kFormat.float_a ? Bound::sum : Bound::exact};
}

}  // namespace octile::cuda
