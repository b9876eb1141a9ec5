#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "files.h"
#include "octile/checkpoint/safetensors.h"

namespace octile::checkpoint {

namespace {

constexpr std::size_t kAlignment = 8;

int write_at(int descriptor, Bytes bytes, std::uint64_t at) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    at += static_cast<std::uint64_t>(written);
  }
  return 0;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorSpec>& tensors,
                                     const Metadata& metadata)
    : path_(path), temporary_(files::temporary_name(path)) {
  std::vector<const TensorSpec*> order;
  for (const TensorSpec& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorSpec* a, const TensorSpec* b) {
    return bits(a->type) != bits(b->type) ? bits(a->type) > bits(b->type) : a->name < b->name;
  });

  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t at = 0;
  for (const TensorSpec* tensor : order) {
    const std::uint64_t end = at + size_of(tensor->type, tensor->shape, tensor->name);
    if (tensor->name == "__metadata__" || !places_.emplace(tensor->name, Place{at, end}).second) {
      throw FileError(path.string() + ": two tensors would be called \"" + printable(tensor->name) + "\"");
    }
    header.push_back(
        {tensor->name, {{"dtype", name(tensor->type)}, {"shape", tensor->shape}, {"data_offsets", {at, end}}}});
    at = end;
  }
  std::string text = header.dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  if (text.size() > kMostHeaderBytes) {
    throw FileError(path.string() + ": " + std::to_string(text.size()) + " bytes of header are more than " +
                    std::to_string(kMostHeaderBytes));
  }
  const std::uint64_t length = text.size();
  text.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
  for (auto& [name, place] : places_) {
    place.next += text.size();
    place.end += text.size();
  }
  size_ = at + text.size();

  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) files::fail_on("write", path, errno);
  if (const int error = write_at(descriptor_, std::as_bytes(std::span(text)), 0)) {
    // A constructor that throws has no destructor.
    close(descriptor_);
    unlink(temporary_.c_str());
    files::fail_on("write", path, error);
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

void SafetensorsWriter::append(std::string_view tensor, Bytes bytes) {
  const auto found = places_.find(tensor);
  if (found == places_.end()) {
    throw FileError(path_.string() + ": the header has no tensor \"" + printable(tensor) + "\"");
  }
  Place& place = found->second;
  if (bytes.size() > place.end - place.next) {
    throw FileError(path_.string() + ": " + std::to_string(bytes.size()) + " bytes for \"" + printable(tensor) +
                    "\", which lacks " + std::to_string(place.end - place.next));
  }
  if (const int error = write_at(descriptor_, bytes, place.next)) files::fail_on("write", path_, error);
  place.next += bytes.size();
}

void SafetensorsWriter::finish(bool overwrite) {
  for (const auto& [name, place] : places_) {
    if (place.next != place.end) {
      throw FileError(path_.string() + ": \"" + printable(name) + "\" lacks " + std::to_string(place.end - place.next) +
                      " bytes");
    }
  }
  if (fsync(descriptor_) != 0) files::fail_on("write", path_, errno);
  files::move_into_place(temporary_, path_, overwrite);
  close(descriptor_);
  descriptor_ = -1;
}

}  // namespace octile::checkpoint
