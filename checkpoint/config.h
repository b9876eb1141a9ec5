// The JSON files of a model's folder.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "octile/checkpoint/checkpoint.h"

namespace octile::checkpoint {

// The largest of real models have 2 MB (a label for each of 21,000 classes) and 30 MB.
inline constexpr std::size_t kMaxConfigBytes = 16'000'000;  // of a lone file's quantization_config too
inline constexpr std::size_t kMaxIndexBytes = 100'000'000;

// config.json. `name` is for messages. Of a quantization everything is checked that a reader of its layers goes by:
// types, and formats and versions that are known. A method that is not known is kept as it is: only its layers are
// refused (layers.h).
ModelConfig read_config(std::string_view text, std::string_view name);
// A lone file's metadata: what describe_quantization wrote.
ModelConfig read_metadata(const Metadata& metadata, std::string_view name);

// model.safetensors.index.json: tensor to file, each a plain name within the folder.
std::map<std::string, std::string> read_index(std::string_view text, std::string_view name);
std::string write_index(const std::map<std::string, std::string>& files, std::uint64_t total_size);

// What a compressed-tensors reader has to know of the quantized layers.
struct QuantizationNote {
  int weight_bits = 8;
  std::int64_t group = 0;  // 0: one scale for each output channel
  bool zero_points = false;
  enum class Input { none, dynamic_per_token, static_per_tensor } input = Input::none;
  std::vector<std::string> ignore;  // linear layers that are not quantized
};

// The value of "quantization_config", as JSON.
std::string describe_quantization(const QuantizationNote& note);
// config.json with that member added, or null replaced; every other byte stays. An empty text: no config.json.
std::string add_quantization(std::string_view config, const QuantizationNote& note);

}  // namespace octile::checkpoint
