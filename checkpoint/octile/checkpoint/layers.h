// Which tensors of a checkpoint are linear layers, by name and shape, and what their weights are.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "octile/checkpoint/checkpoint.h"
#include "octile/checkpoint/quantized_weight.h"

namespace octile::checkpoint {

enum class LayerKind : std::uint8_t {
  plain,           // NAME.weight, float
  int_quantized,   // NAME.weight, I8, and NAME.weight_scale
  pack_quantized,  // NAME.weight_packed and its kin
  awq,             // NAME.qweight and its kin
  gptq,
};

std::string_view name(LayerKind kind);

struct Layer {
  std::string name = {};  // of the module: without ".weight"
  LayerKind kind = LayerKind::plain;
  std::int64_t n = 0;      // OUT
  std::int64_t k = 0;      // IN
  std::int64_t group = 0;  // of a quantized one; 0: a whole row
  bool zero_points = false;
  bool static_input = false;               // the activation has a scale in the file
  std::optional<std::size_t> scheme = {};  // of ModelConfig::groups; none: nothing says more than the tensors
  std::vector<std::string> tensors = {};  // that hold the weight: what a quantizer replaces. The bias is not among them

  std::string weight_tensor() const;
};

// A weight of two dimensions or more that is not taken for a linear layer.
struct LeftOut {
  std::string name;  // of the module
  std::string reason;
  bool linear = false;  // a matrix that may well be one: a reader of the result is told that it is not quantized
};

struct LayerTable {
  std::vector<Layer> layers;  // in the order of their bytes in the files
  std::vector<LeftOut> left_out;
};

// Both hold patterns for module names.
struct Selection {
  std::vector<std::string> ignore;
  std::vector<std::string> only;  // empty: by name. Otherwise exactly these, embeddings and heads too
};

// A linear layer is a float matrix NAME.weight that is no embedding, no norm, no head and no router by its name, and is
// stored (OUT, IN). Quantized layers are known by their tensors; what these have wrong, by themselves or beside what
// the quantization_config says of them, throws FileError. Neither OUT nor IN is 0.
LayerTable find_layers(const Checkpoint& checkpoint, const Selection& selection = {});

// Of a layer that is not plain.
QuantizedWeight read_quantized(const Checkpoint& checkpoint, const Layer& layer);

// (N, K), f32: of a plain layer as it is, of another one dequantized.
std::vector<float> read_weight(const Checkpoint& checkpoint, const Layer& layer);
// The same without rounding to f32 what a file holds in f64.
std::vector<double> read_weight_f64(const Checkpoint& checkpoint, const Layer& layer);

}  // namespace octile::checkpoint
