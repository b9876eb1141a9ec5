// SmoothQuant in checkpoints: folding does not change the model, and where it is not done.
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "checkpoint_levels.h"
#include "checkpoint_model.h"
#include "octile/checkpoint/measure.h"

namespace octile::checkpoint {
namespace {

// x goes through the norm, the layers and the next layers as before: (norm / s) * (W * s).
TEST(Quantize, FoldsWithoutChangingTheModel) {
  for (const ElementType type : {ElementType::f32, ElementType::bf16}) {
    const Model model(type);
    QuantizeOptions options;
    options.activation = Activation::static_per_tensor;
    options.calibration = model.calibration;
    options.smoothing = Smoothing{.search = false, .alpha = 0.5};
    const QuantizeReport report = model.quantize(options);
    ASSERT_EQ(report.smoothed.size(), 4u);
    ASSERT_TRUE(report.not_smoothed.empty());
    const Checkpoint before = Checkpoint::open(model.in), after = Checkpoint::open(model.out);
    for (const SmoothedReport& group : report.smoothed) {
      const bool norm = before.get(group.before + ".weight").shape.size() == 1;
      const std::vector<float> old_norm = before.values(group.before + ".weight");
      const std::vector<float> new_norm = norm ? after.values(group.before + ".weight") : std::vector<float>();
      for (const std::string& layer : group.layers) {
        const std::vector<float> old_weight = before.values(layer + ".weight"), new_weight = weight_of(after, layer);
        const std::vector<float> scale = after.values(layer + ".weight_scale");
        const std::int64_t k = before.get(layer + ".weight").shape[1];
        if (!norm || layer.ends_with("up_proj") || layer.ends_with("v_proj")) continue;  // checked below
        for (std::size_t i = 0; i < old_weight.size(); ++i) {
          const auto row = i / static_cast<std::size_t>(k), j = i % static_cast<std::size_t>(k);
          // Half a step of the quantizer (and the rounding of bf16 scales), through the norm.
          EXPECT_NEAR(new_norm[j] * new_weight[i], old_norm[j] * old_weight[i],
                      0.75f * scale[row] * std::fabs(new_norm[j]))
              << layer << " " << i;
        }
        // The outlier channels have shrunk: their factor is far above the others'.
        EXPECT_GT(std::fabs(old_norm[3] / new_norm[3]), 3 * std::fabs(old_norm[4] / new_norm[4]));
        EXPECT_LT(after.values(layer + ".input_scale")[0], 50.0f / 127);
      }
    }
    // The second layer's columns are multiplied by what the first one's rows are divided by.
    const std::tuple<const char*, const char*, const char*> pairs[] = {
        {"post_attention_layernorm", "mlp.up_proj", "mlp.down_proj"},
        {"input_layernorm", "self_attn.v_proj", "self_attn.o_proj"}};
    for (const auto& [norm, first, second] : pairs) {
      const std::vector<float> old_norm = before.values(kBlock + norm + ".weight");
      const std::vector<float> new_norm = after.values(kBlock + norm + ".weight");
      const std::vector<float> old_first = before.values(kBlock + first + ".weight");
      const std::vector<float> old_second = before.values(kBlock + second + ".weight");
      const std::vector<float> new_first = weight_of(after, kBlock + first),
                               new_second = weight_of(after, kBlock + second);
      const std::size_t inner = old_first.size() / kHidden;
      Difference product;
      for (std::size_t i = 0; i < inner; ++i) {
        for (std::size_t j = 0; j < kHidden; ++j) {
          const float a = old_norm[j] * old_first[i * kHidden + j] * old_second[j * inner + i];
          const float b = new_norm[j] * new_first[i * kHidden + j] * new_second[j * inner + i];
          product.add({&a, 1}, {&b, 1});
        }
      }
      // Two quantized factors of at least 30 dB each; without the fold it would be below 10.
      EXPECT_GT(product.sqnr(), 25) << first;
    }
  }
}

TEST(Quantize, FoldsOnlyWhereItIsExact) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"model_type":"bert"})", "also feeds the residual"},
      {R"({"model_type":"gemma2"})", "no rule for the architecture gemma2"},
      {R"({"model_type":"opt","do_layer_norm_before":false})", "also feeds the residual"},
      {"{}", "no config.json says"},
  };
  for (const auto& [config, reason] : cases) {
    const Model model(ElementType::f32, config);
    QuantizeOptions options;
    options.calibration = model.calibration;
    options.smoothing = Smoothing{};
    const QuantizeReport report = model.quantize(options);
    EXPECT_TRUE(report.smoothed.empty());
    ASSERT_EQ(report.not_smoothed.size(), 7u);
    EXPECT_NE(report.not_smoothed[0].reason.find(reason), std::string::npos) << report.not_smoothed[0].reason;
    EXPECT_EQ(Checkpoint::open(model.out).values(kBlock + "input_layernorm.weight"), model.tensors[1].values);
  }
  // v reads the same input as q and k: if it stays as it is, so must they.
  const Model model;
  QuantizeOptions options;
  options.calibration = model.calibration;
  options.smoothing = Smoothing{};
  options.selection.ignore = {"*.v_proj"};
  const QuantizeReport report = model.quantize(options);
  EXPECT_EQ(report.smoothed.size(), 3u);
  EXPECT_EQ(report.not_smoothed[0].reason, "self_attn.v_proj reads the same input and is not quantized");
}

TEST(Quantize, FoldsIntoValuesWhereHeadsDoNotShareThem) {
  const auto plan = [](const char* config, const std::string& value, const std::string& output, std::int64_t values) {
    const Folder folder;
    write_file(folder.path / "model.safetensors",
               {normal("x." + value + ".weight", {values, 8}, 1), normal("x." + output + ".weight", {8, 8}, 2)});
    write_text(folder.path / "config.json", config);
    const Checkpoint model = Checkpoint::open(folder.path);
    return plan_smoothing(model, find_layers(model).layers);
  };
  const SmoothingPlan bert = plan(R"({"model_type":"bert"})", "attention.self.value", "attention.output.dense", 8);
  ASSERT_EQ(bert.groups.size(), 1u);
  EXPECT_EQ(bert.groups[0].before, "x.attention.self.value");
  ASSERT_EQ(bert.others.size(), 1u);
  EXPECT_NE(bert.others[0].reason.find("also feeds the residual"), std::string::npos);
  for (const char* const config : {R"({"model_type":"opt"})", R"({"model_type":"opt","do_layer_norm_before":false})"}) {
    EXPECT_EQ(plan(config, "self_attn.v_proj", "self_attn.out_proj", 8).groups.size(), 1u) << config;
  }
  const SmoothingPlan grouped = plan(R"({"model_type":"llama"})", "self_attn.v_proj", "self_attn.o_proj", 4);
  EXPECT_TRUE(grouped.groups.empty());
  EXPECT_NE(grouped.others[0].reason.find("the 8 inputs of self_attn.o_proj are not the 4 outputs of self_attn.v_proj"),
            std::string::npos)
      << grouped.others[0].layer << ": " << grouped.others[0].reason;
}

// A group's tensors are checked before any of them is scaled.
TEST(Quantize, FoldsNothingIntoTensorsThatDoNotFit) {
  const auto quantize = [](const Values& extra, ElementType type = ElementType::f32) {
    const Model model(type);
    std::vector<Values> tensors = model.tensors;
    std::erase_if(tensors, [&](const Values& tensor) { return tensor.name == extra.name; });
    tensors.push_back(extra);
    write_file(model.in / "model.safetensors", tensors);
    write_calibration(model.calibration, tensors);
    QuantizeOptions options;
    options.calibration = model.calibration;
    options.smoothing = Smoothing{};
    QuantizeReport report = model.quantize(options);
    const Checkpoint after = Checkpoint::open(model.out);
    if (after.get(extra.name).type == extra.type) {  // not quantized, so unchanged
      const Bytes bytes = after.bytes(extra.name);
      EXPECT_EQ(std::vector<std::byte>(bytes.begin(), bytes.end()), bytes_of(extra)) << extra.name;
    }
    return report;
  };
  const auto reason = [](const QuantizeReport& report) {
    return report.not_smoothed.empty() ? "" : report.not_smoothed.front().reason;
  };
  const std::string norm = kBlock + "input_layernorm";
  const auto bias = [&](std::vector<std::int64_t> shape, std::size_t count, ElementType type = ElementType::f32) {
    return Values{norm + ".bias", std::move(shape), std::vector<float>(count, 1), type};
  };
  const QuantizeReport good = quantize({norm + ".bias", {kHidden}, std::vector<float>(kHidden, 0)});
  EXPECT_EQ(good.smoothed.size(), 4u) << reason(good);
  EXPECT_EQ(reason(quantize(bias({3}, 3))), norm + ".bias is F32 (3), not 64 floats");
  EXPECT_EQ(reason(quantize(bias({0}, 0))), norm + ".bias is F32 (0), not 64 floats");
  EXPECT_EQ(reason(quantize(bias({}, 1))), norm + ".bias is F32 (), not 64 floats");
  EXPECT_EQ(reason(quantize(bias({kHidden, 2}, 2 * kHidden))), norm + ".bias is F32 (64, 2), not 64 floats");
  EXPECT_EQ(reason(quantize(bias({kHidden}, kHidden, ElementType::s16))), norm + ".bias is I16 (64), not 64 floats");
  EXPECT_EQ(reason(quantize(bias({kHidden}, kHidden, ElementType::s64))), norm + ".bias is I64 (64), not 64 floats");
  EXPECT_EQ(reason(quantize({norm + ".weight", {kHidden}, std::vector<float>(kHidden, 1), ElementType::s64})),
            "there is no float input_layernorm.weight of one or two dimensions");

  // One of the layers behind the norm is wider than the others.
  const QuantizeReport wide = quantize(normal(kBlock + "self_attn.k_proj.weight", {kHidden, 2 * kHidden}, 1));
  ASSERT_EQ(wide.not_smoothed.size(), 3u);
  for (const NotSmoothed& layer : wide.not_smoothed) {
    EXPECT_NE(layer.reason.find("128 inputs of self_attn.k_proj are not the 64 outputs of input_layernorm"),
              std::string::npos)
        << layer.reason;
  }

  // A quotient that overflows its type: these factors are below 1.
  Values large = bias({kHidden}, kHidden, ElementType::f16);
  large.values[5] = 65504;
  EXPECT_NE(reason(quantize(large, ElementType::f16)).find(".bias, divided, does not fit F16: element 5 is 65504"),
            std::string::npos);
  large.name = norm + ".weight";
  EXPECT_NE(reason(quantize(large, ElementType::f16)).find(".weight, divided, does not fit F16: element 5 is 65504"),
            std::string::npos);
  large.values[5] = std::nanf("");
  EXPECT_NE(reason(quantize(large, ElementType::f16)).find("element 5 is nan"), std::string::npos);
}

// With a static scale, the excess of unseen rows over the maxima decides whether a search smooths at all.
TEST(Quantize, TheSearchMayFindThatNoSmoothingIsBest) {
  const Model model;
  QuantizeOptions options{.activation = Activation::static_per_tensor, .overwrite = true};
  options.calibration = model.calibration;
  options.smoothing = Smoothing{.search = true};
  write_calibration(model.calibration, model.tensors, true, {}, {0.0f, 0.0f});
  EXPECT_EQ(model.quantize(options).smoothed.size(), 4u);
  write_calibration(model.calibration, model.tensors, true, {}, {0.5f, 100.0f});
  const QuantizeReport report = model.quantize(options);
  EXPECT_TRUE(report.smoothed.empty());
  ASSERT_EQ(report.not_smoothed.size(), 7u);
  EXPECT_EQ(report.not_smoothed[0].reason, "no alpha would gain more than 0.2 dB on unseen inputs");
  const Checkpoint before = Checkpoint::open(model.in), after = Checkpoint::open(model.out);
  const std::string norm = kBlock + "input_layernorm.weight";
  EXPECT_EQ(before.values(norm), after.values(norm));
  ASSERT_EQ(report.warnings.size(), 1u);
  EXPECT_NE(report.warnings[0].find("smoothing is based on 10 calibration rows. With fewer than 1024, unseen"),
            std::string::npos);
  options.activation = Activation::dynamic_per_token;  // a scale per token: nothing is clamped
  const QuantizeReport dynamic = model.quantize(options);
  EXPECT_EQ(dynamic.smoothed.size(), 4u);
  EXPECT_TRUE(dynamic.warnings.empty());
  options.activation = Activation::static_per_tensor;
  for (const std::vector<float>& bad : {std::vector<float>{2, 1}, {0.5f, -1}, {0, 1}}) {
    write_calibration(model.calibration, model.tensors, true, {}, bad);
    EXPECT_ERROR(model.quantize(options), "input_excess = (");
  }
  write_calibration(model.calibration, model.tensors, true, {kBlock + "self_attn.q_proj.input_excess", {}}, {0, 0});
  EXPECT_NO_THROW(model.quantize(options));  // as in older files
}

TEST(Quantize, SearchesAndFeedsBack) {
  const Model model;
  QuantizeOptions options;
  options.calibration = model.calibration;
  options.smoothing = Smoothing{.search = true};
  options.method = WeightMethod::error_feedback;
  const QuantizeReport report = model.quantize(options);
  EXPECT_EQ(report.smoothed.size(), 4u);
  write_calibration(model.calibration, model.tensors, false);
  options.overwrite = true;
  EXPECT_ERROR(model.quantize(options), "has no input_second_moments; octile.calibrate(");  // for the feedback
  options.method = WeightMethod::nearest;
  EXPECT_ERROR(model.quantize(options), "has no input_second_moments; octile.calibrate(");  // for the search
  const std::string down = kBlock + "mlp.down_proj";
  write_calibration(model.calibration, model.tensors, true, {down + ".input_second_moments", {}});
  EXPECT_ERROR(model.quantize(options), "has no input_second_moments for \"" + down + "\", which the search for alpha");
  options.smoothing.reset();
  options.method = WeightMethod::error_feedback;
  EXPECT_ERROR(model.quantize(options), "has no input_second_moments for \"" + down + "\"; leave such layers out");
}

}  // namespace
}  // namespace octile::checkpoint
