// LinearPlan: check the description, ask the kernel table for a quantizer (where X is float) and for the product, bind
// the caller's tensors, launch.
#include "octile/linear.h"

#include <algorithm>

#include "base/float_environment.h"
#include "base/message.h"
#include "base/validate.h"
#include "plan/packed_weight.h"
#include "plan/plan.h"

namespace octile {

namespace {

constexpr std::string_view kSelect = "LinearPlan::select";
constexpr std::string_view kPack = "LinearPlan::pack";

struct LinearImpl : Plan::Impl {
  LinearDescription description;
  bool quantizes = false;  // X is float, and the product takes it as s8
  QuantizeStep quantize;
  ProductStep product;
  StaticScale static_scale;
  std::size_t xq_at = 0;  // (m, k) s8, pitch xq_pitch
  std::int64_t xq_pitch = 0;
  std::size_t x_scale_at = 0;  // (m), or (1) for dynamic_per_tensor
};

void check_types(std::string_view function, const LinearDescription& d) {
  check_choice(function, "x", d.x, kLastDType);
  check_choice(function, "y", d.y, kLastDType);
  check_choice(function, "activation", d.activation, Activation::static_per_tensor);
  check_choice(function, "weight_layout", d.weight_layout, WeightLayout::in_out);
  if (!is_float(d.x) && d.x != DType::s8) {
    fail(Status::unsupported, function, ": x = ", d.x, ", expected f16, bf16, f32, f64 or s8");
  }
  if (!is_float(d.y)) fail(Status::unsupported, function, ": y = ", d.y, ", expected f16, bf16, f32 or f64");
  if (d.x != DType::s8 && (d.x == DType::f64) != (d.y == DType::f64)) {
    fail(Status::unsupported, function, ": x = ", d.x, ", y = ", d.y, ": f64 goes in and out together");
  }
}

// What W8A8 and W4A8 have in common.
void check_a8(std::string_view function, const LinearDescription& d) {
  if (d.k > kMaxContraction) {
    fail(Status::unsupported, function, ": k = ", d.k, ", expected at most ", kMaxContraction,
         ": a longer sum of s8 products can overflow s32");
  }
  if (d.x == DType::s8 && d.x_multiplier) {
    fail(Status::unsupported, function, ": x_multiplier with x = s8: X is quantized already");
  }
  if (d.activation == Activation::static_per_tensor) check_static_scale(function, d.static_scale, scale_type(d.y));
}

void check_formats(std::string_view function, const LinearDescription& d) {
  check_weight_format(function, d.weight, d.k);
  if (d.packed_weight && !has_packed_form(d.weight.type)) {
    fail(Status::unsupported, function, ": packed_weight with weight = ", name(d.weight), ", expected s8 or s4");
  }
  if (d.activation != Activation::none) {
    check_a8(function, d);
  } else if (d.x == DType::s8) {
    fail(Status::unsupported, function, ": weight = ", name(d.weight),
         " with activation = none, x = s8, expected a float x");
  } else if (d.x_multiplier) {
    fail(Status::unsupported, function, ": x_multiplier with activation = none: nothing is quantized");
  }
  const bool per_channel = d.weight.granularity != Granularity::group && d.activation != Activation::none;
  if (d.weight_layout != WeightLayout::out_in && !per_channel) {
    fail(Status::unsupported, function, ": weight = ", name(d.weight), " in layout in_out, expected out_in");
  }
}

Task task_of(const LinearDescription& d) {
  return {Operation::gemm, {d.weight.type, d.activation == Activation::none}};
}

}  // namespace

void check_linear(std::string_view function, const LinearDescription& d) {
  check_size(function, "m", d.m);
  check_size(function, "n", d.n);
  check_size(function, "k", d.k);
  check_bytes(function, "X", d.m, d.k);
  check_bytes(function, "W", d.n, d.k);
  check_bytes(function, "Y", d.m, d.n);
  check_types(function, d);
  check_formats(function, d);
  check_threads(function, d.threads);
  check_device(function, d.device);
  if (d.kernel.empty()) check_tuning(function, d.device);
  const Task product = task_of(d);
  const bool quantizes = d.activation != Activation::none && d.x != DType::s8;
  check_requested_kernel(function, {d.kernel, d.device, {quantizes ? Task{Operation::quantize} : product, product}});
}

// With a static scale too the quantizer works row by row, so that a NaN in X spoils its own row of Y and no other.
QuantizeProblem quantize_problem(const LinearDescription& d) {
  QuantizeProblem p;
  p.rows = d.m;
  p.cols = d.k;
  p.x = d.x;
  p.granularity = d.activation == Activation::dynamic_per_tensor ? Granularity::tensor : Granularity::row;
  p.scale = d.activation == Activation::static_per_tensor ? ScaleSource::given : ScaleSource::dynamic;
  p.multiplier = d.x_multiplier ? Multiplier::per_column : Multiplier::none;
  p.q_min = -127;
  p.q_max = 127;
  p.device = d.device;
  p.threads = d.threads;
  return p;
}

GemmProblem gemm_problem(const LinearDescription& d) {
  GemmProblem p;
  p.m = d.m;
  p.n = d.n;
  p.k = d.k;
  p.a = d.activation == Activation::none ? d.x : DType::s8;
  p.y = d.y;
  p.scale = scale_type(d.y);
  p.b_major = d.weight_layout == WeightLayout::out_in ? Major::contraction : Major::outer;
  p.b = d.weight;
  const bool float_a = d.activation == Activation::none;
  if (p.b.granularity != Granularity::group || p.b.group == 0) p.b.group = std::max<std::int64_t>(d.k, 1);
  if (p.b.granularity != Granularity::group) p.b.granularity = float_a ? Granularity::group : Granularity::row;
  p.b_packed = d.packed_weight;
  p.bias = d.bias;
  p.device = d.device;
  p.threads = d.threads;
  return p;
}

namespace {

// The caller's weight as it is before it is packed, checked: b, b_scale and zero_point.
void bind_weight(const LinearImpl& impl, const LinearPackArgs& args, TensorChecks& checks, GemmOperands& bound) {
  const LinearDescription& d = impl.description;
  const GemmProblem& p = impl.product.all.problem;
  const bool out_in = d.weight_layout == WeightLayout::out_in;
  const ConstTensor weight =
      checks.matrix("weight", args.weight, d.weight.type, out_in ? std::array{d.n, d.k} : std::array{d.k, d.n});
  bound.b = out_in ? weight : transposed(weight);
  const std::array segments = {d.n, d.k / p.b.group};
  if (d.weight.granularity == Granularity::group) {
    bound.b_scale = checks.matrix("weight_scale", args.weight_scale, p.scale, segments);
  } else {
    const bool per_channel = d.weight.granularity == Granularity::row;
    const ConstTensor scale = checks.vector("weight_scale", args.weight_scale, p.scale, per_channel ? d.n : 1);
    bound.b_scale = per_channel ? scale : repeated(scale, d.n);
    if (p.grouped()) bound.b_scale = as_column(bound.b_scale);
  }
  const bool affine = d.weight.zero_point;
  const ConstTensor z = checks.matrix("weight_zero_point", args.weight_zero_point, DType::s32, segments, affine);
  const auto [low, high] = range_of(d.weight.type);
  if (affine && z.device.type == DeviceType::cpu) check_values_within(checks, "weight_zero_point", z, low, high);
  bound.zero_point = z;
}

struct BoundArgs {
  QuantizeOperands quantize;
  GemmOperands gemm;
};

// The caller's tensors, checked; run adds those in the workspace.
BoundArgs bind(const LinearImpl& impl, const LinearArgs& args, TensorChecks& checks) {
  const LinearDescription& d = impl.description;
  const GemmProblem& p = impl.product.all.problem;
  const std::int64_t m = rows_of_call(impl.function, "x", args.x, {d.m, d.k});
  BoundArgs bound;
  bound.gemm.a = bound.quantize.x = checks.matrix("x", args.x, d.x, {m, d.k});
  bound.gemm.y = checks.matrix("y", args.y, d.y, {m, d.n});
  if (d.x == DType::s8) {
    bound.gemm.a_scale = bind_x_scale(checks, d.activation, impl.static_scale, args.x_scale, m);
  } else {
    checks.absent("x_scale", args.x_scale);
  }
  bound.quantize.multiplier = checks.vector("x_multiplier", args.x_multiplier, p.scale, d.k, d.x_multiplier);

  if (d.packed_weight) {
    bound.gemm.b = checks.vector("weight", args.weight, DType::u8, packed_layout(p).size);
    check_alignment(impl.function, "weight", bound.gemm.b.data);
    checks.absent("weight_scale", args.weight_scale);
    checks.absent("weight_zero_point", args.weight_zero_point);
  } else {
    bind_weight(impl, {args.weight, args.weight_scale, args.weight_zero_point}, checks, bound.gemm);
  }
  bound.gemm.bias = checks.vector("bias", args.bias, d.y, d.n, d.bias);
  return bound;
}

// A quantizer, where X is float, and a product.
void select_steps(LinearImpl& impl, const GemmProblem& p) {
  const LinearDescription& d = impl.description;
  if (impl.quantizes) {
    impl.quantize = choose(quantize_kernels(), {Operation::quantize}, quantize_problem(d), kSelect, d.kernel);
  }
  impl.product.all = choose(gemm_kernels(), task_of(p), p, kSelect, d.kernel);
  impl.product.fewer = choose_fewer_rows(impl.product.all, d.kernel);
  if (impl.quantizes) {
    impl.add("quantize X", impl.quantize);
    impl.xq_pitch = operand_pitch(d.k);
    impl.xq_at = impl.reserve(d.m, impl.xq_pitch, DType::s8);
    impl.x_scale_at = impl.reserve(1, std::max<std::int64_t>(d.m, 1), scale_type(d.x));
  }
  impl.add_product("product", impl.product);
  if (p.b_packed) return;
  GemmProblem packed = p;
  packed.b_packed = true;
  const GemmStep faster = ask(gemm_kernels(), task_of(p), packed, d.kernel);
  if (!faster.kernel || faster.cost.seconds > 0.99 * impl.product.all.cost.seconds) return;
  impl.explanation += message("  packed_weight = true would be faster: ", faster.kernel->name, ": expected ",
                              milliseconds(faster.cost.seconds), "\n");
}

}  // namespace

LinearPlan LinearPlan::select(const LinearDescription& description) {
  const cpu::FloatEnvironment environment;
  check_linear(kSelect, description);
  auto impl = std::make_shared<LinearImpl>();
  const LinearDescription& d = impl->description = description;
  impl->function = "LinearPlan::run";
  impl->static_scale = StaticScale(d.static_scale, scale_type(d.y));
  impl->quantizes = d.activation != Activation::none && d.x != DType::s8;
  impl->explanation = message("linear ", d.m, " x ", d.k, " x ", d.n, " (M x K x N), ", d.x, " -> ", d.y,
                              ", activation ", name(d.activation), ", weight ", name(d.weight),
                              d.weight.granularity != Granularity::group ? ""
                              : d.weight.group == 0                      ? " of a row"
                                                                         : message(" of ", d.weight.group),
                              " ", name(d.weight_layout), d.packed_weight ? ", packed" : "", d.bias ? ", bias" : "",
                              ", on ", d.device, "\n");
  const GemmProblem p = gemm_problem(d);
  select_steps(*impl, p);
  impl->describe_times(d.device, d.threads);
  impl->describe_tuning(d.device, d.kernel);
  impl->reserve_scratch(std::max(impl->quantize.workspace, impl->product.workspace()));
  impl->guarantee = guarantee_of(impl->product.all, "K");
  return LinearPlan(std::move(impl));
}

std::size_t LinearPlan::packed_weight_size() const {
  const LinearImpl& impl = impl_->as<LinearImpl>();
  return impl.description.packed_weight ? static_cast<std::size_t>(packed_layout(impl.product.all.problem).size) : 0;
}

void LinearPlan::pack(const LinearPackArgs& args) const {
  const cpu::FloatEnvironment environment;
  const LinearImpl& impl = impl_->as<LinearImpl>();
  if (!impl.description.packed_weight) {
    fail(Status::unsupported, kPack, ": the plan was selected with packed_weight = false");
  }
  TensorChecks checks(kPack, {});
  GemmOperands bound;
  bind_weight(impl, args, checks, bound);
  const Tensor packed =
      checks.vector("packed", args.packed, DType::u8, static_cast<std::int64_t>(packed_weight_size()));
  check_alignment(kPack, "packed", packed.data);
  checks.no_overlap();
  pack_weight(impl.product.all.problem, bound, static_cast<std::byte*>(packed.data));
}

Verdict LinearPlan::can_implement(const LinearArgs& args) const {
  const LinearImpl& impl = impl_->as<LinearImpl>();
  return verdict_on(impl, impl.description.device, args);
}

void LinearPlan::run(const LinearArgs& args, Workspace workspace, Stream stream) const {
  const cpu::FloatEnvironment environment;
  const LinearImpl& impl = impl_->as<LinearImpl>();
  const LinearDescription& d = impl.description;
  TensorChecks checks(impl.function, d.device);
  BoundArgs bound = bind(impl, args, checks);
  std::byte* const memory = finish_checks(checks, impl, workspace);
  const std::int64_t m = args.x.rows();
  if (m == 0 || d.n == 0) return;
  if (d.k == 0) return write_empty_sum(bound.gemm, d.device, stream);

  if (impl.quantizes) {
    const QuantizeProblem& p = impl.quantize.problem;
    const bool per_row = p.granularity == Granularity::row;
    bound.quantize.q = on(d.device, matrix(reinterpret_cast<std::int8_t*>(memory + impl.xq_at), m, d.k, impl.xq_pitch));
    bound.quantize.scale = {memory + impl.x_scale_at, per_row ? 1 : 0, 0, d.k};
    bound.quantize.given_scale = {const_cast<void*>(impl.static_scale.data()), 0, 0, d.k, true};  // only read
    bound.quantize.next_reads_early = bound.gemm.only_a_pending = impl.product.of(m).kernel->reads_b_early;
    launch(impl, impl.quantize, bound.quantize, memory, stream);
    bound.gemm.a = bound.quantize.q;
    bound.gemm.a_scale = on(d.device, scale_vector(memory + impl.x_scale_at, scale_type(d.x), m, per_row ? 1 : 0));
  }
  launch(impl, impl.product.of(m), bound.gemm, memory, stream);
}

}  // namespace octile
