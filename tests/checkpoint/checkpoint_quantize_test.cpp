// quantize_checkpoint: what it writes, that it writes all or nothing, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "checkpoint_levels.h"
#include "checkpoint_model.h"
#include "octile/checkpoint/measure.h"

namespace octile::checkpoint {
namespace {

TEST(Quantize, WritesEveryFormat) {
  for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
    const Model model(type);
    const WeightFormat groups = {DType::s8, Granularity::group, 32};
    std::vector<QuantizeOptions> all = {
        {},
        {.activation = Activation::static_per_tensor, .calibration = model.calibration},
        {.weight = {DType::s4, Granularity::group, 32, true}, .activation = Activation::none},
        {.weight = {DType::s4, Granularity::group, 32}, .activation = Activation::dynamic_per_token},
        {.weight = groups},
        {.weight = groups, .activation = Activation::static_per_tensor, .calibration = model.calibration},
        {.weight = groups, .activation = Activation::none},
        {.activation = Activation::none}};
    for (QuantizeOptions& options : all) {
      options.overwrite = true;
      const QuantizeReport report = model.quantize(options);
      ASSERT_EQ(report.layers.size(), 7u);
      EXPECT_EQ(report.left_out.size(), 2u);
      const Checkpoint before = Checkpoint::open(model.in), after = Checkpoint::open(model.out);
      EXPECT_EQ(report.size_after, after.size());
      EXPECT_EQ(after.config().method, "compressed-tensors");
      const bool is_static = options.activation == Activation::static_per_tensor;
      const bool is_dynamic = options.activation == Activation::dynamic_per_token;
      const bool packs = options.activation == Activation::none || options.weight.type == DType::s4;
      EXPECT_EQ(after.config().format, packs ? "pack-quantized" : "int-quantized");
      for (const Layer& layer : find_layers(after).layers) {
        const std::string scale = layer.name + ".weight_scale";
        EXPECT_EQ(after.get(scale).type, type);
        EXPECT_EQ(layer.static_input, is_static);
        EXPECT_EQ(layer.dynamic_input, is_dynamic);
        EXPECT_EQ(layer.weight.type, options.weight.type);
        EXPECT_EQ(layer.weight.group, options.weight.group);
        if (layer.static_input) {
          EXPECT_NEAR(after.values(layer.name + ".input_scale")[0], 100.0f / 127, 0.004f);  // bf16 rounds by 2^-9
        }
        Difference difference;
        difference.add(weight_of(before, layer.name), read_weight(after, layer));
        // Every weight is off by at most half a step, plus the level's shift by the scale's rounding: 2^-9 of 127 or
        // 7 levels. In 4 bits the largest may be clipped, by less than a step.
        const std::vector<float> scales = after.values(scale);
        const float largest = *std::max_element(scales.begin(), scales.end());
        EXPECT_LE(difference.max_error, largest * (layer.weight.type == DType::s4 ? 1.0 : 0.75)) << layer.name;
        const auto& reports = report.layers;
        const auto found =
            std::find_if(reports.begin(), reports.end(), [&](const LayerReport& r) { return r.name == layer.name; });
        ASSERT_NE(found, reports.end());
        EXPECT_EQ(found->sqnr, difference.sqnr());  // the report agrees with the file
        EXPECT_GT(found->sqnr, options.weight.type == DType::s4 ? 15 : 35);
      }
      for (const char* const name : {"model.embed_tokens.weight", "lm_head.weight"})
        EXPECT_EQ(after.values(name), before.values(name));
      EXPECT_EQ(read_all(model.out / "tokenizer.json"), read_all(model.in / "tokenizer.json"));
      EXPECT_EQ(read_all(model.out / "1_Pooling/config.json"), "{}");
      EXPECT_EQ(read_all(model.out / "config.json").rfind(R"({"model_type": "llama", "x": 1e-6,)", 0), 0u);
      EXPECT_EQ(files_in(model.folder.path), 3u);
    }
  }
}

struct Experts {
  static constexpr std::int64_t kExperts = 3, kInner = 32, kHidden = 64;
  Folder folder;
  std::filesystem::path in = folder.path / "in", out = folder.path / "out";
  bool transposed;
  bool alternate;
  std::vector<Values> tensors;

  Experts(const std::string& model_type, bool is_transposed, ElementType type)
      : transposed(is_transposed), alternate(model_type == "gpt_oss") {
    std::filesystem::create_directory(in);
    write_text(in / "config.json", R"({"model_type": ")" + model_type + R"("})");
    const auto shape = [&](std::int64_t n, std::int64_t k) {
      return transposed ? std::vector{kExperts, k, n} : std::vector{kExperts, n, k};
    };
    tensors = {normal("l.mlp.experts.down_proj", shape(kHidden, kInner), 1, type),
               normal("l.mlp.experts.down_proj_bias", {kExperts, kHidden}, 2, type),
               normal("l.mlp.experts.gate_up_proj", shape(2 * kInner, kHidden), 3, type),
               normal("l.mlp.experts.gate_up_proj_bias", {kExperts, 2 * kInner}, 4, type),
               normal("l.o_proj.weight", {64, 64}, 5, type)};
  }

  void write() const { write_file(in / "model.safetensors", tensors); }

  // Row r of an expert's gate, or up.
  std::int64_t channel(bool up, std::int64_t r) const { return alternate ? 2 * r + up : up * kInner + r; }

  // The weight and the bias, in the given layout.
  std::pair<std::vector<float>, std::vector<float>> expected(std::int64_t e, const std::string& part) const {
    const bool down = part == "down_proj";
    const Values &weight = tensors[down ? 0 : 2], &bias = tensors[down ? 1 : 3];
    const std::int64_t rows = down ? kHidden : kInner, k = down ? kInner : kHidden, all = down ? kHidden : 2 * kInner;
    std::pair<std::vector<float>, std::vector<float>> result;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t c = down ? r : channel(part == "up_proj", r);
      result.second.push_back(bias.values[static_cast<std::size_t>(e * all + c)]);
      for (std::int64_t j = 0; j < k; ++j) {
        const std::int64_t at = transposed ? (e * k + j) * all + c : (e * all + c) * k + j;
        result.first.push_back(weight.values[static_cast<std::size_t>(at)]);
      }
    }
    return result;
  }

  QuantizeReport quantize(QuantizeOptions options) const {
    options.overwrite = true;
    return quantize_checkpoint(in, out, options);
  }
};

TEST(Quantize, TakesExpertsApart) {
  for (const char* const model : {"qwen3_5_moe", "qwen3_vl_moe", "gpt_oss"}) {
    for (const ElementType type : {ElementType::bf16, ElementType::f64}) {
      const Experts experts(model, std::string(model) != "qwen3_5_moe", type);
      experts.write();
      const Checkpoint before = Checkpoint::open(experts.in);
      for (const Layer& layer : find_layers(before).layers) {
        if (!layer.expert) continue;
        const auto [weight, bias] =
            experts.expected(layer.expert->expert, layer.name.substr(layer.name.rfind('.') + 1));
        EXPECT_EQ(read_weight(before, layer), weight) << layer.name;
        EXPECT_EQ(read_weight_f64(before, layer), std::vector<double>(weight.begin(), weight.end())) << layer.name;
      }
      const QuantizeReport report = experts.quantize({.weight = {DType::s4, Granularity::group, 32}});
      EXPECT_EQ(report.layers.size(), 10u);
      EXPECT_TRUE(report.left_out.empty());
      const Checkpoint after = Checkpoint::open(experts.out);
      EXPECT_EQ(after.config().format, experts.transposed ? "octile" : "pack-quantized");
      EXPECT_EQ(after.find("l.mlp.experts.gate_up_proj"), nullptr);
      EXPECT_EQ(after.find("l.mlp.experts.down_proj_bias"), nullptr);
      const LayerTable table = find_layers(after);
      EXPECT_EQ(table.layers.size(), 10u);
      for (std::int64_t e = 0; e < Experts::kExperts; ++e) {
        for (const std::string part : {"gate_proj", "up_proj", "down_proj"}) {
          const std::string name = "l.mlp.experts." + std::to_string(e) + "." + part;
          const auto found = std::find_if(table.layers.begin(), table.layers.end(),
                                          [&](const Layer& layer) { return layer.name == name; });
          ASSERT_NE(found, table.layers.end()) << name;
          const auto [weight, bias] = experts.expected(e, part);
          Difference difference;
          difference.add(weight, read_weight(after, *found));
          EXPECT_GT(difference.sqnr(), 18) << name;
          EXPECT_EQ(after.values(name + ".bias"), bias) << name;
          EXPECT_EQ(after.get(name + ".bias").type, type);
        }
      }
    }
  }
}

TEST(Quantize, LeavesExpertsWhole) {
  const auto reason = [](const auto& change, const QuantizeOptions& options = {}) {
    Experts experts("qwen3_5_moe", false, ElementType::f32);
    change(experts);
    experts.write();
    const QuantizeReport report = experts.quantize(options);
    EXPECT_EQ(report.layers.size(), 1u);
    EXPECT_EQ(report.left_out.size(), 1u);
    const Checkpoint before = Checkpoint::open(experts.in), after = Checkpoint::open(experts.out);
    for (const TensorInfo& tensor : before.shards().front().file.tensors()) {
      if (!tensor.name.starts_with("l.mlp.")) continue;
      EXPECT_EQ(after.values(tensor.name), before.values(tensor.name));
    }
    if (report.left_out.size() != 1) return std::string();
    EXPECT_EQ(report.left_out[0].name, "l.mlp.experts");
    EXPECT_EQ(after.config().ignore, (std::vector<std::string>{"l.mlp.experts", "lm_head"}));
    return report.left_out[0].reason;
  };
  const auto none = [](Experts&) {};
  EXPECT_EQ(reason(none, {.selection = {.ignore = {"*.experts"}, .only = {}}}), "in --ignore");
  EXPECT_EQ(reason(none, {.selection = {.ignore = {"*.down_proj"}, .only = {}}}), "in --ignore");
  EXPECT_EQ(reason(none, {.selection = {.ignore = {}, .only = {"*o_proj"}}}), "not in --only");
  EXPECT_EQ(reason(none, {.weight = {DType::s8, Granularity::group, 64}}),
            "32 inputs are not a multiple of the group, 64");
  EXPECT_EQ(reason([](Experts& e) { e.tensors.erase(e.tensors.begin(), e.tensors.begin() + 2); }),
            "experts without down_proj");
  EXPECT_EQ(reason([](Experts& e) { e.tensors.erase(e.tensors.begin() + 2, e.tensors.begin() + 4); }),
            "experts without gate_up_proj");
  EXPECT_EQ(reason([](Experts& e) { e.tensors.erase(e.tensors.begin() + 1); }),
            "experts with biases in only some layers");
  EXPECT_EQ(reason([](Experts& e) { e.tensors[0].shape = {3, 128, 16}; }), "experts of (3, 64, 64) and (3, 128, 16)");
  EXPECT_EQ(reason([](Experts& e) { e.tensors[1].shape = {64, 3}; }), "experts with biases of (3, 64) and (64, 3)");
  EXPECT_EQ(reason([](Experts& e) { write_text(e.in / "config.json", R"({"model_type": "llama4_text"})"); }),
            "experts of llama4_text in one tensor");
  EXPECT_EQ(reason([](Experts& e) { write_text(e.in / "config.json", "{}"); }),
            "experts in one tensor: only the model_type of a config.json says how they lie in it");
}

TEST(Quantize, RefusesNamesOfExpertsThatAreThere) {
  for (const char* const name : {"l.mlp.experts.1.up_proj.bias", "l.mlp.experts.1.up_proj.weight_scale"}) {
    Experts experts("gpt_oss", true, ElementType::f32);
    experts.tensors.push_back(normal(name, {32}, 9));
    experts.write();
    try {
      experts.quantize({});
      FAIL();
    } catch (const FileError& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("would be written with \"") + name), std::string::npos)
          << error.what();
    }
  }
}

// Values whose squares overflow or underflow f64 are still told apart, in any order.
TEST(Measure, DifferencesOfTinyAndHugeValues) {
  const std::vector<double> tiny = {1e-300, -3e-300}, zeros = {0, 0}, one = {1, 2}, near = {1, 2.5}, huge = {1e300, 0};
  Difference difference;
  difference.add(zeros, zeros);
  EXPECT_TRUE(difference.is_exact());
  EXPECT_EQ(difference.sqnr(), std::numeric_limits<double>::infinity());
  difference.add(tiny, zeros);
  EXPECT_FALSE(difference.is_exact());
  EXPECT_EQ(difference.sqnr(), 0);
  EXPECT_EQ(difference.max_error, 3e-300);
  difference.add(one, near);
  EXPECT_NEAR(difference.sqnr(), 10 * std::log10(5 / 0.25), 1e-12);
  difference.add(tiny, tiny);
  EXPECT_NEAR(difference.sqnr(), 10 * std::log10(5 / 0.25), 1e-12);
  difference.add(huge, zeros);
  EXPECT_EQ(difference.sqnr(), 0);
  difference.add(std::vector<double>{std::nan("")}, std::vector<double>{0});
  EXPECT_FALSE(difference.is_exact());
  EXPECT_TRUE(std::isnan(difference.sqnr()));

  EXPECT_EQ(count_vanished(std::vector<double>{1e-300, 0, 0, 0, 1, 2}, std::vector<double>{0, 0, 0, 0, 0, 2}, 2), 1);
}

TEST(Quantize, WarnsOfWeightsThatBecomeZero) {
  Model model;
  Values& gate = *std::find_if(model.tensors.begin(), model.tensors.end(),
                               [](const Values& v) { return v.name == kBlock + "mlp.gate_proj.weight"; });
  for (float& value : gate.values) value *= 1e-10f;
  write_file(model.in / "model.safetensors", model.tensors);
  for (const bool groups : {false, true}) {
    QuantizeOptions options{.overwrite = true};
    if (groups) options.weight = {DType::s4, Granularity::group, 32}, options.activation = Activation::none;
    const QuantizeReport report = model.quantize(options);
    for (const LayerReport& layer : report.layers) {
      const bool is_gate = layer.name == kBlock + "mlp.gate_proj";
      EXPECT_EQ(layer.vanished, !is_gate ? 0 : groups ? kInner * kHidden / 32 : kInner);
      if (is_gate) {
        EXPECT_EQ(layer.sqnr, 0);
      } else {
        EXPECT_GT(layer.sqnr, 15);
      }
    }
    ASSERT_EQ(report.warnings.size(), 1u);
    EXPECT_NE(report.warnings[0].find(groups ? "mlp.gate_proj\": 192 of 192 groups became all zero"
                                             : "mlp.gate_proj\": 96 of 96 rows became all zero"),
              std::string::npos)
        << report.warnings[0];
  }
}

TEST(Quantize, GivesTheSameBytes) {
  const Model model;
  QuantizeOptions options;
  options.weight = {DType::s4, Granularity::group, 0};
  options.activation = Activation::none;
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

TEST(Quantize, NamesTheLayerInTheLibrarysErrors) {
  const Model model;
  QuantizeOptions options;
  options.calibration = model.calibration;
  const auto calibrate = [&](const std::string& tensor, std::vector<float> values) {
    write_calibration(model.calibration, model.tensors, true, {tensor, std::move(values)});
  };
  const std::string down = kBlock + "mlp.down_proj", up = kBlock + "mlp.up_proj";
  std::vector<float> skew(kInner * kInner);
  skew[1] = 1;
  calibrate(down + ".input_second_moments", skew);
  options.method = WeightMethod::error_feedback;
  EXPECT_ERROR(model.quantize(options), "in: \"" + down + "\": quantize_weight: second_moments[0, 1] = 1");
  options.method = WeightMethod::nearest;
  options.smoothing = Smoothing{.search = true};
  EXPECT_ERROR(model.quantize(options), "in: \"" + down + "\": search_smoothing: second_moments[0, 1] = 1");
  calibrate(kBlock + "self_attn.q_proj.rows", {-1});
  EXPECT_ERROR(model.quantize(options), "q_proj.rows\" is -1; a calibration has seen 1 row or more");
  write_calibration(model.calibration, model.tensors);
  options.smoothing = Smoothing{};
  std::vector<Values> tensors = model.tensors;
  for (Values& tensor : tensors) {
    if (tensor.name == up + ".weight") tensor.values[7] = std::nanf("");
  }
  write_file(model.in / "model.safetensors", tensors);
  EXPECT_ERROR(model.quantize(options), "mlp.gate_proj\": smoothing_factors: weight_channel_max[7] = nan");
  EXPECT_EQ(files_in(model.folder.path), 2u);
}

TEST(Quantize, RefusesOptions) {
  const Model model;
  const auto refuses = [&](auto change, const char* says) {
    QuantizeOptions options;
    options.method = WeightMethod::clip_search;
    options.calibration = model.calibration;
    change(options);
    EXPECT_ERROR(model.quantize(options), says);
    EXPECT_EQ(files_in(model.folder.path), 2u) << says;
  };
  refuses([](auto& o) { o.weight = {DType::s8, Granularity::group, 16}; }, "a group of 16 is not 32, 64, 128 or 0");
  refuses([](auto& o) { o.weight.group = 32; }, "the scales of weights are per row or in groups");
  refuses([](auto& o) { o.weight = WeightFormat::s8_per_tensor; }, "the scales of weights are per row or in groups");
  refuses([](auto& o) { o.weight.zero_point = true; }, "zero points are for 4-bit weights alone");
  refuses([](auto& o) { o.weight = WeightFormat::s4_group, o.activation = Activation::static_per_tensor; },
          "4-bit weights with inputs quantized static_per_tensor");
  refuses([](auto& o) { o.activation = Activation::dynamic_per_tensor; }, "inputs quantized dynamic_per_tensor");
  refuses([](auto& o) { o.activation = Activation::none, o.smoothing = Smoothing{}; },
          "smoothing is for quantized inputs");
  refuses([](auto& o) { o.method = WeightMethod::nearest; }, "the calibration file has no effect without");
  refuses([](auto& o) { o.smoothing = Smoothing{.alpha = 1.5}; }, "is not within 0..1");
  refuses([](auto& o) { o.activation = Activation::static_per_tensor, o.calibration.reset(); },
          "a static scale of the inputs needs a calibration");
  refuses([](auto& o) { o.smoothing = Smoothing{}, o.calibration.reset(); }, "smoothing needs a calibration");
  refuses([](auto& o) { o.method = WeightMethod::error_feedback, o.calibration.reset(); },
          "error feedback needs a calibration");
  refuses([](auto& o) { o.selection.ignore = {"*"}; },
          "there is no linear layer to quantize: 9 left out (in --ignore)");
  refuses(
      [](auto& o) {
        o.weight = {DType::s8, Granularity::group, 64}, o.selection.only = {"*down_proj"};
      },
      "there is no linear layer");
  refuses([&](auto& o) { o.calibration = model.in / "model.safetensors"; }, "does not say octile-calibration");
  write_calibration(model.calibration, model.tensors, false);
  for (const WeightMethod method : {WeightMethod::clip_search, WeightMethod::error_feedback}) {
    refuses([&](auto& o) { o.method = method; }, "calibration: has no input_second_moments; octile.calibrate(");
  }
  write_calibration(model.calibration, {normal("layers.0.q_proj.weight", {4, 4}, 1)});
  refuses([](auto& o) { o.activation = Activation::static_per_tensor; },
          "is not of this model, whose layers have names like \"model.layers.0.mlp.down_proj\": it has "
          "\"layers.0.q_proj.input_channel_max\"");
}

TEST(Quantize, RefusesNamesThatItWouldWriteTwice) {
  const Model model;
  std::vector<Values> tensors = model.tensors;
  tensors.push_back({"lm_head.weight_scale", {1}, {1}});  // lm_head is not quantized
  write_file(model.in / "model.safetensors", tensors);
  EXPECT_EQ(model.quantize().layers.size(), 7u);
  std::filesystem::remove_all(model.out);
  tensors.push_back({kBlock + "mlp.up_proj.weight_scale", {1}, {1}});
  write_file(model.in / "model.safetensors", tensors);
  EXPECT_ERROR(model.quantize(), "mlp.up_proj.weight_scale\", which already exists");
  EXPECT_EQ(files_in(model.folder.path), 2u);
}

TEST(Quantize, KeepsTheConfigsOtherBytes) {
  const std::pair<const char*, const char*> cases[] = {
      {"{}", "{\n  \"quantization_config\": {...}\n}"},
      {" {\t}\n", " {\n  \"quantization_config\": {...}\n\t}\n"},
      {"{\r\n  \"a\": 1\r\n}\r\n", "{\r\n  \"a\": 1,\r\n  \"quantization_config\": {...}\r\n}\r\n"},
      {"{\"a\": 1}\r\n", "{\"a\": 1,\r\n  \"quantization_config\": {...}\r\n}\r\n"},
      {"{\"a\":1 \n \n\t}", "{\"a\":1,\n  \"quantization_config\": {...} \n \n\t}"},
      {"{\"b\": [1e-6, {\"quantization_config\": \"}\"}],\n \"a\\\"{\": \"quantization_config\"\n}\n",
       "{\"b\": [1e-6, {\"quantization_config\": \"}\"}],\n \"a\\\"{\": \"quantization_config\",\n"
       "  \"quantization_config\": {...}\n}\n"},
      {"{\"quantization_config\" : null, \"a\": 1}", "{\"quantization_config\" : {...}, \"a\": 1}"},
      {"{\"a\": [0, Infinity,-Infinity ], \"\\\"NaN\": NaN}",  // as Python writes them
       "{\"a\": [0, Infinity,-Infinity ], \"\\\"NaN\": NaN,\n  \"quantization_config\": {...}\n}"},
  };
  for (const auto& [config, wanted] : cases) {
    const Model model(ElementType::f32, config);
    model.quantize();
    std::string text = read_all(model.out / "config.json");
    const std::string newline = text.find("\r\n") == std::string::npos ? "\n" : "\r\n";
    const std::string begin = "{" + newline + "    \"config_groups\"", end = newline + "  }";
    const std::size_t from = text.find(begin), to = text.find(end, from);
    ASSERT_NE(from, std::string::npos) << text;
    ASSERT_NE(to, std::string::npos) << text;
    const std::string value = text.substr(from, to + end.size() - from);
    EXPECT_EQ(text.replace(from, value.size(), "{...}"), wanted);
    EXPECT_EQ(std::count(value.begin(), value.end(), '\r'),
              newline == "\n" ? 0 : std::count(value.begin(), value.end(), '\n'));
    EXPECT_EQ(Checkpoint::open(model.out).config().format, "int-quantized");
  }
  const Model spelt(ElementType::f32, "{\"quantization\\u005fconfig\": null}");
  EXPECT_ERROR(spelt.quantize(), "\"quantization_config\" already exists");
}

// The "ignore" list, without spaces, that is written for the model with other tensors.
std::string ignored(const Model& model, const std::vector<Values>& tensors) {
  write_file(model.in / "model.safetensors", tensors);
  model.quantize();
  std::string config = read_all(model.out / "config.json");
  std::erase_if(config, [](char c) { return c == ' ' || c == '\n'; });
  const std::size_t begin = config.find('[', config.find("\"ignore\""));
  return config.substr(begin, config.find(']', begin) + 1 - begin);
}

TEST(Quantize, TellsWhatStaysInFloat) {
  const Model model;
  std::vector<Values> tensors = model.tensors;
  tensors.push_back(normal("embed_proj.weight", {8, kHidden}, 1));
  EXPECT_EQ(ignored(model, tensors), R"(["embed_proj","lm_head"])");
}

// The model makes these heads from the embedding. A loader would look for their scales.
TEST(Quantize, TellsOfHeadsThatAreInNoFile) {
  const auto tied = [](const char* more) {
    const Model model;
    std::vector<Values> tensors = model.tensors;
    std::erase_if(tensors, [](const Values& tensor) { return tensor.name == "lm_head.weight"; });
    if (more != nullptr) tensors.push_back(normal(more, {8, kHidden}, 1));
    return ignored(model, tensors);
  };
  EXPECT_EQ(tied(nullptr), R"(["lm_head"])");
  EXPECT_EQ(tied("cls.predictions.transform.dense.weight"), R"(["cls.predictions.decoder","lm_head"])");
  EXPECT_EQ(tied("lm_head.dense.weight"), R"(["lm_head","lm_head.decoder"])");
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
  // A static scale that the calibration does not provide.
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
  options.activation = Activation::static_per_tensor;
  options.calibration = model.calibration;
  EXPECT_ERROR(model.quantize(options), "is nan at channel 0, which is not a maximum");
  for (Values& tensor : calibration) {  // a NaN among numbers, in any tensor
    std::fill(tensor.values.begin(), tensor.values.end(), 1.0f);
    tensor.values[1] = std::nanf("");
  }
  write_file(model.calibration, calibration, metadata);
  EXPECT_ERROR(model.quantize(options), "is nan at channel 1, which is not a maximum");
  for (Values& tensor : calibration) tensor.values[1] = -1;
  write_file(model.calibration, calibration, metadata);
  EXPECT_ERROR(model.quantize(options), "at channel 1, which is not a maximum");
  calibration.back().shape = {1, calibration.back().shape[0]};
  write_file(model.calibration, {calibration.back()}, metadata);
  EXPECT_ERROR(model.quantize(options), "is F32 (1, 96), not F32 of one dimension");
  write_calibration(model.calibration, {model.tensors.begin(), model.tensors.end() - 1});
  EXPECT_ERROR(model.quantize(options), "has no input_channel_max for");
  write_calibration(model.calibration, {normal(kBlock + "mlp.up_proj.weight", {4, 32}, 1)});
  options.selection.only = {"*.up_proj"};
  EXPECT_ERROR(model.quantize(options), "is F32 (32), not F32 (64)");
  EXPECT_EQ(files_in(model.folder.path), 2u);
}

// A norm weight of 0 accepts any factor, and the layer's column then overflows f16.
TEST(Quantize, WritesNoScaleThatReadersRefuse) {
  const Model model(ElementType::f16);
  std::vector<Values> tensors = model.tensors;
  tensors[1].values[3] = 0;  // of input_layernorm
  write_file(model.in / "model.safetensors", tensors);
  std::vector<float> most(kHidden, 1);
  most[3] = 1e30f;
  write_calibration(model.calibration, tensors, true, {kBlock + "self_attn.q_proj.input_channel_max", most});
  QuantizeOptions options;
  options.calibration = model.calibration;
  options.smoothing = Smoothing{.alpha = 1};
  EXPECT_ERROR(model.quantize(options), ": a scale of it is beyond f16");
  EXPECT_EQ(files_in(model.folder.path), 2u);
}

TEST(Quantize, LeavesNothingWhenItIsStopped) {
  const Model model;
  QuantizeOptions options;
  options.calibration = model.calibration;
  options.smoothing = Smoothing{.search = true};
  constexpr int kSmoothing = 4 * (1 + 21);  // each of four groups is reported before each of its alphas
  for (int stop = 0;; stop += stop < kSmoothing - 10 ? 7 : 1) {
    int calls = 0;
    try {
      quantize_checkpoint(model.in, model.out, options,
                          [&](std::int64_t done, std::int64_t all, const std::string& at) {
                            EXPECT_LE(done, all);
                            EXPECT_EQ(at.starts_with("smoothing "), calls < kSmoothing) << at;
                            if (calls++ == stop) throw std::domain_error("stop");
                          });
      EXPECT_GT(stop, kSmoothing + 10);
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
  EXPECT_ERROR(quantize_checkpoint(model.in / "model.safetensors", file, {}), "it already exists");
  EXPECT_ERROR(quantize_checkpoint(file, model.folder.path / "r.safetensors", {}), "is quantized already");
}

}  // namespace
}  // namespace octile::checkpoint
