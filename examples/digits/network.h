// The demo's network: Linear layers with ReLU between them, trained in f32 or in int8, and quantized after training.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data.h"

namespace octile::digits {

// The parameters of Y = X * weight^T + bias. Training keeps them in f32, whatever it multiplies in.
struct Layer {
  std::int64_t in = 0;
  std::int64_t out = 0;
  std::vector<float> weight;  // (out, in)
  std::vector<float> bias;    // (out)
};

using Model = std::vector<Layer>;

// kPixels -> hidden -> hidden -> kClasses. Weights are uniform with variance 2 / in (He et al., 2015), biases zero.
Model initial_model(std::int64_t hidden, Random& random);

std::int64_t weight_bytes_f32(const Model& model);

// How large a minibatch may be, and how many threads may work on it (0: all of the machine).
struct Limits {
  std::int64_t batch = 0;
  int threads = 0;
};

class Classifier {
 public:
  virtual ~Classifier() = default;
  // The scores (m, kClasses) of m images (m, kPixels). They stay until the next call.
  virtual const float* forward(const float* images, std::int64_t m) = 0;
};

// A classifier that can be trained.
class Network : public Classifier {
 public:
  explicit Network(const Model& initial);
  const Model& model() const { return model_; }
  // The gradients of the parameters from those of the scores (m, kClasses), for the images of the last forward.
  virtual void backward(const float* dscores, std::int64_t m) = 0;
  // Stochastic gradient descent with momentum.
  void step(float learning_rate);
  // Bytes that a forward of m images leaves behind for the backward.
  virtual std::int64_t kept_bytes(std::int64_t m) const = 0;
  // The kernels that multiply, for people.
  virtual std::string kernels() const = 0;

 protected:
  Model model_;
  Model gradient_;
  Model velocity_;
};

enum class Way { f32, int8_forward, int8 };
inline constexpr Way kWays[] = {Way::f32, Way::int8_forward, Way::int8};

std::unique_ptr<Network> make_network(Way way, const Model& initial, const Limits& limits);

enum class Format { f32, w8a8, w4 };
inline constexpr Format kFormats[] = {Format::f32, Format::w8a8, Format::w4};
inline constexpr std::int64_t kW4Group = 32;  // neighbours along IN that share a scale

// A trained model with quantized weights.
class QuantizedModel : public Classifier {
 public:
  virtual std::int64_t weight_bytes() const = 0;  // integers and scales, without the biases
  virtual std::string kernels() const = 0;
};

std::unique_ptr<QuantizedModel> quantize_model(Format format, const Model& model, const Limits& limits);

}  // namespace octile::digits
