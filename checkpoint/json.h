// JSON that others wrote, of a folder or of a header: one pass, and time and memory in proportion to the text.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "octile/checkpoint/elements.h"

namespace octile::checkpoint {

inline constexpr std::size_t kMaxJsonDepth = 64;
inline constexpr std::size_t kMaxJsonValues = 1'000'000;  // members and elements of one document

// Hears a text, event by event. An event that returns false ends it.
class JsonListener : public nlohmann::json_sax<nlohmann::json> {
 public:
  // Throws FileError, `name` first, for what is no JSON and for what an event refuses.
  void read(std::string_view text, std::string_view name);

 protected:
  bool fail(std::string error) {
    error_ = std::move(error);
    return false;
  }
  bool binary(binary_t&) final { return fail("binary data"); }  // no text has any
  bool parse_error(std::size_t position, const std::string& token, const nlohmann::json::exception& error) final;
  virtual std::string subject() const { return {}; }  // "the header is ": of messages about the text as a whole

 private:
  std::string error_;
};

// A document that is an object. Checks all of it: its depth, the number of its values, and that no object has a key
// twice. Keeps the members that are wanted.
class JsonDocument : public JsonListener {
 public:
  using Members = std::optional<std::vector<std::string_view>>;  // nullopt: all

  // Keeps the document's own members of these names.
  explicit JsonDocument(Members wanted) : wanted_(std::move(wanted)) {}

  const nlohmann::json& kept() const { return kept_; }

 protected:
  // A value that is not kept: where it stands, 1 for the document's own members, its key, "" for an element, and its
  // text if it is one.
  virtual bool pass(std::size_t /*depth*/, const std::string& /*key*/, nlohmann::json::value_t /*kind*/,
                    const std::string* /*text*/) {
    return true;
  }
  // False: whoever reads the object that stands at `depth` sees to it that no key is there twice.
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

  Members wanted_;
  json kept_ = json::object();
  std::vector<Open> open_;
  std::string top_;
  std::size_t values_ = 0;
};

}  // namespace octile::checkpoint
