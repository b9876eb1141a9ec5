// The observers of the checked executor: for each a kernel that it must report, at the right line, and one that is
// right.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "octile/tile/tile.h"

namespace octile::tile {
namespace {

unsigned line = 0;  // kernels note the line that is to blame: (line = __LINE__, t.load(...))

Array<f32> ramp(const char* name, std::vector<std::int64_t> shape) {
  Array<f32> result(name, std::move(shape));
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, static_cast<float>(i));
  return result;
}

std::string all(const Report& report) {
  std::string result;
  for (const Finding& finding : report.findings) result += text(report, finding) + "\n";
  return result;
}

// The one finding of a report.
Finding only(const Report& report, Problem problem, std::int64_t count) {
  EXPECT_EQ(report.findings.size(), 1u) << all(report);
  if (report.findings.empty()) return {};
  const Finding finding = report.findings[0];
  EXPECT_EQ(name(finding.problem), name(problem)) << all(report);
  EXPECT_EQ(finding.count, count) << all(report);
  const Site& site = report.sites[static_cast<std::size_t>(finding.site)];
  EXPECT_EQ(site.line, line) << all(report);
  EXPECT_NE(site.file.find("tile_checker_test.cpp"), std::string::npos);
  return finding;
}

using Triple = std::array<int, 3>;

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
  EXPECT_EQ(text(report, finding), "tile_checker_test.cpp:" + std::to_string(line) + ":" +
                                       std::to_string(report.sites[0].column) +
                                       ": load x: out of bounds, 24 lanes; first: program (6,0,0), lane [0,0,8], "
                                       "x[200] of 200");
  for (int i = 0; i < 200; ++i) EXPECT_EQ(z[i], x[i] + 10.0f);  // the right ones are still right
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

// ---- Races ----

struct WriteThenReadNeighbour {  // every program writes element p and reads element (p + step) modulo n
  template <class T, class P, class Q>
  void operator()(T& t, P shared, Q z, int step, int n) const {
    const int p = t.program_id(0);
    const auto write = [&] { line = __LINE__, t.store(shared + p, 1.0f); };
    const auto read = [&] { t.store(z + p, t.load(shared + (p + step + n) % n)); };
    if (step > 0) {
      read();  // what a later program will write
      write();
    } else {
      write();
      if (p > 0) read();  // what an earlier program wrote
    }
  }
};

// The same finding whether the store or the load comes first in this run.
TEST(Race, IsBlamedOnTheStoreInEitherOrder) {
  for (const int step : {1, -1}) {
    auto shared = ramp("shared", {8});
    Array<f32> z("z", {8});
    z.fill(0);
    const Report report = launch(CheckedCpu{}, Grid{8}, WriteThenReadNeighbour{}, shared, z, step, 8);
    const Finding finding = only(report, Problem::race, step > 0 ? 8 : 7);
    EXPECT_NE(finding.first.program, finding.first.other_program);
    EXPECT_EQ(report.sites[static_cast<std::size_t>(finding.first.other_site)].access, Access::load);
  }
}

TEST(Race, SeveralProgramsWrite) {
  Array<f32> z("z", {32});
  const Report report = launch(
      CheckedCpu{}, Grid{3}, [](auto& t, auto pz) { line = __LINE__, t.store(pz + t.arange(c<32>), 1.0f); }, z);
  const Finding finding = only(report, Problem::race, 32);
  EXPECT_EQ(finding.first.program, (Triple{1, 0, 0}));
  EXPECT_EQ(finding.first.other_program, (Triple{0, 0, 0}));
}

// All of three programs read what one of them writes, whichever it is.
TEST(Race, WhicheverProgramWrites) {
  for (int writer = 0; writer < 3; ++writer) {
    auto x = ramp("x", {16});
    Array<f32> z("z", {48});
    const Report report = launch(
        CheckedCpu{}, Grid{3},
        [](auto& t, auto px, auto pz, int who) {
          const auto j = t.arange(c<16>);
          t.store(pz + t.program_id(0) * 16 + j, t.load(px + j));
          if (t.program_id(0) == who) line = __LINE__, t.store(px + j, 0.0f);
        },
        x, z, writer);
    EXPECT_EQ(only(report, Problem::race, 16).first.program, (Triple{writer, 0, 0}));
  }
}

TEST(Race, AtomicsAmongThemselvesAreRightButNotWithPlainAccesses) {
  Array<s32> total("total", {1}, {0}), copy("copy", {4});
  Report report = launch(
      CheckedCpu{}, Grid{4}, [](auto& t, auto pt) { t.atomic_add(pt, 2); }, total);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(total[0], 8);

  report = launch(
      CheckedCpu{}, Grid{4},
      [](auto& t, auto pt, auto pc) {
        line = __LINE__, t.atomic_add(pt, 2);
        t.barrier();
        t.store(pc + t.program_id(0), t.load(pt));
      },
      total, copy);
  only(report, Problem::race, 1);

  report = launch(
      CheckedCpu{}, Grid{4},
      [](auto& t, auto pt) {
        if (t.program_id(0) == 2) line = __LINE__, t.store(pt, 0);
        t.atomic_max(pt, 2);
      },
      total);
  only(report, Problem::race, 1);
}

TEST(Race, ReadingTogetherAndWritingApartIsRight) {
  auto x = ramp("x", {32});
  Array<f32> z("z", {4, 32});
  const Report report = launch(
      CheckedCpu{}, Grid{4},
      [](auto& t, auto px, auto pz) {
        const auto j = t.arange(c<32>);
        t.store(pz + t.program_id(0) * 32 + j, t.load(px + j));
      },
      x, z);
  EXPECT_TRUE(report.clean()) << all(report);
}

TEST(Race, TwoLanesOfOneStore) {
  Array<f32> z("z", {40});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto pz) {
        const auto i = col(t.arange(c<4>)) * 6 + t.arange(c<8>);  // rows overlap by two
        line = __LINE__, t.store(pz + i, 1.0f);
      },
      z);
  EXPECT_EQ(only(report, Problem::same_address, 6).first.index, 6);
}

TEST(Barrier, IsNeededBeforeReadingWhatWasStored) {
  Array<f32> z("z", {32});
  Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto pz) {
        const auto i = t.arange(c<16>);
        t.store(pz + i, 1.0f);
        const auto v = (line = __LINE__, t.load(pz + i));
        t.store(pz + i + 16, v);
      },
      z);
  only(report, Problem::unordered, 16);
  report = launch(
      CheckedCpu{}, Grid{2},
      [](auto& t, auto pz) {
        const auto i = t.program_id(0) * 16 + t.arange(c<16>);
        t.store(pz + i, 1.0f);
        t.barrier();
        t.store(pz + i, t.load(pz + i) + 1.0f);
      },
      z);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(z[31], 2.0f);
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
  only(report, Problem::overflow, 1);
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
  only(report, Problem::undefined_index, 16);
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

// ---- Coalescing, records, counts ----

// A copy of 64 x 64 floats by tiles of 8 x 64: by rows, by columns, and from an odd address.
Report copied(int row, int column, int first, std::int64_t size) {
  auto x = ramp("x", {size});
  Array<f32> z("z", {64, 64});
  const Report report = launch(
      CheckedCpu{.layout = {4, 32, 4}}, Grid{8},
      [](auto& t, auto px, auto pz, int r, int k, int start) {
        const auto i = col(t.program_id(0) * 8 + t.arange(c<8>));
        const auto j = t.arange(c<64>);
        t.store(pz + i * 64 + j, t.load(px + i * r + j * k + start));
      },
      x, z, row, column, first);
  EXPECT_TRUE(report.clean()) << all(report);
  return report;
}

TEST(Coalescing, CountsWhatWarpsAskFor) {
  const Site rows = copied(64, 1, 0, 4096).sites[0];
  EXPECT_EQ(rows.sectors, 512);
  // With j * k the compiler does not know that neighbours are neighbours, but the addresses are. 4 x 32 threads of four
  // elements: two requests of each warp, half of whose threads hold 64 columns.
  EXPECT_EQ(rows.requests, 64);
  EXPECT_EQ(rows.request_sectors, 512);
  EXPECT_EQ(rows.request_least, 512);
  EXPECT_EQ(rows.scalar_calls, 0);

  const Site columns = copied(1, 64, 0, 4096).sites[0];
  EXPECT_EQ(columns.sectors, 512);  // a tile reads whole sectors, but
  EXPECT_EQ(columns.requests, 256);
  EXPECT_EQ(columns.request_sectors, 4096);  // each thread one of its own
  EXPECT_EQ(columns.request_least, 512);

  const Site odd = copied(64, 1, 1, 4097).sites[0];
  EXPECT_EQ(odd.scalar_calls, 8);
  EXPECT_EQ(odd.misaligned_calls, 8);
  EXPECT_EQ(odd.requests, 256);
  EXPECT_GT(odd.request_sectors, 3 * odd.request_least);
}

TEST(Coalescing, DependsOnWhereInASectorAnAccessStarts) {
  auto x = ramp("x", {67});
  const Report report = launch(
      CheckedCpu{.layout = {1, 32, 1}}, Grid{8},
      [](auto& t, auto px) { (void)t.load(px + t.program_id(0) * 5 + t.arange(c<32>)); }, x);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(report.sites[0].requests, 8);
  EXPECT_EQ(report.sites[0].request_sectors, 4 + 7 * 5);  // 128 bytes; all but the first straddle a fifth sector
  EXPECT_EQ(report.sites[0].request_least, 8 * 4);
}

TEST(Report, CountsLanesBytesAndElements) {
  auto x = ramp("x", {200});
  Array<f32> z("z", {200});
  const Report report = launch(
      CheckedCpu{}, Grid{7},
      [](auto& t, auto px, auto pz) {
        const auto i = t.program_id(0) * 32 + t.arange(c<32>);
        t.store(pz + i, t.load(px + i, i < 200) + t.load(px + (199 - i), i < 200), i < 200);
      },
      x, z);
  ASSERT_EQ(report.sites.size(), 3u);
  for (const Site& site : report.sites) {
    EXPECT_EQ(site.calls, 7);
    EXPECT_EQ(site.lanes, 224);
    EXPECT_EQ(site.active, 200);
    EXPECT_EQ(site.bytes, 800);
  }
  EXPECT_EQ(report.tensors[0].elements_read, 200);
  EXPECT_EQ(report.tensors[1].elements_written, 200);
  EXPECT_EQ(report.tensors[1].elements_read, 0);
}

// The records say, element by element, what was read and written: counted again from them, it is the same.
TEST(Report, RecordsCountTheSame) {
  auto x = ramp("x", {3, 11, 13});
  Array<s32> index("index", {16}, {5, 6, 7, 8, 1, 3, 5, 7, 9, 11, 0, 0, 4, 2, 1, 0});
  Array<f32> z("z", {3, 11, 13}), gathered("gathered", {16});
  const Report report = launch(
      CheckedCpu{}, Grid{1, 2},
      [](auto& t, auto px, auto pi, auto pz, auto pg) {
        const auto p = col(col(t.arange(c<4>)));
        const auto i = col(t.arange(c<16>));
        const auto j = t.program_id(1) * 8 + t.arange(c<8>);
        const auto in = (p < 3) & (i < 11) & (j < 13);
        const auto odd = t.load(px + p * 143 + i * 13 + j, in & (j != 4), 0.0f);
        t.store(pz + p * 143 + i * 13 + j, odd, in);
        const auto k = t.arange(c<16>);
        if (t.program_id(1) == 0) t.store(pg + k, t.load(px + t.load(pi + k)));
      },
      x, index, z, gathered);
  EXPECT_TRUE(report.clean()) << all(report);
  std::vector<std::int64_t> active(report.sites.size());
  std::vector<std::vector<int>> touched(report.sites.size());
  for (std::size_t s = 0; s < touched.size(); ++s) {
    touched[s].resize(static_cast<std::size_t>(report.tensors[static_cast<std::size_t>(report.sites[s].tensor)].size));
  }
  for (const Record& r : report.records) {
    for (int p = 0; p < r.planes; ++p) {
      for (int i = 0; i < r.rows; ++i) {
        for (int j = 0; j < r.columns; ++j) {
          ++active[static_cast<std::size_t>(r.site)];
          ++touched[static_cast<std::size_t>(r.site)]
                   [static_cast<std::size_t>(r.base + p * r.plane_stride + i * r.row_stride + j * r.column_stride)];
        }
      }
    }
  }
  for (std::size_t s = 0; s < active.size(); ++s) EXPECT_EQ(active[s], report.sites[s].active) << s;
  for (int k = 0; k < 429; ++k) {
    EXPECT_EQ(touched[0][static_cast<std::size_t>(k)], k % 13 == 4 ? 0 : 1) << k;  // j != 4
    EXPECT_EQ(touched[1][static_cast<std::size_t>(k)], 1) << k;
  }
  EXPECT_LE(report.records.size(), 20u);  // boxes, not elements
}

TEST(Report, KeepsNoMoreRecordsThanAsked) {
  auto x = ramp("x", {200});
  const Report report = launch(
      CheckedCpu{.most_records = 3}, Grid{5}, [](auto& t, auto px) { (void)t.load(px + t.program_id(0)); }, x);
  EXPECT_EQ(report.records.size(), 3u);
  EXPECT_EQ(report.records_left_out, 2);
}

TEST(Report, EmptyGridAndEmptyTensor) {
  Array<f32> x("x", {0, 5});
  const Report report = launch(
      CheckedCpu{}, Grid{0}, [](auto& t, auto px) { (void)t.load(px); }, x);
  EXPECT_TRUE(report.clean());
  const Report outside = launch(
      CheckedCpu{}, Grid{1}, [](auto& t, auto px) { (line = __LINE__, t.load(px)); }, x);
  only(outside, Problem::out_of_bounds, 1);
}

}  // namespace
}  // namespace octile::tile
