#include "fused_experts.h"

#include "quantized_layer.h"

namespace octile::checkpoint {

namespace {

using Shape = std::vector<std::int64_t>;

struct Sizes {
  std::int64_t experts, inner, hidden;
  bool transposed;
};

// None if they do not fit each other.
std::optional<Sizes> sizes_of(const Shape& up, const Shape& down) {
  if (up.size() != 3 || down.size() != 3 || up[0] != down[0]) return std::nullopt;
  // At most one of the two holds, as 2 I = H and 2 H = I exclude each other.
  if (up[1] == 2 * down[2] && up[2] == down[1]) return Sizes{up[0], down[2], up[2], false};
  if (up[2] == 2 * down[1] && up[1] == down[2]) return Sizes{up[0], down[1], up[1], true};
  return std::nullopt;
}

class Module {
 public:
  Module(const Checkpoint& checkpoint, std::string name)
      : checkpoint_(checkpoint),
        name_(std::move(name)),
        up_(find("gate_up_proj")),
        down_(find("down_proj")),
        up_bias_(find("gate_up_proj_bias")),
        down_bias_(find("down_proj_bias")) {}

  // Why they cannot be layers; empty if they can.
  std::string refusal() {
    const std::string& model = checkpoint_.config().model_type;
    if (!up_ || !down_) return up_ ? "experts without down_proj" : "experts without gate_up_proj";
    for (const TensorInfo* const tensor : {up_, down_, up_bias_, down_bias_}) {
      if (tensor && !is_float(tensor->type)) return "experts of " + std::string(checkpoint::name(tensor->type));
    }
    const auto sizes = sizes_of(up_->shape, down_->shape);
    if (!sizes) return "experts of " + shape_text(up_->shape) + " and " + shape_text(down_->shape);
    sizes_ = *sizes;
    if (up_->size() == 0) return "it is empty";
    if ((up_bias_ == nullptr) != (down_bias_ == nullptr)) return "experts with biases in only some layers";
    if (up_bias_ && (up_bias_->shape != Shape{sizes_.experts, 2 * sizes_.inner} ||
                     down_bias_->shape != Shape{sizes_.experts, sizes_.hidden})) {
      return "experts with biases of " + shape_text(up_bias_->shape) + " and " + shape_text(down_bias_->shape);
    }
    if (model.empty()) return "experts in one tensor: only the model_type of a config.json says how they lie in it";
    // Transformers has another module for it, which is not supported.
    if (model.starts_with("llama4")) return "experts of " + model + " in one tensor";
    return {};
  }

  std::vector<Layer> layers(const TensorInfo& tensor) const {
    const std::int64_t inner = sizes_.inner, hidden = sizes_.hidden;
    const bool alternate = checkpoint_.config().model_type == "gpt_oss";
    std::vector<Layer> all;
    const auto add = [&](std::int64_t e, const char* part, const Layer& sizes, std::int64_t first, std::int64_t step) {
      const TensorInfo* const bias = &tensor == down_ ? down_bias_ : up_bias_;
      Layer layer = sizes;
      layer.name = name_ + "." + std::to_string(e) + "." + part;
      layer.expert = {name_, e, first, step, sizes_.transposed, bias ? bias->name : ""};
      layer.tensors = {tensor.name};
      all.push_back(std::move(layer));
    };
    for (std::int64_t e = 0; e < sizes_.experts; ++e) {
      if (&tensor == down_) {
        add(e, "down_proj", {.n = hidden, .k = inner}, 0, 1);
      } else {
        add(e, "gate_proj", {.n = inner, .k = hidden}, 0, alternate ? 2 : 1);
        add(e, "up_proj", {.n = inner, .k = hidden}, alternate ? 1 : inner, alternate ? 2 : 1);
      }
    }
    return all;
  }

 private:
  const TensorInfo* find(const char* tensor) const { return checkpoint_.find(name_ + "." + tensor); }

  const Checkpoint& checkpoint_;
  std::string name_;
  const TensorInfo *up_, *down_, *up_bias_, *down_bias_;
  Sizes sizes_ = {};
};

}  // namespace

std::optional<FusedExperts> fused_experts(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  auto name = before(tensor.name, ".gate_up_proj");
  if (!name) name = before(tensor.name, ".down_proj");
  if (!name || tensor.shape.size() != 3 || !(*name == "experts" || name->ends_with(".experts"))) return std::nullopt;
  Module module(checkpoint, *name);
  FusedExperts found = {.name = *name, .layers = {}, .reason = module.refusal()};
  if (found.reason.empty()) found.layers = module.layers(checkpoint.get(tensor.name));
  return found;
}

Bytes bytes_of_expert(const Checkpoint& checkpoint, const std::string& tensor, std::int64_t expert) {
  const Bytes bytes = checkpoint.bytes(tensor);
  const auto size = bytes.size() / static_cast<std::size_t>(checkpoint.get(tensor).shape[0]);
  return bytes.subspan(static_cast<std::size_t>(expert) * size, size);
}

std::vector<std::byte> bias_of_part(const Checkpoint& checkpoint, const Layer& layer) {
  const ExpertPart& part = *layer.expert;
  const Bytes all = bytes_of_expert(checkpoint, part.bias, part.expert);
  const auto width = static_cast<std::size_t>(bits(checkpoint.get(part.bias).type)) / 8;
  std::vector<std::byte> bytes;
  for (std::int64_t i = 0; i < layer.n; ++i) {
    const Bytes one = all.subspan(static_cast<std::size_t>(part.first + i * part.step) * width, width);
    bytes.insert(bytes.end(), one.begin(), one.end());
  }
  return bytes;
}

}  // namespace octile::checkpoint
