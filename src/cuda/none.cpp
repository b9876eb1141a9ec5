// The CUDA side of a library that was built without CUDA: no rows, no devices, and the reason.
#include "cuda/devices.h"
#include "plan/kernel.h"

namespace octile {

CudaDevices cuda_devices() { return {{}, "built without CUDA (OCTILE_CUDA is off)"}; }

namespace cuda {

KernelRows kernels() { return {}; }
OnDevice::OnDevice(Device) {}
OnDevice::~OnDevice() = default;
void write_empty_sum(const GemmOperands&, Stream) {}
void prepare_sum_slots(DType) {}
void prepare_clear_rest() {}
void clear_rest(const ConstTensor&, const Tensor&, Stream) {}
void sum_slots(const SlotOperands&, Stream) {}

}  // namespace cuda

}  // namespace octile
