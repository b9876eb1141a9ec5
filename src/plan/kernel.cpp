// The kernel table: all rows, and queries over all of them.
#include "plan/kernel.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/message.h"
#include "plan/choose.h"

namespace octile {

namespace {

// The rows of one kind, of all folders.
template <class Row>
std::vector<const Row*> all_rows(std::span<const Row* const> KernelRows::*rows) {
  std::vector<const Row*> all;
  for (const KernelRows& folder : {
         reference::kernels(),
#if !OCTILE_SCALAR
             cpu::kernels(),
#endif
             cuda::kernels()
       }) {
    all.insert(all.end(), (folder.*rows).begin(), (folder.*rows).end());
  }
  return all;
}

}  // namespace

std::span<const QuantizeKernel* const> quantize_kernels() {
  static const std::vector<const QuantizeKernel*> kRows = all_rows(&KernelRows::quantize);
  return kRows;
}

std::span<const GemmKernel* const> gemm_kernels() {
  static const std::vector<const GemmKernel*> kRows = all_rows(&KernelRows::gemm);
  return kRows;
}

std::string_view name(Operation operation) {
  static constexpr std::array<std::string_view, 15> kNames = {"quantize",
                                                              "dequantize",
                                                              "quantize_backward",
                                                              "dequantize_backward",
                                                              "fake_quantize",
                                                              "fake_quantize_backward",
                                                              "gradient_quantize",
                                                              "blocked_gradient_quantize",
                                                              "gemm",
                                                              "w8a8_blocked_gemm",
                                                              "column_sum",
                                                              "grouped_gemm",
                                                              "prologue_quantize",
                                                              "grouped_gradient_quantize",
                                                              "grouped_gradient"};
  return kNames[static_cast<std::size_t>(operation)];
}

std::string name(Task task) {
  if (!has_format(task.operation)) return std::string(name(task.operation));
  return message("w", bits(task.format.b), task.format.float_a ? "a16_" : "a8_", name(task.operation));
}

Scales scales_over(const QuantizeProblem& p, const ConstTensor& t, std::int64_t cols) {
  Scales scales{const_cast<void*>(t.data), 0, 0, std::max<std::int64_t>(cols, 1)};
  switch (p.granularity) {
    case Granularity::tensor:
      break;
    case Granularity::row:
      scales.row_stride = t.strides[0];
      break;
    case Granularity::column:
      scales.col_stride = t.strides[0];
      scales.group = 1;
      break;
    case Granularity::group:
      scales.row_stride = t.strides[0];
      scales.col_stride = t.strides[1];
      scales.group = p.group;
      break;
  }
  return scales;
}

std::pair<int, int> range_of(DType q) {
  if (q == DType::u8) return {0, 255};
  const int levels = 1 << (bits(q) < 8 ? bits(q) : 8);
  return {-levels / 2, levels / 2 - 1};
}

// A symmetric range has as many negative values as positive ones.
std::pair<int, int> default_range(DType q, Mapping mapping) {
  const auto [low, high] = range_of(q);
  return {mapping == Mapping::symmetric && low < 0 ? -high : low, high};
}

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> rows;
  // A row can run here if it takes one of these: no row refuses all of them on a machine that it is made for.
  const auto add = [&](const auto& kernel, auto problem, const auto&... others) {
    problem.device = {kernel.device, 0};
    std::string reason = refusal(kernel, problem);
    const auto also = [&](const auto& other) {
      other(problem);
      if (!reason.empty() && refusal(kernel, problem).empty()) reason.clear();
    };
    (also(others), ...);
    rows.push_back({std::string(kernel.name), name(kernel.task), kernel.device, std::move(reason)});
  };
  for (const QuantizeKernel* kernel : quantize_kernels()) {
    QuantizeProblem problem;
    // A block that every row takes.
    if (kernel->task.operation == Operation::blocked_gradient_quantize ||
        kernel->task.operation == Operation::grouped_gradient_quantize) {
      problem.group = 2 * kMinGradientBlock;
    }
    const auto norm = [](QuantizeProblem& p) { p.prologue = Prologue::rms_norm; };
    add(
        *kernel, problem, [](QuantizeProblem& p) { p.granularity = Granularity::tensor; }, norm);
  }
  for (const GemmKernel* kernel : gemm_kernels()) {
    GemmProblem p{.operation = kernel->task.operation};
    const GemmFormat format = kernel->task.format;
    p.b = is_packed(format.b) ? WeightFormat::in_groups(format.b) : WeightFormat::s8_per_channel;
    if (format.float_a) p.a = DType::f32;
    if (format == kW8A16 && p.operation == Operation::gemm) p.b.granularity = Granularity::column;
    if (p.operation == Operation::grouped_gradient) p.b.granularity = Granularity::column;
    if (p.operation == Operation::blocked_gemm || p.operation == Operation::grouped_gradient) {
      p.a_block = kMinGradientBlock;
    }
    if (p.operation == Operation::grouped_gemm || p.operation == Operation::grouped_gradient) p.experts = 1;
    add(
        *kernel, p,
        [](GemmProblem& other) {
          if (is_float(other.a) || other.operation != Operation::gemm) other.a = DType::f16;
        },
        [](GemmProblem& other) {
          if (other.b.type == DType::s8) other.b = WeightFormat::s8_group;
          other.k = other.b.group;
        },
        [](GemmProblem& other) { other.b_packed = is_packed(other.b.type); },
        [](GemmProblem& other) {
          if (is_float(other.a)) other.a = DType::bf16;
        });
  }
  return rows;
}

}  // namespace octile
