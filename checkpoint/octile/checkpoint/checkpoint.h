// The files of a model: one safetensors file, or a folder with config.json and either model.safetensors or the shards
// that model.safetensors.index.json names.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "octile/checkpoint/safetensors.h"

namespace octile::checkpoint {

inline constexpr std::string_view kSingleFile = "model.safetensors";
inline constexpr std::string_view kIndexFile = "model.safetensors.index.json";
inline constexpr std::string_view kConfigFile = "config.json";

// How one kind of values is quantized, in compressed-tensors' terms.
struct QuantizationArgs {
  std::optional<std::int64_t> bits;
  std::string type = "int";
  std::string strategy;  // "channel", "group", "tensor", "token"; empty: not said
  std::optional<std::int64_t> group_size;
  bool symmetric = true;
  bool dynamic = false;
};

struct QuantizationGroup {
  std::vector<std::string> targets;  // names, classes, and expressions that begin with "re:"
  std::string format;                // empty: the model's
  std::optional<QuantizationArgs> weights;
  std::optional<QuantizationArgs> input;
};

// The model as a whole: a folder's config.json, or a single file's metadata.
struct ModelConfig {
  std::string model_type;                  // "llama"; empty: not said
  bool norm_before = true;                 // OPT's do_layer_norm_before
  std::string method;                      // of the quantization: "compressed-tensors", "awq", "gptq"; empty: none
  std::string format;                      // "int-quantized", "pack-quantized"; AWQ's version, GPTQ's checkpoint_format
  std::optional<std::int64_t> bits;        // AWQ and GPTQ
  std::optional<std::int64_t> group_size;  // AWQ and GPTQ; -1: a whole row
  bool desc_act = false;                   // GPTQ: columns in the order of their activations
  std::vector<QuantizationGroup> groups;   // compressed-tensors
  std::vector<std::string> ignore;         // compressed-tensors
};

class Checkpoint {
 public:
  // Opens all files and checks their headers. Throws FileError.
  static Checkpoint open(const std::filesystem::path& path);
  // One file in memory.
  static Checkpoint of(SafetensorsFile file);

  struct Shard {
    std::string file_name;  // within the folder
    SafetensorsFile file;
  };
  struct Place {
    std::size_t shard = 0;
    const TensorInfo* info = nullptr;
  };

  const std::filesystem::path& path() const { return path_; }
  bool is_folder() const { return is_folder_; }
  bool has_index() const { return has_index_; }
  const std::vector<Shard>& shards() const { return shards_; }
  const ModelConfig& config() const { return config_; }
  const std::string& config_text() const { return config_text_; }  // config.json; empty: there is none
  std::vector<std::string> names() const;                          // of all tensors, sorted
  const TensorInfo* find(std::string_view tensor) const;           // null: there is none
  const TensorInfo& get(std::string_view tensor) const;            // FileError: there is none
  std::size_t shard_of(std::string_view tensor) const;
  Bytes bytes(std::string_view tensor) const;
  void release(std::string_view tensor) const;
  // All values as f32. Throws for f8 and 64-bit integers.
  std::vector<float> values(std::string_view tensor) const;
  // The values of an I32 tensor.
  std::vector<std::int32_t> words(std::string_view tensor) const;
  std::uint64_t size() const;  // bytes of all safetensors files

 private:
  void open_file();
  void open_folder();
  void open_shards(const std::filesystem::path& index);
  void add(std::string file_name, SafetensorsFile file);

  std::filesystem::path path_;
  bool is_folder_ = false;
  bool has_index_ = false;
  std::vector<Shard> shards_;
  std::map<std::string, Place, std::less<>> places_;
  ModelConfig config_;
  std::string config_text_;
};

// Whether a module's name matches one of the patterns: * is any text, ? one character, [abc] one of these.
bool matches(std::string_view name, const std::vector<std::string>& patterns);

}  // namespace octile::checkpoint
