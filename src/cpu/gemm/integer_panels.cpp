#include "cpu/gemm/integer_panels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/access.h"
#include "cpu/gemm/pack_panels.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kMostRows = 128;    // of a part; half of them where its span is more than half of kMostSpan
constexpr std::int64_t kMostSpan = 8;      // groups of kMostPanels panels in a part
constexpr std::int64_t kMarkedRows = 16;   // rows from which it pays to look at a panel first
constexpr std::int64_t kMostDepth = 1024;  // of any kernel
constexpr std::int64_t kGroupChannels = kMostPanels * kPanelChannels;
constexpr std::int64_t kMostChannels = kMostSpan * kGroupChannels;
static_assert(kMostDepth <= kMostMarks * kMarkedDepth);
constexpr std::int64_t kPackedHere = 512;   // terms that a part packs for itself
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
  bool accumulate = false;
  Tensor y;  // (rows, cols), contiguous along a row
  std::int64_t rows = 0, cols = 0, k = 0;
};

// Rows of left that a plan may be asked for, and channels.
struct Extent {
  std::int64_t rows, cols;

  explicit Extent(const GemmProblem& p)
      : rows(p.y_major == Major::outer ? p.n : p.m), cols(p.y_major == Major::outer ? p.m : p.n) {}
};

Product oriented(const GemmProblem& problem, const GemmOperands& o) {
  Product p{o.a, o.b, o.a_scale, o.b_scale, o.bias, false, problem.accumulate, o.y, o.y.rows(), o.y.cols(), o.a.cols()};
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

// Bytes of the sums of a part, whose rows lie an odd number of lines apart, so that they do not share cache sets.
constexpr std::int64_t sums_stride(std::int64_t channels) {
  return round_up(channels, 2 * kPanelChannels) + kPanelChannels;
}
std::int64_t bytes_of_sums(const PanelKernel& kernel, std::int64_t rows) {
  const auto most = [&](std::int64_t block, std::int64_t channels) {
    return round_up(std::min(rows, block), kernel.rows) * sums_stride(channels);
  };
  return std::max(most(kMostRows, kMostChannels / 2), most(kMostRows / 2, kMostChannels)) *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

// Workspace: rows of left, the second halves of those that are halved, a mark for each that is, right in panels, then
// for each thread the sums of a part and the panels that it packs for itself: too much for the stack of a thread.
struct Memory {
  std::int64_t stride;
  std::uint8_t* left;
  std::uint8_t* rest;
  std::uint8_t* halved;
  std::uint8_t* panels;
  std::uint8_t* threads;
  std::int64_t sums_bytes;
  std::int64_t thread_bytes;
  std::int64_t size;
  bool packs;
  bool packs_in_parts;

  // Laid out for the most rows of left; `run_rows` are there in this run. Few of them do not pay for panels of all
  // right, which is then packed part by part.
  Memory(const PanelKernel& kernel, const GemmProblem& p, std::int64_t run_rows, void* workspace)
      : stride(left_stride(p.k)) {
    const Extent extent(p);
    const std::int64_t rows = round_up(extent.rows, kTallestTile);
    const bool symmetric = kernel.left == LeftForm::symmetric;
    const bool may_pack = !p.b_packed && extent.rows > kMostRows;
    packs = may_pack && run_rows > kMostRows;
    packs_in_parts = !p.b_packed && !packs;
    Pieces pieces(workspace);
    left = pieces.take(rows * stride);
    rest = pieces.take(symmetric ? rows * stride : 0);
    halved = pieces.take(symmetric ? round_up(rows, kLine) : 0);
    panels = pieces.take(may_pack ? round_up(extent.cols, kPanelChannels) * round_up(p.k, kS8Depth) : 0);
    sums_bytes = round_up(bytes_of_sums(kernel, extent.rows), kLine);
    thread_bytes = sums_bytes + (p.b_packed ? 0 : kPackedHere * kGroupChannels);
    threads = pieces.take(useful_threads(p.threads, product_units(extent.rows, extent.cols, p.k)) * thread_bytes);
    size = pieces.size();
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

// At most kTiledRows rows, that begin a block.
void tile_left(const Product& p, const Memory& memory, const Range& range) {
  const auto [first, rows] = range;
  std::uint8_t* block = memory.left + first * memory.stride;
  for (std::int64_t c = 0; c < p.k; c += kS8Depth) {
    std::uint8_t* tile = block + c * kTiledRows;
    const std::int64_t terms = std::min(kS8Depth, p.k - c);
    if (terms < kS8Depth) std::memset(tile, 0, kTiledRows * kS8Depth);
    const std::uint8_t* from = bytes(p.left) + first * p.left.strides[0] + c * p.left.strides[1];
    if (p.left.strides[1] != 1) {
      transpose({from, p.left.strides[1]}, {tile, kS8Depth}, terms, rows);
      continue;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(tile + r * kS8Depth, from + r * p.left.strides[0], static_cast<std::size_t>(terms));
    }
  }
}

void convert_left(const PanelKernel& kernel, const Product& p, const Memory& memory, Range range) {
  const auto [first, rows] = range;
  if (kernel.left == LeftForm::tiled) return tile_left(p, memory, range);
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
  const std::int32_t* sums;        // (n)
  const std::int32_t* correction;  // (n), subtracted from the sums
  Real left_scale;
  const Real* right_scale;  // (n)
  const Real* bias;         // (n), or one
  std::int64_t n;
  Real* y;
};

enum class BiasOf : std::uint8_t { none, column, row };

template <BiasOf bias_of>
struct FinishRow {
  template <Isa, class Real>
  OCTILE_INLINE static void run(FinishRun<Real> p) {
    const auto* __restrict sums = reinterpret_cast<const std::uint32_t*>(p.sums);
    const auto* __restrict correction = reinterpret_cast<const std::uint32_t*>(p.correction);
    const Real* __restrict right_scale = p.right_scale;
    const Real* __restrict bias = p.bias;
    Real* __restrict y = p.y;
    const Real bias_of_row = bias_of == BiasOf::row ? *bias : Real{0};
    for (std::int64_t j = 0; j < p.n; ++j) {
      const Real scale = p.left_scale * right_scale[j];
      const Real sum = static_cast<Real>(static_cast<std::int32_t>(sums[j] - correction[j]));
      if constexpr (bias_of == BiasOf::none) {
        y[j] = sum * scale;
      } else {
        y[j] = std::fma(sum, scale, bias_of == BiasOf::row ? bias_of_row : bias[j]);
      }
    }
  }
};

template <class Real>
void finish(const FinishRun<Real>& run, BiasOf bias) {
  switch (bias) {
    case BiasOf::none:
      return multiversion<FinishRow<BiasOf::none>>(run);
    case BiasOf::column:
      return multiversion<FinishRow<BiasOf::column>>(run);
    case BiasOf::row:
      return multiversion<FinishRow<BiasOf::row>>(run);
  }
}

// ---- Parts of the product ----

// Parts in the order in which a thread goes through them. Rows of left are taken in bands that fit half a second-level
// cache, and a band meets all panels before the next begins; within a band, all its rows meet a span of groups.
//
// A span is wide because of y: rows of 2 KiB are long enough for the prefetchers, rows of 256 bytes are not, and one
// thread then writes 7 GB/s (Sapphire Rapids). It is narrow where there would be too few parts for the threads.
class Order {
 public:
  Order(const PanelKernel& kernel, const Product& p, const Memory& memory, int threads) : rows_(p.rows), cols_(p.cols) {
    if (!memory.packs_in_parts && cols_ * p.k <= second_level_cache() / 2 && rows_ >= threads * kTiledRows) {
      by_rows(kernel, threads);
      return;
    }
    constexpr std::int64_t kPartsOfAThread = 3;
    // Where each part packs its own panels, one part has all rows.
    for (std::int64_t span = memory.packs_in_parts ? kMostSpan / 2 : kMostSpan; span > 0; span /= 2) {
      channels_ = span * kGroupChannels;
      row_block_ = (span > kMostSpan / 2 ? kMostRows / 2 : kMostRows) / kernel.rows * kernel.rows;
      band_ = row_block_ * std::max<std::int64_t>(1, second_level_cache() / 2 / (row_block_ * memory.stride));
      spans_ = ceil_div(cols_, channels_);
      const bool stays = channels_ * p.k <= second_level_cache() / 4;  // for all rows of the band
      if (stays && (threads == 1 || parts() >= kPartsOfAThread * threads)) break;
    }
  }

  std::int64_t parts() const {
    const std::int64_t whole = rows_ / band_;
    return spans_ * (whole * (band_ / row_block_) + ceil_div(rows_ - whole * band_, row_block_));
  }
  Range rows(std::int64_t part) const {
    const std::int64_t row = band_of(part) * band_ + in_band(part) % blocks_in(band_of(part)) * row_block_;
    return {row, std::min(row_block_, rows_ - row)};
  }
  Range cols(std::int64_t part) const {
    const std::int64_t col = in_band(part) / blocks_in(band_of(part)) * channels_;
    return {col, std::min(channels_, cols_ - col)};
  }

 private:
  // A right that fits the second-level cache of every thread stays there from run to run, and a thread takes the rows
  // that it has quantized itself.
  void by_rows(const PanelKernel& kernel, int threads) {
    channels_ = kMostChannels;
    spans_ = ceil_div(cols_, channels_);
    const std::int64_t share = round_up(ceil_div(rows_, threads), std::max<std::int64_t>(kernel.row_step, 4));
    row_block_ = std::min(share, kMostRows / 2 / kernel.rows * kernel.rows);
    band_ = row_block_;
  }

  std::int64_t band_of(std::int64_t part) const { return part / (spans_ * (band_ / row_block_)); }
  std::int64_t in_band(std::int64_t part) const { return part % (spans_ * (band_ / row_block_)); }
  std::int64_t blocks_in(std::int64_t band) const {
    return ceil_div(std::min(band_, rows_ - band * band_), row_block_);
  }

  std::int64_t rows_, cols_, row_block_ = 0, band_ = 0, channels_ = 0, spans_ = 0;
};

// A part is computed group by group, and then finished row by row.

template <class Real>
class Multiplication {
 public:
  Multiplication(const PanelKernel& kernel, const GemmProblem& problem, const Product& p, const Launch& launch)
      : kernel_(kernel), problem_(problem), p_(p), memory_(kernel, problem, p.rows, launch.workspace.data) {
    if (problem.b_packed) {
      layout_ = packed_layout(problem);
      panels_ = bytes(p.right);
      panel_bytes_ = layout_.panel_bytes;
    } else if (memory_.packs) {
      panels_ = memory_.panels;
      panel_bytes_ = round_up(p.k, kS8Depth) * kPanelChannels;
    }
  }

  void run() const {
    const int threads = useful_threads(problem_.threads, product_units(p_.rows, p_.cols, p_.k));
    const std::int64_t at_once = kernel_.left == LeftForm::tiled ? kTiledRows
                                 : p_.left.strides[1] == 1       ? kConvertedRows
                                                                 : kTurnedRows;
    parallel_for(threads, ceil_div(p_.rows, at_once), [&](std::int64_t part) {
      convert_left(kernel_, p_, memory_, {part * at_once, std::min(at_once, p_.rows - part * at_once)});
    });
    if (memory_.packs) {
      parallel_for(threads, ceil_div(p_.cols, kGroupChannels), [&](std::int64_t part) {
        const std::int64_t first = part * kGroupChannels;
        pack_panels(p_.right, {first, std::min(kGroupChannels, p_.cols - first)}, {0, p_.k},
                    {memory_.panels + part * kMostPanels * panel_bytes_, panel_bytes_});
      });
    }
    const Order order(kernel_, p_, memory_, threads);
    parallel_for(threads, order.parts(), [&](std::int64_t part, int thread) {
      if (kernel_.begin) kernel_.begin();
      multiply(order.rows(part), order.cols(part), memory_.threads + thread * memory_.thread_bytes);
      if (kernel_.end) kernel_.end();
    });
  }

 private:
  struct Sums {
    std::int32_t* data;
    std::int64_t stride;
  };

  // What a part keeps on its stack, and its thread's memory.
  struct Scratch {
    std::int32_t* sums;
    std::uint8_t* packed;
    alignas(64) std::int32_t correction[kMostChannels] = {};
    Real left_scale[kMostRows];
    Real right_scale[kMostChannels];
    Real bias[std::max(kMostRows, kMostChannels)];
    BiasOf bias_of = BiasOf::none;
    std::int64_t sums_stride = 0;
  };

  void multiply(const Range& rows, const Range& cols, std::uint8_t* memory) const {
    Scratch s;
    s.sums = reinterpret_cast<std::int32_t*>(memory);
    s.packed = memory + memory_.sums_bytes;
    load_scales(rows, cols, s);
    s.sums_stride = sums_stride(cols.count);
    for (std::int64_t j = 0; j < cols.count; j += kGroupChannels) {
      multiply_group(rows, {cols.first + j, std::min(kGroupChannels, cols.count - j)}, s, j);
    }
    finish_part(s, rows, cols);
  }

  // Channels from `at` of the part on.
  void multiply_group(const Range& rows, const Range& cols, Scratch& s, std::int64_t at) const {
    const bool packs_here = memory_.packs_in_parts;
    const Sums sums{s.sums + at, s.sums_stride};
    std::int32_t* const correction = s.correction + at;
    const std::int64_t depth = round_up(p_.k, kS8Depth);
    // Blocks of equal depth: 768 terms are 384 and 384, not 512 and 256.
    const std::int64_t most = packs_here ? std::min(kPackedHere, kernel_.depth) : kernel_.depth;
    const std::int64_t block = round_up(ceil_div(depth, ceil_div(depth, most)), kS8Depth);
    // Tiles of equal height: 16 rows are 8 and 8, not 12 and 4.
    const std::int64_t tiles = ceil_div(rows.count, kernel_.rows);
    const std::int64_t tile_rows = round_up(ceil_div(rows.count, tiles), kernel_.row_step);
    TileRun run{};
    run.panels = static_cast<int>(ceil_div(cols.count, kPanelChannels));
    run.a_stride = memory_.stride;
    run.sums_stride = sums.stride;
    for (std::int64_t term = 0; term < depth; term += block) {
      run.depth = std::min(block, depth - term);
      run.accumulate = term > 0;
      if (packs_here) {
        run.b = s.packed;
        run.b_stride = run.depth * kPanelChannels;
        pack_panels(p_.right, cols, {term, std::min(p_.k - term, block)}, {s.packed, run.b_stride});
      } else {
        run.b = panels_ + cols.first / kPanelChannels * panel_bytes_ + term * kPanelChannels;
        run.b_stride = panel_bytes_;
      }
      if (kernel_.left == LeftForm::offset && !problem_.b_packed) add_correction(run, correction);
      std::uint8_t marks[kMostPanels * kMostMarks];
      if (kernel_.mark && rows.count >= kMarkedRows) {
        run.marks = marks;
        for (int j = 0; j < run.panels; ++j) kernel_.mark(run.b + j * run.b_stride, run.depth, marks + j * kMostMarks);
      }
      for (std::int64_t i = 0; i < rows.count; i += tile_rows) {
        run.rows = static_cast<int>(std::min(tile_rows, rows.count - i));
        run.sums = sums.data + i * sums.stride;
        tile(run, rows.first + i, term);
      }
    }
  }

  void tile(TileRun run, std::int64_t row, std::int64_t term) const {
    run.a = memory_.left + row * memory_.stride + (kernel_.left == LeftForm::tiled ? kTiledRows : 1) * term;
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
      std::array<std::uint8_t, kMostDepth> zeros{};
      zeros.fill(0x80);
      return zeros;
    }();
    run.a = kZeros.data();
    run.rows = 1;
    run.sums = correction;
    kernel_.tile(run);
  }

  void load_scales(const Range& row_range, const Range& col_range, Scratch& s) const {
    const auto [first_row, rows] = row_range;
    const auto [first_col, cols] = col_range;
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

  void finish_part(const Scratch& s, const Range& rows, const Range& cols) const {
    const bool direct = p_.y.dtype == DTypeOf<Real>::value && !p_.accumulate;
    Real values[kMostChannels];
    FinishRun<Real> run{s.sums, s.correction, Real{}, s.right_scale, s.bias, cols.count, values};
    for (std::int64_t i = 0; i < rows.count; ++i) {
      const std::int64_t at = (rows.first + i) * p_.y.strides[0] + cols.first;
      if (direct) run.y = static_cast<Real*>(p_.y.data) + at;
      run.left_scale = s.left_scale[i];
      finish(run, s.bias_of);
      if (p_.accumulate) {
        add<Real>(p_.y.data, at, cols.count, values);
      } else if (!direct) {
        narrow<Real>(p_.y.dtype, p_.y.data, at, cols.count, values);
      }
      run.sums += s.sums_stride;
      if (s.bias_of == BiasOf::row) ++run.bias;
    }
  }

  const PanelKernel& kernel_;
  const GemmProblem& problem_;
  const Product& p_;
  Memory memory_;
  PackedLayout layout_;
  const std::uint8_t* panels_ = nullptr;  // unless each part packs its own
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
  return static_cast<std::size_t>(Memory(kernel, problem, Extent(problem).rows, nullptr).size);
}

}  // namespace octile::cpu
