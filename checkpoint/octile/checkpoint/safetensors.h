// A safetensors file: the header's length in 8 bytes, the header (JSON: type, shape and place of each tensor), and the
// tensors' bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "octile/checkpoint/elements.h"

namespace octile::base {
class Temporary;
}

namespace octile::checkpoint {

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // as in other readers

struct TensorInfo {
  std::string name;
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // in the data
  std::uint64_t end = 0;

  std::uint64_t size() const { return end - begin; }
};

std::string shape_text(const std::vector<std::int64_t>& shape);  // "(384, 1536)"

// Bytes of a tensor. Throws FileError, naming `what`, where the shape is negative or its product overflows.
std::uint64_t size_of(ElementType type, const std::vector<std::int64_t>& shape, std::string_view what);

using Metadata = std::map<std::string, std::string>;

// Reads in place: the file is memory-mapped, nothing is copied, and a tensor's bytes are read on access. The whole
// header is checked first: the size of each tensor follows from its type and shape, and together the tensors fill the
// file without overlap or gap. The file must not be truncated while it is open.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path);
  // The bytes must outlive it; `name` is for messages.
  static SafetensorsFile parse(Bytes file, std::string name);

  const std::string& name() const { return name_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // in the order of their bytes
  const Metadata& metadata() const { return metadata_; }
  std::uint64_t size() const { return file_.size(); }
  const TensorInfo* find(std::string_view tensor) const;  // null: there is none
  Bytes bytes(const TensorInfo& tensor) const { return data_.subspan(tensor.begin, tensor.size()); }
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;
  // Returns the tensor's pages to the system; it may be read again.
  void release(const TensorInfo& tensor) const;

 private:
  struct Mapping;
  SafetensorsFile() = default;

  std::string name_;
  std::shared_ptr<Mapping> mapping_;
  Bytes file_;
  Bytes data_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string_view, std::size_t> index_;
  Metadata metadata_;
};

struct TensorSpec {
  std::string name;
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;
};

// Writes a file tensor by tensor, in any order, each from its first byte to its last. The bytes go to a temporary file
// beside `path`; `finish` makes them durable and renames it. Without `finish` nothing is left. The same tensors give
// the same bytes in any order: wider elements come first, then the order is by name, so that every tensor is aligned.
class SafetensorsWriter {
 public:
  // `mode`: the file's permission bits, before the umask.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorSpec>& tensors, const Metadata& metadata,
                    unsigned mode = 0666);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void append(std::string_view tensor, Bytes bytes);
  std::uint64_t size() const { return size_; }
  // To be called once. Throws FileError if a tensor is not complete, or if `path` exists and `overwrite` is not set.
  void finish(bool overwrite);

 private:
  struct Place {
    std::uint64_t next = 0;  // in the file
    std::uint64_t end = 0;
  };

  void write_at(std::uint64_t at, Bytes bytes);

  std::filesystem::path path_;
  std::unique_ptr<base::Temporary> temporary_;
  std::uint64_t size_ = 0;
  std::map<std::string, Place, std::less<>> places_;
};

}  // namespace octile::checkpoint
