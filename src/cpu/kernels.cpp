// The CPU rows of the kernel table, in the order in which equally cheap ones are preferred. Each is at the end of the
// file that has its kernel.
#include "plan/kernel_list.h"

namespace octile::cpu {

// clang-format off
#define QUANTIZE_ROWS(ROW) \
  ROW(quantize_portable) \
  ROW(prologue_quantize_portable) \
  ROW(dequantize_portable) \
  ROW(quantize_backward_portable) \
  ROW(dequantize_backward_portable) \
  ROW(fake_quantize_portable) \
  ROW(fake_quantize_backward_portable) \
  ROW(blocked_gradient_quantize_portable)

#if defined(__x86_64__)
#define ISA_ROWS(ROW) \
  ROW(w8a8_gemm_avx2) \
  ROW(w8a8_gemm_avxvnni) \
  ROW(w8a8_gemm_avx512vnni) \
  ROW(w8a8_blocked_gemm_avx2) \
  ROW(w8a8_blocked_gemm_avxvnni) \
  ROW(w8a8_blocked_gemm_avx512vnni) \
  ROW(w8a8_gemm_amx) \
  ROW(w8a8_blocked_gemm_amx) \
  ROW(w4a8_gemm_avx2) \
  ROW(w4a8_gemm_avx512vnni) \
  ROW(w4a8_gemm_amx) \
  ROW(w8a16_gemm_avx512bf16) \
  ROW(w8a16_gemm_amx) \
  ROW(w4a16_gemm_avx512bf16) \
  ROW(w4a16_gemm_amx)
#elif defined(__aarch64__)
#define ISA_ROWS(ROW) \
  ROW(w8a8_gemm_neon) \
  ROW(w8a8_gemm_i8mm) \
  ROW(w8a8_blocked_gemm_neon) \
  ROW(w8a8_blocked_gemm_i8mm) \
  ROW(w4a8_gemm_neon) \
  ROW(w4a8_gemm_i8mm)
#else
#define ISA_ROWS(ROW)
#endif
#define GEMM_ROWS(ROW) \
  ROW(w8a8_gemm_portable) \
  ROW(w8a8_blocked_gemm_portable) \
  ISA_ROWS(ROW) \
  ROW(w8a16_gemm_portable) \
  ROW(w4a16_gemm_portable) \
  ROW(column_sum_portable)
// clang-format on

OCTILE_KERNEL_LIST

}  // namespace octile::cpu
