// octile inspect: the contents of a checkpoint.
#include <cmath>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "cli/cli.h"
#include "cli/support/console.h"
#include "cli/support/numbers.h"
#include "model_text.h"
#include "octile/checkpoint/measure.h"

namespace octile::cli {

namespace {

using checkpoint::Checkpoint;
using checkpoint::Layer;
using checkpoint::LayerKind;
using checkpoint::LayerTable;
using checkpoint::printable;
using checkpoint::TensorInfo;
using checkpoint::WeightStatistics;

constexpr const char* kFooter =
    R"(PATH is a .safetensors file, or a folder with model.safetensors or the shards that
model.safetensors.index.json names. Quantized layers (compressed-tensors' int-quantized and
pack-quantized, AWQ, GPTQ) are shown dequantized.

An outlier channel is an input channel (a column of the weight) whose largest magnitude
is more than --outlier times the median of all columns' largest.

Exit status: 1 if a file is truncated, or does not match its header.

Examples:
  octile inspect model.safetensors
  octile inspect FOLDER --headers
  octile inspect FOLDER --json | jq '.layers[] | select(.outlier_channels != [])')";

struct Options {
  std::string path;
  bool headers = false;
  bool json = false;
  double outlier = 6;
};

struct Inspected {
  const Layer* layer = nullptr;
  WeightStatistics statistics;
};

std::vector<Inspected> read_layers(const Checkpoint& model, const LayerTable& table, const Options& options) {
  std::vector<Inspected> result;
  std::int64_t all = 0;
  for (const Layer& layer : table.layers) all += layer.n * layer.k;
  std::optional<Progress> progress;
  if (!options.headers) progress.emplace("inspect", all);
  for (const Layer& layer : table.layers) {
    result.push_back({&layer, {}});
    if (options.headers) continue;
    progress->advance(0, printable(layer.name));
    const std::vector<float> values = read_weight(model, layer);
    for (const std::string& tensor : layer.tensors) model.release(tensor);
    result.back().statistics = checkpoint::measure(values, layer.n, layer.k, options.outlier);
    progress->advance(layer.n * layer.k);
  }
  return result;
}

nlohmann::json layer_json(const Checkpoint& model, const Inspected& inspected, bool headers) {
  const Layer& layer = *inspected.layer;
  nlohmann::json json = {{"name", layer.name},
                         {"kind", name(layer.kind)},
                         {"out", layer.n},
                         {"in", layer.k},
                         {"bytes", size_of(model, layer)}};
  if (layer.kind != LayerKind::plain) {
    json["bits"] = bits(layer.weight.type);
    json["group"] = layer.weight.group;
    json["zero_points"] = layer.weight.zero_point;
    json["static_input"] = layer.static_input;
    json["dynamic_input"] = layer.dynamic_input;
  }
  if (headers) return json;
  const WeightStatistics& statistics = inspected.statistics;
  json["min"] = json["least"] = statistics.min;  // least, most: deprecated
  json["max"] = json["most"] = statistics.max;
  json["rms"] = statistics.rms;
  json["not_finite"] = statistics.not_finite;
  json["outlier_channels"] = statistics.outliers;
  return json;
}

void print_json(const Checkpoint& model, const LayerTable& table, const std::vector<Inspected>& layers, bool headers) {
  using nlohmann::json;
  json files = json::array();
  json tensors = json::array();
  for (const Checkpoint::Shard& shard : model.shards()) {
    files.push_back({{"name", shard.file_name}, {"bytes", shard.file.size()}});
    for (const TensorInfo& tensor : shard.file.tensors()) {
      tensors.push_back({{"name", tensor.name},
                         {"type", name(tensor.type)},
                         {"shape", tensor.shape},
                         {"bytes", tensor.size()},
                         {"file", shard.file_name}});
    }
  }
  json rows = json::array();
  for (const Inspected& layer : layers) rows.push_back(layer_json(model, layer, headers));
  json left_out = json::array();
  for (const auto& left : table.left_out) left_out.push_back({{"name", left.name}, {"reason", left.reason}});
  const json document = {{"path", model.path().string()},
                         {"bytes", model.size()},
                         {"model_type", model.config().model_type},
                         {"quantization", {{"method", model.config().method}, {"format", model.config().format}}},
                         {"files", files},
                         {"tensors", tensors},
                         {"layers", rows},
                         {"left_out", left_out}};
  std::cout << json_text(document) << "\n";
}

std::string scheme(const Layer& layer) {
  std::string text(name(layer.kind));
  const bool packs = layer.kind == LayerKind::pack_quantized, levels = packs || layer.kind == LayerKind::int_quantized;
  if (const int width = bits(layer.weight.type); levels && width != (packs ? 4 : 8))
    text += " int" + std::to_string(width);
  if (layer.weight.group > 0) text += " g" + std::to_string(layer.weight.group);
  if (layer.weight.zero_point) text += " zero";
  if (layer.static_input) text += " static";
  if (layer.dynamic_input) text += " dynamic";
  return text;
}

void print_layers(const Checkpoint& model, const std::vector<Inspected>& layers, bool headers) {
  std::vector<std::string> heading = {"linear layer", "scheme", "(OUT, IN)", "bytes"};
  if (!headers) heading.insert(heading.end(), {"min", "max", "rms", "outliers"});
  std::vector<std::vector<std::string>> rows;
  for (const Inspected& inspected : layers) {
    const Layer& layer = *inspected.layer;
    rows.push_back({printable(layer.name), scheme(layer), shape_text(layer), size_text(size_of(model, layer))});
    if (headers) continue;
    const WeightStatistics& statistics = inspected.statistics;
    const bool finite = statistics.not_finite == 0;
    const std::string bad = std::to_string(statistics.not_finite) + " not finite";
    rows.back().insert(rows.back().end(),
                       {fixed(statistics.min, 4), fixed(statistics.max, 4), finite ? fixed(statistics.rms, 4) : bad,
                        std::to_string(statistics.outliers.size())});
  }
  if (!rows.empty()) std::cout << "\n" << format_table(heading, rows, 2);
}

void print_text(const Checkpoint& model, const LayerTable& table, const std::vector<Inspected>& layers, bool headers) {
  std::size_t tensors = 0;
  for (const Checkpoint::Shard& shard : model.shards()) tensors += shard.file.tensors().size();
  std::cout << printable(model.path().string()) << ": " << model.shards().size()
            << (model.shards().size() == 1 ? " file, " : " files, ") << size_text(model.size()) << ", " << tensors
            << " tensors\n";
  const auto& config = model.config();
  if (!config.model_type.empty()) std::cout << "architecture  " << printable(config.model_type) << "\n";
  std::cout << "quantization  " << (config.method.empty() ? "none" : printable(config.method + " " + config.format))
            << "\n";
  print_layers(model, layers, headers);

  std::set<std::string> in_layers;
  for (const Layer& layer : table.layers) in_layers.insert(layer.tensors.begin(), layer.tensors.end());
  std::vector<std::vector<std::string>> rows;
  for (const Checkpoint::Shard& shard : model.shards()) {
    for (const TensorInfo& tensor : shard.file.tensors()) {
      if (in_layers.count(tensor.name) != 0) continue;
      rows.push_back({printable(tensor.name), std::string(name(tensor.type)), checkpoint::shape_text(tensor.shape),
                      size_text(tensor.size())});
    }
  }
  if (!rows.empty()) std::cout << "\n" << format_table({"other tensor", "type", "shape", "bytes"}, rows, 2);
  if (!table.left_out.empty()) std::cout << "\noctile quantize leaves as they are:\n" << reasons_text(table.left_out);
}

void inspect(const Options& options) {
  const Checkpoint model = Checkpoint::open(options.path);
  const LayerTable table = find_layers(model);
  const std::vector<Inspected> layers = read_layers(model, table, options);
  options.json ? print_json(model, table, layers, options.headers) : print_text(model, table, layers, options.headers);
}

}  // namespace

void add_inspect(CLI::App& app) {
  CLI::App* command = app.add_subcommand("inspect", "Show the tensors, layers and outliers of a checkpoint");
  command->footer(kFooter);
  auto options = std::make_shared<Options>();
  command->add_option("path", options->path, "A safetensors file, or a model's folder")->required();
  command->add_flag("--headers", options->headers, "Read only the headers");
  command->add_option("--outlier", options->outlier, "A channel is an outlier beyond this factor of the median")
      ->check(finite_number("POSITIVE", true))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Write one JSON document instead of text");
  add_quiet(*command);
  command->callback([options] { inspect(*options); });
}

}  // namespace octile::cli
