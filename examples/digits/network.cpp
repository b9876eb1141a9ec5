#include "network.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "bench/blas.h"
#include "octile/octile.hpp"

namespace octile::digits {

namespace {

constexpr float kMomentum = 0.9f;

int blas_int(std::int64_t value) { return static_cast<int>(value); }

Model zeros_like(const Model& model) {
  Model zeros = model;
  for (Layer& layer : zeros) {
    std::fill(layer.weight.begin(), layer.weight.end(), 0.0f);
    std::fill(layer.bias.begin(), layer.bias.end(), 0.0f);
  }
  return zeros;
}

void descend(std::vector<float>& value, std::vector<float>& velocity, const std::vector<float>& gradient, float rate) {
  for (std::size_t i = 0; i < value.size(); ++i) {
    velocity[i] = kMomentum * velocity[i] + gradient[i];
    value[i] -= rate * velocity[i];
  }
}

// Scratch that grows to the largest of the plans that share it.
class Scratch {
 public:
  void reserve(const Plan& plan) { bytes_.resize(std::max(bytes_.size(), plan.workspace_size())); }
  Workspace workspace() { return {bytes_.data(), bytes_.size()}; }

 private:
  std::vector<std::byte> bytes_;
};

// f32 throughout, with the BLAS.
class FloatNetwork : public Network {
 public:
  FloatNetwork(const Model& initial, const Limits& limits) : Network(initial) {
    blas().use_threads(limits.threads > 0 ? limits.threads : blas().max_threads);
    std::int64_t widest = 0;
    for (const Layer& layer : model_) {
      inputs_.emplace_back(limits.batch * layer.in);
      widest = std::max({widest, layer.in, layer.out});
    }
    scores_.resize(limits.batch * kClasses);
    dy_.resize(limits.batch * widest);
    dx_.resize(limits.batch * widest);
  }

  const float* forward(const float* images, std::int64_t m) override {
    std::copy_n(images, m * model_.front().in, inputs_.front().data());
    for (std::size_t l = 0; l < model_.size(); ++l) {
      const Layer& layer = model_[l];
      const bool last = l + 1 == model_.size();
      float* y = last ? scores_.data() : inputs_[l + 1].data();
      for (std::int64_t row = 0; row < m; ++row) std::copy_n(layer.bias.data(), layer.out, y + row * layer.out);
      const int rows = blas_int(m), out = blas_int(layer.out), in = blas_int(layer.in);
      blas().sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, out, in, 1.0f, inputs_[l].data(), in,
                   layer.weight.data(), in, 1.0f, y, out);
      if (!last) std::transform(y, y + m * layer.out, y, [](float v) { return std::max(v, 0.0f); });
    }
    return scores_.data();
  }

  void backward(const float* dscores, std::int64_t m) override {
    std::copy_n(dscores, m * kClasses, dy_.data());
    for (std::size_t l = model_.size(); l-- > 0;) {
      const Layer& layer = model_[l];
      Layer& gradient = gradient_[l];
      const int rows = blas_int(m), out = blas_int(layer.out), in = blas_int(layer.in);
      blas().sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, out, in, rows, 1.0f, dy_.data(), out, inputs_[l].data(), in,
                   0.0f, gradient.weight.data(), in);
      std::fill(gradient.bias.begin(), gradient.bias.end(), 0.0f);
      for (std::int64_t row = 0; row < m; ++row) {
        for (std::int64_t n = 0; n < layer.out; ++n) gradient.bias[n] += dy_[row * layer.out + n];
      }
      if (l == 0) break;  // the images need no gradient
      blas().sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, in, out, 1.0f, dy_.data(), out, layer.weight.data(),
                   in, 0.0f, dx_.data(), in);
      // What ReLU let through is positive in its output, which is this layer's input.
      for (std::int64_t i = 0; i < m * layer.in; ++i) dy_[i] = inputs_[l][i] > 0 ? dx_[i] : 0.0f;
    }
  }

  std::int64_t kept_bytes(std::int64_t m) const override {
    std::int64_t bytes = 0;
    for (const Layer& layer : model_) bytes += m * layer.in * static_cast<std::int64_t>(sizeof(float));
    return bytes;
  }

  std::string kernels() const override {
    return blas().get_config ? std::string("sgemm of ") + blas().get_config() : "sgemm of the BLAS";
  }

 private:
  std::vector<std::vector<float>> inputs_;  // of each layer, (batch, in)
  std::vector<float> scores_;
  std::vector<float> dy_;
  std::vector<float> dx_;
};

// The forward in int8; each backward product in int8 or with the int8 operand dequantized. The plans are chosen once.
class Int8Network : public Network {
 public:
  Int8Network(const Model& initial, const Limits& limits, Product product) : Network(initial) {
    std::int64_t widest = 0;
    for (const Layer& layer : model_) {
      layers_.push_back(make_layer(layer, limits, layers_.empty(), product));
      widest = std::max({widest, layer.in, layer.out});
    }
    y_.resize(limits.batch * widest);
    dy_.resize(limits.batch * widest);
    dx_.resize(limits.batch * widest);
  }

  const float* forward(const float* images, std::int64_t m) override {
    const float* x = images;
    for (std::size_t l = 0; l < model_.size(); ++l) {
      const Layer& layer = model_[l];
      Int8Layer& q = layers_[l];
      q.quantize_weight.run({.x = matrix(layer.weight.data(), layer.out, layer.in),
                             .q = matrix(q.weight.data(), layer.out, layer.in),
                             .scale = vector(q.weight_scale.data(), layer.out)},
                            scratch_.workspace());
      q.quantize_x.run(
          {.x = matrix(x, m, layer.in), .q = matrix(q.x.data(), m, layer.in), .scale = vector(q.x_scale.data(), m)},
          scratch_.workspace());
      q.forward.run({.x = matrix(q.x.data(), m, layer.in),
                     .x_scale = vector(q.x_scale.data(), m),
                     .weight = matrix(q.weight.data(), layer.out, layer.in),
                     .weight_scale = vector(q.weight_scale.data(), layer.out),
                     .bias = vector(layer.bias.data(), layer.out),
                     .y = matrix(y_.data(), m, layer.out)},
                    scratch_.workspace());
      if (l + 1 < model_.size()) relu(q, m * layer.out);
      x = y_.data();
    }
    return y_.data();
  }

  void backward(const float* dscores, std::int64_t m) override {
    const float* dy = dscores;
    for (std::size_t l = model_.size(); l-- > 0;) {
      const Layer& layer = model_[l];
      const Int8Layer& q = layers_[l];
      LinearBackwardArgs args{.dy = matrix(dy, m, layer.out),
                              .weight = matrix(q.weight.data(), layer.out, layer.in),
                              .weight_scale = vector(q.weight_scale.data(), layer.out),
                              .x = matrix(q.x.data(), m, layer.in),
                              .x_scale = vector(q.x_scale.data(), m),
                              .dx = {},
                              .dw = matrix(gradient_[l].weight.data(), layer.out, layer.in),
                              .db = vector(gradient_[l].bias.data(), layer.out)};
      if (l > 0) args.dx = matrix(dx_.data(), m, layer.in);
      q.backward.run(args, scratch_.workspace());
      if (l == 0) break;  // its plan has no dX
      const std::vector<std::uint8_t>& passed = layers_[l - 1].passed;
      for (std::int64_t i = 0; i < m * layer.in; i += 8) {
        for (int bit = 0; bit < 8; ++bit) dy_[i + bit] = passed[i / 8] >> bit & 1 ? dx_[i + bit] : 0.0f;
      }
      dy = dy_.data();
    }
  }

  std::int64_t kept_bytes(std::int64_t m) const override {
    std::int64_t bytes = 0;
    for (const Layer& layer : model_) bytes += m * (layer.in + static_cast<std::int64_t>(sizeof(float)));
    for (std::size_t l = 0; l + 1 < model_.size(); ++l) bytes += m * model_[l].out / 8;  // passed
    return bytes;
  }

  std::string kernels() const override {
    const Int8Layer& q = layers_[1];
    return q.quantize_x.sku() + "; " + q.forward.sku() + "; " + q.backward.sku();
  }

 private:
  struct Int8Layer {
    QuantizePlan quantize_weight;
    QuantizePlan quantize_x;
    LinearPlan forward;
    LinearBackwardPlan backward;
    std::vector<std::int8_t> weight;  // (out, in)
    std::vector<float> weight_scale;  // (out)
    std::vector<std::int8_t> x;       // (batch, in)
    std::vector<float> x_scale;       // (batch)
    // (batch, out), a bit each: where ReLU passed its input on. The next layer's int8 input does not tell, a small
    // positive value may be 0 in it. Empty for the last layer.
    std::vector<std::uint8_t> passed;
  };

  Int8Layer make_layer(const Layer& layer, const Limits& limits, bool first, Product product) {
    const std::int64_t m = limits.batch, n = layer.out, k = layer.in;
    Int8Layer q{
        .quantize_weight = QuantizePlan::select({.rows = n, .cols = k, .threads = limits.threads}),
        .quantize_x = QuantizePlan::select({.rows = m, .cols = k, .threads = limits.threads}),
        .forward =
            LinearPlan::select({.m = m, .n = n, .k = k, .x = DType::s8, .bias = true, .threads = limits.threads}),
        .backward = LinearBackwardPlan::select({.m = m,
                                                .n = n,
                                                .k = k,
                                                .dx = first ? Product::none : product,
                                                .dw = product,
                                                .db = true,
                                                .threads = limits.threads}),
        .weight = std::vector<std::int8_t>(n * k),
        .weight_scale = std::vector<float>(n),
        .x = std::vector<std::int8_t>(m * k),
        .x_scale = std::vector<float>(m),
        .passed = std::vector<std::uint8_t>(n == kClasses ? 0 : m * n / 8),
    };
    for (const Plan* plan :
         std::initializer_list<const Plan*>{&q.quantize_weight, &q.quantize_x, &q.forward, &q.backward}) {
      scratch_.reserve(*plan);
    }
    return q;
  }

  void relu(Int8Layer& q, std::int64_t size) {  // hidden layers are a multiple of 8 wide
    for (std::int64_t i = 0; i < size; i += 8) {
      unsigned passed = 0;
      for (int bit = 0; bit < 8; ++bit) {
        passed |= static_cast<unsigned>(y_[i + bit] > 0) << bit;
        y_[i + bit] = std::max(y_[i + bit], 0.0f);
      }
      q.passed[i / 8] = static_cast<std::uint8_t>(passed);
    }
  }

  std::vector<Int8Layer> layers_;
  Scratch scratch_;
  std::vector<float> y_;
  std::vector<float> dy_;
  std::vector<float> dx_;
};

// W8A8: int8 weights, activations quantized per token as they come. W4: 4-bit weights in groups, activations in f32.
class QuantizedInference : public QuantizedModel {
 public:
  QuantizedInference(Format format, const Model& model, const Limits& limits) {
    for (const Layer& layer : model) layers_.push_back(make_layer(format, layer, limits));
    std::int64_t widest = 0;
    for (const Layer& layer : model) widest = std::max(widest, layer.out);
    for (std::vector<float>& y : y_) y.resize(limits.batch * widest);
  }

  const float* forward(const float* images, std::int64_t m) override {
    const float* x = images;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const QuantizedLayer& q = layers_[l];
      float* y = y_[l % 2].data();
      q.plan.run({.x = matrix(x, m, q.in),
                  .weight = q.weight_view(),
                  .weight_scale = q.scale_view(),
                  .bias = vector(q.bias.data(), q.out),
                  .y = matrix(y, m, q.out)},
                 scratch_.workspace());
      if (l + 1 < layers_.size()) std::transform(y, y + m * q.out, y, [](float v) { return std::max(v, 0.0f); });
      x = y;
    }
    return x;
  }

  std::int64_t weight_bytes() const override {
    std::size_t bytes = 0;
    for (const QuantizedLayer& q : layers_) bytes += q.weight.size() + q.scale.size() * sizeof(float);
    return static_cast<std::int64_t>(bytes);
  }

  std::string kernels() const override { return layers_[1].plan.sku(); }

 private:
  struct QuantizedLayer {
    LinearPlan plan;
    std::int64_t in = 0;
    std::int64_t out = 0;
    std::vector<std::uint8_t> weight;  // (out, in) s8, or s4 packed in pairs
    std::vector<float> scale;          // (out), or (out, in / kW4Group)
    std::vector<float> bias;

    bool packed() const { return std::ssize(weight) < out * in; }
    ConstTensor weight_view() const {
      return packed() ? ConstTensor(matrix_s4(weight.data(), out, in))
                      : matrix(reinterpret_cast<const std::int8_t*>(weight.data()), out, in);
    }
    ConstTensor scale_view() const {
      return packed() ? matrix(scale.data(), out, in / kW4Group) : vector(scale.data(), out);
    }
  };

  QuantizedLayer make_layer(Format format, const Layer& layer, const Limits& limits) {
    const bool w4 = format == Format::w4;
    const std::int64_t n = layer.out, k = layer.in;
    QuantizedLayer q{
        .plan = LinearPlan::select(
            {.m = limits.batch,
             .n = n,
             .k = k,
             .activation = w4 ? Activation::none : Activation::dynamic_per_token,
             .weight = w4 ? WeightFormat{DType::s4, Granularity::group, kW4Group} : WeightFormat::s8_per_channel,
             .bias = true,
             .threads = limits.threads}),
        .in = k,
        .out = n,
        .weight = std::vector<std::uint8_t>(w4 ? n * k / 2 : n * k),
        .scale = std::vector<float>(w4 ? n * (k / kW4Group) : n),
        .bias = layer.bias,
    };
    const auto quantize = QuantizePlan::select({.rows = n,
                                                .cols = k,
                                                .q = w4 ? DType::s4 : DType::s8,
                                                .granularity = w4 ? Granularity::group : Granularity::row,
                                                .group = w4 ? kW4Group : 0,
                                                .threads = limits.threads});
    scratch_.reserve(quantize);
    scratch_.reserve(q.plan);
    quantize.run(
        {.x = matrix(layer.weight.data(), n, k),
         .q = w4 ? matrix_s4(q.weight.data(), n, k) : matrix(reinterpret_cast<std::int8_t*>(q.weight.data()), n, k),
         .scale = w4 ? matrix(q.scale.data(), n, k / kW4Group) : vector(q.scale.data(), n)},
        scratch_.workspace());
    return q;
  }

  std::vector<QuantizedLayer> layers_;
  Scratch scratch_;
  std::vector<float> y_[2];
};

}  // namespace

Model initial_model(std::int64_t hidden, Random& random) {
  Model model;
  const std::int64_t widths[] = {kPixels, hidden, hidden, kClasses};
  for (std::size_t l = 0; l + 1 < std::size(widths); ++l) {
    Layer layer{.in = widths[l], .out = widths[l + 1], .weight = {}, .bias = std::vector<float>(widths[l + 1])};
    const float limit = std::sqrt(6.0f / static_cast<float>(layer.in));  // of a uniform value with variance 2 / in
    layer.weight.resize(layer.out * layer.in);
    for (float& weight : layer.weight) weight = (2.0f * random.uniform() - 1.0f) * limit;
    model.push_back(std::move(layer));
  }
  return model;
}

std::int64_t weight_bytes_f32(const Model& model) {
  std::size_t bytes = 0;
  for (const Layer& layer : model) bytes += layer.weight.size() * sizeof(float);
  return static_cast<std::int64_t>(bytes);
}

Network::Network(const Model& initial) : model_(initial), gradient_(zeros_like(initial)), velocity_(gradient_) {}

void Network::step(float learning_rate) {
  for (std::size_t l = 0; l < model_.size(); ++l) {
    descend(model_[l].weight, velocity_[l].weight, gradient_[l].weight, learning_rate);
    descend(model_[l].bias, velocity_[l].bias, gradient_[l].bias, learning_rate);
  }
}

std::unique_ptr<Network> make_network(Way way, const Model& initial, const Limits& limits) {
  if (way == Way::f32) return std::make_unique<FloatNetwork>(initial, limits);
  const Product product = way == Way::int8 ? Product::int8 : Product::dequantized;
  return std::make_unique<Int8Network>(initial, limits, product);
}

std::unique_ptr<QuantizedModel> quantize_model(Format format, const Model& model, const Limits& limits) {
  return std::make_unique<QuantizedInference>(format, model, limits);
}

}  // namespace octile::digits
