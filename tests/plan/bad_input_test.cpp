// Every rejection has a case here that triggers it: the status, the values named in the message, and nothing written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "octile/octile.hpp"

namespace octile {
namespace {

constexpr std::int64_t kRows = 4;
constexpr std::int64_t kCols = 6;
constexpr std::int64_t kHuge = std::int64_t{1} << 62;

// The status of an error, and the texts that it must contain.
struct Expected {
  Status status;
  std::vector<std::string> texts;
};

void expect_error(const std::function<void()>& call, const Expected& expected) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown; expected an error with " << expected.texts[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), expected.status) << error.what();
    for (const std::string& text : expected.texts) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what() << "\n  lacks: " << text;
    }
  }
}

// A valid problem for a quantizer, in which each case makes one thing wrong.
struct Quantizer {
  QuantizeDescription description{.rows = kRows, .cols = kCols};
  std::vector<float> x = std::vector<float>(kRows * kCols + 1, 0.5f);
  std::vector<float> other = std::vector<float>(kRows * kCols + 1, 0.25f);
  std::vector<std::int8_t> q = std::vector<std::int8_t>(2 * kRows * kCols, 77);
  std::vector<std::int8_t> q_transposed = std::vector<std::int8_t>(2 * kRows * kCols, 77);
  std::vector<float> scale = std::vector<float>(kRows * kCols, 0.5f);
  std::vector<std::int32_t> zero_point = std::vector<std::int32_t>(kRows * kCols, 1);
  QuantizeArgs args{.x = matrix<const float>(x.data(), kRows, kCols),
                    .q = matrix(q.data(), kRows, kCols),
                    .scale = vector(scale.data(), kRows)};

  void run() const { QuantizePlan::select(description).run(args); }
};

void expect_select_error(const std::function<void(QuantizeDescription&)>& spoil, const Expected& expected) {
  Quantizer c;
  spoil(c.description);
  expect_error([&] { QuantizePlan::select(c.description); }, expected);
}

void expect_run_error(const std::function<void(Quantizer&)>& spoil, const Expected& expected) {
  Quantizer c;
  spoil(c);
  const Quantizer before = c;
  expect_error([&] { c.run(); }, expected);
  EXPECT_EQ(c.q, before.q);
  EXPECT_EQ(c.q_transposed, before.q_transposed);
  EXPECT_EQ(c.zero_point, before.zero_point);
  const Verdict verdict = QuantizePlan::select(c.description).can_implement(c.args);
  EXPECT_FALSE(verdict);
  EXPECT_EQ(verdict.status, expected.status);
}

TEST(BadDescription, Quantize) {
  const auto invalid = Status::invalid_argument;
  const auto unsupported = Status::unsupported;
  expect_select_error([](auto& d) { d.rows = -3; }, {invalid, {"QuantizePlan::select", "rows = -3"}});
  expect_select_error([](auto& d) { d.cols = -1; }, {invalid, {"cols = -1"}});
  expect_select_error([](auto& d) { d.rows = d.cols = kHuge; }, {invalid, {"4611686018427387904", "overflows"}});
  expect_select_error([](auto& d) { d.rows = std::numeric_limits<std::int64_t>::max(); }, {invalid, {"overflows"}});
  expect_select_error([](auto& d) { d.x = DType::s8; }, {unsupported, {"x = s8", "f16, bf16, f32 or f64"}});
  expect_select_error([](auto& d) { d.x = static_cast<DType>(99); }, {invalid, {"x = 99", "8 values"}});
  expect_select_error([](auto& d) { d.q = DType::f32; }, {unsupported, {"q = f32", "s8, u8 or s4"}});
  expect_select_error([](auto& d) { d.granularity = static_cast<Granularity>(4); }, {invalid, {"granularity = 4"}});
  expect_select_error([](auto& d) { d.scale = static_cast<ScaleSource>(2); }, {invalid, {"scale = 2"}});
  expect_select_error([](auto& d) { d.mapping = static_cast<Mapping>(2); }, {invalid, {"mapping = 2"}});
  expect_select_error([](auto& d) { d.rounding = static_cast<Rounding>(9); }, {invalid, {"rounding = 9"}});
  expect_select_error([](auto& d) { d.orientation = static_cast<Orientation>(3); }, {invalid, {"orientation = 3"}});
  expect_select_error([](auto& d) { d.multiplier = static_cast<Multiplier>(3); }, {invalid, {"multiplier = 3"}});
  expect_select_error([](auto& d) { d.mask = static_cast<Mask>(2); }, {invalid, {"mask = 2"}});
  expect_select_error([](auto& d) { d.threads = -2; }, {invalid, {"threads = -2"}});
  expect_select_error([](auto& d) { d.threads = 5000; }, {invalid, {"threads = 5000", "1024"}});
  expect_select_error([](auto& d) { d.device = {DeviceType::cpu, 1}; }, {invalid, {"cpu", "index 1"}});
  expect_select_error([](auto& d) { d.device = {static_cast<DeviceType>(7), 0}; }, {invalid, {"device.type = 7"}});
  expect_select_error([](auto& d) { d.kernel = "quantize_abacus"; },
                      {invalid, {"quantize_abacus", "quantize_reference"}});
  expect_select_error([](auto& d) { d.q_min = 5, d.q_max = -5; }, {invalid, {"q_min = 5", "q_max = -5"}});
  expect_select_error([](auto& d) { d.q_min = -200, d.q_max = 100; }, {invalid, {"q_min = -200", "-128"}});
  expect_select_error([](auto& d) { d.q_min = -7, d.q_max = 300; }, {invalid, {"q_max = 300", "127"}});
  expect_select_error([](auto& d) { d.q_min = 3, d.q_max = 9; }, {invalid, {"q_min = 3", "0 in the range"}});
  expect_select_error([](auto& d) { d.q_min = -9, d.q_max = 0; }, {invalid, {"q_max = 0", "symmetric"}});
  expect_select_error([](auto& d) { d.q = DType::s4, d.q_min = -127, d.q_max = 127; }, {invalid, {"-8", "s4"}});
  const auto group_of = [](std::int64_t group) {
    return [group](QuantizeDescription& d) { d.granularity = Granularity::group, d.group = group; };
  };
  expect_select_error(group_of(4), {invalid, {"group = 4", "cols = 6"}});
  expect_select_error(group_of(0), {invalid, {"group = 0"}});
  expect_select_error(group_of(-2), {invalid, {"group = -2"}});
  for (const double least : {0.0, -1e-8, 0x1p-80, 1.5, std::nan("")}) {
    expect_select_error([least](auto& d) { d.min_scale = least; }, {invalid, {"min_scale = ", "2^-79 to 1"}});
  }
  expect_select_error([](auto& d) { d.min_scale = 1.0000001; }, {invalid, {"min_scale = 1.0000001:"}});
}

TEST(BadDescription, Prologues) {
  const auto unsupported = Status::unsupported;
  const auto spoiled = [](const std::function<void(QuantizeDescription&)>& spoil) {
    return [spoil](QuantizeDescription& d) { d.prologue = Prologue::silu, spoil(d); };
  };
  const std::string expected = "expected f16, bf16 or f32, s8, row, dynamic symmetric, nearest, none";
  expect_select_error([](auto& d) { d.prologue = static_cast<Prologue>(5); },
                      {Status::invalid_argument, {"prologue = 5"}});
  expect_select_error([](auto& d) { d.gated = true; }, {Status::invalid_argument, {"gated without a prologue"}});
  expect_select_error(spoiled([](auto& d) { d.x = DType::f64; }), {unsupported, {"silu with x = f64", expected}});
  expect_select_error(spoiled([](auto& d) { d.q = DType::u8; }), {unsupported, {"q = u8", expected}});
  expect_select_error(spoiled([](auto& d) { d.granularity = Granularity::tensor; }), {unsupported, {"tensor"}});
  expect_select_error(spoiled([](auto& d) { d.scale = ScaleSource::given; }), {unsupported, {"given symmetric"}});
  expect_select_error(spoiled([](auto& d) { d.mapping = Mapping::affine; }), {unsupported, {"dynamic affine"}});
  expect_select_error(spoiled([](auto& d) { d.rounding = Rounding::stochastic; }), {unsupported, {"stochastic"}});
  expect_select_error(spoiled([](auto& d) { d.multiplier = Multiplier::per_row; }), {unsupported, {"per_row"}});
  const QuantizeDescription activated{.rows = 2, .cols = 2, .prologue = Prologue::silu};
  expect_error([&] { FakeQuantizePlan::select(activated); }, {unsupported, {"only QuantizePlan takes one"}});
}

TEST(BadArguments, TheGateOfAPrologue) {
  const auto mismatch = Status::shape_mismatch;
  const auto gated = [](Quantizer& c, std::int64_t cols) {
    c.description.prologue = Prologue::gelu_tanh;
    c.description.gated = true;
    c.args.up = matrix<const float>(c.other.data(), kRows, cols);
  };
  expect_run_error([&](auto& c) { gated(c, kCols), c.args.up = {}; }, {mismatch, {"up is absent"}});
  expect_run_error([&](auto& c) { gated(c, kCols - 1); }, {mismatch, {"up", "(4, 5)", "(4, 6)"}});
  expect_run_error([&](auto& c) { c.args.up = c.args.x; }, {mismatch, {"up is f32 (4, 6)", "no use for it"}});
}

TEST(BadDescription, Norms) {
  const auto invalid = Status::invalid_argument;
  const auto spoiled = [](const std::function<void(QuantizeDescription&)>& spoil) {
    return [spoil](QuantizeDescription& d) { d.prologue = Prologue::rms_norm, spoil(d); };
  };
  expect_select_error([](auto& d) { d.residual = true; }, {invalid, {"residual without a norm"}});
  expect_select_error(spoiled([](auto& d) { d.prologue = Prologue::silu, d.residual = true; }),
                      {invalid, {"residual without a norm"}});
  expect_select_error(spoiled([](auto& d) { d.gated = true; }), {invalid, {"gated with rms_norm"}});
  for (const double epsilon : {-1e-6, 1e39, std::nan("")}) {
    expect_select_error(spoiled([&](auto& d) { d.epsilon = epsilon; }), {invalid, {"epsilon = ", "at least 0"}});
  }
  expect_select_error(spoiled([](auto& d) { d.norm_weight = DType::f16; }),
                      {Status::unsupported, {"norm_weight = f16 with x = f32", "f32 or x's type"}});
  expect_select_error(spoiled([](auto& d) { d.norm_weight = static_cast<DType>(99); }),
                      {invalid, {"norm_weight = 99"}});
  expect_select_error(spoiled([](auto& d) { d.x = DType::f64; }), {Status::unsupported, {"rms_norm with x = f64"}});
}

TEST(BadArguments, OfNorms) {
  const auto mismatch = Status::shape_mismatch;
  const auto norm = [](Quantizer& c, Prologue prologue, bool residual) {
    c.description.prologue = prologue;
    c.description.residual = residual;
    c.args.norm_weight = vector<const float>(c.other.data(), kCols);
    if (prologue == Prologue::layer_norm) c.args.norm_bias = c.args.norm_weight;
    if (residual) c.args.residual = matrix<const float>(c.other.data(), kRows, kCols);
  };
  const auto rms = Prologue::rms_norm;
  expect_run_error([&](auto& c) { norm(c, rms, false), c.args.norm_weight = {}; },
                   {mismatch, {"norm_weight is absent"}});
  expect_run_error([&](auto& c) { norm(c, rms, false), c.args.norm_bias = c.args.norm_weight; },
                   {mismatch, {"norm_bias", "no use for it"}});
  expect_run_error([&](auto& c) { norm(c, Prologue::layer_norm, false), c.args.norm_bias = {}; },
                   {mismatch, {"norm_bias is absent"}});
  expect_run_error([&](auto& c) { norm(c, rms, true); }, {mismatch, {"sum is absent"}});
  expect_run_error([&](auto& c) { norm(c, rms, true), c.args.residual = {}; }, {mismatch, {"residual is absent"}});
  expect_run_error([&](auto& c) { norm(c, rms, false), c.args.residual = c.args.x; },
                   {mismatch, {"residual", "no use"}});
  expect_run_error([&](auto& c) { norm(c, rms, false), c.args.mean = c.args.scale; }, {mismatch, {"mean", "no use"}});
  expect_run_error([&](auto& c) { c.args.rstd = c.args.scale; }, {mismatch, {"rstd", "no use"}});
}

TEST(BadDescription, OnlyQuantizeTakesMultipliersAndOrientations) {
  const QuantizeDescription multiplied{.rows = 2, .cols = 2, .multiplier = Multiplier::per_column};
  const QuantizeDescription turned{.rows = 2, .cols = 2, .orientation = Orientation::both};
  const Expected expected{Status::unsupported, {"only QuantizePlan"}};
  expect_error([&] { DequantizePlan::select(multiplied); }, expected);
  expect_error([&] { QuantizeBackwardPlan::select(turned); }, expected);
  expect_error([&] { DequantizeBackwardPlan::select(turned); }, expected);
  expect_error([&] { FakeQuantizePlan::select(multiplied); }, expected);
  expect_error([&] { FakeQuantizeBackwardPlan::select(multiplied); }, expected);
}

TEST(BadArguments, QuantizeShapesAndTypes) {
  const auto mismatch = Status::shape_mismatch;
  expect_run_error([](auto& c) { c.args.x = {}; }, {mismatch, {"QuantizePlan::run", "x is absent"}});
  expect_run_error([](auto& c) { c.args.x.rank = 1; }, {mismatch, {"x is f32 (4)"}});
  expect_run_error([](auto& c) { c.args.x.rank = 3; }, {mismatch, {"x is f32 (4, 6)"}});
  expect_run_error([](auto& c) { c.args.x.shape[0] = 5; }, {mismatch, {"(5, 6)", "at most 4 rows of 6"}});
  expect_run_error([](auto& c) { c.args.x.shape[0] = -1; }, {mismatch, {"(-1, 6)"}});
  expect_run_error([](auto& c) { c.args.x.shape[1] = 7; }, {mismatch, {"(4, 7)", "(4, 6)"}});
  expect_run_error([](auto& c) { c.args.x.dtype = DType::f16; }, {mismatch, {"x is f16", "expected f32"}});
  expect_run_error([](auto& c) { c.args.x.device = Device::cuda(1); }, {mismatch, {"cuda:1", "on cpu"}});
  expect_run_error([](auto& c) { c.args.x.strides = {1, 4}; }, {mismatch, {"strides (1, 4)", "contiguous"}});
  expect_run_error(
      [](auto& c) {
        c.args.x.strides = {5, 1};
      },
      {mismatch, {"strides (5, 1)", "at least 6", "0 to repeat"}});
  expect_run_error([](auto& c) { c.args.x.strides = {-6, 1}; }, {mismatch, {"strides (-6, 1)"}});
  expect_run_error([](auto& c) { c.args.x.strides = {kHuge, 1}; }, {Status::invalid_argument, {"overflows"}});
  expect_run_error([](auto& c) { c.args.q.strides = {0, 1}; }, {mismatch, {"q is s8", "at least 6"}});
  expect_run_error([](auto& c) { c.args.q = {}; }, {mismatch, {"q is absent, expected s8 (4, 6)"}});
  expect_run_error([](auto& c) { c.args.q_transposed = c.args.q; }, {mismatch, {"q_transposed", "no use"}});
  expect_run_error([](auto& c) { c.args.scale.shape[0] = 3; }, {mismatch, {"scale is f32 (3)", "expected f32 (4)"}});
  expect_run_error([](auto& c) { c.args.scale = {}; }, {mismatch, {"scale is absent"}});
  expect_run_error([](auto& c) { c.args.zero_point = vector(c.zero_point.data(), kRows); }, {mismatch, {"zero_point"}});
  expect_run_error([](auto& c) { c.args.given_scale = c.args.scale; }, {mismatch, {"given_scale", "no use"}});
  expect_run_error([](auto& c) { c.args.multiplier = vector<const float>(c.other.data(), kCols); },
                   {mismatch, {"multiplier", "no use"}});
  expect_run_error([](auto& c) { c.description.orientation = Orientation::transposed; },
                   {mismatch, {"q is s8", "no use"}});
  expect_run_error([](auto& c) { c.description.orientation = Orientation::both; },
                   {mismatch, {"q_transposed is absent, expected s8 (6, 4)"}});
  expect_run_error([](auto& c) { c.description.multiplier = Multiplier::per_row; },
                   {mismatch, {"multiplier is absent, expected f32 (4)"}});
  expect_run_error(
      [](auto& c) {
        c.description.q = DType::s4;
        c.args.q = matrix_s4(reinterpret_cast<std::uint8_t*>(c.q.data()), kRows, kCols, 7);
      },
      {mismatch, {"strides (7, 1)", "a multiple of 2 for s4"}});
}

TEST(BadArguments, QuantizePointers) {
  expect_run_error([](auto& c) { c.args.x.data = nullptr; }, {Status::invalid_argument, {"x is f32", "null pointer"}});
  expect_run_error([](auto& c) { c.args.q.data = nullptr; }, {Status::invalid_argument, {"q is s8", "null pointer"}});
  expect_run_error([](auto& c) { c.args.x.data = reinterpret_cast<const char*>(c.x.data()) + 1; },
                   {Status::misaligned, {"x is f32", "4 bytes"}});
  expect_run_error([](auto& c) { c.args.q.data = c.x.data(); }, {Status::invalid_argument, {"x at", "overlaps q at"}});
  expect_run_error([](auto& c) { c.args.q.data = reinterpret_cast<char*>(c.x.data()) + kRows * kCols * 4 - 1; },
                   {Status::invalid_argument, {"overlaps"}});
  expect_run_error([](auto& c) { c.args.scale.data = c.x.data(); }, {Status::invalid_argument, {"overlaps scale at"}});
}

TEST(BadArguments, GivenScales) {
  const auto given = [](float value) {
    return [value](Quantizer& c) {
      c.description.scale = ScaleSource::given;
      c.other.assign(kRows, 0.5f);
      c.other[2] = value;
      c.args.given_scale = vector<const float>(c.other.data(), kRows);
      c.args.scale = {};
    };
  };
  const auto invalid = Status::invalid_argument;
  expect_run_error(given(0.0f), {invalid, {"given_scale[2] = 0", "positive and finite"}});
  expect_run_error(given(-0.5f), {invalid, {"given_scale[2] = -0.5"}});
  expect_run_error(given(std::numeric_limits<float>::infinity()), {invalid, {"given_scale[2] = inf"}});
  expect_run_error(given(std::numeric_limits<float>::quiet_NaN()), {invalid, {"given_scale[2] = nan"}});
  expect_run_error(
      [&](Quantizer& c) {
        given(0.5f)(c);
        c.description.mapping = Mapping::affine;
        c.zero_point[1] = 200;
        c.args.given_zero_point = vector<const std::int32_t>(c.zero_point.data(), kRows);
      },
      {invalid, {"given_zero_point[1] = 200", "-128..127"}});
  expect_run_error(
      [&](Quantizer& c) {
        given(0.5f)(c);
        c.description.mapping = Mapping::affine;
      },
      {Status::shape_mismatch, {"given_zero_point is absent"}});
}

TEST(BadArguments, OtherQuantizerPlans) {
  Quantizer c;
  const auto x = matrix<const float>(c.x.data(), kRows, kCols);
  const auto y = matrix(c.other.data(), kRows, kCols);
  const auto scale = vector<const float>(c.scale.data(), kRows);
  const auto q = matrix<const std::int8_t>(c.q.data(), kRows, kCols);
  const Expected absent{Status::shape_mismatch, {"scale is absent"}};
  expect_error([&] { DequantizePlan::select(c.description).run({.q = q, .x = y}); }, absent);
  expect_error([&] { QuantizeBackwardPlan::select(c.description).run({.dy = x, .x = x, .dx = y}); }, absent);
  expect_error([&] { DequantizeBackwardPlan::select(c.description).run({.dy = x, .dq = y}); }, absent);
  expect_error([&] { FakeQuantizePlan::select(c.description).run({.x = x, .y = y}); }, absent);
  expect_error([&] { FakeQuantizeBackwardPlan::select(c.description).run({.dy = x, .x = x, .dx = y}); }, absent);
  Quantizer given;
  given.description.scale = ScaleSource::given;  // which only quantizers ask for by that name
  expect_error([&] { DequantizePlan::select(given.description).run({.q = q, .x = y}); },
               {Status::shape_mismatch, {": scale is absent"}});
  expect_error([&] { DequantizePlan::select(c.description).run({.scale = scale, .x = y}); },
               {Status::shape_mismatch, {"DequantizePlan::run", "q is absent"}});
  expect_error([&] { QuantizeBackwardPlan::select(c.description).run({.dy = x, .scale = scale, .dx = y}); },
               {Status::shape_mismatch, {"QuantizeBackwardPlan::run", "x is absent"}});
  expect_error([&] { DequantizeBackwardPlan::select(c.description).run({.dy = x, .scale = scale}); },
               {Status::shape_mismatch, {"dq is absent"}});
  expect_error([&] { FakeQuantizePlan::select(c.description).run({.x = x}); },
               {Status::shape_mismatch, {"y is absent"}});
  const auto in_place = matrix(c.x.data(), kRows, kCols);
  expect_error(
      [&] { FakeQuantizeBackwardPlan::select(c.description).run({.dy = x, .x = x, .scale = scale, .dx = in_place}); },
      {Status::invalid_argument, {"overlaps"}});
}

// A valid layer.
struct Layer {
  static constexpr std::int64_t kM = 3, kN = 5, kK = 32;
  LinearDescription description{.m = kM, .n = kN, .k = kK, .bias = true};
  std::vector<float> x = std::vector<float>(kM * kK, 0.5f);
  std::vector<std::int8_t> xq = std::vector<std::int8_t>(kM * kK, 3);
  std::vector<std::int8_t> weight = std::vector<std::int8_t>(kN * kK, 2);
  std::vector<float> weight_scale = std::vector<float>(kN * kK, 0.5f);
  std::vector<float> x_scale = std::vector<float>(kM, 0.5f);
  std::vector<float> multiplier = std::vector<float>(kK, 1.0f);
  std::vector<std::int32_t> zero_point = std::vector<std::int32_t>(kN, 0);
  std::vector<float> bias = std::vector<float>(kN, 1.0f);
  std::vector<float> y = std::vector<float>(kM * kN, 77.0f);
  std::vector<std::byte> memory = std::vector<std::byte>(4096);
  Workspace workspace{memory.data(), memory.size()};
  LinearArgs args{.x = matrix<const float>(x.data(), kM, kK),
                  .weight = matrix<const std::int8_t>(weight.data(), kN, kK),
                  .weight_scale = vector<const float>(weight_scale.data(), kN),
                  .bias = vector<const float>(bias.data(), kN),
                  .y = matrix(y.data(), kM, kN)};

  void run() const { LinearPlan::select(description).run(args, workspace); }
};

void expect_layer_error(const std::function<void(Layer&)>& spoil, const Expected& expected) {
  Layer c;
  spoil(c);
  expect_error([&] { c.run(); }, expected);
  EXPECT_EQ(c.y, std::vector<float>(Layer::kM * Layer::kN, 77.0f));
}

bool has_cuda_rows() {
  const std::vector<KernelInfo> rows = kernels();
  return std::any_of(rows.begin(), rows.end(), [](const KernelInfo& row) { return row.device == DeviceType::cuda; });
}

TEST(BadDescription, AGroupCountsOnlyWhereScalesAreForGroups) {
  LinearBackwardDescription d{.m = 4, .n = 8, .k = 16};
  d.weight.group = 7;
  EXPECT_EQ(d.weight, WeightFormat::s8_per_channel);
  EXPECT_NO_THROW(LinearBackwardPlan::select(d));
  EXPECT_NE(WeightFormat::in_groups(DType::s8, 32), WeightFormat::s8_group);
}

TEST(BadTensor, OfAnotherRank) {
  expect_layer_error([](auto& c) { c.args.y.rank = 3; }, {Status::shape_mismatch, {"of rank 3"}});
  expect_layer_error([](auto& c) { c.args.x.rank = -1; }, {Status::shape_mismatch, {"of rank -1"}});
}

TEST(BadDescription, Linear) {
  const auto invalid = Status::invalid_argument;
  const auto unsupported = Status::unsupported;
  expect_layer_error([](auto& c) { c.description.m = -1; }, {invalid, {"LinearPlan::select", "m = -1"}});
  expect_layer_error([](auto& c) { c.description.n = -1; }, {invalid, {"n = -1"}});
  expect_layer_error([](auto& c) { c.description.k = -1; }, {invalid, {"k = -1"}});
  expect_layer_error([](auto& c) { c.description.m = c.description.n = kHuge; }, {invalid, {"overflows"}});
  expect_layer_error([](auto& c) { c.description.k = kMaxContraction + 1; },
                     {unsupported, {"k = 131072", "131071", "s32"}});
  expect_layer_error([](auto& c) { c.description.x = DType::u8; }, {unsupported, {"x = u8"}});
  expect_layer_error([](auto& c) { c.description.y = DType::s8; }, {unsupported, {"y = s8"}});
  expect_layer_error([](auto& c) { c.description.y = DType::f64; }, {unsupported, {"x = f32", "y = f64"}});
  expect_layer_error([](auto& c) { c.description.activation = static_cast<Activation>(5); },
                     {invalid, {"activation = 5"}});
  expect_layer_error([](auto& c) { c.description.weight.type = static_cast<DType>(9); },
                     {invalid, {"weight.type = 9"}});
  expect_layer_error([](auto& c) { c.description.weight.granularity = static_cast<Granularity>(5); },
                     {invalid, {"weight.granularity = 5"}});
  expect_layer_error([](auto& c) { c.description.weight.type = DType::u8; }, {unsupported, {"weight of u8"}});
  expect_layer_error([](auto& c) { c.description.weight.type = DType::s4; }, {unsupported, {"expected s4_group"}});
  expect_layer_error([](auto& c) { c.description.weight.granularity = Granularity::column; },
                     {unsupported, {"expected s8_per_channel"}});
  expect_layer_error([](auto& c) { c.description.weight_layout = static_cast<WeightLayout>(2); },
                     {invalid, {"weight_layout = 2"}});
  expect_layer_error([](auto& c) { c.description.activation = Activation::none, c.description.x = DType::s8; },
                     {unsupported, {"activation = none", "expected a float x"}});
  expect_layer_error([](auto& c) { c.description.weight.zero_point = true; }, {unsupported, {"weight_zero_point"}});
  expect_layer_error([](auto& c) { c.description.x = DType::s8, c.description.x_multiplier = true; },
                     {unsupported, {"x_multiplier"}});
  expect_layer_error([](auto& c) { c.description.threads = -1; }, {invalid, {"threads = -1"}});
  expect_layer_error([](auto& c) { c.description.kernel = "fastest"; }, {invalid, {"fastest"}});
  expect_layer_error([](auto& c) { c.description.device = Device::cuda(99); },
                     {unsupported, {"no kernel", "cuda:99", has_cuda_rows() ? "not quantize_sm80" : "without CUDA"}});
  if (has_cuda_rows()) {
    expect_layer_error([](auto& c) { c.description.kernel = "w8a8_gemm_skinny_sm90"; },
                       {unsupported, {"w8a8_gemm_skinny_sm90: runs on cuda, the plan is for cpu"}});
  }
  for (const double scale : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan(""), 1e-60, 1e60}) {
    expect_layer_error(
        [scale](auto& c) {
          c.description.activation = Activation::static_per_tensor;
          c.description.static_scale = scale;
        },
        {invalid, {"static_scale", "positive and finite"}});
  }
  const auto w4 = [](Layer& c) -> LinearDescription& {
    c.description.activation = Activation::none;
    c.description.weight = WeightFormat::s4_group;
    c.description.weight.group = 32;
    return c.description;
  };
  expect_layer_error([&](auto& c) { w4(c).weight.group = 48; }, {unsupported, {"group = 48", "32, 64, 128"}});
  expect_layer_error([&](auto& c) { w4(c).weight.group = 64; }, {invalid, {"group = 64", "k = 32"}});
  expect_layer_error(
      [](auto& c) {
        c.description.weight = {DType::s8, Granularity::group, 48};
      },
      {unsupported, {"group = 48", "32, 64, 128"}});
  expect_layer_error(
      [](auto& c) {
        c.description.weight = {DType::s8, Granularity::group, 32};
        c.description.weight_layout = WeightLayout::in_out;
      },
      {unsupported, {"s8_group", "in_out"}});
  expect_layer_error([&](auto& c) { w4(c).weight_layout = WeightLayout::in_out; }, {unsupported, {"in_out"}});
  expect_layer_error([&](auto& c) { w4(c).x_multiplier = true; }, {unsupported, {"x_multiplier"}});
  expect_layer_error([&](auto& c) { w4(c).x = DType::s8; }, {unsupported, {"x = s8"}});
  expect_layer_error(
      [&](auto& c) {
        w4(c).activation = Activation::dynamic_per_token;
        c.description.weight.group = 0;
        c.description.k = kMaxContraction + 1;
      },
      {unsupported, {"k = 131072", "131071"}});
  expect_layer_error(
      [&](auto& c) {
        w4(c).activation = Activation::static_per_tensor;
        c.description.static_scale = -1;
      },
      {invalid, {"static_scale"}});
}

// The kernels that an error message lists.
std::vector<std::string> kernels_listed(const std::function<void()>& select) {
  try {
    select();
  } catch (const Error& error) {
    const std::string text = error.what();
    std::istringstream words(text.substr(text.rfind(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

TEST(BadDescription, AnUnknownKernelIsAnsweredWithThoseOfThePlanOnItsDevice) {
  const auto expect = [](const std::vector<std::string>& listed, const std::vector<std::string>& operations) {
    std::vector<std::string> expected;
    for (const KernelInfo& kernel : kernels()) {
      const bool own = std::find(operations.begin(), operations.end(), kernel.operation) != operations.end();
      if (own && kernel.device == DeviceType::cpu) expected.push_back(kernel.name);
    }
    EXPECT_EQ(listed, expected);
  };
  const std::string unknown = "w8a8_gemm_abacus";
  expect(kernels_listed([&] { DequantizePlan::select({.rows = 4, .cols = 4, .kernel = unknown}); }), {"dequantize"});
  LinearDescription d{.m = 4, .n = 4, .k = 4, .kernel = unknown};
  expect(kernels_listed([&] { LinearPlan::select(d); }), {"quantize", "w8a8_gemm"});
  d.x = DType::s8;
  expect(kernels_listed([&] { LinearPlan::select(d); }), {"w8a8_gemm"});
  d = {.m = 4, .n = 4, .k = 32, .activation = Activation::none, .weight = WeightFormat::s4_group, .kernel = unknown};
  d.weight.group = 32;
  expect(kernels_listed([&] { LinearPlan::select(d); }), {"w4a16_gemm"});
  LinearBackwardDescription b{.m = 4, .n = 4, .k = 4, .kernel = unknown};
  expect(kernels_listed([&] { LinearBackwardPlan::select(b); }), {"w8a16_gemm", "column_sum"});
  b.dx = Product::int8;
  expect(kernels_listed([&] { LinearBackwardPlan::select(b); }),
         {"quantize", "gradient_quantize", "w8a8_gemm", "w8a16_gemm", "column_sum"});
  b.gradient_block = 128;
  expect(kernels_listed([&] { LinearBackwardPlan::select(b); }),
         {"blocked_gradient_quantize", "w8a8_blocked_gemm", "w8a16_gemm", "column_sum"});
}

TEST(BadArguments, Linear) {
  const auto mismatch = Status::shape_mismatch;
  const auto invalid = Status::invalid_argument;
  expect_layer_error([](auto& c) { c.args.x.shape[0] = 4; },
                     {mismatch, {"LinearPlan::run", "x is f32 (4, 32)", "at most 3"}});
  expect_layer_error([](auto& c) { c.args.x.shape[1] = 31; }, {mismatch, {"x is f32 (3, 31)"}});
  expect_layer_error([](auto& c) { c.args.y.shape[0] = 2; }, {mismatch, {"y is f32 (2, 5)", "(3, 5)"}});
  expect_layer_error([](auto& c) { c.args.y.data = nullptr; }, {invalid, {"y is f32", "null pointer"}});
  expect_layer_error([](auto& c) { c.args.weight = matrix<const std::int8_t>(c.weight.data(), 32, 5); },
                     {mismatch, {"weight is s8 (32, 5)", "(5, 32)"}});
  expect_layer_error([](auto& c) { c.args.weight_scale.shape[0] = 1; }, {mismatch, {"weight_scale is f32 (1)"}});
  expect_layer_error([](auto& c) { c.args.bias = {}; }, {mismatch, {"bias is absent"}});
  expect_layer_error([](auto& c) { c.description.bias = false; }, {mismatch, {"bias", "no use"}});
  expect_layer_error([](auto& c) { c.args.x_scale = vector<const float>(c.x_scale.data(), 3); },
                     {mismatch, {"x_scale", "no use"}});
  expect_layer_error([](auto& c) { c.args.x_multiplier = vector<const float>(c.multiplier.data(), 32); },
                     {mismatch, {"x_multiplier", "no use"}});
  expect_layer_error([](auto& c) { c.args.weight_zero_point = vector<const std::int32_t>(c.zero_point.data(), 5); },
                     {mismatch, {"weight_zero_point", "no use"}});
  expect_layer_error([](auto& c) { c.description.x_multiplier = true; }, {mismatch, {"x_multiplier is absent"}});
  expect_layer_error(
      [](auto& c) {
        c.description.x = DType::s8;
        c.args.x = matrix<const std::int8_t>(c.xq.data(), 3, 32);
      },
      {mismatch, {"x_scale is absent, expected f32 (3)"}});
  expect_layer_error([](auto& c) { c.args.y = matrix(c.weight_scale.data(), 3, 5); }, {invalid, {"overlaps"}});
  expect_layer_error([](auto& c) { c.workspace = {}; }, {Status::workspace_too_small, {"workspace of 0 bytes"}});
  expect_layer_error([](auto& c) { c.workspace.size = 7; },
                     {Status::workspace_too_small, {"workspace of 7 bytes", "needs"}});
  expect_layer_error(
      [](auto& c) {
        c.description = {.m = 3, .n = 5, .k = 32, .activation = Activation::none, .weight = WeightFormat::s4_group};
        c.description.weight.group = 32;
        c.description.weight.zero_point = true;
        c.zero_point[3] = 8;
        c.args.weight = matrix_s4<const std::uint8_t>(reinterpret_cast<const std::uint8_t*>(c.weight.data()), 5, 32);
        c.args.weight_scale = matrix<const float>(c.weight_scale.data(), 5, 1);
        c.args.weight_zero_point = matrix<const std::int32_t>(c.zero_point.data(), 5, 1);
        c.args.bias = {};
      },
      {invalid, {"weight_zero_point[3, 0] = 8", "-8..7"}});
}

// A valid backward pass: all three products, dX and dW in int8.
struct BackwardPass {
  static constexpr std::int64_t kM = 3, kN = 5, kK = 4;
  LinearBackwardDescription description{
      .m = kM, .n = kN, .k = kK, .dx = Product::int8, .dw = Product::dequantized, .db = true};
  std::vector<float> dy = std::vector<float>(kM * kN, 0.5f);
  std::vector<std::int8_t> weight = std::vector<std::int8_t>(kN * kK, 2);
  std::vector<std::int8_t> x = std::vector<std::int8_t>(kM * kK, 2);
  std::vector<float> weight_scale = std::vector<float>(kN, 0.5f);
  std::vector<float> x_scale = std::vector<float>(kM, 0.5f);
  std::vector<float> dx = std::vector<float>(kM * kK, 77.0f);
  std::vector<float> dw = std::vector<float>(kN * kK, 77.0f);
  std::vector<float> db = std::vector<float>(kN, 77.0f);
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);
  Workspace workspace{memory.data(), memory.size()};
  LinearBackwardArgs args{.dy = matrix<const float>(dy.data(), kM, kN),
                          .weight = matrix<const std::int8_t>(weight.data(), kN, kK),
                          .weight_scale = vector<const float>(weight_scale.data(), kN),
                          .x = matrix<const std::int8_t>(x.data(), kM, kK),
                          .x_scale = vector<const float>(x_scale.data(), kM),
                          .dx = matrix(dx.data(), kM, kK),
                          .dw = matrix(dw.data(), kN, kK),
                          .db = vector(db.data(), kN)};
};

void expect_backward_error(const std::function<void(BackwardPass&)>& spoil, const Expected& expected) {
  BackwardPass c;
  spoil(c);
  expect_error([&] { LinearBackwardPlan::select(c.description).run(c.args, c.workspace); }, expected);
  for (const auto* out : {&c.dx, &c.dw, &c.db}) EXPECT_EQ(*out, std::vector<float>(out->size(), 77.0f));
}

TEST(BadDescription, LinearBackward) {
  const auto invalid = Status::invalid_argument;
  const auto unsupported = Status::unsupported;
  expect_backward_error([](auto& c) { c.description.m = -1; }, {invalid, {"LinearBackwardPlan::select", "m = -1"}});
  expect_backward_error([](auto& c) { c.description.n = -1; }, {invalid, {"n = -1"}});
  expect_backward_error([](auto& c) { c.description.k = -1; }, {invalid, {"k = -1"}});
  expect_backward_error([](auto& c) { c.description.n = c.description.k = kHuge; }, {invalid, {"overflows"}});
  expect_backward_error([](auto& c) { c.description.dy = DType::s8; }, {unsupported, {"dy = s8"}});
  expect_backward_error([](auto& c) { c.description.dw_dtype = DType::f16; },
                        {unsupported, {"dw_dtype = f16", "dy = f32"}});
  expect_backward_error([](auto& c) { c.description.dy = DType::f64, c.description.dw_dtype = DType::f32; },
                        {unsupported, {"dw_dtype = f32", "dy = f64"}});
  expect_backward_error([](auto& c) { c.description.dy = DType::f16, c.description.dw_accumulate = true; },
                        {unsupported, {"dw_accumulate", "dw_dtype = f16", "a dW of f32"}});
  expect_backward_error([](auto& c) { c.description.dw = Product::none, c.description.dw_accumulate = true; },
                        {unsupported, {"dw_accumulate", "dw = none"}});
  expect_backward_error([](auto& c) { c.description.dx = static_cast<Product>(3); }, {invalid, {"dx = 3"}});
  expect_backward_error([](auto& c) { c.description.dw = static_cast<Product>(3); }, {invalid, {"dw = 3"}});
  expect_backward_error(
      [](auto& c) {
        c.description.weight = {DType::s4, Granularity::group};
      },
      {unsupported, {"s4_group"}});
  expect_backward_error([](auto& c) { c.description.activation = Activation::none; },
                        {unsupported, {"activation = none"}});
  expect_backward_error([](auto& c) { c.description.activation = Activation::static_per_tensor; },
                        {invalid, {"static_scale = 0"}});
  expect_backward_error([](auto& c) { c.description.rounding = static_cast<Rounding>(2); },
                        {invalid, {"rounding = 2"}});
  expect_backward_error([](auto& c) { c.description.n = 200000; }, {unsupported, {"n = 200000", "int8 dX", "131071"}});
  expect_backward_error([](auto& c) { c.description.m = 200000, c.description.dw = Product::int8; },
                        {unsupported, {"m = 200000", "int8 dW", "131071"}});
  for (const std::int64_t block : {1, 64, 127, 129, 384, 2048, -128}) {
    expect_backward_error([&](auto& c) { c.description.gradient_block = block; },
                          {unsupported,
                           {"LinearBackwardPlan::select", "gradient_block = " + std::to_string(block) + ",",
                            "0, 128, 256, 512 or 1024"}});
  }
  expect_backward_error(
      [](auto& c) { c.description.gradient_block = 128, c.description.dx = Product::dequantized; },
      {unsupported, {"gradient_block = 128 with dx = dequantized, dw = dequantized", "expected an int8 product"}});
  expect_backward_error([](auto& c) { c.description.device = Device::cuda(99); }, {unsupported, {"no kernel"}});
}

TEST(BadArguments, LinearBackward) {
  const auto mismatch = Status::shape_mismatch;
  const auto invalid = Status::invalid_argument;
  expect_backward_error([](auto& c) { c.args.dy.shape[0] = 4; }, {mismatch, {"LinearBackwardPlan::run", "at most 3"}});
  expect_backward_error([](auto& c) { c.args.dy.dtype = DType::f16; }, {mismatch, {"dy is f16"}});
  expect_backward_error([](auto& c) { c.args.weight = {}; }, {mismatch, {"weight is absent"}});
  expect_backward_error([](auto& c) { c.args.weight_scale.shape[0] = 4; }, {mismatch, {"weight_scale is f32 (4)"}});
  expect_backward_error([](auto& c) { c.args.x = matrix<const std::int8_t>(c.x.data(), 4, 3); },
                        {mismatch, {"x is s8 (4, 3)"}});
  expect_backward_error([](auto& c) { c.args.x_scale = {}; }, {mismatch, {"x_scale is absent"}});
  expect_backward_error([](auto& c) { c.args.dx = {}; }, {mismatch, {"dx is absent"}});
  expect_backward_error([](auto& c) { c.args.dw = {}; }, {mismatch, {"dw is absent"}});
  expect_backward_error([](auto& c) { c.args.db = {}; }, {mismatch, {"db is absent"}});
  expect_backward_error([](auto& c) { c.description.dx = Product::none; }, {mismatch, {"dx is f32", "no use"}});
  expect_backward_error([](auto& c) { c.description.dw = Product::none; }, {mismatch, {"dw is f32", "no use"}});
  expect_backward_error([](auto& c) { c.description.db = false; }, {mismatch, {"db is f32", "no use"}});
  expect_backward_error([](auto& c) { c.args.dx.data = c.dw.data(); }, {invalid, {"dx at", "overlaps dw at"}});
  expect_backward_error([](auto& c) { c.args.db.data = c.dy.data(); }, {invalid, {"dy at", "overlaps db at"}});
  expect_backward_error([](auto& c) { c.workspace.size = 3; }, {Status::workspace_too_small, {"workspace of 3 bytes"}});
}

// What looks like an overlap but is not: two column slices of one matrix; and inputs, which may share memory.
TEST(GoodArguments, SlicesOfOneMatrix) {
  std::vector<float> both(kRows * 2 * kCols, 0.5f);
  std::vector<float> scale(kRows);
  const QuantizeDescription description{.rows = kRows, .cols = kCols};
  const auto plan = FakeQuantizePlan::select(description);
  const auto x = matrix<const float>(both.data(), kRows, kCols, 2 * kCols);
  const auto y = matrix(both.data() + kCols, kRows, kCols, 2 * kCols);
  EXPECT_TRUE(plan.can_implement({.x = x, .y = y, .scale = vector(scale.data(), kRows)}));
  const auto shifted = matrix(both.data() + kCols - 1, kRows, kCols, 2 * kCols);
  EXPECT_FALSE(plan.can_implement({.x = x, .y = shifted, .scale = vector(scale.data(), kRows)}));
  const auto wrapped = matrix(both.data() + kCols + 1, kRows - 1, kCols, 2 * kCols);
  const auto x_fewer = matrix<const float>(both.data(), kRows - 1, kCols, 2 * kCols);
  EXPECT_FALSE(plan.can_implement({.x = x_fewer, .y = wrapped, .scale = vector(scale.data(), kRows - 1)}));
}

TEST(GoodArguments, WhatLiesBetweenTwoRows) {
  // A vector in the padding of a matrix shares no byte with it.
  std::vector<float> x(kRows * 16, 0.5f);
  std::vector<std::int8_t> q(kRows * kCols);
  const QuantizePlan plan = QuantizePlan::select({.rows = kRows, .cols = kCols});
  for (std::int64_t at = 0; at + kRows <= kRows * 16; ++at) {
    const std::int64_t row = at / 16, col = at % 16;
    const bool in_padding = row < kRows - 1 ? col >= kCols && col + kRows <= 16 : col >= kCols;
    const Verdict verdict = plan.can_implement({.x = matrix<const float>(x.data(), kRows, kCols, 16),
                                                .q = matrix(q.data(), kRows, kCols),
                                                .scale = vector(x.data() + at, kRows)});
    EXPECT_EQ(static_cast<bool>(verdict), in_padding) << "scale at " << at << ": " << verdict.reason;
  }
}

TEST(GoodArguments, EmptyShapesTakeNullPointers) {
  for (const auto& [rows, cols] : {std::pair{0, 6}, {4, 0}, {0, 0}}) {
    const auto plan = QuantizePlan::select({.rows = rows, .cols = cols});
    std::vector<float> scale(4, 77.0f);
    plan.run({.x = matrix<const float>(nullptr, rows, cols),
              .q = matrix<std::int8_t>(nullptr, rows, cols),
              .scale = vector(scale.data(), rows)});
    EXPECT_EQ(scale, std::vector<float>(4, 77.0f));
  }
}

TEST(Names, OfValuesOutsideTheEnumeration) {
  EXPECT_EQ(name(static_cast<DType>(200)), "?");
  EXPECT_EQ(bits(static_cast<DType>(200)), 0);
  EXPECT_EQ(name(static_cast<Product>(200)), "?");
}

}  // namespace
}  // namespace octile
