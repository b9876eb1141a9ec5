// Puzzles 1 to 6: elementwise.
#pragma once

#include "puzzles/trial.h"

namespace octile::tile::puzzles {

// One rounding: half a unit in the last place of the result, or of the smallest normal number.
inline Expected rounded_once(double exact) { return {exact, kUnit * std::fmax(std::fabs(exact), kMinFloat)}; }

struct ConstantAdd {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0);
    auto x = input(t, "x", {n0});
    auto z = output(t, "z", {n0});
    const auto go = [&](auto b0) {
      t.assume(n0 == b0);
      t.launch({1}, kernel, x, z, n0, b0);
    };
    t.blocks() == 0 ? go(c<32>) : t.blocks() == 1 ? go(c<1>) : go(c<128>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) { return rounded_once(x[i] + 10.0); });
    }
  }
};

struct MaskedAdd {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0);
    auto x = input(t, "x", {n0});
    auto z = output(t, "z", {n0});
    t.launch({cdiv(n0, 32)}, kernel, x, z, n0, c<32>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) { return rounded_once(x[i] + 10.0); });
    }
  }
};

struct OuterAdd {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), n1 = t.size(1);
    auto x = input(t, "x", {n0}), y = input(t, "y", {n1});
    auto z = output(t, "z", {n1, n0});
    const auto go = [&](auto b0, auto b1) {
      t.assume(n0 == b0);
      t.assume(n1 == b1);
      t.launch({1, 1}, kernel, x, y, z, n0, n1, b0, b1);
    };
    t.blocks() == 0 ? go(c<32>, c<32>) : t.blocks() == 1 ? go(c<16>, c<64>) : go(c<8>, c<1>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) { return rounded_once(static_cast<double>(x[i % n0]) + y[i / n0]); });
    }
  }
};

struct BlockedOuterAdd {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), n1 = t.size(1);
    auto x = input(t, "x", {n0}), y = input(t, "y", {n1});
    auto z = output(t, "z", {n1, n0});
    t.launch({cdiv(n0, 32), cdiv(n1, 32)}, kernel, x, y, z, n0, n1, c<32>, c<32>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z, [&](std::int64_t i) { return rounded_once(static_cast<double>(x[i % n0]) + y[i / n0]); });
    }
  }
};

struct OuterRelu {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), n1 = t.size(1);
    auto x = input(t, "x", {n0}), y = input(t, "y", {n1});
    auto z = output(t, "z", {n1, n0});
    t.launch({cdiv(n0, 32), cdiv(n1, 32)}, kernel, x, y, z, n0, n1, c<32>, c<32>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, z,
             [&](std::int64_t i) { return rounded_once(std::fmax(static_cast<double>(x[i % n0]) * y[i / n0], 0.0)); });
    }
  }
};

struct OuterReluBackward {
  static Facts facts();
  static void run(auto& t, const auto& kernel) {
    const auto n0 = t.size(0), n1 = t.size(1);
    auto x = input(t, "x", {n1, n0}), y = input(t, "y", {n1}), dz = input(t, "dz", {n1, n0});
    auto dx = output(t, "dx", {n1, n0});
    t.launch({cdiv(n0, 32), cdiv(n1, 32)}, kernel, x, y, dz, dx, n0, n1, c<32>, c<32>);
    if constexpr (has_values<decltype(t)>) {
      expect(t, dx, [&](std::int64_t i) {
        const double row = y[i / n0];
        return rounded_once(x[i] * row > 0 ? row * dz[i] : 0.0);
      });
    }
  }
};

}  // namespace octile::tile::puzzles
