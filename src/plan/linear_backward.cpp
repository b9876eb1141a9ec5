// LinearBackwardPlan: up to three products, each a row of the kernel table or two (quantize dY, then multiply).
//
//   dX (M, K)  dequantized: dY * diag(s_w) * Wq         int8: quantize rows of dY * diag(s_w), then q1 * Wq
//   dW (N, K)  dequantized: dY^T * diag(s_x) * Xq       int8: quantize columns of diag(s_x) * dY, then q2^T * Xq
//   dB (N)     the column sums of dY
//
// Where both products are int8, one step may do both quantizers and dB: gradient_quantize. With a gradient_block, one
// step always does everything that dY needs: blocked_gradient_quantize.
#include <algorithm>
#include <array>
#include <optional>

#include "base/ceil_div.h"
#include "base/float_environment.h"
#include "base/message.h"
#include "base/validate.h"
#include "octile/linear.h"
#include "plan/plan.h"

namespace octile {

namespace {

constexpr std::string_view kSelect = "LinearBackwardPlan::select";

// One of dX and dW: the product, before it dY's quantizer if the product is int8 and no other step does it.
struct ProductSteps {
  std::optional<QuantizeStep> quantize;
  ProductStep product;
  std::size_t q_at = 0;      // dY quantized: (m, n), or transposed (n, m)
  std::size_t scale_at = 0;  // (m), or (n); for each block of the contraction
};

struct LinearBackwardImpl : Plan::Impl {
  LinearBackwardDescription description;
  StaticScale static_scale;
  StaticScale one;
  std::optional<QuantizeStep> gradient;  // in place of both quantizers, and of db
  std::optional<ProductSteps> dx;
  std::optional<ProductSteps> dw;
  std::optional<GemmStep> db;
  GradientGuarantees guarantees;
};

DType dw_dtype(const LinearBackwardDescription& d) { return d.dw_dtype.value_or(d.dy); }
WeightLayout dw_layout(const LinearBackwardDescription& d) { return d.dw_layout.value_or(d.weight_layout); }

bool is_int8(const LinearBackwardDescription& d) { return d.dx == Product::int8 || d.dw == Product::int8; }
bool is_blocked(const LinearBackwardDescription& d) { return d.gradient_block > 0; }

void check_block(std::string_view function, const LinearBackwardDescription& d) {
  const std::int64_t block = d.gradient_block;
  if (block == 0) return;
  if (block < kMinGradientBlock || block > kMaxGradientBlock || (block & (block - 1)) != 0) {
    fail(Status::unsupported, function, ": gradient_block = ", block, ", expected 0, 128, 256, 512 or 1024");
  }
  if (!is_int8(d)) {
    fail(Status::unsupported, function, ": gradient_block = ", block, " with dx = ", name(d.dx), ", dw = ", name(d.dw),
         ", expected an int8 product");
  }
}

void check_contraction(std::string_view function, std::string_view product, std::string_view size_name,
                       std::int64_t size) {
  if (size <= kMaxContraction) return;
  fail(Status::unsupported, function, ": ", size_name, " = ", size, " with an int8 ", product, ", expected at most ",
       kMaxContraction, ": a longer sum of s8 products can overflow s32");
}

// The fields that all products of this plan share.
GemmProblem product_problem(const LinearBackwardDescription& d) {
  GemmProblem p;
  p.scale = scale_type(d.dy);
  p.device = d.device;
  p.threads = d.threads;
  return p;
}

// dY times an s8 operand: dequantized, with scales along the contraction, or quantized, with them folded into dY.
GemmProblem product_problem(const LinearBackwardDescription& d, Product product) {
  GemmProblem p = product_problem(d);
  if (product == Product::int8) {
    if (is_blocked(d)) p.operation = Operation::blocked_gemm, p.a_block = d.gradient_block;
    return p;
  }
  p.a = d.dy;
  p.b.granularity = Granularity::column;
  return p;
}

GemmProblem dx_problem(const LinearBackwardDescription& d) {
  GemmProblem p = product_problem(d, d.dx);
  p.m = d.m;
  p.n = d.k;
  p.k = d.n;
  p.y = d.dy;
  p.b_major = d.weight_layout == WeightLayout::in_out ? Major::contraction : Major::outer;
  return p;
}

// Rows of the product are output channels, whichever layout dW is written in.
GemmProblem dw_problem(const LinearBackwardDescription& d) {
  GemmProblem p = product_problem(d, d.dw);
  p.m = d.n;
  p.n = d.k;
  p.k = d.m;
  p.y = dw_dtype(d);
  p.a_major = d.dw == Product::int8 ? Major::contraction : Major::outer;
  p.b_major = d.x_transposed ? Major::contraction : Major::outer;
  p.y_major = dw_layout(d) == WeightLayout::out_in ? Major::contraction : Major::outer;
  p.accumulate = d.dw_accumulate;
  return p;
}

GemmProblem db_problem(const LinearBackwardDescription& d) {
  GemmProblem p = product_problem(d);
  p.operation = Operation::column_sum;
  p.m = 1;
  p.n = d.n;
  p.k = d.m;
  p.a = d.dy;
  p.y = d.dy;
  return p;
}

// The quantizer of dY, for either product. Kernels are asked about at least one element; an empty dY is not quantized.
// In blocks, the orientation says which products are int8.
QuantizeProblem gradient_problem(const LinearBackwardDescription& d) {
  QuantizeProblem p;
  p.rows = std::max<std::int64_t>(d.m, 1);
  p.cols = std::max<std::int64_t>(d.n, 1);
  p.x = d.dy;
  p.orientation = Orientation::both;
  p.group = d.gradient_block;
  if (is_blocked(d) && d.dx != Product::int8) p.orientation = Orientation::transposed;
  if (is_blocked(d) && d.dw != Product::int8) p.orientation = Orientation::row_major;
  p.rounding = d.rounding;
  p.q_min = -127;
  p.q_max = 127;
  p.min_scale = kMinScale;
  p.device = d.device;
  p.threads = d.threads;
  return p;
}

// dY with the scale along the contraction folded in: per row for dX, per column and transposed for dW.
QuantizeProblem dy_problem(const LinearBackwardDescription& d, bool for_dx) {
  QuantizeProblem p = gradient_problem(d);
  p.granularity = for_dx ? Granularity::row : Granularity::column;
  p.orientation = for_dx ? Orientation::row_major : Orientation::transposed;
  p.multiplier = for_dx ? Multiplier::per_column : Multiplier::per_row;
  return p;
}

std::int64_t blocks_of(const LinearBackwardDescription& d, std::int64_t contraction) {
  return is_blocked(d) ? ceil_div(contraction, d.gradient_block) : 1;
}

void select_product(LinearBackwardImpl& impl, std::optional<ProductSteps>& steps, const GemmProblem& problem) {
  const LinearBackwardDescription& d = impl.description;
  steps.emplace();
  if (!is_float(problem.a)) {
    if (!is_blocked(d)) {
      steps->quantize = ask(quantize_kernels(), {Operation::quantize}, dy_problem(d, &steps == &impl.dx), d.kernel);
    }
    steps->q_at = impl.reserve(problem.m, operand_pitch(problem.k), DType::s8);
    steps->scale_at = impl.reserve(blocks_of(d, problem.k), problem.m, problem.scale);
  }
  steps->product.all = choose(gemm_kernels(), task_of(problem), problem, kSelect, d.kernel);
  // Of dX, whose rows are the batch's; dW has one row for each output channel, however few tokens there are.
  if (&steps == &impl.dx) steps->product.fewer = choose_fewer_rows(steps->product.all, d.kernel);
}

// Both quantizers and dB as one step, if that is expected to be faster or was requested by name.
void select_gradient(LinearBackwardImpl& impl) {
  const LinearBackwardDescription& d = impl.description;
  if (is_blocked(d)) {
    impl.gradient =
        choose(quantize_kernels(), {Operation::blocked_gradient_quantize}, gradient_problem(d), kSelect, d.kernel);
    impl.db.reset();
    return;
  }
  if (d.dx != Product::int8 || d.dw != Product::int8) return;
  constexpr Task kTask = {Operation::gradient_quantize};
  const bool named = restricts(quantize_kernels(), kTask, d.kernel);
  // A request for one of the steps that it would replace.
  if (!named && (restricts(quantize_kernels(), {Operation::quantize}, d.kernel) ||
                 (d.db && restricts(gemm_kernels(), {Operation::column_sum}, d.kernel)))) {
    return;
  }
  const QuantizeProblem problem = gradient_problem(d);
  auto gradient = named ? choose(quantize_kernels(), kTask, problem, kSelect, d.kernel)
                        : ask(quantize_kernels(), kTask, problem, d.kernel);
  const bool may_be_apart = impl.dx->quantize->kernel && impl.dw->quantize->kernel;
  const double apart =
      impl.dx->quantize->cost.seconds + impl.dw->quantize->cost.seconds + (impl.db ? impl.db->cost.seconds : 0);
  if (!named && (!gradient.kernel || (may_be_apart && gradient.cost.seconds >= apart))) {
    impl.explanation += gradient.refused;
    if (!gradient.kernel) return;
    const std::string seconds = milliseconds(gradient.cost.seconds);
    impl.explanation += message("  not ", gradient.kernel->name, ": expected ", seconds, "\n");
    return;
  }
  impl.gradient = std::move(gradient);
  impl.dx->quantize.reset();
  impl.dw->quantize.reset();
  impl.db.reset();
}

// Takes the chosen steps into the plan, in the order in which they run.
void add_steps(LinearBackwardImpl& impl) {
  const auto add = [&](std::string_view what, const auto& step) {
    impl.add(what, step);
    impl.reserve_scratch(step.workspace);
  };
  const auto add_product = [&](std::string_view what, const std::optional<ProductSteps>& product) {
    if (!product) return;
    if (product->quantize) {
      require(*product->quantize, {Operation::quantize}, kSelect);
      add(message("quantize dY for ", what), *product->quantize);
    }
    impl.add_product(what, product->product);
    impl.reserve_scratch(product->product.workspace());
  };
  if (impl.gradient) add(impl.description.db ? "quantize dY, and dB" : "quantize dY", *impl.gradient);
  add_product("dX", impl.dx);
  add_product("dW", impl.dw);
  if (impl.db) add("dB", *impl.db);
}

struct BoundArgs {
  ConstTensor dy;
  ConstTensor weight;        // (K, N) view
  ConstTensor weight_scale;  // (N)
  ConstTensor x;             // (K, M) view
  ConstTensor x_scale;       // (M)
  Tensor dx;                 // (M, K)
  Tensor dw;                 // (N, K) view
  Tensor db;                 // (N)
};

BoundArgs bind(const LinearBackwardImpl& impl, const LinearBackwardArgs& args, TensorChecks& checks) {
  const LinearBackwardDescription& d = impl.description;
  const bool out_in = d.weight_layout == WeightLayout::out_in;
  const std::int64_t m = rows_of_call(impl.function, "dy", args.dy, {d.m, d.n});
  const auto weight_shape = out_in ? std::array{d.n, d.k} : std::array{d.k, d.n};
  BoundArgs b;
  b.dy = checks.matrix("dy", args.dy, d.dy, {m, d.n});
  b.dx = checks.matrix("dx", args.dx, d.dy, {m, d.k}, d.dx != Product::none);
  if (d.dx != Product::none) {
    const bool per_channel = d.weight == WeightFormat::s8_per_channel;
    const ConstTensor weight = checks.matrix("weight", args.weight, DType::s8, weight_shape);
    const ConstTensor scale = checks.vector("weight_scale", args.weight_scale, scale_type(d.dy), per_channel ? d.n : 1);
    b.weight = out_in ? transposed(weight) : weight;
    b.weight_scale = per_channel ? scale : repeated(scale, d.n);
  }
  if (d.dw != Product::none) {
    const ConstTensor x =
        checks.matrix("x", args.x, DType::s8, d.x_transposed ? std::array{d.k, m} : std::array{m, d.k});
    b.x = d.x_transposed ? x : transposed(x);
    b.x_scale = bind_x_scale(checks, d.activation, impl.static_scale, args.x_scale, m);
  }
  const bool dw_out_in = dw_layout(d) == WeightLayout::out_in;
  const auto dw_shape = dw_out_in ? std::array{d.n, d.k} : std::array{d.k, d.n};
  const Tensor dw = checks.matrix("dw", args.dw, dw_dtype(d), dw_shape, d.dw != Product::none);
  b.dw = dw_out_in ? dw : transposed(dw);
  b.db = checks.vector("db", args.db, d.dy, d.n, d.db);
  return b;
}

struct Run {
  const LinearBackwardImpl& impl;
  const LinearBackwardArgs& args;
  const BoundArgs& bound;
  std::byte* memory;
  Stream stream;

  // dY quantized for a product of `rows` rows, and its scales.
  Tensor quantized(const ProductSteps& steps, std::int64_t rows, std::int64_t contraction) const {
    auto* const data = reinterpret_cast<std::int8_t*>(memory + steps.q_at);
    return on(impl.description.device, matrix(data, rows, contraction, operand_pitch(contraction)));
  }
  void* scales(const ProductSteps& steps) const { return memory + steps.scale_at; }
};

// q1, q2 transposed and dB from one dY.
void run_gradient(const Run& run) {
  const LinearBackwardImpl& impl = run.impl;
  const BoundArgs& b = run.bound;
  const std::int64_t m = b.dy.rows();
  const std::int64_t n = b.dy.cols();
  if (m == 0 || n == 0) return;
  QuantizeOperands q;
  q.x = b.dy;
  const std::int64_t block = impl.description.gradient_block;
  if (impl.description.dx == Product::int8) {
    q.multiplier = b.weight_scale;
    q.q = run.quantized(*impl.dx, m, n);
    q.scale = {run.scales(*impl.dx), 1, block > 0 ? m : 0, block > 0 ? block : n};
  }
  if (impl.description.dw == Product::int8) {
    q.row_multiplier = b.x_scale;
    q.q_transposed = run.quantized(*impl.dw, n, m);
    q.column_scale = {run.scales(*impl.dw), block > 0 ? n : 0, 1, 1};
    if (block > 0) q.column_scale.row_group = block;
  }
  q.y = b.db;
  q.seed = run.args.seed;
  launch(impl, *impl.gradient, q, run.memory, run.stream);
}

// y (rows, k) = dY-side (rows, contraction) * b^T, with `scale` along the contraction.
void run_product(const Run& run, const ProductSteps& steps, const ConstTensor& dy, const ConstTensor& scale,
                 GemmOperands o) {
  const LinearBackwardImpl& impl = run.impl;
  const std::int64_t rows = o.y.rows();
  const GemmStep& product = steps.product.of(rows);
  const GemmProblem& problem = product.problem;
  const std::int64_t contraction = o.b.cols();
  if (rows == 0 || o.y.cols() == 0) return;
  if (contraction == 0) {
    if (!problem.accumulate) write_empty_sum(o, problem.device, run.stream);
    return;
  }
  if (is_float(problem.a)) {
    o.a = problem.a_major == Major::contraction ? dy : transposed(dy);
    o.b_scale = scale;
  } else {
    const Tensor quantized = run.quantized(steps, rows, contraction);
    if (steps.quantize) {
      const bool per_row = steps.quantize->problem.granularity == Granularity::row;
      QuantizeOperands q;
      q.x = dy;
      q.multiplier = scale;
      q.seed = run.args.seed;
      (per_row ? q.q : q.q_transposed) = quantized;
      q.scale = {run.scales(steps), per_row ? 1 : 0, per_row ? 0 : 1, per_row ? contraction : 1};
      launch(impl, *steps.quantize, q, run.memory, run.stream);
    }
    o.a = quantized;
    if (problem.a_block > 0) {
      o.a_scale = {run.scales(steps), problem.scale, problem.device, 2, {rows, ceil_div(contraction, problem.a_block)},
                   {1, rows}};
    } else {
      o.a_scale = on(problem.device, scale_vector(run.scales(steps), problem.scale, rows, 1));
      o.b_scale = scale_vector(impl.one.data(), problem.scale, o.y.cols(), 0);
    }
  }
  launch(impl, product, o, run.memory, run.stream);
}

}  // namespace

void check_linear_backward(std::string_view function, const LinearBackwardDescription& d) {
  check_size(function, "m", d.m);
  check_size(function, "n", d.n);
  check_size(function, "k", d.k);
  check_bytes(function, "X", d.m, d.k);
  check_bytes(function, "W", d.n, d.k);
  check_bytes(function, "dY", d.m, d.n);
  check_choice(function, "dy", d.dy, kLastDType);
  check_choice(function, "dw_dtype", dw_dtype(d), kLastDType);
  check_choice(function, "dx", d.dx, Product::int8);
  check_choice(function, "dw", d.dw, Product::int8);
  check_choice(function, "activation", d.activation, Activation::static_per_tensor);
  check_weight_format(function, d.weight, d.k);
  check_choice(function, "weight_layout", d.weight_layout, WeightLayout::in_out);
  check_choice(function, "dw_layout", dw_layout(d), WeightLayout::in_out);
  check_choice(function, "rounding", d.rounding, Rounding::stochastic);
  if (!is_float(d.dy)) fail(Status::unsupported, function, ": dy = ", d.dy, ", expected f16, bf16, f32 or f64");
  if (dw_dtype(d) != d.dy && (dw_dtype(d) != DType::f32 || d.dy == DType::f64)) {
    fail(Status::unsupported, function, ": dw_dtype = ", dw_dtype(d), " with dy = ", d.dy,
         ", expected dy's, or f32 for a 16-bit dy");
  }
  if (d.dw_accumulate && (d.dw == Product::none || dw_dtype(d) != scale_type(d.dy))) {
    fail(Status::unsupported, function, ": dw_accumulate with dw = ", name(d.dw), ", dw_dtype = ", dw_dtype(d),
         ", expected a dW of ", scale_type(d.dy));
  }
  if (d.weight != WeightFormat::s8_per_channel && d.weight != WeightFormat::s8_per_tensor) {
    fail(Status::unsupported, function, ": weight = ", name(d.weight), ", expected s8_per_channel or s8_per_tensor");
  }
  if (d.dw != Product::none && d.activation == Activation::none) {
    fail(Status::unsupported, function, ": activation = none: dW needs the int8 X that the forward used");
  }
  if (d.dw != Product::none && d.activation == Activation::static_per_tensor) {
    check_static_scale(function, d.static_scale, scale_type(d.dy));
  }
  check_block(function, d);
  if (d.dx == Product::int8) check_contraction(function, "dX", "n", d.n);
  if (d.dw == Product::int8) check_contraction(function, "dW", "m", d.m);
  check_threads(function, d.threads);
  check_device(function, d.device);
  if (d.kernel.empty()) check_tuning(function, d.device);
  const bool int8 = is_int8(d);
  const bool dequantized = d.dx == Product::dequantized || d.dw == Product::dequantized;
  const Task int8_product = is_blocked(d) ? Task{Operation::blocked_gemm} : Task{Operation::gemm, kW8A8};
  const Task float_product{Operation::gemm, kW8A16};
  const Task gradient{is_blocked(d) ? Operation::blocked_gradient_quantize : Operation::gradient_quantize};
  check_requested_kernel(function,
                         {d.kernel,
                          d.device,
                          {int8 ? is_blocked(d) ? gradient : Task{Operation::quantize} : float_product,
                           int8 ? gradient : float_product, int8 ? int8_product : float_product,
                           dequantized || !int8 ? float_product : int8_product, Task{Operation::column_sum}}});
}

std::string_view name(Gradient value) {
  constexpr std::array<std::string_view, 3> kNames = {"dX", "dW", "dB"};
  const auto i = static_cast<std::size_t>(value);
  return i < kNames.size() ? kNames[i] : "unknown";
}

PrecisionGuarantee guarantee_of_db(DType dy) {
  return {true, false, scale_type(dy), in_words(Bound::sum, {"M", dy, dy})};
}

PrecisionGuarantee GradientGuarantees::together() const {
  PrecisionGuarantee all{true, true, DType::s32, "exact"};
  for (const Gradient gradient : {Gradient::dx, Gradient::dw, Gradient::db}) {
    const auto& one = of[static_cast<std::size_t>(gradient)];
    if (!one || one->bit_stable) continue;
    all = {true, false, one->accumulator,
           message(all.bit_stable ? "" : all.error_bound + "; ", name(gradient), ": ", one->error_bound)};
  }
  return all;
}

const PrecisionGuarantee& GradientGuarantees::at(std::string_view function, Gradient gradient) const {
  check_choice(function, "gradient", gradient, Gradient::db);
  const auto& one = of[static_cast<std::size_t>(gradient)];
  if (!one) fail(Status::invalid_argument, function, ": this plan does not compute ", name(gradient));
  return *one;
}

LinearBackwardPlan LinearBackwardPlan::select(const LinearBackwardDescription& description) {
  const cpu::FloatEnvironment environment;
  check_linear_backward(kSelect, description);
  auto impl = std::make_shared<LinearBackwardImpl>();
  const LinearBackwardDescription& d = impl->description = description;
  impl->function = "LinearBackwardPlan::run";
  impl->static_scale = StaticScale(d.static_scale, scale_type(d.dy));
  impl->one = StaticScale(1.0, scale_type(d.dy));
  impl->explanation = message("linear backward ", d.m, " x ", d.k, " x ", d.n, " (M x K x N), dY ", d.dy, ", dX ",
                              name(d.dx), ", dW ", name(d.dw), " ", dw_dtype(d), ", dB ", d.db ? "yes" : "no",
                              is_blocked(d) ? message(", blocks of ", d.gradient_block) : "", ", weight ",
                              name(d.weight), " ", name(d.weight_layout), ", on ", d.device, "\n");
  if (d.dx != Product::none) select_product(*impl, impl->dx, dx_problem(d));
  if (d.dw != Product::none) select_product(*impl, impl->dw, dw_problem(d));
  if (d.db) impl->db = choose(gemm_kernels(), {Operation::column_sum}, db_problem(d), kSelect, d.kernel);
  select_gradient(*impl);
  add_steps(*impl);
  impl->describe_times(d.device, d.threads);
  impl->describe_tuning(d.device, d.kernel);
  GradientGuarantees& promises = impl->guarantees;
  if (impl->dx) promises[Gradient::dx] = guarantee_of(impl->dx->product.all, "N");
  if (impl->dw) promises[Gradient::dw] = guarantee_of(impl->dw->product.all, "M");
  if (d.db) promises[Gradient::db] = guarantee_of_db(d.dy);  // gradient_quantize adds dB up as column_sum does
  impl->guarantee = promises.together();
  return LinearBackwardPlan(std::move(impl));
}

const PrecisionGuarantee& LinearBackwardPlan::precision_guarantee(Gradient gradient) const {
  return impl_->as<LinearBackwardImpl>().guarantees.at("LinearBackwardPlan::precision_guarantee", gradient);
}

Verdict LinearBackwardPlan::can_implement(const LinearBackwardArgs& args) const {
  const LinearBackwardImpl& impl = impl_->as<LinearBackwardImpl>();
  return verdict_on(impl, impl.description.device, args);
}

void LinearBackwardPlan::run(const LinearBackwardArgs& args, Workspace workspace, Stream stream) const {
  const cpu::FloatEnvironment environment;
  const LinearBackwardImpl& impl = impl_->as<LinearBackwardImpl>();
  TensorChecks checks(impl.function, impl.description.device);
  const BoundArgs b = bind(impl, args, checks);
  const Run run{impl, args, b, finish_checks(checks, impl, workspace), stream};
  if (impl.gradient) run_gradient(run);
  if (impl.dx) {
    GemmOperands o;
    o.b = b.weight;
    o.y = b.dx;
    run_product(run, *impl.dx, b.dy, b.weight_scale, o);
  }
  if (impl.dw) {
    GemmOperands o;
    o.b = b.x;
    o.y = b.dw;
    run_product(run, *impl.dw, b.dy, b.x_scale, o);
  }
  if (impl.description.db && b.db.rows() > 0) {
    GemmOperands o;
    o.a = b.dy;
    o.y = b.db;
    if (b.dy.rows() == 0) {
      o.y = {b.db.data, b.db.dtype, b.db.device, 2, {b.db.rows(), 1}, {b.db.strides[0], 1}};  // as a matrix
      return write_empty_sum(o, b.db.device, stream);
    }
    if (impl.db) launch(impl, *impl.db, o, run.memory, stream);
  }
}

}  // namespace octile
