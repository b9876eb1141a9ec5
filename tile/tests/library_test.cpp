// The quantizers and the forward of puzzles 13 to 15 give the same bits as the library's plans.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <utility>

#include "octile/linear.h"
#include "octile/quantize.h"
#include "octile/tile/tile.h"
#include "puzzles/linear_kernels.h"

namespace octile::tile {
namespace {

template <class T>
using LibraryType = std::conditional_t<std::is_same_v<T, f16>, Half, T>;

template <class T>
LibraryType<T>* library(Array<T>& array) {
  return reinterpret_cast<LibraryType<T>*>(array.data());
}

template <class T>
void expect_same_bits(const Array<T>& got, const Array<T>& expected) {
  for (std::int64_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(got.data() + i, expected.data() + i, sizeof(T)), 0)
        << got.name() << '[' << i << "] is " << static_cast<double>(widen(got[i])) << ", the library's "
        << static_cast<double>(widen(expected[i]));
  }
}

template <class T>
T from_float(float value) {
  if constexpr (std::is_same_v<T, f16>) {
    return f16(value);
  } else {
    return value;
  }
}

// Row by row: normal values of all sizes, ties (the largest is 127 quarters, the rest eighths), zeros, tiny values,
// and one NaN, infinity or -infinity.
template <class T>
Array<T> interesting(int rows, int columns, int kind, std::mt19937& random) {
  constexpr float kSpecial[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity()};
  Array<T> x("x", {rows, columns});
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> eighths(-254, 254);
  for (int i = 0; i < rows; ++i) {
    const int of_row = (kind + i) % 6;
    for (int j = 0; j < columns; ++j) {
      float value = std::ldexp(normal(random), of_row - 3);
      if (of_row == 1) value = j == 0 ? 31.75f : static_cast<float>(eighths(random)) * 0.125f;
      if (of_row == 2) value = 0.0f;
      if (of_row == 3) value *= 1e-7f;
      if (of_row == 4 && kind >= 6 && j == columns / 2) value = kSpecial[kind % 3];
      x.set(i * columns + j, from_float<T>(value));
    }
  }
  return x;
}

constexpr std::pair<int, int> kSizes[] = {{1, 1}, {7, 211}, {16, 128}, {33, 65}, {64, 257}, {5, 1}};

template <class T>
void compare_quantizers(bool whole, int rows, int columns, int kind) {
  SCOPED_TRACE(testing::Message() << rows << " x " << columns << ", kind " << kind << (whole ? ", whole" : ", rows"));
  std::mt19937 random(static_cast<unsigned>(rows * 1000 + columns));
  const int n = rows * columns, scales = whole ? 1 : rows;
  auto x = interesting<T>(rows, columns, kind, random);
  Array<s8> q("q", {rows, columns}), library_q("q", {rows, columns});
  Array<f32> scale("scale", {scales}), library_scale("scale", {scales}), max_abs("max_abs", {1}, {0.0f});
  const auto with = [&](auto executor) {
    if (whole) {
      launch(executor, Grid{cdiv(n, 256)}, puzzles::linear::FindMaximum{}, x, q, scale, max_abs, n, c<256>);
      launch(executor, Grid{cdiv(n, 256)}, puzzles::linear::QuantizeGlobal{}, x, q, scale, max_abs, n, c<256>);
    } else {
      launch(executor, Grid{cdiv(rows, 4)}, puzzles::linear::QuantizeRows{}, x, q, scale, rows, columns, c<4>, c<64>);
    }
  };
  QuantizeDescription description{.rows = rows, .cols = columns, .x = DTypeOf<LibraryType<T>>::value};
  description.granularity = whole ? Granularity::tensor : Granularity::row;
  QuantizePlan::select(description)
      .run({.x = matrix(library(x), rows, columns),
            .q = matrix(library_q.data(), rows, columns),
            .scale = octile::vector(library_scale.data(), scales)});
  with(FastCpu{});
  expect_same_bits(q, library_q);
  expect_same_bits(scale, library_scale);
  with(CheckedCpu{});
  expect_same_bits(q, library_q);
}

TEST(Library, QuantizersHaveTheSameBits) {
  for (const auto& [rows, columns] : kSizes) {
    for (int kind = 0; kind < 12; ++kind) {
      for (const bool whole : {false, true}) {
        compare_quantizers<f16>(whole, rows, columns, kind);
        compare_quantizers<f32>(whole, rows, columns, kind);
      }
    }
  }
}

struct Size {
  int batch, in, out;
};

void compare_forward(const Size& s, bool per_channel, bool biased, int seed) {
  SCOPED_TRACE(testing::Message() << s.batch << " x " << s.in << " x " << s.out << ' ' << per_channel << biased);
  std::mt19937 random(static_cast<unsigned>(seed));
  std::uniform_int_distribution<int> byte(-128, 127);
  std::normal_distribution<float> normal;
  const auto bytes = [&](const char* name, int rows, int columns) {
    Array<s8> result(name, {rows, columns});
    for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, static_cast<s8>(byte(random)));
    return result;
  };
  auto x = bytes("x_q", s.batch, s.in), w = bytes("w_q", s.in, s.out);
  Array<f32> x_scale("x_scale", {1}, {std::fabs(normal(random)) * 0.02f}),
      w_scale("w_scale", {per_channel ? s.out : 1});
  for (std::int64_t j = 0; j < w_scale.size(); ++j) w_scale.set(j, std::fabs(normal(random)) * 0.01f);
  Array<f16> bias("bias", {s.out}), y("y", {s.batch, s.out}), library_y("y", {s.batch, s.out});
  for (int j = 0; j < s.out; ++j) bias.set(j, from_float<f16>(normal(random)));

  LinearDescription description{.m = s.batch, .n = s.out, .k = s.in, .x = octile::DType::s8, .y = octile::DType::f16};
  description.activation = Activation::dynamic_per_tensor;
  description.weight = per_channel ? WeightFormat::s8_per_channel : WeightFormat::s8_per_tensor;
  description.weight_layout = WeightLayout::in_out;
  description.bias = biased;
  LinearArgs args{.x = matrix(x.data(), s.batch, s.in),
                  .x_scale = octile::vector(x_scale.data(), 1),
                  .weight = matrix(w.data(), s.in, s.out),
                  .weight_scale = octile::vector(w_scale.data(), w_scale.size()),
                  .y = matrix(library(library_y), s.batch, s.out)};
  if (biased) args.bias = octile::vector(library(bias), s.out);
  const LinearPlan plan = LinearPlan::select(description);
  Array<u8> workspace("workspace", {static_cast<std::int64_t>(plan.workspace_size())});
  plan.run(args, {workspace.data(), plan.workspace_size()});

  const auto with = [&](auto channels, auto has_bias) {
    launch(FastCpu{}, Grid{cdiv(s.batch, 16), cdiv(s.out, 16)}, puzzles::linear::Forward{}, x, x_scale, w, w_scale,
           bias, y, s.batch, s.in, s.out, channels, has_bias, c<16>, c<16>, c<32>);
  };
  if (per_channel) {
    biased ? with(c<1>, c<1>) : with(c<1>, c<0>);
  } else {
    biased ? with(c<0>, c<1>) : with(c<0>, c<0>);
  }
  expect_same_bits(y, library_y);
}

TEST(Library, ForwardHasTheSameBits) {
  int seed = 0;
  for (const Size& s : {Size{1, 1, 1}, {16, 32, 16}, {33, 100, 47}, {3, 257, 20}, {64, 512, 96}, {5, 0, 9}}) {
    for (const bool per_channel : {true, false}) {
      for (const bool biased : {true, false}) compare_forward(s, per_channel, biased, ++seed);
    }
  }
}

}  // namespace
}  // namespace octile::tile
