// Smooths and quantizes the weight of one layer, and writes it in the file's layout.
#pragma once

#include <string>
#include <vector>

#include "folded.h"
#include "octile/checkpoint/quantize.h"

namespace octile::checkpoint {

// The layer's tensors in the new file.
std::vector<TensorSpec> quantized_tensors(const Checkpoint& checkpoint, const Layer& layer,
                                          const QuantizeOptions& options);

class LayerQuantizer {
 public:
  // `calibration` and `folded` may be null.
  LayerQuantizer(const Checkpoint& checkpoint, const QuantizeOptions& options, const Calibration* calibration,
                 const Folded* folded)
      : checkpoint_(checkpoint), options_(options), calibration_(calibration), folded_(folded) {}

  // Appends the tensors that quantized_tensors names.
  LayerReport write(const Layer& layer, SafetensorsWriter& writer) const;

 private:
  const std::vector<float>* columns(const Layer& layer) const {
    return folded_ ? folded_->columns(layer.name) : nullptr;
  }
  std::vector<float> smoothed_weight(const Layer& layer) const;
  std::vector<float> smoothed_moments(const Layer& layer) const;
  float input_scale(const Layer& layer, ElementType type) const;
  // Fills in the error of the quantized weight against the values in the file.
  void measure(const Layer& layer, const std::vector<float>& values, const QuantizedWeight& weight,
               LayerReport& report) const;
  QuantizedWeight quantize(const Layer& layer, const std::vector<float>& values, ElementType type) const;

  const Checkpoint& checkpoint_;
  const QuantizeOptions& options_;
  const Calibration* calibration_;
  const Folded* folded_;
};

}  // namespace octile::checkpoint
