// The regular expressions that name layers in a quantization_config ("re:..."), matched in linear time.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace octile::checkpoint {

// As Python's re.match takes them: from the beginning of a name on, to any end. Read are characters, `.`, classes, \d
// \w \s and their opposites, groups, `|`, `* + ? {m,n}` (also lazy), `^ $ \A \Z \b \B`. Not read: what looks around or
// back, flags, possessive repetition. A match takes time in proportion to the product of both lengths at most.
class Pattern {
 public:
  // Throws std::invalid_argument, which says what is not read.
  explicit Pattern(std::string_view expression);

  // `steps` are counted down by what the match takes.
  bool matches(std::string_view text, std::int64_t& steps) const;
  std::size_t states() const { return states_.size(); }

 private:
  friend class PatternCompiler;

  // A state of the automaton: it takes a character and goes on to the next state, or without one to one or two others.
  struct State {
    enum class Kind : std::uint8_t { bytes, split, go, begin, end, very_end, boundary, no_boundary, match } kind;
    std::bitset<256> bytes = {};
    std::size_t first = 0;
    std::size_t second = 0;
  };

  std::vector<State> states_;
};

}  // namespace octile::checkpoint
