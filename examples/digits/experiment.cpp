#include "experiment.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>

namespace octile::digits {

namespace {

std::string_view id(Way way) {
  switch (way) {
    case Way::f32:
      return "f32";
    case Way::int8_forward:
      return "int8_forward";
    case Way::int8:
      return "int8";
  }
  return {};
}

std::string_view label(Way way) {
  switch (way) {
    case Way::f32:
      return "f32";
    case Way::int8_forward:
      return "int8 forward";
    case Way::int8:
      return "int8 forward and backward";
  }
  return {};
}

// Row-major images and their labels, gathered from the digits in the order of `numbers`.
struct Images {
  Images(const Digits& digits, const std::int64_t* numbers, std::int64_t size) : labels(size) {
    pixels.resize(size * kPixels);
    for (std::int64_t i = 0; i < size; ++i) {
      std::copy_n(digits.pixels.data() + numbers[i] * kPixels, kPixels, pixels.data() + i * kPixels);
      labels[i] = digits.labels[numbers[i]];
    }
  }
  std::vector<float> pixels;
  std::vector<int> labels;
};

// The mean of -log softmax(scores)[label] over the minibatch, and its gradient by the scores.
double cross_entropy(const float* scores, const std::vector<int>& labels, std::vector<float>& dscores) {
  double loss = 0;
  const auto m = static_cast<float>(labels.size());
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const float* s = scores + i * kClasses;
    float* d = dscores.data() + i * kClasses;
    const float top = *std::max_element(s, s + kClasses);
    float sum = 0;
    for (int c = 0; c < kClasses; ++c) sum += d[c] = std::exp(s[c] - top);
    for (int c = 0; c < kClasses; ++c) d[c] = (d[c] / sum - (c == labels[i] ? 1.0f : 0.0f)) / m;
    loss += std::log(sum) + top - s[labels[i]];
  }
  return loss / static_cast<double>(labels.size());
}

// Minibatches of nearly the same size, none above `batch`.
std::int64_t count_steps(std::int64_t images, std::int64_t batch) { return (images + batch - 1) / batch; }

struct Training {
  std::vector<double> curve;  // mean loss of each epoch
  double seconds = 0;
};

struct Order {
  const Digits& digits;
  std::vector<std::int64_t> images;
  std::uint64_t seed;  // of the order
};

Training train(Network& network, Order order, const Settings& settings, const std::function<void()>& on_epoch) {
  Random random(order.seed);
  const auto size = static_cast<std::int64_t>(order.images.size());
  const std::int64_t steps = count_steps(size, settings.batch);
  std::vector<float> dscores(settings.batch * kClasses);
  Training training;
  for (std::int64_t epoch = 0; epoch < settings.epochs; ++epoch) {
    const auto start = std::chrono::steady_clock::now();
    random.shuffle(order.images);
    double loss = 0;
    for (std::int64_t step = 0; step < steps; ++step) {
      const std::int64_t begin = step * size / steps, end = (step + 1) * size / steps;
      const Images batch(order.digits, order.images.data() + begin, end - begin);
      const float* scores = network.forward(batch.pixels.data(), end - begin);
      loss += cross_entropy(scores, batch.labels, dscores);
      network.backward(dscores.data(), end - begin);
      const double done = static_cast<double>(epoch * steps + step) / static_cast<double>(settings.epochs * steps);
      network.step(static_cast<float>(learning_rate(settings) * (1 - done)));
    }
    training.curve.push_back(loss / static_cast<double>(steps));
    training.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    on_epoch();
  }
  return training;
}

std::int64_t count_correct(Classifier& classifier, const Images& images, std::int64_t batch) {
  const auto size = static_cast<std::int64_t>(images.labels.size());
  std::int64_t correct = 0;
  for (std::int64_t begin = 0; begin < size; begin += batch) {
    const std::int64_t m = std::min(batch, size - begin);
    const float* scores = classifier.forward(images.pixels.data() + begin * kPixels, m);
    for (std::int64_t i = 0; i < m; ++i) {
      const float* s = scores + i * kClasses;
      correct += std::max_element(s, s + kClasses) - s == images.labels[begin + i];
    }
  }
  return correct;
}

// Sums over the folds of one seed.
struct Tally {
  std::int64_t correct = 0;
  double seconds = 0;
  std::vector<double> curve;

  void add(const Training& training) {
    seconds += training.seconds;
    curve.resize(training.curve.size());
    for (std::size_t i = 0; i < curve.size(); ++i) curve[i] += training.curve[i] / kFolds;
  }
};

std::vector<std::int64_t> all_but(const std::vector<std::vector<std::int64_t>>& parts, std::int64_t left_out) {
  std::vector<std::int64_t> images;
  for (std::int64_t i = 0; i < std::ssize(parts); ++i) {
    if (i != left_out) images.insert(images.end(), parts[i].begin(), parts[i].end());
  }
  return images;
}

class Experiment {
 public:
  Experiment(const Settings& settings, const Digits& digits, const OnProgress& on_progress)
      : digits_(digits), on_progress_(on_progress) {
    result_.settings = settings;
    result_.images = digits.size();
    for (Way way : kWays) result_.ways.push_back({id(way), label(way), {}, {}, {}, 0, {}, {}});
    result_.formats = {{"f32", "f32, as trained", {}, 0, {}}, {"w8a8", "W8A8", {}, 0, {}}, {"w4", "W4", {}, 0, {}}};
  }

  Result run() {
    for (std::int64_t seed = 1; seed <= result_.settings.seeds; ++seed) run_seed(seed);
    return std::move(result_);
  }

 private:
  void run_seed(std::int64_t seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const auto parts = split(digits_, kFolds, random);
    std::vector<Tally> ways(std::size(kWays)), formats(std::size(kFormats));
    for (std::int64_t fold = 0; fold < kFolds; ++fold) {
      const Limits limits{result_.settings.batch, result_.settings.threads};
      const Model initial = initial_model(result_.settings.hidden, random);
      // The order of the minibatches, drawn once: each way begins it anew.
      const Order order{digits_, all_but(parts, fold), static_cast<std::uint64_t>(seed * kFolds + fold)};
      const Images unseen(digits_, parts[fold].data(), std::ssize(parts[fold]));
      result_.steps = result_.settings.epochs * count_steps(std::ssize(order.images), limits.batch);
      for (std::size_t w = 0; w < ways.size(); ++w) {
        const std::string what = "seed " + std::to_string(seed) + ", " + std::string(label(kWays[w]));
        const auto network = make_network(kWays[w], initial, limits);
        ways[w].add(train(*network, order, result_.settings, [&] { on_progress_(what); }));
        ways[w].correct += count_correct(*network, unseen, limits.batch);
        result_.ways[w].kept_bytes = network->kept_bytes(limits.batch);
        result_.ways[w].kernels = network->kernels();
        if (kWays[w] == Way::f32) test_formats(*network, unseen, formats);
      }
    }
    for (std::size_t w = 0; w < ways.size(); ++w) {
      WayResult& way = result_.ways[w];
      way.accuracy.values.push_back(percent(ways[w].correct));
      way.loss.values.push_back(ways[w].curve.back());
      way.seconds.values.push_back(ways[w].seconds);
      way.curves.push_back(ways[w].curve);
    }
    for (std::size_t f = 0; f < formats.size(); ++f) {
      result_.formats[f].accuracy.values.push_back(percent(formats[f].correct));
    }
  }

  void test_formats(Network& trained, const Images& unseen, std::vector<Tally>& tallies) {
    const Limits limits{result_.settings.batch, result_.settings.threads};
    for (std::size_t f = 0; f < tallies.size(); ++f) {
      FormatResult& format = result_.formats[f];
      if (kFormats[f] == Format::f32) {
        tallies[f].correct += count_correct(trained, unseen, limits.batch);
        format.weight_bytes = weight_bytes_f32(trained.model());
        format.kernels = trained.kernels();
      } else {
        const auto quantized = quantize_model(kFormats[f], trained.model(), limits);
        tallies[f].correct += count_correct(*quantized, unseen, limits.batch);
        format.weight_bytes = quantized->weight_bytes();
        format.kernels = quantized->kernels();
      }
    }
  }

  double percent(std::int64_t correct) const {
    return 100.0 * static_cast<double>(correct) / static_cast<double>(digits_.size());
  }

  const Digits& digits_;
  const OnProgress& on_progress_;
  Result result_;
};

}  // namespace

double PerSeed::mean() const {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}
double PerSeed::low() const { return *std::min_element(values.begin(), values.end()); }
double PerSeed::high() const { return *std::max_element(values.begin(), values.end()); }

double learning_rate(const Settings& settings) {
  constexpr double kFullBatch = 64;
  return kLearningRate * std::min(1.0, static_cast<double>(settings.batch) / kFullBatch);
}

std::int64_t experiment_length(const Settings& settings) {
  return settings.seeds * kFolds * static_cast<std::int64_t>(std::size(kWays)) * settings.epochs;
}

Result run_experiment(const Settings& settings, const Digits& digits, const OnProgress& on_progress) {
  return Experiment(settings, digits, on_progress).run();
}

}  // namespace octile::digits
