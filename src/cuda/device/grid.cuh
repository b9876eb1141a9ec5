// One grid after another on a stream, overlapped: programmatic dependent launch.
#pragma once

namespace octile::cuda {

// Before the first access to global memory: the grids before this one on the stream have ended, and their writes are
// visible. Every kernel calls it, since each may be launched early. Prefetches into L2 may come before it, and so may
// reads of what is older than the grid before, if that one called wait_for_previous() before let_next_start().
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Early in a kernel: the next grid may use the SMs that become free.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace octile::cuda
