// The demo's experiment: the same network trained three ways, and the one trained in f32 quantized afterwards.
//
// For each seed the digits are split into kFolds parts again. Each part is tested on by a network that was trained on
// the others, so that every image is tested on once per seed by a network that never saw it. The three ways start from
// the same weights and see the same minibatches in the same order. What is tested is the network after the last step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data.h"
#include "network.h"

namespace octile::digits {

struct Settings {
  std::int64_t epochs = 10;
  std::int64_t seeds = 3;  // 1, 2, 3, ...
  std::int64_t batch = 64;
  std::int64_t hidden = 512;
  int threads = 0;  // 0: all of the machine
};

// Of the first step; from there it falls linearly to zero. Minibatches of fewer than 64 get proportionally less. Chosen
// on the f32 network alone.
inline constexpr double kLearningRate = 0.2;
double learning_rate(const Settings& settings);
inline constexpr std::int64_t kFolds = 5;

// One value per seed.
struct PerSeed {
  std::vector<double> values;

  double mean() const;
  double low() const;
  double high() const;
};

struct WayResult {
  std::string_view id;      // for a program
  std::string_view label;   // for people
  PerSeed accuracy;         // percent of all images
  PerSeed loss;             // the curve's end
  PerSeed seconds;          // of training, all folds together
  std::int64_t kept_bytes;  // for the backward of a full minibatch
  std::string kernels;
  std::vector<std::vector<double>> curves;  // per seed: mean training loss of each epoch, mean of the folds
};

struct FormatResult {
  std::string_view id;
  std::string_view label;
  PerSeed accuracy;  // percent of all images
  std::int64_t weight_bytes;
  std::string kernels;
};

struct Result {
  Settings settings;
  std::string source;  // of the digits
  std::int64_t images = 0;
  std::int64_t steps = 0;  // of each training
  std::vector<WayResult> ways;
  std::vector<FormatResult> formats;
};

// Units of progress, of which `on_progress` reports one at a time together with what is being done.
std::int64_t experiment_length(const Settings& settings);
using OnProgress = std::function<void(const std::string& what)>;

Result run_experiment(const Settings& settings, const Digits& digits, const OnProgress& on_progress);

}  // namespace octile::digits
