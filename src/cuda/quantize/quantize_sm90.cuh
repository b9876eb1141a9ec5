// quantize_bands: segments are rows or columns; out in (cols, rows), or in both orientations. x is read once: a cluster
// of blocks keeps a band, 32 rows or the elements of 8 vectors' columns, in its shared memories, and its blocks
// exchange their maxima.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/device/bytes.cuh"
#include "cuda/device/elementwise.cuh"
#include "cuda/device/plain.cuh"

namespace octile::cuda {

namespace cg = cooperative_groups;

template <class T>
struct QuantizeArguments {
  const T* x;
  std::int64_t x_stride;
  std::uint8_t* q;  // may be null
  std::int64_t q_stride;
  std::uint8_t* q_transposed;  // may be null
  std::int64_t q_transposed_stride;
  std::int64_t rows, cols;
  PlainRules rules;
  RowScale<float> given_scale;  // of the segments
  float* scale;                 // may be null
  std::int64_t scale_stride;
  RowScale<float> row_factors;  // used if `factors`
  bool factors;
  bool aligned_out;  // 16 bytes of q_transposed's rows
};

enum class Scope { row, column, known };

constexpr int kBandThreads = 512;
constexpr int kBandWarps = kBandThreads / 32;
constexpr int kMaxCluster = 16;
constexpr int kBandRows = 32;      // of a band of rows
constexpr int kColumnVectors = 8;  // of a row in a band of columns
constexpr int kKnownVectors = 32;  // of a row in a tile whose scale is known
constexpr int kKnownRows = 128;
constexpr int kMaxShared = 208 << 10;

// One block's part of a band: `rows` (a multiple of 32) by `vectors` of 16 bytes.
struct Part {
  int rows, vectors;
};

// Where vector v of row r lies, and then its levels as bytes: 8 of its 16, the first or the second. The 16-row chunks
// of a column of bytes that 32 lanes read at a time are in different banks.
__device__ inline int place(const Part& part, int r, int v) {
  return (r * part.vectors + (part.rows > 32 ? v ^ (r / 32 % 8) : v)) * 16;
}
__device__ inline int byte_place(const Part& part, int r, int v) { return place(part, r, v) + r / 16 % 2 * 8; }

__device__ inline void copy_async(void* shared, const void* global) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One vector of a block's part, for the thread that has it.
template <class T>
struct Item {
  int r;                 // row of the part
  Vector<T>* shared;     // where it lies
  unsigned char* bytes;  // and where its levels go
  const T* x;
  std::uint8_t* q;
};

// A block's part: (rows, vectors) of it are inside the matrix, the first at (r0, c0).
template <class T, Scope scope>
struct PartWalk {
  static constexpr int n = kVectorSize<T>;
  static constexpr int kLanes = scope == Scope::column ? kColumnVectors : 32;  // that share a row
  static constexpr int kStep = kBandThreads / kLanes;                          // rows at a time

  unsigned char* tile;
  Part part;
  std::int64_t r0, c0;
  int rows, vectors;
  int first_row, lane;

  // Tiles with a known scale come in reverse: the pass before this one read the last ones last.
  __device__ PartWalk(const QuantizeArguments<T>& a, Part given, unsigned char* memory) : tile(memory), part(given) {
    if constexpr (scope == Scope::column) part.vectors = kColumnVectors;
    if constexpr (scope == Scope::known) part = {kKnownRows, kKnownVectors};
    if constexpr (scope == Scope::row) part.rows = kBandRows;
    r0 = std::int64_t{scope == Scope::known ? gridDim.y - 1 - blockIdx.y : blockIdx.y} * part.rows;
    c0 = std::int64_t{scope == Scope::known ? gridDim.x - 1 - blockIdx.x : blockIdx.x} * part.vectors * n;
    rows = static_cast<int>(max(std::int64_t{0}, min(std::int64_t{part.rows}, a.rows - r0)));
    vectors = static_cast<int>(max(std::int64_t{0}, min(std::int64_t{part.vectors}, (a.cols - c0) / n)));
    first_row = static_cast<int>(threadIdx.x) / kLanes;
    lane = static_cast<int>(threadIdx.x) % kLanes;
  }

  // Calls visit(Item) for every vector of this thread. Places in shared memory follow from the index of an unrolled
  // loop, pointers from additions: with the general place(), addresses took twice as many instructions as levels.
  template <class Visit>
  __device__ void for_each(const QuantizeArguments<T>& a, const Visit& visit) const {
    const std::int64_t row = r0 + first_row;
    const T* x = a.x + row * a.x_stride + c0 + lane * n;
    std::uint8_t* q = a.q + row * a.q_stride + c0 + lane * n;
    unsigned char* shared = tile + first_row * part.vectors * 16;
    [[maybe_unused]] const int start = scope == Scope::column ? lane ^ (first_row / 32) : lane;
    constexpr int kUnroll = scope == Scope::row ? 2 : scope == Scope::known ? kKnownRows / kStep : 4;
    for (int r = first_row; r < rows;) {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (r < rows) {
          if constexpr (scope == Scope::row) {
#pragma unroll 4
            for (int v = lane; v < vectors; v += kLanes) {
              unsigned char* const at = shared + v * 16;
              const int along = (v - lane) * n;
              visit(Item<T>{r, reinterpret_cast<Vector<T>*>(at), at + k % 2 * 8, x + along, q + along});
            }
          } else if (lane < vectors) {
            const int transposed = scope == Scope::known ? start ^ (k / 2) : start ^ (2 * k);
            const int half = scope == Scope::known ? k % 2 : first_row / 16 % 2;
            unsigned char* const at = shared + transposed * 16;
            visit(Item<T>{r, reinterpret_cast<Vector<T>*>(at), at + half * 8, x, q});
          }
        }
        r += kStep;
        x += kStep * a.x_stride;
        q += kStep * a.q_stride;
        shared += kStep * part.vectors * 16;
      }
    }
  }

  // The bytes that have been written over x, as rows of q_transposed: four columns and 16 rows for each thread,
  // neighbouring lanes down the rows.
  __device__ void write_transposed(const QuantizeArguments<T>& a) const {
    constexpr int kDown = scope == Scope::row ? 2 : scope == Scope::known ? 8 : 16;
    const int chunks = (rows + 15) / 16;
    const int words = part.vectors * (n / 4);
    const int turns = scope == Scope::row ? words : (chunks + kDown - 1) / kDown * words;
    for (int i = static_cast<int>(threadIdx.x); i < turns * kDown; i += kBandThreads) {
      // The lanes down the rows, then four-column words, then further rows.
      const int word = scope == Scope::row ? i / kDown : i / kDown % words;
      const int chunk = (scope == Scope::row ? 0 : i / kDown / words * kDown) + i % kDown;
      const int v = word / (n / 4);
      if (chunk >= chunks || v >= vectors) continue;
      // Sixteen rows have one place in the pattern of banks.
      const unsigned char* const from = tile + byte_place(part, chunk * 16, v) + word % (n / 4) * 4;
      std::uint32_t columns[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        std::uint32_t in[4];
        std::uint32_t transposed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          in[j] = *reinterpret_cast<const std::uint32_t*>(from + (4 * k + j) * part.vectors * 16);
        }
        transpose_4x4(in, transposed);
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[j][k] = transposed[j];
      }
      std::uint8_t* to = a.q_transposed + (c0 + word * 4) * a.q_transposed_stride + r0 + chunk * 16;
#pragma unroll
      for (int j = 0; j < 4; ++j, to += a.q_transposed_stride) {
        put_column(to, columns[j], rows - chunk * 16, a.aligned_out);
      }
    }
  }

 private:
  __device__ static void put_column(std::uint8_t* to, const std::uint32_t (&words)[4], int count, bool aligned) {
    if (aligned && count >= 16) {
      *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
      return;
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      if (k < count) to[k] = static_cast<std::uint8_t>(words[k / 4] >> k % 4 * 8);
    }
  }
};

template <class T, Scope scope>
__global__ void __launch_bounds__(kBandThreads, scope == Scope::column ? 2 : 3)
    quantize_bands(QuantizeArguments<T> a, Part given_part, const float* known) {
  constexpr int n = kVectorSize<T>;
  using Walk = PartWalk<T, scope>;
  extern __shared__ __align__(16) unsigned char tile[];
  // Row scope: of the block's 32 rows. Column scope: of the block's 8 n columns. One list for each block.
  constexpr int kSegments = scope == Scope::column ? kColumnVectors * n : kBandRows;
  __shared__ float block_max[scope == Scope::known ? 1 : kMaxCluster][kSegments];
  __shared__ float warp_max[scope == Scope::column ? kBandWarps : 1][kSegments];
  __shared__ PlainScale scales[kSegments];
  const cg::cluster_group cluster = cg::this_cluster();
  const int thread = static_cast<int>(threadIdx.x);
  const int peers = static_cast<int>(cluster.num_blocks());
  const int rank = static_cast<int>(cluster.block_rank());
  const Walk walk(a, given_part, tile);
  const int rows = walk.rows;
  const int vectors = walk.vectors;
  const int lane = walk.lane;
  const std::int64_t r0 = walk.r0;
  const std::int64_t c0 = walk.c0;
  const auto for_each = [&](const auto& visit) { walk.for_each(a, visit); };

  cluster.barrier_arrive();
  wait_for_previous();
  let_next_start();
  for_each([&](const Item<T>& item) { copy_async(item.shared, item.x); });
  if constexpr (scope == Scope::known) {
    if (thread == 0) scales[0] = {known[0], known[1], known[2]};
  }
  wait_for_copies();
  __syncthreads();
  cluster.barrier_wait();  // all blocks have begun: their shared memory can be written

  const auto factor_at = [&](int r) { return a.factors ? a.row_factors[r0 + r] : 1.0f; };

  // The maxima of this block's part of each segment, to every block of the cluster.
  if constexpr (scope == Scope::row) {
    for (int r = walk.first_row; r < kBandRows; r += Walk::kStep) {
      Magnitude<T> magnitude;
      const auto* const row = reinterpret_cast<const Vector<T>*>(tile) + r * walk.part.vectors;
#pragma unroll 4
      for (int v = lane; v < vectors; v += Walk::kLanes) {
        if (r < rows) magnitude.include(row[v]);
      }
      const float largest = max_of_lanes(magnitude.value());
      if (lane < peers) *cluster.map_shared_rank(&block_max[rank][r], lane) = largest;
    }
  } else if constexpr (scope == Scope::column) {
    float largest[n] = {};
    for_each([&](const Item<T>& item) {
      float x[n];
      widen(*item.shared, x);
      const float factor = factor_at(item.r);
#pragma unroll
      for (int i = 0; i < n; ++i) largest[i] = max_nan(largest[i], fabsf(__fmul_rn(x[i], factor)));
    });
#pragma unroll
    for (int i = 0; i < n; ++i) {
      largest[i] = max_nan(largest[i], __shfl_xor_sync(~0u, largest[i], 8));
      largest[i] = max_nan(largest[i], __shfl_xor_sync(~0u, largest[i], 16));
      if (thread % 32 < Walk::kLanes) warp_max[thread / 32][lane * n + i] = largest[i];
    }
    __syncthreads();
    if (thread < kSegments) {
      float all = 0;
      for (int w = 0; w < kBandWarps; ++w) all = max_nan(all, warp_max[w][thread]);
      for (int peer = 0; peer < peers; ++peer) *cluster.map_shared_rank(&block_max[rank][thread], peer) = all;
    }
  }

  if constexpr (scope != Scope::known) {
    cluster.sync();
    if (thread < kSegments) {
      const std::int64_t segment = (scope == Scope::row ? r0 : c0) + thread;
      const bool valid = segment < (scope == Scope::row ? a.rows : a.cols);
      float largest = 0;
      for (int peer = 0; peer < peers; ++peer) largest = max_nan(largest, block_max[peer][thread]);
      const PlainScale g = plain_scale(a.rules, largest, a.rules.given && valid ? a.given_scale[segment] : 1.0f);
      scales[thread] = g;
      if (valid && rank == 0 && a.scale) a.scale[segment * a.scale_stride] = g.s;
    }
    __syncthreads();
  }

  // Levels: to q, and over the first or second half of the vector that they come from.
  const bool to_q = a.q != nullptr;
  const bool to_transposed = a.q_transposed != nullptr;
  const auto put = [&](const Item<T>& item, const LevelBytes<n>& bytes) {
    if (to_q) bytes.store(item.q);
    if (to_transposed) bytes.store(item.bytes);
  };
  if constexpr (scope == Scope::column) {
    PlainScale g[n];
    bool good = true;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      g[i] = scales[lane * n + i];
      good = good && g[i].good();
    }
    const float low = a.rules.q_min + rounder(0.0f);
    const float high = a.rules.q_max + rounder(0.0f);
    for_each([&](const Item<T>& item) {
      float x[n];
      std::int32_t levels[n];
      widen(*item.shared, x);
      const float factor = factor_at(item.r);
      bool sure = true;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        x[i] = __fmul_rn(x[i], factor);
        const float rounded = __fmaf_rn(x[i], g[i].inv, rounder(0.0f));
        sure = sure && fabsf(__fmaf_rn(rounder(0.0f) - rounded, g[i].s, x[i])) < g[i].sure;
        levels[i] = low_bits(fminf(fmaxf(rounded, low), high));
      }
      if (!sure) {
#pragma unroll
        for (int i = 0; i < n; ++i) levels[i] = divided_level(x[i], g[i].s, a.rules.q_min, a.rules.q_max);
      }
      if (!good) {
#pragma unroll
        for (int i = 0; i < n; ++i) levels[i] = g[i].good() ? levels[i] : 0;
      }
      put(item, LevelBytes<n>(levels, true));
    });
  } else {
    PlainScale g = scales[0];
    for_each([&](const Item<T>& item) {
      if constexpr (scope == Scope::row) g = scales[item.r];
      put(item, plain_bytes(*item.shared, g, a.rules));
    });
  }
  if (!a.q_transposed) return;
  __syncthreads();
  walk.write_transposed(a);
}

// quantize_tensor: one segment, row-major out. One cooperative launch: the maximum, a barrier of the whole grid, the
// levels. What each SM read last it keeps, 204 KiB in shared memory and 72 KiB in registers: 37 MB on an
// H200; the second pass goes backwards, so that some of the rest is in L2.

constexpr int kTensorThreads = 768;
constexpr int kHeld = 6;      // vectors that a thread keeps in registers
constexpr int kStashed = 17;  // and in shared memory
constexpr int kAhead = 4;     // loads in flight for each thread, twice

// The matrix has no gaps: it is `all` vectors, of which a block takes every gridDim.x-th slab of kTensorThreads.
// `partial`: the blocks' maxima. `known`: the scale for another kernel; then there is no second half.
template <class T>
__global__ void __launch_bounds__(kTensorThreads, 1)
    quantize_tensor(QuantizeArguments<T> a, std::int64_t all, float* partial, float* known) {
  constexpr int n = kVectorSize<T>;
  extern __shared__ __align__(16) unsigned char stash_bytes[];
  auto* const stash = reinterpret_cast<Vector<T>*>(stash_bytes) + threadIdx.x;
  __shared__ float warp_max[kTensorThreads / 32];
  __shared__ PlainScale of_block;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t step = std::int64_t{gridDim.x} * kTensorThreads;
  const std::int64_t first = std::int64_t{blockIdx.x} * kTensorThreads + threadIdx.x;
  // The same for all threads. Every turn but the last has all its vectors.
  const int turns = static_cast<int>(ceil_div(all, step));
  const int held = max(0, turns - kHeld);       // from here on they are held in registers,
  const int stashed = max(0, held - kStashed);  // from here on in shared memory; before, they are read again
  const T* const from = a.x + first * n;
  std::uint8_t* const to = a.q + first * n;
  const auto load = [&](int turn) { return load_vector(from + turn * (step * n), n, true); };
  const auto finish = [&](const Vector<T>& v, const PlainScale& g, int turn) {
    plain_bytes(v, g, a.rules).store(to + turn * (step * n));
  };

  wait_for_previous();
  let_next_start();
  Magnitude<T> magnitude;
  int turn = 0;
  for (; turn + 2 * kAhead <= stashed; turn += 2 * kAhead) {
    Vector<T> v[2 * kAhead];
#pragma unroll
    for (int k = 0; k < 2 * kAhead; ++k) v[k] = load(turn + k);
#pragma unroll
    for (int k = 0; k < 2 * kAhead; ++k) magnitude.include(v[k]);
  }
  for (; turn < stashed; ++turn) magnitude.include(load(turn));
  for (; turn < held; ++turn) copy_async(stash + (turn - stashed) * kTensorThreads, from + turn * (step * n));
  Vector<T> last[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    last[k] = turn + k < turns && first + (turn + k) * step < all ? load(turn + k) : Vector<T>{};
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) magnitude.include(last[k]);
  wait_for_copies();
  for (int slot = 0; slot < held - stashed; ++slot) magnitude.include(stash[slot * kTensorThreads]);

  const float lanes_max = max_of_lanes(magnitude.value());
  if (thread % 32 == 0) warp_max[thread / 32] = lanes_max;
  __syncthreads();
  if (thread < 32) {
    const float largest = max_of_lanes(thread < kTensorThreads / 32 ? warp_max[thread] : 0.0f);
    if (thread == 0) partial[blockIdx.x] = largest;
  }
  // The first loads of the second pass are on their way while the blocks wait for one another.
  Vector<T> even[kAhead];
  Vector<T> odd[kAhead];
  const auto load_again = [&](int before, Vector<T>(&v)[kAhead]) {
    const T* p = from + (before - 1) * (step * n);
#pragma unroll
    for (int k = 0; k < kAhead; ++k, p -= step * n) {
      if (before - k > 0) v[k] = load_vector(p, n, true);
    }
  };
  load_again(stashed, even);
  cg::this_grid().sync();
  if (thread < 32) {
    float largest = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += 32) largest = max_nan(largest, __ldcg(partial + i));
    const PlainScale g = plain_scale(a.rules, max_of_lanes(largest), a.rules.given ? a.given_scale[0] : 1.0f);
    if (thread == 0) of_block = g;
    if (thread == 0 && blockIdx.x == 0) {
      if (a.scale) *a.scale = g.s;
      if (known) known[0] = g.s, known[1] = g.inv, known[2] = g.sure;
    }
  }
  if (known) return;
  __syncthreads();
  const PlainScale g = of_block;

#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (held + k < turns && first + (held + k) * step < all) finish(last[k], g, held + k);
  }
  // What is in shared memory is written between reads, so that reads and writes overlap.
  int slot = held - stashed - 1;
  const auto finish_slot = [&] {
    if (slot >= 0) finish(stash[slot * kTensorThreads], g, stashed + slot);
    --slot;
  };
  const auto finish_again = [&](int before, const Vector<T>(&v)[kAhead]) {
    std::uint8_t* p = to + (before - 1) * (step * n);
#pragma unroll
    for (int k = 0; k < kAhead; ++k, p -= step * n) {
      if (before - k > 0) plain_bytes(v[k], g, a.rules).store(p);
    }
  };
  for (turn = stashed; turn > 0; turn -= 2 * kAhead) {
    load_again(turn - kAhead, odd);
    finish_slot();
    finish_again(turn, even);
    load_again(turn - 2 * kAhead, even);
    finish_slot();
    finish_again(turn - kAhead, odd);
  }
  while (slot >= 0) finish_slot();
}

}  // namespace octile::cuda
