// TMA tensor maps. The driver encodes them; it is looked up at run time, so the library loads without one.
#pragma once

#include <cuda.h>  // types only

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "octile/tensor.h"

namespace octile::cuda {

// Of the base and the pitch, in bytes.
constexpr std::int64_t kTmaAlignment = 16;

// Whether TMA can address its rows.
inline bool mappable(const ConstTensor& t) {
  const std::int64_t pitch = t.strides[0] * (bits(t.dtype) / 8);
  return t.strides[1] == 1 && pitch > 0 && pitch % kTmaAlignment == 0 &&
         reinterpret_cast<std::uintptr_t>(t.data) % kTmaAlignment == 0;
}

// A matrix of contiguous rows.
inline ConstTensor matrix(const void* data, DType dtype, Device device, std::int64_t rows, std::int64_t cols,
                          std::int64_t pitch) {
  ConstTensor t = {};
  t.data = data;
  t.dtype = dtype;
  t.device = device;
  t.rank = 2;
  t.shape[0] = rows;
  t.shape[1] = cols;
  t.strides[0] = pitch;
  t.strides[1] = 1;
  return t;
}

// Every second row of a matrix of bytes, from `first` on; at least one row, of which nothing is used if it does not
// exist.
inline ConstTensor every_second_row(const ConstTensor& t, int first) {
  const std::int64_t skipped = t.rows() > first ? first * t.strides[0] : 0;
  return matrix(static_cast<const std::uint8_t*>(t.data) + skipped, t.dtype, t.device,
                std::max<std::int64_t>((t.rows() - first + 1) / 2, 1), t.cols(), 2 * t.strides[0]);
}

// At select: looks up the driver's function.
void prepare_tensor_maps(std::string_view kernel);

struct TmaTile {
  int rows, cols;
  bool swizzled;  // rows of 128, 64 or 32 bytes
};

// Matrices of one shape, this many bytes apart, a multiple of kTmaAlignment. None: a matrix alone.
struct TmaStack {
  std::int64_t count = 0;
  std::int64_t bytes = 0;
};

// Tiles of a mappable matrix of s8, f16, bf16 or f32, or of the matrices of a stack, whose number is then a third
// coordinate; `t` is the first one. Out of bounds TMA reads zeros and writes nothing.
CUtensorMap tensor_map(std::string_view kernel, const ConstTensor& t, const TmaTile& tile, const TmaStack& stack = {});

// Contiguous panels of lines of 64 bytes; swizzled tiles of whole lines of several panels. Of a stack, the number is a
// fourth coordinate.
struct LinePanels {
  const void* data;
  std::int64_t panels, lines;  // of a panel
  int tile_panels, tile_lines;
};
CUtensorMap tensor_map(std::string_view kernel, const LinePanels& t, const TmaStack& stack = {});

}  // namespace octile::cuda
