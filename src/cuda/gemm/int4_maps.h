// A weight of 4 bits as the copy engine's tensor maps take it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/int4_weight.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

// Every second row from `first` on, as bytes, and one at least: of the row that is not there nothing comes.
inline ConstTensor every_second_row(const NibbleWeight& w, int first, Device device) {
  ConstTensor half;
  half.data = w.values + (w.rows > first ? first * w.pitch : 0);
  half.dtype = DType::u8;
  half.device = device;
  half.rank = 2;
  half.shape[0] = std::max((w.rows - first + 1) / 2, 1);
  half.shape[1] = (w.terms + 1) / 2;
  half.strides[0] = 2 * w.pitch;
  half.strides[1] = 1;
  return half;
}

inline bool mappable_nibbles(const ConstTensor& b) {
  const auto pitch = static_cast<std::uintptr_t>(b.strides[0] / 2);
  return pitch > 0 && (reinterpret_cast<std::uintptr_t>(b.data) | pitch) % kBulkAlignment == 0;
}

// A packed weight, a row for each panel, in words: eight terms of a channel.
inline ConstTensor panels(const NibbleWeight& w, Device device) {
  ConstTensor words;
  words.data = w.values;
  words.dtype = DType::f32;
  words.device = device;
  words.rank = 2;
  words.shape[0] = (w.rows + 15) / 16;
  words.shape[1] = words.strides[0] = w.pitch / 4;
  words.strides[1] = 1;
  return words;
}

}  // namespace octile::cuda
