// The walk of elementwise.cuh in the common case: rows of whole aligned vectors of 16 bytes.
#pragma once

#include "cuda/device/elementwise.cuh"

namespace octile::cuda {

// What elements are divided by, and shifted.
struct Scaling {
  float s, inv;  // inverse(s)
  std::int32_t z;
};

// The scales of vectors of n elements: one for each vector, fetched with it ..
template <int n, bool kOfColumns>
struct VectorScales {
  static constexpr bool kColumns = false;
  using Place = SegmentScales<float>::Place;
  using Held = Segment<float>;
  struct Same {
    Scaling scaling;
    __device__ const Scaling& operator[](int) const { return scaling; }
  };

  SegmentScales<float> all;

  __device__ Place place(std::int64_t c) const { return all.place(c); }
  __device__ Held hold(const Place& place, std::int64_t r) const { return all.at(place, r); }
  __device__ static Same of(const Place&, const Held& g) { return {{g.s, inverse(g.s), g.z}}; }
};

// .. or those of columns, one for each element, which a thread fetches once for all its rows.
template <int n>
struct VectorScales<n, true> {
  static constexpr bool kColumns = true;
  struct Place {
    Scaling of_columns[n];
  };
  struct Held {};

  SegmentScales<float> all;

  __device__ Place place(std::int64_t c) const {
    Place place;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const Segment<float> g = all.at(0, c + i);
      place.of_columns[i] = {g.s, inverse(g.s), g.z};
    }
    return place;
  }
  __device__ static Held hold(const Place&, std::int64_t) { return {}; }
  __device__ static const Scaling (&of(const Place& place, const Held&))[n] { return place.of_columns; }
};

// Whether quotient_by can divide by all of them.
template <int n, class Scalings>
__device__ bool can_divide_by(const Scalings& g) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < n; ++i) all = all && g[i].inv != 0;
  return all;
}

// Op has `scales`, which are VectorScales, and:
//   Op::Loaded load(r, c, place), then finish(loaded, place, r, c), for op.kElements
template <class Op>
__global__ void __launch_bounds__(kWalkThreads, Op::kBlocks)
    walk_vectors(std::int64_t rows, std::int64_t cols, const __grid_constant__ Op op) {
  constexpr int n = Op::kElements;
  let_next_start();
  wait_for_previous();
  const std::int64_t c = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * n;
  if (c >= cols) return;
  const auto place = op.scales.place(c);
  const std::int64_t height = blockDim.y;
  const std::int64_t step = gridDim.y * height * Op::kBatch;
  for (std::int64_t r = blockIdx.y * height * Op::kBatch + threadIdx.y; r < rows; r += step) {
    typename Op::Loaded loaded[Op::kBatch];
#pragma unroll
    for (int k = 0; k < Op::kBatch; ++k) {
      if (r + k * height < rows) loaded[k] = op.load(r + k * height, c, place);
    }
#pragma unroll
    for (int k = 0; k < Op::kBatch; ++k) {
      if (r + k * height < rows) op.finish(loaded[k], place, r + k * height, c);
    }
  }
}

template <class Op>
void enqueue_vectors(std::string_view kernel, const ConstTensor& matrix, const Op& op, Stream stream) {
  // Scales of columns are fetched, and inverted, once for many rows.
  const std::int64_t max_blocks = Op::kColumns ? 2 * Op::kBlocks * properties(matrix.device).sms : INT32_MAX;
  enqueue(kernel, walk_vectors<Op>, walk_shape<Op>(matrix, max_blocks), stream, matrix.rows(), matrix.cols(), op);
}

// Calls body with the VectorScales of the matrix; false if walk_vectors is not for them.
template <class T, class Body>
bool with_vector_scales(const ConstTensor& matrix, const SegmentScales<float>& scales, const Body& body) {
  constexpr int n = kVectorSize<T>;
  if (matrix.cols() % n != 0) return false;
  if (scales.shared_by(n)) {
    body(VectorScales<n, false>{scales});
    return true;
  }
  if (scales.group != 1 || (scales.row_stride | scales.zero_row_stride) != 0) return false;
  body(VectorScales<n, true>{scales});
  return true;
}

// Enqueues walk_vectors with Vectors<T, Scales>(op, scales), where op.aligned() and the scales are for it, or else
// walk_elements.
template <template <class, class> class Vectors, template <class> class Op, class T>
void enqueue_elementwise(std::string_view kernel, const ConstTensor& matrix, const Op<T>& op, Stream stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (op.aligned() && with_vector_scales<T>(matrix, op.scales, [&]<class Scales>(const Scales& scales) {
          enqueue_vectors(kernel, matrix, Vectors<T, Scales>(op, scales), stream);
        })) {
      return;
    }
  }
  enqueue_walk(kernel, matrix, op, stream);
}

template <template <class, class> class Vectors, template <class> class Op>
void prepare_elementwise(std::string_view kernel, const QuantizeProblem& p) {
  with_float_type(p.x, [&]<class T>(T) {
    prepare(kernel, walk_elements<Op<T>>);
    if constexpr (!std::is_same_v<T, double>) {
      prepare(kernel, walk_vectors<Vectors<T, VectorScales<kVectorSize<T>, false>>>);
      prepare(kernel, walk_vectors<Vectors<T, VectorScales<kVectorSize<T>, true>>>);
    }
  });
}

}  // namespace octile::cuda
