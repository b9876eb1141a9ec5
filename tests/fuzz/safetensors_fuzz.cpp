// Fuzz target: any bytes as a safetensors file, and what is read of it; as the JSON beside it; and as a small model
// that is smoothed and quantized.
//
// What must hold, whatever the bytes:
//   - nothing but FileError is thrown, and its text is one line;
//   - a file that is read has its tensors side by side, each as large as its type and shape say;
//   - nothing is read outside the file: its memory is exactly as large as it is, for ASan;
//   - every quantized layer that is found is refused, or gives n * k values;
//   - written again, what was read is read again, the same;
//   - a config.json that is read can have a quantization_config added, and then says so;
//   - a model is refused, and nothing is left of what was written, or becomes one whose layers are read and finite.
//
// The first byte says how the input is meant: a whole file; or pieces of JSON and of names that a header is put
// together of, so that more than the first check is reached; or one of the others.
//
// With libFuzzer it is a target as usual; compiled with OCTILE_FUZZ_MAIN a program of its own (standalone.h).
#include <unistd.h>

#include <algorithm>
#include <cmath>
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

#include "config.h"
#include "octile/checkpoint/quantize.h"
#include "small_model.h"
#ifdef OCTILE_FUZZ_MAIN
#include "standalone.h"
#endif

namespace {

using namespace octile::checkpoint;

struct Counts {
  std::uint64_t read = 0;    // files
  std::uint64_t layers = 0;  // of them, read
  std::uint64_t quantized = 0;
  std::uint64_t smoothed = 0;
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

// In memory where there is such a place: what is written is made durable, which takes a disk a while.
std::filesystem::path scratch(const std::string& name) {
  const std::filesystem::path memory = "/dev/shm";
  return (std::filesystem::exists(memory) ? memory : std::filesystem::temp_directory_path()) /
         ("octile-fuzz-" + std::to_string(getpid()) + name);
}

void check_again(const SafetensorsFile& file) {
  const std::filesystem::path path = scratch(".safetensors");
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

// ---- JSON ----

void check_json(Input& in) {
  constexpr const char* kPieces[] = {"{",
                                     "}",
                                     "[",
                                     "]",
                                     ",",
                                     ":",
                                     "\"",
                                     "\\",
                                     "{}",
                                     "null",
                                     "true",
                                     "0",
                                     "1e999",
                                     " ",
                                     "\"a\"",
                                     "\"weight_map\"",
                                     "\"model_type\"",
                                     "\"quantization_config\"",
                                     "\"quant_method\":\"gptq\"",
                                     "\"bits\"",
                                     "\"do_layer_norm_before\"",
                                     "\\u001b",
                                     "\"quantization_config\":null",
                                     "\"a\":1"};
  const bool braces = in.byte() % 2 == 0;
  std::string text = braces ? "{" : "";
  while (in.more()) {
    const std::uint8_t byte = in.byte();
    text += byte < 200 ? kPieces[byte % std::size(kPieces)] : std::string(1, static_cast<char>(in.byte()));
  }
  if (braces) text += "}";
  try {
    read_config(text, "f");
    const ModelConfig config = read_config(add_quantization(text, {}), "f");
    REQUIRE(config.method == "compressed-tensors" && config.format == "int-quantized");
  } catch (const FileError& error) {
    require_error_is_plain(error);
  }
  try {
    REQUIRE(!read_index(text, "f").empty());
  } catch (const FileError& error) {
    require_error_is_plain(error);
  }
}

// ---- A model to quantize ----

QuantizeOptions quantize_options(Input& in, const std::filesystem::path& calibration) {
  constexpr std::int64_t kGroups[] = {32, 0, 64};
  QuantizeOptions options;
  options.format = static_cast<Format>(in.byte() % 3);
  options.method = static_cast<octile::WeightMethod>(in.byte() % 3);
  options.calibration = calibration;
  options.threads = 1;
  if (options.format == Format::w4a16) {
    options.group = kGroups[in.byte() % 3];
    options.zero_points = in.byte() % 2 == 1;
  } else if (in.byte() % 4 != 0) {
    options.smoothing = Smoothing{.search = in.byte() % 2 == 0, .alpha = in.byte() / 255.0};
  }
  return options;
}

void check_quantize(Input& in) {
  const std::filesystem::path root = scratch(""), from = root / "in", to = root / "out",
                              calibration = root / "calibration";
  std::filesystem::remove_all(root);
  std::filesystem::create_directories(from);
  std::ofstream(from / kConfigFile) << (in.byte() < 240 ? R"({"model_type":"llama"})" : "{}");
  const QuantizeOptions options = quantize_options(in, calibration);
  const SmallModel model(in);
  model.write(from / kSingleFile);
  model.write_calibration(calibration);
  std::string error;
  try {
    const QuantizeReport report = quantize_checkpoint(from, to, options);
    ++counts.quantized;
    counts.smoothed += report.smoothed.size();
  } catch (const FileError& what) {
    require_error_is_plain(what);
    error = what.what();
  }
  const auto here = std::distance(std::filesystem::directory_iterator(root), {});
  REQUIRE(here == (error.empty() ? 3 : 2));
  if (error.empty()) {
    const Checkpoint result = Checkpoint::open(to);
    for (const Layer& layer : find_layers(result).layers) {
      if (layer.kind == LayerKind::plain) continue;
      for (const float value : read_weight(result, layer)) REQUIRE(std::isfinite(value));
    }
  }
  std::filesystem::remove_all(root);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input in(data, size);
  const std::uint8_t mode = in.byte();
  if (mode % 64 == 2) return check_quantize(in), 0;  // files again
  if (mode % 8 == 4) return check_json(in), 0;
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

int main(int argc, char** argv) {
  return octile::fuzz::run("safetensors_fuzz", argc, argv, [](std::uint64_t inputs) {
    if (inputs >= 1000 && (counts.layers == 0 || counts.quantized == 0)) return std::string();
    return "files read " + std::to_string(counts.read) + ", layers read " + std::to_string(counts.layers) +
           ", models quantized " + std::to_string(counts.quantized) + ", groups smoothed " +
           std::to_string(counts.smoothed);
  });
}

#endif
