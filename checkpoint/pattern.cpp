#include "pattern.h"

#include <optional>
#include <stdexcept>

namespace octile::checkpoint {

namespace {

constexpr std::size_t kMaxStates = 5000;
constexpr int kMaxDepth = 64;
constexpr int kNoLimit = -1;

using Bytes = std::bitset<256>;

Bytes range(int first, int last) {
  Bytes bytes;
  for (int i = first; i <= last; ++i) bytes.set(static_cast<std::size_t>(i));
  return bytes;
}

// Beyond ASCII nearly all characters are letters.
Bytes word() { return range('0', '9') | range('A', 'Z') | range('a', 'z') | range('_', '_') | range(128, 255); }
Bytes space() { return range('\t', '\r') | range(' ', ' ') | range(0x1c, 0x1f); }

bool is_word(std::string_view text, std::size_t at) {
  static const Bytes bytes = word();
  return at < text.size() && bytes.test(static_cast<unsigned char>(text[at]));
}

}  // namespace

class PatternCompiler {
 public:
  PatternCompiler(std::string_view text, std::vector<Pattern::State>& states) : text_(text), states_(states) {}

  void compile() {
    either(0);
    if (at_ < text_.size()) refuse("an unmatched )");
    add({Kind::match});
  }

 private:
  using Kind = Pattern::State::Kind;

  [[noreturn]] void refuse(const std::string& what) const {
    throw std::invalid_argument(what + " at character " + std::to_string(at_ + 1));
  }
  bool more() const { return at_ < text_.size(); }
  bool next_is(char c) const { return more() && text_[at_] == c; }
  bool take(char c) { return next_is(c) && ++at_; }

  std::size_t add(Pattern::State state) {
    if (states_.size() == kMaxStates) refuse("more than " + std::to_string(kMaxStates) + " states");
    states_.push_back(state);
    return states_.size() - 1;
  }
  void add_bytes(const Bytes& bytes) { add({Kind::bytes, bytes}); }

  // Inserts a state at `at`, and shifts the targets behind it.
  void insert(std::size_t at, Pattern::State state) {
    add(state);
    for (std::size_t i = states_.size() - 1; i > at; --i) {
      states_[i] = states_[i - 1];
      if (states_[i].first >= at) ++states_[i].first;
      if (states_[i].second >= at) ++states_[i].second;
    }
    states_[at] = state;
  }

  void either(int depth) {
    if (depth > kMaxDepth) refuse("groups deeper than " + std::to_string(kMaxDepth));
    const std::size_t begin = states_.size();
    std::vector<std::size_t> ends;
    sequence(depth);
    while (take('|')) {
      ends.push_back(add({Kind::go}));
      // The alternatives so far, or the next one.
      insert(begin, {Kind::split, {}, begin + 1, states_.size() + 1});
      for (std::size_t& end : ends) ++end;
      sequence(depth);
    }
    for (const std::size_t end : ends) states_[end].first = states_.size();
  }

  void sequence(int depth) {
    while (more() && !next_is('|') && !next_is(')')) {
      const std::size_t begin = states_.size();
      const bool can_repeat = atom(depth);
      repeat(begin, can_repeat);
    }
  }

  // False: an anchor, which cannot be repeated.
  bool atom(int depth) {
    const char c = text_[at_++];
    switch (c) {
      case '(':
        group(depth);
        return true;
      case '[':
        add_bytes(byte_class());
        return true;
      case '.':
        add_bytes(~range('\n', '\n'));
        return true;
      case '^':
        return add({Kind::begin}), false;
      case '$':
        return add({Kind::end}), false;
      case '*':
      case '+':
      case '?':
      case '{':
        --at_;
        if (count()) refuse("nothing to repeat");
        ++at_;
        character(c);  // a literal brace
        return true;
      case '\\':
        return escape();
      default:
        character(c);
        return true;
    }
  }

  void group(int depth) {
    if (take('?')) {
      if (take('P')) {
        const std::size_t end = text_.find('>', at_);
        if (!next_is('<') || end == std::string_view::npos) refuse("a reference to a group, which is not read,");
        at_ = end + 1;
      } else if (!take(':')) {
        refuse("a group that looks around or sets flags, which is not read,");
      }
    }
    either(depth + 1);
    if (!take(')')) refuse("a missing )");
  }

  // All bytes of a UTF-8 character.
  void character(char c) {
    add_bytes(range(static_cast<unsigned char>(c), static_cast<unsigned char>(c)));
    while (static_cast<unsigned char>(c) >= 0xc0 && more() && (static_cast<unsigned char>(text_[at_]) & 0xc0) == 0x80) {
      add_bytes(range(static_cast<unsigned char>(text_[at_]), static_cast<unsigned char>(text_[at_])));
      ++at_;
    }
  }

  std::optional<Bytes> named_class(char c) const {
    switch (c) {
      case 'd':
        return range('0', '9');
      case 'D':
        return ~range('0', '9');
      case 'w':
        return word();
      case 'W':
        return ~word();
      case 's':
        return space();
      case 'S':
        return ~space();
      default:
        return std::nullopt;
    }
  }

  char escaped(char c) const {
    constexpr std::string_view kLetters = "nrtfva", kValues = "\n\r\t\f\v\a";
    if (const std::size_t i = kLetters.find(c); i != std::string_view::npos) return kValues[i];
    if (is_word({&c, 1}, 0) && c != '_') refuse(std::string("\\") + c + ", which is not read,");
    return c;
  }

  bool escape() {
    if (!more()) refuse("a \\ without a character");
    const char c = text_[at_++];
    if (c == 'b' || c == 'B') return add({c == 'b' ? Kind::boundary : Kind::no_boundary}), false;
    if (c == 'A' || c == 'Z') return add({c == 'A' ? Kind::begin : Kind::very_end}), false;
    if (const auto bytes = named_class(c)) {
      add_bytes(*bytes);
    } else {
      character(escaped(c));
    }
    return true;
  }

  Bytes byte_class() {
    const bool is_opposite = take('^');
    Bytes all;
    for (bool is_first = true; is_first || !next_is(']'); is_first = false) {
      const auto first = class_member(all);
      if (!first || !next_is('-') || at_ + 1 == text_.size() || text_[at_ + 1] == ']') {
        if (first) all.set(static_cast<unsigned char>(*first));
        continue;
      }
      ++at_;
      const auto last = class_member(all);
      if (!last || static_cast<unsigned char>(*last) < static_cast<unsigned char>(*first)) refuse("a bad range");
      all |= range(static_cast<unsigned char>(*first), static_cast<unsigned char>(*last));
    }
    ++at_;
    return is_opposite ? ~all : all;
  }

  // A character; or nullopt after a named class, which is added to `all`.
  std::optional<char> class_member(Bytes& all) {
    if (!more()) refuse("a missing ]");
    const char c = text_[at_++];
    if (static_cast<unsigned char>(c) >= 0x80) refuse("a class of characters beyond ASCII, which is not read,");
    if (c != '\\') return c;
    if (!more()) refuse("a missing ]");
    const char escaped_one = text_[at_++];
    if (escaped_one == 'b') return '\b';
    if (const auto bytes = named_class(escaped_one)) return all |= *bytes, std::nullopt;
    return escaped(escaped_one);
  }

  struct Count {
    int min = 0;
    int max = kNoLimit;
  };

  std::optional<int> number() {
    constexpr int kMax = 10'000;
    std::optional<int> value;
    while (more() && text_[at_] >= '0' && text_[at_] <= '9') {
      value = value.value_or(0) * 10 + (text_[at_++] - '0');
      if (*value > kMax) refuse("more repetitions than " + std::to_string(kMax));
    }
    return value;
  }

  std::optional<Count> count() {
    if (take('*')) return Count{};
    if (take('+')) return Count{1, kNoLimit};
    if (take('?')) return Count{0, 1};
    const std::size_t begin = at_;
    if (take('{')) {
      const auto min = number();
      if (min && take('}')) return Count{*min, *min};
      if (take(',')) {
        const auto max = number();
        if ((min || max) && take('}')) {
          if (max && *max < min.value_or(0)) refuse("a bad repetition");
          return Count{min.value_or(0), max.value_or(kNoLimit)};
        }
      }
    }
    at_ = begin;  // a literal brace
    return std::nullopt;
  }

  void repeat(std::size_t begin, bool can_repeat) {
    const auto wanted = count();
    if (!wanted) return;
    if (!can_repeat) refuse("a repeated anchor, which is not read,");
    take('?');  // lazy: matches the same names
    if (count()) refuse("a repeated repetition, which is not read,");
    const std::vector<Pattern::State> one(states_.begin() + static_cast<std::ptrdiff_t>(begin), states_.end());
    states_.resize(begin);
    const auto put = [&] {
      const std::size_t offset = states_.size();
      for (Pattern::State state : one) {
        state.first += offset - begin;
        state.second += offset - begin;
        add(state);
      }
    };
    for (int i = 0; i < wanted->min; ++i) put();
    if (wanted->max == kNoLimit) {
      const std::size_t split = add({Kind::split});
      put();
      add({Kind::go, {}, split});
      states_[split].first = split + 1;
      states_[split].second = states_.size();
      return;
    }
    std::vector<std::size_t> splits;
    for (int i = wanted->min; i < wanted->max; ++i) {
      splits.push_back(add({Kind::split}));
      states_[splits.back()].first = states_.size();
      put();
    }
    for (const std::size_t split : splits) states_[split].second = states_.size();
  }

  std::string_view text_;
  std::vector<Pattern::State>& states_;
  std::size_t at_ = 0;
};

Pattern::Pattern(std::string_view expression) { PatternCompiler(expression, states_).compile(); }

// All states that the automaton can be in, character by character.
bool Pattern::matches(std::string_view text, std::int64_t& steps) const {
  std::vector<std::size_t> now = {0}, next;
  std::vector<std::size_t> seen(states_.size(), 0);  // at this character, from 1 on
  for (std::size_t at = 0; !now.empty() && at <= text.size(); ++at) {
    next.clear();
    const auto reach = [&](std::size_t state) {
      if (seen[state] == at + 1) return;
      seen[state] = at + 1;
      now.push_back(state);
    };
    std::vector<std::size_t> begin;
    begin.swap(now);
    for (const std::size_t state : begin) reach(state);
    for (std::size_t i = 0; i < now.size(); ++i) {  // it grows
      const State& state = states_[now[i]];
      const std::size_t behind = now[i] + 1;
      const bool is_boundary = (at > 0 && is_word(text, at - 1)) != is_word(text, at);
      switch (state.kind) {
        case State::Kind::match:
          return true;
        case State::Kind::bytes:
          if (at < text.size() && state.bytes.test(static_cast<unsigned char>(text[at]))) next.push_back(behind);
          break;
        case State::Kind::split:
          reach(state.first);
          reach(state.second);
          break;
        case State::Kind::go:
          reach(state.first);
          break;
        case State::Kind::begin:
          if (at == 0) reach(behind);
          break;
        case State::Kind::end:
          if (at == text.size() || (at + 1 == text.size() && text[at] == '\n')) reach(behind);
          break;
        case State::Kind::very_end:
          if (at == text.size()) reach(behind);
          break;
        case State::Kind::boundary:
          if (is_boundary) reach(behind);
          break;
        case State::Kind::no_boundary:
          if (!is_boundary) reach(behind);
          break;
      }
    }
    steps -= static_cast<std::int64_t>(now.size()) + 1;
    now.swap(next);
  }
  steps -= static_cast<std::int64_t>(states_.size());
  return false;
}

}  // namespace octile::checkpoint
