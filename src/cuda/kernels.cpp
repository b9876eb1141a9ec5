// The CUDA rows of the kernel table, in the order in which equally cheap ones are preferred. Each is at the end of its
// own file.
#include "plan/kernel_list.h"

namespace octile::cuda {

// clang-format off
#define QUANTIZE_ROWS(ROW) \
  ROW(quantize_sm80) \
  ROW(quantize_sm90) \
  ROW(prologue_quantize_sm80) \
  ROW(norm_quantize_sm80) \
  ROW(gradient_quantize_sm90) \
  ROW(blocked_gradient_quantize_sm90) \
  ROW(blocked_gradient_quantize_sm80) \
  ROW(grouped_gradient_quantize_sm90) \
  ROW(grouped_gradient_quantize_sm80) \
  ROW(dequantize_sm80) \
  ROW(quantize_backward_sm80) \
  ROW(dequantize_backward_sm80) \
  ROW(fake_quantize_sm80) \
  ROW(fake_quantize_backward_sm80)

#define GEMM_ROWS(ROW) \
  ROW(w8a8_gemm_sm80) \
  ROW(w8a8_gemm_small_sm80) \
  ROW(w8a8_gemm_sm90) \
  ROW(w8a8_gemm_skinny_sm90) \
  ROW(w8a8_blocked_gemm_sm90) \
  ROW(w8a8_group_gemm_simt_sm80) \
  ROW(w8a8_group_gemm_sm80) \
  ROW(w8a8_blocked_gemm_sm80) \
  ROW(column_sum_sm80) \
  ROW(w8a16_gemm_sm80) \
  ROW(w8a16_gemm_sm90) \
  ROW(w8a16_group_gemm_simt_sm80) \
  ROW(w8a16_group_gemm_sm80) \
  ROW(w8a16_group_gemm_sm90) \
  ROW(w4a16_gemm_simt_sm80) \
  ROW(w4a16_gemm_sm80) \
  ROW(w4a16_gemv_sm90) \
  ROW(w4a16_gemm_skinny_sm90) \
  ROW(w4a16_gemm_sm90) \
  ROW(w4a8_gemm_simt_sm80) \
  ROW(w4a8_gemm_sm80) \
  ROW(w4a8_gemv_sm90) \
  ROW(w4a8_gemm_sm90) \
  ROW(w8a8_grouped_gemm_sm80) \
  ROW(w8a8_grouped_gemm_sm90) \
  ROW(w8a8_grouped_gemm_simt_sm80) \
  ROW(w8a16_grouped_gemm_sm80) \
  ROW(w8a16_grouped_gemm_simt_sm80) \
  ROW(w4a8_grouped_gemm_sm80) \
  ROW(w4a8_grouped_gemv_sm90) \
  ROW(w4a8_grouped_gemm_skinny_sm90) \
  ROW(w4a8_grouped_gemm_sm90) \
  ROW(w4a8_grouped_gemm_simt_sm80) \
  ROW(w4a16_grouped_gemm_sm80) \
  ROW(w4a16_grouped_gemv_sm90) \
  ROW(w4a16_grouped_gemm_sm90) \
  ROW(w4a16_grouped_gemm_skinny_sm90) \
  ROW(w4a16_grouped_gemm_simt_sm80) \
  ROW(w8a8_grouped_gradient_sm90) \
  ROW(w8a8_grouped_gradient_sm80) \
  ROW(w8a16_grouped_gradient_sm80)
// clang-format on

OCTILE_KERNEL_LIST

}  // namespace octile::cuda
