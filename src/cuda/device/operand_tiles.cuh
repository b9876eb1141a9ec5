// Tiles of operands: from global to shared memory, and s8 ones from there to the registers of mma.sync.
//
// An operand tile is (rows, kStep) of an operand (rows, k), in the orientation that the operand has in global memory,
// so that cp.async copies both as they are:
//   contraction-major  (rows, kStep) lines along k
//   outer-major        (kStep, rows) lines along the rows; transposed on the way into registers, by a transposing
//                      ldmatrix and, for s8, one prmt per register
// cp.async copies aligned units of 16 bytes. A line that begins inside a unit is copied from the beginning of that
// unit, with one more unit behind it, and the warp that copied it shifts it into place in shared memory. The bytes
// before the line share a unit with it, so they are readable. The ends of ragged lines are copied by byte count, which
// pads with zeros.
#pragma once

#include <cstdint>

#include "cuda/device/bytes.cuh"
#include "cuda/device/mma.cuh"

namespace octile::cuda {

inline constexpr int kChunk = 16;  // bytes of a unit
inline constexpr int kSlice = 32;  // terms of one matrix instruction on s8

// An operand (rows, k) of s8 or of 16-bit floats, as bytes. A line is what is contiguous: a row, or the same term of
// all rows.
struct Operand {
  const std::int8_t* data;
  const std::int8_t* end;  // of its last line
  std::int64_t pitch;      // bytes from a line to the next
  int rows;
  bool shifted;  // lines begin between aligned units
};

// ---- From global to shared memory.

// An operand tile is written and read without bank conflicts if the 8 rows of a matrix lie in different 16-byte columns
// of the 128-byte lines of banks. Chunk c of line l lies where chunk c ^ twist(l) would.
template <int kLineBytes, bool kOuter, int kElement = 1>
__device__ constexpr int twist(int line) {
  static_assert(kLineBytes >= 64 * (kOuter ? 1 : kElement) && (kLineBytes & (kLineBytes - 1)) == 0,
                "shorter lines would need another pattern");
  // Lines of 16-bit elements along k are read 32 bytes of four lines at a time: see HalfReader.
  if constexpr (!kOuter && kElement == 2) return (line & 3) << 1;
  if constexpr (!kOuter) return kLineBytes >= 128 ? line & 7 : line >> 1 & 3;
  // A transposed matrix takes lines 0, 1, 4, 5, 8, 9, 12, 13 of 16, or the others: see Reader.
  return kLineBytes >= 128 ? (line & 1) | (line >> 2 & 3) << 1 : line >> 2 & 3;
}

// The first `count` bytes of a unit, and zeros. Of the operand's last unit cp.async would read no more either, but
// compute-sanitizer takes it for a read of the whole unit.
__device__ inline void copy_part(const Operand& o, std::uint32_t to_shared, const std::int8_t* from, int count) {
  if (count <= 0 || from + kChunk <= o.end) return copy_async(to_shared, from, min(max(count, 0), kChunk));
#pragma unroll 1
  for (int i = 0; i < kChunk; i += 4) {
    std::uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j < count) word |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(__ldcg(from + i + j))) << 8 * j;
    }
    store_shared(to_shared + i, word);
  }
}

// Lines of an operand that lie one after the other, and those of a GatheredOperand: where a thread's begin. A line is
// copied from the beginning of its first unit; `head` bytes before it.
template <int kTurns, bool kGathered>
struct FillerLines {
  const std::int8_t* from;  // the unit that its first line begins in
  // The same for all lines of a thread, since a turn and a step go on by multiples of 16 lines or bytes, or of 8 lines
  // whose pitch is even.
  int first_head;

  __device__ const std::int8_t* at(const Operand& o, int turn, int lines_at_once) const {
    return from + turn * lines_at_once * o.pitch;
  }
  __device__ int head(int) const { return first_head; }
  __device__ void advance(std::int64_t bytes) { from += bytes; }
};
template <int kTurns>
struct FillerLines<kTurns, true> {
  const std::int8_t* from[kTurns];
  std::uint32_t heads;  // 4 bits each
  static_assert(kTurns <= 8);

  template <class O>
  __device__ const std::int8_t* at(const O&, int turn, int) const {
    return from[turn];
  }
  __device__ int head(int turn) const { return static_cast<int>(heads >> 4 * turn & 15); }
  __device__ void advance(std::int64_t bytes) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) from[i] += bytes;
  }
};

// One thread's part of copying an operand's tiles: chunk `across` of every kLinesAtOnce'th line. Rows beyond the last
// are not copied, and their products are not stored.
template <class Tile, int kRows, bool kOuter, int kElement = 1, bool kGathered = false>
class Filler {
 public:
  static constexpr int kLineBytes = (kOuter ? kRows : Tile::kStep) * kElement;
  static constexpr int kLines = kOuter ? Tile::kStep : kRows;
  // With the unit behind each line, after all lines.
  static constexpr int kBytes = kLines * (kLineBytes + (Tile::kShifts ? kChunk : 0));

  __device__ Filler(const Operand& o, int first_row, int first_term) requires(!kGathered)
      : line_(static_cast<int>(threadIdx.x) / kAcross),
        across_(static_cast<int>(threadIdx.x) % kAcross),
        rows_(kOuter ? min(o.rows - first_row, kRows) * kElement - across_ * kChunk : o.rows - first_row - line_) {
    lines_.from = o.data + across_ * kChunk +
                  (kOuter ? (first_term + line_) * o.pitch + std::int64_t{first_row} * kElement
                          : (first_row + line_) * o.pitch + std::int64_t{first_term} * kElement);
    lines_.first_head = Tile::kShifts ? static_cast<int>(reinterpret_cast<std::uintptr_t>(lines_.from) % kChunk) : 0;
    lines_.from -= lines_.first_head;
  }
  template <class O>
  __device__ Filler(const O& o, int first_row, int first_term) requires kGathered
      : line_(static_cast<int>(threadIdx.x) / kAcross),
        across_(static_cast<int>(threadIdx.x) % kAcross),
        rows_(o.rows - first_row - line_) {
    static_assert(!kOuter);
    lines_.heads = 0;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = inside(i) ? o.row_of_a(first_row + line_ + i * kLinesAtOnce) : 0;
      lines_.from[i] = o.data + row * o.pitch + std::int64_t{first_term} * kElement + across_ * kChunk;
      if constexpr (Tile::kShifts) {
        const auto head = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(lines_.from[i]) % kChunk);
        lines_.heads |= head << 4 * i;
        lines_.from[i] -= head;
      }
    }
  }

  // Whether lines that are not shifted, of k terms, end with a unit.
  __device__ static bool ends_by_units(int k) { return kOuter || k % (kChunk / kElement) == 0; }

  // Whether whole units can be copied in all steps but the last. A unit of which only half belongs to a line may lie
  // outside of all memory, behind the last line.
  __device__ static bool by_units(const Operand& o, int first_row) {
    if (!kOuter) return true;
    if (Tile::kShifts && o.shifted) return first_row + kRows <= o.rows && o.pitch != 0;
    return first_row + kRows <= o.rows || o.rows % (kChunk / kElement) == 0;
  }

  // Whole units; steps are copied in order. kWhole: the whole tile lies inside of the operand. kShifted: the operand
  // may be.
  template <bool kWhole, bool kShifted>
  __device__ void copy(const Operand& o, std::uint32_t tile) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const std::int8_t* from = line(o, i);
      if constexpr (kWhole) {
        copy_async(tile + place(across_, i), from);
      } else {
        copy_async_if(inside(i), tile + place(across_, i), from);
        if constexpr (kShifted && Tile::kShifts) {
          copy_async_if(o.shifted && across_ == kAcross - 1 && inside(i), tile + behind(i), from + kChunk);
        }
      }
    }
    advance(o);
  }

  // The last units, and zeros behind them, of lines that begin and end with units.
  __device__ void copy_end(const Operand& o, int k, int step, std::uint32_t tile) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const bool units = term(step, i) < k;
      const std::int8_t* from = units ? line(o, i) : o.data;
      copy_async_if(inside(i), tile + place(across_, i), from, units ? kChunk : 0);
    }
    advance(o);
  }

  // By byte counts.
  __device__ void copy_ragged(const Operand& o, int k, int step, std::uint32_t tile) {
#pragma unroll 1
    for (int i = 0; i < kTurns; ++i) {
      if (!kOuter && rows_ <= i * kLinesAtOnce) break;
      const std::int8_t* from = line(o, i);
      const int left = k - term(step, i);
      const int bytes = (kOuter ? (left > 0 ? rows_ : -kChunk) : min(left, Tile::kStep) * kElement) + lines_.head(i);
      copy_part(o, tile + place(across_, i), from, bytes);
      if (Tile::kShifts && o.shifted && across_ == kAcross - 1)
        copy_part(o, tile + behind(i), from + kChunk, bytes - kChunk);
    }
    advance(o);
  }

  // Shifts the lines that this warp has copied into place.
  __device__ void straighten_lines(std::uint32_t tile) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const std::uint32_t at = tile + place(across_, i);
      const uint4 first = load_shared(at);
      const uint4 second = load_shared(across_ == kAcross - 1 ? tile + behind(i) : tile + place(across_ + 1, i));
      __syncwarp();
      store_shared(at, shifted_bytes(first, second, static_cast<unsigned>(lines_.head(i))));
    }
  }

 private:
  // Whether a turn's unit lies in the rows of the operand.
  __device__ bool inside(int turn) const { return rows_ > (kOuter ? 0 : turn * kLinesAtOnce); }
  // The first term of a turn's unit.
  __device__ int term(int step, int turn) const {
    return step * Tile::kStep + (kOuter ? line_ + turn * kLinesAtOnce : across_ * (kChunk / kElement));
  }
  __device__ const std::int8_t* line(const Operand& o, int turn) const { return lines_.at(o, turn, kLinesAtOnce); }
  __device__ void advance(const Operand& o) { lines_.advance(Tile::kStep * (kOuter ? o.pitch : kElement)); }

  static constexpr int kAcross = kLineBytes / kChunk;
  static constexpr int kLinesAtOnce = Tile::kThreads / kAcross;
  static constexpr int kTurns = kLines / kLinesAtOnce;
  static_assert(!Tile::kShifts || kLinesAtOnce * kElement % 16 == 0, "every turn has the same shift");
  static_assert(kLines % kLinesAtOnce == 0);
  static_assert(32 % kAcross == 0, "a line belongs to one warp");

  __device__ std::uint32_t place(int across, int turn) const {
    const int own = twist<kLineBytes, kOuter, kElement>(line_);
    const int of_turn = twist<kLineBytes, kOuter, kElement>(turn * kLinesAtOnce);  // 0, or of a bit of its own
    return (line_ + turn * kLinesAtOnce) * kLineBytes + (across ^ own ^ of_turn) * kChunk;
  }
  __device__ std::uint32_t behind(int turn) const {
    return kLines * kLineBytes + (line_ + turn * kLinesAtOnce) * kChunk;
  }

  int line_;
  int across_;
  int rows_;  // from this thread's first on; outer-major: their bytes
  FillerLines<kTurns, kGathered> lines_;
};

// ---- From shared memory to registers.

// 16 rows x 32 terms in the order in which multiply_add_s8 wants them: of left one `a`, the first 16 terms of both
// halves of the rows and then the other terms; of right two pairs, all terms of one half of the rows and then of the
// other. The halves are rows 0..7 and 8..15, of an outer-major operand the even and the odd ones.
struct Fragment {
  std::uint32_t part[4];
};

// Where a lane finds its part of an operand tile.
template <class Tile, int kRows, bool kOuter, bool kIsRight>
class Reader {
 public:
  // first_row: of the warp
  __device__ Reader(int first_row, int lane, int first_slice = 0) {
    const int matrix = lane / 8;
    if constexpr (kOuter) {
      // Rows 0, 1, 2, 3, .. of the four matrices are terms 0, 1, 4, 5, ..; 2, 3, 6, 7, ..; and 16 more: a lane then
      // gets terms 4 t .. 4 t + 3 of two rows from two matrices.
      const int term = matrix / 2 * 16 + lane % 8 / 2 * 4 + matrix % 2 * 2 + lane % 2;
      offset_ = term * kLineBytes + (first_row / kChunk ^ twist<kLineBytes, true>(term)) * kChunk +
                first_slice * kSlice * kLineBytes;
    } else {
      const int half_of_rows = kIsRight ? matrix / 2 : matrix % 2;
      const int half_of_terms = kIsRight ? matrix % 2 : matrix / 2;
      const int row = first_row + half_of_rows * 8 + lane % 8;
      offset_ = row * kLineBytes + ((first_slice * 2 + half_of_terms) ^ twist<kLineBytes, false>(row)) * kChunk;
    }
  }

  // Rows 16 * block .. of the warp, terms kSlice * slice .. of the step.
  __device__ Fragment load(std::uint32_t tile, int block, int slice) const {
    Fragment f;
    if constexpr (kOuter) {
      std::uint32_t pairs[4];
      load_matrices_transposed(tile + (offset_ ^ block * kChunk) + slice * kSlice * kLineBytes, pairs);
      constexpr int kOddRows = kIsRight ? 2 : 1;
      constexpr int kOtherTerms = 3 - kOddRows;
      f.part[0] = __byte_perm(pairs[0], pairs[1], 0x6420);
      f.part[kOddRows] = __byte_perm(pairs[0], pairs[1], 0x7531);
      f.part[kOtherTerms] = __byte_perm(pairs[2], pairs[3], 0x6420);
      f.part[3] = __byte_perm(pairs[2], pairs[3], 0x7531);
    } else {
      load_matrices(tile + (offset_ ^ slice * kSlice) + block * 16 * kLineBytes, f.part);
    }
    return f;
  }

 private:
  static constexpr int kLineBytes = kOuter ? kRows : Tile::kStep;
  std::uint32_t offset_;
};

}  // namespace octile::cuda
