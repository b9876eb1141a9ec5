// What the int8 backward needs of dY in blocks of 256 or 512 terms of either contraction, from one reading of dY.
#include "cuda/quantize/blocked_gradient_quantize_sm90.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kBlockedGradientQuantizeSm90 = "blocked_gradient_quantize_sm90";
}

extern constinit const QuantizeKernel blocked_gradient_quantize_sm90 =
    blocked_gradient_sm90::row<kBlockedGradientQuantizeSm90, false>();

}  // namespace octile::cuda
