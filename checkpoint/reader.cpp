// The Python package's interface to this library: C functions in a separate shared library.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "folds.h"
#include "octile/checkpoint/smoothing.h"
#include "quantized_layer.h"

#define OCTILE_READER_API extern "C" __attribute__((visibility("default")))

namespace octile::checkpoint {

namespace {

using nlohmann::json;

json json_of(const std::optional<QuantizationArgs>& args) {
  if (!args) return nullptr;
  return {{"bits", args->bits ? json(*args->bits) : json(nullptr)},
          {"type", args->type},
          {"strategy", args->strategy},
          {"group_size", args->group_size ? json(*args->group_size) : json(nullptr)},
          {"symmetric", args->symmetric},
          {"dynamic", args->dynamic}};
}

json describe_checkpoint(const char* path) {
  const Checkpoint checkpoint = Checkpoint::open(path);
  const ModelConfig& config = checkpoint.config();
  if (config.method.empty()) {
    reject(path, ": ", (checkpoint.is_folder() ? "config.json" : "its metadata"),
           " has no quantization_config: the checkpoint is not quantized");
  }
  check_method(checkpoint);
  json layers = json::object();
  for (const Layer& layer : find_layers(checkpoint).layers) {
    if (layer.kind == LayerKind::plain) continue;
    check_values(checkpoint, layer);
    layers[layer.name] = {{"kind", name(layer.kind)},
                          {"n", layer.n},
                          {"k", layer.k},
                          {"bits", bits(layer.weight.type)},
                          {"group", layer.weight.group},
                          {"zero_points", layer.weight.zero_point},
                          {"scheme", layer.scheme ? json(*layer.scheme) : json(nullptr)}};
  }
  json files = json::array();
  for (const Checkpoint::Shard& shard : checkpoint.shards()) files.push_back(shard.file_name);
  json schemes = json::array();
  for (const QuantizationGroup& group : config.groups) {
    schemes.push_back({{"weights", json_of(group.weights)}, {"input", json_of(group.input)}});
  }
  return {{"files", files},
          {"format", config.format},
          {"group_size", config.group_size ? json(*config.group_size) : json(nullptr)},
          {"schemes", schemes},
          {"layers", layers}};
}

json describe_folds() {
  json list = json::array();
  for (const Architecture& architecture : architectures()) {
    json folds = json::array();
    for (const Fold& fold : architecture.folds) {
      folds.push_back(
          {{"before", fold.before}, {"layers", fold.layers}, {"needs_norm_before", fold.needs_norm_before}});
    }
    list.push_back({{"model_types", architecture.model_types}, {"blocks", architecture.blocks}, {"folds", folds}});
  }
  return list;
}

// {"result": ...}, or {"error": "..."}; null: there is no memory even for that.
template <class Action>
char* answer(Action action) {
  try {
    json document;
    try {
      document["result"] = action();
    } catch (const std::exception& error) {
      document = {{"error", error.what()}};
    }
    const std::string text = document.dump(-1, ' ', false, json::error_handler_t::replace);
    return strdup(text.c_str());
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

}  // namespace octile::checkpoint

// A quantized checkpoint, a file or a folder, all of it checked but the levels: its files and its layers, as JSON. Call
// octile_reader_free with what is returned.
OCTILE_READER_API char* octile_reader_checkpoint(const char* path) {
  return octile::checkpoint::answer([&] { return octile::checkpoint::describe_checkpoint(path); });
}

// A file that a calibration was saved to, checked.
OCTILE_READER_API char* octile_reader_calibration(const char* path) {
  return octile::checkpoint::answer([&] {
    octile::checkpoint::Calibration::open(path);
    return nlohmann::json(nullptr);
  });
}

// The architectures whose layers can take SmoothQuant's factors, as JSON (folds.h).
OCTILE_READER_API char* octile_reader_folds() { return octile::checkpoint::answer(octile::checkpoint::describe_folds); }

OCTILE_READER_API void octile_reader_free(char* text) { std::free(text); }
