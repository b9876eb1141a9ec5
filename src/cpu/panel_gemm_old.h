// The float product behind w8a16 and w4a16: y[i, j] = sum_c left[i, c] * right[j, c] (+ bias).
//
// Left is packed once into panels of kPanelRows rows; right on the fly into panels of two vectors, kDepth terms deep.
// Each sum goes through its terms in order, and kDepth terms are summed before they are added to the rest, whatever the
// tile, the thread and the other rows: its bits depend on its own row of left and of right alone. A product may be
// fused with its addition (the files that include this are compiled with -ffp-contract=fast), so the bits do depend on
// the instruction set.
#pragma once

#include <cstring>

#include "access.h"
#include "cpu/multiversion.h"
#include "cpu/rows.h"
#include "kernels.h"

namespace octile::cpu {

inline constexpr std::int64_t kDepth = 256;     // terms of a panel of right, which then fits in the first-level cache
inline constexpr std::int64_t kPanelRows = 6;   // 6 x 2 vectors of sums leave 4 of 16 registers for operands
inline constexpr std::int64_t kPartRows = 192;  // rows of left that use a panel of right once it is packed
inline constexpr std::int64_t kRowsAtOnce = 1536;  // rows of left packed at a time, which bounds the workspace
inline constexpr std::int64_t kFetchRows = 96;     // rows fetched at a time, at most: 16 tiles of left
inline constexpr std::int64_t kFetchTerms = 32;

constexpr std::int64_t vector_bytes(Isa isa) { return isa >= Isa::avx512 ? 64 : isa == Isa::avx2 ? 32 : 16; }

// What to fetch of an operand: rows row .. row + rows - 1, terms term .. term + terms - 1.
struct PanelRange {
  std::int64_t row, rows;
  std::int64_t term, terms;
};

// An operand of the product, in float at last.
template <class Real>
class PanelSource {
 public:
  // out[c * width + r] = element (range.row + r, range.term + c). At most kFetchRows rows.
  virtual void fetch(const PanelRange& range, Real* out, std::int64_t width) const = 0;

 protected:
  ~PanelSource() = default;
};

struct TurnRows {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* __restrict in, std::int64_t terms, Real* __restrict out,
                                std::int64_t width) {
    for (std::int64_t c = 0; c < terms; ++c) out[c * width] = in[c];
  }
};

// A float matrix, contiguous along either dimension.
template <class Real>
class FloatSource final : public PanelSource<Real> {
 public:
  explicit FloatSource(const ConstTensor& t) : t_(t) {}

  void fetch(const PanelRange& range, Real* out, std::int64_t width) const override {
    if (t_.strides[1] != 1) {
      for (std::int64_t c = 0; c < range.terms; ++c) {
        widen(t_.dtype, t_.data, (range.term + c) * t_.strides[1] + range.row, range.rows, out + c * width);
      }
      return;
    }
    Real buffer[kFetchTerms];
    for (std::int64_t c = 0; c < range.terms; c += kFetchTerms) {
      const std::int64_t terms = std::min(kFetchTerms, range.terms - c);
      for (std::int64_t r = 0; r < range.rows; ++r) {
        const std::int64_t at = (range.row + r) * t_.strides[0] + range.term + c;
        multiversion<TurnRows>(widened(t_.dtype, t_.data, at, terms, buffer), terms, out + c * width + r, width);
      }
    }
  }

 private:
  ConstTensor t_;
};

template <class Real>
struct TileRun {
  const Real* left;          // panels of (depth, kPanelRows)
  std::int64_t left_stride;  // between panels
  const Real* right;         // (depth, two vectors)
  std::int64_t panels, depth;
  Real* sums;  // (panels * kPanelRows, two vectors)
  bool first;  // the sums begin here
};

struct MultiplyPanels {
  template <Isa isa, class Real>
  OCTILE_INLINE static void run(TileRun<Real> p) {
    typedef Real Vector __attribute__((vector_size(vector_bytes(isa))));
    constexpr std::int64_t kLanes = vector_bytes(isa) / static_cast<std::int64_t>(sizeof(Real));
    for (std::int64_t panel = 0; panel < p.panels; ++panel) {
      const Real* left = p.left + panel * p.left_stride;
      const Real* right = p.right;
      Vector sum[kPanelRows][2] = {};
      for (std::int64_t c = 0; c < p.depth; ++c) {
        const Vector b0 = *reinterpret_cast<const Vector*>(right);
        const Vector b1 = *reinterpret_cast<const Vector*>(right + kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kPanelRows; ++i) {
          sum[i][0] += left[i] * b0;
          sum[i][1] += left[i] * b1;
        }
        left += kPanelRows;
        right += 2 * kLanes;
      }
      auto* sums = reinterpret_cast<Vector*>(p.sums) + panel * kPanelRows * 2;
#pragma GCC unroll 8
      for (int i = 0; i < kPanelRows; ++i) {
        sums[2 * i] = p.first ? sum[i][0] : sums[2 * i] + sum[i][0];
        sums[2 * i + 1] = p.first ? sum[i][1] : sums[2 * i + 1] + sum[i][1];
      }
    }
  }
};

struct AddBias {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* bias, std::int64_t n, Real* sums) {
    for (std::int64_t i = 0; i < n; ++i) sums[i] += bias[i];
  }
};

// y is written along its contiguous dimension: if that is i, then a and b exchange their parts.
template <class Real>
class PanelProduct {
 public:
  PanelProduct(const PanelSource<Real>& a, const PanelSource<Real>& b, const GemmOperands& o)
      : left_(a), right_(b), y_(o.y), rows_(o.y.rows()), cols_(o.y.cols()), k_(o.a.cols()), bias_(o.bias) {}

  static PanelProduct oriented(const PanelSource<Real>& a, const PanelSource<Real>& b, Major y_major,
                               const GemmOperands& o) {
    // By the problem, as the workspace is: the strides of a single column would do either way.
    if (y_major == Major::contraction) return {a, b, o};
    PanelProduct exchanged(b, a, o);
    std::swap(exchanged.y_.strides[0], exchanged.y_.strides[1]);
    std::swap(exchanged.rows_, exchanged.cols_);
    exchanged.bias_per_row_ = true;
    return exchanged;
  }

  static std::size_t workspace(const GemmProblem& p) {
    const std::int64_t rows = round_up(p.y_major == Major::outer ? p.n : p.m, kPanelRows);
    return static_cast<std::size_t>(std::min(rows, kRowsAtOnce) * p.k) * sizeof(Real);
  }

  void run(int threads_wanted, void* workspace) const {
    auto* packed = static_cast<Real*>(workspace);
    const double products = static_cast<double>(rows_) * static_cast<double>(cols_) * static_cast<double>(k_);
    const int threads = useful_threads(threads_wanted, products / 16);
    const std::int64_t width = 2 * vector_bytes(isa()) / static_cast<std::int64_t>(sizeof(Real));
    const std::int64_t col_parts = ceil_div(cols_, width);
    for (std::int64_t first = 0; first < rows_; first += kRowsAtOnce) {
      const std::int64_t rows = std::min(kRowsAtOnce, rows_ - first);
      parallel_for(threads, ceil_div(rows, kFetchRows), [&](std::int64_t part) {
        const std::int64_t r = part * kFetchRows;
        pack_left(first + r, std::min(kFetchRows, rows - r), packed + r * k_);
      });
      parallel_for(threads, ceil_div(rows, kPartRows) * col_parts, [&](std::int64_t part) {
        const std::int64_t r = part / col_parts * kPartRows;
        const std::int64_t c = part % col_parts * width;
        multiply({first + r, std::min(kPartRows, rows - r)}, {c, std::min(width, cols_ - c)}, packed + r * k_, width);
      });
    }
  }

 private:
  struct Range {
    std::int64_t first, count;
  };

  void pack_left(std::int64_t row, std::int64_t rows, Real* packed) const {
    const std::int64_t tiles = ceil_div(rows, kPanelRows);
    Real fetched[kFetchTerms * kFetchRows];  // (kFetchTerms, kFetchRows)
    for (std::int64_t term = 0; term < k_; term += kFetchTerms) {
      const std::int64_t terms = std::min(kFetchTerms, k_ - term);
      if (rows < kFetchRows) std::fill_n(fetched, terms * kFetchRows, Real{0});
      left_.fetch({row, rows, term, terms}, fetched, kFetchRows);
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        Real* out = packed + (tile * k_ + term) * kPanelRows;
        for (std::int64_t c = 0; c < terms; ++c) {
          std::memcpy(out + c * kPanelRows, fetched + c * kFetchRows + tile * kPanelRows, kPanelRows * sizeof(Real));
        }
      }
    }
  }

  void multiply(Range rows, Range cols, const Real* packed, std::int64_t width) const {
    constexpr std::int64_t kMaxWidth = 128 / static_cast<std::int64_t>(sizeof(Real));
    alignas(64) Real panel[kDepth * kMaxWidth];    // (kDepth, width)
    alignas(64) Real sums[kPartRows * kMaxWidth];  // (kPartRows, width)
    std::fill_n(sums, rows.count * width, Real{0});
    if (cols.count < width) std::fill_n(panel, std::min(kDepth, k_) * width, Real{0});
    for (std::int64_t term = 0; term < k_; term += kDepth) {
      const std::int64_t depth = std::min(kDepth, k_ - term);
      right_.fetch({cols.first, cols.count, term, depth}, panel, width);
      multiversion<MultiplyPanels>(TileRun<Real>{packed + term * kPanelRows, k_ * kPanelRows, panel,
                                                 ceil_div(rows.count, kPanelRows), depth, sums, term == 0});
    }
    finish(rows, cols, sums, width);
  }

  void finish(Range rows, Range cols, Real* sums, std::int64_t width) const {
    Real bias[64];
    const bool with_bias = bias_.present();
    for (std::int64_t j = 0; with_bias && !bias_per_row_ && j < cols.count; ++j) {
      bias[j] = load<Real>(bias_, cols.first + j);
    }
    for (std::int64_t i = 0; i < rows.count; ++i) {
      Real* row = sums + i * width;
      if (with_bias) {
        if (bias_per_row_) std::fill_n(bias, cols.count, load<Real>(bias_, rows.first + i));
        multiversion<AddBias>(static_cast<const Real*>(bias), cols.count, row);
      }
      narrow<Real>(y_.dtype, y_.data, (rows.first + i) * y_.strides[0] + cols.first, cols.count, row);
    }
  }

  const PanelSource<Real>& left_;
  const PanelSource<Real>& right_;
  Tensor y_;
  std::int64_t rows_, cols_, k_;
  ConstTensor bias_;
  bool bias_per_row_ = false;
};

}  // namespace octile::cpu
