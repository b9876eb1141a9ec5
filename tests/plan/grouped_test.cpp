// GroupedLinearPlan: each expert's rows have the bits of its dense plan, in every format, however many threads share
// the experts; the bytes of its packed weight; and what it refuses. What it computes is in `octile check`'s list.
#include "plan/grouped.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "octile/octile.hpp"
#include "refusal.h"

namespace octile {

namespace {

struct Free {
  void operator()(std::uint8_t* p) const { std::free(p); }
};

struct Experts {
  GroupedLinearDescription d;
  std::vector<std::int32_t> offsets = {1};
  std::vector<float> x, scale, bias, y;
  std::vector<std::uint8_t> w;  // of either type
  std::vector<std::int32_t> z;
  std::unique_ptr<std::uint8_t[], Free> packed;

  // A row before the first expert's and one after the last one's.
  Experts(const GroupedLinearDescription& description, const std::vector<int>& rows) : d(description) {
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal(0, 1);
    for (const int count : rows) offsets.push_back(offsets.back() + count);
    d.experts = static_cast<std::int64_t>(rows.size());
    d.m = offsets.back() + 1;
    x.resize(static_cast<std::size_t>(d.m * d.k));
    scale.resize(static_cast<std::size_t>(d.experts * d.n * groups()));
    bias.resize(static_cast<std::size_t>(d.experts * d.n));
    y.resize(static_cast<std::size_t>(d.m * d.n));
    w.resize(static_cast<std::size_t>(d.experts * d.n * d.k));
    z.resize(scale.size());
    for (float& v : x) v = normal(random);
    for (float& v : bias) v = normal(random);
    for (float& v : scale) v = 0.01f + std::abs(normal(random));
    for (auto& v : w) v = static_cast<std::uint8_t>(random());
    for (auto& v : z) v = static_cast<std::int32_t>(random() % 16) - 8;
  }

  std::int64_t groups() const { return d.weight.granularity == Granularity::group ? d.k / d.weight.group : 1; }

  // For `experts` experts, from e on.
  LinearPackArgs weight(std::int64_t e, std::int64_t experts) const {
    LinearPackArgs a;
    const std::int64_t rows = experts * d.n, first = e * d.n;
    if (d.weight.type == DType::s4) {
      a.weight = matrix_s4<const std::uint8_t>(w.data() + first * d.k / 2, rows, d.k);
    } else {
      a.weight = matrix(reinterpret_cast<const std::int8_t*>(w.data()) + first * d.k, rows, d.k);
    }
    const float* s = scale.data() + first * groups();
    a.weight_scale = groups() > 1 ? matrix(s, rows, groups()) : vector(s, rows);
    if (d.weight.zero_point) a.weight_zero_point = matrix(z.data() + first * groups(), rows, groups());
    return a;
  }

  std::vector<float> run(int threads) {
    GroupedLinearDescription described = d;
    described.threads = threads;
    const auto plan = GroupedLinearPlan::select(described);
    const LinearPackArgs whole = weight(0, d.experts);
    GroupedLinearArgs a{.x = matrix<const float>(x.data(), d.m, d.k)};
    a.offsets = vector<const std::int32_t>(offsets.data(), d.experts + 1);
    a.weight = whole.weight;
    a.weight_scale = whole.weight_scale;
    a.weight_zero_point = whole.weight_zero_point;
    if (d.packed_weight) {
      const std::size_t size = plan.packed_weight_size();
      packed.reset(static_cast<std::uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64)));
      LinearPackArgs into = whole;
      into.packed = vector(packed.get(), static_cast<std::int64_t>(size));
      plan.pack(into);
      a.weight = into.packed;
      a.weight_scale = a.weight_zero_point = {};
    }
    if (d.bias) a.bias = matrix<const float>(bias.data(), d.experts, d.n);
    std::fill(y.begin(), y.end(), -7.0f);
    a.y = matrix(y.data(), d.m, d.n);
    std::vector<std::uint8_t> workspace(plan.workspace_size());
    plan.run(a, {workspace.data(), workspace.size()});
    return y;
  }

  std::vector<float> dense() const {
    std::vector<float> all(y.size(), -7.0f);
    for (std::int64_t e = 0; e < d.experts; ++e) {
      const std::int64_t first = offsets[static_cast<std::size_t>(e)];
      const std::int64_t rows = offsets[static_cast<std::size_t>(e + 1)] - first;
      const auto plan = LinearPlan::select({.m = rows,
                                            .n = d.n,
                                            .k = d.k,
                                            .activation = d.activation,
                                            .static_scale = d.static_scale,
                                            .weight = d.weight,
                                            .bias = d.bias});
      const LinearPackArgs own = weight(e, 1);
      LinearArgs a{.x = matrix<const float>(x.data() + first * d.k, rows, d.k)};
      a.weight = own.weight;
      a.weight_scale = own.weight_scale;
      a.weight_zero_point = own.weight_zero_point;
      if (d.bias) a.bias = vector<const float>(bias.data() + e * d.n, d.n);
      a.y = matrix(all.data() + first * d.n, rows, d.n);
      std::vector<std::uint8_t> workspace(plan.workspace_size());
      plan.run(a, {workspace.data(), workspace.size()});
    }
    return all;
  }
};

TEST(Grouped, RowsHaveTheBitsOfTheDensePlan) {
  WeightFormat zero_points = WeightFormat::s4_group;
  zero_points.zero_point = true;
  const WeightFormat formats[] = {WeightFormat::s8_per_channel, WeightFormat::s8_group, WeightFormat::s4_group,
                                  zero_points};
  for (const WeightFormat& weight : formats) {
    for (const Activation activation :
         {Activation::dynamic_per_token, Activation::static_per_tensor, Activation::none}) {
      for (const bool packed : {false, true}) {
        GroupedLinearDescription d{.n = 150, .k = 256, .activation = activation, .weight = weight};
        d.static_scale = activation == Activation::static_per_tensor ? 0.03 : 0;
        d.packed_weight = packed;
        d.bias = packed;
        Experts experts(d, {0, 1, 2, 140, 3, 17, 1});
        const std::vector<float> expected = experts.dense();
        for (const int threads : {1, 2, 7}) {
          EXPECT_EQ(experts.run(threads), expected) << name(weight) << ' ' << name(activation) << ' ' << threads;
        }
      }
    }
  }
}

TEST(Grouped, PackedWeightIsTheExpertsPackedWeights) {
  GroupedLinearDescription d{.n = 17, .k = 64, .weight = {DType::s4, Granularity::group, 32}, .packed_weight = true};
  Experts experts(d, {1, 1, 1});
  experts.run(1);
  const auto dense = LinearPlan::select({.m = 1, .n = 17, .k = 64, .weight = d.weight, .packed_weight = true});
  const std::size_t size = dense.packed_weight_size();
  std::unique_ptr<std::uint8_t[], Free> one(static_cast<std::uint8_t*>(std::aligned_alloc(64, size)));
  for (std::size_t e = 0; e < 3; ++e) {
    LinearPackArgs own = experts.weight(static_cast<std::int64_t>(e), 1);
    own.packed = vector(one.get(), static_cast<std::int64_t>(size));
    dense.pack(own);
    EXPECT_TRUE(std::equal(one.get(), one.get() + size, experts.packed.get() + e * size)) << e;
  }
}

TEST(Grouped, RefusesDescriptions) {
  const auto select = [](auto change) {
    GroupedLinearDescription d{.experts = 2, .m = 4, .n = 16, .k = 64};
    change(d);
    return refusal([&] { GroupedLinearPlan::select(d); });
  };
  expect_in("no kernel for w8a8_grouped_gemm on cuda",
            select([](auto& d) { d.device = Device::cuda(0), d.x = DType::s8; }));
  expect_in("activation = dynamic_per_tensor", select([](auto& d) { d.activation = Activation::dynamic_per_tensor; }));
  expect_in("experts = -1 is negative", select([](auto& d) { d.experts = -1; }));
  expect_in("clear_rest with slots = 2", select([](auto& d) { d.clear_rest = true, d.slots = 2, d.tokens = 4; }));
  expect_in("slots = -2 is negative", select([](auto& d) { d.slots = -2; }));
  expect_in("GroupedLinearPlan::select: k = 131072", select([](auto& d) { d.k = kMaxContraction + 1; }));
  expect_in("m = 2147483648, expected at most", select([](auto& d) { d.m = std::int64_t{1} << 31; }));
  expect_in("its size in bytes overflows", select([](auto& d) { d.experts = (1ll << 31) - 1, d.n = 1 << 30; }));
  EXPECT_EQ(select([](auto&) {}), "");
}

// Where an expert's dense plan is refused.
TEST(Grouped, NamesItselfWhereAKernelIsMissing) {
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.device != DeviceType::cpu || kernel.reason.empty()) continue;
    if (kernel.operation == "w8a8_gemm") {
      const GroupedLinearDescription d{.experts = 2, .m = 4, .n = 8, .k = 8, .kernel = kernel.name};
      expect_in("GroupedLinearPlan::select: no kernel for w8a8_gemm", refusal([&] { GroupedLinearPlan::select(d); }));
    }
    if (kernel.operation == "w8a16_gemm") {
      const GroupedLinearBackwardDescription d{.experts = 2, .m = 4, .n = 8, .k = 8, .kernel = kernel.name};
      expect_in("GroupedLinearBackwardPlan::select: no kernel for w8a16_gemm",
                refusal([&] { GroupedLinearBackwardPlan::select(d); }));
    }
  }
}

TEST(Grouped, RefusesArguments) {
  Experts experts({.n = 16, .k = 64, .tokens = 3, .gather = true, .slots = 2}, {1, 2});
  const auto plan = GroupedLinearPlan::select(experts.d);
  std::vector<std::int32_t> token = {0, 2, 1, 0, 2}, place(6, 0);
  std::vector<float> router(6, 1.0f), y(3 * 16);
  const LinearPackArgs whole = experts.weight(0, 2);
  GroupedLinearArgs good{.x = matrix<const float>(experts.x.data(), 3, 64)};
  good.offsets = vector<const std::int32_t>(experts.offsets.data(), 3);
  good.token = vector<const std::int32_t>(token.data(), 5);
  good.weight = whole.weight;
  good.weight_scale = whole.weight_scale;
  good.place = matrix<const std::int32_t>(place.data(), 3, 2);
  good.router_weight = matrix<const float>(router.data(), 3, 2);
  good.y = matrix(y.data(), 3, 16);
  ASSERT_TRUE(plan.can_implement(good)) << plan.can_implement(good).reason;
  const auto refused = [&](auto change) {
    GroupedLinearArgs args = good;
    change(args);
    return plan.can_implement(args).reason;
  };
  expect_in("x is f32 (4, 64)", refused([](auto& a) { a.x.shape[0] = 4; }));
  expect_in("offsets", refused([](auto& a) { a.offsets.shape[0] = 2; }));
  expect_in("place is", refused([](auto& a) { a.place.shape[0] = 4; }));
  expect_in("router_weight", refused([](auto& a) { a.router_weight = {}; }));
  expect_in("y is", refused([](auto& a) { a.y.shape[0] = 2; }));
  token[3] = 3;
  expect_in("token[3] = 3 is outside 0..2", refused([](auto&) {}));
  token[3] = 0;
  experts.offsets[1] = 5;
  expect_in("offsets[2] = 4, expected 5 to 5", refused([](auto&) {}));
  experts.offsets = {0, 2, 6};
  expect_in("offsets[2] = 6, expected 2 to 5", refused([](auto&) {}));
  experts.offsets = {-1, 2, 3};
  expect_in("offsets[0] = -1, expected 0 to 5", refused([](auto&) {}));
}

// Which experts all threads share, and which one thread takes.
TEST(Grouped, SharesOutExperts) {
  const auto shared = [](const std::vector<std::int32_t>& rows, int threads) {
    std::vector<std::int32_t> offsets = {0}, order(rows.size());
    for (const std::int32_t count : rows) offsets.push_back(offsets.back() + count);
    const ConstTensor view = vector<const std::int32_t>(offsets.data(), static_cast<std::int64_t>(offsets.size()));
    const Schedule schedule(view, {threads, 4096, 4096}, order.data());
    std::map<std::int64_t, std::string> how;
    std::mutex mutex;
    schedule.run([&](std::int64_t e) { how[e] += 'a'; },
                 [&](std::int64_t e, int) {
                   const std::lock_guard lock(mutex);
                   how[e] += '1';
                 });
    std::string text;
    for (std::size_t e = 0; e < rows.size(); ++e)
      text += how.contains(static_cast<std::int64_t>(e)) ? how[static_cast<std::int64_t>(e)] : "-";
    return text;
  };
  EXPECT_EQ(shared({1, 0, 1, 1, 1}, 2), "1-111");
  EXPECT_EQ(shared({1, 1, 1}, 2), "a11");        // an odd one
  EXPECT_EQ(shared({1, 1}, 4), "aa");            // fewer than threads
  EXPECT_EQ(shared({1, 300, 1}, 2), "1a1");      // many rows
  EXPECT_EQ(shared({100, 8, 4, 4}, 2), "aa11");  // more than half of the rows; then an odd one
  EXPECT_EQ(shared({5, 5}, 1), "aa");
  EXPECT_EQ(shared({0, 0}, 2), "--");
}

}  // namespace

}  // namespace octile
