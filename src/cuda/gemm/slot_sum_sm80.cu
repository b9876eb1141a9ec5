// The sum over the slots of each token t, in their order, from acc = 0:
//
//   acc = fma(router_weight[t, s], z[place[t, s], j], acc) where place[t, s] is a row of some expert; y[t, j] = acc
//
// A block has kColumns columns of a token. z is read once, the rows of several slots at a time: they are far apart.
#include <cstdint>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "slot_sum_sm80";
constexpr int kThreads = 128;
constexpr int kEach = 4;  // neighbouring columns of a thread
constexpr int kColumns = kThreads * kEach;
constexpr int kBatch = 8;  // slots whose rows are under way together
constexpr int kMaxBlocks = 65535;

template <class Real>
struct Sum {
  const Real* z;
  std::int64_t z_stride;
  const std::int32_t* offsets;  // the first and the last one
  std::int64_t last_offset;
  const std::int32_t* place;
  std::int64_t place_stride;
  const Real* weight;
  std::int64_t weight_stride;
  int tokens, slots, cols;
  void* y;
  std::int64_t y_stride;
  bool y_aligned;  // to kEach elements
};

template <class Y>
__global__ void __launch_bounds__(kThreads) slot_sum_kernel(const __grid_constant__ Sum<RealOf<Y>> p) {
  using Real = RealOf<Y>;
  wait_for_previous();
  let_next_start();
  const int col = static_cast<int>(blockIdx.x) * kColumns + static_cast<int>(threadIdx.x) * kEach;
  if (col >= p.cols) return;
  const int begin = __ldcg(p.offsets), end = __ldcg(p.offsets + p.last_offset);
  // z's columns are padded to a multiple of kEach.
  for (int t = static_cast<int>(blockIdx.y); t < p.tokens; t += static_cast<int>(gridDim.y)) {
    Real sum[kEach] = {};
    for (int first = 0; first < p.slots; first += kBatch) {
      int row[kBatch];
      Real weight[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool slot = first + i < p.slots;
        row[i] = slot ? __ldcg(p.place + t * p.place_stride + first + i) : -1;
        weight[i] = slot ? __ldcg(p.weight + t * p.weight_stride + first + i) : Real(0);
      }
      struct alignas(16) Columns {
        Real at[kEach];
      } z[kBatch];
      constexpr int kUnits = sizeof(Columns) / 16;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (row[i] < begin || row[i] >= end) row[i] = -1;
        if (row[i] < 0) continue;
        const auto* const from = reinterpret_cast<const uint4*>(p.z + row[i] * p.z_stride + col);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) reinterpret_cast<uint4*>(z + i)[u] = __ldcg(from + u);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (row[i] < 0) continue;
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[j] = fma(weight[i], z[i].at[j], sum[j]);
      }
    }
    struct alignas(sizeof(Y) * kEach >= 16 ? 16 : 8) Values {
      Y at[kEach];
    } values;
#pragma unroll
    for (int j = 0; j < kEach; ++j) values.at[j] = narrow<Y>(sum[j]);
    Y* const to = static_cast<Y*>(p.y) + t * p.y_stride + col;
    if (p.y_aligned && col + kEach <= p.cols) {
      *reinterpret_cast<Values*>(to) = values;
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (col + j < p.cols) to[j] = values.at[j];
      }
    }
  }
}

}  // namespace

void prepare_sum_slots(DType y) {
  with_float_type(y, []<class Y>(Y) { prepare(kName, slot_sum_kernel<Y>); });
}

void sum_slots(const SlotOperands& o, Stream stream) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  with_float_type(o.y.dtype, [&]<class Y>(Y) {
    using Real = RealOf<Y>;
    Sum<Real> p = {};
    p.z = static_cast<const Real*>(o.z.data);
    p.z_stride = o.z.strides[0];
    p.offsets = static_cast<const std::int32_t*>(o.offsets.data);
    p.last_offset = (o.offsets.rows() - 1) * o.offsets.strides[0];
    p.place = static_cast<const std::int32_t*>(o.place.data);
    p.place_stride = o.place.strides[0];
    p.weight = static_cast<const Real*>(o.router_weight.data);
    p.weight_stride = o.router_weight.strides[0];
    p.tokens = static_cast<int>(o.y.rows());
    p.slots = static_cast<int>(o.place.cols());
    p.cols = static_cast<int>(o.y.cols());
    p.y = o.y.data;
    p.y_stride = o.y.strides[0];
    constexpr std::int64_t kSize = sizeof(Y);
    p.y_aligned = aligned_rows(p.y, p.y_stride * kSize, kSize * kEach >= 16 ? 16 : 8);
    const auto rows = static_cast<unsigned>(p.tokens < kMaxBlocks ? p.tokens : kMaxBlocks);
    enqueue(kName, slot_sum_kernel<Y>, LaunchShape{{blocks_for(p.cols, kColumns), rows}, kThreads}, stream, p);
  });
}

}  // namespace octile::cuda
