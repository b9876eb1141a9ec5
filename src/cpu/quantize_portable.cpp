// q = clamp(rint(x / s) + z, q_min, q_max), scales found on the way; into (rows, cols), (cols, rows) or both from one
// read. Stochastic: floor(x / s + u) + z.
#include "cpu/segments.h"

namespace octile::cpu {

namespace {

template <class Real>
struct QuantizeRun {
  const Real* x;
  const Real* s;
  const std::int32_t* z;
  const std::uint16_t* noise;
  Real q_min, q_max;
  std::int64_t n;
  std::uint8_t* q;
};

// Integers as their low bytes, which serve s8, u8 and s4 alike. A segment whose scale is NaN gets 0.
template <bool stochastic>
struct QuantizePiece {
  template <Isa, class Real>
  OCTILE_INLINE static void run(QuantizeRun<Real> p) {
    const Real* __restrict x = p.x;
    const Real* __restrict s = p.s;
    const std::int32_t* __restrict z = p.z;
    const std::uint16_t* __restrict noise = p.noise;
    std::uint8_t* __restrict q = p.q;
    for (std::int64_t i = 0; i < p.n; ++i) {
      const Real offset = static_cast<Real>(z[i]);
      const std::uint16_t u = stochastic ? noise[i] : std::uint16_t{0};
      const std::int32_t level = offset_level<stochastic>(x[i] / s[i], p.q_min - offset, p.q_max - offset, u) + z[i];
      q[i] = static_cast<std::uint8_t>(s[i] == s[i] ? level : 0);
    }
  }
};

template <class Real>
class WriteIntegers {
 public:
  static constexpr bool kPoisonsSegments = true;

  WriteIntegers(const QuantizeProblem& p, const QuantizeOperands& o) : p_(p), o_(o) {}

  void piece(const Piece<Real>& piece, std::int64_t block_row) {
    // Bytes that need neither packing nor turning go straight to their place.
    const bool direct = o_.q.present() && o_.q.dtype != DType::s4 && !o_.q_transposed.present();
    std::uint8_t* q = direct ? row_of(piece) : tile_ + block_row * kChunk;
    const QuantizeRun<Real> run{
        piece.x, piece.s, piece.z, piece.noise, static_cast<Real>(p_.q_min), static_cast<Real>(p_.q_max), piece.n, q};
    piece.noise ? multiversion<QuantizePiece<true>>(run) : multiversion<QuantizePiece<false>>(run);
    if (direct || !o_.q.present()) return;
    if (o_.q.dtype == DType::s4) {
      pack_s4(q, piece.n, static_cast<std::uint8_t*>(o_.q.data), piece.row * o_.q.strides[0] + piece.col);
    } else {
      std::copy_n(q, piece.n, row_of(piece));
    }
  }

  void block(std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t n) {
    if (!o_.q_transposed.present()) return;
    auto* data = static_cast<std::uint8_t*>(o_.q_transposed.data);
    const std::int64_t stride = o_.q_transposed.strides[0];
    if (o_.q_transposed.dtype != DType::s4) {
      transpose({tile_, kChunk}, {data + col * stride + row, stride}, rows, n);
      return;
    }
    for (std::int64_t c = 0; c < n; c += kTurnedBlock) {
      const std::int64_t count = std::min(kTurnedBlock, n - c);
      std::uint8_t turned[kTurnedBlock * kTurnedBlock];
      transpose({tile_ + c, kChunk}, {turned, kTurnedBlock}, rows, count);
      for (std::int64_t i = 0; i < count; ++i) {
        pack_s4(turned + i * kTurnedBlock, rows, data, (col + c + i) * stride + row);
      }
    }
  }

 private:
  std::uint8_t* row_of(const Piece<Real>& piece) const {
    return static_cast<std::uint8_t*>(o_.q.data) + piece.row * o_.q.strides[0] + piece.col;
  }

  const QuantizeProblem& p_;
  const QuantizeOperands& o_;
  alignas(64) std::uint8_t tile_[kTurnedBlock * kChunk];  // (kTurnedBlock, kChunk)
};

template <class Real>
void quantize(const QuantizeProblem& p, const QuantizeOperands& o) {
  // A transposed row of 64 bytes is a cache line. Otherwise a block is read twice from the first-level cache.
  const std::int64_t cols = std::max<std::int64_t>(o.x.cols(), 1);
  const std::int64_t block_rows =
      o.q_transposed.present() ? kTurnedBlock : std::clamp<std::int64_t>(16384 / cols, 1, kTurnedBlock);
  SegmentWalk<Real, WriteIntegers<Real>>(p, o, block_rows).run();
}

}  // namespace

void quantize_portable(const QuantizeProblem& p, const QuantizeOperands& o, const Launch&) {
  p.x == DType::f64 ? quantize<double>(p, o) : quantize<float>(p, o);
}

std::size_t quantize_portable_workspace(const QuantizeProblem&) { return 0; }

}  // namespace octile::cpu
