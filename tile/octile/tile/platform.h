// What differs between compilers: the keywords for functions that also run on a GPU, and the source location of a
// call.
#pragma once

#include <version>

#if defined(__CUDACC__)
// Kernels, and every function that a kernel calls. Under nvcc they are compiled for both sides.
#define TILE_KERNEL __host__ __device__ __forceinline__
#define TILE_FUNCTION __host__ __device__ __forceinline__
#else
#define TILE_KERNEL inline
#define TILE_FUNCTION inline
#if defined(__cpp_lib_source_location)
#include <source_location>
#endif
#endif

namespace octile::tile {

// A place in the source of a kernel. A default argument `Where where = Where::here()` is the place of the call.
struct Where {
  const char* file = "";
  unsigned line = 0;
  unsigned column = 0;

#if defined(__CUDACC__)
  TILE_FUNCTION static constexpr Where here(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return {file, line, 0};
  }
#elif defined(__cpp_lib_source_location)
  static constexpr Where here(std::source_location place = std::source_location::current()) {
    return {place.file_name(), place.line(), place.column()};
  }
#else  // clang 14 and 15 with libstdc++
  static constexpr Where here(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE(),
                              unsigned column = __builtin_COLUMN()) {
    return {file, line, column};
  }
#endif
};

}  // namespace octile::tile
