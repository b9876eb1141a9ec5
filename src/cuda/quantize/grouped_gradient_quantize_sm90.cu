// blocked_gradient_quantize_sm90 of each expert's rows, and each expert's dB: for the int8 gradients of experts.
#include "cuda/quantize/blocked_gradient_quantize_sm90.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kGroupedGradientQuantizeSm90 = "grouped_gradient_quantize_sm90";
}

extern constinit const QuantizeKernel grouped_gradient_quantize_sm90 =
    blocked_gradient_sm90::row<kGroupedGradientQuantizeSm90, true>();

}  // namespace octile::cuda
