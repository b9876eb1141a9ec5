#include "cli/bench/cases.h"

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>

namespace octile::cli {

namespace {

enum class Sizes : std::uint8_t { mkn, mk, mn };

template <class Where>
struct Case {
  const char* operation;  // of the table
  const char* title;      // <format>_<operation>
  Sizes sizes;            // those that the operation has
  std::span<const Shape> shapes;
  Prepared (*prepare)(const Benchmark&, Where);
};

// One token, a few, a prompt; a feed-forward block; a square.
constexpr std::array<Shape, 6> kForward = {
    {{1, 4096, 4096}, {16, 4096, 4096}, {128, 1024, 4096}, {512, 768, 3072}, {512, 4096, 4096}, {1024, 1024, 1024}}};
constexpr std::array<Shape, 3> kUnpacked = {{{1, 4096, 4096}, {128, 1024, 4096}, {512, 768, 3072}}};
constexpr std::array<Shape, 3> kW4 = {{{1, 4096, 4096}, {16, 4096, 4096}, {512, 4096, 4096}}};
constexpr std::array<Shape, 1> kTraining = {{{512, 768, 3072}}};
constexpr std::array<Shape, 1> kMatrix = {{{4096, 4096, 4096}}};
// On a GPU: squares and feed-forward blocks of large batches, then typical serving shapes.
constexpr std::array<Shape, 10> kGpuForward = {{{4096, 4096, 4096},
                                                {8192, 8192, 8192},
                                                {4096, 4096, 14336},
                                                {4096, 14336, 4096},
                                                {16384, 4096, 14336},
                                                {1024, 4096, 4096},
                                                {256, 4096, 4096},
                                                {64, 4096, 14336},
                                                {16, 4096, 14336},
                                                {1, 4096, 14336}}};
constexpr std::array<Shape, 5> kGpuW4 = {
    {{1, 4096, 14336}, {16, 4096, 14336}, {64, 4096, 14336}, {256, 4096, 14336}, {4096, 4096, 14336}}};
constexpr std::array<Shape, 3> kGpuTraining = {{{4096, 4096, 4096}, {8192, 8192, 8192}, {4096, 4096, 14336}}};
constexpr std::array<Shape, 3> kGpuExperts = {{{32, 4096, 14336}, {2048, 4096, 14336}, {2048, 2048, 768}}};
constexpr std::array<Shape, 1> kGpuMatrix = {{{8192, 8192, 8192}}};

// A function of the plans with its last arguments.
template <auto kFunction, auto... kChoices, class Where>
Prepared with(const Benchmark& b, Where where) {
  return kFunction(b, where, kChoices...);
}

using enum Granularity;
using enum Mapping;
using enum Orientation;
using enum Product;
using enum Sizes;
using namespace bench;

constexpr Gradients kInt8Gradients = {.dx = int8, .dw = int8, .db = true};
template <int block>
constexpr Gradients kInt8Blocks = {.dx = int8, .dw = int8, .db = true, .block = block};

constexpr Quantizing kGelu = {.prologue = Prologue::gelu_tanh};
constexpr Quantizing kSwiGlu = {.orientation = both, .prologue = Prologue::silu, .gated = true};
constexpr Quantizing kRmsNorm = {.prologue = Prologue::rms_norm};

constexpr Case<int> kCases[] = {
    {"w8a8_gemm", "w8a8_forward", mkn, kForward, with<forward_s8, true>},
    {"w8a8_gemm", "w8a8_forward_unpacked", mkn, kUnpacked, with<forward_s8, false>},
    {"w8a8_gemm", "w8a8_backward_dx", mkn, kTraining, with<backward, true, int8, 0>},
    {"w8a8_gemm", "w8a8_backward_dw", mkn, kTraining, with<backward, false, int8, 0>},
    {"w8a8_blocked_gemm", "w8a8_backward_dx_blocks", mkn, kTraining, with<backward, true, int8, 128>},
    {"w8a8_blocked_gemm", "w8a8_backward_dw_blocks", mkn, kTraining, with<backward, false, int8, 128>},
    {"w8a16_gemm", "w8a16_backward_dx", mkn, kTraining, with<backward, true, dequantized, 0>},
    {"w8a16_gemm", "w8a16_backward_dw", mkn, kTraining, with<backward, false, dequantized, 0>},
    {"w4a16_gemm", "w4a16_forward", mkn, kW4, with<forward_s4, Activation::none, true>},
    {"w4a16_gemm", "w4a16_forward_unpacked", mkn, kW4, with<forward_s4, Activation::none, false>},
    {"w8a16_gemm", "w8a16_forward_bf16", mkn, kW4, with<forward_bf16, DType::s8, true>},
    {"w4a16_gemm", "w4a16_forward_bf16", mkn, kW4, with<forward_bf16, DType::s4, true>},
    {"w4a16_gemm", "w4a16_forward_bf16_unpacked", mkn, kW4, with<forward_bf16, DType::s4, false>},
    {"w4a8_gemm", "w4a8_forward", mkn, kW4, with<forward_s4, Activation::dynamic_per_token, true>},
    {"column_sum", "f32_backward_db", mn, kMatrix, backward_db},
    {"gradient_quantize", "s8_gradient_quantize", mn, kMatrix, gradient_quantize},
    {"blocked_gradient_quantize", "s8_gradient_quantize_blocks", mn, kMatrix, blocked_gradient_quantize},
    {"quantize", "s8_quantize_rows", mk, kMatrix, with<quantize, Quantizing{}>},
    {"quantize", "s8_quantize_transposed", mk, kMatrix, with<quantize, Quantizing{.orientation = transposed}>},
    {"quantize", "s8_quantize_both", mk, kMatrix, with<quantize, Quantizing{.orientation = both}>},
    {"quantize", "s8_quantize_rows_smoothed", mk, kMatrix, with<quantize, Quantizing{.smoothed = true}>},
    {"prologue_quantize", "s8_quantize_gelu", mk, kMatrix, with<quantize, kGelu>},
    {"prologue_quantize", "s8_quantize_swiglu_both", mk, kMatrix, with<quantize, kSwiGlu>},
    {"prologue_quantize", "s8_quantize_rms_norm", mk, kMatrix, with<quantize, kRmsNorm>},
    {"quantize", "u8_quantize_rows", mk, kMatrix, with<quantize, Quantizing{.q = DType::u8, .mapping = affine}>},
    {"quantize", "s8_quantize_columns", mk, kMatrix, with<quantize, Quantizing{.granularity = column}>},
    {"quantize", "s8_quantize_columns_transposed", mk, kMatrix,
     with<quantize, Quantizing{.granularity = column, .orientation = transposed}>},
    {"quantize", "s8_quantize_columns_both", mk, kMatrix,
     with<quantize, Quantizing{.granularity = column, .orientation = both}>},
    {"quantize", "s8_quantize_tensor", mk, kMatrix, with<quantize, Quantizing{.granularity = tensor}>},
    {"quantize", "s8_quantize_tensor_transposed", mk, kMatrix,
     with<quantize, Quantizing{.granularity = tensor, .orientation = transposed}>},
    {"quantize", "s8_quantize_tensor_both", mk, kMatrix,
     with<quantize, Quantizing{.granularity = tensor, .orientation = both}>},
    {"quantize", "s8_quantize_groups", mk, kMatrix, with<quantize, Quantizing{.granularity = group}>},
    {"quantize", "s8_quantize_groups_transposed", mk, kMatrix,
     with<quantize, Quantizing{.granularity = group, .orientation = transposed}>},
    {"quantize", "s8_quantize_groups_both", mk, kMatrix,
     with<quantize, Quantizing{.granularity = group, .orientation = both}>},
    {"quantize", "s8_quantize_static", mk, kMatrix,
     with<quantize, Quantizing{.granularity = tensor, .scale = ScaleSource::given}>},
    {"quantize", "s4_quantize_groups", mk, kMatrix, with<quantize, Quantizing{.granularity = group, .q = DType::s4}>},
    {"dequantize", "s8_dequantize", mk, kMatrix, with<elementwise<DequantizeArgs>, Quantizing{}>},
    {"dequantize", "s8_dequantize_columns", mk, kMatrix,
     with<elementwise<DequantizeArgs>, Quantizing{.granularity = column}>},
    {"dequantize", "s8_dequantize_groups", mk, kMatrix,
     with<elementwise<DequantizeArgs>, Quantizing{.granularity = group}>},
    {"dequantize", "u8_dequantize", mk, kMatrix,
     with<elementwise<DequantizeArgs>, Quantizing{.q = DType::u8, .mapping = affine}>},
    {"dequantize", "s4_dequantize_groups", mk, kMatrix,
     with<elementwise<DequantizeArgs>, Quantizing{.granularity = group, .q = DType::s4}>},
    {"quantize_backward", "s8_quantize_backward", mk, kMatrix, with<elementwise<QuantizeBackwardArgs>, Quantizing{}>},
    {"quantize_backward", "s8_quantize_backward_columns", mk, kMatrix,
     with<elementwise<QuantizeBackwardArgs>, Quantizing{.granularity = column}>},
    {"dequantize_backward", "s8_dequantize_backward", mk, kMatrix,
     with<elementwise<DequantizeBackwardArgs>, Quantizing{}>},
    {"dequantize_backward", "s8_dequantize_backward_columns", mk, kMatrix,
     with<elementwise<DequantizeBackwardArgs>, Quantizing{.granularity = column}>},
    {"fake_quantize", "s8_fake_quantize", mk, kMatrix, with<elementwise<FakeQuantizeArgs>, Quantizing{}>},
    {"fake_quantize", "s8_fake_quantize_columns", mk, kMatrix,
     with<elementwise<FakeQuantizeArgs>, Quantizing{.granularity = column}>},
    {"fake_quantize_backward", "s8_fake_quantize_backward", mk, kMatrix,
     with<elementwise<FakeQuantizeBackwardArgs>, Quantizing{}>},
    {"fake_quantize_backward", "s8_fake_quantize_backward_columns", mk, kMatrix,
     with<elementwise<FakeQuantizeBackwardArgs>, Quantizing{.granularity = column}>},
    {"fake_quantize", "u8_fake_quantize_tensor", mk, kMatrix,
     with<elementwise<FakeQuantizeArgs>, Quantizing{.granularity = tensor, .q = DType::u8, .mapping = affine}>},
};

constexpr Case<const Gpu&> kGpuCases[] = {
    {"w8a8_gemm", "w8a8_forward", mkn, kGpuForward, with<gpu_forward, DType::f16>},
    {"w8a8_gemm", "w8a8_forward_s8", mkn, kGpuForward, with<gpu_forward, DType::s8>},
    {"w4a16_gemm", "w4a16_forward", mkn, kGpuW4, with<gpu_forward_s4, Activation::none, true>},
    {"w4a16_gemm", "w4a16_forward_unpacked", mkn, kGpuW4, with<gpu_forward_s4, Activation::none, false>},
    {"w4a8_gemm", "w4a8_forward", mkn, kGpuW4, with<gpu_forward_s4, Activation::dynamic_per_token, true>},
    {"w8a8_gemm", "w8a8_backward_dx", mkn, kGpuTraining, with<gpu_backward, Gradients{.dx = int8}>},
    {"w8a8_gemm", "w8a8_backward_dw", mkn, kGpuTraining, with<gpu_backward, Gradients{.dw = int8}>},
    {"w8a8_gemm", "w8a8_backward", mkn, kGpuTraining, with<gpu_backward, kInt8Gradients>},
    {"w8a8_blocked_gemm", "w8a8_backward_dx_blocks", mkn, kGpuTraining,
     with<gpu_backward, Gradients{.dx = int8, .block = 128}>},
    {"w8a8_blocked_gemm", "w8a8_backward_dw_blocks", mkn, kGpuTraining,
     with<gpu_backward, Gradients{.dw = int8, .block = 128}>},
    {"w8a16_gemm", "w8a16_backward_dx", mkn, kGpuTraining, with<gpu_backward, Gradients{.dx = dequantized}>},
    {"w8a16_gemm", "w8a16_backward_dw", mkn, kGpuTraining, with<gpu_backward, Gradients{.dw = dequantized}>},
    {"column_sum", "f16_backward_db", mn, kGpuMatrix, with<gpu_backward, Gradients{.db = true}>},
    {"gradient_quantize", "s8_gradient_quantize", mn, kGpuMatrix, with<gpu_backward, kInt8Gradients>},
    {"blocked_gradient_quantize", "s8_gradient_quantize_blocks", mn, kGpuMatrix, with<gpu_backward, kInt8Blocks<128>>},
    {"blocked_gradient_quantize", "s8_gradient_quantize_blocks_256", mn, kGpuMatrix,
     with<gpu_backward, kInt8Blocks<256>>},
    {"blocked_gradient_quantize", "s8_gradient_quantize_blocks_512", mn, kGpuMatrix,
     with<gpu_backward, kInt8Blocks<512>>},
    {"w8a8_grouped_gemm", "w8a8_experts", mkn, kGpuExperts,
     with<gpu_experts, Activation::dynamic_per_token, DType::s8, 0>},
    {"w8a8_grouped_gemm", "w8a8_experts_groups", mkn, kGpuExperts,
     with<gpu_experts, Activation::dynamic_per_token, DType::s8, 128>},
    {"w8a16_grouped_gemm", "w8a16_experts", mkn, kGpuExperts, with<gpu_experts, Activation::none, DType::s8, 0>},
    {"w4a8_grouped_gemm", "w4a8_experts", mkn, kGpuExperts,
     with<gpu_experts, Activation::dynamic_per_token, DType::s4, 128>},
    {"w4a16_grouped_gemm", "w4a16_experts", mkn, kGpuExperts, with<gpu_experts, Activation::none, DType::s4, 128>},
    {"w8a8_grouped_gradient", "w8a8_experts_backward_dx_blocks", mkn, kGpuExperts,
     with<gpu_experts_backward, Gradients{.dx = int8, .block = 256}>},
    {"w8a8_grouped_gradient", "w8a8_experts_backward_dw_blocks", mkn, kGpuExperts,
     with<gpu_experts_backward, Gradients{.dw = int8, .block = 256}>},
    {"w8a16_grouped_gradient", "w8a16_experts_backward_dx", mkn, kGpuExperts,
     with<gpu_experts_backward, Gradients{.dx = dequantized}>},
    {"w8a16_grouped_gradient", "w8a16_experts_backward_dw", mkn, kGpuExperts,
     with<gpu_experts_backward, Gradients{.dw = dequantized}>},
    {"grouped_gradient_quantize", "s8_experts_gradient_quantize_blocks", mn, kGpuMatrix,
     with<gpu_experts_backward, kInt8Blocks<256>>},
    {"quantize", "s8_quantize_rows", mk, kGpuMatrix, with<gpu_quantize, Quantizing{}>},
    {"quantize", "s8_quantize_columns", mk, kGpuMatrix, with<gpu_quantize, Quantizing{.granularity = column}>},
    {"quantize", "s8_quantize_tensor", mk, kGpuMatrix, with<gpu_quantize, Quantizing{.granularity = tensor}>},
    {"quantize", "s8_quantize_both", mk, kGpuMatrix, with<gpu_quantize, Quantizing{.orientation = both}>},
    {"prologue_quantize", "s8_quantize_gelu", mk, kGpuMatrix, with<gpu_quantize, kGelu>},
    {"prologue_quantize", "s8_quantize_swiglu_both", mk, kGpuMatrix, with<gpu_quantize, kSwiGlu>},
    {"prologue_quantize", "s8_quantize_rms_norm", mk, kGpuMatrix, with<gpu_quantize, kRmsNorm>},
    {"dequantize", "s8_dequantize", mk, kGpuMatrix, gpu_elementwise<DequantizeArgs>},
    {"quantize_backward", "s8_quantize_backward", mk, kGpuMatrix, gpu_elementwise<QuantizeBackwardArgs>},
    {"dequantize_backward", "s8_dequantize_backward", mk, kGpuMatrix, gpu_elementwise<DequantizeBackwardArgs>},
    {"fake_quantize", "s8_fake_quantize", mk, kGpuMatrix, gpu_elementwise<FakeQuantizeArgs>},
    {"fake_quantize_backward", "s8_fake_quantize_backward", mk, kGpuMatrix, gpu_elementwise<FakeQuantizeBackwardArgs>},
};

Prepared prepare(const Case<int>& c, const Benchmark& b, const Place& place) { return c.prepare(b, place.threads); }
Prepared prepare(const Case<const Gpu&>& c, const Benchmark& b, const Place& place) { return c.prepare(b, *place.gpu); }

Shape kept(const Shape& shape, Sizes sizes) {
  return {shape.m, sizes == Sizes::mn ? 0 : shape.k, sizes == Sizes::mk ? 0 : shape.n};
}

std::string text(const Shape& shape) {
  std::string joined = std::to_string(shape.m);
  for (const std::int64_t size : {shape.k, shape.n}) {
    if (size > 0) joined.append("x").append(std::to_string(size));
  }
  return joined;
}

bool takes_bf16_alone(const KernelInfo& row) {
  return row.operation.ends_with("a16_gemm") && (row.name.ends_with("_avx512bf16") || row.name.ends_with("_amx"));
}

template <class Cases>
std::vector<Benchmark> benchmarks_among(const Cases& cases, const KernelInfo& row, const std::vector<Shape>& shapes,
                                        DType dtype) {
  std::vector<Benchmark> benchmarks;
  bool known = false;
  for (const auto& c : cases) {
    if (row.operation != c.operation) continue;
    known = true;
    if (c.sizes == mkn && dtype != DType::f32) continue;
    const bool of_bf16 = std::string_view(c.title).find("_bf16") != std::string_view::npos;
    if (of_bf16 != takes_bf16_alone(row)) continue;
    for (const Shape& requested : shapes.empty() ? c.shapes : std::span(shapes)) {
      const Shape shape = kept(requested, c.sizes);
      const std::string title = c.title;
      const std::string format = title.starts_with("f32") ? std::string(octile::name(dtype)) + title.substr(3) : title;
      const std::string name = format + "_" + text(shape);
      const bool twice = std::any_of(benchmarks.begin(), benchmarks.end(), [&](auto& b) { return b.name == name; });
      if (twice) continue;
      benchmarks.push_back({name, row.name, shape, dtype,
                            [&c](const Benchmark& b, const Place& place) { return prepare(c, b, place); }});
    }
  }
  if (!known) throw std::logic_error("no benchmark for the operation " + row.operation + " of " + row.name);
  return benchmarks;
}

}  // namespace

std::vector<Benchmark> benchmarks_of(const KernelInfo& row, const std::vector<Shape>& shapes, DType dtype) {
  return row.device == DeviceType::cuda ? benchmarks_among(kGpuCases, row, shapes, DType::f32)
                                        : benchmarks_among(kCases, row, shapes, dtype);
}

}  // namespace octile::cli
