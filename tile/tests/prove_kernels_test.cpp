// Ten kernels: equal to a plain loop on both CPU executors, and proved.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "octile/tile/prove.h"

#define int octile::tile::SymbolicInt
#define bool octile::tile::SymbolicBool
#include "ten_kernels.h"
#undef int
#undef bool

namespace octile::tile {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

Array<f32> values(const char* name, std::vector<std::int64_t> shape) {
  Array<f32> result(name, std::move(shape));
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < result.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    result.set(i, static_cast<f32>(state >> 20) / 1024.0f - 2.0f);
  }
  return result;
}
Array<s32> integers(const char* name, std::vector<std::int64_t> shape, auto value) {
  Array<s32> result(name, std::move(shape));
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, static_cast<s32>(value(i)));
  return result;
}

// Runs a kernel on the checked and the fast executor, and compares its output with expected(i).
template <class Kernel, class Z, class F, class... Args>
void expect_right(Grid grid, const Kernel& kernel, Array<Z>& z, F expected, Args&&... args) {
  const Report report = launch(CheckedCpu{}, grid, kernel, args...);
  for (const Finding& finding : report.findings) ADD_FAILURE() << text(report, finding);
  for (const bool fast : {false, true}) {
    if (fast) launch(FastCpu{2}, grid, kernel, args...);
    for (std::int64_t i = 0; i < z.size(); ++i) {
      const double want = expected(i);
      ASSERT_TRUE(z.written(i)) << i;
      if (std::isinf(want)) {
        ASSERT_EQ(static_cast<double>(z[i]), want) << i;
      } else {
        ASSERT_NEAR(static_cast<double>(z[i]), want, 2e-4 * (1 + std::fabs(want))) << i;
      }
    }
  }
}

void expect_proved(const std::function<void(Prover&)>& setup) {
  const Proof proof = prove(setup);
  EXPECT_TRUE(proof.proved()) << text(proof);
  EXPECT_LT(proof.seconds, 10);
}

TEST(TenKernels, StridedAdd) {
  auto x = values("x", {77, 3}), y = values("y", {77, 2});
  Array<f32> z("z", {77});
  expect_right(
      {3}, ten::StridedAdd{}, z, [&](auto i) { return x[i * 3] + y[i * 2]; }, x, y, z, 77, 3, 2, c<32>);
  expect_proved([](Prover& p) {
    const auto n = p.size("n"), x_step = p.size("x_step", 1), y_step = p.size("y_step", 1);
    p.launch({cdiv(n, 32)}, ten::StridedAdd{}, p.input<f32>("x", {n, x_step}), p.input<f32>("y", {n, y_step}),
             p.output<f32>("z", {n}), n, x_step, y_step, c<32>);
  });
}

TEST(TenKernels, Copy2d) {
  auto x = values("x", {37, 50});
  Array<f32> z("z", {37, 45});
  expect_right(
      {3, 2}, ten::Copy2d{}, z, [&](auto i) { return x[i / 45 * 50 + i % 45]; }, x, z, 37, 45, 50, c<16>, c<32>);
  expect_proved([](Prover& p) {
    const auto rows = p.size("rows"), columns = p.size("columns"), pitch = p.size("pitch");
    p.assume(columns <= pitch);
    p.launch({cdiv(rows, 16), cdiv(columns, 32)}, ten::Copy2d{}, p.input<f32>("x", {rows, pitch}),
             p.output<f32>("z", {rows, columns}), rows, columns, pitch, c<16>, c<32>);
  });
}

TEST(TenKernels, LayerNormForwardAndBackward) {
  constexpr int kRows = 5, kColumns = 77;
  auto x = values("x", {kRows, kColumns}), gamma = values("gamma", {kColumns}), beta = values("beta", {kColumns}),
       dz = values("dz", {kColumns, kRows});
  Array<f32> z("z", {kRows, kColumns}), mean("mean", {kRows}), rstd("rstd", {kRows}), dx("dx", {kRows, kColumns});
  const auto moments = [&](std::int64_t row) {
    double total = 0, squares = 0;
    for (int j = 0; j < kColumns; ++j) total += x[row * kColumns + j];
    for (int j = 0; j < kColumns; ++j) squares += std::pow(x[row * kColumns + j] - total / kColumns, 2);
    return std::pair{total / kColumns, 1 / std::sqrt(squares / kColumns + 1e-5)};
  };
  const auto normal = [&](std::int64_t i) {
    const auto [m, r] = moments(i / kColumns);
    return (x[i] - m) * r;
  };
  expect_right(
      {kRows}, ten::LayerNorm{}, z, [&](auto i) { return normal(i) * gamma[i % kColumns] + beta[i % kColumns]; }, x,
      gamma, beta, z, mean, rstd, kColumns, c<32>);
  expect_right(
      {kRows}, ten::LayerNormBackward{}, dx,
      [&](auto i) {
        const std::int64_t first = i / kColumns * kColumns;
        double of_g = 0, of_gv = 0;
        for (int j = 0; j < kColumns; ++j) {
          of_g += dz[first + j] * gamma[j];
          of_gv += dz[first + j] * gamma[j] * normal(first + j);
        }
        const double g = dz[i] * gamma[i % kColumns];
        return moments(i / kColumns).second * (g - of_g / kColumns - normal(i) * of_gv / kColumns);
      },
      x, gamma, mean, rstd, dz, dx, kColumns, c<32>);
  expect_proved([](Prover& p) {
    const auto rows = p.size("rows"), columns = p.size("columns", 1);
    const auto input = p.input<f32>("x", {rows, columns}), scale = p.input<f32>("gamma", {columns});
    const auto means = p.output<f32>("mean", {rows}), factors = p.output<f32>("rstd", {rows});
    p.launch({rows}, ten::LayerNorm{}, input, scale, p.input<f32>("beta", {columns}),
             p.output<f32>("z", {rows, columns}), means, factors, columns, c<32>);
    p.launch({rows}, ten::LayerNormBackward{}, input, scale, means, factors, p.input<f32>("dz", {rows, columns}),
             p.output<f32>("dx", {rows, columns}), columns, c<32>);
  });
}

TEST(TenKernels, Rope) {
  constexpr int kTokens = 3, kHeads = 2, kHalf = 16;
  auto x = values("x", {kTokens, kHeads, 2 * kHalf}), cosine = values("cos", {kTokens, kHalf}),
       sine = values("sin", {kTokens, kHalf});
  Array<f32> z("z", {kTokens, kHeads, 2 * kHalf});
  expect_right(
      {kTokens, kHeads}, ten::Rope{}, z,
      [&](auto i) {
        const std::int64_t token = i / (kHeads * 2 * kHalf), j = i % (2 * kHalf), pair = i - j + j % kHalf;
        const double a = x[pair], b = x[pair + kHalf], cos = cosine[token * kHalf + j % kHalf],
                     sin = sine[token * kHalf + j % kHalf];
        return j < kHalf ? a * cos - b * sin : b * cos + a * sin;
      },
      x, cosine, sine, z, kHeads, c<kHalf>);
  expect_proved([](Prover& p) {
    const auto tokens = p.size("tokens"), heads = p.size("heads");
    p.launch({tokens, heads}, ten::Rope{}, p.input<f32>("x", {tokens, heads, 64}), p.input<f32>("cos", {tokens, 32}),
             p.input<f32>("sin", {tokens, 32}), p.output<f32>("z", {tokens, heads, 64}), heads, c<32>);
  });
}

TEST(TenKernels, TopKMask) {
  auto x = values("x", {4, 50});
  x.set(7, x[3]);
  Array<f32> z("z", {4, 50});
  expect_right(
      {4}, ten::TopKMask{}, z,
      [&](auto i) {
        int before = 0;
        for (std::int64_t j = i / 50 * 50; j < i / 50 * 50 + 50; ++j) {
          before += x[j] > x[i] || (x[j] == x[i] && j < i) ? 1 : 0;
        }
        return before < 6 ? double{x[i]} : -std::numeric_limits<double>::infinity();
      },
      x, z, 50, 6, c<64>);
  expect_proved([](Prover& p) {
    const auto rows = p.size("rows"), n = p.size("n"), k = p.size("k");
    p.assume(n <= 64);
    p.launch({rows}, ten::TopKMask{}, p.input<f32>("x", {rows, n}), p.output<f32>("z", {rows, n}), n, k, c<64>);
  });
}

TEST(TenKernels, Histogram) {
  auto x = integers("x", {300}, [](auto i) { return i * i % 7; });
  Array<s32> bins("bins", {7}, std::vector<s32>(7, 0));
  const Report report = launch(CheckedCpu{}, Grid{10}, ten::Histogram{}, x, bins, 300, c<32>);
  EXPECT_TRUE(report.clean());
  for (int b = 0; b < 7; ++b) {
    int count = 0;
    for (int i = 0; i < 300; ++i) count += x[i] == b ? 1 : 0;
    EXPECT_EQ(bins[b], count);
  }
  expect_proved([](Prover& p) {
    const auto n = p.size("n"), bins = p.size("bins", 1);
    p.launch({cdiv(n, 32)}, ten::Histogram{}, p.input<s32>("x", {n}, 0, bins), p.input<s32>("bins", {bins}), n, c<32>);
  });
}

TEST(TenKernels, BatchedTranspose) {
  auto x = values("x", {3, 20, 37});
  Array<f32> z("z", {3, 37, 20});
  expect_right(
      {2, 2, 3}, ten::BatchedTranspose{}, z, [&](auto i) { return x[i / 740 * 740 + i % 20 * 37 + i / 20 % 37]; }, x, z,
      20, 37, c<16>, c<32>);
  expect_proved([](Prover& p) {
    const auto batch = p.size("batch"), rows = p.size("rows"), columns = p.size("columns");
    p.launch({cdiv(rows, 16), cdiv(columns, 32), batch}, ten::BatchedTranspose{},
             p.input<f32>("x", {batch, rows, columns}), p.output<f32>("z", {batch, columns, rows}), rows, columns,
             c<16>, c<32>);
  });
}

TEST(TenKernels, SegmentedSum) {
  auto x = values("x", {100});
  auto offsets = integers("offsets", {8}, [](auto i) { return std::min<std::int64_t>(i * i * 2, 100); });
  Array<f32> z("z", {7});
  expect_right(
      {2}, ten::SegmentedSum{}, z,
      [&](auto i) {
        double total = 0;
        for (int j = offsets[i]; j < offsets[i + 1]; ++j) total += x[j];
        return total;
      },
      x, offsets, z, 7, 28, c<4>, c<16>);
  expect_proved([](Prover& p) {
    const auto n = p.size("n"), segments = p.size("segments"), longest = p.size("longest");
    p.launch({cdiv(segments, 4)}, ten::SegmentedSum{}, p.input<f32>("x", {n}),
             p.input<s32>("offsets", {segments + 1}, 0, n + 1), p.output<f32>("z", {segments}), segments, longest, c<4>,
             c<16>);
  });
}

TEST(TenKernels, Int4Unpack) {
  Array<u8> packed("packed", {51});
  for (int i = 0; i < 51; ++i) packed.set(i, static_cast<u8>(i * 37));
  Array<s8> z("z", {102});
  expect_right(
      {4}, ten::Int4Unpack{}, z, [&](auto i) { return (packed[i / 2] >> (i % 2 * 4) & 15) - 8; }, packed, z, 102,
      c<32>);
  expect_proved([](Prover& p) {
    const auto n = p.size("n");
    p.assume(n % 2 == 0);
    p.launch({cdiv(n, 32)}, ten::Int4Unpack{}, p.input<u8>("packed", {n / 2}), p.output<s8>("z", {n}), n, c<32>);
  });
}

TEST(TenKernels, SoftmaxWithLengths) {
  auto x = values("x", {5, 70});
  auto lengths = integers("lengths", {5}, [](auto i) { return std::array{70, 1, 33, 0, 64}[at(i)]; });
  Array<f32> z("z", {5, 70});
  expect_right(
      {3}, ten::SoftmaxWithLengths{}, z,
      [&](auto i) {
        double total = 0;
        for (int j = 0; j < lengths[i / 70]; ++j) total += std::exp(double{x[i / 70 * 70 + j]});
        return i % 70 < lengths[i / 70] ? std::exp(double{x[i]}) / total : 0.0;
      },
      x, lengths, z, 5, 70, c<2>, c<32>);
  expect_proved([](Prover& p) {
    const auto rows = p.size("rows"), columns = p.size("columns");
    p.launch({cdiv(rows, 2)}, ten::SoftmaxWithLengths{}, p.input<f32>("x", {rows, columns}),
             p.input<s32>("lengths", {rows}, 0, columns + 1), p.output<f32>("z", {rows, columns}), rows, columns, c<2>,
             c<32>);
  });
}

// Without their assumptions they are refuted, so the proofs are not vacuous.
void expect_refuted(Property property, const std::function<void(Prover&)>& setup) {
  const Proof proof = prove(setup);
  EXPECT_EQ(proof.answer(property), Answer::refuted) << text(proof);
}

TEST(TenKernels, WithoutTheirAssumptions) {
  expect_refuted(Property::bounds, [](Prover& p) {  // a pitch smaller than the number of columns
    const auto rows = p.size("rows"), columns = p.size("columns"), pitch = p.size("pitch");
    p.launch({cdiv(rows, 16), cdiv(columns, 32)}, ten::Copy2d{}, p.input<f32>("x", {rows, pitch}),
             p.output<f32>("z", {rows, columns}), rows, columns, pitch, c<16>, c<32>);
  });
  expect_refuted(Property::written, [](Prover& p) {  // more than 64 columns
    const auto rows = p.size("rows"), n = p.size("n"), k = p.size("k");
    p.launch({rows}, ten::TopKMask{}, p.input<f32>("x", {rows, n}), p.output<f32>("z", {rows, n}), n, k, c<64>);
  });
  expect_refuted(Property::bounds, [](Prover& p) {  // one value too many
    const auto n = p.size("n"), bins = p.size("bins", 1);
    p.launch({cdiv(n, 32)}, ten::Histogram{}, p.input<s32>("x", {n}, 0, bins + 1), p.input<s32>("bins", {bins}), n,
             c<32>);
  });
  expect_refuted(Property::bounds, [](Prover& p) {  // offsets past the end
    const auto n = p.size("n"), segments = p.size("segments"), longest = p.size("longest");
    p.launch({cdiv(segments, 4)}, ten::SegmentedSum{}, p.input<f32>("x", {n}),
             p.input<s32>("offsets", {segments + 1}, 0, n + 2), p.output<f32>("z", {segments}), segments, longest, c<4>,
             c<16>);
  });
  expect_refuted(Property::bounds, [](Prover& p) {  // an odd number of integers
    const auto n = p.size("n");
    p.launch({cdiv(n, 32)}, ten::Int4Unpack{}, p.input<u8>("packed", {n / 2}), p.output<s8>("z", {n}), n, c<32>);
  });
  expect_refuted(Property::bounds, [](Prover& p) {  // a length greater than the number of columns
    const auto rows = p.size("rows"), columns = p.size("columns");
    p.launch({cdiv(rows, 2)}, ten::SoftmaxWithLengths{}, p.input<f32>("x", {rows, columns}),
             p.input<s32>("lengths", {rows}, 0, columns + 2), p.output<f32>("z", {rows, columns}), rows, columns, c<2>,
             c<32>);
  });
  expect_refuted(Property::written, [](Prover& p) {  // too few programs
    const auto batch = p.size("batch"), rows = p.size("rows"), columns = p.size("columns");
    p.launch({cdiv(rows, 16), cdiv(columns, 64), batch}, ten::BatchedTranspose{},
             p.input<f32>("x", {batch, rows, columns}), p.output<f32>("z", {batch, columns, rows}), rows, columns,
             c<16>, c<32>);
  });
}

}  // namespace
}  // namespace octile::tile
