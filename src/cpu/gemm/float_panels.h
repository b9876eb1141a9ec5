// The float product behind w8a16 and w4a16: y[i, j] = sum_c left[i, c] * right[j, c] (+ bias).
//
// Left, the float operand, is packed once into panels of a tile's rows; right, the quantized one, becomes float on the
// fly, in panels of two vectors that stay in the L1 cache. Terms are summed in segments of at most kDepth:
// each from zero and in order of its terms, then (times the segment's scale, if right has any) added to the segments
// before. That holds whatever the tile, the thread and the other rows, so the bits of y[i, j] depend on row i of left
// and row j of right alone. A product is fused with its addition where the machine can (the files that include this are
// compiled with -ffp-contract=fast), so the bits do depend on the instruction set.
//
// Panels hold elements: a float, a double, or a pair of bf16 (bf16_pairs.h), which is two terms. A file for one
// instruction set defines OCTILE_PANEL_INLINE first, so that the innermost loops may use its intrinsics. Panels are
// multiplied by a `Tile`: VectorTile, or AmxTile (bf16_tiles.h).
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "base/access.h"
#include "cpu/gemm/transpose_lanes.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/kernel.h"

#ifndef OCTILE_PANEL_INLINE
#define OCTILE_PANEL_INLINE OCTILE_INLINE
#endif

namespace octile::cpu {

// Terms 2 c, in the low half, and 2 c + 1 of a row: element c.
using Bf16Pair = std::uint32_t;
template <class Element>
inline constexpr bool kIsPair = std::is_same_v<Element, Bf16Pair>;
template <class Element>
inline constexpr std::int64_t kTerms = kIsPair<Element> ? 2 : 1;  // of an element
template <class Element>
using SumOf = std::conditional_t<kIsPair<Element>, float, Element>;

// sum += a * b, lane by lane.
template <class Element>
struct Products {
  template <class Vector>
  OCTILE_INLINE static void add(const Vector& a, const Vector& b, Vector& sum) {
    sum += a * b;
  }
};

inline constexpr std::int64_t kDepth = 256;        // terms, and elements, of a panel of right, at most
inline constexpr std::int64_t kMaxRows = 12;       // of a tile of vectors, on any machine
inline constexpr std::int64_t kMaxPanelRows = 16;  // of left, on any machine
inline constexpr std::int64_t kMaxCols = 32;       // of a panel of right
inline constexpr std::int64_t kPartRows = 264;     // rows of left that use a panel of right once it is float
inline constexpr std::int64_t kPartCols = 64;      // a line of s8; left comes from far only once for all of them
inline constexpr std::int64_t kMaxPartCols = 128;
inline constexpr std::int64_t kRowsAtOnce = 1536;  // rows of left packed at a time, which bounds the workspace
inline constexpr std::int64_t kPackedPanels = 8;   // panels of left written side by side: ways of a L1 cache
inline constexpr std::int64_t kPackedTerms = 64;
inline constexpr std::int64_t kSpreadElements = kPackedTerms * kPackedPanels * kMaxRows;

constexpr std::int64_t vector_bytes(Isa isa) { return isa >= Isa::avx512 ? 64 : isa >= Isa::avx2 ? 32 : 16; }

// Rows x 2 vectors of sums, 2 of right and 1 of left: 16 registers, or the 32 of AVX-512.
constexpr std::int64_t tile_rows(Isa isa) { return isa >= Isa::avx512 ? 12 : 6; }

template <class Real>
constexpr std::int64_t panel_cols(Isa isa) {
  return std::max<std::int64_t>(16, 2 * vector_bytes(isa) / static_cast<std::int64_t>(sizeof(Real)));
}

// multiversion<Kernel<rows>>(args...), for rows = 1 .. kMaxRows.
template <template <std::int64_t> class Kernel, class... Args>
void with_rows(std::int64_t rows, Args... args) {
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    ((rows == kIndex + 1 ? multiversion<Kernel<kIndex + 1>>(args...) : void()), ...);
  }
  (std::make_index_sequence<kMaxRows>());
}

// ---- Packing left ----

template <class Real>
struct TransposeRun {
  const Real* rows[kMaxRows];
  std::int64_t terms;
  Real* out;  // (terms, rows)
};

// out[j * stride + i] = rows[i][c + j], 4 of each.
template <class Real>
OCTILE_INLINE void transpose_4x4(const Real* const* rows, std::int64_t c, Real* out, std::int64_t stride) {
  typedef Real Four __attribute__((vector_size(16)));
  Four in[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&in[i], rows[i] + c, sizeof(Four));
  transpose_lanes(in);
  for (int i = 0; i < 4; ++i) std::memcpy(out + i * stride, &in[i], sizeof(Four));
}

template <>
OCTILE_INLINE void transpose_4x4(const double* const* rows, std::int64_t c, double* out, std::int64_t stride) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) out[j * stride + i] = rows[i][c + j];
  }
}

// Rows that are contiguous along the contraction.
template <std::int64_t kRows>
struct TransposeRows {
  template <Isa, class Real>
  OCTILE_INLINE static void run(TransposeRun<Real> p) {
    std::int64_t c = 0;
    if constexpr (kRows >= 4) {
      for (; c + 4 <= p.terms; c += 4) {
        for (std::int64_t r = 0; r + 4 <= kRows; r += 4) transpose_4x4(p.rows + r, c, p.out + c * kRows + r, kRows);
        if (kRows % 4 != 0) transpose_4x4(p.rows + kRows - 4, c, p.out + c * kRows + kRows - 4, kRows);
      }
    }
    for (; c < p.terms; ++c) {
      for (std::int64_t r = 0; r < kRows; ++r) p.out[c * kRows + r] = p.rows[r][c];
    }
  }
};

template <class Real>
struct SpreadRun {
  const Real* in;  // (terms, panels * rows)
  std::int64_t in_stride;
  std::int64_t terms, panels;
  Real* out;  // (panels, terms, rows)
  std::int64_t out_stride;
};

// Rows that lie side by side.
template <std::int64_t kRows>
struct SpreadRows {
  template <Isa, class Real>
  OCTILE_INLINE static void run(SpreadRun<Real> p) {
    for (std::int64_t c = 0; c < p.terms; ++c) {
      const Real* in = p.in + c * p.in_stride;
      Real* out = p.out + c * kRows;
      for (std::int64_t panel = 0; panel < p.panels; ++panel) {
        std::memcpy(out, in, kRows * sizeof(Real));
        in += kRows;
        out += p.out_stride;
      }
    }
  }
};

// The float operand, (rows, k), contiguous along either (for pairs along k), packed: for each `step` terms, panels of
// (step / kRun, panel_rows, kRun), so that what the tiles of a part read lies in one piece. Zero beyond the last row
// and the last term. Terms are counted in elements.
template <class Element, std::int64_t kRun = 1>
class LeftPanels {
 public:
  struct Shape {
    std::int64_t panels, panel_rows;
    std::int64_t depth, step;  // terms, and how many of them lie together

    std::int64_t at(std::int64_t panel, std::int64_t term) const {
      const std::int64_t begin = term / step * step;
      return panel_rows * (panels * begin + panel * std::min(step, depth - begin) + term - begin);
    }
  };

  LeftPanels(const ConstTensor& t, const Shape& shape, Element* packed)
      : t_(t), cols_(ceil_div(t.cols(), kTerms<Element> * kRun) * kRun), shape_(shape), packed_(packed) {}

  const Element* panel(std::int64_t panel, std::int64_t term) const { return packed_ + shape_.at(panel, term); }

  // Row `row` of the operand becomes the first of panel `first`. At most kPackedPanels panels. `buffer` holds
  // kSpreadElements.
  void pack(std::int64_t row, std::int64_t first, std::int64_t panels, Element* buffer) const {
    const std::int64_t rows = std::min(panels * shape_.panel_rows, t_.rows() - row);
    for (std::int64_t term = 0; term < shape_.depth; term += shape_.step) {
      const std::int64_t end = std::min(term + shape_.step, shape_.depth);
      for (std::int64_t c = term; c < std::min(end, cols_); c += kPackedTerms) {
        const Terms terms{c, std::min({kPackedTerms, end - c, cols_ - c})};
        if constexpr (kRun > 1) {
          copy(row, rows, terms, first);
        } else if constexpr (kIsPair<Element>) {
          transpose(row, rows, terms, first);
        } else {
          t_.strides[1] == 1 ? transpose(row, rows, terms, first) : spread(row, rows, terms, {first, buffer});
        }
      }
      const std::int64_t beyond = std::max(term, cols_);
      for (std::int64_t panel = 0; panel < panels && beyond < end; ++panel) {
        std::fill_n(packed_ + shape_.at(first + panel, beyond), (end - beyond) * shape_.panel_rows, Element{0});
      }
    }
  }

 private:
  struct Terms {
    std::int64_t first, count;
  };

  // Of a row that is contiguous along the contraction. `buffer` is filled unless the elements can be read in place.
  const Element* elements(std::int64_t row, Terms terms, Element* buffer) const {
    const std::int64_t at = row * t_.strides[0] + terms.first * kTerms<Element>;
    if constexpr (kIsPair<Element>) {
      std::fill_n(buffer + terms.count - kRun, kRun, Element{0});
      const auto count = static_cast<std::size_t>(std::min(2 * terms.count, t_.cols() - 2 * terms.first));
      std::memcpy(buffer, static_cast<const std::uint16_t*>(t_.data) + at, count * sizeof(std::uint16_t));
      return buffer;
    } else {
      return widened(t_.dtype, t_.data, at, terms.count, buffer);
    }
  }

  void transpose(std::int64_t row, std::int64_t rows, Terms terms, std::int64_t panel) const {
    Element buffer[kMaxRows * kPackedTerms];
    for (; rows > 0; row += shape_.panel_rows, rows -= shape_.panel_rows) {
      TransposeRun<Element> run{{}, terms.count, packed_ + shape_.at(panel++, terms.first)};
      for (std::int64_t r = 0; r < shape_.panel_rows; ++r) {
        Element* own = buffer + r * kPackedTerms;
        run.rows[r] = own;
        if (r < rows) {
          run.rows[r] = elements(row + r, terms, own);
        } else {
          std::fill_n(own, terms.count, Element{0});
        }
      }
      with_rows<TransposeRows>(shape_.panel_rows, run);
    }
  }

  void copy(std::int64_t row, std::int64_t rows, Terms terms, std::int64_t panel) const {
    Element buffer[kPackedTerms];
    for (; rows > 0; row += shape_.panel_rows, rows -= shape_.panel_rows, ++panel) {
      for (std::int64_t r = 0; r < shape_.panel_rows; ++r) {
        if (r < rows) {
          elements(row + r, terms, buffer);
        } else {
          std::fill_n(buffer, terms.count, Element{0});
        }
        Element* out = packed_ + shape_.at(panel, terms.first) + r * kRun;
        for (std::int64_t c = 0; c < terms.count; c += kRun, out += shape_.panel_rows * kRun) {
          std::memcpy(out, buffer + c, kRun * sizeof(Element));
        }
      }
    }
  }

  struct Spread {
    std::int64_t panel;
    Element* buffer;  // (terms, width)
  };

  void spread(std::int64_t row, std::int64_t rows, Terms terms, const Spread& to) const {
    const auto [panel, buffer] = to;
    const std::int64_t panels = ceil_div(rows, shape_.panel_rows);
    const std::int64_t width = panels * shape_.panel_rows;
    const std::int64_t at = terms.first * t_.strides[1] + row;
    const bool direct = t_.dtype == DTypeOf<Element>::value && rows == width;
    for (std::int64_t c = 0; c < terms.count && !direct; ++c) {
      widen(t_.dtype, t_.data, at + c * t_.strides[1], rows, buffer + c * width);
      std::fill_n(buffer + c * width + rows, width - rows, Element{0});
    }
    with_rows<SpreadRows>(
        shape_.panel_rows,
        SpreadRun<Element>{direct ? static_cast<const Element*>(t_.data) + at : buffer, direct ? t_.strides[1] : width,
                           terms.count, panels, packed_ + shape_.at(panel, terms.first),
                           shape_.at(panel + 1, terms.first) - shape_.at(panel, terms.first)});
  }

  ConstTensor t_;
  std::int64_t cols_;
  Shape shape_;
  Element* packed_;
};

// ---- The tile ----

template <class Element>
struct FloatTile {
  const Element* left;  // (panels, depth / kRun, rows, kRun)
  std::int64_t panels;
  const Element* right;  // (depth, panel_cols)
  std::int64_t depth, segment;
  const SumOf<Element>* scales;  // (depth / segment, panel_cols), or null
  SumOf<Element>* sums;          // (panels * rows, kPartCols)
};

template <std::int64_t kRows, class Element>
struct MultiplyPanels {
  static constexpr bool kNeedsBf16 = kIsPair<Element>;

  template <Isa isa>
  OCTILE_PANEL_INLINE static void run(FloatTile<Element> p) {
    if constexpr (kRows <= tile_rows(isa)) {
      for (std::int64_t panel = 0; panel < p.panels; ++panel) {
        constexpr std::int64_t kLanes = vector_bytes(isa) / static_cast<std::int64_t>(sizeof(Element));
        for (std::int64_t col = 0; col < panel_cols<Element>(isa); col += 2 * kLanes) {
          for (std::int64_t first = 0; first < p.depth; first += p.segment) {
            add_segment<isa>(p, panel, col, first);
          }
        }
      }
    }
  }

 private:
  template <Isa isa>
  OCTILE_PANEL_INLINE static void add_segment(const FloatTile<Element>& p, std::int64_t panel, std::int64_t col,
                                              std::int64_t first) {
    typedef Element Vector __attribute__((vector_size(vector_bytes(isa))));
    typedef SumOf<Element> Sums __attribute__((vector_size(vector_bytes(isa))));
    constexpr std::int64_t kLanes = vector_bytes(isa) / static_cast<std::int64_t>(sizeof(Element));
    constexpr std::int64_t kCols = panel_cols<Element>(isa);
    const Element* __restrict left = p.left + (panel * p.depth + first) * kRows;
    const Element* __restrict right = p.right + first * kCols + col;
    Sums sum[kRows][2] = {};
    for (std::int64_t c = std::min(p.segment, p.depth - first); c > 0; --c) {
      const Vector b0 = *reinterpret_cast<const Vector*>(right);
      const Vector b1 = *reinterpret_cast<const Vector*>(right + kLanes);
#pragma GCC unroll 12
      for (int i = 0; i < kRows; ++i) {
        const Vector a = left[i] - Vector{};  // broadcast once
        Products<Element>::add(a, b0, sum[i][0]);
        Products<Element>::add(a, b1, sum[i][1]);
      }
      left += kRows;
      right += kCols;
    }
    const auto* scale = p.scales ? reinterpret_cast<const Sums*>(p.scales + first / p.segment * kCols + col) : nullptr;
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      auto* sums = reinterpret_cast<Sums*>(p.sums + (panel * kRows + i) * kPartCols + col);
      sums[0] = scale ? sums[0] + sum[i][0] * scale[0] : sums[0] + sum[i][0];
      sums[1] = scale ? sums[1] + sum[i][1] * scale[1] : sums[1] + sum[i][1];
    }
  }
};

// What multiplies panels: vectors of sums.
template <class Element>
struct VectorTile {
  static constexpr std::int64_t kRun = 1;  // elements of a row side by side in a panel of left; depths are multiples

  // As long as a thread multiplies panels of this many rows.
  struct Session {
    explicit Session(std::int64_t) {}
  };

  static std::int64_t rows() { return tile_rows(isa()); }  // of a panel of left, at most

  static void multiply(std::int64_t panel_rows, const FloatTile<Element>& run) { with_rows<Rows>(panel_rows, run); }

 private:
  template <std::int64_t kRows>
  using Rows = MultiplyPanels<kRows, Element>;
};

// Rows and columns of y that a part computes.
struct PartRange {
  std::int64_t row, rows;
  std::int64_t col, cols;
  std::int64_t stride = kPartCols;  // of its sums
};

// y = sums (rows, stride) + bias, or y + sums, along the dimension in which y is contiguous.
template <class Real>
void write_sums(bool accumulate, const GemmOperands& o, const PartRange& part, Real* sums) {
  const auto write = [&](std::int64_t at, std::int64_t n, const Real* values) {
    accumulate ? add<Real>(o.y.data, at, n, values) : narrow<Real>(o.y.dtype, o.y.data, at, n, values);
  };
  if (o.bias.present()) {
    Real bias[kMaxPartCols];
    for (std::int64_t j = 0; j < part.cols; ++j) bias[j] = load<Real>(o.bias, part.col + j);
    for (std::int64_t i = 0; i < part.rows; ++i) {
      add<Real>(sums, i * part.stride, part.cols, bias);
    }
  }
  if (o.y.strides[1] == 1) {
    for (std::int64_t i = 0; i < part.rows; ++i) {
      const std::int64_t at = (part.row + i) * o.y.strides[0] + part.col;
      write(at, part.cols, sums + i * part.stride);
    }
    return;
  }
  Real columns[4 * kPartRows];  // (4 columns, rows)
  for (std::int64_t j = 0; j < part.cols; j += 4) {
    for (std::int64_t i = 0; i < part.rows; i += 4) {
      const Real* const at = sums + i * part.stride + j;
      const Real* const rows[4] = {at, at + part.stride, at + 2 * part.stride, at + 3 * part.stride};
      transpose_4x4(rows, 0, columns + i, kPartRows);
    }
    for (std::int64_t c = 0; c < std::min<std::int64_t>(4, part.cols - j); ++c) {
      const std::int64_t at = (part.col + j + c) * o.y.strides[1] + part.row;
      write(at, part.rows, columns + c * kPartRows);
    }
  }
}

// ---- The product ----

// Part of right: rows row .. row + rows - 1, and terms term .. term + terms - 1, counted in elements.
struct PanelRange {
  std::int64_t row, rows;
  std::int64_t term, terms;
};

inline int panel_threads(int wanted, std::int64_t rows, std::int64_t cols, std::int64_t depth) {
  return useful_threads(wanted,
                        static_cast<double>(rows) * static_cast<double>(cols) * static_cast<double>(depth) / 16);
}

// Of left. A row more than a multiple of a tile's rows is not rare, and fewer rows than p.m may be run.
inline std::size_t left_panels_workspace(const GemmProblem& p, std::int64_t depth) {
  const std::int64_t rows = std::min(p.m + kMaxPanelRows, kRowsAtOnce);
  return static_cast<std::size_t>(rows * depth * (p.scale == DType::f64 ? 8 : 4));
}

// `Right` is the quantized operand, its terms counted in elements:
//   std::int64_t depth()    terms of left and right, padding included
//   std::int64_t segment()  terms of a segment, at most kDepth
//   std::int64_t step()     terms that are fetched at a time: whole segments, at most kDepth
//   struct Stage            at most (kPartCols, step) of it, close at hand and still quantized
//   void stage(const PanelRange&, std::int64_t at, Stage&)   at: the place of the first term in the stage
//   void prefetch(const PanelRange&)
//   const SumOf<Element>* fetch(const Stage&, const PanelRange&, Element* out, SumOf<Element>* scales)
//                           out (terms, panel_cols); returns scales (segments, panel_cols), or null if it has none
template <class Element, class Right, class Tile = VectorTile<Element>>
class PanelProduct {
 public:
  PanelProduct(const GemmProblem& problem, const GemmOperands& o, const Right& right)
      : accumulate_(problem.accumulate),
        o_(o),
        right_(right),
        rows_(o.y.rows()),
        cols_(o.y.cols()),
        depth_(right.depth()) {
    panel_rows_ = ceil_div(rows_, ceil_div(rows_, Tile::rows()));  // no panel much emptier than the others
    step_ = right.step();
  }

  void run(int threads_wanted, void* workspace) const {
    const int threads = panel_threads(threads_wanted, rows_, cols_, depth_);
    auto* const scratch = static_cast<Scratch*>(workspace);
    auto* const packed = reinterpret_cast<Element*>(scratch + threads);
    const std::int64_t rows_at_once = kRowsAtOnce / panel_rows_ * panel_rows_;
    for (std::int64_t first = 0; first < rows_; first += rows_at_once) {
      const std::int64_t rows = std::min(rows_at_once, rows_ - first);
      const std::int64_t panels = ceil_div(rows, panel_rows_);
      const Left left(o_.a, {panels, panel_rows_, depth_, step_}, packed);
      parallel_for(threads, ceil_div(panels, kPackedPanels), [&](std::int64_t part, int thread) {
        const std::int64_t panel = part * kPackedPanels;
        left.pack(first + panel * panel_rows_, panel, std::min(kPackedPanels, panels - panel),
                  reinterpret_cast<Element*>(scratch[thread].sums));
      });
      const std::int64_t part_panels = ceil_div(panels, ceil_div(panels, kPartRows / panel_rows_));
      const std::int64_t part_rows = part_panels * panel_rows_;
      const std::int64_t row_parts = ceil_div(panels, part_panels);
      const bool few = row_parts * ceil_div(cols_, kPartCols) < 4 * threads;
      const std::int64_t part_cols = few ? panel_cols<Element>(isa()) : kPartCols;
      const std::int64_t col_parts = ceil_div(cols_, part_cols);
      parallel_for(threads, row_parts * col_parts, [&](std::int64_t part, int thread) {
        const typename Tile::Session session(panel_rows_);
        const std::int64_t r = part / col_parts * part_rows;
        const std::int64_t c = part % col_parts * part_cols;
        multiply(left, r / panel_rows_, {first + r, std::min(part_rows, rows - r), c, std::min(part_cols, cols_ - c)},
                 scratch[thread]);
      });
    }
  }

  // Left packed, of p.m rows at most, and scratch for each thread.
  static std::size_t workspace(const GemmProblem& p, std::int64_t depth) {
    const auto threads = static_cast<std::size_t>(panel_threads(p.threads, p.m, p.n, depth));
    return left_panels_workspace(p, depth) + threads * sizeof(Scratch);
  }

 private:
  static constexpr std::int64_t kWidth = kMaxCols * 4 / static_cast<std::int64_t>(sizeof(Element));
  static_assert(kPartRows * kPartCols >= kSpreadElements);
  using Real = SumOf<Element>;
  using Left = LeftPanels<Element, Tile::kRun>;
  // Of a thread: too much for its stack.
  struct Scratch {
    alignas(64) Element panel[kDepth * kWidth];    // (depth, panel_cols)
    alignas(64) Real scales[kDepth / 8 * kWidth];  // (segments, panel_cols)
    alignas(64) Real sums[kPartRows * kPartCols];  // (rows, kPartCols)
    typename Right::Stage stages[2];
  };

  void multiply(const Left& left, std::int64_t first_panel, const PartRange& part, Scratch& scratch) const {
    const std::int64_t width = panel_cols<Element>(isa());
    const std::int64_t panels = ceil_div(part.rows, panel_rows_);
    Element* const panel = scratch.panel;
    Real* const sums = scratch.sums;
    auto& stages = scratch.stages;
    std::fill_n(sums, panels * panel_rows_ * kPartCols, Real{0});
    const std::int64_t piece = ceil_div(step_, ceil_div(part.cols, width));
    right_.stage(terms_of(part, 0, step_), 0, stages[0]);
    for (std::int64_t term = 0; term < depth_; term += step_) {
      const std::int64_t depth = std::min(step_, depth_ - term);
      // While a panel is multiplied, a piece of the next stage comes nearer. The lines of a stage often lie a power of
      // two apart: all of them at once would drive each other out of the cache.
      std::int64_t next = 0;
      for (std::int64_t c = 0; c < part.cols; c += width) {
        const PanelRange range{part.col + c, std::min(width, part.cols - c), term, depth};
        const Real* scale = right_.fetch(stages[term / step_ % 2], range, panel, scratch.scales);
        const std::int64_t count = std::min(piece, step_ - next);
        right_.stage(terms_of(part, term + step_ + next, count), next, stages[(term / step_ + 1) % 2]);
        next += count;
        right_.prefetch(terms_of(part, term + step_ + next, piece));
        Tile::multiply(panel_rows_,
                       {left.panel(first_panel, term), panels, panel, depth, right_.segment(), scale, sums + c});
      }
    }
    write_sums(accumulate_, o_, part, sums);
  }

  PanelRange terms_of(const PartRange& part, std::int64_t term, std::int64_t terms) const {
    return {part.col, part.cols, term, std::clamp<std::int64_t>(depth_ - term, 0, terms)};
  }

  bool accumulate_;
  const GemmOperands& o_;
  const Right& right_;
  std::int64_t rows_, cols_, depth_;
  std::int64_t panel_rows_;
  std::int64_t step_;  // terms of a panel of right
};

}  // namespace octile::cpu
