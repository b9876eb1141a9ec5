#include "folded.h"

#include <algorithm>
#include <cmath>

#include "octile/smooth_quant.h"

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

Folded::Folded(const Checkpoint& checkpoint, const Calibration& calibration, const QuantizeOptions& options)
    : checkpoint_(checkpoint), calibration_(calibration), options_(options) {}

void Folded::plan(const std::vector<Layer>& layers, QuantizeReport& report) {
  const SmoothingPlan plan = plan_smoothing(checkpoint_, layers);
  report.not_smoothed = plan.others;
  for (const SmoothingGroup& group : plan.groups) fold(group, report);
}

const std::vector<float>* Folded::columns(const std::string& layer) const {
  const auto found = columns_.find(layer);
  return found == columns_.end() ? nullptr : &found->second;
}

const std::vector<float>* Folded::rows(const std::string& tensor) const {
  const auto found = rows_.find(tensor);
  return found == rows_.end() ? nullptr : &found->second;
}

double Folded::search(const SmoothingGroup& group, const std::vector<float>& channel_max) const {
  const Layer& first = group.layers.front();
  if (!calibration_.has_second_moments(first)) {
    throw FileError(options_.calibration->string() + ": has no input_second_moments for \"" + printable(first.name) +
                    "\", which the search for alpha needs");
  }
  std::vector<float> weights;  // one below the other
  for (const Layer& layer : group.layers) {
    const std::vector<float> weight = read_weight(checkpoint_, layer);
    weights.insert(weights.end(), weight.begin(), weight.end());
  }
  const auto n = static_cast<std::int64_t>(weights.size()) / first.k;
  const std::vector<float> moments = calibration_.second_moments(first);
  const SmoothingSearchDescription description = {.n = n, .k = first.k, .threads = options_.threads};
  return search_smoothing(description, {.weight = matrix(weights.data(), n, first.k),
                                        .input_channel_max = as_vector(channel_max),
                                        .second_moments = matrix(moments.data(), first.k, first.k),
                                        .rows = calibration_.rows(first)})
      .alpha;
}

void Folded::fold(const SmoothingGroup& group, QuantizeReport& report) {
  const auto skip = [&](const std::string& reason) {
    for (const Layer& layer : group.layers) report.not_smoothed.push_back({layer.name, reason});
  };
  for (const Layer& layer : group.layers) {
    if (!calibration_.has(layer)) return skip("the calibration lacks " + layer.name);
  }
  const std::int64_t k = group.layers.front().k;
  std::vector<float> channel_max = calibration_.channel_max(group.layers.front());
  Calibrator weight_max({.features = k, .threads = options_.threads});
  for (const Layer& layer : group.layers) {
    const std::vector<float> more = calibration_.channel_max(layer);
    for (std::size_t j = 0; j < more.size(); ++j) channel_max[j] = std::max(channel_max[j], more[j]);
    const std::vector<float> weight = read_weight(checkpoint_, layer);
    weight_max.observe(matrix(weight.data(), layer.n, layer.k));
    checkpoint_.release(layer.weight_tensor());
  }
  SmoothingArgs args;
  args.alpha = options_.smoothing->search ? search(group, channel_max) : options_.smoothing->alpha;
  std::vector<float> factors(static_cast<std::size_t>(k));
  const std::vector<float> weight_channel_max = weight_max.channel_max();
  args.input_channel_max = as_vector(channel_max);
  args.weight_channel_max = as_vector(weight_channel_max);
  args.factors = as_vector(factors);
  smoothing_factors(args);

  // A norm's weight is rounded to the file's type once it is divided. What that has really divided by is what the
  // columns are multiplied by, so that the model computes what it did.
  const TensorInfo& before = checkpoint_.get(group.before + ".weight");
  if (before.shape.size() == 1) {
    const std::vector<float> old = checkpoint_.values(before.name);
    std::vector<float> divided(old.size());
    for (std::size_t j = 0; j < old.size(); ++j) divided[j] = old[j] / factors[j];
    round_values(before.type, divided);
    for (std::size_t j = 0; j < old.size(); ++j) {
      if (old[j] == 0) continue;
      factors[j] = old[j] / divided[j];
      // Zero where the quotient overflowed, infinite where it was lost.
      if (!std::isfinite(factors[j]) || factors[j] == 0) {
        return skip(group.before + ", divided, does not fit " + std::string(name(before.type)));
      }
    }
  }
  rows_[group.before + ".weight"] = factors;
  if (checkpoint_.find(group.before + ".bias")) rows_[group.before + ".bias"] = factors;
  SmoothedReport done = {group.before, {}, args.alpha};
  for (const Layer& layer : group.layers) {
    columns_[layer.name] = factors;
    done.layers.push_back(layer.name);
  }
  report.smoothed.push_back(std::move(done));
}

}  // namespace octile::checkpoint
