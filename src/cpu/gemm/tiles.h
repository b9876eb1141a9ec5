// The tile registers of AMX: eight of up to 16 rows of 64 bytes.
#pragma once

#include <immintrin.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace octile::cpu {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 64;  // of a row

struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::array<std::uint16_t, 16> row_bytes{};
  std::array<std::uint8_t, 16> rows{};
};
static_assert(sizeof(TileConfiguration) == 64);

// Tiles 0 to 5 have `left_rows` rows: sums and the left operand. 6 and 7 hold the right one.
constexpr TileConfiguration tile_configuration(int left_rows) {
  TileConfiguration configuration;
  for (std::size_t i = 0; i < 8; ++i) {
    configuration.row_bytes[i] = kTileBytes;
    configuration.rows[i] = static_cast<std::uint8_t>(i < 6 ? left_rows : kTileRows);
  }
  return configuration;
}

// After writing what tiles will load: GCC 12 does not know that _tile_loadd reads memory.
inline __attribute__((always_inline)) void written_for_tiles() { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace octile::cpu
