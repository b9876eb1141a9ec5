// h = round_to_x(x sigma(t)), or that times up, and then q = clamp(rint(h / s), q_min, q_max): h in the workspace, and
// quantize_portable on it. base/sigmoid.h has sigma.
#include <bit>
#include <cmath>

#include "base/sigmoid.h"
#include "cpu/quantize/levels.h"
#include "cpu/support/cost.h"

namespace octile::cpu {

extern const QuantizeKernel quantize_portable;

namespace {

constexpr std::int64_t kRun = 1024;

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

std::int64_t bytes_of_h(const QuantizeProblem& p) { return round_up(p.rows * p.cols * bits(p.x) / 8, 64); }

QuantizeProblem without_prologue(QuantizeProblem p) {
  p.prologue = Prologue::none;
  p.gated = false;
  return p;
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const std::int64_t rows = o.x.rows();
  const std::int64_t cols = o.x.cols();
  const auto of_run = p.prologue == Prologue::silu
                          ? (p.gated ? activate<Prologue::silu, true> : activate<Prologue::silu, false>)
                          : (p.gated ? activate<Prologue::gelu_tanh, true> : activate<Prologue::gelu_tanh, false>);
  auto* const memory = static_cast<std::uint8_t*>(launch.workspace.data);
  const int threads = useful_threads(p.threads, 4 * static_cast<double>(rows) * static_cast<double>(cols));
  parallel_for(threads, rows, [&](std::int64_t r) {
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
  QuantizeOperands quantizer = o;
  quantizer.up = {};
  quantizer.x = {.data = memory, .dtype = p.x, .rank = 2, .shape = {rows, cols}, .strides = {cols, 1}};
  const Launch rest = {.workspace = {memory + bytes_of_h(p), launch.workspace.size}, .stream = launch.stream};
  quantize_portable.launch(without_prologue(p), quantizer, rest);
}

std::size_t workspace(const QuantizeProblem& p) {
  return static_cast<std::size_t>(bytes_of_h(p)) + quantize_portable.workspace(without_prologue(p));
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
