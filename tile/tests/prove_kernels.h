// Wrong kernels for the prover, of the kinds in the checker's tests, at any size. Written as kernels are: the caller
// decides what `int` is.
#pragma once

namespace octile::tile::wrong {

struct StartsTooEarly {
  void operator()(auto& t, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>) - 3;
    t.store(z + i, 1.0f, i < n);
  }
};
struct RowsOverlapInAStore {
  void operator()(auto& t, auto z, int n) const {
    const auto i = col(t.arange(c<4>)) * 6 + t.arange(c<8>);
    t.store(z + i, 1.0f, i < n);
  }
};
struct OneMoreThanABlock {
  void operator()(auto& t, auto z, int n) const {
    const auto i = t.program_id(0) * 8 + t.arange(c<16>);
    t.store(z + i, 1.0f, (t.arange(c<16>) <= 8) & (i < n));
  }
};
struct ReadsItsNeighbour {
  void operator()(auto& t, auto shared, auto z, int n) const {
    const int p = t.program_id(0);
    t.store(z + p, t.load(shared + (p + 1) % n));
    t.store(shared + p, 1.0f);
  }
};
struct ReadsWhatItStored {
  void operator()(auto& t, auto z, int n) const {
    const auto i = t.program_id(0) * 16 + t.arange(c<16>);
    t.store(z + i, 1.0f, i < n);
    t.store(z + i, t.load(z + i, i < n) + 1.0f, i < n);
  }
};
struct ReversesInPlace {
  void operator()(auto& t, auto x, int n) const {
    const auto i = t.arange(c<64>);
    const auto v = t.load(x + (n - 1 - i), i < n);
    t.store(x + i, v, i < n);
  }
};
struct RowsOverlapInALoop {
  void operator()(auto& t, auto z, int n) const {
    const auto j = t.arange(c<32>);
    for (int row : range(cdiv(n, 20))) t.store(z + (j + row * 20), 1.0f, j + row * 20 < n);
  }
};
struct OtherShape {
  void operator()(auto& t, auto z, int n) const {
    t.store(z + t.arange(c<64>), 0.0f, t.arange(c<64>) < n);
    const auto i = col(t.arange(c<8>)) * 8 + t.arange(c<8>);
    t.store(z + i, 1.0f, i < n);
  }
};
struct LoadsAheadOfItsStores {
  void operator()(auto& t, auto x, auto z, int n) const {
    t.pipeline(
        c<3>, n - 1,
        [&](int k) {
          return fetches(t.fetch(z + (t.arange(c<16>) + 16 * k)), t.fetch(x + (t.arange(c<16>) + 16 * k)));
        },
        [&](int k, const auto& before, const auto& v) {
          t.store(z + (t.arange(c<16>) + 16 * (k + 1)), before + v);
          t.barrier();
        });
  }
};
struct IndexFromAMaskedLoad {
  void operator()(auto& t, auto index, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(z + t.load(index + i, i < n), 1.0f);
  }
};
struct MaskFromAMaskedLoad {
  void operator()(auto& t, auto flags, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(z + i, 1.0f, t.load(flags + i, i < n) > 0);
  }
};
struct HistogramWithoutALimit {
  void operator()(auto& t, auto x, auto bins, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.atomic_add(bins + t.load(x + i, i < n, 0), 1, i < n);
  }
};
struct StoresBesideAtomics {
  void operator()(auto& t, auto total) const {
    t.atomic_add(total, 1);
    t.store(total + t.arange(c<1>), 0, t.arange(c<1>) + t.program_id(0) == 0);
  }
};
struct AddsToWhatNobodyWrote {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(z + i, t.load(z + i, i < n) + t.load(x + i, i < n), i < n);
  }
};
struct OffsetsPast32Bits {
  void operator()(auto& t, auto z, int n) const {
    const auto far = t.program_id(0) * 1500000 + t.arange(c<1>);
    t.store(z + (far * 1000 - far * 999 - t.program_id(0) * 1499999), 1.0f, t.program_id(0) + t.arange(c<1>) < n);
  }
};

// ---- And a second dozen, written before the prover knew them ----

struct TransposesWithTheWrongStride {
  void operator()(auto& t, auto x, auto z, int rows, int columns) const {
    const auto i = col(t.program_id(0) * 16 + t.arange(c<16>));
    const auto j = t.program_id(1) * 16 + t.arange(c<16>);
    const auto in = (i < rows) & (j < columns);
    t.store(z + j * columns + i, t.load(x + i * columns + j, in), in);
  }
};
struct RotatesByOne {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(z + i + 1, t.load(x + i, i < n), i < n);
  }
};
struct EvenElementsOnly {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = (t.program_id(0) * 32 + t.arange(c<32>)) * 2;
    t.store(z + i, t.load(x + i, i < n), i < n);
  }
};
struct LastBlockOfTheLoopMissing {
  void operator()(auto& t, auto x, auto z, int n) const {
    for (int k : range(0, n - 32, 32)) {
      const auto i = t.arange(c<32>) + k;
      t.store(z + i, t.load(x + i, i < n), i < n);
    }
  }
};
struct StencilWithoutItsBorder {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    const auto v = t.load(x + (i - 1), i < n) + t.load(x + (i + 1), i < n);
    t.store(z + i, v, i < n);
  }
};
struct GridStrideWithoutTheStride {
  void operator()(auto& t, auto x, auto z, int n) const {
    for (int k : range(0, n, 32)) {
      const auto i = t.arange(c<32>) + k;
      t.store(z + i, t.load(x + i, i < n), i < n);
    }
  }
};
struct DownsampledRowsOfTheInput {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(z + i, t.load(x + i * 2) + t.load(x + i * 2 + 1), i < n);
  }
};
struct UpperTriangleOnly {
  void operator()(auto& t, auto z, int n) const {
    const auto i = col(t.program_id(0) * 8 + t.arange(c<8>));
    const auto j = t.program_id(1) * 8 + t.arange(c<8>);
    t.store(z + i * n + j, 1.0f, (i < n) & (j < n) & (j >= i));
  }
};
struct SharedScratch {
  void operator()(auto& t, auto x, auto scratch, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(scratch + t.arange(c<32>), t.load(x + i, i < n, 0.0f));
    t.barrier();
    t.store(z + i, t.load(scratch + t.arange(c<32>)), i < n);
  }
};
struct BarrierInOneBranch {
  void operator()(auto& t, auto scratch, auto z, int n) const {
    const auto i = t.arange(c<32>);
    t.store(scratch + t.program_id(0) * 32 + i, 1.0f);
    if (n > 40) t.barrier();
    t.store(z + t.program_id(0) * 32 + i, t.load(scratch + t.program_id(0) * 32 + (31 - i)));
  }
};
struct BarrierBeforeTheLoopAlone {
  void operator()(auto& t, auto scratch, auto z, int n) const {
    const auto i = t.arange(c<32>);
    t.store(scratch + i, 0.0f);
    t.barrier();
    for (int k : range(n)) {
      const auto v = t.load(scratch + (31 - i));
      t.store(z + (i + k * 32), v);
      t.store(scratch + i, v + 1.0f);
    }
  }
};
struct GathersUnchecked {
  void operator()(auto& t, auto index, auto x, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(z + i, t.load(x + t.load(index + i, i < n, 0), i < n), i < n);
  }
};
struct ScattersWithTwins {
  void operator()(auto& t, auto index, auto x, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(z + t.load(index + i, i < n, 0), t.load(x + i, i < n), i < n);
  }
};
struct DividesByWhatMayBeZero {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    t.store(z + i, 100 / t.load(x + i, i < n, 1), i < n);
  }
};
struct OneProgramTooMany {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.program_id(0) * 32 + t.arange(c<32>);
    const auto from = i * (n / n);
    t.store(z + (from & 1023), t.load(x + i, i < n, 0.0f), i < n);
  }
};

// ---- Loops that carry something on: wrong from the third or a later iteration on ----

struct LateIndex {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.arange(c<32>);
    auto now = i * 1, next = i * 1;
    for (int k : range(n)) {
      t.store(z, sum(t.load(x + now)));
      now = next;
      next = (i + 32 + k * 0) * 1;
    }
  }
};
struct LatePointers {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.arange(c<32>);
    auto now = x + i * 1, next = x + i * 1;
    for ([[maybe_unused]] int k : range(n)) {
      t.store(z, sum(t.load(now)));
      now = next;
      next = x + i * 2;
    }
  }
};
struct LateMask {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.arange(c<64>);
    auto now = i < 32, next = i < 32;
    for ([[maybe_unused]] int k : range(n)) {
      t.store(z, sum(t.load(x + i, now, 0.0f)));
      now = next;
      next = i < 64;
    }
  }
};
struct LateValues {  // undefined from lane n on
  void operator()(auto& t, auto x, auto z, int n) const {
    auto first = t.full(c<32>, 0.0f), second = first, third = first;
    for (int k : range(n)) {
      first = second;
      second = third;
      third = t.load(x + k + t.arange(c<32>), t.arange(c<32>) < 32 - k);
    }
    t.store(z, sum(first));
  }
};
struct LateIndices {  // indices kept in tiles
  void operator()(auto& t, auto x, auto z, int n) const {
    auto now = t.full(c<32>, 0), next = t.full(c<32>, 0);
    for ([[maybe_unused]] int k : range(n)) {
      t.store(z, sum(t.load(x + now)));
      now = next;
      next = t.full(c<32>, 32);
    }
  }
};
struct LateNumber {
  void operator()(auto& t, auto x, auto z, int n) const {
    int blocks = 0;
    for ([[maybe_unused]] int k : range(n)) {
      const int slack = blocks > 999 ? 64 : 0;
      t.store(z, sum(t.load(x + (t.arange(c<32>) + slack))));
      blocks += 1;
    }
  }
};
struct LateStep {  // in a pipeline
  void operator()(auto& t, auto x, auto z, int n) const {
    int now = 0, next = 0;
    t.pipeline(
        c<3>, n, [&](int) { return fetches(t.fetch(x + t.arange(c<32>))); },
        [&](int, const auto&) {
          t.store(z + now, 1.0f);
          t.barrier();
          now = next;
          next = 1;
        });
  }
};
struct NoIteration {
  void operator()(auto& t, auto x, auto z, int n) const {
    int last = 40;
    for (int k : range(0, n - 1, 32)) last = k * 0;
    t.store(z, sum(t.load(x + (last + t.arange(c<32>)))));
  }
};
struct LateFlag {
  void operator()(auto& t, auto, auto z, int n) const {
    bool now = false, next = false;
    for ([[maybe_unused]] int k : range(n)) {
      if (now) t.store(z + 5, 1.0f);
      now = next;
      next = true;
    }
    t.store(z, 1.0f);
  }
};
struct EarlyEnd {
  void operator()(auto& t, auto x, auto z, int n) const {
    bool done = false;
    for (int k : range(n)) {
      if (!done) t.store(z, sum(t.load(x + t.arange(c<32>))));
      t.barrier();
      if (done) t.store(z + 1, 1.0f);
      done |= k >= 64;
    }
  }
};

}  // namespace octile::tile::wrong

namespace octile::tile::right {

// The second iteration leaves the same as the first.
struct CarriesOn {
  void operator()(auto& t, auto x, auto z, int n) const {
    const auto i = t.arange(c<32>);
    auto total = t.full(c<32>, 0.0f);
    auto count = t.full(c<1>, 0);
    auto mask = i < 32;
    bool any = false;
    int last = 0;
    for (int k : range(n)) {
      const auto v = t.load(x + k * 32 + i, mask, 0.0f);
      total += v;
      count = sum(where(v > 0.0f, 1, 0)) + 0 * count;
      mask = i < 32;
      any = true;
      last = k;
      for (int l : range(n)) last = l;
    }
    t.store(z + i, where(count > 0, total, 0.0f), i < last + 32);
    t.store(z + 32, any ? 1.0f : 0.0f);
  }
};

}  // namespace octile::tile::right
