#include "cpu/w8a8_panels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "access.h"
#include "cpu/multiversion.h"
#include "cpu/pack_panels.h"
#include "cpu/rows.h"
#include "packed_weight.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kRowBlock = 128;     // rows of a part: (kRowBlock, kGroupChannels) sums lie on the stack
constexpr std::int64_t kDepthBlock = 1024;  // terms: 64 KiB of b stay in the second-level cache for all rows
constexpr std::int64_t kPackedHere = 512;   // terms that a part packs for itself, on the stack
constexpr std::int64_t kConvertedRows = 8;  // at a time, where rows are contiguous
constexpr std::int64_t kTurnedRows = 32;    // elsewhere
constexpr std::int64_t kTallestTile = 32;   // rows beyond the last that a tile may read
constexpr std::int64_t kLine = 64;

// Bytes from one converted row of a to the next. An odd number of lines: rows a power of two apart share their places
// in the first-level cache.
std::int64_t left_stride(std::int64_t k) { return (ceil_div(k, kS8Depth) | 1) * kLine; }

// y is written along its contiguous dimension: if that is i, then a and b exchange their parts.
struct Product {
  ConstTensor left, right;  // (rows, k), (cols, k); a packed right is bytes
  ConstTensor left_scale, right_scale;
  ConstTensor bias;
  bool bias_per_row = false;
  Tensor y;  // (rows, cols), contiguous along a row
  std::int64_t rows = 0, cols = 0, k = 0;
};

// Rows of left that a plan may be asked for, and channels.
struct Extent {
  std::int64_t rows, cols;
  bool exchanged;

  explicit Extent(const GemmProblem& p)
      : rows(p.y_major == Major::outer ? p.n : p.m),
        cols(p.y_major == Major::outer ? p.m : p.n),
        exchanged(p.y_major == Major::outer) {}
};

Product oriented(const GemmProblem& problem, const GemmOperands& o) {
  Product p{o.a, o.b, o.a_scale, o.b_scale, o.bias, false, o.y, o.y.rows(), o.y.cols(), o.a.cols()};
  // By the problem, as the workspace is: the strides of a single column would do either way.
  if (problem.y_major == Major::contraction) return p;
  std::swap(p.left, p.right);
  std::swap(p.left_scale, p.right_scale);
  std::swap(p.rows, p.cols);
  std::swap(p.y.shape[0], p.y.shape[1]);
  std::swap(p.y.strides[0], p.y.strides[1]);
  p.bias_per_row = true;
  return p;
}

// ---- Left: copied once, as the tile wants it ----

struct FlipSigns {
  template <Isa>
  OCTILE_INLINE static void run(std::uint8_t* __restrict row, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) row[i] ^= 0x80;
  }
};

struct HoldsLowest {
  template <Isa>
  OCTILE_INLINE static void run(const std::uint8_t* __restrict row, std::int64_t n, std::uint8_t* found) {
    std::uint8_t any = 0;
    for (std::int64_t i = 0; i < n; ++i) any |= row[i] == 0x80 ? 1 : 0;
    *found = any;
  }
};

// row becomes half of itself, rounded down, and `rest` the other half.
struct Halve {
  template <Isa>
  OCTILE_INLINE static void run(std::uint8_t* __restrict row, std::int64_t n, std::uint8_t* __restrict rest) {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto whole = static_cast<std::int8_t>(row[i]);
      const auto half = static_cast<std::int8_t>(whole >> 1);
      row[i] = static_cast<std::uint8_t>(half);
      rest[i] = static_cast<std::uint8_t>(whole - half);
    }
  }
};

// Workspace: rows of left, the second halves of those that are halved, a mark for each that is, then right in panels.
struct Memory {
  std::int64_t stride;
  std::uint8_t* left;
  std::uint8_t* rest;
  std::uint8_t* halved;
  std::uint8_t* panels;
  std::int64_t size;

  Memory(const PanelKernel& kernel, const GemmProblem& p, void* workspace) : stride(left_stride(p.k)) {
    const Extent extent(p);
    const std::int64_t rows = round_up(extent.rows, kTallestTile);
    const bool symmetric = kernel.left == LeftForm::symmetric;
    left = static_cast<std::uint8_t*>(workspace);
    rest = left + rows * stride;
    halved = rest + (symmetric ? rows * stride : 0);
    panels = halved + (symmetric ? round_up(rows, kLine) : 0);
    const bool packs = !p.b_packed && extent.rows > kRowBlock;
    size = panels - left + (packs ? round_up(extent.cols, kPanelChannels) * round_up(p.k, kS8Depth) : 0);
  }
};

const std::uint8_t* bytes(const ConstTensor& t) { return static_cast<const std::uint8_t*>(t.data); }

void copy_rows(const ConstTensor& t, std::int64_t k, std::int64_t first, std::int64_t rows, const Bytes& out) {
  if (t.strides[1] == 1) {
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(out.data + r * out.stride, bytes(t) + (first + r) * t.strides[0], static_cast<std::size_t>(k));
    }
  } else {
    transpose({bytes(t) + first, t.strides[1]}, out, k, rows);
  }
}

void convert_left(const PanelKernel& kernel, const Product& p, const Memory& memory, Range range) {
  const auto [first, rows] = range;
  const std::int64_t depth = round_up(p.k, kS8Depth);
  copy_rows(p.left, p.k, first, rows, {memory.left + first * memory.stride, memory.stride});
  for (std::int64_t r = first; r < first + rows; ++r) {
    std::uint8_t* row = memory.left + r * memory.stride;
    std::memset(row + p.k, 0, static_cast<std::size_t>(depth - p.k));
    if (kernel.left == LeftForm::offset) multiversion<FlipSigns>(row, p.k);
    if (kernel.left == LeftForm::symmetric) {
      multiversion<HoldsLowest>(static_cast<const std::uint8_t*>(row), p.k, memory.halved + r);
      std::uint8_t* rest = memory.rest + r * memory.stride;
      if (memory.halved[r]) {
        multiversion<Halve>(row, depth, rest);
      } else {
        std::memset(rest, 0, static_cast<std::size_t>(depth));
      }
    }
  }
}

// ---- From sums to y ----

template <class Real>
struct FinishRun {
  const std::int32_t* sums;        // (rows, kGroupChannels)
  const std::int32_t* correction;  // (n), subtracted from the sums
  const Real* left_scale;          // (rows)
  const Real* right_scale;         // (n)
  const Real* bias;                // (n), or (rows)
  std::int64_t rows, n;
  Real* y;
  std::int64_t y_stride;
};

enum class BiasOf : std::uint8_t { none, column, row };

template <BiasOf bias_of>
struct FinishTile {
  template <Isa, class Real>
  OCTILE_INLINE static void run(FinishRun<Real> p) {
    for (std::int64_t i = 0; i < p.rows; ++i) {
      const auto* __restrict sums = reinterpret_cast<const std::uint32_t*>(p.sums + i * kGroupChannels);
      const auto* __restrict correction = reinterpret_cast<const std::uint32_t*>(p.correction);
      const Real* __restrict right_scale = p.right_scale;
      const Real* __restrict bias = p.bias;
      const Real left_scale = p.left_scale[i];
      Real* __restrict y = p.y + i * p.y_stride;
      const Real bias_of_row = bias_of == BiasOf::row ? bias[i] : Real{0};
      for (std::int64_t j = 0; j < p.n; ++j) {
        const Real scale = left_scale * right_scale[j];
        const Real sum = static_cast<Real>(static_cast<std::int32_t>(sums[j] - correction[j]));
        if constexpr (bias_of == BiasOf::none) {
          y[j] = sum * scale;
        } else {
          y[j] = std::fma(sum, scale, bias_of == BiasOf::row ? bias_of_row : bias[j]);
        }
      }
    }
  }
};

template <class Real>
void finish(const FinishRun<Real>& run, BiasOf bias) {
  switch (bias) {
    case BiasOf::none:
      return multiversion<FinishTile<BiasOf::none>>(run);
    case BiasOf::column:
      return multiversion<FinishTile<BiasOf::column>>(run);
    case BiasOf::row:
      return multiversion<FinishTile<BiasOf::row>>(run);
  }
}

// ---- Parts of the product: up to kRowBlock rows times up to kGroupPanels panels ----

template <class Real>
class Multiplication {
 public:
  Multiplication(const PanelKernel& kernel, const GemmProblem& problem, const Product& p, const Launch& launch)
      : kernel_(kernel), problem_(problem), p_(p), memory_(kernel, problem, launch.workspace.data) {
    if (problem.b_packed) {
      layout_ = packed_layout(problem);
      panels_ = bytes(p.right);
      panel_bytes_ = layout_.panel_bytes;
    } else if (Extent(problem).rows > kRowBlock) {
      panels_ = memory_.panels;
      panel_bytes_ = round_up(p.k, kS8Depth) * kPanelChannels;
    }
  }

  void run() const {
    const double products = static_cast<double>(p_.rows) * static_cast<double>(p_.cols) * static_cast<double>(p_.k);
    const int threads = useful_threads(problem_.threads, products / 256);
    const std::int64_t at_once = p_.left.strides[1] == 1 ? kConvertedRows : kTurnedRows;
    parallel_for(threads, ceil_div(p_.rows, at_once), [&](std::int64_t part) {
      convert_left(kernel_, p_, memory_, {part * at_once, std::min(at_once, p_.rows - part * at_once)});
    });
    if (panels_ == memory_.panels) {
      parallel_for(threads, ceil_div(p_.cols, kGroupChannels), [&](std::int64_t part) {
        const std::int64_t first = part * kGroupChannels;
        pack_panels(p_.right, {first, std::min(kGroupChannels, p_.cols - first)}, {0, p_.k},
                    {memory_.panels + part * kGroupPanels * panel_bytes_, panel_bytes_});
      });
    }
    const std::int64_t row_block = kRowBlock / kernel_.rows * kernel_.rows;
    const std::int64_t row_blocks = ceil_div(p_.rows, row_block);
    parallel_for(threads, row_blocks * ceil_div(p_.cols, kGroupChannels), [&](std::int64_t part) {
      if (kernel_.begin) kernel_.begin();
      const std::int64_t row = part % row_blocks * row_block;
      multiply(row, std::min(row_block, p_.rows - row), part / row_blocks * kGroupChannels);
      if (kernel_.end) kernel_.end();
    });
  }

 private:
  // What a part keeps on its stack.
  struct Scratch {
    alignas(64) std::int32_t sums[kRowBlock * kGroupChannels];
    alignas(64) std::int32_t correction[kGroupChannels] = {};
    Real left_scale[kRowBlock];
    Real right_scale[kGroupChannels];
    Real bias[std::max(kRowBlock, kGroupChannels)];
    BiasOf bias_of = BiasOf::none;
  };

  void multiply(std::int64_t first_row, std::int64_t rows, std::int64_t first_col) const {
    Scratch s;
    const std::int64_t cols = std::min(kGroupChannels, p_.cols - first_col);
    load_scales(first_row, rows, first_col, cols, s);
    const bool packs_here = panels_ == nullptr;
    alignas(64) std::uint8_t packed[kPackedHere * kGroupChannels];
    const std::int64_t depth = round_up(p_.k, kS8Depth);
    const std::int64_t block = packs_here ? kPackedHere : kDepthBlock;
    // Tiles of equal height: 16 rows are 8 and 8, not 12 and 4.
    const std::int64_t tiles = ceil_div(rows, kernel_.rows);
    const std::int64_t tile_rows = round_up(ceil_div(rows, tiles), kernel_.row_step);
    TileRun run{};
    run.panels = static_cast<int>(ceil_div(cols, kPanelChannels));
    run.a_stride = memory_.stride;
    for (std::int64_t term = 0; term < depth; term += block) {
      run.depth = std::min(block, depth - term);
      run.accumulate = term > 0;
      if (packs_here) {
        run.b = packed;
        run.b_stride = run.depth * kPanelChannels;
        pack_panels(p_.right, {first_col, cols}, {term, std::min(p_.k - term, block)}, {packed, run.b_stride});
      } else {
        run.b = panels_ + first_col / kPanelChannels * panel_bytes_ + term * kPanelChannels;
        run.b_stride = panel_bytes_;
      }
      if (kernel_.left == LeftForm::offset && !problem_.b_packed) add_correction(run, s.correction);
      for (std::int64_t i = 0; i < rows; i += tile_rows) {
        run.rows = static_cast<int>(std::min(tile_rows, rows - i));
        run.sums = s.sums + i * kGroupChannels;
        tile(run, first_row + i, term);
        if (term + block >= depth) finish_tile(s, i, run.rows, first_row, first_col, cols);
      }
    }
  }

  void tile(TileRun run, std::int64_t row, std::int64_t term) const {
    run.a = memory_.left + row * memory_.stride + term;
    kernel_.tile(run);
    if (kernel_.left != LeftForm::symmetric) return;
    const std::uint8_t* halved = memory_.halved + row;
    if (std::find(halved, halved + run.rows, 1) == halved + run.rows) return;
    run.a = memory_.rest + row * memory_.stride + term;
    run.accumulate = true;
    kernel_.tile(run);
  }

  // The sums of a row of zeros.
  void add_correction(TileRun run, std::int32_t* correction) const {
    alignas(64) static constexpr auto kZeros = [] {
      std::array<std::uint8_t, kDepthBlock> zeros{};
      zeros.fill(0x80);
      return zeros;
    }();
    run.a = kZeros.data();
    run.rows = 1;
    run.sums = correction;
    kernel_.tile(run);
  }

  void load_scales(std::int64_t first_row, std::int64_t rows, std::int64_t first_col, std::int64_t cols,
                   Scratch& s) const {
    for (std::int64_t i = 0; i < rows; ++i) s.left_scale[i] = load<Real>(p_.left_scale, first_row + i);
    if (problem_.b_packed) {
      const std::uint8_t* scales = panels_ + layout_.scales_at;
      std::memcpy(s.right_scale, scales + first_col * static_cast<std::int64_t>(sizeof(Real)),
                  static_cast<std::size_t>(cols) * sizeof(Real));
      if (kernel_.left == LeftForm::offset) {
        const std::uint8_t* sums = panels_ + layout_.sums_at;
        std::memcpy(s.correction, sums + first_col * static_cast<std::int64_t>(sizeof(std::int32_t)),
                    static_cast<std::size_t>(cols) * sizeof(std::int32_t));
        for (std::int32_t& sum : s.correction) sum = static_cast<std::int32_t>(static_cast<std::uint32_t>(sum) * 128u);
      }
    } else {
      for (std::int64_t j = 0; j < cols; ++j) s.right_scale[j] = load<Real>(p_.right_scale, first_col + j);
    }
    if (!p_.bias.present()) return;
    s.bias_of = p_.bias_per_row ? BiasOf::row : BiasOf::column;
    const std::int64_t first = p_.bias_per_row ? first_row : first_col;
    for (std::int64_t i = 0; i < (p_.bias_per_row ? rows : cols); ++i) s.bias[i] = load<Real>(p_.bias, first + i);
  }

  void finish_tile(const Scratch& s, std::int64_t i, int rows, std::int64_t first_row, std::int64_t first_col,
                   std::int64_t cols) const {
    const std::int64_t at = (first_row + i) * p_.y.strides[0] + first_col;
    const Real* bias = s.bias + (s.bias_of == BiasOf::row ? i : 0);
    FinishRun<Real> run{
        s.sums + i * kGroupChannels, s.correction, s.left_scale + i, s.right_scale, bias, rows, cols, nullptr, 0};
    if (p_.y.dtype == DTypeOf<Real>::value) {
      run.y = static_cast<Real*>(p_.y.data) + at;
      run.y_stride = p_.y.strides[0];
      return finish(run, s.bias_of);
    }
    Real values[kTallestTile * kGroupChannels];
    run.y = values;
    run.y_stride = kGroupChannels;
    finish(run, s.bias_of);
    for (std::int64_t r = 0; r < rows; ++r) {
      narrow<Real>(p_.y.dtype, p_.y.data, at + r * p_.y.strides[0], cols, values + r * kGroupChannels);
    }
  }

  const PanelKernel& kernel_;
  const GemmProblem& problem_;
  const Product& p_;
  Memory memory_;
  PackedLayout layout_;
  const std::uint8_t* panels_ = nullptr;  // null: each part packs its own
  std::int64_t panel_bytes_ = 0;
};

}  // namespace

void multiply_panels(const PanelKernel& kernel, const GemmProblem& problem, const GemmOperands& operands,
                     const Launch& launch) {
  const Product product = oriented(problem, operands);
  problem.scale == DType::f64 ? Multiplication<double>(kernel, problem, product, launch).run()
                              : Multiplication<float>(kernel, problem, product, launch).run();
}

std::size_t panels_workspace(const PanelKernel& kernel, const GemmProblem& problem) {
  return static_cast<std::size_t>(Memory(kernel, problem, nullptr).size);
}

}  // namespace octile::cpu
