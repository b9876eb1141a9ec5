#include "octile/checkpoint/quantize.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "config.h"
#include "files.h"
#include "folded.h"
#include "octile/checkpoint/measure.h"

namespace octile::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr float kInputLevels = 127;

// A finished tensor of the result, or the plan of one.
struct Output {
  TensorSpec spec;
  std::vector<std::byte> bytes = {};
};

std::vector<std::byte> bytes_of(const std::vector<std::int32_t>& words) {
  const Bytes bytes = std::as_bytes(std::span(words));
  return {bytes.begin(), bytes.end()};
}

class Quantizer {
 public:
  Quantizer(const fs::path& from, const fs::path& to, const QuantizeOptions& options, const OnProgress& progress)
      : options_(options), progress_(progress), checkpoint_(Checkpoint::open(from)), to_(to) {
    if (options.calibration) calibration_.emplace(Calibration::open(*options.calibration));
  }

  QuantizeReport run() {
    check_target();
    choose_layers();
    check_calibration();
    std::optional<Folded> folded;
    if (options_.smoothing) {
      folded.emplace(checkpoint_, *calibration_, options_);
      folded->plan(layers_, report_);
      folded_ = &*folded;
    }
    for (const Layer& layer : layers_) {
      for (const std::string& tensor : layer.tensors) layer_of_.emplace(tensor, &layer);
    }
    for (const Checkpoint::Shard& shard : checkpoint_.shards()) {
      for (const TensorInfo& tensor : shard.file.tensors()) all_ += static_cast<std::int64_t>(tensor.size());
    }
    report_.size_before = checkpoint_.size();
    checkpoint_.is_folder() ? write_folder() : write_file();
    return std::move(report_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw FileError(checkpoint_.path().string() + ": " + what); }

  // What would fail at the end fails at once.
  void check_target() const {
    const fs::path from = fs::weakly_canonical(checkpoint_.path());
    const fs::path to = fs::weakly_canonical(to_);
    if (from == to) throw FileError("cannot write " + to_.string() + ": it is what is read");
    const auto [end, ignored] = std::mismatch(from.begin(), from.end(), to.begin(), to.end());
    if (checkpoint_.is_folder() && end == from.end()) {
      throw FileError("cannot write " + to_.string() + ": it is inside of what is read");
    }
    const fs::path parent = to_.has_parent_path() ? to_.parent_path() : ".";
    if (!fs::is_directory(parent)) {
      throw FileError("cannot write " + to_.string() + ": there is no folder " + parent.string());
    }
    if (!fs::exists(to_)) return;
    if (!options_.overwrite) throw FileError("cannot write " + to_.string() + ": it is there already (see --force)");
    if (fs::is_directory(to_) != checkpoint_.is_folder()) {
      throw FileError("cannot write " + to_.string() + ": it is a " + (fs::is_directory(to_) ? "folder" : "file") +
                      ", what is read is not");
    }
    if (!checkpoint_.is_folder()) return;
    // The folder goes as a whole, so nothing else may be in it.
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(to_)) {
      const fs::path name = entry.path().lexically_relative(to_);
      if (fs::exists(checkpoint_.path() / name) || name.extension() == ".safetensors" || name == kIndexFile ||
          name == kConfigFile) {
        continue;
      }
      throw FileError("cannot replace " + to_.string() + ": " + name.string() + " in it does not come from " +
                      checkpoint_.path().string());
    }
  }

  void choose_layers() {
    LayerTable table = find_layers(checkpoint_, options_.selection);
    report_.left_out = std::move(table.left_out);
    if (!checkpoint_.config().method.empty()) {
      fail("is quantized already (" + printable(checkpoint_.config().method) + ")");
    }
    for (Layer& layer : table.layers) {
      if (layer.kind != LayerKind::plain) {
        fail("\"" + printable(layer.name) + "\" is quantized already (" + std::string(name(layer.kind)) + ")");
      }
      const std::string reason = refusal(layer);
      if (reason.empty()) {
        layers_.push_back(std::move(layer));
      } else {
        report_.left_out.push_back({layer.name, reason, true});
      }
    }
    if (layers_.empty()) fail("there is no linear layer to quantize");
  }

  std::string refusal(const Layer& layer) const {
    if (options_.format != Format::w4a16) {
      if (layer.k <= kMaxContraction) return {};
      return std::to_string(layer.k) + " inputs are more than " + std::to_string(kMaxContraction);
    }
    if (options_.group == 0 || layer.k % options_.group == 0) return {};
    return std::to_string(layer.k) + " inputs are no multiple of the group, " + std::to_string(options_.group);
  }

  void check_calibration() const {
    const auto need = [&](auto has, const std::string& what) {
      std::string first;
      std::size_t missing = 0;
      for (const Layer& layer : layers_) {
        if (has(layer)) continue;
        if (missing++ == 0) first = layer.name;
      }
      if (missing == 0) return;
      throw FileError(options_.calibration->string() + ": has no " + what + " for \"" + printable(first) + "\"" +
                      (missing > 1 ? " and " + std::to_string(missing - 1) + " more layers" : "") +
                      "; leave such layers out with --ignore, or calibrate them");
    };
    if (options_.format == Format::w8a8_static) {
      need([&](const Layer& layer) { return calibration_->has(layer); }, "input_channel_max");
    }
    if (options_.method == WeightMethod::error_feedback) {
      need([&](const Layer& layer) { return calibration_->has_second_moments(layer); }, "input_second_moments");
    }
  }

  // ---- One layer ----

  // What the layer will be in the file, without its bytes.
  std::vector<Output> plan(const Layer& layer) const {
    const ElementType type = checkpoint_.get(layer.weight_tensor()).type;
    const auto up = [](std::int64_t count) { return (count + 7) / 8; };
    if (options_.format == Format::w4a16) {
      const std::int64_t groups = options_.group == 0 ? 1 : layer.k / options_.group;
      std::vector<Output> outputs = {{{layer.name + ".weight_packed", ElementType::s32, {layer.n, up(layer.k)}}},
                                     {{layer.name + ".weight_scale", type, {layer.n, groups}}},
                                     {{layer.name + ".weight_shape", ElementType::s64, {2}}}};
      if (options_.zero_points) {
        outputs.push_back({{layer.name + ".weight_zero_point", ElementType::s32, {up(layer.n), groups}}});
      }
      return outputs;
    }
    std::vector<Output> outputs = {{{layer.name + ".weight", ElementType::s8, {layer.n, layer.k}}},
                                   {{layer.name + ".weight_scale", type, {layer.n, 1}}}};
    if (options_.format == Format::w8a8_static) outputs.push_back({{layer.name + ".input_scale", type, {1}}});
    return outputs;
  }

  std::vector<float> smoothed_weight(const Layer& layer) const {
    std::vector<float> values = read_weight(checkpoint_, layer);
    const auto* const columns = folded_ ? folded_->columns(layer.name) : nullptr;
    const auto* const rows = folded_ ? folded_->rows(layer.weight_tensor()) : nullptr;
    for (std::int64_t i = 0; i < layer.n; ++i) {
      for (std::int64_t j = 0; j < layer.k; ++j) {
        float& value = values[static_cast<std::size_t>(i * layer.k + j)];
        if (!std::isfinite(value)) {
          fail("\"" + printable(layer.name) + "\": the weight is " + std::to_string(value) + " at (" +
               std::to_string(i) + ", " + std::to_string(j) + ")");
        }
        if (rows) value /= (*rows)[static_cast<std::size_t>(i)];
        if (columns) value *= (*columns)[static_cast<std::size_t>(j)];
      }
    }
    return values;
  }

  std::vector<float> smoothed_moments(const Layer& layer) const {
    std::vector<float> moments = calibration_->second_moments(layer);
    const auto* const factors = folded_ ? folded_->columns(layer.name) : nullptr;
    if (!factors) return moments;
    const auto k = static_cast<std::size_t>(layer.k);
    for (std::size_t i = 0; i < k; ++i) {
      for (std::size_t j = 0; j < k; ++j) moments[i * k + j] = moments[i * k + j] / (*factors)[i] / (*factors)[j];
    }
    return moments;
  }

  float input_scale(const Layer& layer, ElementType type) const {
    const std::vector<float> channel_max = calibration_->channel_max(layer);
    const auto* const factors = folded_ ? folded_->columns(layer.name) : nullptr;
    float most = 0;
    for (std::size_t j = 0; j < channel_max.size(); ++j) {
      const float value = factors ? channel_max[j] / (*factors)[j] : channel_max[j];
      most = std::max(most, value);
    }
    float scale = most / kInputLevels;
    if (most == 0) scale = 1;  // every level is 0 then
    round_values(type, {&scale, 1});
    if (std::isfinite(scale) && scale > 0) return scale;
    throw FileError(options_.calibration->string() + ": the largest input of \"" + printable(layer.name) + "\" is " +
                    std::to_string(most) + ", which gives no scale in " + std::string(name(type)));
  }

  QuantizedWeight quantize(const Layer& layer, const std::vector<float>& values, ElementType type) const {
    const bool w4 = options_.format == Format::w4a16;
    QuantizedWeight weight;
    weight.n = layer.n;
    weight.k = layer.k;
    weight.type = w4 ? DType::s4 : DType::s8;
    weight.group = w4 ? options_.group : 0;
    weight.q.resize(static_cast<std::size_t>(weight.n * weight.row_bytes()));
    weight.scale.resize(static_cast<std::size_t>(weight.n * weight.groups()));
    WeightQuantizerDescription description = {.n = layer.n, .k = layer.k};
    description.weight = w4 ? WeightFormat::s4_group : WeightFormat::s8_per_channel;
    if (w4) description.group = options_.group;
    description.zero_point = w4 && options_.zero_points;
    description.scale = type == ElementType::f16 ? DType::f16 : type == ElementType::bf16 ? DType::bf16 : DType::f32;
    description.method = options_.method;
    description.threads = options_.threads;
    WeightQuantizerArgs args;
    args.weight = matrix(values.data(), layer.n, layer.k);
    const auto scale_view = [&](auto* data) {
      return w4 ? matrix(data, layer.n, weight.groups()) : vector(data, layer.n);
    };
    args.scale = scale_view(weight.scale.data());
    args.q = w4 ? matrix_s4(weight.q.data(), layer.n, layer.k)
                : matrix(reinterpret_cast<std::int8_t*>(weight.q.data()), layer.n, layer.k);
    if (description.zero_point) {
      weight.zero_point.resize(weight.scale.size());
      args.zero_point = scale_view(weight.zero_point.data());
    }
    std::vector<float> moments;
    if (options_.method != WeightMethod::nearest && calibration_ && calibration_->has_second_moments(layer)) {
      moments = smoothed_moments(layer);
      args.second_moments = matrix(moments.data(), layer.k, layer.k);
    }
    quantize_weight(description, args);
    return weight;
  }

  LayerReport write_layer(const Layer& layer, SafetensorsWriter& writer) const {
    const ElementType type = checkpoint_.get(layer.weight_tensor()).type;
    const std::vector<float> values = smoothed_weight(layer);
    const QuantizedWeight weight = quantize(layer, values, type);
    checkpoint_.release(layer.weight_tensor());

    std::vector<Output> outputs = plan(layer);
    const auto* const q = reinterpret_cast<const std::byte*>(weight.q.data());
    if (weight.type == DType::s8) {
      outputs[0].bytes.assign(q, q + weight.q.size());
    } else {
      const std::int64_t shape[2] = {layer.n, layer.k};
      const Bytes shape_bytes = std::as_bytes(std::span(shape));
      outputs[0].bytes = bytes_of(pack_levels(weight));
      outputs[2].bytes.assign(shape_bytes.begin(), shape_bytes.end());
      if (!weight.zero_point.empty()) outputs[3].bytes = bytes_of(pack_zero_points(weight));
    }
    outputs[1].bytes = write_values(type, weight.scale);
    if (options_.format == Format::w8a8_static) {
      const float scale = input_scale(layer, type);
      outputs[2].bytes = write_values(type, {&scale, 1});
    }

    LayerReport report = {.name = layer.name, .n = layer.n, .k = layer.k};
    report.bytes_before = checkpoint_.get(layer.weight_tensor()).size();
    for (const Output& output : outputs) {
      writer.append(output.spec.name, output.bytes);
      report.bytes += output.bytes.size();
    }
    Difference difference;
    std::vector<float> row(static_cast<std::size_t>(layer.k));
    for (std::int64_t i = 0; i < layer.n; ++i) {
      dequantize_row(weight, i, row);
      difference.add(std::span(values).subspan(static_cast<std::size_t>(i * layer.k), row.size()), row);
    }
    report.sqnr = difference.sqnr();
    report.max_error = difference.max_error;
    return report;
  }

  // ---- Files ----

  // Copied, or divided by the factors of the layers behind it.
  void write_other(const TensorInfo& tensor, SafetensorsWriter& writer) const {
    const auto* const rows = folded_ ? folded_->rows(tensor.name) : nullptr;
    if (!rows) {
      writer.append(tensor.name, checkpoint_.bytes(tensor.name));
    } else {
      std::vector<float> values = checkpoint_.values(tensor.name);
      const std::size_t width = values.size() / rows->size();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] /= (*rows)[i / width];
      writer.append(tensor.name, write_values(tensor.type, values));
    }
    checkpoint_.release(tensor.name);
  }

  void write_shard(const Checkpoint::Shard& shard, const fs::path& path, const Metadata& metadata) {
    std::vector<TensorSpec> specs;
    for (const TensorInfo& tensor : shard.file.tensors()) {
      const auto found = layer_of_.find(tensor.name);
      if (found == layer_of_.end()) {
        specs.push_back({tensor.name, tensor.type, tensor.shape});
      } else {
        for (Output& output : plan(*found->second)) specs.push_back(std::move(output.spec));
      }
    }
    for (const TensorSpec& spec : specs) {
      index_[spec.name] = shard.file_name;
      tensor_bytes_ += size_of(spec.type, spec.shape, spec.name);
    }
    SafetensorsWriter writer(path, specs, metadata);
    for (const TensorInfo& tensor : shard.file.tensors()) {
      if (progress_) progress_(done_, all_, tensor.name);
      const auto found = layer_of_.find(tensor.name);
      if (found == layer_of_.end()) {
        write_other(tensor, writer);
      } else {
        report_.layers.push_back(write_layer(*found->second, writer));
      }
      done_ += static_cast<std::int64_t>(tensor.size());
    }
    if (progress_) progress_(done_, all_, shard.file_name);
    writer.finish(options_.overwrite);
    report_.size_after += writer.size();
  }

  QuantizationNote note() const {
    QuantizationNote note;
    note.weight_bits = options_.format == Format::w4a16 ? 4 : 8;
    note.group = options_.format == Format::w4a16 ? options_.group : 0;
    note.zero_points = options_.format == Format::w4a16 && options_.zero_points;
    note.input = options_.format == Format::w8a8          ? QuantizationNote::Input::dynamic_per_token
                 : options_.format == Format::w8a8_static ? QuantizationNote::Input::static_per_tensor
                                                          : QuantizationNote::Input::none;
    for (const LeftOut& left : report_.left_out) {
      if (left.linear) note.ignore.push_back(left.name);
    }
    std::sort(note.ignore.begin(), note.ignore.end());
    return note;
  }

  void write_file() {
    const Checkpoint::Shard& shard = checkpoint_.shards().front();
    Metadata metadata = shard.file.metadata();
    metadata["quantization_config"] = describe_quantization(note());
    write_shard(shard, to_, metadata);
  }

  void write_folder() {
    const fs::path target = to_.has_filename() ? to_ : to_.parent_path();
    const fs::path folder = files::temporary_name(target);
    fs::remove_all(folder);
    fs::create_directory(folder);
    try {
      fill(folder);
      files::move_into_place(folder, target, options_.overwrite);
    } catch (...) {
      std::error_code ignored;
      fs::remove_all(folder, ignored);
      throw;
    }
  }

  void fill(const fs::path& folder) {
    std::set<std::string> written = {std::string(kIndexFile), std::string(kConfigFile)};
    for (const Checkpoint::Shard& shard : checkpoint_.shards()) {
      write_shard(shard, folder / shard.file_name, shard.file.metadata());
      written.insert(shard.file_name);
    }
    if (checkpoint_.has_index()) {
      files::write_text(folder / kIndexFile, write_index(index_, tensor_bytes_));
    }
    files::write_text(folder / kConfigFile, add_quantization(checkpoint_.config_text(), note()));
    copy_others(checkpoint_.path(), folder, written);
  }

  // Links to files are followed, as model caches use them; links to folders are not, since they may lead back.
  void copy_others(const fs::path& from, const fs::path& to, const std::set<std::string>& except) const {
    for (const fs::directory_entry& entry : fs::directory_iterator(from)) {
      const fs::path name = entry.path().filename();
      if (except.count(name.string()) != 0) continue;
      if (progress_) progress_(done_, all_, name.string());
      if (entry.is_directory()) {
        if (entry.is_symlink()) throw FileError(entry.path().string() + ": a link to a folder is not followed");
        fs::create_directory(to / name);
        copy_others(entry.path(), to / name, {});
      } else if (entry.is_regular_file()) {
        files::copy(entry.path(), to / name);
      } else {
        throw FileError(entry.path().string() + ": neither a file nor a folder");
      }
    }
  }

  const QuantizeOptions& options_;
  const OnProgress& progress_;
  Checkpoint checkpoint_;
  fs::path to_;
  std::optional<Calibration> calibration_;
  const Folded* folded_ = nullptr;
  std::vector<Layer> layers_;
  std::map<std::string, const Layer*> layer_of_;  // by tensor
  std::map<std::string, std::string> index_;      // file by tensor
  std::uint64_t tensor_bytes_ = 0;
  QuantizeReport report_;
  std::int64_t done_ = 0;  // bytes
  std::int64_t all_ = 0;
};

void check(const QuantizeOptions& options) {
  const bool w4 = options.format == Format::w4a16;
  if (w4 && options.group != 0 && options.group != 32 && options.group != 64 && options.group != 128) {
    throw FileError("a group of " + std::to_string(options.group) + " is none of 32, 64, 128, 0 (a whole row)");
  }
  if (!w4 && options.zero_points) throw FileError("zero points are of w4a16 alone");
  if (w4 && options.smoothing) throw FileError("smoothing is for quantized activations, and w4a16 has none");
  if (options.smoothing && !(options.smoothing->alpha >= 0 && options.smoothing->alpha <= 1)) {
    throw FileError("alpha = " + std::to_string(options.smoothing->alpha) + " is not within 0..1");
  }
  const char* const needs = options.format == Format::w8a8_static            ? "w8a8-static"
                            : options.smoothing                              ? "smoothing"
                            : options.method == WeightMethod::error_feedback ? "error feedback"
                                                                             : nullptr;
  if (needs && !options.calibration) throw FileError(std::string(needs) + " needs a calibration file");
}

}  // namespace

QuantizeReport quantize_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                                   const QuantizeOptions& options, const OnProgress& progress) {
  check(options);
  return Quantizer(from, to, options, progress).run();
}

}  // namespace octile::checkpoint
