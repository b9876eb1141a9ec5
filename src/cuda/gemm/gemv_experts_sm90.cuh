// Experts with few tokens each, of w4a16_grouped_gemv_sm90 and w4a8_grouped_gemv_sm90: what a block has of them. The
// tiles of up to kExpertTokens tokens of an expert share the blocks of the grid evenly, and the blocks of a tile share
// the rows of its expert's weight. Where that would leave many blocks idle, all blocks share the rows of all tiles
// instead, and a block may have rows of two tiles (ExpertShares).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/device/experts.cuh"
#include "cuda/device/output.cuh"
#include "cuda/gemm/gemv_units_sm90.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

inline constexpr int kExpertTokens = 8;  // of a tile, at most

struct ExpertShare {
  int expert = 0;
  int first_token = 0, end_token = 0;  // rows of y
  int begin = 0, end = 0;              // tiles of kTileRows rows of the weight

  __device__ int tokens() const { return end_token - first_token; }
};

// All lanes of a warp call it alike.
__device__ inline ExpertShare share_of_warp(const Experts& experts, int row_tiles) {
  TileFinder finder(experts, kExpertTokens);
  const int count = finder.count();
  if (count == 0) return {};
  const int blocks = static_cast<int>(gridDim.x) / count;
  const int part = static_cast<int>(blockIdx.x) / count;
  if (part >= blocks) return {};
  const ExpertTile at = finder.find(static_cast<int>(blockIdx.x) - part * count);
  const int first = at.first + at.tile * kExpertTokens;
  return {at.expert, first, min(first + kExpertTokens, at.end), row_tiles * part / blocks,
          row_tiles * (part + 1) / blocks};
}

// Of a block; at most two, since there are at least as many blocks as tiles.
struct ExpertShares {
  int count = 0;
  ExpertShare of[2];
};

// All lanes of a warp call it alike.
__device__ inline ExpertShares shares_of_warp(const Experts& experts, int row_tiles) {
  TileFinder finder(experts, kExpertTokens);
  const std::int64_t all = std::int64_t{finder.count()} * row_tiles;
  const std::int64_t first = all * blockIdx.x / gridDim.x;
  int end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - first);
  int tile = static_cast<int>(first / row_tiles);
  int begin = static_cast<int>(first - std::int64_t{tile} * row_tiles);
  end += begin;
  ExpertShares shares;
#pragma unroll 1
  while (begin < end) {
    const ExpertTile at = finder.find(tile++);
    const int token = at.first + at.tile * kExpertTokens;
    shares.of[shares.count++] = {at.expert, token, min(token + kExpertTokens, at.end), begin, min(end, row_tiles)};
    begin = 0;
    end -= row_tiles;
  }
  return shares;
}

// Into shared memory; all threads of the block.
__device__ inline void find_share(const Experts& experts, int row_tiles, ExpertShare& share) {
  if (threadIdx.x < 32) {
    const ExpertShare found = share_of_warp(experts, row_tiles);
    if (threadIdx.x == 0) share = found;
  }
  __syncthreads();
}
__device__ inline void find_shares(const Experts& experts, int row_tiles, ExpertShares& shares) {
  if (threadIdx.x < 32) {
    const ExpertShares found = shares_of_warp(experts, row_tiles);
    if (threadIdx.x == 0) shares = found;
  }
  __syncthreads();
}

// The row of a of a token, of a form F with or without experts.
template <class F, class Arguments>
__device__ int row_of(const Arguments& p, int token) {
  return F::experts ? p.experts.row_of_a(p.first_token + token) : token;
}

__device__ inline void move_to_tokens(TokenRows& y, const ExpertShare& share) {
  const std::int64_t at = share.first_token * y.pitch * (y.type == DType::f32 ? 4 : 2);
  y.y = static_cast<std::uint8_t*>(y.y) + at;
  y.tokens = share.tokens();
}

__device__ inline void move_to_expert(Bias& bias, const Experts& experts, int e) {
  if (bias.data) bias.data = static_cast<const std::uint8_t*>(bias.data) + e * experts.bias;
}

// ---- The host's side.

struct ExpertGrid {
  std::int64_t blocks;
  std::int64_t row_tiles;  // of an expert's weight
  std::int64_t most;       // of them in a block
};

// With this many blocks on an SM.
inline ExpertGrid expert_grid(const GemmProblem& p, std::int64_t m, int blocks_per_sm) {
  const std::int64_t tiles = max_tiles(p, m, kExpertTokens);
  const std::int64_t row_tiles = ceil_div(p.n, kTileRows);
  const std::int64_t room = std::int64_t{properties(p.device).sms} * blocks_per_sm;
  const std::int64_t blocks = std::min(tiles * row_tiles, std::max(tiles, room));
  return {blocks, row_tiles, ceil_div(row_tiles, blocks / tiles)};
}

// Tiles of rows that a block is expected to have.
inline double expected_row_tiles(const GemmProblem& p) {
  const double tiles = std::max(expected_tiles(p, p.m, kExpertTokens), 1.0);
  const double blocks = std::max(std::floor(properties(p.device).sms / tiles), 1.0);
  return std::ceil(static_cast<double>(ceil_div(p.n, kTileRows)) / blocks);
}

// The same where all blocks share the rows of all tiles. Going from one tile to the next takes as long as reading the
// 48 KB of nibbles that a block has in flight.
inline double expected_even_row_tiles(const GemmProblem& p) {
  constexpr double kTermsInFlight = 96 << 10;
  const double tiles = std::max(expected_tiles(p, p.m, kExpertTokens), 1.0);
  const double all = tiles * static_cast<double>(ceil_div(p.n, kTileRows));
  return std::ceil(all / properties(p.device).sms) + std::ceil(kTermsInFlight / (kTileRows * static_cast<double>(p.k)));
}

// Measured on an H200: seconds of a launch, and of a term of a row of a block's weights.
inline constexpr double kExpertsSeconds = 9.0e-6;
inline constexpr double kExpertsTermSeconds = 1.85e-11;

// rows: of y, at most.
inline std::string reason_against_experts(const GemmProblem& p, int rows) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  if (!p.b_packed) return "takes packed weights";
  if (p.m > rows) return message("is for up to ", rows, " rows of all experts");
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (std::max(p.n, p.k) > std::int64_t{1} << 23) return "takes at most 2^23 rows or columns";
  return {};
}

}  // namespace octile::cuda
