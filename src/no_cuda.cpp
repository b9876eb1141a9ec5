// The symbols of src/cuda/ in a library that was built without CUDA.
#include "cuda_devices.h"

namespace octile {

CudaDevices cuda_devices() { return {{}, "built without CUDA (OCTILE_CUDA is off)"}; }

}  // namespace octile
