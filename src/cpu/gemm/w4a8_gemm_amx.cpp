// w4a8 on the tile registers: AVX-512 makes bytes of a panel's nibbles, 64 terms at a time, while the tiles multiply.
#include "cpu/gemm/tile_amx.h"

namespace octile::cpu {

namespace {

struct Terms : TermsOfTiles {
  static constexpr Offset kOffset = Offset::row_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels / 2;
  static constexpr int kScratch = kTileRows * kTileBytes;

  OCTILE_TILE_INLINE static const std::uint8_t* lines(const std::uint8_t* b, std::int64_t c, std::int64_t depth,
                                                      std::uint8_t* scratch) {
    constexpr int kLines = kTileBytes / kS4Depth;  // of nibbles
    const __m512i low = _mm512_set1_epi8(15);
    const std::uint8_t* from = b + c / kS4Depth * kPanelLine;
    const auto count = static_cast<int>(std::min<std::int64_t>((depth - c) / kS4Depth, kLines));
    for (int i = 0; i < kLines; ++i) {
      const __m512i line = i < count ? _mm512_loadu_si512(from + i * kPanelLine) : _mm512_setzero_si512();
      _mm512_store_si512(scratch + 2 * i * kTileBytes, _mm512_and_si512(line, low));
      _mm512_store_si512(scratch + (2 * i + 1) * kTileBytes, _mm512_and_si512(_mm512_srli_epi16(line, 4), low));
    }
    written_for_tiles();
    return scratch;
  }
};

constexpr PanelKernel kKernel = amx_kernel<Terms>();

std::string supports(const GemmProblem& p) {
  if (p.b.group != p.k && p.b.group % kTileBytes != 0) return "takes groups of 64 terms and more, and whole rows";
  return needs<Isa::amx>(p);
}

// Sapphire Rapids.
Cost cost(const GemmProblem& p) { return at_rate<1000>(whole_tiles(p)); }

}  // namespace

extern constinit const GemmKernel w4a8_gemm_amx =
    panels_row<kKernel>("w4a8_gemm_amx", {Operation::gemm, kW4A8}, supports, cost);

}  // namespace octile::cpu
