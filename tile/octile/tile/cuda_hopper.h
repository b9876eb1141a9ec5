// Instructions of Hopper: barriers in shared memory that count bytes, TMA, and WGMMA. Emulated: what WGMMA reads
// through its descriptors.
#pragma once

#include "octile/tile/cuda_device.h"
#include "octile/tile/cuda_layout.h"

namespace octile::tile::gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILE_HOPPER(emulated, ...) __VA_ARGS__
#elif defined(__CUDA_ARCH__)
#define TILE_HOPPER(emulated, ...) __trap()  // compiled for another GPU, where it is never called
#else
#define TILE_HOPPER(emulated, ...) TILE_EMULATED(emulated)
#endif

// ---- Barriers in shared memory. A phase ends when all arrivals and all expected bytes have come in ----

#if defined(__CUDACC__)
TILE_FUNCTION void barrier_init([[maybe_unused]] Word barrier, [[maybe_unused]] int arrivals) {
  TILE_HOPPER(, asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory"));
}
TILE_FUNCTION void barriers_are_made() {
  TILE_HOPPER(, asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"));
}
TILE_FUNCTION void barrier_arrive([[maybe_unused]] Word barrier) {
  TILE_HOPPER(, asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"));
}
// By one lane of a warp whose lanes all come here.
TILE_FUNCTION void barrier_expect([[maybe_unused]] Word barrier, [[maybe_unused]] int bytes) {
  TILE_HOPPER(, asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n"
                             "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}\n" ::"r"(barrier),
                             "r"(bytes)
                             : "memory"));
}
// Until the phase of this parity has ended; the one before the first has parity 1.
TILE_FUNCTION void barrier_wait([[maybe_unused]] Word barrier, [[maybe_unused]] Word parity) {
  TILE_HOPPER(, asm volatile("{\n.reg .pred p;\nagain:\n"
                             "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                             "@p bra done;\nbra again;\ndone:\n}\n" ::"r"(barrier),
                             "r"(parity)
                             : "memory"));
}

// A box of a tensor map, from the element (x, y, z) on, to shared memory. By one lane of a warp whose lanes all come
// here: the compiler knows then that what it says of the box is uniform, and needs no loop for it.
TILE_FUNCTION void tma_load([[maybe_unused]] Word to, [[maybe_unused]] const void* map, [[maybe_unused]] int x,
                            [[maybe_unused]] int y, [[maybe_unused]] int z, [[maybe_unused]] Word barrier) {
  TILE_HOPPER(, asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n"
                             "@p cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                             "[%0], [%1, {%2, %3, %4}], [%5];\n}\n" ::"r"(to),
                             "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                             : "memory"));
}

// The same box for both blocks of a cluster of two, to the same places in each.
TILE_FUNCTION void tma_load_to_both([[maybe_unused]] Word to, [[maybe_unused]] const void* map, [[maybe_unused]] int x,
                                    [[maybe_unused]] int y, [[maybe_unused]] int z, [[maybe_unused]] Word barrier) {
  TILE_HOPPER(, asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n"
                             "@p cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                             ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;\n}\n" ::"r"(to),
                             "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(std::uint16_t{3})
                             : "memory"));
}

// An address of this block's shared memory, in another block of the cluster.
TILE_FUNCTION Word address_in([[maybe_unused]] Word address, [[maybe_unused]] int block) {
  [[maybe_unused]] Word there = 0;
  TILE_HOPPER(, asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                             : "=r"(there)
                             : "r"(address), "r"(block));
              return there);
}
// For what was only read: with .release.cluster it would be a fence of the whole GPU in the main loop.
TILE_FUNCTION void barrier_arrive_in_cluster([[maybe_unused]] Word barrier) {
  TILE_HOPPER(, asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory"));
}
TILE_FUNCTION int cluster_rank() {
  [[maybe_unused]] int rank = 0;
  TILE_HOPPER(, asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); return rank);
}
TILE_FUNCTION void cluster_barrier() {
  TILE_HOPPER(, asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"));
}
// A word for another block of the cluster, which counts as four bytes there. By one lane of a warp.
TILE_FUNCTION void send_word([[maybe_unused]] Word to, [[maybe_unused]] Word word, [[maybe_unused]] Word barrier) {
  TILE_HOPPER(
      , asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n"
                     "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];\n}\n" ::"r"(to),
                     "r"(word), "r"(barrier)
                     : "memory"));
}

template <int kCount>
TILE_FUNCTION void fewer_registers() {
  TILE_HOPPER(, asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount)));
}
template <int kCount>
TILE_FUNCTION void more_registers() {
  TILE_HOPPER(, asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount)));
}
#endif

// Which of the warpgroups this thread is in; the compiler knows that a warp agrees.
TILE_FUNCTION int warpgroup() {
#if defined(__CUDA_ARCH__)
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 7), 0);
#else
  return thread() >> 7;
#endif
}

// Of the threads of this warpgroup.
TILE_FUNCTION void warpgroup_barrier([[maybe_unused]] int group) {
  TILE_DEVICE(barrier(), asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"));
}

// Makes this thread's stores to shared memory visible to WGMMA and TMA, after the barrier that follows.
TILE_FUNCTION void stores_to_matrices() {
#if defined(__CUDA_ARCH__)
  TILE_HOPPER(, asm volatile("fence.proxy.async.shared::cta;" ::: "memory"));
#endif
}

// ---- WGMMA: c (64, n) += a (64, 32 bytes) @ b (n, 32 bytes)^T, by the 128 threads of a warpgroup ----

TILE_FUNCTION void products_begin() {
#if defined(__CUDA_ARCH__)
  TILE_HOPPER(, asm volatile("wgmma.fence.sync.aligned;" ::: "memory"));
#endif
}
TILE_FUNCTION void products_end() {
#if defined(__CUDA_ARCH__)
  TILE_HOPPER(, asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"));
#endif
}
// Until those of all dots but the last `kPending` are done.
template <int kPending>
TILE_FUNCTION void wait_for_products() {
#if defined(__CUDA_ARCH__)
  TILE_HOPPER(, asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"));
#endif
}
// The same, for a number that the compiler knows in most kernels.
TILE_FUNCTION void wait_for_products(int pending) {
  if (pending >= 2) return wait_for_products<2>();
  if (pending == 1) return wait_for_products<1>();
  wait_for_products<0>();
}
// Keeps the compiler from moving uses of the sums across what is above.
template <int n, class C>
TILE_FUNCTION void pin([[maybe_unused]] C* sums) {
#if defined(__CUDA_ARCH__)
  TILE_UNROLL
  for (int i = 0; i < n; ++i) {
    if constexpr (std::is_same_v<C, float>) {
      asm volatile("" : "+f"(sums[i])::"memory");
    } else {
      asm volatile("" : "+r"(sums[i])::"memory");
    }
  }
#endif
}

// Where a matrix of an operand begins in shared memory, and its strides. Lines of 128, 64 or 32 bytes, permuted by
// TMA's swizzle of that many bytes. kAlong: a line is a row of a, or a column of b, from one term to the next.
// Otherwise it is 64 of them (of 16 bits) at one term, the lines of the terms follow each other, and after `panel`
// bytes come the next 64.
template <int kLine>
TILE_FUNCTION std::uint64_t descriptor(Word address, int panel) {
  constexpr std::uint64_t kSwizzle = kLine == 128 ? 1 : kLine == 64 ? 2 : 3;
  return (kSwizzle << 62) | (std::uint64_t{8 * kLine / 16} << 32) |
         (static_cast<std::uint64_t>(static_cast<Word>(panel) >> 4) << 16) | ((address >> 4) & 0x3fff);
}

// Where the i-th sum of an instruction is among the rows of a thread: 4 j + 2 h + e is row h, columns 8 j + 2 c + e.
template <int kRow>
TILE_FUNCTION constexpr int sum_at(int i) {
  return (i >> 1 & 1) * kRow + (i >> 2) * 2 + (i & 1);
}

template <int n>
struct Wgmma;

// clang-format off
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILE_SUMS_4 "%0, %1, %2, %3"
#define TILE_SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TILE_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TILE_SUMS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TILE_SUMS_64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TILE_SUMS_128 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TILE_S4(c, i) c(s[sum_at<kRow>(i)]), c(s[sum_at<kRow>(i + 1)]), c(s[sum_at<kRow>(i + 2)]), c(s[sum_at<kRow>(i + 3)])
#define TILE_REGISTERS_4(c, i) TILE_S4(c, i)
#define TILE_REGISTERS_8(c, i) TILE_REGISTERS_4(c, i), TILE_REGISTERS_4(c, i + 4)
#define TILE_REGISTERS_16(c, i) TILE_REGISTERS_8(c, i), TILE_REGISTERS_8(c, i + 8)
#define TILE_REGISTERS_32(c, i) TILE_REGISTERS_16(c, i), TILE_REGISTERS_16(c, i + 16)
#define TILE_REGISTERS_64(c, i) TILE_REGISTERS_32(c, i), TILE_REGISTERS_32(c, i + 32)
#define TILE_REGISTERS_128(c, i) TILE_REGISTERS_64(c, i), TILE_REGISTERS_64(c, i + 64)

#define TILE_WGMMA(count, n, shape, operands, tail, c, ...)                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #n shape " {" TILE_SUMS_##count \
               "}, " operands ", p" tail ";\n}\n"                                                                    \
               : TILE_REGISTERS_##count(c, 0)                                                                        \
               : __VA_ARGS__)
#define TILE_WGMMA_OF(count, n, o0, o1, o2, o3, o4, o5)                                                              \
  template <>                                                                                                        \
  struct Wgmma<n> {                                                                                                  \
    template <class T, bool kAlongA, bool kAlongB, int kRow, class C>                                                \
    __device__ __forceinline__ static void add(C* s, std::uint64_t a, std::uint64_t b) {                             \
      if constexpr (std::is_same_v<T, f16>) {                                                                        \
        TILE_WGMMA(count, n, "k16.f32.f16.f16", "%" #o0 ", %" #o1, ", 1, 1, %" #o2 ", %" #o3, "+f", "l"(a), "l"(b),  \
                   "n"(!kAlongA), "n"(!kAlongB));                                                                    \
      } else if constexpr (std::is_same_v<T, bf16>) {                                                                \
        TILE_WGMMA(count, n, "k16.f32.bf16.bf16", "%" #o0 ", %" #o1, ", 1, 1, %" #o2 ", %" #o3, "+f", "l"(a),        \
                   "l"(b), "n"(!kAlongA), "n"(!kAlongB));                                                            \
      } else if constexpr (std::is_same_v<T, f32>) {                                                                 \
        TILE_WGMMA(count, n, "k8.f32.tf32.tf32", "%" #o0 ", %" #o1, ", 1, 1", "+f", "l"(a), "l"(b));                 \
      } else {                                                                                                       \
        TILE_WGMMA(count, n, "k32.s32.s8.s8", "%" #o0 ", %" #o1, "", "+r", "l"(a), "l"(b));                          \
      }                                                                                                              \
    }                                                                                                                \
    template <class T, bool kAlongB, int kRow, class C>                                                              \
    __device__ __forceinline__ static void add_held(C* s, const Word* a, std::uint64_t b) {                     \
      if constexpr (std::is_same_v<T, f16>) {                                                                        \
        TILE_WGMMA(count, n, "k16.f32.f16.f16", "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4, ", 1, 1, %" #o5,  \
                   "+f", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(!kAlongB));                         \
      } else {                                                                                                       \
        TILE_WGMMA(count, n, "k16.f32.bf16.bf16", "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4,                 \
                   ", 1, 1, %" #o5, "+f", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(!kAlongB));        \
      }                                                                                                              \
    }                                                                                                                \
  };
TILE_WGMMA_OF(4, 8, 4, 5, 6, 7, 8, 9)
TILE_WGMMA_OF(8, 16, 8, 9, 10, 11, 12, 13)
TILE_WGMMA_OF(16, 32, 16, 17, 18, 19, 20, 21)
TILE_WGMMA_OF(32, 64, 32, 33, 34, 35, 36, 37)
TILE_WGMMA_OF(64, 128, 64, 65, 66, 67, 68, 69)
TILE_WGMMA_OF(128, 256, 128, 129, 130, 131, 132, 133)
#undef TILE_WGMMA_OF
#undef TILE_WGMMA
#undef TILE_S4
#undef TILE_SUMS_4
#undef TILE_REGISTERS_4
#undef TILE_SUMS_8
#undef TILE_REGISTERS_8
#undef TILE_SUMS_16
#undef TILE_REGISTERS_16
#undef TILE_SUMS_32
#undef TILE_REGISTERS_32
#undef TILE_SUMS_64
#undef TILE_REGISTERS_64
#undef TILE_SUMS_128
#undef TILE_REGISTERS_128
#else
// clang-format on
template <int n>
struct Wgmma {
  template <class T, bool kAlongA, bool kAlongB, int kRow, class C>
  TILE_FUNCTION static void add([[maybe_unused]] C* s, [[maybe_unused]] std::uint64_t a,
                                [[maybe_unused]] std::uint64_t b) {
#if !defined(__CUDACC__)
    emulation::wgmma<T, kAlongA, kAlongB, n>(a, b, [s](int i) -> C& { return s[sum_at<kRow>(i)]; });
#elif defined(__CUDA_ARCH__)
    __trap();
#endif
  }
  template <class T, bool kAlongB, int kRow, class C>
  TILE_FUNCTION static void add_held([[maybe_unused]] C* s, [[maybe_unused]] const Word* a,
                                     [[maybe_unused]] std::uint64_t b) {
#if !defined(__CUDACC__)
    emulation::wgmma<T, kAlongB, n>({a[0], a[1], a[2], a[3]}, b, [s](int i) -> C& { return s[sum_at<kRow>(i)]; });
#elif defined(__CUDA_ARCH__)
    __trap();
#endif
  }
};
#endif
// clang-format on

}  // namespace octile::tile::gpu
