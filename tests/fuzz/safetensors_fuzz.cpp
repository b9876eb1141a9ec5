// Fuzz target: any bytes as a safetensors file, with or without a config.json, and what is read of it.
//
// What must hold, whatever the bytes:
//   - nothing but FileError is thrown, and its text is one line;
//   - a file that is read has its tensors side by side, each as large as its type and shape say;
//   - nothing is read outside the file: its memory is exactly as large as it is, for ASan;
//   - every quantized layer that is found is refused, or gives n * k values;
//   - written again, what was read is read again, the same.
//
// The first byte says how the input is meant: a whole file; or pieces of JSON and of names that a header is put
// together of, so that more than the first check is reached.
//
// With libFuzzer it is a target as usual. Compiled with OCTILE_FUZZ_MAIN it is a program of its own:
//   safetensors_fuzz [--runs N] [--seconds S] [--seed S] [FILE...]   random inputs, or the files' bytes
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "octile/checkpoint/layers.h"

namespace {

using namespace octile::checkpoint;

struct Counts {
  std::uint64_t read = 0;    // files
  std::uint64_t layers = 0;  // of them, read
} counts;

#define REQUIRE(condition)                                                          \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                 \
    }                                                                               \
  } while (0)

void require_error_is_plain(const FileError& error) {
  const std::string text = error.what();
  REQUIRE(!text.empty() && text.find_first_of("\n\r\x1b") == std::string::npos);
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  bool more() const { return at_ < size_; }
  template <std::size_t kCount>
  std::string pick(const char* const (&texts)[kCount]) {
    return texts[byte() % kCount];
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

struct Piece {
  std::string name;
  std::string type;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> values = {};  // empty: any bytes
};

// A layer of one of the layouts, as it should be.
std::vector<Piece> layer(Input& in) {
  const std::int64_t n = in.byte() % 3 * 8, k = in.byte() % 5 * 8;
  const std::int64_t group = in.byte() % 2 == 0 ? 8 : 16;
  const std::int64_t groups = k % group == 0 ? k / group : 1;
  const std::string scale = in.byte() % 4 == 1 ? "F16" : "F32";
  switch (in.byte() % 4) {
    case 0:
      return {{"a.weight_packed", "I32", {n, k / 8}},
              {"a.weight_scale", scale, {n, groups}},
              {"a.weight_shape", "I64", {2}, {n, k}},
              {"a.weight_zero_point", "I32", {n / 8, groups}},
              {"a.weight_g_idx", "I32", {k}}};
    case 1:
      return {{"a.weight", "I8", {n, k}},
              {"a.weight_scale", scale, {n, 1}},
              {"a.weight_zero_point", "I8", {n, 1}},
              {"a.input_scale", "F32", {1}}};
    case 2:
      return {{"a.qweight", "I32", {k, n / 8}}, {"a.qzeros", "I32", {groups, n / 8}}, {"a.scales", scale, {groups, n}}};
    default:
      return {{"a.qweight", "I32", {k / 8, n}},
              {"a.qzeros", "I32", {groups, n / 8}},
              {"a.scales", scale, {groups, n}},
              {"a.g_idx", "I32", {k}}};
  }
}

std::uint64_t bytes_of(const Piece& piece) {
  for (int i = 0; i <= static_cast<int>(ElementType::c64); ++i) {
    const auto type = static_cast<ElementType>(i);
    if (name(type) != piece.type) continue;
    try {
      return size_of(type, piece.shape, "x");
    } catch (const FileError&) {
    }
  }
  return 4;
}

// A file that is mostly legal: a layer, its tensors side by side, now and then something odd.
std::vector<std::byte> put_together(Input& in) {
  constexpr const char* kNames[] = {"a.weight", "a.bias", "b.weight", "b.weight_scale", "__metadata__", "c\\u001b"};
  constexpr const char* kTypes[] = {"I32", "F32",     "I8", "F16",  "I64", "BF16",
                                    "F64", "F8_E4M3", "U8", "BOOL", "F4",  "X"};
  constexpr std::int64_t kSizes[] = {8, 1, 2, 16, 4, 64, 0, 3, std::int64_t{1} << 32, -1, INT64_MAX};
  std::vector<Piece> pieces = layer(in);
  const std::uint8_t extra = in.byte();
  if (extra >= 200) pieces.push_back({in.pick(kNames), in.pick(kTypes), {kSizes[extra % 8]}});
  std::uint8_t oddities = in.byte();
  for (oddities = oddities < 128 ? 0 : oddities % 4; oddities > 0; --oddities) {
    Piece& piece = pieces[in.byte() % pieces.size()];
    switch (in.byte() % 5) {
      case 0:
        piece.type = in.pick(kTypes);
        break;
      case 1:
        piece.shape[in.byte() % piece.shape.size()] = kSizes[in.byte() % std::size(kSizes)];
        break;
      case 2:
        piece.shape.push_back(kSizes[in.byte() % 3]);
        break;
      case 3:
        piece.name = in.pick(kNames);
        break;
      default:
        std::swap(piece, pieces.back()), pieces.size() > 1 ? pieces.pop_back() : void();
        break;
    }
  }
  std::string header = "{";
  std::uint64_t at = 0;
  for (const Piece& piece : pieces) {
    std::uint64_t size = bytes_of(piece);
    if (size > 1 << 16) size = in.byte();
    const std::uint64_t end = at + size + (in.byte() == 255);
    std::string extents;
    for (const std::int64_t extent : piece.shape) extents += (extents.empty() ? "" : ",") + std::to_string(extent);
    header += (at == 0 && header.size() == 1 ? "\"" : ",\"") + piece.name + R"(":{"dtype":")" + piece.type +
              R"(","shape":[)" + extents + R"(],"data_offsets":[)" + std::to_string(at) + "," + std::to_string(end) +
              "]}";
    at = end;
  }
  header += in.byte() == 255 ? "]" : "}";
  const std::uint64_t length = header.size();
  std::vector<std::byte> file(sizeof length + header.size() + at);
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  std::size_t next = file.size() - at;
  for (const Piece& piece : pieces) {
    const std::size_t begin = next;
    for (const std::size_t end = begin + bytes_of(piece); next < std::min(end, file.size()); ++next) {
      file[next] = static_cast<std::byte>(in.byte());
    }
    const std::size_t known = piece.values.size() * sizeof(std::int64_t);
    if (known > 0 && next - begin == known) std::memcpy(file.data() + begin, piece.values.data(), known);
  }
  return file;
}

void check_again(const SafetensorsFile& file) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("octile-fuzz-" + std::to_string(getpid()) + ".safetensors");
  std::vector<TensorSpec> specs;
  for (const TensorInfo& tensor : file.tensors()) specs.push_back({tensor.name, tensor.type, tensor.shape});
  SafetensorsWriter writer(path, specs, file.metadata());
  for (const TensorInfo& tensor : file.tensors()) writer.append(tensor.name, file.bytes(tensor));
  writer.finish(true);
  const SafetensorsFile again = SafetensorsFile::open(path);
  std::filesystem::remove(path);
  REQUIRE(again.tensors().size() == file.tensors().size() && again.metadata() == file.metadata());
  for (const TensorInfo& tensor : file.tensors()) {
    const TensorInfo* const other = again.find(tensor.name);
    REQUIRE(other && other->type == tensor.type && other->shape == tensor.shape);
    const Bytes own = file.bytes(tensor), copied = again.bytes(*other);
    REQUIRE(std::equal(own.begin(), own.end(), copied.begin(), copied.end()));
  }
}

void check_layers(SafetensorsFile file) {
  const Checkpoint model = Checkpoint::of(std::move(file));
  for (const Layer& layer : find_layers(model).layers) {
    try {
      const std::vector<float> values = read_weight(model, layer);
      REQUIRE(values.size() == static_cast<std::size_t>(layer.n * layer.k));
      ++counts.layers;
    } catch (const FileError& error) {
      require_error_is_plain(error);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input in(data, size);
  const std::uint8_t mode = in.byte();
  std::vector<std::byte> bytes;
  if (mode % 2 == 1) {
    while (in.more()) bytes.push_back(static_cast<std::byte>(in.byte()));
  } else {
    bytes = put_together(in);
  }
  const auto exact = std::make_unique<std::byte[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), exact.get());
  try {
    SafetensorsFile file = SafetensorsFile::parse({exact.get(), bytes.size()}, "f");
    ++counts.read;
    std::uint64_t at = 0;
    for (const TensorInfo& tensor : file.tensors()) {
      REQUIRE(tensor.begin == at && tensor.size() == size_of(tensor.type, tensor.shape, tensor.name));
      at = tensor.end;
      REQUIRE(file.find(tensor.name) == &tensor);
      std::uint64_t sum = 0;
      for (const std::byte byte : file.bytes(tensor)) sum += static_cast<std::uint64_t>(byte);
      REQUIRE(sum <= 255 * tensor.size());
    }
    if (mode % 64 == 0) check_again(file);  // it writes a file, which is slow
    check_layers(std::move(file));
  } catch (const FileError& error) {
    require_error_is_plain(error);
  }
  return 0;
}

#ifdef OCTILE_FUZZ_MAIN

namespace {

// The input that was running when something aborted.
std::vector<std::uint8_t> current;
constexpr const char* kFailureFile = "safetensors_fuzz_failure.bin";

void save_current(int) {
  std::FILE* const file = std::fopen(kFailureFile, "wb");
  if (file != nullptr) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
    std::fprintf(stderr, "the input is in %s\n", kFailureFile);
  }
  std::_Exit(1);
}

std::uint64_t next_random(std::uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

}  // namespace

// Sanitizers then end in SIGABRT too, which saves the input.
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __tsan_default_options() { return "abort_on_error=1"; }

int main(int argc, char** argv) {
  std::uint64_t runs = 20000;
  double seconds = 0;
  std::uint64_t seed = 1;
  bool files = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : "0";
    if (argument == "--runs") {
      runs = std::strtoull(value, nullptr, 10), ++i;
    } else if (argument == "--seconds") {
      seconds = std::strtod(value, nullptr), ++i;
    } else if (argument == "--seed") {
      seed = std::strtoull(value, nullptr, 10), ++i;
    } else {
      std::ifstream file(argument, std::ios::binary);
      if (!file) {
        std::fprintf(stderr, "safetensors_fuzz: cannot read %s\n", argument.c_str());
        return 2;
      }
      const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
      files = true;
    }
  }
  if (files) return 0;

  std::signal(SIGABRT, save_current);
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  std::uint64_t done = 0;
  for (; seconds > 0 ? elapsed() < seconds : done < runs; ++done) {
    std::uint64_t state = seed * 0x9e3779b97f4a7c15u;
    for (int skip = 0; skip < 3; ++skip) next_random(state);
    current.resize(next_random(state) % 200 + 1);
    for (std::uint8_t& byte : current) byte = static_cast<std::uint8_t>(next_random(state) >> 24);
    LLVMFuzzerTestOneInput(current.data(), current.size());
    ++seed;
  }
  std::printf("inputs %llu, files read %llu, layers read %llu, last seed %llu\n", static_cast<unsigned long long>(done),
              static_cast<unsigned long long>(counts.read), static_cast<unsigned long long>(counts.layers),
              static_cast<unsigned long long>(seed - 1));
  return counts.layers > 0 || runs < 1000 ? 0 : 1;  // a target that reaches nothing finds nothing
}

#endif
