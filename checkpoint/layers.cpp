#include "octile/checkpoint/layers.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <set>

#include "fused_experts.h"
#include "quantized_layer.h"

namespace octile::checkpoint {

namespace {

std::string_view last_part(std::string_view module) { return module.substr(module.rfind('.') + 1); }

std::string lower_case(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

class Finder {
 public:
  Finder(const Checkpoint& checkpoint, const Selection& selection)
      : checkpoint_(checkpoint), selection_(selection), quantized_(checkpoint) {}

  LayerTable find() {
    for (const Checkpoint::Shard& shard : checkpoint_.shards()) {
      for (const TensorInfo& tensor : shard.file.tensors()) look_at(tensor);
    }
    for (const auto* const patterns : {&selection_.only, &selection_.ignore}) {
      for (const std::string& pattern : *patterns) {
        if (matched_.count(pattern) == 0) table_.unmatched.push_back(pattern);
      }
    }
    return std::move(table_);
  }

 private:
  void look_at(const TensorInfo& tensor) {
    if (std::optional<Layer> layer = quantized_.of(tensor)) {
      add(std::move(*layer));
    } else if (const auto plain = before(tensor.name, ".weight"); plain && tensor.shape.size() >= 2) {
      look_at_weight(*plain, tensor);
    } else if (std::optional<FusedExperts> experts = fused_experts(checkpoint_, tensor)) {
      look_at_experts(std::move(*experts));
    }
  }

  // All of them, or none.
  void look_at_experts(FusedExperts experts) {
    const std::string names[] = {experts.name, experts.name + ".gate_up_proj", experts.name + ".down_proj"};
    const auto is_one = [&](const std::vector<std::string>& patterns) {
      return std::any_of(std::begin(names), std::end(names), [&](const auto& name) { return matches(name, patterns); });
    };
    for (const std::string& name : names) note_patterns(name);
    std::string reason = experts.reason;
    if (reason.empty() && !selection_.only.empty() && !is_one(selection_.only)) reason = "not in --only";
    if (reason.empty() && is_one(selection_.ignore)) reason = "in --ignore";
    if (reason.empty()) {
      std::move(experts.layers.begin(), experts.layers.end(), std::back_inserter(table_.layers));
    } else if (table_.left_out.empty() || table_.left_out.back().name != experts.name) {  // of its other tensor
      table_.left_out.push_back({experts.name, std::move(reason), true});
    }
  }

  // Whether or not this matrix is quantized.
  void note_patterns(const std::string& name) {
    for (const auto* const patterns : {&selection_.only, &selection_.ignore}) {
      for (const std::string& pattern : *patterns) {
        if (matched_.count(pattern) == 0 && matches(name, {pattern})) matched_.insert(pattern);
      }
    }
  }

  void look_at_weight(const std::string& module, const TensorInfo& tensor) {
    note_patterns(module);
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

  // Why no option can make it a linear layer; empty if one can.
  std::string refusal(const std::string& module, const TensorInfo& tensor) const {
    if (tensor.shape.size() != 2) return std::to_string(tensor.shape.size()) + " dimensions";
    if (!is_float(tensor.type)) return "values of " + std::string(name(tensor.type));
    if (tensor.size() == 0) return "it is empty";
    const TensorInfo* const bias = checkpoint_.find(module + ".bias");
    if (bias && bias->shape.size() == 1 && bias->shape[0] != tensor.shape[0]) {
      return "its bias has " + std::to_string(bias->shape[0]) + " values: the weight is not stored (OUT, IN)";
    }
    if (bias && (bias->shape.size() != 1 || !is_float(bias->type))) {
      return "its bias is " + std::string(name(bias->type)) + " " + shape_text(bias->shape);
    }
    // For a square one, the shape does not tell.
    if (is_one_of(checkpoint_.config().model_type, {"gpt2", "openai-gpt", "imagegpt"}) &&
        is_one_of(last_part(module), {"c_attn", "c_proj", "c_fc", "q_attn"})) {
      return "this architecture stores it (IN, OUT)";
    }
    return {};
  }

  // Certainly not a linear layer: a row per token or position.
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

  void add(Layer layer) {
    note_patterns(layer.name);
    const bool is_wanted = selection_.only.empty() || matches(layer.name, selection_.only);
    const char* const reason = layer.n == 0 || layer.k == 0             ? "it is empty"
                               : !is_wanted                             ? "not in --only"
                               : matches(layer.name, selection_.ignore) ? "in --ignore"
                                                                        : nullptr;
    if (reason) {
      table_.left_out.push_back({layer.name, reason, true});
    } else {
      table_.layers.push_back(std::move(layer));
    }
  }

  const Checkpoint& checkpoint_;
  const Selection& selection_;
  QuantizedLayers quantized_;
  std::set<std::string> matched_;  // patterns
  LayerTable table_;
};

}  // namespace

std::string_view name(LayerKind kind) {
  constexpr std::array<std::string_view, 5> kNames = {"float", "int-quantized", "pack-quantized", "awq", "gptq"};
  return kNames.at(static_cast<std::size_t>(kind));
}

LayerKind kind_of(const WeightFormat& weight, Activation activation) {
  const bool packs = is_packed(weight.type) || activation == Activation::none;
  return packs ? LayerKind::pack_quantized : LayerKind::int_quantized;
}

std::string Layer::weight_tensor() const { return tensors.front(); }

LayerTable find_layers(const Checkpoint& checkpoint, const Selection& selection) {
  return Finder(checkpoint, selection).find();
}

std::uint64_t size_of(const Checkpoint& checkpoint, const Layer& layer) {
  std::uint64_t bytes = 0;
  for (const std::string& tensor : layer.tensors) bytes += checkpoint.get(tensor).size();
  if (!layer.expert) return bytes;
  return static_cast<std::uint64_t>(layer.n * layer.k * bits(checkpoint.get(layer.weight_tensor()).type) / 8);
}

std::vector<float> read_weight(const Checkpoint& checkpoint, const Layer& layer) {
  if (layer.expert) {
    const TensorInfo& info = checkpoint.get(layer.weight_tensor());
    std::vector<float> matrix(static_cast<std::size_t>(info.shape[1] * info.shape[2]));
    read_values(info.type, bytes_of_expert(checkpoint, info.name, layer.expert->expert), matrix,
                checkpoint.path().string() + ": " + info.name);
    return values_of_part(layer, matrix);
  }
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
    const Bytes bytes = layer.expert ? bytes_of_expert(checkpoint, layer.weight_tensor(), layer.expert->expert)
                                     : checkpoint.bytes(layer.weight_tensor());
    std::vector<double> values(bytes.size() / sizeof(double));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return layer.expert ? values_of_part(layer, values) : values;
  }
  const std::vector<float> values = read_weight(checkpoint, layer);
  return {values.begin(), values.end()};
}

}  // namespace octile::checkpoint
