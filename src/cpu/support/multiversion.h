// One loop, compiled for several instruction sets and chosen at run time, so that one binary is fast on each. The bits
// do not depend on the choice: contraction is off, and what is fused says std::fma.
//
//   struct Scale {  // a kernel: always inlined, arguments by value
//     template <Isa isa> OCTILE_INLINE static void run(const float* x, float* y, std::int64_t n) {...}
//   };
//   multiversion<Scale>(x, y, n);
#pragma once

#include "cpu/support/isa.h"

#define OCTILE_INLINE inline __attribute__((always_inline))

namespace octile::cpu {

#if defined(__x86_64__)

#define OCTILE_TARGET_AVX2 "avx2,fma,bmi2"
#define OCTILE_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2"
#define OCTILE_TARGET_AVX512BF16 OCTILE_TARGET_AVX512 ",avx512vnni,avx512bf16"
#if defined(__clang__)
#define OCTILE_TARGET_WIDE ""
#else
#define OCTILE_TARGET_WIDE ",prefer-vector-width=512"
#endif

template <class Kernel, class... Args>
__attribute__((target(OCTILE_TARGET_AVX2), flatten)) void run_avx2(Args... args) {
  Kernel::template run<Isa::avx2>(args...);
}

template <class Kernel, class... Args>
__attribute__((target(OCTILE_TARGET_AVX512 OCTILE_TARGET_WIDE), flatten)) void run_avx512(Args... args) {
  Kernel::template run<Isa::avx512>(args...);
}

template <class Kernel, class... Args>
__attribute__((target(OCTILE_TARGET_AVX512 ",avx512vnni" OCTILE_TARGET_WIDE), flatten)) void run_avx512vnni(
    Args... args) {
  Kernel::template run<Isa::avx512vnni>(args...);
}

template <class Kernel, class... Args>
__attribute__((target(OCTILE_TARGET_AVX512BF16 OCTILE_TARGET_WIDE), flatten)) void run_avx512bf16(Args... args) {
  Kernel::template run<Isa::avx512bf16>(args...);
}

template <class Kernel>
concept UsesVnni = requires {
  typename Kernel::Vnni;
};

// Of kernels that only rows for Isa::avx512bf16 run.
template <class Kernel>
concept NeedsBf16 = requires {
  requires Kernel::kNeedsBf16;
};

template <class Kernel, class... Args>
void multiversion(Args... args) {
  if constexpr (NeedsBf16<Kernel>) {
    run_avx512bf16<Kernel>(args...);
  } else {
    switch (isa()) {
      case Isa::amx:
      case Isa::avx512bf16:
      case Isa::avx512vnni:
        if constexpr (UsesVnni<Kernel>) return run_avx512vnni<Kernel>(args...);
        [[fallthrough]];
      case Isa::avx512:
        return run_avx512<Kernel>(args...);
      case Isa::avxvnni:
      case Isa::avx2:
        return run_avx2<Kernel>(args...);
      default:
        break;
    }
    Kernel::template run<Isa::baseline>(args...);
  }
}

#else

template <class Kernel, class... Args>
void multiversion(Args... args) {
  Kernel::template run<Isa::baseline>(args...);
}

#endif

}  // namespace octile::cpu
