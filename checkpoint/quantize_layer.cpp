#include "quantize_layer.h"

#include <algorithm>
#include <cmath>

#include "octile/checkpoint/measure.h"
#include "reject.h"

namespace octile::checkpoint {

namespace {

constexpr float kInputLevels = 127;

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const Bytes bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

std::vector<TensorSpec> quantized_tensors(const Checkpoint& checkpoint, const Layer& layer,
                                          const QuantizeOptions& options) {
  const ElementType type = checkpoint.get(layer.weight_tensor()).type;
  const DType level = options.weight.type;
  const std::int64_t groups = groups_of(options.weight, layer.k);
  const TensorSpec scale = {layer.name + ".weight_scale", type, {layer.n, groups}};
  std::vector<TensorSpec> specs;
  if (kind_of(options.weight, options.activation) == LayerKind::pack_quantized) {
    specs = {{layer.name + ".weight_packed", ElementType::s32, {layer.n, words_for(layer.k, level)}},
             scale,
             {layer.name + ".weight_shape", ElementType::s64, {2}}};
    if (options.weight.zero_point) {
      specs.push_back({layer.name + ".weight_zero_point", ElementType::s32, {words_for(layer.n, level), groups}});
    }
  } else {
    specs = {{layer.name + ".weight", ElementType::s8, {layer.n, layer.k}}, scale};
  }
  if (options.activation == Activation::static_per_tensor) specs.push_back({layer.name + ".input_scale", type, {1}});
  return specs;
}

std::vector<float> LayerQuantizer::smoothed_weight(const Layer& layer) const {
  std::vector<float> values = read_weight(checkpoint_, layer);
  const auto k = static_cast<std::size_t>(layer.k);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    const double value = read_weight_f64(checkpoint_, layer)[i];
    reject(checkpoint_.path().string(), ": ", quoted(layer.name), ": the weight is ", number_text(value), " at (",
           i / k, ", ", i % k, ")", (std::isfinite(value) ? ", which is beyond f32" : ""));
  }
  if (const auto* const rows = folded_ ? folded_->rows(layer.weight_tensor()) : nullptr) divide_rows(values, *rows);
  if (const auto* const factors = columns(layer)) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= (*factors)[i % k];
  }
  return values;
}

std::vector<float> LayerQuantizer::smoothed_moments(const Layer& layer) const {
  std::vector<float> moments = calibration_->second_moments(layer);
  const auto* const factors = columns(layer);
  if (!factors) return moments;
  const auto k = static_cast<std::size_t>(layer.k);
  for (std::size_t i = 0; i < k; ++i) {
    for (std::size_t j = 0; j < k; ++j) moments[i * k + j] = moments[i * k + j] / (*factors)[i] / (*factors)[j];
  }
  return moments;
}

float LayerQuantizer::input_scale(const Layer& layer, ElementType type) const {
  const std::vector<float> channel_max = calibration_->channel_max(layer);
  const auto* const factors = columns(layer);
  float max = 0;
  for (std::size_t j = 0; j < channel_max.size(); ++j) {
    const float value = factors ? channel_max[j] / (*factors)[j] : channel_max[j];
    max = std::max(max, value);
  }
  float scale = max / kInputLevels;
  if (max == 0) scale = 1;  // every level is 0
  round_values(type, {&scale, 1});
  if (std::isfinite(scale) && scale > 0) return scale;
  reject(options_.calibration->string(), ": the largest input of ", quoted(layer.name), " is ", number_text(max),
         ", which gives no scale in ", name(type));
}

QuantizedWeight LayerQuantizer::quantize(const Layer& layer, const std::vector<float>& values, ElementType type) const {
  QuantizedWeight weight;
  weight.n = layer.n;
  weight.k = layer.k;
  weight.format = options_.weight;
  weight.q.resize(static_cast<std::size_t>(weight.n * weight.row_bytes()));
  weight.scale.resize(static_cast<std::size_t>(weight.n * weight.groups()));
  WeightQuantizerDescription description = {.n = layer.n, .k = layer.k, .weight = options_.weight};
  description.scale = type == ElementType::f16 ? DType::f16 : type == ElementType::bf16 ? DType::bf16 : DType::f32;
  description.method = options_.method;
  description.threads = options_.threads;
  WeightQuantizerArgs args;
  args.weight = matrix(values.data(), layer.n, layer.k);
  const auto scale_view = [&](auto* data) {
    return options_.weight.granularity == Granularity::row ? vector(data, layer.n)
                                                           : matrix(data, layer.n, weight.groups());
  };
  args.scale = scale_view(weight.scale.data());
  args.q = weight.values();
  if (options_.weight.zero_point) {
    weight.zero_point.resize(weight.scale.size());
    args.zero_point = scale_view(weight.zero_point.data());
  }
  std::vector<float> moments;
  if (options_.method != WeightMethod::nearest && calibration_ && calibration_->has_second_moments(layer)) {
    moments = smoothed_moments(layer);
    args.second_moments = matrix(moments.data(), layer.k, layer.k);
  }
  of_layer(checkpoint_, layer.name, [&] { quantize_weight(description, args); });
  return weight;
}

LayerReport LayerQuantizer::write(const Layer& layer, SafetensorsWriter& writer) const {
  const ElementType type = checkpoint_.get(layer.weight_tensor()).type;
  const std::vector<float> values = smoothed_weight(layer);
  const QuantizedWeight weight = quantize(layer, values, type);

  std::vector<std::vector<std::byte>> tensors;
  if (kind_of(options_.weight, options_.activation) == LayerKind::pack_quantized) {
    tensors = {bytes_of(pack_levels(weight)), write_values(type, weight.scale),
               bytes_of(std::vector<std::int64_t>{layer.n, layer.k})};
    if (!weight.zero_point.empty()) tensors.push_back(bytes_of(pack_zero_points(weight)));
  } else {
    tensors = {bytes_of(weight.q), write_values(type, weight.scale)};
  }
  if (options_.activation == Activation::static_per_tensor) {
    const float scale = input_scale(layer, type);
    tensors.push_back(write_values(type, {&scale, 1}));
  }

  LayerReport report = {.name = layer.name, .n = layer.n, .k = layer.k};
  report.bytes_before = size_of(checkpoint_, layer);
  const std::vector<TensorSpec> specs = quantized_tensors(checkpoint_, layer, options_);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    writer.append(specs[i].name, tensors.at(i));
    report.bytes += tensors[i].size();
  }
  measure(layer, values, weight, report);
  checkpoint_.release(layer.weight_tensor());
  return report;
}

void LayerQuantizer::measure(const Layer& layer, const std::vector<float>& values, const QuantizedWeight& weight,
                             LayerReport& report) const {
  // A value too small for f32 is no zero in the file.
  std::vector<double> exact;
  if (checkpoint_.get(layer.weight_tensor()).type == ElementType::f64) {
    exact = read_weight_f64(checkpoint_, layer);
    const auto* const rows = folded_ ? folded_->rows(layer.weight_tensor()) : nullptr;
    const auto* const factors = columns(layer);
    const auto k = static_cast<std::size_t>(layer.k);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      if (rows) exact[i] /= static_cast<double>((*rows)[i / k]);
      if (factors) exact[i] *= static_cast<double>((*factors)[i % k]);
    }
  }
  Difference difference;
  std::vector<float> dequantized(static_cast<std::size_t>(layer.k));
  std::vector<double> row(dequantized.size());
  for (std::int64_t i = 0; i < layer.n; ++i) {
    dequantize_row(weight, i, dequantized);
    const auto at = static_cast<std::ptrdiff_t>(i * layer.k);
    if (exact.empty()) {
      row.assign(values.begin() + at, values.begin() + at + layer.k);
    } else {
      row.assign(exact.begin() + at, exact.begin() + at + layer.k);
    }
    const std::vector<double> quantized(dequantized.begin(), dequantized.end());
    difference.add(row, quantized);
    report.vanished += count_vanished(row, quantized, weight.run());
  }
  report.sqnr = difference.sqnr();
  report.max_error = difference.max_error;
}

}  // namespace octile::checkpoint
