// One linear layer with a known result: every x quantizes to 127 and every w to -127, both with a scale of 1.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "octile/octile.hpp"

int main() {
  const std::vector<float> x(3 * 64, 127.0f), w_scale(5, 1.0f), bias(5, 0.5f);
  const std::vector<std::int8_t> wq(5 * 64, -127);
  std::vector<float> y(3 * 5);
  const auto plan = octile::LinearPlan::select({.m = 3, .n = 5, .k = 64, .bias = true});
  std::vector<std::byte> scratch(plan.workspace_size());
  plan.run({.x = octile::matrix(x.data(), 3, 64),
            .weight = octile::matrix(wq.data(), 5, 64),
            .weight_scale = octile::vector(w_scale.data(), 5),
            .bias = octile::vector(bias.data(), 5),
            .y = octile::matrix(y.data(), 3, 5)},
           {scratch.data(), scratch.size()});
  for (const float value : y) {
    if (value != -127.0f * 127.0f * 64.0f + 0.5f) {
      std::printf("expected %g, got %g\n", -127.0 * 127.0 * 64.0 + 0.5, static_cast<double>(value));
      return 1;
    }
  }

  // An exception keeps its type across the library's boundary.
  try {
    octile::LinearPlan::select({.m = -1, .n = 5, .k = 64});
  } catch (const octile::Error& error) {
    std::printf("%s\n", error.what());
    return 0;
  }
  std::puts("a negative size was accepted");
  return 1;
}
