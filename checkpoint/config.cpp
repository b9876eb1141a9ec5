#include "config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace octile::checkpoint {

namespace {

using nlohmann::json;

constexpr int kDeepest = 64;  // a hostile file must not exhaust the stack of whoever walks the values
constexpr const char* kQuantization = "quantization_config";
constexpr std::string_view kSpace = " \t\r\n";

json parse(std::string_view text, std::string_view name) {
  const std::string file(name);
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    using Event = json::parse_event_t;
    if (depth > kDeepest) throw FileError(file + ": deeper than " + std::to_string(kDeepest) + " levels");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
      throw FileError(file + ": \"" + printable(value.get<std::string>()) + "\" is there twice");
    }
    return true;
  };
  // For the parser it is the end of the text, whatever comes behind.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    throw FileError(file + ": no JSON (byte " + std::to_string(zero + 1) + " is 0)");
  }
  try {
    json document = json::parse(text, check);
    if (document.is_object()) return document;
  } catch (const json::parse_error& error) {
    throw FileError(file + ": no JSON (byte " + std::to_string(error.byte) + ")");
  } catch (const json::exception& error) {  // a number beyond every double
    throw FileError(file + ": JSON that is not read (" + printable(error.what()) + ")");
  }
  throw FileError(file + ": no JSON object");
}

// Where the value of the document's own member begins; npos if it is not written so. The text is a JSON object.
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

// The text at `key`; empty where there is none.
std::string text_of(const json& object, const char* key, std::string_view name) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return {};
  if (!found->is_string()) throw FileError(std::string(name) + ": \"" + key + "\" is no text");
  return found->get<std::string>();
}

void read_quantization(const json& quantization, std::string_view name, ModelConfig& config) {
  if (!quantization.is_object()) throw FileError(std::string(name) + ": \"quantization_config\" is no object");
  config.method = text_of(quantization, "quant_method", name);
  if (config.method.empty()) throw FileError(std::string(name) + ": \"quantization_config\" has no \"quant_method\"");
  const char* key = config.method == "awq" ? "version" : config.method == "gptq" ? "checkpoint_format" : "format";
  config.format = text_of(quantization, key, name);
  if (const auto bits = quantization.find("bits"); bits != quantization.end() && !bits->is_null()) {
    if (!bits->is_number_unsigned()) throw FileError(std::string(name) + ": \"bits\" is no whole number");
    config.bits = static_cast<int>(std::min<std::uint64_t>(bits->get<std::uint64_t>(), 64));
  }
}

json quantization_json(const QuantizationNote& note) {
  json weights = {{"num_bits", note.weight_bits},
                  {"type", "int"},
                  {"symmetric", !note.zero_points},
                  {"strategy", note.group > 0 ? "group" : "channel"},
                  {"group_size", note.group > 0 ? json(note.group) : json(nullptr)},
                  {"dynamic", false}};
  json input = nullptr;
  if (note.input != QuantizationNote::Input::none) {
    const bool dynamic = note.input == QuantizationNote::Input::dynamic_per_token;
    input = {{"num_bits", 8},         {"type", "int"},
             {"symmetric", true},     {"strategy", dynamic ? "token" : "tensor"},
             {"group_size", nullptr}, {"dynamic", dynamic}};
  }
  return {{"quant_method", "compressed-tensors"},
          {"format", note.weight_bits == 8 ? "int-quantized" : "pack-quantized"},
          {"quantization_status", "compressed"},
          {"global_compression_ratio", nullptr},
          {"kv_cache_scheme", nullptr},
          {"ignore", note.ignore},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"weights", weights},
              {"input_activations", input},
              {"output_activations", nullptr}}}}}};
}

}  // namespace

ModelConfig read_config(std::string_view text, std::string_view name) {
  const json document = parse(text, name);
  ModelConfig config;
  config.model_type = text_of(document, "model_type", name);
  if (const auto before = document.find("do_layer_norm_before"); before != document.end()) {
    if (!before->is_boolean()) {
      throw FileError(std::string(name) + ": \"do_layer_norm_before\" is neither true nor false");
    }
    config.norm_before = before->get<bool>();
  }
  if (const auto found = document.find(kQuantization); found != document.end() && !found->is_null()) {
    read_quantization(*found, name, config);
  }
  return config;
}

ModelConfig read_metadata(const Metadata& metadata, std::string_view name) {
  ModelConfig config;
  if (const auto found = metadata.find(kQuantization); found != metadata.end()) {
    read_quantization(parse(found->second, name), name, config);
  }
  return config;
}

std::map<std::string, std::string> read_index(std::string_view text, std::string_view name) {
  const json document = parse(text, name);
  const std::string file(name);
  const auto map = document.find("weight_map");
  if (map == document.end() || !map->is_object()) throw FileError(file + ": there is no object \"weight_map\"");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, value] : map->items()) {
    if (!value.is_string()) throw FileError(file + ": the file of \"" + printable(tensor) + "\" is no text");
    const std::string shard = value.get<std::string>();
    if (shard.empty() || shard.front() == '.' || shard.find_first_of(std::string("/\\\0", 3)) != std::string::npos) {
      throw FileError(file + ": \"" + printable(tensor) + "\" would be in \"" + printable(shard) +
                      "\", which is no name of a file in this folder");
    }
    files.emplace(tensor, shard);
  }
  if (files.empty()) throw FileError(file + ": \"weight_map\" is empty");
  return files;
}

std::string write_index(const std::map<std::string, std::string>& files, std::uint64_t total_size) {
  const json document = {{"metadata", {{"total_size", total_size}}}, {"weight_map", files}};
  return document.dump(2) + "\n";
}

std::string describe_quantization(const QuantizationNote& note) { return quantization_json(note).dump(); }

std::string add_quantization(std::string_view config, const QuantizationNote& note) {
  const std::string alone = json({{kQuantization, quantization_json(note)}}).dump(2);
  if (config.empty()) return alone + "\n";
  const std::string member = alone.substr(1, alone.size() - 3);  // without the braces and the last line's end
  if (parse(config, kConfigFile).contains(kQuantization)) {
    const std::size_t at = value_at(config, kQuantization);
    if (at == std::string_view::npos || config.substr(at, 4) != "null") {
      throw FileError(std::string(kConfigFile) + ": \"" + kQuantization + "\" is there already");
    }
    return std::string(config.substr(0, at)) + member.substr(member.find('{')) + std::string(config.substr(at + 4));
  }
  const std::size_t end = config.rfind('}');
  const std::size_t last = config.find_last_not_of(kSpace, end - 1);
  return std::string(config.substr(0, last + 1)) + (config[last] == '{' ? "" : ",") + member + "\n" +
         std::string(config.substr(end));
}

}  // namespace octile::checkpoint
