// Reductions, shapes, products, masks and memory of the tile language against scalar loops, on both CPU executors.
#include <algorithm>
#include <limits>

#include "operators.h"

namespace octile::tile {
namespace {

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
  Array<f32> rows("rows", {2, 8}), columns("columns", {2, 64}), planes("planes", {8, 64}), highest("highest", {2, 8}),
      lowest("lowest", {2, 64});
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
      x, rows, columns, planes, highest, lowest);
  for (int p = 0; p < 2; ++p) {
    for (int i = 0; i < 8; ++i) {
      std::vector<float> row;
      for (int j = 0; j < 64; ++j) row.push_back(x[p * 512 + i * 64 + j]);
      EXPECT_EQ(rows[p * 8 + i], folded(row)[0]);
      EXPECT_EQ(highest[p * 8 + i], *std::max_element(row.begin(), row.end()));
    }
    for (int j = 0; j < 64; ++j) {
      std::vector<float> column;
      for (int i = 0; i < 8; ++i) column.push_back(x[p * 512 + i * 64 + j]);
      EXPECT_EQ(columns[p * 64 + j], folded(column)[0]);
      EXPECT_EQ(lowest[p * 64 + j], *std::min_element(column.begin(), column.end()));
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
    s32 highest = x[i * 4];
    for (int j = 0; j < 4; ++j) highest = std::max(highest, x[i * 4 + j]);
    for (int j = 0; j < 4; ++j) {
      EXPECT_EQ(transposed[j * 8 + i], x[i * 4 + j]);
      EXPECT_EQ(reshaped[i * 4 + j], x[i * 4 + j]);
      EXPECT_EQ(repeated[i * 4 + j], highest);
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
  dots<E, f32, f32, 2, 1, 8, 16>();
  dots<E, f16, f32, 2, 16, 32, 16>();
  dots<E, bf16, f32, 1, 32, 16, 8>();
  dots<E, s8, s32, 2, 4, 2, 128>();
}

// ---- Masks and memory ----

// Lanes for which a lazy mask, or the interval of a row, says something else than the comparison spelled out.
template <class M, class Expected>
int lanes_wrong(const M& mask, Expected expected) {
  using S = typename M::Shape;
  int wrong = 0;
  bool all = true;
  for (int r = 0; r < S::kRows; ++r) {
    Interval interval{};
    if constexpr (M::kInterval) interval = mask.interval(0, r);
    for (int j = 0; j < S::kColumns; ++j) {
      const bool holds = expected(r, j);
      all = all && holds;
      wrong += mask.at(0, r, j) != holds ? 1 : 0;
      if constexpr (M::kInterval) wrong += (j >= interval.low && j < interval.high) != holds ? 1 : 0;
    }
  }
  return wrong + (mask.all() && !all ? 1 : 0);
}

template <class A, class N>
void compare(const A& index, N n) {
  const auto at = [&](auto holds) { return [=](int r, int j) { return holds(index.at(0, r, j)); }; };
  EXPECT_EQ(lanes_wrong(index < n, at([=](s64 i) { return i < n; })), 0) << n;
  EXPECT_EQ(lanes_wrong(index <= n, at([=](s64 i) { return i <= n; })), 0) << n;
  EXPECT_EQ(lanes_wrong(index > n, at([=](s64 i) { return i > n; })), 0) << n;
  EXPECT_EQ(lanes_wrong(index >= n, at([=](s64 i) { return i >= n; })), 0) << n;
  EXPECT_EQ(lanes_wrong(index == n, at([=](s64 i) { return i == n; })), 0) << n;
  EXPECT_EQ(lanes_wrong(index != n, at([=](s64 i) { return i != n; })), 0) << n;
}

// Over all positions of the bound. Both executors hold an index in 64 bits, so one does.
template <class A>
void sweep(const A& index) {
  for (int n = -12; n < 60; ++n) {
    compare(index, n);
    const auto at = [&](auto holds) { return [=](int r, int j) { return holds(index.at(0, r, j)); }; };
    EXPECT_EQ(lanes_wrong(n > index, at([=](s64 i) { return i < n; })), 0) << n;
    EXPECT_EQ(lanes_wrong(n <= index, at([=](s64 i) { return i >= n; })), 0) << n;
    EXPECT_EQ(lanes_wrong((index >= n) & (index < n + 7), at([=](s64 i) { return i >= n && i < n + 7; })), 0) << n;
    EXPECT_EQ(lanes_wrong((index < n) | (index > n + 3), at([=](s64 i) { return i < n || i > n + 3; })), 0) << n;
    EXPECT_EQ(lanes_wrong(!(index < n), at([=](s64 i) { return i >= n; })), 0) << n;
  }
}

TEST(Masks, SayWhatTheirLanesSay) {
  run<CheckedCpu>({}, [](auto& t) {
    const auto i = col(t.arange(c<4>));
    const auto j = t.arange(c<8>);
    sweep(i * 8 + j);  // four kinds of index: a tile of unit stride, one of any strides, a column, a row
    sweep(i * 5 - j);
    sweep(i + j * 3);
    sweep(40 - i * 4 - j * 3);
    sweep(i * 3);
    sweep(j + 5);
    sweep(j * 0 + 7);
  });
}

struct Narrow {  // an executor that holds indices as they are, as a GPU does
  template <class I>
  using Index = I;
  using Overflow = NoOverflow;
};

// No sum or difference of a bound and an index leaves its type.
template <class E, class I>
void sweep_ends() {
  constexpr I kLow = std::numeric_limits<I>::min(), kHigh = std::numeric_limits<I>::max();
  for (const I base : {kLow, kLow + 40, I{-3}, I{0}, I{5}, kHigh - 40, kHigh - 7}) {
    Affine<E, I, Shape<1, 1, 8>, true> unit{base, 0, 0, 1};
    Affine<E, I, Shape<1, 2, 8>, false> up{base > kHigh - 40 ? kHigh - 40 : base, 0, 5, 3}, still{base, 0, 0, 0};
    Affine<E, I, Shape<1, 2, 8>, false> down{base < kLow + 40 ? kLow + 40 : base, 0, -5, -3};
    for (const I n : {kLow, kLow + 1, kLow + 30, I{-1}, I{0}, I{9}, kHigh - 30, kHigh - 1, kHigh}) {
      compare(unit, n);
      compare(up, n);
      compare(still, n);
      compare(down, n);
    }
  }
}

TEST(Masks, WithTheLargestAndTheLeastNumbers) {
  sweep_ends<FastCpu, s64>();
  sweep_ends<Narrow, s32>();
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
  Array<s32> total("total", {1}, {5}), bins("bins", {4}, {0, 0, 0, 0}), highest("highest", {1}, {INT32_MIN});
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
      x, y, total, bins, highest, real, 1000);
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
  EXPECT_EQ(highest[0], top);
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
