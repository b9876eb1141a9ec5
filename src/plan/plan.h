// What all plans share behind the public Plan.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/float_environment.h"
#include "base/validate.h"
#include "cuda/devices.h"
#include "octile/linear.h"
#include "octile/plan.h"
#include "plan/choose.h"
#include "plan/kernel.h"

namespace octile {

using QuantizeStep = Step<QuantizeProblem, QuantizeOperands>;
using GemmStep = Step<GemmProblem, GemmOperands>;

// A product, and the rows that are faster for fewer rows of X.
struct ProductStep {
  GemmStep all = {};
  std::vector<FewerRows> fewer = {};

  const GemmStep& of(std::int64_t rows) const {
    for (const FewerRows& few : fewer) {
      if (rows <= few.rows) return few.step;
    }
    return all;
  }
  std::size_t workspace() const {
    std::size_t bytes = all.workspace;
    for (const FewerRows& few : fewer) bytes = std::max(bytes, few.step.workspace);
    return bytes;
  }
};

// Bytes from row to row of an s8 operand in a workspace. TMA needs multiples of 16, and a step of 128 bytes that
// straddles two cache lines reads both (w8a8_gemm_sm90, 4096 x K x 4096: 138 us at K = 4112, 90 at 4096).
constexpr std::int64_t operand_pitch(std::int64_t contraction) { return (contraction + 127) / 128 * 128; }

// Checks the description of a linear layer and of its gradients; `function` is named in errors.
void check_linear(std::string_view function, const LinearDescription& description);
void check_linear_backward(std::string_view function, const LinearBackwardDescription& description);

// The quantizer of a linear layer's X, and its product.
QuantizeProblem quantize_problem(const LinearDescription& description);
GemmProblem gemm_problem(const LinearDescription& description);

// A plan's concrete Impl adds its description and its steps; as<> is it.
struct __attribute__((visibility("hidden"))) Plan::Impl {
  std::string function;     // "LinearPlan::run"
  std::string sku;          // the kernels chosen
  std::string explanation;  // without the lines that follow for every plan
  std::string times;
  std::size_t workspace = 0;
  PrecisionGuarantee guarantee;

  template <class Own>
  const Own& as() const {
    return static_cast<const Own&>(*this);
  }

  // Takes a chosen step into the plan: prepares it, and adds it to sku and explanation.
  template <class Problem, class Operands>
  void add(std::string_view what, const Step<Problem, Operands>& step) {
    const cuda::OnDevice current(step.problem.device);
    if (step.kernel->prepare) step.kernel->prepare(step.problem);
    if (step.unaligned && step.unaligned->prepare) step.unaligned->prepare(step.problem);
    sku += message(sku.empty() ? "" : " + ", step.kernel->name);
    if (step.unaligned) sku += message(" (unaligned: ", step.unaligned->name, ")");
    add_line(what, step.kernel->name, step.cost);
    if (step.tuned.m > 0)
      explanation += message("  ", in_words(step.tuned), step.is_tuned() ? "\n" : ", cannot do this\n");
    if (step.unaligned) explanation += message("  where operands are not aligned for it: ", step.unaligned->name, "\n");
    if (step.kernel->detail) explanation += "  " + step.kernel->detail(step.problem) + "\n";
    explanation += step.refused;
  }
  void add_line(std::string_view what, std::string_view kernel, const Cost& cost);
  // The same for a product, with the rows that are faster for fewer rows of X.
  void add_product(std::string_view what, const ProductStep& product);
  // Adds what the times in explain() mean.
  void describe_times(Device device, int threads);
  // Adds which tuning the products follow.
  void describe_tuning(Device device, std::string_view kernel);

  // Reserves bytes of the workspace and returns where they begin; the first reservations of a plan.
  std::size_t reserve(std::int64_t rows, std::int64_t cols, DType dtype);
  // Reserves scratch that steps use one after the other, behind everything else.
  void reserve_scratch(std::size_t bytes);
  std::size_t scratch = 0;  // where it begins
  bool scratch_begun = false;
};

// How many rows this call runs: the description's, {rows, columns}, or fewer.
std::int64_t rows_of_call(std::string_view function, std::string_view name, const ConstTensor& t,
                          std::array<std::int64_t, 2> described);

// The last checks of a run: nothing overlaps, and the workspace is present and large enough. Returns its aligned start;
// null if the plan needs none.
std::byte* finish_checks(TensorChecks& checks, const Plan::Impl& impl, Workspace workspace);

// Runs one step on part of the plan's workspace.
template <class Problem, class Operands>
void launch(const Plan::Impl& impl, const Step<Problem, Operands>& step, const Operands& operands, std::byte* workspace,
            Stream stream) {
  const Workspace scratch = {workspace ? workspace + impl.scratch : nullptr, step.workspace};
  const cuda::OnDevice current(step.problem.device);
  step.row(operands).launch(step.problem, operands, {scratch, stream});
}

// The verdict of can_implement: whether the plan's `bind`, with which run begins, throws.
template <class Impl, class Args>
Verdict verdict_on(const Impl& impl, Device device, const Args& args) {
  const cpu::FloatEnvironment environment;
  try {
    TensorChecks checks(impl.function, device);
    bind(impl, args, checks);
    checks.no_overlap();
    return {};
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
}

// A scale that the plan itself keeps, in the type that its kernels read.
class StaticScale {
 public:
  StaticScale() = default;
  StaticScale(double value, DType type) : type_(type), f32_(static_cast<float>(value)), f64_(value) {}
  DType type() const { return type_; }
  const void* data() const { return type_ == DType::f64 ? static_cast<const void*>(&f64_) : &f32_; }

 private:
  DType type_ = DType::f32;
  float f32_ = 0;
  double f64_ = 0;
};

// A vector of `size` scales at `data`; stride 0 repeats one.
ConstTensor scale_vector(const void* data, DType type, std::int64_t size, std::int64_t stride);

// A vector of one value as a vector of `size`.
ConstTensor repeated(ConstTensor one, std::int64_t size);

// A vector of scales as a matrix of one column.
ConstTensor as_column(ConstTensor scales);

// The same matrix with its dimensions swapped: a view for kernels, which take either stride as 1.
template <class Void>
BasicTensor<Void> transposed(BasicTensor<Void> t) {
  return {t.data, t.dtype, t.device, t.rank, {t.shape[1], t.shape[0]}, {t.strides[1], t.strides[0]}};
}

// The scale of an s8 X as a vector of m, from the caller's tensor or from the description's static scale.
ConstTensor bind_x_scale(TensorChecks& checks, Activation activation, const StaticScale& static_scale,
                         const ConstTensor& x_scale, std::int64_t m);

// The empty sum: y is the bias, or zero.
void write_empty_sum(const GemmOperands& operands, Device device, Stream stream);

// The guarantee of a product: its row's bound over `terms` ("K").
PrecisionGuarantee guarantee_of(const GemmStep& step, std::string_view terms);

// The guarantees of a backward plan, one per gradient that it computes.
struct GradientGuarantees {
  std::array<std::optional<PrecisionGuarantee>, 3> of = {};

  std::optional<PrecisionGuarantee>& operator[](Gradient gradient) { return of[static_cast<std::size_t>(gradient)]; }
  PrecisionGuarantee together() const;
  // Refuses one that is not computed.
  const PrecisionGuarantee& at(std::string_view function, Gradient gradient) const;
};

// Of dB of a dY of this type.
PrecisionGuarantee guarantee_of_db(DType dy);

}  // namespace octile
