// SmoothQuant's factors, tensor by tensor.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "octile/checkpoint/quantize.h"
#include "octile/error.h"
#include "reject.h"

namespace octile::checkpoint {

// Divides along the first dimension.
void divide_rows(std::span<float> values, std::span<const float> factors);

// Turns the library's errors in `action` into a FileError that names the layer.
template <class Action>
auto of_layer(const Checkpoint& checkpoint, const std::string& layer, Action action) {
  try {
    return action();
  } catch (const Error& error) {
    reject(checkpoint.path().string(), ": ", quoted(layer), ": ", error.what());
  }
}

class Folded {
 public:
  Folded(const Checkpoint& checkpoint, const Calibration& calibration, const QuantizeOptions& options)
      : checkpoint_(checkpoint), calibration_(calibration), options_(options) {}

  // Computes the group's factors and adds it to the report: smoothed, or not where a divided tensor would not fit its
  // type. A search calls `tell` before each alpha; it may throw.
  void fold(const SmoothingGroup& group, QuantizeReport& report, const std::function<void()>& tell);

  // The factors of the columns of the layer's weight; null: none.
  const std::vector<float>* columns(const std::string& layer) const;
  // The divisors of the tensor along its first dimension; null: none.
  const std::vector<float>* rows(const std::string& tensor) const;

 private:
  std::vector<float> factors(const SmoothingGroup& group, const std::function<void()>& tell,
                             std::optional<double>& alpha) const;
  // nullopt: no alpha is worth it.
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
