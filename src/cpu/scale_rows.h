// The walk of the four kernels that are given their scales: elementwise, a chunk of a row at a time, with one scale and
// one zero point per element.
#pragma once

#include "cpu/multiversion.h"
#include "cpu/rows.h"
#include "kernels.h"

namespace octile::cpu {

inline constexpr std::int64_t kRowChunk = 512;

template <class T>
void fill_scales(const Scales& scales, std::int64_t r, std::int64_t c, std::int64_t n, T* out) {
  const auto* data = static_cast<const T*>(scales.data);
  if (!data) {
    std::fill_n(out, n, T{});
  } else if (scales.col_stride == 0) {
    std::fill_n(out, n, data[r * scales.row_stride]);
  } else if (scales.group == 1 && scales.col_stride == 1) {
    std::copy_n(data + r * scales.row_stride + c, n, out);
  } else {
    for (std::int64_t i = 0; i < n;) {
      const std::int64_t end = std::min(n, ((c + i) / scales.group + 1) * scales.group - c);
      std::fill(out + i, out + end, data[scales.index(r, c + i)]);
      i = end;
    }
  }
}

// Calls body(row, col, n, s, z) for pieces of at most kRowChunk elements.
template <class Real, class Body>
void for_each_scaled_piece(const QuantizeProblem& p, const QuantizeOperands& o, const ConstTensor& shape,
                           const Body& body) {
  const std::int64_t rows = shape.rows();
  const std::int64_t cols = shape.cols();
  const std::int64_t block_rows = std::clamp<std::int64_t>(32768 / std::max<std::int64_t>(cols, 1), 1, 256);
  const int threads = useful_threads(p.threads, static_cast<double>(rows) * static_cast<double>(cols));
  const bool same_in_all_rows = o.given_scale.row_stride == 0 && o.given_zero_point.row_stride == 0;
  parallel_for(threads, ceil_div(rows, block_rows), [&](std::int64_t part) {
    alignas(64) Real s[kRowChunk];
    alignas(64) std::int32_t z[kRowChunk];
    const std::int64_t first = part * block_rows;
    for (std::int64_t c = 0; c < cols; c += kRowChunk) {
      const std::int64_t n = std::min(kRowChunk, cols - c);
      for (std::int64_t r = first; r < std::min(rows, first + block_rows); ++r) {
        if (r == first || !same_in_all_rows) {
          fill_scales(o.given_scale, r, c, n, s);
          fill_scales(o.given_zero_point, r, c, n, z);
        }
        body(r, c, n, s, z);
      }
    }
  });
}

}  // namespace octile::cpu
