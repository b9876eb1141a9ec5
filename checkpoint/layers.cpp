#include "octile/checkpoint/layers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace octile::checkpoint {

namespace {

// The module's name, if `tensor` ends in the suffix.
std::optional<std::string> before(const std::string& tensor, std::string_view suffix) {
  if (tensor.size() <= suffix.size() || !tensor.ends_with(suffix)) return std::nullopt;
  return tensor.substr(0, tensor.size() - suffix.size());
}

std::string_view last_part(std::string_view module) { return module.substr(module.rfind('.') + 1); }

std::string lower_case(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> list) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

[[noreturn]] void refuse(const Checkpoint& checkpoint, const std::string& module, const std::string& what) {
  throw FileError(checkpoint.path().string() + ": \"" + printable(module) + "\": " + what);
}

class Finder {
 public:
  Finder(const Checkpoint& checkpoint, const Selection& selection) : checkpoint_(checkpoint), selection_(selection) {}

  LayerTable find() {
    for (const Checkpoint::Shard& shard : checkpoint_.shards()) {
      for (const TensorInfo& tensor : shard.file.tensors()) look_at(tensor);
    }
    return std::move(table_);
  }

 private:
  void look_at(const TensorInfo& tensor) {
    if (const auto module = before(tensor.name, ".weight_packed")) {
      add(*module, pack_quantized(*module));
    } else if (const auto words = before(tensor.name, ".qweight")) {
      add(*words, transposed_words(*words));
    } else if (const auto plain = before(tensor.name, ".weight")) {
      if (tensor.type == ElementType::s8 && checkpoint_.find(*plain + ".weight_scale")) {
        add(*plain, int_quantized(*plain, tensor));
      } else if (tensor.shape.size() >= 2) {
        look_at_weight(*plain, tensor);
      }
    }
  }

  void look_at_weight(const std::string& module, const TensorInfo& tensor) {
    const bool wanted = matches(module, selection_.only);
    std::string reason = refusal(module, tensor);
    if (reason.empty() && !selection_.only.empty() && !wanted) reason = "not in --only";
    if (reason.empty() && matches(module, selection_.ignore)) reason = "in --ignore";
    if (reason.empty() && !wanted) reason = reason_by_name(module);
    if (reason.empty()) {
      table_.layers.push_back({.name = module, .n = tensor.shape[0], .k = tensor.shape[1], .tensors = {tensor.name}});
    } else {
      table_.left_out.push_back({module, std::move(reason), tensor.shape.size() == 2 && !is_table(module)});
    }
  }

  // What no wish can change.
  std::string refusal(const std::string& module, const TensorInfo& tensor) const {
    if (tensor.shape.size() != 2) return std::to_string(tensor.shape.size()) + " dimensions";
    if (!is_float(tensor.type)) return "values of " + std::string(name(tensor.type));
    if (tensor.size() == 0) return "it is empty";
    const TensorInfo* const bias = checkpoint_.find(module + ".bias");
    if (bias && bias->shape.size() == 1 && bias->shape[0] != tensor.shape[0]) {
      return "its bias has " + std::to_string(bias->shape[0]) + " values: the weight is not stored (OUT, IN)";
    }
    // Square ones of them show nothing by their shape.
    if (is_one_of(checkpoint_.config().model_type, {"gpt2", "openai-gpt", "imagegpt"}) &&
        is_one_of(last_part(module), {"c_attn", "c_proj", "c_fc", "q_attn"})) {
      return "this architecture stores it (IN, OUT)";
    }
    return {};
  }

  // Certainly no linear layer, but a row for each token or place.
  static bool is_table(const std::string& module) {
    const std::string lower = lower_case(module);
    const std::string_view last = last_part(lower);
    return last.ends_with("embedding") || last.ends_with("embeddings") ||
           is_one_of(last, {"embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "shared",
                            "relative_attention_bias"});
  }

  static std::string reason_by_name(const std::string& module) {
    const std::string lower = lower_case(module);
    const std::string_view last = last_part(lower);
    if (is_one_of(last, {"lm_head", "head", "embed_out", "output_projection", "classifier", "score", "qa_outputs"}) ||
        lower.ends_with("predictions.decoder") || lower.ends_with("lm_head.decoder")) {
      return "a head";
    }
    if (is_one_of(last, {"gate", "shared_expert_gate", "router"}) || lower.ends_with("router.classifier"))
      return "a router";
    if (contains(lower, "embed") || is_one_of(last, {"wte", "wpe", "shared", "relative_attention_bias"})) {
      return "an embedding";
    }
    if (contains(last, "norm") || contains(last, "ln_")) return "a norm";
    return {};
  }

  void add(const std::string& module, Layer layer) {
    layer.name = module;
    const bool is_wanted = selection_.only.empty() || matches(module, selection_.only);
    const char* const reason = layer.n == 0 || layer.k == 0         ? "it is empty"
                               : !is_wanted                         ? "not in --only"
                               : matches(module, selection_.ignore) ? "in --ignore"
                                                                    : nullptr;
    if (reason) {
      table_.left_out.push_back({module, reason, true});
    } else {
      table_.layers.push_back(std::move(layer));
    }
  }

  [[noreturn]] void fail(const std::string& module, const std::string& what) const {
    refuse(checkpoint_, module, what);
  }

  // Of the module's tensor, which is a matrix of this type.
  std::array<std::int64_t, 2> matrix(const std::string& module, const std::string& suffix, ElementType type) const {
    const TensorInfo& tensor = checkpoint_.get(module + suffix);
    if (tensor.type != type || tensor.shape.size() != 2) {
      fail(module, suffix.substr(1) + " is " + std::string(name(tensor.type)) + " " + shape_text(tensor.shape) +
                       ", not a matrix of " + std::string(name(type)));
    }
    return {tensor.shape[0], tensor.shape[1]};
  }

  std::int64_t group_length(const std::string& module, std::int64_t k, std::int64_t groups) const {
    if (groups == 1 || k == 0) return 0;
    if (groups > 0 && k % groups == 0) return k / groups;
    fail(module, std::to_string(k) + " inputs do not come in " + std::to_string(groups) + " groups");
  }

  void take(Layer& layer, const std::string& module, std::initializer_list<const char*> suffixes) const {
    for (const char* const suffix : suffixes) {
      if (checkpoint_.find(module + suffix)) layer.tensors.push_back(module + suffix);
    }
  }

  Layer int_quantized(const std::string& module, const TensorInfo& tensor) const {
    if (tensor.shape.size() != 2) fail(module, "an I8 weight of shape " + shape_text(tensor.shape));
    Layer layer = {.kind = LayerKind::int_quantized, .n = tensor.shape[0], .k = tensor.shape[1]};
    const TensorInfo& scale = checkpoint_.get(module + ".weight_scale");
    const auto count = static_cast<std::int64_t>(scale.size() * 8 / static_cast<std::uint64_t>(bits(scale.type)));
    if (!is_float(scale.type) || (count != 1 && count != layer.n)) {
      fail(module, "weight_scale is " + std::string(name(scale.type)) + " " + shape_text(scale.shape) + " for " +
                       std::to_string(layer.n) + " outputs");
    }
    layer.zero_points = checkpoint_.find(module + ".weight_zero_point") != nullptr;
    layer.static_input = checkpoint_.find(module + ".input_scale") != nullptr;
    take(layer, module, {".weight", ".weight_scale", ".weight_zero_point", ".input_scale", ".input_zero_point"});
    return layer;
  }

  Layer pack_quantized(const std::string& module) const {
    const auto words = matrix(module, ".weight_packed", ElementType::s32);
    const TensorInfo& shape = checkpoint_.get(module + ".weight_shape");
    if (shape.type != ElementType::s64 || shape.shape != std::vector<std::int64_t>{2}) {
      fail(module,
           "weight_shape is " + std::string(name(shape.type)) + " " + shape_text(shape.shape) + ", not I64 (2)");
    }
    Layer layer = {.kind = LayerKind::pack_quantized};
    std::int64_t sizes[2];
    std::memcpy(sizes, checkpoint_.bytes(shape.name).data(), sizeof sizes);
    std::tie(layer.n, layer.k) = std::tie(sizes[0], sizes[1]);
    if (layer.n != words[0] || layer.k < 0 || words_for(layer.k) != words[1]) {
      fail(module, "weight_packed " + shape_text({words[0], words[1]}) + " does not hold 4 bits each of weight_shape " +
                       shape_text({layer.n, layer.k}) + ", and other widths are not read");
    }
    layer.group = groups_of_rows(module, layer);
    layer.zero_points = checkpoint_.find(module + ".weight_zero_point") != nullptr;
    take(layer, module, {".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"});
    return layer;
  }

  std::int64_t groups_of_rows(const std::string& module, const Layer& layer) const {
    const TensorInfo& scale = checkpoint_.get(module + ".weight_scale");
    if (!is_float(scale.type) || scale.shape.size() != 2 || scale.shape[0] != layer.n) {
      fail(module, "weight_scale is " + std::string(name(scale.type)) + " " + shape_text(scale.shape) + " for " +
                       std::to_string(layer.n) + " outputs");
    }
    return group_length(module, layer.k, scale.shape[1]);
  }

  // AWQ and GPTQ: the words of one lie along OUT, of the other along IN.
  Layer transposed_words(const std::string& module) const {
    const auto words = matrix(module, ".qweight", ElementType::s32);
    const TensorInfo& scale = checkpoint_.get(module + ".scales");
    if (!is_float(scale.type) || scale.shape.size() != 2) {
      fail(module, "scales is " + std::string(name(scale.type)) + " " + shape_text(scale.shape));
    }
    const ModelConfig& config = checkpoint_.config();
    if (config.bits != 0 && config.bits != 4) fail(module, std::to_string(config.bits) + " bits; only 4 are read");
    Layer layer = {.n = scale.shape[1]};
    const bool is_awq = layer.n > 0 && layer.n % kInAWord == 0 && words[1] == layer.n / kInAWord;
    const bool is_gptq = words[1] == layer.n;
    if (!is_awq && !is_gptq) {
      fail(module, "qweight " + shape_text({words[0], words[1]}) + " with scales " + shape_text(scale.shape) +
                       " is of no layout that is read (AWQ or GPTQ, 4 bits)");
    }
    if (is_awq && !config.format.empty() && config.method == "awq" && config.format != "gemm" &&
        config.format != "GEMM") {
      fail(module, "AWQ's version \"" + printable(config.format) + "\" has another layout; \"gemm\" is read");
    }
    layer.kind = is_awq ? LayerKind::awq : LayerKind::gptq;
    if (!is_awq && words[0] > (std::int64_t{1} << 40)) fail(module, "qweight " + shape_text({words[0], words[1]}));
    layer.k = is_awq ? words[0] : words[0] * kInAWord;
    layer.group = group_length(module, layer.k, scale.shape[0]);
    layer.zero_points = checkpoint_.find(module + ".qzeros") != nullptr;
    take(layer, module, {".qweight", ".qzeros", ".scales", ".g_idx"});
    return layer;
  }

  const Checkpoint& checkpoint_;
  const Selection& selection_;
  LayerTable table_;
};

// What int8 levels can have for a zero point, whatever type it is stored in.
std::vector<std::int32_t> zero_points(const Checkpoint& checkpoint, const Layer& layer, const std::string& what,
                                      std::size_t count) {
  const std::vector<float> values = checkpoint.values(layer.name + what);
  if (values.size() != count) {
    refuse(
        checkpoint, layer.name,
        what.substr(1) + " has " + std::to_string(values.size()) + " values for " + std::to_string(count) + " scales");
  }
  std::vector<std::int32_t> result;
  for (const float value : values) {
    if (!(value >= -128 && value <= 127) || value != std::trunc(value)) {
      refuse(checkpoint, layer.name,
             what.substr(1) + " has " + number_text(value) + ", which is no whole number within -128..127");
    }
    result.push_back(static_cast<std::int32_t>(value));
  }
  return result;
}

float input_scale(const Checkpoint& checkpoint, const Layer& layer) {
  const TensorInfo& tensor = checkpoint.get(layer.name + ".input_scale");
  if (!is_float(tensor.type)) refuse(checkpoint, layer.name, "input_scale is " + std::string(name(tensor.type)));
  const std::vector<float> scale = checkpoint.values(tensor.name);
  if (scale.size() != 1) {
    refuse(checkpoint, layer.name, "input_scale has " + std::to_string(scale.size()) + " values, not 1");
  }
  if (std::isfinite(scale[0]) && scale[0] > 0) return scale[0];
  refuse(checkpoint, layer.name, "input_scale is " + number_text(scale[0]) + ", which is no scale");
}

QuantizedWeight read_int_quantized(const Checkpoint& checkpoint, const Layer& layer) {
  QuantizedWeight weight;
  weight.n = layer.n;
  weight.k = layer.k;
  const Bytes levels = checkpoint.bytes(layer.name + ".weight");
  weight.q.resize(levels.size());
  std::memcpy(weight.q.data(), levels.data(), levels.size());
  weight.scale = checkpoint.values(layer.name + ".weight_scale");
  weight.per_tensor = weight.scale.size() == 1 && layer.n != 1;
  for (const float scale : weight.scale) {
    if (!std::isfinite(scale)) refuse(checkpoint, layer.name, "a scale is " + number_text(scale));
  }
  if (layer.zero_points) {
    weight.zero_point = zero_points(checkpoint, layer, ".weight_zero_point", weight.scale.size());
  }
  if (layer.static_input) {
    weight.input_scale = input_scale(checkpoint, layer);
    if (checkpoint.find(layer.name + ".input_zero_point")) {
      weight.input_zero_point = zero_points(checkpoint, layer, ".input_zero_point", 1).front();
    }
  }
  return weight;
}

}  // namespace

std::string_view name(LayerKind kind) {
  constexpr std::array<std::string_view, 5> kNames = {"float", "int-quantized", "pack-quantized", "awq", "gptq"};
  return kNames.at(static_cast<std::size_t>(kind));
}

std::string Layer::weight_tensor() const { return tensors.front(); }

LayerTable find_layers(const Checkpoint& checkpoint, const Selection& selection) {
  return Finder(checkpoint, selection).find();
}

QuantizedWeight read_quantized(const Checkpoint& checkpoint, const Layer& layer) {
  if (layer.kind == LayerKind::int_quantized) return read_int_quantized(checkpoint, layer);
  const bool packs = layer.kind == LayerKind::pack_quantized;
  const std::string name = checkpoint.path().string() + ": \"" + layer.name + "\"";
  const auto words = checkpoint.words(layer.weight_tensor());
  const auto scale = checkpoint.values(layer.name + (packs ? ".weight_scale" : ".scales"));
  std::vector<std::int32_t> zeros;
  if (layer.zero_points) zeros = checkpoint.words(layer.name + (packs ? ".weight_zero_point" : ".qzeros"));
  if (layer.zero_points && zeros.empty() && !words.empty()) throw FileError(printable(name) + ": no zero points");
  const PackedWords packed = {.name = name,
                              .n = layer.n,
                              .k = layer.k,
                              .group = layer.group,
                              .words = words,
                              .scale = scale,
                              .zero_words = zeros};
  if (layer.kind == LayerKind::awq) return from_awq(packed);
  const std::string order = layer.name + (packs ? ".weight_g_idx" : ".g_idx");
  std::vector<std::int32_t> group_of;
  if (checkpoint.find(order)) group_of = checkpoint.words(order);
  if (packs) {
    // -1 is what an order that is not used is filled with.
    if (std::all_of(group_of.begin(), group_of.end(), [](std::int32_t group) { return group == -1; })) group_of.clear();
    check_group_order(packed, group_of);
    return from_pack_quantized(packed);
  }
  return from_gptq(packed, group_of, checkpoint.config().format == "gptq_v2" ? 0 : 1);
}

std::vector<float> read_weight(const Checkpoint& checkpoint, const Layer& layer) {
  if (layer.kind == LayerKind::plain) return checkpoint.values(layer.weight_tensor());
  const QuantizedWeight weight = read_quantized(checkpoint, layer);
  std::vector<float> values(static_cast<std::size_t>(weight.n * weight.k));
  for (std::int64_t row = 0; row < weight.n; ++row) {
    dequantize_row(weight, row, {values.data() + row * weight.k, static_cast<std::size_t>(weight.k)});
  }
  return values;
}

std::vector<double> read_weight_f64(const Checkpoint& checkpoint, const Layer& layer) {
  if (layer.kind == LayerKind::plain && checkpoint.get(layer.weight_tensor()).type == ElementType::f64) {
    const Bytes bytes = checkpoint.bytes(layer.weight_tensor());
    std::vector<double> values(bytes.size() / sizeof(double));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  const std::vector<float> values = read_weight(checkpoint, layer);
  return {values.begin(), values.end()};
}

}  // namespace octile::checkpoint
