// w4a8 with vpdpbusd on 64 bytes: 16 channels of 4 terms, twice a line, b as the u8 operand and a as the s8 one.
#define OCTILE_TILE __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#include "cpu/gemm/dots.h"
#include "cpu/gemm/tile_avx512vnni.h"

namespace octile::cpu {

namespace {

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = 1;
  // 8 x 2 vectors of sums, and the low and high nibbles of two panels; a comes from memory.
  static constexpr int kSteps[] = {4, 4, 4, 4, 2, 2, 2, 2};
  static constexpr Offset kOffset = Offset::row_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels / 2;

  template <int rows, int panels>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at, __m512i (&sum)[rows][panels]) {
    if constexpr (rows * panels == 1) return multiply_one(run, at, sum[0][0]);
    const __m512i low = _mm512_set1_epi8(15);
    const std::uint8_t* right[panels];
#pragma GCC unroll 8
    for (int j = 0; j < panels; ++j) right[j] = at.b + j * run.b_stride;
    const std::uint8_t* left_at = at.a;
    const std::int64_t bytes = run.depth * kDepthBytes;
    const std::int64_t ahead = rows > 4 || at.near > 0 ? kAhead : at.far;
    for (std::int64_t line_at = 0; line_at < bytes; line_at += kPanelLine, left_at += kS4Depth) {
      __m512i lower[panels];
      __m512i upper[panels];
#pragma GCC unroll 8
      for (int j = 0; j < panels; ++j) {
        _mm_prefetch(right[j] + line_at + ahead, _MM_HINT_T0);
        const __m512i line = _mm512_loadu_si512(right[j] + line_at);
        lower[j] = _mm512_and_si512(line, low);
        upper[j] = _mm512_and_si512(line >> 4, low);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const __m512i left = broadcast(left_at + i * run.a_stride);
        const __m512i left_upper = broadcast(left_at + i * run.a_stride + kLaneBytes);
#pragma GCC unroll 8
        for (int j = 0; j < panels; ++j) {
          sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], lower[j], left);
          sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], upper[j], left_upper);
        }
      }
    }
  }

 private:
  static constexpr std::int64_t kOneAhead = 8192;

  // One row times one panel: four chains of products.
  OCTILE_TILE_INLINE static void multiply_one(const TileRun& run, const TileOperands& at, __m512i& sum) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i chains[2][2] = {{sum, _mm512_setzero_si512()}, {_mm512_setzero_si512(), _mm512_setzero_si512()}};
    const std::uint8_t* left = at.a;
    const std::uint8_t* right = at.b;
    const auto add_line = [&](__m512i(&chain)[2]) OCTILE_TILE {
      _mm_prefetch(right + kOneAhead, _MM_HINT_T0);
      const __m512i line = _mm512_loadu_si512(right);
      chain[0] = _mm512_dpbusd_epi32(chain[0], _mm512_and_si512(line, low), broadcast(left));
      chain[1] = _mm512_dpbusd_epi32(chain[1], _mm512_and_si512(line >> 4, low), broadcast(left + kLaneBytes));
      left += kS4Depth;
      right += kPanelLine;
    };
    std::int64_t lines = run.depth / kS4Depth;
    for (; lines > 1; lines -= 2) {
      add_line(chains[0]);
      add_line(chains[1]);
    }
    if (lines > 0) add_line(chains[0]);
    sum = _mm512_add_epi32(_mm512_add_epi32(chains[0][0], chains[0][1]), _mm512_add_epi32(chains[1][0], chains[1][1]));
  }
};

// ---- One row of a, and rows of b as they are ----

constexpr std::int64_t kDotTerms = 128;  // of a channel, in a vector

// Four channels, from a group on.
struct Dots {
  const std::uint8_t* left;
  const std::uint8_t* right[kDotChannels];
  const std::int32_t* left_sums;
  const float* scales;  // (groups, 4)
  __m128 total;
};

// The first this many bytes of a vector.
OCTILE_TILE_INLINE __mmask64 first_bytes(std::int64_t count) {
  return count >= kPanelLine ? ~__mmask64{0} : count <= 0 ? 0 : (__mmask64{1} << count) - 1;
}

// Adds 128 terms to the sums of their lanes, or `rest` of them if not `whole`: the others count as 0 in a.
template <bool whole>
OCTILE_TILE_INLINE void add_terms(const Dots& at, std::int64_t ahead, std::int64_t rest, __m512i (&sum)[kDotChannels]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const __m512i low = _mm512_set1_epi8(15);
  const __m512i flip = _mm512_set1_epi8(8);
  const __mmask64 all = ~__mmask64{0};
  const __m512i front = _mm512_maskz_loadu_epi8(whole ? all : first_bytes(rest), at.left);
  const __m512i back = _mm512_maskz_loadu_epi8(whole ? all : first_bytes(rest - kPanelLine), at.left + kPanelLine);
  const __m512i left_lower = _mm512_permutex2var_epi32(front, even, back);
  const __m512i left_upper = _mm512_permutex2var_epi32(front, odd, back);
#pragma GCC unroll 4
  for (int j = 0; j < kDotChannels; ++j) {
    _mm_prefetch(at.right[j] + ahead, _MM_HINT_T0);
    const __m512i line = _mm512_maskz_loadu_epi8(whole ? all : first_bytes(rest / 2), at.right[j]);
    // q + 8, which is q with its sign bit turned around: (line ^ flip) & low.
    const __m512i lower = _mm512_ternarylogic_epi32(line, flip, low, 0x28);
    const __m512i upper = _mm512_ternarylogic_epi32(_mm512_maskz_srli_epi32(kAllLanes, line, 4), flip, low, 0x28);
    sum[j] = _mm512_dpbusd_epi32(sum[j], lower, left_lower);
    sum[j] = _mm512_dpbusd_epi32(sum[j], upper, left_upper);
  }
}

// The next groups: `parts` that share a vector, or one that has vectors of its own.
template <int parts, bool whole>
OCTILE_TILE_INLINE void fold_groups(const GroupDotRun& run, std::int64_t ahead, std::int64_t rest, Dots& at) {
  __m512i sum[kDotChannels];
#pragma GCC unroll 4
  for (int j = 0; j < kDotChannels; ++j) sum[j] = _mm512_setzero_si512();
  std::int64_t terms = parts == 1 ? run.depth : kDotTerms;
  do {
    add_terms<whole>(at, ahead, rest, sum);
    at.left += kDotTerms;
#pragma GCC unroll 4
    for (int j = 0; j < kDotChannels; ++j) at.right[j] += kDotTerms / 2;
    terms -= kDotTerms;
  } while (parts == 1 && terms > 0);
  // A quarter has the channels' sums of 32 terms: of a group, of half of one, or of a quarter.
  const __m512i quarters = sum_quarters(sum);
  __m128i acc[4] = {
      _mm512_maskz_extracti32x4_epi32(0xf, quarters, 0), _mm512_maskz_extracti32x4_epi32(0xf, quarters, 1),
      _mm512_maskz_extracti32x4_epi32(0xf, quarters, 2), _mm512_maskz_extracti32x4_epi32(0xf, quarters, 3)};
  if constexpr (parts < 4) {
    acc[0] = _mm_add_epi32(acc[0], acc[1]);
    acc[1] = _mm_add_epi32(acc[2], acc[3]);
  }
  if constexpr (parts < 2) acc[0] = _mm_add_epi32(acc[0], acc[1]);
  const std::int64_t count = whole ? parts : rest * parts / kDotTerms;
#pragma GCC unroll 4
  for (int part = 0; part < parts; ++part) {
    if (!whole && part >= count) break;
    const __m128i less = _mm_set1_epi32(8 * at.left_sums[part]);
    at.total = _mm_maskz_fmadd_ps(0xf, _mm_cvtepi32_ps(_mm_sub_epi32(acc[part], less)),
                                  _mm_load_ps(at.scales + part * kDotChannels), at.total);
  }
  at.left_sums += parts;
  at.scales += parts * kDotChannels;
}

template <int parts>
OCTILE_TILE void dot_channels(const GroupDotRun& run) {
  constexpr std::int64_t kScales = 256;  // groups whose scales are laid side by side at a time
  alignas(64) float scales[kScales][kDotChannels];
  for (std::int64_t channel = 0; channel < run.channels; channel += kDotChannels) {
    Dots at{.left = run.a, .right = {}, .left_sums = run.a_sums, .scales = nullptr, .total = _mm_setzero_ps()};
    const float* from[kDotChannels];
    for (int j = 0; j < kDotChannels; ++j) {
      const std::int64_t place = std::min(channel + j, run.channels - 1);
      at.right[j] = run.b + place * run.b_stride;
      from[j] = run.scales + place * run.scales_stride;
    }
    // The same terms of the next four.
    const std::int64_t ahead = channel + 2 * kDotChannels <= run.channels ? kDotChannels * run.b_stride : 0;
    for (std::int64_t g = 0; g < run.groups; g += kScales) {
      const std::int64_t groups = std::min(kScales, run.groups - g);
      for (std::int64_t i = 0; i < groups; ++i) {
        for (int j = 0; j < kDotChannels; ++j) scales[i][j] = from[j][(g + i) * run.scales_group];
      }
      at.scales = scales[0];
      std::int64_t i = 0;
      for (; i + parts <= groups; i += parts) fold_groups<parts, true>(run, ahead, kDotTerms, at);
      if (i < groups) fold_groups<parts, false>(run, ahead, (groups - i) * run.depth, at);
    }
    _mm_storeu_ps(run.totals + channel, at.total);
  }
}

void group_dot(const GroupDotRun& run) {
  run.depth == 32 ? dot_channels<4>(run) : run.depth == 64 ? dot_channels<2>(run) : dot_channels<1>(run);
}

constexpr PanelKernel kKernel = [] {
  PanelKernel kernel = panel_kernel<Tile, Terms>(AForm::plain);
  kernel.group_dot = group_dot;
  kernel.one_panel_bytes = std::int64_t{1} << 20;
  return kernel;
}();

}  // namespace

extern constinit const GemmKernel w4a8_gemm_avx512vnni =
    panels_row<kKernel>("w4a8_gemm_avx512vnni", {Operation::gemm, kW4A8}, needs<Isa::avx512vnni>, at_rate<600>);

}  // namespace octile::cpu
