// The CUDA executor on emulated blocks of threads: index maps, shuffles, matrix fragments, asynchronous copies and
// barriers, against the fast CPU executor.
#include <gtest/gtest.h>

#include "tile_cuda_cases.h"

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

// Each layout with the groups that it does in a way of its own; tile_cuda_test.cu has all of both.
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
TEST(CudaEmulation, MatrixUnitsOfFloats) {
  expect_the_results_of_the_cpu<Warps<2, 2>>([](auto& cases) { cases.float_dots(); });
}
TEST(CudaEmulation, MatrixUnitsOfBytes) {
  expect_the_results_of_the_cpu<Warps<2, 2, 4>>([](auto& cases) { cases.bytes_forward(); });
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
  for (int i = 0; i < 2'000'000; ++i) {
    const std::uint64_t bits = random();
    const auto exponent = [&](int shift) { return 67u + static_cast<std::uint32_t>(bits >> shift) % 120u; };
    // Every eighth divisor has nearly all bits set, every eighth next to none.
    const std::uint32_t ones = i % 8 == 0 ? 0x7ffff0u : 0u, kept = i % 8 == 1 ? 0xfu : 0x7fffffu;
    const f32 x = bits_as<f32>((exponent(48) << 23) | (static_cast<std::uint32_t>(bits) & 0x7fffffu));
    const f32 y = bits_as<f32>((exponent(56) << 23) | (((static_cast<std::uint32_t>(bits >> 24) & kept) | ones)));
    if (!gpu::divides_plainly(x) || !gpu::divides_plainly(y)) continue;
    wrong += bits_as<std::uint32_t>(gpu::divide_plainly(x, y, 1.0f / y)) != bits_as<std::uint32_t>(x / y);
  }
  EXPECT_EQ(wrong, 0);
}

TEST(CudaLayout, EveryElementHasOneOwner) {
  const auto check = []<class L, class S>(L, S) {
    using P = Part<L, S>;
    std::vector<int> owners(static_cast<std::size_t>(S::kSize));
    for (int thread = 0; thread < L::kThreads; ++thread) {
      for (int i = 0; i < P::kSize && P::owns(thread); ++i) {
        const int line = i / P::kRow, group = i % P::kRow / P::kVector;
        const int row = line / P::kRows * S::kRows + P::row(L::row(thread), line % P::kRows);
        ++owners[static_cast<std::size_t>(row * S::kColumns + P::column(L::column(thread), group) + i % P::kVector)];
      }
    }
    for (const int n : owners) ASSERT_EQ(n, 1);
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
  shapes(Threads<256, 1, 1>{});
  shapes(Warps<1, 1>{});
  shapes(Warps<2, 4>{});
  shapes(Warps<4, 2, 4>{});
}

}  // namespace
}  // namespace octile::tile
