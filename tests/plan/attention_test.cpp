// Attention of one query token: every instruction set against the scalar version, over shapes, types, strides and
// masks; what its bits do not depend on; and what it refuses.
#include "plan/attention.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/attention/exp2.h"
#include "cpu/support/isa.h"
#include "octile/octile.h"
#include "octile/tensor.h"

namespace octile {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

struct Sizes {
  std::int64_t batch, kv_heads, group, positions, size;
};

enum class Shown { all, beginning, some, none_of_one };

// Of floats in memory; T is what holds them.
template <class T>
struct Problem {
  Sizes s;
  std::int64_t padding = 3, heads = s.kv_heads * s.group;
  std::vector<T> query, key, value, y, expected;
  std::vector<std::uint8_t> mask;  // twice as long as needed: its stride is 2
  std::int64_t query_shape[3] = {s.batch, heads, s.size}, query_strides[3] = {heads * s.size, s.size, 1};
  std::int64_t cache_shape[4] = {s.batch, s.kv_heads, s.positions, s.size};
  // (batch, positions, heads, size + padding)
  std::int64_t cache_strides[4] = {s.positions * s.kv_heads * (s.size + padding), s.size + padding,
                                   s.kv_heads*(s.size + padding), 1};
  std::int64_t mask_shape[2] = {s.batch, s.positions}, mask_strides[2] = {2 * s.positions, 2};
  octile_tensor tensors[5];
  octile_attend_one_query_args args{};

  explicit Problem(Sizes sizes, Shown shown = Shown::some) : s(sizes) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<T>& values, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) values.push_back(T(normal(random)));
    };
    fill(query, s.batch * heads * s.size);
    fill(key, s.batch * cache_strides[0]);
    fill(value, s.batch * cache_strides[0]);
    y.assign(query.size(), T(-7.0f));
    expected = y;
    mask.assign(static_cast<std::size_t>(2 * s.batch * s.positions), 0);
    for (std::int64_t i = 0; i < s.batch * s.positions; ++i) {
      const std::int64_t position = i % s.positions;
      const bool seen = shown == Shown::beginning ? position < 2 + i / s.positions * 40 : random() % 3 == 0;
      mask[static_cast<std::size_t>(2 * i)] = seen && !(shown == Shown::none_of_one && i < s.positions) ? 5 : 0;
    }
    const octile_element type = std::is_same_v<T, float>  ? octile_element{OCTILE_CODE_FLOAT, 32, 1}
                                : std::is_same_v<T, Half> ? octile_element{OCTILE_CODE_FLOAT, 16, 1}
                                                          : octile_element{OCTILE_CODE_BFLOAT, 16, 1};
    constexpr octile_device kCpu = {OCTILE_DEVICE_CPU, 0};
    tensors[0] = {query.data(), kCpu, 3, type, query_shape, query_strides, 0};
    tensors[1] = {key.data(), kCpu, 4, type, cache_shape, cache_strides, 0};
    tensors[2] = {value.data(), kCpu, 4, type, cache_shape, cache_strides, 0};
    tensors[3] = {mask.data(), kCpu, 2, {OCTILE_CODE_UINT, 8, 1}, mask_shape, mask_strides, 0};
    tensors[4] = {y.data(), kCpu, 3, type, query_shape, nullptr, 0};
    args = {sizeof args,
            &tensors[0],
            &tensors[1],
            &tensors[2],
            &tensors[3],
            &tensors[4],
            1 / std::sqrt(static_cast<double>(s.size)),
            1,
            0};
    if (shown == Shown::all) args.mask = nullptr;
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  std::size_t at(std::int64_t b, std::int64_t head, std::int64_t position) const {
    return static_cast<std::size_t>(b * cache_strides[0] + head * cache_strides[1] + position * cache_strides[2]);
  }
  bool visible(std::int64_t b, std::int64_t position) const {
    return !args.mask || mask[static_cast<std::size_t>(2 * (b * s.positions + position))] != 0;
  }

  const std::vector<T>& run() {
    EXPECT_EQ(octile_attend_one_query(&args), OCTILE_OK) << octile_last_error();
    return y;
  }

  const std::vector<T>& twin() {
    const auto cache = [&](const std::vector<T>& data) {
      return OneQuery::Cache{data.data(), cache_strides[0], cache_strides[1], cache_strides[2]};
    };
    reference::attend_one_query({DTypeOf<T>::value, s.batch, s.kv_heads, s.group, s.positions, s.size, query.data(),
                                 query_strides[0], query_strides[1], cache(key), cache(value),
                                 args.mask ? mask.data() : nullptr, mask_strides[0], mask_strides[1], expected.data(),
                                 static_cast<float>(args.scale), 1});
    return expected;
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void on_every_isa(const std::function<void()>& test) {
  for (int i = 0; i < cpu::kIsaCount; ++i) {
    if (!cpu::machine_has(static_cast<cpu::Isa>(i))) continue;
    cpu::isa_ceiling = static_cast<cpu::Isa>(i);
    test();
  }
  cpu::isa_ceiling = cpu::Isa::amx;
}

template <class T>
class Attention : public testing::Test {};
using Types = testing::Types<float, BFloat16, Half>;
TYPED_TEST_SUITE(Attention, Types);

TYPED_TEST(Attention, OfEveryShapeIsItsTwins) {
  constexpr Sizes kSizes[] = {{1, 4, 3, 160, 128}, {2, 1, 1, 300, 64}, {1, 2, 2, 70, 80},   {2, 2, 4, 33, 96},
                              {1, 1, 5, 600, 256}, {1, 2, 8, 129, 20}, {3, 1, 71, 130, 64}, {1, 1, 7, 1, 1},
                              {1, 3, 6, 257, 37},  {4, 2, 2, 128, 16}};
  constexpr double kStep = std::is_same_v<TypeParam, float> ? 0x1p-20
                           : std::is_same_v<TypeParam, Half>
                               ? 0x1p-11
                               : 0x1p-8;  // half a unit in the last place, or in that of some sums
  for (const Sizes& s : kSizes) {
    for (const Shown shown : {Shown::all, Shown::beginning, Shown::some, Shown::none_of_one}) {
      Problem<TypeParam> p(s, shown);
      p.twin();
      on_every_isa([&] {
        p.run();
        for (std::size_t i = 0; i < p.y.size(); ++i) {
          const auto wanted = static_cast<double>(static_cast<float>(p.expected[i]));
          ASSERT_NEAR(static_cast<float>(p.y[i]), wanted, kStep * (std::abs(wanted) + 1))
              << i << " of " << s.positions << " positions, size " << s.size << ", group " << s.group << ", "
              << cpu::name(cpu::isa());
        }
        if (shown == Shown::none_of_one) {
          const std::size_t first = p.y.size() / static_cast<std::size_t>(s.batch);
          for (std::size_t i = 0; i < first; ++i) ASSERT_EQ(static_cast<float>(p.y[i]), 0.0f);
        }
      });
    }
  }
}

TYPED_TEST(Attention, DoesNotReadHiddenPositions) {
  Problem<TypeParam> p({2, 2, 3, 300, 40});
  on_every_isa([&] {
    Problem<TypeParam> spoiled({2, 2, 3, 300, 40});
    for (std::int64_t i = 0; i < 2 * 2 * 300; ++i) {
      const std::int64_t b = i / 600, head = i / 300 % 2, position = i % 300;
      if (spoiled.visible(b, position)) continue;
      for (std::size_t c = 0; c < 40; ++c) {
        spoiled.key[spoiled.at(b, head, position) + c] = TypeParam(c % 2 ? kNaN : kInfinity);
        spoiled.value[spoiled.at(b, head, position) + c] = TypeParam(c % 2 ? kInfinity : kNaN);
      }
    }
    EXPECT_TRUE(same_bits(spoiled.run(), p.run())) << cpu::name(cpu::isa());
  });
}

TYPED_TEST(Attention, KeepsNaN) {
  on_every_isa([] {
    Problem<TypeParam> of_values({1, 2, 2, 300, 40}, Shown::all), of_keys({1, 2, 2, 300, 40}, Shown::all);
    of_values.value[of_values.at(0, 1, 200) + 3] = TypeParam(kNaN);
    of_keys.key[of_keys.at(0, 1, 299) + 39] = TypeParam(kNaN);
    of_values.run();
    of_keys.run();
    for (std::size_t i = 0; i < 160; ++i) {
      EXPECT_EQ(std::isnan(static_cast<float>(of_values.y[i])), i >= 80 && i % 40 == 3) << i;
      EXPECT_EQ(std::isnan(static_cast<float>(of_keys.y[i])), i >= 80) << i;
    }
  });
}

TYPED_TEST(Attention, HasTheSameBitsOnAnyThreadsAndAlone) {
  Problem<TypeParam> p({3, 2, 3, 1100, 64});
  const std::vector<TypeParam> one = p.run();
  for (const int threads : {2, 3, 7, 0}) {
    p.args.threads = threads;
    std::fill(p.y.begin(), p.y.end(), TypeParam(-7.0f));
    EXPECT_TRUE(same_bits(p.run(), one)) << threads << " threads";
  }
  const std::size_t count = one.size() / 3;
  std::vector<TypeParam> alone(count);
  for (std::size_t b = 0; b < 3; ++b) {
    p.query_shape[0] = p.cache_shape[0] = p.mask_shape[0] = 1;
    p.tensors[0].data = p.query.data() + b * count;
    p.tensors[1].data = p.key.data() + p.at(static_cast<std::int64_t>(b), 0, 0);
    p.tensors[2].data = p.value.data() + p.at(static_cast<std::int64_t>(b), 0, 0);
    p.tensors[3].data = p.mask.data() + b * 2200;
    p.tensors[4].data = alone.data();
    p.run();
    EXPECT_EQ(std::memcmp(alone.data(), one.data() + b * count, count * sizeof(TypeParam)), 0) << b;
  }
}

// The strides of what is empty say nothing: array libraries give it any.
TYPED_TEST(Attention, OfNothingHasAnyStrides) {
  Problem<TypeParam> no_positions({2, 2, 3, 0, 20}, Shown::all), no_batch({0, 2, 3, 5, 20}, Shown::all);
  std::fill(std::begin(no_positions.cache_strides), std::end(no_positions.cache_strides), 0);
  for (const TypeParam v : no_positions.run()) EXPECT_EQ(static_cast<float>(v), 0.0f);
  std::fill(std::begin(no_batch.cache_strides), std::end(no_batch.cache_strides), 0);
  std::fill(std::begin(no_batch.query_strides), std::end(no_batch.query_strides), 0);
  no_batch.tensors[4].strides = no_batch.query_strides;
  no_batch.run();
}

// Scores so far apart that most weights are 0, and so large that their exp would overflow.
TYPED_TEST(Attention, OfLargeScores) {
  Problem<TypeParam> p({1, 1, 2, 200, 64});
  p.args.scale = 200;
  p.twin();
  on_every_isa([&] {
    p.run();
    for (std::size_t i = 0; i < p.y.size(); ++i) {
      EXPECT_NEAR(static_cast<float>(p.y[i]), static_cast<float>(p.expected[i]), 2e-2) << i;
    }
  });
}

TEST(AttentionWithoutWeight, KeepsWhatIsNotANumber) {
  // The scores of these positions are -inf: all, those of a split of 128, and some that begin within one.
  for (const auto& range : {std::pair{0, 300}, {128, 256}, {250, 300}}) {
    Problem<float> p({1, 1, 3, 300, 20}, Shown::all);
    for (std::size_t h = 0; h < 3; ++h) p.query[h * 20] = 1;
    for (int i = range.first; i < range.second; ++i) p.key[p.at(0, 0, i)] = -kInfinity;
    p.twin();
    on_every_isa([&] {
      p.run();
      for (std::size_t i = 0; i < p.y.size(); ++i) EXPECT_NEAR(p.y[i], p.expected[i], 1e-5) << range.first << ' ' << i;
    });
    p.value[p.at(0, 0, 255) + 3] = kNaN;
    p.twin();
    on_every_isa([&] {
      p.run();
      for (std::size_t i = 0; i < p.y.size(); ++i) {
        EXPECT_EQ(std::isnan(p.y[i]), i % 20 == 3) << range.first << ' ' << i;
        EXPECT_EQ(std::isnan(p.expected[i]), i % 20 == 3) << range.first << ' ' << i;
      }
    });
  }
}

TEST(AttentionsExp, IsWithinUnitsInTheLastPlace) {
  typedef float Four __attribute__((vector_size(16)));
  double max = 0;
  for (float x = -126; x <= 0; x += 0x1p-10f) {
    Four y = Four{} + x;
    cpu::exp2_below_0(y);
    const double wanted = std::exp2(static_cast<double>(x));
    max = std::max(max, std::abs(y[0] - wanted) / std::ldexp(0x1p-23, std::ilogb(wanted)));
  }
  EXPECT_LE(max, 1.25);
  Four y = {0, -kInfinity, -126.5f, kNaN};
  cpu::exp2_below_0(y);
  EXPECT_EQ(y[0], 1);
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[2], 0);
  EXPECT_TRUE(std::isnan(y[3]));
}

TEST(BadAttention, IsRefused) {
  using P = Problem<float>;
  struct Case {
    octile_status status;
    const char* text;
    std::function<void(P&)> spoil;
  };
  static std::int64_t other[4];  // a shape or strides of its own
  const auto changed = [](const std::int64_t* from, int rank, int at, std::int64_t to) {
    std::copy_n(from, rank, other);
    other[at] = to;
    return other;
  };
  static constexpr std::int64_t zeros[4] = {};
  const std::int64_t huge = std::int64_t{1} << 62;
  const std::vector<Case> cases = {
      {OCTILE_INVALID_ARGUMENT, "struct_size = 3", [](P& p) { p.args.struct_size = 3; }},
      {OCTILE_INVALID_ARGUMENT, "reserved = 1", [](P& p) { p.args.reserved = 1; }},
      {OCTILE_INVALID_ARGUMENT, "threads = -1", [](P& p) { p.args.threads = -1; }},
      {OCTILE_INVALID_ARGUMENT, "query is NULL", [](P& p) { p.args.query = nullptr; }},
      {OCTILE_INVALID_ARGUMENT, "y is NULL", [](P& p) { p.args.y = nullptr; }},
      {OCTILE_INVALID_ARGUMENT, "the data of key is NULL", [](P& p) { p.tensors[1].data = nullptr; }},
      {OCTILE_INVALID_ARGUMENT, "the shape of value is NULL", [](P& p) { p.tensors[2].shape = nullptr; }},
      {OCTILE_INVALID_ARGUMENT, "mask has dtype code 6", [](P& p) { p.tensors[3].dtype.code = 6; }},
      {OCTILE_SHAPE_MISMATCH, "query has ndim = 4, expected 3", [](P& p) { p.tensors[0].ndim = 4; }},
      {OCTILE_SHAPE_MISMATCH, "mask has ndim = 1, expected 2", [](P& p) { p.tensors[3].ndim = 1; }},
      {OCTILE_SHAPE_MISMATCH, "value is bf16 (2, 2, 9, 8)",
       [](P& p) {
         p.tensors[2].dtype = {OCTILE_CODE_BFLOAT, 16, 1};
       }},
      {OCTILE_SHAPE_MISMATCH, "mask is s8 (2, 9)", [](P& p) { p.tensors[3].dtype.code = OCTILE_CODE_INT; }},
      {OCTILE_SHAPE_MISMATCH, "expected f32 (2, 2, 9, 8) on cpu",
       [&](P& p) { p.tensors[2].shape = changed(p.cache_shape, 4, 2, 8); }},
      {OCTILE_SHAPE_MISMATCH, "expected f32 (3, 2, 9, 8)",
       [&](P& p) { p.tensors[0].shape = p.tensors[4].shape = changed(p.query_shape, 3, 0, 3); }},
      {OCTILE_SHAPE_MISMATCH, "expected u8 (2, 9)", [&](P& p) { p.tensors[3].shape = changed(p.mask_shape, 2, 0, 3); }},
      {OCTILE_SHAPE_MISMATCH, "do not divide the 5 of query",
       [&](P& p) { p.tensors[0].shape = p.tensors[4].shape = changed(p.query_shape, 3, 1, 5); }},
      {OCTILE_SHAPE_MISMATCH, "y is f32 (2, 6, 8) strides (48, 9, 1) on cpu, expected a compact one",
       [&](P& p) { p.tensors[4].strides = changed(p.query_strides, 3, 1, 9); }},
      {OCTILE_SHAPE_MISMATCH, "key is f32 (2, 2, 9, 8) strides (198, 11, 22, 2) on cpu, not contiguous",
       [&](P& p) { p.tensors[1].strides = changed(p.cache_strides, 4, 3, 2); }},
      {OCTILE_SHAPE_MISMATCH, "negative stride",
       [&](P& p) { p.tensors[1].strides = changed(p.cache_strides, 4, 2, -1); }},
      {OCTILE_INVALID_ARGUMENT, "(2, 2, -9, 8)", [&](P& p) { p.tensors[1].shape = changed(p.cache_shape, 4, 2, -9); }},
      {OCTILE_INVALID_ARGUMENT, "overflows",
       [&](P& p) { p.tensors[1].strides = changed(p.cache_strides, 4, 2, huge); }},
      {OCTILE_SHAPE_MISMATCH, "on cuda:0, expected", [](P& p) { p.tensors[1].device.type = OCTILE_DEVICE_CUDA; }},
      {OCTILE_MISALIGNED, "no multiple of 4", [](P& p) { p.tensors[2].byte_offset = 2; }},
      {OCTILE_SHAPE_MISMATCH, "key is f32 (2, 2, 9, 8) strides (198, 11, 22, 1) on cpu:7, expected",
       [](P& p) { p.tensors[1].device.id = 7; }},
      {OCTILE_INVALID_ARGUMENT, ", f32 (2, 6, 8) strides (48, 8, 1) on cpu, overlaps query at ",
       [](P& p) { p.tensors[4].data = p.query.data(); }},
      {OCTILE_INVALID_ARGUMENT, ", f32 (2, 2, 9, 8) strides (198, 11, 22, 1) on cpu; see docs/how-to/errors.md",
       [](P& p) { p.tensors[4].data = p.value.data() + 5; }},
      {OCTILE_INVALID_ARGUMENT, "scale = nan, expected -2^127 to 2^127", [](P& p) { p.args.scale = std::nan(""); }},
      {OCTILE_INVALID_ARGUMENT, "scale = 2e+38, expected -2^127", [](P& p) { p.args.scale = 2e38; }},
      {OCTILE_INVALID_ARGUMENT, "scale = -1e+300, expected -2^127", [](P& p) { p.args.scale = -1e300; }},
      {OCTILE_UNSUPPORTED, "expected a size of 1 to 256",
       [&](P& p) { p.tensors[0].shape = p.tensors[4].shape = changed(p.query_shape, 3, 2, 257); }},
      {OCTILE_UNSUPPORTED, "fewer than 2^31 positions",
       [&](P& p) {
         p.tensors[1].shape = changed(p.cache_shape, 4, 2, std::int64_t{1} << 31);
         p.tensors[1].strides = zeros;
       }},
      {OCTILE_UNSUPPORTED, "expected f16, bf16 or f32",
       [](P& p) {
         p.tensors[0].dtype = {OCTILE_CODE_FLOAT, 64, 1};
       }},
  };
  for (const Case& c : cases) {
    P p({2, 2, 3, 9, 8});
    const std::vector<float> before = p.y;
    c.spoil(p);
    EXPECT_EQ(octile_attend_one_query(&p.args), c.status) << octile_last_error();
    EXPECT_NE(std::string(octile_last_error()).find(c.text), std::string::npos)
        << octile_last_error() << "\n  lacks: " << c.text;
    EXPECT_NE(std::string(octile_last_error()).find("octile_attend_one_query: "), std::string::npos);
    EXPECT_EQ(p.y, before);
  }
  EXPECT_EQ(octile_attend_one_query(nullptr), OCTILE_INVALID_ARGUMENT);
}

TEST(EmptyAttention, IsZerosOrNothing) {
  Problem<float> p({2, 2, 3, 9, 8});
  p.cache_shape[2] = p.mask_shape[1] = 0;
  for (const float y : p.run()) EXPECT_EQ(y, 0);
  p.query_shape[0] = p.cache_shape[0] = p.mask_shape[0] = 0;
  p.y.assign(p.y.size(), 3);
  for (const float y : p.run()) EXPECT_EQ(y, 3);
  Problem<float> no_heads({2, 2, 3, 9, 8});
  no_heads.query_shape[1] = 0;
  no_heads.tensors[4].data = no_heads.key.data();  // any address will do: the tensor is empty
  no_heads.run();
}

TEST(AttentionsRounding, IsItsOwn) {
  Problem<float> p({2, 2, 3, 9, 80});
  p.args.scale = 1 / std::sqrt(80.0);
  const std::vector<float> nearest = p.run();
  std::fesetround(FE_UPWARD);
  std::feclearexcept(FE_ALL_EXCEPT);
  const std::vector<float> upward = p.run();
  const int flags = std::fetestexcept(FE_ALL_EXCEPT), mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(upward, nearest);
  EXPECT_EQ(flags, 0);
  EXPECT_EQ(mode, FE_UPWARD);
}

}  // namespace
}  // namespace octile
