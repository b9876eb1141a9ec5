// Puzzles 10 to 12: a convolution and two matrix products.
#pragma once

#include "puzzles/trial.h"

namespace octile::tile::puzzles {

// A sum of products in floating point, in any order: one rounding for each term and one for each addition, and `extra`
// roundings of what goes into a term.
class SumOfTerms {
 public:
  explicit SumOfTerms(int extra = 0) : roundings_(extra) {}
  void add(double term) {
    sum_ += term;
    size_ += std::fabs(term);
    ++roundings_;
  }
  Expected expected() const { return {sum_, (roundings_ + 1) * kUnit * size_}; }
  double sum() const { return sum_; }
  double bound() const { return expected().bound; }

 private:
  double sum_ = 0, size_ = 0;
  int roundings_;
};

struct Convolution {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), h = t.size(1), w = t.size(2), kh = t.size(3), kw = t.size(4);
    auto x = input(t, "x", {n0, h, w}), k = input(t, "k", {kh, kw});
    auto z = output(t, "z", {n0, h, w});
    const auto go = [&](auto b0, auto bh, auto bw) {
      t.assume(kh == bh);
      t.assume(kw == bw);
      t.launch({cdiv(n0, b0)}, kernel, x, k, z, n0, h, w, bh, bw, b0, c<8>);
    };
    t.blocks() == 0 ? go(c<1>, c<4>, c<4>) : t.blocks() == 1 ? go(c<2>, c<4>, c<4>) : go(c<4>, c<2>, c<8>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) {
        const std::int64_t image = i / (h * w), row = i / w % h, column = i % w;
        SumOfTerms sum;
        for (std::int64_t oj = 0; oj < kh && row + oj < h; ++oj) {
          for (std::int64_t ok = 0; ok < kw && column + ok < w; ++ok) {
            sum.add(static_cast<double>(k[oj * kw + ok]) * x[(image * h + row + oj) * w + column + ok]);
          }
        }
        return sum.expected();
      });
    }
  }
};

struct BatchedMatmul {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), n1 = t.size(1), n2 = t.size(2), middle = t.size(3);
    auto x = input(t, "x", {n2, n0, middle}), y = input(t, "y", {n2, middle, n1});
    auto z = output(t, "z", {n2, n0, n1});
    const auto go = [&](auto b2) {
      t.launch({cdiv(n0, 16), cdiv(n1, 16), cdiv(n2, b2)}, kernel, x, y, z, n0, n1, n2, middle, c<16>, c<16>, b2,
               c<16>);
    };
    t.blocks() == 0 ? go(c<1>) : go(c<2>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) {
        const std::int64_t row = i / n1, batch = row / n0;
        SumOfTerms sum;
        for (std::int64_t l = 0; l < middle; ++l) {
          sum.add(static_cast<double>(x[row * middle + l]) * y[(batch * middle + l) * n1 + i % n1]);
        }
        return sum.expected();
      });
    }
  }
};

// Weights of 4 bits, eight to a word; a scale and a shift of 4 bits for each group of eight along a row.
struct QuantizedMatmul {
  static constexpr int kGroup = 8, kInAWord = 8;

  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), n1 = t.size(1), middle = t.size(2), groups = middle / kGroup;
    const auto words = cdiv(groups, kInAWord);  // of shifts
    t.assume(middle % kGroup == 0);
    auto scale = input(t, "scale", {n0, groups});
    auto offset = input<s32>(t, "offset", {n0, words}), weight = input<s32>(t, "weight", {n0, groups});
    auto activation = input(t, "activation", {middle, n1});
    auto z = output(t, "z", {n0, n1});
    t.launch({cdiv(n0, 16), cdiv(n1, 16)}, kernel, scale, offset, weight, activation, z, n0, n1, middle, c<16>, c<16>,
             c<64>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) {
        const std::int64_t row = i / n1;
        SumOfTerms sum(1);
        for (std::int64_t l = 0; l < middle; ++l) {
          const std::int64_t group = l / kGroup;
          const int shift = nibble(offset[row * words + group / kInAWord], group % kInAWord);
          const int w = nibble(weight[row * groups + l / kInAWord], l % kInAWord) - shift;
          sum.add(static_cast<double>(scale[row * groups + group]) * w * activation[l * n1 + i % n1]);
        }
        return sum.expected();
      });
    }
  }

 private:
  static int nibble(s32 word, std::int64_t i) {
    return static_cast<int>(static_cast<std::uint32_t>(word) >> (4 * i)) & 15;
  }
};

}  // namespace octile::tile::puzzles
