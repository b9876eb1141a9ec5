// Quantizes the linear layers of a checkpoint, one at a time: memory is that of one layer.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "octile/checkpoint/layers.h"
#include "octile/checkpoint/smoothing.h"
#include "octile/weight_quantizer.h"

namespace octile::checkpoint {

struct Smoothing {
  bool search = false;  // alpha per layer; the calibration must hold second moments
  double alpha = 0.5;   // without search
};

struct QuantizeOptions {
  // s8 or s4, per row or in groups of 32, 64 or 128; zero points with s4.
  WeightFormat weight = WeightFormat::s8_per_channel;
  // none: only the weight is quantized. s4: none or dynamic_per_token. Not dynamic_per_tensor.
  Activation activation = Activation::dynamic_per_token;
  WeightMethod method = WeightMethod::nearest;
  std::optional<std::filesystem::path> calibration = {};
  std::optional<Smoothing> smoothing = {};  // of quantized activations
  Selection selection = {};
  bool overwrite = false;
  int threads = 0;
};

// Options that are wrong, whatever the files hold.
class OptionError : public FileError {
 public:
  using FileError::FileError;
};

struct LayerReport {
  std::string name;
  std::int64_t n = 0;
  std::int64_t k = 0;
  double sqnr = 0;  // dB, of the dequantized weight beside the file's values, smoothed
  double max_error = 0;
  std::int64_t vanished = 0;       // rows, or groups of a row, that became all zero
  std::uint64_t bytes = 0;         // of the quantized weight with its scales
  std::uint64_t bytes_before = 0;  // of the float weight
};

struct SmoothedReport {
  std::string before;
  std::vector<std::string> layers;
  double alpha = 0;
};

struct QuantizeReport {
  std::vector<LayerReport> layers;
  std::vector<LeftOut> left_out;
  std::vector<SmoothedReport> smoothed;
  std::vector<NotSmoothed> not_smoothed;
  std::vector<std::string>
      warnings;                   // sentences: patterns without a layer, few calibration rows, weights that became zero
  std::uint64_t size_before = 0;  // of the safetensors files
  std::uint64_t size_after = 0;
};

// Called with the bytes done, all bytes, and the tensor: before each group that is smoothed, each alpha that is tried,
// each tensor and each file. It may throw; then nothing is left of what was written.
using OnProgress = std::function<void(std::int64_t done, std::int64_t all, const std::string& tensor)>;

// `from` and `to` are both a safetensors file, or both a folder, whose other files are copied verbatim; links to files
// are followed. `to` appears in one step when all is done. `overwrite` replaces a regular file, or a folder all of
// whose contents come from `from`; nothing that is read may be in it. Permissions are those of the sources, less the
// umask. The same input gives the same bytes. Throws OptionError, and FileError, among others where `from` is quantized
// already.
QuantizeReport quantize_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                                   const QuantizeOptions& options, const OnProgress& progress = {});

}  // namespace octile::checkpoint
