// The ring of shared-memory stages between producers and consumers, and the tile order of a persistent grid.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/ptx.cuh"

namespace octile::cuda {

// A position in the ring, and the parity of its lap: the phase of the full barriers there. The phase of the empty
// barriers is the opposite one.
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

template <std::size_t n>
__device__ void init_barriers(std::uint64_t (&barriers)[n], std::uint32_t arrivals) {
  for (auto& barrier : barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
}

// Tiles in bands, `band` tiles wide across the whole matrix, every second band backwards. What the grid works on at any
// time is then nearly square, and its operands stay in L2.
struct TileOrder {
  int rows = 0;  // of tiles
  int cols = 0;
  int band = 1;
  bool bands_of_rows = false;

  __host__ __device__ int count() const { return rows * cols; }

  // {row, column} of a tile.
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
