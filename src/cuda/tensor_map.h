// What the bulk copy engine is told of a matrix. The driver encodes it; it is found at run time, so that the library
// loads where there is no driver.
#pragma once

#include <cuda.h>  // types alone

#include <string_view>

#include "octile/tensor.h"

namespace octile::cuda {

// What the engine asks of the base and of the pitch, in bytes.
constexpr std::int64_t kBulkAlignment = 16;

// Whether the engine can address its rows.
inline bool mappable(const ConstTensor& t) {
  const std::int64_t pitch = t.strides[0] * (bits(t.dtype) / 8);
  return t.strides[1] == 1 && pitch > 0 && pitch % kBulkAlignment == 0 &&
         reinterpret_cast<std::uintptr_t>(t.data) % kBulkAlignment == 0;
}

// At select: finds the driver's function.
void prepare_tensor_maps(std::string_view kernel);

struct BulkBox {
  int rows, cols;
  bool swizzled;  // rows of 128, 64 or 32 bytes, pieces of 16 exchanged so that eight rows meet no bank twice
};

// Boxes of a mappable matrix of s8, f16, bf16 or f32; beyond it the engine reads zeros and writes nothing.
CUtensorMap tensor_map(std::string_view kernel, const ConstTensor& t, const BulkBox& box);

// Panels of lines of 64 bytes, one panel after the other, and swizzled boxes of whole lines of some panels.
struct LinePanels {
  const void* data;
  std::int64_t panels, lines;  // of a panel
  int box_panels, box_lines;
};
CUtensorMap tensor_map(std::string_view kernel, const LinePanels& t);

}  // namespace octile::cuda
