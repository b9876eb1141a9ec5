// Where SmoothQuant's factors can be folded, by architecture: the one table, which the Python package reads too.
#pragma once

#include <string_view>
#include <vector>

namespace octile::checkpoint {

// Names within one block of the model. The output of `before` goes into `layers` and nowhere else, and may be divided
// per channel.
struct Fold {
  std::string_view before;
  std::vector<std::string_view> layers;
  bool needs_norm_before = false;  // not where config.json's do_layer_norm_before is false
};

struct Architecture {
  std::vector<std::string_view> model_types;  // in config.json
  std::vector<std::string_view> blocks = {};  // classes of Transformers
  std::vector<Fold> folds = {};
  // The norm follows the addition, and its output is added again: it cannot take factors.
  bool is_post_norm = false;
};

const std::vector<Architecture>& architectures();

}  // namespace octile::checkpoint
