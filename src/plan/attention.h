// Attention of one query token per sequence over its cache of keys and values: octile_attend_one_query, once its
// arguments have been checked. There is no plan and no row of the kernel table: one function does it for all tensors.
#pragma once

#include <cstdint>

#include "octile/types.h"

namespace octile {

inline constexpr std::int64_t kMaxHeadSize = 256;

// y[b, h] = sum_p w_p * value[b, g, p] / sum_p w_p, w_p = exp(scale * query[b, h] . key[b, g, p]), g = h / group, over
// the positions p that the mask lets through; zeros if there are none. Heads of queries with the same g share keys and
// values.
struct OneQuery {
  struct Cache {  // (batch, kv_heads, positions, size), contiguous along size; strides in elements
    const void* data;
    std::int64_t batch_stride, head_stride, position_stride;
  };

  DType dtype;  // of query, key, value and y: f16, bf16 or f32
  std::int64_t batch, kv_heads, group, positions, size;
  const void* query;  // (batch, kv_heads * group, size)
  std::int64_t query_batch_stride, query_head_stride;
  Cache key, value;
  const std::uint8_t* mask;  // (batch, positions), 0 hides; null: none is hidden
  std::int64_t mask_batch_stride, mask_position_stride;
  void* y;  // (batch, kv_heads * group, size), compact
  float scale;
  int threads;  // maximum; 0: all

  bool visible(std::int64_t b, std::int64_t position) const {
    return !mask || mask[b * mask_batch_stride + position * mask_position_stride] != 0;
  }
};

namespace cpu {
void attend_one_query(const OneQuery& o);
}
namespace reference {
void attend_one_query(const OneQuery& o);  // in f64, rounded once
}

}  // namespace octile
