#include "cpu/gemm/integer_panels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/access.h"
#include "cpu/gemm/finish.h"
#include "cpu/gemm/pack_panels.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kMaxRows = 128;      // of a part; half of them where its span is more than half of kMaxSpan
constexpr std::int64_t kStreamRows = 512;   // of a part where rows stream past right
constexpr std::int64_t kMinOuterRows = 64;  // from which rows stream past what a part packs of an outer-major right
constexpr std::int64_t kMaxSpan = 8;        // column blocks in a part
constexpr std::int64_t kNarrowRows = 16;    // rows from which it pays to look for narrow sums first
constexpr std::int64_t kMaxDepth = 1024;    // of any kernel
constexpr std::int64_t kManyTerms = 2048;
constexpr std::int64_t kBlockChannels = kMaxPanels * kPanelChannels;
constexpr std::int64_t kMaxChannels = kMaxSpan * kBlockChannels;
static_assert(kMaxDepth <= kMaxNarrowBlocks * kNarrowDepth);
constexpr std::int64_t kPackedBytes = 512;                          // of a channel, that a part packs for itself
constexpr std::int64_t kMaxGroups = 2 * kPackedBytes / 32;          // of a channel, in kPackedBytes
constexpr std::int64_t kConvertedRows = 8;                          // at a time, where rows are contiguous
constexpr std::int64_t kTransposedRows = 32;                        // elsewhere
constexpr std::int64_t kMaxTileRows = 32;                           // rows beyond the last that a tile may read
constexpr std::int64_t kMaxBlocks = kMaxDepth / kMinGradientBlock;  // of a, in a block of terms
static_assert(kMaxGradientBlock <= kMaxDepth);
constexpr std::int64_t kLine = 64;

// ---- Left: copied once, in the form that the tile takes ----

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

struct SumGroup {
  template <Isa>
  OCTILE_INLINE static void run(const std::uint8_t* __restrict row, std::int64_t n, std::int32_t* sum) {
    std::int32_t total = 0;
    for (std::int64_t i = 0; i < n; ++i) total += static_cast<std::int8_t>(row[i]);
    *sum = total;
  }
};

// Of each 8 terms the even ones first: the nibbles of an unpacked s4 weight are in this order in a lane.
struct EvenTermsFirst {
  template <Isa>
  OCTILE_INLINE static void run(std::uint8_t* row, std::int64_t n) {
    typedef std::uint8_t Sixteen __attribute__((vector_size(16)));
    for (std::int64_t i = 0; i < n; i += 16) {
      Sixteen terms;
      std::memcpy(&terms, row + i, sizeof terms);
#if defined(__clang__)
      terms = __builtin_shufflevector(terms, terms, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
#else
      terms = __builtin_shuffle(terms, Sixteen{0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15});
#endif
      std::memcpy(row + i, &terms, sizeof terms);
    }
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
  const auto sums = [&](std::int64_t block, std::int64_t channels) {
    return round_up(std::min(rows, block), kernel.rows) * sums_stride(channels);
  };
  return std::max({sums(kMaxRows, kMaxChannels / 2), sums(kMaxRows / 2, kMaxChannels),
                   kernel.stream_rows > 0 ? sums(kStreamRows, kBlockChannels) : 0}) *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

// Whether rows of left stream past a block of right, and how many terms of it then stay in the L2 cache.
bool streams(const PanelKernel& kernel, const GemmProblem& p, std::int64_t rows) {
  if (kernel.stream_rows == 0 || rows <= kernel.rows) return false;
  if (kernel.a != AForm::tiled) return true;
  // The tiles of AMX finish few terms so fast that f32 y has to be written in long rows.
  return !p.grouped() && p.a_block == 0 && (p.k >= kManyTerms || bits(p.y) == 16);
}
std::int64_t stream_depth(const PanelKernel& kernel, std::int64_t depth_bytes) {
  const std::int64_t in_cache = second_level_cache() / 4 / (kMaxPanels * depth_bytes) / kS8Depth * kS8Depth;
  return std::clamp(in_cache, kernel.depth, kMaxNarrowBlocks * kNarrowDepth);
}

// Workspace: rows of left, the second halves of those that are halved, a flag for each that is, sums of left over each
// group, right in panels, then for each thread the sums of a part and the panels that it packs for itself: too much for
// the stack of a thread.
struct Memory {
  std::int64_t stride;
  std::int64_t channel_bytes;  // of right
  std::uint8_t* left;
  std::uint8_t* rest;
  std::uint8_t* halved;
  std::int32_t* left_sums;  // (rows, groups)
  std::uint8_t* panels;
  std::uint8_t* threads;
  std::int64_t sums_bytes;
  std::int64_t thread_bytes;
  std::int64_t size;
  bool packs;
  bool packs_in_parts;
  bool streams_parts;  // packs_in_parts: as much as stays in the L2 cache, past which rows stream
  bool dots;           // packs nothing: kernel.dot, or kernel.group_dot
  bool as_caller;      // packs, as a caller would

  // Laid out for the maximum of rows of left; `run_rows` are there in this run. Few of them do not pay for panels of
  // all right, which is then packed part by part. A right in groups is packed as a caller would pack it where a part
  // cannot hold a group, or where its nibbles or the tile's form of left ask for it.
  Memory(const PanelKernel& kernel, const GemmProblem& p, std::int64_t run_rows, void* workspace)
      : stride(row_stride(p.k)), channel_bytes(p.b.type == DType::s4 ? p.k / 2 : p.k) {
    const GemmExtent extent(p);
    const std::int64_t rows = round_up(extent.rows, kMaxTileRows);
    const bool symmetric = kernel.a == AForm::symmetric;
    const bool s4 = p.b.type == DType::s4;
    const bool only_as_caller =
        p.grouped() && (p.b.group > kPackedBytes || kernel.a == AForm::tiled || (s4 && p.b_major == Major::outer));
    // A right operand that is contiguous along its channels takes so long to pack that only one part should do it.
    const bool outer = (p.y_major == Major::outer ? p.a_major : p.b_major) == Major::outer;
    const bool may_stream = kernel.stream_rows > 0 && kernel.a != AForm::tiled && !p.grouped() && p.a_block == 0;
    const bool dot_groups =
        kernel.group_dot && s4 && !p.b.zero_point && (p.b.group == 32 || p.b.group == 64 || p.b.group % 128 == 0);
    dots = !p.b_packed && !outer && ((may_stream && run_rows <= kernel.dot_rows) || (dot_groups && run_rows <= 1));
    const auto packs_for = [&](std::int64_t rows) {
      if (p.b_packed || only_as_caller) return !p.b_packed;
      return rows > (!may_stream ? kMaxRows : outer ? kStreamRows : std::numeric_limits<std::int64_t>::max());
    };
    const bool may_pack = packs_for(extent.rows);
    packs = packs_for(run_rows) && !dots;
    as_caller = packs && p.grouped();
    packs_in_parts = !p.b_packed && !packs && !dots;
    const std::int64_t unstreamed =
        std::max(outer ? kMinOuterRows : 0, std::max<std::int64_t>(kernel.dot_rows, kernel.rows));
    streams_parts = packs_in_parts && may_stream && run_rows > unstreamed;
    const PackedLayout layout = packed_layout(p);
    Pieces pieces(workspace);
    left = pieces.take(rows * stride);
    rest = pieces.take(symmetric ? rows * stride : 0);
    halved = pieces.take(symmetric ? round_up(rows, kLine) : 0);
    left_sums = reinterpret_cast<std::int32_t*>(pieces.take(s4 ? round_up(4 * rows * layout.groups, kLine) : 0));
    panels = pieces.take(!may_pack     ? 0
                         : p.grouped() ? layout.size
                                       : round_up(extent.cols, kPanelChannels) * round_up(p.k, kS8Depth));
    sums_bytes = round_up(bytes_of_sums(kernel, extent.rows), kLine);
    const std::int64_t part_depth = may_stream && extent.rows > unstreamed
                                        ? std::min(stream_depth(kernel, kPanelChannels), round_up(p.k, kS8Depth))
                                        : 0;
    thread_bytes =
        sums_bytes +
        (p.b_packed || only_as_caller ? 0 : std::max({kPackedBytes, p.a_block, part_depth}) * kBlockChannels);
    threads = pieces.take(useful_threads(p.threads, product_units(extent.rows, extent.cols, p.k)) * thread_bytes);
    size = pieces.size();
  }
};

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
void tile_left(const GemmView& p, const Memory& memory, const Range& range) {
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

void convert_left(const PanelKernel& kernel, const GemmView& p, const Memory& memory, Range range) {
  const auto [first, rows] = range;
  if (kernel.a == AForm::tiled) return tile_left(p, memory, range);
  const std::int64_t depth = round_up(p.k, kS8Depth);
  copy_rows(p.left, p.k, first, rows, {memory.left + first * memory.stride, memory.stride});
  for (std::int64_t r = first; r < first + rows; ++r) {
    std::uint8_t* row = memory.left + r * memory.stride;
    std::memset(row + p.k, 0, static_cast<std::size_t>(depth - p.k));
    if (kernel.a == AForm::offset) multiversion<FlipSigns>(row, p.k);
    if (kernel.a == AForm::symmetric) {
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

// ---- Parts of the product ----

// Parts in the order in which a thread goes through them. Rows of left are taken in bands that fit half an L2
// cache, and a band meets all panels before the next begins; within a band, all its rows meet a span of groups.
//
// A span is wide because of y: rows of 2 KiB are long enough for the prefetchers, rows of 256 bytes are not, and one
// thread then writes 7 GB/s (Sapphire Rapids). It is narrow where there would be too few parts for the threads.
class Order {
 public:
  Order(const PanelKernel& kernel, const GemmView& p, const Memory& memory, bool streams, int threads)
      : rows_(p.rows), cols_(p.cols) {
    if (!memory.packs_in_parts && !memory.dots && cols_ * memory.channel_bytes <= second_level_cache() / 2 &&
        rows_ >= threads * kTiledRows) {
      by_rows(kernel, threads);
      return;
    }
    constexpr std::int64_t kPartsOfAThread = 3;
    if (memory.streams_parts || (streams && !memory.packs_in_parts && !memory.dots)) {
      channels_ = kBlockChannels;
      spans_ = ceil_div(cols_, channels_);
      row_block_ = kStreamRows;
      // The tiles of AMX are so fast that left has to come from the L2 cache.
      if (kernel.a == AForm::tiled) {
        while (row_block_ > kMaxRows / 2 && row_block_ * memory.stride > second_level_cache() * 5 / 8) row_block_ /= 2;
      }
      for (;; row_block_ /= 2) {
        band_ = row_block_;
        if (threads == 1 || row_block_ < kMaxRows || parts() >= kPartsOfAThread * threads) return;
      }
    }
    // Where each part packs its own panels, or its rows read right as it is, one part has all rows.
    for (std::int64_t span = memory.packs_in_parts || memory.dots ? kMaxSpan / 2 : kMaxSpan; span > 0; span /= 2) {
      channels_ = span * kBlockChannels;
      row_block_ = (span > kMaxSpan / 2 ? kMaxRows / 2 : kMaxRows) / kernel.rows * kernel.rows;
      band_ = row_block_ * std::max<std::int64_t>(1, second_level_cache() / 2 / (row_block_ * memory.stride));
      spans_ = ceil_div(cols_, channels_);
      // For all rows of the band, where they need it more than once.
      const bool stays = rows_ <= row_block_ || channels_ * memory.channel_bytes <= second_level_cache() / 4;
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
  // A right operand that fits the L2 cache of every thread stays there from run to run, and a thread takes the rows
  // that it has quantized itself.
  void by_rows(const PanelKernel& kernel, int threads) {
    channels_ = kMaxChannels;
    spans_ = ceil_div(cols_, channels_);
    const std::int64_t share = round_up(ceil_div(rows_, threads), std::max<std::int64_t>(kernel.row_step, 4));
    row_block_ = std::min(share, kMaxRows / 2 / kernel.rows * kernel.rows);
    band_ = row_block_;
  }

  std::int64_t band_of(std::int64_t part) const { return part / (spans_ * (band_ / row_block_)); }
  std::int64_t in_band(std::int64_t part) const { return part % (spans_ * (band_ / row_block_)); }
  std::int64_t blocks_in(std::int64_t band) const {
    return ceil_div(std::min(band_, rows_ - band * band_), row_block_);
  }

  std::int64_t rows_, cols_, row_block_ = 0, band_ = 0, channels_ = 0, spans_ = 0;
};

// A part is computed by blocks of up to four panels, and then finished row by row.

template <class Real>
class Multiplication {
 public:
  Multiplication(const PanelKernel& kernel, const GemmProblem& problem, const GemmOperands& o, const Launch& launch)
      : kernel_(kernel),
        problem_(problem),
        o_(o),
        p_(problem, o),
        memory_(kernel, problem, p_.rows, launch.workspace.data),
        layout_(packed_layout(problem)),
        in_groups_(problem.grouped()),
        streams_(streams(kernel, problem, p_.rows)),
        folds_(in_groups_ || problem.a_block > 0),
        finishes_(kernel.finishes && (streams_ || kernel.a != AForm::tiled || p_.rows <= kernel.rows) && !folds_ &&
                  std::is_same_v<Real, float> && !p_.accumulate && !(p_.bias.present() && p_.bias_per_row)),
        depth_bytes_(kPanelChannels * (problem.b.type == DType::s4 ? 4 : 8) / 8) {
    packed_ = problem.b_packed || memory_.as_caller;
    if (packed_) {
      panels_ = problem.b_packed ? bytes(p_.right) : memory_.panels;
      panel_bytes_ = layout_.panel_bytes;
    } else if (memory_.packs) {
      panels_ = memory_.panels;
      panel_bytes_ = round_up(p_.k, kS8Depth) * kPanelChannels;
    }
  }

  void run() const {
    const int threads = useful_threads(problem_.threads, product_units(p_.rows, p_.cols, p_.k));
    const std::int64_t at_once = kernel_.a == AForm::tiled ? kTiledRows
                                 : p_.left.strides[1] == 1 ? kConvertedRows
                                                           : kTransposedRows;
    parallel_for(threads, ceil_div(p_.rows, at_once), [&](std::int64_t part) {
      const Range rows{part * at_once, std::min(at_once, p_.rows - part * at_once)};
      convert_left(kernel_, p_, memory_, rows);
      if (problem_.b.type == DType::s4) sum_groups(rows);
      if (problem_.b.type == DType::s4 && !packed_) {
        for (std::int64_t r = rows.first; r < rows.first + rows.count; ++r) {
          multiversion<EvenTermsFirst>(memory_.left + r * memory_.stride, round_up(p_.k, kS8Depth));
        }
      }
    });
    if (memory_.as_caller) {
      pack_weight(problem_, o_, reinterpret_cast<std::byte*>(memory_.panels));
    } else if (memory_.packs) {
      parallel_for(threads, ceil_div(p_.cols, kBlockChannels), [&](std::int64_t part) {
        const std::int64_t first = part * kBlockChannels;
        pack_panels(p_.right, {first, std::min(kBlockChannels, p_.cols - first)}, {0, p_.k},
                    {memory_.panels + part * kMaxPanels * panel_bytes_, panel_bytes_});
      });
    }
    const Order order(kernel_, p_, memory_, streams_, threads);
    parallel_for(threads, order.parts(), [&](std::int64_t part, int thread) {
      if (kernel_.configure) kernel_.configure();
      multiply(order.rows(part), order.cols(part), memory_.threads + thread * memory_.thread_bytes);
      if (kernel_.release) kernel_.release();
    });
  }

 private:
  using PartFinish = Finish<Real, kStreamRows, kMaxChannels>;

  // What a part keeps on its stack, and its thread's memory.
  struct Scratch {
    std::int32_t* sums;  // or the totals of groups
    std::uint8_t* packed;
    std::int64_t sums_stride;
    alignas(64) std::int32_t correction[kMaxChannels] = {};

    float* totals() const { return reinterpret_cast<float*>(sums); }
  };

  // Of a's blocks in a block of terms, for each channel of up to four panels.
  struct BlockSegments {
    alignas(64) float scales[kMaxPanels][kMaxBlocks][kPanelChannels];
    alignas(64) std::int32_t sums[kMaxPanels][kMaxBlocks][kPanelChannels];
  };

  void sum_groups(const Range& rows) const {
    const bool tiled = kernel_.a == AForm::tiled;
    for (std::int64_t r = rows.first; r < rows.first + rows.count; ++r) {
      for (std::int64_t g = 0; g < layout_.groups; ++g) {
        const std::int64_t end = (g + 1) * problem_.b.group;
        const std::int64_t step = tiled ? kS8Depth : problem_.b.group;
        std::int32_t& total = memory_.left_sums[r * layout_.groups + g] = 0;
        for (std::int64_t c = g * problem_.b.group; c < end; c += step) {
          const std::uint8_t* terms =
              tiled ? left({r / kTiledRows * kTiledRows, c}) + r % kTiledRows * kS8Depth : left({r, c});
          std::int32_t sum = 0;
          multiversion<SumGroup>(terms, std::min(step, end - c), &sum);
          total += sum;
        }
      }
    }
  }

  void multiply(const Range& rows, const Range& cols, std::uint8_t* memory) const {
    Scratch s{reinterpret_cast<std::int32_t*>(memory), memory + memory_.sums_bytes, sums_stride(cols.count)};
    PartFinish finish(p_, rows, cols);
    if (streams_ && !memory_.dots) s.sums_stride = sums_stride(kBlockChannels);
    if (folds_ && !streams_) {
      std::fill_n(s.totals(), rows.count * s.sums_stride, 0.0f);
    } else if (!folds_) {
      load_channels(cols, finish.right_scale, s.correction);
    }
    if (memory_.dots && in_groups_) {
      const ConstTensor& scale = o_.b_scale;
      kernel_.group_dot({.a = left({rows.first, 0}),
                         .b = bytes(p_.right) + cols.first * p_.right.strides[0] / 2,
                         .b_stride = p_.right.strides[0] / 2,
                         .groups = layout_.groups,
                         .depth = problem_.b.group,
                         .channels = cols.count,
                         .scales = static_cast<const float*>(scale.data) + cols.first * scale.strides[0],
                         .scales_stride = scale.strides[0],
                         .scales_group = scale.strides[1],
                         .a_sums = memory_.left_sums,
                         .totals = s.totals()});
      return finish.write(s.totals(), s.sums_stride, nullptr);
    }
    if (memory_.dots) {
      kernel_.dot({left({rows.first, 0}), memory_.stride, bytes(p_.right) + cols.first * p_.right.strides[0],
                   p_.right.strides[0], p_.k, rows.count, cols.count, s.sums, s.sums_stride});
      return finish.write(s.sums, s.sums_stride, s.correction);
    }
    for (std::int64_t j = 0; j < cols.count; j += kBlockChannels) {
      multiply_block(rows, {cols.first + j, std::min(kBlockChannels, cols.count - j)}, s, j, finish);
    }
    if (streams_ || finishes_) return;
    folds_ ? finish.write(s.totals(), s.sums_stride, nullptr) : finish.write(s.sums, s.sums_stride, s.correction);
  }

  // Terms of a block. Of equal depth: 768 terms are 384 and 384, not 512 and 256. All groups are one block, since a
  // tile that folds many of them is called less often (M = 1: 6 %), unless flags are kept for this many terms alone.
  std::int64_t block_depth(std::int64_t rows) const {
    if (in_groups_ && !packed_) {
      const std::int64_t terms = kPackedBytes * 8 / bits(problem_.b.type);
      return std::min(terms / layout_.group_depth, layout_.groups) * layout_.group_depth;
    }
    const std::int64_t kernel_depth = streams_ ? stream_depth(kernel_, depth_bytes_) : kernel_.depth;
    if (in_groups_ && !kernel_.find_narrow && !streams_) return layout_.groups * layout_.group_depth;
    if (in_groups_) return std::max<std::int64_t>(kernel_depth / layout_.group_depth, 1) * layout_.group_depth;
    const std::int64_t depth = round_up(p_.k, kS8Depth);
    if (packed_ && rows <= kernel_.rows) return depth;  // read once: no need to keep it in a cache
    const std::int64_t step = std::max(p_.block, kS8Depth);
    const std::int64_t max = memory_.packs_in_parts && !memory_.streams_parts ? std::min(kPackedBytes, kernel_.depth)
                             : p_.block > 0                                   ? kMaxDepth
                                                                              : kernel_depth;
    return round_up(ceil_div(depth, ceil_div(depth, std::max(max, step))), step);
  }

  // Channels from `at` of the part on.
  void multiply_block(const Range& rows, const Range& cols, Scratch& s, std::int64_t at,
                      const PartFinish& finish) const {
    std::int32_t* const correction = s.correction + at;
    const std::int64_t depth = in_groups_ ? layout_.groups * layout_.group_depth : round_up(p_.k, kS8Depth);
    const std::int64_t block = block_depth(rows.count);
    // Tiles of equal height: 16 rows are 8 and 8, not 12 and 4.
    const std::int64_t max_rows = streams_ ? kernel_.stream_rows : kernel_.rows;
    const std::int64_t tiles = ceil_div(rows.count, max_rows);
    const std::int64_t tile_rows = round_up(ceil_div(rows.count, tiles), kernel_.row_step);
    BlockSegments segments;
    GroupSegments group_segments;
    const TileFinish to_y = finish.of_tiles(correction, {at, cols.count});
    TileRun run{};
    run.panels = static_cast<int>(ceil_div(cols.count, kPanelChannels));
    run.a_stride = memory_.stride;
    run.sums_stride = s.sums_stride;
    run.one_panel = packed_ && kernel_.one_panel_bytes > 0 &&
                    ceil_div(p_.cols, kPanelChannels) * panel_bytes_ >= kernel_.one_panel_bytes;
    for (std::int64_t term = 0; term < depth; term += block) {
      run.depth = std::min(block, depth - term);
      run.accumulate = term > 0;
      run.whole = packed_ && block >= depth;
      if (memory_.packs_in_parts) {
        pack(cols, term, run, s.packed);
      } else {
        run.b = panels_ + cols.first / kPanelChannels * panel_bytes_ + term * depth_bytes_;
        run.b_stride = panel_bytes_;
      }
      if (in_groups_) {
        run.group = packed_ ? groups_of(cols.first, term) : groups_packed(run, {cols.first, term}, group_segments);
      } else if (p_.block > 0) {
        run.group = blocks_of(run, {cols.first, term}, segments);
      } else if (kernel_.a == AForm::offset && !packed_) {
        add_correction(run, correction);
      }
      std::uint8_t narrow[kMaxPanels * kMaxNarrowBlocks];
      if (kernel_.find_narrow && rows.count >= kNarrowRows && run.depth <= kMaxNarrowBlocks * kNarrowDepth &&
          layout_.group_depth % kNarrowDepth == 0) {
        run.narrow = narrow;
        for (int j = 0; j < run.panels; ++j) {
          kernel_.find_narrow(run.b + j * run.b_stride, run.depth, narrow + j * kMaxNarrowBlocks);
        }
      } else {
        run.narrow = nullptr;
      }
      run.finish = finishes_ && term + block >= depth ? &to_y : nullptr;
      // Where rows stream past right, each of the first tiles fetches a panel of the next block, and the last of
      // three two; or, where they multiply fast, each its share of all panels.
      const std::uint8_t* next = !streams_ || !panels_  ? nullptr
                                 : term + block < depth ? run.b + block * depth_bytes_
                                 : cols.first + kBlockChannels < p_.cols
                                     ? run.b + kMaxPanels * panel_bytes_ - term * depth_bytes_
                                     : nullptr;
      run.later_lines = static_cast<int>(ceil_div(kS8Depth * depth_bytes_ / kLine, tiles));
      for (std::int64_t i = 0; i < rows.count; i += tile_rows) {
        const std::int64_t number = i / tile_rows;
        run.rows = static_cast<int>(std::min(tile_rows, rows.count - i));
        run.row = i;
        run.later_panels = i + tile_rows >= rows.count && number + 1 < run.panels ? 2 : 1;
        if (kernel_.a == AForm::tiled) {
          run.later = next ? next - run.b + number * run.depth / kS8Depth * run.later_lines * kLine : 0;
        } else {
          run.later = next && number < run.panels ? next - run.b + number * panel_bytes_ : 0;
        }
        // A tile that meets all terms at once leaves nothing for later ones.
        const std::int64_t place = !streams_ ? i * s.sums_stride + at : block < depth ? i * s.sums_stride : 0;
        if (folds_) {
          run.group.totals = s.totals() + place;
          run.group.totals_stride = s.sums_stride;
          if (streams_ && term == 0) std::fill_n(run.group.totals, run.rows * s.sums_stride, 0.0f);
          in_groups_ ? fold_groups(run, {rows.first + i, term}) : fold_blocks(run, {rows.first + i, term});
        } else {
          run.sums = s.sums + place;
          tile(run, {rows.first + i, term});
          if (run.finish) continue;
        }
        if (!streams_ || term + block < depth) continue;
        const Range tile_range{i, run.rows};
        const Range part_cols{at, cols.count};
        folds_ ? finish.write(s.totals() + place, s.sums_stride, nullptr, tile_range, part_cols)
               : finish.write(s.sums + place, s.sums_stride, correction, tile_range, part_cols);
      }
    }
  }

  // The run's terms of these channels, `run.depth` at most, for one part.
  void pack(const Range& cols, std::int64_t term, TileRun& run, std::uint8_t* packed) const {
    const std::int64_t terms = std::min(p_.k - term, run.depth);
    run.b = packed;
    run.b_stride = round_up(run.depth * depth_bytes_, kPanelChannels * kS8Depth);
    if (problem_.b.type == DType::s8) return pack_panels(p_.right, cols, {term, terms}, {packed, run.b_stride});
    ConstTensor pairs = p_.right;
    pairs.strides = {p_.right.strides[0] / 2, 1};
    pack_panels(pairs, cols, {term / 2, ceil_div(terms, 2)}, {packed, run.b_stride, kFlipNibbles});
  }

  struct Place {
    std::int64_t row, term;
  };

  const std::uint8_t* left(const Place& at) const {
    return memory_.left + at.row * memory_.stride + (kernel_.a == AForm::tiled ? kTiledRows : 1) * at.term;
  }

  void tile(TileRun& run, const Place& at) const {
    run.a = left(at);
    const std::uint8_t* halved = memory_.halved + at.row;
    if (kernel_.a != AForm::symmetric || std::find(halved, halved + run.rows, 1) == halved + run.rows) {
      return kernel_.tile(run);
    }
    TileRun half = run;
    half.finish = nullptr;
    kernel_.tile(half);
    half.a = memory_.rest + at.row * memory_.stride + at.term;
    half.accumulate = true;
    half.finish = run.finish;
    kernel_.tile(half);
  }

  // The groups of a block of terms: `run.group` has those of the part's channels, from its first term on.
  void fold_groups(TileRun& run, const Place& at) const {
    const std::int64_t depth = run.depth;
    run.group.groups = depth / layout_.group_depth;
    run.group.row_sums = memory_.left_sums + at.row * layout_.groups + at.term / layout_.group_depth;
    run.group.row_sums_stride = layout_.groups;
    run.depth = layout_.group_depth;
    fold(run, at);
    run.depth = depth;
  }

  // a's blocks in a block of terms: the whole ones, then one that is short. `run.group` has what is right's of them.
  void fold_blocks(TileRun run, const Place& at) const {
    GroupRun& group = run.group;
    const std::int64_t depth = run.depth;
    for (std::int64_t done = 0; done < depth; done += group.groups * p_.block) {
      const std::int64_t block = done / p_.block;
      group.groups = std::max<std::int64_t>((depth - done) / p_.block, 1);
      if (!p_.right_has_blocks) group.row_scales = block_scale(at.row, at.term / p_.block + block);
      run.depth = std::min(p_.block, depth - done);
      fold(run, {at.row, at.term + done});
      const std::int64_t segments = group.groups * kPanelChannels * static_cast<std::int64_t>(sizeof(float));
      group.scales += segments;
      group.channel_sums += segments;
      run.b += group.groups * p_.block * depth_bytes_;
      if (run.narrow) run.narrow += group.groups * p_.block / kNarrowDepth;
    }
  }

  // The terms of the groups from `at` on, `run.depth` each.
  void fold(TileRun& run, const Place& at) const {
    run.a = left(at);
    run.group.rest = nullptr;
    const std::uint8_t* halved = memory_.halved + at.row;
    if (kernel_.a == AForm::symmetric && std::find(halved, halved + run.rows, 1) != halved + run.rows) {
      run.group.rest = memory_.rest + at.row * memory_.stride + at.term;
    }
    run.group.row_scales ? kernel_.row_folding_tile(run) : kernel_.folding_tile(run);
  }

  const float* block_scale(std::int64_t i, std::int64_t block) const {
    return static_cast<const float*>(p_.block_scale.data) + i * p_.block_scale.strides[0] +
           block * p_.block_scale.strides[1];
  }

  struct PanelPlace {
    std::int64_t col, term;
  };

  // What goes with the groups of right's channels that `run` has packed, from `at` on.
  struct GroupSegments {
    alignas(64) float scales[kMaxPanels][kMaxGroups][kPanelChannels];
    alignas(64) std::int32_t sums[kMaxPanels][kMaxGroups][kPanelChannels];
    std::uint8_t zero_points[kMaxPanels][kMaxGroups][kPanelChannels];
  };
  GroupRun groups_packed(const TileRun& run, const PanelPlace& at, GroupSegments& s) const {
    GroupRun group{};
    group.scales = reinterpret_cast<const std::uint8_t*>(s.scales);
    group.channel_sums = reinterpret_cast<const std::uint8_t*>(s.sums);
    group.zero_points = problem_.b.zero_point ? &s.zero_points[0][0][0] : nullptr;
    group.segments_stride = kMaxGroups * kPanelChannels;
    const std::int64_t first = at.term / layout_.group_depth;
    const std::int64_t groups = run.depth / layout_.group_depth;
    const std::int64_t channels = std::min(kBlockChannels, p_.cols - at.col);
    constexpr std::int64_t kFloat = sizeof(float);  // there is no f64 with groups
    ConstTensor lanes = o_.b_scale;
    lanes.strides = {lanes.strides[0] * kFloat, lanes.strides[1]};
    if (lanes.strides[1] == 1) {
      pack_panels(lanes, {at.col, channels}, {first * kFloat, groups * kFloat},
                  {reinterpret_cast<std::uint8_t*>(s.scales), kMaxGroups * kPanelChannels * kFloat});
    }
    for (std::int64_t c = 0; c < channels && (lanes.strides[1] != 1 || problem_.b.zero_point); ++c) {
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t panel = c / kPanelChannels;
        const std::int64_t lane = c % kPanelChannels;
        if (lanes.strides[1] != 1) s.scales[panel][g][lane] = load<float>(o_.b_scale, at.col + c, first + g);
        if (!problem_.b.zero_point) continue;
        s.zero_points[panel][g][lane] =
            static_cast<std::uint8_t>(8 + load_integer(o_.zero_point, at.col + c, first + g));
      }
    }
    if (kernel_.a != AForm::offset || problem_.b.type != DType::s8) return group;
    for (std::int64_t g = 0; g < groups; ++g) {
      alignas(64) std::int32_t sums[kBlockChannels] = {};
      TileRun part = run;
      part.b += g * layout_.group_depth * depth_bytes_;
      part.depth = layout_.group_depth;
      part.accumulate = false;
      add_correction(part, sums);
      for (std::int64_t c = 0; c < run.panels * kPanelChannels; ++c) {
        s.sums[c / kPanelChannels][g][c % kPanelChannels] = sums[c] / 128;
      }
    }
    return group;
  }

  // What goes with the blocks of a that `run` has of right's channels from `at` on.
  GroupRun blocks_of(const TileRun& run, const PanelPlace& at, BlockSegments& s) const {
    GroupRun group{};
    group.scales = reinterpret_cast<const std::uint8_t*>(s.scales);
    group.channel_sums = reinterpret_cast<const std::uint8_t*>(s.sums);
    group.segments_stride = kMaxBlocks * kPanelChannels;
    group.row_scales_stride = p_.block_scale.strides[0];
    group.row_scales_group = p_.block_scale.strides[1];
    for (std::int64_t g = 0; g * p_.block < run.depth; ++g) {
      alignas(64) std::int32_t sums[kBlockChannels] = {};
      if (kernel_.a == AForm::offset) {
        TileRun block = run;
        block.b += g * p_.block * depth_bytes_;
        block.depth = std::min(p_.block, run.depth - g * p_.block);
        block.accumulate = false;
        add_correction(block, sums);
      }
      const std::int64_t channels = std::min(kBlockChannels, p_.cols - at.col);
      for (std::int64_t c = 0; c < run.panels * kPanelChannels; ++c) {
        const std::int64_t panel = c / kPanelChannels;
        const std::int64_t lane = c % kPanelChannels;
        s.sums[panel][g][lane] = sums[c] / 128;
        if (!p_.right_has_blocks) continue;
        s.scales[panel][g][lane] = c < channels ? *block_scale(at.col + c, at.term / p_.block + g) : 0.0f;
      }
    }
    return group;
  }

  // The scales of channels from `col` on, and what goes with them, from a term on.
  GroupRun groups_of(std::int64_t col, std::int64_t term) const {
    const std::int64_t segment = col * layout_.groups + term / layout_.group_depth * kPanelChannels;
    GroupRun group{};
    group.scales = panels_ + layout_.scales_at + segment * static_cast<std::int64_t>(sizeof(float));
    group.channel_sums = panels_ + layout_.sums_at + segment * static_cast<std::int64_t>(sizeof(std::int32_t));
    group.zero_points = problem_.b.zero_point ? panels_ + layout_.zero_points_at + segment : nullptr;
    group.segments_stride = layout_.groups * kPanelChannels;
    return group;
  }

  // The sums of a row of zeros.
  void add_correction(TileRun run, std::int32_t* correction) const {
    alignas(64) static constexpr auto kZeros = [] {
      std::array<std::uint8_t, kMaxDepth> zeros{};
      zeros.fill(0x80);
      return zeros;
    }();
    run.a = kZeros.data();
    run.rows = 1;
    run.sums = correction;
    const std::int64_t depth = run.depth;
    for (std::int64_t term = 0; term < depth; term += run.depth) {
      run.depth = std::min(kMaxDepth, depth - term);
      kernel_.tile(run);
      run.b += run.depth * depth_bytes_;
      run.accumulate = true;
    }
  }

  // Scales, and what a packed right says of the correction.
  void load_channels(const Range& cols, Real* scale, std::int32_t* correction) const {
    if (!packed_) {
      for (std::int64_t j = 0; j < cols.count; ++j) scale[j] = load<Real>(p_.right_scale, cols.first + j);
      return;
    }
    const auto count = static_cast<std::size_t>(cols.count);
    std::memcpy(scale, reinterpret_cast<const Real*>(panels_ + layout_.scales_at) + cols.first, count * sizeof(Real));
    if (kernel_.a != AForm::offset) return;
    const auto* sums = reinterpret_cast<const std::uint32_t*>(panels_ + layout_.sums_at) + cols.first;
    for (std::int64_t j = 0; j < cols.count; ++j) correction[j] = static_cast<std::int32_t>(sums[j] * 128u);
  }

  const PanelKernel& kernel_;
  const GemmProblem& problem_;
  const GemmOperands& o_;
  GemmView p_;
  Memory memory_;
  PackedLayout layout_;
  bool in_groups_;                        // of right
  bool streams_;                          // rows stream past right
  bool folds_;                            // in_groups_, or a is in blocks
  bool finishes_;                         // tiles write y
  bool packed_;                           // panels_ are in the packed form, with sums and scales
  std::int64_t depth_bytes_;              // of a panel: bytes of a term
  const std::uint8_t* panels_ = nullptr;  // unless each part packs its own
  std::int64_t panel_bytes_ = 0;
};

}  // namespace

void multiply_panels(const PanelKernel& kernel, const GemmProblem& problem, const GemmOperands& operands,
                     const Launch& launch) {
  problem.scale == DType::f64 ? Multiplication<double>(kernel, problem, operands, launch).run()
                              : Multiplication<float>(kernel, problem, operands, launch).run();
}

std::size_t panels_workspace(const PanelKernel& kernel, const GemmProblem& problem) {
  return static_cast<std::size_t>(Memory(kernel, problem, GemmExtent(problem).rows, nullptr).size);
}

}  // namespace octile::cpu
