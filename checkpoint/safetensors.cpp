#include "octile/checkpoint/safetensors.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "files.h"
#include "json.h"

namespace octile::checkpoint {

namespace {

constexpr std::uint64_t kLengthBytes = 8;

std::optional<ElementType> element_type(std::string_view text) {
  for (int i = 0; i <= static_cast<int>(ElementType::c64); ++i) {
    if (name(static_cast<ElementType>(i)) == text) return static_cast<ElementType>(i);
  }
  return std::nullopt;
}

// Reads the header event by event: nothing that does not belong there is stored, however deep or long it is.
class HeaderReader : public JsonListener {
 public:
  std::vector<TensorInfo> tensors;
  Metadata metadata;

  bool key(string_t& text) override {
    switch (state_) {
      case State::names:
        return start_entry(text);
      case State::metadata:
        key_ = text;
        return metadata.emplace(text, "").second || fail("__metadata__ has ", quoted(text), " twice");
      default:
        return start_field(text);
    }
  }

  bool start_object(std::size_t) override {
    switch (state_) {
      case State::start:
        return go(State::names);
      case State::entry:
        return go(key_ == "__metadata__" ? State::metadata : State::fields);
      default:
        return unexpected("an object");
    }
  }

  bool end_object() override {
    switch (state_) {
      case State::names:
        return go(State::done);
      case State::metadata:
        return go(State::names);
      default:
        return finish_tensor();
    }
  }

  bool string(string_t& text) override {
    if (state_ == State::metadata) {
      metadata[key_] = text;
      return true;
    }
    if (state_ != State::fields || field_ != Field::type) return unexpected("a text");
    const auto type = element_type(text);
    if (!type) return fail(about(), "the type ", quoted(text), " is unknown");
    tensors.back().type = *type;
    field_ = Field::none;
    return true;
  }

  bool start_array(std::size_t) override {
    if (state_ != State::fields || (field_ != Field::shape && field_ != Field::offsets)) return unexpected("an array");
    return go(State::numbers);
  }

  bool end_array() override {
    if (field_ == Field::offsets && offsets_ != 2) {
      return fail(about(), "data_offsets has ", offsets_, " numbers, not 2");
    }
    field_ = Field::none;
    return go(State::fields);
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ != State::numbers) return unexpected("a number");
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return fail(about(), "the number ", value, " is too large");
    }
    if (field_ == Field::shape) {
      tensors.back().shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    ++offsets_;
    (offsets_ == 1 ? tensors.back().begin : tensors.back().end) = value;
    return true;
  }

  bool number_integer(number_integer_t value) override { return fail(about(), "the number ", value, " is negative"); }
  bool number_float(number_float_t, const string_t& text) override {
    return fail(about(), "the number ", printable(text), " is not a whole number in range");
  }
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a truth value"); }

 private:
  enum class State : std::uint8_t { start, names, entry, metadata, fields, numbers, done };
  enum class Field : std::uint8_t { none, type, shape, offsets };

  bool go(State state) {
    state_ = state;
    return true;
  }
  std::string subject() const override { return "the header is "; }
  std::string about() const {
    return state_ == State::fields || state_ == State::numbers ? "tensor \"" + printable(key_) + "\": " : "";
  }
  bool unexpected(const std::string& what) {
    if (state_ == State::start) return fail("the header is ", what, ", not a JSON object");
    return fail(about(), "the header has ", what, " where none belongs",
                (state_ == State::entry || state_ == State::metadata ? " (at \"" + printable(key_) + "\")" : ""));
  }

  bool start_entry(const std::string& text) {
    if (text == "__metadata__" && has_metadata_) return fail("the header has \"__metadata__\" twice");
    key_ = text;
    seen_ = 0;
    offsets_ = 0;
    if (text != "__metadata__") tensors.emplace_back().name = text;
    has_metadata_ |= text == "__metadata__";
    return go(State::entry);
  }

  bool start_field(const std::string& text) {
    field_ = text == "dtype"          ? Field::type
             : text == "shape"        ? Field::shape
             : text == "data_offsets" ? Field::offsets
                                      : Field::none;
    if (field_ == Field::none) return fail(about(), "the field ", quoted(text), " is unknown");
    const unsigned bit = 1u << static_cast<unsigned>(field_);
    if (seen_ & bit) return fail(about(), "the field \"", text, "\" appears twice");
    seen_ |= bit;
    return true;
  }

  bool finish_tensor() {
    for (const auto& [field, text] :
         {std::pair(Field::type, "dtype"), {Field::shape, "shape"}, {Field::offsets, "data_offsets"}}) {
      if (!(seen_ & 1u << static_cast<unsigned>(field))) return fail(about(), text, " is missing");
    }
    return go(State::names);
  }

  State state_ = State::start;
  Field field_ = Field::none;
  unsigned seen_ = 0;
  int offsets_ = 0;
  std::string key_;
  bool has_metadata_ = false;
};

}  // namespace

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i == 8) {
      text += ", ...";
      break;
    }
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + ")";
}

std::uint64_t size_of(ElementType type, const std::vector<std::int64_t>& shape, std::string_view what) {
  std::uint64_t count = static_cast<std::uint64_t>(bits(type));
  bool is_empty = false;
  for (const std::int64_t extent : shape) {
    is_empty |= extent == 0;
    // In any order: (0, 2^63 - 1) has a product, and (2^63 - 1, 0) none on the way to it.
    const auto factor = static_cast<std::uint64_t>(std::max<std::int64_t>(extent, 1));
    if (extent < 0 || __builtin_mul_overflow(count, factor, &count)) {
      reject(printable(what), ": the shape ", shape_text(shape), " has no size");
    }
  }
  if (is_empty) return 0;
  if (count % 8 != 0) {
    reject(printable(what), ": ", shape_text(shape), " of ", name(type), " does not end on a byte");
  }
  return count / 8;
}

struct SafetensorsFile::Mapping {
  explicit Mapping(const std::filesystem::path& path) {
    const files::Descriptor file = files::open_to_read(path);
    struct stat status = {};
    if (fstat(file.number(), &status) != 0) files::fail_on("read", path, errno);
    size = static_cast<std::size_t>(status.st_size);
    if (size == 0) return;
    data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number(), 0);
    if (data == MAP_FAILED) files::fail_on("map", path, errno);
  }
  ~Mapping() {
    if (size > 0) munmap(data, size);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* data = nullptr;
  std::size_t size = 0;
};

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  const auto mapping = std::make_shared<Mapping>(path);
  SafetensorsFile file = parse({static_cast<const std::byte*>(mapping->data), mapping->size}, path.string());
  file.mapping_ = mapping;
  return file;
}

SafetensorsFile SafetensorsFile::parse(Bytes bytes, std::string name) {
  if (bytes.size() < kLengthBytes) reject(name, ": truncated: ", bytes.size(), " bytes are not a safetensors file");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  // Checked first, so that a file of another kind is not reported as truncated.
  if (length > kMaxHeaderBytes) {
    reject(name, ": not a safetensors file: its header would have ", length, " bytes, more than ", kMaxHeaderBytes);
  }
  if (length > bytes.size() - kLengthBytes) {
    reject(name, ": truncated: the header has ", length, " bytes, the file ", bytes.size());
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  if (length == 0 || *text != '{') reject(name, ": not a safetensors file: its header does not begin with {");
  HeaderReader header;
  header.read({text, length}, name);

  SafetensorsFile file;
  file.name_ = std::move(name);
  file.file_ = bytes;
  file.data_ = bytes.subspan(kLengthBytes + length);
  file.tensors_ = std::move(header.tensors);
  file.metadata_ = std::move(header.metadata);
  std::stable_sort(file.tensors_.begin(), file.tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  for (std::size_t i = 0; i < file.tensors_.size(); ++i) {
    const std::string& tensor = file.tensors_[i].name;
    if (!file.index_.emplace(tensor, i).second) {
      reject(file.name_, ": the header has ", quoted(tensor), " twice");
    }
  }
  for (const TensorInfo& tensor : file.tensors_) {
    const std::string what = file.name_ + ": tensor \"" + printable(tensor.name) + "\"";
    const std::uint64_t size = size_of(tensor.type, tensor.shape, what);
    if (tensor.begin > tensor.end || tensor.end - tensor.begin != size) {
      reject(what, ": data_offsets ", tensor.begin, " to ", tensor.end, ", but ", shape_text(tensor.shape), " of ",
             checkpoint::name(tensor.type), " has ", size, " bytes");
    }
  }
  std::uint64_t at = 0;
  for (const TensorInfo& tensor : file.tensors_) {
    if (tensor.begin != at) {
      reject(file.name_, ": tensor ", quoted(tensor.name), " begins at byte ", tensor.begin,
             (tensor.begin < at ? " and overlaps" : ", after a hole behind"), " what ends at ", at);
    }
    at = tensor.end;
  }
  if (at > file.data_.size()) {
    reject(file.name_, ": truncated: the tensors have ", at, " bytes, the file has ", file.data_.size(), " for them");
  }
  if (at < file.data_.size()) {
    reject(file.name_, ": ", file.data_.size() - at, " bytes behind the last tensor belong to none");
  }
  return file;
}

const TensorInfo* SafetensorsFile::find(std::string_view tensor) const {
  const auto found = index_.find(tensor);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

void SafetensorsFile::release(const TensorInfo& tensor) const {
  if (!mapping_) return;
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const Bytes own = bytes(tensor);
  const auto begin = (reinterpret_cast<std::uintptr_t>(own.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(own.data()) + own.size()) / page * page;
  // Only a hint: its failure does no harm.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace octile::checkpoint
