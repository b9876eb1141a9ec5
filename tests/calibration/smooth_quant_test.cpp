// The calibrator and SmoothQuant against plain loops, what smoothing recovers, and the static W8A8 plan that uses it.
#include "octile/smooth_quant.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/access.h"
#include "octile/octile.hpp"

namespace octile {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::vector<float> normal(std::int64_t count, unsigned seed, float size = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0, size);
  std::vector<float> values(at(count));
  for (float& value : values) value = distribution(generator);
  return values;
}

// The status of an error, and the texts that it must contain.
void expect_error(const std::function<void()>& call, Status status, const std::vector<std::string>& texts) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown; expected an error with " << texts[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    for (const std::string& text : texts) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what() << "\n  lacks: " << text;
    }
  }
}

// ---- Calibrator ----

std::vector<float> excess_of(const Calibrator& calibrator) {
  std::vector<float> excess(2);
  calibrator.excess(vector(excess.data(), 2));
  return excess;
}

std::vector<double> moments_of(const Calibrator& calibrator) {
  std::vector<double> h(at(calibrator.features() * calibrator.features()));
  calibrator.second_moments(matrix(h.data(), calibrator.features(), calibrator.features()));
  return h;
}

TEST(Calibrator, EqualsPlainLoopsHoweverTheRowsAreSplit) {
  for (const std::int64_t k : {1, 7, 65, 150}) {
    const std::int64_t rows = 131;
    const std::vector<float> x = normal(rows * k, static_cast<unsigned>(k));
    std::vector<float> largest(at(k));
    std::vector<double> h(at(k * k));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < k; ++i) {
        largest[at(i)] = std::max(largest[at(i)], std::abs(x[at(r * k + i)]));
        for (std::int64_t j = 0; j < k; ++j) {
          h[at(i * k + j)] += static_cast<double>(x[at(r * k + i)]) * static_cast<double>(x[at(r * k + j)]);
        }
      }
    }
    for (const int threads : {1, 2, 7}) {
      for (const std::int64_t step : {1, 50, 131}) {
        Calibrator calibrator({.features = k, .second_moments = true, .threads = threads});
        for (std::int64_t r = 0; r < rows; r += step) {
          calibrator.observe(matrix<const float>(x.data() + r * k, std::min(step, rows - r), k));
        }
        EXPECT_EQ(calibrator.rows(), rows);
        EXPECT_EQ(calibrator.features(), k);
        EXPECT_EQ(calibrator.channel_max(), largest);
        EXPECT_EQ(calibrator.max(), *std::max_element(largest.begin(), largest.end()));
        EXPECT_EQ(moments_of(calibrator), h) << k << " features, " << threads << " threads, " << step << " rows a call";
      }
    }
  }
}

TEST(Calibrator, TakesEveryFloatTypeAndStride) {
  const std::vector<float> values = {1, -2.5f, 0.25f, -0.0f, 3, 0.5f};  // (2, 3), exact in all types
  std::vector<Half> half;
  std::vector<BFloat16> bfloat;
  std::vector<double> wide;
  for (const float value : values) half.emplace_back(value), bfloat.emplace_back(value), wide.emplace_back(value);
  std::vector<float> padded = {1, -2.5f, 0.25f, 99, 99, -0.0f, 3, 0.5f};
  const ConstTensor once = matrix<const float>(values.data(), 1, 3);
  ConstTensor repeated = once;
  repeated.shape[0] = 2;
  repeated.strides[0] = 0;
  for (const ConstTensor& x :
       {ConstTensor(matrix<const float>(values.data(), 2, 3)), ConstTensor(matrix<const Half>(half.data(), 2, 3)),
        ConstTensor(matrix<const BFloat16>(bfloat.data(), 2, 3)), ConstTensor(matrix<const double>(wide.data(), 2, 3)),
        ConstTensor(matrix<const float>(padded.data(), 2, 3, 5)), repeated}) {
    Calibrator calibrator({.features = 3, .second_moments = true});
    calibrator.observe(x);
    const bool twice = x.strides[0] == 0;
    EXPECT_EQ(calibrator.channel_max(), (twice ? std::vector{1.0f, 2.5f, 0.25f} : std::vector{1.0f, 3.0f, 0.5f}));
    EXPECT_EQ(moments_of(calibrator)[4], twice ? 12.5 : 15.25);
    std::vector<float> h(9);
    calibrator.second_moments(matrix(h.data(), 3, 3));
    EXPECT_EQ(h[1], static_cast<float>(moments_of(calibrator)[1]));
    EXPECT_EQ(h[3], h[1]);
    std::vector<float> out(6, -1.0f);
    calibrator.channel_max(vector(out.data(), 3, 2));
    EXPECT_EQ(out[2], calibrator.channel_max()[1]);
    EXPECT_EQ(out[1], -1.0f);
  }
}

TEST(Calibrator, ABadValueStays) {
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    Calibrator calibrator({.features = 3, .second_moments = true});
    const std::vector<float> x = {1, 2, 3, 4, bad, 6};
    const std::vector<float> more = {100, 200, 300};
    calibrator.observe(matrix<const float>(x.data(), 2, 3));
    calibrator.observe(matrix<const float>(more.data(), 1, 3));
    const std::vector<float> largest = calibrator.channel_max();
    EXPECT_EQ(largest[0], 100);
    EXPECT_TRUE(std::isnan(largest[1]));
    EXPECT_EQ(largest[2], 300);
    EXPECT_TRUE(std::isnan(calibrator.max()));
    const std::vector<double> h = moments_of(calibrator);
    for (int i = 0; i < 9; ++i) EXPECT_EQ(std::isnan(h[at(i)]), i / 3 == 1 || i % 3 == 1) << i;
  }
  Calibrator calibrator({.features = 1});
  const double beyond = 1e300;
  calibrator.observe(matrix<const double>(&beyond, 1, 1));
  EXPECT_TRUE(std::isnan(calibrator.max()));
}

TEST(Calibrator, Merges) {
  const std::vector<float> x = normal(8 * 5, 3);
  Calibrator whole({.features = 5, .second_moments = true});
  Calibrator first({.features = 5, .second_moments = true});
  Calibrator second({.features = 5, .second_moments = true});
  whole.observe(matrix<const float>(x.data(), 8, 5));
  first.observe(matrix<const float>(x.data(), 3, 5));
  second.observe(matrix<const float>(x.data() + 15, 5, 5));
  first.merge(second);
  EXPECT_EQ(first.rows(), 8);
  EXPECT_EQ(first.channel_max(), whole.channel_max());
  const std::vector<double> sum = moments_of(first);
  const std::vector<double> wanted = moments_of(whole);
  // Sums of 8 terms in two orders: each within 8 * 2^-53 of the terms' magnitudes, which the diagonal bounds.
  double diagonal = 0;
  for (int j = 0; j < 5; ++j) diagonal = std::max(diagonal, wanted[at(6 * j)]);
  for (std::size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(sum[i], wanted[i], 2 * 8 * 0x1p-53 * diagonal);

  // Two calibrators that saw the same rows: the sums double, and so does the number of rows.
  const std::vector<float> more = normal(300 * 5, 4);
  Calibrator one({.features = 5}), two({.features = 5});
  one.observe(matrix<const float>(more.data(), 300, 5));
  two.observe(matrix<const float>(more.data(), 300, 5));
  const std::vector<float> before = excess_of(one);
  one.merge(two);
  EXPECT_FLOAT_EQ(excess_of(one)[0], before[0] / 2);
  EXPECT_FLOAT_EQ(excess_of(one)[1], before[1] / 2);
  const std::vector<float> nearest = excess_of(one);
  std::fesetround(FE_UPWARD);
  const std::vector<float> upward = excess_of(one);
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(upward, nearest);
}

// Rows of each block of 128 beside the maxima of the blocks before it, each by the number of rows before.
TEST(Calibrator, ExcessEqualsPlainLoopsHoweverTheRowsAreSplit) {
  const std::int64_t rows = 700, k = 9;
  std::vector<float> x = normal(rows * k, 5);
  for (std::int64_t r = 0; r < rows; ++r) x[at(r * k)] = 0;  // a channel that never exceeds
  double exceeding = 0;
  std::vector<double> squares(at(k));
  std::vector<float> before(at(k)), largest(at(k));
  for (std::int64_t r = 0; r < rows; ++r) {
    if (r % 128 == 0) before = largest;
    const std::int64_t earlier = r / 128 * 128;
    for (std::int64_t j = 0; j < k; ++j) {
      const float value = std::abs(x[at(r * k + j)]);
      largest[at(j)] = std::max(largest[at(j)], value);
      if (earlier == 0 || value <= before[at(j)]) continue;
      const double by = static_cast<double>(value) - static_cast<double>(before[at(j)]);
      exceeding += static_cast<double>(earlier);
      squares[at(j)] += static_cast<double>(earlier) * by * by;
    }
  }
  double square = 0;
  for (std::int64_t j = 1; j < k; ++j) square += squares[at(j)] / static_cast<double>(largest[at(j)] * largest[at(j)]);
  const double values = static_cast<double>(rows - 128) * k * rows;
  for (const int step : {1, 50, 128, 700}) {
    Calibrator calibrator({.features = k});
    for (std::int64_t r = 0; r < rows; r += step) {
      calibrator.observe(matrix<const float>(x.data() + r * k, std::min<std::int64_t>(step, rows - r), k));
    }
    const std::vector<float> excess = excess_of(calibrator);
    EXPECT_NEAR(excess[0], exceeding / values, 1e-6 * excess[0]);
    EXPECT_NEAR(excess[1], square / values, 1e-5 * excess[1]);
  }
}

// The excess estimated from some rows predicts that of other rows within 50 %.
TEST(Calibrator, ExcessForetellsWhatOtherRowsExceedBy) {
  const std::int64_t k = 128;
  for (const std::int64_t rows : {256, 1024, 4096}) {
    const std::vector<float> x = normal(rows * k, 6), fresh = normal(20000 * k, 7);
    Calibrator calibrator({.features = k});
    calibrator.observe(matrix<const float>(x.data(), rows, k));
    const std::vector<float> largest = calibrator.channel_max(), excess = excess_of(calibrator);
    double count = 0, square = 0;
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      const double by = static_cast<double>(std::abs(fresh[i]) / largest[i % at(k)]) - 1;
      if (by > 0) count += 1, square += by * by;
    }
    const auto all = static_cast<double>(fresh.size());
    EXPECT_NEAR(excess[0] / (count / all), 1, 0.5) << rows;
    EXPECT_NEAR(excess[1] / (square / all), 1, 0.5) << rows;
  }
  // Too few rows to compare: the value for independent rows, with an exponential tail of mean 1 / (ln(rows) + 0.58).
  Calibrator few({.features = k});
  const std::vector<float> x = normal(100 * k, 8);
  EXPECT_EQ(excess_of(few), (std::vector<float>{0, 0}));
  few.observe(matrix<const float>(x.data(), 100, k));
  EXPECT_FLOAT_EQ(excess_of(few)[0], 1.0f / 101);
  EXPECT_FLOAT_EQ(excess_of(few)[1], static_cast<float>(2.0 / 101 / std::pow(std::log(100.0) + 0.5772156649, 2)));
}

TEST(Calibrator, Rejects) {
  const auto invalid = Status::invalid_argument;
  const auto mismatch = Status::shape_mismatch;
  expect_error([] { Calibrator({.features = -1}); }, invalid, {"Calibrator", "features = -1"});
  expect_error([] { Calibrator({.features = std::int64_t{1} << 40, .second_moments = true}); }, invalid, {"overflows"});
  expect_error([] { Calibrator({.features = 2, .threads = -1}); }, invalid, {"threads = -1"});
  Calibrator calibrator({.features = 3});
  Calibrator other({.features = 4});
  Calibrator with_moments({.features = 3, .second_moments = true});
  std::vector<float> x(12);
  std::vector<std::int8_t> q(12);
  std::vector<Half> h(9);
  expect_error([&] { calibrator.observe(matrix<const float>(x.data(), 3, 4)); }, mismatch,
               {"Calibrator::observe", "x is f32 (3, 4)", "(3, 3)"});
  expect_error([&] { calibrator.observe(matrix<const std::int8_t>(q.data(), 3, 3)); }, Status::unsupported,
               {"x is s8"});
  expect_error([&] { calibrator.observe(matrix<const float>(x.data(), -2, 3)); }, invalid, {"rows of x = -2"});
  expect_error([&] { calibrator.observe(vector<const float>(x.data(), 3)); }, mismatch, {"x is f32 (3)"});
  expect_error([&] { calibrator.observe(on(Device::cuda(0), matrix<const float>(x.data(), 1, 3))); }, mismatch,
               {"cuda:0"});
  expect_error([&] { calibrator.merge(other); }, mismatch, {"features = 4", "features = 3"});
  expect_error([&] { calibrator.merge(with_moments); }, mismatch, {"second_moments = 1"});
  expect_error([&] { calibrator.second_moments(matrix(x.data(), 3, 3)); }, Status::unsupported,
               {"second_moments = false"});
  expect_error([&] { with_moments.second_moments(matrix(h.data(), 3, 3)); }, Status::unsupported, {"h is f16"});
  expect_error([&] { with_moments.second_moments(matrix(x.data(), 3, 4)); }, mismatch, {"h is f32 (3, 4)"});
  expect_error([&] { calibrator.channel_max(vector(x.data(), 4)); }, mismatch, {"out is f32 (4)"});
  EXPECT_EQ(calibrator.rows(), 0);
  EXPECT_EQ(calibrator.max(), 0);
}

// ---- Smoothing ----

TEST(Smoothing, FactorsAreTheFormula) {
  const std::vector<float> x = {0, 1e-7f, 1e-5f, 0.3f, 1, 7.5f, 400, 3e38f, 1e-20f, 123.456f};
  const std::vector<float> w = {1, 0, 2e-3f, 0.7f, 1, 1e-9f, 0.02f, 3e38f, 1e20f, 0.0312f};
  const auto k = static_cast<std::int64_t>(x.size());
  for (const double alpha : {0.0, 0.25, 0.5, 0.8, 1.0}) {
    std::vector<float> s(x.size());
    std::vector<float> inverse(x.size());
    const float largest = smoothing_factors({.alpha = alpha,
                                             .input_channel_max = vector(x.data(), k),
                                             .weight_channel_max = vector(w.data(), k),
                                             .factors = vector(s.data(), k),
                                             .multiplier = vector(inverse.data(), k)});
    float wanted_largest = 0;
    for (std::size_t j = 0; j < x.size(); ++j) {
      const double xj = std::max(static_cast<double>(x[j]), static_cast<double>(1e-5f));
      const double wj = std::max(static_cast<double>(w[j]), static_cast<double>(1e-5f));
      const double wanted = std::max(std::pow(xj, alpha) / std::pow(wj, 1 - alpha), static_cast<double>(1e-5f));
      // One rounding to f32; the errors before it are far smaller.
      EXPECT_NEAR(s[j], wanted, wanted * (0x1p-24 + 1e-13)) << "alpha " << alpha << " channel " << j;
      EXPECT_EQ(inverse[j], 1 / s[j]);
      wanted_largest = std::max(wanted_largest, x[j] * inverse[j]);
    }
    EXPECT_EQ(largest, wanted_largest);
  }
}

template <class T>
std::vector<T> converted(const std::vector<float>& values) {
  std::vector<T> out;
  for (const float value : values) out.push_back(static_cast<T>(value));
  return out;
}

template <class T>
void expect_folded() {
  const std::vector<float> s = {0.5f, 3, 1e-3f};
  const auto w = converted<T>({1, 2, 3, 4, 5, 6});
  const auto norm = converted<T>({1, 2, 3});
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  auto consumer = w;  // (2, 3)
  auto before = w;    // (3, 2)
  auto gain = norm, bias = norm;
  const ConstTensor factors = vector<const float>(s.data(), 3);
  smooth_weight(matrix(consumer.data(), 2, 3), factors);
  smooth_before({.factors = factors, .weight = matrix(before.data(), 3, 2)});
  smooth_before({.factors = factors, .weight = vector(gain.data(), 3), .bias = vector(bias.data(), 3)});
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(consumer[i], static_cast<T>(static_cast<Real>(w[i]) * static_cast<Real>(s[i % 3])));
    EXPECT_EQ(before[i], static_cast<T>(static_cast<Real>(w[i]) / static_cast<Real>(s[i / 2])));
  }
  for (std::size_t j = 0; j < 3; ++j) {
    EXPECT_EQ(gain[j], static_cast<T>(static_cast<Real>(norm[j]) / static_cast<Real>(s[j])));
    EXPECT_EQ(bias[j], gain[j]);
  }
}

TEST(Smoothing, FoldsIntoWeightsAndTheLayerBefore) {
  expect_folded<float>();
  expect_folded<double>();
  expect_folded<Half>();
  expect_folded<BFloat16>();
}

TEST(Smoothing, Rejects) {
  const auto invalid = Status::invalid_argument;
  const auto mismatch = Status::shape_mismatch;
  struct Case {
    std::vector<float> x = {1, 2, 3};
    std::vector<float> w = {1, 2, 3};
    std::vector<float> s = {-7, -7, -7};
    std::vector<std::int8_t> q = {1, 2, 3};
    SmoothingArgs args{.input_channel_max = vector<const float>(x.data(), 3),
                       .weight_channel_max = vector<const float>(w.data(), 3),
                       .factors = vector(s.data(), 3)};
  };
  const auto rejected = [](const std::function<void(Case&)>& spoil, Status status,
                           const std::vector<std::string>& texts) {
    Case c;
    spoil(c);
    const Case before = c;
    expect_error([&] { smoothing_factors(c.args); }, status, texts);
    EXPECT_EQ(c.s, before.s);
  };
  for (const double alpha : {-0.1, 1.1, std::nan("")}) {
    rejected([=](Case& c) { c.args.alpha = alpha; }, invalid, {"smoothing_factors", "alpha = "});
  }
  for (const float bad : {kNan, kInfinity, -1.0f}) {
    rejected([=](Case& c) { c.x[1] = bad; }, invalid, {"input_channel_max[1] = "});
    rejected([=](Case& c) { c.w[2] = bad; }, invalid, {"weight_channel_max[2] = "});
  }
  rejected([](Case& c) { c.args.weight_channel_max.shape[0] = 2; }, mismatch, {"weight_channel_max", "(3)"});
  rejected([](Case& c) { c.args.input_channel_max.shape[0] = -2; }, invalid, {"input_channel_max = -2"});
  rejected([](Case& c) { c.args.factors = {}; }, mismatch, {"factors is absent"});
  rejected([](Case& c) { c.args.multiplier = vector(c.q.data(), 3); }, mismatch, {"multiplier is s8"});
  rejected([](Case& c) { c.args.multiplier = c.args.factors; }, invalid, {"overlaps"});

  Case c;
  std::vector<float> weight(6, 1.0f);
  const ConstTensor factors = vector<const float>(c.x.data(), 3);
  expect_error([&] { smooth_weight(matrix(weight.data(), 3, 2), factors); }, mismatch, {"weight is f32 (3, 2)"});
  expect_error([&] { smooth_weight(matrix(weight.data(), -1, 3), factors); }, invalid, {"rows of weight = -1"});
  expect_error([&] { smooth_weight(matrix(c.q.data(), 1, 3), factors); }, Status::unsupported, {"weight is s8"});
  expect_error([&] { smooth_before({.factors = factors}); }, mismatch, {"weight is absent"});
  expect_error([&] { smooth_before({.factors = factors, .weight = matrix(weight.data(), 2, 3)}); }, mismatch,
               {"smooth_before", "weight is f32 (2, 3)", "(3, 3)"});
  expect_error([&] { smooth_before({.factors = factors, .weight = matrix(weight.data(), 3, -2)}); }, invalid,
               {"columns of weight = -2"});
  expect_error([&] { smooth_before({.factors = factors, .weight = vector(c.q.data(), 3)}); }, Status::unsupported,
               {"weight is s8"});
  expect_error(
      [&] { smooth_before({.factors = factors, .weight = vector(c.w.data(), 3), .bias = vector(c.q.data(), 3)}); },
      Status::unsupported, {"bias is s8"});
  expect_error(
      [&] { smooth_before({.factors = factors, .weight = vector(c.w.data(), 3), .bias = vector(c.s.data(), 2)}); },
      mismatch, {"bias is f32 (2)"});
  expect_error([&] { smooth_before({.factors = factors, .weight = vector(c.x.data(), 3)}); }, invalid, {"overlaps"});
  for (const float bad : {0.0f, -1.0f, kNan, kInfinity}) {
    c.x[1] = bad;
    expect_error([&] { smooth_weight(matrix(weight.data(), 2, 3), factors); }, invalid, {"factors[1] = "});
    expect_error([&] { smooth_before({.factors = factors, .weight = vector(c.w.data(), 3)}); }, invalid,
                 {"factors[1] = "});
  }
  EXPECT_EQ(weight, std::vector<float>(6, 1.0f));
  EXPECT_EQ(c.w, (std::vector<float>{1, 2, 3}));
}

// ---- The search, and what smoothing recovers ----

// A layer behind a LayerNorm: inputs with lognormal channel sizes. `outliers` of the channels are `factor` times as
// large, and their weights are divided by it: the layer computes the same function.
struct Layer {
  std::int64_t m = 192, n = 96, k = 400;
  std::vector<float> x, w, channel_max;

  Layer(int outliers, float factor) : x(normal(m * k, 1)), w(normal(n * k, 2, 0.05f)) {
    const std::vector<float> size = normal(k, 3, 0.4f);
    for (std::int64_t j = 0; j < k; ++j) {
      const float by = j % 100 == 17 && j / 100 < outliers ? factor : 1;
      for (std::int64_t r = 0; r < m; ++r) x[at(r * k + j)] *= std::exp(size[at(j)]) * by;
      for (std::int64_t r = 0; r < n; ++r) w[at(r * k + j)] /= by;
    }
    Calibrator calibrator({.features = k});
    calibrator.observe(matrix<const float>(x.data(), m, k));
    channel_max = calibrator.channel_max();
  }

  ConstTensor rows() const { return matrix<const float>(x.data(), m, k); }
  ConstTensor weight() const { return matrix<const float>(w.data(), n, k); }
  ConstTensor maxima() const { return vector<const float>(channel_max.data(), k); }
  SmoothingSearchDescription description(Activation activation) const {
    SmoothingSearchDescription d;
    d.n = n, d.k = k, d.activation = activation;
    return d;
  }
  SmoothingSearchResult search(Activation activation) const {
    return search_smoothing(description(activation), {.weight = weight(), .input_channel_max = maxima(), .x = rows()});
  }
};

double decibels(double error) { return -10 * std::log10(error); }

TEST(SmoothQuant, RecoversWhatInjectedOutliersCost) {
  const Layer plain(0, 1);
  const Layer spoiled(4, 50);  // 1 % of the channels, 50 times as large
  const auto activation = Activation::static_per_tensor;
  const double without = decibels(plain.search(activation).unsmoothed_error);
  const SmoothingSearchResult result = spoiled.search(activation);
  const double naive = decibels(result.unsmoothed_error);
  const double smoothed = decibels(result.error);
  const double recovered = (smoothed - naive) / (without - naive);
  std::printf("static W8A8: %.2f dB; with outliers %.2f dB; smoothed, alpha = %.2f, %.2f dB: %.0f %% recovered\n",
              without, naive, result.alpha, smoothed, 100 * recovered);
  EXPECT_GT(without - naive, 15);  // the injection hurts: 50 times the range is up to 34 dB
  EXPECT_GE(recovered, 0.9);
}

// A search reports what a user's own steps give: factors, a smoothed and quantized weight, LinearPlan.
TEST(SmoothQuant, TheSearchMeasuresWhatIsServed) {
  const Layer layer(4, 50);
  for (const auto activation :
       {Activation::static_per_tensor, Activation::dynamic_per_token, Activation::dynamic_per_tensor}) {
    for (const WeightFormat& format :
         {WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor, WeightFormat{DType::s4, Granularity::group}}) {
      SmoothingSearchDescription d = layer.description(activation);
      d.weight = format;
      d.first_alpha = d.last_alpha = 0.6;
      d.steps = 1;
      double error = -1;
      const SmoothingSearchResult result = search_smoothing(d, {.weight = layer.weight(),
                                                                .input_channel_max = layer.maxima(),
                                                                .x = layer.rows(),
                                                                .errors = vector(&error, 1)});
      EXPECT_EQ(result.alpha, 0.6);
      EXPECT_EQ(result.error, error);

      const bool s4 = format.type == DType::s4;
      Calibrator weights({.features = layer.k});
      weights.observe(layer.weight());
      const std::vector<float> weight_max = weights.channel_max();
      std::vector<float> s(at(layer.k)), multiplier(at(layer.k)), scale(at(layer.n));
      const float largest = smoothing_factors({.alpha = 0.6,
                                               .input_channel_max = layer.maxima(),
                                               .weight_channel_max = vector<const float>(weight_max.data(), layer.k),
                                               .factors = vector(s.data(), layer.k),
                                               .multiplier = vector(multiplier.data(), layer.k)});
      std::vector<float> w = layer.w;
      smooth_weight(matrix(w.data(), layer.n, layer.k), vector<const float>(s.data(), layer.k));
      std::vector<std::uint8_t> bytes(at(layer.n * layer.k));
      const Tensor q = s4 ? matrix_s4(bytes.data(), layer.n, layer.k)
                          : matrix(reinterpret_cast<std::int8_t*>(bytes.data()), layer.n, layer.k);
      const Tensor scales = s4 ? matrix(scale.data(), layer.n, 1)
                               : vector(scale.data(), format.granularity == Granularity::row ? layer.n : 1);
      quantize_weight({.n = layer.n, .k = layer.k, .weight = format},
                      {.weight = matrix<const float>(w.data(), layer.n, layer.k), .q = q, .scale = scales});
      const auto plan = LinearPlan::select({.m = layer.m,
                                            .n = layer.n,
                                            .k = layer.k,
                                            .activation = activation,
                                            .static_scale = largest / 127,
                                            .weight = format,
                                            .x_multiplier = true});
      std::vector<float> y(at(layer.m * layer.n));
      std::vector<std::byte> scratch(plan.workspace_size());
      plan.run({.x = layer.rows(),
                .x_multiplier = vector<const float>(multiplier.data(), layer.k),
                .weight = q,
                .weight_scale = scales,
                .y = matrix(y.data(), layer.m, layer.n)},
               {scratch.data(), scratch.size()});
      double noise = 0, signal = 0;
      for (std::int64_t r = 0; r < layer.m; ++r) {
        for (std::int64_t c = 0; c < layer.n; ++c) {
          double wanted = 0;
          for (std::int64_t j = 0; j < layer.k; ++j) {
            wanted +=
                static_cast<double>(layer.x[at(r * layer.k + j)]) * static_cast<double>(layer.w[at(c * layer.k + j)]);
          }
          const double e = static_cast<double>(y[at(r * layer.n + c)]) - wanted;
          noise += e * e, signal += wanted * wanted;
        }
      }
      // The search has Y in f32: a relative error of about sqrt(k) 2^-24, beside quantization's of 1e-3 and more.
      EXPECT_NEAR(result.error, noise / signal, 1e-3 * noise / signal) << name(activation) << " " << name(format);
    }
  }
}

TEST(SmoothQuant, SecondMomentsTellNearlyWhatTheRowsTell) {
  const Layer layer(4, 50);
  Calibrator calibrator({.features = layer.k, .second_moments = true});
  calibrator.observe(layer.rows());
  const std::vector<double> h = moments_of(calibrator);
  for (const WeightFormat& format :
       {WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor, WeightFormat{DType::s4, Granularity::group}}) {
    SmoothingSearchDescription d = layer.description(Activation::static_per_tensor);
    d.weight = format;
    std::vector<double> of_rows(21), of_moments(21);
    const SmoothingSearchResult rows = search_smoothing(d, {.weight = layer.weight(),
                                                            .input_channel_max = layer.maxima(),
                                                            .x = layer.rows(),
                                                            .errors = vector(of_rows.data(), 21)});
    const SmoothingSearchResult moments = search_smoothing(d, {.weight = layer.weight(),
                                                               .input_channel_max = layer.maxima(),
                                                               .second_moments = matrix(h.data(), layer.k, layer.k),
                                                               .rows = layer.m,
                                                               .errors = vector(of_moments.data(), 21)});
    // Rounding errors are not quite uniform and independent.
    for (std::size_t i = 0; i < 21; ++i) EXPECT_NEAR(of_moments[i] / of_rows[i], 1, 0.25) << name(format) << " " << i;
    EXPECT_NEAR(moments.unsmoothed_error / rows.unsmoothed_error, 1, 0.25);
    EXPECT_EQ(moments.error, *std::min_element(of_moments.begin(), of_moments.end()));
    EXPECT_EQ(rows.error, *std::min_element(of_rows.begin(), of_rows.end()));
    const std::size_t chosen = at(std::lround(moments.alpha * 20));
    EXPECT_LT(of_rows[chosen], 1.1 * rows.error) << "the alpha that the moments chose";
  }
}

// On unseen rows a static layer loses by rounding and clamping; the search adds an estimate of the clamping.
TEST(SmoothQuant, ErrorsHaveWhatUnseenRowsExceedTheMaximaBy) {
  const Layer layer(4, 50);
  const SmoothingSearchDescription d = layer.description(Activation::static_per_tensor);
  std::vector<double> plain(21), with(21), dynamic(21), dynamic_with(21);
  const std::vector<float> excess = {1e-3f, 2e-5f};
  const auto search = [&](SmoothingSearchDescription of, std::vector<double>& errors, bool has_excess) {
    return search_smoothing(of, {.weight = layer.weight(),
                                 .input_channel_max = layer.maxima(),
                                 .x = layer.rows(),
                                 .input_excess = has_excess ? vector(excess.data(), 2) : ConstTensor{},
                                 .errors = vector(errors.data(), 21)});
  };
  const double unsmoothed = search(d, plain, false).unsmoothed_error;
  const SmoothingSearchResult result = search(d, with, true);
  EXPECT_EQ(result.unsmoothed_error, unsmoothed);
  EXPECT_EQ(result.error, *std::min_element(with.begin(), with.end()));

  double signal = 0;
  for (std::int64_t r = 0; r < layer.m; ++r) {
    for (std::int64_t c = 0; c < layer.n; ++c) {
      double y = 0;
      for (std::int64_t j = 0; j < layer.k; ++j) {
        y += static_cast<double>(layer.x[at(r * layer.k + j)]) * static_cast<double>(layer.w[at(c * layer.k + j)]);
      }
      signal += y * y;
    }
  }
  Calibrator weights({.features = layer.k});
  weights.observe(layer.weight());
  const std::vector<float> weight_max = weights.channel_max();
  const double tail = std::sqrt(2e-5 / 2e-3);  // mean of the exponential
  for (int step = 0; step < 21; step += 5) {
    std::vector<float> s(at(layer.k));
    const float largest = smoothing_factors({.alpha = step / 20.0,
                                             .input_channel_max = layer.maxima(),
                                             .weight_channel_max = vector(weight_max.data(), layer.k),
                                             .factors = vector(s.data(), layer.k)});
    double clipped = 0;
    for (std::int64_t j = 0; j < layer.k; ++j) {
      double norm = 0;
      for (std::int64_t c = 0; c < layer.n; ++c) norm += std::pow(static_cast<double>(layer.w[at(c * layer.k + j)]), 2);
      const auto max = static_cast<double>(layer.channel_max[at(j)]);
      const double beyond = std::max(0.0, static_cast<double>(largest) * static_cast<double>(s[at(j)]) / max - 1);
      clipped += norm * max * max * 2e-5 * std::exp(-beyond / tail);
    }
    const double wanted = static_cast<double>(layer.m) * clipped / signal;
    EXPECT_NEAR(with[at(step)] - plain[at(step)], wanted, 1e-5 * wanted) << step;
  }

  // Only the rows are known, not the excess: the value for independent rows is used.
  SmoothingSearchDescription of_rows = d;
  of_rows.calibration_rows = 192;
  std::vector<double> modelled(21);
  search(of_rows, modelled, false);
  EXPECT_GT(modelled[20], plain[20]);
  // A scale taken from the row itself clamps nothing.
  search(layer.description(Activation::dynamic_per_token), dynamic, false);
  search(layer.description(Activation::dynamic_per_token), dynamic_with, true);
  EXPECT_EQ(dynamic, dynamic_with);
}

// Gaussian channels of about the same size, few rows: not smoothing is better. Outliers: smoothing always is.
TEST(SmoothQuant, TheSearchSaysWhetherSmoothingIsWorthIt) {
  for (const float outliers : {1.0f, 50.0f}) {
    const Layer layer(4, outliers);
    SmoothingSearchDescription d = layer.description(Activation::static_per_tensor);
    SmoothingSearchArgs args = {.weight = layer.weight(), .input_channel_max = layer.maxima(), .x = layer.rows()};
    EXPECT_TRUE(search_smoothing(d, args).smooth);  // unseen rows are not estimated
    d.calibration_rows = 8;
    const SmoothingSearchResult result = search_smoothing(d, args);
    EXPECT_EQ(result.smooth, outliers > 1);
    EXPECT_EQ(result.smooth, result.error < 0.95 * result.unsmoothed_error);
  }
}

TEST(SmoothQuant, TheSearchGivesTheSameBitsWithAnyNumberOfThreads) {
  const Layer layer(4, 50);
  Calibrator calibrator({.features = layer.k, .second_moments = true});
  calibrator.observe(layer.rows());
  const std::vector<double> h = moments_of(calibrator);
  SmoothingSearchDescription d = layer.description(Activation::static_per_tensor);
  d.steps = 3;
  std::vector<std::vector<double>> seen;
  for (const int threads : {1, 2, 7}) {
    d.threads = threads;
    std::vector<double> errors(6);
    search_smoothing(d, {.weight = layer.weight(),
                         .input_channel_max = layer.maxima(),
                         .x = layer.rows(),
                         .errors = vector(errors.data(), 3)});
    search_smoothing(d, {.weight = layer.weight(),
                         .input_channel_max = layer.maxima(),
                         .second_moments = matrix(h.data(), layer.k, layer.k),
                         .rows = layer.m,
                         .errors = vector(errors.data() + 3, 3)});
    seen.push_back(errors);
  }
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(seen[0], seen[2]);
}

// An alpha for which W * s overflows the weight's type is not chosen, and its error is infinite.
TEST(SmoothQuant, AnAlphaThatTheWeightsTypeCannotHoldIsNotChosen) {
  const std::vector<float> x = normal(16 * 8, 1, 1e6f);
  const std::vector<Half> w(4 * 8, Half(1.0f));
  Calibrator calibrator({.features = 8});
  calibrator.observe(matrix<const float>(x.data(), 16, 8));
  const std::vector<float> largest = calibrator.channel_max();
  std::vector<double> errors(3);
  SmoothingSearchDescription d;
  d.n = 4, d.k = 8, d.w = DType::f16, d.steps = 3;
  const SmoothingSearchResult result = search_smoothing(d, {.weight = matrix(w.data(), 4, 8),
                                                            .input_channel_max = vector(largest.data(), 8),
                                                            .x = matrix<const float>(x.data(), 16, 8),
                                                            .errors = vector(errors.data(), 3)});
  EXPECT_EQ(errors[2], std::numeric_limits<double>::infinity());  // alpha 1: s is 1e6 and more
  EXPECT_LT(result.alpha, 1);
  EXPECT_LT(result.error, 1e-2);
}

TEST(SmoothQuant, TheSearchRejects) {
  const auto invalid = Status::invalid_argument;
  const auto unsupported = Status::unsupported;
  const auto mismatch = Status::shape_mismatch;
  const std::vector<float> values(64 * 64, 0.5f);
  std::vector<double> h(64 * 64);
  for (int j = 0; j < 64; ++j) h[at(65 * j)] = 1;
  struct Case {
    SmoothingSearchDescription d;
    SmoothingSearchArgs args;
    std::vector<double> errors = std::vector<double>(21, -3.0);
  };
  const auto rejected = [&](const std::function<void(Case&)>& spoil, Status status, std::vector<std::string> texts) {
    texts.push_back("search_smoothing: ");
    Case c;
    c.d.n = 4, c.d.k = 64;
    c.args.weight = matrix<const float>(values.data(), 4, 64);
    c.args.input_channel_max = vector<const float>(values.data(), 64);
    c.args.x = matrix<const float>(values.data(), 8, 64);
    c.args.errors = vector(c.errors.data(), 21);
    EXPECT_NO_THROW(search_smoothing(c.d, c.args));
    c.errors.assign(21, -3.0);
    spoil(c);
    expect_error([&] { search_smoothing(c.d, c.args); }, status, texts);
    EXPECT_EQ(c.errors, std::vector<double>(21, -3.0));
  };
  rejected([](Case& c) { c.d.n = -1; }, invalid, {"n = -1"});
  rejected([](Case& c) { c.d.k = -1; }, invalid, {"k = -1"});
  rejected([](Case& c) { c.d.n = c.d.k = std::int64_t{1} << 40; }, invalid, {"overflows"});
  rejected([](Case& c) { c.d.x = DType::s8; }, unsupported, {"x = s8"});
  rejected([](Case& c) { c.d.x = static_cast<DType>(9); }, invalid, {"x = 9"});
  rejected([](Case& c) { c.d.w = DType::s8; }, unsupported, {"w = s8"});
  rejected([](Case& c) { c.d.w = static_cast<DType>(9); }, invalid, {"w = 9"});
  rejected([](Case& c) { c.d.activation = Activation::none; }, unsupported, {"activation = none"});
  rejected([](Case& c) { c.d.activation = static_cast<Activation>(5); }, invalid, {"activation = 5"});
  rejected([](Case& c) { c.d.weight.granularity = static_cast<Granularity>(5); }, invalid, {"granularity = 5"});
  rejected([](Case& c) { c.d.weight = {DType::s4, Granularity::group, 48}; }, unsupported, {"group = 48"});
  rejected([](Case& c) { c.d.weight = {DType::s4, Granularity::group, 128}; }, invalid, {"group = 128"});
  rejected([](Case& c) { c.d.weight = {DType::s4, Granularity::group, 32, true}; }, unsupported, {"weight_zero_point"});
  for (const double alpha : {-0.1, 1.1, std::nan("")}) {
    rejected([=](Case& c) { c.d.first_alpha = alpha; }, invalid, {"first_alpha = "});
    rejected([=](Case& c) { c.d.last_alpha = alpha; }, invalid, {"last_alpha = "});
  }
  for (const int steps : {0, 1002}) rejected([=](Case& c) { c.d.steps = steps; }, invalid, {"steps = "});
  rejected([](Case& c) { c.d.calibration_rows = -1; }, invalid, {"calibration_rows = -1"});
  std::vector<float> excess(2);
  const auto with_excess = [&](float probability, float square) {
    excess = {probability, square};
    return [&](Case& c) { c.args.input_excess = vector<const float>(excess.data(), 2); };
  };
  rejected(with_excess(-0.1f, 1), invalid, {"input_excess = (-0.1", "expected a probability"});
  rejected(with_excess(1.5f, 1), invalid, {"input_excess = (1.5"});
  rejected(with_excess(0, 1), invalid, {"input_excess = (0, 1)"});
  rejected(with_excess(0.5f, -1), invalid, {"input_excess = (0.5, -1)"});
  rejected(with_excess(0.5f, kInfinity), invalid, {"input_excess = (0.5, inf)"});
  rejected(with_excess(kNan, 1), invalid, {"input_excess = (nan"});
  rejected([&](Case& c) { c.args.input_excess = vector<const float>(excess.data(), 1); }, mismatch,
           {"input_excess is"});
  rejected([](Case& c) { c.d.threads = 2000; }, invalid, {"threads = 2000"});
  rejected([](Case& c) { c.args.weight.shape[0] = 3; }, mismatch, {"weight is f32 (3, 64)"});
  rejected([](Case& c) { c.args.input_channel_max = {}; }, mismatch, {"input_channel_max is absent"});
  rejected([](Case& c) { c.args.x = {}; }, invalid, {"x is absent", "second_moments is absent", "one of them"});
  rejected([&](Case& c) { c.args.second_moments = matrix<const double>(h.data(), 64, 64); }, invalid, {"one of them"});
  rejected([](Case& c) { c.args.x.shape[0] = -1; }, invalid, {"rows of x = -1"});
  rejected([](Case& c) { c.args.x.shape[1] = 63; }, mismatch, {"x is f32 (8, 63)"});
  rejected([](Case& c) { c.args.errors.shape[0] = 20; }, mismatch, {"errors is f64 (20)"});
  const auto moments = [&](Case& c) {
    c.args.x = {};
    c.args.second_moments = matrix<const double>(h.data(), 64, 64);
    c.args.rows = 8;
  };
  rejected([&](Case& c) { moments(c), c.args.rows = 0; }, invalid, {"rows = 0"});
  rejected([&](Case& c) { moments(c), c.d.activation = Activation::dynamic_per_token; }, unsupported,
           {"dynamic_per_token", "expected x"});
  const std::vector<float> huge(64 * 64, 1e20f);
  rejected(
      [&](Case& c) {
        c.args.weight = matrix<const float>(huge.data(), 4, 64);
        c.args.x = matrix<const float>(huge.data(), 8, 64);
        c.args.input_channel_max = vector<const float>(huge.data(), 64);
      },
      invalid, {"too large for f32 or for sums in f32"});
  h[3] = 7;
  rejected(moments, invalid, {"second_moments[0, 3] = 7"});
  std::vector<float> bad = values;
  bad[70] = kNan;
  rejected([&](Case& c) { c.args.weight = matrix<const float>(bad.data(), 4, 64); }, invalid, {"weight[1, 6] = nan"});
  rejected([&](Case& c) { c.args.input_channel_max = vector<const float>(bad.data() + 64, 64); }, invalid,
           {"input_channel_max[6] = nan"});
  rejected([&](Case& c) { c.args.x = matrix<const float>(bad.data(), 8, 64); }, invalid, {"x[1, 6] = nan"});
}

// ---- The static W8A8 plan ----

// X passed in s8, one scale for all of it given in the description instead of a tensor, the bias fused. Such a plan
// needs no scratch for quantizing. CPU kernels ask for space to rearrange X, as much as with any other scale; the
// reference and the GPU kernels rearrange nothing.
TEST(StaticW8A8, TakesQuantizedRowsAndOneScaleWithoutScratchOfItsOwn) {
  constexpr std::int64_t kM = 5, kN = 7, kK = 33;
  std::mt19937 generator(1);
  std::uniform_int_distribution<int> level(-128, 127);
  std::vector<std::int8_t> x(kM * kK), w(kN * kK);
  for (auto& q : x) q = static_cast<std::int8_t>(level(generator));
  for (auto& q : w) q = static_cast<std::int8_t>(level(generator));
  const std::vector<float> scale = normal(kN, 2), bias = normal(kN, 3);
  const double static_scale = 0.0371;
  LinearDescription d{.m = kM,
                      .n = kN,
                      .k = kK,
                      .x = DType::s8,
                      .activation = Activation::static_per_tensor,
                      .static_scale = static_scale,
                      .bias = true};
  const auto plan = LinearPlan::select(d);
  d.activation = Activation::dynamic_per_token;
  EXPECT_EQ(plan.workspace_size(), LinearPlan::select(d).workspace_size());
  d.activation = Activation::static_per_tensor;
  d.kernel = "reference";
  const auto reference = LinearPlan::select(d);
  EXPECT_EQ(reference.workspace_size(), 0u);
  EXPECT_TRUE(plan.precision_guarantee().bit_stable);
  std::vector<float> y(kM * kN), same(kM * kN);
  std::vector<std::byte> scratch(plan.workspace_size());
  LinearArgs args{.x = matrix<const std::int8_t>(x.data(), kM, kK),
                  .weight = matrix<const std::int8_t>(w.data(), kN, kK),
                  .weight_scale = vector<const float>(scale.data(), kN),
                  .bias = vector<const float>(bias.data(), kN),
                  .y = matrix(y.data(), kM, kN)};
  plan.run(args, {scratch.data(), scratch.size()});
  args.y = matrix(same.data(), kM, kN);
  reference.run(args);
  EXPECT_EQ(y, same);
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t n = 0; n < kN; ++n) {
      std::int32_t acc = 0;
      for (std::int64_t k = 0; k < kK; ++k) acc += x[at(m * kK + k)] * w[at(n * kK + k)];
      const float both = static_cast<float>(static_scale) * scale[at(n)];
      EXPECT_EQ(y[at(m * kN + n)], std::fma(static_cast<float>(acc), both, bias[at(n)]));
    }
  }
  const std::vector<float> row_scale(kM, 0.5f);
  args.x_scale = vector<const float>(row_scale.data(), kM);
  const Verdict verdict = plan.can_implement(args);
  EXPECT_EQ(verdict.status, Status::shape_mismatch);
  EXPECT_NE(verdict.reason.find("x_scale"), std::string::npos) << verdict.reason;
}

// The same plan fed with float rows: multiplied, rounded to the static scale and clamped, then as above.
TEST(StaticW8A8, QuantizesWithTheStaticScaleInside) {
  constexpr std::int64_t kM = 6, kN = 5, kK = 40;
  std::vector<float> x = normal(kM * kK, 4);
  x[kK + 3] = 1e30f;      // clamped
  x[2 * kK] = kInfinity;  // makes its own row NaN
  const std::vector<float> multiplier = normal(kK, 5), scale = normal(kN, 6), bias = normal(kN, 7);
  std::vector<std::int8_t> w(kN * kK), xq(kM * kK);
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<std::int8_t>(static_cast<int>(i * 37 % 255) - 127);
  const float s = 0.02f;
  for (std::size_t i = 0; i < xq.size(); ++i) {
    const float value = x[i] * multiplier[i % kK] / s;
    xq[i] = static_cast<std::int8_t>(std::nearbyint(std::clamp(value, -127.0f, 127.0f)));
  }
  LinearDescription d{.m = kM,
                      .n = kN,
                      .k = kK,
                      .activation = Activation::static_per_tensor,
                      .static_scale = s,
                      .bias = true,
                      .x_multiplier = true};
  const auto inside = LinearPlan::select(d);
  d.x = DType::s8;
  d.x_multiplier = false;
  const auto handed = LinearPlan::select(d);
  std::vector<float> y(kM * kN), wanted(kM * kN);
  std::vector<std::byte> scratch(std::max(inside.workspace_size(), handed.workspace_size()));
  LinearArgs args{.x = matrix<const float>(x.data(), kM, kK),
                  .x_multiplier = vector<const float>(multiplier.data(), kK),
                  .weight = matrix<const std::int8_t>(w.data(), kN, kK),
                  .weight_scale = vector<const float>(scale.data(), kN),
                  .bias = vector<const float>(bias.data(), kN),
                  .y = matrix(y.data(), kM, kN)};
  inside.run(args, {scratch.data(), scratch.size()});
  args.x = matrix<const std::int8_t>(xq.data(), kM, kK);
  args.x_multiplier = {};
  args.y = matrix(wanted.data(), kM, kN);
  handed.run(args, {scratch.data(), scratch.size()});
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (i / kN == 2) {
      EXPECT_TRUE(std::isnan(y[i]));
    } else {
      EXPECT_EQ(y[i], wanted[i]) << i;
    }
  }
}

}  // namespace
}  // namespace octile
