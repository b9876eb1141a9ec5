// GroupedLinearBackwardPlan: the gradients have the bits of a loop of dense plans over the experts, in every product,
// however many threads share the experts; and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "octile/octile.hpp"
#include "refusal.h"

namespace octile {

namespace {

using Description = GroupedLinearBackwardDescription;

// dW is f32 unless T is double.
template <class T>
struct Experts {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  struct Gradients {
    std::vector<Real> dx, dw, db;  // dx and db widened
    bool operator==(const Gradients&) const = default;
  };

  Description d;
  std::vector<std::int32_t> offsets = {1};
  std::vector<T> dy, dx, db;
  std::vector<Real> x_scale, weight_scale, dw;
  std::vector<std::int8_t> x, weight;

  // A row before the first expert's and one after the last one's.
  Experts(const Description& description, const std::vector<int>& rows) : d(description) {
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal(0, 1);
    for (const int count : rows) offsets.push_back(offsets.back() + count);
    d.experts = static_cast<std::int64_t>(rows.size());
    d.m = offsets.back() + 1;
    d.dy = DTypeOf<T>::value;
    d.dw_dtype = DTypeOf<Real>::value;
    const auto make = [](auto& v, std::int64_t size, auto value) {
      v.resize(static_cast<std::size_t>(size));
      for (auto& one : v) one = value();
    };
    const auto level = [&] { return static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127); };
    const auto scale = [&] { return static_cast<Real>(0.01f + std::abs(normal(random))); };
    make(dy, d.m * d.n, [&] { return T(normal(random)); });
    make(x, d.m * d.k, level);
    make(weight, d.experts * d.n * d.k, level);
    make(x_scale, d.m, scale);
    make(weight_scale, d.experts * scales(), scale);
  }

  std::int64_t scales() const { return d.weight == WeightFormat::s8_per_channel ? d.n : 1; }

  void clear() {
    dx.assign(x.size(), T(-7.0f));
    db.assign(static_cast<std::size_t>(d.experts * d.n), T(-7.0f));
    dw.assign(weight.size(), Real(-7));
  }

  Gradients gradients() const {
    const auto widened = [](const std::vector<T>& v) {
      std::vector<Real> all;
      for (const T one : v) all.push_back(static_cast<Real>(one));
      return all;
    };
    return {widened(dx), dw, widened(db)};
  }

  GroupedLinearBackwardArgs args() {
    GroupedLinearBackwardArgs a{.dy = matrix<const T>(dy.data(), d.m, d.n)};
    a.offsets = vector<const std::int32_t>(offsets.data(), d.experts + 1);
    if (d.dx != Product::none) {
      a.weight = matrix<const std::int8_t>(weight.data(), d.experts * d.n, d.k);
      a.weight_scale = vector<const Real>(weight_scale.data(), d.experts * scales());
      a.dx = matrix(dx.data(), d.m, d.k);
    }
    if (d.dw != Product::none) {
      a.x = matrix<const std::int8_t>(x.data(), d.m, d.k);
      if (d.activation != Activation::static_per_tensor) a.x_scale = vector<const Real>(x_scale.data(), d.m);
      a.dw = matrix(dw.data(), d.experts * d.n, d.k);
    }
    if (d.db) a.db = matrix(db.data(), d.experts, d.n);
    a.seed = 11;
    return a;
  }

  Gradients run(int threads) {
    Description described = d;
    described.threads = threads;
    const auto plan = GroupedLinearBackwardPlan::select(described);
    clear();
    std::vector<std::uint8_t> workspace(plan.workspace_size());
    plan.run(args(), {workspace.data(), workspace.size()});
    return gradients();
  }

  Gradients loop() {
    clear();
    for (std::int64_t e = 0; e < d.experts; ++e) {
      const std::int64_t first = offsets[static_cast<std::size_t>(e)];
      const std::int64_t rows = offsets[static_cast<std::size_t>(e + 1)] - first;
      const auto plan = LinearBackwardPlan::select({.m = rows,
                                                    .n = d.n,
                                                    .k = d.k,
                                                    .dy = d.dy,
                                                    .dw_dtype = d.dw_dtype,
                                                    .dw_accumulate = d.dw_accumulate,
                                                    .dx = d.dx,
                                                    .dw = d.dw,
                                                    .db = d.db,
                                                    .activation = d.activation,
                                                    .static_scale = d.static_scale,
                                                    .weight = d.weight,
                                                    .rounding = d.rounding,
                                                    .gradient_block = d.gradient_block});
      LinearBackwardArgs a{.dy = matrix<const T>(dy.data() + first * d.n, rows, d.n)};
      if (d.dx != Product::none) {
        a.weight = matrix<const std::int8_t>(weight.data() + e * d.n * d.k, d.n, d.k);
        a.weight_scale = vector<const Real>(weight_scale.data() + e * scales(), scales());
        a.dx = matrix(dx.data() + first * d.k, rows, d.k);
      }
      if (d.dw != Product::none) {
        a.x = matrix<const std::int8_t>(x.data() + first * d.k, rows, d.k);
        if (d.activation != Activation::static_per_tensor) {
          a.x_scale = vector<const Real>(x_scale.data() + first, rows);
        }
        a.dw = matrix(dw.data() + e * d.n * d.k, d.n, d.k);
      }
      if (d.db) a.db = vector(db.data() + e * d.n, d.n);
      a.seed = 11 + static_cast<std::uint64_t>(e);
      std::vector<std::uint8_t> workspace(plan.workspace_size());
      plan.run(a, {workspace.data(), workspace.size()});
    }
    return gradients();
  }
};

const std::vector<int> kRows = {0, 1, 2, 140, 3, 17, 300, 0, 1};

template <class T>
void expect_bits_of_the_loop(const Description& d, const std::string& what) {
  Experts<T> experts(d, kRows);
  const auto expected = experts.loop();
  for (const int threads : {1, 2, 7}) EXPECT_TRUE(experts.run(threads) == expected) << what << ", threads " << threads;
}

template <class T>
class GroupedBackward : public testing::Test {};
using Types = testing::Types<Half, BFloat16, float, double>;
TYPED_TEST_SUITE(GroupedBackward, Types);

TYPED_TEST(GroupedBackward, GradientsHaveTheBitsOfTheLoop) {
  for (const Product dx : {Product::none, Product::dequantized, Product::int8}) {
    for (const Product dw : {Product::none, Product::dequantized, Product::int8}) {
      for (const bool db : {false, true}) {
        for (const std::int64_t block : {0, 128}) {
          if (block > 0 && dx != Product::int8 && dw != Product::int8) continue;
          const Description d{.n = 150, .k = 70, .dx = dx, .dw = dw, .db = db, .gradient_block = block};
          expect_bits_of_the_loop<TypeParam>(d, std::string(name(dx)) + ' ' + std::string(name(dw)) + " dB " +
                                                    std::to_string(db) + " block " + std::to_string(block));
        }
      }
    }
  }
}

TYPED_TEST(GroupedBackward, OptionsHaveTheBitsOfTheLoop) {
  for (const Product product : {Product::dequantized, Product::int8}) {
    const Description plain{.n = 33, .k = 65, .dx = product, .dw = product, .db = true};
    Description d = plain;
    d.dw_accumulate = true;
    expect_bits_of_the_loop<TypeParam>(d, "dw_accumulate");
    d = plain;
    d.activation = Activation::static_per_tensor;
    d.static_scale = 0.03;
    d.weight = WeightFormat::s8_per_tensor;
    expect_bits_of_the_loop<TypeParam>(d, "static scale, weight per tensor");
    d = plain;
    d.rounding = Rounding::stochastic;
    expect_bits_of_the_loop<TypeParam>(d, "stochastic");
    d.gradient_block = 128;
    expect_bits_of_the_loop<TypeParam>(product == Product::int8 ? d : plain, "stochastic in blocks");
  }
}

// Experts at and above the number of rows that one thread takes, and one with more rows than a block of dW's
// contraction.
TEST(GroupedBackward, LargeExpertsHaveTheBitsOfTheLoop) {
  for (const Product product : {Product::dequantized, Product::int8}) {
    Experts<float> experts({.n = 200, .k = 130, .dx = product, .dw = product, .db = true}, {2, 1500, 128, 129});
    const auto expected = experts.loop();
    for (const int threads : {1, 2}) EXPECT_TRUE(experts.run(threads) == expected) << name(product);
  }
}

TEST(GroupedBackward, ExpertsWithoutRowsAndRowsOfNobody) {
  Experts<float> experts({.n = 16, .k = 24, .db = true}, {0, 2, 0});
  const auto got = experts.run(2);
  const auto part = [](const std::vector<float>& v, std::size_t i, std::size_t parts) {
    const auto size = static_cast<std::ptrdiff_t>(v.size() / parts), first = static_cast<std::ptrdiff_t>(i) * size;
    return std::vector<float>(v.begin() + first, v.begin() + first + size);
  };
  for (const std::size_t e : {0u, 2u}) {
    EXPECT_EQ(part(got.dw, e, 3), std::vector<float>(16 * 24, 0.0f)) << e;
    EXPECT_EQ(part(got.db, e, 3), std::vector<float>(16, 0.0f)) << e;
  }
  for (const std::size_t row : {0u, 3u}) EXPECT_EQ(part(got.dx, row, 4), std::vector<float>(24, -7.0f)) << row;
  EXPECT_NE(part(got.dx, 1, 4), std::vector<float>(24, -7.0f));
}

TEST(GroupedBackward, ClearsRowsOfNobody) {
  Experts<float> experts({.n = 16, .k = 24, .clear_rest = true}, {0, 2, 0});
  const auto got = experts.run(2).dx;
  const auto is_clear = [&](std::ptrdiff_t row) {
    return std::all_of(got.begin() + row * 24, got.begin() + (row + 1) * 24, [](float v) { return v == 0; });
  };
  for (const std::ptrdiff_t row : {0, 1, 2, 3}) EXPECT_EQ(is_clear(row), row == 0 || row == 3) << row;
}

// Nothing is added to its dw, not even zeros: -0 stays.
TEST(GroupedBackward, ExpertsWithoutRowsLeaveWhatTheyAddTo) {
  for (const bool db : {false, true}) {
    Experts<float> experts({.n = 16, .k = 24, .dw_accumulate = true, .db = db}, {0, 2, 0});
    const auto plan = GroupedLinearBackwardPlan::select(experts.d);
    experts.clear();
    std::fill(experts.dw.begin(), experts.dw.end(), -0.0f);
    std::vector<std::uint8_t> workspace(plan.workspace_size());
    plan.run(experts.args(), {workspace.data(), workspace.size()});
    EXPECT_TRUE(std::all_of(experts.dw.begin(), experts.dw.begin() + 16 * 24, [](float v) { return std::signbit(v); }));
    EXPECT_EQ(experts.db[0], db ? 0.0f : -7.0f);
  }
}

// More rows than an int8 dW can sum, but not in one expert.
TEST(GroupedBackward, LongestContraction) {
  Experts<float> experts({.n = 1, .k = 1, .dx = Product::none, .dw = Product::int8}, {kMaxContraction, 2});
  EXPECT_TRUE(experts.run(2) == experts.loop());
  experts.offsets[1] += 1;
  const auto plan = GroupedLinearBackwardPlan::select(experts.d);
  EXPECT_NE(plan.can_implement(experts.args()).reason.find("expert 0 has 131072 rows with an int8 dW"),
            std::string::npos);
}

TEST(GroupedBackward, RefusesDescriptions) {
  const auto select = [](auto change) {
    Description d{.experts = 2, .m = 4, .n = 16, .k = 64};
    change(d);
    return refusal([&] { GroupedLinearBackwardPlan::select(d); });
  };
  expect_in("GroupedLinearBackwardPlan::select: k = -1", select([](auto& d) { d.k = -1; }));
  expect_in("experts = -1 is negative", select([](auto& d) { d.experts = -1; }));
  expect_in("m = 2147483648, expected at most", select([](auto& d) { d.m = std::int64_t{1} << 31; }));
  expect_in("n = 131072 with an int8 dX", select([](auto& d) { d.n = 131072, d.dx = Product::int8; }));
  EXPECT_EQ(select([](auto& d) { d.m = 131072, d.dw = Product::int8; }), "");  // an expert may have fewer
  expect_in("activation = dynamic_per_tensor", select([](auto& d) { d.activation = Activation::dynamic_per_tensor; }));
  expect_in("weight = s4_group", select([](auto& d) { d.weight = WeightFormat::s4_group, d.k = 128; }));
  expect_in("gradient_block = 128 with", select([](auto& d) { d.gradient_block = 128; }));
  expect_in("its size in bytes overflows", select([](auto& d) { d.experts = (1ll << 31) - 1, d.n = 1 << 30; }));
  EXPECT_NE(select([](auto& d) { d.device = Device::cuda(0); }), "");
  EXPECT_EQ(select([](auto&) {}), "");
}

TEST(GroupedBackward, RefusesArguments) {
  Experts<float> experts({.n = 16, .k = 64, .db = true}, {1, 2});
  experts.clear();
  const auto plan = GroupedLinearBackwardPlan::select(experts.d);
  const auto refused = [&](auto change) {
    GroupedLinearBackwardArgs args = experts.args();
    change(args);
    return plan.can_implement(args).reason;
  };
  EXPECT_EQ(refused([](auto&) {}), "");
  expect_in("expected at most 5 rows", refused([](auto& a) { a.dy.shape[0] = 6; }));
  expect_in("offsets", refused([](auto& a) { a.offsets.shape[0] = 2; }));
  expect_in("weight is", refused([](auto& a) { a.weight.shape[0] = 16; }));
  expect_in("weight_scale", refused([](auto& a) { a.weight_scale.shape[0] = 2; }));
  expect_in("x_scale", refused([](auto& a) { a.x_scale = {}; }));
  expect_in("dx is", refused([](auto& a) { a.dx.shape[0] = 4; }));
  expect_in("dw is", refused([](auto& a) { a.dw.shape[0] = 16; }));
  expect_in("db is", refused([](auto& a) { a.db.shape[0] = 1; }));
  expect_in("overlap", refused([](auto& a) { a.dx.data = a.dw.data; }));
  experts.offsets = {0, 2, 6};
  expect_in("offsets[2] = 6, expected 2 to 5", refused([](auto&) {}));
  experts.offsets = {1, 2, 4};
  Description none = experts.d;
  none.dx = none.dw = Product::none;
  none.db = false;
  expect_in("dx is", GroupedLinearBackwardPlan::select(none).can_implement(experts.args()).reason);
}

}  // namespace

}  // namespace octile
