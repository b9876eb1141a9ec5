// Shared by quantizers with a prologue: where q goes, the scale of a row, and the transpose of q.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/device/quantize_rows.cuh"
#include "cuda/quantize/segments_sm80.cuh"

namespace octile::cuda {

struct PrologueArguments {
  std::uint8_t* q;
  std::int64_t q_stride;
  std::int64_t rows, cols;
  PlainRules rules;
  float* scale;
  std::int64_t scale_stride;

  // n bytes of row r, as far as there are columns from c on.
  template <int n>
  __device__ void put_bytes(std::int64_t r, std::int64_t c, const LevelBytes<n>& bytes) const {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (c + i < cols) q[r * q_stride + c + i] = static_cast<std::uint8_t>(bytes.words[i / 4] >> i % 4 * 8);
    }
  }
};

inline PrologueArguments prologue_arguments(const QuantizeProblem& p, const QuantizeOperands& o, const Tensor& q) {
  return {static_cast<std::uint8_t*>(q.data), q.strides[0],      o.x.rows(), o.x.cols(), plain_rules(p),
          static_cast<float*>(o.scale.data),  o.scale.row_stride};
}

// The caller's q, or one in the workspace if only the transpose is requested.
inline std::int64_t q_pitch(std::int64_t cols) { return ceil_div(cols, 128) * 128; }
inline Tensor row_major_q(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  if (o.q.present()) return o.q;
  return {launch.workspace.data, p.q, p.device, 2, o.x.shape, {q_pitch(o.x.cols()), 1}};
}
inline std::size_t row_major_workspace(const QuantizeProblem& p) {
  return p.orientation == Orientation::transposed ? static_cast<std::size_t>(p.rows * q_pitch(p.cols)) : 0;
}

// On an H200, 16384 x 16384 bf16. operations: of an element; matrices: of x's type, that are read or written.
inline Cost prologue_cost(const QuantizeProblem& p, int operations, int matrices) {
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.cols);
  const double transposed = p.orientation == Orientation::row_major ? 0 : 2 * elements;
  const double bytes = elements * (bits(p.x) / 8 * matrices + 1) + transposed;
  return {operations * elements, bytes, bytes / 2.8e12 + 4e-6};
}

// prologue_quantize_sm80.cu: q_transposed, if it is present, becomes the transpose of q.
void transpose_q(const Tensor& q, const Tensor& q_transposed, Stream stream);
void prepare_transpose_q();
std::string prologue_sm80_supports(const QuantizeProblem& p);

// Vectors of a row to come, on their way to dynamic shared memory while the row before is worked on. Those of a thread
// lie apart from the others', so that it waits for its own alone.
template <class T>
class VectorsAhead {
 public:
  __device__ VectorsAhead() {
    extern __shared__ uint4 vectors[];
    own_ = vectors + threadIdx.y * blockDim.x + threadIdx.x;
  }

  // `from` is a multiple of 16 bytes. What was at place i has been taken.
  __device__ void request(int i, const T* from) const { ptx::cp_async_16(place(i), from); }
  __device__ static void wait() { ptx::cp_async_wait_all(); }
  __device__ Vector<T> take(int i) const { return *reinterpret_cast<const Vector<T>*>(place(i)); }

  static unsigned bytes(const dim3& block, int places) {
    return static_cast<unsigned>(block.x * block.y * sizeof(uint4)) * places;
  }

 private:
  __device__ uint4* place(int i) const { return own_ + i * blockDim.x * blockDim.y; }

  uint4* own_;
};

// The scale of the block's row; `lane` of `width` threads, whole warps or a part of one.
__device__ inline PlainScale scale_of_row(const PlainRules& rules, float largest, int lane, int width) {
  __shared__ float warp_max[kRowThreads / 32];
  __shared__ PlainScale of_row;
  if (width <= 32) return plain_scale(rules, max_of_lanes(largest, width), 1.0f);
  largest = max_of_warp(largest);
  if (lane % 32 == 0) warp_max[lane / 32] = largest;
  __syncthreads();
  if (lane < 32) {  // one warp divides for all
    const PlainScale g = plain_scale(rules, max_of_warp(lane < width / 32 ? warp_max[lane] : 0.0f), 1.0f);
    if (lane == 0) of_row = g;
  }
  __syncthreads();
  return of_row;
}

}  // namespace octile::cuda
