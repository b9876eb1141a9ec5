// CUTLASS behind a C interface, one tile per library:
//
//   Y[m, n] = f16( fma( f32( sum_k X[m, k] * W[n, k] ), x_scale[m] * w_scale[n], bias[n] ) )
//
// X (M, K) and W (N, K) are s8, scales f32, bias and Y (M, N) f16, all compact row-major. It is Octile's own contract,
// in the same order, so that its results can be compared bit for bit.
//
// The tile is given at compile time: TILE_M, TILE_N, TILE_K, CLUSTER_M, CLUSTER_N, COOPERATIVE (0: ping-pong) and
// SWAPPED (1: the tile's M is the layer's N, and Y^T = W * X^T is computed: for batches smaller than any tile's M).
#include <cstdint>
#include <new>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "cutlass/version.h"

namespace {

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;

constexpr bool kSwapped = SWAPPED != 0;
constexpr bool kCooperative = COOPERATIVE != 0;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

using Tile = Shape<Int<TILE_M>, Int<TILE_N>, Int<TILE_K>>;
using Cluster = Shape<Int<CLUSTER_M>, Int<CLUSTER_N>, _1>;
using LayoutY = std::conditional_t<kSwapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

using MainSchedule = std::conditional_t<kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                        cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
using EpilogueSchedule = std::conditional_t<kCooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                                            cutlass::epilogue::TmaWarpSpecialized>;

// One value per row of the tile's product, and one per column.
template <class Element>
using PerRow = fusion::Sm90ColBroadcast<0, Tile, Element, float, Stride<_1, _0, _0>>;
template <class Element>
using PerColumn = fusion::Sm90RowBroadcast<0, Tile, Element, float, Stride<_0, _1, _0>>;

using Bias = std::conditional_t<kSwapped, PerRow<cutlass::half_t>, PerColumn<cutlass::half_t>>;
using Scales =
    fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, float, float, kRound>, PerRow<float>, PerColumn<float>>;
using Epilogue = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::homogeneous_multiply_add, cutlass::half_t, float, kRound>,
                                 fusion::Sm90AccFetch, Scales, Bias>;

using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    int32_t, float, void, LayoutY, 8, cutlass::half_t, LayoutY, 8, EpilogueSchedule, Epilogue>::CollectiveOp;

using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor, 16, int8_t,
    cutlass::layout::ColumnMajor, 16, int32_t, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename CollectiveEpilogue::SharedStorage))>,
    MainSchedule>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue,
                                                    cutlass::gemm::PersistentScheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
using Raster = typename cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params::RasterOrderOptions;

struct Prepared {
  Gemm gemm;
  void* workspace = nullptr;

  ~Prepared() { cudaFree(workspace); }
};

}  // namespace

extern "C" {

struct Operands {
  int64_t m, n, k;
  const int8_t* x;
  const int8_t* w;
  const float* x_scale;
  const float* w_scale;
  const void* bias;
  void* y;
};

// What cutlass/version.h says: 40200 is 4.2.0.
int peer_version() { return CUTLASS_MAJOR * 10000 + CUTLASS_MINOR * 100 + CUTLASS_PATCH; }

// raster: 0 CUTLASS chooses, 1 along M, 2 along N. NULL: CUTLASS refuses this problem.
void* peer_create(const Operands* o, int swizzle, int raster) {
  const int rows = static_cast<int>(kSwapped ? o->n : o->m), columns = static_cast<int>(kSwapped ? o->m : o->n);
  const int depth = static_cast<int>(o->k);
  const int8_t* a = kSwapped ? o->w : o->x;
  const int8_t* b = kSwapped ? o->x : o->w;
  const float* row_scale = kSwapped ? o->w_scale : o->x_scale;
  const float* column_scale = kSwapped ? o->x_scale : o->w_scale;

  typename Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {rows, columns, depth, 1};
  arguments.mainloop.ptr_A = a;
  arguments.mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, make_shape(rows, depth, 1));
  arguments.mainloop.ptr_B = b;
  arguments.mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, make_shape(columns, depth, 1));
  arguments.epilogue.ptr_D = static_cast<cutlass::half_t*>(o->y);
  arguments.epilogue.dD = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, make_shape(rows, columns, 1));
  arguments.epilogue.thread = {{},  // the accumulator
                               {{row_scale, 0.0f, {}}, {column_scale, 0.0f, {}}, {}},
                               {static_cast<const cutlass::half_t*>(o->bias), cutlass::half_t(0), {}},
                               {}};
  arguments.scheduler.max_swizzle_size = swizzle;
  arguments.scheduler.raster_order = raster == 1 ? Raster::AlongM : raster == 2 ? Raster::AlongN : Raster::Heuristic;

  cudaGetDevice(&arguments.hw_info.device_id);
  cudaDeviceGetAttribute(&arguments.hw_info.sm_count, cudaDevAttrMultiProcessorCount, arguments.hw_info.device_id);

  if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return nullptr;
  auto* prepared = new (std::nothrow) Prepared;
  if (!prepared) return nullptr;
  const std::size_t bytes = Gemm::get_workspace_size(arguments);
  if ((bytes != 0 && cudaMalloc(&prepared->workspace, bytes) != cudaSuccess) ||
      prepared->gemm.initialize(arguments, prepared->workspace) != cutlass::Status::kSuccess) {
    delete prepared;
    return nullptr;
  }
  return prepared;
}

int peer_run(void* prepared, void* stream) {
  const auto status = static_cast<Prepared*>(prepared)->gemm.run(static_cast<cudaStream_t>(stream));
  return status == cutlass::Status::kSuccess ? 0 : 1;
}

void peer_destroy(void* prepared) { delete static_cast<Prepared*>(prepared); }
}
