// Puzzles 10 to 12: the kernels that solve them, and wrong ones. A kernel named SomethingBut is the solution with one
// mistake: compiled once, it is several wrong kernels. A comment on the line to blame names them.
#pragma once

#include "puzzles/mistake.h"

namespace octile::tile::puzzles::products {

// ---- 10 ----

struct Convolution {  // a part of an image row at a time, of b0 images: each tap is one shifted load
  TILE_KERNEL void operator()(auto& t, auto x, auto k, auto z, int n0, int h, int w, auto kh, auto kw, auto b0,
                              auto b1) const {
    const auto image = col(t.program_id(0) * b0 + t.arange(b0));
    for (int row : range(h)) {
      for (int first : range(0, w, b1)) {
        const auto column = t.arange(b1) + first;
        auto total = t.full(b0, b1, 0.0f);
        for (int oj : range(minimum_of(kh, h - row))) {
          for (int ok : range(kw)) {
            const auto in = (image < n0) & (column + ok < w);
            const auto v = t.load(x + image * (h * w) + (column + ((row + oj) * w + ok)), in, 0.0f);
            total += t.load(k + (oj * kw + ok)) * v;
          }
        }
        t.store(z + image * (h * w) + (column + row * w), total, (image < n0) & (column < w));
      }
    }
  }
  TILE_FUNCTION static int minimum_of(int a, int b) { return a < b ? a : b; }
};

// A pixel at a time, as a sum over the taps: another solution, and two wrong kernels.
struct ConvolutionByPixel {
  enum Mistake { none, images_without_mask, wraps_around } mistake = none;

  TILE_KERNEL void operator()(auto& t, auto x, auto k, auto z, int n0, int h, int w, auto kh, auto kw, auto b0,
                              auto) const {
    const auto image = col(col(t.program_id(0) * b0 + t.arange(b0)));
    const auto oj = col(t.arange(kh));
    const auto ok = t.arange(kw);
    const int images = mistake == images_without_mask ? kNoEnd : n0, width = mistake == wraps_around ? kNoEnd : w;
    const auto taps = t.load(k + oj * kw + ok);
    for (int pixel : range(h * w)) {
      const auto at = oj * w + ok + pixel;
      const auto in = (image < images) & (at < h * w) & (ok + pixel % w < width);
      const auto v = t.load(x + image * (h * w) + at, in, 0.0f);                    // wrong: ImagesWithoutMask
      t.store(z + image * (h * w) + pixel, sum(sum(taps * v), kRows), image < n0);  // wrong: WrapsAround
    }
  }
};

struct ConvolutionBut {
  enum Mistake { at_most_24_columns, into_the_next_image, taps_transposed } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto k, auto z, int n0, int h, int w, auto kh, auto kw, auto b0,
                              auto b1) const {
    const auto image = col(t.program_id(0) * b0 + t.arange(b0));
    for (int row : range(h)) {
      for (int first : range(0, mistake == at_most_24_columns && w > 24 ? 24 : w, b1)) {
        const auto column = t.arange(b1) + first;
        auto total = t.full(b0, b1, 0.0f);
        for (int oj : range(kh)) {
          for (int ok : range(kw)) {
            const auto at = image * (h * w) + (column + ((row + oj) * w + ok));
            const int end = mistake == into_the_next_image || row + oj < h ? n0 * h * w : 0;
            const auto v = t.load(x + at, (at < end) & (column + ok < w), 0.0f);
            total += t.load(k + (mistake == taps_transposed ? ok * kh + oj : oj * kw + ok)) * v;
          }
        }
        t.store(z + image * (h * w) + (column + row * w), total, (image < n0) & (column < w));  // wrong: ConvolutionBut
      }
    }
  }
};

// ---- 11 ----

struct BatchedMatmul {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, int n2, int middle, auto b0, auto b1,
                              auto b2, auto b_middle) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const auto batch = col(col(t.program_id(2) * b2 + t.arange(b2)));
    auto total = t.full(b2, b0, b1, 0.0f);
    t.pipeline(
        c<3>, cdiv(middle, b_middle),
        [&](int step) {
          const auto k = t.arange(b_middle) + step * b_middle;
          const auto in_x = (batch < n2) & (i < n0) & (k < middle);
          const auto in_y = (batch < n2) & (col(k) < middle) & (j < n1);
          return fetches(t.fetch(x + batch * (n0 * middle) + i * middle + k, in_x, 0.0f),
                         t.fetch(y + batch * (middle * n1) + col(k) * n1 + j, in_y, 0.0f));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    t.store(z + batch * (n0 * n1) + i * n1 + j, total, (batch < n2) & (i < n0) & (j < n1));
  }
};

struct SquareOnly {  // n0 * n1 and middle where others belong, and a mask that is always true: right if all is square
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, int n2, int middle, auto b0, auto b1,
                              auto b2, auto b_middle) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const auto batch = col(col(t.program_id(2) * b2 + t.arange(b2)));
    const auto l = t.arange(b_middle);
    auto total = t.full(b2, b0, b1, 0.0f);
    for (int k : range(0, middle, b1)) {
      const auto in = l + k < k + b1;
      const auto a = t.load(x + batch * (n0 * n1) + i * middle + (l + k), in, 0.0f);
      const auto p = y + batch * (n0 * n1) + col(l) * n1 + (j + k * middle);
      const auto b = t.load(p, col(l) + k < k + b1, 0.0f);  // wrong: SquareOnly
      total = dot(a, b, total);
    }
    t.store(z + batch * (n0 * n1) + i * n1 + j, total, (batch < n2) & (i < n0) & (j < n1));
  }
};

struct MatmulBut {
  enum Mistake {
    whole_blocks_of_the_middle,
    tail_times_zero,
    at_most_128_terms,
    batch_before_the_columns,
    y_in_rows_of_middle,
    in_half
  } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, int n2, int middle, auto b0, auto b1,
                              auto b2, auto b_middle) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const auto batch = col(col(t.program_id(2) * b2 + t.arange(b2)));
    const auto line = mistake == batch_before_the_columns ? i * n2 + batch : batch * n0 + i;
    const int step = mistake == y_in_rows_of_middle && middle < n1 ? middle : n1;
    auto total = t.full(b2, b0, b1, 0.0f);
    const int end = mistake == whole_blocks_of_the_middle ? middle / b_middle * b_middle : middle;
    for (int k : range(0, mistake == at_most_128_terms && end > 128 ? 128 : end, b_middle)) {
      const auto l = t.arange(b_middle) + k;
      const auto p = x + line * middle + l;
      const auto in_x = (batch < n2) & (i < n0) & (l < middle);
      const auto a = mistake == tail_times_zero ? t.load(p, in_x) : t.load(p, in_x, 0.0f);
      const auto in_y = (batch < n2) & (col(l) < middle) & (j < n1);
      total = dot(a, t.load(y + batch * (middle * n1) + col(l) * step + j, in_y, 0.0f), total);
      if (mistake == in_half) total = cast<f32>(cast<f16>(total));
    }
    const auto in = (batch < n2) & (i < n0) & (j < n1);
    const auto p = z + batch * (n0 * n1) + i * n1 + j;
    t.store(p, total, in);  // wrong: WholeBlocksOfTheMiddle, TailTimesZero, MatmulBut
  }
};

// ---- 12 ----

struct QuantizedMatmul {
  TILE_KERNEL void operator()(auto& t, auto scale, auto offset, auto weight, auto activation, auto z, int n0, int n1,
                              int middle, auto b0, auto b1, auto b_middle) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const auto group = t.arange(b_middle / c<8>);
    const auto nibble = t.arange(c<8>) * 4;
    const int groups = middle / 8;
    auto total = t.full(b0, b1, 0.0f);
    for (int k : range(0, middle, b_middle)) {
      // b_middle weights are eight groups, whose eight shifts are one word.
      const auto in = (i < n0) & (group + k / 8 < groups);
      const auto words = t.load(weight + i * groups + (group + k / 8), in, 0);
      const auto scales = t.load(scale + i * groups + (group + k / 8), in, 0.0f);
      const auto shifts = (t.load(offset + i * cdiv(groups, 8) + k / 64, i < n0, 0) >> nibble) & 15;
      const auto levels = ((col(words) >> nibble) & 15) - col(shifts);
      const auto a = reshape(col(scales) * levels, b0, b_middle);
      const auto l = col(t.arange(b_middle) + k);
      total = dot(a, t.load(activation + l * n1 + j, (l < middle) & (j < n1), 0.0f), total);
    }
    t.store(z + i * n1 + j, total, (i < n0) & (j < n1));
  }
};

struct QuantizedBut {
  enum Mistake {
    without_shift_and_scale,
    scales_without_mask,
    at_most_256_terms,
    signed_weights,
    shifts_of_the_first_word,
    scaled_before_the_shift
  } mistake;

  TILE_KERNEL void operator()(auto& t, auto scale, auto offset, auto weight, auto activation, auto z, int n0, int n1,
                              int middle, auto b0, auto b1, auto b_middle) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const auto group = t.arange(b_middle / c<8>);
    const auto nibble = t.arange(c<8>) * 4;
    const int groups = middle / 8, sign = mistake == signed_weights ? 8 : 0;
    const int rows = mistake == scales_without_mask ? kNoEnd : n0,
              end = mistake == scales_without_mask ? kNoEnd : groups;
    auto total = t.full(b0, b1, 0.0f);
    for (int k : range(0, mistake == at_most_256_terms && middle > 256 ? 256 : middle, b_middle)) {
      const auto in = (i < n0) & (group + k / 8 < groups);
      const auto words = t.load(weight + i * groups + (group + k / 8), in, 0);
      const auto in_scales = (i < rows) & (group + k / 8 < end);
      const auto scales = t.load(scale + i * groups + (group + k / 8), in_scales, 0.0f);  // wrong: ScalesWithoutMask
      const int word = mistake == shifts_of_the_first_word ? 0 : k / 64;
      const auto shifts = (t.load(offset + i * cdiv(groups, 8) + word, i < n0, 0) >> nibble) & 15;
      const auto levels = (((col(words) >> nibble) & 15) ^ sign) - sign;
      auto a = reshape(col(scales) * (levels - col(shifts)), b0, b_middle);
      if (mistake == scaled_before_the_shift) a = reshape(col(scales) * levels - col(shifts), b0, b_middle);
      if (mistake == without_shift_and_scale) a = reshape(cast<f32>(levels), b0, b_middle);
      const auto l = col(t.arange(b_middle) + k);
      total = dot(a, t.load(activation + l * n1 + j, (l < middle) & (j < n1), 0.0f), total);
    }
    t.store(z + i * n1 + j, total, (i < n0) & (j < n1));  // wrong: WithoutShiftAndScale, QuantizedBut
  }
};

}  // namespace octile::tile::puzzles::products
