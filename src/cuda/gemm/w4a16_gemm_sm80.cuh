// w4a16_gemm_sm80, on the device: 16-bit tokens by nibbles as floats of their type.
#pragma once

#include "cuda/gemm/w4_gemm_sm80.cuh"

namespace octile::cuda::w4a16_sm80 {

using namespace w4_sm80;

template <class T, int kChunk_>
struct Halves {
  static constexpr int kElement = 2;
  static constexpr bool kSplits = true;
  static constexpr bool kRow = false;
  static constexpr int kChunk = kChunk_;
  using Sum = float;
  using Total = float;
  using Offset = cuda::Offset<T>;
  struct Slice {
    std::uint32_t a[2][4];  // of the low nibbles, and of the high ones
  };

  __device__ explicit Halves(bool) {}

  // Two rows' nibbles.
  __device__ static void convert(uint2 words, const Offset& first, const Offset& second, Slice& to) {
    integers_of(__byte_perm(words.x, 0, 0x4140), first, to.a[0][0], to.a[1][0]);
    integers_of(__byte_perm(words.y, 0, 0x4140), second, to.a[0][1], to.a[1][1]);
    integers_of(__byte_perm(words.x, 0, 0x4342), first, to.a[0][2], to.a[1][2]);
    integers_of(__byte_perm(words.y, 0, 0x4342), second, to.a[0][3], to.a[1][3]);
  }

  __device__ static uint4 read(std::uint32_t from) { return load_shared(from); }

  __device__ static void multiply(Sum (&sums)[4], const Slice& b, uint4 a, bool first) {
    if (first) sums[0] = sums[1] = sums[2] = sums[3] = 0;
    multiply_add_16(T(), sums, b.a[0], {a.x, a.y});
    multiply_add_16(T(), sums, b.a[1], {a.z, a.w});
  }

  __device__ static float fold(Sum sum, float scale, float total) { return __fmaf_rn(sum, scale, total); }
  __device__ static float fold_row(Sum sum, float) { return sum; }

 private:
  // Of two bytes, 16 bits apart: the pair of low nibbles, and that of high ones.
  __device__ static void integers_of(std::uint32_t two, const Offset& offset, std::uint32_t& low, std::uint32_t& high) {
    using Pair = Two<T>;
    if constexpr (std::is_same_v<T, __half>) {
      const Pair sixteenth = as_pair<Pair>(0x2c002c00u);
      low = as_bits(__hadd2(as_pair<Pair>(and_xor(two, 0x000f000fu, 0x64006400u)), as_pair<Pair>(offset.low)));
      high = as_bits(
          __hfma2(as_pair<Pair>(and_xor(two, 0x00f000f0u, 0x64006400u)), sixteenth, as_pair<Pair>(offset.high)));
    } else {
      low = as_bits(__hadd2(as_pair<Pair>(and_xor(two, 0x000f000fu, 0x43004300u)), as_pair<Pair>(offset.low)));
      high = as_bits(__hadd2(as_pair<Pair>(and_xor(two >> 4, 0x000f000fu, 0x43004300u)), as_pair<Pair>(offset.low)));
    }
  }
};

struct Tiles {
  static constexpr bool kSplits = true;
  template <class Body>
  static void for_each(const Body& body) {
    body(Candidate<TileShape<64, 8, 128, 8, 4, 1, 4>>{{91e-9, 25e-9}});
    body(Candidate<TileShape<64, 16, 128, 6, 4, 1, 4>>{{105e-9, 25e-9}});
    body(Candidate<TileShape<64, 32, 128, 4, 2, 2, 3>>{{140e-9, 42e-9}});
    body(Candidate<TileShape<64, 64, 64, 6, 2, 2, 3>>{{213e-9, 85e-9}});
    body(Candidate<TileShape<64, 128, 64, 4, 2, 2, 2>>{{323e-9, 118e-9}});
  }
};

inline constexpr auto kWithArithmetic = [](const GemmProblem& p, const auto& body) {
  const bool small = p.b.group == 32;
  if (p.a == DType::f16) {
    return small ? body.template operator()<Halves<__half, 1>>() : body.template operator()<Halves<__half, 2>>();
  }
  return small ? body.template operator()<Halves<__nv_bfloat16, 1>>()
               : body.template operator()<Halves<__nv_bfloat16, 2>>();
};

inline std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 80); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  return reason_against_problem(p);
}

}  // namespace octile::cuda::w4a16_sm80
