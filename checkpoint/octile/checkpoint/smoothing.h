// SmoothQuant in a checkpoint: the statistics of a calibration file, and the layers between which factors can be
// folded.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "octile/checkpoint/checkpoint.h"
#include "octile/checkpoint/layers.h"

namespace octile::checkpoint {

// A safetensors file with the metadata {"format": "octile-calibration", "version": "1"} and, for each linear layer
// NAME: NAME.input_channel_max f32 (K), NAME.input_max f32 (1), NAME.rows I64 (1), and optionally
// NAME.input_second_moments f32 (K, K) and NAME.input_excess f32 (2), which is Calibrator::excess().
class Calibration {
 public:
  // Checks the whole file but the second moments' values. Throws FileError.
  static Calibration open(const std::filesystem::path& path);

  bool has(const Layer& layer) const;
  bool has_second_moments(const Layer& layer) const;
  std::string example() const;                               // the name of one of its tensors, for messages
  std::vector<float> channel_max(const Layer& layer) const;  // (K)
  std::int64_t rows(const Layer& layer) const;
  std::vector<float> second_moments(const Layer& layer) const;  // (K, K)
  std::vector<float> excess(const Layer& layer) const;          // (2); empty: not in the file

 private:
  explicit Calibration(Checkpoint file) : file_(std::move(file)) {}
  void check() const;
  void check_shape(const Layer& layer, const char* what, const std::vector<std::int64_t>& shape) const;
  std::vector<float> values(const Layer& layer, const char* what, std::vector<std::int64_t> shape) const;
  Checkpoint file_;
};

// Layers that read one input, and the layer before, which alone produces that input and whose output has no other
// reader: factors move from one to the others without changing what the model computes.
struct SmoothingGroup {
  std::string before;  // a norm, or a linear layer whose outputs are divided
  std::vector<Layer> layers;
};

struct NotSmoothed {
  std::string layer;
  std::string reason;
};

struct SmoothingPlan {
  std::vector<SmoothingGroup> groups;
  std::vector<NotSmoothed> others;
};

// By config.json's model_type (folds.h). A norm takes the factors where it precedes what it feeds (llama, mistral,
// qwen2, qwen3, opt), not where its output is also added to the residual (bert). A linear layer takes them where each
// channel of its output is passed on unmixed: values to the attention's output layer, unless heads share them, and
// up_proj to down_proj.
SmoothingPlan plan_smoothing(const Checkpoint& checkpoint, const std::vector<Layer>& layers);

}  // namespace octile::checkpoint
