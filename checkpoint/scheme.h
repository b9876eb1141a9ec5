// What a quantization_config says of a layer, by its name.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "octile/checkpoint/checkpoint.h"
#include "pattern.h"

namespace octile::checkpoint {

// The targets of compressed-tensors: a layer's name, an expression that fits it ("re:..."), or a class, "Linear" or
// "Module". Of several that mean a layer the most specific holds, in that order, and among equals the first of the
// alphabet.
class Targets {
 public:
  // Throws FileError, `place` first, for an expression that is not read.
  Targets(const std::vector<std::string>& targets, const std::string& place);

  // The target that means the layer; null: none does. Throws FileError when all that was asked has taken too long.
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

  // Of compressed-tensors, an index of ModelConfig::groups. Throws FileError for a layer that is in no group, or is to
  // be ignored.
  std::size_t group_of(const std::string& layer);
  bool ignores(const std::string& layer) { return ignored_.of(layer) != nullptr; }

 private:
  const Checkpoint& checkpoint_;
  Targets ignored_;
  std::map<std::string, std::size_t> groups_;  // by target
  Targets targets_;
};

}  // namespace octile::checkpoint
