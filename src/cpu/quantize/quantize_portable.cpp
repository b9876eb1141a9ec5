// q = clamp(rint(x / s) + z, q_min, q_max), scales found on the way; into (rows, cols), (cols, rows) or both from one
// read. Stochastic: floor(x / s + u) + z.
#include "cpu/quantize/segments.h"
#include "cpu/support/cost.h"
#include "plan/either.h"

namespace octile::cpu {

namespace {

// A block of bytes, kept until it is transposed: whole rows, unless they are very long, so that x is read once. They
// lie 64 bytes further apart than they are long: at a distance of a power of two the bytes of a column would fight for
// the same few places of a cache. 128 rows make two neighbouring lines of each transposed row, which memory takes
// in half the time of two single ones, where two such tiles fit an L2 cache.
struct Tile {
  std::int64_t cols;
  std::int64_t rows;

  explicit Tile(const QuantizeProblem& p)
      : cols(std::clamp<std::int64_t>(round_up(p.cols, 64), 1024, 8192)), rows(cols > 4096 ? 64 : kBlockRows) {}
  std::int64_t stride() const { return cols + 64; }
  std::int64_t bytes() const { return rows * stride(); }
};

// The transposed output, a block of rows behind: a strip of the block before is transposed and written after each few
// pieces of the next, so that memory is read and written at the same time. Zen 5, two threads, 64 MiB read and 16 MiB
// written around the caches in scattered lines: 1.7 ms interleaved, 2.2 ms when a block was written at its end, 3.1 ms
// through the caches.
class Transposer {
 public:
  Transposer(const QuantizeProblem& p, const Tensor& q_transposed, std::uint8_t* tiles, bool around_caches)
      : q_(q_transposed),
        stride_(Tile(p).stride()),
        tile_(tiles),
        other_(tiles ? tiles + Tile(p).bytes() : nullptr),
        around_caches_(around_caches) {}

  // Where to write the bytes of the block that comes next.
  std::uint8_t* at(std::int64_t row, std::int64_t col) const { return tile_ + row * stride_ + col; }

  // `elements` have been written: one strip for as many as it holds.
  void advance(std::int64_t elements) {
    written_ += elements;
    for (; done_ < pending_.cols && written_ >= pending_.rows * kStrip; written_ -= pending_.rows * kStrip) {
      turn_strip();
    }
  }

  // All of it has been written: it is rows x cols at (row, col) of the matrix.
  void finish_block(std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t cols) {
    finish();
    std::swap(tile_, other_);
    pending_ = {row, col, rows, cols};
    done_ = 0;
    written_ = 0;
  }

  void finish() {
    while (done_ < pending_.cols) turn_strip();
  }

 private:
  static constexpr std::int64_t kStrip = 64;  // columns
  struct Block {
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
  };

  void turn_strip() {
    const std::int64_t cols = std::min(kStrip, pending_.cols - done_);
    auto* data = static_cast<std::uint8_t*>(q_.data);
    const std::int64_t stride = q_.strides[0];
    const std::int64_t to = (pending_.col + done_) * stride + pending_.row;
    const ConstBytes from = {other_ + done_, stride_};
    done_ += cols;
    if (q_.dtype != DType::s4) return transpose(from, {data + to, stride}, pending_.rows, cols, around_caches_);
    std::uint8_t transposed[kStrip * kBlockRows];
    transpose(from, {transposed, kBlockRows}, pending_.rows, cols);
    for (std::int64_t i = 0; i < cols; ++i) pack_s4(transposed + i * kBlockRows, pending_.rows, data, to + i * stride);
  }

  const Tensor& q_;
  std::int64_t stride_;
  std::uint8_t* tile_;   // being filled
  std::uint8_t* other_;  // being transposed
  bool around_caches_;
  Block pending_;
  std::int64_t done_ = 0;     // columns of it
  std::int64_t written_ = 0;  // elements that have not paid for a strip
};

template <class Real>
class WriteIntegers {
 public:
  static constexpr bool kPoisonsSegments = true;

  WriteIntegers(const QuantizeProblem& p, const QuantizeOperands& o, std::uint8_t* tiles)
      : p_(p),
        o_(o),
        around_caches_(outgrows_caches(bytes_moved(o))),
        fits_(p.scale == ScaleSource::dynamic && p.mapping == Mapping::symmetric && p.q_min <= -p.q_max),
        transposer_(p, o.q_transposed, tiles, around_caches_) {}

  template <class Scale>
  void piece(const Piece<Real>& piece, const Scale& scale) {
    write(piece, [&](std::uint8_t* q) {
      round_to_levels(LevelRun<Real, std::uint8_t>{piece.x, piece.noise, static_cast<Real>(p_.q_min),
                                                   static_cast<Real>(p_.q_max), piece.n, piece.ahead, q, fits_},
                      scale);
    });
  }

  // f16 is converted by integer arithmetic, for which AVX2 is too slow: a buffer and F16C are faster there, and with
  // AVX-512 where levels are clamped.
  bool takes_narrow() const {
    if (p_.multiplier != Multiplier::none || p_.rounding != Rounding::nearest) return false;
    return p_.x == DType::bf16 ? isa() >= Isa::avx2 : p_.x == DType::f16 && fits_ && isa() >= Isa::avx512;
  }
  template <class T, class Scale>
  void narrow(const Piece<Real>& piece, const T* x, const Scale& scale) {
    write(piece, [&](std::uint8_t* q) {
      multiversion<RoundNarrow>(
          NarrowRun<T>{x, static_cast<float>(p_.q_min), static_cast<float>(p_.q_max), piece.n, piece.ahead, q, fits_},
          scale);
    });
  }

  void block(std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t cols) {
    if (o_.q_transposed.present()) transposer_.finish_block(row, col, rows, cols);
  }

  void finish() {
    transposer_.finish();
    if (around_caches_) end_copies();
  }

 private:
  // round(q) writes the piece's bytes.
  template <class Round>
  void write(const Piece<Real>& piece, const Round& round) {
    const bool transposes = o_.q_transposed.present();
    // Bytes that need no more go straight to their place.
    const bool direct = !around_caches_ && !transposes && o_.q.dtype != DType::s4;
    std::uint8_t* q = direct ? row_of(piece) : transposes ? transposer_.at(piece.block_row, piece.block_col) : row_;
    round(q);
    if (!direct && o_.q.present()) put(piece, q);
    if (transposes) transposer_.advance(piece.n);
  }

  std::uint8_t* row_of(const Piece<Real>& piece) const {
    return static_cast<std::uint8_t*>(o_.q.data) + piece.row * o_.q.strides[0] + piece.col;
  }

  void put(const Piece<Real>& piece, const std::uint8_t* q) const {
    if (o_.q.dtype == DType::s4) {
      pack_s4(q, piece.n, static_cast<std::uint8_t*>(o_.q.data), piece.row * o_.q.strides[0] + piece.col);
    } else if (around_caches_) {
      copy_around_caches(row_of(piece), q, piece.n);
    } else {
      std::copy_n(q, piece.n, row_of(piece));
    }
  }

  const QuantizeProblem& p_;
  const QuantizeOperands& o_;
  bool around_caches_;
  bool fits_;
  Transposer transposer_;
  alignas(64) std::uint8_t row_[kRun<Real>];
};

bool transposes(const QuantizeProblem& p) { return p.orientation != Orientation::row_major; }

template <class Real>
void quantize(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  auto* const memory = static_cast<std::uint8_t*>(launch.workspace.data);
  std::uint8_t* const tiles = memory + column_bytes(p);
  Blocks blocks = row_blocks_of(p, o.x, memory);
  if (o.q_transposed.present()) {
    // The first block ends where a line of the transposed rows ends, if they all end lines at the same column.
    const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(o.q_transposed.data) % 64);
    const Tile tile(p);
    blocks = {.rows = tile.rows,
              .cols = tile.cols,
              .first_rows = tile.rows - (o.q_transposed.dtype == DType::s4 ? 0 : misaligned),
              .memory = tiles,
              .bytes = 2 * tile.bytes(),
              .columns = memory};
  }
  SegmentWalk<Real, WriteIntegers<Real>>(p, o, blocks).run();
}

std::size_t workspace(const QuantizeProblem& p) {
  const std::int64_t tiles = transposes(p) ? quantizing_threads(p, p.rows) * 2 * Tile(p).bytes() : 0;
  return static_cast<std::size_t>(column_bytes(p) + tiles);
}

}  // namespace

extern constinit const QuantizeKernel quantize_portable =
    portable_row("quantize_portable", Operation::quantize, either<quantize<float>, quantize<double>>, workspace);

}  // namespace octile::cpu
