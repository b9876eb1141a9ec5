// Block primitives beyond plain C++: barriers, shuffles, asynchronous copies, tensor core products. Under nvcc these
// are instructions; any other compiler emulates a block on the CPU (cuda_emulation.h), so that all code above this file
// is tested without a GPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "octile/tile/types.h"

#if defined(__CUDA_ARCH__)
#define TILE_UNROLL _Pragma("unroll")
#define TILE_NO_UNROLL _Pragma("unroll 1")
#define TILE_DEVICE(emulated, ...) __VA_ARGS__  // the statement on a GPU, and the emulation's call
extern __shared__ __align__(1024) unsigned char octile_tile_arena[];
#elif defined(__CUDACC__)
#define TILE_UNROLL
#define TILE_NO_UNROLL
#define TILE_EMULATED(call) __builtin_trap()  // compiled for the host as well, but never called there
#else
#include "octile/tile/cuda_emulation.h"
#define TILE_UNROLL
#define TILE_NO_UNROLL
#define TILE_EMULATED(call) return emulation::call
#endif
#if !defined(__CUDA_ARCH__)
#define TILE_DEVICE(emulated, ...) TILE_EMULATED(emulated)
#endif

namespace octile::tile::gpu {

using Word = std::uint32_t;

TILE_FUNCTION int thread() { TILE_DEVICE(thread(), return static_cast<int>(threadIdx.x)); }
TILE_FUNCTION int block_index([[maybe_unused]] int axis) {
  TILE_DEVICE(block_index(axis), return static_cast<int>(axis == 0 ? blockIdx.x : axis == 1 ? blockIdx.y : blockIdx.z));
}
TILE_FUNCTION int block_count([[maybe_unused]] int axis) {
  TILE_DEVICE(block_count(axis), return static_cast<int>(axis == 0 ? gridDim.x : axis == 1 ? gridDim.y : gridDim.z));
}

// The shared memory of the block.
TILE_FUNCTION unsigned char* arena() { TILE_DEVICE(arena(), return octile_tile_arena); }
// The threads that hold tiles.
template <class L>
TILE_FUNCTION void barrier() {
  if constexpr (L::kWgmma) {
    TILE_DEVICE(barrier(), asm volatile("bar.sync 0, %0;" ::"n"(L::kThreads) : "memory"));
  } else {
    TILE_DEVICE(barrier(), __syncthreads());
  }
}

TILE_FUNCTION Word shuffle_xor([[maybe_unused]] Word value, [[maybe_unused]] int mask) {
  TILE_DEVICE(shuffle_xor(value, mask), return __shfl_xor_sync(0xffffffffu, value, mask));
}
template <class T>
TILE_FUNCTION T shuffle_xor(T value, int mask) {
  if constexpr (sizeof(T) == 8) {
    const std::uint64_t bits = bits_as<std::uint64_t>(value);
    const std::uint64_t high = shuffle_xor(static_cast<Word>(bits >> 32), mask);
    return bits_as<T>((high << 32) | shuffle_xor(static_cast<Word>(bits), mask));
  } else if constexpr (sizeof(T) == 4) {
    return bits_as<T>(shuffle_xor(bits_as<Word>(value), mask));
  } else {
    return static_cast<T>(shuffle_xor(static_cast<Word>(value), mask));  // bool
  }
}

TILE_FUNCTION bool all_lanes([[maybe_unused]] bool value) {
  TILE_DEVICE(all_lanes(value), return __all_sync(0xffffffffu, value) != 0);
}

// ---- Memory in chunks of up to 16 bytes, at an address that is a multiple of their size ----

template <int kBytes>
struct alignas(kBytes) Chunk {
  unsigned char bytes[kBytes];
};
template <>
struct alignas(16) Chunk<16> {
  Word words[4];
};
template <>
struct alignas(8) Chunk<8> {
  Word words[2];
};
template <>
struct Chunk<4> {
  Word word;
};
template <>
struct Chunk<2> {
  std::uint16_t half;
};

template <class T>
TILE_FUNCTION T* in_global_memory(T* p) {  // tells the compiler the address space
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// Between memory and registers: one access per chunk.
template <int n, class T>
TILE_FUNCTION void load_vector(T* to, const T* from) {
  constexpr int kBytes = n * static_cast<int>(sizeof(T));
  constexpr int kChunk = kBytes < 16 ? kBytes : 16;
  constexpr int kElements = kChunk / static_cast<int>(sizeof(T));
#if !defined(__CUDACC__)
  emulation::check_aligned(from, kChunk);
#endif
  TILE_UNROLL
  for (int i = 0; i < n; i += kElements) {
    const Chunk<kChunk> chunk = *reinterpret_cast<const Chunk<kChunk>*>(from + i);
    memcpy(static_cast<void*>(to + i), &chunk, kChunk);
  }
}
template <int n, class T>
TILE_FUNCTION void store_vector(T* to, const T* from) {
  constexpr int kBytes = n * static_cast<int>(sizeof(T));
  constexpr int kChunk = kBytes < 16 ? kBytes : 16;
  constexpr int kElements = kChunk / static_cast<int>(sizeof(T));
#if !defined(__CUDACC__)
  emulation::check_aligned(to, kChunk);
#endif
  TILE_UNROLL
  for (int i = 0; i < n; i += kElements) {
    Chunk<kChunk> chunk;
    memcpy(&chunk, from + i, kChunk);
    *reinterpret_cast<Chunk<kChunk>*>(to + i) = chunk;
  }
}

// ---- Asynchronous copies of 16 bytes from global to shared memory ----

TILE_FUNCTION Word shared_address([[maybe_unused]] const void* p) {
  TILE_DEVICE(shared_address(p), return static_cast<Word>(__cvta_generic_to_shared(p)));
}
TILE_FUNCTION void copy_async([[maybe_unused]] void* to, [[maybe_unused]] const void* from) {
  TILE_DEVICE(copy_async(to, from),
              asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)),
                           "l"(__cvta_generic_to_global(from))
                           : "memory"));
}
TILE_FUNCTION void commit_copies() {
  TILE_DEVICE(commit_copies(), asm volatile("cp.async.commit_group;" ::: "memory"));
}
// Until at most `kPending` groups of this thread are under way.
template <int kPending>
TILE_FUNCTION void wait_for_copies() {
  TILE_DEVICE(wait_for_copies(kPending), asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"));
}

// ---- Matrices: eight rows of 16 bytes; lane l names row l % 8 of matrix l / 8 ----

// Lane l gets the words l % 4 of rows l / 4; transposed, as 16-bit elements, rows 2 (l % 4) and + 1 of column l / 4.
template <bool kTransposed>
TILE_FUNCTION void load_matrices([[maybe_unused]] Word (&m)[4], [[maybe_unused]] const void* row) {
#if defined(__CUDA_ARCH__)
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
  }
#else
  TILE_EMULATED(load_matrices<kTransposed>(m, row));
#endif
}

// The other way, of words as they come without transposing.
TILE_FUNCTION void store_matrices([[maybe_unused]] const Word (&m)[4], [[maybe_unused]] void* row) {
  TILE_DEVICE(
      store_matrices(m, row),
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                   "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                   : "memory"));
}

// Two 16-bit elements a lane, as a matrix of 8 x 8 lies without transposing, to the same for the matrix transposed.
TILE_FUNCTION Word transpose_matrix([[maybe_unused]] Word word) {
#if defined(__CUDA_ARCH__)
  Word out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
#else
  TILE_EMULATED(transpose_matrix(word));
#endif
}

// Rows g = lane / 4 and g + 8, columns 2 t and 2 t + 1 with t = lane % 4 of c (16 x 8) += a (16 x 16) @ b (16 x 8).
template <class T, class C>
TILE_FUNCTION void multiply_matrices([[maybe_unused]] C (&c)[4], [[maybe_unused]] const Word (&a)[4],
                                     [[maybe_unused]] const Word (&b)[2]) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, f16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (std::is_same_v<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  TILE_EMULATED(multiply_matrices<T>(c, a, b));
#endif
}

// Bytes chosen by the four digits of `which` from b (4 .. 7) and a (0 .. 3).
TILE_FUNCTION Word choose_bytes(Word a, Word b, Word which) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, which);
#else
  const std::uint64_t both = (static_cast<std::uint64_t>(b) << 32) | a;
  Word result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<Word>((both >> (8 * ((which >> (4 * i)) & 7))) & 0xff) << (8 * i);
  }
  return result;
#endif
}

// The upper two bytes of a word, s8 or u8. From a whole word ptxas makes one permutation and two conversions of it,
// where from shifts it makes a shift, or two, for each.
template <class T>
TILE_FUNCTION void upper_bytes_to_floats(Word word, f32& first, f32& second) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, s8>) {
    asm("{\n.reg .b8 a, b, c, d;\nmov.b32 {a, b, c, d}, %2;\ncvt.rn.f32.s8 %0, c;\ncvt.rn.f32.s8 %1, d;\n}"
        : "=f"(first), "=f"(second)
        : "r"(word));
  } else {
    asm("{\n.reg .b8 a, b, c, d;\nmov.b32 {a, b, c, d}, %2;\ncvt.rn.f32.u8 %0, c;\ncvt.rn.f32.u8 %1, d;\n}"
        : "=f"(first), "=f"(second)
        : "r"(word));
  }
#else
  first = static_cast<f32>(static_cast<T>(word >> 16));
  second = static_cast<f32>(static_cast<T>(word >> 24));
#endif
}

// Two 16-bit floats in a word, each rounded to nearest: the first in the lower half.
TILE_FUNCTION Word pack_halves(f32 lower, f32 upper) {
#if defined(__CUDA_ARCH__)
  Word pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
  return pair;
#else
  return Word{f32_to_f16(lower)} | Word{f32_to_f16(upper)} << 16;
#endif
}
TILE_FUNCTION Word subtract_halves(Word a, Word b) {
#if defined(__CUDA_ARCH__)
  Word difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
#else
  const auto half = [](Word word, int i) { return f16_to_f32(static_cast<std::uint16_t>(word >> (16 * i))); };
  return pack_halves(half(a, 0) - half(b, 0), half(a, 1) - half(b, 1));
#endif
}

}  // namespace octile::tile::gpu
