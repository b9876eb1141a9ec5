// The kernel table. A row is a kernel; the plans look nowhere else. To add a kernel, write its file, declare its
// launcher in kernels.h and add its row here: `octile info`, `octile check` and `octile bench` then know it.
#include "kernels.h"

#include <algorithm>
#include <array>
#include <string>

#include "choose.h"
#include "cpu/thread_pool.h"

namespace octile {

namespace {

template <class Problem>
std::string always(const Problem&) {
  return {};
}

template <class Problem>
std::size_t none(const Problem&) {
  return 0;
}

double threads(int wanted) { return wanted > 0 ? wanted : cpu::hardware_threads(); }

// Bytes of one matrix element read and written, roughly the float in and the integer out.
Cost quantize_cost(const QuantizeProblem& p, double bytes_per_second) {
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.cols);
  const double bytes = elements * (bits(p.x) + bits(p.q) * (p.orientation == Orientation::both ? 2 : 1)) / 8;
  return {2 * elements, bytes, bytes / bytes_per_second};
}

Cost gemm_cost(const GemmProblem& p, double operations_per_second, double bytes_per_second) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const int b_bits = p.operation == Operation::w4a16_gemm ? 4 : p.operation == Operation::column_sum ? 0 : 8;
  const double bytes = (m * k * bits(p.a) + n * k * b_bits + m * n * bits(p.y)) / 8;
  const double operations = 2 * m * n * k;
  return {operations, bytes, std::max(operations / operations_per_second, bytes / bytes_per_second)};
}

// What one core reaches without vector instructions beyond SSE2 (docs/notes/cpu.md). They have to rank the rows; with
// wider vectors the portable rows take a fraction of the time that explain() expects.
Cost reference_quantize(const QuantizeProblem& p) { return quantize_cost(p, 0.1e9); }
[[maybe_unused]] Cost portable_quantize(const QuantizeProblem& p) { return quantize_cost(p, 4e9 * threads(p.threads)); }
Cost reference_gemm(const GemmProblem& p) { return gemm_cost(p, 0.3e9, 1e9); }
[[maybe_unused]] Cost portable_w8a8(const GemmProblem& p) { return gemm_cost(p, 80e9 * threads(p.threads), 10e9); }
[[maybe_unused]] Cost portable_float(const GemmProblem& p) { return gemm_cost(p, 40e9 * threads(p.threads), 10e9); }

constexpr DeviceType kCpu = DeviceType::cpu;
using Op = Operation;

// clang-format off
constexpr QuantizeKernel kQuantizeKernels[] = {
  // name                               operation                   device supports cost               workspace                            launch
  {"quantize_reference",                Op::quantize,               kCpu, always, reference_quantize, none,                                  reference::quantize},
  {"dequantize_reference",              Op::dequantize,             kCpu, always, reference_quantize, none,                                  reference::dequantize},
  {"quantize_backward_reference",       Op::quantize_backward,      kCpu, always, reference_quantize, none,                                  reference::quantize_backward},
  {"dequantize_backward_reference",     Op::dequantize_backward,    kCpu, always, reference_quantize, none,                                  reference::dequantize_backward},
  {"fake_quantize_reference",           Op::fake_quantize,          kCpu, always, reference_quantize, none,                                  reference::fake_quantize},
  {"fake_quantize_backward_reference",  Op::fake_quantize_backward, kCpu, always, reference_quantize, none,                                  reference::fake_quantize_backward},
#if !OCTILE_SCALAR
  {"quantize_portable",                 Op::quantize,               kCpu, always, portable_quantize,  cpu::quantize_portable_workspace,      cpu::quantize_portable},
  {"dequantize_portable",               Op::dequantize,             kCpu, always, portable_quantize,  none,                                  cpu::dequantize_portable},
  {"quantize_backward_portable",        Op::quantize_backward,      kCpu, always, portable_quantize,  none,                                  cpu::quantize_backward_portable},
  {"dequantize_backward_portable",      Op::dequantize_backward,    kCpu, always, portable_quantize,  none,                                  cpu::dequantize_backward_portable},
  {"fake_quantize_portable",            Op::fake_quantize,          kCpu, always, portable_quantize,  cpu::fake_quantize_portable_workspace, cpu::fake_quantize_portable},
  {"fake_quantize_backward_portable",   Op::fake_quantize_backward, kCpu, always, portable_quantize,  none,                                  cpu::fake_quantize_backward_portable},
#endif
};

constexpr GemmKernel kGemmKernels[] = {
  {"w8a8_gemm_reference",               Op::w8a8_gemm,              kCpu, always, reference_gemm,     none,                                  reference::w8a8_gemm},
  {"w8a16_gemm_reference",              Op::w8a16_gemm,             kCpu, always, reference_gemm,     none,                                  reference::w8a16_gemm},
  {"w4a16_gemm_reference",              Op::w4a16_gemm,             kCpu, always, reference_gemm,     none,                                  reference::w4a16_gemm},
  {"column_sum_reference",              Op::column_sum,             kCpu, always, reference_gemm,     none,                                  reference::column_sum},
#if !OCTILE_SCALAR
  {"w8a8_gemm_portable",                Op::w8a8_gemm,              kCpu, always, portable_w8a8,      cpu::w8a8_gemm_portable_workspace,     cpu::w8a8_gemm_portable},
  {"w8a16_gemm_portable",               Op::w8a16_gemm,             kCpu, always, portable_float,     cpu::w8a16_gemm_portable_workspace,    cpu::w8a16_gemm_portable},
  {"w4a16_gemm_portable",               Op::w4a16_gemm,             kCpu, always, portable_float,     cpu::w4a16_gemm_portable_workspace,    cpu::w4a16_gemm_portable},
  {"column_sum_portable",               Op::column_sum,             kCpu, always, portable_float,     none,                                  cpu::column_sum_portable},
#endif
};
// clang-format on

}  // namespace

std::span<const QuantizeKernel> quantize_kernels() { return kQuantizeKernels; }
std::span<const GemmKernel> gemm_kernels() { return kGemmKernels; }

std::string_view name(Operation operation) {
  static constexpr std::array<std::string_view, 10> kNames = {
      "quantize",  "dequantize", "quantize_backward", "dequantize_backward", "fake_quantize", "fake_quantize_backward",
      "w8a8_gemm", "w8a16_gemm", "w4a16_gemm",        "column_sum"};
  return kNames[static_cast<std::size_t>(operation)];
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
  switch (q) {
    case DType::u8:
      return {0, 255};
    case DType::s4:
      return {-8, 7};
    default:
      return {-128, 127};
  }
}

// A symmetric range has as many negative values as positive ones.
std::pair<int, int> default_range(DType q, Mapping mapping) {
  const auto [low, high] = range_of(q);
  return {mapping == Mapping::symmetric && low < 0 ? -high : low, high};
}

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> rows;
  const auto add = [&](const auto& kernel) {
    rows.push_back({std::string(kernel.name), std::string(name(kernel.operation)), kernel.device, {}});
  };
  for (const auto& kernel : kQuantizeKernels) add(kernel);
  for (const auto& kernel : kGemmKernels) add(kernel);
  return rows;
}

}  // namespace octile
