// Philox-4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011): ten rounds of multiplications on (counter, key), the same bits wherever it is computed.
#pragma once

#include <array>
#include <cstdint>

#ifdef __CUDACC__
#define OCTILE_HOST_DEVICE __host__ __device__
#else
#define OCTILE_HOST_DEVICE
#endif

namespace octile {

OCTILE_HOST_DEVICE inline void philox_4x32_10(std::uint64_t counter, std::uint64_t key, std::uint32_t* words) {
  std::uint32_t x0 = static_cast<std::uint32_t>(counter);
  std::uint32_t x1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t x2 = 0;
  std::uint32_t x3 = 0;
  std::uint32_t key0 = static_cast<std::uint32_t>(key);
  std::uint32_t key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * x0;
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * x2;
    x0 = static_cast<std::uint32_t>(product1 >> 32) ^ x1 ^ key0;
    x1 = static_cast<std::uint32_t>(product1);
    x2 = static_cast<std::uint32_t>(product0 >> 32) ^ x3 ^ key1;
    x3 = static_cast<std::uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  words[0] = x0;
  words[1] = x1;
  words[2] = x2;
  words[3] = x3;
}

inline std::array<std::uint32_t, 4> philox_4x32_10(std::uint64_t counter, std::uint64_t key) {
  std::array<std::uint32_t, 4> words;
  philox_4x32_10(counter, key, words.data());
  return words;
}

// u in [0, 1) for element `index` (row * cols + col of the whole matrix): one of the eight 16-bit halves of block
// index / 8. Sixteen bits, so that x / s + u is exact in f32 for every integer x / s of 8 bits, and no exact integer is
// ever rounded up.
inline float uniform(std::uint64_t index, std::uint64_t seed) {
  const std::uint32_t word = philox_4x32_10(index / 8, seed)[index % 8 / 2];
  return static_cast<float>(index % 2 ? word >> 16 : word & 0xffffu) * 0x1p-16f;
}

}  // namespace octile
