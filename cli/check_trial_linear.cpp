// The trials of the products, forward and backward, and how far their float sums may lie from the oracle's.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/access.h"
#include "check_run.h"
#include "reference/oracle.h"

namespace octile::cli {

namespace {

using Size = Tensors::Size;

// A matrix of magnitudes.
struct Magnitudes {
  std::int64_t rows;
  std::int64_t cols;
  std::vector<double> values;

  template <class Value>
  Magnitudes(std::int64_t r, std::int64_t c, const Value& value) : rows(r), cols(c) {
    values.reserve(static_cast<std::size_t>(rows * cols));
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) values.push_back(std::abs(static_cast<double>(value(i, j))));
    }
  }
  const double* row(std::int64_t i) const { return values.data() + i * cols; }
  double at(std::int64_t i, std::int64_t j) const { return row(i)[j]; }
};

// a (M, K) times b (K, N).
Magnitudes product(const Magnitudes& a, const Magnitudes& b) {
  Magnitudes y(a.rows, b.cols, [](std::int64_t, std::int64_t) { return 0; });
  for (std::int64_t i = 0; i < a.rows; ++i) {
    double* const out = y.values.data() + i * y.cols;
    for (std::int64_t k = 0; k < a.cols; ++k) {
      const double factor = a.at(i, k);
      const double* const in = b.row(k);
      for (std::int64_t j = 0; j < b.cols; ++j) out[j] += factor * in[j];
    }
  }
  return y;
}

// How far a float sum of `terms` products of three factors (a float, a small integer, a scale) may lie from its exact
// value, if the sum of their magnitudes is A. Whatever the order of the sum, and wherever the scale is applied:
//   - a term takes at most two roundings to be formed, terms - 1 to be added to the others and one to take the bias in;
//     a kernel that keeps the scale out of the sum, or that narrows in two steps, has one more. n = terms + 4 covers
//     it, and n roundings of unit roundoff u change a term by at most n u / (1 - n u) (Higham, Accuracy and Stability
//     of Numerical Algorithms, section 3.1).
//   - the oracle does the same in f64, u = 2^-53.
//   - a product below the normal numbers loses up to a subnormal unit, and |integer| <= 128 may multiply it afterwards.
// The rounding to the output's type, by both, is added where the outputs are compared.
double sum_error(DType real, std::int64_t terms, double magnitude) {
  const double n = static_cast<double>(terms) + 4;
  const auto gamma = [n](double u) { return n * u / (1 - n * u); };
  const bool wide = real == DType::f64;
  const double subnormal = wide ? std::numeric_limits<double>::denorm_min() : 0x1p-149;
  return (gamma(wide ? 0x1p-53 : 0x1p-24) + gamma(0x1p-53)) * magnitude + 128 * n * subnormal;
}

// What more may be lost in element (i, j) where (q - z) s is rounded to X's 16-bit type before it is multiplied: the
// scale and the product are rounded once each, unit roundoff u. In f16 the scales of a row are taken relative to one of
// them, which is put into [2^5, 2^6): what falls below the normal numbers is off by 2^-25 at most, 15 times for a scale
// and once for a product, altogether 2^-26 S, S being the row's largest scale. bf16 has f32's range, and a matrix unit
// may take what is subnormal for zero.
class NarrowWeightError {
 public:
  explicit NarrowWeightError(const LinearArgs& args) : type_(args.x.dtype) {
    for (std::int64_t i = 0; i < args.x.rows(); ++i) {
      double& sum = inputs_.emplace_back(0);
      for (std::int64_t k = 0; k < args.x.cols(); ++k) sum += std::abs(load<double>(args.x, i, k));
    }
    for (std::int64_t j = 0; j < args.weight_scale.rows(); ++j) {
      double& most = scales_.emplace_back(0);
      for (std::int64_t g = 0; g < args.weight_scale.cols(); ++g) {
        most = std::max(most, std::abs(load<double>(args.weight_scale, j, g)));
      }
    }
  }

  double at(std::int64_t i, std::int64_t j, double magnitude) const {
    const double x = inputs_[static_cast<std::size_t>(i)];
    if (type_ == DType::bf16) return (0x1p-7 + 0x1p-16) * magnitude + 0x1p-125 * x;
    return (0x1p-10 + 0x1p-22) * magnitude + 0x1p-26 * scales_[static_cast<std::size_t>(j)] * x;
  }

 private:
  DType type_;
  std::vector<double> inputs_;  // of each row of X, the sum of magnitudes
  std::vector<double> scales_;  // of each output, the largest
};

// What more may be lost where an integer times its scale is rounded to a 16-bit type before it is multiplied: the scale
// and the product are rounded once each, unit roundoff u. `reach` is the sum of the other operand's magnitudes times
// the largest scale: in f16 scales are taken relative to the largest one, which is put at the top of what f16 holds,
// and what then falls below the normal numbers is off by at most 2^-15 of the largest scale (scaled_bytes.cuh; half of
// 2^-24 where the largest is put into [256, 512)). bf16 has f32's range, and a matrix unit may take what is subnormal
// for zero: at most 2^-116 of the largest scale a term, and where a dequantized value is, 2^-118 times the operand.
double narrow_error(const LinearBackwardCase& c, double magnitude, double reach, double subnormal) {
  const DType dy = c.description.dy;
  if (!c.narrow_products || (dy != DType::f16 && dy != DType::bf16)) return 0;
  if (dy == DType::f16) return (0x1p-10 + 0x1p-22) * magnitude + 0x1p-15 * reach;
  return (0x1p-7 + 0x1p-16) * magnitude + subnormal + 0x1p-118 * reach;
}

double largest(const ConstTensor& scales) {
  double most = 0;
  for (std::int64_t i = 0; i < scales.rows(); ++i) most = std::max(most, std::abs(load<double>(scales, i)));
  return most;
}

// The bounds of the products that are summed in float; the others are bit for bit.
void bound_backward(Tensors& tensors, const LinearBackwardCase& c, const LinearBackwardArgs& args) {
  const LinearBackwardDescription& d = c.description;
  const std::int64_t m = args.dy.rows();
  const bool out_in = d.weight_layout == WeightLayout::out_in;
  const DType real = scale_type(d.dy);
  if (d.dx == Product::dequantized) {
    const bool per_channel = d.weight == WeightFormat::s8_per_channel;
    const Magnitudes dy(m, d.n, [&](std::int64_t i, std::int64_t j) { return load<double>(args.dy, i, j); });
    const Magnitudes w(d.n, d.k, [&](std::int64_t j, std::int64_t k) {
      const int q = out_in ? load_integer(args.weight, j, k) : load_integer(args.weight, k, j);
      return q * load<double>(args.weight_scale, per_channel ? j : 0);
    });
    const Magnitudes sum = product(dy, w);
    const double scale = largest(args.weight_scale);
    const Magnitudes reach = product(dy, Magnitudes(d.n, 1, [&](auto, auto) { return scale; }));
    const double lost = 0x1p-116 * scale * static_cast<double>(d.n);
    tensors.set_bound("dx", [&](std::int64_t i, std::int64_t k) {
      return sum_error(real, d.n, sum.at(i, k)) + narrow_error(c, sum.at(i, k), reach.at(i, 0), lost);
    });
  }
  const Magnitudes dy_t(d.n, m, [&](std::int64_t j, std::int64_t i) { return load<double>(args.dy, i, j); });
  if (d.dw == Product::dequantized) {
    const bool per_token = d.activation == Activation::dynamic_per_token;
    const Magnitudes x(m, d.k, [&](std::int64_t i, std::int64_t k) {
      const double s = args.x_scale.present() ? load<double>(args.x_scale, per_token ? i : 0) : d.static_scale;
      return (d.x_transposed ? load_integer(args.x, k, i) : load_integer(args.x, i, k)) * s;
    });
    const Magnitudes sum = product(dy_t, x);
    const double scale = args.x_scale.present() ? largest(args.x_scale) : d.static_scale;
    const Magnitudes reach = product(dy_t, Magnitudes(m, 1, [&](auto, auto) { return scale; }));
    const double lost = 0x1p-116 * scale * static_cast<double>(m);
    const bool dw_out_in = d.dw_layout.value_or(d.weight_layout) == WeightLayout::out_in;
    const std::int64_t terms = m + (d.dw_accumulate ? 2 : 0);  // both round the product before it is added
    tensors.set_bound("dw", [&](std::int64_t r, std::int64_t col) {
      const auto [i, k] = dw_out_in ? std::pair(r, col) : std::pair(col, r);
      return sum_error(real, terms, sum.at(i, k)) + narrow_error(c, sum.at(i, k), reach.at(i, 0), lost);
    });
  }
  if (d.db) {
    const Magnitudes sum = product(dy_t, Magnitudes(m, 1, [](std::int64_t, std::int64_t) { return 1; }));
    tensors.set_bound("db", [&](std::int64_t j, std::int64_t) { return sum_error(real, m, sum.at(j, 0)); });
  }
}

}  // namespace

Trial trial_of(const LinearCase& c, std::uint64_t seed) {
  const LinearDescription& d = c.description;
  auto tensors = std::make_shared<Tensors>(c, seed);
  const bool w4 = d.weight.type == DType::s4;
  const bool w4a16 = w4 && d.activation == Activation::none;
  const std::int64_t group = d.weight.group == 0 ? std::max<std::int64_t>(d.k, 1) : d.weight.group;
  const DType real = scale_type(d.y);
  if (w4a16) tensors->keep_sums_finite();

  LinearArgs args;
  args.x =
      d.x == DType::s8 ? tensors->integers(DType::s8, {c.rows, d.k}, {-128, 127}) : tensors->floats(d.x, {c.rows, d.k});
  if (d.x == DType::s8 && d.activation != Activation::static_per_tensor) {
    const std::int64_t scales = d.activation == Activation::dynamic_per_token ? c.rows : 1;
    args.x_scale = tensors->computed_scales(real, {scales}, 0.02);
  }
  if (d.x_multiplier) args.x_multiplier = tensors->computed_scales(real, {d.k}, 1.0);
  if (w4) {
    args.weight = tensors->integers(DType::s4, {d.n, d.k}, {-8, 7});
    args.weight_scale = tensors->computed_scales(real, {d.n, d.k / group}, 0.1);
    if (d.weight.zero_point) {
      args.weight_zero_point = tensors->integers(DType::s32, {d.n, d.k / group}, {-8, 7});
    }
  } else {
    const bool out_in = d.weight_layout == WeightLayout::out_in;
    args.weight = tensors->integers(DType::s8, out_in ? Size{d.n, d.k} : Size{d.k, d.n}, {-128, 127});
    args.weight_scale = tensors->computed_scales(real, {d.weight == WeightFormat::s8_per_channel ? d.n : 1}, 0.01);
  }
  if (d.bias) args.bias = tensors->floats(d.y, {d.n});
  args.y = tensors->output("y", d.y, {c.rows, d.n});

  LinearDescription unpacked = d;
  unpacked.packed_weight = false;
  expect<LinearPlan>(*tensors, c, unpacked, args, oracle::linear);
  if (w4a16 && d.k > 0) {
    const Magnitudes x(c.rows, d.k, [&](std::int64_t i, std::int64_t k) { return load<double>(args.x, i, k); });
    const Magnitudes w(d.k, d.n, [&](std::int64_t k, std::int64_t j) {
      const int z = d.weight.zero_point ? load_integer(args.weight_zero_point, j, k / group) : 0;
      return (load_integer(args.weight, j, k) - z) * load<double>(args.weight_scale, j, k / group);
    });
    const Magnitudes sum = product(x, w);
    const bool narrow = c.narrow_products && (d.x == DType::f16 || d.x == DType::bf16);
    // A kernel may multiply x by q + 8 or q + 24 and take (8 + z) or (24 + z) times the sum of x off afterwards. Then
    // it is these terms that are summed and rounded, and an infinite x makes a NaN.
    const Magnitudes raised(narrow ? d.k : 0, d.n, [&](std::int64_t k, std::int64_t j) {
      const int z = d.weight.zero_point ? load_integer(args.weight_zero_point, j, k / group) : 0;
      const int terms = load_integer(args.weight, j, k) + 24 + std::abs(24 + z);
      return terms * load<double>(args.weight_scale, j, k / group);
    });
    const Magnitudes summed = narrow ? product(x, raised) : sum;
    const NarrowWeightError lost(args);
    if (narrow) tensors->let_infinities_be_nan("y");
    tensors->set_bound("y", [&](std::int64_t i, std::int64_t j) {
      const double rounded = narrow && group < d.k ? lost.at(i, j, sum.at(i, j)) : 0;
      return sum_error(real, d.k, summed.at(i, j) + (d.bias ? std::abs(load<double>(args.bias, j)) : 0)) + rounded;
    });
  }
  return {tensors, runner<LinearPlan>(tensors, d, args)};
}

Trial trial_of(const LinearBackwardCase& c, std::uint64_t seed) {
  const LinearBackwardDescription& d = c.description;
  auto tensors = std::make_shared<Tensors>(c, seed);
  const auto weight_size = [&](WeightLayout layout) {
    return layout == WeightLayout::out_in ? Size{d.n, d.k} : Size{d.k, d.n};
  };
  const DType real = scale_type(d.dy);
  if (d.dx == Product::dequantized || d.dw == Product::dequantized || d.db) tensors->keep_sums_finite();

  LinearBackwardArgs args{.dy = tensors->floats(d.dy, {c.rows, d.n})};
  args.seed = tensors->random();
  if (d.dx != Product::none) {
    args.weight = tensors->integers(DType::s8, weight_size(d.weight_layout), {-128, 127});
    args.weight_scale = tensors->computed_scales(real, {d.weight == WeightFormat::s8_per_channel ? d.n : 1}, 0.01);
    args.dx = tensors->output("dx", d.dy, {c.rows, d.k});
  }
  if (d.dw != Product::none) {
    args.x = tensors->integers(DType::s8, d.x_transposed ? Size{d.k, c.rows} : Size{c.rows, d.k}, {-128, 127});
    if (d.activation != Activation::static_per_tensor) {
      const std::int64_t scales = d.activation == Activation::dynamic_per_token ? c.rows : 1;
      args.x_scale = tensors->computed_scales(real, {scales}, 0.02);
    }
    const DType dw = d.dw_dtype.value_or(d.dy);
    const Size size = weight_size(d.dw_layout.value_or(d.weight_layout));
    args.dw = d.dw_accumulate ? tensors->output_with_floats("dw", dw, size) : tensors->output("dw", dw, size);
  }
  if (d.db) args.db = tensors->output("db", d.dy, {d.n});

  expect<LinearBackwardPlan>(*tensors, c, d, args, oracle::linear_backward);
  bound_backward(*tensors, c, args);
  return {tensors, runner<LinearBackwardPlan>(tensors, d, args)};
}

}  // namespace octile::cli
