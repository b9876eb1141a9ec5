#include "folded.h"

#include <algorithm>
#include <cmath>

#include "octile/smooth_quant.h"
#include "reject.h"

namespace octile::checkpoint {

namespace {

template <class T>
auto as_vector(std::vector<T>& values) {
  return vector(values.data(), static_cast<std::int64_t>(values.size()));
}
auto as_vector(const std::vector<float>& values) {
  return vector(values.data(), static_cast<std::int64_t>(values.size()));
}

}  // namespace

void divide_rows(std::span<float> values, std::span<const float> factors) {
  const std::size_t width = values.size() / factors.size();
  for (std::size_t i = 0; i < values.size(); ++i) values[i] /= factors[i / width];
}

const std::vector<float>* Folded::columns(const std::string& layer) const {
  const auto found = columns_.find(layer);
  return found == columns_.end() ? nullptr : &found->second;
}

const std::vector<float>* Folded::rows(const std::string& tensor) const {
  const auto found = rows_.find(tensor);
  return found == rows_.end() ? nullptr : &found->second;
}

std::optional<double> Folded::search(const SmoothingGroup& group, const std::vector<float>& channel_max,
                                     const std::function<void()>& tell) const {
  const Layer& first = group.layers.front();
  if (!calibration_.has_second_moments(first)) {
    reject(options_.calibration->string(), ": has no input_second_moments for ", quoted(first.name),
           ", which the search for alpha needs");
  }
  std::vector<float> weights;  // stacked
  for (const Layer& layer : group.layers) {
    const std::vector<float> weight = read_weight(checkpoint_, layer);
    weights.insert(weights.end(), weight.begin(), weight.end());
  }
  const auto n = static_cast<std::int64_t>(weights.size()) / first.k;
  const std::vector<float> moments = calibration_.second_moments(first);
  const std::vector<float> excess = calibration_.excess(first);
  SmoothingSearchDescription description = {.n = n, .k = first.k, .threads = options_.threads};
  SmoothingSearchArgs args = {.weight = matrix(weights.data(), n, first.k),
                              .input_channel_max = as_vector(channel_max),
                              .second_moments = matrix(moments.data(), first.k, first.k),
                              .rows = calibration_.rows(first),
                              .on_step = tell};
  // A scale per token is that of the row itself, so nothing is clamped.
  if (options_.activation == Activation::static_per_tensor) {
    description.calibration_rows = args.rows;
    if (!excess.empty()) args.input_excess = as_vector(excess);
  }
  const SmoothingSearchResult found = search_smoothing(description, args);
  if (!found.smooth) return std::nullopt;
  return found.alpha;
}

std::vector<float> Folded::factors(const SmoothingGroup& group, const std::function<void()>& tell,
                                   std::optional<double>& alpha) const {
  const std::int64_t k = group.layers.front().k;
  std::vector<float> channel_max(static_cast<std::size_t>(k));
  Calibrator weight_max({.features = k, .threads = options_.threads});
  for (const Layer& layer : group.layers) {
    const std::vector<float> more = calibration_.channel_max(layer);
    for (std::size_t j = 0; j < more.size(); ++j) channel_max[j] = std::max(channel_max[j], more[j]);
    const std::vector<float> weight = read_weight(checkpoint_, layer);
    weight_max.observe(matrix(weight.data(), layer.n, layer.k));
    checkpoint_.release(layer.weight_tensor());
  }
  alpha = options_.smoothing->search ? search(group, channel_max, tell) : options_.smoothing->alpha;
  if (!alpha) return {};
  std::vector<float> factors(static_cast<std::size_t>(k));
  const std::vector<float> weight_channel_max = weight_max.channel_max();
  SmoothingArgs args;
  args.alpha = *alpha;
  args.input_channel_max = as_vector(channel_max);
  args.weight_channel_max = as_vector(weight_channel_max);
  args.factors = as_vector(factors);
  smoothing_factors(args);
  return factors;
}

// Returns why the tensor cannot be divided, or nothing. A norm's weight is rounded to the file's type after the
// division. The columns are multiplied, and the bias divided, by the quotient of the old and the rounded weight, so
// that the model computes the same.
std::string Folded::divide(const TensorInfo& tensor, std::vector<float>& factors) const {
  const std::vector<float> old = checkpoint_.values(tensor.name);
  std::vector<float> divided = old;
  divide_rows(divided, factors);
  round_values(tensor.type, divided);
  checkpoint_.release(tensor.name);
  const bool is_norm = tensor.shape.size() == 1 && tensor.name.ends_with(".weight");
  for (std::size_t i = 0; i < old.size(); ++i) {
    const bool is_lost = is_norm && old[i] != 0 && (divided[i] == 0 || !std::isfinite(old[i] / divided[i]));
    if (!std::isfinite(divided[i]) || is_lost) {
      return tensor.name + ", divided, does not fit " + std::string(name(tensor.type)) + ": element " +
             std::to_string(i) + " is " + number_text(old[i]) + ", the factor " +
             number_text(factors[i / (old.size() / factors.size())]);
    }
    if (is_norm && old[i] != 0) factors[i] = old[i] / divided[i];
  }
  return {};
}

void Folded::fold(const SmoothingGroup& group, QuantizeReport& report, const std::function<void()>& tell) {
  const auto skip = [&](const std::string& reason) {
    for (const Layer& layer : group.layers) report.not_smoothed.push_back({layer.name, reason});
  };
  for (const Layer& layer : group.layers) {
    if (!calibration_.has(layer)) return skip("the calibration lacks " + layer.name);
  }
  std::optional<double> alpha;
  std::vector<float> factors =
      of_layer(checkpoint_, group.layers.front().name, [&] { return this->factors(group, tell, alpha); });
  if (!alpha) return skip("no alpha would gain more than 0.2 dB on unseen inputs");
  SmoothedReport done = {group.before, {}, *alpha};
  const char* const parts[] = {".weight", ".bias"};  // the weight first: it may change the factors
  for (const char* const part : parts) {
    const TensorInfo* const tensor = checkpoint_.find(group.before + part);
    const std::string reason = tensor ? divide(*tensor, factors) : "";
    if (!reason.empty()) return skip(reason);
  }
  for (const char* const part : parts) rows_[group.before + part] = factors;
  for (const Layer& layer : group.layers) {
    columns_[layer.name] = factors;
    done.layers.push_back(layer.name);
  }
  report.smoothed.push_back(std::move(done));
}

}  // namespace octile::checkpoint
