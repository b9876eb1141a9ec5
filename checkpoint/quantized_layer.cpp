#include "quantized_layer.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace octile::checkpoint {

namespace {

// The tensors of quantized layers of any layout.
constexpr std::array<const char*, 13> kSuffixes = {"weight",
                                                   "weight_packed",
                                                   "weight_scale",
                                                   "weight_shape",
                                                   "weight_zero_point",
                                                   "weight_g_idx",
                                                   "input_scale",
                                                   "input_zero_point",
                                                   "input_multiplier",
                                                   "qweight",
                                                   "qzeros",
                                                   "scales",
                                                   "g_idx"};

std::string type_text(std::optional<ElementType> type) { return type ? std::string(name(*type)) : "a float type"; }

bool fits(const TensorInfo& tensor, std::optional<ElementType> type) {
  return type ? tensor.type == *type : is_float(tensor.type);
}

// Of a number of bits that is supported.
DType type_of(const QuantizationArgs& weights) { return *level_type(*weights.bits); }

// "4 or 8"
std::string known_bits(const char* before_last) {
  std::string list;
  for (const DType type : kLevelTypes) {
    list += (list.empty() ? "" : type == *std::rbegin(kLevelTypes) ? before_last : ", ") + std::to_string(bits(type));
  }
  return list;
}

}  // namespace

std::optional<std::string> before(const std::string& tensor, std::string_view suffix) {
  if (tensor.size() <= suffix.size() || !tensor.ends_with(suffix)) return std::nullopt;
  return tensor.substr(0, tensor.size() - suffix.size());
}

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> list) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

std::optional<Layer> QuantizedLayers::of(const TensorInfo& tensor) {
  if (const auto packed = before(tensor.name, ".weight_packed")) return pack_quantized(*packed);
  if (const auto words = before(tensor.name, ".qweight")) return transposed_words(*words);
  if (const auto scale = before(tensor.name, ".weight_scale")) {
    check_scale_of_none(*scale);
    return std::nullopt;
  }
  const auto module = before(tensor.name, ".weight");
  if (!module || tensor.type != ElementType::s8) return std::nullopt;
  if (!checkpoint_.find(*module + ".weight_scale")) return std::nullopt;  // other integers
  return int_quantized(*module, tensor);
}

// In a file with compressed-tensors' layers, a scale must have a weight. Float weights with scales are ignored.
void QuantizedLayers::check_scale_of_none(const std::string& module) {
  if (checkpoint_.config().groups.empty() || checkpoint_.find(module + ".weight_packed")) return;
  if (schemes_.ignores(module)) return;
  const TensorInfo* const weight = checkpoint_.find(module + ".weight");
  if (!weight) fail(module, "has a weight_scale and no weight");
  if (weight->type == ElementType::s8 || (!is_float(weight->type) && weight->type >= ElementType::f16)) return;
  fail(module, "weight is ", described(*weight), ", expected I8");
}

const TensorInfo& QuantizedLayers::get(const Layer& layer, const std::string& suffix) const {
  if (const TensorInfo* const tensor = checkpoint_.find(layer.name + "." + suffix)) return *tensor;
  fail(layer.name, "has no ", suffix);
}

bool QuantizedLayers::has(const Layer& layer, const std::string& suffix) const {
  return checkpoint_.find(layer.name + "." + suffix) != nullptr;
}

void QuantizedLayers::expect(const Layer& layer, const std::string& suffix, std::optional<ElementType> type,
                             const std::vector<Shape>& shapes) const {
  const TensorInfo& tensor = get(layer, suffix);
  if (fits(tensor, type) && std::find(shapes.begin(), shapes.end(), tensor.shape) != shapes.end()) return;
  std::string list;
  for (const Shape& shape : shapes) list += (list.empty() ? "" : " or ") + shape_text(shape);
  fail(layer.name, suffix, " is ", described(tensor), ", expected ", type_text(type), " ", list);
}

QuantizedLayers::Shape QuantizedLayers::matrix(const Layer& layer, const std::string& suffix,
                                               std::optional<ElementType> type) const {
  const TensorInfo& tensor = get(layer, suffix);
  if (fits(tensor, type) && tensor.shape.size() == 2) return tensor.shape;
  fail(layer.name, suffix, " is ", described(tensor), ", not a matrix of ", type_text(type));
}

void check_method(const Checkpoint& checkpoint) {
  const std::string& method = checkpoint.config().method;
  if (is_one_of(method, {"compressed-tensors", "awq", "gptq"})) return;
  reject(checkpoint.path().string(), ": quant_method is ", quoted(method),
         ", expected compressed-tensors, awq or gptq");
}

void QuantizedLayers::check_method(const Layer& layer) const {
  const std::string& method = checkpoint_.config().method;
  if (method.empty()) return;
  checkpoint::check_method(checkpoint_);
  const bool is_compressed = layer.kind == LayerKind::int_quantized || layer.kind == LayerKind::pack_quantized;
  if (method != (is_compressed ? "compressed-tensors" : name(layer.kind))) {
    fail(layer.name, "is ", name(layer.kind), ", and quant_method is ", quoted(method));
  }
}

// The layer's group in compressed-tensors' config; null if there is no config.
const QuantizationGroup* QuantizedLayers::choose_group(Layer& layer) {
  check_method(layer);
  const ModelConfig& config = checkpoint_.config();
  if (config.method.empty()) return nullptr;
  layer.scheme = schemes_.group_of(layer.name);
  const QuantizationGroup& group = config.groups[*layer.scheme];
  const bool packs = layer.kind == LayerKind::pack_quantized;
  const std::string& format = group.format.empty() ? config.format : group.format;
  if (!is_one_of(format, {"", "octile", "mixed-precision", name(layer.kind)}) &&
      (packs || format != "naive-quantized")) {
    fail(layer.name, "is ", name(layer.kind), ", and quantization_config says ", quoted(format));
  }
  if (!group.weights) fail(layer.name, "its group of quantization_config has no weights");
  const QuantizationArgs& weights = *group.weights;
  if (weights.type != "int" || !level_type(weights.bits.value_or(0))) {
    fail(layer.name, "weights of ", (weights.bits ? std::to_string(*weights.bits) : "no"), " bits, type ",
         quoted(weights.type), ", expected int of ", known_bits(" or "));
  }
  const bool has_points = has(layer, "weight_zero_point");
  if (!weights.symmetric && !has_points) fail(layer.name, "has no weight_zero_point");
  // Older int8 files have some that are 0.
  if (weights.symmetric && has_points && packs) {
    fail(layer.name, "has a weight_zero_point, and quantization_config says symmetric");
  }
  return &group;
}

void QuantizedLayers::check_input(Layer& layer, const QuantizationGroup* group) const {
  layer.static_input = group ? group->input && !group->input->dynamic : has(layer, "input_scale");
  layer.dynamic_input = group && group->input && group->input->dynamic;
  if (!layer.static_input) return;
  expect(layer, "input_scale", std::nullopt, {{1}, {}});
  if (has(layer, "input_multiplier")) expect(layer, "input_multiplier", std::nullopt, {{layer.k}});
}

Layer QuantizedLayers::int_quantized(const std::string& module, const TensorInfo& weight) {
  if (weight.shape.size() != 2) fail(module, "an I8 weight of shape ", shape_text(weight.shape));
  Layer layer = {.name = module, .kind = LayerKind::int_quantized, .n = weight.shape[0], .k = weight.shape[1]};
  if (layer.n == 0 || layer.k == 0) return layer;
  const QuantizationGroup* const group = choose_group(layer);
  if (group) layer.weight.type = type_of(*group->weights);
  check_scale(layer, group);
  check_input(layer, group);
  take(layer, {"weight", "weight_scale", "weight_zero_point"});
  return layer;
}

Layer QuantizedLayers::pack_quantized(const std::string& module) {
  Layer layer = {.name = module, .kind = LayerKind::pack_quantized};
  const Shape words = matrix(layer, "weight_packed", ElementType::s32);
  expect(layer, "weight_shape", ElementType::s64, {{2}});
  std::int64_t sizes[2];
  std::memcpy(sizes, checkpoint_.bytes(module + ".weight_shape").data(), sizeof sizes);
  layer.n = sizes[0];
  layer.k = sizes[1];
  const auto holds = [&](DType type) { return words_for(layer.k, type) == words[1]; };
  const DType* const held = std::find_if(std::begin(kLevelTypes), std::end(kLevelTypes), holds);
  if (layer.n != words[0] || layer.k < 0 || held == std::end(kLevelTypes)) {
    fail(module, "weight_packed ", shape_text(words), " does not hold ", known_bits(" or "),
         " bits each of weight_shape ", shape_text({layer.n, layer.k}));
  }
  if (layer.n == 0 || layer.k == 0) return layer;
  const QuantizationGroup* const group = choose_group(layer);
  layer.weight.type = group ? type_of(*group->weights) : *held;
  if (!holds(layer.weight.type)) {
    fail(module, "weight_packed holds ", bits(*held), " bits each, and quantization_config says num_bits ",
         bits(layer.weight.type));
  }
  check_scale(layer, group);
  check_input(layer, group);
  check_words(layer, "weight_zero_point", {words_for(layer.n, layer.weight.type), groups_of(layer.weight, layer.k)},
              "weight_g_idx");
  take(layer, {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"});
  return layer;
}

// Determines the granularity from quantization_config, or from the scale's shape where there is none.
void QuantizedLayers::check_scale(Layer& layer, const QuantizationGroup* group) const {
  const bool packs = layer.kind == LayerKind::pack_quantized;
  const bool in_groups = packs || is_packed(layer.weight.type);  // if need be of a whole row
  const std::string strategy = group ? group->weights->strategy : "";
  const Shape scale = packs && !group ? matrix(layer, "weight_scale", std::nullopt) : get(layer, "weight_scale").shape;
  std::int64_t groups = 1;
  if (strategy == "group") {
    groups = count_groups(layer, group->weights->group_size.value_or(0));
  } else if (!group && scale.size() == 2 && scale[0] == layer.n) {
    groups = scale[1];
    if (groups == 0 || layer.k % groups != 0) {
      fail(layer.name, layer.k, " inputs do not divide into ", groups, " groups");
    }
  } else if (group && in_groups && strategy != "channel") {
    fail(layer.name, bits(layer.weight.type), "-bit weights per ", quoted(strategy), ", expected group or channel");
  }
  expect(layer, "weight_scale", std::nullopt,
         in_groups || groups > 1 ? std::vector<Shape>{{layer.n, groups}}
                                 : std::vector<Shape>{{layer.n, 1}, {layer.n}, {1}, {}});
  layer.weight.group = groups == 1 ? 0 : layer.k / groups;
  layer.weight.granularity = in_groups || groups > 1                                ? Granularity::group
                             : layer.n != 1 && (scale.empty() || scale == Shape{1}) ? Granularity::tensor
                                                                                    : Granularity::row;
  layer.weight.zero_point = has(layer, "weight_zero_point");
}

std::int64_t QuantizedLayers::count_groups(const Layer& layer, std::int64_t length) const {
  if (length > 0 && layer.k % length == 0) return layer.k / length;
  fail(layer.name, "groups of ", length, " do not divide its ", layer.k, " inputs");
}

void QuantizedLayers::check_words(const Layer& layer, const std::string& zero_points, const Shape& zero_shape,
                                  const std::string& order) const {
  if (has(layer, zero_points)) expect(layer, zero_points, ElementType::s32, {zero_shape});
  if (has(layer, order)) expect(layer, order, ElementType::s32, {{layer.k}});
}

// AWQ packs along OUT, GPTQ along IN.
Layer QuantizedLayers::transposed_words(const std::string& module) {
  constexpr std::int64_t kMax = std::int64_t{1} << 40;
  constexpr std::int64_t kPerWord = 8;
  Layer layer = {.name = module, .kind = LayerKind::gptq};
  const Shape words = matrix(layer, "qweight", ElementType::s32);
  const Shape scale = matrix(layer, "scales", std::nullopt);
  const ModelConfig& config = checkpoint_.config();
  layer.n = scale[1];
  const bool is_awq = layer.n > 0 && layer.n % kPerWord == 0 && words[1] == layer.n / kPerWord;
  if ((!is_awq && words[1] != layer.n) || words[0] > kMax) {
    fail(module, "qweight ", shape_text(words), " with scales ", shape_text(scale),
         " is not a supported layout (AWQ or GPTQ, 4 bits)");
  }
  if (is_awq) layer.kind = LayerKind::awq;
  check_method(layer);
  if (!config.method.empty() && config.bits != 4) {
    fail(module, (config.bits ? std::to_string(*config.bits) : "no"), " bits; only 4 are supported");
  }
  layer.k = is_awq ? words[0] : words[0] * kPerWord;
  if (layer.n == 0 || layer.k == 0) return layer;
  if (layer.n % kPerWord != 0) {
    fail(module, "GPTQ packs 8 zero points a word, and there are ", layer.n, " outputs");
  }
  std::int64_t groups = scale[0];
  if (config.group_size) groups = *config.group_size == -1 ? 1 : count_groups(layer, *config.group_size);
  if (groups == 0 || layer.k % groups != 0) {
    fail(module, layer.k, " inputs do not divide into ", groups, " groups");
  }
  expect(layer, "scales", std::nullopt, {{groups, layer.n}});
  layer.weight = {DType::s4, Granularity::group, groups == 1 ? 0 : layer.k / groups, true};
  get(layer, "qzeros");
  check_words(layer, "qzeros", {groups, layer.n / kPerWord}, "g_idx");
  if (config.desc_act && !has(layer, "g_idx")) fail(module, "has no g_idx, and quantization_config says desc_act");
  take(layer, {"qweight", "qzeros", "scales", "g_idx"});
  return layer;
}

void QuantizedLayers::take(Layer& layer, std::initializer_list<const char*> suffixes) const {
  for (const char* const suffix : suffixes) {
    if (has(layer, suffix)) layer.tensors.push_back(layer.name + "." + suffix);
  }
  if (layer.static_input) {
    for (const char* const suffix : {"input_scale", "input_zero_point", "input_multiplier"}) {
      if (has(layer, suffix)) layer.tensors.push_back(layer.name + "." + suffix);
    }
  }
  for (const char* const suffix : kSuffixes) {
    const std::string tensor = layer.name + "." + suffix;
    const auto is_it = [&](const std::string& own) { return own == tensor; };
    if (checkpoint_.find(tensor) && std::none_of(layer.tensors.begin(), layer.tensors.end(), is_it)) {
      fail(layer.name, suffix, " does not belong to layers of this scheme");
    }
  }
  if (has(layer, "bias")) expect(layer, "bias", std::nullopt, {{layer.n}});
}

}  // namespace octile::checkpoint
