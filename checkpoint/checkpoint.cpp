#include "octile/checkpoint/checkpoint.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "config.h"
#include "files.h"
#include "reject.h"

namespace octile::checkpoint {

namespace {

// True for a dangling link too: opening it then reports the error.
bool is_there(const std::filesystem::path& path) {
  return std::filesystem::exists(std::filesystem::symlink_status(path));
}

}  // namespace

Checkpoint Checkpoint::open(const std::filesystem::path& path) {
  return files::with_file_errors([&] {
    Checkpoint checkpoint;
    checkpoint.path_ = path;
    checkpoint.is_folder_ = std::filesystem::is_directory(path);
    checkpoint.is_folder_ ? checkpoint.open_folder() : checkpoint.open_file();
    return checkpoint;
  });
}

void Checkpoint::open_file() {
  add(path_.filename().string(), SafetensorsFile::open(path_));
  const SafetensorsFile& file = shards_.front().file;
  config_ = read_metadata(file.metadata(), file.name());
}

void Checkpoint::open_folder() {
  const std::filesystem::path config = path_ / kConfigFile;
  if (is_there(config)) {
    config_text_ = files::read_text(config, kMaxConfigBytes);
    config_ = read_config(config_text_, config.string());
  }
  const std::filesystem::path index = path_ / kIndexFile;
  const std::filesystem::path single = path_ / kSingleFile;
  has_index_ = is_there(index);
  const bool has_single = is_there(single);
  if (has_index_ == has_single) {
    reject(path_.string(), (has_single ? ": has both " : ": has neither "), kSingleFile,
           (has_single ? " and " : " nor "), kIndexFile);
  }
  has_single ? add(std::string(kSingleFile), SafetensorsFile::open(single)) : open_shards(index);
}

void Checkpoint::open_shards(const std::filesystem::path& index) {
  const auto shard_of = read_index(files::read_text(index, kMaxIndexBytes), index.string());
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shard_of) names.insert(shard);
  for (const std::string& name : names) add(name, SafetensorsFile::open(path_ / name));
  for (const auto& [tensor, shard] : shard_of) {
    const auto found = places_.find(tensor);
    if (found == places_.end() || shards_[found->second.shard].file_name != shard) {
      reject(index.string(), ": ", quoted(tensor), " is not in ", printable(shard));
    }
  }
  for (const auto& [tensor, place] : places_) {
    if (shard_of.count(tensor) != 0) continue;
    reject(index.string(), ": lacks ", quoted(tensor), ", which is in ", printable(shards_[place.shard].file_name));
  }
}

Checkpoint Checkpoint::of(SafetensorsFile file) {
  Checkpoint checkpoint;
  checkpoint.path_ = file.name();
  checkpoint.config_ = read_metadata(file.metadata(), file.name());
  checkpoint.add(file.name(), std::move(file));
  return checkpoint;
}

// shards_ may reallocate; the TensorInfos that places_ points to, inside each file's own vector, stay in place.
void Checkpoint::add(std::string file_name, SafetensorsFile file) {
  shards_.push_back({std::move(file_name), std::move(file)});
  const Shard& shard = shards_.back();
  for (const TensorInfo& tensor : shard.file.tensors()) {
    const auto [place, is_new] = places_.emplace(tensor.name, Place{shards_.size() - 1, &tensor});
    if (!is_new) {
      reject(path_.string(), ": ", quoted(tensor.name), " is in ", printable(shards_[place->second.shard].file_name),
             " and in ", printable(shard.file_name));
    }
  }
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : places_) names.push_back(name);
  return names;
}

const TensorInfo* Checkpoint::find(std::string_view tensor) const {
  const auto found = places_.find(tensor);
  return found == places_.end() ? nullptr : found->second.info;
}

const TensorInfo& Checkpoint::get(std::string_view tensor) const {
  if (const TensorInfo* const info = find(tensor)) return *info;
  reject(path_.string(), ": there is no tensor ", quoted(tensor));
}

std::size_t Checkpoint::shard_of(std::string_view tensor) const {
  get(tensor);
  return places_.find(tensor)->second.shard;
}

Bytes Checkpoint::bytes(std::string_view tensor) const { return shards_[shard_of(tensor)].file.bytes(get(tensor)); }

void Checkpoint::release(std::string_view tensor) const { shards_[shard_of(tensor)].file.release(get(tensor)); }

std::vector<float> Checkpoint::values(std::string_view tensor) const {
  const TensorInfo& info = get(tensor);
  const int width = bits(info.type);
  std::vector<float> result(static_cast<std::size_t>(info.size()) * 8 / static_cast<std::size_t>(width));
  read_values(info.type, bytes(tensor), result, path_.string() + ": " + info.name);
  return result;
}

std::vector<std::int32_t> Checkpoint::words(std::string_view tensor) const {
  const TensorInfo& info = get(tensor);
  if (info.type != ElementType::s32) {
    reject(path_.string(), ": ", quoted(tensor), " is ", name(info.type), ", not I32");
  }
  std::vector<std::int32_t> result(static_cast<std::size_t>(info.size()) / 4);
  if (!result.empty()) std::memcpy(result.data(), bytes(tensor).data(), result.size() * 4);
  return result;
}

std::uint64_t Checkpoint::size() const {
  std::uint64_t total = 0;
  for (const Shard& shard : shards_) total += shard.file.size();
  return total;
}

bool matches(std::string_view name, const std::vector<std::string>& patterns) {
  const std::string text(name);
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return fnmatch(pattern.c_str(), text.c_str(), 0) == 0; });
}

}  // namespace octile::checkpoint
