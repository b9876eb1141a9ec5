#include "config.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/python_json.h"
#include "json.h"

namespace octile::checkpoint {

namespace {

using nlohmann::json;

constexpr const char* kQuantization = "quantization_config";
constexpr const char* kNormBefore = "do_layer_norm_before";
constexpr std::string_view kWeightMap = "weight_map";
constexpr std::string_view kSpace = " \t\r\n";

// Typed access to an object's members. A null counts as absent.
class Object {
 public:
  Object(const json& value, std::string place) : value_(value), place_(std::move(place)) {}

  const json* find(const char* key) const {
    const auto found = value_.find(key);
    return found == value_.end() || found->is_null() ? nullptr : &*found;
  }
  std::string text(const char* key, const char* otherwise = "") const {
    const json* const value = find(key);
    if (value && !value->is_string()) refuse(key, "not a string");
    return value ? value->get<std::string>() : otherwise;
  }
  std::optional<std::int64_t> whole(const char* key) const {
    const json* const value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<std::uint64_t>() > INT64_MAX)) {
      refuse(key, "not an integer");
    }
    return value->get<std::int64_t>();
  }
  bool truth(const char* key, bool otherwise) const {
    const json* const value = find(key);
    if (value && !value->is_boolean()) refuse(key, "neither true nor false");
    return value ? value->get<bool>() : otherwise;
  }
  std::optional<Object> object(const std::string& key) const {
    const json* const value = find(key.c_str());
    if (!value) return std::nullopt;
    if (!value->is_object()) refuse(key, "not an object");
    return Object(*value, place_ + ": " + printable(key));
  }
  std::vector<std::string> names(const char* key, std::vector<std::string> otherwise) const {
    const json* const value = find(key);
    if (!value) return otherwise;
    const auto is_text = [](const json& element) { return element.is_string(); };
    if (!value->is_array() || !std::all_of(value->begin(), value->end(), is_text)) refuse(key, "not a list of names");
    return value->get<std::vector<std::string>>();
  }
  std::vector<std::string> keys() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : value_.items()) keys.push_back(key);
    return keys;
  }
  [[noreturn]] void refuse(const std::string& key, const char* what) const {
    reject(place_, ": ", quoted(key), " is ", what);
  }
  const std::string& place() const { return place_; }

 private:
  const json& value_;
  std::string place_;
};

JsonDocument parse(std::string_view text, std::string_view name, JsonDocument::Members wanted) {
  if (text.size() > kMaxConfigBytes) {
    reject(name, ": more than ", kMaxConfigBytes, " bytes of JSON");
  }
  JsonDocument document(std::move(wanted));
  document.read(text, name);
  return document;
}

// Where the value of the document's own member begins; npos if the key is escaped. The text is a JSON object.
std::size_t value_at(std::string_view text, std::string_view key) {
  int depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{' || text[i] == '[') ++depth;
    if (text[i] == '}' || text[i] == ']') --depth;
    if (text[i] != '"') continue;
    const std::size_t begin = i + 1;
    for (++i; text[i] != '"'; ++i) i += text[i] == '\\';
    if (depth != 1 || text.substr(begin, i - begin) != key) continue;
    const std::size_t colon = text.find_first_not_of(kSpace, i + 1);
    if (text[colon] == ':') return text.find_first_not_of(kSpace, colon + 1);  // else it is a value itself
  }
  return std::string_view::npos;
}

std::optional<QuantizationArgs> read_args(const Object& group, const char* key) {
  const std::optional<Object> object = group.object(key);
  if (!object) return std::nullopt;
  QuantizationArgs args;
  args.bits = object->whole("num_bits");
  args.type = object->text("type", "int");
  args.strategy = object->text("strategy");
  args.group_size = object->whole("group_size");
  args.symmetric = object->truth("symmetric", true);
  const json* const dynamic = object->find("dynamic");  // may be "local", which no layer supports
  args.dynamic = dynamic && !dynamic->is_string() && object->truth("dynamic", false);
  if (dynamic && dynamic->is_string()) args.strategy = "dynamic \"" + object->text("dynamic") + '"';
  return args;
}

void check_known(const Object& quantization, const char* key, const std::string& value,
                 std::initializer_list<const char*> known) {
  std::string list;
  for (const char* const one : known) {
    if (value == one) return;
    if (*one != 0) list += (list.empty() ? "" : ", ") + std::string(one);
  }
  reject(quantization.place(), ": ", key, " is ", quoted(value), ", expected one of ", list);
}

// "octile": our own layers that multiply their inputs. Formats without integers are known too, but none of their layers
// are read.
void check_format(const Object& object, const std::string& format) {
  check_known(object, "format", format,
              {"", "int-quantized", "pack-quantized", "naive-quantized", "mixed-precision", "octile", "dense",
               "float-quantized"});
}

// Rotated weights are read as they are. What rotates activations has to be computed while the model runs.
void check_transforms(const Object& quantization) {
  const std::optional<Object> transforms = quantization.object("transform_config");
  const std::optional<Object> groups = transforms ? transforms->object("config_groups") : std::nullopt;
  if (!groups) return;
  for (const std::string& key : groups->keys()) {
    const std::optional<Object> group = groups->object(key);
    const json* const apply = group ? group->find("apply") : nullptr;
    if (!apply) continue;
    if (!apply->is_array()) group->refuse("apply", "not a list");
    for (const json& element : *apply) {
      if (!element.is_object()) group->refuse("apply", "not a list of objects");
      const std::string location = Object(element, group->place()).text("location");
      if (location == "weight_input" || location == "weight_output") continue;
      reject(group->place(), ": \"location\" is ", quoted(location),
             ", and transforms of activations are not supported");
    }
  }
}

void read_groups(const Object& quantization, ModelConfig& config) {
  config.ignore = quantization.names("ignore", {});
  const json* const groups = quantization.find("config_groups");
  const auto is_object = [](const json& group) { return group.is_object(); };
  if (!groups || !groups->is_object() || !std::all_of(groups->begin(), groups->end(), is_object)) {
    reject(quantization.place(), " has no config_groups");
  }
  const Object all(*groups, quantization.place() + ": config_groups");
  for (const std::string& key : all.keys()) {
    const Object group = *all.object(key);
    config.groups.push_back({.targets = group.names("targets", {"Linear"}),
                             .format = group.text("format"),
                             .weights = read_args(group, "weights"),
                             .input = read_args(group, "input_activations")});
    check_format(group, config.groups.back().format);
    if (group.find("output_activations")) {
      group.refuse("output_activations", "not null, and quantized outputs are not supported");
    }
  }
}

void read_quantization(const Object& quantization, ModelConfig& config) {
  config.method = quantization.text("quant_method");
  if (config.method.empty()) reject(quantization.place(), " has no \"quant_method\"");
  if (config.method == "compressed-tensors") {
    config.format = quantization.text("format");
    check_format(quantization, config.format);
    read_groups(quantization, config);
    check_transforms(quantization);
  } else if (config.method == "awq" || config.method == "gptq") {
    if (config.method == "awq") {
      config.format = quantization.text("version");
      check_known(quantization, "version", config.format, {"", "gemm", "GEMM"});
      check_known(quantization, "checkpoint_format", quantization.text("checkpoint_format"), {"", "gemm", "GEMM"});
    } else {
      config.format = quantization.text("checkpoint_format");
      check_known(quantization, "checkpoint_format", config.format, {"", "gptq", "gptq_v2"});
      if (quantization.truth("is_marlin_format", false))
        quantization.refuse("is_marlin_format", "true, a layout that is not supported");
      config.desc_act = quantization.truth("desc_act", false);
    }
    config.bits = quantization.whole("bits");
    if (!config.bits) config.bits = quantization.whole("w_bit");
    config.group_size = quantization.whole("group_size");
    if (!config.group_size) config.group_size = quantization.whole("q_group_size");
  } else {
    const json* const format = quantization.find("format");
    if (format && format->is_string()) config.format = format->get<std::string>();
  }
}

// Keeps only the weight_map of an index, member by member.
class IndexReader : public JsonDocument {
 public:
  IndexReader() : JsonDocument(Members(std::in_place)) {}
  std::map<std::string, std::string> files;
  bool has_map = false;

 private:
  bool remembers_keys(std::size_t depth) const override { return depth != 1 || top() != kWeightMap; }

  bool pass(std::size_t depth, const std::string& key, nlohmann::json::value_t kind, const std::string* text) override {
    if (depth == 1 && key == kWeightMap) has_map = kind == nlohmann::json::value_t::object;
    if (depth != 2 || top() != kWeightMap || !has_map) return true;
    if (!text) return fail("the file of ", quoted(key), " is not a string");
    if (text->empty() || text->front() == '.' || text->find_first_of("/\\") != std::string::npos ||
        text->find('\0') != std::string::npos) {
      return fail(quoted(key), " would be in ", quoted(*text), ", which is not the name of a file in this folder");
    }
    return files.emplace(key, *text).second || fail_twice(key);
  }
};

json quantization_json(const QuantizationNote& note) {
  const WeightFormat& weight = note.weight;
  const json weights = {{"num_bits", bits(weight.type)},
                        {"type", "int"},
                        {"symmetric", !weight.zero_point},
                        {"strategy", weight.group > 0 ? "group" : "channel"},
                        {"group_size", weight.group > 0 ? json(weight.group) : json(nullptr)},
                        {"dynamic", false}};
  json input = nullptr;
  if (note.activation != Activation::none) {
    const bool dynamic = note.activation == Activation::dynamic_per_token;
    input = {{"num_bits", 8},         {"type", "int"},
             {"symmetric", true},     {"strategy", dynamic ? "token" : "tensor"},
             {"group_size", nullptr}, {"dynamic", dynamic}};
  }
  // In the group as well: compressed-tensors would take 4-bit weights with quantized inputs for int-quantized.
  const std::string_view format = note.for_octile ? "octile" : name(kind_of(weight, note.activation));
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"quantization_status", "compressed"},
          {"global_compression_ratio", nullptr},
          {"kv_cache_scheme", nullptr},
          {"ignore", note.ignore},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"format", format},
              {"weights", weights},
              {"input_activations", input},
              {"output_activations", nullptr}}}}}};
}

}  // namespace

ModelConfig read_config(std::string_view text, std::string_view name) {
  const JsonDocument document =
      parse(base::without_python_numbers(text), name, {{"model_type", kNormBefore, kQuantization}});
  const Object object(document.kept(), std::string(name));
  ModelConfig config;
  config.model_type = object.text("model_type");
  config.norm_before = object.truth(kNormBefore, true);
  if (const auto quantization = object.object(kQuantization)) read_quantization(*quantization, config);
  return config;
}

ModelConfig read_metadata(const Metadata& metadata, std::string_view name) {
  ModelConfig config;
  if (const auto found = metadata.find(kQuantization); found != metadata.end()) {
    const std::string place = std::string(name) + ": " + kQuantization;
    const JsonDocument document = parse(found->second, place, std::nullopt);
    read_quantization(Object(document.kept(), place), config);
  }
  return config;
}

std::map<std::string, std::string> read_index(std::string_view text, std::string_view name) {
  IndexReader index;
  index.read(text, name);
  const std::string file(name);
  if (!index.has_map) reject(file, ": there is no object \"weight_map\"");
  if (index.files.empty()) reject(file, ": \"weight_map\" is empty");
  return std::move(index.files);
}

std::string write_index(const std::map<std::string, std::string>& files, std::uint64_t total_size) {
  const json document = {{"metadata", {{"total_size", total_size}}}, {"weight_map", files}};
  return document.dump(2) + "\n";
}

std::string describe_quantization(const QuantizationNote& note) { return quantization_json(note).dump(); }

std::string add_quantization(std::string_view config, const QuantizationNote& note) {
  std::string alone = json({{kQuantization, quantization_json(note)}}).dump(2);
  if (config.empty()) return alone + "\n";
  const std::size_t first_end = config.find('\n');
  const bool is_crlf = first_end != std::string_view::npos && first_end > 0 && config[first_end - 1] == '\r';
  const std::string end_of_line = is_crlf ? "\r\n" : "\n";
  for (std::size_t i = 0; is_crlf && (i = alone.find('\n', i)) != std::string::npos; i += 2)
    alone.replace(i, 1, "\r\n");
  // Without the braces and the last newline.
  const std::string member = alone.substr(1, alone.size() - 2 - end_of_line.size());
  if (parse(base::without_python_numbers(config), kConfigFile, {{kQuantization}}).kept().contains(kQuantization)) {
    const std::size_t at = value_at(config, kQuantization);
    if (at == std::string_view::npos || config.substr(at, 4) != "null") {
      reject(kConfigFile, ": \"", kQuantization, "\" already exists");
    }
    return std::string(config.substr(0, at)) + member.substr(member.find('{')) + std::string(config.substr(at + 4));
  }
  const std::size_t end = config.rfind('}');
  const std::size_t last = config.find_last_not_of(kSpace, end - 1);
  const bool has_line = config.substr(last + 1, end - last - 1).find('\n') != std::string_view::npos;
  return std::string(config.substr(0, last + 1)) + (config[last] == '{' ? "" : ",") + member +
         (has_line ? "" : end_of_line) + std::string(config.substr(last + 1));
}

}  // namespace octile::checkpoint
