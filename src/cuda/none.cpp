// The symbols of src/cuda/ in a library that was built without CUDA.
#include "cuda/devices.h"
#include "plan/kernel.h"

namespace octile {

namespace {

constexpr const char* kReason = "built without CUDA (OCTILE_CUDA is off)";

}  // namespace

CudaDevices cuda_devices() { return {{}, kReason}; }

namespace cuda {

OnDevice::OnDevice(Device) {}
OnDevice::~OnDevice() = default;

// Every row says no, and so nothing else is called.
std::string quantizer_sm80_supports(const QuantizeProblem&) { return kReason; }
Cost quantize_sm80_cost(const QuantizeProblem&) { return {}; }
std::size_t quantize_sm80_workspace(const QuantizeProblem&) { return 0; }
void quantize_sm80_prepare(const QuantizeProblem&) {}
void quantize_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&) {}
std::string quantize_sm90_supports(const QuantizeProblem&) { return kReason; }
Cost quantize_sm90_cost(const QuantizeProblem&) { return {}; }
std::size_t quantize_sm90_workspace(const QuantizeProblem&) { return 0; }
void quantize_sm90_prepare(const QuantizeProblem&) {}
void quantize_sm90(const QuantizeProblem&, const QuantizeOperands&, const Launch&) {}
std::string gradient_quantize_sm90_supports(const QuantizeProblem&) { return kReason; }
Cost gradient_quantize_sm90_cost(const QuantizeProblem&) { return {}; }
std::size_t gradient_quantize_sm90_workspace(const QuantizeProblem&) { return 0; }
void gradient_quantize_sm90_prepare(const QuantizeProblem&) {}
void gradient_quantize_sm90(const QuantizeProblem&, const QuantizeOperands&, const Launch&) {}
void dequantize_sm80_prepare(const QuantizeProblem&) {}
void dequantize_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&) {}
void straight_through_sm80_prepare(const QuantizeProblem&) {}
void quantize_backward_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&) {}
void dequantize_backward_sm80_prepare(const QuantizeProblem&) {}
void dequantize_backward_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&) {}
std::size_t fake_quantize_sm80_workspace(const QuantizeProblem&) { return 0; }
void fake_quantize_sm80_prepare(const QuantizeProblem&) {}
void fake_quantize_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&) {}
void fake_quantize_backward_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&) {}
std::string w8a8_gemm_sm80_supports(const GemmProblem&) { return kReason; }
Cost w8a8_gemm_sm80_cost(const GemmProblem&) { return {}; }
void w8a8_gemm_sm80_prepare(const GemmProblem&) {}
void w8a8_gemm_sm80(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w8a8_gemm_sm90_supports(const GemmProblem&) { return kReason; }
Cost w8a8_gemm_sm90_cost(const GemmProblem&) { return {}; }
std::size_t w8a8_gemm_sm90_workspace(const GemmProblem&) { return 0; }
void w8a8_gemm_sm90_prepare(const GemmProblem&) {}
std::string w8a8_gemm_sm90_detail(const GemmProblem&) { return {}; }
void w8a8_gemm_sm90(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w8a8_gemm_skinny_sm90_supports(const GemmProblem&) { return kReason; }
Cost w8a8_gemm_skinny_sm90_cost(const GemmProblem&) { return {}; }
std::size_t w8a8_gemm_skinny_sm90_workspace(const GemmProblem&) { return 0; }
void w8a8_gemm_skinny_sm90_prepare(const GemmProblem&) {}
std::string w8a8_gemm_skinny_sm90_detail(const GemmProblem&) { return {}; }
void w8a8_gemm_skinny_sm90(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w8a8_linear_sm90_supports(const GemmProblem&) { return kReason; }
Cost w8a8_linear_sm90_cost(const GemmProblem&) { return {}; }
std::size_t w8a8_linear_sm90_workspace(const GemmProblem&) { return 0; }
void w8a8_linear_sm90_prepare(const GemmProblem&) {}
void w8a8_linear_sm90(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string column_sum_sm80_supports(const GemmProblem&) { return kReason; }
Cost column_sum_sm80_cost(const GemmProblem&) { return {}; }
std::size_t column_sum_sm80_workspace(const GemmProblem&) { return 0; }
void column_sum_sm80_prepare(const GemmProblem&) {}
void column_sum_sm80(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w8a16_gemm_sm80_supports(const GemmProblem&) { return kReason; }
Cost w8a16_gemm_sm80_cost(const GemmProblem&) { return {}; }
void w8a16_gemm_sm80_prepare(const GemmProblem&) {}
void w8a16_gemm_sm80(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w8a16_gemm_sm90_supports(const GemmProblem&) { return kReason; }
Cost w8a16_gemm_sm90_cost(const GemmProblem&) { return {}; }
void w8a16_gemm_sm90_prepare(const GemmProblem&) {}
std::string w8a16_gemm_sm90_detail(const GemmProblem&) { return {}; }
void w8a16_gemm_sm90(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w4a8_gemm_sm80_supports(const GemmProblem&) { return kReason; }
Cost w4a8_gemm_sm80_cost(const GemmProblem&) { return {}; }
void w4a8_gemm_sm80_prepare(const GemmProblem&) {}
void w4a8_gemm_sm80(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w4a8_gemm_sm90_supports(const GemmProblem&) { return kReason; }
Cost w4a8_gemm_sm90_cost(const GemmProblem&) { return {}; }
void w4a8_gemm_sm90_prepare(const GemmProblem&) {}
std::string w4a8_gemm_sm90_detail(const GemmProblem&) { return {}; }
void w4a8_gemm_sm90(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w4a16_gemm_sm80_supports(const GemmProblem&) { return kReason; }
Cost w4a16_gemm_sm80_cost(const GemmProblem&) { return {}; }
void w4a16_gemm_sm80_prepare(const GemmProblem&) {}
void w4a16_gemm_sm80(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w4a16_gemv_sm90_supports(const GemmProblem&) { return kReason; }
Cost w4a16_gemv_sm90_cost(const GemmProblem&) { return {}; }
void w4a16_gemv_sm90_prepare(const GemmProblem&) {}
std::string w4a16_gemv_sm90_detail(const GemmProblem&) { return {}; }
void w4a16_gemv_sm90(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w4a16_gemm_skinny_sm90_supports(const GemmProblem&) { return kReason; }
Cost w4a16_gemm_skinny_sm90_cost(const GemmProblem&) { return {}; }
void w4a16_gemm_skinny_sm90_prepare(const GemmProblem&) {}
std::string w4a16_gemm_skinny_sm90_detail(const GemmProblem&) { return {}; }
void w4a16_gemm_skinny_sm90(const GemmProblem&, const GemmOperands&, const Launch&) {}
std::string w4a16_gemm_sm90_supports(const GemmProblem&) { return kReason; }
Cost w4a16_gemm_sm90_cost(const GemmProblem&) { return {}; }
void w4a16_gemm_sm90_prepare(const GemmProblem&) {}
std::string w4a16_gemm_sm90_detail(const GemmProblem&) { return {}; }
void w4a16_gemm_sm90(const GemmProblem&, const GemmOperands&, const Launch&) {}
void write_empty_sum(const GemmOperands&, Stream) {}

}  // namespace cuda

}  // namespace octile
