// The kernel table. A row is a kernel; the plans look nowhere else. To add a kernel, write its file, declare its
// launcher in kernels.h and add its row here: `octile info`, `octile check` and `octile bench` then know it.
#include "plan/kernel.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/thread_pool.h"
#include "cpu/support/isa.h"
#include "plan/choose.h"

namespace octile {

namespace {

template <class Problem>
std::string always(const Problem&) {
  return {};
}

// The portable products read rows of b.
[[maybe_unused]] std::string unpacked(const GemmProblem& p) {
  return p.b_packed ? "takes the weight as it is, not packed" : "";
}

template <class Problem>
std::size_t none(const Problem&) {
  return 0;
}

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
  const int b_bits = p.group > 0 ? 4 : p.operation == Operation::column_sum ? 0 : 8;
  const double bytes = (m * k * bits(p.a) + n * k * b_bits + m * n * bits(p.y)) / 8;
  const double operations = 2 * m * n * k;
  // Added, although they overlap: among kernels that wait for memory alone the one with less to do is the faster.
  return {operations, bytes, operations / operations_per_second + bytes / bytes_per_second};
}

// What one core reaches, on a Zen 5 at 4 GHz where nothing else is said (docs/notes/cpu.md). They have to rank the rows
// and to give explain() its order of magnitude.
Cost reference_quantize(const QuantizeProblem& p) { return quantize_cost(p, 0.1e9); }
// As slow as its parts, and never chosen unless it is asked for.
Cost reference_gradient(const QuantizeProblem& p) { return quantize_cost(p, 0.05e9); }
Cost reference_gemm(const GemmProblem& p) { return gemm_cost(p, 0.3e9, 1e9); }

#if !OCTILE_SCALAR

using cpu::Isa;

double threads(int wanted) { return wanted > 0 ? wanted : cpu::hardware_threads(); }

constexpr double kBytesPerSecond = 15e9;  // and core

template <Isa isa, class Problem>
std::string needs(const Problem&) {
  return cpu::reason_against(isa);
}

template <Isa isa>
std::string needs_f32(const GemmProblem& p) {
  if (p.scale == DType::f64) return "has no f64";
  return cpu::reason_against(isa);
}

double weight_bytes(const GemmProblem& p) { return static_cast<double>(p.n) * static_cast<double>(p.k); }

// Of the portable rows, which are compiled for several instruction sets.
double with_isa(double baseline, double avx2, double avx512, double avx512vnni) {
  return cpu::isa() >= Isa::avx512vnni ? avx512vnni
         : cpu::isa() >= Isa::avx512   ? avx512
         : cpu::isa() >= Isa::avx2     ? avx2
                                       : baseline;
}

Cost portable_quantize(const QuantizeProblem& p) { return quantize_cost(p, 4e9 * threads(p.threads)); }
Cost portable_w8a8(const GemmProblem& p) {
  Cost cost =
      gemm_cost(p, with_isa(75e9, 140e9, 265e9, 490e9) * threads(p.threads), kBytesPerSecond * threads(p.threads));
  if (p.b_major == Major::outer) cost.seconds += weight_bytes(p) / (0.5e9 * threads(p.threads));  // turned first
  return cost;
}
Cost portable_float(const GemmProblem& p) {
  return gemm_cost(p, with_isa(40e9, 90e9, 200e9, 200e9) * threads(p.threads), kBytesPerSecond * threads(p.threads));
}

// Rates in operations per second and core; those of the Arm rows are not measured: about 70% of two dot products a
// cycle at 3 GHz. A weight that does not come packed is packed first.
template <int giga>
Cost at_rate(const GemmProblem& p) {
  Cost cost = gemm_cost(p, giga * 1e9 * threads(p.threads), kBytesPerSecond * threads(p.threads));
  if (!p.b_packed) cost.seconds += weight_bytes(p) / (20e9 * threads(p.threads));
  return cost;
}

// A tile multiplies 16 rows, however many there are (Sapphire Rapids).
[[maybe_unused]] Cost amx_w8a8(const GemmProblem& p) {
  GemmProblem padded = p;
  padded.m = (p.m + 15) / 16 * 16;
  return at_rate<1500>(padded);
}

#endif

// On an H200, launch included (docs/notes/gpu.md).
Cost cuda_quantize(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, 3.8e12);
  cost.seconds += 3e-6;
  return cost;
}

constexpr DeviceType kCpu = DeviceType::cpu;
constexpr DeviceType kCuda = DeviceType::cuda;
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
  {"gradient_quantize_reference",       Op::gradient_quantize,      kCpu, always, reference_gradient, none,                                  reference::gradient_quantize},
#if !OCTILE_SCALAR
  {"quantize_portable",                 Op::quantize,               kCpu, always, portable_quantize,  cpu::quantize_portable_workspace,      cpu::quantize_portable},
  {"dequantize_portable",               Op::dequantize,             kCpu, always, portable_quantize,  none,                                  cpu::dequantize_portable},
  {"quantize_backward_portable",        Op::quantize_backward,      kCpu, always, portable_quantize,  none,                                  cpu::quantize_backward_portable},
  {"dequantize_backward_portable",      Op::dequantize_backward,    kCpu, always, portable_quantize,  none,                                  cpu::dequantize_backward_portable},
  {"fake_quantize_portable",            Op::fake_quantize,          kCpu, always, portable_quantize,  cpu::fake_quantize_portable_workspace, cpu::fake_quantize_portable},
  {"fake_quantize_backward_portable",   Op::fake_quantize_backward, kCpu, always, portable_quantize,  none,                                  cpu::fake_quantize_backward_portable},
#endif
  {"quantize_sm80",                     Op::quantize,               kCuda, cuda::quantizer_sm80_supports, cuda::quantize_sm80_cost, cuda::quantize_sm80_workspace,      cuda::quantize_sm80,               cuda::quantize_sm80_prepare},
  {"quantize_sm90",                     Op::quantize,               kCuda, cuda::quantize_sm90_supports,  cuda::quantize_sm90_cost, cuda::quantize_sm90_workspace,      cuda::quantize_sm90,               cuda::quantize_sm90_prepare},
  {"gradient_quantize_sm90",            Op::gradient_quantize,      kCuda, cuda::gradient_quantize_sm90_supports, cuda::gradient_quantize_sm90_cost, cuda::gradient_quantize_sm90_workspace, cuda::gradient_quantize_sm90, cuda::gradient_quantize_sm90_prepare},
  {"dequantize_sm80",                   Op::dequantize,             kCuda, cuda::quantizer_sm80_supports, cuda_quantize,            none,                               cuda::dequantize_sm80,             cuda::dequantize_sm80_prepare},
  {"quantize_backward_sm80",            Op::quantize_backward,      kCuda, cuda::quantizer_sm80_supports, cuda_quantize,            none,                               cuda::quantize_backward_sm80,      cuda::straight_through_sm80_prepare},
  {"dequantize_backward_sm80",          Op::dequantize_backward,    kCuda, cuda::quantizer_sm80_supports, cuda_quantize,            none,                               cuda::dequantize_backward_sm80,    cuda::dequantize_backward_sm80_prepare},
  {"fake_quantize_sm80",                Op::fake_quantize,          kCuda, cuda::quantizer_sm80_supports, cuda_quantize,            cuda::fake_quantize_sm80_workspace, cuda::fake_quantize_sm80,          cuda::fake_quantize_sm80_prepare},
  {"fake_quantize_backward_sm80",       Op::fake_quantize_backward, kCuda, cuda::quantizer_sm80_supports, cuda_quantize,            none,                               cuda::fake_quantize_backward_sm80, cuda::straight_through_sm80_prepare},
};

constexpr GemmKernel kGemmKernels[] = {
  {"w8a8_gemm_reference",               Op::w8a8_gemm,              kCpu, always, reference_gemm,     none,                                  reference::w8a8_gemm},
  {"w8a16_gemm_reference",              Op::w8a16_gemm,             kCpu, always, reference_gemm,     none,                                  reference::w8a16_gemm},
  {"w4a16_gemm_reference",              Op::w4a16_gemm,             kCpu, always, reference_gemm,     none,                                  reference::w4a16_gemm},
  {"w4a8_gemm_reference",               Op::w4a8_gemm,              kCpu, always, reference_gemm,     none,                                  reference::w4a8_gemm},
  {"column_sum_reference",              Op::column_sum,             kCpu, always, reference_gemm,     none,                                  reference::column_sum},
#if !OCTILE_SCALAR
  {"w8a8_gemm_portable",                Op::w8a8_gemm,              kCpu, unpacked, portable_w8a8,      cpu::w8a8_gemm_portable_workspace,     cpu::w8a8_gemm_portable},
#if defined(__x86_64__)
  {"w8a8_gemm_avx2",                    Op::w8a8_gemm,              kCpu, needs<Isa::avx2>, at_rate<180>, cpu::w8a8_gemm_avx2_workspace,         cpu::w8a8_gemm_avx2},
  {"w8a8_gemm_avxvnni",                 Op::w8a8_gemm,              kCpu, needs<Isa::avxvnni>, at_rate<350>, cpu::w8a8_gemm_avxvnni_workspace,   cpu::w8a8_gemm_avxvnni},
  {"w8a8_gemm_avx512vnni",              Op::w8a8_gemm,              kCpu, needs<Isa::avx512vnni>, at_rate<700>, cpu::w8a8_gemm_avx512vnni_workspace, cpu::w8a8_gemm_avx512vnni},
  {"w8a8_gemm_amx",                     Op::w8a8_gemm,              kCpu, needs<Isa::amx>, amx_w8a8,      cpu::w8a8_gemm_amx_workspace,          cpu::w8a8_gemm_amx},
  {"w4a8_gemm_avx2",                    Op::w4a8_gemm,              kCpu, needs_f32<Isa::avx2>, at_rate<300>, cpu::w4a8_gemm_workspace,         cpu::w4a8_gemm_avx2},
  {"w4a8_gemm_avx512vnni",              Op::w4a8_gemm,              kCpu, needs_f32<Isa::avx512vnni>, at_rate<600>, cpu::w4a8_gemm_workspace,   cpu::w4a8_gemm_avx512vnni},
#elif defined(__aarch64__)
  {"w8a8_gemm_neon",                    Op::w8a8_gemm,              kCpu, needs<Isa::neon>, at_rate<130>, cpu::w8a8_gemm_neon_workspace,         cpu::w8a8_gemm_neon},
  {"w8a8_gemm_i8mm",                    Op::w8a8_gemm,              kCpu, needs<Isa::i8mm>, at_rate<180>, cpu::w8a8_gemm_i8mm_workspace,         cpu::w8a8_gemm_i8mm},
  {"w4a8_gemm_neon",                    Op::w4a8_gemm,              kCpu, needs_f32<Isa::neon>, at_rate<110>, cpu::w4a8_gemm_workspace,          cpu::w4a8_gemm_neon},
  {"w4a8_gemm_i8mm",                    Op::w4a8_gemm,              kCpu, needs_f32<Isa::i8mm>, at_rate<160>, cpu::w4a8_gemm_workspace,          cpu::w4a8_gemm_i8mm},
#endif
  {"w8a16_gemm_portable",               Op::w8a16_gemm,             kCpu, always, portable_float,     cpu::w8a16_gemm_portable_workspace,    cpu::w8a16_gemm_portable},
  {"w4a16_gemm_portable",               Op::w4a16_gemm,             kCpu, always,  portable_float,     cpu::w4a16_gemm_portable_workspace,    cpu::w4a16_gemm_portable},
  {"column_sum_portable",               Op::column_sum,             kCpu, always, portable_float,     none,                                  cpu::column_sum_portable},
#endif
  {"w8a8_gemm_sm80",                    Op::w8a8_gemm,              kCuda, cuda::w8a8_gemm_sm80_supports,   cuda::w8a8_gemm_sm80_cost,   none,                            cuda::w8a8_gemm_sm80,   cuda::w8a8_gemm_sm80_prepare},
  {"w8a8_gemm_sm90",                    Op::w8a8_gemm,              kCuda, cuda::w8a8_gemm_sm90_supports,   cuda::w8a8_gemm_sm90_cost,   cuda::w8a8_gemm_sm90_workspace,   cuda::w8a8_gemm_sm90,   cuda::w8a8_gemm_sm90_prepare, cuda::w8a8_gemm_sm90_detail},
  {"w8a8_gemm_skinny_sm90",             Op::w8a8_gemm,              kCuda, cuda::w8a8_gemm_skinny_sm90_supports, cuda::w8a8_gemm_skinny_sm90_cost, cuda::w8a8_gemm_skinny_sm90_workspace, cuda::w8a8_gemm_skinny_sm90, cuda::w8a8_gemm_skinny_sm90_prepare, cuda::w8a8_gemm_skinny_sm90_detail},
  {"column_sum_sm80",                   Op::column_sum,             kCuda, cuda::column_sum_sm80_supports,  cuda::column_sum_sm80_cost,  cuda::column_sum_sm80_workspace, cuda::column_sum_sm80,  cuda::column_sum_sm80_prepare},
  {"w8a16_gemm_sm80",                   Op::w8a16_gemm,             kCuda, cuda::w8a16_gemm_sm80_supports,  cuda::w8a16_gemm_sm80_cost,  none,                            cuda::w8a16_gemm_sm80,  cuda::w8a16_gemm_sm80_prepare},
  {"w8a16_gemm_sm90",                   Op::w8a16_gemm,             kCuda, cuda::w8a16_gemm_sm90_supports,  cuda::w8a16_gemm_sm90_cost,  none,                            cuda::w8a16_gemm_sm90,  cuda::w8a16_gemm_sm90_prepare, cuda::w8a16_gemm_sm90_detail},
  {"w4a16_gemm_sm80",                   Op::w4a16_gemm,             kCuda, cuda::w4a16_gemm_sm80_supports,  cuda::w4a16_gemm_sm80_cost,  none,                            cuda::w4a16_gemm_sm80,  cuda::w4a16_gemm_sm80_prepare},
  {"w4a16_gemv_sm90",                   Op::w4a16_gemm,             kCuda, cuda::w4a16_gemv_sm90_supports,  cuda::w4a16_gemv_sm90_cost,  none,                            cuda::w4a16_gemv_sm90,  cuda::w4a16_gemv_sm90_prepare, cuda::w4a16_gemv_sm90_detail, NibbleTerms::raised},
  {"w4a16_gemm_skinny_sm90",            Op::w4a16_gemm,             kCuda, cuda::w4a16_gemm_skinny_sm90_supports,  cuda::w4a16_gemm_skinny_sm90_cost,  none,                            cuda::w4a16_gemm_skinny_sm90,  cuda::w4a16_gemm_skinny_sm90_prepare, cuda::w4a16_gemm_skinny_sm90_detail},
  {"w4a16_gemm_sm90",                   Op::w4a16_gemm,             kCuda, cuda::w4a16_gemm_sm90_supports,  cuda::w4a16_gemm_sm90_cost,  none,                            cuda::w4a16_gemm_sm90,  cuda::w4a16_gemm_sm90_prepare, cuda::w4a16_gemm_sm90_detail, NibbleTerms::rounded},
  {"w4a8_gemm_sm80",                    Op::w4a8_gemm,              kCuda, cuda::w4a8_gemm_sm80_supports,   cuda::w4a8_gemm_sm80_cost,   none,                            cuda::w4a8_gemm_sm80,   cuda::w4a8_gemm_sm80_prepare},
  {"w4a8_gemm_sm90",                    Op::w4a8_gemm,              kCuda, cuda::w4a8_gemm_sm90_supports,   cuda::w4a8_gemm_sm90_cost,   none,                            cuda::w4a8_gemm_sm90,   cuda::w4a8_gemm_sm90_prepare, cuda::w4a8_gemm_sm90_detail},
  {"w8a8_linear_sm90",                  Op::w8a8_linear,            kCuda, cuda::w8a8_linear_sm90_supports, cuda::w8a8_linear_sm90_cost, cuda::w8a8_linear_sm90_workspace, cuda::w8a8_linear_sm90, cuda::w8a8_linear_sm90_prepare},
};
// clang-format on

}  // namespace

std::span<const QuantizeKernel> quantize_kernels() { return kQuantizeKernels; }
std::span<const GemmKernel> gemm_kernels() { return kGemmKernels; }

std::string_view name(Operation operation) {
  static constexpr std::array<std::string_view, 13> kNames = {"quantize",          "dequantize",
                                                              "quantize_backward", "dequantize_backward",
                                                              "fake_quantize",     "fake_quantize_backward",
                                                              "gradient_quantize", "w8a8_linear",
                                                              "w8a8_gemm",         "w8a16_gemm",
                                                              "w4a16_gemm",        "w4a8_gemm",
                                                              "column_sum"};
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
  // A row can run here if it takes one of these: no row refuses all of them on a machine that it is made for.
  const auto add = [&](const auto& kernel, auto problem, const auto& other) {
    problem.device = {kernel.device, 0};
    std::string reason = kernel.supports(problem);
    other(problem);
    if (!reason.empty() && kernel.supports(problem).empty()) reason.clear();
    rows.push_back({std::string(kernel.name), std::string(name(kernel.operation)), kernel.device, std::move(reason)});
  };
  for (const auto& kernel : kQuantizeKernels) {
    add(kernel, QuantizeProblem{}, [](QuantizeProblem& p) { p.granularity = Granularity::tensor; });
  }
  for (const auto& kernel : kGemmKernels) {
    add(kernel, GemmProblem{.operation = kernel.operation}, [](GemmProblem& p) { p.a = DType::f16; });
  }
  return rows;
}

}  // namespace octile
