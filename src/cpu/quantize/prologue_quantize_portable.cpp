// h = round_to_x(x sigma(t)), or that times up, or a norm of the row, and then q = clamp(rint(h / s), q_min, q_max): h
// in the workspace, and quantize_portable on it. base/sigmoid.h has sigma, base/norm.h the order of a norm's sums.
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

template <bool centred>
struct Normalize {
  template <Isa>
  OCTILE_INLINE static void run(const float* __restrict x, float mean, float rstd, const float* __restrict weight,
                                const float* __restrict bias, std::int64_t n, float* __restrict h) {
    for (std::int64_t i = 0; i < n; ++i) {
      const float z = (x[i] - mean) * rstd;
      h[i] = centred ? std::fma(z, weight[i], bias[i]) : z * weight[i];
    }
  }
};

// The norm of one row. x - 0 is x, so that an rms_norm has a mean of 0.
struct NormOfRow {
  const QuantizeProblem& p;
  const QuantizeOperands& o;
  const float* weight;  // (cols), and behind it the bias

  void operator()(std::int64_t r, std::uint8_t* memory) const {
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
      for (std::int64_t n = kRun / 2; n > 0; n /= 2) {
        for (std::int64_t i = 0; i < n; ++i) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
      }
      return lanes[0] / static_cast<float>(cols);
    };
    const float mean = centred ? sum(multiversion<AddToLanes<false>, const float*, float, std::int64_t, float*>, 0) : 0;
    const float square = sum(multiversion<AddToLanes<true>, const float*, float, std::int64_t, float*>, mean);
    const float rstd = 1 / std::sqrt(square + static_cast<float>(p.epsilon));
    if (o.mean.present()) store(o.mean, r, 0, mean);
    if (o.rstd.present()) store(o.rstd, r, 0, rstd);
    for_each_run([&](std::int64_t c, std::int64_t n, const float* values) {
      float* const to = narrowing_target(p.x, memory, r * cols + c, h);
      if (centred) {
        multiversion<Normalize<true>>(values, mean, rstd, weight + c, weight + cols + c, n, to);
      } else {
        multiversion<Normalize<false>>(values, 0.0f, rstd, weight + c, weight + c, n, to);
      }
      if (to == h) narrow(p.x, memory, r * cols + c, n, h);
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

std::int64_t bytes_of_h(const QuantizeProblem& p) { return round_up(p.rows * p.cols * bits(p.x) / 8, 64); }
// A norm's weight and bias, as f32.
std::int64_t bytes_of_weight(const QuantizeProblem& p) {
  return is_norm(p.prologue) ? round_up(2 * p.cols * static_cast<std::int64_t>(sizeof(float)), 64) : 0;
}

QuantizeProblem without_prologue(QuantizeProblem p) {
  p.prologue = Prologue::none;
  p.gated = false;
  return p;
}

void normalize(const QuantizeProblem& p, const QuantizeOperands& o, int threads, std::uint8_t* memory) {
  const std::int64_t cols = o.x.cols();
  auto* const weight = reinterpret_cast<float*>(memory + bytes_of_h(p));
  for (std::int64_t c = 0; c < cols; ++c) {
    weight[c] = load<float>(o.norm_weight, c);
    if (o.norm_bias.present()) weight[cols + c] = load<float>(o.norm_bias, c);
  }
  const NormOfRow of_row = {p, o, weight};
  parallel_for(threads, o.x.rows(), [&](std::int64_t r) { of_row(r, memory); });
}

void activate(const QuantizeProblem& p, const QuantizeOperands& o, int threads, std::uint8_t* memory) {
  const std::int64_t cols = o.x.cols();
  const auto of_run = p.prologue == Prologue::silu
                          ? (p.gated ? activate<Prologue::silu, true> : activate<Prologue::silu, false>)
                          : (p.gated ? activate<Prologue::gelu_tanh, true> : activate<Prologue::gelu_tanh, false>);
  parallel_for(threads, o.x.rows(), [&](std::int64_t r) {
    float x[kRun], up[kRun], h[kRun];
    for (std::int64_t c = 0; c < cols; c += kRun) {
      const std::int64_t n = std::min(kRun, cols - c);
      const float* const from = widened(p.x, o.x.data, r * o.x.strides[0] + c, n, x);
      const float* const by = p.gated ? widened(p.x, o.up.data, r * o.up.strides[0] + c, n, up) : nullptr;
      float* const to = narrowing_target(p.x, memory, r * cols + c, h);
      of_run(from, by, n, to);
      if (to == h) narrow(p.x, memory, r * cols + c, n, h);
    }
  });
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const std::int64_t rows = o.x.rows();
  const std::int64_t cols = o.x.cols();
  auto* const memory = static_cast<std::uint8_t*>(launch.workspace.data);
  const int threads = useful_threads(p.threads, 4 * static_cast<double>(rows) * static_cast<double>(cols));
  is_norm(p.prologue) ? normalize(p, o, threads, memory) : activate(p, o, threads, memory);
  QuantizeOperands quantizer{.scale = o.scale, .q = o.q, .q_transposed = o.q_transposed};
  quantizer.x = {.data = memory, .dtype = p.x, .rank = 2, .shape = {rows, cols}, .strides = {cols, 1}};
  const Launch rest = {.workspace = {memory + bytes_of_h(p) + bytes_of_weight(p), launch.workspace.size},
                       .stream = launch.stream};
  quantize_portable.launch(without_prologue(p), quantizer, rest);
}

std::size_t workspace(const QuantizeProblem& p) {
  return static_cast<std::size_t>(bytes_of_h(p) + bytes_of_weight(p)) +
         quantize_portable.workspace(without_prologue(p));
}

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
