// Puzzles 13 to 18: a linear layer of int8 operands, forward and backward.
#pragma once

#include <algorithm>
#include <limits>

#include "puzzles/products.h"

namespace octile::tile::puzzles {

// The scale of integers -127 .. 127 for values whose largest magnitude is `max_abs`, and the integer of one of them, as
// the library has them: a NaN or an infinity makes the scale NaN and the integers 0.
float scale_of(float max_abs);
inline int level_of(float value, float scale) {
  const float level = std::nearbyint(value / scale);
  return std::isnan(level) ? 0 : static_cast<int>(std::min(std::max(level, -127.0f), 127.0f));
}
inline float larger_magnitude(float max_abs, float value) {
  const float magnitude = std::fabs(value);
  return std::isnan(max_abs) || magnitude <= max_abs ? max_abs : magnitude;  // a NaN wins
}

// The result rounded to f16; `bound` is that of the result before.
inline Expected in_half(double exact, double bound) {
  return {exact, bound + kHalfUnit * (std::fabs(exact) + bound) + kMinHalf};
}

struct QuantizeGlobal {
  static Facts facts();
  static void run(auto& t, const auto& find_maximum, const auto& quantize) {
    const auto rows = t.size(0), columns = t.size(1), n = rows * columns;
    auto x = input<f16>(t, "x", {rows, columns}, [&](auto i) {  // an odd line, of a kind that depends on rows
      return next_value<f16>(t, {2 * rows + 1, i, n});
    });
    auto q = output<s8>(t, "q", {rows, columns});
    auto scale = output(t, "scale", {1});
    auto max_abs = between_launches(t, "max_abs", 0.0f);
    t.launch({larger(cdiv(n, 256), 1)}, find_maximum, x, q, scale, max_abs, n, c<256>);
    t.launch({larger(cdiv(n, 256), 1)}, quantize, x, q, scale, max_abs, n, c<256>);
    if constexpr (has_values<decltype(t)>) {
      float largest = 0;
      for (int i = 0; i < n; ++i) largest = larger_magnitude(largest, widen(x[i]));
      const float s = scale_of(largest);
      expect(t, scale, [&](std::int64_t) { return Expected{s, 0}; });
      expect(t, q, [&](std::int64_t i) { return Expected{static_cast<double>(level_of(widen(x[i]), s)), 0}; });
    }
  }
};

struct QuantizeRows {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto rows = t.size(0), columns = t.size(1);
    auto x = input<f16>(t, "x", {rows, columns});
    auto q = output<s8>(t, "q", {rows, columns});
    auto scale = output(t, "scale", {rows});
    t.launch({cdiv(rows, 4)}, kernel, x, q, scale, rows, columns, c<4>, c<64>);
    if constexpr (has_values<decltype(t)>) {
      std::vector<float> scales;
      for (int i = 0; i < rows; ++i) {
        float largest = 0;
        for (int j = 0; j < columns; ++j) largest = larger_magnitude(largest, widen(x[i * columns + j]));
        scales.push_back(scale_of(largest));
      }
      const auto s = [&](std::int64_t row) { return scales[static_cast<std::size_t>(row)]; };
      expect(t, scale, [&](std::int64_t i) { return Expected{s(i), 0}; });
      expect(t, q, [&](std::int64_t i) {
        return Expected{static_cast<double>(level_of(widen(x[i]), s(i / columns))), 0};
      });
    }
  }
};

struct Forward {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto batch = t.size(0), in = t.size(1), out = t.size(2);
    const bool per_channel = t.blocks() != 1, with_bias = t.blocks() != 2;
    auto x_q = input<s8>(t, "x_q", {batch, in}), w_q = input<s8>(t, "w_q", {in, out});
    auto x_scale = scales(t, "x_scale", {1}), w_scale = scales(t, "w_scale", {per_channel ? out : 1});
    auto bias = input<f16>(t, "bias", {with_bias ? out : 0});
    auto y = output<f16>(t, "y", {batch, out});
    const auto go = [&](auto channels, auto biased) {
      t.launch({cdiv(batch, 16), cdiv(out, 16)}, kernel, x_q, x_scale, w_q, w_scale, bias, y, batch, in, out, channels,
               biased, c<16>, c<16>, c<32>);
    };
    t.blocks() == 0 ? go(c<1>, c<1>) : t.blocks() == 1 ? go(c<0>, c<1>) : go(c<1>, c<0>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, y, [&](std::int64_t i) {
        const std::int64_t row = i / out, j = i % out;
        std::int64_t sum = 0;
        for (std::int64_t k = 0; k < in; ++k) sum += std::int64_t{x_q[row * in + k]} * w_q[k * out + j];
        const double product = static_cast<double>(sum) * x_scale[0] * w_scale[per_channel ? j : 0];
        const double exact = product + (with_bias ? as_double(bias[j]) : 0.0);
        // The product may be rounded to f16 before the bias is added, as the formula of the reference interface has it.
        const double bound = (4 * kUnit + kHalfUnit) * std::fabs(product) + kMinHalf;
        return in_half(exact, bound);
      });
    }
  }
};

struct BackwardDx {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto batch = t.size(0), in = t.size(1), out = t.size(2);
    const bool per_channel = t.blocks() != 1;
    auto dy = input<f16>(t, "dy", {batch, out});
    auto w_q = input<s8>(t, "w_q", {in, out});
    auto w_scale = scales(t, "w_scale", {per_channel ? out : 1});
    auto dx = output<f16>(t, "dx", {batch, in});
    const auto go = [&](auto channels) {
      t.launch({cdiv(batch, 16), cdiv(in, 16)}, kernel, dy, w_q, w_scale, dx, batch, in, out, channels, c<16>, c<16>,
               c<32>);
    };
    per_channel ? go(c<1>) : go(c<0>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, dx, [&](std::int64_t i) {
        SumOfTerms sum(1);
        for (std::int64_t n = 0; n < out; ++n) {
          const double w = static_cast<double>(w_q[i % in * out + n]) * w_scale[per_channel ? n : 0];
          sum.add(as_double(dy[i / in * out + n]) * w);
        }
        return in_half(sum.sum(), sum.bound());
      });
    }
  }
};

struct BackwardDw {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto batch = t.size(0), in = t.size(1), out = t.size(2);
    auto x_q = input<s8>(t, "x_q", {batch, in});
    auto x_scale = scales(t, "x_scale", {1});
    auto dy = input<f16>(t, "dy", {batch, out});
    auto dw = output<f16>(t, "dw", {in, out});
    t.launch({cdiv(in, 16), cdiv(out, 16)}, kernel, x_q, x_scale, dy, dw, batch, in, out, c<16>, c<16>, c<32>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, dw, [&](std::int64_t i) {
        SumOfTerms sum(1);
        for (std::int64_t m = 0; m < batch; ++m) {
          sum.add(static_cast<double>(x_q[m * in + i / out]) * x_scale[0] * as_double(dy[m * out + i % out]));
        }
        return in_half(sum.sum(), sum.bound());
      });
    }
  }
};

struct BackwardDb {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto batch = t.size(0), out = t.size(1);
    auto dy = input<f16>(t, "dy", {batch, out});
    auto db = output<f16>(t, "db", {out});
    t.launch({cdiv(out, 64)}, kernel, dy, db, batch, out, c<64>, c<16>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, db, [&](std::int64_t i) {
        SumOfTerms sum;
        for (std::int64_t m = 0; m < batch; ++m) sum.add(as_double(dy[m * out + i]));
        return in_half(sum.sum(), sum.bound());
      });
    }
  }
};

}  // namespace octile::tile::puzzles
