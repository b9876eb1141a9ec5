// The observers of the checked executor: for each kind, a kernel that it must report, at the right line, and a correct
// one. Here: bounds, undefined lanes, uninitialized memory, index arithmetic.
#include "checker.h"

#include <cmath>
#include <stdexcept>

namespace octile::tile {
namespace {

TEST(Grid, HasThreeAxes) {
  Array<s32> z("z", {8});
  for (const int axis : {-1, 3}) {
    const auto ids = [=](auto& t, auto pz) { t.store(pz + t.program_id(axis), 1); };
    const auto counts = [=](auto& t, auto pz) { t.store(pz + t.num_programs(axis), 1); };
    EXPECT_THROW(launch(CheckedCpu{}, Grid{2}, ids, z), std::invalid_argument);
    EXPECT_THROW(launch(CheckedCpu{}, Grid{2}, counts, z), std::invalid_argument);
  }
}

// ---- Out of bounds ----

TEST(OutOfBounds, LoadPastTheEnd) {
  auto x = ramp("x", {200});
  Array<f32> z("z", {200});
  const Report report = launch(
      CheckedCpu{}, Grid{7},
      [](auto& t, auto px, auto pz, int n) {
        const auto i = t.program_id(0) * 32 + t.arange(c<32>);
        const auto v = (line = __LINE__, t.load(px + i, i < n + 100));
        t.store(pz + i, v + 10.0f, i < n);
      },
      x, z, 200);
  const Finding finding = only(report, Problem::out_of_bounds, 24);
  EXPECT_EQ(finding.first.program, (Triple{6, 0, 0}));
  EXPECT_EQ(finding.first.lane, (Triple{0, 0, 8}));
  EXPECT_EQ(finding.first.index, 200);
  EXPECT_EQ(text(report, finding), "checker_test.cpp:" + std::to_string(line) + ":" +
                                       std::to_string(report.sites[0].column) +
                                       ": load x: out of bounds, 24 lanes; first: program (6,0,0), lane [0,0,8], "
                                       "x[200] of 200");
  for (int i = 0; i < 200; ++i) EXPECT_EQ(z[i], x[i] + 10.0f);  // the correct ones are unaffected
}

TEST(OutOfBounds, StoreBeforeTheStart) {
  Array<f32> z("z", {64});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto pz) {
        const auto i = col(t.arange(c<8>)) * 8 + t.arange(c<8>) - 3;
        line = __LINE__, t.store(pz + i, 1.0f);
      },
      z);
  const Finding finding = only(report, Problem::out_of_bounds, 3);
  EXPECT_EQ(finding.first.index, -3);
  EXPECT_EQ(finding.first.lane, (Triple{0, 0, 0}));
}

TEST(OutOfBounds, GatheredAndAtomic) {
  Array<s32> index("index", {4}, {0, 3, 9, -1}), bins("bins", {4}, {0, 0, 0, 0});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto pi, auto pb) { line = __LINE__, t.atomic_add(pb + t.load(pi + t.arange(c<4>)), 1); }, index,
      bins);
  EXPECT_EQ(only(report, Problem::out_of_bounds, 2).first.lane, (Triple{0, 0, 2}));
  EXPECT_EQ(bins[0] + bins[3], 2);
}

TEST(OutOfBounds, NeighboursOnBothSides) {
  auto x = ramp("x", {70});
  Array<f32> z("z", {70});
  const auto differences = [](auto& t, auto px, auto pz, int n) {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(pz + i, t.load(px + i + 1, i < n - 1, 0.0f) - t.load(px + i - 1, (i > 0) & (i < n), 0.0f), i < n);
  };
  const Report report = launch(CheckedCpu{}, Grid{3}, differences, x, z, 70);
  EXPECT_TRUE(report.findings.empty()) << all(report);
  for (int i = 1; i < 69; ++i) EXPECT_EQ(z[i], x[i + 1] - x[i - 1]);
  EXPECT_EQ(z[0], x[1]);
  EXPECT_EQ(z[69], -x[68]);
}

TEST(OutOfBounds, ExactlyTheEndIsRight) {
  auto x = ramp("x", {5, 13});
  Array<f32> z("z", {5, 13});
  const Report report = launch(
      CheckedCpu{}, Grid{2, 2},
      [](auto& t, auto px, auto pz) {
        const auto i = col(t.program_id(1) * 4 + t.arange(c<4>));
        const auto j = t.program_id(0) * 8 + t.arange(c<8>);
        const auto in = (i < 5) & (j < 13);
        t.store(pz + i * 13 + j, t.load(px + i * 13 + j, in), in);
      },
      x, z);
  EXPECT_TRUE(report.clean()) << all(report);
  for (int i = 0; i < 65; ++i) EXPECT_EQ(z[i], x[i]);
}

// ---- Undefined lanes ----

TEST(Undefined, StoredSumOfALoadWithoutOther) {
  auto x = ramp("x", {4, 20});
  Array<f32> z("z", {4});
  const Report report = launch(
      CheckedCpu{}, Grid{4},
      [](auto& t, auto px, auto pz) {
        const auto j = t.arange(c<32>);
        const auto v = t.load(px + t.program_id(0) * 20 + j, j < 20);
        line = __LINE__, t.store(pz + t.program_id(0), sum(v));
      },
      x, z);
  only(report, Problem::undefined_value, 4);
  EXPECT_TRUE(std::isnan(z[0]));
}

TEST(Undefined, WhatIsSelectedAwayOrMaskedOffIsRight) {
  auto x = ramp("x", {20});
  Array<f32> z("z", {32}), y("y", {20});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz, auto py) {
        const auto j = t.arange(c<32>);
        const auto v = t.load(px + j, j < 20);
        t.store(pz + j, where(j < 20, v, 0.0f) * 2.0f);
        t.store(py + j, exp2(v), j < 20);
      },
      x, z, y);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(z[19], 38.0f);
  EXPECT_EQ(z[20], 0.0f);
}

// false & x is false and true | x is true, whatever x is.
TEST(Undefined, AMaskThatDoesNotDependOnItIsRight) {
  auto x = ramp("x", {20});
  Array<f32> z("z", {20}), y("y", {32});
  Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz, auto py) {
        const auto j = t.arange(c<32>);
        const auto v = t.load(px + j, j < 20);
        t.store(pz + j, v, (v >= 0.0f) & (j < 20));
        t.store(py + j, where((j >= 20) | (v > 30.0f), 1.0f, v));
      },
      x, z, y);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(y[20], 1.0f);
  report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz, auto) {
        const auto j = t.arange(c<32>);
        const auto v = t.load(px + j, j < 20);
        line = __LINE__, t.store(pz + j, 1.0f, (v >= 0.0f) & (j < 22));
      },
      x, z, y);
  only(report, Problem::undefined_index, 2);
}

TEST(Undefined, FlowsThroughEveryOperator) {
  auto x = ramp("x", {3});
  Array<f32> z("z", {7, 4});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz) {
        const auto j = t.arange(c<4>);
        const auto v = t.load(px + j, j < 3);
        const auto zero = t.full(c<4>, c<4>, 0.0f);
        const auto store = [&](int row, const auto& value) { line = __LINE__, t.store(pz + row * 4 + j, value); };
        store(0, v + 1.0f);
        store(1, maximum(2.0f, v));
        store(2, cast<f32>(cast<s8, Round::even>(v)));
        store(3, reshape(col(v), c<4>));
        store(4, where(v > 1.0f, 1.0f, v));
        store(5, fma(v, v, v));
        store(6, sum(trans(dot(trans(col(v) + t.full(c<4>, 0.0f)), zero + 1.0f, zero)), kRows) * 0.0f);
      },
      x, z);
  // One lane of each of the first six; the dot spreads it to all of its row.
  only(report, Problem::undefined_value, 6 + 4);
}

TEST(Undefined, IndexAndMask) {
  Array<s32> index("index", {3}, {0, 1, 2});
  Array<f32> z("z", {4});
  const auto kernel = [](auto& t, auto pi, auto pz, auto as_mask) {
    const auto j = t.arange(c<4>);
    const auto k = t.load(pi + j, j < 3);
    if constexpr (as_mask) {
      line = __LINE__, t.store(pz + j, 1.0f, k >= 0);
    } else {
      line = __LINE__, t.store(pz + k, 1.0f);
    }
  };
  Report report = launch(CheckedCpu{}, Grid{1}, kernel, index, z, c<0>);
  EXPECT_EQ(only(report, Problem::undefined_index, 1).first.lane, (Triple{0, 0, 3}));
  report = launch(CheckedCpu{}, Grid{1}, kernel, index, z, c<1>);
  EXPECT_EQ(only(report, Problem::undefined_index, 1).first.lane, (Triple{0, 0, 3}));
}

TEST(Undefined, DivisionByZeroAndShiftsTooFar) {
  Array<s32> x("x", {4}, {7, 0, -2, 40}), quotient("quotient", {4}), shifted("shifted", {4});
  Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pq) {
        const auto j = t.arange(c<4>);
        line = __LINE__, t.store(pq + j, 100 / t.load(px + j));
      },
      x, quotient);
  EXPECT_EQ(only(report, Problem::undefined_value, 1).first.lane, (Triple{0, 0, 1}));
  EXPECT_EQ(quotient[2], -50);
  report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto ps) {
        const auto j = t.arange(c<4>);
        line = __LINE__, t.store(ps + j, 1 << t.load(px + j));
      },
      x, shifted);
  only(report, Problem::undefined_value, 2);
  EXPECT_EQ(shifted[0], 128);
}

TEST(Undefined, AProgramIndexDividedByZero) {
  Array<s32> z("z", {4});
  const auto launched = [&](int by, auto index, auto value) {
    return launch(
        CheckedCpu{}, Grid{1},
        [=](auto& t, auto pz) {
          const auto p = t.program_id(0);
          line = __LINE__, t.store(pz + (t.arange(c<4>) + index(p, by)), t.arange(c<4>) + value(p, by));
        },
        z);
  };
  const auto zero = [](auto, int) { return 0; };
  const auto quotient = [](auto p, int by) { return p / by; };
  const auto rest = [](auto p, int by) { return p % by; };
  EXPECT_EQ(only(launched(0, quotient, zero), Problem::undefined_index, 4).first.cause, Cause::division);
  EXPECT_EQ(only(launched(0, rest, zero), Problem::undefined_index, 4).first.cause, Cause::division);
  EXPECT_EQ(only(launched(0, zero, quotient), Problem::undefined_value, 4).first.cause, Cause::division);
  EXPECT_TRUE(launched(1, quotient, rest).clean());
}

// A finding names the line that an undefined lane came from, through all computations.
TEST(Undefined, NamesWhereItCameFrom) {
  auto x = ramp("x", {4, 20}), y = ramp("y", {32});
  Array<f32> z("z", {4, 32});
  unsigned origin = 0;
  const auto from = [&] { return "; from load x at checker_test.cpp:" + std::to_string(origin); };
  Report report = launch(
      CheckedCpu{}, Grid{4},
      [&](auto& t, auto px, auto py, auto pz) {
        const auto j = t.arange(c<32>);
        const auto v = (origin = __LINE__, t.load(px + t.program_id(0) * 20 + j, j < 20));
        const auto w = t.load(py + j);
        const auto total = sum(sum(trans(reshape(exp2(w + v), c<8>, c<4>))), kRows) * 2.0f;
        line = __LINE__, t.store(pz + t.program_id(0) * 32 + j, where(j < 32, w * total, w));
      },
      x, y, z);
  const Finding finding = only(report, Problem::undefined_value, 4 * 32);
  EXPECT_TRUE(text(report, finding).ends_with(from())) << all(report);
  EXPECT_EQ(report.sites[static_cast<std::size_t>(finding.first.other_site)].line, origin);

  report = launch(
      CheckedCpu{}, Grid{1},
      [&](auto& t, auto px, auto py, auto) {
        const auto j = t.arange(c<32>);
        const auto v = (origin = __LINE__, t.load(px + j, j < 20));
        line = __LINE__, t.store(py + j, 1.0f, v > 3.0f);
      },
      x, y, z);
  EXPECT_TRUE(text(report, only(report, Problem::undefined_index, 12)).ends_with(from())) << all(report);

  report = launch(
      CheckedCpu{}, Grid{1},
      [&](auto& t, auto px, auto py, auto) {
        const auto j = t.arange(c<32>);
        const auto count = cast<s32, Round::zero>(t.load(px + j, j < 20, 1.0f));
        line = __LINE__, t.store(py + j, cast<f32>(100 / count) + t.load(py + j, j < 31, 0.0f));
      },
      x, y, z);
  EXPECT_TRUE(text(report, only(report, Problem::undefined_value, 1)).ends_with("; from a division by 0"));
}

// ---- Loops without an end ----

TEST(Endless, IsStoppedAndNamed) {
  auto x = ramp("x", {64});
  Array<f32> z("z", {4});
  std::string seen;
  const auto kernel = [&](auto& t, auto px, auto pz, int step) {
    auto total = t.full(c<16>, 0.0f);
    if (t.program_id(0) == 1) seen = text(progress());
    for (int k = 0; k < 64; k += t.program_id(0) < 2 ? 16 : step) {
      line = __LINE__, total += t.load(px + t.arange(c<16>) + k);
    }
    t.store(pz + t.program_id(0), sum(total));
  };
  Report report = launch(CheckedCpu{.max_steps = 5}, Grid{4}, kernel, x, z, 16);
  EXPECT_TRUE(report.clean()) << all(report);
  report = launch(CheckedCpu{.max_steps = 5}, Grid{4}, kernel, x, z, 0);
  const Finding finding = only(report, Problem::endless, 5);
  EXPECT_EQ(text(report, finding), "checker_test.cpp:" + std::to_string(line) + ":" +
                                       std::to_string(report.sites[0].column) +
                                       ": load x: endless loop, 5 steps; first: program (2,0,0)");
  EXPECT_EQ(seen, ", program (1,0,0), before it used any memory");
  EXPECT_EQ(text(progress()), "");
}

// ---- Tensors ----

TEST(Tensors, ThatCannotBe) {
  EXPECT_THROW(Array<f32>("x", {3, -1}), std::invalid_argument);
  EXPECT_THROW(Array<f32>("x", {3}, {1.0f, 2.0f}), std::invalid_argument);
  EXPECT_THROW(Array<f32>("x", {1}, {1.0f, 2.0f}), std::invalid_argument);
}

// ---- Uninitialized memory ----

TEST(Uninitialized, LoadOfWhatNobodyWrote) {
  Array<f32> x("x", {40}), z("z", {40});
  for (int i = 0; i < 30; ++i) x.set(i, 1.0f);
  const Report report = launch(
      CheckedCpu{}, Grid{5},
      [](auto& t, auto px, auto pz) {
        const auto i = t.program_id(0) * 8 + t.arange(c<8>);
        const auto v = (line = __LINE__, t.load(px + i));
        t.store(pz + i, v);
      },
      x, z);
  const Finding finding = only(report, Problem::uninitialized, 10);
  EXPECT_EQ(finding.first.index, 30);
  EXPECT_EQ(finding.first.program, (Triple{3, 0, 0}));
}

TEST(Uninitialized, AnEarlierLaunchMayHaveWrittenIt) {
  auto x = ramp("x", {64});
  Array<f32> partial("partial", {8}), z("z", {1});
  const Report first = launch(
      CheckedCpu{}, Grid{8},
      [](auto& t, auto px, auto pp) {
        const auto i = t.program_id(0);
        t.store(pp + i, sum(t.load(px + i * 8 + t.arange(c<8>))));
      },
      x, partial);
  const Report second = launch(
      CheckedCpu{}, Grid{1}, [](auto& t, auto pp, auto pz) { t.store(pz, sum(t.load(pp + t.arange(c<8>)))); }, partial,
      z);
  EXPECT_TRUE(first.clean() && second.clean()) << all(first) << all(second);
  EXPECT_EQ(z[0], 64.0f * 63 / 2);
}

TEST(Uninitialized, AnExecutorWithoutARecordMayHaveWrittenIt) {
  auto x = ramp("x", {64});
  Array<f32> y("y", {64}), z("z", {64});
  const auto copy = [](auto& t, auto from, auto to) {
    const auto i = t.program_id(0) * 8 + t.arange(c<8>);
    line = __LINE__, t.store(to + i, t.load(from + i));
  };
  launch(FastCpu{.threads = 1}, Grid{0}, copy, x, y);
  only(launch(CheckedCpu{}, Grid{8}, copy, y, z), Problem::uninitialized, 64);  // no program has run
  launch(FastCpu{.threads = 1}, Grid{8}, copy, x.tensor(), y.tensor());
  const Report report = launch(CheckedCpu{}, Grid{8}, copy, y, z);
  EXPECT_TRUE(report.clean()) << all(report);
}

// ---- Index arithmetic ----

TEST(Overflow, OfThirtyTwoBitIndices) {
  auto x = ramp("x", {16});
  Array<f32> z("z", {16});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz) {
        const auto i = t.arange(c<16>);
        const auto far = i * 300000000;
        const auto v = (line = __LINE__, t.load(px + (far - i * 299999999)));
        t.store(pz + i, v);
      },
      x, z);
  EXPECT_EQ(only(report, Problem::overflow, 8).first.lane, (Triple{0, 0, 8}));
  EXPECT_EQ(z[7], 7.0f);
}

// A masked-off lane has no index, whatever was computed for it.
TEST(Overflow, NotOfLanesThatAreMaskedOff) {
  auto x = ramp("x", {16});
  Array<f32> z("z", {16}), columns("columns", {2, 16}), nothing("nothing", {1});
  const Report report = launch(
      CheckedCpu{}, Grid{3},
      [](auto& t, auto px, auto pz, auto pc, auto pn) {
        const auto i = t.arange(c<16>);
        const auto far = i * 300000000 - i * 299999999;
        const auto first = t.program_id(0) == 0;
        if (first) t.store(pz + far, t.load(px + far, i < 8), i < 8);
        // As a column, broadcast, and in a mask that depends on another.
        const auto down = col(t.arange(c<4>)) * 1500000000;
        const auto in = (col(t.arange(c<4>)) < 2) & (down < 1600000000);
        if (first) t.store(pc + (down / 1500000000 * 16 + i), 1.0f, in);
        t.store(pn + (t.program_id(0) * 1500000000 + t.arange(c<1>)), 1.0f, t.program_id(0) + t.arange(c<1>) < 1);
      },
      x, z, columns, nothing);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(z[7], 7.0f);
  EXPECT_FALSE(z.written(8));
  EXPECT_EQ(columns[31], 1.0f);
}

TEST(Overflow, OfTheProgramIndexAndOfMasks) {
  Array<f32> z("z", {16});
  Report report = launch(
      CheckedCpu{}, Grid{3},
      [](auto& t, auto pz) {
        const auto p = (t.program_id(0) + 1) * 1500000000;
        line = __LINE__, t.store(pz + t.arange(c<16>), 1.0f, t.arange(c<16>) + p < 0);
      },
      z);
  ASSERT_FALSE(report.clean());
  EXPECT_EQ(name(report.findings[0].problem), name(Problem::overflow)) << all(report);
  EXPECT_EQ(report.findings[0].first.program, (Triple{1, 0, 0}));
  EXPECT_EQ(report.sites[0].line, line);
}

TEST(Overflow, OfTheProgramIndexOnTheWay) {
  Array<f32> z("z", {3});
  const Report report = launch(
      CheckedCpu{}, Grid{3},
      [](auto& t, auto pz) {
        const auto p = t.program_id(0) * 1500000000 / 1500000000;
        line = __LINE__, t.store(pz + p, 1.0f);
      },
      z);
  EXPECT_EQ(only(report, Problem::overflow, 1).first.program, (Triple{2, 0, 0}));
}

TEST(Overflow, OfTheProgramIndexAsAVariable) {
  Array<f32> z("z", {3});
  const auto found = [&](auto change) {
    const Report report = launch(
        CheckedCpu{}, Grid{3},
        [=](auto& t, auto pz) {
          auto p = t.program_id(0);
          change(p);
          line = __LINE__, t.store(pz + p, 1.0f);
        },
        z);
    EXPECT_EQ(only(report, Problem::overflow, 1).first.program, (Triple{2, 0, 0}));
  };
  found([](auto& p) { p *= 1500000000, p /= 1500000000; });
  found([](auto& p) { p += 2147483646, p -= 2147483646; });
  found([](auto& p) { p += 2147483645, ++p, --p, p -= 2147483645; });
  found([](auto& p) { p += std::int64_t{2147483646}, p %= 3; });
  found([](auto& p) { p = -(-p * 1500000000) / 1500000000; });
}

TEST(Overflow, OfAnIndexThatBecomesAValue) {
  auto x = ramp("x", {16});
  Array<f32> z("z", {16});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz) {
        const auto i = t.arange(c<16>);
        const auto v = (line = __LINE__, t.load(px + (i * 300000000 & 15)));
        t.store(pz + i, v, i < 0);
      },
      x, z);
  EXPECT_EQ(only(report, Problem::overflow, 8).first.lane, (Triple{0, 0, 8}));
}

TEST(Overflow, OfAMaskThatBecomesAValue) {
  auto x = ramp("x", {16});
  Array<f32> z("z", {16});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz) {
        const auto i = t.arange(c<16>);
        line = __LINE__, t.store(pz + i, where((i * 300000000 > 5) & (i < 12), t.load(px + i), 1.0f));
      },
      x, z);
  EXPECT_EQ(only(report, Problem::overflow, 4).first.lane, (Triple{0, 0, 8}));  // from 12 on it is false anyway
}

TEST(Overflow, NotOfSixtyFourBits) {
  auto x = ramp("x", {16});
  Array<f32> z("z", {16});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz) {
        const auto i = t.arange(c<16>);
        const auto far = i * std::int64_t{300000000};
        t.store(pz + i, t.load(px + (far - i * std::int64_t{299999999})));
      },
      x, z);
  EXPECT_TRUE(report.clean()) << all(report);
}

}  // namespace
}  // namespace octile::tile
