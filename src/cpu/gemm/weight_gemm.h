// A float matrix times a weight of s4 or s8 with scales along the rows, packed or not; a (m, k), b (n, k):
//
//   y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, g]) * b_scale[j, g]) + bias[j], g the group that c is in
//
// The scale stays out of the sum over a group: y = sum_g scale_g * sum_{c in g} a[i, c] * float(b[j, c] - z), where the
// integers are exact. A few rows of a stream the weight once, as integers in registers; more rows take it as panels of
// floats. Both sum in the order of float_panels.h, so a row of y has the same bits either way.
//
// `Codec` is NibbleVectors or ByteVectors, or of pairs of bf16 NibblePairs or BytePairs. `Tile`: VectorStream, or
// AmxTile (bf16_tiles.h).
#pragma once

#include "cpu/gemm/weight_panels.h"

namespace octile::cpu {

namespace {

// ---- Many rows: panels of floats ----

template <template <Isa> class Codec>
using ElementOf = typename Codec<Isa::baseline>::Element;

template <class Element>
struct DecodeRun {
  WeightBlock block;
  std::int64_t terms;
  NibbleOrder order;
  Element* out;  // (elements, width), 16 columns of it
  std::int64_t width;
};

template <template <Isa> class Codec>
struct DecodeBlock {
  using Element = ElementOf<Codec>;
  static constexpr bool kNeedsBf16 = kIsPair<Element>;

  template <Isa isa>
  OCTILE_PANEL_INLINE static void run(DecodeRun<Element> p) {
    p.order == NibbleOrder::packed ? decode<isa, NibbleOrder::packed>(p) : decode<isa, NibbleOrder::row>(p);
  }

  template <Isa>
  OCTILE_INLINE static void run(DecodeRun<double> p) {
    for (std::int64_t c = 0; c < p.terms; ++c) {
      if constexpr (kLineTerms == 4) {
        const auto* bytes = reinterpret_cast<const std::int8_t*>(p.block.lines) + c / 4 * kPanelLine + c % 4;
        for (std::int64_t i = 0; i < kPanelChannels; ++i) p.out[c * p.width + i] = bytes[i * kLaneBytes];
        continue;
      }
      const int bit = nibble_bit(p.order, static_cast<int>(c % kLineTerms));
      for (std::int64_t i = 0; i < kPanelChannels; ++i) {
        const int byte = p.block.lines[c / kLineTerms * kPanelLine + i * kLaneBytes + bit / 8];
        const int zero = p.block.zero_points ? p.block.zero_points[i] : 8;
        p.out[c * p.width + i] = (byte >> bit % 8 & 15) - zero;
      }
    }
  }

 private:
  static constexpr int kLineTerms = Codec<Isa::baseline>::kLineTerms;

  template <Isa isa, NibbleOrder kOrder>
  OCTILE_PANEL_INLINE static void decode(const DecodeRun<Element>& p) {
    using V = Codec<isa>;
    for (std::int64_t i = 0; i < kPanelChannels; i += V::kLanes) {
      V codec;
      codec.set(p.block.zero_points ? p.block.zero_points + i : nullptr);
      const std::uint8_t* line = p.block.lines + i * kLaneBytes;
      for (std::int64_t c = 0; c < p.terms; c += kLineTerms, line += kPanelLine) {
        typename V::Words lanes;
        std::memcpy(&lanes, line, sizeof lanes);
#pragma GCC unroll 8
        for (int t = 0; t < kLineTerms / kTerms<Element>; ++t) {
          Element* const out = p.out + (c / kTerms<Element> + t) * p.width + i;
          codec.template element<kOrder, false>(lanes, t, *reinterpret_cast<typename V::Elements*>(out));
        }
      }
    }
  }
};

// What PanelProduct takes as its right operand. Depths and segments are padded to multiples of kRun elements.
template <class Element, template <Isa> class Codec, std::int64_t kRun>
class WeightOperand {
 public:
  using Real = SumOf<Element>;
  struct Stage {};  // nothing: a panel is one run of memory, or soon will be

  explicit WeightOperand(const WeightPanels& weight) : weight_(weight) {}

  std::int64_t depth() const { return round_up(weight_.depth() / kTerms<Element>, kRun); }
  std::int64_t segment() const { return round_up(weight_.segment() / kTerms<Element>, kRun); }
  std::int64_t step() const { return std::max<std::int64_t>(128 / segment(), 1) * segment(); }
  void stage(const PanelRange&, std::int64_t, Stage&) const {}
  void prefetch(const PanelRange&) const {}

  const Real* fetch(const Stage&, const PanelRange& range, Element* out, Real* scales) const {
    const std::int64_t width = panel_cols<Element>(isa());
    if (range.rows <= width - kPanelChannels) {
      std::fill_n(out, range.terms * width, Element{0});
      std::fill_n(scales, ceil_div(range.terms, segment()) * width, Real{0});
    }
    WeightPanels::Storage<Codec> storage;
    for (std::int64_t i = 0; i < range.rows; i += kPanelChannels) {
      const std::int64_t panel = (range.row + i) / kPanelChannels;
      for (std::int64_t c = 0; c < range.terms; c += segment()) {
        const std::int64_t term = (range.term + c) * kTerms<Element>;
        const std::int64_t padded = std::min(segment(), range.terms - c);
        const std::int64_t terms = std::min(padded * kTerms<Element>, weight_.depth() - term);
        const WeightBlock block = weight_.block(panel, term, terms, storage.buffer);
        multiversion<DecodeBlock<Codec>>(DecodeRun<Element>{block, terms, weight_.order(), out + c * width + i, width});
        for (std::int64_t e = terms / kTerms<Element>; e < padded; ++e) {
          std::fill_n(out + (c + e) * width + i, kPanelChannels, Element{0});
        }
        std::memcpy(scales + c / segment() * width + i, block.scales, kPanelChannels * sizeof(Real));
      }
    }
    return scales;
  }

 private:
  const WeightPanels& weight_;
};

// ---- A few rows: integers in registers ----

// Enough sums for the latency of their additions, at most what the registers hold beside a weight and an activation.
constexpr std::int64_t stream_rows(Isa isa) { return isa >= Isa::avx512 ? 12 : isa >= Isa::avx2 ? 6 : 2; }
constexpr std::int64_t stream_panels(Isa isa, std::int64_t rows) {
  if (isa >= Isa::avx512) return rows <= 4 ? 4 : rows <= 6 ? 3 : rows <= 8 ? 2 : 1;
  if (isa >= Isa::avx2) return rows <= 2 ? 2 : 1;
  return rows == 1 ? 2 : 1;
}
constexpr std::int64_t kMaxStreamPanels = 4;
constexpr std::int64_t kStreamCols = kMaxStreamPanels * kPanelChannels;

// Bytes ahead in each panel; beyond a page the machine does not look by itself (21 to 28 GB/s on one thread of Zen 5).
constexpr std::int64_t kPrefetch = 2048;
constexpr std::int64_t kScalesAhead = 4;  // groups

template <class Element>
struct StreamRun {
  WeightBlock panels[kMaxStreamPanels];
  const Element* left;       // (elements of groups * group_depth terms, rows), of a tile
  std::int64_t left_stride;  // from one tile to the next
  std::int64_t groups, group_depth;
  NibbleOrder order;
  float* sums;               // (tiles * rows, kStreamCols)
  std::int64_t next;         // bytes from the end of a panel to the panel in its place in the next part, or 0
  std::int64_t next_scales;  // the same for its scales, in groups
};

template <std::int64_t kRows, template <Isa> class Codec>
struct StreamPanels {
  using Element = ElementOf<Codec>;
  static constexpr bool kNeedsBf16 = kIsPair<Element>;

  template <Isa isa>
  OCTILE_PANEL_INLINE static void run(StreamRun<Element> p) {
    if constexpr (kRows <= stream_rows(isa)) {
      if constexpr (Codec<isa>::kLineTerms == 4) {
        stream<isa, NibbleOrder::packed, false>(p);
      } else if (p.order == NibbleOrder::packed) {
        p.panels[0].zero_points ? stream<isa, NibbleOrder::packed, true>(p)
                                : stream<isa, NibbleOrder::packed, false>(p);
      } else {
        p.panels[0].zero_points ? stream<isa, NibbleOrder::row, true>(p) : stream<isa, NibbleOrder::row, false>(p);
      }
    }
  }

 private:
  template <Isa isa, NibbleOrder kOrder, bool kZeroPoints>
  OCTILE_PANEL_INLINE static void stream(const StreamRun<Element>& p) {
    using V = Codec<isa>;
    using Elements = typename V::Elements;
    using Sums = typename V::Sums;
    constexpr int kLineTerms = V::kLineTerms;
    constexpr int kLineElements = kLineTerms / kTerms<Element>;
    constexpr std::int64_t kVectors = kPanelChannels / V::kLanes;  // of a panel
    constexpr std::int64_t kAll = stream_panels(isa, kRows) * kVectors;
    V codecs[kZeroPoints ? kAll : 1];
    if (!kZeroPoints) codecs[0].set(nullptr);
    constexpr bool kLookUp = !kZeroPoints && (kRows <= 4 || kIsPair<Element>);
    const Element* left = p.left;
    std::int64_t at = 0;  // bytes into each panel
    const std::int64_t near = p.groups * p.group_depth / kLineTerms * kPanelLine - kPrefetch;
    for (std::int64_t group = 0; group < p.groups; ++group) {
      // Scales are apart from the panels, a line for each group, which hardware prefetchers do not predict.
      const std::int64_t later = group + kScalesAhead;
      const std::int64_t line = later < p.groups || p.next == 0 ? later : later + p.next_scales;
      for (std::int64_t i = 0; i < kAll / kVectors; ++i) {
        __builtin_prefetch(static_cast<const float*>(p.panels[i].scales) + line * kPanelChannels);
      }
      for (std::int64_t i = 0; i < kAll && kZeroPoints; ++i) {
        codecs[i].set(p.panels[i / kVectors].zero_points + group * kPanelChannels + i % kVectors * V::kLanes);
      }
      for (std::int64_t first = 0; first < p.group_depth; first += kDepth) {
        Sums sum[kRows][kAll] = {};
        const std::int64_t ahead = kPrefetch + (at < near ? 0 : p.next);
        for (std::int64_t end = at + std::min(kDepth, p.group_depth - first) / kLineTerms * kPanelLine; at < end;
             at += kPanelLine) {
          typename V::Words lanes[kAll];
#pragma GCC unroll 8
          for (int i = 0; i < kAll; ++i) {
            const std::uint8_t* line = p.panels[i / kVectors].lines + at + i % kVectors * V::kLanes * kLaneBytes;
            std::memcpy(&lanes[i], line, sizeof lanes[i]);
          }
#pragma GCC unroll 8
          for (int t = 0; t < kLineElements; ++t) {
            // One after the other, so that arithmetic goes on while they wait for a place.
            for (int i = t; i < kAll / kVectors; i += kLineElements) __builtin_prefetch(p.panels[i].lines + at + ahead);
            Elements w[kAll];
#pragma GCC unroll 8
            for (int i = 0; i < kAll; ++i) {
              codecs[kZeroPoints ? i : 0].template element<kOrder, kLookUp>(lanes[i], t, w[i]);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
              const Elements x = left[t * kRows + r] - Elements{};
#pragma GCC unroll 8
              for (int i = 0; i < kAll; ++i) Products<Element>::add(x, w[i], sum[r][i]);
            }
          }
          left += kLineElements * kRows;
        }
#pragma GCC unroll 8
        for (int i = 0; i < kAll; ++i) {
          Sums scale;
          std::memcpy(&scale,
                      static_cast<const float*>(p.panels[i / kVectors].scales) + group * kPanelChannels +
                          i % kVectors * V::kLanes,
                      sizeof scale);
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) {
            auto* sums = reinterpret_cast<Sums*>(p.sums + r * kStreamCols + i * V::kLanes);
            *sums = *sums + sum[r][i] * scale;
          }
        }
      }
    }
  }
};

// More rows than a tile's go through the weight again and again while it is near: kMaxStreamTiles times, and panels of
// floats are as fast (Zen 5).
constexpr std::int64_t kMaxStreamTiles = 4;

// Of a thread: too much for its stack.
template <template <Isa> class Codec>
struct StreamScratch {
  alignas(64) float sums[kMaxStreamTiles * kMaxRows * kStreamCols];
  WeightPanels::Storage<Codec> buffers[kMaxStreamPanels];
};
static_assert(kStreamCols >= kPackedTerms);  // x whose rows lie side by side is packed through the sums

// A VectorTile that multiplies a few rows too.
template <template <Isa> class Codec>
struct VectorStream : VectorTile<ElementOf<Codec>> {
  using Element = ElementOf<Codec>;
  static constexpr std::int64_t kMaxTiles = kMaxStreamTiles;

  static std::int64_t stream_rows() { return cpu::stream_rows(isa()); }  // of a tile, at most

  // Multiplied at a time.
  static std::int64_t stream_panels(std::int64_t, std::int64_t tile_rows) {
    return cpu::stream_panels(isa(), tile_rows);
  }

  static void stream(std::int64_t tiles, std::int64_t tile_rows, StreamRun<Element> run) {
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      with_rows<Rows>(tile_rows, run);
      run.left += run.left_stride;
      run.sums += tile_rows * kStreamCols;
    }
  }

 private:
  template <std::int64_t kRows>
  using Rows = StreamPanels<kRows, Codec>;
};

template <template <Isa> class Codec, class Tile>
void stream(const GemmProblem& p, const GemmOperands& o, const WeightPanels& weight, void* workspace) {
  using Element = ElementOf<Codec>;
  const std::int64_t rows = o.y.rows();
  const std::int64_t depth = weight.depth();
  const PackedLayout& layout = weight.layout();
  const std::int64_t tiles = ceil_div(rows, Tile::stream_rows());
  const std::int64_t tile_rows = ceil_div(rows, tiles);
  const std::int64_t elements = round_up(depth / kTerms<Element>, Tile::kRun);
  const int threads = panel_threads(p.threads, rows, p.n, elements);
  auto* const scratch = static_cast<StreamScratch<Codec>*>(workspace);
  const LeftPanels<Element, Tile::kRun> left(o.a, {tiles, tile_rows, elements, elements},
                                             reinterpret_cast<Element*>(scratch + threads));
  left.pack(0, 0, tiles, reinterpret_cast<Element*>(scratch->sums));
  const std::int64_t part_panels = Tile::stream_panels(tiles, tile_rows);
  const std::int64_t segment = weight.segment();
  const std::int64_t step = weight.packed() ? depth : kDepth / segment * segment;
  parallel_for(threads, ceil_div(layout.panels, part_panels), [&](std::int64_t part, int thread) {
    const typename Tile::Session session(tile_rows);
    const std::int64_t first = part * part_panels;
    auto& [sums, buffers] = scratch[thread];
    std::fill_n(sums, tiles * tile_rows * kStreamCols, 0.0f);
    for (std::int64_t term = 0; term < depth; term += step) {
      const std::int64_t terms = std::min(step, depth - term);
      const std::int64_t run_depth = weight.packed() ? layout.group_depth : std::min(segment, terms);
      StreamRun<Element> run{{},
                             left.panel(0, term / kTerms<Element>),
                             tile_rows * elements,
                             terms / run_depth,
                             run_depth,
                             weight.order(),
                             sums,
                             0,
                             0};
      if (weight.packed()) {
        run.next = (part_panels - 1) * layout.panel_bytes;
        run.next_scales = (part_panels - 1) * layout.groups;
      }
      for (std::int64_t i = 0; i < part_panels; ++i) {
        run.panels[i] = weight.block(std::min(first + i, layout.panels - 1), term, terms, buffers[i].buffer);
      }
      Tile::stream(tiles, tile_rows, run);
    }
    const std::int64_t col = first * kPanelChannels;
    write_sums(false, o, {0, rows, col, std::min(part_panels * kPanelChannels, p.n - col), kStreamCols}, sums);
  });
}

// Of a Codec and a Tile that multiplies a few rows too.
template <class Element, template <Isa> class Codec, class Tile>
using WeightRight = WeightOperand<Element, Codec, Tile::kRun>;
template <class Element, template <Isa> class Codec, class Tile>
using WeightProduct = PanelProduct<Element, WeightRight<Element, Codec, Tile>, Tile>;

template <template <Isa> class Codec, class Tile = VectorStream<Codec>>
void multiply_weight(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  const WeightPanels weight(p, o);
  void* const workspace = launch.workspace.data;
  using Element = ElementOf<Codec>;
  if constexpr (!kIsPair<Element>) {
    if (p.scale == DType::f64) {
      const WeightRight<double, Codec, VectorTile<double>> right(weight);
      return WeightProduct<double, Codec, VectorTile<double>>(p, o, right).run(p.threads, workspace);
    }
  }
  if (o.y.rows() > Tile::kMaxTiles * Tile::stream_rows()) {
    const WeightRight<Element, Codec, Tile> right(weight);
    WeightProduct<Element, Codec, Tile>(p, o, right).run(p.threads, workspace);
  } else {
    stream<Codec, Tile>(p, o, weight, workspace);
  }
}

template <template <Isa> class Codec, class Tile = VectorStream<Codec>>
std::size_t weight_workspace(const GemmProblem& p) {
  using Element = ElementOf<Codec>;
  const PackedLayout layout = packed_layout(p);
  const std::int64_t depth = round_up(layout.groups * layout.group_depth / kTerms<Element>, Tile::kRun);
  if constexpr (!kIsPair<Element>) {
    if (p.scale == DType::f64) return WeightProduct<double, Codec, VectorTile<double>>::workspace(p, depth);
  }
  const auto threads = static_cast<std::size_t>(panel_threads(p.threads, p.m, p.n, depth));
  return std::max(left_panels_workspace(p, depth) + threads * sizeof(StreamScratch<Codec>),
                  WeightProduct<Element, Codec, Tile>::workspace(p, depth));
}

}  // namespace

}  // namespace octile::cpu
