// The reference rows of the kernel table: quantize.cpp, gemm.cpp.
#include "plan/kernel_list.h"

namespace octile::reference {

// clang-format off
#define QUANTIZE_ROWS(ROW) \
  ROW(quantize_reference) \
  ROW(prologue_quantize_reference) \
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

OCTILE_KERNEL_LIST

}  // namespace octile::reference
