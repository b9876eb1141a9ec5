// Every operator of the tile language against a scalar loop, on both CPU executors.
#include "operators.h"

#include <algorithm>

namespace octile::tile {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// op on tiles and op on numbers, where they are written differently.
template <class OnTiles, class OnNumbers>
struct Both {
  OnTiles on_tiles;
  OnNumbers on_numbers;
  auto operator()(const auto& x, const auto& y) const {
    if constexpr (TileLike<std::remove_cvref_t<decltype(x)>>) return on_tiles(x, y);
    if constexpr (!TileLike<std::remove_cvref_t<decltype(x)>>) return on_numbers(x, y);
  }
};

template <class OnTiles, class OnNumbers>
Both(OnTiles, OnNumbers) -> Both<OnTiles, OnNumbers>;

// out[k] = the k-th of ops(a, b), lane by lane.
template <class E, class Out, class A, class B, class... Ops>
void each(Array<A> a, Array<B> b, Ops... ops) {
  Array<Out> z("z", {sizeof...(Ops), 8, 16});
  run<E>(
      {},
      [&](auto& t, auto pa, auto pb, auto pz) {
        const auto i = col(t.arange(c<8>)) * 16 + t.arange(c<16>);
        const auto x = t.load(pa + i);
        const auto y = t.load(pb + i);
        int k = 0;
        (t.store(pz + (i + 128 * k++), ops(x, y)), ...);
      },
      a, b, z);
  for (std::int64_t i = 0; i < 128; ++i) {
    std::int64_t k = 0;
    (expect_same(z[i + 128 * k++], static_cast<Out>(ops(a[i], b[i])), i), ...);
  }
}

template <class T>
Array<T> left(int low = -128, int high = 127) {
  return values<T>("a", {8, 16}, 1, low, high);
}
template <class T>
Array<T> right(int low = 1, int high = 30) {
  return values<T>("b", {8, 16}, 2, low, high);
}

TYPED_TEST(OnCpu, FloatArithmetic) {
  using E = TypeParam;
  each<E, f32>(
      left<f32>(), right<f32>(), [](auto x, auto y) { return x + y; }, [](auto x, auto y) { return x - y; },
      [](auto x, auto y) { return x * y; }, [](auto x, auto y) { return x / y; },
      [](auto x, auto y) { return 2.5f - x / y; },
      Both{[](auto x, auto y) { return fma(x, y, x); }, [](float x, float y) { return std::fma(x, y, x); }});
  // s32 with f32 gives f32; f16 is widened.
  each<E, f32>(left<f32>(), right<s32>(),
               Both{[](auto x, auto y) { return x * y; }, [](float x, s32 y) { return x * static_cast<float>(y); }});
  each<E, f32>(left<f16>(), right<f16>(),
               Both{[](auto x, auto y) { return x * y; }, [](f16 x, f16 y) { return widen(x) * widen(y); }});
}

TYPED_TEST(OnCpu, IntegerArithmetic) {
  using E = TypeParam;
  each<E, s32>(
      left<s32>(), right<s32>(), [](auto x, auto y) { return x + y; }, [](auto x, auto y) { return x - y; },
      [](auto x, auto y) { return x * y; }, [](auto x, auto y) { return x / y; }, [](auto x, auto y) { return x % y; },
      [](auto x, auto y) { return x & y; }, [](auto x, auto y) { return x | y; }, [](auto x, auto y) { return x ^ y; },
      [](auto x, auto y) { return x >> y; },
      Both{[](auto x, auto y) { return x << y; },
           [](s32 x, s32 y) { return static_cast<s32>(static_cast<std::uint32_t>(x) << y); }});
  each<E, s32>(left<s8>(), right<s8>(), [](auto x, auto y) { return x * y; });
  each<E, s32>(left<u8>(0, 255), right<s8>(), [](auto x, auto y) { return x - y; });
  each<E, s64>(left<s64>(), right<s32>(), [](auto x, auto y) { return x * 100000000000 + y; });
}

TYPED_TEST(OnCpu, Comparisons) {
  using E = TypeParam;
  each<E, bool>(
      left<s32>(-2, 6), right<s32>(-2, 6), [](auto x, auto y) { return x < y; }, [](auto x, auto y) { return x <= y; },
      [](auto x, auto y) { return x > y; }, [](auto x, auto y) { return x >= y; },
      [](auto x, auto y) { return x == y; }, [](auto x, auto y) { return x != y; },
      [](auto x, auto y) { return (y > 0) & !((x < y) | (x == y)); });
  each<E, s32>(
      left<s32>(-2, 6), right<s32>(-2, 6),
      Both{[](auto x, auto y) { return where(x < y, x, y * 10); }, [](s32 x, s32 y) { return x < y ? x : y * 10; }},
      Both{[](auto x, auto y) { return maximum(x, y) - minimum(x, y) + abs(x) + ~y - (-x); },
           [](s32 x, s32 y) { return std::abs(x - y) + std::abs(x) + ~y + x; }});
}

// A row, a column or a number on either side, for operators whose result has the operands' type, a wider one, or is a
// mask.
template <class E, class A, class Out, class Op>
void repeated(Op op) {
  auto a = left<A>();
  Array<Out> z("z", {5, 8, 16});
  const auto number = Widened<A>(3);
  run<E>(
      {},
      [&](auto& t, auto pa, auto pz) {
        const auto i = col(t.arange(c<8>));
        const auto j = t.arange(c<16>);
        const auto x = t.load(pa + i * 16 + j);
        const auto row = t.load(pa + j);
        const auto column = t.load(pa + i);
        const auto to = pz + i * 16 + j;
        t.store(to, op(x, row));
        t.store(to + 128, op(column, x));
        t.store(to + 256, op(row, column));
        t.store(to + 384, op(x, number));
        t.store(to + 512, op(number, column));
      },
      a, z);
  for (std::int64_t k = 0; k < 128; ++k) {
    const auto x = widen(a[k]), row = widen(a[k % 16]), column = widen(a[k / 16]);
    expect_same(z[k], static_cast<Out>(op(x, row)), k);
    expect_same(z[k + 128], static_cast<Out>(op(column, x)), k);
    expect_same(z[k + 256], static_cast<Out>(op(row, column)), k);
    expect_same(z[k + 384], static_cast<Out>(op(x, number)), k);
    expect_same(z[k + 512], static_cast<Out>(op(number, column)), k);
  }
}

TYPED_TEST(OnCpu, OperandsAreRepeated) {
  using E = TypeParam;
  repeated<E, f32, f32>([](auto x, auto y) { return x - y; });
  repeated<E, f16, f32>([](auto x, auto y) { return x * y; });
  repeated<E, s8, s32>([](auto x, auto y) { return x - y; });
  repeated<E, s32, bool>([](auto x, auto y) { return x < y; });
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

TYPED_TEST(OnCpu, ANanWins) {
  using E = TypeParam;
  Array<f32> a("a", {4}, {1, kNan, 2, kInfinity}), b("b", {4}, {kNan, 1, 3, -kInfinity});
  Array<f32> highest("highest", {4}), lowest("lowest", {4}), top("top", {1});
  run<E>(
      {},
      [](auto& t, auto pa, auto pb, auto pm, auto pl, auto pt) {
        const auto i = t.arange(c<4>);
        const auto x = t.load(pa + i), y = t.load(pb + i);
        t.store(pm + i, maximum(x, y));
        t.store(pl + i, minimum(x, y));
        t.store(pt, max(x));
      },
      a, b, highest, lowest, top);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(std::isnan(highest[i]) && std::isnan(lowest[i]));
  EXPECT_EQ(highest[2], 3);
  EXPECT_EQ(lowest[3], -kInfinity);
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

// All 65536 values widen exactly; every float between two of them rounds to the nearer one, ties to even.
template <class T>
void narrowing(int infinity) {
  const auto value = [](int bits) { return T::from_bits(static_cast<std::uint16_t>(bits)); };
  for (int i = 0; i < infinity; ++i) {
    const float low = value(i), high = value(i + 1);
    ASSERT_EQ(T(low).bits, i);
    ASSERT_EQ(T(-low).bits, i | 0x8000);
    ASSERT_EQ(bits(static_cast<float>(value(i | 0x8000))), bits(-low));
    if (i + 1 == infinity) break;
    ASSERT_LT(value(i), value(i + 1));
    const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    ASSERT_EQ(T(middle).bits, i % 2 == 0 ? i : i + 1);
    ASSERT_EQ(T(std::nextafter(middle, high)).bits, i + 1);
    ASSERT_EQ(T(std::nextafter(middle, low)).bits, i);
  }
  EXPECT_EQ(T(kInfinity).bits, infinity);
  EXPECT_EQ(T(-kInfinity).bits, infinity | 0x8000);
  EXPECT_EQ(T(std::numeric_limits<float>::max()).bits, infinity);
  for (int i = infinity + 1; i < 0x8000; ++i) {
    const T nan = value(i);
    ASSERT_TRUE(std::isnan(nan) && nan != nan && !(nan < nan)) << i;
    ASSERT_TRUE(std::isnan(static_cast<float>(T(nan)))) << i;
  }
}
TEST(SixteenBitFloats, RoundToNearestEven) {
  narrowing<f16>(0x7c00);
  narrowing<bf16>(0x7f80);
  EXPECT_EQ(f16(65519.9f).bits, 0x7bff);
  EXPECT_EQ(f16(65520.0f).bits, 0x7c00);
}

// Converts values, never bits, unless they are called bits; also at compile time.
template <class T>
constexpr bool made_of_values() {
  static_assert(sizeof(T) == 2 && std::is_trivial_v<T> && std::is_standard_layout_v<T> && !std::is_aggregate_v<T>);
  static_assert(!std::is_convertible_v<float, T> && std::is_convertible_v<T, float>);
  return T(3) == 3.0f && T(3.0f) == T(3.0) && T{2.5} == 2.5f && T{3} == 3 && static_cast<T>(-1) < T(0.5) &&
         -T(1) == -1 && T() == 0 && T{}.bits == 0 && T::from_bits(T(1.5f).bits) == 1.5f && T(T(7)) == T(7) &&
         T(0.25f) + T(1) == 1.25f;
}
static_assert(made_of_values<f16>() && made_of_values<bf16>());
static_assert(f16(1).bits == 0x3c00 && bf16(1).bits == 0x3f80 && f16::from_bits(0x3c00) == 1 &&
              f16(0x1p-24f).bits == 1);

TYPED_TEST(OnCpu, SixteenBitNumbersAreTheirValue) {
  using E = TypeParam;
  Array<f16> x("x", {8}), z("z", {4, 8});
  x.fill(f16(3.0f));
  run<E>(
      {},
      [](auto& t, auto px, auto pz, auto two) {
        const auto i = t.arange(c<8>);
        t.store(pz + i, t.load(px + i, i < 4, f16(1.0f)));
        t.store(pz + 8 + i, f16(5));
        t.store(pz + 16 + i, cast<f16>(t.load(px + i) * two));
        t.store(pz + 24 + i, cast<f16>(where(i < 2, f16(-1), t.full(c<8>, f16(0.5)))));
      },
      x, z, f16(2));
  const float expected[4][8] = {{3, 3, 3, 3, 1, 1, 1, 1},
                                {5, 5, 5, 5, 5, 5, 5, 5},
                                {6, 6, 6, 6, 6, 6, 6, 6},
                                {-1, -1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5}};
  for (int i = 0; i < 32; ++i) EXPECT_EQ(z[i], expected[i / 8][i % 8]) << i;
}

}  // namespace
}  // namespace octile::tile
