#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "files.h"
#include "octile/checkpoint/safetensors.h"
#include "reject.h"

namespace octile::checkpoint {

namespace {

constexpr std::size_t kAlignment = 8;

std::string json_of(const nlohmann::json& value, const std::filesystem::path& path) {
  try {
    return value.dump();
  } catch (const nlohmann::json::exception&) {
    reject(path.string(), ": ", printable(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::ignore)),
           " is no UTF-8");
  }
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorSpec>& tensors,
                                     const Metadata& metadata, unsigned mode)
    : path_(path) {
  std::vector<const TensorSpec*> order;
  for (const TensorSpec& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorSpec* a, const TensorSpec* b) {
    return bits(a->type) != bits(b->type) ? bits(a->type) > bits(b->type) : a->name < b->name;
  });

  std::string text = "{";
  const auto add = [&](const std::string& key, const std::string& value) {
    text += (text.size() > 1 ? "," : "") + json_of(key, path) + ":" + value;
  };
  if (!metadata.empty()) add("__metadata__", json_of(metadata, path));
  std::uint64_t at = 0;
  for (const TensorSpec* tensor : order) {
    const std::uint64_t end = at + size_of(tensor->type, tensor->shape, tensor->name);
    if (tensor->name == "__metadata__" || !places_.emplace(tensor->name, Place{at, end}).second) {
      reject(path.string(), ": two tensors would be called ", quoted(tensor->name));
    }
    add(tensor->name, R"({"dtype":")" + std::string(name(tensor->type)) + R"(","shape":)" +
                          json_of(tensor->shape, path) + R"(,"data_offsets":[)" + std::to_string(at) + "," +
                          std::to_string(end) + "]}");
    at = end;
  }
  text += '}';
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  if (text.size() > kMaxHeaderBytes) {
    reject(path.string(), ": ", text.size(), " bytes of header are more than ", kMaxHeaderBytes);
  }
  const std::uint64_t length = text.size();
  text.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
  for (auto& [name, place] : places_) {
    place.next += text.size();
    place.end += text.size();
  }
  size_ = at + text.size();

  files::with_file_errors(
      [&] { temporary_ = std::make_unique<base::Temporary>(path, base::Temporary::Kind::file, mode); });
  write_at(0, std::as_bytes(std::span(text)));
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write_at(std::uint64_t at, Bytes bytes) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(temporary_->file().number(), bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) files::fail_on("write", path_, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    at += static_cast<std::uint64_t>(written);
  }
}

void SafetensorsWriter::append(std::string_view tensor, Bytes bytes) {
  const auto found = places_.find(tensor);
  if (found == places_.end()) {
    reject(path_.string(), ": the header has no tensor ", quoted(tensor));
  }
  Place& place = found->second;
  if (bytes.size() > place.end - place.next) {
    reject(path_.string(), ": ", bytes.size(), " bytes for ", quoted(tensor), ", which lacks ", place.end - place.next);
  }
  write_at(place.next, bytes);
  place.next += bytes.size();
}

void SafetensorsWriter::finish(bool overwrite) {
  for (const auto& [name, place] : places_) {
    if (place.next != place.end) {
      reject(path_.string(), ": ", quoted(name), " lacks ", place.end - place.next, " bytes");
    }
  }
  files::with_file_errors([&] { overwrite ? temporary_->replace() : temporary_->move_into_place(); });
}

}  // namespace octile::checkpoint
