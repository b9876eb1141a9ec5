// The factors of SmoothQuant, tensor by tensor.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "octile/checkpoint/quantize.h"
#include "octile/error.h"

namespace octile::checkpoint {

// Divides along the first dimension.
void divide_rows(std::span<float> values, std::span<const float> factors);

// What the library refuses in `action` becomes a FileError that names the layer.
template <class Action>
auto of_layer(const Checkpoint& checkpoint, const std::string& layer, Action action) {
  try {
    return action();
  } catch (const Error& error) {
    throw FileError(checkpoint.path().string() + ": \"" + printable(layer) + "\": " + error.what());
  }
}

class Folded {
 public:
  Folded(const Checkpoint& checkpoint, const Calibration& calibration, const QuantizeOptions& options)
      : checkpoint_(checkpoint), calibration_(calibration), options_(options) {}

  // Reads the group's weights, and reports it: as smoothed, or as not smoothed where a tensor, divided, would not fit
  // its type. A search for alpha calls `tell` before each one, which may throw.
  void fold(const SmoothingGroup& group, QuantizeReport& report, const std::function<void()>& tell);

  // What the columns of the layer's weight are multiplied by; null: nothing.
  const std::vector<float>* columns(const std::string& layer) const;
  // What the tensor's values are divided by along its first dimension; null: nothing.
  const std::vector<float>* rows(const std::string& tensor) const;

 private:
  std::vector<float> factors(const SmoothingGroup& group, const std::function<void()>& tell,
                             std::optional<double>& alpha) const;
  // Nothing: no alpha is worth it.
  std::optional<double> search(const SmoothingGroup& group, const std::vector<float>& channel_max,
                               const std::function<void()>& tell) const;
  std::string divide(const TensorInfo& tensor, std::vector<float>& factors) const;

  const Checkpoint& checkpoint_;
  const Calibration& calibration_;
  const QuantizeOptions& options_;
  std::map<std::string, std::vector<float>> columns_;
  std::map<std::string, std::vector<float>> rows_;
};

}  // namespace octile::checkpoint
