# The CUDA language and runtime. The runtime is linked statically, so that a machine without CUDA can load the library.

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "OCTILE_CUDA is ON, but there is no CUDA compiler: put nvcc in PATH, set CUDACXX, "
                      "or build with -DOCTILE_CUDA=OFF")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  # sm_90a has the matrix instructions of Hopper; what is newer compiles the generic code of sm_90.
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual" CACHE STRING "CUDA architectures")
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
find_package(CUDAToolkit REQUIRED)
