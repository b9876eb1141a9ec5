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

// ---- Grids and loops ----

TYPED_TEST(OnCpu, AGridHasNoNegativeSide) {
  Array<f32> z("z", {1});
  const auto kernel = [](auto& t, auto pz) { t.store(pz + t.program_id(0), 1.0f); };
  for (const Grid grid : {Grid{-3}, Grid{1, -1}, Grid{-1, -1, 1}}) {
    try {
      launch(TypeParam{}, grid, kernel, z);
      ADD_FAILURE();
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("a grid has sides from 0, and not ("), std::string::npos);
    }
  }
  launch(TypeParam{}, Grid{0, 5}, kernel, z);
}

TEST(Cdiv, RoundsUpNearTheEnds) {
  EXPECT_EQ(cdiv(2147483647, 1024), 2097152);
  EXPECT_EQ(cdiv(0, 3), 0);
  EXPECT_EQ(cdiv(7, 3), 3);
  EXPECT_EQ(cdiv(6, 3), 2);
  EXPECT_EQ(cdiv(-5, 2), -2);
  EXPECT_EQ(cdiv(5, -2), -2);
  EXPECT_EQ(cdiv(-5, -2), 3);
  EXPECT_EQ(cdiv(-2147483647 - 1, 2), -1073741824);
}

std::vector<int> listed(const Range& range) {
  std::vector<int> result;
  for (const int k : range) {
    if (result.size() == 5000) break;
    result.push_back(k);
  }
  return result;
}

TEST(Ranges, AreThoseOfPython) {
  constexpr int kMax = 2147483647, kMin = -kMax - 1;
  EXPECT_EQ(listed(range(3)), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(listed(range(2, 9, 3)), (std::vector<int>{2, 5, 8}));
  EXPECT_EQ(listed(range(2, 8, 3)), (std::vector<int>{2, 5}));
  EXPECT_EQ(listed(range(9, 2, -3)), (std::vector<int>{9, 6, 3}));
  EXPECT_EQ(listed(range(-1)), std::vector<int>{});
  EXPECT_EQ(listed(range(5, 5)), std::vector<int>{});
  EXPECT_EQ(listed(range(0, 5, 0)), std::vector<int>{});
  EXPECT_EQ(listed(range(0, kMax, 1 << 20)).size(), 2048u);
  EXPECT_EQ(listed(range(kMin, kMax, kMax)), (std::vector<int>{kMin, -1, kMax - 1}));
  EXPECT_EQ(listed(range(kMax, kMin, kMin)), (std::vector<int>{kMax, -1}));
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

// ---- Large tiles ----

TYPED_TEST(OnCpu, ATileMayHave1048576Elements) {
  constexpr int n = 1 << 20;
  Array<f32> x("x", {n}), z("z", {n}), s("s", {1});
  for (int i = 0; i < n; ++i) x.set(i, static_cast<float>(i % 1000));
  run<TypeParam>(
      {2},
      [](auto& t, auto px, auto pz, auto ps) {
        const auto i = t.arange(c<n>);
        const auto v = t.load(px + i, i >= 0, 0.0f);
        auto w = v + 1.0f;
        auto copy = w;
        w = w * 2.0f;
        copy += w;
        copy = where(i % 2 == 0, copy, v);
        const auto all = (i >= 0) & (i < n - t.program_id(0) * n);  // the second program stores nothing
        t.store(pz + i, copy, all);
        t.store(ps + t.arange(c<1>), max(trans(col(v))), t.arange(c<1>) < 1 - t.program_id(0));
      },
      x, z, s);
  for (int i = 0; i < n; ++i) {
    const float v = x[i];
    ASSERT_EQ(z[i], i % 2 == 0 ? 3.0f * (v + 1.0f) : v) << i;
  }
  EXPECT_EQ(s[0], 999.0f);
}

TYPED_TEST(OnCpu, LargeProducts) {
  constexpr int m = 256, k = 512;
  auto a = values<f16>("a", {m, k}, 1, -8, 8), b = values<f16>("b", {k, m}, 2, -8, 8);
  Array<f32> z("z", {m, m});
  run<TypeParam>(
      {1},
      [](auto& t, auto pa, auto pb, auto pz) {
        const auto i = t.arange(c<m>);
        const auto j = t.arange(c<k>);
        auto total = t.full(c<m>, c<m>, 0.0f);
        total = dot(t.load(pa + col(i) * k + j), t.load(pb + col(j) * m + i), total);
        t.store(pz + col(i) * m + i, total);
      },
      a, b, z);
  for (const int at : {0, 77 * m + 5, m * m - 1}) {
    float expected = 0;
    for (int l = 0; l < k; ++l)
      expected += static_cast<float>(a[at / m * k + l]) * static_cast<float>(b[l * m + at % m]);
    EXPECT_NEAR(z[at], expected, 1e-3f * k);
  }
}

// ---- Pointers ----

// Only the end of a tensor with more than 2^31 elements exists.
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
