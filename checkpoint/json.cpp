#include "json.h"

#include <algorithm>

namespace octile::checkpoint {

void JsonListener::read(std::string_view text, std::string_view name) {
  const std::string file(name);
  // The parser takes it for the end of the text.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    reject(file, ": ", subject(), "not JSON (byte ", zero + 1, " is 0)");
  }
  nlohmann::json_sax<nlohmann::json>* const events = this;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), events)) reject(file, ": ", error_);
}

bool JsonListener::parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) {
  if (dynamic_cast<const nlohmann::json::parse_error*>(&error)) {
    return fail(subject(), "not JSON (byte ", position, ")");
  }
  return fail(subject(), "JSON that is not read (", printable(error.what()), ")");  // a number beyond every double
}

bool JsonDocument::fail_twice(const std::string& key) { return fail(quoted(key), " appears twice"); }

bool JsonDocument::key(string_t& key) {
  Open& object = open_.back();
  if (remembers_keys(open_.size() - 1) && !object.keys.insert(key).second) return fail_twice(key);
  if (open_.size() == 1) top_ = key;
  object.key = std::move(key);
  return true;
}

// Stores the next value, and returns its place; null: it is not kept.
nlohmann::json* JsonDocument::place(json& value) {
  Open& parent = open_.back();
  if (open_.size() == 1) {
    const bool keep = !requested_ || std::find(requested_->begin(), requested_->end(), parent.key) != requested_->end();
    return keep ? &(kept_[parent.key] = std::move(value)) : nullptr;
  }
  if (parent.kept == nullptr) return nullptr;
  if (parent.is_object) return &((*parent.kept)[parent.key] = std::move(value));
  parent.kept->push_back(std::move(value));
  return &parent.kept->back();
}

bool JsonDocument::add(json value) {
  if (open_.empty()) return fail(subject(), "not a JSON object");
  if (++values_ > kMaxJsonValues) return fail("more than ", kMaxJsonValues, " values");
  if (place(value) != nullptr) return true;
  return pass(open_.size(), open_.back().key, value.type(), value.get_ptr<const std::string*>());
}

bool JsonDocument::open(bool is_object) {
  json value(is_object ? json::value_t::object : json::value_t::array);
  if (open_.empty()) {
    if (!is_object) return fail(subject(), "not a JSON object");
    open_.push_back({nullptr, true});
    return true;
  }
  if (open_.size() == kMaxJsonDepth) return fail("deeper than ", kMaxJsonDepth, " levels");
  if (++values_ > kMaxJsonValues) return fail("more than ", kMaxJsonValues, " values");
  json* const kept = place(value);
  if (kept == nullptr && !pass(open_.size(), open_.back().key, value.type(), nullptr)) return false;
  open_.push_back({kept, is_object});
  return true;
}

bool JsonDocument::close() {
  open_.pop_back();
  return true;
}

}  // namespace octile::checkpoint
