// w8a8 on the tile registers: tdpbssd adds the product of 16 rows of a by 64 terms and of 64 terms by a panel. A
// panel's 64 terms are 1 KiB, rows of 16 channels of 4 terms, as the instruction wants them. Groups and blocks are
// folded by AVX-512, which all chips with tile registers have.
#include <immintrin.h>

#include <algorithm>

#include "cpu/gemm/integer_panels.h"
#include "plan/packed_weight.h"

#define OCTILE_AMX __attribute__((target("amx-tile,amx-int8,avx512f")))

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

// Up to two tiles of rows by two panels.
struct Sums {
  std::int32_t* at;
  std::int64_t stride;

  template <int row_tile, int panel>
  OCTILE_AMX void load() const {
    _tile_loadd(2 * row_tile + panel, at + row_tile * kTileRows * stride + panel * kPanelChannels, 4 * stride);
  }
  template <int row_tile, int panel>
  OCTILE_AMX void store() const {
    _tile_stored(2 * row_tile + panel, at + row_tile * kTileRows * stride + panel * kPanelChannels, 4 * stride);
  }
};

template <Fold kFold>
struct Tile {
  static constexpr int kRowStep = kTileRows;
  static constexpr int kColSteps = 1;
  static constexpr int kSteps[] = {2, 2};  // 2 x 2 tiles of sums, 2 of a and 2 of b: all eight

  template <int row_tiles, int panels>
  OCTILE_AMX static void run(const TileRun& run, int first) {
    const std::uint8_t* a = run.a;
    const std::uint8_t* b = run.b + first * run.b_stride;
    if constexpr (kFold == Fold::none) {
      const Sums sums{run.sums + first * kPanelChannels, run.sums_stride};
      run.accumulate ? load<row_tiles, panels>(sums) : zero();
      multiply<row_tiles, panels>(run, a, b);
      store<row_tiles, panels>(sums);
    } else {
      const GroupRun group = run.group;
      const int rows = std::min(run.rows, row_tiles * kTileRows);
      // Two of them, so that the tiles of a group needn't wait until the one before is folded.
      alignas(64) std::int32_t sums[2][row_tiles * kTileRows][panels * kPanelChannels];
      for (std::int64_t g = 0; g < group.groups; ++g) {
        zero();
        multiply<row_tiles, panels>(run, a, b);
        store<row_tiles, panels>({sums[g % 2][0], panels * kPanelChannels});
        fold<panels>(group, first, g, rows, sums[g % 2]);
        a += run.depth * kTileRows;
        b += run.depth * kPanelChannels;
      }
    }
  }

 private:
  OCTILE_AMX static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  template <int row_tiles, int panels>
  OCTILE_AMX static void load(const Sums& sums) {
    sums.load<0, 0>();
    if constexpr (panels == 2) sums.load<0, 1>();
    if constexpr (row_tiles == 2) sums.load<1, 0>();
    if constexpr (row_tiles == 2 && panels == 2) sums.load<1, 1>();
  }

  template <int row_tiles, int panels>
  OCTILE_AMX static void store(const Sums& sums) {
    sums.store<0, 0>();
    if constexpr (panels == 2) sums.store<0, 1>();
    if constexpr (row_tiles == 2) sums.store<1, 0>();
    if constexpr (row_tiles == 2 && panels == 2) sums.store<1, 1>();
  }

  // Tiles 0 to 3 are sums (row of tiles, panel), 4 and 5 hold a, 6 and 7 hold b.
  template <int row_tiles, int panels>
  OCTILE_AMX static void multiply(const TileRun& run, const std::uint8_t* a, const std::uint8_t* b) {
    const std::uint8_t* lower_a = a + kTileRows * run.a_stride;
    for (std::int64_t c = 0; c < run.depth; c += kTileBytes) {
      _tile_loadd(4, a + c * kTileRows, kTileBytes);
      _tile_loadd(6, b + c * kPanelChannels, kTileBytes);
      if constexpr (panels == 2) _tile_loadd(7, b + run.b_stride + c * kPanelChannels, kTileBytes);
      if constexpr (row_tiles == 2) _tile_loadd(5, lower_a + c * kTileRows, kTileBytes);
      _tile_dpbssd(0, 4, 6);
      if constexpr (panels == 2) _tile_dpbssd(1, 4, 7);
      if constexpr (row_tiles == 2) _tile_dpbssd(2, 5, 6);
      if constexpr (row_tiles == 2 && panels == 2) _tile_dpbssd(3, 5, 7);
    }
  }

  // The sums of group g, of as many rows as there are: scales are there for no others.
  template <int panels>
  OCTILE_AMX static void fold(const GroupRun& run, int first, std::int64_t g, int rows,
                              const std::int32_t (*sums)[panels * kPanelChannels]) {
    __m512 scale[panels] = {};
    for (int j = 0; kFold == Fold::channels && j < panels; ++j) {
      scale[j] = _mm512_loadu_ps(run.scales + 4 * ((first + j) * run.segments_stride + g * kPanelChannels));
    }
    for (int i = 0; i < rows; ++i) {
      float* totals = run.totals + i * run.totals_stride + first * kPanelChannels;
      for (int j = 0; j < panels; ++j, totals += kPanelChannels) {
        if constexpr (kFold == Fold::rows) {
          scale[j] = _mm512_set1_ps(run.row_scales[i * run.row_scales_stride + g * run.row_scales_group]);
        }
        const __m512 acc = _mm512_cvtepi32_ps(_mm512_load_si512(sums[i] + j * kPanelChannels));
        _mm512_storeu_ps(totals, _mm512_fmadd_ps(acc, scale[j], _mm512_loadu_ps(totals)));
      }
    }
  }
};

constexpr PanelKernel kKernel = {.a = AForm::tiled,
                                 .rows = 2 * kTileRows,
                                 .row_step = kTileRows,
                                 .depth = 512,
                                 .tile = run_tile<Tile<Fold::none>>,
                                 .folding_tile = run_tile<Tile<Fold::channels>>,
                                 .row_folding_tile = run_tile<Tile<Fold::rows>>,
                                 .configure = configure,
                                 .release = release};

std::string supports(const GemmProblem& p) {
  if (p.grouped() && p.b.group % kTileBytes != 0) return "takes groups of 64 terms and more, which fill a tile's rows";
  return needs<Isa::amx>(p);
}

// A tile multiplies 16 rows, however many there are (Sapphire Rapids).
Cost cost(const GemmProblem& p) {
  GemmProblem padded = p;
  padded.m = (p.m + kTileRows - 1) / kTileRows * kTileRows;
  return p.grouped() || p.a_block > 0 ? at_rate<800>(padded) : at_rate<1500>(padded);
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

extern constinit const GemmKernel w8a8_blocked_gemm_amx = {
    .name = "w8a8_blocked_gemm_amx",
    .task = {Operation::blocked_gemm},
    .supports = supports,
    .cost = cost,
    .workspace = panels_workspace<kKernel>,
    .launch = launch_panels<kKernel>,
};

}  // namespace octile::cpu
