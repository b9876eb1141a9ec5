// The oracle: each plan as the contract defines it, whole operations on the public descriptions and arguments, without
// the plans, the kernel table or any workspace. Slow, allocating, unchecked: for tests and for `octile check`.
//
// Integer paths give the bits that every backend gives. Sums in float (W4A16, dequantized products, dB) are taken in
// f64 and rounded once: the central value.
#pragma once

#include "octile/grouped_linear.h"
#include "octile/linear.h"
#include "octile/quantize.h"

namespace octile::oracle {

void quantize(const QuantizeDescription& description, const QuantizeArgs& args);
void dequantize(const QuantizeDescription& description, const DequantizeArgs& args);
void quantize_backward(const QuantizeDescription& description, const QuantizeBackwardArgs& args);
void dequantize_backward(const QuantizeDescription& description, const DequantizeBackwardArgs& args);
void fake_quantize(const QuantizeDescription& description, const FakeQuantizeArgs& args);
void fake_quantize_backward(const QuantizeDescription& description, const FakeQuantizeBackwardArgs& args);
void linear(const LinearDescription& description, const LinearArgs& args);
void grouped_linear(const GroupedLinearDescription& description, const GroupedLinearArgs& args);
void linear_backward(const LinearBackwardDescription& description, const LinearBackwardArgs& args);
void grouped_linear_backward(const GroupedLinearBackwardDescription& description,
                             const GroupedLinearBackwardArgs& args);

}  // namespace octile::oracle
