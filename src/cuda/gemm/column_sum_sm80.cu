// y[0, j] = sum_i a[i, j]: a (m, n) of f16, bf16, f32 or f64, summed in f32 (f64 in f64), y of a's type.
//
//   sum_rows    a block takes some vectors of 16 bytes side by side, or single elements where rows of a are not
//               aligned, and every `parts`-th bunch of rows; its lines add up in shared memory, to partial (parts, n)
//               in the workspace, or to y
//
// Where there is more than one part, the same kernel sums the parts. The order of all additions follows from the
// shapes.
#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "column_sum_sm80";
constexpr int kThreads = 256;
constexpr int kBlocksEach = 4;  // of an SM
constexpr std::int64_t kMaxParts = 512;

// Where a thread takes n elements of a row: threads side by side, rows at a time, loads of a thread under way together.
template <int n>
constexpr int kLanes = n == 1 ? 64 : 16;
template <int n>
constexpr int kLines = kThreads / kLanes<n>;
template <int n>
constexpr int kAhead = n == 1 ? 16 : 4;

template <class T, class Out>
struct Columns {
  const T* a;
  std::int64_t stride;
  std::int64_t rows, cols;
  std::int64_t parts;
  RealOf<T>* partial;  // (parts, cols)
  Out* y;
  std::int64_t y_stride;
};

// a is read once, and evicted from L2 first: 45 us instead of 52 at 8192 x 8192 f16 with an L2 full of other kernels'
// data.
template <class T>
__device__ Vector<T> load_once(const T* p, const Vector<T>&) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint4 v;
  asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(policy)
               : "memory");
  return *reinterpret_cast<const Vector<T>*>(&v);
}
template <class T>
__device__ T load_once(const T* p, T) {
  return __ldcg(p);
}

template <class T, int n>
__device__ void add(const Vector<T>& v, RealOf<T> (&sum)[n]) {
  RealOf<T> x[n];
  widen(v, x);
#pragma unroll
  for (int i = 0; i < n; ++i) sum[i] += x[i];
}
template <class T>
__device__ void add(T x, RealOf<T> (&sum)[1]) {
  sum[0] += widen(x);
}

// n elements of a row for each thread: those of a vector, or one. Questions about the end within the loads of the main
// loop cost a third where n is 1.
template <class T, class Out, int n>
__global__ void __launch_bounds__(kThreads, kBlocksEach) sum_rows(const __grid_constant__ Columns<T, Out> s) {
  using Real = RealOf<T>;
  __shared__ Real of_lines[kLines<n>][n * kLanes<n>];
  const int lane = static_cast<int>(threadIdx.x);
  const int line = static_cast<int>(threadIdx.y);
  const std::int64_t first = std::int64_t{blockIdx.x} * kLanes<n> * n;
  const std::int64_t c = first + lane * n;
  const std::int64_t first_row = std::int64_t{blockIdx.y} * kLines<n> + line;
  const std::int64_t step = s.parts * kLines<n>;
  let_next_start();
  wait_for_previous();

  Real sum[n] = {};
  // Vectors may reach beyond the end of a row, into what is before the next one: those sums are not written.
  const std::int64_t whole = c + n <= s.cols ? s.rows : c < s.cols && c + n <= s.stride ? s.rows - 1 : 0;
  std::int64_t r = first_row;
  const auto add_rows = [&](auto all_there) {
    const T* const p = s.a + r * s.stride + c;
    std::conditional_t<n == 1, T, Vector<T>> v[kAhead<n>] = {};
#pragma unroll
    for (int k = 0; k < kAhead<n>; ++k) {
      if (decltype(all_there)::value || r + k * step < whole) v[k] = load_once(p + k * step * s.stride, v[k]);
    }
#pragma unroll
    for (int k = 0; k < kAhead<n>; ++k) add(v[k], sum);
  };
  for (; r + (kAhead<n> - 1) * step < whole; r += kAhead<n> * step) add_rows(std::true_type());
  if (r < whole) add_rows(std::false_type());
  if (n > 1 && whole < s.rows) {
    for (r = first_row; r < s.rows; r += step) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (r >= whole && c + i < s.cols) sum[i] += widen(__ldcg(s.a + r * s.stride + c + i));
      }
    }
  }

#pragma unroll
  for (int i = 0; i < n; ++i) of_lines[line][i * kLanes<n> + lane] = sum[i];
  __syncthreads();
  for (int i = line * kLanes<n> + lane; i < kLanes<n> * n && first + i < s.cols; i += kThreads) {
    Real total = 0;
#pragma unroll
    for (int k = 0; k < kLines<n>; ++k) total += of_lines[k][i % n * kLanes<n> + i / n];
    if (s.parts == 1) {
      s.y[(first + i) * s.y_stride] = narrow<Out>(total);
    } else {
      s.partial[blockIdx.y * s.cols + first + i] = total;
    }
  }
}

// As many as keep all SMs busy, each with a few rows for every line.
template <int n>
std::int64_t parts_for(std::int64_t rows, std::int64_t cols, Device device) {
  const std::int64_t across = blocks_for(cols, kLanes<n> * n);
  const std::int64_t wanted = kBlocksEach * properties(device).sms / std::max<std::int64_t>(across, 1);
  return std::clamp<std::int64_t>(std::min(wanted, rows / (kAhead<n> * kLines<n>)), 1, kMaxParts);
}

template <class T, int n>
void launch_sum(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  using Real = RealOf<T>;
  const std::int64_t parts = parts_for<n>(o.a.rows(), o.a.cols(), p.device);
  const Columns<T, T> s = {static_cast<const T*>(o.a.data),
                           o.a.strides[0],
                           o.a.rows(),
                           o.a.cols(),
                           parts,
                           static_cast<Real*>(launch.workspace.data),
                           static_cast<T*>(o.y.data),
                           o.y.rank == 1 ? o.y.strides[0] : o.y.strides[1]};
  const dim3 grid(blocks_for(s.cols, kLanes<n> * n), static_cast<unsigned>(parts));
  enqueue(kName, sum_rows<T, T, n>, {grid, dim3(kLanes<n>, kLines<n>)}, launch.stream, s);
  if (parts == 1) return;
  const Columns<Real, T> all = {s.partial, s.cols, parts, s.cols, 1, nullptr, s.y, s.y_stride};
  enqueue(kName, sum_rows<Real, T, 1>, {dim3(blocks_for(s.cols, kLanes<1>)), dim3(kLanes<1>, kLines<1>)}, launch.stream,
          all);
}

std::string supports(const GemmProblem& p) { return reason_against(p.device, 80); }

// On an H200.
Cost cost(const GemmProblem& p) {
  const double elements = static_cast<double>(p.k) * static_cast<double>(p.n);
  const double bytes = elements * bits(p.a) / 8;
  return {elements, bytes, bytes / 4.1e12 + 4e-6};
}

std::size_t workspace(const GemmProblem& p) {
  return with_float_type(p.a, [&](auto a) {
    using T = decltype(a);
    const std::int64_t parts =
        std::max(parts_for<kVectorSize<T>>(p.k, p.n, p.device), parts_for<1>(p.k, p.n, p.device));
    return sizeof(RealOf<T>) * static_cast<std::size_t>(p.n * parts);
  });
}

void load(const GemmProblem& p) {
  with_float_type(p.a, [](auto a) {
    using T = decltype(a);
    prepare(kName, sum_rows<T, T, kVectorSize<T>>);
    prepare(kName, sum_rows<T, T, 1>);
    prepare(kName, sum_rows<RealOf<T>, T, 1>);
  });
}

void launch(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  with_float_type(p.a, [&](auto a) {
    using T = decltype(a);
    const std::int64_t pitch = o.a.strides[0] * static_cast<std::int64_t>(sizeof(T));
    aligned_rows(o.a.data, pitch, 16) ? launch_sum<T, kVectorSize<T>>(p, o, launch) : launch_sum<T, 1>(p, o, launch);
  });
}

}  // namespace

extern constinit const GemmKernel column_sum_sm80 = {
    .name = "column_sum_sm80",
    .task = {Operation::column_sum},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
