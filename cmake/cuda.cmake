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
find_package(CUDAToolkit 12.5 REQUIRED)

# The kernels, compiled for what they can run on: those whose name ends in sm90 use instructions that Hopper alone has.
macro(octile_add_cuda_objects)
  file(GLOB octile_cuda_sources CONFIGURE_DEPENDS src/cuda/*.cu)
  set(octile_cuda_sm90_sources ${octile_cuda_sources})
  list(FILTER octile_cuda_sm90_sources INCLUDE REGEX "_sm90\\.cu$")
  list(FILTER octile_cuda_sources EXCLUDE REGEX "_sm90\\.cu$")
  set(octile_cuda_objects)
  foreach(part cuda cuda_sm90)
    add_library(octile_${part} OBJECT ${octile_${part}_sources})
    target_include_directories(octile_${part} PRIVATE include src src/cuda)
    octile_compile_options(octile_${part})
    list(APPEND octile_cuda_objects $<TARGET_OBJECTS:octile_${part}>)
  endforeach()
  set_target_properties(octile_cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
endmacro()
