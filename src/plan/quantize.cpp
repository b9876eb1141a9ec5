// The six quantizer plans: check the description, ask the kernel table, bind the caller's tensors, launch.
#include "octile/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "base/float_environment.h"
#include "base/message.h"
#include "base/validate.h"
#include "plan/plan.h"

namespace octile {

namespace {

struct QuantizerImpl : Plan::Impl {
  QuantizeStep step;
};

void resolve_range(std::string_view function, QuantizeProblem& p) {
  const bool symmetric = p.mapping == Mapping::symmetric;
  const auto [type_min, type_max] = range_of(p.q);
  if (p.q_min == 0 && p.q_max == 0) std::tie(p.q_min, p.q_max) = default_range(p.q, p.mapping);
  if (p.q_max <= p.q_min || p.q_min < type_min || p.q_max > type_max || p.q_min > 0 || p.q_max < 0 ||
      (symmetric && p.q_max == 0)) {
    fail(Status::invalid_argument, function, ": q_min = ", p.q_min, ", q_max = ", p.q_max, ": expected ", type_min,
         " <= q_min < q_max <= ", type_max, " for ", p.q, ", with 0 in the range",
         symmetric ? " and q_max > 0 (symmetric)" : "");
  }
}

void check_min_scale(std::string_view function, const QuantizeProblem& p) {
  if (p.min_scale >= kMinScale && p.min_scale <= 1) return;
  fail(Status::invalid_argument, function, ": min_scale = ", p.min_scale, ": expected 2^-79 to 1");
}

// A quantizer with a prologue has rows of its own.
Task task_of(Operation operation, const QuantizeDescription& description) {
  return {operation == Operation::quantize && description.prologue != Prologue::none ? Operation::prologue_quantize
                                                                                     : operation};
}

template <class Args>
constexpr Operation kOperation = Operation::quantize;
template <>
constexpr Operation kOperation<DequantizeArgs> = Operation::dequantize;
template <>
constexpr Operation kOperation<QuantizeBackwardArgs> = Operation::quantize_backward;
template <>
constexpr Operation kOperation<DequantizeBackwardArgs> = Operation::dequantize_backward;
template <>
constexpr Operation kOperation<FakeQuantizeArgs> = Operation::fake_quantize;
template <>
constexpr Operation kOperation<FakeQuantizeBackwardArgs> = Operation::fake_quantize_backward;

std::string_view plan_name(Operation operation) {
  static constexpr std::array<std::string_view, 6> kNames = {"QuantizePlan",         "DequantizePlan",
                                                             "QuantizeBackwardPlan", "DequantizeBackwardPlan",
                                                             "FakeQuantizePlan",     "FakeQuantizeBackwardPlan"};
  return kNames[static_cast<std::size_t>(operation)];
}

void check_norm(std::string_view function, const QuantizeProblem& p) {
  if (!is_norm(p.prologue)) {
    if (p.residual) fail(Status::invalid_argument, function, ": residual without a norm");
    return;
  }
  if (p.gated)
    fail(Status::invalid_argument, function, ": gated with ", name(p.prologue), ", which is not an activation");
  const auto epsilon = static_cast<float>(p.epsilon);
  if (!(epsilon >= 0 && std::isfinite(epsilon))) {
    fail(Status::invalid_argument, function, ": epsilon = ", p.epsilon, ": expected at least 0 and finite in f32");
  }
  if (p.norm_weight != DType::f32 && p.norm_weight != p.x) {
    fail(Status::unsupported, function, ": norm_weight = ", p.norm_weight, " with x = ", p.x,
         ": expected f32 or x's type");
  }
}

void check_prologue(std::string_view function, Operation operation, const QuantizeProblem& p) {
  check_norm(function, p);
  if (p.prologue == Prologue::none) {
    if (p.gated) fail(Status::invalid_argument, function, ": gated without a prologue");
    return;
  }
  if (operation != Operation::quantize) {
    fail(Status::unsupported, function, ": prologue = ", name(p.prologue), ": only QuantizePlan takes one");
  }
  const bool plain = p.granularity == Granularity::row && p.scale == ScaleSource::dynamic &&
                     p.mapping == Mapping::symmetric && p.rounding == Rounding::nearest &&
                     p.multiplier == Multiplier::none;
  if (plain && p.x != DType::f64 && p.q == DType::s8) return;
  fail(Status::unsupported, function, ": prologue = ", name(p.prologue), " with x = ", p.x, ", q = ", p.q,
       ", granularity = ", name(p.granularity), ", ", name(p.scale), ' ', name(p.mapping), ", ", name(p.rounding),
       ", multiplier = ", name(p.multiplier), ": expected f16, bf16 or f32, s8, row, dynamic symmetric, nearest, none");
}

// The description's checks, and its range made explicit.
QuantizeProblem checked_problem(std::string_view function, Operation operation,
                                const QuantizeDescription& description) {
  QuantizeProblem p = description;
  check_size(function, "rows", p.rows);
  check_size(function, "cols", p.cols);
  check_bytes(function, "a matrix", p.rows, p.cols);
  check_choice(function, "x", p.x, kLastDType);
  check_choice(function, "q", p.q, kLastDType);
  if (!is_float(p.x)) fail(Status::unsupported, function, ": x = ", p.x, ", expected f16, bf16, f32 or f64");
  if (!is_quantized(p.q)) fail(Status::unsupported, function, ": q = ", p.q, ", expected s8, u8 or s4");
  check_choice(function, "granularity", p.granularity, Granularity::group);
  check_choice(function, "scale", p.scale, ScaleSource::given);
  check_choice(function, "mapping", p.mapping, Mapping::affine);
  check_choice(function, "rounding", p.rounding, Rounding::stochastic);
  check_choice(function, "orientation", p.orientation, Orientation::both);
  check_choice(function, "multiplier", p.multiplier, Multiplier::per_row);
  check_choice(function, "mask", p.mask, Mask::exclusive);
  check_choice(function, "prologue", p.prologue, Prologue::layer_norm);
  check_choice(function, "norm_weight", p.norm_weight, kLastDType);
  check_threads(function, p.threads);
  check_device(function, p.device);
  check_requested_kernel(function, {p.kernel, p.device, {task_of(operation, p)}});
  resolve_range(function, p);
  check_min_scale(function, p);
  if (p.granularity == Granularity::group && (p.group <= 0 || p.cols % p.group != 0)) {
    fail(Status::invalid_argument, function, ": group = ", p.group, " does not divide cols = ", p.cols);
  }
  if (operation != Operation::quantize &&
      (p.multiplier != Multiplier::none || p.orientation != Orientation::row_major)) {
    fail(Status::unsupported, function, ": multiplier = ", name(p.multiplier), ", orientation = ", name(p.orientation),
         ": only QuantizePlan takes other than none and row_major");
  }
  check_prologue(function, operation, p);
  return p;
}

std::shared_ptr<const Plan::Impl> select_quantizer(Operation operation, const QuantizeDescription& description) {
  const std::string function = message(plan_name(operation), "::select");
  auto impl = std::make_shared<QuantizerImpl>();
  const QuantizeProblem p = checked_problem(function, operation, description);
  impl->function = message(plan_name(operation), "::run");
  const Task task = task_of(operation, p);
  impl->step = choose(quantize_kernels(), task, p, function, p.kernel);
  impl->step.problem.kernel.clear();  // rows may copy the problem in run(), which allocates nothing
  impl->explanation = message(name(task), " ", p.rows, " x ", p.cols, " ", p.x, " <-> ", p.q, " [", p.q_min, ", ",
                              p.q_max, "], ", name(p.granularity));
  if (p.granularity == Granularity::group) impl->explanation += message(" of ", p.group);
  impl->explanation +=
      message(", ", name(p.scale), " ", name(p.mapping), ", ", name(p.rounding), ", ", name(p.orientation));
  if (p.prologue != Prologue::none) {
    impl->explanation +=
        message(" of ", name(p.prologue), p.gated ? " times up" : "", p.residual ? " of x + residual" : "");
  }
  impl->explanation += message(", on ", p.device, "\n");
  impl->add(name(task), impl->step);
  impl->describe_times(p.device, p.threads);
  impl->reserve_scratch(impl->step.workspace);
  impl->guarantee = {true, true, scale_type(p.x), "exact"};
  return impl;
}

struct Segments {
  const QuantizeProblem& problem;
  std::array<std::int64_t, 2> shape;  // of the matrix in this call
  bool expected = true;               // as for TensorChecks
};

// Scales or zero points, checked for the shape that they have at this granularity, as strides over the matrix.
template <class Void>
Scales bind_segments(TensorChecks& checks, std::string_view what, const BasicTensor<Void>& t, DType dtype,
                     const Segments& segments) {
  const auto& [p, shape, expected] = segments;
  if (!expected) return checks.absent(what, t), Scales{};
  switch (p.granularity) {
    case Granularity::tensor:
      return scales_over(p, checks.vector(what, t, dtype, 1), shape[1]);
    case Granularity::row:
      return scales_over(p, checks.vector(what, t, dtype, shape[0]), shape[1]);
    case Granularity::column:
      return scales_over(p, checks.vector(what, t, dtype, shape[1]), shape[1]);
    case Granularity::group:
      break;
  }
  return scales_over(p, checks.matrix(what, t, dtype, {shape[0], shape[1] / p.group}), shape[1]);
}

// A given scale is the caller's own number, so a bad one is an error; a computed one may be NaN, which reports bad
// data.
template <class Real>
void check_scale_values(const TensorChecks& checks, const ConstTensor& t) {
  for_each_element(t, [&](std::int64_t i, std::int64_t r, std::int64_t c) {
    const Real s = static_cast<const Real*>(t.data)[i];
    if (s > 0 && std::isfinite(s)) return;
    fail(Status::invalid_argument, checks.function(), ": given_scale[", place_in(t, r, c), "] = ", s,
         ", expected positive and finite");
  });
}

// Values are checked if the host can read them.
bool readable(const QuantizeProblem& p) { return p.device.type == DeviceType::cpu; }

// A scale and a zero point that come in, and their names in the arguments.
struct Incoming {
  const ConstTensor& scale;
  const ConstTensor& zero_point;
  std::string_view scale_name = "scale";
  std::string_view zero_point_name = "zero_point";
};

// For the plan's matrix of this shape.
void bind_incoming(TensorChecks& checks, const QuantizeProblem& p, std::array<std::int64_t, 2> shape,
                   const Incoming& in, QuantizeOperands& o) {
  o.given_scale = bind_segments(checks, in.scale_name, in.scale, scale_type(p.x), {p, shape});
  const bool affine = p.mapping == Mapping::affine;
  o.given_zero_point = bind_segments(checks, in.zero_point_name, in.zero_point, DType::s32, {p, shape, affine});
  if (affine && readable(p)) check_values_within(checks, in.zero_point_name, in.zero_point, p.q_min, p.q_max);
}

// The scale of a quantizer, given or dynamic, in and out.
template <class Args>
void bind_quantizer_scales(TensorChecks& checks, const QuantizeProblem& p, std::array<std::int64_t, 2> shape,
                           const Args& args, QuantizeOperands& o) {
  const bool dynamic = p.scale == ScaleSource::dynamic;
  if (dynamic) {
    checks.absent("given_scale", args.given_scale);
    checks.absent("given_zero_point", args.given_zero_point);
  } else {
    bind_incoming(checks, p, shape, {args.given_scale, args.given_zero_point, "given_scale", "given_zero_point"}, o);
    if (readable(p)) {
      p.x == DType::f64 ? check_scale_values<double>(checks, args.given_scale)
                        : check_scale_values<float>(checks, args.given_scale);
    }
  }
  // Quantize reports a bad segment of a given scale here. Fake quantize has none: what is bad is NaN in y itself.
  constexpr bool kReportsGiven = std::is_same_v<Args, QuantizeArgs>;
  const bool reports = dynamic || (kReportsGiven && args.scale.present());
  o.scale = bind_segments(checks, "scale", args.scale, scale_type(p.x), {p, shape, reports});
  const bool affine = dynamic && p.mapping == Mapping::affine;
  o.zero_point = bind_segments(checks, "zero_point", args.zero_point, DType::s32, {p, shape, affine});
}

// The shape that this call runs.
std::array<std::int64_t, 2> shape_of(const QuantizerImpl& impl, std::string_view what, const ConstTensor& t) {
  const QuantizeProblem& p = impl.step.problem;
  return {rows_of_call(impl.function, what, t, {p.rows, p.cols}), p.cols};
}

void bind_norm(TensorChecks& checks, const QuantizeProblem& p, std::array<std::int64_t, 2> shape,
               const QuantizeArgs& args, QuantizeOperands& o) {
  const bool norm = is_norm(p.prologue);
  const bool centred = p.prologue == Prologue::layer_norm;
  o.norm_weight = checks.vector("norm_weight", args.norm_weight, p.norm_weight, shape[1], norm);
  o.norm_bias = checks.vector("norm_bias", args.norm_bias, p.norm_weight, shape[1], centred);
  o.residual = checks.matrix("residual", args.residual, p.x, shape, p.residual);
  o.sum = checks.matrix("sum", args.sum, p.x, shape, p.residual);
  o.mean = checks.vector("mean", args.mean, DType::f32, shape[0], centred && args.mean.present());
  o.rstd = checks.vector("rstd", args.rstd, DType::f32, shape[0], norm && args.rstd.present());
}

QuantizeOperands bind(const QuantizerImpl& impl, const QuantizeArgs& args, TensorChecks& checks) {
  const QuantizeProblem& p = impl.step.problem;
  const auto shape = shape_of(impl, "x", args.x);
  QuantizeOperands o;
  o.x = checks.matrix("x", args.x, p.x, shape);
  const std::int64_t factors = shape[p.multiplier == Multiplier::per_column ? 1 : 0];
  const bool multiplies = p.multiplier != Multiplier::none;
  o.multiplier = checks.vector("multiplier", args.multiplier, scale_type(p.x), factors, multiplies);
  o.up = checks.matrix("up", args.up, p.x, shape, p.gated);
  bind_norm(checks, p, shape, args, o);
  bind_quantizer_scales(checks, p, shape, args, o);
  const bool transposes = p.orientation != Orientation::row_major;
  o.q = checks.matrix("q", args.q, p.q, shape, p.orientation != Orientation::transposed);
  o.q_transposed = checks.matrix("q_transposed", args.q_transposed, p.q, {shape[1], shape[0]}, transposes);
  o.seed = args.seed;
  return o;
}

QuantizeOperands bind(const QuantizerImpl& impl, const DequantizeArgs& args, TensorChecks& checks) {
  const QuantizeProblem& p = impl.step.problem;
  const auto shape = shape_of(impl, "q", args.q);
  QuantizeOperands o;
  o.q_in = checks.matrix("q", args.q, p.q, shape);
  o.y = checks.matrix("x", args.x, p.x, shape);
  bind_incoming(checks, p, shape, {args.scale, args.zero_point}, o);
  return o;
}

QuantizeOperands bind(const QuantizerImpl& impl, const DequantizeBackwardArgs& args, TensorChecks& checks) {
  const QuantizeProblem& p = impl.step.problem;
  const auto shape = shape_of(impl, "dy", args.dy);
  QuantizeOperands o;
  o.dy = checks.matrix("dy", args.dy, p.x, shape);
  o.y = checks.matrix("dq", args.dq, p.x, shape);
  o.given_scale = bind_segments(checks, "scale", args.scale, scale_type(p.x), {p, shape});
  return o;
}

QuantizeOperands bind(const QuantizerImpl& impl, const FakeQuantizeArgs& args, TensorChecks& checks) {
  const QuantizeProblem& p = impl.step.problem;
  const auto shape = shape_of(impl, "x", args.x);
  QuantizeOperands o;
  o.x = checks.matrix("x", args.x, p.x, shape);
  o.y = checks.matrix("y", args.y, p.x, shape);
  bind_quantizer_scales(checks, p, shape, args, o);
  o.seed = args.seed;
  return o;
}

// QuantizeBackwardArgs and FakeQuantizeBackwardArgs have the same fields.
template <class Args>
QuantizeOperands bind(const QuantizerImpl& impl, const Args& args, TensorChecks& checks) {
  const QuantizeProblem& p = impl.step.problem;
  const auto shape = shape_of(impl, "dy", args.dy);
  QuantizeOperands o;
  o.dy = checks.matrix("dy", args.dy, p.x, shape);
  o.x = checks.matrix("x", args.x, p.x, shape);
  o.y = checks.matrix("dx", args.dx, p.x, shape);
  bind_incoming(checks, p, shape, {args.scale, args.zero_point}, o);
  return o;
}

template <class Args>
void run(const QuantizerImpl& impl, const Args& args, Workspace workspace, Stream stream) {
  TensorChecks checks(impl.function, impl.step.problem.device);
  const QuantizeOperands o = bind(impl, args, checks);
  std::byte* const scratch = finish_checks(checks, impl, workspace);
  const ConstTensor& shaped = o.x.present() ? o.x : o.q_in.present() ? o.q_in : o.dy;
  if (shaped.rows() == 0 || shaped.cols() == 0) return;
  launch(impl, impl.step, o, scratch, stream);
}

}  // namespace

template <class Args>
QuantizerPlan<Args> QuantizerPlan<Args>::select(const QuantizeDescription& description) {
  const cpu::FloatEnvironment environment;
  return QuantizerPlan(select_quantizer(kOperation<Args>, description));
}

template <class Args>
Verdict QuantizerPlan<Args>::can_implement(const Args& args) const {
  const QuantizerImpl& impl = impl_->as<QuantizerImpl>();
  return verdict_on(impl, impl.step.problem.device, args);
}

template <class Args>
void QuantizerPlan<Args>::run(const Args& args, Workspace workspace, Stream stream) const {
  const cpu::FloatEnvironment environment;
  octile::run(impl_->as<QuantizerImpl>(), args, workspace, stream);
}

template class QuantizerPlan<QuantizeArgs>;
template class QuantizerPlan<DequantizeArgs>;
template class QuantizerPlan<QuantizeBackwardArgs>;
template class QuantizerPlan<DequantizeBackwardArgs>;
template class QuantizerPlan<FakeQuantizeArgs>;
template class QuantizerPlan<FakeQuantizeBackwardArgs>;

}  // namespace octile
