// The JSON files of a model's folder.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "octile/checkpoint/layers.h"

namespace octile::checkpoint {

// The largest of real models have 2 MB (a label for each of 21,000 classes) and 30 MB.
inline constexpr std::size_t kMaxConfigBytes = 16'000'000;  // of a single file's quantization_config too
inline constexpr std::size_t kMaxIndexBytes = 100'000'000;

// config.json. `name` is for messages. Checks all that a reader of quantized layers relies on: types, formats and
// versions. An unknown method is kept; only its layers are refused (layers.h).
ModelConfig read_config(std::string_view text, std::string_view name);
// A single file's metadata, as describe_quantization wrote it.
ModelConfig read_metadata(const Metadata& metadata, std::string_view name);

// model.safetensors.index.json: tensor to file, each a plain name within the folder.
std::map<std::string, std::string> read_index(std::string_view text, std::string_view name);
std::string write_index(const std::map<std::string, std::string>& files, std::uint64_t total_size);

// What a compressed-tensors reader must know of the quantized layers.
struct QuantizationNote {
  WeightFormat weight = {};
  Activation activation = Activation::dynamic_per_token;
  std::vector<std::string> ignore = {};  // linear layers that are not quantized
  bool for_octile = false;               // a layout that others would misread: format "octile"
};

// The value of "quantization_config", as JSON.
std::string describe_quantization(const QuantizationNote& note);
// config.json with that member added, or in place of null; every other byte stays. Empty: there is no config.json.
std::string add_quantization(std::string_view config, const QuantizationNote& note);

}  // namespace octile::checkpoint
