// Launches on both CPU executors: grids, threads and exceptions, loops, program indices, large tiles, far pointers.
#include <stdexcept>

#include "operators.h"

namespace octile::tile {
namespace {

// ---- Exceptions ----

TEST(Exceptions, OfAKernelReachTheCaller) {
  Array<f32> z("z", {64});
  const auto kernel = [](auto& t, auto pz) {
    if (static_cast<int>(t.program_id(0)) == 40) throw std::runtime_error("at 40");
    t.store(pz + t.program_id(0), 1.0f);
  };
  for (const int threads : {1, 4}) {
    try {
      launch(FastCpu{.threads = threads}, Grid{64}, kernel, z);
      ADD_FAILURE() << threads << " threads";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "at 40");
    }
  }
  EXPECT_THROW(launch(CheckedCpu{}, Grid{64}, kernel, z), std::runtime_error);
}

TEST(Exceptions, OfEveryThread) {
  Array<f32> z("z", {64});
  const auto kernel = [](auto& t, auto pz) { t.store(pz + t.program_id(3), 1.0f); };
  EXPECT_THROW(launch(FastCpu{.threads = 4}, Grid{1000}, kernel, z), std::invalid_argument);
}

TEST(Exceptions, EndALaunchEarly) {
  Array<s32> z("z", {1}, {0});
  const auto kernel = [](auto& t, auto pz) {
    if (static_cast<int>(t.program_id(0)) == 0) throw std::runtime_error("at 0");
    t.atomic_add(pz, 1);
  };
  EXPECT_THROW(launch(FastCpu{.threads = 2}, Grid{1 << 22}, kernel, z), std::runtime_error);
  EXPECT_LT(z[0], (1 << 22) - 1);
}

// ---- Program indices ----

TYPED_TEST(OnCpu, AProgramIndexIsAVariable) {
  constexpr int kPrograms = 3;
  Array<s32> z("z", {16}), w("w", {3, 8});
  run<TypeParam>(
      {kPrograms},
      [](auto& t, auto pz, auto pw) {
        for (auto p = t.program_id(0); p < 16; p += t.num_programs(0)) t.store(pz + p, p * 2);
        auto q = t.program_id(0);
        const auto store = [&](int i) { t.store(pw + (t.program_id(0) * 8 + i), q); };
        q *= 10;
        store(0);
        q -= 3;
        store(1);
        q /= 2;
        store(2);
        q %= 3;
        store(3);
        ++q;
        store(4);
        q--;
        --q;
        store(5);
        q = -q;
        store(6);
        q = 7;
        q++;
        q += std::int64_t{1};
        store(7);
      },
      z, w);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(z[i], 2 * i);
  for (int p = 0; p < kPrograms; ++p) {
    const int a = 10 * p, b = a - 3, half = b / 2, rest = half % 3, up = rest + 1, down = up - 2;
    int i = 0;
    for (const int expected : {a, b, half, rest, up, down, -down, 9}) EXPECT_EQ(w[8 * p + i++], expected) << p;
  }
}

// ---- Pointers ----

// Only the end of a tensor of more than 2^31 elements exists.
TEST(Pointers, AddOffsetsToALoadedIndexIn64Bits) {
  constexpr std::int64_t kSize = (std::int64_t{1} << 31) + 64;
  std::vector<s8> end(128);
  for (int i = 0; i < 128; ++i) end[static_cast<std::size_t>(i)] = static_cast<s8>(i);
  Tensor<s8> x{"x", reinterpret_cast<s8*>(reinterpret_cast<std::uintptr_t>(end.data()) - (kSize - 128)), {kSize}};
  Array<s32> index("index", {8});
  for (int i = 0; i < 8; ++i) index.set(i, 2147483640 + i);
  Array<s8> z("z", {4, 8});
  launch(
      FastCpu{.threads = 1}, Grid{1},
      [](auto& t, auto px, auto pi, auto pz) {
        const auto i = t.arange(c<8>);
        const auto v = t.load(pi + i);
        t.store(pz + i, t.load(px + v + i));
        t.store(pz + 8 + i, t.load(px + i + v));
        t.store(pz + 16 + i, t.load(px + v + 2 * i - i));
        auto wide = px + cast<s64>(v);
        wide += i;
        t.store(pz + 24 + i, t.load(wide));
      },
      x, index, z);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(z[i], 56 + 2 * (i % 8)) << i;
}

}  // namespace
}  // namespace octile::tile
