// The packed weight: its layout, that a plan needs nothing else, and that bad buffers are refused. And int8
// products at edges that random integers do not reach.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "cpu/support/isa.h"
#include "octile/octile.hpp"
#include "reference/oracle.h"

namespace octile {

namespace {

using Random = std::mt19937_64;

struct Free {
  void operator()(std::uint8_t* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::uint8_t[], Free>;

Buffer aligned(std::size_t size) {
  return Buffer(static_cast<std::uint8_t*>(std::aligned_alloc(64, std::max<std::size_t>(size + 63, 64) / 64 * 64)));
}

// A linear layer on random data with everything it needs, in either weight format.
struct Layer {
  LinearDescription d;
  std::vector<float> x, bias, scale, y, expected;
  std::vector<std::int8_t> w;
  std::vector<std::uint8_t> w4;
  std::vector<std::int32_t> z;

  Layer(LinearDescription description, Random random) : d(description) {
    const auto size = [](std::int64_t rows, std::int64_t cols) { return static_cast<std::size_t>(rows * cols); };
    const std::int64_t groups = this->groups();
    std::normal_distribution<float> normal(0, 1);
    x.resize(size(d.m, d.k));
    bias.resize(size(1, d.n));
    scale.resize(size(d.n, groups));
    z.resize(size(d.n, groups));
    w.resize(size(d.n, d.k));
    w4.resize(size(d.n, (d.k + 1) / 2));
    y.resize(size(d.m, d.n), -1);
    expected.resize(y.size());
    for (float& v : x) v = normal(random);
    for (float& v : bias) v = normal(random);
    for (float& v : scale) v = 0.01f + std::abs(normal(random));
    for (auto& v : z) v = static_cast<std::int32_t>(random() % 16) - 8;
    for (auto& v : w) v = static_cast<std::int8_t>(random() % 256);
    for (auto& v : w4) v = static_cast<std::uint8_t>(random() % 256);
  }

  bool s4() const { return d.weight.type == DType::s4; }
  bool in_groups() const { return d.weight.granularity == Granularity::group; }
  std::int64_t groups() const { return in_groups() && d.weight.group > 0 ? d.k / d.weight.group : 1; }
  LinearPackArgs weight() const {
    LinearPackArgs a;
    const bool out_in = d.weight_layout == WeightLayout::out_in;
    a.weight = s4() ? ConstTensor(matrix_s4<const std::uint8_t>(w4.data(), d.n, d.k))
                    : matrix<const std::int8_t>(w.data(), out_in ? d.n : d.k, out_in ? d.k : d.n);
    a.weight_scale =
        in_groups() ? matrix<const float>(scale.data(), d.n, groups()) : vector<const float>(scale.data(), d.n);
    if (d.weight.zero_point) a.weight_zero_point = matrix<const std::int32_t>(z.data(), d.n, groups());
    return a;
  }
  LinearArgs args(float* out) const {
    LinearArgs a;
    a.x = matrix<const float>(x.data(), d.m, d.k);
    a.weight = weight().weight;
    a.weight_scale = weight().weight_scale;
    a.weight_zero_point = weight().weight_zero_point;
    a.bias = vector<const float>(bias.data(), d.n);
    a.y = matrix(out, d.m, d.n);
    return a;
  }
  // With the packed weight alone.
  LinearArgs packed_args(const std::uint8_t* packed, std::size_t size) {
    LinearArgs a = args(y.data());
    a.weight = vector(packed, static_cast<std::int64_t>(size));
    a.weight_scale = a.weight_zero_point = {};
    return a;
  }
};

LinearDescription s8_layer() { return {.m = 5, .n = 35, .k = 131, .packed_weight = true, .bias = true}; }
LinearDescription s4_layer() {
  LinearDescription d = s8_layer();
  d.k = 192;
  d.weight = WeightFormat::s4_group;
  d.weight.group = 64;
  d.weight.zero_point = true;
  return d;
}
LinearDescription s8_group_layer(std::int64_t group) {
  LinearDescription d = s8_layer();
  d.k = 192;
  d.weight = WeightFormat::s8_group;
  d.weight.group = group;
  return d;
}

void run(const LinearPlan& plan, const LinearArgs& args) {
  std::vector<std::byte> workspace(plan.workspace_size());
  plan.run(args, {workspace.data(), workspace.size()});
}

Buffer packed_by(const LinearPlan& plan, const Layer& layer, int before = 0xa5) {
  Buffer packed = aligned(plan.packed_weight_size());
  std::memset(packed.get(), before, plan.packed_weight_size());
  LinearPackArgs args = layer.weight();
  args.packed = vector(packed.get(), static_cast<std::int64_t>(plan.packed_weight_size()));
  plan.pack(args);
  return packed;
}

std::string error_of(const std::function<void()>& body, Status status) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace

// Follows docs/reference/packed-weights.md, not the code.
TEST(PackedWeight, ValuesOfS8LieWhereTheManualSays) {
  const Layer layer(s8_layer(), Random(1));
  const LinearPlan plan = LinearPlan::select(layer.d);
  const Buffer packed = packed_by(plan, layer);
  constexpr std::int64_t kPanels = 3, kDepth = 192;
  ASSERT_EQ(plan.packed_weight_size(), static_cast<std::size_t>(kPanels * 16 * (kDepth + 4 + 4)));
  for (std::int64_t j = 0; j < kPanels * 16; ++j) {
    std::int32_t sum = 0;
    for (std::int64_t c = 0; c < kDepth; ++c) {
      const bool inside = j < layer.d.n && c < layer.d.k;
      const int expected = inside ? layer.w[static_cast<std::size_t>(j * layer.d.k + c)] : 0;
      const std::int64_t at = j / 16 * kDepth * 16 + c / 4 * 64 + j % 16 * 4 + c % 4;
      ASSERT_EQ(static_cast<std::int8_t>(packed[static_cast<std::size_t>(at)]), expected) << j << ' ' << c;
      sum += expected;
    }
    std::int32_t stored_sum;
    float stored_scale;
    const std::uint8_t* sums = packed.get() + kPanels * 16 * kDepth;
    std::memcpy(&stored_sum, sums + 4 * j, 4);
    std::memcpy(&stored_scale, sums + kPanels * 64 + 4 * j, 4);
    EXPECT_EQ(stored_sum, sum);
    EXPECT_EQ(stored_scale, j < layer.d.n ? layer.scale[static_cast<std::size_t>(j)] : 0.0f);
  }
}

TEST(PackedWeight, ValuesOfS8InGroupsLieWhereTheManualSays) {
  for (const std::int64_t group : {32, 64}) {
    const Layer layer(s8_group_layer(group), Random(12));
    const LinearPlan plan = LinearPlan::select(layer.d);
    const Buffer packed = packed_by(plan, layer);
    constexpr std::int64_t kPanels = 3;
    const std::int64_t groups = 192 / group;
    const std::int64_t values = kPanels * 16 * 192;
    const std::int64_t segments = kPanels * groups * 16;
    ASSERT_EQ(plan.packed_weight_size(), static_cast<std::size_t>(values + segments * (4 + 4)));
    for (std::int64_t j = 0; j < kPanels * 16; ++j) {
      for (std::int64_t g = 0; g < groups; ++g) {
        std::int32_t sum = 0;
        for (std::int64_t term = 0; term < group; ++term) {
          const std::int64_t c = g * group + term;
          const int expected = j < layer.d.n ? layer.w[static_cast<std::size_t>(j * layer.d.k + c)] : 0;
          const std::int64_t at = ((j / 16 * groups + g) * (group / 4) + term / 4) * 64 + j % 16 * 4 + term % 4;
          ASSERT_EQ(static_cast<std::int8_t>(packed[static_cast<std::size_t>(at)]), expected) << j << ' ' << c;
          sum += expected;
        }
        const std::int64_t segment = (j / 16 * groups + g) * 16 + j % 16;
        std::int32_t stored_sum;
        float stored_scale;
        std::memcpy(&stored_sum, packed.get() + values + 4 * segment, 4);
        std::memcpy(&stored_scale, packed.get() + values + segments * 4 + 4 * segment, 4);
        EXPECT_EQ(stored_sum, sum);
        EXPECT_EQ(stored_scale, j < layer.d.n ? layer.scale[static_cast<std::size_t>(j * groups + g)] : 0.0f);
      }
    }
  }
}

TEST(PackedWeight, ValuesOfS4LieWhereTheManualSays) {
  const Layer layer(s4_layer(), Random(2));
  const LinearPlan plan = LinearPlan::select(layer.d);
  const Buffer packed = packed_by(plan, layer);
  constexpr std::int64_t kPanels = 3, kGroups = 3, kGroup = 64;
  const std::int64_t values = kPanels * kGroups * kGroup * 8;
  const std::int64_t segments = kPanels * kGroups * 16;
  ASSERT_EQ(plan.packed_weight_size(), static_cast<std::size_t>(values + segments * 4 + (segments + 63) / 64 * 64));
  for (std::int64_t j = 0; j < layer.d.n; ++j) {
    for (std::int64_t c = 0; c < layer.d.k; ++c) {
      const int byte = layer.w4[static_cast<std::size_t>((j * layer.d.k + c) / 2)];
      const int value = ((c % 2 ? byte >> 4 : byte & 15) ^ 8) - 8;
      const std::int64_t term = c % kGroup;
      const std::int64_t at = ((j / 16 * kGroups + c / kGroup) * (kGroup / 8) + term / 8) * 64 + j % 16 * 4 + term % 4;
      const int stored = packed[static_cast<std::size_t>(at)];
      ASSERT_EQ(term % 8 < 4 ? stored & 15 : stored >> 4, value + 8) << j << ' ' << c;
    }
    for (std::int64_t g = 0; g < kGroups; ++g) {
      const std::int64_t segment = (j / 16 * kGroups + g) * 16 + j % 16;
      float scale;
      std::memcpy(&scale, packed.get() + values + 4 * segment, 4);
      EXPECT_EQ(scale, layer.scale[static_cast<std::size_t>(j * kGroups + g)]);
      EXPECT_EQ(packed[static_cast<std::size_t>(values + segments * 4 + segment)],
                8 + layer.z[static_cast<std::size_t>(j * kGroups + g)]);
    }
  }
}

TEST(PackedWeight, DependsOnNothingButTheWeight) {
  for (const LinearDescription& d : {s8_layer(), s8_group_layer(32), s4_layer()}) {
    const Layer layer(d, Random(3));
    const LinearPlan plan = LinearPlan::select(d);
    const Buffer packed = packed_by(plan, layer);
    LinearDescription other = d;
    other.m = 700;
    other.threads = 7;
    other.kernel = "reference";
    const LinearPlan plan_of_others = LinearPlan::select(other);
    ASSERT_EQ(plan_of_others.packed_weight_size(), plan.packed_weight_size());
    const Buffer again = packed_by(plan_of_others, layer, 0x5a);
    EXPECT_EQ(std::memcmp(packed.get(), again.get(), plan.packed_weight_size()), 0);
  }
}

// Of every format, and for every activation, which is no part of the form.
TEST(PackedWeight, OfNoTermsIsEmpty) {
  for (const WeightFormat weight :
       {WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor, WeightFormat::s8_group, WeightFormat::s4_group}) {
    for (const Activation activation : {Activation::none, Activation::dynamic_per_token}) {
      Layer layer(
          {.m = 5, .n = 35, .k = 0, .activation = activation, .weight = weight, .packed_weight = true, .bias = true},
          Random(13));
      const LinearPlan plan = LinearPlan::select(layer.d);
      EXPECT_EQ(plan.packed_weight_size(), 0u) << name(weight) << ", " << name(activation);
      run(plan, layer.packed_args(nullptr, 0));
      for (std::size_t i = 0; i < layer.y.size(); ++i) EXPECT_EQ(layer.y[i], layer.bias[i % 35]);
    }
  }
}

TEST(PackedWeight, InOutIsPackedToTheSameBytes) {
  Layer layer(s8_layer(), Random(4));
  const Buffer packed = packed_by(LinearPlan::select(layer.d), layer);
  Layer transposed = layer;
  transposed.d.weight_layout = WeightLayout::in_out;
  for (std::int64_t j = 0; j < layer.d.n; ++j) {
    for (std::int64_t c = 0; c < layer.d.k; ++c) {
      transposed.w[static_cast<std::size_t>(c * layer.d.n + j)] = layer.w[static_cast<std::size_t>(j * layer.d.k + c)];
    }
  }
  const LinearPlan plan = LinearPlan::select(transposed.d);
  EXPECT_EQ(std::memcmp(packed.get(), packed_by(plan, transposed).get(), plan.packed_weight_size()), 0);
}

TEST(PackedWeight, BadCallsAreRefused) {
  Layer layer(s8_layer(), Random(5));
  const LinearPlan plan = LinearPlan::select(layer.d);
  const std::size_t size = plan.packed_weight_size();
  const Buffer packed = packed_by(plan, layer);
  const Buffer larger = aligned(size + 64);
  const auto pack_to = [&](std::uint8_t* data, std::size_t bytes) {
    LinearPackArgs args = layer.weight();
    args.packed = vector(data, static_cast<std::int64_t>(bytes));
    plan.pack(args);
  };
  EXPECT_NE(error_of([&] { pack_to(larger.get() + 16, size); }, Status::misaligned).find("multiple of 64"),
            std::string::npos);
  EXPECT_NE(error_of([&] { pack_to(larger.get(), size + 64); }, Status::shape_mismatch).find("packed is u8"),
            std::string::npos);
  std::memcpy(larger.get() + 16, packed.get(), size);
  const LinearArgs off_line = layer.packed_args(larger.get() + 16, size);
  EXPECT_NE(error_of([&] { run(plan, off_line); }, Status::misaligned).find("LinearPlan::run: weight lies at"),
            std::string::npos);
  EXPECT_FALSE(plan.can_implement(off_line));
  LinearArgs in_pieces = layer.packed_args(packed.get(), size);
  in_pieces.weight.strides[0] = 0;
  EXPECT_NE(error_of([&] { run(plan, in_pieces); }, Status::shape_mismatch).find("bytes have the stride 1"),
            std::string::npos);
  LinearArgs twice = layer.packed_args(packed.get(), size);
  twice.weight_scale = layer.weight().weight_scale;
  EXPECT_NE(error_of([&] { run(plan, twice); }, Status::shape_mismatch).find("weight_scale"), std::string::npos);
  EXPECT_NE(error_of([&] { run(plan, layer.args(layer.y.data())); }, Status::shape_mismatch).find("expected u8"),
            std::string::npos);
  EXPECT_TRUE(std::all_of(layer.y.begin(), layer.y.end(), [](float v) { return v == -1; })) << "something was written";

  LinearDescription unpacked = layer.d;
  unpacked.packed_weight = false;
  const LinearPlan other = LinearPlan::select(unpacked);
  EXPECT_EQ(other.packed_weight_size(), 0u);
  EXPECT_NE(error_of([&] { other.pack(layer.weight()); }, Status::unsupported).find("packed_weight = false"),
            std::string::npos);
}

// Weights whose four magnitudes that share 16 bits sum to exactly 258, and just above, against activations of 127:
// where the AVX2 row decides between its two loops.
TEST(W8A8, MagnitudesAtTheEdgeOfSixteenBits) {
  for (const cpu::Isa isa : {cpu::Isa::avx2, cpu::Isa::amx}) {
    cpu::isa_ceiling = isa;
    for (const int max : {64, 65, 127, 128}) {
      Layer layer({.m = 33, .n = 40, .k = 200, .packed_weight = true, .bias = true}, Random(6));
      Random random(7);
      for (std::size_t i = 0; i < layer.w.size(); ++i) {
        const int magnitude = i % 4 == 0 ? 258 - 3 * (max < 86 ? max : 43) : max < 86 ? max : i % 2 ? max : 0;
        layer.w[i] = static_cast<std::int8_t>(random() % 2 ? std::min(magnitude, 127) : -magnitude);
      }
      for (float& v : layer.x) v = random() % 2 ? 127.0f : -127.0f;
      const LinearPlan plan = LinearPlan::select(layer.d);
      const Buffer packed = packed_by(plan, layer);
      run(plan, layer.packed_args(packed.get(), plan.packed_weight_size()));
      oracle::linear(layer.d, layer.args(layer.expected.data()));
      ASSERT_EQ(std::memcmp(layer.y.data(), layer.expected.data(), layer.y.size() * sizeof(float)), 0)
          << plan.sku() << ", " << max;
    }
  }
  cpu::isa_ceiling = cpu::Isa::amx;
}

// Bell-shaped, as weights are: the sweep's integers are uniform.
TEST(W8A8, WeightsInABellCurveOnEveryInstructionSet) {
  Layer layer({.m = 70, .n = 90, .k = 1300, .packed_weight = true, .bias = true}, Random(8));
  Random random(9);
  std::normal_distribution<float> normal(0, 30);
  for (auto& v : layer.w) v = static_cast<std::int8_t>(std::clamp(std::rint(normal(random)), -128.0f, 127.0f));
  oracle::linear(layer.d, layer.args(layer.expected.data()));
  for (int i = 0; i < cpu::kIsaCount; ++i) {
    cpu::isa_ceiling = static_cast<cpu::Isa>(i);
    const LinearPlan plan = LinearPlan::select(layer.d);
    const Buffer packed = packed_by(plan, layer);
    run(plan, layer.packed_args(packed.get(), plan.packed_weight_size()));
    EXPECT_EQ(std::memcmp(layer.y.data(), layer.expected.data(), layer.y.size() * sizeof(float)), 0) << plan.sku();
  }
  cpu::isa_ceiling = cpu::Isa::amx;
}

// Values of the whole range on both sides, including -128, which the AVX2 row must split.
TEST(W8A8, WeightsInGroupsOnEveryInstructionSet) {
  for (const std::int64_t group : {0, 32, 64, 128}) {
    for (const bool packed : {true, false}) {
      Layer layer({.m = 37, .n = 90, .k = group == 0 ? 200 : 1280, .packed_weight = packed, .bias = true}, Random(10));
      layer.d.x = DType::s8;
      layer.d.weight = WeightFormat::s8_group;
      layer.d.weight.group = group;
      layer = Layer(layer.d, Random(10));
      Random random(11);
      std::vector<std::int8_t> x(static_cast<std::size_t>(layer.d.m * layer.d.k));
      for (auto& v : x) v = static_cast<std::int8_t>(random() % 256);
      const std::vector<float> x_scale(static_cast<std::size_t>(layer.d.m), 0.0625f);
      const auto given = [&](LinearArgs args) {
        args.x = matrix<const std::int8_t>(x.data(), layer.d.m, layer.d.k);
        args.x_scale = vector<const float>(x_scale.data(), layer.d.m);
        return args;
      };
      oracle::linear(layer.d, given(layer.args(layer.expected.data())));
      for (int i = 0; i < cpu::kIsaCount; ++i) {
        cpu::isa_ceiling = static_cast<cpu::Isa>(i);
        const LinearPlan plan = LinearPlan::select(layer.d);
        const Buffer bytes = packed ? packed_by(plan, layer) : Buffer();
        run(plan,
            given(packed ? layer.packed_args(bytes.get(), plan.packed_weight_size()) : layer.args(layer.y.data())));
        EXPECT_EQ(std::memcmp(layer.y.data(), layer.expected.data(), layer.y.size() * sizeof(float)), 0)
            << plan.sku() << ", group " << group << (packed ? ", packed" : "");
      }
    }
  }
  cpu::isa_ceiling = cpu::Isa::amx;
}

// A packed weight of a little more than a megabyte: some kernels then take one panel at a time. 129 lines are an odd
// number, and 129 panels not a multiple of a tile's.
TEST(W4A8, ARowAloneTimesALargeWeightOnEveryInstructionSet) {
  for (const std::int64_t group : {0, 32, 128}) {
    for (const bool zero_point : {false, true}) {
      LinearDescription d{.m = 1, .n = 2053, .k = group == 0 ? 1032 : 1024, .packed_weight = true, .bias = true};
      d.weight = WeightFormat::s4_group;
      d.weight.group = group;
      d.weight.zero_point = zero_point;
      Layer layer(d, Random(14));
      oracle::linear(d, layer.args(layer.expected.data()));
      for (int i = 0; i < cpu::kIsaCount; ++i) {
        cpu::isa_ceiling = static_cast<cpu::Isa>(i);
        const LinearPlan plan = LinearPlan::select(d);
        const Buffer bytes = packed_by(plan, layer);
        run(plan, layer.packed_args(bytes.get(), plan.packed_weight_size()));
        EXPECT_EQ(std::memcmp(layer.y.data(), layer.expected.data(), layer.y.size() * sizeof(float)), 0)
            << plan.sku() << ", group " << group << (zero_point ? ", zero points" : "");
      }
    }
  }
  cpu::isa_ceiling = cpu::Isa::amx;
}

// Per tensor, per channel and in groups, packed and not, a few rows and many, within the bound of a float sum.
TEST(W8A16, EveryGranularityOnEveryInstructionSet) {
  for (const WeightFormat& weight :
       {WeightFormat::s8_per_tensor, WeightFormat::s8_per_channel, WeightFormat::s8_group}) {
    for (const bool packed : {true, false}) {
      for (const std::int64_t m : {3, 70}) {
        LinearDescription d{.m = m, .n = 90, .k = 384, .activation = Activation::none, .weight = weight};
        d.packed_weight = packed;
        d.bias = true;
        Layer layer(d, Random(13));
        const bool one = weight.granularity == Granularity::tensor;
        const auto with_scale = [&](auto args) {
          if (one) args.weight_scale = vector<const float>(layer.scale.data(), 1);
          return args;
        };
        oracle::linear(d, with_scale(layer.args(layer.expected.data())));
        for (int i = 0; i < cpu::kIsaCount; ++i) {
          cpu::isa_ceiling = static_cast<cpu::Isa>(i);
          const LinearPlan plan = LinearPlan::select(d);
          Buffer bytes = aligned(plan.packed_weight_size());
          LinearArgs args = with_scale(layer.args(layer.y.data()));
          if (packed) {
            LinearPackArgs pack = with_scale(layer.weight());
            pack.packed = vector(bytes.get(), static_cast<std::int64_t>(plan.packed_weight_size()));
            plan.pack(pack);
            args = layer.packed_args(bytes.get(), plan.packed_weight_size());
          }
          run(plan, args);
          for (std::size_t at = 0; at < layer.y.size(); ++at) {
            const std::int64_t row = static_cast<std::int64_t>(at) / d.n, col = static_cast<std::int64_t>(at) % d.n;
            double magnitude = std::abs(layer.bias[static_cast<std::size_t>(col)]);
            for (std::int64_t k = 0; k < d.k; ++k) {
              const float scale =
                  layer.scale[static_cast<std::size_t>(one ? 0 : col * layer.groups() + k * layer.groups() / d.k)];
              magnitude += std::abs(layer.x[static_cast<std::size_t>(row * d.k + k)] * scale *
                                    static_cast<float>(layer.w[static_cast<std::size_t>(col * d.k + k)]));
            }
            ASSERT_NEAR(layer.y[at], layer.expected[at], static_cast<double>(d.k + 4) * 0x1p-24 * magnitude)
                << plan.sku() << ' ' << row << ' ' << col << ", m = " << m << (packed ? ", packed" : "");
          }
        }
      }
    }
  }
  cpu::isa_ceiling = cpu::Isa::amx;
}

}  // namespace octile
