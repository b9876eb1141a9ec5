// The number contract, line by line: values worked out by hand, and whole tensors computed in another way than the
// library's (integers, exact quotients in f64, explicit roundings). Every expected value holds for every row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/philox.h"
#include "octile/octile.hpp"

namespace octile {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

template <class T>
using Values = std::vector<T>;
using Bytes = Values<std::int8_t>;
using Floats = Values<float>;

// The arches of the table's CPU rows: "reference", "portable", ...
std::vector<std::string> arches() {
  std::set<std::string> found;
  for (const KernelInfo& row : kernels()) {
    if (row.device == DeviceType::cpu && row.reason.empty()) found.insert(row.name.substr(row.name.rfind('_') + 1));
  }
  return {found.begin(), found.end()};
}

// The library's own arches accept every problem here, except those that a test names.
const std::set<std::string> kOwnArches = {"reference",  "portable", "avx2", "avxvnni",
                                          "avx512vnni", "amx",      "neon", "i8mm"};

bool multiplies_floats(const LinearDescription& d) { return d.activation == Activation::none; }
bool multiplies_floats(const LinearBackwardDescription& d) {
  return d.dx == Product::dequantized || d.dw == Product::dequantized;
}

// Why another arch, perhaps a single new row (docs/how-to/add-kernel.md), rejects a problem; "" if it does
// not. Always "" for the library's own, except for AMX's float rows, which take only bf16.
template <class Plan = LinearPlan, class Description>
std::string rejection(const std::string& arch, Description description) {
  if (kOwnArches.count(arch) != 0 && !(arch == "amx" && multiplies_floats(description))) return "";
  description.kernel = arch;
  try {
    Plan::select(description);
  } catch (const Error& error) {
    if (error.status() == Status::unsupported) return error.what();
    throw;
  }
  return "";
}

class EveryArch : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Contract, EveryArch, testing::ValuesIn(arches()), [](const auto& p) { return p.param; });

template <class Plan, class Description, class Args>
void run(Description description, const std::string& kernel, const Args& args) {
  description.kernel = kernel;
  const Plan plan = Plan::select(description);
  std::vector<std::byte> workspace(plan.workspace_size());
  plan.run(args, {workspace.data(), workspace.size()});
}

template <class T>
bool same_bits(const Values<T>& a, const Values<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
T* as(Values<T>& v) {
  return v.data();
}
template <class T>
const T* as(const Values<T>& v) {
  return v.data();
}

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// ---- The contract's arithmetic, spelled another way ----

// To the nearest integer, ties to even.
double round_half_even(double v) {
  const double low = std::floor(v);
  const double up = v - low;
  if (up != 0.5) return up < 0.5 ? low : low + 1;
  return std::fmod(low, 2) == 0 ? low : low + 1;
}

// f64 has enough bits (53 >= 2 * 24 + 2) that a quotient of floats, rounded to f64 and then to f32, is the f32
// quotient. A product of floats is exact in f64.
float quotient(float a, float b) { return static_cast<float>(static_cast<double>(a) / static_cast<double>(b)); }
float product(float a, float b) { return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)); }

struct Quantized {
  Bytes q;
  float s;
};

Quantized quantize_segment(const Floats& x) {
  float amax = 0;
  for (const float v : x) amax = std::max(amax, std::abs(v));
  Quantized out{{}, std::max(quotient(amax, 127.0f), 1e-8f)};
  for (const float v : x) {
    const double q = round_half_even(quotient(v, out.s));
    out.q.push_back(static_cast<std::int8_t>(q > 127 ? 127 : q < -127 ? -127 : q));
  }
  return out;
}

Floats normal(std::size_t size, std::uint64_t seed, float spread = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> distribution(0, spread);
  Floats v(size);
  for (float& x : v) x = distribution(random);
  return v;
}

Bytes full_range(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes v(size);
  for (auto& x : v) x = static_cast<std::int8_t>(static_cast<int>(random() % 256) - 128);
  return v;
}

// The products of a backward pass, and the blocks of its gradient.
constexpr std::pair<Product, std::int64_t> kBackwards[] = {
    {Product::dequantized, 0}, {Product::int8, 0}, {Product::int8, 128}};

// One row of f32, quantized as a whole.
struct RowResult {
  Bytes q;
  float s;
};

RowResult quantize_row(const std::string& arch, const Floats& x, QuantizeDescription d = {}) {
  d.rows = 1;
  d.cols = static_cast<std::int64_t>(x.size());
  RowResult out{Bytes(x.size(), 99), -1};
  run<QuantizePlan>(
      d, arch,
      QuantizeArgs{.x = matrix(as(x), 1, d.cols), .q = matrix(as(out.q), 1, d.cols), .scale = vector(&out.s, 1)});
  return out;
}

// ---- Quantize ----

TEST_P(EveryArch, TiesGoToEven) {
  const RowResult r =
      quantize_row(GetParam(), {127, -127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 126.5f, 125.5f, 0, -0.0f});
  EXPECT_EQ(r.s, 1.0f);
  EXPECT_EQ(r.q, (Bytes{127, -127, 0, 2, 2, 0, -2, -2, 126, 126, 0, 0}));
}

TEST_P(EveryArch, DividesAndDoesNotMultiplyByTheReciprocal) {
  int told_apart = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    // Halves of the scale's multiples, so that the last bit of the quotient decides.
    Floats x = normal(1009, seed);
    float amax = 0;
    for (const float v : x) amax = std::max(amax, std::abs(v));
    const float s = quotient(amax, 127);
    for (std::size_t i = 0; i < x.size(); i += 2)
      x[i] = product(s, static_cast<float>(static_cast<int>(i % 251) - 125) + 0.5f);
    const Quantized expected = quantize_segment(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double shortcut = round_half_even(product(x[i], quotient(1, expected.s)));
      told_apart += shortcut != static_cast<double>(expected.q[i]);
    }
    const RowResult r = quantize_row(GetParam(), x);
    EXPECT_EQ(r.s, expected.s);
    EXPECT_EQ(r.q, expected.q);
  }
  EXPECT_GT(told_apart, 100) << "the data would not notice the shortcut";
}

TEST_P(EveryArch, TheScaleHasAFloor) {
  const RowResult zero = quantize_row(GetParam(), {0, -0.0f, 0});
  EXPECT_EQ(zero.s, 1e-8f);
  EXPECT_EQ(zero.q, (Bytes{0, 0, 0}));
  const RowResult tiny = quantize_row(GetParam(), {6e-9f, -1.6e-8f, 1e-38f, 1e-45f});
  EXPECT_EQ(tiny.s, 1e-8f);
  EXPECT_EQ(tiny.q, (Bytes{1, -2, 0, 0}));
  EXPECT_GT(quantize_row(GetParam(), {1.28e-6f}).s, 1e-8f);
}

TEST_P(EveryArch, SymmetricNeverWritesMinus128AndAffineDoes) {
  const Floats x = {-1000, 1000, -128, -127.5f, 127.5f, -3e38f, 3e38f};
  const float s = 1;
  const std::int32_t z = 0;
  Bytes q(x.size());
  QuantizeDescription d{.rows = 1, .cols = 7, .scale = ScaleSource::given};
  QuantizeArgs args{.x = matrix(as(x), 1, 7), .given_scale = vector(&s, 1), .q = matrix(as(q), 1, 7)};
  run<QuantizePlan>(d, GetParam(), args);
  EXPECT_EQ(q, (Bytes{-127, 127, -127, -127, 127, -127, 127}));
  d.mapping = Mapping::affine;
  args.given_zero_point = vector(&z, 1);
  run<QuantizePlan>(d, GetParam(), args);
  EXPECT_EQ(q, (Bytes{-128, 127, -128, -128, 127, -128, 127}));
}

template <class T>
struct AffineResult {
  Values<T> q;
  float s;
  std::int32_t z;
};

template <class T>
AffineResult<T> quantize_affine(const std::string& arch, const Floats& x) {
  AffineResult<T> out{Values<T>(x.size()), 0, 99};
  const auto cols = static_cast<std::int64_t>(x.size());
  const QuantizeDescription d{.rows = 1, .cols = cols, .q = DTypeOf<T>::value, .mapping = Mapping::affine};
  run<QuantizePlan>(d, arch,
                    QuantizeArgs{.x = matrix(as(x), 1, cols),
                                 .q = matrix(as(out.q), 1, cols),
                                 .scale = vector(&out.s, 1),
                                 .zero_point = vector(&out.z, 1)});
  return out;
}

TEST_P(EveryArch, AffineByHand) {
  // s = 4 / 255; x_min / s = -63.75, to -64; z = -128 + 64.
  const auto mixed = quantize_affine<std::int8_t>(GetParam(), {-1, 3, 0, 1});
  EXPECT_EQ(mixed.s, quotient(4, 255));
  EXPECT_EQ(mixed.z, -64);
  EXPECT_EQ(mixed.q, (Bytes{-128, 127, -64, 0}));
  const auto unsigned_mixed = quantize_affine<std::uint8_t>(GetParam(), {-1, 3, 0, 1});
  EXPECT_EQ(unsigned_mixed.z, 64);
  EXPECT_EQ(unsigned_mixed.q, (Values<std::uint8_t>{0, 255, 64, 128}));
  // x_min is at most 0 and x_max at least 0, so that 0 is always in the range.
  const auto positive = quantize_affine<std::int8_t>(GetParam(), {2, 0.5f, 2});
  EXPECT_EQ(positive.s, quotient(2, 255));
  EXPECT_EQ(positive.z, -128);
  EXPECT_EQ(positive.q, (Bytes{127, -64, 127})) << "0.5 / s = 63.75";
  const auto negative = quantize_affine<std::int8_t>(GetParam(), {-2, -2});
  EXPECT_EQ(negative.z, 127);
  EXPECT_EQ(negative.q, (Bytes{-128, -128}));
  const auto zero = quantize_affine<std::int8_t>(GetParam(), {0, 0});
  EXPECT_EQ(zero.s, 1e-8f);
  EXPECT_EQ(zero.z, -128);
  EXPECT_EQ(zero.q, (Bytes{-128, -128}));
}

TEST_P(EveryArch, AffineKeepsZeroExactly) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Floats x = normal(37, seed);
    for (float& v : x) v = v * 3 + static_cast<float>(seed % 9) - 4;
    x[11] = 0;
    const auto r = quantize_affine<std::uint8_t>(GetParam(), x);
    EXPECT_EQ(r.q[11], r.z) << seed;
    Floats back(x.size());
    run<DequantizePlan>(QuantizeDescription{.rows = 1, .cols = 37, .q = DType::u8, .mapping = Mapping::affine},
                        GetParam(),
                        DequantizeArgs{.q = matrix(as(r.q), 1, 37),
                                       .scale = vector(&r.s, 1),
                                       .zero_point = vector(&r.z, 1),
                                       .x = matrix(as(back), 1, 37)});
    EXPECT_EQ(back[11], 0.0f);
    // Half a step for the rounding; the zero point was rounded to a whole step too, so an end may be clamped by half of
    // one more. A few units of f32 for the two divisions.
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(back[i], x[i], r.s * 1.0001f);
  }
}

TEST_P(EveryArch, FourBitsGoLowNibbleFirst) {
  const Floats x = {1, -2, 7, -7, 3};
  Values<std::uint8_t> q(3, 0xff);
  float s = 0;
  run<QuantizePlan>(QuantizeDescription{.rows = 1, .cols = 5, .q = DType::s4}, GetParam(),
                    QuantizeArgs{.x = matrix(as(x), 1, 5), .q = matrix_s4(as(q), 1, 5), .scale = vector(&s, 1)});
  EXPECT_EQ(s, 1.0f);
  EXPECT_EQ(q, (Values<std::uint8_t>{0xe1, 0x97, 0x03}));
}

// Every value of a row of 16-bit floats up to its largest: many are ties.
template <class T>
void quantize_every_value(const std::string& arch, DType dtype, std::uint16_t largest) {
  Values<T> x;
  Floats wide;
  for (std::uint32_t bits = 0; bits < 1 << 16; ++bits) {
    T value;
    value.bits = static_cast<std::uint16_t>(bits);
    if ((bits & 0x7fff) <= largest) x.push_back(value), wide.push_back(value);
  }
  const Quantized expected = quantize_segment(wide);
  const auto cols = static_cast<std::int64_t>(x.size());
  Bytes q(x.size(), 99);
  float s = -1;
  run<QuantizePlan>(QuantizeDescription{.rows = 1, .cols = cols, .x = dtype}, arch,
                    QuantizeArgs{.x = matrix(as(x), 1, cols), .q = matrix(as(q), 1, cols), .scale = vector(&s, 1)});
  EXPECT_EQ(s, expected.s) << largest;
  EXPECT_TRUE(q == expected.q) << largest;

  // In groups that each end with the largest value.
  for (const std::int64_t group : {128, 32, 33}) {
    const auto last = static_cast<std::size_t>(
        std::find_if(x.begin(), x.end(), [&](const T& value) { return value.bits == largest; }) - x.begin());
    Values<T> grouped;
    Bytes wanted;
    const auto add = [&](std::size_t i) { grouped.push_back(x[i]), wanted.push_back(expected.q[i]); };
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (grouped.size() % at(group) == at(group - 1)) add(last);
      add(i);
    }
    while (grouped.size() % at(group) != 0) add(last);
    const auto count = static_cast<std::int64_t>(grouped.size());
    Bytes levels(grouped.size(), 99);
    Floats scales(at(count / group), -1);
    run<QuantizePlan>(
        QuantizeDescription{.rows = 1, .cols = count, .x = dtype, .granularity = Granularity::group, .group = group},
        arch,
        QuantizeArgs{.x = matrix(as(grouped), 1, count),
                     .q = matrix(as(levels), 1, count),
                     .scale = matrix(as(scales), 1, count / group)});
    EXPECT_TRUE(scales == Floats(scales.size(), expected.s)) << largest << ' ' << group;
    EXPECT_TRUE(levels == wanted) << largest << ' ' << group;
  }
}

TEST_P(EveryArch, EverySixteenBitFloat) {
  std::mt19937 random(7);
  for (int i = 0; i < 20; ++i) {
    quantize_every_value<Half>(GetParam(), DType::f16, static_cast<std::uint16_t>(random() % 0x7c00));
    quantize_every_value<BFloat16>(GetParam(), DType::bf16, static_cast<std::uint16_t>(random() % 0x7f80));
  }
  for (const std::uint16_t largest : {0x0001, 0x0100, 0x4a80, 0x7b00, 0x7bff}) {
    quantize_every_value<Half>(GetParam(), DType::f16, largest);
    quantize_every_value<BFloat16>(GetParam(), DType::bf16, largest);
  }
  quantize_every_value<BFloat16>(GetParam(), DType::bf16, 0x7f7f);
}

// The same with a given scale: many are clamped, and products with the inverse may be infinite.
template <class T>
void quantize_by_given_scale(const std::string& arch, DType dtype, float s, std::int32_t z, std::mt19937& random) {
  constexpr std::int64_t kRows = 32, kCols = 1 << 11;
  Values<T> x(std::size_t{1} << 16);
  Bytes expected(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i].bits = static_cast<std::uint16_t>(i);
    if (!std::isfinite(static_cast<float>(x[i]))) x[i].bits = 0x8000;
    const float level = std::clamp(std::rint(static_cast<float>(x[i]) / s) + static_cast<float>(z), -128.0f, 127.0f);
    expected[i] = static_cast<std::int8_t>(level);
  }
  const auto quantize = [&] {
    Bytes q(x.size(), 99);
    run<QuantizePlan>(QuantizeDescription{.rows = kRows,
                                          .cols = kCols,
                                          .x = dtype,
                                          .granularity = Granularity::tensor,
                                          .scale = ScaleSource::given,
                                          .mapping = Mapping::affine,
                                          .threads = 2},
                      arch,
                      QuantizeArgs{.x = matrix(as(x), kRows, kCols),
                                   .given_scale = vector(&s, 1),
                                   .given_zero_point = vector(&z, 1),
                                   .q = matrix(as(q), kRows, kCols)});
    return q;
  };
  EXPECT_TRUE(quantize() == expected) << s << ' ' << z;
  x[random() % x.size()].bits = dtype == DType::f16 ? 0xfc00 : 0xff80;  // -infinity
  EXPECT_TRUE(quantize() == Bytes(x.size(), 0)) << s << ' ' << z;
}

TEST_P(EveryArch, EverySixteenBitFloatByGivenScales) {
  std::mt19937 random(8);
  for (const float s : {1.2e-38f, 1e-30f, 0x1p-99f, 3e-4f, 0.7f, 1.0f, 251.0f, 1e29f, 0x1p100f, 3e38f}) {
    for (const std::int32_t z : {-128, 0, 5, 127}) {
      quantize_by_given_scale<Half>(GetParam(), DType::f16, s, z, random);
      quantize_by_given_scale<BFloat16>(GetParam(), DType::bf16, s, z, random);
    }
  }
}

// Every granularity quantizes each segment as if it were alone.
TEST_P(EveryArch, SegmentsAreQuantizedOnTheirOwn) {
  constexpr std::int64_t kRows = 37, kCols = 96, kGroup = 32;
  const Floats x = normal(kRows * kCols, 3);
  for (const Granularity granularity :
       {Granularity::tensor, Granularity::row, Granularity::column, Granularity::group}) {
    const bool by_row = granularity == Granularity::row || granularity == Granularity::group;
    const std::int64_t high = by_row ? 1 : kRows;
    const std::int64_t wide = granularity == Granularity::group    ? kGroup
                              : granularity == Granularity::column ? 1
                                                                   : kCols;
    Bytes q(x.size()), q_t(x.size());
    Floats scale(at((kRows / high) * (kCols / wide)));
    Tensor scale_view = granularity == Granularity::group ? matrix(as(scale), kRows, kCols / wide)
                                                          : vector(as(scale), static_cast<std::int64_t>(scale.size()));
    run<QuantizePlan>(QuantizeDescription{.rows = kRows,
                                          .cols = kCols,
                                          .granularity = granularity,
                                          .group = kGroup,
                                          .orientation = Orientation::both},
                      GetParam(),
                      QuantizeArgs{.x = matrix(as(x), kRows, kCols),
                                   .q = matrix(as(q), kRows, kCols),
                                   .q_transposed = matrix(as(q_t), kCols, kRows),
                                   .scale = scale_view});
    std::size_t segment = 0;
    for (std::int64_t r = 0; r < kRows; r += high) {
      for (std::int64_t c = 0; c < kCols; c += wide, ++segment) {
        Floats values;
        for (std::int64_t i = r; i < r + high; ++i) {
          for (std::int64_t j = c; j < c + wide; ++j) values.push_back(x[at(i * kCols + j)]);
        }
        const Quantized expected = quantize_segment(values);
        ASSERT_EQ(scale[segment], expected.s);
        std::size_t k = 0;
        for (std::int64_t i = r; i < r + high; ++i) {
          for (std::int64_t j = c; j < c + wide; ++j, ++k) {
            ASSERT_EQ(q[at(i * kCols + j)], expected.q[k]) << name(granularity) << ' ' << i << ' ' << j;
            ASSERT_EQ(q_t[at(j * kRows + i)], expected.q[k]) << name(granularity) << ' ' << i << ' ' << j;
          }
        }
      }
    }
  }
}

TEST_P(EveryArch, SixteenBitInputsAreWidenedFirst) {
  const Floats source = normal(513, 5);
  Values<Half> half;
  Values<BFloat16> bfloat;
  for (const float v : source) {
    half.push_back(Half(v));
    bfloat.push_back(BFloat16(v));
  }
  const auto check = [&](const auto& narrow, DType dtype) {
    const Quantized expected = quantize_segment(Floats(narrow.begin(), narrow.end()));
    RowResult r{Bytes(narrow.size()), 0};
    run<QuantizePlan>(
        QuantizeDescription{.rows = 1, .cols = 513, .x = dtype}, GetParam(),
        QuantizeArgs{.x = matrix(narrow.data(), 1, 513), .q = matrix(as(r.q), 1, 513), .scale = vector(&r.s, 1)});
    EXPECT_EQ(r.s, expected.s);
    EXPECT_EQ(r.q, expected.q);
  };
  check(half, DType::f16);
  check(bfloat, DType::bf16);
}

TEST_P(EveryArch, DoubleWorksInDouble) {
  // In f32 both would be 1 and the quotient 63.5, a tie; in f64 the second is a little less.
  const Values<double> x = {127, 63.5 - 1e-9, 63.5};
  Bytes q(3);
  double s = 0;
  run<QuantizePlan>(QuantizeDescription{.rows = 1, .cols = 3, .x = DType::f64}, GetParam(),
                    QuantizeArgs{.x = matrix(as(x), 1, 3), .q = matrix(as(q), 1, 3), .scale = vector(&s, 1)});
  EXPECT_EQ(s, 1.0);
  EXPECT_EQ(q, (Bytes{127, 63, 64}));
}

TEST_P(EveryArch, TheMultiplierIsRoundedOnce) {
  const Floats x = normal(200, 8);
  const Floats m = normal(200, 9);
  Floats scaled;
  for (std::size_t i = 0; i < x.size(); ++i) scaled.push_back(product(x[i], m[i]));
  const Quantized expected = quantize_segment(scaled);
  RowResult r{Bytes(200), 0};
  run<QuantizePlan>(QuantizeDescription{.rows = 1, .cols = 200, .multiplier = Multiplier::per_column}, GetParam(),
                    QuantizeArgs{.x = matrix(as(x), 1, 200),
                                 .multiplier = vector(as(m), 200),
                                 .q = matrix(as(r.q), 1, 200),
                                 .scale = vector(&r.s, 1)});
  EXPECT_EQ(r.s, expected.s);
  EXPECT_EQ(r.q, expected.q);
}

// ---- Stochastic rounding ----

Bytes quantize_stochastic(const std::string& arch, const Floats& x, std::int64_t cols, std::uint64_t seed,
                          int threads = 0) {
  const std::int64_t rows = static_cast<std::int64_t>(x.size()) / cols;
  const float s = 1;
  Bytes q(x.size());
  run<QuantizePlan>(QuantizeDescription{.rows = rows,
                                        .cols = cols,
                                        .scale = ScaleSource::given,
                                        .rounding = Rounding::stochastic,
                                        .threads = threads},
                    arch,
                    QuantizeArgs{.x = matrix(as(x), rows, cols),
                                 .given_scale = vector(&s, rows, 0),
                                 .q = matrix(as(q), rows, cols),
                                 .seed = seed});
  return q;
}

TEST_P(EveryArch, StochasticRoundingHasTheRightMean) {
  constexpr std::size_t kCount = 200000;
  for (const float x : {0.3f, -0.3f, 5.75f, -100.0625f, 0.001f}) {
    double mean = 0;
    for (const std::int8_t q : quantize_stochastic(GetParam(), Floats(kCount, x), 1000, 42)) mean += q / double{kCount};
    const double p = x - std::floor(x);
    // u has 16 bits: the chance to go up is p to within 2^-16.
    EXPECT_NEAR(mean, x, 5 * std::sqrt(p * (1 - p) / kCount) + 0x1p-16) << x;
  }
}

TEST_P(EveryArch, StochasticRoundingLeavesIntegersAlone) {
  Floats x;
  for (int i = -127; i <= 127; ++i) x.push_back(static_cast<float>(i));
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Bytes q = quantize_stochastic(GetParam(), x, 51, seed);
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(q[i], static_cast<int>(i) - 127);
  }
}

TEST_P(EveryArch, StochasticRoundingDependsOnSeedAndElementAlone) {
  const Floats x = normal(300 * 41, 1, 30);
  const Bytes q = quantize_stochastic(GetParam(), x, 41, 7, 1);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double v = std::floor(static_cast<double>(x[i] + uniform(i, 7)));
    ASSERT_EQ(q[i], v > 127 ? 127 : v < -127 ? -127 : v) << i;
  }
  for (const int threads : {1, 2, 7}) EXPECT_EQ(quantize_stochastic(GetParam(), x, 41, 7, threads), q);
  EXPECT_NE(quantize_stochastic(GetParam(), x, 41, 8), q);
}

// ---- Dequantize, fake quantize and the straight-through gradients, by hand ----

TEST_P(EveryArch, StraightThroughByHand) {
  // s = 0.5, z = 10, range -20..20: v = rint(x / s) + z.
  const Floats x = {-15, -15.25f, -15.5f, 5, 5.25f, 5.5f, 0};  // v = -20, -20 (-30.5 to -30), -21, 20, 20, 21, 10
  const Floats dy = {1, 2, 3, 4, 5, 6, 7};
  const float s = 0.5f;
  const std::int32_t z = 10;
  QuantizeDescription d{.rows = 1, .cols = 7, .mapping = Mapping::affine, .q_min = -20, .q_max = 20};
  const auto backward = [&](auto args) {
    Floats dx(7, -99);
    args.dy = matrix(as(dy), 1, 7);
    args.x = matrix(as(x), 1, 7);
    args.scale = vector(&s, 1);
    args.zero_point = vector(&z, 1);
    args.dx = matrix(as(dx), 1, 7);
    if constexpr (std::is_same_v<decltype(args), QuantizeBackwardArgs>) {
      run<QuantizeBackwardPlan>(d, GetParam(), args);
    } else {
      run<FakeQuantizeBackwardPlan>(d, GetParam(), args);
    }
    return dx;
  };
  EXPECT_EQ(backward(QuantizeBackwardArgs{}), (Floats{2, 4, 0, 8, 10, 0, 14}));
  EXPECT_EQ(backward(FakeQuantizeBackwardArgs{}), (Floats{1, 2, 0, 4, 5, 0, 7}));
  d.mask = Mask::exclusive;
  EXPECT_EQ(backward(QuantizeBackwardArgs{}), (Floats{0, 0, 0, 0, 0, 0, 14}));
  EXPECT_EQ(backward(FakeQuantizeBackwardArgs{}), (Floats{0, 0, 0, 0, 0, 0, 7}));

  Floats y(7);
  d.scale = ScaleSource::given;
  run<FakeQuantizePlan>(d, GetParam(),
                        FakeQuantizeArgs{.x = matrix(as(x), 1, 7),
                                         .given_scale = vector(&s, 1),
                                         .given_zero_point = vector(&z, 1),
                                         .y = matrix(as(y), 1, 7)});
  EXPECT_EQ(y, (Floats{-15, -15, -15, 5, 5, 5, 0}));
}

TEST_P(EveryArch, DequantizeByHand) {
  const Bytes q = {-128, -1, 0, 1, 127, 5};
  const Floats s = {0.25f, 3.0f};
  const Values<std::int32_t> z = {-128, 7};
  Floats x(6);
  QuantizeDescription d{.rows = 2, .cols = 3, .mapping = Mapping::affine};
  run<DequantizePlan>(d, GetParam(),
                      DequantizeArgs{.q = matrix(as(q), 2, 3),
                                     .scale = vector(as(s), 2),
                                     .zero_point = vector(as(z), 2),
                                     .x = matrix(as(x), 2, 3)});
  EXPECT_EQ(x, (Floats{0, 31.75f, 32, -18, 360, -6}));
  const Floats dy = {1, 2, 3, 4, 5, 6};
  run<DequantizeBackwardPlan>(
      d, GetParam(),
      DequantizeBackwardArgs{.dy = matrix(as(dy), 2, 3), .scale = vector(as(s), 2), .dq = matrix(as(x), 2, 3)});
  EXPECT_EQ(x, (Floats{0.25f, 0.5f, 0.75f, 12, 15, 18}));
}

// ---- The forward ----

// X (m, k) and W (n, k) s8, f32 out.
struct Forward {
  std::int64_t m, n, k;
  Bytes x, w;
  Floats x_scale, w_scale, bias;  // bias may be empty

  LinearDescription description(DType y) const {
    return {.m = m, .n = n, .k = k, .x = DType::s8, .y = y, .bias = !bias.empty()};
  }
  template <class T = float>
  Values<T> run_on(const std::string& arch) const {
    Values<T> y(at(m * n), T{-99});
    const Values<T> xs(x_scale.begin(), x_scale.end()), ws(w_scale.begin(), w_scale.end()), b(bias.begin(), bias.end());
    LinearArgs args{.x = matrix(as(x), m, k),
                    .x_scale = vector(as(xs), m),
                    .weight = matrix(as(w), n, k),
                    .weight_scale = vector(as(ws), n)};
    if (!bias.empty()) args.bias = vector(as(b), n);
    args.y = matrix(as(y), m, n);
    run<LinearPlan>(description(DTypeOf<T>::value), arch, args);
    return y;
  }
};

TEST_P(EveryArch, TheForwardIsOneFma) {
  // 3 * (1 + 2^-23) - 3: rounded before the bias it would be 4 * 2^-23.
  const Forward f{1, 1, 1, {3}, {1}, {1 + 0x1p-23f}, {1}, {-3}};
  EXPECT_EQ(f.run_on(GetParam()), (Floats{3 * 0x1p-23f}));
}

TEST_P(EveryArch, TheTwoScalesAreMultipliedFirst) {
  // 2^-80 * 2^-80 is 0 in f32; 127 * 2^-80 * 2^-80 would be 0 too, but (127 * 127 * 1024 * 2^-80) * 2^-80 would not.
  const Forward f{1, 1, 1024, Bytes(1024, 127), Bytes(1024, 127), {0x1p-80f}, {0x1p-80f}, {}};
  EXPECT_EQ(f.run_on(GetParam()), (Floats{0}));
  // 2^100 * 2^100 is infinity.
  const Forward g{1, 1, 1, {1}, {1}, {0x1p100f}, {0x1p100f}, {}};
  EXPECT_EQ(g.run_on(GetParam()), (Floats{kInf}));
}

TEST_P(EveryArch, TheSumIsExactAndItsConversionRoundsOnce) {
  // 1040 * 127 * 127 + 127 * 24 + 9 = 2^24 + 1.
  Forward f{1, 1, 1042, Bytes(1042, 127), Bytes(1042, 127), {1}, {1}, {}};
  f.w[1040] = 24;
  f.x[1041] = 9;
  f.w[1041] = 1;
  EXPECT_EQ(f.run_on(GetParam()), (Floats{16777216}));
  if (const std::string why = rejection(GetParam(), f.description(DType::f64)); !why.empty()) GTEST_SKIP() << why;
  EXPECT_EQ(f.run_on<double>(GetParam()), (Values<double>{16777217}));
}

TEST_P(EveryArch, TheLongestSumOfMinus128IsExact) {
  const auto k = at(kMaxContraction);
  const Forward f{2, 3, kMaxContraction, Bytes(2 * k, -128), Bytes(3 * k, -128), {1, 1}, {1, 1, 1}, {}};
  if (const std::string why = rejection(GetParam(), f.description(DType::f64)); !why.empty()) GTEST_SKIP() << why;
  EXPECT_EQ(f.run_on<double>(GetParam()), Values<double>(6, 2147467264.0));
  Forward g = f;
  g.w.assign(g.w.size(), 127);
  EXPECT_EQ(g.run_on<double>(GetParam()), Values<double>(6, -131071.0 * 128 * 127));
}

TEST_P(EveryArch, TheForwardIsTheContractsFormula) {
  constexpr std::int64_t kM = 19, kN = 37, kK = 211;
  Forward f{
      kM, kN, kK, full_range(kM * kK, 1), full_range(kN * kK, 2), normal(kM, 3), normal(kN, 4), normal(kN, 5, 300)};
  for (float& s : f.x_scale) s = std::abs(s) + 0.01f;
  for (float& s : f.w_scale) s = std::abs(s) + 0.01f;
  for (const bool with_bias : {true, false}) {
    if (!with_bias) f.bias.clear();
    const Floats y = f.run_on(GetParam());
    for (std::int64_t m = 0; m < kM; ++m) {
      for (std::int64_t n = 0; n < kN; ++n) {
        std::int64_t acc = 0;
        for (std::int64_t k = 0; k < kK; ++k) acc += std::int64_t{f.x[at(m * kK + k)]} * f.w[at(n * kK + k)];
        // |acc| < 2^24, so 24 + 24 bits; the bias is within 2^12 of the product's size: all of it fits in 64 bits.
        ASSERT_LT(std::abs(acc), 1 << 24);
        const long double exact = static_cast<long double>(acc) * product(f.x_scale[at(m)], f.w_scale[at(n)]) +
                                  (with_bias ? f.bias[at(n)] : 0.0f);
        ASSERT_EQ(y[at(m * kN + n)], static_cast<float>(exact)) << m << ' ' << n;
      }
    }
  }
}

// Beyond the type's range and below it, and NaN with its bits.
TEST_P(EveryArch, ANarrowOutputIsTheFloatRounded) {
  constexpr std::int64_t kN = 83, kK = 131;
  for (const std::int64_t m : {1, 5, 13, 70}) {
    Forward f{m, kN, kK, full_range(m * kK, 1), full_range(kN * kK, 2), Floats(at(m)), Floats(at(kN)), {}};
    for (std::size_t i = 0; i < f.x_scale.size(); ++i)
      f.x_scale[i] = std::ldexp(1.1f, static_cast<int>(i * 7 % 40) - 25);
    for (std::size_t i = 0; i < f.w_scale.size(); ++i)
      f.w_scale[i] = std::ldexp(1.3f, static_cast<int>(i * 5 % 20) - 12);
    f.w_scale[3] = kInf, f.w_scale[40] = kNan, f.w_scale[80] = -kNan, f.w_scale[82] = 1e-42f;
    const Floats y = f.run_on(GetParam());
    const auto expect_rounded = [&]<class T>(T) {
      Values<T> narrow(y.size(), T{-99});
      const LinearArgs args{.x = matrix(as(f.x), m, kK),
                            .x_scale = vector(as(f.x_scale), m),
                            .weight = matrix(as(f.w), kN, kK),
                            .weight_scale = vector(as(f.w_scale), kN),
                            .y = matrix(as(narrow), m, kN)};
      run<LinearPlan>(f.description(DTypeOf<T>::value), GetParam(), args);
      EXPECT_TRUE(same_bits(narrow, Values<T>(y.begin(), y.end()))) << m;
    };
    expect_rounded(Half{});
    expect_rounded(BFloat16{});
  }
}

// A whole dynamic layer with f16 input and output.
struct HalfLayer {
  std::int64_t n, k;
  Bytes w;
  Floats w_scale;
  Values<Half> bias;

  HalfLayer(std::int64_t n_, std::int64_t k_) : n(n_), k(k_), w(full_range(at(n * k), 11)), w_scale(normal(at(n), 12)) {
    for (float& s : w_scale) s = std::abs(s) * 0.01f;
    for (const float b : normal(at(n), 13)) bias.push_back(Half(b));
  }

  LinearDescription description(std::int64_t m) const {
    return {.m = m, .n = n, .k = k, .x = DType::f16, .y = DType::f16, .bias = true};
  }
  LinearArgs args(const Half* x, Half* y, std::int64_t m) const {
    LinearArgs a{.x = matrix(x, m, k),
                 .weight = matrix(as(w), n, k),
                 .weight_scale = vector(as(w_scale), n),
                 .bias = vector(as(bias), n)};
    a.y = matrix(y, m, n);
    return a;
  }
};

TEST_P(EveryArch, ARowOfYHasTheSameBitsAloneAndInABatchOf4096) {
  constexpr std::int64_t kBatch = 4096, kN = 37, kK = 100;
  const HalfLayer layer(kN, kK);
  Values<Half> x, batch(kBatch * kN), alone(kN);
  for (const float v : normal(kBatch * kK, 21)) x.push_back(Half(v));
  run<LinearPlan>(layer.description(kBatch), GetParam(), layer.args(as(x), as(batch), kBatch));
  for (const std::int64_t most : {std::int64_t{1}, kBatch}) {  // a plan for one row, and one row with a plan for many
    LinearDescription d = layer.description(most);
    d.kernel = GetParam();
    const LinearPlan plan = LinearPlan::select(d);
    std::vector<std::byte> workspace(plan.workspace_size());
    for (std::int64_t m = 0; m < kBatch; ++m) {
      plan.run(layer.args(as(x) + m * kK, as(alone), 1), {workspace.data(), workspace.size()});
      ASSERT_EQ(std::memcmp(as(alone), as(batch) + m * kN, kN * sizeof(Half)), 0) << m;
    }
  }
}

TEST_P(EveryArch, TheBitsDoNotDependOnTheNumberOfThreads) {
  constexpr std::int64_t kM = 301, kN = 130, kK = 260;
  const HalfLayer layer(kN, kK);
  Values<Half> x, dy;
  for (const float v : normal(kM * kK, 31)) x.push_back(Half(v));
  for (const float v : normal(kM * kN, 32)) dy.push_back(Half(v));
  const Bytes xq = full_range(kM * kK, 33);
  Floats x_scale = normal(kM, 34);
  for (float& s : x_scale) s = std::abs(s);
  struct Results {
    Values<Half> y{kM * kN}, dx{kM * kK}, db{kN};
    Floats dw = Floats(kN * kK);
  };
  const auto compute = [&](int threads, Product product, std::int64_t block) {
    Results r;
    LinearDescription d = layer.description(kM);
    d.threads = threads;
    run<LinearPlan>(d, GetParam(), layer.args(as(x), as(r.y), kM));
    LinearBackwardDescription b{.m = kM,
                                .n = kN,
                                .k = kK,
                                .dy = DType::f16,
                                .dw_dtype = DType::f32,
                                .dx = product,
                                .dw = product,
                                .db = true,
                                .gradient_block = block,
                                .threads = threads};
    LinearBackwardArgs a{.dy = matrix(as(dy), kM, kN),
                         .weight = matrix(as(layer.w), kN, kK),
                         .weight_scale = vector(as(layer.w_scale), kN)};
    a.x = matrix(as(xq), kM, kK);
    a.x_scale = vector(as(x_scale), kM);
    a.dx = matrix(as(r.dx), kM, kK);
    a.dw = matrix(as(r.dw), kN, kK);
    a.db = vector(as(r.db), kN);
    if (rejection<LinearBackwardPlan>(GetParam(), b).empty()) run<LinearBackwardPlan>(b, GetParam(), a);
    return r;
  };
  for (const auto& [product, block] : kBackwards) {
    const Results one = compute(1, product, block);
    for (const int threads : {2, 7}) {
      const Results many = compute(threads, product, block);
      EXPECT_TRUE(same_bits(one.y, many.y) && same_bits(one.dx, many.dx) && same_bits(one.dw, many.dw) &&
                  same_bits(one.db, many.db))
          << threads << ' ' << name(product) << ' ' << block;
    }
  }
}

// ---- The int8 backward ----

// The fold over blocks of d, quantized with the backward's smallest scale, times the integers beside it.
float folded(const Floats& d, const Bytes& integers, std::size_t block) {
  float t = 0;
  for (std::size_t first = 0; first < d.size(); first += block) {
    const std::size_t end = std::min(first + block, d.size());
    float amax = 0;
    for (std::size_t c = first; c < end; ++c) amax = std::max(amax, std::abs(d[c]));
    const float s = std::max(quotient(amax, 127.0f), 0x1p-79f);
    double acc = 0;  // an integer
    for (std::size_t c = first; c < end; ++c) {
      acc += std::clamp(round_half_even(quotient(d[c], s)), -127.0, 127.0) * integers[c];
    }
    t = std::fma(static_cast<float>(acc), s, t);
  }
  return t;
}

TEST_P(EveryArch, TheBlockedBackwardIsTheContractsFormula) {
  constexpr std::int64_t kM = 333, kN = 290, kK = 33;
  Floats dy = normal(kM * kN, 46);
  for (std::int64_t i = 0; i < kM * kN; ++i) dy[at(i)] *= std::ldexp(1.0f, static_cast<int>(-(i / kN * 7 % 13)));
  const Bytes w = full_range(kN * kK, 47), x = full_range(kM * kK, 48);
  Floats s_w = normal(kN, 49), s_x = normal(kM, 50);
  for (float& s : s_w) s = std::abs(s) + 0.01f;
  for (float& s : s_x) s = std::abs(s) + 0.01f;
  for (const std::int64_t block : {128, 256, 512, 1024}) {
    Floats dx(kM * kK), dw(kN * kK);
    LinearBackwardArgs a{
        .dy = matrix(as(dy), kM, kN), .weight = matrix(as(w), kN, kK), .weight_scale = vector(as(s_w), kN)};
    a.x = matrix(as(x), kM, kK);
    a.x_scale = vector(as(s_x), kM);
    a.dx = matrix(as(dx), kM, kK);
    a.dw = matrix(as(dw), kN, kK);
    LinearBackwardDescription d{.m = kM, .n = kN, .k = kK, .dx = Product::int8, .dw = Product::int8};
    d.gradient_block = block;
    run<LinearBackwardPlan>(d, GetParam(), a);
    const auto column = [](const Bytes& of, std::int64_t k) {
      Bytes out;
      for (std::size_t i = at(k); i < of.size(); i += kK) out.push_back(of[i]);
      return out;
    };
    for (std::int64_t k = 0; k < kK; ++k) {
      for (std::int64_t m = 0; m < kM; ++m) {
        Floats d1;
        for (std::int64_t n = 0; n < kN; ++n) d1.push_back(product(dy[at(m * kN + n)], s_w[at(n)]));
        ASSERT_EQ(dx[at(m * kK + k)], folded(d1, column(w, k), at(block))) << block << ' ' << m << ' ' << k;
      }
      for (std::int64_t n = 0; n < kN; ++n) {
        Floats d2;
        for (std::int64_t m = 0; m < kM; ++m) d2.push_back(product(dy[at(m * kN + n)], s_x[at(m)]));
        ASSERT_EQ(dw[at(n * kK + k)], folded(d2, column(x, k), at(block))) << block << ' ' << n << ' ' << k;
      }
    }
  }
}

TEST_P(EveryArch, TheInt8BackwardIsTheContractsFormula) {
  constexpr std::int64_t kM = 45, kN = 70, kK = 33;
  const Floats dy = normal(kM * kN, 41);
  const Bytes w = full_range(kN * kK, 42), x = full_range(kM * kK, 43);
  Floats s_w = normal(kN, 44), s_x = normal(kM, 45);
  for (float& s : s_w) s = std::abs(s) + 0.01f;
  for (float& s : s_x) s = std::abs(s) + 0.01f;
  Floats dx(kM * kK), dw(kN * kK);
  LinearBackwardArgs a{
      .dy = matrix(as(dy), kM, kN), .weight = matrix(as(w), kN, kK), .weight_scale = vector(as(s_w), kN)};
  a.x = matrix(as(x), kM, kK);
  a.x_scale = vector(as(s_x), kM);
  a.dx = matrix(as(dx), kM, kK);
  a.dw = matrix(as(dw), kN, kK);
  run<LinearBackwardPlan>(
      LinearBackwardDescription{.m = kM, .n = kN, .k = kK, .dx = Product::int8, .dw = Product::int8}, GetParam(), a);

  for (std::int64_t m = 0; m < kM; ++m) {
    Floats d1;
    for (std::int64_t n = 0; n < kN; ++n) d1.push_back(product(dy[at(m * kN + n)], s_w[at(n)]));
    const Quantized q1 = quantize_segment(d1);
    for (std::int64_t k = 0; k < kK; ++k) {
      std::int64_t acc = 0;
      for (std::int64_t n = 0; n < kN; ++n) acc += std::int64_t{q1.q[at(n)]} * w[at(n * kK + k)];
      ASSERT_EQ(dx[at(m * kK + k)], product(q1.s, static_cast<float>(acc))) << m << ' ' << k;
    }
  }
  for (std::int64_t n = 0; n < kN; ++n) {
    Floats d2;
    for (std::int64_t m = 0; m < kM; ++m) d2.push_back(product(dy[at(m * kN + n)], s_x[at(m)]));
    const Quantized q2 = quantize_segment(d2);
    for (std::int64_t k = 0; k < kK; ++k) {
      std::int64_t acc = 0;
      for (std::int64_t m = 0; m < kM; ++m) acc += std::int64_t{q2.q[at(m)]} * x[at(m * kK + k)];
      ASSERT_EQ(dw[at(n * kK + k)], product(q2.s, static_cast<float>(acc))) << n << ' ' << k;
    }
  }
}

// ---- W8A8 in groups: the fold rounds once per group, and once more with the bias ----

TEST_P(EveryArch, WeightsInGroupsFoldInOrder) {
  if (GetParam() == "amx") GTEST_SKIP() << "has no groups";
  constexpr std::int64_t kM = 3, kN = 18, kK = 192, kGroup = 64, kGroups = 3;
  const Bytes x = full_range(kM * kK, 21), w = full_range(kN * kK, 22);
  const Floats s = normal(kN * kGroups, 23), bias = normal(kN, 24, 1000), s_x = {0.5f, 0.001f, 3.0f};
  Floats y(kM * kN);
  LinearDescription d{.m = kM, .n = kN, .k = kK, .x = DType::s8, .bias = true};
  d.weight = {DType::s8, Granularity::group, kGroup};
  if (const std::string why = rejection(GetParam(), d); !why.empty()) GTEST_SKIP() << why;
  run<LinearPlan>(d, GetParam(),
                  LinearArgs{.x = matrix(as(x), kM, kK),
                             .x_scale = vector(as(s_x), kM),
                             .weight = matrix(as(w), kN, kK),
                             .weight_scale = matrix(as(s), kN, kGroups),
                             .bias = vector(as(bias), kN),
                             .y = matrix(as(y), kM, kN)});
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t n = 0; n < kN; ++n) {
      float t = 0;
      for (std::int64_t g = 0; g < kGroups; ++g) {
        int acc = 0;
        for (std::int64_t k = g * kGroup; k < (g + 1) * kGroup; ++k) acc += x[at(m * kK + k)] * w[at(n * kK + k)];
        t = std::fma(static_cast<float>(acc), s[at(n * kGroups + g)], t);
      }
      ASSERT_EQ(y[at(m * kN + n)], std::fma(t, s_x[at(m)], bias[at(n)])) << m << ' ' << n;
    }
  }
}

// ---- W4A16, where the sums are exact whatever their order ----

TEST_P(EveryArch, FourBitWeightsByExactSums) {
  constexpr std::int64_t kM = 60, kN = 9, kK = 96, kGroup = 32, kGroups = 3;
  std::mt19937_64 random(6);
  const auto small = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  Floats x(kM * kK), s(kN * kGroups), bias(kN);
  Values<std::int32_t> q(kN * kK), z(kN * kGroups);
  Values<std::uint8_t> packed(kN * kK / 2);
  for (float& v : x) v = static_cast<float>(small(-64, 64));
  for (float& v : s) v = std::ldexp(1.0f, small(-3, 3));
  for (float& v : bias) v = static_cast<float>(small(-1000, 1000));
  for (auto& v : z) v = small(-8, 7);
  for (auto& v : q) v = small(-8, 7);
  for (std::size_t i = 0; i < q.size(); ++i)
    packed[i / 2] = static_cast<std::uint8_t>(packed[i / 2] | (q[i] & 15) << (i % 2 * 4));
  Floats y(kM * kN);
  LinearDescription d{.m = kM,
                      .n = kN,
                      .k = kK,
                      .activation = Activation::none,
                      .weight = {DType::s4, Granularity::group, kGroup, true},
                      .bias = true};
  LinearArgs a{
      .x = matrix(as(x), kM, kK), .weight = matrix_s4(as(packed), kN, kK), .weight_scale = matrix(as(s), kN, kGroups)};
  a.weight_zero_point = matrix(as(z), kN, kGroups);
  a.bias = vector(as(bias), kN);
  a.y = matrix(as(y), kM, kN);
  const Values<BFloat16> narrow(x.begin(), x.end());
  if (!rejection(GetParam(), d).empty()) {
    d.x = DType::bf16;
    a.x = matrix(as(narrow), kM, kK);
  }
  run<LinearPlan>(d, GetParam(), a);
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t n = 0; n < kN; ++n) {
      std::int64_t eighths = std::int64_t{8} * static_cast<std::int64_t>(bias[at(n)]);
      for (std::int64_t k = 0; k < kK; ++k) {
        const std::size_t g = at(n * kGroups + k / kGroup);
        eighths += static_cast<std::int64_t>(x[at(m * kK + k)]) * (q[at(n * kK + k)] - z[g]) *
                   static_cast<std::int64_t>(s[g] * 8);
      }
      ASSERT_LT(std::abs(eighths), 1 << 24) << "not exact in f32";
      ASSERT_EQ(y[at(m * kN + n)], static_cast<float>(eighths) / 8) << m << ' ' << n;
    }
  }
}

// A kernel may treat bf16 subnormals, and nothing else, as zero. 7 - -8 is the largest integer.
TEST_P(EveryArch, TinyAndInfiniteBf16TimesFourBitWeights) {
  constexpr std::int64_t kN = 18, kK = 65;
  for (const std::int64_t m : {4, 60}) {
    const Floats kinds = {0x1p-133f, 0x1p-126f, kInf, kNan};
    Values<BFloat16> x(at(m * kK), BFloat16(1.0f));
    for (std::int64_t i = 0; i < m; ++i) {
      BFloat16* const row = as(x) + i * kK;
      if (i % 4 < 2) std::fill_n(row, kK, BFloat16(kinds[at(i % 4)]));
      row[i % kK] = BFloat16(kinds[at(i % 4)]);
    }
    const Values<std::uint8_t> w(at(kN * (kK + 1) / 2), 0x77);
    const Floats s(kN, 1);
    const Values<std::int32_t> z(kN, -8);
    Floats y(at(m * kN));
    LinearDescription d{.m = m, .n = kN, .k = kK, .x = DType::bf16, .activation = Activation::none};
    d.weight = {DType::s4, Granularity::group, 0, true};
    LinearArgs a{.x = matrix(as(x), m, kK), .weight = matrix_s4(as(w), kN, kK), .weight_scale = matrix(as(s), kN, 1)};
    a.weight_zero_point = matrix(as(z), kN, 1);
    a.y = matrix(as(y), m, kN);
    run<LinearPlan>(d, GetParam(), a);
    for (std::int64_t i = 0; i < m * kN; ++i) {
      const float value = y[at(i)], kind = kinds[at(i / kN % 4)];
      const float sum = kind * 15 * kK;
      const bool flushed = kind == 0x1p-133f && value == 0;
      EXPECT_TRUE(value == sum || flushed || (std::isnan(value) && std::isnan(sum))) << value << ", not " << sum;
    }
  }
}

// ---- Not finite ----

bool all_nan(const float* begin, std::int64_t count) {
  return std::all_of(begin, begin + count, [](float v) { return std::isnan(v); });
}
bool all_finite(const float* begin, std::int64_t count) {
  return std::all_of(begin, begin + count, [](float v) { return std::isfinite(v); });
}

TEST_P(EveryArch, ABadValueSpoilsItsSegmentAndNothingElse) {
  constexpr std::int64_t kRows = 6, kCols = 40;
  for (const float bad : {kNan, kInf, -kInf}) {
    Floats x = normal(kRows * kCols, 51);
    x[2 * kCols + 7] = bad;
    for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
      Bytes q(x.size(), 99);
      Floats scale(kRows);
      Values<std::int32_t> z(kRows, 99);
      QuantizeArgs args{
          .x = matrix(as(x), kRows, kCols), .q = matrix(as(q), kRows, kCols), .scale = vector(as(scale), kRows)};
      if (mapping == Mapping::affine) args.zero_point = vector(as(z), kRows);
      run<QuantizePlan>(QuantizeDescription{.rows = kRows, .cols = kCols, .mapping = mapping}, GetParam(), args);
      for (std::int64_t r = 0; r < kRows; ++r) {
        EXPECT_EQ(std::isnan(scale[at(r)]), r == 2);
        const bool zero = std::all_of(q.begin() + r * kCols, q.begin() + (r + 1) * kCols, [](int v) { return v == 0; });
        EXPECT_EQ(zero, r == 2);
      }
      EXPECT_EQ(z[2], mapping == Mapping::affine ? 0 : 99);
    }
  }
}

TEST_P(EveryArch, ABadValueReachesTheOutputAsNaN) {
  constexpr std::int64_t kM = 4, kN = 5, kK = 33;
  const Bytes w = full_range(kN * kK, 61), xq = full_range(kM * kK, 62);
  const Floats ones(std::max(kM, kN), 1.0f);
  for (const float bad : {kNan, kInf, -kInf}) {
    Floats x = normal(kM * kK, 63), y(kM * kN);
    x[2 * kK + 32] = bad;
    for (const Activation activation :
         {Activation::dynamic_per_token, Activation::static_per_tensor, Activation::dynamic_per_tensor}) {
      LinearDescription d{.m = kM, .n = kN, .k = kK, .activation = activation, .static_scale = 0.02};
      LinearArgs a{.x = matrix(as(x), kM, kK), .weight = matrix(as(w), kN, kK), .weight_scale = vector(as(ones), kN)};
      a.y = matrix(as(y), kM, kN);
      run<LinearPlan>(d, GetParam(), a);
      for (std::int64_t m = 0; m < kM; ++m) {
        const bool spoilt = m == 2 || activation == Activation::dynamic_per_tensor;
        EXPECT_TRUE(spoilt ? all_nan(as(y) + m * kN, kN) : all_finite(as(y) + m * kN, kN)) << name(activation) << m;
      }
    }
    Floats dy = normal(kM * kN, 64), dx(kM * kK), dw(kN * kK);
    dy[1 * kN + 3] = bad;
    LinearBackwardArgs b{
        .dy = matrix(as(dy), kM, kN), .weight = matrix(as(w), kN, kK), .weight_scale = vector(as(ones), kN)};
    b.x = matrix(as(xq), kM, kK);
    b.x_scale = vector(as(ones), kM);
    b.dx = matrix(as(dx), kM, kK);
    b.dw = matrix(as(dw), kN, kK);
    LinearBackwardDescription backward{.m = kM, .n = kN, .k = kK, .dx = Product::int8, .dw = Product::int8};
    for (const std::int64_t block : {0, 128}) {
      backward.gradient_block = block;
      run<LinearBackwardPlan>(backward, GetParam(), b);
      for (std::int64_t m = 0; m < kM; ++m)
        EXPECT_TRUE(m == 1 ? all_nan(as(dx) + m * kK, kK) : all_finite(as(dx) + m * kK, kK)) << block;
      for (std::int64_t n = 0; n < kN; ++n)
        EXPECT_TRUE(n == 3 ? all_nan(as(dw) + n * kK, kK) : all_finite(as(dw) + n * kK, kK)) << block;
    }
  }
}

TEST_P(EveryArch, ANaNScaleOfAWeightSpoilsItsChannelAndNothingElse) {
  constexpr std::int64_t kM = 3, kN = 4, kK = 8;
  const Forward f{kM, kN, kK, full_range(kM * kK, 71), full_range(kN * kK, 72), Floats(kM, 1), {1, kNan, 1, 1}, {}};
  const Floats y = f.run_on(GetParam());
  for (std::int64_t m = 0; m < kM; ++m) {
    for (std::int64_t n = 0; n < kN; ++n) EXPECT_EQ(std::isnan(y[at(m * kN + n)]), n == 1);
  }
}

// ---- Empty ----

TEST_P(EveryArch, ASumOverNothingIsTheBiasOrZero) {
  EXPECT_EQ((Forward{2, 3, 0, {}, {}, {1, 1}, {1, 1, 1}, {4, 5, 6}}.run_on(GetParam())), (Floats{4, 5, 6, 4, 5, 6}));
  EXPECT_EQ((Forward{2, 3, 0, {}, {}, {1, 1}, {1, 1, 1}, {}}.run_on(GetParam())), Floats(6, 0.0f));
  EXPECT_EQ((Forward{0, 3, 4, {}, Bytes(12), {}, {1, 1, 1}, {}}.run_on(GetParam())), Floats{});
  EXPECT_EQ((Forward{2, 0, 4, Bytes(8), {}, {1, 1}, {}, {}}.run_on(GetParam())), Floats{});

  for (const auto& [product, block] : kBackwards) {
    const Bytes w(12, 1), x(8, 1);
    const Floats ones(4, 1);
    Floats dw(12, -99), db(3, -99), dx(8, -99);
    const float* nothing = nullptr;
    const std::int8_t* no_bytes = nullptr;
    LinearBackwardArgs a{.dy = matrix(nothing, 0, 3), .x = matrix(no_bytes, 0, 4), .x_scale = vector(nothing, 0)};
    a.dw = matrix(as(dw), 3, 4);
    a.db = vector(as(db), 3);
    LinearBackwardDescription of_a{.m = 2, .n = 3, .k = 4, .dx = Product::none, .dw = product, .db = true};
    of_a.gradient_block = block;
    if (!rejection<LinearBackwardPlan>(GetParam(), of_a).empty()) continue;
    run<LinearBackwardPlan>(of_a, GetParam(), a);
    EXPECT_EQ(dw, Floats(12, 0.0f));
    EXPECT_EQ(db, Floats(3, 0.0f));
    LinearBackwardArgs b{
        .dy = matrix(nothing, 2, 0), .weight = matrix(no_bytes, 0, 4), .weight_scale = vector(nothing, 0)};
    b.dx = matrix(as(dx), 2, 4);
    LinearBackwardDescription of_b{.m = 2, .n = 0, .k = 4, .dx = product, .dw = Product::none};
    of_b.gradient_block = block;
    run<LinearBackwardPlan>(of_b, GetParam(), b);
    EXPECT_EQ(dx, Floats(8, 0.0f));
  }
}

}  // namespace
}  // namespace octile
