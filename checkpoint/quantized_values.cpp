// The values of a quantized layer: scales, zero points, levels.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quantized_layer.h"

namespace octile::checkpoint {

namespace {

// Checked in f32, in which the product is computed.
std::vector<float> scales(const Checkpoint& checkpoint, const Layer& layer, const std::string& suffix) {
  std::vector<float> values = checkpoint.values(layer.name + "." + suffix);
  for (const float value : values) {
    if (std::isfinite(value) && value > 0) continue;
    layer_error(checkpoint, layer.name, suffix, " holds ", number_text(value), "; scales are finite and above 0");
  }
  return values;
}

const QuantizationGroup* group_of(const Checkpoint& checkpoint, const Layer& layer) {
  return layer.scheme ? &checkpoint.config().groups[*layer.scheme] : nullptr;
}

struct ZeroPoints {
  std::size_t count;
  bool symmetric;  // says quantization_config
  DType type = DType::s8;
};

// Of levels that are not packed, stored in any type.
std::vector<std::int32_t> zero_points(const Checkpoint& checkpoint, const Layer& layer, const std::string& suffix,
                                      const ZeroPoints& expected) {
  const auto [count, symmetric, type] = expected;
  const int limit = 1 << (bits(type) - 1);
  const std::vector<float> values = checkpoint.values(layer.name + "." + suffix);
  if (values.size() != count) {
    layer_error(checkpoint, layer.name, suffix, " has ", values.size(), " values for ", count, " scales");
  }
  std::vector<std::int32_t> result;
  for (const float value : values) {
    if (!(value >= static_cast<float>(-limit) && value < static_cast<float>(limit)) || value != std::trunc(value)) {
      layer_error(checkpoint, layer.name, suffix, " has ", number_text(value), ", which is not a whole number within ",
                  -limit, "..", limit - 1);
    }
    if (symmetric && value != 0) {
      layer_error(checkpoint, layer.name, suffix, " holds ", number_text(value),
                  ", and quantization_config says symmetric");
    }
    result.push_back(static_cast<std::int32_t>(value));
  }
  return result;
}

// Levels of fewer bits, a byte each.
void check_levels(const Checkpoint& checkpoint, const Layer& layer) {
  const int limit = 1 << (bits(layer.weight.type) - 1);
  for (const std::byte byte : checkpoint.bytes(layer.name + ".weight")) {
    const int level = static_cast<std::int8_t>(byte);
    if (level >= -limit && level < limit) continue;
    layer_error(checkpoint, layer.name, "weight holds ", level, ", and quantization_config says num_bits ",
                bits(layer.weight.type));
  }
}

// Everything but the levels.
QuantizedWeight int_parameters(const Checkpoint& checkpoint, const Layer& layer) {
  const QuantizationGroup* const group = group_of(checkpoint, layer);
  QuantizedWeight weight;
  weight.n = layer.n;
  weight.k = layer.k;
  weight.format = layer.weight;
  weight.scale = scales(checkpoint, layer, "weight_scale");
  if (layer.weight.zero_point) {
    weight.zero_point = zero_points(checkpoint, layer, "weight_zero_point",
                                    {weight.scale.size(), group && group->weights->symmetric, layer.weight.type});
  }
  if (!layer.static_input) return weight;
  weight.input_scale = scales(checkpoint, layer, "input_scale").front();
  if (checkpoint.find(layer.name + ".input_zero_point")) {
    weight.input_zero_point =
        zero_points(checkpoint, layer, "input_zero_point", {1, group && group->input->symmetric}).front();
  }
  if (checkpoint.find(layer.name + ".input_multiplier")) scales(checkpoint, layer, "input_multiplier");
  return weight;
}

// The storage behind a PackedWords.
struct Words {
  std::string name = {};
  std::vector<std::int32_t> words = {};
  std::vector<float> scale = {};
  std::vector<std::int32_t> zeros = {};
  std::vector<std::int32_t> group_of = {};

  PackedWords view(const Layer& layer) const {
    return {.name = name,
            .n = layer.n,
            .k = layer.k,
            .group = layer.weight.group,
            .type = layer.weight.type,
            .words = words,
            .scale = scale,
            .zero_words = zeros};
  }
};

int zero_offset(const Checkpoint& checkpoint) { return checkpoint.config().format == "gptq_v2" ? 0 : 1; }

// Everything but the words of the weight.
Words word_parameters(const Checkpoint& checkpoint, const Layer& layer) {
  const bool packs = layer.kind == LayerKind::pack_quantized;
  Words words = {.name = checkpoint.path().string() + ": \"" + layer.name + "\""};
  words.scale = scales(checkpoint, layer, packs ? "weight_scale" : "scales");
  if (layer.weight.zero_point) words.zeros = checkpoint.words(layer.name + (packs ? ".weight_zero_point" : ".qzeros"));
  const std::string order = layer.name + (packs ? ".weight_g_idx" : ".g_idx");
  if (checkpoint.find(order)) words.group_of = checkpoint.words(order);
  // An unused order is filled with -1.
  const auto is_unused = [](std::int32_t group) { return group == -1; };
  if (packs && std::all_of(words.group_of.begin(), words.group_of.end(), is_unused)) words.group_of.clear();
  check_group_order(words.view(layer), words.group_of);
  if (layer.kind == LayerKind::gptq) check_gptq_zero_points(words.view(layer), zero_offset(checkpoint));
  return words;
}

}  // namespace

void check_values(const Checkpoint& checkpoint, const Layer& layer) {
  if (layer.kind == LayerKind::plain) return;
  if (layer.kind != LayerKind::int_quantized) {
    word_parameters(checkpoint, layer);
    return;
  }
  int_parameters(checkpoint, layer);
  if (is_packed(layer.weight.type)) check_levels(checkpoint, layer);
}

QuantizedWeight read_quantized(const Checkpoint& checkpoint, const Layer& layer) {
  if (layer.kind == LayerKind::int_quantized) {
    QuantizedWeight weight = int_parameters(checkpoint, layer);
    const Bytes levels = checkpoint.bytes(layer.name + ".weight");
    weight.q.resize(static_cast<std::size_t>(weight.n * weight.row_bytes()));
    if (layer.weight.type == DType::s8) {
      std::memcpy(weight.q.data(), levels.data(), levels.size());
      return weight;
    }
    check_levels(checkpoint, layer);
    const std::byte* level = levels.data();
    for (std::int64_t row = 0; row < weight.n; ++row) {
      for (std::int64_t column = 0; column < weight.k; ++column) {
        weight.put(row, column, static_cast<std::int8_t>(*level++));
      }
    }
    return weight;
  }
  Words words = word_parameters(checkpoint, layer);
  words.words = checkpoint.words(layer.weight_tensor());
  const PackedWords packed = words.view(layer);
  if (layer.kind == LayerKind::awq) return from_awq(packed);
  if (layer.kind == LayerKind::pack_quantized) return from_pack_quantized(packed);
  return from_gptq(packed, words.group_of, zero_offset(checkpoint));
}

}  // namespace octile::checkpoint
