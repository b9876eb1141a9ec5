// w8a8 on the tile registers: tdpbssd adds the product of 16 rows of a by 64 terms and of 64 terms by a panel. A
// panel's 64 terms are 1 KiB, rows of 16 channels of 4 terms, as the instruction wants them.
#include <immintrin.h>

#include "cpu/gemm/integer_panels.h"
#include "plan/packed_weight.h"

#define OCTILE_AMX __attribute__((target("amx-tile,amx-int8")))

namespace octile::cpu {

namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row

struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                                 kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  std::uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};
static_assert(sizeof(TileConfiguration) == 64);
static_assert(kTileRows == kTiledRows && kTileBytes == kS8Depth);

OCTILE_AMX void configure() {
  static constexpr TileConfiguration kConfiguration;
  _tile_loadconfig(&kConfiguration);
}

OCTILE_AMX void release() { _tile_release(); }

struct Tile {
  static constexpr int kRowStep = kTileRows;
  static constexpr int kColSteps = 1;
  static constexpr int kSteps[] = {2, 2};  // 2 x 2 tiles of sums, 2 of a and 2 of b: all eight

  // Tiles 0 to 3 are sums (row of tiles, panel), 4 and 5 hold a, 6 and 7 hold b.
  template <int row_tiles, int panels>
  OCTILE_AMX static void run(const TileRun& run, int first) {
    const auto sums_bytes = static_cast<std::size_t>(run.sums_stride) * sizeof(std::int32_t);
    std::int32_t* sums = run.sums + first * kPanelChannels;
    std::int32_t* lower = sums + kTileRows * run.sums_stride;
    if (run.accumulate) {
      _tile_loadd(0, sums, sums_bytes);
      if constexpr (panels == 2) _tile_loadd(1, sums + kPanelChannels, sums_bytes);
      if constexpr (row_tiles == 2) _tile_loadd(2, lower, sums_bytes);
      if constexpr (row_tiles == 2 && panels == 2) _tile_loadd(3, lower + kPanelChannels, sums_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const std::uint8_t* lower_a = run.a + kTileRows * run.a_stride;
    const std::uint8_t* b = run.b + first * run.b_stride;
    for (std::int64_t c = 0; c < run.depth; c += kTileBytes) {
      _tile_loadd(4, run.a + c * kTileRows, kTileBytes);
      _tile_loadd(6, b + c * kPanelChannels, kTileBytes);
      if constexpr (panels == 2) _tile_loadd(7, b + run.b_stride + c * kPanelChannels, kTileBytes);
      if constexpr (row_tiles == 2) _tile_loadd(5, lower_a + c * kTileRows, kTileBytes);
      _tile_dpbssd(0, 4, 6);
      if constexpr (panels == 2) _tile_dpbssd(1, 4, 7);
      if constexpr (row_tiles == 2) _tile_dpbssd(2, 5, 6);
      if constexpr (row_tiles == 2 && panels == 2) _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums, sums_bytes);
    if constexpr (panels == 2) _tile_stored(1, sums + kPanelChannels, sums_bytes);
    if constexpr (row_tiles == 2) _tile_stored(2, lower, sums_bytes);
    if constexpr (row_tiles == 2 && panels == 2) _tile_stored(3, lower + kPanelChannels, sums_bytes);
  }
};

constexpr PanelKernel kKernel = {.a = AForm::tiled,
                                 .rows = 2 * kTileRows,
                                 .row_step = kTileRows,
                                 .depth = 512,
                                 .tile = run_tile<Tile>,
                                 .configure = configure,
                                 .release = release};

std::string supports(const GemmProblem& p) {
  return p.grouped() ? "takes one scale per channel, not groups" : needs<Isa::amx>(p);
}

// A tile multiplies 16 rows, however many there are (Sapphire Rapids).
Cost cost(const GemmProblem& p) {
  GemmProblem padded = p;
  padded.m = (p.m + kTileRows - 1) / kTileRows * kTileRows;
  return at_rate<1500>(padded);
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_amx = {
    .name = "w8a8_gemm_amx",
    .task = {Operation::gemm, kW8A8},
    .supports = supports,
    .cost = cost,
    .workspace = panels_workspace<kKernel>,
    .launch = launch_panels<kKernel>,
};

}  // namespace octile::cpu
