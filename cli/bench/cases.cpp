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
// On a GPU: squares and feed-forward blocks of large batches, then what serving asks for.
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
constexpr std::array<Shape, 1> kGpuMatrix = {{{8192, 8192, 8192}}};

// clang-format off
constexpr Case<int> kCases[] = {
    {"w8a8_gemm",              "w8a8_forward",             Sizes::mkn, kForward,  bench::forward_w8a8},
    {"w8a8_gemm",              "w8a8_forward_unpacked",    Sizes::mkn, kUnpacked, bench::forward_w8a8_unpacked},
    {"w8a8_gemm",              "w8a8_backward_dx",         Sizes::mkn, kTraining, bench::backward_dx_int8},
    {"w8a8_gemm",              "w8a8_backward_dw",         Sizes::mkn, kTraining, bench::backward_dw_int8},
    {"w8a8_blocked_gemm",      "w8a8_backward_dx_blocks",  Sizes::mkn, kTraining, bench::backward_dx_int8_blocks},
    {"w8a8_blocked_gemm",      "w8a8_backward_dw_blocks",  Sizes::mkn, kTraining, bench::backward_dw_int8_blocks},
    {"w8a16_gemm",             "w8a16_backward_dx",        Sizes::mkn, kTraining, bench::backward_dx_dequantized},
    {"w8a16_gemm",             "w8a16_backward_dw",        Sizes::mkn, kTraining, bench::backward_dw_dequantized},
    {"w4a16_gemm",             "w4a16_forward",            Sizes::mkn, kW4,       bench::forward_w4a16},
    {"w4a16_gemm",             "w4a16_forward_unpacked",   Sizes::mkn, kW4,       bench::forward_w4a16_unpacked},
    {"w4a8_gemm",              "w4a8_forward",             Sizes::mkn, kW4,       bench::forward_w4a8},
    {"column_sum",             "f32_backward_db",          Sizes::mn,  kMatrix,   bench::backward_db},
    {"gradient_quantize",      "s8_gradient_quantize",     Sizes::mn,  kMatrix,   bench::gradient_quantize},
    {"blocked_gradient_quantize", "s8_gradient_quantize_blocks", Sizes::mn, kMatrix, bench::blocked_gradient_quantize},
    {"quantize",               "s8_quantize_rows",         Sizes::mk,  kMatrix,   bench::quantize_rows},
    {"quantize",               "s8_quantize_columns",      Sizes::mk,  kMatrix,   bench::quantize_columns},
    {"quantize",               "s8_quantize_tensor",       Sizes::mk,  kMatrix,   bench::quantize_tensor},
    {"quantize",               "s8_quantize_both",         Sizes::mk,  kMatrix,   bench::quantize_both},
    {"dequantize",             "s8_dequantize",            Sizes::mk,  kMatrix,   bench::dequantize},
    {"quantize_backward",      "s8_quantize_backward",     Sizes::mk,  kMatrix,   bench::quantize_backward},
    {"dequantize_backward",    "s8_dequantize_backward",   Sizes::mk,  kMatrix,   bench::dequantize_backward},
    {"fake_quantize",          "s8_fake_quantize",         Sizes::mk,  kMatrix,   bench::fake_quantize},
    {"fake_quantize_backward", "s8_fake_quantize_backward", Sizes::mk, kMatrix,   bench::fake_quantize_backward},
};

constexpr Case<const Gpu&> kGpuCases[] = {
    {"w8a8_gemm",              "w8a8_forward",             Sizes::mkn, kGpuForward, bench::gpu_forward_w8a8},
    {"w8a8_gemm",              "w8a8_forward_s8",          Sizes::mkn, kGpuForward, bench::gpu_forward_w8a8_s8},
    {"w8a8_linear",            "w8a8_forward",             Sizes::mkn, kGpuForward, bench::gpu_forward_w8a8},
    {"w4a16_gemm",             "w4a16_forward",            Sizes::mkn, kGpuW4,      bench::gpu_forward_w4a16},
    {"w4a16_gemm",             "w4a16_forward_unpacked",   Sizes::mkn, kGpuW4,      bench::gpu_forward_w4a16_unpacked},
    {"w4a8_gemm",              "w4a8_forward",             Sizes::mkn, kGpuW4,      bench::gpu_forward_w4a8},
    {"w8a8_gemm",              "w8a8_backward_dx",         Sizes::mkn, kGpuTraining, bench::gpu_backward_dx_int8},
    {"w8a8_gemm",              "w8a8_backward_dw",         Sizes::mkn, kGpuTraining, bench::gpu_backward_dw_int8},
    {"w8a8_gemm",              "w8a8_backward",            Sizes::mkn, kGpuTraining, bench::gpu_backward_int8},
    {"w8a16_gemm",             "w8a16_backward_dx",        Sizes::mkn, kGpuTraining, bench::gpu_backward_dx_dequantized},
    {"w8a16_gemm",             "w8a16_backward_dw",        Sizes::mkn, kGpuTraining, bench::gpu_backward_dw_dequantized},
    {"column_sum",             "f16_backward_db",          Sizes::mn,  kGpuMatrix,  bench::gpu_backward_db},
    {"gradient_quantize",      "s8_gradient_quantize",     Sizes::mn,  kGpuMatrix,  bench::gpu_gradient_quantize},
    {"blocked_gradient_quantize", "s8_blocked_gradient_quantize", Sizes::mn, kGpuMatrix, bench::gpu_blocked_gradient_quantize},
    {"quantize",               "s8_quantize_rows",         Sizes::mk,  kGpuMatrix,  bench::gpu_quantize_rows},
    {"quantize",               "s8_quantize_columns",      Sizes::mk,  kGpuMatrix,  bench::gpu_quantize_columns},
    {"quantize",               "s8_quantize_tensor",       Sizes::mk,  kGpuMatrix,  bench::gpu_quantize_tensor},
    {"quantize",               "s8_quantize_both",         Sizes::mk,  kGpuMatrix,  bench::gpu_quantize_both},
    {"dequantize",             "s8_dequantize",            Sizes::mk,  kGpuMatrix,  bench::gpu_dequantize},
    {"quantize_backward",      "s8_quantize_backward",     Sizes::mk,  kGpuMatrix,  bench::gpu_quantize_backward},
    {"dequantize_backward",    "s8_dequantize_backward",   Sizes::mk,  kGpuMatrix,  bench::gpu_dequantize_backward},
    {"fake_quantize",          "s8_fake_quantize",         Sizes::mk,  kGpuMatrix,  bench::gpu_fake_quantize},
    {"fake_quantize_backward", "s8_fake_quantize_backward", Sizes::mk, kGpuMatrix,  bench::gpu_fake_quantize_backward},
};
// clang-format on

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

template <class Cases>
std::vector<Benchmark> benchmarks_among(const Cases& cases, const KernelInfo& row, const std::vector<Shape>& shapes) {
  std::vector<Benchmark> benchmarks;
  bool known = false;
  for (const auto& c : cases) {
    if (row.operation != c.operation) continue;
    known = true;
    for (const Shape& requested : shapes.empty() ? c.shapes : std::span(shapes)) {
      const Shape shape = kept(requested, c.sizes);
      const std::string name = std::string(c.title) + "_" + text(shape);
      const bool twice = std::any_of(benchmarks.begin(), benchmarks.end(), [&](auto& b) { return b.name == name; });
      if (twice) continue;
      benchmarks.push_back(
          {name, row.name, shape, [&c](const Benchmark& b, const Place& place) { return prepare(c, b, place); }});
    }
  }
  if (!known) throw std::logic_error("no benchmark for the operation " + row.operation + " of " + row.name);
  return benchmarks;
}

}  // namespace

std::vector<Benchmark> benchmarks_of(const KernelInfo& row, const std::vector<Shape>& shapes) {
  return row.device == DeviceType::cuda ? benchmarks_among(kGpuCases, row, shapes)
                                        : benchmarks_among(kCases, row, shapes);
}

}  // namespace octile::cli
