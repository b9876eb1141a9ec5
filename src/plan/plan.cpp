#include "plan/plan.h"

#include <algorithm>

#include "base/access.h"
#include "base/message.h"
#include "base/thread_pool.h"

namespace octile {

namespace {

constexpr std::size_t kAlignment = 128;  // a GPU's cache line, and TMA's strictest alignment

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// With room to start at a multiple of kAlignment wherever the caller's memory begins.
std::size_t bytes_of_workspace(const Plan::Impl& impl) {
  return impl.workspace == 0 ? 0 : impl.workspace + kAlignment - 1;
}

}  // namespace

std::size_t Plan::workspace_size() const { return bytes_of_workspace(*impl_); }

std::string Plan::sku() const { return impl_->sku; }

PrecisionGuarantee Plan::precision_guarantee() const { return impl_->guarantee; }

std::string Plan::explain() const {
  return message(impl_->explanation, impl_->times, "workspace ", workspace_size(), " bytes\n");
}

void Plan::Impl::add_line(std::string_view what, std::string_view kernel, const Cost& cost) {
  char text[128];
  std::snprintf(text, sizeof text, ": expected %s, %.4g MB, %.4g GOP\n", milliseconds(cost.seconds).c_str(),
                cost.bytes * 1e-6, cost.operations * 1e-9);
  explanation += message(what, ": ", kernel, text);
}

void Plan::Impl::add_product(std::string_view what, const ProductStep& product) {
  add(what, product.all);
  for (const FewerRows& few : product.fewer) {
    explanation +=
        message("  up to ", few.rows, few.rows == 1 ? " row: " : " rows: ", few.step.kernel->name, ": expected ",
                milliseconds(few.step.cost.seconds), few.step.is_tuned() ? "; " + in_words(few.step.tuned) : "", "\n");
  }
}

void Plan::Impl::describe_times(Device device, int threads) {
  if (device.type == DeviceType::cuda) {
    times = "expected times are estimates, launch included, with nothing in the GPU's caches\n";
    return;
  }
  const int max_threads = threads > 0 ? threads : cpu::hardware_threads();
  times = message("expected times are estimates for ", max_threads, max_threads == 1 ? " thread" : " threads",
                  " with nothing in the caches\n");
}

void Plan::Impl::describe_tuning(Device device, std::string_view kernel) {
  times += message(
      "tuning: ", kernel.empty() ? in_words(*tuning_of(device)) : "not used, since the description names a kernel",
      "\n");
}

std::size_t Plan::Impl::reserve(std::int64_t rows, std::int64_t cols, DType dtype) {
  const std::size_t begin = workspace;
  workspace += aligned(static_cast<std::size_t>(rows) * static_cast<std::size_t>((cols * bits(dtype) + 7) / 8));
  return begin;
}

void Plan::Impl::reserve_scratch(std::size_t bytes) {
  if (!scratch_begun) scratch = workspace;
  scratch_begun = true;
  workspace = std::max(workspace, scratch + aligned(bytes));
}

std::int64_t rows_of_call(std::string_view function, std::string_view name, const ConstTensor& t,
                          std::array<std::int64_t, 2> described) {
  const auto [rows, cols] = described;
  if (t.rank == 2 && t.rows() >= 0 && t.rows() <= rows) return t.rows();
  fail(Status::shape_mismatch, function, ": ", name, " is ", t, ", expected at most ", rows, " rows of ", cols);
}

std::byte* finish_checks(TensorChecks& checks, const Plan::Impl& impl, Workspace workspace) {
  const std::size_t needed = bytes_of_workspace(impl);
  const bool suffices = needed > 0 && workspace.data != nullptr && workspace.size >= needed;
  if (suffices) checks.workspace(workspace.data, needed);
  checks.no_overlap();
  if (needed == 0) return nullptr;
  if (!suffices) {
    fail(Status::workspace_too_small, impl.function, ": workspace of ", workspace.data ? workspace.size : 0,
         " bytes, the plan needs ", needed, "; see docs/how-to/errors.md#workspace");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
  return static_cast<std::byte*>(workspace.data) + (aligned(address) - address);
}

void check_requested_kernel(std::string_view function, const RequestedKernel& requested) {
  if (requested.name.empty()) return;
  bool found = false;
  std::string known;
  const auto look = [&](const auto& kernel) {
    found = found || matches(kernel.name, requested.name);
    const auto* end = requested.tasks.end();
    if (kernel.device != requested.device.type || std::find(requested.tasks.begin(), end, kernel.task) == end) return;
    known += message(" ", kernel.name);
  };
  for (const QuantizeKernel* kernel : quantize_kernels()) look(*kernel);
  for (const GemmKernel* kernel : gemm_kernels()) look(*kernel);
  if (found) return;
  fail(Status::invalid_argument, function, ": no kernel is named ", requested.name,
       ", nor has that arch; this plan on ", requested.device, " can have:", known);
}

std::vector<FewerRows> choose_fewer_rows(const GemmStep& all, std::string_view requested) {
  GemmProblem p = all.problem;
  const Task task = task_of(p);
  if (!is_exact(task) || p.device.type != DeviceType::cpu || p.m < 2 || p.n == 0 || p.k == 0) return {};
  const bool restricted = restricts(gemm_kernels(), task, requested);
  std::vector<const GemmKernel*> able;
  for (const GemmKernel* kernel : gemm_kernels()) {
    const bool asked = kernel->task == task && kernel->device == p.device.type && !kernel->aligned;
    if (asked && (!restricted || matches(kernel->name, requested)) && refusal(*kernel, p).empty()) {
      able.push_back(kernel);
    }
  }
  const std::shared_ptr<const TunedRows> measured = requested.empty() ? tuned_rows(p) : nullptr;
  const auto tuned = [&](std::int64_t rows) { return measured ? tuned_at(*measured, rows) : nullptr; };
  const auto fastest = [&](std::int64_t rows) {
    p.m = rows;
    if (const TunedChoice* choice = tuned(rows)) {
      const auto is_it = [&](const GemmKernel* kernel) { return kernel->name == choice->kernel; };
      if (const auto found = std::find_if(able.begin(), able.end(), is_it); found != able.end()) return *found;
    }
    const auto faster = [&](const GemmKernel* a, const GemmKernel* b) {
      return a->cost(p).seconds < b->cost(p).seconds;
    };
    return *std::min_element(able.begin(), able.end(), faster);
  };
  std::vector<FewerRows> fewer;
  // Between two numbers of rows whose kernels differ, a third one may be the fastest.
  struct Rows {
    std::int64_t count;
    const GemmKernel* kernel;
  };
  const auto divide = [&](const auto& self, const Rows& low, const Rows& high) -> void {
    if (low.kernel == high.kernel) return;
    if (high.count - low.count == 1) {
      p.m = low.count;
      GemmStep step{p, low.kernel, nullptr, low.kernel->cost(p), scratch_size(*low.kernel, p), {}, {}};
      if (const TunedChoice* choice = tuned(low.count)) step.tuned = *choice;
      fewer.push_back({low.count, std::move(step)});
      return;
    }
    const std::int64_t count = low.count + (high.count - low.count) / 2;
    const Rows middle{count, fastest(count)};
    self(self, middle, high);
    self(self, low, middle);
  };
  Rows high{p.m, all.kernel};
  while (high.count > 1) {
    // Costs are of whole tiles: with few rows the choice may change at any number of them, and back.
    constexpr std::int64_t kEach = 256;
    const std::int64_t count = high.count <= kEach ? high.count - 1 : std::max(high.count / 2, kEach);
    const Rows low{count, fastest(count)};
    divide(divide, low, high);
    high = low;
  }
  std::reverse(fewer.begin(), fewer.end());
  return fewer;
}

ConstTensor scale_vector(const void* data, DType type, std::int64_t size, std::int64_t stride) {
  return {data, type, {}, 1, {size, 0}, {stride, 0}};
}

ConstTensor repeated(ConstTensor one, std::int64_t size) {
  one.shape[0] = size;
  one.strides[0] = 0;
  return one;
}

ConstTensor as_column(ConstTensor scales) {
  scales.rank = 2;
  scales.shape[1] = 1;
  scales.strides[1] = 1;
  return scales;
}

ConstTensor bind_x_scale(TensorChecks& checks, Activation activation, const StaticScale& static_scale,
                         const ConstTensor& x_scale, std::int64_t m) {
  if (activation == Activation::static_per_tensor) {
    checks.absent("x_scale", x_scale);
    return scale_vector(static_scale.data(), static_scale.type(), m, 0);
  }
  const bool per_token = activation == Activation::dynamic_per_token;
  const ConstTensor bound = checks.vector("x_scale", x_scale, static_scale.type(), per_token ? m : 1);
  return per_token ? bound : repeated(bound, m);
}

void write_empty_sum(const GemmOperands& o, Device device, Stream stream) {
  if (device.type == DeviceType::cuda) {
    const cuda::OnDevice current(device);
    return cuda::write_empty_sum(o, stream);
  }
  for (std::int64_t i = 0; i < o.y.rows(); ++i) {
    for (std::int64_t j = 0; j < o.y.cols(); ++j) store(o.y, i, j, o.bias.present() ? load<double>(o.bias, j) : 0.0);
  }
}

PrecisionGuarantee guarantee_of(const GemmStep& step, std::string_view terms) {
  const GemmProblem& p = step.problem;
  const Bound bound = step.kernel->bound;
  if (bound == Bound::exact) return {true, true, DType::s32, "exact"};
  return {true, false, p.scale, in_words(bound, {terms, p.a, p.y, p.grouped() && p.b.group < p.k})};
}

}  // namespace octile
