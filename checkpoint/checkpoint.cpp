#include "octile/checkpoint/checkpoint.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "config.h"
#include "files.h"

namespace octile::checkpoint {

Checkpoint Checkpoint::open(const std::filesystem::path& path) {
  Checkpoint checkpoint;
  checkpoint.path_ = path;
  checkpoint.is_folder_ = std::filesystem::is_directory(path);
  if (!checkpoint.is_folder_) {
    checkpoint.add(path.filename().string(), SafetensorsFile::open(path));
    const SafetensorsFile& file = checkpoint.shards_.front().file;
    checkpoint.config_ = read_metadata(file.metadata(), file.name());
    return checkpoint;
  }
  const std::filesystem::path config = path / kConfigFile;
  if (std::filesystem::exists(config)) {
    checkpoint.config_text_ = files::read_text(config);
    checkpoint.config_ = read_config(checkpoint.config_text_, config.string());
  }
  const std::filesystem::path index = path / kIndexFile;
  const std::filesystem::path single = path / kSingleFile;
  if (std::filesystem::exists(single)) {
    if (std::filesystem::exists(index)) {
      throw FileError(path.string() + ": has both " + std::string(kSingleFile) + " and " + std::string(kIndexFile));
    }
    checkpoint.add(std::string(kSingleFile), SafetensorsFile::open(single));
    return checkpoint;
  }
  if (!std::filesystem::exists(index)) {
    throw FileError(path.string() + ": has neither " + std::string(kSingleFile) + " nor " + std::string(kIndexFile));
  }
  checkpoint.has_index_ = true;
  const auto places = read_index(files::read_text(index), index.string());
  std::set<std::string> names;
  for (const auto& [tensor, shard] : places) names.insert(shard);
  for (const std::string& name : names) checkpoint.add(name, SafetensorsFile::open(path / name));
  for (const auto& [tensor, shard] : places) {
    const auto found = checkpoint.places_.find(tensor);
    if (found == checkpoint.places_.end() || checkpoint.shards_[found->second.shard].file_name != shard) {
      throw FileError(index.string() + ": \"" + printable(tensor) + "\" is not in " + shard);
    }
  }
  for (const auto& [tensor, place] : checkpoint.places_) {
    if (places.count(tensor) != 0) continue;
    throw FileError(index.string() + ": lacks \"" + printable(tensor) + "\", which is in " +
                    checkpoint.shards_[place.shard].file_name);
  }
  return checkpoint;
}

Checkpoint Checkpoint::of(SafetensorsFile file) {
  Checkpoint checkpoint;
  checkpoint.path_ = file.name();
  checkpoint.config_ = read_metadata(file.metadata(), file.name());
  checkpoint.add(file.name(), std::move(file));
  return checkpoint;
}

// The vector's elements move; what places_ points to, inside a SafetensorsFile's vector, does not.
void Checkpoint::add(std::string file_name, SafetensorsFile file) {
  shards_.push_back({std::move(file_name), std::move(file)});
  const Shard& shard = shards_.back();
  for (const TensorInfo& tensor : shard.file.tensors()) {
    const auto [place, is_new] = places_.emplace(tensor.name, Place{shards_.size() - 1, &tensor});
    if (!is_new) {
      throw FileError(path_.string() + ": \"" + printable(tensor.name) + "\" is in " +
                      shards_[place->second.shard].file_name + " and in " + shard.file_name);
    }
  }
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : places_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

const TensorInfo* Checkpoint::find(std::string_view tensor) const {
  const auto found = places_.find(std::string(tensor));
  return found == places_.end() ? nullptr : found->second.info;
}

const TensorInfo& Checkpoint::get(std::string_view tensor) const {
  if (const TensorInfo* const info = find(tensor)) return *info;
  throw FileError(path_.string() + ": there is no tensor \"" + printable(tensor) + "\"");
}

std::size_t Checkpoint::shard_of(std::string_view tensor) const {
  get(tensor);
  return places_.find(std::string(tensor))->second.shard;
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
    throw FileError(path_.string() + ": \"" + printable(tensor) + "\" is " + std::string(name(info.type)) +
                    ", not I32");
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
