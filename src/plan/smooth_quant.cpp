// SmoothQuant's factors, and their way into a weight and into the layer before.
#include "octile/smooth_quant.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/access.h"
#include "base/float_environment.h"
#include "base/float_rows.h"
#include "base/message.h"
#include "base/powers.h"
#include "base/validate.h"

namespace octile {

namespace {

constexpr float kMin = 1e-5f;

std::int64_t length_of(std::string_view function, std::string_view name, const ConstTensor& t) {
  check_size(function, message("the length of ", name), t.shape[0]);
  return t.shape[0];
}

void check_float(std::string_view function, std::string_view name, const ConstTensor& t) {
  if (!is_float(t.dtype)) {
    fail(Status::unsupported, function, ": ", name, " is ", t, ", expected f16, bf16, f32 or f64");
  }
}

// Element (r, c) times or over the factor, rounded once to its type.
template <bool divide>
void scale_element(const Tensor& t, std::int64_t r, std::int64_t c, float factor) {
  const auto apply = [&]<class Real>(Real value) {
    store<Real>(t, r, c, divide ? value / static_cast<Real>(factor) : value * static_cast<Real>(factor));
  };
  t.dtype == DType::f64 ? apply(load<double>(t, r, c)) : apply(load<float>(t, r, c));
}

}  // namespace

float smoothing_factors(const SmoothingArgs& args) {
  const cpu::FloatEnvironment environment;
  constexpr std::string_view kFunction = "smoothing_factors";
  if (!(args.alpha >= 0 && args.alpha <= 1)) {
    fail(Status::invalid_argument, kFunction, ": alpha = ", args.alpha, ", expected 0 to 1");
  }
  TensorChecks checks(kFunction, {});
  const std::int64_t k = length_of(kFunction, "input_channel_max", args.input_channel_max);
  const ConstTensor inputs = checks.vector("input_channel_max", args.input_channel_max, DType::f32, k);
  const ConstTensor weights = checks.vector("weight_channel_max", args.weight_channel_max, DType::f32, k);
  const Tensor factors = checks.vector("factors", args.factors, DType::f32, k);
  if (args.multiplier.present()) checks.vector("multiplier", args.multiplier, DType::f32, k);
  checks.no_overlap();
  check_positive(kFunction, "input_channel_max", inputs, true);
  check_positive(kFunction, "weight_channel_max", weights, true);

  float largest = 0;
  for (std::int64_t j = 0; j < k; ++j) {
    const float x = read_f32(inputs, j);
    const double log_x = log2_of(std::max(x, kMin));
    const double log_w = log2_of(std::max(read_f32(weights, j), kMin));
    const auto power = static_cast<float>(exp2_of(args.alpha * log_x - (1 - args.alpha) * log_w));
    const float factor = std::max(power, kMin);
    write_f32(factors, j, factor);
    if (args.multiplier.present()) write_f32(args.multiplier, j, 1 / factor);
    largest = std::max(largest, x * (1 / factor));
  }
  return largest;
}

void smooth_weight(const Tensor& weight, const ConstTensor& factors) {
  const cpu::FloatEnvironment environment;
  constexpr std::string_view kFunction = "smooth_weight";
  check_float(kFunction, "weight", weight);
  TensorChecks checks(kFunction, {});
  const ConstTensor s = checks.vector("factors", factors, DType::f32, length_of(kFunction, "factors", factors));
  check_size(kFunction, "the rows of weight", weight.shape[0]);
  const Tensor w = checks.matrix("weight", weight, weight.dtype, {weight.shape[0], s.shape[0]});
  checks.no_overlap();
  check_positive(kFunction, "factors", s, false);
  for (std::int64_t r = 0; r < w.rows(); ++r) {
    for (std::int64_t j = 0; j < w.cols(); ++j) scale_element<false>(w, r, j, read_f32(s, j));
  }
}

void smooth_before(const SmoothBeforeArgs& args) {
  const cpu::FloatEnvironment environment;
  constexpr std::string_view kFunction = "smooth_before";
  TensorChecks checks(kFunction, {});
  const ConstTensor s =
      checks.vector("factors", args.factors, DType::f32, length_of(kFunction, "factors", args.factors));
  const std::int64_t k = s.shape[0];
  check_float(kFunction, "weight", args.weight);
  Tensor weight = args.weight;
  if (weight.rank == 2) {
    check_size(kFunction, "the columns of weight", weight.cols());
    weight = checks.matrix("weight", weight, weight.dtype, {k, weight.cols()});
  } else {
    checks.vector("weight", weight, weight.dtype, k);
  }
  if (args.bias.present()) {
    check_float(kFunction, "bias", args.bias);
    checks.vector("bias", args.bias, args.bias.dtype, k);
  }
  checks.no_overlap();
  check_positive(kFunction, "factors", s, false);
  for (std::int64_t j = 0; j < k; ++j) {
    const float factor = read_f32(s, j);
    const std::int64_t cols = weight.rank == 2 ? weight.cols() : 1;
    for (std::int64_t c = 0; c < cols; ++c) scale_element<true>(weight, j, c, factor);
    if (args.bias.present()) scale_element<true>(args.bias, j, 0, factor);
  }
}

}  // namespace octile
