// The gradients against f64: each product's distance from its central value, for each type, and the bound that it
// is tested against; and identities that gradients satisfy whatever their rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/philox.h"
#include "octile/octile.hpp"

namespace octile {
namespace {

constexpr std::int64_t kM = 96, kN = 130, kK = 67;

template <class T>
constexpr DType kDType = DTypeOf<T>::value;

// The type of scales, and of the arithmetic.
template <class T>
using RealOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

std::size_t at(std::int64_t r, std::int64_t c, std::int64_t cols) { return static_cast<std::size_t>(r * cols + c); }

template <class T>
T converted(double v) {
  if constexpr (std::is_same_v<T, double>) {
    return v;
  } else {
    return T(static_cast<float>(v));
  }
}

template <class T>
double exact(T v) {
  if constexpr (std::is_same_v<T, double>) {
    return v;
  } else {
    return static_cast<double>(static_cast<float>(v));
  }
}

// Half a unit in the last place at v: the largest error of rounding to the type.
template <class T>
double half_ulp(double v) {
  struct Format {
    int precision, min_exponent;
  };
  constexpr Format kFormat = std::is_same_v<T, Half>       ? Format{11, -14}
                             : std::is_same_v<T, BFloat16> ? Format{8, -126}
                             : std::is_same_v<T, float>    ? Format{24, -126}
                                                           : Format{53, -1022};
  const int exponent = v == 0 ? kFormat.min_exponent : std::max(std::ilogb(v), kFormat.min_exponent);
  return std::ldexp(0.5, exponent - kFormat.precision + 1);
}

// One layer's backward: dY in T, Xq and Wq over the whole range of s8.
template <class T>
struct Layer {
  using Real = RealOf<T>;
  std::vector<T> dy;              // (M, N)
  std::vector<std::int8_t> w, x;  // (N, K), (M, K)
  std::vector<Real> s_w, s_x;     // (N), (M)

  explicit Layer(std::uint64_t seed) : dy(kM * kN), w(kN * kK), x(kM * kK), s_w(kN), s_x(kM) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    for (T& v : dy) v = converted<T>(normal(random));
    for (auto& v : w) v = static_cast<std::int8_t>(static_cast<int>(random() % 256) - 128);
    for (auto& v : x) v = static_cast<std::int8_t>(static_cast<int>(random() % 256) - 128);
    for (Real& s : s_w) s = static_cast<Real>(0.001 + 0.01 * std::abs(normal(random)));
    for (Real& s : s_x) s = static_cast<Real>(0.001 + 0.01 * std::abs(normal(random)));
  }

  double dy_at(std::int64_t m, std::int64_t n) const { return exact(dy[at(m, n, kN)]); }
  long double w_at(std::int64_t n, std::int64_t k) const {
    return w[at(n, k, kK)] * static_cast<long double>(s_w[static_cast<std::size_t>(n)]);
  }
  long double x_at(std::int64_t m, std::int64_t k) const {
    return x[at(m, k, kK)] * static_cast<long double>(s_x[static_cast<std::size_t>(m)]);
  }
};

template <class T>
struct Gradients {
  std::vector<T> dx = std::vector<T>(kM * kK);
  std::vector<T> dw = std::vector<T>(kN * kK);
  std::vector<T> db = std::vector<T>(kN);
};

struct Choice {
  Product product = Product::dequantized;
  Rounding rounding = Rounding::nearest;
  std::uint64_t seed = 0;
};

template <class T>
Gradients<T> backward(const Layer<T>& layer, const Choice& choice) {
  Gradients<T> g;
  const LinearBackwardPlan plan = LinearBackwardPlan::select({.m = kM,
                                                              .n = kN,
                                                              .k = kK,
                                                              .dy = kDType<T>,
                                                              .dx = choice.product,
                                                              .dw = choice.product,
                                                              .db = true,
                                                              .rounding = choice.rounding});
  LinearBackwardArgs a{.dy = matrix(layer.dy.data(), kM, kN),
                       .weight = matrix(layer.w.data(), kN, kK),
                       .weight_scale = vector(layer.s_w.data(), kN)};
  a.x = matrix(layer.x.data(), kM, kK);
  a.x_scale = vector(layer.s_x.data(), kM);
  a.dx = matrix(g.dx.data(), kM, kK);
  a.dw = matrix(g.dw.data(), kN, kK);
  a.db = vector(g.db.data(), kN);
  a.seed = choice.seed;
  std::vector<std::byte> workspace(plan.workspace_size());
  plan.run(a, {workspace.data(), workspace.size()});
  return g;
}

// A sum of products in f64 or, where long double is longer, in that (so that an f64 product has something to be
// compared with), the sum of its terms' magnitudes, and how many there are.
struct Central {
  long double value = 0;
  double magnitude = 0;
  std::int64_t terms = 0;

  void add(long double term) {
    value += term;
    magnitude += static_cast<double>(std::abs(term));
    ++terms;
  }
};

template <class T>
Central central_dx(const Layer<T>& l, std::int64_t m, std::int64_t k) {
  Central sum;
  for (std::int64_t n = 0; n < kN; ++n) sum.add(l.dy_at(m, n) * l.w_at(n, k));
  return sum;
}

template <class T>
Central central_dw(const Layer<T>& l, std::int64_t n, std::int64_t k) {
  Central sum;
  for (std::int64_t m = 0; m < kM; ++m) sum.add(l.dy_at(m, n) * l.x_at(m, k));
  return sum;
}

template <class T>
Central central_db(const Layer<T>& l, std::int64_t n) {
  Central sum;
  for (std::int64_t m = 0; m < kM; ++m) sum.add(l.dy_at(m, n));
  return sum;
}

template <class T>
constexpr double kUnitRoundoff = std::is_same_v<RealOf<T>, double> ? 0x1p-53 : 0x1p-24;

// The error bound of a float sum before it is rounded to T: a term takes two roundings to be formed (integer * scale,
// and times dY) and up to terms - 1 to be added, in whatever order; n roundings change it by at most n u / (1 - n u)
// (Higham, section 3.1). The central value may be a sum in f64 itself, with the same bound in its own unit.
template <class T>
double float_sum_error(const Central& sum) {
  const double n = static_cast<double>(sum.terms) + 2;
  const auto gamma = [n](double u) { return n * u / (1 - n * u); };
  return (gamma(kUnitRoundoff<T>) + gamma(0x1p-53)) * sum.magnitude;
}

// The error bound of an int8 product. With d = dY * scale in the arithmetic's type and s the scale of its segment:
//   - d carries one rounding, d / s another, and s itself may be rounded down so that the largest quotient passes 127
//     by up to 2 * 127 u and is clamped: together at most 5 u |d| for each element (|d| <= 127 s (1 + 2 u));
//   - rounding to an integer adds at most s / 2 (nearest) or s (stochastic), so that
//     |q s - dY * scale| <= s r + 5 u |d|, and each such error is multiplied by an integer of the other operand;
//   - the exact sum is converted, and multiplied by s: two more roundings of the result.
struct Int8Terms {
  double integers = 0;   // sum of |integer|
  double magnitude = 0;  // sum of |d * integer|
  double amax = 0;       // max |d|
};

template <class T>
double int8_error(const Int8Terms& t, long double value, double rounding) {
  const double u = kUnitRoundoff<T>;
  const double s = std::max(t.amax / 127, 0x1p-79) * (1 + 2 * u);
  const double error = t.integers * s * rounding + 5 * u * t.magnitude;
  return error + 3 * u * (static_cast<double>(std::abs(value)) + error);
}

template <class T>
Int8Terms int8_terms_dx(const Layer<T>& l, std::int64_t m, std::int64_t k) {
  Int8Terms t;
  for (std::int64_t n = 0; n < kN; ++n) {
    const double d = std::abs(l.dy_at(m, n) * static_cast<double>(l.s_w[static_cast<std::size_t>(n)]));
    const double integer = std::abs(static_cast<double>(l.w[at(n, k, kK)]));
    t.amax = std::max(t.amax, d);
    t.integers += integer;
    t.magnitude += d * integer;
  }
  return t;
}

template <class T>
Int8Terms int8_terms_dw(const Layer<T>& l, std::int64_t n, std::int64_t k) {
  Int8Terms t;
  for (std::int64_t m = 0; m < kM; ++m) {
    const double d = std::abs(l.dy_at(m, n) * static_cast<double>(l.s_x[static_cast<std::size_t>(m)]));
    const double integer = std::abs(static_cast<double>(l.x[at(m, k, kK)]));
    t.amax = std::max(t.amax, d);
    t.integers += integer;
    t.magnitude += d * integer;
  }
  return t;
}

// Compares a gradient with its central values, prints the largest and the root mean square error, and fails where an
// error exceeds its bound plus the one rounding to T.
template <class T>
class ErrorReport {
 public:
  explicit ErrorReport(std::string what) : what_(std::move(what)) {}

  void add(T computed, long double central, double bound) {
    const double value = exact(computed);
    const auto error = static_cast<double>(std::abs(value - central));
    const double allowed = bound + half_ulp<T>(value);
    EXPECT_LE(error, allowed) << what_ << ": " << value << ", central " << central;
    worst_ = std::max(worst_, error);
    share_ = std::max(share_, error / allowed);
    squares_ += error * error;
    reference_ += static_cast<double>(central * central);
    bound_ = std::max(bound_, allowed);
  }

  double relative() const { return std::sqrt(squares_ / reference_); }

  ~ErrorReport() {
    std::printf("  %-24s %-5s largest error %.3g (bound up to %.3g, at most %4.1f%% of its own), rms / rms %.3g\n",
                what_.c_str(), std::string(name(kDType<T>)).c_str(), worst_, bound_, 100 * share_, relative());
  }

 private:
  std::string what_;
  double worst_ = 0, share_ = 0, squares_ = 0, reference_ = 0, bound_ = 0;
};

template <class T>
class Backward : public testing::Test {};
using Types = testing::Types<Half, BFloat16, float, double>;
struct TypeNames {
  template <class T>
  static std::string GetName(int) {
    return std::string(name(kDType<T>));
  }
};
TYPED_TEST_SUITE(Backward, Types, TypeNames);

TYPED_TEST(Backward, DequantizedProductsKeepTheirBound) {
  const Layer<TypeParam> layer(1);
  const Gradients<TypeParam> g = backward(layer, {});
  ErrorReport<TypeParam> dx("dX dequantized"), dw("dW dequantized"), db("dB");
  for (std::int64_t k = 0; k < kK; ++k) {
    for (std::int64_t m = 0; m < kM; ++m) {
      const Central sum = central_dx(layer, m, k);
      dx.add(g.dx[at(m, k, kK)], sum.value, float_sum_error<TypeParam>(sum));
    }
    for (std::int64_t n = 0; n < kN; ++n) {
      const Central sum = central_dw(layer, n, k);
      dw.add(g.dw[at(n, k, kK)], sum.value, float_sum_error<TypeParam>(sum));
    }
  }
  for (std::int64_t n = 0; n < kN; ++n) {
    const Central sum = central_db(layer, n);
    db.add(g.db[static_cast<std::size_t>(n)], sum.value, float_sum_error<TypeParam>(sum));
  }
}

TYPED_TEST(Backward, Int8ProductsKeepTheirBound) {
  const Layer<TypeParam> layer(2);
  for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    const double step = rounding == Rounding::nearest ? 0.5 : 1;
    const Gradients<TypeParam> g = backward(layer, {Product::int8, rounding, 99});
    ErrorReport<TypeParam> dx("dX int8 " + std::string(name(rounding))), dw("dW int8 " + std::string(name(rounding)));
    for (std::int64_t k = 0; k < kK; ++k) {
      for (std::int64_t m = 0; m < kM; ++m) {
        const long double central = central_dx(layer, m, k).value;
        dx.add(g.dx[at(m, k, kK)], central, int8_error<TypeParam>(int8_terms_dx(layer, m, k), central, step));
      }
      for (std::int64_t n = 0; n < kN; ++n) {
        const long double central = central_dw(layer, n, k).value;
        dw.add(g.dw[at(n, k, kK)], central, int8_error<TypeParam>(int8_terms_dw(layer, n, k), central, step));
      }
    }
    // The bounds above are for the worst case. On average, a step of s = amax / 127 adds a variance of s^2 / 12
    // (stochastic: s^2 / 6) to that of d; amax is here about 4.4 deviations, so that the noise is about
    // 4.4 / 127 / sqrt(12) = 1 % (1.4 %) of the signal. Far more or far less would be a mistake.
    const double usual = rounding == Rounding::nearest ? 0.010 : 0.014;
    EXPECT_LT(dx.relative(), 1.5 * usual);
    EXPECT_LT(dw.relative(), 1.5 * usual);
    EXPECT_GT(dx.relative(), usual / 2);
    EXPECT_GT(dw.relative(), usual / 2);
  }
}

// The gradient of a mean over many tokens is tiny. Unless something overflows or underflows, scaling dY by a power of
// two scales every gradient by exactly the same.
TEST(SmallGradients, KeepTheirBits) {
  constexpr float kLess = 0x1p-40f;
  const Layer<float> layer(5);
  Layer<float> small = layer;
  for (float& v : small.dy) v *= kLess;
  for (const Product product : {Product::int8, Product::dequantized}) {
    const Gradients<float> expected = backward(layer, {product});
    const Gradients<float> g = backward(small, {product});
    for (std::size_t i = 0; i < g.dx.size(); ++i) ASSERT_EQ(g.dx[i], expected.dx[i] * kLess) << i;
    for (std::size_t i = 0; i < g.dw.size(); ++i) ASSERT_EQ(g.dw[i], expected.dw[i] * kLess) << i;
    for (std::size_t i = 0; i < g.db.size(); ++i) ASSERT_EQ(g.db[i], expected.db[i] * kLess) << i;
  }
}

// Over many seeds the mean of stochastic gradients is the central value: five deviations of a mean of kSeeds, each
// error a sum of independent steps s times an integer, with a variance of at most s^2 / 4 each (an integer's step of s
// in one direction or the other). What does not average out are the roundings of 2^-16 in u, s^2-16 an element.
TEST(StochasticBackward, IsUnbiased) {
  constexpr int kSeeds = 300;
  const Layer<float> layer(3);
  std::vector<double> mean(kM * kK);
  for (int seed = 0; seed < kSeeds; ++seed) {
    const Gradients<float> g = backward(layer, {Product::int8, Rounding::stochastic, static_cast<std::uint64_t>(seed)});
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += static_cast<double>(g.dx[i]) / kSeeds;
  }
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t k = 0; k < kK; k += 5) {
      const Int8Terms t = int8_terms_dx(layer, m, k);
      const double s = t.amax / 127;
      double squares = 0;
      for (std::int64_t n = 0; n < kN; ++n) squares += std::pow(layer.w[at(n, k, kK)], 2);
      const long double central = central_dx(layer, m, k).value;
      const double systematic = s * 0x1p-16 * t.integers + int8_error<float>(t, central, 0);
      ASSERT_NEAR(mean[at(m, k, kK)], central, 5 * s / 2 * std::sqrt(squares / kSeeds) + systematic) << m << ' ' << k;
    }
  }
}

// ---- Identities ----

// With Xhat and What the dequantized operands, <dX, Xhat> = <dY, Xhat What^T> = <dW, What>: one trilinear form.
TEST(BackwardIdentities, TheGradientsAreAdjointToTheForward) {
  const Layer<double> layer(4);
  const Gradients<double> g = backward(layer, {});
  Central by_y, by_x, by_w;
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t n = 0; n < kN; ++n) {
      for (std::int64_t k = 0; k < kK; ++k) by_y.add(layer.dy_at(m, n) * layer.x_at(m, k) * layer.w_at(n, k));
    }
  }
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t k = 0; k < kK; ++k) by_x.add(g.dx[at(m, k, kK)] * layer.x_at(m, k));
  }
  for (std::int64_t n = 0; n < kN; ++n) {
    for (std::int64_t k = 0; k < kK; ++k) by_w.add(g.dw[at(n, k, kK)] * layer.w_at(n, k));
  }
  // Every path adds the same M * N * K terms, with fewer roundings than that.
  const double bound = 2 * static_cast<double>(by_y.terms) * 0x1p-53 * by_y.magnitude;
  EXPECT_NEAR(by_x.value, by_y.value, bound);
  EXPECT_NEAR(by_w.value, by_y.value, bound);
  EXPECT_GT(std::abs(by_y.value), 1e4 * bound) << "the bound must mean something";
}

// Where a column of Xhat is all ones, that column of dW is dB: exactly for integers, whose sums are exact in any order.
TEST(BackwardIdentities, TheBiasIsAWeightOnOnes) {
  Layer<float> layer(5);
  for (std::size_t i = 0; i < layer.dy.size(); ++i)
    layer.dy[i] = static_cast<float>(static_cast<int>(i * 7919 % 255) - 127);
  for (std::int64_t m = 0; m < kM; ++m) layer.x[at(m, 3, kK)] = 1;
  std::fill(layer.s_x.begin(), layer.s_x.end(), 1.0f);
  const Gradients<float> g = backward(layer, {});
  for (std::int64_t n = 0; n < kN; ++n) EXPECT_EQ(g.dw[at(n, 3, kK)], g.db[static_cast<std::size_t>(n)]) << n;
}

// Scaling dY by a power of two scales every gradient by the same, bit for bit, in int8 too, where the scale takes the
// factor.
TEST(BackwardIdentities, PowersOfTwoPassThrough) {
  const Layer<float> layer(6);
  Layer<float> larger = layer;
  for (float& v : larger.dy) v *= 64;
  for (const Choice& choice : {Choice{}, Choice{Product::int8}, Choice{Product::int8, Rounding::stochastic, 5}}) {
    Gradients<float> one = backward(layer, choice);
    const Gradients<float> other = backward(larger, choice);
    for (auto* gradient : {&one.dx, &one.dw, &one.db}) {
      for (float& v : *gradient) v *= 64;
    }
    EXPECT_EQ(one.dx, other.dx);
    EXPECT_EQ(one.dw, other.dw);
    EXPECT_EQ(one.db, other.db);
  }
}

// With the rows of the batch in another order, dX has its rows in that order, and the int8 dW, whose sum is exact, the
// same bits.
TEST(BackwardIdentities, TheOrderOfTheBatchDoesNotMatter) {
  const Layer<float> layer(7);
  Layer<float> turned = layer;
  const auto from = [](std::int64_t m) { return (m * 29 + 5) % kM; };  // 29 and 96 are coprime
  for (std::int64_t m = 0; m < kM; ++m) {
    std::copy_n(layer.dy.begin() + from(m) * kN, kN, turned.dy.begin() + m * kN);
    std::copy_n(layer.x.begin() + from(m) * kK, kK, turned.x.begin() + m * kK);
    turned.s_x[static_cast<std::size_t>(m)] = layer.s_x[static_cast<std::size_t>(from(m))];
  }
  for (const Product product : {Product::dequantized, Product::int8}) {
    const Gradients<float> one = backward(layer, {product}), other = backward(turned, {product});
    for (std::int64_t m = 0; m < kM; ++m) {
      EXPECT_EQ(std::memcmp(other.dx.data() + m * kK, one.dx.data() + from(m) * kK, kK * sizeof(float)), 0) << m;
    }
    if (product == Product::int8) {
      EXPECT_EQ(one.dw, other.dw);
    }
  }
}

// dX of a batch of unit vectors is What itself, exactly, in both products: one term, and in int8 a quantized dY of 127
// with a scale of s_w / 127.
TEST(BackwardIdentities, AUnitGradientReadsTheWeight) {
  Layer<double> layer(8);
  std::fill(layer.dy.begin(), layer.dy.end(), 0.0);
  for (std::int64_t m = 0; m < kM; ++m) layer.dy[at(m, m, kN)] = 1;
  const Gradients<double> plain = backward(layer, {});
  const Gradients<double> int8 = backward(layer, {Product::int8});
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t k = 0; k < kK; ++k) {
      ASSERT_EQ(plain.dx[at(m, k, kK)], static_cast<double>(layer.w_at(m, k)));
      // Divided by 127 and multiplied again: two roundings.
      ASSERT_NEAR(int8.dx[at(m, k, kK)], layer.w_at(m, k), 2.01 * 0x1p-53 * std::abs(layer.w_at(m, k)));
    }
  }
}

// ---- Blocks of the contraction ----

// A description, and how many of its rows run.
struct Blocked {
  LinearBackwardDescription description;
  std::int64_t rows = 0;
  std::uint64_t seed = 0;
};

// Its operands and outputs. Tokens differ in size by up to 2^12, so that blocks have different scales.
template <class T>
struct BlockedRun {
  using Real = RealOf<T>;
  LinearBackwardDescription d;
  std::int64_t m, n, k;
  std::uint64_t seed;
  std::vector<T> dy, dx, db;
  std::vector<Real> s_w, s_x, dw;  // dW in the type of the scales
  std::vector<std::int8_t> w, x;

  explicit BlockedRun(const Blocked& c) : d(c.description), m(c.rows), n(d.n), k(d.k), seed(c.seed) {
    d.dy = kDType<T>;
    d.dw_dtype = kDType<Real>;
    std::mt19937_64 random(static_cast<std::uint64_t>(m * 31 + n * 7 + k));
    std::normal_distribution<double> normal;
    dy.resize(at(m, 0, n));
    for (std::size_t i = 0; i < dy.size(); ++i) {
      dy[i] = converted<T>(normal(random) * std::ldexp(1, -static_cast<int>(i / static_cast<std::size_t>(n) * 7 % 13)));
    }
    const auto integers = [&](std::vector<std::int8_t>& of, std::int64_t rows) {
      of.resize(at(rows, 0, k));
      for (auto& v : of) v = static_cast<std::int8_t>(static_cast<int>(random() % 256) - 128);
    };
    integers(w, n);
    integers(x, m);
    const auto scales = [&](std::vector<Real>& of, std::int64_t size) {
      of.resize(static_cast<std::size_t>(size));
      for (Real& s : of) s = static_cast<Real>(0.001 + 0.01 * std::abs(normal(random)));
    };
    scales(s_w, n);
    scales(s_x, m);
    dx.assign(at(m, 0, k), converted<T>(-99));
    dw.assign(at(n, 0, k), 3);
    db.assign(static_cast<std::size_t>(n), converted<T>(-99));
  }

  void run() {
    const LinearBackwardPlan plan = LinearBackwardPlan::select(d);
    LinearBackwardArgs a{.dy = matrix<const T>(dy.data(), m, n)};
    if (d.dx != Product::none) {
      a.weight = matrix<const std::int8_t>(w.data(), n, k);
      a.weight_scale = vector<const Real>(s_w.data(), n);
      a.dx = matrix(dx.data(), m, k);
    }
    if (d.dw != Product::none) {
      a.x = matrix<const std::int8_t>(x.data(), m, k);
      a.x_scale = vector<const Real>(s_x.data(), m);
      a.dw = matrix(dw.data(), n, k);
    }
    if (d.db) a.db = vector(db.data(), n);
    a.seed = seed;
    std::vector<std::byte> workspace(plan.workspace_size());
    plan.run(a, {workspace.data(), workspace.size()});
  }

  // One term of the contract's sum: a block of dY times a scale, quantized, times integers.
  struct Term {
    Real d;
    std::int8_t integer;
    std::uint64_t index;  // of dY's element, for the random number
  };

  Real folded(const std::vector<Term>& terms) const {
    Real t = 0;
    const auto length = static_cast<std::size_t>(d.gradient_block);
    for (std::size_t first = 0; first < terms.size(); first += length) {
      const std::size_t end = std::min(first + length, terms.size());
      Real largest = 0;
      for (std::size_t c = first; c < end; ++c) largest = std::max(largest, std::abs(terms[c].d));
      const Real s = std::max<Real>(largest / 127, static_cast<Real>(0x1p-79));
      std::int64_t acc = 0;
      for (std::size_t c = first; c < end; ++c) {
        const Real ratio = terms[c].d / s;
        const Real level = d.rounding == Rounding::nearest
                               ? std::nearbyint(ratio)
                               : std::floor(ratio + static_cast<Real>(uniform(terms[c].index, seed)));
        acc += static_cast<std::int64_t>(std::clamp<Real>(level, -127, 127)) * terms[c].integer;
      }
      t = std::fma(static_cast<Real>(acc), s, t);
    }
    return t;
  }

  Real dy_at(std::int64_t r, std::int64_t c) const { return static_cast<Real>(exact(dy[at(r, c, n)])); }
  std::uint64_t index(std::int64_t r, std::int64_t c) const { return static_cast<std::uint64_t>(r * n + c); }

  Real expected_dx(std::int64_t row, std::int64_t col) const {
    std::vector<Term> terms;
    for (std::int64_t c = 0; c < n; ++c) {
      terms.push_back({dy_at(row, c) * s_w[static_cast<std::size_t>(c)], w[at(c, col, k)], index(row, c)});
    }
    return folded(terms);
  }

  Real expected_dw(std::int64_t row, std::int64_t col) const {
    std::vector<Term> terms;
    for (std::int64_t r = 0; r < m; ++r) {
      terms.push_back({dy_at(r, row) * s_x[static_cast<std::size_t>(r)], x[at(r, col, k)], index(r, row)});
    }
    const Real sum = folded(terms);
    return d.dw_accumulate ? 3 + sum : sum;
  }

  void expect_int8_products() const {
    for (std::int64_t r = 0; d.dx == Product::int8 && r < m; ++r) {
      for (std::int64_t c = 0; c < k; ++c) {
        ASSERT_EQ(exact(dx[at(r, c, k)]), exact(converted<T>(expected_dx(r, c)))) << "dX " << r << ' ' << c;
      }
    }
    for (std::int64_t r = 0; d.dw == Product::int8 && r < n; ++r) {
      for (std::int64_t c = 0; c < k; ++c) ASSERT_EQ(dw[at(r, c, k)], expected_dw(r, c)) << "dW " << r << ' ' << c;
    }
    for (std::int64_t c = 0; d.db && c < n; ++c) {
      Central sum;
      for (std::int64_t r = 0; r < m; ++r) sum.add(dy_at(r, c));
      const double value = exact(db[static_cast<std::size_t>(c)]);
      ASSERT_NEAR(value, sum.value, float_sum_error<T>(sum) + half_ulp<T>(value)) << "dB " << c;
    }
  }
};

constexpr Product kNo = Product::none, kFloat = Product::dequantized, kInt8 = Product::int8;

LinearBackwardDescription blocked(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t block) {
  return {.m = m, .n = n, .k = k, .dx = kInt8, .dw = kInt8, .db = true, .gradient_block = block};
}

TYPED_TEST(Backward, GradientsInBlocksAreTheContractsSums) {
  // Several blocks, full and short; one block; contractions shorter than a block; fewer rows than the plan's.
  struct Size {
    std::int64_t max_rows, rows, n, block;
  };
  for (const Size& s : {Size{256, 256, 384, 128},
                        {300, 300, 257, 128},
                        {600, 513, 300, 256},
                        {700, 131, 129, 128},
                        {5, 5, 3, 128},
                        {1100, 1, 1030, 1024},
                        {1030, 1025, 70, 1024},
                        {530, 530, 520, 512}}) {
    for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
      SCOPED_TRACE(testing::Message() << s.rows << " x " << s.n << ", blocks of " << s.block << ' ' << name(rounding));
      Blocked c{blocked(s.max_rows, s.n, 5, s.block), s.rows, 77};
      c.description.rounding = rounding;
      c.description.dw_accumulate = s.rows == 513;
      BlockedRun<TypeParam> run(c);
      run.run();
      run.expect_int8_products();
      if (this->HasFatalFailure()) return;
    }
  }
}

// A product that is not int8 has the same bits as without blocks.
TEST(BlockedBackward, OneProductAlone) {
  for (const auto& [dx, dw] : {std::pair{kInt8, kFloat}, {kFloat, kInt8}, {kInt8, kNo}, {kNo, kInt8}}) {
    for (const bool db : {false, true}) {
      SCOPED_TRACE(testing::Message() << name(dx) << ' ' << name(dw) << ' ' << db);
      LinearBackwardDescription d = blocked(260, 200, 9, 128);
      d.dx = dx, d.dw = dw, d.db = db;
      BlockedRun<BFloat16> run({d, 260});
      run.run();
      run.expect_int8_products();
      d.gradient_block = 0;
      BlockedRun<BFloat16> whole({d, 260});
      whole.run();
      if (dx == kFloat) {
        EXPECT_EQ(std::memcmp(run.dx.data(), whole.dx.data(), run.dx.size() * sizeof(BFloat16)), 0);
      }
      if (dw == kFloat) {
        EXPECT_EQ(run.dw, whole.dw);
      }
      if (dx == kInt8) {
        EXPECT_NE(std::memcmp(run.dx.data(), whole.dx.data(), run.dx.size() * sizeof(BFloat16)), 0);
      }
      if (dw == kInt8) {
        EXPECT_NE(run.dw, whole.dw);
      }
    }
  }
}

TEST(BlockedBackward, OneBlockIsTheWholeContraction) {
  for (const std::int64_t block : {128, 256, 512, 1024}) {
    BlockedRun<Half> run({blocked(block, block - 1, 7, block), block});
    run.run();
    LinearBackwardDescription d = blocked(block, block - 1, 7, 0);
    BlockedRun<Half> whole({d, block});
    whole.run();
    EXPECT_EQ(std::memcmp(run.dx.data(), whole.dx.data(), run.dx.size() * sizeof(Half)), 0) << block;
    EXPECT_EQ(run.dw, whole.dw) << block;
  }
}

TEST(BlockedBackward, SumsOfNothingAreZero) {
  const std::array<std::array<std::int64_t, 4>, 4> sizes = {{{0, 0, 3, 4}, {9, 0, 3, 4}, {3, 3, 0, 4}, {3, 3, 4, 0}}};
  for (const auto& [max_rows, rows, n, k] : sizes) {
    SCOPED_TRACE(testing::Message() << rows << " of " << max_rows << " x " << n << " x " << k);
    BlockedRun<float> run({blocked(max_rows, n, k, 128), rows});
    run.run();
    run.expect_int8_products();
    if (n == 0) {
      EXPECT_EQ(run.dx, std::vector<float>(run.dx.size(), 0.0f));
    }
    if (rows == 0) {
      EXPECT_EQ(run.dw, std::vector<float>(run.dw.size(), 0.0f));
      EXPECT_EQ(run.db, std::vector<float>(run.db.size(), 0.0f));
    }
  }
}

// The purpose of blocks: where tokens differ in size, a large one costs precision only in its own block.
TEST(BlockedBackward, ErrorsFallWithTheBlock) {
  double last = 1;
  for (const std::int64_t block : {1024, 256, 128}) {
    BlockedRun<float> run({blocked(1024, 24, 8, block), 1024});
    for (std::int64_t c = 0; c < run.n; ++c) run.dy[at(7, c, run.n)] *= 0x1p16f;
    run.run();
    double squares = 0;
    for (std::int64_t n = 0; n < run.n; ++n) {
      for (std::int64_t k = 0; k < run.k; ++k) {
        double exact_dw = 0;
        for (std::int64_t r = 0; r < run.m; ++r) {
          exact_dw += static_cast<double>(run.dy_at(r, n)) * static_cast<double>(run.s_x[static_cast<std::size_t>(r)]) *
                      run.x[at(r, k, run.k)];
        }
        squares += std::pow(exact_dw - static_cast<double>(run.dw[at(n, k, run.k)]), 2);
      }
    }
    const double error = std::sqrt(squares);
    // The tokens of the large one's block are rounded away, so the squared error is about proportional to the block.
    if (block < 1024) {
      EXPECT_LT(error, (block == 256 ? 0.6 : 0.9) * last) << block;
    }
    last = error;
  }
}

}  // namespace
}  // namespace octile
