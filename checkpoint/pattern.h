// The regular expressions of a quantization_config ("re:..."), matched in linear time.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace octile::checkpoint {

// Semantics of Python's re.match: a match begins at the start of the name and may end anywhere. Supported: characters,
// `.`, classes, \d \w \s and their complements, groups, `|`, `* + ? {m,n}` (also lazy), `^ $ \A \Z \b \B`. Not
// supported: lookaround, backreferences, flags, possessive repetition. A match takes time proportional to the product
// of both lengths at most.
class Pattern {
 public:
  // Throws std::invalid_argument, which says what is not supported.
  explicit Pattern(std::string_view expression);

  // Subtracts the steps that the match takes from `steps`.
  bool matches(std::string_view text, std::int64_t& steps) const;
  std::size_t states() const { return states_.size(); }

 private:
  friend class PatternCompiler;

  // A state of the automaton. It consumes a character and moves to the next state, or moves without one.
  struct State {
    enum class Kind : std::uint8_t { bytes, split, go, begin, end, very_end, boundary, no_boundary, match } kind;
    std::bitset<256> bytes = {};
    std::size_t first = 0;
    std::size_t second = 0;
  };

  std::vector<State> states_;
};

}  // namespace octile::checkpoint
