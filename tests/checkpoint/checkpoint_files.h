// Files for the tests of checkpoints.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "octile/checkpoint/checkpoint.h"

namespace octile::checkpoint {

// A temporary folder, removed afterwards.
struct Folder {
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "octile-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::filesystem::path path;
};

inline std::string read_all(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const std::filesystem::path& path, const std::string& text) { std::ofstream(path) << text; }

inline std::size_t files_in(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

struct Values {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<float> values;
  ElementType type = ElementType::f32;
};

template <class T>
std::vector<std::byte> bytes_as(const std::vector<float>& values) {
  const std::vector<T> converted(values.begin(), values.end());
  const Bytes bytes = std::as_bytes(std::span(converted));
  return {bytes.begin(), bytes.end()};
}

inline std::vector<std::byte> bytes_of(const Values& tensor) {
  switch (tensor.type) {
    case ElementType::s8:
      return bytes_as<std::int8_t>(tensor.values);
    case ElementType::s16:
      return bytes_as<std::int16_t>(tensor.values);
    case ElementType::s32:
      return bytes_as<std::int32_t>(tensor.values);
    case ElementType::s64:
      return bytes_as<std::int64_t>(tensor.values);
    default:
      return write_values(tensor.type, tensor.values);
  }
}

inline void write_file(const std::filesystem::path& path, const std::vector<Values>& tensors,
                       const Metadata& metadata = {}) {
  std::vector<TensorSpec> specs;
  for (const Values& tensor : tensors) specs.push_back({tensor.name, tensor.type, tensor.shape});
  SafetensorsWriter writer(path, specs, metadata);
  for (const Values& tensor : tensors) writer.append(tensor.name, bytes_of(tensor));
  writer.finish(true);
}

inline std::string error_of_open(const std::filesystem::path& path) {
  try {
    Checkpoint::open(path);
    return {};
  } catch (const FileError& error) {
    return error.what();
  }
}

// Normal values, rounded to `type`.
inline Values normal(const std::string& name, std::vector<std::int64_t> shape, unsigned seed,
                     ElementType type = ElementType::f32) {
  Values result = {name, shape, {}, type};
  std::mt19937 random(seed);
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  for (std::int64_t i = 0; i < count; ++i) {
    // The sum of three uniform values is normal enough, and the same on every system.
    float sum = 0;
    for (int j = 0; j < 3; ++j) sum += static_cast<float>(random() >> 8) * 0x1p-24f - 0.5f;
    result.values.push_back(sum);
  }
  round_values(type, result.values);
  return result;
}

}  // namespace octile::checkpoint
