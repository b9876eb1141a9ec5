// Runs of neighbouring elements, between memory and the arithmetic type; and which thread does how much.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/thread_pool.h"
#include "octile/tensor.h"

namespace octile::cpu {

// Elements i .. i + n - 1 of a float array as Real (float; double for f64).
template <class Real>
void widen(DType dtype, const void* data, std::int64_t i, std::int64_t n, Real* out);

// The same without a copy where the array already holds Real; otherwise `buffer` is filled and returned.
template <class Real>
const Real* widened(DType dtype, const void* data, std::int64_t i, std::int64_t n, Real* buffer) {
  if (dtype == DTypeOf<Real>::value) return static_cast<const Real*>(data) + i;
  widen(dtype, data, i, n, buffer);
  return buffer;
}

// Rounds n values to elements i .. i + n - 1 of a float array.
template <class Real>
void narrow(DType dtype, void* data, std::int64_t i, std::int64_t n, const Real* values);

// Adds n values to elements i .. i + n - 1 of an array of Real.
template <class Real>
void add(void* data, std::int64_t i, std::int64_t n, const Real* values);

// Where to write n values of Real that `narrow` will take: the array itself where it holds Real, else `buffer`.
template <class Real>
Real* narrowing_target(DType dtype, void* data, std::int64_t i, Real* buffer) {
  return dtype == DTypeOf<Real>::value ? static_cast<Real*>(data) + i : buffer;
}

// Elements i .. i + n - 1 of an s8, u8 or s4 array.
void widen_integers(DType dtype, const void* data, std::int64_t i, std::int64_t n, std::int16_t* out);

// Elements i .. i + n - 1 of an s4 array, as bytes.
void unpack_s4(const std::uint8_t* data, std::int64_t i, std::int64_t n, std::int8_t* out);

// Packs n bytes as elements i .. i + n - 1 of an s4 array. Element i - 1 keeps its nibble; the one after the last
// becomes 0 if it shares a byte with it.
void pack_s4(const std::uint8_t* bytes, std::int64_t n, std::uint8_t* data, std::int64_t i);

// A matrix of bytes, row-major.
struct Bytes {
  std::uint8_t* data;
  std::int64_t stride;
};
struct ConstBytes {
  const std::uint8_t* data;
  std::int64_t stride;
};
// `to` (cols, rows) becomes the transpose of `from` (rows, cols).
void transpose(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols, bool around_caches = false);

// Copies on the way to memory: past the caches where the machine can do that. What was written so is seen by other
// threads after `end_copies`.
void copy_around_caches(void* to, const void* from, std::int64_t bytes);
// `rows` times `lines` lines of 64 bytes, each row to an aligned place.
void copy_rows_around_caches(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t lines);
void end_copies();

// The last-level cache that a program may count on; the system's own figure is at times that of all sockets. Tests
// lower it.
inline constinit std::atomic<double> cache_bytes = 32 << 20;
// Whether a kernel that moves this many bytes should write around the caches: by its end they would hold little of what
// it wrote, and a line that is not written whole is read first. Zen 5, 64 MiB in and 16 MiB out: 1.7 ms, else 1.9.
inline bool outgrows_caches(double bytes) { return bytes > cache_bytes.load(std::memory_order_relaxed); }

// Floats on their way to a tensor: rounded to its type, and past the caches where the kernel outgrows them. `elements`
// of the tensor's type is what the kernel moves in all.
template <class Real>
class FloatsOut {
 public:
  FloatsOut(const Tensor& t, double elements) : t_(t), around_caches_(outgrows_caches(elements * bits(t.dtype) / 8)) {}
  FloatsOut(const FloatsOut&) = delete;
  FloatsOut& operator=(const FloatsOut&) = delete;
  ~FloatsOut() {
    if (around_caches_) end_copies();
  }

  // Where to write what goes to element i and those after it: the tensor itself, or `buffer`.
  Real* target(std::int64_t i, Real* buffer) const {
    return t_.dtype == DTypeOf<Real>::value && !around_caches_ ? static_cast<Real*>(t_.data) + i : buffer;
  }

  // Takes n <= kMax values from where `target` said.
  static constexpr std::int64_t kMax = 2048;
  void put(std::int64_t i, std::int64_t n, const Real* values) const {
    const std::int64_t bytes = bits(t_.dtype) / 8;
    void* to = static_cast<char*>(t_.data) + i * bytes;
    if (!around_caches_) return narrow<Real>(t_.dtype, t_.data, i, n, values);
    if (t_.dtype == DTypeOf<Real>::value) return copy_around_caches(to, values, n * bytes);
    alignas(64) std::uint16_t narrowed[kMax];  // f16 or bf16
    narrow<Real>(t_.dtype, narrowed, 0, n, values);
    copy_around_caches(to, narrowed, n * bytes);
  }

 private:
  const Tensor& t_;
  bool around_caches_;
};

// Lines of memory to be fetched while something else is computed, some for each step of kAheadStep elements. Hardware
// prefetchers stop at the end of a page, and do not see the next row while this one is looked at a second time.
// Zen 5, two threads reading: 38 GB/s without, 48 GB/s with.
inline constexpr std::int64_t kAheadStep = 128;
struct Ahead {
  std::uintptr_t next = 0;
  int lines = 0;

  Ahead() = default;
  template <class T>
  Ahead(const T* x, std::int64_t elements, int lines_per_step)
      : next(reinterpret_cast<std::uintptr_t>(x) + static_cast<std::uintptr_t>(elements) * sizeof(T)),
        lines(lines_per_step) {}

  // What is fetched while the elements after the next n are looked at.
  Ahead after(std::int64_t n) const {
    Ahead later = *this;
    later.next += static_cast<std::uintptr_t>(n / kAheadStep * lines) * 64;
    return later;
  }

  __attribute__((always_inline)) void prefetch() {
    for (int i = 0; i < lines; ++i, next += 64) __builtin_prefetch(reinterpret_cast<const void*>(next), 0, 3);
  }
};

// From element (row, col) of a matrix on.
inline Ahead ahead_of(const ConstTensor& t, std::int64_t row, std::int64_t col) {
  const int size = bits(t.dtype);
  return {static_cast<const char*>(t.data), (row * t.strides[0] + col) * size / 8,
          static_cast<int>(kAheadStep) * size / 512};
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// Hands out a workspace piece by piece; or, without one, only adds up how much is needed.
class Pieces {
 public:
  explicit Pieces(void* workspace) : data_(static_cast<std::uint8_t*>(workspace)) {}
  std::uint8_t* take(std::int64_t bytes) {
    std::uint8_t* piece = data_ ? data_ + size_ : nullptr;
    size_ += bytes;
    return piece;
  }
  std::int64_t size() const { return size_; }

 private:
  std::uint8_t* data_;
  std::int64_t size_ = 0;
};

// Waking a thread costs about as much as this many units (an element quantized, or 32 products of a matrix
// multiplication): each thread in use has at least as much to do.
inline constexpr double kWorthAThread = 16384;

// Of a product with an integer weight (cols, k): 256 products take about as long as reading 16 bytes of it.
inline double product_units(std::int64_t rows, std::int64_t cols, std::int64_t k) {
  const double weight = static_cast<double>(cols) * static_cast<double>(k);
  return weight * std::max(static_cast<double>(rows) / 256, 1.0 / 16);
}
inline int useful_threads(int threads, double units) {
  const int max = std::min(threads > 0 ? threads : hardware_threads(), kMaxThreads);
  return static_cast<int>(std::clamp(units / kWorthAThread, 1.0, static_cast<double>(max)));
}

// Calls body(worker, take) on workers 0 .. threads - 1 at most. take() gives each of them a part that no other has,
// until it gives `parts`. What a worker keeps from part to part it keeps in its own call.
template <class Body>
void share(int threads, std::int64_t parts, const Body& body) {
  std::atomic<std::int64_t> next = 0;
  parallel_for(threads, std::min<std::int64_t>(threads, parts), [&](std::int64_t worker) {
    body(worker, [&] { return std::min(parts, next.fetch_add(1, std::memory_order_relaxed)); });
  });
}

}  // namespace octile::cpu
