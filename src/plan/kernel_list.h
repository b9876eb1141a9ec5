// For a list of rows: declares those that QUANTIZE_ROWS(ROW) and GEMM_ROWS(ROW) name, each at the end of its own file,
// and defines kernels().
#pragma once

#include "plan/kernel.h"

#define OCTILE_DECLARE_QUANTIZE_ROW(row) extern const QuantizeKernel row;
#define OCTILE_DECLARE_GEMM_ROW(row) extern const GemmKernel row;
#define OCTILE_ADDRESS_OF_ROW(row) &row,

#define OCTILE_KERNEL_LIST                                                                       \
  QUANTIZE_ROWS(OCTILE_DECLARE_QUANTIZE_ROW)                                                     \
  GEMM_ROWS(OCTILE_DECLARE_GEMM_ROW)                                                             \
  KernelRows kernels() {                                                                         \
    static constexpr const QuantizeKernel* kQuantize[] = {QUANTIZE_ROWS(OCTILE_ADDRESS_OF_ROW)}; \
    static constexpr const GemmKernel* kGemm[] = {GEMM_ROWS(OCTILE_ADDRESS_OF_ROW)};             \
    return {kQuantize, kGemm};                                                                   \
  }
