// h = round_to_x(x sigma(t)), or that times up, or a norm of the row, and then q = clamp(rint(h / s), q_min, q_max): h
// of some rows in the workspace, and quantize_portable on it. base/sigmoid.h has sigma, base/norm.h the order of a
// norm's sums.
#include <bit>
#include <cmath>

#include "base/access.h"
#include "base/norm.h"
#include "base/sigmoid.h"
#include "cpu/quantize/levels.h"
#include "cpu/support/cost.h"

namespace octile::cpu {

extern const QuantizeKernel quantize_portable;

namespace {

constexpr std::int64_t kRun = kNormLanes;

// exp2 of z, which is clamped: the integer is in the low bits of the sum.
OCTILE_INLINE float exp2_of(float z) {
  const float limited = clamped(z, kMinExponent, kMaxExponent);
  const float sum = limited + kRounder<float>;
  const float f = limited - (sum - kRounder<float>);
  float p = std::fma(kExp2[4], f, kExp2[3]);
  p = std::fma(p, f, kExp2[2]);
  p = std::fma(p, f, kExp2[1]);
  p = std::fma(p, f, kExp2[0]);
  p = std::fma(p, f, 1.0f);
  const auto n = std::bit_cast<std::uint32_t>(sum) << 23;  // kRounder has none of these bits
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) + n);
}

template <Prologue prologue, bool gated>
struct Activate {
  template <Isa>
  OCTILE_INLINE static void run(const float* __restrict x, const float* __restrict up, std::int64_t n,
                                float* __restrict h) {
    for (std::int64_t i = 0; i < n; ++i) {
      const float z = prologue == Prologue::silu ? x[i] * kSilu : x[i] * std::fma(x[i] * x[i], kGeluCubic, kGelu);
      const float y = x[i] * (1.0f / (1.0f + exp2_of(z)));
      h[i] = gated ? y * up[i] : y;
    }
  }
};

template <Prologue prologue, bool gated>
void activate(const float* x, const float* up, std::int64_t n, float* h) {
  multiversion<Activate<prologue, gated>>(x, up, n, h);
}

struct Add {
  template <Isa>
  OCTILE_INLINE static void run(const float* x, const float* y, std::int64_t n, float* sum) {
    for (std::int64_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
  }
};

// To each lane its value, or the square of that.
template <bool squares>
struct AddToLanes {
  template <Isa>
  OCTILE_INLINE static void run(const float* __restrict x, float mean, std::int64_t n, float* __restrict lanes) {
    for (std::int64_t i = 0; i < n; ++i) {
      const float d = x[i] - mean;
      lanes[i] = squares ? std::fma(d, d, lanes[i]) : lanes[i] + x[i];
    }
  }
};

// Neighbours are added until one is left, in lanes[0].
struct FoldLanes {
  template <Isa>
  OCTILE_INLINE static void run(float* __restrict lanes) {
    float half[kRun / 2];
    for (std::int64_t n = kRun / 2; n > 0; n /= 2) {
      for (std::int64_t i = 0; i < n; ++i) half[i] = lanes[2 * i] + lanes[2 * i + 1];
      std::copy_n(half, n, lanes);
    }
  }
};

// `ahead`: of the next row, which is not in the caches.
template <bool centred>
struct Normalize {
  template <Isa>
  OCTILE_INLINE static void run(const float* __restrict x, float mean, float rstd, const float* __restrict weight,
                                const float* __restrict bias, std::int64_t n, Ahead ahead, float* __restrict h) {
    for (std::int64_t begin = 0; begin < n; begin += kAheadStep) {
      ahead.prefetch();
      for (std::int64_t i = begin; i < std::min(n, begin + kAheadStep); ++i) {
        const float z = (x[i] - mean) * rstd;
        h[i] = centred ? std::fma(z, weight[i], bias[i]) : z * weight[i];
      }
    }
  }
};

// The norm of one row. x - 0 is x, so that an rms_norm has a mean of 0.
struct NormOfRow {
  const QuantizeProblem& p;
  const QuantizeOperands& o;
  const float* weight;  // (cols), and behind it the bias

  // h of row r, to row `to_row` of memory.
  void operator()(std::int64_t r, std::uint8_t* memory, std::int64_t to_row) const {
    const std::int64_t cols = o.x.cols();
    const bool centred = p.prologue == Prologue::layer_norm;
    float x[kRun], h[kRun];
    if (p.residual) add(r);
    const ConstTensor from = p.residual ? ConstTensor(o.sum) : o.x;
    const auto for_each_run = [&](const auto& body) {
      for (std::int64_t c = 0; c < cols; c += kRun) {
        const std::int64_t n = std::min(kRun, cols - c);
        body(c, n, widened(p.x, from.data, r * from.strides[0] + c, n, x));
      }
    };
    const auto sum = [&](auto* to_lanes, float mean) {
      float lanes[kRun] = {};
      for_each_run([&](std::int64_t, std::int64_t n, const float* values) { to_lanes(values, mean, n, lanes); });
      multiversion<FoldLanes>(static_cast<float*>(lanes));
      return lanes[0] / static_cast<float>(cols);
    };
    const float mean = centred ? sum(multiversion<AddToLanes<false>, const float*, float, std::int64_t, float*>, 0) : 0;
    const float square = sum(multiversion<AddToLanes<true>, const float*, float, std::int64_t, float*>, mean);
    const float rstd = 1 / std::sqrt(square + static_cast<float>(p.epsilon));
    if (o.mean.present()) store(o.mean, r, 0, mean);
    if (o.rstd.present()) store(o.rstd, r, 0, rstd);
    for_each_run([&](std::int64_t c, std::int64_t n, const float* values) {
      float* const to = narrowing_target(p.x, memory, to_row * cols + c, h);
      const Ahead ahead = p.residual || r + 1 == o.x.rows() ? Ahead() : ahead_of(o.x, r + 1, c);
      if (centred) {
        multiversion<Normalize<true>>(values, mean, rstd, weight + c, weight + cols + c, n, ahead, to);
      } else {
        multiversion<Normalize<false>>(values, 0.0f, rstd, weight + c, weight + c, n, ahead, to);
      }
      if (to == h) narrow(p.x, memory, to_row * cols + c, n, h);
    });
  }

  // x + residual.
  void add(std::int64_t r) const {
    float x[kRun], y[kRun], sum[kRun];
    for (std::int64_t c = 0; c < o.x.cols(); c += kRun) {
      const std::int64_t n = std::min(kRun, o.x.cols() - c);
      const float* const values = widened(p.x, o.x.data, r * o.x.strides[0] + c, n, x);
      const float* const others = widened(p.x, o.residual.data, r * o.residual.strides[0] + c, n, y);
      multiversion<Add>(values, others, n, sum);
      narrow(p.x, o.sum.data, r * o.sum.strides[0] + c, n, sum);
    }
  }
};

// The activation of row r, to row `to_row` of memory.
struct ActivationOfRow {
  const QuantizeProblem& p;
  const QuantizeOperands& o;
  void (*of_run)(const float*, const float*, std::int64_t, float*);

  void operator()(std::int64_t r, std::uint8_t* memory, std::int64_t to_row) const {
    const std::int64_t cols = o.x.cols();
    float x[kRun], up[kRun], h[kRun];
    for (std::int64_t c = 0; c < cols; c += kRun) {
      const std::int64_t n = std::min(kRun, cols - c);
      const float* const from = widened(p.x, o.x.data, r * o.x.strides[0] + c, n, x);
      const float* const by = p.gated ? widened(p.x, o.up.data, r * o.up.strides[0] + c, n, up) : nullptr;
      float* const to = narrowing_target(p.x, memory, to_row * cols + c, h);
      of_run(from, by, n, to);
      if (to == h) narrow(p.x, memory, to_row * cols + c, n, h);
    }
  }
};

// A thread takes a block of rows at a time, and quantizes them while their h is in its caches. Where q is transposed,
// all rows are one block: the quantizer writes a block's lines while it reads the next one. Where there are too few
// blocks for the threads, these share the rows, and then the quantizer's.
struct Blocks {
  int threads;
  std::int64_t rows;  // of a block

  Blocks(const QuantizeProblem& p, std::int64_t all_rows)
      : threads(useful_threads(p.threads, 4 * static_cast<double>(all_rows) * static_cast<double>(p.cols))) {
    constexpr std::int64_t kBytes = 1 << 18;
    const std::int64_t fitting = kBytes / std::max<std::int64_t>(p.cols * bits(p.x) / 8, 1);
    rows = std::max<std::int64_t>(
        p.orientation == Orientation::row_major ? std::min<std::int64_t>(fitting, 64) : all_rows, 1);
  }
  bool enough(std::int64_t all_rows) const { return threads == 1 || ceil_div(all_rows, rows) >= 2 * threads; }
  // Of h, that are there at once.
  std::int64_t kept_rows(std::int64_t all_rows) const {
    return ceil_div(all_rows, rows) <= 2 * threads ? all_rows : 2 * threads * rows;
  }
};

QuantizeProblem quantizer_of(QuantizeProblem p, std::int64_t rows, int threads) {
  p.prologue = Prologue::none;
  p.gated = false;
  p.rows = rows;
  p.threads = threads;
  return p;
}

// Parts of the workspace, in this order.
struct Memory {
  std::int64_t weight;           // a norm's weight and bias, as f32
  std::int64_t h;                // of the rows that are there at once
  std::int64_t block_quantizer;  // a thread's
  std::int64_t quantizer;        // of all threads

  explicit Memory(const QuantizeProblem& p) {
    const Blocks blocks(p, p.rows);
    weight = is_norm(p.prologue) ? round_up(2 * p.cols * static_cast<std::int64_t>(sizeof(float)), 64) : 0;
    h = round_up(blocks.kept_rows(p.rows) * p.cols * bits(p.x) / 8, 64);
    const auto bytes = [&](std::int64_t rows, int threads) {
      return round_up(static_cast<std::int64_t>(quantize_portable.workspace(quantizer_of(p, rows, threads))), 64);
    };
    block_quantizer = bytes(blocks.rows, 1);
    quantizer = std::max(blocks.threads * block_quantizer, bytes(blocks.kept_rows(p.rows), p.threads));
  }
  std::int64_t all() const { return weight + h + quantizer; }
};

// Rows first .. first + rows - 1 of what the quantizer writes, of the h that is given.
QuantizeOperands quantizer_operands(const QuantizeProblem& p, const QuantizeOperands& o, std::int64_t first,
                                    std::int64_t rows, const std::uint8_t* h) {
  const std::int64_t cols = o.x.cols();
  QuantizeOperands part{.scale = o.scale, .q = o.q, .q_transposed = o.q_transposed};
  part.x = {.data = h, .dtype = p.x, .rank = 2, .shape = {rows, cols}, .strides = {cols, 1}};
  if (o.scale.data) part.scale.data = static_cast<float*>(o.scale.data) + first * o.scale.row_stride;
  if (o.q.present()) {
    part.q.data = static_cast<std::int8_t*>(o.q.data) + first * o.q.strides[0];
    part.q.shape[0] = rows;
  }
  if (o.q_transposed.present()) {
    part.q_transposed.data = static_cast<std::int8_t*>(o.q_transposed.data) + first;
    part.q_transposed.shape[1] = rows;
  }
  return part;
}

template <class OfRow>
void quantize(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch, const OfRow& of_row) {
  const std::int64_t rows = o.x.rows();
  const Blocks blocks(p, rows);
  const Memory memory(p);
  std::uint8_t* const h = static_cast<std::uint8_t*>(launch.workspace.data) + memory.weight;
  const auto run = [&](std::int64_t first, std::int64_t count, int threads, std::uint8_t* from, std::uint8_t* to) {
    const Launch part = {.workspace = {to, static_cast<std::size_t>(memory.quantizer)}, .stream = launch.stream};
    quantize_portable.launch(quantizer_of(p, count, threads), quantizer_operands(p, o, first, count, from), part);
  };
  if (!blocks.enough(rows)) {
    parallel_for(blocks.threads, rows, [&](std::int64_t r) { of_row(r, h, r); });
    return run(0, rows, p.threads, h, h + memory.h);
  }
  const std::int64_t bytes = blocks.rows * o.x.cols() * bits(p.x) / 8;
  parallel_for(blocks.threads, ceil_div(rows, blocks.rows), [&](std::int64_t block, int thread) {
    std::uint8_t* const own = h + thread * bytes;
    const std::int64_t first = block * blocks.rows;
    const std::int64_t count = std::min(blocks.rows, rows - first);
    for (std::int64_t r = 0; r < count; ++r) of_row(first + r, own, r);
    run(first, count, 1, own, h + memory.h + thread * memory.block_quantizer);
  });
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  if (!is_norm(p.prologue)) {
    const auto of_run = p.prologue == Prologue::silu
                            ? (p.gated ? activate<Prologue::silu, true> : activate<Prologue::silu, false>)
                            : (p.gated ? activate<Prologue::gelu_tanh, true> : activate<Prologue::gelu_tanh, false>);
    return quantize(p, o, launch, ActivationOfRow{p, o, of_run});
  }
  const std::int64_t cols = o.x.cols();
  auto* const weight = static_cast<float*>(launch.workspace.data);
  for (std::int64_t c = 0; c < cols; ++c) {
    weight[c] = load<float>(o.norm_weight, c);
    if (o.norm_bias.present()) weight[cols + c] = load<float>(o.norm_bias, c);
  }
  quantize(p, o, launch, NormOfRow{p, o, weight});
}

std::size_t workspace(const QuantizeProblem& p) { return static_cast<std::size_t>(Memory(p).all()); }

Cost cost(const QuantizeProblem& p) { return quantize_cost(p, 2e9 * thread_count(p.threads)); }

}  // namespace

extern constinit const QuantizeKernel prologue_quantize_portable = {
    .name = "prologue_quantize_portable",
    .task = {Operation::prologue_quantize},
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace octile::cpu
