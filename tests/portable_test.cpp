// The portable CPU kernels against the reference ones, on random ragged cases: every granularity, type, orientation and
// rounding, padded leading dimensions, poisoned segments, 1, 2 and 7 threads, every instruction set of this machine.
// Integer paths bit for bit, sums of floats within a derived bound.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <tuple>
#include <vector>

#include "base/access.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/kernel.h"

namespace octile {
namespace {

using Random = std::mt19937_64;

std::int64_t pick(Random& random, std::initializer_list<std::int64_t> values) {
  return values.begin()[random() % values.size()];
}

bool coin(Random& random, int one_in = 2) { return random() % static_cast<unsigned>(one_in) == 0; }

// A tensor that owns its bytes, which all begin as 0xA5: what is written outside the view shows.
struct Buffer {
  std::vector<std::uint64_t> words;
  Tensor view;

  Buffer() = default;
  Buffer(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t padding) {
    std::int64_t leading = cols + padding;
    if (dtype == DType::s4) leading = (leading + 1) / 2 * 2;
    words.assign(static_cast<std::size_t>(rows * leading * bits(dtype) / 64 + 2), 0xA5A5A5A5A5A5A5A5u);
    view = {words.data(), dtype, {}, 2, {rows, cols}, {leading, 1}};
  }
  Buffer(const Buffer& other) { *this = other; }
  Buffer& operator=(const Buffer& other) {
    words = other.words;
    view = other.view;
    if (view.present()) view.data = words.data();
    return *this;
  }

  Tensor as_vector(std::int64_t stride = 1) const {
    return {view.data, view.dtype, {}, 1, {view.rows() * view.cols(), 0}, {stride, 0}};
  }
  Tensor exchanged() const {
    Tensor t = view;
    std::swap(t.shape[0], t.shape[1]);
    std::swap(t.strides[0], t.strides[1]);
    return t;
  }
};

bool is_nan_at(const Buffer& b, std::size_t byte) {
  const auto at = [&](auto type) {
    decltype(type) value;
    std::memcpy(&value, reinterpret_cast<const char*>(b.words.data()) + byte / sizeof(value) * sizeof(value),
                sizeof(value));
    return std::isnan(static_cast<double>(value));
  };
  switch (b.view.dtype) {
    case DType::f16:
      return at(Half{});
    case DType::bf16:
      return at(BFloat16{});
    case DType::f32:
      return at(float{});
    case DType::f64:
      return at(double{});
    default:
      return false;
  }
}

// Equal byte for byte, padding included, except that one NaN is as good as another.
testing::AssertionResult same(const Buffer& a, const Buffer& b) {
  const auto* x = reinterpret_cast<const unsigned char*>(a.words.data());
  const auto* y = reinterpret_cast<const unsigned char*>(b.words.data());
  for (std::size_t i = 0; i < a.words.size() * 8; ++i) {
    if (x[i] != y[i] && !(is_nan_at(a, i) && is_nan_at(b, i))) {
      const auto element = static_cast<std::int64_t>(i) * 8 / bits(a.view.dtype);
      const std::int64_t leading = std::max<std::int64_t>(a.view.strides[0], 1);
      return testing::AssertionFailure() << name(a.view.dtype) << " byte " << i << ", row " << element / leading
                                         << " column " << element % leading << ": " << int{x[i]} << " is not "
                                         << int{y[i]};
    }
  }
  return testing::AssertionSuccess();
}

// Normal values, many exact ties at halves, now and then something extreme or not finite.
double value(Random& random, bool poison) {
  if (poison && coin(random, 400)) {
    // A NaN of any payload, an infinity of either sign.
    const std::uint64_t quiet_nan = 0x7ff8000000000000u | random() >> 13;
    return coin(random) ? std::bit_cast<double>(quiet_nan) : (coin(random) ? 1 : -1) * HUGE_VAL;
  }
  switch (random() % 8) {
    case 0:
      return static_cast<double>(static_cast<int>(random() % 601) - 300) / 2;
    case 1:
      return coin(random) ? 0.0 : -0.0;
    case 2:
      return coin(random, 50) ? 60000.0 : 1e-7 * static_cast<double>(random() % 100);
    default:
      return std::normal_distribution<double>(0, 20)(random);
  }
}

void fill_float(Buffer& b, Random& random, bool poison = false) {
  for (std::int64_t r = 0; r < b.view.rows(); ++r) {
    for (std::int64_t c = 0; c < b.view.cols(); ++c) {
      const double v = value(random, poison);
      b.view.dtype == DType::f64 ? store<double>(b.view, r, c, v) : store<float>(b.view, r, c, static_cast<float>(v));
    }
  }
}

void fill_positive(Buffer& b, Random& random) {
  for (std::int64_t r = 0; r < b.view.rows(); ++r) {
    for (std::int64_t c = 0; c < b.view.cols(); ++c) {
      const double v = coin(random) ? std::ldexp(1.0, static_cast<int>(random() % 8) - 6)
                                    : std::uniform_real_distribution<double>(0.001, 2)(random);
      b.view.dtype == DType::f64 ? store<double>(b.view, r, c, v) : store<float>(b.view, r, c, static_cast<float>(v));
    }
  }
}

void fill_integers(Buffer& b, Random& random, int low, int high) {
  for (std::int64_t r = 0; r < b.view.rows(); ++r) {
    for (std::int64_t c = 0; c < b.view.cols(); ++c) {
      store_integer(b.view, r, c, low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)));
    }
  }
}

std::vector<cpu::Isa> machine_isas() {
  cpu::isa_ceiling = cpu::Isa::amx;
  std::vector<cpu::Isa> isas;
  for (int i = 0; i < cpu::kIsaCount; ++i) {
    if (cpu::machine_has(static_cast<cpu::Isa>(i))) isas.push_back(static_cast<cpu::Isa>(i));
  }
  return isas;
}

// Runs body for every instruction set of this machine and for 1, 2 and 7 threads.
template <class Body>
void for_each_machine(const Body& body) {
  for (cpu::Isa isa : machine_isas()) {
    cpu::isa_ceiling = isa;
    for (int threads : {1, 2, 7}) {
      SCOPED_TRACE(testing::Message() << "isa " << cpu::name(isa) << ", " << threads << " threads");
      body(threads);
      if (testing::Test::HasFailure()) break;
    }
  }
  cpu::isa_ceiling = cpu::Isa::amx;
}

constexpr DType kFloats[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
constexpr DType kIntegers[] = {DType::s8, DType::u8, DType::s4};

struct QuantizeCase {
  QuantizeProblem problem;
  Buffer x, dy, q_in, multiplier, given_scale, given_zero_point;
  Buffer q, q_transposed, scale, zero_point, y;  // outputs, untouched
  bool same_scale_for_all = false;

  QuantizeCase(Random& random, std::int64_t rows, std::int64_t cols) {
    QuantizeProblem& p = problem;
    p.rows = rows + static_cast<std::int64_t>(random() % 3);
    p.cols = cols;
    p.x = kFloats[random() % 4];
    p.q = kIntegers[random() % 3];
    p.granularity = static_cast<Granularity>(random() % 4);
    if (p.granularity == Granularity::group) {
      p.group = 1;
      for (std::int64_t g : {2, 3, 7, 16, 64, 257, 511, 600}) p.group = cols % g == 0 && coin(random) ? g : p.group;
    }
    p.mapping = coin(random) ? Mapping::symmetric : Mapping::affine;
    p.scale = coin(random, 3) ? ScaleSource::given : ScaleSource::dynamic;
    p.rounding = coin(random, 3) ? Rounding::stochastic : Rounding::nearest;
    p.orientation = static_cast<Orientation>(random() % 3);
    p.multiplier = static_cast<Multiplier>(random() % 3);
    p.mask = coin(random) ? Mask::inclusive : Mask::exclusive;
    std::tie(p.q_min, p.q_max) = default_range(p.q, p.mapping);
    if (coin(random, 4)) p.q_max -= 2, p.q_min += coin(random);

    const std::int64_t padding = coin(random) ? 0 : 2 + static_cast<std::int64_t>(random() % 40);
    const DType real = scale_type(p.x);
    const bool poison = coin(random, 3);
    x = Buffer(p.x, rows, cols, padding);
    fill_float(x, random, poison);
    dy = Buffer(p.x, rows, cols, padding / 2);
    fill_float(dy, random, poison);
    q_in = Buffer(p.q, rows, cols, padding);
    const auto [low, high] = range_of(p.q);
    fill_integers(q_in, random, low, high);
    multiplier = Buffer(real, 1, std::max(rows, cols) * 2, 0);
    fill_float(multiplier, random);
    const std::int64_t scale_rows = p.granularity == Granularity::row || p.granularity == Granularity::group ? rows : 1;
    const std::int64_t scale_cols = p.granularity == Granularity::column  ? cols
                                    : p.granularity == Granularity::group ? cols / p.group
                                                                          : 1;
    const std::int64_t scale_padding = p.granularity == Granularity::group ? padding : 0;
    given_scale = Buffer(real, scale_rows, scale_cols, scale_padding);
    fill_positive(given_scale, random);
    given_zero_point = Buffer(DType::s32, scale_rows, scale_cols, scale_padding);
    fill_integers(given_zero_point, random, p.q_min, p.q_max);
    same_scale_for_all = coin(random, 4);

    q = Buffer(p.q, rows, cols, padding);
    q_transposed = Buffer(p.q, cols, rows, padding);
    scale = Buffer(real, scale_rows, scale_cols, scale_padding);
    zero_point = Buffer(DType::s32, scale_rows, scale_cols, scale_padding);
    y = Buffer(p.x, rows, cols, padding);
  }

  Scales scales(const Buffer& b) const {
    Scales s = scales_over(problem, problem.granularity == Granularity::group ? b.view : b.as_vector(), x.view.cols());
    if (same_scale_for_all && (&b == &given_scale || &b == &given_zero_point)) s.row_stride = s.col_stride = 0;
    return s;
  }

  QuantizeOperands operands(const std::string& operation) const {
    const bool affine = problem.mapping == Mapping::affine;
    QuantizeOperands o;
    o.x = x.view;
    o.seed = 12345;
    if (operation == "quantize" || operation == "fake_quantize") {
      const bool fake = operation == "fake_quantize";
      if (problem.scale == ScaleSource::given) {
        o.given_scale = scales(given_scale);
        if (affine) o.given_zero_point = scales(given_zero_point);
      }
      if (problem.scale == ScaleSource::dynamic || !fake) {
        if (!(problem.scale == ScaleSource::given && problem.mask == Mask::inclusive)) o.scale = scales(scale);
        if (affine && problem.scale == ScaleSource::dynamic) o.zero_point = scales(zero_point);
      }
      if (fake) {
        o.y = y.view;
      } else {
        if (problem.multiplier != Multiplier::none) {
          o.multiplier = multiplier.as_vector(problem.mask == Mask::inclusive ? 1 : problem.rows % 3);
        }
        if (problem.orientation != Orientation::transposed) o.q = q.view;
        if (problem.orientation != Orientation::row_major) o.q_transposed = q_transposed.view;
      }
      return o;
    }
    o.given_scale = scales(given_scale);
    if (affine) o.given_zero_point = scales(given_zero_point);
    o.dy = dy.view;
    o.q_in = q_in.view;
    o.y = y.view;
    return o;
  }
};

std::string describe(const QuantizeCase& c) {
  const QuantizeProblem& p = c.problem;
  std::ostringstream out;
  out << "x " << name(p.x) << " (" << c.x.view.rows() << ", " << c.x.view.cols() << "), q " << name(p.q) << ", "
      << name(p.granularity) << ", group " << p.group << ", " << name(p.scale) << ", " << name(p.mapping) << ", "
      << name(p.rounding) << ", " << name(p.orientation) << ", multiplier " << name(p.multiplier) << ", mask "
      << name(p.mask) << ", range " << p.q_min << ".." << p.q_max << (c.same_scale_for_all ? ", one scale" : "");
  return out.str();
}

// Runs the kernel on a workspace of exactly the bytes it asked for, between two guards.
template <class Problem, class Operands>
using Launcher = void (*)(const Problem&, const Operands&, const Launch&);
template <class Problem, class Operands>
void run_guarded(Launcher<Problem, Operands> launcher, const Problem& p, const Operands& o, std::size_t size) {
  std::vector<std::uint64_t> memory(size / 8 + 32, 0xC3C3C3C3C3C3C3C3u);
  auto* begin = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 64 + 63) / 64 * 64);
  launcher(p, o, {{begin, size}, {}});
  for (std::size_t i = 0; i < 64; ++i) {
    ASSERT_EQ(begin[size + i], 0xC3) << "byte " << i << " after the workspace";
    ASSERT_EQ(begin[-1 - static_cast<std::ptrdiff_t>(i)], 0xC3) << "byte " << i << " before the workspace";
  }
}

using QuantizeLauncher = Launcher<QuantizeProblem, QuantizeOperands>;
using GemmLauncher = Launcher<GemmProblem, GemmOperands>;

struct QuantizePair {
  const char* operation;
  QuantizeLauncher portable, reference;
};

void run_portable(const QuantizePair& pair, const QuantizeCase& c) {
  const bool quantizes = pair.portable == cpu::quantize_portable;
  run_guarded(pair.portable, c.problem, c.operands(pair.operation),
              quantizes ? cpu::quantize_portable_workspace(c.problem) : 0);
}

class PortableQuantize : public testing::TestWithParam<QuantizePair> {};

TEST_P(PortableQuantize, GivesTheBitsOfTheReference) {
  const QuantizePair& pair = GetParam();
  Random random(7);
  for (int i = 0; i < 160 && !HasFailure(); ++i) {
    const bool large = i % 20 == 0;  // large enough for several threads
    const std::int64_t rows = large ? pick(random, {3, 130, 300}) : pick(random, {1, 2, 3, 17, 64, 65, 129});
    const std::int64_t cols =
        large ? pick(random, {513, 700, 1200}) : pick(random, {1, 2, 7, 15, 64, 99, 192, 511, 512, 514, 1028});
    QuantizeCase untouched(random, rows, cols);
    if (std::string(pair.operation) == "fake_quantize") untouched.problem.multiplier = Multiplier::none;
    SCOPED_TRACE(testing::Message() << "case " << i << ": " << describe(untouched));
    const QuantizeCase expected = untouched;
    pair.reference(expected.problem, expected.operands(pair.operation), {});
    for_each_machine([&](int threads) {
      QuantizeCase got = untouched;
      got.problem.threads = threads;
      cpu::cache_bytes = i % 3 == 0 ? 0 : 1e9;  // 0: every output is written around the caches
      run_portable(pair, got);
      EXPECT_TRUE(same(got.q, expected.q)) << "q";
      EXPECT_TRUE(same(got.q_transposed, expected.q_transposed)) << "q_transposed";
      EXPECT_TRUE(same(got.scale, expected.scale)) << "scale";
      EXPECT_TRUE(same(got.zero_point, expected.zero_point)) << "zero_point";
      EXPECT_TRUE(same(got.y, expected.y)) << "y";
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, PortableQuantize,
    testing::Values(QuantizePair{"quantize", cpu::quantize_portable, reference::quantize},
                    QuantizePair{"dequantize", cpu::dequantize_portable, reference::dequantize},
                    QuantizePair{"quantize_backward", cpu::quantize_backward_portable, reference::quantize_backward},
                    QuantizePair{"dequantize_backward", cpu::dequantize_backward_portable,
                                 reference::dequantize_backward},
                    QuantizePair{"fake_quantize", cpu::fake_quantize_portable, reference::fake_quantize},
                    QuantizePair{"fake_quantize_backward", cpu::fake_quantize_backward_portable,
                                 reference::fake_quantize_backward}),
    [](const auto& info) { return std::string(info.param.operation); });

// Values a few units in the last place from a tie, scales of every size: products with 1 / s round many of them to the
// other side, and only quotients decide. The rest of a row is harmless, so that a step of it holds one or two of them.
TEST(PortableQuantizeTies, QuotientsDecide) {
  Random random(29);
  constexpr std::int64_t kRows = 64, kCols = 1024;
  for (int i = 0; i < 40 && !HasFailure(); ++i) {
    const bool dense = i % 2 == 0;
    QuantizeProblem p{.rows = kRows, .cols = kCols, .scale = ScaleSource::given, .q_min = -127, .q_max = 127};
    p.granularity = i % 4 < 2 ? Granularity::row : Granularity::column;
    Buffer s(DType::f32, 1, kCols, 0);
    auto* scales = static_cast<float*>(s.view.data);
    const int exponent = static_cast<int>(random() % 280) - 148;  // from the denormal to nearly the largest
    for (std::int64_t c = 0; c < kCols; ++c) {
      scales[c] = static_cast<float>(std::ldexp(1 + static_cast<double>(random() % (1u << 23)) * 0x1p-23,
                                                std::min(exponent, i % 8 == 0 ? 126 : 110)));
    }
    Buffer x(DType::f32, kRows, kCols, 0);
    auto* values = static_cast<float*>(x.view.data);
    for (std::int64_t at = 0; at < kRows * kCols; ++at) {
      const float scale = scales[p.granularity == Granularity::row ? at / kCols : at % kCols];
      const double half = static_cast<double>(random() % 260) - 130 + (dense || coin(random, 90) ? 0.5 : 0.25);
      values[at] = static_cast<float>(half * scale);
      for (std::uint64_t ulps = random() % 3; ulps > 0; --ulps) {
        values[at] = std::nextafter(values[at], coin(random) ? HUGE_VALF : -HUGE_VALF);
      }
      if (!std::isfinite(values[at])) values[at] = 0;
    }
    const std::int64_t along = p.granularity == Granularity::row ? 1 : 0;
    for (const char* operation : {"quantize", "fake_quantize", "quantize_backward"}) {
      const bool fake = std::string(operation) == "fake_quantize";
      const bool backward = std::string(operation) == "quantize_backward";
      Buffer expected(fake || backward ? DType::f32 : DType::s8, kRows, kCols, 0);
      const auto run = [&](Buffer& out, int threads, bool portable) {
        p.threads = threads;
        QuantizeOperands o{.x = x.view, .given_scale = {scales, along, 1 - along, along == 1 ? kCols : 1}};
        (fake || backward ? o.y : o.q) = out.view;
        if (backward) {
          o.dy = x.view;
          portable ? cpu::quantize_backward_portable(p, o, {}) : reference::quantize_backward(p, o, {});
        } else if (fake) {
          portable ? cpu::fake_quantize_portable(p, o, {}) : reference::fake_quantize(p, o, {});
        } else {
          portable ? cpu::quantize_portable(p, o, {}) : reference::quantize(p, o, {});
        }
      };
      run(expected, 1, false);
      for_each_machine([&](int threads) {
        Buffer got(expected.view.dtype, kRows, kCols, 0);
        run(got, threads, true);
        EXPECT_TRUE(same(got, expected)) << operation << ", case " << i << ", exponent " << exponent;
      });
    }
  }
}

// Every f16 and bf16 value goes through the vectorized conversions both ways.
TEST(PortableConversions, AllSixteenBitValues) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    QuantizeProblem p{.rows = 64, .cols = 1024, .x = dtype, .granularity = Granularity::tensor};
    Buffer dy(dtype, 64, 1024, 0);
    auto* values = static_cast<std::uint16_t*>(dy.view.data);
    for (int i = 0; i < 65536; ++i) values[i] = static_cast<std::uint16_t>(i);
    for (float s : {1.0f, 0.7f, 3e-5f, 1e30f}) {
      Buffer expected(dtype, 64, 1024, 0);
      const QuantizeOperands o{.dy = dy.view, .given_scale = {&s, 0, 0, 1024}, .y = expected.view};
      reference::dequantize_backward(p, o, {});
      for_each_machine([&](int threads) {
        p.threads = threads;
        Buffer got(dtype, 64, 1024, 0);
        QuantizeOperands mine = o;
        mine.y = got.view;
        cpu::dequantize_backward_portable(p, mine, {});
        EXPECT_TRUE(same(got, expected)) << name(dtype) << " times " << s;
      });
    }
  }
}

struct GemmCase {
  GemmProblem problem;
  Buffer a, b, a_scale, b_scale, c_scale, zero_point, bias, y;
  std::int64_t m, n, k;
  std::int64_t scale_stride = 1;

  GemmCase(Random& random, Operation operation, std::int64_t m, std::int64_t n, std::int64_t k) : m(m), n(n), k(k) {
    GemmProblem& p = problem;
    const bool w8a8 = operation == Operation::w8a8_gemm;
    const bool w4a16 = operation == Operation::w4a16_gemm;
    const auto major = [&] { return coin(random) ? Major::contraction : Major::outer; };
    p.operation = operation;
    p.m = m + static_cast<std::int64_t>(random() % 3);
    p.n = n;
    p.k = k;
    p.y = kFloats[random() % 4];
    p.a = w8a8 ? DType::s8 : p.y;
    p.scale = scale_type(p.y);
    if (!w8a8 && p.y == DType::f64 && coin(random)) p.y = DType::f32;  // dW in f32 from f64
    p.a_major = operation == Operation::column_sum || w4a16 ? Major::contraction : major();
    p.b_major = w4a16 ? Major::contraction : major();
    p.y_major = w4a16 || operation == Operation::column_sum ? Major::contraction : major();
    p.group = k == 0 ? 1 : k;
    for (std::int64_t g : {32, 64, 128}) p.group = k > 0 && k % g == 0 && coin(random) ? g : p.group;
    p.zero_point = w4a16 && coin(random);
    p.bias = (w8a8 || w4a16) && coin(random);
    scale_stride = coin(random, 4) ? 0 : 1;

    const auto matrix_of = [&](DType dtype, Major major, std::int64_t rows, std::int64_t cols) {
      const std::int64_t padding = coin(random) ? 0 : 2 + static_cast<std::int64_t>(random() % 70);
      return major == Major::contraction ? Buffer(dtype, rows, cols, padding) : Buffer(dtype, cols, rows, padding);
    };
    a = matrix_of(p.a, p.a_major, m, k);
    b = matrix_of(w4a16 ? DType::s4 : DType::s8, p.b_major, n, k);
    y = operation == Operation::column_sum ? Buffer(p.y, 1, n, 0) : matrix_of(p.y, p.y_major, m, n);
    if (w8a8) {
      fill_integers(a, random, -128, coin(random, 3) ? -128 : 127);
    } else {
      fill_float(a, random);
    }
    fill_integers(b, random, w4a16 ? -8 : -128, w4a16 ? 7 : coin(random, 3) ? -128 : 127);
    a_scale = Buffer(p.scale, 1, m, 0);
    b_scale = w4a16 ? Buffer(p.scale, n, k / p.group, 3) : Buffer(p.scale, 1, n, 0);
    c_scale = Buffer(p.scale, 1, k, 0);
    zero_point = Buffer(DType::s32, n, k / p.group, 5);
    bias = Buffer(p.y, 1, n, 0);
    fill_positive(a_scale, random);
    fill_positive(b_scale, random);
    fill_positive(c_scale, random);
    fill_integers(zero_point, random, -8, 7);
    fill_float(bias, random);
    if (w8a8 && m > 0 && coin(random, 4)) {
      store<double>(a_scale.view, 0, 0, std::nan(""));
      if (p.scale == DType::f32) store<float>(a_scale.view, 0, 0, std::nanf(""));
    }
  }

  GemmOperands operands() const {
    const auto oriented = [](const Buffer& x, Major major) {
      return major == Major::contraction ? x.view : x.exchanged();
    };
    GemmOperands o;
    o.a = oriented(a, problem.a_major);
    o.y = problem.operation == Operation::column_sum ? y.as_vector() : oriented(y, problem.y_major);
    if (problem.operation == Operation::column_sum) return o;
    o.b = oriented(b, problem.b_major);
    o.a_scale = a_scale.as_vector(scale_stride);
    o.b_scale = problem.operation == Operation::w4a16_gemm ? b_scale.view : b_scale.as_vector(scale_stride);
    o.c_scale = c_scale.as_vector(scale_stride);
    if (problem.zero_point) o.zero_point = zero_point.view;
    if (problem.bias) o.bias = bias.as_vector();
    return o;
  }
};

std::string describe(const GemmCase& c) {
  const auto text = [](Major major) { return major == Major::contraction ? " by k" : " outer"; };
  std::ostringstream out;
  out << "m " << c.m << " n " << c.n << " k " << c.k << ", a " << name(c.problem.a) << text(c.problem.a_major) << ", b"
      << text(c.problem.b_major) << ", y " << name(c.problem.y) << text(c.problem.y_major) << ", group "
      << c.problem.group << (c.problem.bias ? ", bias" : "") << (c.problem.zero_point ? ", zero point" : "")
      << ", scale " << name(c.problem.scale) << " stride " << c.scale_stride;
  return out.str();
}

GemmCase random_gemm(Random& random, Operation operation, int i) {
  const bool large = i % 20 == 0;
  const auto size = [&] {
    return large ? pick(random, {97, 130, 200}) : pick(random, {1, 2, 3, 4, 5, 6, 10, 13, 33, 64, 65, 70, 130});
  };
  const std::int64_t k =
      large ? pick(random, {257, 512, 700}) : pick(random, {0, 1, 5, 10, 31, 64, 65, 100, 257, 320, 600});
  if (operation == Operation::column_sum) {
    // Its a is (m, n); k stands for n here. No rows sum to 0.
    const std::int64_t cols = large ? 1000 : std::max<std::int64_t>(k, 1);
    return GemmCase(random, operation, i % 9 == 4 ? 0 : size(), cols, cols);
  }
  const std::int64_t m = size();
  return GemmCase(random, operation, m, size(), k);
}

TEST(PortableW8A8, GivesTheBitsOfTheReference) {
  Random random(11);
  for (int i = 0; i < 150 && !HasFailure(); ++i) {
    const GemmCase untouched = random_gemm(random, Operation::w8a8_gemm, i);
    SCOPED_TRACE(testing::Message() << "case " << i << ": " << describe(untouched));
    GemmCase expected = untouched;
    if (expected.k == 0) {  // an empty sum is 0, whatever the scales
      expected.scale_stride = 0;
      for (Buffer* s : {&expected.a_scale, &expected.b_scale}) std::fill(s->words.begin(), s->words.end(), 0);
    }
    reference::w8a8_gemm(expected.problem, expected.operands(), {});
    for_each_machine([&](int threads) {
      GemmCase got = untouched;
      got.problem.threads = threads;
      run_guarded(cpu::w8a8_gemm_portable, got.problem, got.operands(), cpu::w8a8_gemm_portable_workspace(got.problem));
      EXPECT_TRUE(same(got.y, expected.y));
    });
  }
}

// The longest contraction of the most negative values comes within 2^14 of the end of s32.
TEST(PortableW8A8, LongestContraction) {
  Random random(13);
  GemmCase untouched(random, Operation::w8a8_gemm, 5, 3, kMaxContraction);
  std::memset(untouched.a.words.data(), 0x80, untouched.a.words.size() * 8);
  std::memset(untouched.b.words.data(), 0x80, untouched.b.words.size() * 8);
  const GemmCase expected = untouched;
  reference::w8a8_gemm(expected.problem, expected.operands(), {});
  for_each_machine([&](int threads) {
    GemmCase got = untouched;
    got.problem.threads = threads;
    run_guarded(cpu::w8a8_gemm_portable, got.problem, got.operands(), cpu::w8a8_gemm_portable_workspace(got.problem));
    EXPECT_TRUE(same(got.y, expected.y));
  });
}

// More rows than are packed at a time.
TEST(PortableW8A8, ManyRows) {
  Random random(17);
  const GemmCase untouched(random, Operation::w8a8_gemm, 2100, 9, 70);
  const GemmCase expected = untouched;
  reference::w8a8_gemm(expected.problem, expected.operands(), {});
  for_each_machine([&](int threads) {
    GemmCase got = untouched;
    got.problem.threads = threads;
    run_guarded(cpu::w8a8_gemm_portable, got.problem, got.operands(), cpu::w8a8_gemm_portable_workspace(got.problem));
    EXPECT_TRUE(same(got.y, expected.y));
  });
}

// Half a unit in the last place, relative, and half the smallest subnormal.
double epsilon(DType dtype) {
  return dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f32 ? 0x1p-24 : 0x1p-53;
}
double smallest(DType dtype) { return dtype == DType::f16 ? 0x1p-25 : dtype == DType::f64 ? 0x1p-1074 : 0x1p-150; }

// sum_c |a[i, c]| * |w[j, c]|, |bias| included: what a sum's error is measured against.
double magnitude(const GemmCase& c, const GemmOperands& o, std::int64_t i, std::int64_t j) {
  const GemmProblem& p = c.problem;
  double sum = o.bias.present() ? std::fabs(load<double>(o.bias, j)) : 0;
  if (p.operation == Operation::column_sum) {
    for (std::int64_t r = 0; r < c.m; ++r) sum += std::fabs(load<double>(o.a, r, j));
    return sum;
  }
  for (std::int64_t t = 0; t < c.k; ++t) {
    double w = load_integer(o.b, j, t);
    if (p.operation == Operation::w8a16_gemm) {
      w *= load<double>(o.c_scale, t);
    } else {
      w = (w - (p.zero_point ? load_integer(o.zero_point, j, t / p.group) : 0)) *
          load<double>(o.b_scale, j, t / p.group);
    }
    sum += std::fabs(load<double>(o.a, i, t) * w);
  }
  return sum;
}

// A sum of t terms in any order, each term with two roundings (the weight's and the product's), is off by at most
// (t + 1) * u / (1 - (t + 1) * u) of the sum of magnitudes; one addition more for the bias. Then y is rounded, here and
// in the central value, each time by at most epsilon of it. This is the part before that rounding, one per element.
std::vector<double> sum_bounds(const GemmCase& c) {
  const GemmOperands o = c.operands();
  const bool sum_of_rows = c.problem.operation == Operation::column_sum;
  const double terms = static_cast<double>(sum_of_rows ? c.m : c.k) + 2;
  const double u = epsilon(c.problem.scale);
  std::vector<double> bounds;
  for (std::int64_t i = 0; i < (sum_of_rows ? 1 : c.m); ++i) {
    for (std::int64_t j = 0; j < c.n; ++j) bounds.push_back(terms * u / (1 - terms * u) * magnitude(c, o, i, j));
  }
  return bounds;
}

void expect_within(const std::vector<double>& bounds, const GemmCase& got, const GemmCase& expected) {
  const GemmOperands o = got.operands();
  const GemmOperands e = expected.operands();
  const DType dtype = got.problem.y;
  for (std::size_t index = 0; index < bounds.size(); ++index) {
    const std::int64_t i = static_cast<std::int64_t>(index) / got.n;
    const std::int64_t j = static_cast<std::int64_t>(index) % got.n;
    const double y = o.y.rank == 1 ? load<double>(o.y, j) : load<double>(o.y, i, j);
    const double central = e.y.rank == 1 ? load<double>(e.y, j) : load<double>(e.y, i, j);
    if (std::isinf(y) || std::isinf(central)) {
      // An f16 sum beyond 65504: near it, one of the two may round down.
      ASSERT_EQ(dtype, DType::f16);
      ASSERT_GE(std::min(std::fabs(y), std::fabs(central)), 65000) << "row " << i << " column " << j;
      continue;
    }
    const double bound = bounds[index] + epsilon(dtype) * (std::fabs(y) + std::fabs(central)) + 2 * smallest(dtype);
    ASSERT_LE(std::fabs(y - central), bound) << "row " << i << " column " << j << ": " << y << " for " << central;
  }
}

struct FloatGemm {
  Operation operation;
  GemmLauncher portable, reference;
  std::size_t (*workspace)(const GemmProblem&);
};

class PortableFloatGemm : public testing::TestWithParam<FloatGemm> {};

// Within the bound, and with the same bits for 1, 2 and 7 threads.
TEST_P(PortableFloatGemm, StaysWithinTheBound) {
  const FloatGemm& gemm = GetParam();
  Random random(19);
  for (int i = 0; i < 80 && !HasFailure(); ++i) {
    const GemmCase untouched = random_gemm(random, gemm.operation, i);
    SCOPED_TRACE(testing::Message() << "case " << i << ": " << describe(untouched));
    const GemmCase expected = untouched;
    gemm.reference(expected.problem, expected.operands(), {});
    const std::vector<double> bounds = sum_bounds(untouched);
    GemmCase one_thread = untouched;
    for_each_machine([&](int threads) {
      GemmCase got = untouched;
      got.problem.threads = threads;
      run_guarded(gemm.portable, got.problem, got.operands(), gemm.workspace(got.problem));
      if (threads == 1) {
        expect_within(bounds, got, expected);
        one_thread = got;
      } else {
        EXPECT_TRUE(same(got.y, one_thread.y)) << "against one thread";
      }
    });
  }
}

// Row i of y computed alone has the bits it has in the whole.
TEST_P(PortableFloatGemm, RowsDoNotDependOnEachOther) {
  const FloatGemm& gemm = GetParam();
  if (gemm.operation == Operation::column_sum) return;  // it has one row
  Random random(23);
  for (int i = 0; i < 30 && !HasFailure(); ++i) {
    GemmCase whole(random, gemm.operation, pick(random, {7, 200, 400}), pick(random, {10, 40}), 300);
    SCOPED_TRACE(testing::Message() << "case " << i << ": " << describe(whole));
    GemmCase alone = whole;
    run_guarded(gemm.portable, whole.problem, whole.operands(), gemm.workspace(whole.problem));
    for (std::int64_t r : {std::int64_t{0}, whole.m / 2, whole.m - 1}) {
      GemmOperands o = alone.operands();
      const GemmOperands w = whole.operands();
      const std::int64_t bytes = bits(alone.problem.a) / 8;
      o.a.data = static_cast<const char*>(o.a.data) + r * o.a.strides[0] * bytes;
      o.a.shape[0] = o.y.shape[0] = 1;
      run_guarded(gemm.portable, alone.problem, o, gemm.workspace(alone.problem));
      for (std::int64_t j = 0; j < whole.n; ++j) {
        ASSERT_EQ(load<double>(o.y, 0, j), load<double>(w.y, r, j)) << "row " << r << " column " << j;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PortableFloatGemm,
                         testing::Values(FloatGemm{Operation::w8a16_gemm, cpu::w8a16_gemm_portable,
                                                   reference::w8a16_gemm, cpu::w8a16_gemm_portable_workspace},
                                         FloatGemm{Operation::w4a16_gemm, cpu::w4a16_gemm_portable,
                                                   reference::w4a16_gemm, cpu::w4a16_gemm_portable_workspace},
                                         FloatGemm{Operation::column_sum, cpu::column_sum_portable,
                                                   reference::column_sum,
                                                   [](const GemmProblem&) { return std::size_t{0}; }}),
                         [](const auto& info) { return std::string(name(info.param.operation)); });

}  // namespace
}  // namespace octile
