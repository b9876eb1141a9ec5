// What the int8 backward needs of dY (m, n):
//
//   s1[m] = max(max_n |dY[m, n] w[n]| / 127, min_scale)    q1[m, n] = rint(dY[m, n] w[n] / s1[m])
//   s2[n] = max(max_m |dY[m, n] x[m]| / 127, min_scale)    q2[n, m] = rint(dY[m, n] x[m] / s2[n])
//   dB[n] = sum_m dY[m, n]
//
// One launch that reads dY twice: device/two_pass.cuh. The bits are those of two quantizers.
#include <string>

#include "cuda/device/two_pass.cuh"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "gradient_quantize_sm90";

// The parts of the workspace after the rows' maxima, in elements of 4 bytes.
struct Parts {
  std::size_t column_max, partial_sums, all;
};

template <class T>
Parts parts(Device device, std::int64_t rows, std::int64_t cols) {
  const auto owners = static_cast<std::size_t>(tiling_of<T>(device, rows, cols).max_owners());
  const std::size_t sums = static_cast<std::size_t>(rows) + static_cast<std::size_t>(cols);
  return {static_cast<std::size_t>(rows), sums, sums + owners * static_cast<std::size_t>(cols)};
}

template <class T>
TwoPassArguments<T> arguments(const QuantizeProblem& p, const QuantizeOperands& o, void* workspace) {
  const Parts at = parts<T>(p.device, o.x.rows(), o.x.cols());
  auto* const words = static_cast<std::uint32_t*>(workspace);
  TwoPassArguments<T> a = {};
  a.m = tiles::matrices<T>(o);
  a.column_factor = row_scale<float>(o.multiplier);
  a.row_factor = row_scale<float>(o.row_multiplier);
  a.row_scale = static_cast<float*>(o.scale.data);
  a.row_scale_stride = o.scale.row_stride;
  a.column_scale = static_cast<float*>(o.column_scale.data);
  a.column_scale_stride = o.column_scale.col_stride;
  if (o.y.present()) a.sum = static_cast<T*>(o.y.data), a.sum_stride = o.y.strides[0];
  a.q_max = static_cast<float>(p.q_max);
  a.min_scale = static_cast<float>(p.min_scale);
  a.row_max = words;
  a.column_max = words + at.column_max;
  a.partial_sums = reinterpret_cast<float*>(words + at.partial_sums);
  return a;
}

std::string supports(const QuantizeProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.x == DType::f64 || p.q != DType::s8 || p.rounding != Rounding::nearest) {
    return "does f16, bf16 and f32 to s8, to nearest";
  }
  if (p.mapping != Mapping::symmetric || p.scale != ScaleSource::dynamic || p.q_min > -p.q_max) {
    return "does symmetric dynamic scales with nothing to clamp";
  }
  if (p.rows > 1 << 30 || p.cols > 1 << 30) return "counts rows and columns in 32 bits";
  return {};
}

// On an H200, 8192 x 8192 f16.
Cost cost(const QuantizeProblem& p) {
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.cols);
  const double bytes = elements * (2 * bits(p.x) + 2 * bits(p.q)) / 8;
  return {4 * elements, bytes, bytes / 3.6e12 + 10e-6};
}

std::size_t workspace(const QuantizeProblem& p) {
  return with_narrow_type(p.x, [&](auto x) { return parts<decltype(x)>(p.device, p.rows, p.cols).all * 4; });
}

void load(const QuantizeProblem& p) {
  with_narrow_type(p.x, [&](auto x) {
    using T = decltype(x);
    prepare_two_pass<T, true>(kName);
  });
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_narrow_type(p.x, [&](auto x) {
    using T = decltype(x);
    const int blocks = tiling_of<T>(p.device, o.x.rows(), o.x.cols()).blocks;
    enqueue_two_pass<T, true>(kName, arguments<T>(p, o, launch.workspace.data), blocks, tiles::moves_whole<T>(o),
                              launch.stream);
  });
}

}  // namespace

extern constinit const QuantizeKernel gradient_quantize_sm90 = {
    .name = "gradient_quantize_sm90",
    .task = {Operation::gradient_quantize},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
