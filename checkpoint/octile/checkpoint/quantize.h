// A checkpoint with float weights becomes one with quantized weights, layer by layer: memory is that of one layer.
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

enum class Format : std::uint8_t {
  w8a8,         // int-quantized, activations quantized per token
  w8a8_static,  // int-quantized, one scale for all activations of a layer
  w4a16,        // pack-quantized
};

struct Smoothing {
  bool search = false;  // alpha per layer; the calibration must hold second moments
  double alpha = 0.5;   // without search
};

struct QuantizeOptions {
  Format format = Format::w8a8;
  std::int64_t group = 128;  // w4a16: 32, 64, 128, or 0: a whole row
  bool zero_points = false;  // w4a16
  WeightMethod method = WeightMethod::nearest;
  std::optional<std::filesystem::path> calibration = {};
  std::optional<Smoothing> smoothing = {};  // w8a8
  Selection selection = {};
  bool overwrite = false;
  int threads = 0;
};

struct LayerReport {
  std::string name;
  std::int64_t n = 0;
  std::int64_t k = 0;
  double sqnr = 0;  // dB, of the quantized weight, dequantized, beside the values in the file, smoothed
  double max_error = 0;
  std::int64_t vanished = 0;       // rows, or groups of a row, that are all zero now and were not
  std::uint64_t bytes = 0;         // of the quantized weight with all that belongs to it
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
  std::vector<std::string> warnings;  // sentences: few calibration rows, weights that became zero
  std::uint64_t size_before = 0;      // of the safetensors files
  std::uint64_t size_after = 0;
};

// Called with the bytes done, of all, and the tensor: before each group that is smoothed, each alpha that is tried for
// it, each tensor and each file.
// May throw: then nothing is left of what was written.
using OnProgress = std::function<void(std::int64_t done, std::int64_t all, const std::string& tensor)>;

// `from` and `to`: both a safetensors file, or both a folder, whose other files are copied byte for byte; links to
// files are followed. `to` appears when all is done, in one step. `overwrite` replaces a regular file, or a folder all
// of whose contents come from `from`; nothing that is read may be in it. Permissions are those of the sources, less the
// umask. The same input gives the same bytes. Throws FileError, among others where `from` is quantized already.
QuantizeReport quantize_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                                   const QuantizeOptions& options, const OnProgress& progress = {});

}  // namespace octile::checkpoint
