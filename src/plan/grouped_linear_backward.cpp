// GroupedLinearBackwardPlan. On a GPU one grouped_gradient_quantize has all experts' rows of dY, and dB, and one
// grouped_gradient each is dX and dW. On the CPU each expert's rows go through a LinearBackwardPlan of the expert's
// shape, as in GroupedLinearPlan: experts with few rows one a thread, the others with all threads.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/access.h"
#include "base/ceil_div.h"
#include "base/fields.h"
#include "base/float_environment.h"
#include "base/message.h"
#include "base/thread_pool.h"
#include "base/validate.h"
#include "octile/grouped_linear.h"
#include "plan/grouped.h"
#include "plan/plan.h"

namespace octile {

namespace {

constexpr std::string_view kSelect = "GroupedLinearBackwardPlan::select";

// On a GPU, one of dX and dW.
struct ProductSteps {
  GemmStep product;
  // dY quantized for it, (rows, pitch), and its scales, (blocks, rows).
  std::size_t q_at = 0;
  std::size_t scale_at = 0;
};

struct GroupedLinearBackwardImpl : Plan::Impl {
  GroupedLinearBackwardDescription description;
  GradientGuarantees guarantees;  // as one expert's
  // On a GPU.
  StaticScale static_scale;
  std::optional<QuantizeStep> gradient;  // of the int8 products, and db
  std::optional<ProductSteps> dx;
  std::optional<ProductSteps> dw;
  // On the CPU.
  std::optional<LinearBackwardPlan> many;  // an expert with all threads
  std::optional<LinearBackwardPlan> few;   // an expert of at most kFewGroupedRows rows with one thread
  std::size_t order_at = 0;
};

LinearBackwardDescription expert_of(const GroupedLinearBackwardDescription& d) {
  auto expert = with_fields<LinearBackwardDescription>(
      OCTILE_FIELDS(a.m, a.n, a.k, a.dy, a.dw_dtype, a.dw_accumulate, a.dx, a.dw, a.db, a.activation, a.static_scale,
                    a.weight, a.rounding, a.gradient_block, a.device, a.threads, a.kernel),
      d);
  if (d.dw == Product::int8) expert.m = std::min(d.m, kMaxContraction);
  return expert;
}

bool is_int8(const GroupedLinearBackwardDescription& d) { return d.dx == Product::int8 || d.dw == Product::int8; }
DType dw_dtype(const GroupedLinearBackwardDescription& d) { return d.dw_dtype.value_or(d.dy); }

void check(const GroupedLinearBackwardDescription& d) {
  LinearBackwardDescription expert = expert_of(d);
  const bool on_gpu = d.device.type == DeviceType::cuda;
  if (on_gpu) expert.kernel = {};  // other rows' names
  check_linear_backward(kSelect, expert);
  check_grouped(kSelect, d);
  check_bytes(kSelect, "X", d.m, d.k);
  check_bytes(kSelect, "dY", d.m, d.n);
  check_bytes(kSelect, "dB", d.experts, d.n);
  if (!on_gpu) return;
  check_requested_kernel(kSelect,
                         {d.kernel,
                          d.device,
                          {Task{Operation::grouped_gradient_quantize}, Task{Operation::grouped_gradient, kW8A8},
                           Task{Operation::grouped_gradient, kW8A16}}});
  if (is_int8(d) && d.gradient_block == 0) {
    fail(Status::unsupported, kSelect, ": gradient_block = 0 with dx = ", name(d.dx), ", dw = ", name(d.dw), " on ",
         d.device, ", expected 128, 256, 512 or 1024: on a GPU experts' dY is quantized in blocks");
  }
}

// An int8 dW sums an expert's rows in s32.
void check_contractions(const TensorChecks& checks, const ConstTensor& offsets) {
  for (std::int64_t e = 0; e + 1 < offsets.rows(); ++e) {
    const std::int64_t count = load_integer(offsets, e + 1) - load_integer(offsets, e);
    if (count <= kMaxContraction) continue;
    fail(Status::unsupported, checks.function(), ": expert ", e, " has ", count,
         " rows with an int8 dW, expected at most ", kMaxContraction, ": a longer sum of s8 products can overflow s32");
  }
}

// The caller's tensors, checked.
GroupedLinearBackwardArgs bind(const GroupedLinearBackwardImpl& impl, const GroupedLinearBackwardArgs& args,
                               TensorChecks& checks) {
  const GroupedLinearBackwardDescription& d = impl.description;
  const std::int64_t m = rows_of_call(impl.function, "dy", args.dy, {d.m, d.n}), channels = d.experts * d.n;
  GroupedLinearBackwardArgs b;
  b.seed = args.seed;
  b.dy = checks.matrix("dy", args.dy, d.dy, {m, d.n});
  b.offsets = checks.vector("offsets", args.offsets, DType::s32, d.experts + 1);
  if (d.device.type == DeviceType::cpu) {
    check_offsets(checks, b.offsets, m);
    if (d.dw == Product::int8) check_contractions(checks, b.offsets);
  }
  b.dx = checks.matrix("dx", args.dx, d.dy, {m, d.k}, d.dx != Product::none);
  if (d.dx != Product::none) {
    const bool per_channel = d.weight == WeightFormat::s8_per_channel;
    b.weight = checks.matrix("weight", args.weight, DType::s8, {channels, d.k});
    b.weight_scale =
        checks.vector("weight_scale", args.weight_scale, scale_type(d.dy), per_channel ? channels : d.experts);
  }
  if (d.dw != Product::none) {
    b.x = checks.matrix("x", args.x, DType::s8, {m, d.k});
    const bool given = d.activation != Activation::static_per_tensor;
    b.x_scale = checks.vector("x_scale", args.x_scale, scale_type(d.dy), m, given);
  }
  b.dw = checks.matrix("dw", args.dw, d.dw_dtype.value_or(d.dy), {channels, d.k}, d.dw != Product::none);
  b.db = checks.matrix("db", args.db, d.dy, {d.experts, d.n}, d.db);
  return b;
}

LinearBackwardArgs expert_args(const GroupedLinearBackwardDescription& d, const GroupedLinearBackwardArgs& all,
                               std::int64_t e) {
  const std::int64_t first = load_integer(all.offsets, e);
  const std::int64_t count = load_integer(all.offsets, e + 1) - first;
  LinearBackwardArgs one;
  one.seed = all.seed + static_cast<std::uint64_t>(e);
  one.dy = rows_at(all.dy, first, count);
  if (d.dx != Product::none) {
    one.weight = expert_rows(all.weight, e, d.n);
    one.weight_scale = expert_rows(all.weight_scale, e, d.weight == WeightFormat::s8_per_channel ? d.n : 1);
    one.dx = rows_at(all.dx, first, count);
  }
  if (d.dw != Product::none) {
    one.x = rows_at(all.x, first, count);
    if (all.x_scale.present()) one.x_scale = rows_at(all.x_scale, first, count);
    one.dw = expert_rows(all.dw, e, d.n);
  }
  if (d.db) one.db = as_vector(rows_at(all.db, e, 1));
  return one;
}

// ---- On a GPU ----

// Of dY, of all blocks of rows that experts may have.
QuantizeProblem gradient_problem(const GroupedLinearBackwardDescription& d) {
  const std::int64_t block = std::max(d.gradient_block, kMinGradientBlock);
  QuantizeProblem p;
  p.rows = std::max<std::int64_t>(max_blocks(d.experts, d.m, block) * block, 1);
  p.cols = std::max<std::int64_t>(d.n, 1);
  p.x = d.dy;
  p.orientation = Orientation::both;
  p.group = block;
  p.rounding = d.rounding;
  p.q_min = -127;
  p.q_max = 127;
  p.min_scale = kMinScale;
  p.device = d.device;
  return p;
}

GemmProblem product_problem(const GroupedLinearBackwardDescription& d, Product product) {
  GemmProblem p;
  p.operation = Operation::grouped_gradient;
  p.n = d.k;
  p.b_major = Major::outer;
  p.scale = scale_type(d.dy);
  p.experts = d.experts;
  p.device = d.device;
  if (product == Product::int8) {
    p.a_block = d.gradient_block;
  } else {
    p.a = d.dy;
    p.b.granularity = Granularity::column;
  }
  return p;
}

GemmProblem dx_problem(const GroupedLinearBackwardDescription& d) {
  GemmProblem p = product_problem(d, d.dx);
  p.m = d.m;
  p.k = d.n;
  p.y = d.dy;
  return p;
}

GemmProblem dw_problem(const GroupedLinearBackwardDescription& d) {
  GemmProblem p = product_problem(d, d.dw);
  p.by_terms = true;
  p.m = d.n;
  p.k = d.m;
  p.y = dw_dtype(d);
  p.a_major = d.dw == Product::int8 ? Major::contraction : Major::outer;
  p.accumulate = d.dw_accumulate;
  return p;
}

void select_on_gpu(GroupedLinearBackwardImpl& impl) {
  const GroupedLinearBackwardDescription& d = impl.description;
  impl.static_scale = StaticScale(d.static_scale, scale_type(d.dy));
  std::size_t scratch = 0;
  if (is_int8(d) || d.db) {
    const QuantizeProblem p = gradient_problem(d);
    impl.gradient = choose(quantize_kernels(), {Operation::grouped_gradient_quantize}, p, kSelect, d.kernel);
    impl.add(!is_int8(d) ? "dB" : d.db ? "quantize dY, and dB" : "quantize dY", *impl.gradient);
    scratch = impl.gradient->workspace;
  }
  const auto add_product = [&](std::string_view what, std::optional<ProductSteps>& steps, const GemmProblem& p) {
    steps.emplace();
    steps->product = choose(gemm_kernels(), task_of(p), p, kSelect, d.kernel);
    impl.add(what, steps->product);
    scratch = std::max(scratch, steps->product.workspace);
    if (is_float(p.a)) return;
    const std::int64_t terms = p.by_terms ? max_blocks(d.experts, p.k, p.a_block) * p.a_block : p.k;
    steps->q_at = impl.reserve(p.m, operand_pitch(terms), DType::s8);
    steps->scale_at = impl.reserve(ceil_div(terms, p.a_block), p.m, p.scale);
  };
  if (d.dx != Product::none) add_product("dX", impl.dx, dx_problem(d));
  if (d.dw != Product::none) add_product("dW", impl.dw, dw_problem(d));
  if (d.clear_rest && d.dx != Product::none) {
    const cuda::OnDevice current(d.device);
    cuda::prepare_clear_rest();
  }
  impl.reserve_scratch(scratch);
  impl.describe_times(d.device, d.threads);
  if (impl.dx) impl.guarantees[Gradient::dx] = guarantee_of(impl.dx->product, "N");
  if (impl.dw) impl.guarantees[Gradient::dw] = guarantee_of(impl.dw->product, "M");
  if (d.db) impl.guarantees[Gradient::db] = guarantee_of_db(d.dy);
}

struct GpuRun {
  const GroupedLinearBackwardImpl& impl;
  const GroupedLinearBackwardArgs& args;
  std::byte* memory;
  Stream stream;

  const GroupedLinearBackwardDescription& d = impl.description;
  std::int64_t m = args.dy.rows();

  std::int64_t terms_of(const ProductSteps& steps) const {
    const GemmProblem& p = steps.product.problem;
    return p.by_terms ? max_blocks(d.experts, m, p.a_block) * p.a_block : p.k;
  }
  Tensor quantized(const ProductSteps& steps, std::int64_t rows) const {
    const std::int64_t terms = terms_of(steps);
    return on(d.device, matrix(reinterpret_cast<std::int8_t*>(memory + steps.q_at), rows, terms, operand_pitch(terms)));
  }
  ConstTensor scales(const ProductSteps& steps, std::int64_t rows) const {
    const GemmProblem& p = steps.product.problem;
    return {memory + steps.scale_at, p.scale, d.device, 2, {rows, ceil_div(terms_of(steps), p.a_block)}, {1, rows}};
  }
  ConstTensor x_scale() const {
    if (d.activation != Activation::static_per_tensor) return args.x_scale;
    return scale_vector(impl.static_scale.data(), impl.static_scale.type(), m, 0);
  }
  bool one_scale() const { return d.weight != WeightFormat::s8_per_channel; }
  ConstTensor weight_scale() const {
    const ConstTensor first = expert_rows(args.weight_scale, 0, one_scale() ? 1 : d.n);
    return one_scale() ? repeated(first, d.n) : first;
  }
  std::int64_t weight_scale_stride() const { return (one_scale() ? 1 : d.n) * args.weight_scale.strides[0]; }

  void gradient() const {
    QuantizeOperands q;
    q.x = args.dy;
    q.offsets = args.offsets;
    if (d.dx == Product::int8) {
      q.multiplier = weight_scale();
      q.multiplier_stride = weight_scale_stride();
      q.q = quantized(*impl.dx, m);
      q.scale = {memory + impl.dx->scale_at, 1, m, d.gradient_block};
    }
    if (d.dw == Product::int8) {
      q.row_multiplier = x_scale();
      q.q_transposed = quantized(*impl.dw, d.n);
      q.column_scale = {memory + impl.dw->scale_at, d.n, 1, 1, false, d.gradient_block};
    }
    q.y = args.db;
    q.seed = args.seed;
    launch(impl, *impl.gradient, q, memory, stream);
  }

  void dx() const {
    const GemmStep& step = impl.dx->product;
    GemmOperands o;
    o.experts.offsets = args.offsets;
    o.y = args.dx;
    if (d.n == 0) return write_empty_sum(o, d.device, stream);
    o.experts.b_stride = d.n * args.weight.strides[0];
    o.b = transposed(expert_rows(args.weight, 0, d.n));
    if (is_float(step.problem.a)) {
      o.a = args.dy;
      o.b_scale = weight_scale();
      o.experts.b_scale_stride = weight_scale_stride();
    } else {
      o.a = quantized(*impl.dx, m);
      o.a_scale = scales(*impl.dx, m);
    }
    launch(impl, step, o, memory, stream);
  }

  void dw() const {
    const GemmStep& step = impl.dw->product;
    GemmOperands o;
    o.y = args.dw;
    if (m == 0) {
      if (!d.dw_accumulate) write_empty_sum(o, d.device, stream);
      return;
    }
    o.experts.offsets = args.offsets;
    o.y = expert_rows(args.dw, 0, d.n);
    o.experts.y_stride = d.n * args.dw.strides[0];
    o.b = transposed(args.x);
    if (is_float(step.problem.a)) {
      o.a = transposed(args.dy);
      o.b_scale = x_scale();
    } else {
      o.a = quantized(*impl.dw, d.n);
      o.a_scale = scales(*impl.dw, d.n);
    }
    launch(impl, step, o, memory, stream);
  }

  void run() const {
    if (d.experts > 0 && d.n > 0 && m > 0 && impl.gradient) gradient();
    if (d.db && m == 0) {
      GemmOperands o;
      o.y = args.db;
      write_empty_sum(o, d.device, stream);
    }
    if (impl.dx && d.experts > 0 && d.k > 0 && m > 0) dx();
    if (impl.dw && d.experts > 0 && d.n > 0 && d.k > 0) dw();
    if (impl.dx && d.clear_rest && m > 0) {
      const cuda::OnDevice current(d.device);
      cuda::clear_rest(args.offsets, args.dx, stream);
    }
  }
};

// ---- On the CPU ----

void select_on_cpu(GroupedLinearBackwardImpl& impl) {
  const GroupedLinearBackwardDescription& d = impl.description;
  LinearBackwardDescription dense = expert_of(d);
  impl.many = select_expert<LinearBackwardPlan>(kSelect, dense);
  dense.m = std::min(d.m, kFewGroupedRows);
  dense.threads = 1;
  impl.few = select_expert<LinearBackwardPlan>(kSelect, dense);
  impl.sku = impl.many->sku();
  impl.explanation += message("an expert with all threads\n", impl.many->explain(), "an expert of at most ",
                              kFewGroupedRows, " rows, with one thread: ", impl.few->sku(), "\n");
  impl.order_at = impl.reserve(1, d.experts, DType::s32);
  impl.reserve_scratch(std::max(impl.many->workspace_size(),
                                impl.few->workspace_size() * static_cast<std::size_t>(threads_of_groups(d.threads))));
  const auto promise = [&](Gradient gradient, bool computed) {
    if (computed) impl.guarantees[gradient] = impl.many->precision_guarantee(gradient);
  };
  promise(Gradient::dx, d.dx != Product::none);
  promise(Gradient::dw, d.dw != Product::none);
  promise(Gradient::db, d.db);
}

void clear_rows(const Tensor& t) {
  const auto row_bytes = static_cast<std::size_t>(t.cols() * bits(t.dtype) / 8);
  for (std::int64_t r = 0; row_bytes > 0 && r < t.rows(); ++r) std::memset(rows_at(t, r, 1).data, 0, row_bytes);
}

}  // namespace

GroupedLinearBackwardPlan GroupedLinearBackwardPlan::select(const GroupedLinearBackwardDescription& description) {
  const cpu::FloatEnvironment environment;
  check(description);
  const GroupedLinearBackwardDescription& d = description;
  auto impl = std::make_shared<GroupedLinearBackwardImpl>();
  impl->description = d;
  impl->function = "GroupedLinearBackwardPlan::run";
  impl->explanation = message("grouped linear backward, ", d.experts, " experts, ", d.m, " rows\n");
  d.device.type == DeviceType::cuda ? select_on_gpu(*impl) : select_on_cpu(*impl);
  impl->guarantee = impl->guarantees.together();
  return GroupedLinearBackwardPlan(std::move(impl));
}

const PrecisionGuarantee& GroupedLinearBackwardPlan::precision_guarantee(Gradient gradient) const {
  return impl_->as<GroupedLinearBackwardImpl>().guarantees.at("GroupedLinearBackwardPlan::precision_guarantee",
                                                              gradient);
}

Verdict GroupedLinearBackwardPlan::can_implement(const GroupedLinearBackwardArgs& args) const {
  const GroupedLinearBackwardImpl& impl = impl_->as<GroupedLinearBackwardImpl>();
  return verdict_on(impl, impl.description.device, args);
}

void GroupedLinearBackwardPlan::run(const GroupedLinearBackwardArgs& args, Workspace workspace, Stream stream) const {
  const cpu::FloatEnvironment environment;
  const GroupedLinearBackwardImpl& impl = impl_->as<GroupedLinearBackwardImpl>();
  const GroupedLinearBackwardDescription& d = impl.description;
  TensorChecks checks(impl.function, d.device);
  const GroupedLinearBackwardArgs bound = bind(impl, args, checks);
  std::byte* const memory = finish_checks(checks, impl, workspace);
  if (d.device.type == DeviceType::cuda) return GpuRun{impl, bound, memory, stream}.run();

  const Schedule schedule{
      bound.offsets, {d.threads, d.n, d.k}, reinterpret_cast<std::int32_t*>(memory + impl.order_at)};
  const std::size_t one = impl.few->workspace_size();
  std::byte* const scratch = memory + impl.scratch;
  const auto few = [&](std::int64_t e, int thread) {
    impl.few->run(expert_args(d, bound, e), {scratch + static_cast<std::size_t>(thread) * one, one});
  };
  schedule.run(
      [&](std::int64_t e) {
        impl.many->run(expert_args(d, bound, e), {scratch, impl.many->workspace_size()});
      },
      few);
  if (d.clear_rest && d.dx != Product::none) clear_rest(bound.offsets, bound.dx, schedule.threads());
  const bool clears_dw = d.dw != Product::none && !d.dw_accumulate;
  if (!clears_dw && !d.db) return;
  cpu::parallel_for(threads_of_groups(d.threads), d.experts, [&](std::int64_t e) {
    if (load_integer(bound.offsets, e) != load_integer(bound.offsets, e + 1)) return;
    if (clears_dw) clear_rows(expert_rows(bound.dw, e, d.n));
    if (d.db) clear_rows(expert_rows(bound.db, e, 1));
  });
}

}  // namespace octile
