// Fuzz target: any bytes as a safetensors file that is read; as the JSON beside it; and as a small model
// that is smoothed and quantized.
//
// What must hold, whatever the bytes:
//   - nothing but FileError is thrown, and its text is one line;
//   - a file that is read has its tensors side by side, each as large as its type and shape say;
//   - nothing is read outside the file: its memory is exactly as large as it is, for ASan;
//   - every quantized layer that is found is refused, or gives n * k values; the checks made without its levels find
//     everything that can be wrong with it;
//   - what was read, written again, is read again unchanged;
//   - a hundred kilobytes of JSON that is slow to parse are read or refused in seconds;
//   - a config.json that was read accepts a quantization_config, and then contains it;
//   - a model is refused and leaves no files, or becomes one whose layers can be read and are finite.
//
// The first byte selects the kind of input: a whole file; or pieces of JSON and names from which a header is put
// together, so that more than the first check is reached; or a short piece to be repeated into a long text; or one of
// the others.
//
// It is linked with libFuzzer, or with standalone.cpp.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "config.h"
#include "octile/checkpoint/quantize.h"
#include "pattern.h"
#include "quantized_layer.h"
#include "small_model.h"
#include "target.h"

namespace {

using namespace octile::checkpoint;

struct Counts {
  std::uint64_t read = 0;       // files
  std::uint64_t layers = 0;     // of them, read
  std::uint64_t described = 0;  // of them, by a quantization_config
  std::uint64_t long_texts = 0;
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

// A valid layer in one of the layouts.
std::vector<Piece> layer(Input& in) {
  const std::int64_t n = in.byte() % 3 * 8, k = in.byte() % 5 * 8;
  const std::int64_t group = in.byte() % 2 == 0 ? 8 : 16;
  const std::int64_t groups = k % group == 0 ? k / group : 1;
  const std::string scale = in.byte() % 4 == 1 ? "F16" : "F32";
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < k; ++i) order.push_back(i * groups / k);
  switch (in.byte() % 4) {
    case 0:
      return {{"a.weight_packed", "I32", {n, k / 8}},
              {"a.weight_scale", scale, {n, groups}},
              {"a.weight_shape", "I64", {2}, {n, k}},
              {"a.weight_zero_point", "I32", {n / 8, groups}},
              {"a.weight_g_idx", "I32", {k}, order}};
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
              {"a.g_idx", "I32", {k}, order}};
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

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) result += (c == '"' || c == '\\' ? "\\" : "") + std::string(1, c);
  return result;
}

// Sometimes, what a quantization_config says of the layer; usually that is correct.
std::string metadata(Input& in, const std::vector<Piece>& pieces) {
  constexpr const char* kOdd[] = {"null",        "4",          "8",          "\"a\"",          "[]",      "{}",
                                  "-1",          "0",          "16",         "true",           "false",   "\"group\"",
                                  "\"channel\"", "\"re:a|b\"", "[\"re:(\"]", "[\"re:b.*|c\"]", "[\"a\"]", "\"gptq_v3\"",
                                  "\"gemv\"",    "\"float\"",  "\"local\"",  "1e300"};
  if (in.byte() % 2 == 0) return {};
  const auto member = [&](const std::string& key, const std::string& value) {
    return ",\"" + key + "\":" + (in.byte() < 240 ? value : in.pick(kOdd));
  };
  const auto has = [&](const std::string& suffix) {
    return std::any_of(pieces.begin(), pieces.end(), [&](const Piece& piece) { return piece.name == "a." + suffix; });
  };
  const bool packs = has("weight_packed"), words = has("qweight"), is_gptq = has("g_idx");
  const std::vector<std::int64_t>& scale = pieces[words ? 2 : 1].shape;
  const std::int64_t k = words ? pieces[0].shape[0] * (is_gptq ? 8 : 1) : packs ? pieces[2].values[1] : 0;
  const std::int64_t groups = words ? scale[0] : scale[1];
  const std::string group = std::to_string(groups > 0 ? k / groups : 0);
  std::string config = "{\"a\":0";
  if (words) {
    config += member("quant_method", is_gptq ? "\"gptq\"" : "\"awq\"") + member("bits", "4") +
              member("group_size", group) +
              member(is_gptq ? "checkpoint_format" : "version", is_gptq ? "\"gptq_v2\"" : "\"gemm\"") +
              member("desc_act", "false");
  } else {
    config += member("quant_method", "\"compressed-tensors\"") +
              member("format", packs ? "\"pack-quantized\"" : "\"int-quantized\"") + member("ignore", "[\"b\"]") +
              ",\"config_groups\":{\"g\":{\"a\":0" + member("targets", "[\"Linear\"]") + ",\"weights\":{\"a\":0" +
              member("num_bits", packs ? "4" : "8") + member("symmetric", "false") +
              member("strategy", packs ? "\"group\"" : "\"channel\"") + member("group_size", group) + "}" +
              (packs ? "" : ",\"input_activations\":{\"a\":0" + member("dynamic", "false") + "}") + "}}";
  }
  return R"("__metadata__":{"quantization_config":")" + escaped(config + "}") + R"("})";
}

// A mostly legal file: a layer, its tensors side by side, sometimes something odd.
std::vector<std::byte> put_together(Input& in) {
  constexpr const char* kNames[] = {"a.weight", "a.bias", "b.weight", "b.weight_scale", "__metadata__", "c\\u001b"};
  constexpr const char* kTypes[] = {"I32", "F32",     "I8", "F16",  "I64", "BF16",
                                    "F64", "F8_E4M3", "U8", "BOOL", "F4",  "X"};
  constexpr std::int64_t kSizes[] = {8, 1, 2, 16, 4, 64, 0, 3, std::int64_t{1} << 32, -1, INT64_MAX};
  std::vector<Piece> pieces = layer(in);
  const std::string config = metadata(in, pieces);
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
  std::string header = "{" + config;
  std::uint64_t at = 0;
  for (const Piece& piece : pieces) {
    std::uint64_t size = bytes_of(piece);
    if (size > 1 << 16) size = in.byte();
    const std::uint64_t end = at + size + (in.byte() == 255);
    std::string extents;
    for (const std::int64_t extent : piece.shape) extents += (extents.empty() ? "" : ",") + std::to_string(extent);
    header += (header.size() == 1 ? "\"" : ",\"") + piece.name + R"(":{"dtype":")" + piece.type + R"(","shape":[)" +
              extents + R"(],"data_offsets":[)" + std::to_string(at) + "," + std::to_string(end) + "]}";
    at = end;
  }
  header += in.byte() == 255 ? "]" : "}";
  const std::uint64_t length = header.size();
  std::vector<std::byte> file(sizeof length + header.size() + at);
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  std::size_t next = file.size() - at;
  for (const Piece& piece : pieces) {
    const std::size_t begin = next, end = std::min(begin + bytes_of(piece), file.size());
    const bool is_scale = piece.name.find("scale") != std::string::npos && in.byte() < 240;
    const std::size_t width = piece.type == "F16" ? 2 : piece.type == "I64" ? 8 : 4;
    for (; next < end; ++next) file[next] = static_cast<std::byte>(in.byte());
    for (std::size_t i = 0; is_scale && begin + (i + 1) * width <= end; ++i) {  // above 0 and finite
      file[begin + (i + 1) * width - 1] &= std::byte{0x3f};
      file[begin + i * width] |= std::byte{1};
    }
    for (std::size_t i = 0; !piece.values.empty() && begin + (i + 1) * width <= end && i < piece.values.size(); ++i) {
      std::memcpy(file.data() + begin + i * width, &piece.values[i], width);
    }
  }
  return file;
}

// In memory if possible: written files are made durable, which is slow on a disk.
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
    std::string bad, wrong;
    try {
      check_values(model, layer);
    } catch (const FileError& error) {
      bad = error.what();
    }
    try {
      const std::vector<float> values = read_weight(model, layer);
      REQUIRE(values.size() == static_cast<std::size_t>(layer.n * layer.k));
      ++counts.layers;
      counts.described += layer.scheme.has_value();
    } catch (const FileError& error) {
      require_error_is_plain(error);
      wrong = error.what();
    }
    REQUIRE(layer.kind == LayerKind::plain || bad == wrong);
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

// A repeated piece, with or without a number in it, between a beginning and an end that may not fit it.
std::string long_json(Input& in) {
  constexpr const char* kBegins[] = {
      "{\"a\":[", "{\"a\":{", "{", "{\"a\":\"", "{\"weight_map\":{", "{\"a\":[[[[{\"b\":[", ""};
  constexpr const char* kPieces[] = {"\"k#\":{},",
                                     "{\"k#\":{}},",
                                     "[",
                                     "{\"a\":",
                                     "\"k#\":#,",
                                     "\"k\":1,",
                                     "\"#\",",
                                     "\\u0041\\n",
                                     "#.5e-3#,",
                                     "7",
                                     "[[#]],",
                                     "s",
                                     "\"t#\":\"f\",",
                                     " ",
                                     "\x7f",
                                     "[]",
                                     "]",
                                     "},{",
                                     "\"k#\":[[{\"a\":{\"b\":1}}]],",
                                     "\\\""};
  constexpr const char* kEnds[] = {"\"k\":0}", "\"k\":0}}", "0]}", "\"}", "", "]", "}"};
  std::string text = in.pick(kBegins);
  const std::string piece = in.pick(kPieces);
  const std::size_t size = std::size_t{1000} << in.byte() % 9;
  for (std::size_t i = 0; text.size() < size; ++i) {
    for (const char c : piece) text += c == '#' ? std::to_string(i) : std::string(1, c);
  }
  text += in.pick(kEnds);
  if (in.more()) text[(in.byte() * 256u + in.byte()) % text.size()] = static_cast<char>(in.byte());
  return text;
}

void check_long_json(Input& in) {
  const std::uint8_t place = in.byte();
  const std::string text = long_json(in);
  const std::clock_t begin = std::clock();
  const auto attempt = [&](const auto& action) {
    try {
      action();
    } catch (const FileError& error) {
      require_error_is_plain(error);
    }
  };
  switch (place % 5) {
    case 0:
      attempt([&] { read_config(text, "f"); });
      attempt([&] { add_quantization(text, {}); });
      break;
    case 1:
      attempt([&] {
        read_config(R"({"quantization_config":{"quant_method":"compressed-tensors","config_groups":)" + text + "}}",
                    "f");
      });
      break;
    case 2:
      attempt([&] { read_index(text, "f"); });
      break;
    case 3:
      attempt([&] { read_metadata({{"quantization_config", text}}, "f"); });
      break;
    default:
      attempt([&] {
        const std::uint64_t length = text.size();
        const std::string file = std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
        SafetensorsFile::parse(std::as_bytes(std::span(file)), "f");
      });
  }
  ++counts.long_texts;
  constexpr double kMaxSeconds = 5;  // of CPU time; a parser that looks back takes longer for a quarter of a MB
  REQUIRE(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < kMaxSeconds);
}

// ---- Expressions for names ----

void check_pattern(Input& in) {
  constexpr const char* kPieces[] = {"(",   ")",   "|",   "*",    "+",     "?",      "[",    "]",   "^",      "$",
                                     ".",   "\\",  "a",   "b",    "{2}",   "{1,3}",  "{",    "(?:", "(?P<n>", "-",
                                     "\\d", "\\w", "\\b", "{0,}", "{100}", "(a|b)*", "[^a]", "\\."};
  std::string expression, text;
  for (std::size_t count = in.byte() % 40; count > 0; --count) expression += in.pick(kPieces);
  while (in.more()) text += static_cast<char>(in.byte() % 4 == 0 ? in.byte() : "ab.1"[in.byte() % 4]);
  std::int64_t steps = 0;
  try {
    const Pattern pattern(expression);
    pattern.matches(text, steps);
    REQUIRE(-steps <= static_cast<std::int64_t>((pattern.states() + 1) * (text.size() + 2)));
  } catch (const std::invalid_argument& error) {
    REQUIRE(*error.what() != 0);
  }
}

// ---- A model to quantize ----

QuantizeOptions quantize_options(Input& in, const std::filesystem::path& calibration) {
  constexpr std::int64_t kGroups[] = {32, 0, 64};
  QuantizeOptions options;
  constexpr octile::Activation kActivations[] = {octile::Activation::dynamic_per_token,
                                                 octile::Activation::static_per_tensor, octile::Activation::none};
  options.activation = kActivations[in.byte() % 3];
  options.method = static_cast<octile::WeightMethod>(in.byte() % 3);
  options.threads = 1;
  if (options.activation == octile::Activation::none && in.byte() % 2 == 1) {
    options.weight.type = octile::DType::s4;
    options.weight.zero_point = in.byte() % 2 == 1;
  }
  if (options.weight.type == octile::DType::s4 || in.byte() % 2 == 1) {
    options.weight.granularity = octile::Granularity::group;
    options.weight.group = kGroups[in.byte() % 3];
  }
  if (options.activation != octile::Activation::none && in.byte() % 4 != 0) {
    options.smoothing = Smoothing{.search = in.byte() % 2 == 0, .alpha = in.byte() / 255.0};
  }
  // A calibration without effect is an error.
  if (options.activation == octile::Activation::static_per_tensor || options.smoothing ||
      options.method != octile::WeightMethod::nearest) {
    options.calibration = calibration;
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
  if (mode % 64 == 12) return check_long_json(in), 0;
  if (mode % 64 == 20) return check_pattern(in), 0;
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

std::string octile::fuzz::reached(std::uint64_t inputs) {
  if (inputs >= 1000 && (counts.layers == 0 || counts.quantized == 0 || counts.long_texts == 0)) return {};
  return "files read " + std::to_string(counts.read) + ", layers read " + std::to_string(counts.layers) +
         ", by a config " + std::to_string(counts.described) + ", long texts " + std::to_string(counts.long_texts) +
         ", models quantized " + std::to_string(counts.quantized) + ", groups smoothed " +
         std::to_string(counts.smoothed);
}
