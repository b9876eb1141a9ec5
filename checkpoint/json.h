// Untrusted JSON, of a folder or of a header: read in one pass, in time and memory proportional to the text.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "reject.h"

namespace octile::checkpoint {

inline constexpr std::size_t kMaxJsonDepth = 64;
inline constexpr std::size_t kMaxJsonValues = 1'000'000;  // members and elements of one document

// Receives a text event by event. An event that returns false ends the parse.
class JsonListener : public nlohmann::json_sax<nlohmann::json> {
 public:
  // Throws FileError, `name` first, for invalid JSON and for what an event rejects.
  void read(std::string_view text, std::string_view name);

 protected:
  template <class... Parts>
  bool fail(const Parts&... parts) {
    error_ = message(parts...);
    return false;
  }
  bool binary(binary_t&) final { return fail("binary data"); }  // not in a text
  bool parse_error(std::size_t position, const std::string& token, const nlohmann::json::exception& error) final;
  virtual std::string subject() const { return {}; }  // "the header is ", for messages about the whole text

 private:
  std::string error_;
};

// A document that is an object. Checks its depth, the number of its values, and that no object repeats a key. Keeps the
// requested members.
class JsonDocument : public JsonListener {
 public:
  using Members = std::optional<std::vector<std::string_view>>;  // nullopt: all

  // Keeps the document's own members of these names.
  explicit JsonDocument(Members requested) : requested_(std::move(requested)) {}

  const nlohmann::json& kept() const { return kept_; }

 protected:
  // Called with each value that is not kept: its depth (1: the document's own members), its key ("": an element), its
  // kind, and the text of a string.
  virtual bool pass(std::size_t /*depth*/, const std::string& /*key*/, nlohmann::json::value_t /*kind*/,
                    const std::string* /*text*/) {
    return true;
  }
  // False: the derived class checks for repeated keys in the objects at `depth`.
  virtual bool remembers_keys(std::size_t /*depth*/) const { return true; }
  bool fail_twice(const std::string& key);
  const std::string& top() const { return top_; }  // the document's own member that is being read

 private:
  using json = nlohmann::json;

  struct Open {
    json* kept = nullptr;  // null: not kept
    bool is_object = false;
    std::string key = {};
    std::set<std::string> keys = {};
  };

  bool null() final { return add(nullptr); }
  bool boolean(bool value) final { return add(value); }
  bool number_integer(number_integer_t value) final { return add(value); }
  bool number_unsigned(number_unsigned_t value) final { return add(value); }
  bool number_float(number_float_t value, const string_t&) final { return add(value); }
  bool string(string_t& value) final { return add(std::move(value)); }
  bool key(string_t& key) final;
  bool start_object(std::size_t) final { return open(true); }
  bool start_array(std::size_t) final { return open(false); }
  bool end_object() final { return close(); }
  bool end_array() final { return close(); }

  json* place(json& value);
  bool add(json value);
  bool open(bool is_object);
  bool close();

  Members requested_;
  json kept_ = json::object();
  std::vector<Open> open_;
  std::string top_;
  std::size_t values_ = 0;
};

}  // namespace octile::checkpoint
