// h = round_to_x(prologue(x)), or that of prologue(x) * up; s = max(max|h| / 127, min_scale) of each row; q = rint(h /
// s).
//
//   activate_rows       x is read once, and h stays in registers until the row's scale is known
//   activate_any_rows   rows that are long, odd or unaligned: h is computed twice
//   transpose_bytes     q (rows, cols) to q_transposed (cols, rows)
//
// What else was tried, and the times: docs/notes/gpu.md, "Prologues".
#include "cuda/device/sigmoid.cuh"
#include "cuda/quantize/prologue_quantize_sm80.cuh"

namespace octile::cuda {

namespace {

constexpr std::string_view kRows = "prologue_quantize_sm80";
constexpr std::string_view kAnyRows = "prologue_quantize_sm80 (any rows)";
constexpr std::string_view kTranspose = "prologue_quantize_sm80 (transpose)";

template <class T>
struct ActivateArguments : PrologueArguments {
  Rows<const T> x, up;
};

// Blocks of kRowThreads on an SM: with a third the registers of a gated row spill (H200, 16384 x 16384 bf16, both
// orientations: gelu 484 us, 522 with two; swiglu 589, 552 with two).
template <int kVectors, bool gated>
constexpr int kActivateBlocks = kVectors > kVectorsOfMany || gated ? 2 : 3;

// A row of the block, a power of two up to 32 threads or whole warps, keeps a row: kVectors vectors for each thread.
template <class T, int kVectors, Prologue prologue, bool gated>
__global__ void __launch_bounds__(kRowThreads, kActivateBlocks<kVectors, gated>)
    activate_rows(const ActivateArguments<T> a) {
  constexpr int n = kVectorSize<T>;
  const int lane = static_cast<int>(threadIdx.x);
  const int width = static_cast<int>(blockDim.x);
  const std::int64_t r = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int vectors = r < a.rows ? static_cast<int>(a.cols / n) : 0;
  let_next_start();
  wait_for_previous();
  Vector<T> h[kVectors] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (k * width + lane < vectors) h[k] = load_vector(a.x.at(r, (k * width + lane) * n), n, true);
  }
  Magnitude<T> magnitude;
  Vector<T> up = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (k * width + lane >= vectors) break;
    if constexpr (gated) up = load_vector(a.up.at(r, (k * width + lane) * n), n, true);
    h[k] = activation<T, prologue, gated>(h[k], up);
    magnitude.include(h[k]);
  }
  const PlainScale g = scale_of_row(a.rules, magnitude.value(), lane, width);
  if (lane == 0 && vectors > 0) a.scale[r * a.scale_stride] = g.s;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (k * width + lane >= vectors) break;
    plain_bytes(h[k], g, a.rules).store(a.q + r * a.q_stride + (k * width + lane) * n);
  }
}

// A block has a row, at any address and of any length.
template <class T, Prologue prologue, bool gated>
__global__ void __launch_bounds__(kRowThreads) activate_any_rows(const ActivateArguments<T> a) {
  constexpr int n = kVectorSize<T>;
  const std::int64_t r = blockIdx.x;
  let_next_start();
  wait_for_previous();
  const auto at = [&](std::int64_t c) {
    const int count = static_cast<int>(min(std::int64_t{n}, a.cols - c));
    const Vector<T> x = load_vector(a.x.at(r, c), count, a.x.aligned);
    const Vector<T> up = gated ? load_vector(a.up.at(r, c), count, a.up.aligned) : Vector<T>{};
    return activation<T, prologue, gated>(x, up);
  };
  const std::int64_t step = std::int64_t{kRowThreads} * n;
  Magnitude<T> magnitude;
  for (std::int64_t c = threadIdx.x * n; c < a.cols; c += step) magnitude.include(at(c));
  const PlainScale g = scale_of_row(a.rules, magnitude.value(), static_cast<int>(threadIdx.x), kRowThreads);
  if (threadIdx.x == 0) a.scale[r * a.scale_stride] = g.s;
  for (std::int64_t c = threadIdx.x * n; c < a.cols; c += step) {
    const LevelBytes<n> bytes = plain_bytes(at(c), g, a.rules);
    a.put_bytes(r, c, bytes);
  }
}

constexpr int kTile = 128;  // rows and columns: whole lines of both matrices
constexpr int kTileThreads = 256;
constexpr int kPitch = kTile / 4 + 1;  // words
// Words before row r of the tile. Four more for each 16 rows: chunks of 16 that 8 lanes read are in different banks.
__device__ inline int row_place(int r) { return r * kPitch + r / 16 * 4; }

template <bool kAligned>
__global__ void __launch_bounds__(kTileThreads)
    transpose_bytes(IntegerRows from, IntegerRows to, std::int64_t rows, std::int64_t cols) {
  __shared__ std::uint32_t tile[kTile * kPitch + kTile / 16 * 4];
  const std::int64_t r0 = std::int64_t{blockIdx.y} * kTile;
  const std::int64_t c0 = std::int64_t{blockIdx.x} * kTile;
  const int thread = static_cast<int>(threadIdx.x);
  let_next_start();
  wait_for_previous();
  uint4 in[kTile * kTile / 16 / kTileThreads];
#pragma unroll
  for (int k = 0; k < kTile * 8 / kTileThreads; ++k) {
    const std::int64_t r = r0 + thread / 8 + k * (kTileThreads / 8);
    const std::int64_t c = c0 + thread % 8 * 16;
    in[k] = {};
    if (r >= rows || c >= cols) continue;
    const std::uint8_t* const p = from.data + r * from.stride + c;
    if (kAligned && c + 16 <= cols) {
      in[k] = __ldcg(reinterpret_cast<const uint4*>(p));
    } else {
      std::uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (c + i < cols) words[i / 4] |= std::uint32_t{__ldcg(p + i)} << i % 4 * 8;
      }
      in[k] = {words[0], words[1], words[2], words[3]};
    }
  }
#pragma unroll
  for (int k = 0; k < kTile * 8 / kTileThreads; ++k) {
    std::uint32_t* const p = tile + row_place(thread / 8 + k * (kTileThreads / 8)) + thread % 8 * 4;
    p[0] = in[k].x, p[1] = in[k].y, p[2] = in[k].z, p[3] = in[k].w;
  }
  __syncthreads();
  const int chunk = thread % 8;  // of 16 rows
  const int word = thread / 8;   // of 4 columns
  std::uint32_t columns[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    std::uint32_t four[4];
    std::uint32_t transposed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) four[j] = tile[row_place(chunk * 16) + (4 * k + j) * kPitch + word];
    transpose_4x4(four, transposed);
#pragma unroll
    for (int j = 0; j < 4; ++j) columns[j][k] = transposed[j];
  }
  const std::int64_t r = r0 + chunk * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::int64_t c = c0 + word * 4 + j;
    if (c >= cols || r >= rows) continue;
    std::uint8_t* const p = to.data + c * to.stride + r;
    if (kAligned && r + 16 <= rows) {
      *reinterpret_cast<uint4*>(p) = {columns[j][0], columns[j][1], columns[j][2], columns[j][3]};
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (r + i < rows) p[i] = static_cast<std::uint8_t>(columns[j][i / 4] >> i % 4 * 8);
      }
    }
  }
}

template <class T, Prologue prologue, bool gated>
void launch_rows(const ActivateArguments<T>& a, bool whole, Stream stream) {
  constexpr int n = kVectorSize<T>;
  const std::int64_t vectors = a.cols / n;
  if (!whole || a.cols % n != 0 || vectors > kRowThreads * kVectorsOfLong) {
    const LaunchShape shape = {dim3(static_cast<unsigned>(a.rows)), dim3(kRowThreads)};
    return enqueue(kAnyRows, activate_any_rows<T, prologue, gated>, shape, stream, a);
  }
  const auto as = [&](auto* kernel, int each) {
    const dim3 block = block_for(vectors, each);
    enqueue(kRows, kernel, {dim3(blocks_for(a.rows, block.y)), block}, stream, a);
  };
  vectors <= kRowThreads* kVectorsOfMany ? as(activate_rows<T, kVectorsOfMany, prologue, gated>, kVectorsOfMany)
                                         : as(activate_rows<T, kVectorsOfLong, prologue, gated>, kVectorsOfLong);
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const Tensor q = row_major_q(p, o, launch);
  with_narrow_type(p.x, [&](auto x) {
    using T = decltype(x);
    ActivateArguments<T> a = {prologue_arguments(p, o, q), rows_of<T>(o.x)};
    if (p.gated) a.up = rows_of<T>(o.up);
    const bool whole = a.x.aligned && (!p.gated || a.up.aligned) && integer_rows(q, kVectorSize<T>).aligned;
    with_prologue(p.prologue, p.gated,
                  [&]<Prologue prologue, bool gated>() { launch_rows<T, prologue, gated>(a, whole, launch.stream); });
  });
  transpose_q(q, o.q_transposed, launch.stream);
}

std::string supports(const QuantizeProblem& p) {
  if (is_norm(p.prologue)) return "has no norms";
  return prologue_sm80_supports(p);
}

Cost cost(const QuantizeProblem& p) { return prologue_cost(p, 30, p.gated ? 2 : 1); }

void load(const QuantizeProblem& p) {
  with_narrow_type(p.x, [&](auto x) {
    with_prologue(p.prologue, p.gated, [&]<Prologue prologue, bool gated>() {
      using T = decltype(x);
      prepare(kRows, activate_rows<T, kVectorsOfMany, prologue, gated>);
      prepare(kRows, activate_rows<T, kVectorsOfLong, prologue, gated>);
      prepare(kAnyRows, activate_any_rows<T, prologue, gated>);
    });
  });
  prepare_transpose_q();
}

}  // namespace

void transpose_q(const Tensor& q, const Tensor& q_transposed, Stream stream) {
  if (!q_transposed.present()) return;
  const IntegerRows from = integer_rows(q, 16);
  const IntegerRows to = integer_rows(q_transposed, 16);
  const LaunchShape shape = {dim3(blocks_for(q.cols(), kTile), blocks_for(q.rows(), kTile)), dim3(kTileThreads)};
  auto* const kernel = from.aligned && to.aligned ? transpose_bytes<true> : transpose_bytes<false>;
  enqueue(kTranspose, kernel, shape, stream, from, to, q.rows(), q.cols());
}

void prepare_transpose_q() {
  prepare(kTranspose, transpose_bytes<true>);
  prepare(kTranspose, transpose_bytes<false>);
}

std::string prologue_sm80_supports(const QuantizeProblem& p) {
  if (p.rows > 65535 * kTile) return "counts tiles of 128 rows in 16 bits";
  return quantizer_sm80_supports(p);
}

extern constinit const QuantizeKernel prologue_quantize_sm80 = {
    .name = "prologue_quantize_sm80",
    .task = {Operation::prologue_quantize},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = row_major_workspace,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
