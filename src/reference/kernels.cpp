// The reference rows of the kernel table: quantize.cpp, gemm.cpp.
#include <array>

#include "plan/kernel.h"

namespace octile::reference {

// clang-format off
#define QUANTIZE_ROWS(ROW) \
  ROW(quantize_reference) \
  ROW(dequantize_reference) \
  ROW(quantize_backward_reference) \
  ROW(dequantize_backward_reference) \
  ROW(fake_quantize_reference) \
  ROW(fake_quantize_backward_reference) \
  ROW(gradient_quantize_reference) \
  ROW(blocked_gradient_quantize_reference)

#define GEMM_ROWS(ROW) \
  ROW(w8a8_gemm_reference) \
  ROW(w8a8_blocked_gemm_reference) \
  ROW(w8a16_gemm_reference) \
  ROW(w4a16_gemm_reference) \
  ROW(w4a8_gemm_reference) \
  ROW(column_sum_reference)
// clang-format on

#define DECLARE(row) extern const QuantizeKernel row;
QUANTIZE_ROWS(DECLARE)
#undef DECLARE
#define DECLARE(row) extern const GemmKernel row;
GEMM_ROWS(DECLARE)
#undef DECLARE

KernelRows kernels() {
#define ADDRESS(row) &row,
  static constexpr const QuantizeKernel* kQuantize[] = {QUANTIZE_ROWS(ADDRESS)};
  static constexpr const GemmKernel* kGemm[] = {GEMM_ROWS(ADDRESS)};
#undef ADDRESS
  return {kQuantize, kGemm};
}

}  // namespace octile::reference
