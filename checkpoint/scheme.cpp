#include "scheme.h"

#include <stdexcept>

#include "reject.h"

namespace octile::checkpoint {

namespace {

// Real files have dozens of expressions of a dozen states each; a match takes hundreds of steps of some nanoseconds.
constexpr std::size_t kMaxStates = 100'000;
constexpr std::int64_t kSteps = 100'000'000, kStepsOfALayer = 20'000;

std::string place_of(const Checkpoint& checkpoint) { return checkpoint.path().string() + ": quantization_config"; }

std::map<std::string, std::size_t> groups_by_target(const std::vector<QuantizationGroup>& groups) {
  std::map<std::string, std::size_t> result;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const std::string& target : groups[i].targets) result[target] = i;
  }
  return result;
}

std::vector<std::string> keys_of(const std::map<std::string, std::size_t>& map) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : map) keys.push_back(key);
  return keys;
}

}  // namespace

Targets::Targets(const std::vector<std::string>& targets, const std::string& place)
    : place_(place), names_(targets.begin(), targets.end()), steps_(kSteps) {
  std::size_t states = 0;
  for (const std::string& target : names_) {
    if (!target.starts_with("re:")) continue;
    try {
      states += patterns_.emplace_back(target, std::string_view(target).substr(3)).second.states();
    } catch (const std::invalid_argument& error) {
      reject(place_, ": the target ", quoted(target), " is not a supported regular expression: ", error.what());
    }
    if (states > kMaxStates) reject(place_, ": its regular expressions are too long");
  }
}

const std::string* Targets::of(const std::string& layer) {
  if (const auto found = names_.find(layer); found != names_.end()) return &*found;
  steps_ += kStepsOfALayer;
  for (const auto& [target, pattern] : patterns_) {
    if (pattern.matches(layer, steps_)) return &target;
    if (steps_ < 0) reject(place_, ": its regular expressions take too long");
  }
  for (const char* const name : {"Linear", "Module"}) {
    if (const auto found = names_.find(name); found != names_.end()) return &*found;
  }
  return nullptr;
}

Schemes::Schemes(const Checkpoint& checkpoint)
    : checkpoint_(checkpoint),
      ignored_(checkpoint.config().ignore, place_of(checkpoint)),
      groups_(groups_by_target(checkpoint.config().groups)),
      targets_(keys_of(groups_), place_of(checkpoint)) {}

std::size_t Schemes::group_of(const std::string& layer) {
  const auto refuse = [&](const std::string& what) -> FileError {
    return FileError(checkpoint_.path().string() + ": \"" + printable(layer) + "\": " + what);
  };
  if (const std::string* const target = ignored_.of(layer)) {
    throw refuse("it is quantized, and quantization_config ignores \"" + printable(*target) + "\"");
  }
  const std::string* const target = targets_.of(layer);
  if (!target) throw refuse("no group of quantization_config matches it");
  return groups_.at(*target);
}

}  // namespace octile::checkpoint
