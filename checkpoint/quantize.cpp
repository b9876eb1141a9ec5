#include "octile/checkpoint/quantize.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <string_view>

#include "config.h"
#include "files.h"
#include "fused_experts.h"
#include "octile/smooth_quant.h"
#include "quantize_layer.h"
#include "reject.h"
#include "target.h"

namespace octile::checkpoint {

namespace {

namespace fs = std::filesystem;

// Heads that share the embedding's weight are in no file, and yet are linear layers of the model: a loader must not
// look for their scales. A model has such a head if a tensor's name begins with `beside`.
struct TiedHead {
  std::string_view name;
  std::string_view beside;
};
constexpr std::array<TiedHead, 7> kTiedHeads = {{{"lm_head", ""},
                                                 {"lm_head.decoder", "lm_head.dense."},
                                                 {"cls.predictions.decoder", "cls.predictions."},
                                                 {"predictions.decoder", "predictions."},
                                                 {"generator_lm_head", "generator_predictions."},
                                                 {"vocab_projector", "vocab_transform."},
                                                 {"proj_out", "model.encoder.conv1."}}};

class Quantizer {
 public:
  Quantizer(const fs::path& from, const fs::path& to, const QuantizeOptions& options, const OnProgress& progress)
      : options_(options),
        progress_(progress),
        checkpoint_(Checkpoint::open(from)),
        target_(check_target(checkpoint_, to, options)) {
    if (options.calibration) calibration_.emplace(Calibration::open(*options.calibration));
  }

  QuantizeReport run() {
    choose_layers();
    check_calibration();
    for (const Layer& layer : layers_) {
      for (const std::string& tensor : layer.tensors) layers_in_[tensor].push_back(&layer);
      if (layer.expert && !layer.expert->bias.empty()) biases_in_[layer.expert->bias].push_back(&layer);
    }
    check_names();
    for (const Checkpoint::Shard& shard : checkpoint_.shards()) {
      for (const TensorInfo& tensor : shard.file.tensors()) all_ += static_cast<std::int64_t>(tensor.size());
    }
    if (options_.smoothing && is_static()) warn_of_few_rows();
    if (options_.smoothing) fold();
    quantizer_.emplace(checkpoint_, options_, calibration_ ? &*calibration_ : nullptr, folded_ ? &*folded_ : nullptr);
    report_.size_before = checkpoint_.size();
    checkpoint_.is_folder() ? write_folder() : write_file();
    warn_of_vanished();
    return std::move(report_);
  }

 private:
  bool is_static() const { return options_.activation == Activation::static_per_tensor; }

  [[noreturn]] void fail(const std::string& what) const { reject(checkpoint_.path().string(), ": ", what); }

  void tell(const std::string& what) const {
    if (progress_) progress_(done_, all_, what);
  }

  void choose_layers() {
    LayerTable table = find_layers(checkpoint_, options_.selection);
    report_.left_out = std::move(table.left_out);
    const std::vector<std::string> heads = tied_heads();
    for (const std::string& pattern : table.unmatched) {
      const auto is_for = [&](const std::string& head) { return matches(head, {pattern}); };
      if (std::any_of(heads.begin(), heads.end(), is_for)) continue;
      report_.warnings.push_back("the pattern \"" + printable(pattern) + "\" matches no layer");
    }
    if (!checkpoint_.config().method.empty()) {
      fail("is quantized already (" + printable(checkpoint_.config().method) + ")");
    }
    std::map<std::string, std::string> experts_left;  // reasons by module: all layers of experts, or none
    for (const Layer& layer : table.layers) {
      if (!layer.expert) continue;
      if (const std::string reason = refusal(layer); !reason.empty())
        experts_left.emplace(layer.expert->module, reason);
    }
    for (const auto& [module, reason] : experts_left) report_.left_out.push_back({module, reason, true});
    for (Layer& layer : table.layers) {
      if (layer.kind != LayerKind::plain) {
        fail("\"" + printable(layer.name) + "\" is quantized already (" + std::string(name(layer.kind)) + ")");
      }
      if (layer.expert && experts_left.count(layer.expert->module) != 0) continue;
      const std::string reason = refusal(layer);
      if (reason.empty()) {
        layers_.push_back(std::move(layer));
      } else {
        report_.left_out.push_back({layer.name, reason, true});
      }
    }
    if (layers_.empty()) fail("there is no linear layer to quantize" + reasons());
  }

  std::string reasons() const {
    std::map<std::string, int> counts;
    for (const LeftOut& left : report_.left_out) ++counts[left.reason];
    std::string text;
    for (const auto& [reason, count] : counts) {
      text += (text.empty() ? ": " : ", ") + std::to_string(count) + " left out (" + printable(reason) + ")";
    }
    return text;
  }

  std::string refusal(const Layer& layer) const {
    if (options_.activation != Activation::none && layer.k > kMaxContraction) {
      return std::to_string(layer.k) + " inputs are more than " + std::to_string(kMaxContraction);
    }
    const std::int64_t group = options_.weight.group;
    if (group == 0 || layer.k % group == 0) return {};
    return std::to_string(layer.k) + " inputs are not a multiple of the group, " + std::to_string(group);
  }

  void check_calibration() const {
    if (!calibration_) return;
    const auto has = [&](const Layer& layer) { return calibration_->has(layer); };
    const auto has_moments = [&](const Layer& layer) { return calibration_->has_second_moments(layer); };
    const bool feeds_back = options_.method == WeightMethod::error_feedback;
    const auto refuse = [&](const std::string& what) { reject(options_.calibration->string(), ": ", what); };
    if (std::none_of(layers_.begin(), layers_.end(), has)) {
      refuse("is not of this model, whose layers have names like \"" + printable(layers_.front().name) + "\": it has " +
             calibration_->example());
    }
    const bool searches = options_.smoothing && options_.smoothing->search;
    // Without moments such a file would have no effect.
    const bool clips_alone = options_.method == WeightMethod::clip_search && !is_static() && !options_.smoothing;
    const bool wants_moments = feeds_back || searches || clips_alone;
    if (wants_moments && std::none_of(layers_.begin(), layers_.end(), has_moments)) {
      refuse("has no input_second_moments; octile.calibrate(model, second_moments=True) takes them");
    }
    const auto need = [&](const auto& in_file, const std::string& what) {
      const auto lacks = [&](const Layer& layer) { return !in_file(layer); };
      const auto missing = std::count_if(layers_.begin(), layers_.end(), lacks);
      if (missing == 0) return;
      refuse("has no " + what + " for \"" + printable(std::find_if(layers_.begin(), layers_.end(), lacks)->name) +
             "\"" + (missing > 1 ? " and " + std::to_string(missing - 1) + " more layers" : "") +
             "; leave such layers out with --ignore, or calibrate them");
    };
    if (is_static()) need(has, "input_channel_max");
    if (feeds_back) need(has_moments, "input_second_moments");
  }

  // A layer's new tensors must not have the name of a tensor that stays.
  void check_names() const {
    for (const Layer& layer : layers_) {
      for (const TensorSpec& spec : quantized_tensors(checkpoint_, layer, options_)) {
        check_name(layer, spec.name);
      }
      if (layer.expert && !layer.expert->bias.empty()) check_name(layer, layer.name + ".bias");
    }
  }

  void check_name(const Layer& layer, const std::string& tensor) const {
    if (!checkpoint_.find(tensor) || layers_in_.count(tensor) != 0) return;
    fail("\"" + printable(layer.name) + "\" would be written with \"" + printable(tensor) + "\", which already exists");
  }

  void fold() {
    SmoothingPlan plan = plan_smoothing(checkpoint_, layers_);
    report_.not_smoothed = std::move(plan.others);
    const auto bytes_of = [&](const SmoothingGroup& group) {
      std::int64_t bytes = 0;
      for (const Layer& layer : group.layers) {
        bytes += static_cast<std::int64_t>(checkpoint_.get(layer.weight_tensor()).size());
      }
      return bytes;
    };
    for (const SmoothingGroup& group : plan.groups) all_ += bytes_of(group);
    folded_.emplace(checkpoint_, *calibration_, options_);
    for (const SmoothingGroup& group : plan.groups) {
      const auto tell_of_group = [&] { tell("smoothing " + group.before); };
      tell_of_group();
      folded_->fold(group, report_, tell_of_group);
      done_ += bytes_of(group);
    }
  }

  // Runs before anything is written: a calibration without rows is an error.
  void warn_of_few_rows() {
    std::int64_t rows = kFewCalibrationRows;
    for (const Layer& layer : layers_) {
      if (calibration_->has(layer)) rows = std::min(rows, calibration_->rows(layer));
    }
    if (rows == kFewCalibrationRows) return;
    report_.warnings.push_back("smoothing is based on " + std::to_string(rows) + " calibration rows. With fewer than " +
                               std::to_string(kFewCalibrationRows) +
                               ", unseen inputs exceed the largest values seen more often, and are clamped");
  }

  void warn_of_vanished() {
    for (const LayerReport& layer : report_.layers) {
      if (layer.vanished == 0) continue;
      const bool groups = options_.weight.group != 0;
      const std::int64_t all = layer.n * groups_of(options_.weight, layer.k);
      report_.warnings.push_back("\"" + printable(layer.name) + "\": " + std::to_string(layer.vanished) + " of " +
                                 std::to_string(all) + (groups ? " groups" : " rows") +
                                 " became all zero: their values are too small for the smallest scale, 1e-8");
    }
  }

  // Copied, or divided by the factors of the layers behind it.
  void write_other(const TensorInfo& tensor, SafetensorsWriter& writer) const {
    const auto* const rows = folded_ ? folded_->rows(tensor.name) : nullptr;
    if (!rows) {
      writer.append(tensor.name, checkpoint_.bytes(tensor.name));
    } else {
      std::vector<float> values = checkpoint_.values(tensor.name);
      divide_rows(values, *rows);
      writer.append(tensor.name, write_values(tensor.type, values));
    }
    checkpoint_.release(tensor.name);
  }

  static std::span<const Layer* const> found_in(const std::map<std::string, std::vector<const Layer*>>& by_tensor,
                                                const TensorInfo& tensor) {
    const auto found = by_tensor.find(tensor.name);
    if (found == by_tensor.end()) return {};
    return found->second;
  }
  std::span<const Layer* const> layers_in(const TensorInfo& tensor) const { return found_in(layers_in_, tensor); }
  std::span<const Layer* const> biases_in(const TensorInfo& tensor) const { return found_in(biases_in_, tensor); }

  // `mode`: the file's permission bits.
  void write_shard(const Checkpoint::Shard& shard, const fs::path& path, const Metadata& metadata, mode_t mode) {
    std::vector<TensorSpec> specs;
    for (const TensorInfo& tensor : shard.file.tensors()) {
      const auto layers = layers_in(tensor), biases = biases_in(tensor);
      if (layers.empty() && biases.empty()) specs.push_back({tensor.name, tensor.type, tensor.shape});
      for (const Layer* const layer : layers) {
        const auto quantized = quantized_tensors(checkpoint_, *layer, options_);
        specs.insert(specs.end(), quantized.begin(), quantized.end());
      }
      for (const Layer* const layer : biases) specs.push_back({layer->name + ".bias", tensor.type, {layer->n}});
    }
    for (const TensorSpec& spec : specs) {
      index_[spec.name] = shard.file_name;
      tensor_bytes_ += size_of(spec.type, spec.shape, spec.name);
    }
    SafetensorsWriter writer(path, specs, metadata, mode);
    for (const TensorInfo& tensor : shard.file.tensors()) {
      tell(tensor.name);
      const auto layers = layers_in(tensor), biases = biases_in(tensor);
      if (layers.empty() && biases.empty()) write_other(tensor, writer);
      for (const Layer* const layer : layers) {
        report_.layers.push_back(quantizer_->write(*layer, writer));
        done_ += static_cast<std::int64_t>(report_.layers.back().bytes_before);
        tell(tensor.name);
      }
      for (const Layer* const layer : biases) writer.append(layer->name + ".bias", bias_of_part(checkpoint_, *layer));
      if (layers.empty()) done_ += static_cast<std::int64_t>(tensor.size());
    }
    tell(shard.file_name);
    writer.finish(options_.overwrite);
    report_.size_after += writer.size();
  }

  std::vector<std::string> tied_heads() const {
    std::vector<std::string> heads;
    const std::vector<std::string> names = checkpoint_.names();
    for (const TiedHead& head : kTiedHeads) {
      const auto is_beside = [&](const std::string& name) { return name.starts_with(head.beside); };
      const bool is_in_file = checkpoint_.find(std::string(head.name) + ".weight") != nullptr;
      if (!is_in_file && std::any_of(names.begin(), names.end(), is_beside)) heads.emplace_back(head.name);
    }
    return heads;
  }

  QuantizationNote note() const {
    QuantizationNote note = {.weight = options_.weight, .activation = options_.activation};
    for (const LeftOut& left : report_.left_out) {
      if (left.linear) note.ignore.push_back(left.name);
    }
    // Transformers finds no place for such experts one by one, and would go on with random ones.
    note.for_octile = std::any_of(layers_.begin(), layers_.end(),
                                  [](const Layer& layer) { return layer.expert && layer.expert->transposed; });
    for (std::string& head : tied_heads()) note.ignore.push_back(std::move(head));
    std::sort(note.ignore.begin(), note.ignore.end());
    return note;
  }

  void write_file() {
    const Checkpoint::Shard& shard = checkpoint_.shards().front();
    Metadata metadata = shard.file.metadata();
    metadata["quantization_config"] = describe_quantization(note());
    write_shard(shard, target_, metadata, mode_of(checkpoint_.path()));
  }

  // The permissions of the source and of the file that is replaced, whichever are stricter.
  mode_t mode_of(const fs::path& source) const { return base::mode_of(source, 0) & base::mode_of(target_, 0777); }

  void write_folder() {
    files::Temporary folder(target_, files::Temporary::Kind::folder, mode_of(checkpoint_.path()));
    fill(folder);
    options_.overwrite ? folder.replace(check_replaced(checkpoint_, target_)) : folder.move_into_place();
  }

  void fill(files::Temporary& folder) {
    const auto mode_in = [&](const fs::path& name, mode_t otherwise) {
      return base::mode_of(checkpoint_.path() / name, otherwise);
    };
    std::set<std::string> written = {std::string(kIndexFile), std::string(kConfigFile)};
    const mode_t weights_mode = mode_in(checkpoint_.shards().front().file_name, 0);
    files::write_text(folder, kConfigFile, add_quantization(checkpoint_.config_text(), note()),
                      mode_in(kConfigFile, weights_mode));
    for (const Checkpoint::Shard& shard : checkpoint_.shards()) {
      write_shard(shard, folder.path() / shard.file_name, shard.file.metadata(), mode_in(shard.file_name, 0));
      written.insert(shard.file_name);
    }
    if (checkpoint_.has_index()) {
      files::write_text(folder, kIndexFile, write_index(index_, tensor_bytes_), mode_in(kIndexFile, weights_mode));
    }
    copy_others(checkpoint_.path(), folder, written, [&](const std::string& name) { tell(name); });
  }

  const QuantizeOptions& options_;
  const OnProgress& progress_;
  Checkpoint checkpoint_;
  fs::path target_;
  std::optional<Calibration> calibration_;
  std::optional<Folded> folded_;
  std::optional<LayerQuantizer> quantizer_;
  std::vector<Layer> layers_;
  std::map<std::string, std::vector<const Layer*>> layers_in_;  // by tensor: of one that holds experts, several
  std::map<std::string, std::vector<const Layer*>> biases_in_;
  std::map<std::string, std::string> index_;  // file by tensor
  std::uint64_t tensor_bytes_ = 0;
  QuantizeReport report_;
  std::int64_t done_ = 0;  // bytes
  std::int64_t all_ = 0;
};

void check(const QuantizeOptions& options) {
  const WeightFormat& weight = options.weight;
  const bool is_static = options.activation == Activation::static_per_tensor;
  const bool keeps_inputs = options.activation == Activation::none;
  if (weight.group != 0 && weight.group != 32 && weight.group != 64 && weight.group != 128) {
    throw OptionError("a group of " + std::to_string(weight.group) + " is not 32, 64, 128 or 0 (a whole row)");
  }
  if (weight.granularity != Granularity::group && (weight.granularity != Granularity::row || weight.group != 0)) {
    throw OptionError("the scales of weights are per row or in groups");
  }
  if (options.activation == Activation::dynamic_per_tensor || (is_packed(weight.type) && is_static)) {
    throw OptionError(std::to_string(bits(weight.type)) + "-bit weights with inputs quantized " +
                      std::string(name(options.activation)) + " are not written");
  }
  if (!is_packed(weight.type) && weight.zero_point) throw OptionError("zero points are for 4-bit weights alone");
  if (keeps_inputs && options.smoothing) {
    throw OptionError("smoothing is for quantized inputs, which this format does not have");
  }
  if (options.smoothing && !(options.smoothing->alpha >= 0 && options.smoothing->alpha <= 1)) {
    throw OptionError("alpha = " + number_text(options.smoothing->alpha) + " is not within 0..1");
  }
  const char* const needs = is_static                                        ? "a static scale of the inputs"
                            : options.smoothing                              ? "smoothing"
                            : options.method == WeightMethod::error_feedback ? "error feedback"
                                                                             : nullptr;
  if (needs && !options.calibration) {
    throw OptionError(std::string(needs) + " needs a calibration file; see docs/how-to/quantize-checkpoint.md");
  }
  if (options.calibration && !is_static && !options.smoothing && options.method == WeightMethod::nearest) {
    throw OptionError(
        "the calibration file has no effect without smoothing, a static scale of the inputs or a method "
        "other than nearest");
  }
}

}  // namespace

QuantizeReport quantize_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                                   const QuantizeOptions& options, const OnProgress& progress) {
  check(options);
  return files::with_file_errors([&] { return Quantizer(from, to, options, progress).run(); });
}

}  // namespace octile::checkpoint
