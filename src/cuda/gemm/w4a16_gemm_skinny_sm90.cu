// w4a16 for up to 64 rows of a, tokens.
//
//   y (m, n) = round_to_y(sum over groups g of s[j, g] * (sum over c in g of a[i, c] * (q[j, c] - z[j, g])) + bias[j])
//
// a f16 or bf16; the integers q - z are exact in either, their products with a are summed in f32, 128 terms or a group
// at a time, and scaled there. How: device/skinny_nibbles.cuh. What that cannot read: w4a16_gemm_sm80.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "base/message.h"
#include "cuda/device/skinny_nibbles.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a16_gemm_skinny_sm90";
constexpr int kFewTokens = 32;
constexpr int kMostTokens = 64;
using AnyForm = SkinnyForm<__half, kMostTokens, true, 1, false>;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Groups smaller than a step.
bool fine(const GemmProblem& p) { return p.b.group < AnyForm::terms && p.b.group < p.k; }

struct Choice {
  int parts = 1;  // of the terms
  double seconds = std::numeric_limits<double>::infinity();
};

// Fitted to an H200, L2 flushed: a step, and what does not depend on their number. Of clusters of four and eight blocks
// 30 and 15 are there at one time.
Choice best_choice(const GemmProblem& p, std::int64_t tokens) {
  struct Seconds {
    double fixed, packed, plain, fine;
  };
  constexpr Seconds kFew = {7.2e-6, 0.725e-6, 0.98e-6, 1.28e-6};
  constexpr Seconds kMore = {7.5e-6, 0.985e-6, 1.26e-6, 1.62e-6};
  constexpr double kSharingSeconds = 0.05e-6;
  constexpr double kWaveSeconds = 4e-6;
  const Seconds& each = tokens > kFewTokens ? kMore : kFew;
  const double step_seconds = fine(p) ? each.fine : p.b_packed ? each.packed : each.plain;
  const double multiprocessors = properties(p.device).multiprocessors;
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div(p.n, AnyForm::rows), 1);
  const std::int64_t steps = ceil_div(p.k, AnyForm::terms);
  Choice best;
  for (int parts = 1; parts <= 8 && parts <= std::max<std::int64_t>(steps, 1); parts *= 2) {
    const double of_132 = parts == 1 ? 132 : parts == 2 ? 66 : 120 / parts;
    const double waves = std::ceil(static_cast<double>(tiles) / std::max(of_132 * multiprocessors / 132, 1.0));
    const double seconds = each.fixed + (parts - 1) * kSharingSeconds + (waves - 1) * kWaveSeconds +
                           waves * static_cast<double>(ceil_div(steps, parts)) * step_seconds;
    if (seconds < best.seconds) best = {parts, seconds};
  }
  return best;
}

ConstTensor matrix(const void* data, DType dtype, Device device, std::int64_t rows, std::int64_t cols,
                   std::int64_t pitch) {
  ConstTensor t;
  t.data = data;
  t.dtype = dtype;
  t.device = device;
  t.rank = 2;
  t.shape[0] = rows;
  t.shape[1] = cols;
  t.strides[0] = pitch;
  t.strides[1] = 1;
  return t;
}

template <class F>
SkinnyMaps maps_of(const GemmProblem& problem, const GemmOperands& o, const NibbleWeight& w) {
  SkinnyMaps maps = {};
  maps.tokens = tensor_map(kName, o.a, {F::tokens, F::terms / 2, true});
  const auto map_of = [&](const void* data, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t pitch,
                          BulkBox box) {
    return tensor_map(kName, matrix(data, dtype, problem.device, rows, cols, pitch), box);
  };
  if (!F::packed) {
    maps.weight = map_of(w.values, DType::u8, w.rows, w.terms / 2, w.pitch, {F::rows, F::terms / 2, true});
    return maps;
  }
  const std::int64_t panels = ceil_div(problem.n, kPanelChannels);
  const std::int64_t cols = std::int64_t{w.groups} * kPanelChannels;
  constexpr BulkBox kGroup = {F::rows / kPanelChannels, kPanelChannels, false};
  maps.weight = tensor_map(kName, LinePanels{w.values, panels, problem.k / 8, kGroup.rows, F::terms / 8});
  maps.scales = map_of(w.scales, DType::f32, panels, cols, cols, kGroup);
  if (F::zeros) maps.zeros = map_of(w.zeros, DType::u8, panels, cols, cols, kGroup);
  return maps;
}

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, int parts, Stream stream) {
  static_assert(sizeof(skinny_nibbles::Shared<F>) <= 227 * 1024);
  SkinnyNibbles p;
  p.weight = nibble_weight(problem, o);
  const SkinnyMaps maps = maps_of<F>(problem, o, p.weight);
  if (p.weight.groups == 1) p.weight.scale.col = p.weight.zero.col = 0;
  p.group_folds = F::folds > 1 ? p.weight.group / 32 : 1;
  p.tokens = static_cast<int>(o.a.rows());
  p.steps = static_cast<int>(ceil_div(problem.k, F::terms));
  p.parts = parts;
  if (problem.bias) {
    p.bias = o.bias.data;
    p.bias_stride = o.bias.strides[0];
  }
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  const auto two = static_cast<std::uintptr_t>(bits(problem.y) / 8 * 2);
  p.y_aligned =
      (reinterpret_cast<std::uintptr_t>(o.y.data) | static_cast<std::uintptr_t>(p.y_pitch) * two / 2) % two == 0;
  const auto blocks = static_cast<unsigned>(ceil_div(problem.n, F::rows) * parts);
  enqueue(kName, skinny_nibbles_kernel<F>,
          LaunchShape{blocks, skinny_nibbles::kThreads, sizeof(skinny_nibbles::Shared<F>),
                      dim3(static_cast<unsigned>(parts))},
          stream, maps, p);
}

// Calls body(form) for the problem's, with room for so many tokens.
template <class Body>
void with_form(const GemmProblem& p, std::int64_t tokens, const Body& body) {
  const auto with_zeros = [&]<class T, int most, bool packed, int folds>() {
    if (p.b.zero_point) return body(SkinnyForm<T, most, packed, folds, true>());
    body(SkinnyForm<T, most, packed, folds, false>());
  };
  const auto with_packed = [&]<class T, int most>() {
    if (!p.b_packed) return with_zeros.template operator()<T, most, false, 1>();
    if (fine(p)) return with_zeros.template operator()<T, most, true, 4>();
    with_zeros.template operator()<T, most, true, 1>();
  };
  const auto with_type = [&]<int most>() {
    if (p.a == DType::f16) return with_packed.template operator()<__half, most>();
    with_packed.template operator()<__nv_bfloat16, most>();
  };
  if (tokens <= kFewTokens) return with_type.template operator()<kFewTokens>();
  with_type.template operator()<kMostTokens>();
}

bool aligned(const void* data, std::int64_t pitch_bytes) {
  return pitch_bytes > 0 &&
         (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uintptr_t>(pitch_bytes)) % kBulkAlignment == 0;
}

// Whether 16 bytes of a row may be read at a time.
bool readable(const GemmProblem& p, const GemmOperands& o) {
  const std::int64_t pitch = o.b.strides[0] / 2;
  return aligned(o.a.data, o.a.strides[0] * 2) && (p.b_packed || aligned(o.b.data, pitch));
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  if (p.scale != DType::f32) return "has no f64";
  if (p.m > kMostTokens) return message("is for up to ", kMostTokens, " rows of a");
  if (p.k % 32 != 0) return "wants rows of a multiple of 32 terms";
  if (fine(p) && !p.b_packed) return "wants a packed weight where groups are smaller than 128";
  if (std::max(p.n, p.k) > std::int64_t{1} << 30) return "takes at most 2^30 rows or terms";
  return {};
}

Cost cost(const GemmProblem& p) {
  const auto m = static_cast<double>(p.m);
  const auto n = static_cast<double>(p.n);
  const auto k = static_cast<double>(p.k);
  Cost cost;
  cost.operations = 2 * m * n * k;
  cost.bytes = 2 * m * k + n * k / 2 + m * n * bits(p.y) / 8;
  cost.seconds = best_choice(p, p.m).seconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  return message("tiles of ", AnyForm::rows, " rows, terms in ", best_choice(p, p.m).parts, " parts");
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  for (const int tokens : {kFewTokens, kMostTokens}) {
    with_form(problem, tokens,
              []<class F>(F) { prepare(kName, skinny_nibbles_kernel<F>, sizeof(skinny_nibbles::Shared<F>)); });
  }
}

bool aligned(const GemmProblem& p, const GemmOperands& o) { return readable(p, o); }

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  const int parts = best_choice(problem, o.a.rows()).parts;
  with_form(problem, o.a.rows(), [&]<class F>(F) { launch_form<F>(problem, o, parts, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_gemm_skinny_sm90 = {
    .name = "w4a16_gemm_skinny_sm90",
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
