// Every operator of the tile language against a scalar loop, on both CPU executors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "octile/tile/tile.h"

namespace octile::tile {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class E>
class OnCpu : public testing::Test {};
using Executors = testing::Types<FastCpu, CheckedCpu>;
TYPED_TEST_SUITE(OnCpu, Executors);

// A correct kernel is also one that the checker has nothing to say about.
template <class E, class Kernel, class... Args>
void run(Grid grid, const Kernel& kernel, Args&&... args) {
  if constexpr (std::is_same_v<E, CheckedCpu>) {
    const Report report = launch(E{}, grid, kernel, args...);
    for (const Finding& finding : report.findings) ADD_FAILURE() << text(report, finding);
  } else {
    launch(E{}, grid, kernel, args...);
  }
}

template <class T>
Array<T> values(const char* name, std::vector<std::int64_t> shape, unsigned seed, int low = -128, int high = 127) {
  Array<T> result(name, std::move(shape));
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> integer(low, high);
  for (std::int64_t i = 0; i < result.size(); ++i) {
    const int n = integer(random);
    if constexpr (std::is_same_v<T, f32>) result.set(i, static_cast<float>(n) * 0.37f);
    if constexpr (std::is_same_v<T, f16>) result.set(i, f16{f32_to_f16(static_cast<float>(n) * 0.37f)});
    if constexpr (std::is_same_v<T, bf16>) result.set(i, bf16{f32_to_bf16(static_cast<float>(n) * 0.37f)});
    if constexpr (is_integer_type<T>) result.set(i, static_cast<T>(n));
    if constexpr (std::is_same_v<T, bool>) result.set(i, n > 0);
  }
  return result;
}

template <class T>
std::uint32_t bits(T value) {
  std::uint32_t result = 0;
  std::memcpy(&result, &value, sizeof(T));
  return result;
}

void expect_same(float got, float expected, std::int64_t i) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(got)) << "element " << i;
  } else {
    EXPECT_EQ(bits(got), bits(expected)) << "element " << i << ": " << got << " instead of " << expected;
  }
}
template <class T>
requires std::is_integral_v<T>
void expect_same(T got, T expected, std::int64_t i) { EXPECT_EQ(got, expected) << "element " << i; }

// The number 3 as an operand.
template <class B>
inline constexpr auto kNumber = 3;
template <>
inline constexpr auto kNumber<f16> = 3.0f;

template <class B>
B three() {
  if constexpr (std::is_same_v<B, f16>) return f16{f32_to_f16(3.0f)};
  if constexpr (!std::is_same_v<B, f16>) return B(3);
}

// out = op(a, b), tile by tile, with row and column operands too.
template <class E, class A, class B, class Out, class Op, class Expected>
void binary(Op op, Expected expected, Array<A> a, Array<B> b) {
  Array<Out> z("z", {8, 16}), row("row", {8, 16}), column("column", {8, 16}), number("number", {8, 16});
  run<E>(
      {},
      [&](auto& t, auto pa, auto pb, auto pz, auto prow, auto pcolumn, auto pnumber) {
        const auto i = col(t.arange(c<8>));
        const auto j = t.arange(c<16>);
        const auto x = t.load(pa + i * 16 + j);
        const auto y = t.load(pb + i * 16 + j);
        t.store(pz + i * 16 + j, op(x, y));
        t.store(prow + i * 16 + j, op(x, t.load(pb + j)));
        t.store(pcolumn + i * 16 + j, op(t.load(pa + i), y));
        t.store(pnumber + i * 16 + j, op(x, kNumber<B>));
      },
      a, b, z, row, column, number);
  for (std::int64_t i = 0; i < 8; ++i) {
    for (std::int64_t j = 0; j < 16; ++j) {
      const std::int64_t k = i * 16 + j;
      expect_same(z[k], static_cast<Out>(expected(a[k], b[k])), k);
      expect_same(row[k], static_cast<Out>(expected(a[k], b[j])), k);
      expect_same(column[k], static_cast<Out>(expected(a[i], b[k])), k);
      expect_same(number[k], static_cast<Out>(expected(a[k], three<B>())), k);
    }
  }
}

template <class E, class A, class B, class Out, class Op, class Expected>
void binary(Op op, Expected expected) {
  binary<E, A, B, Out>(op, expected, values<A>("a", {8, 16}, 1), values<B>("b", {8, 16}, 2, 1, 30));
}

TYPED_TEST(OnCpu, FloatArithmetic) {
  using E = TypeParam;
  binary<E, f32, f32, f32>([](auto x, auto y) { return x + y; }, [](float x, float y) { return x + y; });
  binary<E, f32, f32, f32>([](auto x, auto y) { return x - y; }, [](float x, float y) { return x - y; });
  binary<E, f32, f32, f32>([](auto x, auto y) { return x * y; }, [](float x, float y) { return x * y; });
  binary<E, f32, f32, f32>([](auto x, auto y) { return x / y; }, [](float x, float y) { return x / y; });
  binary<E, f32, f32, f32>([](auto x, auto y) { return 2.5f - x / y; }, [](float x, float y) { return 2.5f - x / y; });
  binary<E, f32, f32, f32>([](auto x, auto y) { return fma(x, y, x); },
                           [](float x, float y) { return std::fma(x, y, x); });
  // An s32 beside an f32 becomes an f32.
  binary<E, f32, s32, f32>([](auto x, auto y) { return x * y; },
                           [](float x, s32 y) { return x * static_cast<float>(y); });
}

TYPED_TEST(OnCpu, IntegerArithmetic) {
  using E = TypeParam;
  binary<E, s32, s32, s32>([](auto x, auto y) { return x + y; }, [](s32 x, s32 y) { return x + y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x - y; }, [](s32 x, s32 y) { return x - y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x * y; }, [](s32 x, s32 y) { return x * y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x / y; }, [](s32 x, s32 y) { return x / y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x % y; }, [](s32 x, s32 y) { return x % y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x & y; }, [](s32 x, s32 y) { return x & y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x | y; }, [](s32 x, s32 y) { return x | y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x ^ y; }, [](s32 x, s32 y) { return x ^ y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x >> y; }, [](s32 x, s32 y) { return x >> y; });
  binary<E, s32, s32, s32>([](auto x, auto y) { return x << y; },
                           [](s32 x, s32 y) { return static_cast<s32>(static_cast<std::uint32_t>(x) << y); });
  binary<E, s8, s8, s32>([](auto x, auto y) { return x * y; }, [](s8 x, s8 y) { return x * y; });
  binary<E, u8, s8, s32>([](auto x, auto y) { return x - y; }, [](u8 x, s8 y) { return x - y; });
  binary<E, s64, s32, s64>([](auto x, auto y) { return x * 100000000000 + y; },
                           [](s64 x, s32 y) { return x * 100000000000 + y; });
}

TYPED_TEST(OnCpu, IntegersWrap) {
  using E = TypeParam;
  Array<s32> a("a", {4}, {INT32_MAX, INT32_MIN, INT32_MIN, 65536}), b("b", {4}, {1, 1, -1, 65536});
  Array<s32> sum("sum", {4}), difference("difference", {4}), product("product", {4}), quotient("quotient", {4});
  run<E>(
      {},
      [](auto& t, auto pa, auto pb, auto ps, auto pd, auto pp, auto pq) {
        const auto i = t.arange(c<4>);
        const auto x = t.load(pa + i), y = t.load(pb + i);
        t.store(ps + i, x + y);
        t.store(pd + i, x - y);
        t.store(pp + i, x * y);
        t.store(pq + i, x / y);
      },
      a, b, sum, difference, product, quotient);
  EXPECT_EQ(sum[0], INT32_MIN);
  EXPECT_EQ(difference[1], INT32_MAX);
  EXPECT_EQ(product[3], 0);
  EXPECT_EQ(quotient[2], INT32_MIN);
}

TYPED_TEST(OnCpu, SixteenBitFloatsAreWidened) {
  using E = TypeParam;
  binary<E, f16, f16, f32>([](auto x, auto y) { return x * y; }, [](f16 x, f16 y) { return widen(x) * widen(y); },
                           values<f16>("a", {8, 16}, 1),
                           [] {
                             auto b = values<f16>("b", {8, 16}, 2);
                             return b;
                           }());
}

TYPED_TEST(OnCpu, Comparisons) {
  using E = TypeParam;
  const auto a = [] { return values<s32>("a", {8, 16}, 3, -2, 6); };
  const auto b = [] { return values<s32>("b", {8, 16}, 4, -2, 6); };
  binary<E, s32, s32, bool>([](auto x, auto y) { return x < y; }, std::less<s32>(), a(), b());
  binary<E, s32, s32, bool>([](auto x, auto y) { return x <= y; }, std::less_equal<s32>(), a(), b());
  binary<E, s32, s32, bool>([](auto x, auto y) { return x > y; }, std::greater<s32>(), a(), b());
  binary<E, s32, s32, bool>([](auto x, auto y) { return x >= y; }, std::greater_equal<s32>(), a(), b());
  binary<E, s32, s32, bool>([](auto x, auto y) { return x == y; }, std::equal_to<s32>(), a(), b());
  binary<E, s32, s32, bool>([](auto x, auto y) { return x != y; }, std::not_equal_to<s32>(), a(), b());
  binary<E, s32, s32, bool>([](auto x, auto y) { return (y > 0) & !((x < y) | (x == y)); },
                            [](s32 x, s32 y) { return x > y && y > 0; }, a(), b());
  binary<E, s32, s32, s32>([](auto x, auto y) { return where(x < y, x, y * 10); },
                           [](s32 x, s32 y) { return x < y ? x : y * 10; }, a(), b());
  binary<E, s32, s32, s32>([](auto x, auto y) { return maximum(x, y) - minimum(x, y) + abs(x) + ~y - (-x); },
                           [](s32 x, s32 y) { return std::abs(x - y) + std::abs(x) + ~y + x; }, a(), b());
}

TYPED_TEST(OnCpu, ANanWins) {
  using E = TypeParam;
  Array<f32> a("a", {4}, {1, kNan, 2, kInfinity}), b("b", {4}, {kNan, 1, 3, -kInfinity});
  Array<f32> most("most", {4}), least("least", {4}), top("top", {1});
  run<E>(
      {},
      [](auto& t, auto pa, auto pb, auto pm, auto pl, auto pt) {
        const auto i = t.arange(c<4>);
        const auto x = t.load(pa + i), y = t.load(pb + i);
        t.store(pm + i, maximum(x, y));
        t.store(pl + i, minimum(x, y));
        t.store(pt, max(x));
      },
      a, b, most, least, top);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(std::isnan(most[i]) && std::isnan(least[i]));
  EXPECT_EQ(most[2], 3);
  EXPECT_EQ(least[3], -kInfinity);
  EXPECT_TRUE(std::isnan(top[0]));
}

TYPED_TEST(OnCpu, Functions) {
  using E = TypeParam;
  Array<f32> x("x", {16},
               {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -0.2f, 8388607.5f, 16777216.f, 1e30f, -2.5f, 0.f, -0.f, kInfinity, kNan,
                4.f, 2.f});
  Array<f32> r("r", {16}), s("s", {16}), a("a", {16});
  run<E>(
      {},
      [](auto& t, auto px, auto pr, auto ps, auto pa) {
        const auto i = t.arange(c<16>);
        const auto v = t.load(px + i);
        t.store(pr + i, rint(v));
        t.store(ps + i, sqrt(abs(v)));
        t.store(pa + i, -abs(v));
      },
      x, r, s, a);
  for (int i = 0; i < 16; ++i) {
    expect_same(r[i], std::nearbyint(x[i]), i);
    expect_same(s[i], std::sqrt(std::fabs(x[i])), i);
    expect_same(a[i], -std::fabs(x[i]), i);
  }
}

TYPED_TEST(OnCpu, Exp2IsWithinTwoUlp) {
  using E = TypeParam;
  constexpr int kSize = 1 << 14;
  Array<f32> x("x", {kSize}), z("z", {kSize});
  for (int i = 0; i < kSize; ++i) x.set(i, static_cast<float>(i - kSize / 2) * 0.0187f);  // -153 .. 153
  const float special[] = {-kInfinity, kInfinity, kNan,   0.0f,  1.0f,      -126.0f,
                           -149.0f,    128.0f,    -1e30f, 1e30f, 127.99999f};
  for (int i = 0; i < 11; ++i) x.set(i, special[i]);
  run<E>(
      {kSize / 1024},
      [](auto& t, auto px, auto pz) {
        const auto i = t.program_id(0) * 1024 + t.arange(c<1024>);
        t.store(pz + i, exp2(t.load(px + i)));
      },
      x, z);
  EXPECT_EQ(z[0], 0.0f);
  EXPECT_EQ(z[1], kInfinity);
  EXPECT_TRUE(std::isnan(z[2]));
  EXPECT_EQ(z[3], 1.0f);
  EXPECT_EQ(z[4], 2.0f);
  EXPECT_EQ(z[5], 0x1p-126f);
  EXPECT_EQ(z[6], 0x1p-149f);
  EXPECT_EQ(z[7], kInfinity);
  for (int i = 3; i < kSize; ++i) {
    const double exact = std::exp2(static_cast<double>(x[i]));
    if (exact >= 0x1p128) {
      EXPECT_EQ(z[i], kInfinity) << x[i];
    } else {
      const double unit = std::max(std::ldexp(1.0, std::ilogb(std::max(exact, 0x1p-149)) - 23), 0x1p-149);
      EXPECT_LE(std::fabs(static_cast<double>(z[i]) - exact), 1.25 * unit) << x[i];
    }
  }
}

// ---- Casts ----

TYPED_TEST(OnCpu, CastsToIntegersSaturateAndRoundAsStated) {
  using E = TypeParam;
  Array<f32> x("x", {16},
               {0.5f, 1.5f, -0.5f, -1.5f, 2.7f, -2.7f, 127.4f, 127.5f, -128.5f, -128.6f, 300.f, -300.f, 1e20f, -1e20f,
                kNan, kInfinity});
  Array<s8> even("even", {16}), zero("zero", {16}), down("down", {16}), up("up", {16});
  Array<u8> byte("byte", {16});
  Array<s32> wide("wide", {16});
  Array<s64> wider("wider", {16});
  run<E>(
      {},
      [](auto& t, auto px, auto pe, auto pz, auto pd, auto pu, auto pb, auto pw, auto pl) {
        const auto i = t.arange(c<16>);
        const auto v = t.load(px + i);
        t.store(pe + i, cast<s8, Round::even>(v));
        t.store(pz + i, cast<s8, Round::zero>(v));
        t.store(pd + i, cast<s8, Round::down>(v));
        t.store(pu + i, cast<s8, Round::up>(v));
        t.store(pb + i, cast<u8, Round::even>(v));
        t.store(pw + i, cast<s32, Round::even>(v));
        t.store(pl + i, cast<s64, Round::zero>(v));
      },
      x, even, zero, down, up, byte, wide, wider);
  for (int i = 0; i < 16; ++i) {
    const auto expected = [&](double rounded, double low, double high) {
      return std::isnan(rounded) ? std::int64_t{0}
             : rounded >= high   ? (high > 1e18 ? INT64_MAX : static_cast<std::int64_t>(high))
                                 : static_cast<std::int64_t>(std::max(rounded, low));
    };
    EXPECT_EQ(even[i], expected(std::nearbyint(x[i]), -128, 127)) << x[i];
    EXPECT_EQ(zero[i], expected(std::trunc(x[i]), -128, 127)) << x[i];
    EXPECT_EQ(down[i], expected(std::floor(x[i]), -128, 127)) << x[i];
    EXPECT_EQ(up[i], expected(std::ceil(x[i]), -128, 127)) << x[i];
    EXPECT_EQ(byte[i], expected(std::nearbyint(x[i]), 0, 255)) << x[i];
    EXPECT_EQ(wide[i], expected(std::nearbyint(x[i]), INT32_MIN, INT32_MAX)) << x[i];
    EXPECT_EQ(wider[i], expected(std::trunc(x[i]), -0x1p63, 0x1p63)) << x[i];
  }
}

TYPED_TEST(OnCpu, CastsAmongIntegersAndMasks) {
  using E = TypeParam;
  Array<s32> x("x", {8}, {0, 1, -1, 127, 128, -129, 255, 65536});
  Array<s8> narrow("narrow", {8});
  Array<bool> truth("truth", {8});
  Array<f32> real("real", {8});
  Array<s32> count("count", {1});
  run<E>(
      {},
      [](auto& t, auto px, auto pn, auto pt, auto pr, auto pc) {
        const auto i = t.arange(c<8>);
        const auto v = t.load(px + i);
        t.store(pn + i, cast<s8>(v));
        t.store(pt + i, cast<bool>(v));
        t.store(pr + i, cast<f32>(v + i));
        t.store(pc, sum(i < 5));
      },
      x, narrow, truth, real, count);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(narrow[i], static_cast<s8>(x[i]));
    EXPECT_EQ(truth[i], x[i] != 0);
    EXPECT_EQ(real[i], static_cast<float>(x[i] + i));
  }
  EXPECT_EQ(count[0], 5);
}

// All 65536 values widen exactly; every float between two of them goes to the nearer one, or the even one of the two.
template <class T, class Narrow>
void narrowing(Narrow narrow, int infinity) {
  for (int i = 0; i < infinity; ++i) {
    const float low = widen(T{static_cast<std::uint16_t>(i)}), high = widen(T{static_cast<std::uint16_t>(i + 1)});
    ASSERT_EQ(narrow(low), i);
    ASSERT_EQ(narrow(-low), i | 0x8000);
    if (i + 1 == infinity) break;
    const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    ASSERT_EQ(narrow(middle), i % 2 == 0 ? i : i + 1);
    ASSERT_EQ(narrow(std::nextafter(middle, high)), i + 1);
    ASSERT_EQ(narrow(std::nextafter(middle, low)), i);
  }
  EXPECT_EQ(narrow(kInfinity), infinity);
  EXPECT_TRUE(std::isnan(widen(T{narrow(kNan)})));
}
TEST(SixteenBitFloats, RoundToNearestEven) {
  narrowing<f16>([](float x) { return f32_to_f16(x); }, 0x7c00);
  narrowing<bf16>([](float x) { return f32_to_bf16(x); }, 0x7f80);
  EXPECT_EQ(f32_to_f16(65519.9f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
}

// ---- Reductions, shapes, dot ----

template <class T>
std::vector<T> folded(std::vector<T> x) {
  while (x.size() > 1) {
    const std::size_t half = x.size() / 2;
    for (std::size_t i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
    x.resize(half);
  }
  return x;
}

TYPED_TEST(OnCpu, ReductionsFoldHalvesOntoEachOther) {
  using E = TypeParam;
  Array<f32> x("x", {2, 8, 64});
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int i = 0; i < x.size(); ++i) x.set(i, normal(random));
  Array<f32> rows("rows", {2, 8}), columns("columns", {2, 64}), planes("planes", {8, 64}), most("most", {2, 8}),
      least("least", {2, 64});
  run<E>(
      {},
      [](auto& t, auto px, auto pr, auto pc, auto pp, auto pm, auto pl) {
        const auto p = col(col(t.arange(c<2>)));
        const auto i = col(t.arange(c<8>));
        const auto j = t.arange(c<64>);
        const auto v = t.load(px + p * 512 + i * 64 + j);
        t.store(pr + p * 8 + i, sum(v));
        t.store(pc + p * 64 + j, sum(v, kRows));
        t.store(pp + i * 64 + j, sum(v, kPlanes));
        t.store(pm + p * 8 + i, max(v));
        t.store(pl + p * 64 + j, min(v, kRows));
      },
      x, rows, columns, planes, most, least);
  for (int p = 0; p < 2; ++p) {
    for (int i = 0; i < 8; ++i) {
      std::vector<float> row;
      for (int j = 0; j < 64; ++j) row.push_back(x[p * 512 + i * 64 + j]);
      EXPECT_EQ(rows[p * 8 + i], folded(row)[0]);
      EXPECT_EQ(most[p * 8 + i], *std::max_element(row.begin(), row.end()));
    }
    for (int j = 0; j < 64; ++j) {
      std::vector<float> column;
      for (int i = 0; i < 8; ++i) column.push_back(x[p * 512 + i * 64 + j]);
      EXPECT_EQ(columns[p * 64 + j], folded(column)[0]);
      EXPECT_EQ(least[p * 64 + j], *std::min_element(column.begin(), column.end()));
      for (int i = 0; i < 8 && p == 0; ++i) EXPECT_EQ(planes[i * 64 + j], x[i * 64 + j] + x[512 + i * 64 + j]);
    }
  }
}

TYPED_TEST(OnCpu, NarrowTypesAreSummedWide) {
  using E = TypeParam;
  auto bytes = values<s8>("bytes", {1024}, 6);
  auto halves = values<f16>("halves", {1024}, 7);
  Array<s32> total("total", {1});
  Array<f32> real("real", {1});
  run<E>(
      {},
      [](auto& t, auto pb, auto ph, auto pt, auto pr) {
        const auto i = t.arange(c<1024>);
        t.store(pt, sum(t.load(pb + i)));
        t.store(pr, sum(t.load(ph + i)));
      },
      bytes, halves, total, real);
  s32 expected = 0;
  std::vector<float> wide;
  for (int i = 0; i < 1024; ++i) {
    expected += bytes[i];
    wide.push_back(widen(halves[i]));
  }
  EXPECT_EQ(total[0], expected);
  EXPECT_EQ(real[0], folded(wide)[0]);
}

TYPED_TEST(OnCpu, Rearranging) {
  using E = TypeParam;
  auto x = values<s32>("x", {8, 4}, 8, -1000, 1000);
  Array<s32> transposed("transposed", {4, 8}), reshaped("reshaped", {2, 16}), nibbles("nibbles", {8, 4, 8}),
      repeated("repeated", {8, 4});
  run<E>(
      {},
      [](auto& t, auto px, auto pt, auto pr, auto pn, auto pb) {
        const auto v = t.load(px + col(t.arange(c<8>)) * 4 + t.arange(c<4>));
        t.store(pt + col(t.arange(c<4>)) * 8 + t.arange(c<8>), trans(v));
        t.store(pr + col(t.arange(c<2>)) * 16 + t.arange(c<16>), reshape(v, c<2>, c<16>));
        const auto parts = (col(v) >> t.arange(c<8>) * 4) & 15;  // (8, 4, 8), as puzzle 12 unpacks its weights
        t.store(pn + col(t.arange(c<8>)) * 32 + t.arange(c<32>), reshape(parts, c<8>, c<4> * c<8>));
        t.store(pb + col(t.arange(c<8>)) * 4 + t.arange(c<4>), broadcast(max(v), v));
      },
      x, transposed, reshaped, nibbles, repeated);
  for (int i = 0; i < 8; ++i) {
    s32 most = x[i * 4];
    for (int j = 0; j < 4; ++j) most = std::max(most, x[i * 4 + j]);
    for (int j = 0; j < 4; ++j) {
      EXPECT_EQ(transposed[j * 8 + i], x[i * 4 + j]);
      EXPECT_EQ(reshaped[i * 4 + j], x[i * 4 + j]);
      EXPECT_EQ(repeated[i * 4 + j], most);
      for (int k = 0; k < 8; ++k) EXPECT_EQ(nibbles[(i * 4 + j) * 8 + k], (x[i * 4 + j] >> (4 * k)) & 15);
    }
  }
}

template <class E, class T, class Sum, int P, int M, int N, int K>
void dots() {
  auto a = values<T>("a", {P, M, K}, 9), b = values<T>("b", {P, K, N}, 10);
  auto start = values<Sum>("start", {P, M, N}, 11);
  Array<Sum> z("z", {P, M, N});
  run<E>(
      {},
      [](auto& t, auto pa, auto pb, auto ps, auto pz) {
        const auto p = col(col(t.arange(c<P>)));
        const auto i = col(t.arange(c<M>));
        const auto j = t.arange(c<N>);
        const auto k = t.arange(c<K>);
        const auto x = t.load(pa + p * (M * K) + i * K + k);
        const auto y = t.load(pb + p * (K * N) + col(k) * N + j);
        const auto s = t.load(ps + p * (M * N) + i * N + j);
        t.store(pz + p * (M * N) + i * N + j, dot(x, y, s));
      },
      a, b, start, z);
  for (int p = 0; p < P; ++p) {
    for (int i = 0; i < M; ++i) {
      for (int j = 0; j < N; ++j) {
        double sum = start[(p * M + i) * N + j], size = std::fabs(sum);
        for (int k = 0; k < K; ++k) {
          const double term = static_cast<double>(widen(a[(p * M + i) * K + k])) * widen(b[(p * K + k) * N + j]);
          sum += term;
          size += std::fabs(term);
        }
        // Integers exactly; K products and K sums in f32 within gamma(K + 1).
        const double bound = std::is_same_v<Sum, s32> ? 0 : (K + 1) * 0x1p-24 * size;
        EXPECT_LE(std::fabs(static_cast<double>(z[(p * M + i) * N + j]) - sum), bound);
      }
    }
  }
}
TYPED_TEST(OnCpu, Dot) {
  using E = TypeParam;
  dots<E, f32, f32, 1, 16, 16, 32>();
  dots<E, f32, f32, 2, 4, 8, 16>();
  dots<E, f32, f32, 1, 1, 32, 64>();
  dots<E, f16, f32, 2, 16, 32, 16>();
  dots<E, bf16, f32, 1, 32, 16, 8>();
  dots<E, s8, s32, 1, 16, 32, 128>();
  dots<E, s8, s32, 4, 2, 2, 2>();
}

// ---- Masks and memory ----

// Every comparison of an index with a number, as a lazy mask and spelled out, over all positions of the bound.
TYPED_TEST(OnCpu, LazyMasksSayWhatTheirLanesSay) {
  using E = TypeParam;
  const auto check = [](auto index, auto mask, auto expected) {
    using S = typename decltype(mask)::Shape;
    bool all = true;
    for (int r = 0; r < S::kRows; ++r) {
      for (int j = 0; j < S::kColumns; ++j) {
        const bool holds = expected(index.at(0, r, j));
        all = all && holds;
        EXPECT_EQ(mask.at(0, r, j), holds);
        if constexpr (decltype(mask)::kInterval) {
          const Interval interval = mask.interval(0, r);
          EXPECT_EQ(j >= interval.low && j < interval.high, holds) << r << ' ' << j;
        }
      }
    }
    EXPECT_TRUE(all || !mask.all());
  };
  const auto sweep = [&](auto index) {
    for (int n = -12; n < 60; ++n) {
      check(index, index < n, [&](s64 i) { return i < n; });
      check(index, index <= n, [&](s64 i) { return i <= n; });
      check(index, index > n, [&](s64 i) { return i > n; });
      check(index, n > index, [&](s64 i) { return i < n; });
      check(index, n <= index, [&](s64 i) { return i >= n; });
      check(index, index == n, [&](s64 i) { return i == n; });
      check(index, index != n, [&](s64 i) { return i != n; });
      check(index, (index >= n) & (index < n + 7), [&](s64 i) { return i >= n && i < n + 7; });
      check(index, (index < n) | (index > n + 3), [&](s64 i) { return i < n || i > n + 3; });
      check(index, !(index < n), [&](s64 i) { return i >= n; });
    }
  };
  const Grid grid;
  const auto body = [&](auto& t) {
    const auto i = col(t.arange(c<4>));
    const auto j = t.arange(c<8>);
    sweep(i * 8 + j);
    sweep(i * 5 - j);
    sweep(i + j * 3);
    sweep(40 - i * 4 - j * 3);
    sweep(i * 3);
    sweep(j + 5);
    sweep(j * 0 + 7);
  };
  run<E>(grid, body);
}

TYPED_TEST(OnCpu, MaskedLoadsAndStores) {
  using E = TypeParam;
  auto x = values<s32>("x", {6, 10}, 12);
  Array<s32> z("z", {6, 10});
  z.fill(77);
  Array<s32> gathered("gathered", {16}), diagonal("diagonal", {16});
  run<E>(
      {},
      [](auto& t, auto px, auto pz, auto pg, auto pd) {
        const auto i = col(t.arange(c<8>));
        const auto j = t.arange(c<16>);
        const auto in = (i < 6) & (j < 10);
        const auto v = t.load(px + i * 10 + j, in, -5);
        t.store(pz + i * 10 + j, v + 1, in & (i <= j));  // the upper triangle
        const auto k = j * 7 % 60;                       // not affine: a stored index
        t.store(pg + j, t.load(px + k));
        t.store(pd + j, t.load(px + j * 11, (j != 3) & (j < 5), 9));
      },
      x, z, gathered, diagonal);
  for (int i = 0; i < 6; ++i) {
    for (int j = 0; j < 10; ++j) EXPECT_EQ(z[i * 10 + j], i <= j ? x[i * 10 + j] + 1 : 77);
  }
  for (int j = 0; j < 16; ++j) {
    EXPECT_EQ(gathered[j], x[j * 7 % 60]);
    EXPECT_EQ(diagonal[j], j != 3 && j < 5 ? x[j * 11] : 9);
  }
}

TYPED_TEST(OnCpu, Atomics) {
  using E = TypeParam;
  auto x = values<s32>("x", {1000}, 13, -50, 50);
  auto y = values<f32>("y", {1000}, 14);
  Array<s32> total("total", {1}, {5}), bins("bins", {4}, {0, 0, 0, 0}), most("most", {1}, {INT32_MIN});
  Array<f32> real("real", {1}, {-kInfinity});
  run<E>(
      {32},
      [](auto& t, auto px, auto py, auto pt, auto pb, auto pm, auto pr, int n) {
        const auto i = t.program_id(0) * 32 + t.arange(c<32>);
        const auto v = t.load(px + i, i < n, 0);
        t.atomic_add(pt, sum(v));
        t.atomic_add(pb + (v & 3), 1, i < n);
        t.atomic_max(pm, max(v));
        t.atomic_max(pr, max(t.load(py + i, i < n, -kInfinity)));
      },
      x, y, total, bins, most, real, 1000);
  s32 sum = 5, count[4] = {}, top = INT32_MIN;
  float largest = -kInfinity;
  for (int i = 0; i < 1000; ++i) {
    sum += x[i];
    ++count[x[i] & 3];
    top = std::max(top, x[i]);
    largest = std::max(largest, y[i]);
  }
  EXPECT_EQ(total[0], sum);
  for (int k = 0; k < 4; ++k) EXPECT_EQ(bins[k], count[k]);
  EXPECT_EQ(most[0], top);
  EXPECT_EQ(real[0], largest);
}

TYPED_TEST(OnCpu, ProgramsKnowTheGrid) {
  using E = TypeParam;
  Array<s32> seen("seen", {2, 3, 5});
  run<E>(
      {5, 3, 2},
      [](auto& t, auto p) {
        const auto x = t.program_id(0), y = t.program_id(1), z = t.program_id(2);
        t.store(p + (z * t.num_programs(1) + y) * t.num_programs(0) + x, x + 10 * y + 100 * z);
      },
      seen);
  for (int i = 0; i < 30; ++i) EXPECT_EQ(seen[i], i % 5 + 10 * (i / 5 % 3) + 100 * (i / 15));
}

}  // namespace
}  // namespace octile::tile
