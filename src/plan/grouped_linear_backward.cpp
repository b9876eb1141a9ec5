// GroupedLinearBackwardPlan on the CPU: each expert's rows go through a LinearBackwardPlan of the expert's shape, as in
// GroupedLinearPlan: experts with few rows one a thread, the others with all threads.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/access.h"
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

struct GroupedLinearBackwardImpl : Plan::Impl {
  GroupedLinearBackwardDescription description;
  std::optional<LinearBackwardPlan> many;  // an expert with all threads
  std::optional<LinearBackwardPlan> few;   // an expert of at most kFewGroupedRows rows with one thread
  std::size_t order_at = 0;
};

const GroupedLinearBackwardImpl& backward(const std::shared_ptr<const Plan::Impl>& impl) {
  return static_cast<const GroupedLinearBackwardImpl&>(*impl);
}

LinearBackwardDescription expert_of(const GroupedLinearBackwardDescription& d) {
  return {.m = d.dw == Product::int8 ? std::min(d.m, kMaxContraction) : d.m,
          .n = d.n,
          .k = d.k,
          .dy = d.dy,
          .dw_dtype = d.dw_dtype,
          .dw_accumulate = d.dw_accumulate,
          .dx = d.dx,
          .dw = d.dw,
          .db = d.db,
          .activation = d.activation,
          .static_scale = d.static_scale,
          .weight = d.weight,
          .rounding = d.rounding,
          .gradient_block = d.gradient_block,
          .device = d.device,
          .threads = d.threads,
          .kernel = d.kernel};
}

void check(const GroupedLinearBackwardDescription& d) {
  check_linear_backward(kSelect, expert_of(d));
  check_grouped(kSelect, d);
  check_bytes(kSelect, "X", d.m, d.k);
  check_bytes(kSelect, "dY", d.m, d.n);
  check_bytes(kSelect, "dB", d.experts, d.n);
  if (d.device.type != DeviceType::cpu) {
    fail(Status::unsupported, kSelect, ": device = ", d.device, ", expected the CPU: no other has these gradients");
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
  if (args.dy.rank != 2 || args.dy.rows() < 0 || args.dy.rows() > d.m) {
    fail(Status::shape_mismatch, impl.function, ": dy is ", args.dy, ", expected at most ", d.m, " rows of ", d.n);
  }
  const std::int64_t m = args.dy.rows(), channels = d.experts * d.n;
  GroupedLinearBackwardArgs b;
  b.seed = args.seed;
  b.dy = checks.matrix("dy", args.dy, d.dy, {m, d.n});
  b.offsets = checks.vector("offsets", args.offsets, DType::s32, d.experts + 1);
  check_offsets(checks, b.offsets, m);
  if (d.dw == Product::int8) check_contractions(checks, b.offsets);
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
  LinearBackwardDescription dense = expert_of(d);
  impl->many = LinearBackwardPlan::select(dense);
  dense.m = std::min(d.m, kFewGroupedRows);
  dense.threads = 1;
  impl->few = LinearBackwardPlan::select(dense);
  impl->sku = impl->many->sku();
  impl->explanation = message("grouped linear backward, ", d.experts, " experts, ", d.m,
                              " rows\nan expert with all threads\n", impl->many->explain(), "an expert of at most ",
                              kFewGroupedRows, " rows, with one thread: ", impl->few->sku(), "\n");
  impl->order_at = impl->reserve(1, d.experts, DType::s32);
  impl->reserve_scratch(std::max(impl->many->workspace_size(),
                                 impl->few->workspace_size() * static_cast<std::size_t>(threads_of_groups(d.threads))));
  impl->guarantee = impl->many->precision_guarantee();
  return GroupedLinearBackwardPlan(std::move(impl));
}

const PrecisionGuarantee& GroupedLinearBackwardPlan::precision_guarantee(Gradient gradient) const {
  return backward(impl_).many->precision_guarantee(gradient);
}

Verdict GroupedLinearBackwardPlan::can_implement(const GroupedLinearBackwardArgs& args) const {
  const cpu::FloatEnvironment environment;
  return verdict_of([&] {
    TensorChecks checks(impl_->function, backward(impl_).description.device);
    bind(backward(impl_), args, checks);
    checks.no_overlap();
  });
}

void GroupedLinearBackwardPlan::run(const GroupedLinearBackwardArgs& args, Workspace workspace, Stream) const {
  const cpu::FloatEnvironment environment;
  const GroupedLinearBackwardImpl& impl = backward(impl_);
  const GroupedLinearBackwardDescription& d = impl.description;
  TensorChecks checks(impl.function, d.device);
  const GroupedLinearBackwardArgs bound = bind(impl, args, checks);
  std::byte* const memory = finish_checks(checks, impl, workspace);

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
  const bool clears_dw = d.dw != Product::none && !d.dw_accumulate;
  if (!clears_dw && !d.db) return;
  cpu::parallel_for(threads_of_groups(d.threads), d.experts, [&](std::int64_t e) {
    if (load_integer(bound.offsets, e) != load_integer(bound.offsets, e + 1)) return;
    if (clears_dw) clear_rows(expert_rows(bound.dw, e, d.n));
    if (d.db) clear_rows(expert_rows(bound.db, e, 1));
  });
}

}  // namespace octile
