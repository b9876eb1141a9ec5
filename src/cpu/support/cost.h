// Facts about the CPU rows: which instruction set they need, and the speed of one core, on a Zen 5 at 4 GHz unless
// noted otherwise (docs/notes/cpu.md). The rates rank the rows and give explain() its order of magnitude.
#pragma once

#include <string>

#include "base/thread_pool.h"
#include "cpu/support/isa.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cpu {

inline double thread_count(int requested) { return requested > 0 ? requested : hardware_threads(); }

inline constexpr double kBytesPerSecond = 15e9;  // and core

// Of the product kernels of one instruction set.
template <Isa isa>
std::string needs(const GemmProblem& p) {
  if ((p.grouped() || p.a_block > 0) && p.scale == DType::f64) return "has no f64 with scales in groups or blocks";
  return reason_against(isa);
}

inline double weight_bytes(const GemmProblem& p) { return static_cast<double>(p.n) * static_cast<double>(p.k); }

// Of the portable rows, which are compiled for several instruction sets.
inline double with_isa(double baseline, double avx2, double avx512, double avx512vnni) {
  return isa() >= Isa::avx512vnni ? avx512vnni : isa() >= Isa::avx512 ? avx512 : isa() >= Isa::avx2 ? avx2 : baseline;
}

inline Cost portable_quantize_cost(const QuantizeProblem& p) { return quantize_cost(p, 4e9 * thread_count(p.threads)); }
// Of the quantizers.
constexpr QuantizeKernel portable_row(std::string_view name, Operation operation,
                                      decltype(QuantizeKernel::launch) launch,
                                      decltype(QuantizeKernel::workspace) workspace = nullptr) {
  return {.name = name, .task = {operation}, .cost = portable_quantize_cost, .workspace = workspace, .launch = launch};
}
inline Cost portable_float_cost(const GemmProblem& p) {
  const double threads = thread_count(p.threads);
  return gemm_cost(p, with_isa(40e9, 90e9, 200e9, 200e9) * threads, kBytesPerSecond * threads);
}

// A weight that does not come packed is packed first, or part by part: this many values a second and core.
inline double packing_seconds(const GemmProblem& p, double values_per_second) {
  return p.b_packed ? 0 : weight_bytes(p) / (values_per_second * thread_count(p.threads));
}

// Rates in operations per second and core. Up to `dot_rows` rows of x multiply a weight as it is, at four fifths of the
// rate.
template <int giga, int dot_rows = 0>
Cost at_rate(const GemmProblem& p) {
  const double threads = thread_count(p.threads);
  const bool as_it_is = !p.b_packed && !p.grouped() && p.b_major == Major::contraction && p.m <= dot_rows;
  Cost cost = gemm_cost(p, (as_it_is ? 0.8 : 1.0) * giga * 1e9 * threads, kBytesPerSecond * threads);
  if (!as_it_is) cost.seconds += packing_seconds(p, 20e9);
  return cost;
}

}  // namespace octile::cpu
