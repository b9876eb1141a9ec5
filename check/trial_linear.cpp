// The trials of the products, forward and backward, and how far their float sums may be from the oracle's.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/access.h"
#include "base/fields.h"
#include "base/message.h"
#include "base/parts.h"
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

double largest(const ConstTensor& scales) {
  double max = 0;
  for (std::int64_t i = 0; i < scales.rows(); ++i) max = std::max(max, std::abs(load<double>(scales, i)));
  return max;
}

// The sum of each row.
std::vector<double> row_sums(const Magnitudes& m) {
  std::vector<double> sums;
  for (std::int64_t i = 0; i < m.rows; ++i) sums.push_back(std::accumulate(m.row(i), m.row(i) + m.cols, 0.0));
  return sums;
}

// What the error of the forward's float sums depends on: y = x ((w - z) s) + bias.
class ForwardFacts {
 public:
  ForwardFacts(const LinearDescription& d, const LinearArgs& args)
      : d_(d),
        args_(args),
        group_(d.weight.granularity != Granularity::group || d.weight.group == 0 ? std::max<std::int64_t>(d.k, 1)
                                                                                 : d.weight.group),
        x_(args.x.rows(), d.k, [&](std::int64_t i, std::int64_t k) { return load<double>(args.x, i, k); }),
        x_sums_(row_sums(x_)),
        sum_(product(x_, weight([](int q, int z) { return q - z; }))) {
    for (std::int64_t j = 0; j < d.n; ++j) {
      double& max = scales_.emplace_back(0);
      for (std::int64_t k = 0; k < d.k; k += group_) max = std::max(max, std::abs(scale(j, k)));
    }
  }

  SumFacts at(Bound bound, std::int64_t i, std::int64_t j) {
    const double bias = d_.bias ? std::abs(load<double>(args_.bias, j)) : 0;
    SumFacts facts{.a = d_.x, .terms = d_.k, .several_scales = group_ < d_.k};
    facts.magnitude = sum_.at(i, j) + bias;
    if (bound == Bound::offset_weight) {
      if (!offset_) offset_ = product(x_, weight([](int q, int z) { return q + 24 + std::abs(24 + z); }));
      facts.offset_magnitude = offset_->at(i, j) + bias;
    }
    facts.a_magnitude = x_sums_[static_cast<std::size_t>(i)];
    facts.max_scale = scales_[static_cast<std::size_t>(j)];
    return facts;
  }

 private:
  double scale(std::int64_t j, std::int64_t k) const {
    if (args_.weight_scale.rank == 2) return load<double>(args_.weight_scale, j, k / group_);
    return load<double>(args_.weight_scale, args_.weight_scale.rows() == 1 ? 0 : j);
  }

  // (k, n), as `value` makes it of an integer and its zero point.
  template <class Value>
  Magnitudes weight(const Value& value) const {
    const bool out_in = d_.weight_layout == WeightLayout::out_in;
    return {d_.k, d_.n, [&](std::int64_t k, std::int64_t j) {
              const int z = d_.weight.zero_point ? load_integer(args_.weight_zero_point, j, k / group_) : 0;
              const int q = out_in ? load_integer(args_.weight, j, k) : load_integer(args_.weight, k, j);
              return value(q, z) * scale(j, k);
            }};
  }

  LinearDescription d_;
  LinearArgs args_;
  std::int64_t group_;
  Magnitudes x_;
  std::vector<double> x_sums_;
  Magnitudes sum_;
  std::optional<Magnitudes> offset_;
  std::vector<double> scales_;  // of each output, the largest
};

// What the float sums of the backward depend on; its other outputs are bit for bit.
class BackwardFacts {
 public:
  BackwardFacts(const LinearBackwardDescription& d, const LinearBackwardArgs& args) : d_(d) {
    const std::int64_t m = args.dy.rows();
    const bool out_in = d.weight_layout == WeightLayout::out_in;
    if (d.dx == Product::dequantized) {
      const bool per_channel = d.weight.granularity == Granularity::row;
      const Magnitudes dy(m, d.n, [&](std::int64_t i, std::int64_t j) { return load<double>(args.dy, i, j); });
      const Magnitudes w(d.n, d.k, [&](std::int64_t j, std::int64_t k) {
        const int q = out_in ? load_integer(args.weight, j, k) : load_integer(args.weight, k, j);
        return q * load<double>(args.weight_scale, per_channel ? j : 0);
      });
      dx_ = {{.a = d.dy, .terms = d.n, .max_scale = largest(args.weight_scale)}, product(dy, w), row_sums(dy)};
    }
    const Magnitudes dy_t(d.n, m, [&](std::int64_t j, std::int64_t i) { return load<double>(args.dy, i, j); });
    if (d.dw == Product::dequantized) {
      const bool per_token = d.activation == Activation::dynamic_per_token;
      const Magnitudes x(m, d.k, [&](std::int64_t i, std::int64_t k) {
        const double s = args.x_scale.present() ? load<double>(args.x_scale, per_token ? i : 0) : d.static_scale;
        return (d.x_transposed ? load_integer(args.x, k, i) : load_integer(args.x, i, k)) * s;
      });
      // With dw_accumulate both round the product before it is added.
      SumFacts facts{.a = d.dy, .terms = m + (d.dw_accumulate ? 2 : 0)};
      facts.max_scale = args.x_scale.present() ? largest(args.x_scale) : d.static_scale;
      dw_ = {facts, product(dy_t, x), row_sums(dy_t)};
    }
    if (d.db) db_ = {{.a = d.dy, .terms = m}, {}, row_sums(dy_t)};
  }

  SumFacts dx(std::int64_t i, std::int64_t k) const { return dx_.at(i, k); }
  SumFacts dw(std::int64_t row, std::int64_t col) const {
    return d_.dw_layout.value_or(d_.weight_layout) == WeightLayout::out_in ? dw_.at(row, col) : dw_.at(col, row);
  }
  SumFacts db(std::int64_t j) const {
    SumFacts facts = db_.facts;
    facts.magnitude = db_.sums[static_cast<std::size_t>(j)];
    return facts;
  }

 private:
  struct Output {
    SumFacts facts = {};
    std::optional<Magnitudes> product = {};
    std::vector<double> sums = {};  // of a row of dY or of its transpose

    SumFacts at(std::int64_t row, std::int64_t col) const {
      SumFacts at = facts;
      at.magnitude = product->at(row, col);
      at.a_magnitude = sums[static_cast<std::size_t>(row)];
      return at;
    }
  };

  LinearBackwardDescription d_;
  Output dx_, dw_, db_;
};

// Facts, of an output's element, by the names of BackwardFacts.
template <class Description, class Facts>
void set_backward_facts(Tensors& tensors, const Description& d, const std::shared_ptr<Facts>& facts) {
  const Task w8a16{Operation::gemm, kW8A16};
  if (d.dx == Product::dequantized) {
    tensors.set_facts("dx", w8a16, [facts](Bound, auto i, auto k) { return facts->dx(i, k); });
  }
  if (d.dw == Product::dequantized) {
    tensors.set_facts("dw", w8a16, [facts](Bound, auto r, auto c) { return facts->dw(r, c); });
  }
  if (d.db) {
    tensors.set_facts("db", {Operation::column_sum}, [facts](Bound, auto r, auto c) {
      if constexpr (requires { facts->db(r, c); }) {
        return facts->db(r, c);
      } else {
        return facts->db(r);
      }
    });
  }
}

ConstTensor row_of(const ConstTensor& t, std::int64_t row) { return rows_at(t, row, 1); }

ConstTensor column_of(ConstTensor t, std::int64_t col) {
  if (t.data) t.data = static_cast<const std::byte*>(t.data) + col * bits(t.dtype) / 8;
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

// What the error of the experts' float sums depends on: that of an expert's row, or of a sum of them over slots.
class GroupedFacts {
 public:
  GroupedFacts(const GroupedLinearDescription& d, const GroupedLinearArgs& args) : d_(d), args_(args) {
    for (std::int64_t e = 0; e < d.experts; ++e) {
      const std::int64_t first = load_integer(args.offsets, e);
      const std::int64_t count = load_integer(args.offsets, e + 1) - first;
      if (count == 0) continue;
      const Alone& x = *rows_.emplace_back(std::make_unique<Alone>(ConstTensor{nullptr, d.x, {}, 2, {count, d.k}, {}}));
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t from = d.gather ? load_integer(args.token, first + r) : first + r;
        for (std::int64_t k = 0; k < d.k; ++k) store(x.view, r, k, load<double>(args.x, from, k));
      }
      LinearArgs one{.x = x.view, .weight = expert_rows(args.weight, e, d.n)};
      one.weight_scale = expert_rows(args.weight_scale, e, d.weight.granularity == Granularity::tensor ? 1 : d.n);
      one.weight_zero_point = expert_rows(args.weight_zero_point, e, d.n);
      if (d.bias) one.bias = as_vector(rows_at(args.bias, e, 1));
      const LinearDescription dense{.n = d.n, .k = d.k, .x = d.x, .weight = d.weight, .bias = d.bias};
      const auto facts = std::make_shared<ForwardFacts>(dense, one);
      for (std::int64_t r = 0; r < count; ++r) of_row_[first + r] = {facts, r};
    }
  }

  SumFacts at(Bound bound, std::int64_t i, std::int64_t j) {
    if (d_.slots == 0) return of(bound, i, j);
    SumFacts sum{.a = d_.x, .terms = d_.k + d_.slots};
    for (std::int64_t s = 0; s < d_.slots; ++s) {
      const double weight = std::abs(load<double>(args_.router_weight, i, s));
      const SumFacts one = of(bound, load_integer(args_.place, i, s), j);
      sum.several_scales = sum.several_scales || one.several_scales;
      sum.magnitude += weight * one.magnitude;
      sum.offset_magnitude += weight * one.offset_magnitude;
      sum.a_magnitude += weight * one.a_magnitude;
      sum.max_scale = std::max(sum.max_scale, one.max_scale);
    }
    return sum;
  }

 private:
  SumFacts of(Bound bound, std::int64_t row, std::int64_t j) {
    const auto found = of_row_.find(row);
    return found == of_row_.end() ? SumFacts{.a = d_.x} : found->second.first->at(bound, found->second.second, j);
  }

  GroupedLinearDescription d_;
  GroupedLinearArgs args_;
  std::vector<std::unique_ptr<Alone>> rows_;
  std::map<std::int64_t, std::pair<std::shared_ptr<ForwardFacts>, std::int64_t>> of_row_;
};

class GroupedBackwardFacts {
 public:
  GroupedBackwardFacts(const GroupedLinearBackwardDescription& d, const GroupedLinearBackwardArgs& args) : n_(d.n) {
    for (std::int64_t e = 0; e < d.experts; ++e) {
      const std::int64_t first = load_integer(args.offsets, e);
      const std::int64_t count = load_integer(args.offsets, e + 1) - first;
      LinearBackwardArgs one{.dy = rows_at(args.dy, first, count)};
      one.weight = expert_rows(args.weight, e, d.n);
      one.weight_scale = expert_rows(args.weight_scale, e, d.weight.granularity == Granularity::tensor ? 1 : d.n);
      one.x = rows_at(args.x, first, count);
      one.x_scale = rows_at(args.x_scale, first, count);
      const auto dense = with_fields<LinearBackwardDescription>(
          OCTILE_FIELDS(a.n, a.k, a.dy, a.dw_accumulate, a.dx, a.dw, a.db, a.activation, a.static_scale, a.weight), d);
      for (std::int64_t r = 0; r < count; ++r) of_row_[first + r] = {e, r};
      experts_.emplace_back(dense, one);
    }
  }

  SumFacts dx(std::int64_t row, std::int64_t k) const {
    const auto found = of_row_.find(row);
    return found == of_row_.end() ? SumFacts{} : expert(found->second.first).dx(found->second.second, k);
  }
  SumFacts dw(std::int64_t row, std::int64_t k) const { return expert(row / n_).dw(row % n_, k); }
  SumFacts db(std::int64_t e, std::int64_t j) const { return expert(e).db(j); }

 private:
  const BackwardFacts& expert(std::int64_t e) const { return experts_[static_cast<std::size_t>(e)]; }

  std::int64_t n_;
  std::vector<BackwardFacts> experts_;
  std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> of_row_;  // expert, and row of it
};

// Of one layer, or of experts'.
template <class Args, class Facts, class Case>
Trial forward_trial(const Case& c, std::uint64_t seed, const std::vector<Operand>& operands,
                    void (*oracle)(const typename Kind<Args>::Description&, const Args&)) {
  const auto& d = c.description;
  const auto tensors = std::make_shared<Tensors>(c, seed);
  const bool sums_in_float = d.activation == Activation::none;
  if (sums_in_float) tensors->keep_sums_finite();
  const auto args = args_of<Args>(tensors->add(operands), 0);
  auto unpacked = d;
  unpacked.packed_weight = false;
  expect(*tensors, c, unpacked, args, oracle);
  Trial trial{tensors, runner(tensors, d, args)};
  if (!sums_in_float || d.k == 0) return trial;
  const auto facts = std::make_shared<Facts>(d, args);
  tensors->set_facts("y", {Operation::gemm, {d.weight.type, true}},
                     [facts](Bound bound, auto i, auto j) { return facts->at(bound, i, j); });
  if constexpr (std::is_same_v<Args, LinearArgs>) {
    trial.rows_alone = [d, args](const Attempt& attempt) { return linear_rows_alone(d, args, attempt); };
  }
  return trial;
}

template <class Args, class Facts, class Case>
Trial backward_trial(const Case& c, std::uint64_t seed, const std::vector<Operand>& operands,
                     void (*oracle)(const typename Kind<Args>::Description&, const Args&)) {
  const auto& d = c.description;
  const auto tensors = std::make_shared<Tensors>(c, seed);
  const bool dequantizes = d.dx == Product::dequantized || d.dw == Product::dequantized;
  if (dequantizes || d.db) tensors->keep_sums_finite();
  const std::vector<Tensor> views = tensors->add(operands);
  const auto args = args_of<Args>(views, tensors->random());
  expect(*tensors, c, d, args, oracle);
  set_backward_facts(*tensors, d, std::make_shared<Facts>(d, args));
  Trial trial{tensors, runner(tensors, d, args)};
  if constexpr (std::is_same_v<Args, LinearBackwardArgs>) {
    if (!dequantizes) return trial;
    trial.rows_alone = [d, args](const Attempt& attempt) { return gradient_rows_alone(d, args, attempt); };
  }
  return trial;
}

}  // namespace

Trial trial_of(const LinearCase& c, std::uint64_t seed) {
  return forward_trial<LinearArgs, ForwardFacts>(c, seed, operands<LinearArgs>(c.description, c.rows), oracle::linear);
}

Trial trial_of(const LinearBackwardCase& c, std::uint64_t seed) {
  return backward_trial<LinearBackwardArgs, BackwardFacts>(c, seed, operands<LinearBackwardArgs>(c.description, c.rows),
                                                           oracle::linear_backward);
}

Trial trial_of(const GroupedLinearCase& c, std::uint64_t seed) {
  return forward_trial<GroupedLinearArgs, GroupedFacts>(c, seed, operands(c), oracle::grouped_linear);
}

Trial trial_of(const GroupedLinearBackwardCase& c, std::uint64_t seed) {
  return backward_trial<GroupedLinearBackwardArgs, GroupedBackwardFacts>(c, seed, operands(c),
                                                                         oracle::grouped_linear_backward);
}

}  // namespace octile::check
