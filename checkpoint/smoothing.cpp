#include "octile/checkpoint/smoothing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

namespace octile::checkpoint {

namespace {

struct Rule {
  const char* before;
  std::vector<const char*> layers;
};

// Names within one block of the model.
struct Architecture {
  std::vector<const char*> model_types;
  std::vector<Rule> rules;
};

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> table = {
      {{"llama", "mistral", "qwen2", "qwen3"},
       {{"input_layernorm", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
        {"post_attention_layernorm", {"mlp.gate_proj", "mlp.up_proj"}},
        // down's input is act(gate) * up: dividing up's outputs divides it.
        {"mlp.up_proj", {"mlp.down_proj"}},
        // The heads' outputs are sums of values, channel by channel, with weights that add up to 1.
        {"self_attn.v_proj", {"self_attn.o_proj"}}}},
      {{"bert", "roberta", "xlm-roberta", "electra"}, {{"attention.self.value", {"attention.output.dense"}}}},
      {{"opt"},
       {{"self_attn_layer_norm", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
        {"self_attn.v_proj", {"self_attn.out_proj"}},
        {"final_layer_norm", {"fc1"}}}}};
  return table;
}

// The norm stands after the addition, and its output is added again.
bool is_post_norm(const ModelConfig& config) {
  const auto& type = config.model_type;
  return type == "bert" || type == "roberta" || type == "xlm-roberta" || type == "distilbert" || type == "mpnet" ||
         type == "electra" || (type == "opt" && !config.norm_before);
}

std::string no_rules_reason(const ModelConfig& config) {
  if (config.model_type.empty()) return "no config.json says what architecture it is";
  if (is_post_norm(config)) {
    return "the norm before it also feeds the residual (" + printable(config.model_type) +
           " normalizes after its blocks)";
  }
  return "no rule for the architecture " + printable(config.model_type);
}

}  // namespace

Calibration Calibration::open(const std::filesystem::path& path) {
  SafetensorsFile file = SafetensorsFile::open(path);
  const Metadata& metadata = file.metadata();
  const auto format = metadata.find("format");
  const auto version = metadata.find("version");
  if (format == metadata.end() || format->second != "octile-calibration" || version == metadata.end() ||
      version->second != "1") {
    throw FileError(path.string() + ": its metadata does not say octile-calibration, version 1");
  }
  return Calibration(Checkpoint::of(std::move(file)));
}

bool Calibration::has(const Layer& layer) const { return file_.find(layer.name + ".input_channel_max") != nullptr; }

bool Calibration::has_second_moments(const Layer& layer) const {
  return file_.find(layer.name + ".input_second_moments") != nullptr;
}

std::vector<float> Calibration::values(const Layer& layer, const char* what, std::vector<std::int64_t> shape) const {
  const std::string tensor = layer.name + what;
  const TensorInfo& info = file_.get(tensor);
  if (info.type != ElementType::f32 || info.shape != shape) {
    throw FileError(file_.path().string() + ": \"" + printable(tensor) + "\" is " + std::string(name(info.type)) + " " +
                    shape_text(info.shape) + ", not F32 " + shape_text(shape));
  }
  std::vector<float> result = file_.values(tensor);
  file_.release(tensor);
  return result;
}

std::vector<float> Calibration::channel_max(const Layer& layer) const {
  std::vector<float> result = values(layer, ".input_channel_max", {layer.k});
  for (std::size_t j = 0; j < result.size(); ++j) {
    if (std::isfinite(result[j]) && result[j] >= 0) continue;
    throw FileError(file_.path().string() + ": \"" + printable(layer.name) + ".input_channel_max\" is " +
                    std::to_string(result[j]) + " at channel " + std::to_string(j) + ", which is no maximum");
  }
  return result;
}

std::int64_t Calibration::rows(const Layer& layer) const {
  const TensorInfo& info = file_.get(layer.name + ".rows");
  if (info.type != ElementType::s64 || info.size() != sizeof(std::int64_t)) {
    throw FileError(file_.path().string() + ": \"" + printable(info.name) + "\" is " + std::string(name(info.type)) +
                    " " + shape_text(info.shape) + ", not I64 (1)");
  }
  std::int64_t rows = 0;
  std::memcpy(&rows, file_.bytes(info.name).data(), sizeof rows);
  return rows;
}

std::vector<float> Calibration::second_moments(const Layer& layer) const {
  return values(layer, ".input_second_moments", {layer.k, layer.k});
}

SmoothingPlan plan_smoothing(const Checkpoint& checkpoint, const std::vector<Layer>& layers) {
  const ModelConfig& config = checkpoint.config();
  SmoothingPlan plan;
  const Architecture* architecture = nullptr;
  for (const Architecture& candidate : architectures()) {
    const bool is_it = std::find(candidate.model_types.begin(), candidate.model_types.end(), config.model_type) !=
                       candidate.model_types.end();
    if (is_it && !(config.model_type == "opt" && !config.norm_before)) architecture = &candidate;
  }
  std::map<std::string, const Layer*> by_name;
  for (const Layer& layer : layers) by_name.emplace(layer.name, &layer);
  for (const Layer& layer : layers) {
    if (architecture == nullptr) {
      plan.others.push_back({layer.name, no_rules_reason(config)});
      continue;
    }
    const Rule* rule = nullptr;
    std::string block;
    std::size_t position = 0;  // of the layer in its rule
    for (const Rule& candidate : architecture->rules) {
      for (std::size_t i = 0; i < candidate.layers.size(); ++i) {
        const std::string suffix = std::string(".") + candidate.layers[i];
        if (!layer.name.ends_with(suffix)) continue;
        rule = &candidate;
        position = i;
        block = layer.name.substr(0, layer.name.size() - suffix.size() + 1);
      }
    }
    if (rule == nullptr) {
      plan.others.push_back(
          {layer.name, is_post_norm(config) ? no_rules_reason(config) : "no layer before it can take the factors"});
      continue;
    }
    const std::string before = block + rule->before;
    SmoothingGroup group = {before, {}};
    std::string missing;
    for (const char* const name : rule->layers) {
      const auto found = by_name.find(block + name);
      if (found == by_name.end()) {
        missing = block + name;
      } else {
        group.layers.push_back(*found->second);
      }
    }
    const TensorInfo* const norm = checkpoint.find(before + ".weight");
    if (!missing.empty()) {
      // Its input would be divided too.
      plan.others.push_back({layer.name, missing + " reads the same input and is not quantized"});
    } else if (norm == nullptr || norm->shape.empty() || !is_float(norm->type)) {
      plan.others.push_back({layer.name, "there is no float " + before + ".weight"});
    } else if (norm->shape[0] != layer.k) {
      plan.others.push_back({layer.name, "its " + std::to_string(layer.k) + " inputs are not the " +
                                             std::to_string(norm->shape[0]) + " outputs of " + rule->before +
                                             ", as in grouped attention"});
    } else if (position == 0) {
      plan.groups.push_back(std::move(group));
    }
  }
  return plan;
}

}  // namespace octile::checkpoint
