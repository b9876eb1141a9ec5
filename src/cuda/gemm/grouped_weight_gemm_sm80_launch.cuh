// Launches of grouped_weight_gemm_sm80.cuh, and the rows that a format makes of it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/forms.h"
#include "cuda/gemm/experts_stream_sm80.cuh"
#include "cuda/gemm/grouped_weight_gemm_sm80.cuh"
#include "cuda/launch.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda::grouped_weight_sm80 {

// Seconds on an SM of an H200 for a slice of the tile.
struct TileTimes {
  double alone;    // of one block
  double further;  // of each further one that is on the SM at the same time
};

// Seconds for a unit.
struct StreamTimes {
  double unit;   // of an SM
  double block;  // of an SM, for each block of 8 tokens
  double alone;  // of one warp, however many there are
};

template <class Tile>
struct Candidate {
  std::conditional_t<Tile::kStreams, StreamTimes, TileTimes> times;
};

constexpr double kLaunchSeconds = 6.1e-6;
constexpr double kBytesPerSecond = 21e9;   // of memory, and SM
constexpr double kSharedPerSecond = 43e9;  // from L2 to shared memory, and SM
constexpr double kPlain = 1.15;            // times as long with nibbles that are not packed
constexpr double kSearchSeconds = 1e-6;    // of a block for its tile among the experts'
constexpr double kStreamSeconds = 4.5e-6;  // of a stream until its first tokens are there
constexpr double kFillSeconds = 0.4e-6;    // of each unit of its rings beyond 4
constexpr double kStripSeconds = 120e-9;   // of a stream, and SM

// A step has a whole chunk: twice as many terms in one stage less, where the tile is made for smaller ones.
template <class Tile, class Arithmetic, bool kFits = (Arithmetic::kChunk * kSliceTerms <= Tile::kStep)>
struct FittedTo {
  using Type = Tile;
};
template <class Tile, class Arithmetic>
struct FittedTo<Tile, Arithmetic, false> {
  using Type = TileShape<Tile::kRows, Tile::kTokens, 2 * Tile::kStep, Tile::kStages - 1, Tile::kRowWarps,
                         Tile::kTokenWarps, Tile::kBlocks>;
};
template <class Tile, class Arithmetic>
using Fitted = typename FittedTo<Tile, Arithmetic>::Type;

// Whether a problem can be one of streams, if it has room.
inline bool may_stream(const GemmProblem& p) {
  return p.operation == Operation::grouped_gemm && p.b_packed && p.k > 0 && p.k % kStreamStep == 0;
}

// Of a stream: bytes of shared memory for tokens.
template <class Shape, class Arithmetic>
std::int64_t stream_room(const GemmProblem& p) {
  constexpr std::int64_t kOther = kRingBytes<Shape, Arithmetic> + std::int64_t{sizeof(StreamShared<Shape>)};
  return static_cast<std::int64_t>(properties(p.device).shared_memory) - kOther;
}

// The most tokens of a tile, a power of two; 0: there is no room.
template <class Shape, class Arithmetic>
int stream_tokens(const GemmProblem& p) {
  const std::int64_t room = stream_room<Shape, Arithmetic>(p);
  if (room <= 0 || !may_stream(p)) return 0;
  const std::int64_t tokens = std::min<std::int64_t>(room / (p.k * bits(p.a) / 8), Shape::kTokens);
  return static_cast<int>(std::bit_floor(static_cast<std::uint64_t>(tokens)));
}

// 0: there is no room.
template <class Tile, class Arithmetic>
unsigned shared_bytes(const GemmProblem& p) {
  if constexpr (Tile::kStreams) {
    const std::int64_t tile = stream_tokens<Tile, Arithmetic>(p) * p.k * bits(p.a) / 8;
    if (tile == 0) return 0;
    return kRingBytes<Tile, Arithmetic> +
           static_cast<unsigned>(std::min(Tile::kTiles * tile, stream_room<Tile, Arithmetic>(p)));
  } else {
    static_assert(Tile::kStages * Stage<Tile, Arithmetic>::kBytes <= 99 * 1024, "the least of all GPUs");
    return Tile::kStages * Stage<Tile, Arithmetic>::kBytes;
  }
}

struct Choice {
  int tile = -1;
  int parts = 1;  // of k
  double seconds = std::numeric_limits<double>::infinity();
};

constexpr int kMaxParts = 8;
constexpr int kMinTerms = 1024;             // of a part
constexpr std::size_t kMaxSums = 16 << 20;  // bytes
constexpr double kSumSeconds = 1.5e-6;      // of the second kernel, besides its bytes

constexpr std::int64_t sums_pitch(std::int64_t n) { return ceil_div(n, std::int64_t{4}) * 4; }
inline std::size_t sums_size(std::int64_t m, std::int64_t n, int parts) {
  return parts == 1 ? 0 : static_cast<std::size_t>(parts * m * sums_pitch(n)) * sizeof(float);
}
inline int steps_of_part(std::int64_t k, int parts, int step) {
  return static_cast<int>(ceil_div(ceil_div(k, std::int64_t{step}), std::int64_t{parts}));
}

// Whether a second kernel may add up parts of k: of float tokens. The sums of s8 ones are rounded group by group.
template <class Format>
constexpr bool kSplits = Format::kFormat.float_a;

// Of the format's tiles. scratch: bytes.
template <class Format>
Choice choose(const GemmProblem& p, std::int64_t m, std::size_t scratch = kMaxSums) {
  const CudaDevice& gpu = properties(p.device);
  const double element = bits(p.a) / 8;
  const double k = static_cast<double>(p.k);
  const double groups = static_cast<double>(ceil_div(p.k, p.b.group));
  const double row_bytes = k * bits(p.b.type) / 8 + groups * (p.b.zero_point ? 8 : 4);
  const double bytes_per_second = kBytesPerSecond * gpu.sms;
  const bool grouped = p.operation == Operation::grouped_gemm;
  const double weights = grouped ? experts_with_rows(p, m) : 1;
  const double memory = (weights * static_cast<double>(p.n) * row_bytes + static_cast<double>(m) * k * element +
                         static_cast<double>(m * p.n) * bits(p.y) / 8) /
                        bytes_per_second;
  const double folds = p.b.group < 128 ? 128.0 / static_cast<double>(p.b.group) - 1 : 0;  // more than one in 128 terms
  Choice best;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](int tile, int parts, double seconds) {
    const double rank = ranked(kLaunchSeconds + seconds, tile);
    if (rank >= least) return;
    least = rank;
    best = {tile, parts, kLaunchSeconds + seconds};
  };
  int number = 0;
  Format::for_each_tile([&]<class Tile>(const Candidate<Tile>& candidate) {
    const int tile = number++;
    if constexpr (Tile::kStreams) {
      if (!may_stream(p)) return;
      int tokens = 0;
      std::int64_t room = 0;
      Format::with_arithmetic(p, [&]<class Arithmetic>() {
        tokens = stream_tokens<Tile, Arithmetic>(p);
        room = stream_room<Tile, Arithmetic>(p);
      });
      // Strips, and a kernel's times (stream_order) of all tiles, are counted in 32 bits.
      const StreamTimes& times = candidate.times;
      const double time = (times.unit + Tile::kTokenBlocks * times.block) * 256e9;
      if (tokens == 0 || static_cast<double>(max_tiles(p, m, tokens)) * time > 0x1p30 ||
          max_tiles(p, m, tokens) * ceil_div(p.n, Tile::kRows) > std::int64_t{1} << 30) {
        return;
      }
      const double tiles = expected_tiles(p, m, tokens);
      const double blocks = std::max(1.0, (static_cast<double>(m) / 8 + 0.5 * experts_with_rows(p, m)) / tiles);
      const double strips = tiles * static_cast<double>(ceil_div(p.n, Tile::kRows)) / gpu.sms;
      const double units = Tile::kPanels * k / kStreamStep * (1 + 0.15 * folds);
      const double together = strips * (kStripSeconds + units * (times.unit + blocks * times.block));
      const double alone = std::ceil(strips / Tile::kWarps) * units * times.alone;
      // A block with strips of two tiles starts again if both do not fit.
      const double of_tile = std::max(1.0, std::round(1.3 * static_cast<double>(m) / tiles));
      const double both = 2 * std::min<double>(std::bit_ceil(static_cast<unsigned>(of_tile)), tokens) * k * element;
      const double again = both > static_cast<double>(room) ? 1.15 * units * times.alone : 0;
      consider(tile, 1, kStreamSeconds + (Tile::kRing - 4) * kFillSeconds + std::max(together, alone) + again);
    } else {
      for (int parts = 1; parts == 1 || (kSplits<Format> && !grouped && parts <= kMaxParts && p.k >= parts * kMinTerms);
           ++parts) {
        if (sums_size(m, p.n, parts) > std::min(scratch, kMaxSums)) break;
        const double token_tiles =
            grouped ? expected_tiles(p, m, Tile::kTokens) : static_cast<double>(ceil_div(m, Tile::kTokens));
        const double of_sm = std::ceil(token_tiles * static_cast<double>(ceil_div(p.n, Tile::kRows) * parts) / gpu.sms);
        const double share = 1.0 / parts;
        const bool repacked = p.b.type == DType::s4 && !p.b_packed;
        const double slices = share * k / kSliceTerms * (repacked ? kPlain : 1) * (1 + 0.15 * folds);
        const double copied =
            of_sm * share * (Tile::kRows * row_bytes + Tile::kTokens * k * element) / kSharedPerSecond;
        const TileTimes& times = candidate.times;
        const double multiplied =
            slices * (of_sm * times.further + std::ceil(of_sm / Tile::kBlocks) * (times.alone - times.further));
        const double sums =
            parts == 1 ? 0 : kSumSeconds + 2 * static_cast<double>(sums_size(m, p.n, parts)) / bytes_per_second;
        const double tiles = std::max(multiplied, copied) + (grouped ? of_sm * kSearchSeconds : 0);
        consider(tile, parts, std::max(tiles, memory) + 0.09 * std::min(tiles, memory) + sums);
      }
    }
  });
  return best;
}

template <class Format, class Body>
void with_tile(int number, const Body& body) {
  int i = 0;
  Format::for_each_tile([&](const auto& candidate) {
    if (i++ == number) body(candidate);
  });
}

// Times in 1/256 ns. Beside other warps, a block of tokens takes 0.6 of its time alone (measured).
template <class Shape, class Arithmetic>
StreamOrder stream_order(const GemmProblem& p, const StreamTimes& times) {
  const auto in_kernel = [](double seconds) { return static_cast<int>(std::lround(seconds * 256e9)); };
  const auto tokens = static_cast<unsigned>(stream_tokens<Shape, Arithmetic>(p));
  const auto shared = static_cast<int>(shared_bytes<Shape, Arithmetic>(p)) - kRingBytes<Shape, Arithmetic>;
  return {in_kernel(times.unit), in_kernel(0.6 * times.block), static_cast<int>(std::bit_width(tokens)) - 1, shared};
}

inline std::string reason_against_problem(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 80); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  if (!p.grouped()) return "takes scales of groups of a row";
  if (p.b_packed && p.b.type == DType::s8) return "takes an s8 weight as it is, not packed";
  const int multiple = p.b.type == DType::s8 ? kUnit : kSliceTerms;
  if (p.k % multiple != 0) return message("needs K to be a multiple of ", multiple);
  if (p.b.group != 32 && p.b.group != 64 && p.b.group != 128 && p.b.group != p.k)
    return "takes groups of 32, 64 and 128 terms and of a row";
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or terms";
  if (p.operation == Operation::grouped_gemm && max_tiles(p, p.m, 8) * ceil_div(p.n, 64) > std::int64_t{1} << 30) {
    return "takes at most 2^30 tiles of y";
  }
  return {};
}

// Calls body.operator()<Arithmetic<T, chunk>>() with a's type and the slices that are added up before they are scaled,
// 0 for a row. Fewer forms than there could be, since each is compiled for every tile.
template <template <class, int> class Arithmetic, class Body>
void with_chunk_and_type(const GemmProblem& p, const Body& body) {
  const auto with = [&]<class T>() {
    if constexpr (Arithmetic<T, 1>::kWeightBits == 8) {  // mostly has a scale per row
      if (p.b.group == p.k) return body.template operator()<Arithmetic<T, 0>>();
    }
    p.b.group < 128 ? body.template operator()<Arithmetic<T, 1>>() : body.template operator()<Arithmetic<T, 4>>();
  };
  p.a == DType::f16 ? with.template operator()<__half>() : with.template operator()<__nv_bfloat16>();
}

// Calls body.operator()<Arithmetic<slices of a group>>(), 0 for a row.
template <template <int> class Arithmetic, class Body>
void with_group(const GemmProblem& p, const Body& body) {
  switch (p.b.group) {
    case 32:
      return body.template operator()<Arithmetic<1>>();
    case 64:
      return body.template operator()<Arithmetic<2>>();
    case 128:
      return body.template operator()<Arithmetic<4>>();
    default:
      return body.template operator()<Arithmetic<0>>();
  }
}

// Hopper's own rows for nibbles take less time there (docs/notes/gpu.md), and are not left for an estimate that is a
// little less. Of dense W8A16 the estimate is 10 % too high (21 timings).
template <class Format>
double on_hopper(bool experts) {
  if (Format::kFormat.b == DType::s4) return experts ? 1.08 : 1.3;
  return Format::kFormat.float_a && !experts ? 0.9 : 1;
}

template <class Format>
Cost cost(const GemmProblem& p) {
  const bool experts = p.operation == Operation::grouped_gemm;
  Cost cost = experts ? grouped_work(p) : gemm_work(p);
  cost.seconds = choose<Format>(p, p.m).seconds * (properties(p.device).major == 9 ? on_hopper<Format>(experts) : 1);
  return cost;
}

template <class Format>
std::string detail(const GemmProblem& p) {
  const Choice choice = choose<Format>(p, p.m);
  std::string text;
  with_tile<Format>(choice.tile, [&]<class Tile>(const Candidate<Tile>&) {
    if constexpr (Tile::kStreams) {
      Format::with_arithmetic(p, [&]<class Arithmetic>() {
        text = message("y^T = b * a^T, a warp per ", Tile::kRows, " rows of b, up to ",
                       stream_tokens<Tile, Arithmetic>(p), " tokens of an expert");
      });
    } else {
      text = message("y^T = b * a^T, tile ", Tile::kRows, "x", Tile::kTokens, ", ", choice.parts,
                     choice.parts == 1 ? " part of k" : " parts of k");
    }
  });
  return text;
}

template <class Format>
std::size_t workspace(const GemmProblem& p) {
  return sums_size(p.m, p.n, choose<Format>(p, p.m).parts);
}

// cp.async copies aligned units.
inline bool aligned(const GemmProblem& p, const GemmOperands& o) {
  if (o.a.strides[1] != 1 || !aligned_rows(o.a.data, o.a.strides[0] * (bits(p.a) / 8), kUnit)) return false;
  // Packed weights of experts lie at multiples of 64.
  if (p.b_packed) return true;
  const std::int64_t strides = o.b.strides[0] | o.experts.b_stride;
  return o.b.strides[1] == 1 && aligned_rows(o.b.data, strides * bits(p.b.type) / 8, kUnit);
}

template <class Tile, class Arithmetic, bool kExperts>
auto* kernel_of([[maybe_unused]] const GemmProblem& p) {
  if constexpr (Tile::kStreams) {
    return p.b.zero_point ? experts_stream_kernel<Tile, Arithmetic, true>
                          : experts_stream_kernel<Tile, Arithmetic, false>;
  } else if constexpr (kExperts) {
    return experts_gemm_kernel<Tile, Arithmetic>;
  } else {
    return grouped_weight_gemm_kernel<Tile, Arithmetic>;
  }
}

template <class Format, const std::string_view& kName, bool kExperts>
void load(const GemmProblem& p) {
  Format::with_arithmetic(p, [&]<class Arithmetic>() {
    Format::for_each_tile([&]<class Listed>(const Candidate<Listed>&) {
      using Tile = Fitted<Listed, Arithmetic>;
      if constexpr (kExperts || !Tile::kStreams) {
        const unsigned shared = shared_bytes<Tile, Arithmetic>(p);
        if (shared > 0) prepare(kName, kernel_of<Tile, Arithmetic, kExperts>(p), shared);
      }
    });
  });
  if constexpr (kSplits<Format> && !kExperts) prepare(kName, sum_parts_kernel<kSumThreads>);
}

// All but what depends on a tile.
inline void set_operands(Arguments& p, const GemmProblem& problem, const GemmOperands& o) {
  p.weight = grouped_weight(problem, o);
  p.group_shift = 31;
  for (int shift = 5; shift <= 7; ++shift) {
    if (problem.b.group == 1 << shift) p.group_shift = shift;
  }
  p.a = static_cast<const std::uint8_t*>(o.a.data);
  p.a_pitch = o.a.strides[0] * (bits(problem.a) / 8);
  p.tokens = static_cast<int>(o.y.rows());
  if (problem.a == DType::s8) p.a_scale = row_scale<float>(o.a_scale);
  p.bias = bias_of(problem, o);
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
}

template <class Format, const std::string_view& kName, bool kExperts>
void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const std::int64_t m = o.y.rows();
  if (m == 0 || problem.n == 0 || (kExperts && problem.experts == 0)) return;
  std::conditional_t<kExperts, GroupedArguments, Arguments> p = {};
  set_operands(p, problem, o);
  if constexpr (kExperts) {
    p.bias.type = o.bias.dtype;
    p.experts = experts_of(problem, o);
  }
  const Choice choice = choose<Format>(problem, m, launch.workspace.size);
  p.sums = static_cast<float*>(launch.workspace.data);
  p.sums_pitch = sums_pitch(problem.n);
  with_tile<Format>(choice.tile, [&]<class Listed>(const Candidate<Listed>& candidate) {
    Format::with_arithmetic(problem, [&]<class Arithmetic>() {
      using Tile = Fitted<Listed, Arithmetic>;
      if constexpr (kExperts || !Tile::kStreams) {
        p.part_steps = steps_of_part(problem.k, choice.parts, Tile::kStep);
        p.parts = static_cast<int>(ceil_div(problem.k, std::int64_t{p.part_steps} * Tile::kStep));
        p.y_aligned = aligned_for(o.y, Tile::kLaneRows);
        p.row_tiles = static_cast<int>(ceil_div(problem.n, Tile::kRows));
        p.token_tiles = static_cast<int>(kExperts ? max_tiles(problem, m, Tile::kTokens) : ceil_div(m, Tile::kTokens));
        const auto blocks = static_cast<unsigned>(p.row_tiles) * static_cast<unsigned>(p.token_tiles);
        auto* const kernel = kernel_of<Tile, Arithmetic, kExperts>(problem);
        LaunchShape shape{{blocks, static_cast<unsigned>(p.parts)}, Tile::kThreads};
        shape.shared_bytes = shared_bytes<Tile, Arithmetic>(problem);
        if constexpr (Tile::kStreams) {
          const std::int64_t strips = max_tiles(problem, m, stream_tokens<Tile, Arithmetic>(problem)) * p.row_tiles;
          shape.grid.x = static_cast<unsigned>(std::min<std::int64_t>(strips, properties(problem.device).sms));
          enqueue(kName, kernel, shape, launch.stream, p, stream_order<Tile, Arithmetic>(problem, candidate.times));
        } else {
          enqueue(kName, kernel, shape, launch.stream, p);
        }
      }
    });
  });
  if constexpr (kSplits<Format> && !kExperts) {
    if (p.parts == 1) return;
    p.y_aligned = aligned_for(o.y, 4);
    const LaunchShape shape{{blocks_for(problem.n, 4 * kSumThreads), static_cast<unsigned>(std::min(p.tokens, 65535))},
                            kSumThreads};
    enqueue(kName, sum_parts_kernel<kSumThreads>, shape, launch.stream, p);
  }
}

template <class Format>
std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against_problem(p); !reason.empty()) return reason;
  if (!Format::kFormat.float_a) return {};
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  return {};
}

// The row of a Format, which has
//   kFormat
//   for_each_tile(body)             calls body(Candidate<Tile>)
//   with_arithmetic(problem, body)  calls body.operator()<Arithmetic>() with the problem's
//
// kExperts: of each expert's rows. A block finds its tile among the experts' (device/experts.cuh), and then is a block
// of the dense kernel, or it is one of experts_stream_sm80.cuh; rows of a are gathered on the way into shared memory.
template <class Format, const std::string_view& kName, bool kExperts = false>
constexpr GemmKernel row() {
  return {.name = kName,
          .task = {kExperts ? Operation::grouped_gemm : Operation::gemm, Format::kFormat},
          .device = DeviceType::cuda,
          .supports = supports<Format>,
          .cost = cost<Format>,
          .workspace = kSplits<Format> && !kExperts ? workspace<Format> : nullptr,
          .launch = launch<Format, kName, kExperts>,
          .prepare = load<Format, kName, kExperts>,
          .detail = detail<Format>,
          .aligned = aligned,
          .bound = Format::kFormat.float_a ? Bound::sum : Bound::exact};
}

}  // namespace octile::cuda::grouped_weight_sm80
