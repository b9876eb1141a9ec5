// Operands of the GEMMs with 4-bit weights: tensor maps of a and of the weight, and the weight's TMA loads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "cuda/device/warp_specialized.cuh"
#include "cuda/gemm/int4_weight.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

// Every second row from `first` on, as bytes; at least one row, of which nothing is used if it does not exist.
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
  return pitch > 0 && (reinterpret_cast<std::uintptr_t>(b.data) | pitch) % kTmaAlignment == 0;
}

// A packed weight, one row per panel, in words of eight elements of a channel.
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

// Whether TMA can read a, and b where it is not packed.
inline bool int4_mappable(const GemmProblem& problem, const GemmOperands& o) {
  return mappable(o.a) && (problem.b_packed || mappable_nibbles(o.b));
}

// One thread: a tile of the weight, `bytes` in all, from this column and row on: packed, or the even rows and then the
// odd ones.
template <bool packed>
__device__ void load_int4_tile(std::uint32_t to, int bytes, const GemmMaps& maps, int term, int row,
                               std::uint32_t full) {
  if constexpr (packed) {
    ptx::tma_load(to, maps.b, term * 2, row / 16, full);
  } else {
    ptx::tma_load(to, maps.b, term / 2, row / 2, full);
    ptx::tma_load(to + bytes / 2, maps.b_odd, term / 2, row / 2, full);
  }
}

struct Int4Tiles {
  int rows_a, rows_b, terms;
};

// All maps but y's, for which a's stands in.
inline GemmMaps int4_maps(std::string_view kernel, const GemmProblem& problem, const ConstTensor& a,
                          const NibbleWeight& w, const Int4Tiles& tile) {
  GemmMaps maps;
  maps.a = maps.y = tensor_map(kernel, a, {tile.rows_a, tile.terms, true});
  if (w.packed) {
    maps.b = maps.b_odd = tensor_map(kernel, panels(w, problem.device), {tile.rows_b / 16, tile.terms * 2, false});
    return maps;
  }
  const TmaTile half = {tile.rows_b / 2, tile.terms / 2, true};
  maps.b = tensor_map(kernel, every_second_row(w, 0, problem.device), half);
  maps.b_odd = tensor_map(kernel, every_second_row(w, 1, problem.device), half);
  return maps;
}

}  // namespace octile::cuda
