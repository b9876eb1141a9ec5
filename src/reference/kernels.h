// The reference rows that are called by name: the oracle's steps.
#pragma once

#include "plan/kernel.h"

namespace octile::reference {

extern const QuantizeKernel quantize_reference, prologue_quantize_reference, dequantize_reference,
    quantize_backward_reference, dequantize_backward_reference, fake_quantize_reference,
    fake_quantize_backward_reference;
extern const GemmKernel column_sum_reference;

}  // namespace octile::reference
