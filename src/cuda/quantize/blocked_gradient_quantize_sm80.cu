// What the int8 backward needs of dY in blocks of T terms of either contraction.
#include "cuda/quantize/blocked_gradient_quantize_sm80.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kBlockedGradientQuantizeSm80 = "blocked_gradient_quantize_sm80";
}

extern constinit const QuantizeKernel blocked_gradient_quantize_sm80 =
    blocked_gradient_sm80::row<kBlockedGradientQuantizeSm80, false>();

}  // namespace octile::cuda
