// The factors of SmoothQuant, tensor by tensor.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "octile/checkpoint/quantize.h"

namespace octile::checkpoint {

class Folded {
 public:
  // Reads the weights of one group after the other.
  Folded(const Checkpoint& checkpoint, const Calibration& calibration, const QuantizeOptions& options);

  void plan(const std::vector<Layer>& layers, QuantizeReport& report);

  // What the columns of the layer's weight are multiplied by; null: nothing.
  const std::vector<float>* columns(const std::string& layer) const;
  // What the tensor's values are divided by along its first dimension; null: nothing.
  const std::vector<float>* rows(const std::string& tensor) const;

 private:
  void fold(const SmoothingGroup& group, QuantizeReport& report);
  double search(const SmoothingGroup& group, const std::vector<float>& channel_max) const;

  const Checkpoint& checkpoint_;
  const Calibration& calibration_;
  const QuantizeOptions& options_;
  std::map<std::string, std::vector<float>> columns_;
  std::map<std::string, std::vector<float>> rows_;
};

}  // namespace octile::checkpoint
