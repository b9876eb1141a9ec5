// The CUDA executor on emulated blocks of threads: index maps, shuffles, matrix fragments, asynchronous copies and
// barriers, against the fast CPU executor.
#include <gtest/gtest.h>

#include "cuda_cases.h"

namespace octile::tile {
namespace {

struct Emulated {
  bool backwards;
  template <class L, class... Args>
  void launch(Grid grid, Args&&... args) {
    Cuda<L> executor;
    executor.backwards = backwards;
    octile::tile::launch(executor, grid, args...);
  }
};

// A group of cases on a layout, with the threads in both orders.
template <class L, class Group>
void expect_the_results_of_the_cpu(Group group) {
  for (const bool backwards : {false, true}) {
    Emulated machine{backwards};
    cuda_cases::Cases<L, Emulated> cases(machine);
    group(cases);
    EXPECT_GT(cases.runs(), 0);
    EXPECT_EQ(cases.wrong(), 0);
  }
}

TEST(CudaEmulation, WhatMayHaveBeenWrittenCountsAsWritten) {
  Array<f32> z("z", {32});
  launch(
      Cuda<Threads<4, 32>>{}, Grid{1}, [](auto& t, auto pz) { t.store(pz + t.arange(c<32>), 1.0f); }, z);
  EXPECT_TRUE(z.written(31));
  EXPECT_EQ(z[31], 1.0f);
}

// Each layout with the groups that it handles differently; cuda_test.cu combines all of both.
TEST(CudaEmulation, OneWarpARow) {
  expect_the_results_of_the_cpu<Threads<4, 32>>([](auto& cases) {
    cases.elementwise();
    cases.tiles();
    cases.integers();
  });
}
TEST(CudaEmulation, OneBlockARow) {
  expect_the_results_of_the_cpu<Threads<1, 128>>([](auto& cases) { cases.rows(); });
}
TEST(CudaEmulation, TwoWarpsARow) {
  expect_the_results_of_the_cpu<Threads<2, 64>>([](auto& cases) {
    cases.reductions();
    cases.pipelines();
  });
}
TEST(CudaEmulation, MatrixUnitsOfFloats) {
  expect_the_results_of_the_cpu<Warps<2, 2>>([](auto& cases) { cases.float_dots(); });
}
TEST(CudaEmulation, MatrixUnitsOfBytes) {
  expect_the_results_of_the_cpu<Warps<2, 2, 4>>([](auto& cases) { cases.bytes_forward(); });
}

TEST(CudaEmulation, Warpgroups) {
  expect_the_results_of_the_cpu<Warpgroups<2>>([](auto& cases) { cases.warpgroups(); });
}
TEST(CudaEmulation, WarpgroupsAlone) {
  expect_the_results_of_the_cpu<Warpgroups<2, NoFallback>>([](auto& cases) {
    cases.template by_wgmma<false>();
    cases.rows_of_warpgroups();
  });
}
TEST(CudaEmulation, WarpgroupsOfTf32) {
  expect_the_results_of_the_cpu<Warpgroups<2, NoFallback, true>>([](auto& cases) { cases.tf32(); });
}
TEST(CudaEmulation, OneWarpgroup) {  // its fallback is compiled above
  expect_the_results_of_the_cpu<Warpgroups<1, Warps<2, 2, 4>>>([](auto& cases) { cases.bytes_forward(); });
  expect_the_results_of_the_cpu<Warpgroups<1, Warps<2, 2>>>([](auto& cases) { cases.float_dots(); });
}

TEST(CudaMath, Exp2HasTheSameBits) {
  std::int64_t wrong = 0;
  for (std::uint64_t i = 0; i <= 0xffffffffu; i += 97) {
    const f32 x = bits_as<f32>(static_cast<std::uint32_t>(i));
    if (!(std::fabs(x) <= gpu::kExp2Normal)) continue;
    wrong += bits_as<std::uint32_t>(gpu::exp2_normal(x)) != bits_as<std::uint32_t>(scalar::Exp2{}(x));
  }
  EXPECT_EQ(wrong, 0);
}

TEST(CudaMath, DivisionHasTheSameBits) {
  std::mt19937_64 random(5);
  std::int64_t wrong = 0;
  const auto check = [&](f32 x, f32 y) {
    wrong += bits_as<std::uint32_t>(gpu::divide_plainly(x, y, 1.0f / y)) != bits_as<std::uint32_t>(x / y);
  };
  const auto number = [&] {
    const auto bits = random();
    const auto exponent = 67u + static_cast<std::uint32_t>(bits >> 48) % 120u;
    return bits_as<f32>((exponent << 23) | (static_cast<std::uint32_t>(bits) & 0x807fffffu));
  };
  for (int i = 0; i < 1'000'000; ++i) check(number(), std::fabs(number()));
  for (const f32 x : {0.0f, -0.0f, 0x1p-60f, -0x1p60f}) {
    for (const f32 y : {0x1p-60f, 0.3f, 1.0f, 0x1p60f}) check(x, y);
  }
  EXPECT_EQ(wrong, 0);
}

// The quotients nearest to the middle of two floats: X 2^s = (2 K + 1) Y + j with a small j, for integers X
// and Y of 24 bits; s is 24 if X >= Y, else 25. An error of 3 / 2^24 units in the last place reaches |j| = 6.
TEST(CudaMath, DivisionIsRightWhereItIsHardest) {
  std::int64_t wrong = 0, tried = 0;
  const auto divide = [&](std::int64_t y) {
    constexpr std::int64_t kLow = 1 << 23, kHigh = 1 << 24;
    int zeros = 0;
    while (y >> zeros << zeros == y) ++zeros;
    --zeros;
    const std::int64_t odd = y >> zeros;  // j is a multiple of 2^zeros, and X is known modulo this
    for (const int s : {24, 25}) {
      std::int64_t inverse = 1 % odd;  // of 2^(s - zeros)
      for (int i = 0; i < s - zeros; ++i) inverse = (inverse % 2 == 0 ? inverse : inverse + odd) / 2;
      for (std::int64_t j = -8; j <= 8; ++j) {
        if (j == 0 || (j >> zeros << zeros) != j) continue;
        const std::int64_t low = s == 24 ? y : kLow, high = s == 24 ? kHigh : y;
        const std::int64_t rest = ((j >> zeros) % odd + odd) % odd * inverse % odd;
        for (std::int64_t x = low + ((rest - low) % odd + odd) % odd; x < high; x += odd) {
          const f32 a = static_cast<f32>(x), b = static_cast<f32>(y);
          wrong += gpu::divide_plainly(a, b, 1.0f / b) != a / b;
          ++tried;
        }
      }
    }
  };
  // Checked once for every Y: all 180 million such quotients are correct.
  for (std::int64_t y = 1 << 23; y < 1 << 24; y += 613) divide(y);
  EXPECT_GT(tried, 100'000);
  EXPECT_EQ(wrong, 0);
}

// A layout's part of a shape, as numbers: the test below is compiled once.
struct PartOf {
  int threads, size, row_size, vector, rows, shape_rows, shape_columns, shape_size;
  bool (*owns)(int thread);
  int (*thread_row)(int thread);
  int (*row)(int thread_row, int line);
  int (*column)(int thread, int group);
};

void expect_one_owner_of_each(const PartOf& p) {
  std::vector<int> owners(static_cast<std::size_t>(p.shape_size));
  for (int thread = 0; thread < p.threads; ++thread) {
    for (int i = 0; i < p.size && p.owns(thread); ++i) {
      const int line = i / p.row_size, group = i % p.row_size / p.vector;
      const int row = line / p.rows * p.shape_rows + p.row(p.thread_row(thread), line % p.rows);
      ++owners[static_cast<std::size_t>(row * p.shape_columns + p.column(thread, group) + i % p.vector)];
    }
  }
  for (const int n : owners) ASSERT_EQ(n, 1);
}

TEST(CudaLayout, EveryElementHasOneOwner) {
  const auto check = []<class L, class S>(L, S) {
    using P = Part<L, S>;
    expect_one_owner_of_each({L::kThreads, P::kSize, P::kRow, P::kVector, P::kRows, S::kRows, S::kColumns, S::kSize,
                              P::owns, L::row, P::row, P::column});
  };
  const auto shapes = [&]<class L>(L layout) {
    check(layout, Shape<1, 1, 1>{});
    check(layout, Shape<1, 1, 2>{});
    check(layout, Shape<2, 4, 32>{});
    check(layout, Shape<1, 64, 1>{});
    check(layout, Shape<1, 1, 4096>{});
    check(layout, Shape<1, 128, 128>{});
    check(layout, Shape<4, 16, 8>{});
  };
  shapes(Threads<1, 32>{});
  shapes(Threads<8, 16, 8>{});
  shapes(Threads<1, 128>{});
  shapes(Threads<2, 256>{});
  shapes(Threads<256, 1, 1>{});
  shapes(Warps<1, 1>{});
  shapes(Warps<2, 4>{});
  shapes(Warps<4, 2, 4>{});
}

}  // namespace
}  // namespace octile::tile
