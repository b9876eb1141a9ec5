#include <cudaTypedefs.h>

#include "base/message.h"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace octile::cuda {

namespace {

CUtensorMapDataType element_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

PFN_cuTensorMapEncodeTiled_v12000 encode_function(std::string_view kernel) {
  static const auto function = [&] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          kernel);
    if (result != cudaDriverEntryPointSuccess) fail(Status::cuda_error, kernel, ": the driver has no tensor maps");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

struct Encoded {
  const void* data;
  CUtensorMapDataType type;
  cuuint32_t rank;
  const cuuint64_t* sizes;
  const cuuint64_t* pitch;
  const cuuint32_t* shape;
  const cuuint32_t* steps;
  CUtensorMapSwizzle swizzle;
};

CUresult encode(std::string_view kernel, CUtensorMap& map, const Encoded& e) {
  return encode_function(kernel)(&map, e.type, e.rank, const_cast<void*>(e.data), e.sizes, e.pitch, e.shape, e.steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, e.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace

void prepare_tensor_maps(std::string_view kernel) { encode_function(kernel); }

CUtensorMap tensor_map(std::string_view kernel, const ConstTensor& t, const TmaTile& tile, const TmaStack& stack) {
  const auto element = static_cast<cuuint64_t>(bits(t.dtype) / 8);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(t.cols()), static_cast<cuuint64_t>(t.rows()),
                              static_cast<cuuint64_t>(stack.count)};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(t.strides[0]) * element, static_cast<cuuint64_t>(stack.bytes)};
  const cuuint32_t shape[] = {static_cast<cuuint32_t>(tile.cols), static_cast<cuuint32_t>(tile.rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const cuuint32_t rank = stack.count > 0 ? 3 : 2;
  const CUtensorMapSwizzle swizzle = !tile.swizzled             ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : shape[0] * element == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                     : shape[0] * element == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                : CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap map;
  const CUresult result =
      encode(kernel, map, {t.data, element_type(t.dtype), rank, sizes, pitch, shape, steps, swizzle});
  if (result != CUDA_SUCCESS) {
    fail(Status::cuda_error, kernel, ": no tensor map of ", t, ": error ", static_cast<int>(result));
  }
  return map;
}

CUtensorMap tensor_map(std::string_view kernel, const LinePanels& t, const TmaStack& stack) {
  constexpr cuuint64_t kLine = 64;
  const cuuint64_t sizes[] = {kLine, static_cast<cuuint64_t>(t.lines), static_cast<cuuint64_t>(t.panels),
                              static_cast<cuuint64_t>(stack.count)};
  const cuuint64_t pitch[] = {kLine, static_cast<cuuint64_t>(t.lines) * kLine, static_cast<cuuint64_t>(stack.bytes)};
  const cuuint32_t shape[] = {kLine, static_cast<cuuint32_t>(t.tile_lines), static_cast<cuuint32_t>(t.tile_panels), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const cuuint32_t rank = stack.count > 0 ? 4 : 3;
  CUtensorMap map;
  const CUresult result =
      encode(kernel, map,
             {t.data, CU_TENSOR_MAP_DATA_TYPE_UINT8, rank, sizes, pitch, shape, steps, CU_TENSOR_MAP_SWIZZLE_64B});
  if (result != CUDA_SUCCESS) {
    fail(Status::cuda_error, kernel, ": no tensor map of ", t.panels, " panels of ", t.lines, " lines: error ",
         static_cast<int>(result));
  }
  return map;
}

}  // namespace octile::cuda
