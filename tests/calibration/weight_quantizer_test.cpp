// quantize_weight against a simple version, bit for bit: one loop per step of octile/weight_quantizer.h, no blocks, no
// threads, no vectors.
#include "octile/weight_quantizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/access.h"
#include "calibration/outer_sum.h"
#include "cpu/support/isa.h"
#include "octile/octile.hpp"

namespace octile {
namespace {

using Description = WeightQuantizerDescription;

bool s4(const Description& d) { return d.weight.type == DType::s4; }
bool grouped(const Description& d) { return d.weight.granularity == Granularity::group; }
bool per_tensor(const Description& d) { return d.weight.granularity == Granularity::tensor; }
std::int64_t segment_of(const Description& d) { return grouped(d) && d.weight.group > 0 ? d.weight.group : d.k; }
std::int64_t segments_of(const Description& d) { return grouped(d) ? d.k / segment_of(d) : 1; }
std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// ---- The twin ----

struct Scale {
  float s;
  int z;
};

struct Levels {
  int low, high;
};

Levels levels_of(const Description& d) {
  if (!s4(d)) return {-127, 127};
  return {-8, 7};
}

float as_kept(DType dtype, float s) {
  return dtype == DType::f16 ? static_cast<float>(Half(s)) : dtype == DType::bf16 ? static_cast<float>(BFloat16(s)) : s;
}

bool uses_all_levels(const Description& d) {
  return s4(d) && d.method == WeightMethod::nearest && !d.weight.zero_point;
}

int steps_of(const Description& d) {
  if (uses_all_levels(d)) return 4;
  return d.method == WeightMethod::nearest ? 1 : d.clip_steps;
}

float candidate(const Description& d, int step) {
  return step == 0 ? 1.0f : static_cast<float>(1 - (1 - d.min_clip) * step / (d.clip_steps - 1));
}

Scale plain_scale(const Description& d, const std::vector<float>& w, int step) {
  const Levels levels = levels_of(d);
  float low = 0;
  float high = 0;
  for (const float x : w) low = std::min(low, x), high = std::max(high, x);
  if (!uses_all_levels(d)) low *= candidate(d, step), high *= candidate(d, step);
  float span = d.weight.zero_point ? (high - low) / static_cast<float>(levels.high - levels.low)
                                   : std::max(-low, high) / static_cast<float>(levels.high);
  if (uses_all_levels(d)) {
    const float largest = std::max(-low, high);
    span = std::vector{largest / 7, std::max(-low / 8, high / 7), largest / 7.5f, largest / 8}[at(step)];
  }
  float s = as_kept(d.scale, std::max(span, 1e-8f));
  if (s == 0) s = 0x1p-24f;
  if (!d.weight.zero_point) return {s, 0};
  const float z = static_cast<float>(levels.low) - std::nearbyint(low / s);
  return {s, static_cast<int>(std::clamp(z, static_cast<float>(levels.low), static_cast<float>(levels.high)))};
}

// One row's rounding error as the search's header defines it: by w * (1 / s), in 16 lanes of f32.
double plain_error(const Description& d, Scale scale, const std::vector<float>& w, const std::vector<float>& h) {
  const Levels levels = levels_of(d);
  float sums[16] = {};
  for (std::size_t i = 0; i < w.size(); ++i) {
    const float ratio = w[i] * (1 / scale.s);
    const float level = std::nearbyint(
        std::clamp(ratio, static_cast<float>(levels.low - scale.z), static_cast<float>(levels.high - scale.z)));
    const float error = level * scale.s - w[i];
    sums[i % 16] += error * error * h[i];
  }
  double lanes[16];
  for (int l = 0; l < 16; ++l) lanes[l] = static_cast<double>(sums[l]);
  for (const int half : {8, 4, 2, 1}) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

Scale plain_search(const Description& d, const std::vector<float>& w, const std::vector<float>& h) {
  Scale best = plain_scale(d, w, 0);
  double least = plain_error(d, best, w, h);
  for (int step = 1; step < steps_of(d); ++step) {
    const Scale scale = plain_scale(d, w, step);
    const double error = plain_error(d, scale, w, h);
    if (error < least) least = error, best = scale;
  }
  return best;
}

int plain_level(const Description& d, Scale scale, float t) {
  const Levels levels = levels_of(d);
  return static_cast<int>(std::nearbyint(std::clamp(t / scale.s, static_cast<float>(levels.low - scale.z),
                                                    static_cast<float>(levels.high - scale.z)))) +
         scale.z;
}

struct Couplings {
  std::vector<std::int64_t> order;
  std::vector<double> u, d;  // (k, k) and (k), by the order of rounding
};

// H = U D U^T by elimination from the last column to the first: the Cholesky loop of src/calibration/cholesky.h with
// both orders reversed.
Couplings plain_couplings(const Description& d, const std::vector<double>& h) {
  const std::int64_t k = d.k;
  Couplings c;
  c.order.resize(at(k));
  std::iota(c.order.begin(), c.order.end(), 0);
  const auto diagonal = [&](std::int64_t j) { return h[at(j * k + j)]; };
  if (d.order == ColumnOrder::by_moment) {
    std::stable_sort(c.order.begin(), c.order.end(),
                     [&](std::int64_t a, std::int64_t b) { return diagonal(a) > diagonal(b); });
  }
  double sum = 0;
  int alive = 0;
  for (std::int64_t j = 0; j < k; ++j) sum += diagonal(j), alive += diagonal(j) > 0;
  const double mean = alive ? sum / alive : 1;
  std::vector<double> r(at(k * k));  // R of H = R R^T, upper triangular
  for (std::int64_t j = k - 1; j >= 0; --j) {
    for (std::int64_t i = j; i >= 0; --i) {
      const std::int64_t ci = c.order[at(i)];
      const std::int64_t cj = c.order[at(j)];
      const bool dead = diagonal(ci) == 0 || diagonal(cj) == 0;
      double value = i == j ? (dead ? mean : diagonal(ci) + d.damping * mean)
                            : (dead ? 0 : h[at(std::min(ci, cj) * k + std::max(ci, cj))]);
      for (std::int64_t m = k - 1; m > j; --m) value -= r[at(j * k + m)] * r[at(i * k + m)];
      r[at(i * k + j)] = i == j ? std::sqrt(value) : value / r[at(j * k + j)];
    }
  }
  c.u.resize(at(k * k));
  for (std::int64_t j = 0; j < k; ++j) {
    c.d.push_back(r[at(j * k + j)]);
    for (std::int64_t i = 0; i < j; ++i) c.u[at(i * k + j)] = r[at(i * k + j)] / r[at(j * k + j)];
  }
  return c;
}

struct Result {
  std::vector<int> q;        // (n, k)
  std::vector<float> scale;  // (n, segments)
  std::vector<int> zero;
};

struct Problem {
  Description d;
  std::vector<float> w;           // (n, k)
  std::vector<double> h;          // (k, k), or nothing
  std::vector<float> importance;  // (k), or nothing
};

std::vector<float> row_of(const Problem& p, std::int64_t n, std::int64_t first, std::int64_t count) {
  return {p.w.begin() + n * p.d.k + first, p.w.begin() + n * p.d.k + first + count};
}

Result plain(const Problem& p) {
  const Description& d = p.d;
  const std::int64_t k = d.k;
  const bool feedback = d.method == WeightMethod::error_feedback;
  Couplings c;
  std::vector<double> h(at(k), 1.0);
  if (feedback) {
    c = plain_couplings(d, p.h);
    for (std::int64_t j = 0; j < k; ++j) {
      const double relative = c.d[at(j)] / *std::max_element(c.d.begin(), c.d.end());
      h[at(c.order[at(j)])] = relative * relative;
    }
  } else {
    c.order.resize(at(k));
    std::iota(c.order.begin(), c.order.end(), 0);
    for (std::int64_t j = 0; j < k; ++j) {
      if (!p.h.empty()) h[at(j)] = p.h[at(j * k + j)];
      if (!p.importance.empty()) h[at(j)] = static_cast<double>(p.importance[at(j)]);
    }
    const double largest = *std::max_element(h.begin(), h.end());
    for (double& x : h) x = largest > 0 ? x / largest : 0;
  }
  const std::vector<float> weights(h.begin(), h.end());
  const auto slice = [&](std::int64_t first, std::int64_t count) {
    return std::vector<float>(weights.begin() + first, weights.begin() + first + count);
  };

  Scale whole{};
  if (per_tensor(d)) {
    double least = 0;
    for (int step = 0; step < steps_of(d); ++step) {
      const Scale scale = plain_scale(d, p.w, step);
      double error = 0;
      for (std::int64_t n = 0; n < d.n; ++n) error += plain_error(d, scale, row_of(p, n, 0, k), weights);
      if (step == 0 || error < least) least = error, whole = scale;
    }
  }

  const std::int64_t segment = segment_of(d);
  const std::int64_t segments = segments_of(d);
  const bool on_the_way = feedback && segments > 1 && d.order == ColumnOrder::as_they_lie;
  Result result{std::vector<int>(at(d.n * k)), std::vector<float>(at(d.n * segments)),
                std::vector<int>(at(d.n * segments))};
  for (std::int64_t n = 0; n < d.n; ++n) {
    std::vector<Scale> scales(at(segments));
    for (std::int64_t g = 0; g < segments; ++g) {
      scales[at(g)] =
          per_tensor(d) ? whole : plain_search(d, row_of(p, n, g * segment, segment), slice(g * segment, segment));
    }
    std::vector<float> errors(at(k));
    const auto t_of = [&](std::int64_t j, std::int64_t before) {
      float t = p.w[at(n * k + c.order[at(j)])];
      for (std::int64_t i = 0; feedback && i < before; ++i) t += errors[at(i)] * static_cast<float>(c.u[at(i * k + j)]);
      return t;
    };
    for (std::int64_t j = 0; j < k; ++j) {
      if (on_the_way && j % segment == 0) {
        std::vector<float> t;
        for (std::int64_t i = j; i < j + segment; ++i) t.push_back(t_of(i, j));
        scales[at(j / segment)] = plain_search(d, t, slice(j, segment));
      }
      const std::int64_t column = c.order[at(j)];
      const Scale scale = scales[at(column / segment)];
      const int level = plain_level(d, scale, t_of(j, j));
      errors[at(j)] = p.w[at(n * k + column)] - static_cast<float>(level - scale.z) * scale.s;
      result.q[at(n * k + column)] = level;
    }
    for (std::int64_t g = 0; g < segments; ++g) {
      result.scale[at(n * segments + g)] = scales[at(g)].s;
      result.zero[at(n * segments + g)] = scales[at(g)].z;
    }
  }
  return result;
}

// ---- The library ----

// Outputs with a guard around them: rows of q and scale are padded, and the padding must stay.
struct Outputs {
  explicit Outputs(const Description& d) : d(d) {
    q.assign(at(d.n * q_pitch()), 0x5a);
    scale.assign(at(d.n * scale_pitch() + 1), -5.0f);
    zero.assign(at(d.n * scale_pitch() + 1), 99);
  }
  std::int64_t q_pitch() const { return s4(d) ? (d.k + 1) / 2 + 1 : d.k + 3; }  // bytes
  std::int64_t scale_pitch() const { return segments_of(d) + 1; }

  Tensor q_tensor() {
    if (s4(d)) return matrix_s4(q.data(), d.n, d.k, 2 * q_pitch());
    return matrix(reinterpret_cast<std::int8_t*>(q.data()), d.n, d.k, q_pitch());
  }
  Tensor scale_tensor() {
    if (grouped(d)) return matrix(scale.data(), d.n, segments_of(d), scale_pitch());
    return vector(scale.data(), per_tensor(d) ? 1 : d.n, scale_pitch());
  }
  Tensor zero_tensor() {
    return d.weight.zero_point ? matrix(zero.data(), d.n, segments_of(d), scale_pitch()) : Tensor{};
  }

  Description d;
  std::vector<std::uint8_t> q;
  std::vector<float> scale;
  std::vector<std::int32_t> zero;
};

WeightQuantizerArgs args_of(const Problem& p, Outputs& out) {
  return {.weight = matrix(p.w.data(), p.d.n, p.d.k),
          .second_moments = p.h.empty() ? ConstTensor{} : matrix(p.h.data(), p.d.k, p.d.k),
          .importance = p.importance.empty() ? ConstTensor{} : vector(p.importance.data(), p.d.k),
          .q = out.q_tensor(),
          .scale = out.scale_tensor(),
          .zero_point = out.zero_tensor()};
}

std::string text(const Description& d) {
  return std::string(name(d.weight)) + " " + std::string(name(d.method)) + " " + std::string(name(d.order)) +
         " n = " + std::to_string(d.n) + " k = " + std::to_string(d.k) + " group = " + std::to_string(d.weight.group) +
         (d.weight.zero_point ? " with z" : "") + " scale " + std::string(name(d.scale)) +
         " steps = " + std::to_string(d.clip_steps) + " threads = " + std::to_string(d.threads);
}

void expect_equal(Outputs& out, const Result& wanted) {
  const Description& d = out.d;
  const ConstTensor q = out.q_tensor();
  int wrong = 0;
  for (std::int64_t n = 0; n < d.n; ++n) {
    for (std::int64_t c = 0; c < d.k; ++c) wrong += load_integer(q, n, c) != wanted.q[at(n * d.k + c)];
    for (std::int64_t g = 0; g < segments_of(d); ++g) {
      const std::size_t i = at(n * segments_of(d) + g);
      const std::int64_t place = per_tensor(d) ? 0 : n * out.scale_pitch() + g;
      EXPECT_EQ(out.scale[at(place)], wanted.scale[i]) << text(d) << " row " << n << " segment " << g;
      if (d.weight.zero_point) {
        EXPECT_EQ(out.zero[at(place)], wanted.zero[i]) << text(d);
      }
    }
    for (std::int64_t b = s4(d) ? (d.k + 1) / 2 : d.k; b < out.q_pitch(); ++b) {
      EXPECT_EQ(out.q[at(n * out.q_pitch() + b)], 0x5a) << text(d) << ": the padding of q was written";
    }
  }
  EXPECT_EQ(wrong, 0) << text(d);
  EXPECT_EQ(out.scale.back(), -5.0f);
}

// Inputs correlated with their neighbours, and channels of very different sizes, two of them dead.
Problem problem(const Description& d, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Problem p{d, {}, {}, {}};
  p.w.resize(at(d.n * d.k));
  for (float& w : p.w) w = normal(generator) * std::exp(normal(generator)) * 0.05f;
  const std::int64_t rows = d.k / 2 + 3;  // fewer than columns: H is singular before damping
  std::vector<float> x(at(rows * d.k));
  for (std::int64_t r = 0; r < rows; ++r) {
    float before = 0;
    for (std::int64_t j = 0; j < d.k; ++j) {
      before = 0.7f * before + normal(generator);
      x[at(r * d.k + j)] = j % 29 == 3 ? 0 : before * (1 + static_cast<float>(j % 7));
    }
  }
  if (d.method == WeightMethod::nearest) return p;
  Calibrator calibrator({.features = d.k, .second_moments = true});
  calibrator.observe(matrix<const float>(x.data(), rows, d.k));
  p.h.resize(at(d.k * d.k));
  calibrator.second_moments(matrix(p.h.data(), d.k, d.k));
  return p;
}

std::vector<Description> descriptions() {
  std::vector<Description> all;
  struct Format {
    WeightFormat weight;
    std::int64_t n, k;
  };
  const auto group = [](DType type, std::int64_t size, bool zero_point = false) {
    return WeightFormat{type, Granularity::group, size, zero_point};
  };
  const std::vector<Format> formats = {{WeightFormat::s8_per_channel, 70, 45}, {WeightFormat::s8_per_channel, 3, 300},
                                       {WeightFormat::s8_per_tensor, 66, 37},  {group(DType::s4, 32), 5, 96},
                                       {group(DType::s4, 64, true), 65, 128},  {group(DType::s4, 128), 2, 384},
                                       {group(DType::s4, 128, true), 3, 256},  {group(DType::s4, 0), 9, 131},
                                       {group(DType::s4, 32, true), 4, 32},    {group(DType::s4, 0, true), 4, 51},
                                       {group(DType::s8, 32), 5, 96},          {group(DType::s8, 64), 65, 128},
                                       {group(DType::s8, 128), 2, 384},        {group(DType::s8, 0), 9, 131}};
  for (const Format& f : formats) {
    for (const auto method : {WeightMethod::nearest, WeightMethod::clip_search, WeightMethod::error_feedback}) {
      for (const auto order : {ColumnOrder::as_they_lie, ColumnOrder::by_moment}) {
        if (method != WeightMethod::error_feedback && order != ColumnOrder::as_they_lie) continue;
        for (const int steps : {1, 9}) {
          if (method == WeightMethod::nearest && steps > 1) continue;
          Description d;
          d.n = f.n, d.k = f.k, d.weight = f.weight;
          d.method = method, d.order = order, d.clip_steps = steps;
          d.scale = all.size() % 3 == 1 ? DType::f16 : all.size() % 3 == 2 ? DType::bf16 : DType::f32;
          all.push_back(d);
        }
      }
    }
  }
  return all;
}

TEST(WeightQuantizer, EqualsThePlainTwinOnEveryInstructionSetAndThreadCount) {
  const std::vector<Description> all = descriptions();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Problem p = problem(all[i], static_cast<unsigned>(i));
    const Result wanted = plain(p);
    const cpu::Isa ceiling = cpu::isa_ceiling;
    int threads = 0;
    for (const cpu::Isa isa : {cpu::Isa::baseline, cpu::Isa::avx2, cpu::Isa::amx}) {
      cpu::isa_ceiling = isa;
      Outputs out(p.d);
      Description d = p.d;
      d.threads = std::vector{1, 2, 7}[at(threads++)];
      quantize_weight(d, args_of(p, out));
      expect_equal(out, wanted);
    }
    cpu::isa_ceiling = ceiling;
  }
}

TEST(WeightQuantizer, TakesEveryFloatType) {
  Description d{.n = 7, .k = 64, .weight = {DType::s4, Granularity::group, 32}, .method = WeightMethod::error_feedback};
  Problem p = problem(d, 5);
  std::vector<Half> half;
  std::vector<BFloat16> bfloat;
  std::vector<double> wide;
  for (float& w : p.w) {
    w = static_cast<float>(BFloat16(static_cast<float>(Half(w))));  // exact in every type
    half.emplace_back(w), bfloat.emplace_back(w), wide.push_back(static_cast<double>(w) * (1 + 0x1p-40));
  }
  const Result wanted = plain(p);
  for (const ConstTensor& w : {ConstTensor(matrix<const Half>(half.data(), d.n, d.k)),
                               ConstTensor(matrix<const BFloat16>(bfloat.data(), d.n, d.k)),
                               ConstTensor(matrix<const double>(wide.data(), d.n, d.k))}) {
    Outputs out(d);
    WeightQuantizerArgs args = args_of(p, out);
    args.weight = w;
    d.w = w.dtype;
    quantize_weight(d, args);
    expect_equal(out, wanted);
  }
}

TEST(WeightQuantizer, NearestHasTheBitsOfQuantizePlan) {
  // Without symmetric s4, which here includes -8; the plan never produces that.
  for (const WeightFormat& weight :
       {WeightFormat::s8_per_channel, WeightFormat{DType::s8, Granularity::group, 32},
        WeightFormat{DType::s8, Granularity::group, 128}, WeightFormat{DType::s4, Granularity::group, 0, true},
        WeightFormat{DType::s4, Granularity::group, 32, true}, WeightFormat{DType::s4, Granularity::group, 64, true}}) {
    const bool affine = weight.zero_point;
    Description d{.n = 6, .k = 128, .weight = weight};
    const Problem p = problem(d, 11);
    Outputs out(d);
    quantize_weight(d, args_of(p, out));
    const std::int64_t segments = segments_of(d);
    std::vector<std::uint8_t> q(at(d.n * d.k));
    std::vector<float> scale(at(d.n * segments));
    std::vector<std::int32_t> zero(scale.size());
    const auto plan = QuantizePlan::select({.rows = d.n,
                                            .cols = d.k,
                                            .q = s4(d) ? DType::s4 : DType::s8,
                                            .granularity = weight.granularity,
                                            .group = grouped(d) ? segment_of(d) : 0,
                                            .mapping = affine ? Mapping::affine : Mapping::symmetric});
    std::vector<std::byte> scratch(plan.workspace_size());
    const Tensor wanted =
        s4(d) ? matrix_s4(q.data(), d.n, d.k) : matrix(reinterpret_cast<std::int8_t*>(q.data()), d.n, d.k);
    plan.run({.x = matrix(p.w.data(), d.n, d.k),
              .q = wanted,
              .scale = grouped(d) ? matrix(scale.data(), d.n, segments) : vector(scale.data(), d.n),
              .zero_point = affine ? matrix(zero.data(), d.n, segments) : Tensor{}},
             {scratch.data(), scratch.size()});
    for (std::int64_t n = 0; n < d.n; ++n) {
      for (std::int64_t c = 0; c < d.k; ++c) {
        ASSERT_EQ(load_integer(out.q_tensor(), n, c), load_integer(wanted, n, c)) << text(d);
      }
      for (std::int64_t g = 0; g < segments; ++g) {
        ASSERT_EQ(out.scale[at(n * out.scale_pitch() + g)], scale[at(n * segments + g)]);
        if (affine) {
          ASSERT_EQ(out.zero[at(n * out.scale_pitch() + g)], zero[at(n * segments + g)]);
        }
      }
    }
  }
}

TEST(WeightQuantizer, ImportanceIsWhatADiagonalOfMomentsWouldBe) {
  Description d{.n = 8, .k = 96, .weight = {DType::s4, Granularity::group, 32}, .method = WeightMethod::clip_search};
  Problem p = problem(d, 21);
  Problem q = p;
  q.h.clear();
  for (std::int64_t j = 0; j < d.k; ++j) q.importance.push_back(static_cast<float>(p.h[at(j * d.k + j)]));
  for (std::int64_t j = 0; j < d.k; ++j) p.h[at(j * d.k + j)] = static_cast<double>(q.importance[at(j)]);
  Outputs a(d);
  Outputs b(d);
  Outputs plain_one(d);
  quantize_weight(d, args_of(p, a));
  quantize_weight(d, args_of(q, b));
  q.importance.clear();
  quantize_weight(d, args_of(q, plain_one));
  EXPECT_EQ(a.q, b.q);
  EXPECT_EQ(a.scale, b.scale);
  EXPECT_NE(a.scale, plain_one.scale);
  expect_equal(plain_one, plain(q));
}

TEST(WeightQuantizer, NothingAtAll) {
  for (const std::int64_t n : {0, 3}) {
    for (const auto method : {WeightMethod::nearest, WeightMethod::clip_search, WeightMethod::error_feedback}) {
      const Description d{.n = n, .k = n == 0 ? 32 : 0, .method = method};
      std::vector<double> h(at(d.k * d.k), 1.0);
      std::vector<float> w(at(d.n * d.k + 1));
      std::vector<std::int8_t> q(w.size());
      std::vector<float> scale(4, -1.0f);
      WeightQuantizerArgs args{.weight = matrix<const float>(w.data(), d.n, d.k),
                               .q = matrix(q.data(), d.n, d.k),
                               .scale = vector(scale.data(), d.n)};
      if (method == WeightMethod::error_feedback) args.second_moments = matrix<const double>(h.data(), d.k, d.k);
      quantize_weight(d, args);
      EXPECT_EQ(scale, n == 0 ? std::vector<float>(4, -1.0f) : (std::vector<float>{1e-8f, 1e-8f, 1e-8f, -1.0f}));
    }
  }
}

// A dead channel has no influence: the others are rounded as if it were not there.
TEST(WeightQuantizer, DeadChannelsAreRoundedToNearestAndChangeNothing) {
  const Description d{.n = 4, .k = 40, .method = WeightMethod::error_feedback, .clip_steps = 1};
  Problem p = problem(d, 31);
  for (std::int64_t n = 0; n < d.n; ++n) p.w[at(n * d.k)] = 1;  // the scale is that of a channel that stays
  Outputs with(d);
  quantize_weight(d, args_of(p, with));
  const Couplings c = plain_couplings(d, p.h);
  int dead = 0;
  for (std::int64_t j = 0; j < d.k; ++j) {
    if (p.h[at(j * d.k + j)] != 0) continue;
    ++dead;
    for (std::int64_t n = 0; n < d.n; ++n) {
      const float s = with.scale[at(n * with.scale_pitch())];
      EXPECT_EQ(load_integer(with.q_tensor(), n, j), plain_level(d, {s, 0}, p.w[at(n * d.k + j)]));
      p.w[at(n * d.k + j)] = 0.25f;  // another value there
    }
  }
  EXPECT_EQ(dead, 2);
  Outputs other(d);
  quantize_weight(d, args_of(p, other));
  for (std::int64_t n = 0; n < d.n; ++n) {
    for (std::int64_t j = 0; j < d.k; ++j) {
      if (p.h[at(j * d.k + j)] == 0) continue;
      EXPECT_EQ(load_integer(with.q_tensor(), n, j), load_integer(other.q_tensor(), n, j));
    }
  }
}

// ---- What it is good for ----

// Inputs with a spectrum that falls as 1 / i and channels of lognormal size, 2,048 rows, and weights with the tails of
// a trained layer's (Student's t, 5 degrees of freedom), 128 x 256.
struct Layer {
  std::int64_t n = 128;
  std::int64_t k = 256;
  std::vector<double> h, fresh;  // of the calibration rows, and of other rows
  std::vector<float> w;
};

Layer correlated_layer() {
  Layer layer;
  const std::int64_t k = layer.k;
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  std::student_t_distribution<float> tailed(5);
  std::vector<float> basis(at(k * k));
  for (float& b : basis) b = normal(generator);
  std::vector<float> size(at(k));
  for (float& s : size) s = std::exp(0.5f * normal(generator));
  const auto moments = [&] {
    constexpr std::int64_t kRows = 2048;
    std::vector<float> parts(at(k * kRows)), x(at(kRows * k));
    for (std::int64_t i = 0; i < k * kRows; ++i)
      parts[at(i)] = normal(generator) / std::sqrt(1.0f + static_cast<float>(i / kRows));
    add_outer({parts.data(), kRows, basis.data(), k, x.data(), k, k, kRows, k});
    for (std::int64_t i = 0; i < kRows * k; ++i) x[at(i)] *= size[at(i % k)];
    Calibrator calibrator({.features = k, .second_moments = true});
    calibrator.observe(matrix<const float>(x.data(), kRows, k));
    std::vector<double> h(at(k * k));
    calibrator.second_moments(matrix(h.data(), k, k));
    return h;
  };
  layer.h = moments();
  layer.fresh = moments();
  for (std::int64_t i = 0; i < layer.n * k; ++i) layer.w.push_back(tailed(generator) / 16);
  return layer;
}

// SQNR of the layer's output on rows that the quantizer has not seen.
double sqnr(const Layer& layer, Description d) {
  d.n = layer.n, d.k = layer.k;
  const Problem p{d, layer.w, d.method == WeightMethod::nearest ? std::vector<double>{} : layer.h, {}};
  Outputs out(d);
  quantize_weight(d, args_of(p, out));
  const WeightError error = weight_error(d, {.weight = matrix(p.w.data(), d.n, d.k),
                                             .second_moments = matrix(layer.fresh.data(), d.k, d.k),
                                             .q = out.q_tensor(),
                                             .scale = out.scale_tensor(),
                                             .zero_point = out.zero_tensor()});
  return 10 * std::log10(error.signal / error.noise);
}

TEST(WeightQuantizer, GainsOverNearest) {
  const Layer layer = correlated_layer();
  struct Bar {
    const char* what;
    Description d;
    double clip,
        feedback;  // dB, at least, over a scale of the extremes; docs/explanation/smooth-quant.md has the measurements
  };
  const auto group = [](std::int64_t size, bool zero_point) {
    return Description{.weight = {DType::s4, Granularity::group, size, zero_point}};
  };
  const Description s8_group_64 = {.weight = {DType::s8, Granularity::group, 64}};
  EXPECT_GE(sqnr(layer, s8_group_64) - sqnr(layer, {}), 2);  // groups over channels
  for (Bar bar : {Bar{"s8 per channel", {}, 0.2, 5.5}, Bar{"s8 group 64", s8_group_64, 0, 5},
                  Bar{"s4 group 32", group(32, false), 1.2, 6}, Bar{"s4 group 128", group(128, false), 1.4, 7},
                  Bar{"s4 group 128, z", group(128, true), 0.6, 6}, Bar{"s4 row", group(0, false), 2, 7.5}}) {
    const double nearest = sqnr(layer, bar.d);
    bar.d.method = WeightMethod::clip_search;
    bar.d.clip_steps = 1;
    const double extremes = sqnr(layer, bar.d);
    bar.d.clip_steps = Description().clip_steps;
    const double clip = sqnr(layer, bar.d);
    bar.d.method = WeightMethod::error_feedback;
    const double feedback = sqnr(layer, bar.d);
    bar.d.order = ColumnOrder::as_they_lie;
    const double as_they_lie = sqnr(layer, bar.d);
    std::printf("%-16s nearest %5.2f dB, clip_search %+5.2f, error_feedback %+5.2f (as they lie %+5.2f)\n", bar.what,
                nearest, clip - nearest, feedback - nearest, as_they_lie - nearest);
    const bool uses_all = uses_all_levels({.weight = bar.d.weight});
    EXPECT_GE(nearest - extremes, uses_all ? 0.7 : 0) << bar.what;
    EXPECT_GT(clip, nearest) << bar.what;
    EXPECT_GE(clip - extremes, bar.clip) << bar.what;
    EXPECT_GE(feedback - extremes, bar.feedback) << bar.what;
    EXPECT_GT(as_they_lie, clip) << bar.what;
  }
}

TEST(WeightError, EqualsThePlainSum) {
  for (const Description& description : descriptions()) {
    Description d = description;
    if (d.method != WeightMethod::clip_search || d.clip_steps > 1) continue;
    const Problem p = problem(d, 3);
    Outputs out(d);
    quantize_weight(d, args_of(p, out));
    std::vector<float> importance;
    for (std::int64_t j = 0; j < d.k; ++j) importance.push_back(static_cast<float>(j % 3));
    double noise[3] = {}, signal[3] = {}, magnitude = 0;
    for (std::int64_t n = 0; n < d.n; ++n) {
      std::vector<double> e(at(d.k));
      for (std::int64_t c = 0; c < d.k; ++c) {
        const std::int64_t place = per_tensor(d) ? 0 : n * out.scale_pitch() + c / segment_of(d);
        const int z = d.weight.zero_point ? out.zero[at(place)] : 0;
        e[at(c)] =
            static_cast<double>(static_cast<float>(load_integer(out.q_tensor(), n, c) - z) * out.scale[at(place)]) -
            static_cast<double>(p.w[at(n * d.k + c)]);
      }
      for (std::int64_t i = 0; i < d.k; ++i) {
        const double w = static_cast<double>(p.w[at(n * d.k + i)]);
        noise[1] += e[at(i)] * e[at(i)] * static_cast<double>(importance[at(i)]);
        noise[2] += e[at(i)] * e[at(i)];
        signal[1] += w * w * static_cast<double>(importance[at(i)]);
        signal[2] += w * w;
        for (std::int64_t j = 0; j < d.k; ++j) {
          const double h = p.h[at(i * d.k + j)];
          noise[0] += e[at(i)] * h * e[at(j)];
          signal[0] += w * h * static_cast<double>(p.w[at(n * d.k + j)]);
          magnitude += std::abs(w * h) * std::abs(static_cast<double>(p.w[at(n * d.k + j)]));
        }
      }
    }
    for (int i = 0; i < 3; ++i) {
      WeightErrorArgs args{.weight = matrix(p.w.data(), d.n, d.k),
                           .q = out.q_tensor(),
                           .scale = out.scale_tensor(),
                           .zero_point = out.zero_tensor()};
      if (i == 0) args.second_moments = matrix(p.h.data(), d.k, d.k);
      if (i == 1) args.importance = vector<const float>(importance.data(), d.k);
      const WeightError error = weight_error(d, args);
      // H and E are rounded to f32 (2^-24 each), and a sum of k terms in f32 is off by less than (k + 3) 2^-24 of the
      // sum of their magnitudes. E's sum is below W's.
      const double bound = static_cast<double>(d.k + 6) * 0x1p-24 * (i == 0 ? magnitude : signal[i]);
      EXPECT_NEAR(error.noise, noise[i], bound) << text(d) << " " << i;
      EXPECT_NEAR(error.signal, signal[i], bound) << text(d) << " " << i;
    }
  }
}

// ---- Rejections ----

struct Bad {
  Description d{.n = 3, .k = 64, .weight = {DType::s4, Granularity::group, 32}, .method = WeightMethod::error_feedback};
  Problem p = problem(d, 1);
  std::vector<float> importance = std::vector<float>(64, 1.0f);
  Outputs out{d};
  WeightQuantizerArgs args = args_of(p, out);
};

void expect_error(const std::function<void(Bad&)>& spoil, Status status, const std::vector<std::string>& texts) {
  Bad bad;
  spoil(bad);
  const Outputs before = bad.out;
  try {
    quantize_weight(bad.d, bad.args);
    ADD_FAILURE() << "nothing was thrown; expected " << texts[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_NE(std::string(error.what()).find("quantize_weight"), std::string::npos) << error.what();
    for (const std::string& text : texts) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what() << "\n  lacks: " << text;
    }
  }
  EXPECT_EQ(bad.out.q, before.q);
  EXPECT_EQ(bad.out.scale, before.scale);
  EXPECT_EQ(bad.out.zero, before.zero);
}

TEST(BadWeightQuantizer, Descriptions) {
  const auto invalid = Status::invalid_argument;
  const auto unsupported = Status::unsupported;
  expect_error([](Bad& b) { b.d.n = -1; }, invalid, {"n = -1"});
  expect_error([](Bad& b) { b.d.k = -2; }, invalid, {"k = -2"});
  expect_error([](Bad& b) { b.d.n = b.d.k = std::int64_t{1} << 40; }, invalid, {"overflows"});
  expect_error([](Bad& b) { b.d.w = DType::s8; }, unsupported, {"w = s8"});
  expect_error([](Bad& b) { b.d.w = static_cast<DType>(77); }, invalid, {"w = 77"});
  expect_error([](Bad& b) { b.d.weight.granularity = static_cast<Granularity>(4); }, invalid, {"granularity = 4"});
  expect_error([](Bad& b) { b.d.scale = DType::f64; }, unsupported, {"scale = f64", "f16, bf16 or f32"});
  expect_error([](Bad& b) { b.d.scale = static_cast<DType>(9); }, invalid, {"scale = 9"});
  expect_error([](Bad& b) { b.d.method = static_cast<WeightMethod>(3); }, invalid, {"method = 3"});
  expect_error([](Bad& b) { b.d.order = static_cast<ColumnOrder>(2); }, invalid, {"order = 2"});
  expect_error([](Bad& b) { b.d.weight.group = 48; }, unsupported, {"group = 48"});
  expect_error([](Bad& b) { b.d.weight.group = 128; }, invalid, {"group = 128", "k = 64"});
  expect_error([](Bad& b) { b.d.weight = WeightFormat::s8_per_channel, b.d.weight.zero_point = true; }, unsupported,
               {"zero_point", "s8_per_channel"});
  for (const double damping : {-0.01, 1.5, std::nan("")}) {
    expect_error([=](Bad& b) { b.d.damping = damping; }, invalid, {"damping = ", "0 to 1"});
  }
  for (const double least : {0.0, -1.0, 1.01, std::nan("")}) {
    expect_error([=](Bad& b) { b.d.min_clip = least; }, invalid, {"min_clip = "});
  }
  for (const int steps : {0, -3, 1002}) expect_error([=](Bad& b) { b.d.clip_steps = steps; }, invalid, {"clip_steps"});
  expect_error([](Bad& b) { b.d.threads = -1; }, invalid, {"threads = -1"});
}

TEST(BadWeightQuantizer, Tensors) {
  const auto invalid = Status::invalid_argument;
  const auto mismatch = Status::shape_mismatch;
  expect_error([](Bad& b) { b.args.weight = {}; }, mismatch, {"weight is absent"});
  expect_error([](Bad& b) { b.args.weight.shape[1] = 63; }, mismatch, {"weight", "(3, 63)"});
  expect_error([](Bad& b) { b.args.weight = on(Device::cuda(0), b.args.weight); }, mismatch, {"weight", "cuda:0"});
  expect_error([](Bad& b) { b.args.q.dtype = DType::s8; }, mismatch, {"q is s8", "s4"});
  expect_error([](Bad& b) { b.args.scale.dtype = DType::f16; }, mismatch, {"scale is f16", "f32"});
  expect_error([](Bad& b) { b.args.scale.shape[1] = 1; }, mismatch, {"scale"});
  expect_error([](Bad& b) { b.d.weight.zero_point = true; }, mismatch, {"zero_point is absent"});
  expect_error([](Bad& b) { b.args.zero_point = matrix(b.out.zero.data(), 3, 2); }, mismatch, {"zero_point", "no use"});
  expect_error([](Bad& b) { b.args.second_moments = {}; }, invalid, {"error_feedback", "without second_moments"});
  expect_error([](Bad& b) { b.args.second_moments.shape[0] = 63; }, mismatch, {"second_moments"});
  expect_error([](Bad& b) { b.args.second_moments.dtype = DType::f16; }, Status::unsupported,
               {"second_moments", "f32 or f64"});
  expect_error([](Bad& b) { b.d.method = WeightMethod::nearest; }, mismatch, {"second_moments", "no use"});
  expect_error([](Bad& b) { b.args.importance = vector<const float>(b.importance.data(), 64); }, mismatch,
               {"importance", "no use"});
  const auto with_importance = [](Bad& b) {
    b.d.method = WeightMethod::clip_search;
    b.args.importance = vector<const float>(b.importance.data(), 64);
  };
  expect_error(with_importance, invalid, {"second_moments and importance"});
  for (const float value : {-1.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    expect_error(
        [&](Bad& b) {
          with_importance(b);
          b.args.second_moments = {};
          b.importance[5] = value;
        },
        invalid, {"importance[5] = "});
  }
  expect_error([](Bad& b) { b.args.scale.data = b.out.q.data(); }, invalid, {"overlaps"});
}

TEST(BadWeightQuantizer, Values) {
  const auto invalid = Status::invalid_argument;
  for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    expect_error([=](Bad& b) { b.p.w[64 + 9] = value; }, invalid, {"weight[1, 9] = "});
  }
  std::vector<double> wide(3 * 64, 0.5);
  wide[130] = 1e39;
  expect_error(
      [&](Bad& b) {
        b.d.w = DType::f64;
        b.args.weight = matrix<const double>(wide.data(), 3, 64);
      },
      invalid, {"weight[2, 2] = 1e+39", "finite in f32"});
  expect_error([](Bad& b) { b.p.w[3] = 3e38f, b.p.w[4] = -3e38f, b.d.scale = DType::f16; }, invalid,
               {"row 0", "-3e+38", "beyond f16"});
  expect_error(
      [](Bad& b) {
        b.p.w[3] = 3e38f, b.p.w[4] = -3e38f;
        b.d.weight.zero_point = true;
        b.args.zero_point = matrix(b.out.zero.data(), 3, 2, 3);
      },
      invalid, {"row 0", "3e+38", "beyond f32"});
  expect_error([](Bad& b) { b.p.w[3] = 2e37f; }, invalid, {"2e+37", "couplings", "f32's range"});
  for (const double value : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    expect_error([=](Bad& b) { b.p.h[65 * 7] = value; }, invalid, {"second_moments[7, 7] = "});
  }
  expect_error([](Bad& b) { b.p.h[64 * 2 + 9] += 1e3; }, invalid, {"second_moments[2, 9]", "[9, 2]", "symmetric"});
  expect_error([](Bad& b) { b.p.h[64 * 9 + 2] = std::nan(""); }, invalid, {"second_moments[2, 9]"});
  // Fewer rows than columns, and no damping: singular.
  expect_error([](Bad& b) { b.d.damping = 0; }, invalid, {"not positive definite", "damping = 0", "column"});
  // Symmetric, but not positive semidefinite.
  expect_error([](Bad& b) { b.p.h[64 * 2 + 9] = b.p.h[64 * 9 + 2] = 1e6; }, invalid, {"not positive definite"});
}

TEST(BadWeightError, Tensors) {
  Bad b;
  WeightErrorArgs args{.weight = b.args.weight, .q = b.args.q, .scale = b.args.scale};
  EXPECT_NO_THROW(weight_error(b.d, args));
  args.q = {};
  EXPECT_THROW(weight_error(b.d, args), Error);
  args.q = b.args.q;
  args.second_moments = b.args.second_moments;
  args.importance = vector<const float>(b.importance.data(), 64);
  EXPECT_THROW(weight_error(b.d, args), Error);
  b.d.n = -1;
  EXPECT_THROW(weight_error(b.d, args), Error);
}

}  // namespace
}  // namespace octile
