// The checked executor's reports of unordered accesses: for each kind, a kernel that it must report, at the
// right line, and a correct one.
#include <stdexcept>

#include "checker.h"

namespace octile::tile {
namespace {

// ---- Several programs ----

struct WriteThenReadNeighbour {  // every program writes element p and reads element (p + step) modulo n
  template <class T, class P, class Q>
  void operator()(T& t, P shared, Q z, int step, int n) const {
    const int p = t.program_id(0);
    const auto write = [&] { line = __LINE__, t.store(shared + p, 1.0f); };
    const auto read = [&] { t.store(z + p, t.load(shared + (p + step + n) % n)); };
    if (step > 0) {
      read();  // what a later program writes
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

// All three programs read what one of them writes, whichever it is.
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

TEST(Race, AlsoWhereTheSameValueIsStored) {
  Array<f32> z("z", {40});
  const Report report = launch(
      CheckedCpu{}, Grid{5},
      [](auto& t, auto pz) {  // blocks of 8, and one more
        const auto i = t.program_id(0) * 8 + t.arange(c<16>);
        line = __LINE__, t.store(pz + i, 1.0f, (t.arange(c<16>) <= 8) & (i < 40));
      },
      z);
  EXPECT_EQ(only(report, Problem::race, 4).first.index, 8);
}

// In this order the next program overwrites it, so the result is right.
TEST(Race, AStoreBeyondItsRow) {
  auto x = ramp("x", {4, 20});
  Array<f32> z("z", {4, 20});
  const Report report = launch(
      CheckedCpu{}, Grid{4},
      [](auto& t, auto px, auto pz) {
        const auto j = t.arange(c<32>), i = t.program_id(0) * 20 + j;
        line = __LINE__, t.store(pz + i, t.load(px + i, j < 20, 0.0f), i < 80);
      },
      x, z);
  only(report, Problem::race, 12 * 3);
  for (int i = 0; i < 80; ++i) EXPECT_EQ(z[i], x[i]);
}

TEST(Race, ThroughTwoNamesOfOneTensor) {
  auto x = ramp("x", {64});
  const Report report = launch(
      CheckedCpu{}, Grid{8},
      [](auto& t, auto from, auto to) {
        const auto i = t.program_id(0) * 8 + t.arange(c<8>);
        const auto v = t.load(from + i + 1, i < 63, 0.0f);
        t.barrier();
        line = __LINE__, t.store(to + i, v);
      },
      x, x);
  EXPECT_EQ(only(report, Problem::race, 7).first.index, 8);
  EXPECT_EQ(report.tensors.size(), 1u);
  const Report in_place = launch(
      CheckedCpu{}, Grid{8},
      [](auto& t, auto from, auto to) {
        const auto i = t.program_id(0) * 8 + t.arange(c<8>);
        t.store(to + i, t.load(from + i) + 1.0f);
      },
      x, x);
  EXPECT_TRUE(in_place.clean()) << all(in_place);
}

TEST(Race, TensorsThatShareAPart) {
  auto x = ramp("x", {64});
  const auto copy = [](auto& t, auto from, auto to) { t.store(to, t.load(from)); };
  const Tensor<f32> a{"a", x.data(), {40}}, b{"b", x.data() + 39, {25}}, c{"c", x.data() + 40, {24}};
  try {
    launch(CheckedCpu{}, Grid{1}, copy, a, b);
    ADD_FAILURE();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("a and b share a part"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(launch(CheckedCpu{}, Grid{1}, copy, a, c).clean());
}

// ---- One program, whose lanes are threads ----

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

TEST(Barrier, BeforeOverwritingWhatAnotherLaneReads) {
  const auto reverse = [](auto& t, auto x, auto wait) {
    const auto i = t.arange(c<64>);
    const auto v = t.load(x + (63 - i));
    if constexpr (wait != 0) t.barrier();
    line = __LINE__, t.store(x + i, v);
  };
  auto x = ramp("x", {64});
  const Report report = launch(CheckedCpu{}, Grid{1}, reverse, x, c<0>);
  const Finding finding = only(report, Problem::unordered, 64);
  EXPECT_EQ(report.sites[static_cast<std::size_t>(finding.first.other_site)].access, Access::load);
  EXPECT_EQ(finding.first.other_program, (Triple{0, 0, 0}));
  EXPECT_NE(all(report).find("; also load at checker_order_test.cpp:"), std::string::npos) << all(report);
  const Report right = launch(CheckedCpu{}, Grid{1}, reverse, x, c<1>);
  EXPECT_TRUE(right.clean()) << all(right);
}

TEST(Barrier, IsNotNeededToOverwriteWhatTheLaneItselfUsed) {
  auto x = ramp("x", {4, 64});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px) {
        const auto i = col(t.arange(c<4>)) * 64 + t.arange(c<64>);
        for (int k = 0; k < 3; ++k) {
          const auto v = t.load(px + i) + t.load(px + i, i > 7);
          t.store(px + i, v, i > 7);
          t.store(px + i, 2.0f * v, i > 7);
          t.barrier();
        }
      },
      x);
  EXPECT_TRUE(report.clean()) << all(report);
}

// A row writes too much; in this order the next row overwrites it.
TEST(Barrier, BetweenStoresOfDifferentLanes) {
  const auto rows = [](auto& t, auto pz) {
    const auto j = t.arange(c<32>);
    for (int row = 0; row < 4; ++row) {
      line = __LINE__, t.store(pz + (j + row * 20), 1.0f, j + row * 20 < 80);
    }
  };
  Array<f32> z("z", {80});
  const Finding finding = only(launch(CheckedCpu{}, Grid{1}, rows, z), Problem::unordered, 3 * 12);
  EXPECT_EQ(finding.first.index, 20);
  // In a tile of another shape, other threads hold the elements.
  const auto shapes = [](auto& t, auto pz, auto wait) {
    t.store(pz + t.arange(c<64>), 0.0f);
    if constexpr (wait != 0) t.barrier();
    line = __LINE__, t.store(pz + (col(t.arange(c<8>)) * 8 + t.arange(c<8>)), 1.0f);
  };
  only(launch(CheckedCpu{}, Grid{1}, shapes, z, c<0>), Problem::unordered, 64);
  EXPECT_TRUE(launch(CheckedCpu{}, Grid{1}, shapes, z, c<1>).clean());
}

TEST(Barrier, BetweenStoresAndAtomics) {
  const auto store_first = [](auto& t, auto bins, auto wait) {
    t.store(bins + t.arange(c<8>), 0);
    if constexpr (wait != 0) t.barrier();
    line = __LINE__, t.atomic_add(bins + (t.arange(c<32>) & 7), 1);
    t.atomic_add(bins + (t.arange(c<16>) & 7), 1);
  };
  Array<s32> bins("bins", {8}), out("out", {8});
  only(launch(CheckedCpu{}, Grid{1}, store_first, bins, c<0>), Problem::unordered, 8);  // from then on they are atomic
  const Report right = launch(CheckedCpu{}, Grid{1}, store_first, bins, c<1>);
  EXPECT_TRUE(right.clean()) << all(right);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(bins[i], 6);
  const auto load_after = [](auto& t, auto counts, auto to, auto wait) {
    const auto i = t.arange(c<8>);
    t.atomic_add(counts + i, 1);
    if constexpr (wait != 0) t.barrier();
    const auto v = (line = __LINE__, t.load(counts + i));
    t.store(to + i, v);
  };
  only(launch(CheckedCpu{}, Grid{1}, load_after, bins, out, c<0>), Problem::unordered, 8);
  EXPECT_TRUE(launch(CheckedCpu{}, Grid{1}, load_after, bins, out, c<1>).clean());
}

// ---- Pipelines ----

struct Prefix {  // adds the previous block to each block of 16
  void operator()(auto& t, auto x, auto z) const {
    t.pipeline(
        c<3>, 4,
        [&](int k) {
          line = __LINE__ + 1;
          return fetches(t.fetch(z + (t.arange(c<16>) + 16 * k)), t.fetch(x + (t.arange(c<16>) + 16 * k)));
        },
        [&](int k, const auto& before, const auto& v) {
          t.store(z + (t.arange(c<16>) + 16 * (k + 1)), before + v);
          t.barrier();
        });
  }
};

TEST(Pipeline, LoadsAheadOfWhatItsBodiesStore) {
  auto x = ramp("x", {80});
  Array<f32> z("z", {80});
  z.fill(0);
  only(launch(CheckedCpu{}, Grid{1}, Prefix{}, x, z), Problem::unordered, 3 * 16);
}

TEST(Pipeline, WhatWasStoredBeforeItAndABarrierIsThere) {
  auto x = ramp("x", {64});
  Array<f32> y("y", {64}), z("z", {64});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto py, auto pz) {
        const auto i = t.arange(c<16>);
        for (int k = 0; k < 4; ++k) t.store(py + (i + 16 * k), t.load(px + (i + 16 * k)));
        t.barrier();
        t.pipeline(
            c<2>, 4, [&](int k) { return fetches(t.fetch(py + (15 - i + 16 * k))); },
            [&](int k, const auto& v) {
              t.store(py + (i + 16 * k), v);  // its loads are complete
              t.store(pz + (i + 16 * k), v);
            });
        t.barrier();
        t.store(pz + i, t.load(pz + i) + 1.0f);
      },
      x, y, z);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(z[0], 16.0f);
  EXPECT_EQ(z[63], 48.0f);
}

TEST(Pipeline, WithinAnother) {
  auto x = ramp("x", {64}), y = ramp("y", {4, 48});
  Array<f32> z("z", {64});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto py, auto pz) {
        const auto i = t.arange(c<16>);
        t.pipeline(
            c<3>, 4, [&](int k) { return fetches(t.fetch(px + (i + 16 * k))); },
            [&](int k, const auto& v) {
              auto total = t.full(c<16>, 0.0f);
              t.pipeline(
                  c<2>, 3, [&](int step) { return fetches(t.fetch(py + (i + 16 * step + 48 * k))); },
                  [&](int, const auto& w) { total += w; });
              t.store(pz + (i + 16 * k), v + total);
            });
      },
      x, y, z);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(z[0], x[0] + y[0] + y[16] + y[32]);
  EXPECT_EQ(z[63], x[63] + y[159] + y[175] + y[191]);
}

// On a GPU a step is staged before the bodies of earlier steps, and again at its turn.
TEST(Pipeline, AStageThatDependsOnMoreThanItsStepGoesWrong) {
  auto x = ramp("x", {64});
  Array<f32> z("z", {64});
  const auto running = [](auto& t, auto px, auto pz) {
    int first = 0;
    t.pipeline(
        c<2>, 4,
        [&](int) {
          first += 16;
          line = __LINE__ + 1;
          return fetches(t.fetch(px + (t.arange(c<16>) + first - 16)));
        },
        [&](int k, const auto& v) { t.store(pz + (t.arange(c<16>) + 16 * k), v); });
  };
  only(launch(CheckedCpu{}, Grid{1}, running, x, z), Problem::out_of_bounds, 16);
  const auto by_body = [](auto& t, auto px, auto pz) {
    int first = 0;
    t.pipeline(
        c<2>, 4, [&](int) { return fetches(t.fetch(px + (t.arange(c<16>) + first))); },
        [&](int k, const auto& v) {
          first += 16;
          t.store(pz + (t.arange(c<16>) + 16 * k), v);
        });
  };
  const Report report = launch(CheckedCpu{}, Grid{1}, by_body, x, z);
  EXPECT_EQ(z[16], 0.0f);  // as on a GPU: not 16
  EXPECT_EQ(report.sites[0].calls, 4);
}

}  // namespace
}  // namespace octile::tile
