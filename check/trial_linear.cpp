// The trials of the products, forward and backward, and how far their float sums may lie from the oracle's.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/access.h"
#include "base/message.h"
#include "check/runner.h"
#include "reference/oracle.h"

namespace octile::check {

namespace {

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

ConstTensor row_of(ConstTensor t, std::int64_t row) {
  t.data = static_cast<const std::byte*>(t.data) + row * t.strides[0] * bits(t.dtype) / 8;
  t.shape[0] = 1;
  return t;
}

ConstTensor column_of(ConstTensor t, std::int64_t col) {
  t.data = static_cast<const std::byte*>(t.data) + col * bits(t.dtype) / 8;
  t.shape[1] = 1;
  return t;
}

// A compact matrix like this one, with its own memory.
struct Alone {
  explicit Alone(const ConstTensor& like)
      : bytes(static_cast<std::size_t>(like.rows() * like.cols() * bits(like.dtype) / 8)),
        view{bytes.data(), like.dtype, {}, 2, like.shape, {like.cols(), 1}} {}
  std::vector<std::byte> bytes;
  Tensor view;
};

// Empty: both have the same bits.
std::string compare_alone(const Alone& alone, const ConstTensor& whole, std::string_view name, std::int64_t index) {
  for (std::int64_t r = 0; r < whole.rows(); ++r) {
    for (std::int64_t c = 0; c < whole.cols(); ++c) {
      const double a = load<double>(alone.view, r, c);
      const double b = load<double>(whole, r, c);
      if (a != b && !(std::isnan(a) && std::isnan(b))) {
        return message(name, ": ", index, " alone has ", a, " where it has ", b, " among the others");
      }
    }
  }
  return {};
}

// The first, the one in the middle and the last.
std::vector<std::int64_t> some_of(std::int64_t count) {
  if (count < 2) return {};
  return {0, count / 2, count - 1};
}

std::string linear_rows_alone(LinearDescription d, LinearArgs args, const Attempt& attempt) {
  d.kernel = attempt.kernel;
  d.threads = attempt.threads;
  const LinearPlan plan = LinearPlan::select(d);
  Packed packed;
  const LinearArgs whole = prepared(d, plan, args, packed);
  for (const std::int64_t row : some_of(args.y.rows())) {
    LinearArgs one = whole;
    one.x = row_of(whole.x, row);
    const Alone y(row_of(whole.y, row));
    one.y = y.view;
    run_on_host(plan, one);
    if (std::string what = compare_alone(y, row_of(whole.y, row), "y", row); !what.empty()) return what;
  }
  return {};
}

// dX a token at a time, dW an output channel at a time.
std::string gradient_rows_alone(LinearBackwardDescription d, const LinearBackwardArgs& whole, const Attempt& attempt) {
  d.kernel = attempt.kernel;
  d.threads = attempt.threads;
  d.db = false;
  if (d.dx == Product::dequantized) {
    LinearBackwardDescription alone = d;
    alone.dw = Product::none;
    alone.dw_accumulate = false;
    const auto plan = LinearBackwardPlan::select(alone);
    for (const std::int64_t row : some_of(whole.dy.rows())) {
      LinearBackwardArgs one{row_of(whole.dy, row), whole.weight, whole.weight_scale};
      const Alone dx(row_of(whole.dx, row));
      one.dx = dx.view;
      run_on_host(plan, one);
      if (std::string what = compare_alone(dx, row_of(whole.dx, row), "dx", row); !what.empty()) return what;
    }
  }
  if (d.dw == Product::dequantized && !d.dw_accumulate) {
    LinearBackwardDescription alone = d;
    alone.dx = Product::none;
    alone.n = 1;
    const auto plan = LinearBackwardPlan::select(alone);
    const bool out_in = d.dw_layout.value_or(d.weight_layout) == WeightLayout::out_in;
    for (const std::int64_t channel : some_of(d.n)) {
      LinearBackwardArgs one{.dy = column_of(whole.dy, channel), .x = whole.x, .x_scale = whole.x_scale};
      const ConstTensor among = out_in ? row_of(whole.dw, channel) : column_of(whole.dw, channel);
      const Alone dw(among);
      one.dw = dw.view;
      run_on_host(plan, one);
      if (std::string what = compare_alone(dw, among, "dw", channel); !what.empty()) return what;
    }
  }
  return {};
}

}  // namespace

Trial trial_of(const LinearCase& c, std::uint64_t seed) {
  const LinearDescription& d = c.description;
  const auto tensors = std::make_shared<Tensors>(c, seed);
  const bool w4a16 = d.weight == WeightFormat::s4_group && d.activation == Activation::none;
  const std::int64_t group = d.group == 0 ? std::max<std::int64_t>(d.k, 1) : d.group;
  const DType real = scale_type(d.y);
  if (w4a16) tensors->keep_sums_finite();
  const auto args = args_of<LinearArgs>(tensors->add(operands<LinearArgs>(d, c.rows)), 0);

  LinearDescription unpacked = d;
  unpacked.packed_weight = false;
  expect(*tensors, c, unpacked, args, oracle::linear);
  if (w4a16 && d.k > 0) {
    const Magnitudes x(c.rows, d.k, [&](std::int64_t i, std::int64_t k) { return load<double>(args.x, i, k); });
    const Magnitudes w(d.k, d.n, [&](std::int64_t k, std::int64_t j) {
      const int z = d.weight_zero_point ? load_integer(args.weight_zero_point, j, k / group) : 0;
      return (load_integer(args.weight, j, k) - z) * load<double>(args.weight_scale, j, k / group);
    });
    const Magnitudes sum = product(x, w);
    const bool narrow = c.narrow_products && (d.x == DType::f16 || d.x == DType::bf16);
    // A kernel may multiply x by q + 8 or q + 24 and take (8 + z) or (24 + z) times the sum of x off afterwards. Then
    // it is these terms that are summed and rounded, and an infinite x makes a NaN.
    const Magnitudes raised(narrow ? d.k : 0, d.n, [&](std::int64_t k, std::int64_t j) {
      const int z = d.weight_zero_point ? load_integer(args.weight_zero_point, j, k / group) : 0;
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
  Trial trial{tensors, runner(tensors, d, args)};
  if (w4a16) trial.rows_alone = [d, args](const Attempt& attempt) { return linear_rows_alone(d, args, attempt); };
  return trial;
}

Trial trial_of(const LinearBackwardCase& c, std::uint64_t seed) {
  const LinearBackwardDescription& d = c.description;
  const auto tensors = std::make_shared<Tensors>(c, seed);
  if (d.dx == Product::dequantized || d.dw == Product::dequantized || d.db) tensors->keep_sums_finite();
  const std::vector<Tensor> views = tensors->add(operands<LinearBackwardArgs>(d, c.rows));
  const auto args = args_of<LinearBackwardArgs>(views, tensors->random());
  expect(*tensors, c, d, args, oracle::linear_backward);
  bound_backward(*tensors, c, args);
  Trial trial{tensors, runner(tensors, d, args)};
  if (d.dx == Product::dequantized || d.dw == Product::dequantized) {
    trial.rows_alone = [d, args](const Attempt& attempt) { return gradient_rows_alone(d, args, attempt); };
  }
  return trial;
}

}  // namespace octile::check
