// The experts of a mixture, where a file has the weights of all of them in one tensor:
//   experts.gate_up_proj (E, 2 I, H), experts.down_proj (E, H, I)   or both transposed, (E, H, 2 I) and (E, I, H)
//   experts.gate_up_proj_bias (E, 2 I), experts.down_proj_bias (E, H)   or neither
// Each expert becomes three layers: experts.3.gate_proj, experts.3.up_proj, experts.3.down_proj.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "octile/checkpoint/layers.h"

namespace octile::checkpoint {

struct FusedExperts {
  std::string name;           // of the module: "model.layers.0.mlp.experts"
  std::vector<Layer> layers;  // whose weights are in the requested tensor
  std::string reason;         // why they are no layers; empty: they are
};

// None for a tensor that is neither gate_up_proj nor down_proj of three dimensions.
std::optional<FusedExperts> fused_experts(const Checkpoint& checkpoint, const TensorInfo& tensor);

// The layer's values, of those of its expert's matrix.
template <class T>
std::vector<T> values_of_part(const Layer& layer, const std::vector<T>& matrix) {
  const ExpertPart& part = *layer.expert;
  const auto channels = static_cast<std::int64_t>(matrix.size()) / layer.k;
  std::vector<T> values;
  values.reserve(static_cast<std::size_t>(layer.n * layer.k));
  for (std::int64_t i = 0; i < layer.n; ++i) {
    const std::int64_t channel = part.first + i * part.step;
    for (std::int64_t k = 0; k < layer.k; ++k) {
      values.push_back(
          matrix[static_cast<std::size_t>(part.transposed ? k * channels + channel : channel * layer.k + k)]);
    }
  }
  return values;
}

// The bytes of the expert's part of a tensor of all experts.
Bytes bytes_of_expert(const Checkpoint& checkpoint, const std::string& tensor, std::int64_t expert);

// The layer's bias, in the type of the file.
std::vector<std::byte> bias_of_part(const Checkpoint& checkpoint, const Layer& layer);

}  // namespace octile::checkpoint
