// Puzzles 7 to 9: long rows, a block of each at a time.
#pragma once

#include <algorithm>

#include "puzzles/trial.h"

namespace octile::tile::puzzles {

struct LongSum {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), length = t.size(1);
    auto x = input(t, "x", {n0, length});
    auto z = output(t, "z", {n0});
    const auto go = [&](auto b0) { t.launch({cdiv(n0, b0)}, kernel, x, z, n0, length, b0, c<32>); };
    t.blocks() == 0 ? go(c<1>) : go(c<2>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) {
        double sum = 0, size = 0;
        for (int j = 0; j < length; ++j) {
          sum += x[i * length + j];
          size += std::fabs(x[i * length + j]);
        }
        return Expected{sum, length * kUnit * size};
      });
    }
  }
};

struct LongSoftmax {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), length = t.size(1);
    auto x = input(t, "x", {n0, length});
    auto z = output(t, "z", {n0, length});
    const auto go = [&](auto b0) { t.launch({cdiv(n0, b0)}, kernel, x, z, n0, length, b0, c<32>); };
    t.blocks() == 0 ? go(c<1>) : go(c<2>);
    if constexpr (has_values<decltype(t)>) {
      double high = 0, low = 0, total = 0;  // of the row that i is in
      expect(t, z, [&](std::int64_t i) {
        if (i % length == 0) {
          high = low = x[i];
          for (int j = 0; j < length; ++j) {
            high = std::max<double>(high, x[i + j]);
            low = std::min<double>(low, x[i + j]);
          }
          total = 0;
          for (int j = 0; j < length; ++j) total += std::exp(x[i + j] - high);
        }
        const double exact = std::exp(x[i] - high) / total;
        return Expected{exact, kUnit * (12 * (high - low) + 5.0 * length + 10) * exact + kMinFloat};
      });
    }
  }
};

struct ScalarAttention {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), length = t.size(1);
    // Scores q k that are low; that rise for one query and fall for the next; of which those of one query are as large
    // as 300 and those of the next below 1.
    const Values values = t.values();
    const bool low = values == Values::low, rising = values == Values::rising, apart = values == Values::apart;
    auto q = input(t, "q", {n0}, [&](auto i) {
      const bool odd = i % 2 != 0;
      const float uniform = t.next_float(low || rising || apart ? Values::mixed : values, {i / n0, i, n0});
      if (low || rising) return (!odd ? 1.0f : low ? 10.0f : -1.0f) * (1.0f + uniform);
      return apart && odd ? 600.0f * (1.0f + uniform) : uniform;
    });
    auto k = input(t, "k", {length}),
         v = input(t, "v", {length}, [&](auto j) {
           return t.next_float(low || rising || apart ? Values::mixed : values, {0, j, length});
         });
    auto z = output(t, "z", {n0});
    t.launch({cdiv(n0, 64)}, kernel, q, k, v, z, n0, length, c<64>, c<32>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) {
        const double query = q[i];
        double high = query * k[0], largest = 0;
        for (int j = 0; j < length; ++j) {
          high = std::max(high, query * k[j]);
          largest = std::max(largest, std::fabs(query * k[j]));
        }
        double total = 0, sum = 0, size = 0;
        for (int j = 0; j < length; ++j) {
          const double weight = std::exp(query * k[j] - high);
          total += weight;
          sum += weight * v[j];
          size += weight * std::fabs(v[j]);
        }
        return Expected{sum / total, 2 * kUnit * (16 * largest + 5.0 * length + 10) * size / total + kMinFloat};
      });
    }
  }
};

}  // namespace octile::tile::puzzles
