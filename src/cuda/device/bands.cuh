// The order of a product's tiles over a grid.
#pragma once

namespace octile::cuda {

inline constexpr int kBand = 8;  // tiles of left that are visited together, so that right's tiles are found in L2

// Which tile of left and of right: bands of kBand tiles of left; along a band, column of tiles by column.
__device__ inline int2 tile_in_bands(int number, int left_tiles, int right_tiles) {
  const int band = number / (kBand * right_tiles);
  const int in_band = number % (kBand * right_tiles);
  const int band_tiles = min(kBand, left_tiles - band * kBand);
  return {band * kBand + in_band % band_tiles, in_band / band_tiles};
}

}  // namespace octile::cuda
