// The groups of a quantization_config, by a layer's name.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "octile/checkpoint/checkpoint.h"
#include "pattern.h"

namespace octile::checkpoint {

// The targets of compressed-tensors: a layer's name, an expression that matches it ("re:..."), or a class, "Linear" or
// "Module". Of several targets that match, the first in that order counts, and among equals the first of the alphabet.
class Targets {
 public:
  // Throws FileError, `place` first, for an expression that is not supported.
  Targets(const std::vector<std::string>& targets, const std::string& place);

  // The target that matches the layer; null: none. Throws FileError when all matches so far took too many steps.
  const std::string* of(const std::string& layer);

 private:
  std::string place_;
  std::set<std::string> names_;
  std::vector<std::pair<std::string, Pattern>> patterns_;  // sorted
  std::int64_t steps_;
};

class Schemes {
 public:
  explicit Schemes(const Checkpoint& checkpoint);

  // For compressed-tensors: an index of ModelConfig::groups. Throws FileError for a layer that is in no group, or is
  // ignored.
  std::size_t group_of(const std::string& layer);
  bool ignores(const std::string& layer) { return ignored_.of(layer) != nullptr; }

 private:
  const Checkpoint& checkpoint_;
  Targets ignored_;
  std::map<std::string, std::size_t> groups_;  // by target
  Targets targets_;
};

}  // namespace octile::checkpoint
