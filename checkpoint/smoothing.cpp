#include "octile/checkpoint/smoothing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "folds.h"
#include "reject.h"

namespace octile::checkpoint {

namespace {

const Architecture* architecture_of(const ModelConfig& config) {
  for (const Architecture& architecture : architectures()) {
    const auto& types = architecture.model_types;
    if (std::find(types.begin(), types.end(), config.model_type) != types.end()) return &architecture;
  }
  return nullptr;
}

std::string no_fold_reason(const ModelConfig& config, const Architecture* architecture) {
  if (config.model_type.empty()) return "no config.json says what architecture it is";
  if (!architecture) return "no rule for the architecture " + printable(config.model_type);
  if (architecture->is_post_norm || !config.norm_before) {
    return "the norm before it also feeds the residual (" + printable(config.model_type) +
           " normalizes after its blocks)";
  }
  return "no layer before it can take the factors";
}

struct Match {
  const Fold* fold = nullptr;  // null: none
  std::string block = {};      // what precedes the fold's names
};

Match match_of(const Architecture& architecture, const ModelConfig& config, const std::string& layer) {
  for (const Fold& fold : architecture.folds) {
    if (fold.needs_norm_before && !config.norm_before) continue;
    for (const std::string_view name : fold.layers) {
      const std::string suffix = "." + std::string(name);
      if (layer.ends_with(suffix)) return {&fold, layer.substr(0, layer.size() - suffix.size() + 1)};
    }
  }
  return {};
}

// Empty: the factors can go into what precedes the group's layers. Names are those within the block, the same in
// each, so that a list of reasons stays short.
std::string cannot_fold(const Checkpoint& checkpoint, const SmoothingGroup& group, const std::string& block) {
  const std::string before = group.before.substr(block.size());
  const TensorInfo* const weight = checkpoint.find(group.before + ".weight");
  if (!weight || !is_float(weight->type) || weight->shape.empty() || weight->shape.size() > 2) {
    return "there is no float " + before + ".weight of one or two dimensions";
  }
  const std::int64_t outputs = weight->shape[0];
  for (const Layer& layer : group.layers) {
    if (layer.k == outputs) continue;
    return "the " + std::to_string(layer.k) + " inputs of " + layer.name.substr(block.size()) + " are not the " +
           std::to_string(outputs) + " outputs of " + before + ", as in grouped attention";
  }
  const TensorInfo* const bias = checkpoint.find(group.before + ".bias");
  if (!bias || (is_float(bias->type) && bias->shape == std::vector<std::int64_t>{outputs})) return {};
  return bias->name + " is " + std::string(name(bias->type)) + " " + shape_text(bias->shape) + ", not " +
         std::to_string(outputs) + " floats";
}

}  // namespace

Calibration Calibration::open(const std::filesystem::path& path) {
  SafetensorsFile file = SafetensorsFile::open(path);
  const Metadata& metadata = file.metadata();
  const auto format = metadata.find("format");
  const auto version = metadata.find("version");
  if (format == metadata.end() || format->second != "octile-calibration" || version == metadata.end() ||
      version->second != "1") {
    reject(path.string(), ": its metadata does not say octile-calibration, version 1");
  }
  Calibration calibration(Checkpoint::of(std::move(file)));
  calibration.check();
  return calibration;
}

// All of the file, but the values of the second moments: each tensor belongs to a layer that has the others.
void Calibration::check() const {
  for (const std::string& tensor : file_.names()) {
    const std::size_t dot = tensor.rfind('.');
    const std::string what = tensor.substr(dot == std::string::npos ? 0 : dot);
    const std::string_view known[] = {".input_channel_max", ".input_max", ".rows", ".input_second_moments",
                                      ".input_excess"};
    if (std::find(std::begin(known), std::end(known), what) == std::end(known)) {
      reject(file_.path().string(), ": ", quoted(tensor), " is nothing that a calibration holds");
    }
    Layer layer = {.name = tensor.substr(0, dot)};
    if (what != ".input_channel_max") {
      file_.get(layer.name + ".input_channel_max");
      continue;
    }
    const TensorInfo& info = file_.get(tensor);
    if (info.shape.size() != 1) {
      reject(file_.path().string(), ": ", quoted(tensor), " is ", described(info), ", not F32 of one dimension");
    }
    layer.k = info.shape[0];
    const std::vector<float> channel_max = this->channel_max(layer);
    const float input_max = values(layer, ".input_max", {1}).front();
    const float largest = channel_max.empty() ? 0 : *std::max_element(channel_max.begin(), channel_max.end());
    if (input_max != largest) {
      reject(file_.path().string(), ": \"", printable(layer.name), ".input_max\" is ", number_text(input_max),
             ", and the largest of input_channel_max ", number_text(largest));
    }
    rows(layer);
    if (has_second_moments(layer)) check_shape(layer, ".input_second_moments", {layer.k, layer.k});
    excess(layer);
  }
}

bool Calibration::has(const Layer& layer) const { return file_.find(layer.name + ".input_channel_max") != nullptr; }

bool Calibration::has_second_moments(const Layer& layer) const {
  return file_.find(layer.name + ".input_second_moments") != nullptr;
}

std::string Calibration::example() const {
  const std::vector<std::string> names = file_.names();
  return names.empty() ? "nothing" : "\"" + printable(names.front()) + "\"";
}

void Calibration::check_shape(const Layer& layer, const char* what, const std::vector<std::int64_t>& shape) const {
  const TensorInfo& info = file_.get(layer.name + what);
  if (info.type == ElementType::f32 && info.shape == shape) return;
  reject(file_.path().string(), ": ", quoted(info.name), " is ", described(info), ", not F32 ", shape_text(shape));
}

std::vector<float> Calibration::values(const Layer& layer, const char* what, std::vector<std::int64_t> shape) const {
  check_shape(layer, what, shape);
  const std::string tensor = layer.name + what;
  std::vector<float> result = file_.values(tensor);
  file_.release(tensor);
  return result;
}

std::vector<float> Calibration::channel_max(const Layer& layer) const {
  std::vector<float> result = values(layer, ".input_channel_max", {layer.k});
  for (std::size_t j = 0; j < result.size(); ++j) {
    if (std::isfinite(result[j]) && result[j] >= 0) continue;
    reject(file_.path().string(), ": \"", printable(layer.name), ".input_channel_max\" is ", number_text(result[j]),
           " at channel ", j, ", which is not a maximum");
  }
  return result;
}

std::int64_t Calibration::rows(const Layer& layer) const {
  const TensorInfo& info = file_.get(layer.name + ".rows");
  if (info.type != ElementType::s64 || info.size() != sizeof(std::int64_t)) {
    reject(file_.path().string(), ": ", quoted(info.name), " is ", described(info), ", not I64 (1)");
  }
  std::int64_t rows = 0;
  std::memcpy(&rows, file_.bytes(info.name).data(), sizeof rows);
  if (rows < 1) {
    reject(file_.path().string(), ": ", quoted(info.name), " is ", rows, "; a calibration has seen 1 row or more");
  }
  return rows;
}

std::vector<float> Calibration::second_moments(const Layer& layer) const {
  return values(layer, ".input_second_moments", {layer.k, layer.k});
}

std::vector<float> Calibration::excess(const Layer& layer) const {
  if (!file_.find(layer.name + ".input_excess")) return {};
  return values(layer, ".input_excess", {2});
}

SmoothingPlan plan_smoothing(const Checkpoint& checkpoint, const std::vector<Layer>& layers) {
  const ModelConfig& config = checkpoint.config();
  const Architecture* const architecture = architecture_of(config);
  std::map<std::string, const Layer*> by_name;
  for (const Layer& layer : layers) by_name.emplace(layer.name, &layer);
  SmoothingPlan plan;
  for (const Layer& layer : layers) {
    const Match match = architecture ? match_of(*architecture, config, layer.name) : Match();
    if (match.fold == nullptr) {
      plan.others.push_back({layer.name, no_fold_reason(config, architecture)});
      continue;
    }
    SmoothingGroup group = {match.block + std::string(match.fold->before), {}};
    std::string reason;
    for (const std::string_view name : match.fold->layers) {
      const auto found = by_name.find(match.block + std::string(name));
      if (found != by_name.end()) {
        group.layers.push_back(*found->second);
      } else if (reason.empty()) {
        // Its input would be divided too.
        reason = std::string(name) + " reads the same input and is not quantized";
      }
    }
    if (reason.empty()) reason = cannot_fold(checkpoint, group, match.block);
    if (!reason.empty()) {
      plan.others.push_back({layer.name, reason});
    } else if (layer.name == group.layers.front().name) {
      plan.groups.push_back(std::move(group));
    }
  }
  return plan;
}

}  // namespace octile::checkpoint
