// Hopper's matrix unit with its first operand from registers, for few columns: what register_products.cuh has for
// 64 columns and more.
#pragma once

#include "cuda/device/wgmma.cuh"

namespace octile::cuda {

// clang-format off
#define OCTILE_N16_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define OCTILE_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define OCTILE_PRODUCT(shape, type, names, a0, a1, a2, a3, b, p, upper) \
  "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, " p ", 0;\nmov.b64 b, {" b ", " upper "};\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" names "}, {" a0 ", " a1 ", " a2 ", " a3 "}, b, p, 1, 1, 0;\n}\n"
#define OCTILE_32(type) OCTILE_PRODUCT("m64n32k16", type, OCTILE_N16_0, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
#define OCTILE_IN(a, b, accumulate) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kOperandUpper)
// clang-format on

// sums (64 x 32 or 64) = or += a (64 x 16) by the operand b (32 or 64 x 16), in contraction-major lines.
template <class T>
__device__ void multiply_16(float (&sums)[16], const Fragment& a, std::uint32_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(OCTILE_32("f16") : OCTILE_F8(sums, 0), OCTILE_F8(sums, 8) : OCTILE_IN(a, b, accumulate));
  } else {
    asm volatile(OCTILE_32("bf16") : OCTILE_F8(sums, 0), OCTILE_F8(sums, 8) : OCTILE_IN(a, b, accumulate));
  }
}

template <class T>
__device__ void multiply_16(float (&sums)[32], const Fragment& a, std::uint32_t b, bool accumulate) {
  multiply_16<T, false>(sums, a, b, accumulate);
}

#undef OCTILE_N16_0
#undef OCTILE_F8
#undef OCTILE_PRODUCT
#undef OCTILE_32
#undef OCTILE_IN

}  // namespace octile::cuda
