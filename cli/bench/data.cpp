#include "cli/bench/data.h"

#include <algorithm>
#include <random>

#include "octile/quantize.h"

namespace octile::cli {

namespace {

// Prime, so that no row of a usual matrix repeats another. Drawing each value of a large one would take seconds.
constexpr std::size_t kDrawn = 1'048'573;

void run(const QuantizePlan& plan, const QuantizeArgs& args) {
  std::vector<std::byte> workspace(plan.workspace_size());
  plan.run(args, {workspace.data(), workspace.size()});
}

}  // namespace

std::vector<float> normal(std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
  std::vector<float> values = zeros<float>(rows, cols);
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> distribution;
  const std::size_t drawn = std::min(values.size(), kDrawn);
  std::generate_n(values.begin(), drawn, [&] { return distribution(generator); });
  for (std::size_t i = drawn; i < values.size(); ++i) values[i] = values[i - drawn];
  return values;
}

QuantizedMatrix quantized_rows(const std::vector<float>& x, std::int64_t rows, std::int64_t cols) {
  QuantizedMatrix m{zeros<std::int8_t>(rows, cols), zeros<float>(rows, 1)};
  run(QuantizePlan::select({.rows = rows, .cols = cols}), {.x = matrix(x.data(), rows, cols),
                                                           .q = matrix(m.values.data(), rows, cols),
                                                           .scale = vector(m.scale.data(), rows)});
  return m;
}

PackedMatrix quantized_groups(const std::vector<float>& x, std::int64_t rows, std::int64_t cols, std::int64_t group) {
  PackedMatrix m{zeros<std::uint8_t>(rows, (cols + 1) / 2), zeros<float>(rows, cols / group)};
  run(QuantizePlan::select(
          {.rows = rows, .cols = cols, .q = DType::s4, .granularity = Granularity::group, .group = group}),
      {.x = matrix(x.data(), rows, cols),
       .q = matrix_s4(m.values.data(), rows, cols),
       .scale = matrix(m.scale.data(), rows, cols / group)});
  return m;
}

}  // namespace octile::cli
