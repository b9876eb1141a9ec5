// The trials of the quantizer family, and the one entry to all.
#include "check_trial.h"

#include <tuple>

#include "check_run.h"
#include "reference/oracle.h"

namespace octile::cli {

namespace {

using Size = Tensors::Size;

// The quantizer family: everything is bit for bit.
template <class Args>
Trial quantizer_trial(const std::shared_ptr<Tensors>& tensors, const QuantizerCase& c, const Args& args,
                      void (*oracle)(const QuantizeDescription&, const Args&)) {
  expect<QuantizerPlan<Args>>(*tensors, c, c.description, args, oracle);
  return {tensors, runner<QuantizerPlan<Args>>(tensors, c.description, args)};
}

// The shapes of the tensors that come with a case of the quantizer family, and how they are made.
struct QuantizerTensors {
  const QuantizerCase& c;
  const QuantizeDescription& d = c.description;
  std::shared_ptr<Tensors> tensors;
  int q_min = d.q_min;
  int q_max = d.q_max;

  QuantizerTensors(const QuantizerCase& quantizer_case, std::uint64_t seed)
      : c(quantizer_case), tensors(std::make_shared<Tensors>(quantizer_case, seed)) {
    if (q_min == 0 && q_max == 0) std::tie(q_min, q_max) = default_range(d.q, d.mapping);
  }

  Size whole() const { return {c.rows, d.cols}; }
  Size segments() const {
    switch (d.granularity) {
      case Granularity::tensor:
        return {1};
      case Granularity::row:
        return {c.rows};
      case Granularity::column:
        return {d.cols};
      case Granularity::group:
        break;
    }
    return {c.rows, d.cols / d.group};
  }
  bool affine() const { return d.mapping == Mapping::affine; }
  bool dynamic() const { return d.scale == ScaleSource::dynamic; }

  ConstTensor floats() const { return tensors->floats(d.x, whole()); }
  ConstTensor zero_point() const {
    return affine() ? tensors->integers(DType::s32, segments(), {q_min, q_max}) : ConstTensor{};
  }
  ConstTensor given_scale() const {
    return tensors->scales(scale_type(d.x), segments(), tensors->typical_scale(d.x, q_max));
  }
  ConstTensor computed_scale() const {
    return tensors->computed_scales(scale_type(d.x), segments(), tensors->typical_scale(d.x, q_max));
  }

  // What QuantizeArgs and FakeQuantizeArgs have in common.
  template <class Args>
  void add_scales(Args& args) const {
    if (!dynamic()) {
      args.given_scale = given_scale();
      args.given_zero_point = zero_point();
    }
    const bool asked_for = c.scale_out && c.operation == Operation::quantize;
    if (dynamic() || asked_for) args.scale = tensors->output("scale", scale_type(d.x), segments());
    if (dynamic() && affine()) args.zero_point = tensors->output("zero_point", DType::s32, segments());
    args.seed = tensors->random();
  }

  Trial quantize() const {
    QuantizeArgs args{.x = floats()};
    if (d.multiplier != Multiplier::none) {
      const Size size{d.multiplier == Multiplier::per_column ? d.cols : c.rows};
      args.multiplier = tensors->computed_scales(scale_type(d.x), size, 1.0);
    }
    add_scales(args);
    if (d.orientation != Orientation::transposed) args.q = tensors->output("q", d.q, whole());
    if (d.orientation != Orientation::row_major) {
      args.q_transposed = tensors->output("q_transposed", d.q, {d.cols, c.rows});
    }
    return quantizer_trial(tensors, c, args, oracle::quantize);
  }

  Trial dequantize() const {
    const auto [low, high] = range_of(d.q);
    DequantizeArgs args{.q = tensors->integers(d.q, whole(), {low, high})};
    args.scale = computed_scale();
    args.zero_point = zero_point();
    args.x = tensors->output("x", d.x, whole());
    return quantizer_trial(tensors, c, args, oracle::dequantize);
  }

  Trial dequantize_backward() const {
    DequantizeBackwardArgs args{.dy = floats()};
    args.scale = computed_scale();
    args.dq = tensors->output("dq", d.x, whole());
    return quantizer_trial(tensors, c, args, oracle::dequantize_backward);
  }

  Trial fake_quantize() const {
    FakeQuantizeArgs args{.x = floats()};
    add_scales(args);
    args.y = tensors->output("y", d.x, whole());
    return quantizer_trial(tensors, c, args, oracle::fake_quantize);
  }

  // QuantizeBackwardArgs and FakeQuantizeBackwardArgs have the same fields.
  template <class Args>
  Trial straight_through(void (*oracle)(const QuantizeDescription&, const Args&)) const {
    Args args;
    args.dy = floats();
    args.x = floats();
    args.scale = computed_scale();
    args.zero_point = zero_point();
    args.dx = tensors->output("dx", d.x, whole());
    return quantizer_trial(tensors, c, args, oracle);
  }
};

}  // namespace

Trial trial_of(const QuantizerCase& c, std::uint64_t seed) {
  const QuantizerTensors t(c, seed);
  switch (c.operation) {
    case Operation::dequantize:
      return t.dequantize();
    case Operation::quantize_backward:
      return t.straight_through(oracle::quantize_backward);
    case Operation::dequantize_backward:
      return t.dequantize_backward();
    case Operation::fake_quantize:
      return t.fake_quantize();
    case Operation::fake_quantize_backward:
      return t.straight_through(oracle::fake_quantize_backward);
    default:
      return t.quantize();
  }
}

Trial make_trial(const Case& c, std::uint64_t seed) {
  return std::visit([seed](const auto& one) { return trial_of(one, seed); }, c);
}

}  // namespace octile::cli
