// w8a8 on the tile registers, which take a panel's lines as they are.
#include "cpu/gemm/tile_amx.h"

namespace octile::cpu {

namespace {

struct Terms : TermsOfTiles {
  static constexpr Offset kOffset = Offset::none;
  static constexpr std::int64_t kDepthBytes = kPanelChannels;
  static constexpr int kScratch = 0;

  static const std::uint8_t* lines(const std::uint8_t* b, std::int64_t c, std::int64_t, std::uint8_t*) {
    return b + c * kPanelChannels;
  }
};

constexpr PanelKernel kKernel = [] {
  PanelKernel kernel = amx_kernel<Terms>();
  kernel.stream_rows = kernel.rows;
  return kernel;
}();

std::string supports(const GemmProblem& p) {
  if (p.grouped() && p.b.group % kTileBytes != 0) return "takes groups of 64 terms and more, which fill a tile's rows";
  return needs<Isa::amx>(p);
}

// Sapphire Rapids.
Cost cost(const GemmProblem& p) {
  return p.grouped() || p.a_block > 0 ? at_rate<800>(whole_tiles(p)) : at_rate<1500>(whole_tiles(p));
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_amx =
    panels_row<kKernel>("w8a8_gemm_amx", {Operation::gemm, kW8A8}, supports, cost);

extern constinit const GemmKernel w8a8_blocked_gemm_amx =
    panels_row<kKernel>("w8a8_blocked_gemm_amx", {Operation::blocked_gemm}, supports, cost);

}  // namespace octile::cpu
