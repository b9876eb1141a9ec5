// A small model in a temporary folder, with a calibration, for the tests of quantize_checkpoint.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_files.h"
#include "octile/checkpoint/quantize.h"

namespace octile::checkpoint {

inline constexpr std::int64_t kHidden = 64, kInner = 96;
inline const std::string kBlock = "model.layers.0.";

// A LLaMA block, and the tensors around it.
inline std::vector<Values> llama(ElementType type = ElementType::f32) {
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

// Inputs in which one channel in sixteen is a hundred times as large. `instead` replaces a tensor's values; none drops
// it.
inline void write_calibration(const std::filesystem::path& path, const std::vector<Values>& tensors,
                              bool moments = true, const std::pair<std::string, std::vector<float>>& instead = {},
                              const std::vector<float>& excess = {}) {
  std::vector<Values> all;
  for (const Values& tensor : tensors) {
    if (tensor.shape.size() != 2) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - std::string(".weight").size());
    const std::int64_t k = tensor.shape[1];
    std::vector<float> max(static_cast<std::size_t>(k), 1), h(static_cast<std::size_t>(k * k));
    for (std::size_t j = 0; j < max.size(); ++j) {
      if (j % 16 == 3) max[j] = 100;
      h[j * max.size() + j] = max[j] * max[j];
    }
    if (instead.first == name + ".input_channel_max" && !instead.second.empty()) max = instead.second;
    all.push_back({name + ".input_channel_max", {k}, max});
    all.push_back({name + ".input_max", {1}, {*std::max_element(max.begin(), max.end())}});
    all.push_back({name + ".rows", {1}, {10}, ElementType::s64});
    if (!excess.empty()) all.push_back({name + ".input_excess", {2}, excess});
    if (moments) all.push_back({name + ".input_second_moments", {k, k}, h});
  }
  for (Values& tensor : all) {
    if (tensor.name == instead.first) tensor.values = instead.second;
  }
  std::erase_if(all, [&](const Values& tensor) { return tensor.name == instead.first && tensor.values.empty(); });
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

inline std::vector<float> weight_of(const Checkpoint& model, const std::string& name) {
  for (const Layer& layer : find_layers(model).layers) {
    if (layer.name == name) return read_weight(model, layer);
  }
  return model.values(name + ".weight");
}

}  // namespace octile::checkpoint
