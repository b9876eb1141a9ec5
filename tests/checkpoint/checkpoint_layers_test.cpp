// Which tensors are linear layers, and which quantized ones are refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "checkpoint_files.h"
#include "checkpoint_levels.h"
#include "octile/checkpoint/layers.h"
#include "octile/checkpoint/measure.h"

namespace octile::checkpoint {
namespace {

Checkpoint model_of(const Folder& folder, const std::vector<Values>& tensors, const std::string& config = "") {
  write_file(folder.path / "model.safetensors", tensors);
  if (!config.empty()) write_text(folder.path / "config.json", config);
  return Checkpoint::open(folder.path);
}

std::vector<std::string> names_of(const LayerTable& table) {
  std::vector<std::string> names;
  for (const Layer& layer : table.layers) names.push_back(layer.name);
  std::sort(names.begin(), names.end());
  return names;
}

std::string reason_of(const LayerTable& table, const std::string& name) {
  for (const LeftOut& left : table.left_out) {
    if (left.name == name) return left.reason;
  }
  return {};
}

TEST(Layers, AreFoundByNameAndShape) {
  const Folder folder;
  const Checkpoint model = model_of(folder, {normal("embeddings.word_embeddings.weight", {8, 4}, 1),
                                             normal("model.embed_tokens.weight", {8, 4}, 1),
                                             normal("transformer.wte.weight", {8, 4}, 1),
                                             normal("encoder.query.weight", {4, 4}, 1),
                                             normal("encoder.query.bias", {4}, 1),
                                             normal("encoder.LayerNorm.weight", {4}, 1),
                                             normal("odd_norm.weight", {4, 4}, 1),
                                             normal("mlp.gate_proj.weight", {6, 4}, 1),
                                             normal("mlp.gate.weight", {6, 4}, 1),
                                             normal("mlp.shared_expert_gate.weight", {1, 4}, 1),
                                             normal("lm_head.weight", {8, 4}, 1),
                                             normal("cls.predictions.decoder.weight", {8, 4}, 1),
                                             normal("conv.weight", {2, 4, 3}, 1),
                                             normal("transposed.weight", {6, 4}, 1),
                                             normal("transposed.bias", {4}, 1),
                                             normal("none.weight", {0, 4}, 1),
                                             normal("wide.weight", {6, 4}, 1),
                                             normal("wide.bias", {6, 1}, 1),
                                             {"ints.weight", {2, 2}, {1, 2, 3, 4}, ElementType::s8}});
  const LayerTable table = find_layers(model);
  EXPECT_EQ(names_of(table), (std::vector<std::string>{"encoder.query", "mlp.gate_proj"}));
  EXPECT_EQ(reason_of(table, "embeddings.word_embeddings"), "an embedding");
  EXPECT_EQ(reason_of(table, "model.embed_tokens"), "an embedding");
  EXPECT_EQ(reason_of(table, "transformer.wte"), "an embedding");
  EXPECT_EQ(reason_of(table, "odd_norm"), "a norm");
  EXPECT_EQ(reason_of(table, "mlp.gate"), "a router");
  EXPECT_EQ(reason_of(table, "mlp.shared_expert_gate"), "a router");
  EXPECT_EQ(reason_of(table, "lm_head"), "a head");
  EXPECT_EQ(reason_of(table, "cls.predictions.decoder"), "a head");
  EXPECT_EQ(reason_of(table, "conv"), "3 dimensions");
  EXPECT_EQ(reason_of(table, "ints"), "values of I8");
  EXPECT_EQ(reason_of(table, "none"), "it is empty");
  EXPECT_EQ(reason_of(table, "wide"), "its bias is F32 (6, 1)");
  EXPECT_NE(reason_of(table, "transposed").find("its bias has 4 values"), std::string::npos);

  const LayerTable ignoring = find_layers(model, {.ignore = {"*.que?y"}, .only = {}});
  EXPECT_EQ(names_of(ignoring), std::vector<std::string>{"mlp.gate_proj"});
  EXPECT_EQ(reason_of(ignoring, "encoder.query"), "in --ignore");
  const LayerTable chosen = find_layers(model, {.ignore = {}, .only = {"lm_head", "transposed", "conv"}});
  EXPECT_EQ(names_of(chosen), std::vector<std::string>{"lm_head"});  // the others cannot be
  EXPECT_EQ(reason_of(chosen, "encoder.query"), "not in --only");
}

// The result lists the matrices that stay in float, since some whose names rule them out are linear. It leaves out
// known embeddings: vLLM 0.10 would take them for linear layers and stop.
TEST(Layers, MatricesThatAreLeftMayBeLinear) {
  const Folder folder;
  const Checkpoint model =
      model_of(folder, {normal("embed_proj.weight", {4, 4}, 1), normal("embed_proj.bias", {4}, 1),
                        normal("norm_proj.weight", {4, 4}, 1), normal("lm_head.weight", {4, 4}, 1),
                        normal("transposed.weight", {6, 4}, 1), normal("transposed.bias", {4}, 1),
                        normal("none.weight", {0, 4}, 1), normal("conv.weight", {2, 4, 3}, 1),
                        normal("model.embed_tokens.weight", {4, 4}, 1),
                        normal("embeddings.Word_Embeddings.weight", {4, 4}, 1), normal("h.wte.weight", {4, 4}, 1)});
  const std::vector<std::string> others = {"conv", "model.embed_tokens", "embeddings.Word_Embeddings", "h.wte"};
  const LayerTable table = find_layers(model);
  ASSERT_EQ(table.left_out.size(), 9u);
  for (const LeftOut& left : table.left_out) {
    EXPECT_EQ(left.linear, std::find(others.begin(), others.end(), left.name) == others.end()) << left.name;
  }
}

// A tensor with a side of 0 has no bytes, however long the other is: nothing may allocate or loop over that length.
TEST(Layers, EmptyOnesAreLeft) {
  const Folder folder;
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  for (const auto& [n, k] : {std::pair(std::int64_t{0}, kHuge), {kHuge, 0}, {0, 0}}) {
    write_file(folder.path / "model.safetensors",
               {{"int.weight", {n, k}, {}, ElementType::s8},
                {"int.weight_scale", {1}, {1}},
                {"plain.weight", {n, k}, {}},
                {"pack.weight_packed", {0, kHuge / 8}, {}, ElementType::s32},
                {"pack.weight_shape", {2}, {0, static_cast<float>(kHuge)}, ElementType::s64},
                {"pack.weight_scale", {0, 1}, {}},
                {"gptq.qweight", {kHuge / 8, 0}, {}, ElementType::s32},
                {"gptq.scales", {1, 0}, {}}});
    const LayerTable table = find_layers(Checkpoint::open(folder.path));
    EXPECT_TRUE(table.layers.empty());
    EXPECT_EQ(table.left_out.size(), 4u);
    for (const LeftOut& left : table.left_out) EXPECT_EQ(left.reason, "it is empty") << left.name;
  }
  const WeightStatistics none = measure({}, 0, std::numeric_limits<std::int64_t>::max(), 6);
  EXPECT_EQ(none.rms, 0);
  EXPECT_TRUE(none.outliers.empty());
}

TEST(Layers, OfGpt2AreLeft) {
  const Folder folder;
  const Checkpoint model = model_of(folder, {normal("h.0.attn.c_proj.weight", {4, 4}, 1)}, R"({"model_type":"gpt2"})");
  EXPECT_EQ(reason_of(find_layers(model), "h.0.attn.c_proj"), "this architecture stores it (IN, OUT)");
}

// Writes 32-bit words, which write_file cannot.
void write_words(const std::filesystem::path& path,
                 const std::vector<std::pair<TensorSpec, std::vector<std::int32_t>>>& all,
                 const std::vector<Values>& values) {
  std::vector<TensorSpec> specs;
  for (const auto& [spec, ints] : all) specs.push_back(spec);
  for (const Values& tensor : values) specs.push_back({tensor.name, tensor.type, tensor.shape});
  SafetensorsWriter writer(path, specs, {});
  for (const auto& [spec, ints] : all) writer.append(spec.name, std::as_bytes(std::span(ints)));
  for (const Values& tensor : values) writer.append(tensor.name, bytes_of(tensor));
  writer.finish(true);
}

TEST(Layers, AwqAndGptqAreToldApartByShape) {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  const Awq awq(kLevels);
  const Values scale = {"w.scales", {2, 16}, awq.scale};
  write_words(
      path,
      {{{"w.qweight", ElementType::s32, {64, 2}}, awq.weight}, {{"w.qzeros", ElementType::s32, {2, 2}}, awq.zeros}},
      {scale});
  Checkpoint model = Checkpoint::open(path);
  LayerTable table = find_layers(model);
  ASSERT_EQ(table.layers.size(), 1u);
  EXPECT_EQ(table.layers[0].kind, LayerKind::awq);
  expect_levels(read_quantized(model, table.layers[0]), kLevels);

  const Gptq gptq({8, 64, 32}, 0);
  write_words(
      path,
      {{{"w.qweight", ElementType::s32, {8, 8}}, gptq.weight}, {{"w.qzeros", ElementType::s32, {2, 1}}, gptq.zeros}},
      {{"w.scales", {2, 8}, gptq.scale}});
  model = Checkpoint::open(path);
  table = find_layers(model);
  ASSERT_EQ(table.layers.size(), 1u);
  EXPECT_EQ(table.layers[0].kind, LayerKind::gptq);
  EXPECT_EQ(table.layers[0].k, 64);

  write_words(path, {{{"w.qweight", ElementType::s32, {8, 8}}, gptq.weight}},
              {{"w.scales", {2, 12}, std::vector<float>(24, 1)}});
  EXPECT_ERROR(find_layers(Checkpoint::open(path)), "is not a supported layout");
  write_words(path, {{{"w.qweight", ElementType::s32, {8, 8}}, gptq.weight}},
              {{"w.scales", {3, 8}, std::vector<float>(24, 1)}});
  EXPECT_ERROR(find_layers(Checkpoint::open(path)), "64 inputs do not divide into 3 groups");
  write_words(path, {{{"w.qweight", ElementType::s32, {64}}, gptq.weight}}, {{"w.scales", {2, 8}, gptq.scale}});
  EXPECT_ERROR(find_layers(Checkpoint::open(path)), "qweight is I32 (64), not a matrix of I32");
  write_words(path, {{{"w.qweight", ElementType::s32, {8, 8}}, gptq.weight}}, {});
  EXPECT_ERROR(find_layers(Checkpoint::open(path)), "\"w\": has no scales");
}

TEST(Layers, OtherWidthsAndVersionsAreRefused) {
  const Folder folder;
  const Awq awq(kLevels);
  write_words(folder.path / "model.safetensors", {{{"w.qweight", ElementType::s32, {64, 2}}, awq.weight}},
              {{"w.scales", {2, 16}, awq.scale}});
  write_text(folder.path / "config.json",
             R"({"quantization_config":{"quant_method":"awq","version":"gemv","bits":4}})");
  EXPECT_ERROR(find_layers(Checkpoint::open(folder.path)), "version is \"gemv\", expected one of gemm, GEMM");
  write_text(folder.path / "config.json",
             R"({"quantization_config":{"quant_method":"awq","version":"gemm","bits":3}})");
  EXPECT_ERROR(find_layers(Checkpoint::open(folder.path)), "3 bits; only 4 are supported");
}

// Python refuses these too, with the same messages; tests/torch/checkpoint_test.py and awq_gptq_test.py test them all.
TEST(Layers, AreWhatTheConfigSays) {
  const Folder folder;
  const auto error = [&](const std::string& config) {
    write_text(folder.path / "config.json", R"({"quantization_config":)" + config + "}");
    return error_of([&] {
      const Checkpoint model = Checkpoint::open(folder.path);
      for (const Layer& layer : find_layers(model).layers) read_weight(model, layer);
    });
  };
  const Awq awq(kLevels);
  const auto write = [&](bool has_zeros) {
    std::vector<std::pair<TensorSpec, std::vector<std::int32_t>>> words = {
        {{"w.qweight", ElementType::s32, {64, 2}}, awq.weight}};
    if (has_zeros) words.push_back({{"w.qzeros", ElementType::s32, {2, 2}}, awq.zeros});
    write_words(folder.path / "model.safetensors", words, {{"w.scales", {2, 16}, awq.scale}});
  };
  write(true);
  EXPECT_EQ(error(R"({"quant_method":"awq","bits":4,"group_size":32})"), "");
  EXPECT_NE(error(R"({"quant_method":"awq","bits":4,"group_size":64})").find("expected a float type (1, 16)"),
            std::string::npos);
  EXPECT_NE(error(R"({"quant_method":"awq","bits":8})").find("8 bits; only 4 are supported"), std::string::npos);
  EXPECT_NE(error(R"({"quant_method":"gptq","bits":4})").find("is awq, and quant_method is \"gptq\""),
            std::string::npos);
  EXPECT_NE(error(R"({"quant_method":"hqq"})").find("expected compressed-tensors, awq or gptq"), std::string::npos);
  write(false);
  EXPECT_NE(error(R"({"quant_method":"awq","bits":4})").find("\"w\": has no qzeros"), std::string::npos);

  write_words(folder.path / "model.safetensors",
              {{{"w.weight_packed", ElementType::s32, {2, 4}}, std::vector<std::int32_t>(8, 0x12345678)}},
              {{"w.weight_scale", {2, 2}, {1, 2, 3, 4}}, {"w.weight_shape", {2}, {2, 32}, ElementType::s64}});
  const auto pack = [&](const std::string& weights, const std::string& rest = "") {
    return error(R"({"quant_method":"compressed-tensors","config_groups":{"g":{"targets":["re:.*w$"],"weights":{)" +
                 weights + "}}}" + rest + "}");
  };
  const std::string good = R"("num_bits":4,"strategy":"group","group_size":16)";
  EXPECT_EQ(pack(good), "");
  EXPECT_NE(pack(R"("num_bits":8,"strategy":"group","group_size":16)")
                .find("holds 4 bits each, and quantization_config says num_bits 8"),
            std::string::npos);
  EXPECT_NE(pack(good + R"(,"symmetric":false)").find("has no weight_zero_point"), std::string::npos);
  EXPECT_NE(pack(R"("num_bits":4,"strategy":"group","group_size":8)").find("expected a float type (2, 4)"),
            std::string::npos);
  EXPECT_NE(pack(R"("num_bits":4,"strategy":"channel")").find("expected a float type (2, 1)"), std::string::npos);
  EXPECT_NE(pack(good, R"(,"format":"int-quantized")").find("says \"int-quantized\""), std::string::npos);
  EXPECT_NE(pack(good, R"(,"ignore":["w"])").find("it is quantized, and quantization_config ignores \"w\""),
            std::string::npos);

  // An integer matrix that is not a layer, beside quantized ones.
  write_words(folder.path / "model.safetensors",
              {{{"w.weight_packed", ElementType::s32, {2, 4}}, std::vector<std::int32_t>(8, 0x12345678)}},
              {{"w.weight_scale", {2, 2}, {1, 2, 3, 4}},
               {"w.weight_shape", {2}, {2, 32}, ElementType::s64},
               {"ints.weight", {1, 2}, {1, 2}, ElementType::s8}});
  EXPECT_EQ(pack(good, R"(,"ignore":["ints"])"), "");
}

TEST(Layers, HaveScalesAboveZero) {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  for (const float bad : {0.0f, -1.0f, -0.0f, std::numeric_limits<float>::infinity()}) {
    const auto read = [&] {
      const Checkpoint model = Checkpoint::open(path);
      read_weight(model, find_layers(model).layers.at(0));
    };
    write_file(path, {{"w.weight", {2, 2}, {-128, 2, 127, -3}, ElementType::s8}, {"w.weight_scale", {2, 1}, {1, bad}}});
    EXPECT_ERROR(read(), "weight_scale holds");
    const Awq awq(kLevels);
    std::vector<float> scale = awq.scale;
    scale.back() = bad;
    write_words(
        path,
        {{{"w.qweight", ElementType::s32, {64, 2}}, awq.weight}, {{"w.qzeros", ElementType::s32, {2, 2}}, awq.zeros}},
        {{"w.scales", {2, 16}, scale}});
    EXPECT_ERROR(read(), "\"w\": scales holds");
  }
}

TEST(Layers, PackQuantizedIsChecked) {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  const std::vector<std::int32_t> packed(8, 0x12345678);
  const auto write = [&](std::vector<std::int64_t> words_shape, std::vector<float> shape,
                         std::vector<std::int64_t> scale_shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : scale_shape) count *= extent;
    write_words(path, {{{"w.weight_packed", ElementType::s32, words_shape}, packed}},
                {{"w.weight_scale", scale_shape, std::vector<float>(static_cast<std::size_t>(count), 1)},
                 {"w.weight_shape", {static_cast<std::int64_t>(shape.size())}, shape, ElementType::s64}});
    return [&] { read_weight(Checkpoint::open(path), find_layers(Checkpoint::open(path)).layers.at(0)); };
  };
  EXPECT_EQ(error_of(write({2, 4}, {2, 32}, {2, 2})), "");
  EXPECT_EQ(error_of(write({2, 4}, {2, 30}, {2, 1})), "");
  EXPECT_ERROR(write({2, 4}, {2, 24}, {2, 1})(), "does not hold 4 or 8 bits each of weight_shape (2, 24)");
  EXPECT_EQ(error_of(write({2, 4}, {2, 16}, {2, 4})), "");  // 8 bits each
  const Layer layer = find_layers(Checkpoint::open(path)).layers.at(0);
  EXPECT_EQ(layer.weight, (WeightFormat{DType::s8, Granularity::group, 4}));
  const float bytes[] = {0x78 - 128, 0x56 - 128, 0x34 - 128, 0x12 - 128};
  const std::vector<float> values = read_weight(Checkpoint::open(path), layer);
  ASSERT_EQ(values.size(), 32u);
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], bytes[i % 4]) << i;
  EXPECT_ERROR(write({2, 4}, {2, 64}, {2, 1})(),
               "does not hold 4 or 8 bits each of weight_shape (2, 64)");  // 2 bits each
  EXPECT_ERROR(write({2, 4}, {3, 32}, {3, 1})(), "does not hold");
  EXPECT_ERROR(write({2, 4}, {2, -32}, {2, 1})(), "does not hold");
  EXPECT_ERROR(write({2, 4}, {2, 32, 1}, {2, 1})(), "weight_shape is I64 (3), expected I64 (2)");
  EXPECT_ERROR(write({2, 4}, {2, 32}, {1, 1})(), "weight_scale is F32 (1, 1), expected a float type (2, 1)");
  EXPECT_ERROR(write({2, 4}, {2, 32}, {2, 3})(), "32 inputs do not divide into 3 groups");
}

TEST(Layers, PackQuantizedHasItsGroupsInOrder) {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  const auto write = [&](std::int64_t k, const std::vector<std::int32_t>& order) {
    const auto length = static_cast<std::int64_t>(order.size());
    write_words(
        path,
        {{{"w.weight_packed", ElementType::s32, {1, k / 8}},
          std::vector<std::int32_t>(static_cast<std::size_t>(k / 8))},
         {{"w.weight_g_idx", ElementType::s32, {length}}, order}},
        {{"w.weight_scale", {1, 1}, {1}}, {"w.weight_shape", {2}, {1, static_cast<float>(k)}, ElementType::s64}});
    return error_of([&] { read_weight(Checkpoint::open(path), find_layers(Checkpoint::open(path)).layers.at(0)); });
  };
  EXPECT_EQ(write(8, std::vector<std::int32_t>(8)), "");
  EXPECT_EQ(write(8, std::vector<std::int32_t>(8, -1)), "");  // not used
  EXPECT_NE(write(8, {0, 0, 0, 1, 0, 0, 0, 0}).find("g_idx puts input 3 in group 1"), std::string::npos);
  EXPECT_NE(write(8, {0, 0, 0}).find("weight_g_idx is I32 (3), expected I32 (8)"), std::string::npos);
  EXPECT_NE(write(8, {-1, 0, 0, 0, 0, 0, 0, 1}).find("g_idx puts input 0 in group -1"), std::string::npos);
}

TEST(Layers, IntQuantizedIsChecked) {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  const auto layer_error = [&](const std::vector<Values>& tensors) {
    write_file(path, tensors);
    return error_of([&] {
      const Checkpoint model = Checkpoint::open(path);
      const Layer layer = find_layers(model).layers.at(0);
      EXPECT_EQ(read_weight(model, layer), (std::vector<float>{-128, 2, 254, -6}));
    });
  };
  const Values weight = {"w.weight", {2, 2}, {-128, 2, 127, -3}, ElementType::s8};
  const Values wide = {"w.weight", {1, 4}, {-128, 2, 127, -3}, ElementType::s8};
  EXPECT_EQ(layer_error({wide, {"w.weight_scale", {1, 2}, {1, 2}}}), "");  // in groups of 2
  EXPECT_ERROR(find_layers([&] {
                 write_file(path, {wide, {"w.weight_scale", {1, 3}, {1, 2, 3}}});
                 return Checkpoint::open(path);
               }()),
               "4 inputs do not divide into 3 groups");
  EXPECT_EQ(layer_error({weight, {"w.weight_scale", {2, 1}, {1, 2}}}), "");
  EXPECT_EQ(layer_error({weight, {"w.weight_scale", {2}, {1, 2}, ElementType::bf16}, {"w.input_scale", {1}, {3}}}), "");
  EXPECT_NE(layer_error({weight, {"w.weight_scale", {3, 1}, {1, 2, 3}}})
                .find("weight_scale is F32 (3, 1), expected a float type (2, 1) or (2) or (1) or ()"),
            std::string::npos);
  EXPECT_NE(layer_error({weight, {"w.weight_scale", {2, 1}, {1, std::nanf("")}}})
                .find("weight_scale holds nan; scales are finite and above 0"),
            std::string::npos);
  EXPECT_NE(layer_error({weight, {"w.weight_scale", {2, 1}, {1, 2}}, {"w.input_scale", {2}, {3, 3}}})
                .find("input_scale is F32 (2), expected a float type (1) or ()"),
            std::string::npos);
  EXPECT_NE(
      layer_error({weight, {"w.weight_scale", {2, 1}, {1, 2}}, {"w.weight_zero_point", {1}, {3}, ElementType::s8}})
          .find("weight_zero_point has 1 values for 2 scales"),
      std::string::npos);
}

TEST(Layers, IntQuantizedHasZeroPointsThatAreLevels) {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  const Values weight = {"w.weight", {2, 2}, {-128, 2, 127, -3}, ElementType::s8};
  const Values scale = {"w.weight_scale", {2, 1}, {1, 2}};
  const auto read = [&](const Values& zero) {
    write_file(path, {weight, scale, {"w.input_scale", {1}, {3}}, zero});
    const Checkpoint model = Checkpoint::open(path);
    return read_quantized(model, find_layers(model).layers.at(0));
  };
  const auto weight_zero = [&](std::vector<float> values, ElementType type = ElementType::f32) {
    return read({"w.weight_zero_point", {2, 1}, std::move(values), type});
  };
  const auto input_zero = [&](std::vector<float> values, ElementType type = ElementType::f32) {
    return read({"w.input_zero_point", {static_cast<std::int64_t>(values.size())}, values, type});
  };
  for (const ElementType type : {ElementType::s8, ElementType::s16, ElementType::bf16, ElementType::f64}) {
    EXPECT_EQ(weight_zero({-128, 127}, type).zero_point, (std::vector<std::int32_t>{-128, 127}));
    EXPECT_EQ(input_zero({-7}, type).input_zero_point, -7);
  }
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {128.0f, -129.0f, 0.5f, 1e30f, -1e30f, nan, inf, -inf}) {
    EXPECT_ERROR(weight_zero({0, bad}), "w.safetensors: \"w\": weight_zero_point has ");
    EXPECT_ERROR(input_zero({bad}), "which is not a whole number within -128..127");
  }
  EXPECT_ERROR(weight_zero({0, 300}, ElementType::s16), "weight_zero_point has 300");
  EXPECT_ERROR(weight_zero({0, 3}, ElementType::s64), "values of I64 are not read");
  EXPECT_ERROR(input_zero({0, 0}), "input_zero_point has 2 values for 1 scales");
}

TEST(Layers, IntQuantizedHasAnInputScaleThatIsOne) {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  const Values weight = {"w.weight", {2, 2}, {-128, 2, 127, -3}, ElementType::s8};
  const auto scale = [&](std::vector<float> values, ElementType type = ElementType::f32) {
    write_file(path, {weight,
                      {"w.weight_scale", {2, 1}, {1, 2}},
                      {"w.input_scale", {static_cast<std::int64_t>(values.size())}, values, type}});
    const Checkpoint model = Checkpoint::open(path);
    return read_quantized(model, find_layers(model).layers.at(0)).input_scale;
  };
  EXPECT_EQ(scale({0.25f}, ElementType::f16), 0.25f);
  for (const float bad : {0.0f, -1.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    EXPECT_ERROR(scale({bad}), "scales are finite and above 0");
  }
  EXPECT_ERROR(scale({-1}), "w.safetensors: \"w\": input_scale holds -1; scales are finite");
  EXPECT_ERROR(scale({}), "input_scale is F32 (0), expected a float type (1) or ()");
  EXPECT_ERROR(scale({3}, ElementType::s16), "input_scale is I16");
}

}  // namespace
}  // namespace octile::checkpoint
