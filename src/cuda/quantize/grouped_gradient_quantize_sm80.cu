// blocked_gradient_quantize_sm80 of each expert's rows, and each expert's dB: for the int8 gradients of experts.
#include "cuda/quantize/blocked_gradient_quantize_sm80.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kGroupedGradientQuantizeSm80 = "grouped_gradient_quantize_sm80";
}

extern constinit const QuantizeKernel grouped_gradient_quantize_sm80 =
    blocked_gradient_sm80::row<kGroupedGradientQuantizeSm80, true>();

}  // namespace octile::cuda
