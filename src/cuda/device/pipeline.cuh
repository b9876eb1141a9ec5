// A ring of stages in shared memory between the warp that fills them and the warps that read them, and the order in
// which a persistent grid walks over the tiles of a matrix.
#pragma once

#include "cuda/device/ptx.cuh"

namespace octile::cuda {

// A place in the ring, and the parity of the lap: of the full barriers' phase there; the empty barriers' is the other.
template <int stages>
struct RingPosition {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ RingPosition ahead(int steps) const {
    const int there = stage + steps;
    return {there % stages, parity ^ (there / stages & 1)};
  }
};

// Tiles in bands: `band` tiles wide, across the whole matrix, every second one backwards. What the grid works on at one
// time is then nearly square, and its operands stay in the second-level cache.
struct TileOrder {
  int rows = 0;  // of tiles
  int cols = 0;
  int band = 1;
  bool bands_of_rows = false;

  __host__ __device__ int count() const { return rows * cols; }

  // {row, column} of the tile with this number.
  __device__ int2 operator[](int index) const {
    const int length = bands_of_rows ? cols : rows;
    const int width = bands_of_rows ? rows : cols;
    const int number = index / (band * length);
    const int first = number * band;
    const int across = min(band, width - first);
    const int within = index - first * length;
    int along = within / across;
    const int beside = first + within - along * across;
    if (number & 1) along = length - 1 - along;
    return bands_of_rows ? int2{beside, along} : int2{along, beside};
  }
};

}  // namespace octile::cuda
