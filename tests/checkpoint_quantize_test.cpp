// quantize_checkpoint: what is written, that it is all or nothing, what is refused, and that folding changes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>

#include "checkpoint_files.h"
#include "checkpoint_levels.h"
#include "octile/checkpoint/measure.h"
#include "octile/checkpoint/quantize.h"

namespace octile::checkpoint {
namespace {

constexpr std::int64_t kHidden = 64, kInner = 96;
const std::string kBlock = "model.layers.0.";

// A block of LLaMA's, with what stands around it.
std::vector<Values> llama(ElementType type = ElementType::f32) {
  std::vector<Values> tensors = {normal("model.embed_tokens.weight", {10, kHidden}, 1, type),
                                 normal(kBlock + "input_layernorm.weight", {kHidden}, 2, type),
                                 normal(kBlock + "post_attention_layernorm.weight", {kHidden}, 3, type),
                                 normal("lm_head.weight", {10, kHidden}, 4, type)};
  for (const char* const name : {"q", "k", "v", "o"}) {
    tensors.push_back(normal(kBlock + "self_attn." + name + "_proj.weight", {kHidden, kHidden},
                             5u + static_cast<unsigned>(*name), type));
  }
  tensors.push_back(normal(kBlock + "mlp.gate_proj.weight", {kInner, kHidden}, 6, type));
  tensors.push_back(normal(kBlock + "mlp.up_proj.weight", {kInner, kHidden}, 7, type));
  tensors.push_back(normal(kBlock + "mlp.down_proj.weight", {kHidden, kInner}, 8, type));
  return tensors;
}

// Inputs of which one channel in sixteen is a hundred times the others.
void write_calibration(const std::filesystem::path& path, const std::vector<Values>& tensors, bool moments = true) {
  std::vector<Values> all;
  for (const Values& tensor : tensors) {
    if (tensor.shape.size() != 2) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - std::string(".weight").size());
    const std::int64_t k = tensor.shape[1];
    std::vector<float> most(static_cast<std::size_t>(k), 1), h(static_cast<std::size_t>(k * k));
    for (std::size_t j = 0; j < most.size(); ++j) {
      if (j % 16 == 3) most[j] = 100;
      h[j * most.size() + j] = most[j] * most[j];
    }
    all.push_back({name + ".input_channel_max", {k}, most});
    all.push_back({name + ".input_max", {1}, {100}});
    all.push_back({name + ".rows", {1}, {10}, ElementType::s64});
    if (moments) all.push_back({name + ".input_second_moments", {k, k}, h});
  }
  write_file(path, all, {{"format", "octile-calibration"}, {"version", "1"}});
}

struct Model {
  explicit Model(ElementType type = ElementType::f32,
                 const std::string& config = R"({"model_type": "llama", "x": 1e-6})")
      : tensors(llama(type)) {
    std::filesystem::create_directory(in);
    write_file(in / "model.safetensors", tensors, {{"format", "pt"}});
    write_text(in / "config.json", config);
    write_text(in / "tokenizer.json", std::string("{\"a\":\0\xff}", 8));
    std::filesystem::create_directory(in / "1_Pooling");
    write_text(in / "1_Pooling" / "config.json", "{}");
    write_calibration(calibration, tensors);
  }
  QuantizeReport quantize(QuantizeOptions options = {}) const { return quantize_checkpoint(in, out, options); }

  Folder folder;
  std::filesystem::path in = folder.path / "in", out = folder.path / "out", calibration = folder.path / "calibration";
  std::vector<Values> tensors;
};

std::vector<float> weight_of(const Checkpoint& model, const std::string& name) {
  for (const Layer& layer : find_layers(model).layers) {
    if (layer.name == name) return read_weight(model, layer);
  }
  return model.values(name + ".weight");
}

TEST(Quantize, WritesEveryFormat) {
  for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
    const Model model(type);
    std::vector<QuantizeOptions> all(3);
    all[1].format = Format::w8a8_static;
    all[1].calibration = model.calibration;
    all[2].format = Format::w4a16;
    all[2].group = 32;
    all[2].zero_points = true;
    for (QuantizeOptions& options : all) {
      options.overwrite = true;
      const QuantizeReport report = model.quantize(options);
      ASSERT_EQ(report.layers.size(), 7u);
      EXPECT_EQ(report.left_out.size(), 2u);
      const Checkpoint before = Checkpoint::open(model.in), after = Checkpoint::open(model.out);
      EXPECT_EQ(report.size_after, after.size());
      EXPECT_EQ(after.config().method, "compressed-tensors");
      EXPECT_EQ(after.config().format, options.format == Format::w4a16 ? "pack-quantized" : "int-quantized");
      for (const Layer& layer : find_layers(after).layers) {
        const std::string scale = layer.name + ".weight_scale";
        EXPECT_EQ(after.get(scale).type, type);
        EXPECT_EQ(layer.static_input, options.format == Format::w8a8_static);
        if (layer.static_input) {
          EXPECT_NEAR(after.values(layer.name + ".input_scale")[0], 100.0f / 127, 0.004f);  // bf16 rounds by 2^-9
        }
        Difference difference;
        difference.add(weight_of(before, layer.name), read_weight(after, layer));
        // Every weight is off by half a step at most, and by what the scale's rounding moves the level: 2^-9 of 127 or
        // 7 levels.
        const std::vector<float> scales = after.values(scale);
        const float largest = *std::max_element(scales.begin(), scales.end());
        EXPECT_LE(difference.max_error, largest * (layer.zero_points ? 1.0 : 0.75)) << layer.name;
        const auto& reports = report.layers;
        const auto found =
            std::find_if(reports.begin(), reports.end(), [&](const LayerReport& r) { return r.name == layer.name; });
        ASSERT_NE(found, reports.end());
        EXPECT_EQ(found->sqnr, difference.sqnr());  // what is reported is what the file gives
        EXPECT_GT(found->sqnr, options.format == Format::w4a16 ? 15 : 35);
      }
      for (const char* const name : {"model.embed_tokens.weight", "lm_head.weight"})
        EXPECT_EQ(after.values(name), before.values(name));
      EXPECT_EQ(read_all(model.out / "tokenizer.json"), read_all(model.in / "tokenizer.json"));
      EXPECT_EQ(read_all(model.out / "1_Pooling/config.json"), "{}");
      EXPECT_EQ(read_all(model.out / "config.json").rfind("{\n  \"model_type\": \"llama\",\n  \"x\": 1e-06,\n", 0), 0u);
      EXPECT_EQ(files_in(model.folder.path), 3u);
    }
  }
}

TEST(Quantize, GivesTheSameBytes) {
  const Model model;
  QuantizeOptions options;
  options.format = Format::w4a16;
  options.group = 0;
  options.threads = 1;
  model.quantize(options);
  const std::string first = read_all(model.out / "model.safetensors");
  options.threads = 3;
  options.overwrite = true;
  model.quantize(options);
  EXPECT_EQ(read_all(model.out / "model.safetensors"), first);
}

TEST(Quantize, KeepsShards) {
  const Model model;
  std::filesystem::remove(model.in / "model.safetensors");
  const std::ptrdiff_t half = 6;
  write_file(model.in / "m-1.safetensors", {model.tensors.begin(), model.tensors.begin() + half});
  write_file(model.in / "m-2.safetensors", {model.tensors.begin() + half, model.tensors.end()});
  std::string index;
  for (std::size_t i = 0; i < model.tensors.size(); ++i) {
    index +=
        (i ? ",\"" : "\"") + model.tensors[i].name + (i < half ? "\":\"m-1.safetensors\"" : "\":\"m-2.safetensors\"");
  }
  write_text(model.in / "model.safetensors.index.json", "{\"weight_map\":{" + index + "}}");
  EXPECT_EQ(model.quantize().layers.size(), 7u);
  const Checkpoint after = Checkpoint::open(model.out);  // checks the index against the shards
  EXPECT_EQ(after.shards().size(), 2u);
  EXPECT_EQ(after.shard_of(kBlock + "mlp.down_proj.weight_scale"), 1u);
}

// x goes through norm, layers and the next layers as before: (norm / s) * (W * s).
TEST(Quantize, FoldsWithoutChangingTheModel) {
  for (const ElementType type : {ElementType::f32, ElementType::bf16}) {
    const Model model(type);
    QuantizeOptions options;
    options.format = Format::w8a8_static;
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
        if (!norm || layer.ends_with("up_proj") || layer.ends_with("v_proj")) continue;  // looked at below
        for (std::size_t i = 0; i < old_weight.size(); ++i) {
          const auto row = i / static_cast<std::size_t>(k), j = i % static_cast<std::size_t>(k);
          // Half a step of the quantizer (and the rounding of bf16 scales), through the norm.
          EXPECT_NEAR(new_norm[j] * new_weight[i], old_norm[j] * old_weight[i],
                      0.75f * scale[row] * std::fabs(new_norm[j]))
              << layer << " " << i;
        }
        // The loud channels have become quiet: their factor is far above the others'.
        EXPECT_GT(std::fabs(old_norm[3] / new_norm[3]), 3 * std::fabs(old_norm[4] / new_norm[4]));
        EXPECT_LT(after.values(layer + ".input_scale")[0], 50.0f / 127);
      }
    }
    // What the second layer's columns are multiplied by, the first one's rows are divided by.
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
  // v reads what q and k read: if it stays as it is, so must they.
  const Model model;
  QuantizeOptions options;
  options.calibration = model.calibration;
  options.smoothing = Smoothing{};
  options.selection.ignore = {"*.v_proj"};
  const QuantizeReport report = model.quantize(options);
  EXPECT_EQ(report.smoothed.size(), 3u);
  EXPECT_NE(report.not_smoothed[0].reason.find("v_proj reads the same input and is not quantized"), std::string::npos);
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
  EXPECT_EQ(plan(R"({"model_type":"opt"})", "self_attn.v_proj", "self_attn.out_proj", 8).groups.size(), 1u);
  const SmoothingPlan grouped = plan(R"({"model_type":"llama"})", "self_attn.v_proj", "self_attn.o_proj", 4);
  EXPECT_TRUE(grouped.groups.empty());
  EXPECT_NE(grouped.others[0].reason.find("its 8 inputs are not the 4 outputs"), std::string::npos)
      << grouped.others[0].layer << ": " << grouped.others[0].reason;
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
  EXPECT_ERROR(model.quantize(options), "has no input_second_moments for");  // the feedback's
  options.method = WeightMethod::nearest;
  EXPECT_ERROR(model.quantize(options), "which the search for alpha needs");
}

// ---- Refusals: nothing is written ----

TEST(Quantize, RefusesWishes) {
  const Model model;
  const auto refuses = [&](auto change, const char* says) {
    QuantizeOptions options;
    options.calibration = model.calibration;
    change(options);
    EXPECT_ERROR(model.quantize(options), says);
    EXPECT_EQ(files_in(model.folder.path), 2u) << says;
  };
  refuses([](auto& o) { o.format = Format::w4a16, o.group = 16; }, "a group of 16 is none of");
  refuses([](auto& o) { o.zero_points = true; }, "zero points are of w4a16");
  refuses([](auto& o) { o.format = Format::w4a16, o.smoothing = Smoothing{}; },
          "smoothing is for quantized activations");
  refuses([](auto& o) { o.smoothing = Smoothing{.alpha = 1.5}; }, "is not within 0..1");
  refuses([](auto& o) { o.format = Format::w8a8_static, o.calibration.reset(); }, "w8a8-static needs a calibration");
  refuses([](auto& o) { o.smoothing = Smoothing{}, o.calibration.reset(); }, "smoothing needs a calibration");
  refuses([](auto& o) { o.method = WeightMethod::error_feedback, o.calibration.reset(); },
          "error feedback needs a calibration");
  refuses([](auto& o) { o.selection.ignore = {"*"}; }, "there is no linear layer to quantize");
  refuses([](auto& o) { o.format = Format::w4a16, o.selection.only = {"*down_proj"}, o.group = 64; },
          "there is no linear layer");
  refuses([&](auto& o) { o.calibration = model.in / "model.safetensors"; }, "does not say octile-calibration");
}

TEST(Quantize, RefusesPlaces) {
  const Model model;
  const auto refuses = [&](const std::filesystem::path& to, const char* says, bool overwrite = true) {
    QuantizeOptions options;
    options.overwrite = overwrite;
    EXPECT_ERROR(quantize_checkpoint(model.in, to, options), says);
  };
  refuses(model.in, "it is what is read");
  refuses(model.in / ".." / "in", "it is what is read");
  refuses(model.in / "out", "inside of what is read");
  refuses(model.folder.path / "none" / "out", "there is no folder");
  refuses(model.calibration, "it is a file, what is read is not");
  std::filesystem::create_directory(model.out);
  refuses(model.out, "it is there already", false);
  write_text(model.out / "thesis.txt", "years of work");
  refuses(model.out, "thesis.txt in it does not come from");
  EXPECT_EQ(read_all(model.out / "thesis.txt"), "years of work");
}

TEST(Quantize, RefusesWhatIsQuantized) {
  const Model model;
  model.quantize();
  EXPECT_ERROR(quantize_checkpoint(model.out, model.folder.path / "twice", {}),
               "is quantized already (compressed-tensors)");
  write_text(model.out / "config.json", "{}");
  EXPECT_ERROR(quantize_checkpoint(model.out, model.folder.path / "twice", {}), "is quantized already (int-quantized)");
  EXPECT_FALSE(std::filesystem::exists(model.folder.path / "twice"));
}

TEST(Quantize, RefusesValues) {
  const Model model;
  std::vector<Values> tensors = model.tensors;
  tensors.back().values[kInner + 2] = std::nanf("");
  write_file(model.in / "model.safetensors", tensors);
  EXPECT_ERROR(model.quantize(), "mlp.down_proj\": the weight is nan at (1, 2)");
  EXPECT_EQ(files_in(model.folder.path), 2u);
  // A static scale that the calibration cannot give.
  write_file(model.in / "model.safetensors", model.tensors);
  std::vector<Values> calibration;
  for (const Values& tensor : model.tensors) {
    if (tensor.shape.size() != 2) continue;
    calibration.push_back({tensor.name.substr(0, tensor.name.size() - 7) + ".input_channel_max",
                           {tensor.shape[1]},
                           std::vector<float>(static_cast<std::size_t>(tensor.shape[1]), std::nanf(""))});
  }
  const Metadata metadata = {{"format", "octile-calibration"}, {"version", "1"}};
  write_file(model.calibration, calibration, metadata);
  QuantizeOptions options;
  options.format = Format::w8a8_static;
  options.calibration = model.calibration;
  EXPECT_ERROR(model.quantize(options), "is nan at channel 0, which is no maximum");
  for (Values& tensor : calibration) {  // a NaN among numbers, wherever it stands
    std::fill(tensor.values.begin(), tensor.values.end(), 1.0f);
    tensor.values[1] = std::nanf("");
  }
  write_file(model.calibration, calibration, metadata);
  EXPECT_ERROR(model.quantize(options), "is nan at channel 1, which is no maximum");
  for (Values& tensor : calibration) tensor.values[1] = -1;
  write_file(model.calibration, calibration, metadata);
  EXPECT_ERROR(model.quantize(options), "at channel 1, which is no maximum");
  calibration.pop_back();
  write_file(model.calibration, calibration, metadata);
  EXPECT_ERROR(model.quantize(options), "has no input_channel_max for");
  calibration.back().shape = {1, calibration.back().shape[0]};
  write_file(model.calibration, calibration, metadata);
  options.selection.only = {"*.up_proj"};
  EXPECT_ERROR(model.quantize(options), "not F32 (64)");
  EXPECT_EQ(files_in(model.folder.path), 2u);
}

TEST(Quantize, LeavesNothingWhenItIsStopped) {
  const Model model;
  QuantizeReport report;
  for (int stop = 0;; ++stop) {
    int calls = 0;
    try {
      quantize_checkpoint(model.in, model.out, {}, [&](std::int64_t done, std::int64_t all, const std::string&) {
        EXPECT_LE(done, all);
        if (calls++ == stop) throw std::domain_error("stop");
      });
      EXPECT_GT(stop, 10);
      break;
    } catch (const std::domain_error&) {
      EXPECT_EQ(files_in(model.folder.path), 2u) << stop;
    }
  }
  EXPECT_EQ(files_in(model.folder.path), 3u);
}

TEST(Quantize, ALoneFileCarriesItsConfig) {
  const Model model;
  const auto file = model.folder.path / "q.safetensors";
  quantize_checkpoint(model.in / "model.safetensors", file, {});
  const Checkpoint after = Checkpoint::open(file);
  EXPECT_EQ(after.config().format, "int-quantized");
  EXPECT_EQ(after.shards()[0].file.metadata().at("format"), "pt");
  EXPECT_ERROR(quantize_checkpoint(model.in / "model.safetensors", file, {}), "it is there already");
  EXPECT_ERROR(quantize_checkpoint(file, model.folder.path / "r.safetensors", {}), "is quantized already");
}

}  // namespace
}  // namespace octile::checkpoint
