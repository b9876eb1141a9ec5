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
  int_quantized,   // NAME.weight, I8 (of 4 bits too), and NAME.weight_scale
  pack_quantized,  // NAME.weight_packed and others
  awq,             // NAME.qweight and others
  gptq,
};

std::string_view name(LayerKind kind);

// How compressed-tensors stores such a layer: packed if only the weight is quantized, or has 4 bits.
LayerKind kind_of(const WeightFormat& weight, Activation activation);

// Where a layer is in a tensor of all experts, (E, OUT, IN) or (E, IN, OUT).
struct ExpertPart {
  std::string module;  // of all experts
  std::int64_t expert = 0;
  std::int64_t first = 0;  // of its channels among the expert's: first, first + step, ...
  std::int64_t step = 1;
  bool transposed = false;
  std::string bias;  // the tensor of all experts' biases; empty: none
};

struct Layer {
  std::string name = {};  // of the module: without ".weight"
  LayerKind kind = LayerKind::plain;
  std::int64_t n = 0;                      // OUT
  std::int64_t k = 0;                      // IN
  WeightFormat weight = {};                // of a quantized one
  bool static_input = false;               // the activation has a scale in the file
  bool dynamic_input = false;              // quantization_config says that the activation is quantized in each call
  std::optional<std::size_t> scheme = {};  // of ModelConfig::groups; none: nothing says more than the tensors
  std::vector<std::string> tensors = {};   // that hold the weight, which a quantizer replaces. Without the bias
  std::optional<ExpertPart> expert = {};   // of a plain one: it is a part of its tensor

  std::string weight_tensor() const;
};

// A weight of two dimensions or more that does not count as a linear layer.
struct LeftOut {
  std::string name;  // of the module
  std::string reason;
  bool linear = false;  // a matrix that may be one: the result lists it as not quantized
};

struct LayerTable {
  std::vector<Layer> layers;  // in the order of their bytes in the files
  std::vector<LeftOut> left_out;
  std::vector<std::string> unmatched;  // patterns of the selection that are for none of them
};

// Patterns of module names.
struct Selection {
  std::vector<std::string> ignore;
  std::vector<std::string> only;  // empty: layers by their names; else exactly these, embeddings and heads too
};

// A linear layer is a float matrix NAME.weight, stored (OUT, IN), whose name is not that of an embedding, a norm, a
// head or a router. Of experts that share a tensor each has layers of its own (fused_experts.h). Quantized layers are
// known by their tensors; tensors that are wrong, or that disagree with the quantization_config, throw FileError.
// Neither OUT nor IN is 0.
LayerTable find_layers(const Checkpoint& checkpoint, const Selection& selection = {});

// Of its weight, in the file.
std::uint64_t size_of(const Checkpoint& checkpoint, const Layer& layer);

// The layer must not be plain.
QuantizedWeight read_quantized(const Checkpoint& checkpoint, const Layer& layer);

// (N, K), f32: the values of a plain layer, the dequantized ones of another.
std::vector<float> read_weight(const Checkpoint& checkpoint, const Layer& layer);
// The same, with the values of an f64 tensor unrounded.
std::vector<double> read_weight_f64(const Checkpoint& checkpoint, const Layer& layer);

}  // namespace octile::checkpoint
