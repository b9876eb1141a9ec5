// Each op: take over the arguments, inspect them, find the plan, allocate the outputs, run.
#include "torch_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "octile/octile.h"
#include "plan_cache.h"

namespace octile_torch {

namespace {

// Of a segment that is empty or all zeros.
constexpr double kMinScale = 1e-8;

template <class Description>
Description defaults(octile_status (*initialize)(Description*, std::size_t)) {
  static const Description kDefaults = [&] {
    Description description = {};  // a library that is older than the header leaves its end alone
    initialize(&description, sizeof description);
    return description;
  }();
  return kDefaults;
}

// A plan's threads are torch's, so that torch.set_num_threads() is obeyed. GPUs have none.
std::int32_t threads_of(octile_device device) {
  if (device.type != OCTILE_DEVICE_CPU) return 0;
  std::uint32_t count = 0;
  if (shim.get_num_threads(&count) != 0) fail("torch did not return its number of threads");
  return static_cast<std::int32_t>(count);
}

template <class Description>
void place(octile_device device, Description* description) {
  description->device = device;
  description->threads = threads_of(device);
}

// Of the arguments that are present.
template <class... Inputs>
void look(Inputs&... inputs) {
  ((inputs.present() ? inputs.look() : void()), ...);
}

template <class Args>
void run(octile_status (*function)(const octile_plan*, const Args*, void*, std::size_t, void*), const Plan& plan,
         Args& args, octile_device device) {
  args.struct_size = sizeof args;
  void* stream = nullptr;
  if (device.type == OCTILE_DEVICE_CUDA) {
    const CudaShim& cuda = cuda_shim();
    if (cuda.current_stream == nullptr) fail("this torch has no stable interface for CUDA");
    if (cuda.current_stream(device.id, &stream) != 0) fail("torch has no stream for cuda:%d", device.id);
  }
  Workspace workspace;
  workspace.create(plan.workspace_size(), device);
  if (function(plan.handle(), &args, workspace.data(), plan.workspace_size(), stream) != OCTILE_OK) {
    fail("%s", octile_last_error());
  }
}

std::int32_t granularity(const Input& weight_scale) {
  return weight_scale.elements() == 1 ? OCTILE_WEIGHT_S8_PER_TENSOR : OCTILE_WEIGHT_S8_PER_CHANNEL;
}

std::int32_t activation_of(const Input& x_scale) {
  return x_scale.elements() == 1 ? OCTILE_ACTIVATION_DYNAMIC_PER_TENSOR : OCTILE_ACTIVATION_DYNAMIC_PER_TOKEN;
}

// An int of torch's, clamped to int32_t: no choice is outside, so the library refuses the nearest value.
std::int32_t choice(Value value) {
  using Limits = std::numeric_limits<std::int32_t>;
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(static_cast<std::int64_t>(value), Limits::min(), Limits::max()));
}

bool boolean(Value value) { return (value & 0xff) != 0; }

}  // namespace

// ---- quantize ----

namespace {

void check_orientation(std::int32_t orientation) {
  if (orientation < OCTILE_ORIENTATION_ROW_MAJOR || orientation > OCTILE_ORIENTATION_BOTH) {
    fail("orientation is %d, expected 0 (row-major), 1 (transposed) or 2 (both)", orientation);
  }
}

octile_quantize_description quantize_description(const Input& x, std::int32_t granularity, std::int32_t orientation) {
  octile_quantize_description description = defaults(octile_quantize_description_init);
  description.rows = x.rows();
  description.cols = x.columns();
  description.x = dtype_of(x.torch_dtype());
  description.granularity = granularity;
  description.orientation = orientation;
  return description;
}

// q, q_transposed and scale of a run.
class Quantized {
 public:
  Quantized(const Input& x, const octile_quantize_description& description)
      : q_(shim.s8, x.device()),
        q_transposed_(shim.s8, x.device()),
        scale_(x.torch_dtype() == shim.f64 ? shim.f64 : shim.f32, x.device()) {
    const std::int64_t rows = x.rows(), columns = x.columns();
    // _ops.py has the reasons.
    const std::int64_t row_stride = (columns + 15) / 16 * 16, transposed_stride = (rows + 15) / 16 * 16 + 128;
    row_major_ = description.orientation != OCTILE_ORIENTATION_TRANSPOSED;
    transposed_ = description.orientation != OCTILE_ORIENTATION_ROW_MAJOR;
    q_shape_ = row_major_ ? Shape{rows, columns, row_stride} : Shape{0, 0, 1};
    transposed_shape_ = transposed_ ? Shape{columns, rows, transposed_stride} : Shape{0, 0, 1};
    scales_ = description.granularity == OCTILE_GRANULARITY_TENSOR ? 1
              : description.granularity == OCTILE_GRANULARITY_ROW  ? rows
                                                                   : columns;
    q_.create_matrix(q_shape_);
    q_transposed_.create_matrix(transposed_shape_);
    scale_.create_vector(scales_);
    if (rows == 0 || columns == 0) scale_.fill(kMinScale);  // the library writes nothing then
  }

  void put_into(octile_quantize_args& args) {
    if (row_major_) args.q = views_(q_, q_shape_);
    if (transposed_) args.q_transposed = views_(q_transposed_, transposed_shape_);
    args.scale = views_(scale_, scales_);
  }
  void release_to(Value* stack) {
    stack[0] = q_.release();
    stack[1] = q_transposed_.release();
    stack[2] = scale_.release();
  }

 private:
  Output q_, q_transposed_, scale_;
  Shape q_shape_, transposed_shape_;
  std::int64_t scales_;
  bool row_major_, transposed_;
  Views views_;
};

}  // namespace

// quantize(Tensor x, int granularity, int orientation, Tensor? given_scale=None, int prologue=0, Tensor? up=None)
//     -> (Tensor, Tensor, Tensor)
void quantize(Value* stack) {
  Input x("x", stack[0]);
  const std::int32_t granularity = choice(stack[1]), orientation = choice(stack[2]);
  Input given_scale = Input::optional("given_scale", stack[3]);
  Input up = Input::optional("up", stack[5]);
  look(x, given_scale, up);
  x.as_matrix();
  if (up.present()) up.as_matrix();
  if (granularity < OCTILE_GRANULARITY_TENSOR || granularity > OCTILE_GRANULARITY_COLUMN) {
    fail("granularity is %d, expected 0 (tensor), 1 (row) or 2 (column)", granularity);
  }
  check_orientation(orientation);
  octile_quantize_description description = quantize_description(x, granularity, orientation);
  if (given_scale.present()) {
    given_scale.as_vector();
    description.scale = OCTILE_SCALE_GIVEN;
  }
  description.prologue = choice(stack[4]);
  description.gated = up.present();
  place(x.device(), &description);
  const std::shared_ptr<const Plan> plan = find_plan(description);

  Quantized results(x, description);
  Views view;
  octile_quantize_args args = {};
  args.x = view(x);
  args.given_scale = view(given_scale);
  args.up = view(up);
  results.put_into(args);
  run(octile_quantize_run, *plan, args, x.device());
  results.release_to(stack);
}

// ---- norm_quantize ----

// norm_quantize(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int prologue, int orientation, float epsilon)
//     -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
void norm_quantize(Value* stack) {
  Input x("x", stack[0]), weight("weight", stack[1]), bias = Input::optional("bias", stack[2]);
  Input residual = Input::optional("residual", stack[3]);
  const std::int32_t prologue = choice(stack[4]), orientation = choice(stack[5]);
  look(x, weight, bias, residual);
  x.as_matrix();
  weight.as_vector();
  if (bias.present()) bias.as_vector();
  if (residual.present()) residual.as_matrix();
  check_orientation(orientation);
  if (prologue != OCTILE_PROLOGUE_RMS_NORM && prologue != OCTILE_PROLOGUE_LAYER_NORM) {
    fail("prologue is %d, expected 3 (rms_norm) or 4 (layer_norm)", prologue);
  }

  octile_quantize_description description = quantize_description(x, OCTILE_GRANULARITY_ROW, orientation);
  description.prologue = prologue;
  description.norm_weight = dtype_of(weight.torch_dtype());
  description.residual = residual.present();
  std::memcpy(&description.epsilon, &stack[6], sizeof description.epsilon);
  place(x.device(), &description);
  const std::shared_ptr<const Plan> plan = find_plan(description);

  const std::int64_t rows = x.rows(), columns = x.columns();
  const bool centred = prologue == OCTILE_PROLOGUE_LAYER_NORM;
  const Shape sum_shape = residual.present() ? Shape{rows, columns, columns} : Shape{0, 0, 1};
  Quantized results(x, description);
  Output sum(x.torch_dtype(), x.device()), mean(shim.f32, x.device()), rstd(shim.f32, x.device());
  sum.create_matrix(sum_shape);
  mean.create_vector(centred ? rows : 0);
  rstd.create_vector(rows);
  if (columns == 0) mean.fill(0), rstd.fill(0);
  Views view;
  octile_quantize_args args = {};
  args.x = view(x);
  args.norm_weight = view(weight);
  args.norm_bias = view(bias);
  args.residual = view(residual);
  if (residual.present()) args.sum = view(sum, sum_shape);
  if (centred) args.mean = view(mean, rows);
  args.rstd = view(rstd, rows);
  results.put_into(args);
  run(octile_quantize_run, *plan, args, x.device());
  results.release_to(stack);
  stack[3] = sum.release();
  stack[4] = mean.release();
  stack[5] = rstd.release();
}

namespace {

// How many neighbours along K share a scale of (N, groups); 0: all of them.
std::int64_t group_of(const Input& weight_scale, std::int64_t k) {
  const std::int64_t groups = weight_scale.columns();
  if (groups < 1 || k % groups != 0) {
    fail("weight_scale has %lld columns, which do not divide %lld", static_cast<long long>(groups),
         static_cast<long long>(k));
  }
  return groups > 1 ? k / groups : 0;
}

// The types of which a byte holds several values, and the formats of weights of them.
struct Packed {
  std::int64_t per_byte;
  std::int32_t dtype, weight;
};
constexpr Packed kPacked[] = {{2, OCTILE_DTYPE_S4, OCTILE_WEIGHT_S4_GROUP}};

// For a weight of `columns` values a row; NULL if it is not of bytes, or fits none of these types.
const Packed* packed_as(const Input& weight, std::int64_t columns) {
  if (weight.torch_dtype() != shim.u8) return nullptr;
  for (const Packed& one : kPacked) {
    if (weight.columns() == columns / one.per_byte + (columns % one.per_byte != 0)) return &one;
  }
  return nullptr;
}

// A weight of `columns` values a row: int8, or bytes of several each.
void check_levels(const Input& weight, std::int64_t columns) {
  if (packed_as(weight, columns) != nullptr) return;
  if (weight.torch_dtype() == shim.s8 && weight.columns() == columns) return;
  fail("weight has %lld columns of %s, expected %lld of int8 or %lld of uint8",
       static_cast<long long>(weight.columns()), name_of(weight.torch_dtype()), static_cast<long long>(columns),
       static_cast<long long>(columns / 2 + columns % 2));
}

}  // namespace

// ---- dequantize ----

// dequantize(Tensor weight, Tensor weight_scale, Tensor? weight_zero_point, int columns, ScalarType dtype) -> Tensor
void dequantize(Value* stack) {
  Input weight("weight", stack[0]), scale("weight_scale", stack[1]);
  Input zero_point = Input::optional("weight_zero_point", stack[2]);
  const auto columns = static_cast<std::int64_t>(stack[3]);
  const auto dtype = static_cast<std::int32_t>(stack[4]);
  look(weight, scale, zero_point);
  weight.as_matrix();
  check_levels(weight, columns);
  if (dtype_of(dtype) < 0) fail("dtype is %s", name_of(dtype));

  octile_quantize_description description = defaults(octile_quantize_description_init);
  description.rows = weight.rows();
  description.cols = columns;
  description.x = dtype_of(dtype);
  const Packed* const packed = packed_as(weight, columns);
  description.q = packed != nullptr ? packed->dtype : OCTILE_DTYPE_S8;
  description.mapping = zero_point.present() ? OCTILE_MAPPING_AFFINE : OCTILE_MAPPING_SYMMETRIC;
  const bool grouped = scale.dimensions() == 2 && columns > 0;
  if (grouped) {
    scale.as_matrix();
    zero_point.as_matrix();
    description.group = group_of(scale, columns);
    if (description.group == 0) description.group = columns;
    description.granularity = OCTILE_GRANULARITY_GROUP;
  } else if (columns > 0) {
    scale.as_vector();
    zero_point.as_vector();
    description.granularity = scale.elements() == 1 ? OCTILE_GRANULARITY_TENSOR : OCTILE_GRANULARITY_ROW;
  }
  place(weight.device(), &description);
  const std::shared_ptr<const Plan> plan = find_dequantize_plan(description);

  const Shape shape = {weight.rows(), columns, columns};
  Output x(dtype, weight.device());
  x.create_matrix(shape);
  if (shape.rows > 0 && columns > 0) {
    Views views;
    octile_dequantize_args args = {};
    args.q = packed != nullptr ? views.packed(weight, columns, packed->per_byte) : views(weight);
    args.scale = views(scale);
    args.zero_point = views(zero_point);
    args.x = views(x, shape);
    run(octile_dequantize_run, *plan, args, weight.device());
  }
  stack[0] = x.release();
}

// ---- The linear layers ----

namespace {

// Of int8 weights, by their scales: (N), (1) or (N, K / group).
void describe_s8(Input& weight_scale, std::int64_t k, octile_linear_description* description) {
  weight_scale.as_scales();
  const bool grouped = weight_scale.dimensions() == 2;
  description->weight = grouped ? OCTILE_WEIGHT_S8_GROUP : granularity(weight_scale);
  if (grouped) description->group = group_of(weight_scale, k);
}

struct LinearOperands {
  Input &x, &x_scale, &x_multiplier, &weight, &weight_scale, &weight_zero_point, &bias;
};

// Common to all of them. The description lacks m, k, bias, device and threads, and n unless the weight is packed.
void run_linear(octile_linear_description& description, LinearOperands operands, std::int32_t y_dtype, Value* result) {
  auto& [x, x_scale, x_multiplier, weight, weight_scale, weight_zero_point, bias] = operands;
  const bool packed = description.packed_weight != 0;
  if (!packed) {
    description.n = description.weight_layout == OCTILE_LAYOUT_IN_OUT ? weight.columns() : weight.rows();
  }
  const std::int64_t n = description.n;
  description.m = x.rows();
  description.k = x.columns();
  description.bias = bias.present();
  description.x_multiplier = x_multiplier.present();
  place(x.device(), &description);
  const std::shared_ptr<const Plan> plan = find_plan(description);

  Output y(y_dtype, x.device());
  y.create_rows(x, n);

  const Packed* const as = packed ? nullptr : packed_as(weight, x.columns());
  Views views;
  octile_linear_args args = {};
  args.x = views(x);
  args.x_scale = views(x_scale);
  args.x_multiplier = views(x_multiplier);
  args.weight = as != nullptr ? views.packed(weight, x.columns(), as->per_byte) : views(weight);
  args.weight_scale = views(weight_scale);
  args.weight_zero_point = views(weight_zero_point);
  args.bias = views(bias);
  args.y = views(y, {x.rows(), n, n});
  run(octile_linear_run, *plan, args, x.device());
  *result = y.release();
}

}  // namespace

// linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int activation, int weight_layout,
//        Tensor? x_multiplier=None, float static_scale=0.0) -> Tensor
void linear(Value* stack) {
  Input x("x", stack[0]), weight("weight", stack[1]), weight_scale("weight_scale", stack[2]);
  Input bias = Input::optional("bias", stack[3]), multiplier = Input::optional("x_multiplier", stack[6]), none("", 0);
  octile_linear_description description = defaults(octile_linear_description_init);
  description.activation = choice(stack[4]);
  description.weight_layout = choice(stack[5]);
  std::memcpy(&description.static_scale, &stack[7], sizeof description.static_scale);
  look(x, weight, weight_scale, bias, multiplier);
  x.as_rows();
  weight.as_matrix();
  describe_s8(weight_scale, x.columns(), &description);
  bias.as_vector();
  multiplier.as_vector();
  description.x = description.y = dtype_of(x.torch_dtype());
  run_linear(description, {x, none, multiplier, weight, weight_scale, none, bias}, x.torch_dtype(), &stack[0]);
}

// linear_int8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, int weight_layout,
//             ScalarType dtype) -> Tensor
void linear_int8(Value* stack) {
  Input x("x", stack[0]), x_scale("x_scale", stack[1]), weight("weight", stack[2]);
  Input weight_scale("weight_scale", stack[3]), bias = Input::optional("bias", stack[4]), none("", 0);
  octile_linear_description description = defaults(octile_linear_description_init);
  description.weight_layout = choice(stack[5]);
  const auto y_dtype = static_cast<std::int32_t>(stack[6]);
  look(x, x_scale, weight, weight_scale, bias);
  x.as_matrix();
  x_scale.as_vector();
  weight.as_matrix();
  describe_s8(weight_scale, x.columns(), &description);
  bias.as_vector();
  if (dtype_of(y_dtype) < 0) fail("dtype is %s", name_of(y_dtype));
  description.x = dtype_of(x.torch_dtype());
  if (description.x != OCTILE_DTYPE_S8) fail("x is of %s, expected int8", name_of(x.torch_dtype()));
  description.y = dtype_of(y_dtype);
  description.activation = activation_of(x_scale);
  run_linear(description, {x, x_scale, none, weight, weight_scale, none, bias}, y_dtype, &stack[0]);
}

// linear_s4(Tensor x, Tensor weight, Tensor weight_scale, Tensor? weight_zero_point, Tensor? bias, int activation=0)
//     -> Tensor
void linear_s4(Value* stack) {
  Input x("x", stack[0]), weight("weight", stack[1]), weight_scale("weight_scale", stack[2]);
  Input zero_point = Input::optional("weight_zero_point", stack[3]), bias = Input::optional("bias", stack[4]),
        none("", 0);
  look(x, weight, weight_scale, zero_point, bias);
  x.as_rows();
  weight.as_matrix();
  weight_scale.as_matrix();
  zero_point.as_matrix();
  bias.as_vector();
  const std::int64_t k = x.columns();
  const Packed* const packed = packed_as(weight, k);
  if (packed == nullptr) {
    fail("weight has %lld columns of %s, expected %lld of uint8", static_cast<long long>(weight.columns()),
         name_of(weight.torch_dtype()), static_cast<long long>((k + 1) / 2));
  }
  octile_linear_description description = defaults(octile_linear_description_init);
  description.x = description.y = dtype_of(x.torch_dtype());
  description.activation = choice(stack[5]);
  description.weight = packed->weight;
  description.group = group_of(weight_scale, k);
  description.weight_zero_point = zero_point.present();
  run_linear(description, {x, none, none, weight, weight_scale, zero_point, bias}, x.torch_dtype(), &stack[0]);
}

// linear_packed(Tensor x, Tensor weight, Tensor? bias, int out_features, int activation, int weight_format, int group,
//               bool zero_point, Tensor? x_multiplier, float static_scale) -> Tensor
void linear_packed(Value* stack) {
  Input x("x", stack[0]), weight("weight", stack[1]), bias = Input::optional("bias", stack[2]);
  Input multiplier = Input::optional("x_multiplier", stack[8]), none("", 0);
  octile_linear_description description = defaults(octile_linear_description_init);
  description.packed_weight = 1;
  description.n = static_cast<std::int64_t>(stack[3]);
  description.activation = choice(stack[4]);
  description.weight = choice(stack[5]);
  description.group = static_cast<std::int64_t>(stack[6]);
  description.weight_zero_point = boolean(stack[7]);
  std::memcpy(&description.static_scale, &stack[9], sizeof description.static_scale);
  look(x, weight, bias, multiplier);
  x.as_rows();
  weight.as_vector();
  bias.as_vector();
  multiplier.as_vector();
  description.x = description.y = dtype_of(x.torch_dtype());
  run_linear(description, {x, none, multiplier, weight, none, none, bias}, x.torch_dtype(), &stack[0]);
}

// ---- grouped_linear(Tensor x, Tensor? x_scale, Tensor offsets, Tensor? token, Tensor weight, Tensor? weight_scale,
//                     Tensor? weight_zero_point, Tensor? bias, Tensor? place, Tensor? router_weight, int out_features,
//                     int activation, int weight_format, int group, bool zero_point, ScalarType dtype) -> Tensor ----

void grouped_linear(Value* stack) {
  Input x("x", stack[0]), x_scale = Input::optional("x_scale", stack[1]), offsets("offsets", stack[2]);
  Input token = Input::optional("token", stack[3]), weight("weight", stack[4]);
  Input weight_scale = Input::optional("weight_scale", stack[5]);
  Input zero_point = Input::optional("weight_zero_point", stack[6]), bias = Input::optional("bias", stack[7]);
  Input places = Input::optional("place", stack[8]), router_weight = Input::optional("router_weight", stack[9]);
  octile_grouped_linear_description description = defaults(octile_grouped_linear_description_init);
  description.n = static_cast<std::int64_t>(stack[10]);
  description.activation = choice(stack[11]);
  description.weight = choice(stack[12]);
  description.group = static_cast<std::int64_t>(stack[13]);
  description.weight_zero_point = boolean(stack[14]);
  const auto y_dtype = static_cast<std::int32_t>(stack[15]);
  look(x, x_scale, offsets, token, weight, weight_scale, zero_point, bias, places, router_weight);
  for (Input* matrix : {&x, &zero_point, &bias, &places, &router_weight}) matrix->as_matrix();
  for (Input* vector : {&x_scale, &offsets, &token}) vector->as_vector();
  const bool packed = weight.dimensions() < 2;
  packed ? weight.as_vector() : weight.as_matrix();
  weight_scale.as_scales();
  if (dtype_of(y_dtype) < 0) fail("dtype is %s", name_of(y_dtype));
  const std::int64_t rows = token.present() ? token.elements() : x.rows();
  description.experts = offsets.elements() - 1;
  description.m = rows;
  description.k = x.columns();
  description.gather = token.present();
  description.slots = places.present() ? places.columns() : 0;
  description.tokens = places.present() ? places.rows() : 0;
  if (token.present()) description.tokens = std::max(description.tokens, x.rows());
  description.x = dtype_of(x.torch_dtype());
  description.y = dtype_of(y_dtype);
  description.packed_weight = packed;
  description.bias = bias.present();
  description.clear_rest = !places.present();
  place(x.device(), &description);
  const std::shared_ptr<const Plan> plan = find_plan(description);

  const Shape shape = {places.present() ? places.rows() : rows, description.n, description.n};
  Output y(y_dtype, x.device());
  y.create_matrix(shape);
  Views views;
  octile_grouped_linear_args args = {};
  args.x = views(x);
  args.x_scale = views(x_scale);
  args.offsets = views(offsets);
  args.token = views(token);
  const Packed* const as = packed ? nullptr : packed_as(weight, x.columns());
  args.weight = as != nullptr ? views.packed(weight, x.columns(), as->per_byte) : views(weight);
  args.weight_scale = views(weight_scale);
  args.weight_zero_point = views(zero_point);
  args.bias = views(bias);
  args.place = views(places);
  args.router_weight = views(router_weight);
  args.y = views(y, shape);
  run(octile_grouped_linear_run, *plan, args, x.device());
  stack[0] = y.release();
}

// ---- attend_one_query(Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale) -> Tensor ----

void attend_one_query(Value* stack) {
  Input query("query", stack[0]), key("key", stack[1]), value("value", stack[2]);
  Input mask = Input::optional("mask", stack[3]);
  mask.may_be_bool();
  const std::optional<Value> given_scale = take_optional(stack[4]);
  look(query, key, value, mask);
  for (const Input* input : {&query, &key, &value, &mask}) {
    if (input->present()) input->require_dimensions(4);
  }
  if (query.size(2) != 1) fail("query has %lld rows, expected 1", static_cast<long long>(query.size(2)));
  if (mask.present() && mask.torch_dtype() != shim.boolean) {
    fail("mask is of %s, expected bool", name_of(mask.torch_dtype()));
  }
  if (mask.present() && (mask.size(1) != 1 || mask.size(2) != 1)) {
    fail("mask is (%lld, %lld, %lld, %lld), expected (batch or 1, 1, 1, positions)",
         static_cast<long long>(mask.size(0)), static_cast<long long>(mask.size(1)),
         static_cast<long long>(mask.size(2)), static_cast<long long>(mask.size(3)));
  }
  const std::int64_t batch = query.size(0), heads = query.size(1), size = query.size(3);
  Output y(query.torch_dtype(), query.device());
  y.create_dense({batch, 1, heads, size});

  View views[5];
  octile_attend_one_query_args args = {};
  args.struct_size = sizeof args;
  args.query = views[0].dimensions(query, {0, 1, 3});
  args.key = views[1].dimensions(key, {0, 1, 2, 3});
  args.value = views[2].dimensions(value, {0, 1, 2, 3});
  args.mask = views[3].dimensions(mask, {0, 3});
  args.y = views[4].dense(y, {batch, heads, size});
  args.scale = 1 / std::sqrt(static_cast<double>(size));
  if (given_scale) std::memcpy(&args.scale, &*given_scale, sizeof args.scale);
  args.threads = threads_of(query.device());
  if (octile_attend_one_query(&args) != OCTILE_OK) fail("%s", octile_last_error());
  stack[0] = y.release();
}

// ---- linear_backward(Tensor dy, Tensor? weight, Tensor? weight_scale, Tensor? x, Tensor? x_scale, int dx, int dw,
//                      bool db, int weight_layout, bool x_transposed, ScalarType dw_dtype, int dw_layout,
//                      int rounding=0, SymInt seed=0, int gradient_block=0) -> (Tensor, Tensor, Tensor)
//      grouped_linear_backward(Tensor dy, Tensor offsets, Tensor? weight, Tensor? weight_scale, Tensor? x,
//                              Tensor? x_scale, int dx, int dw, bool db, ScalarType dw_dtype, int rounding=0,
//                              SymInt seed=0, int gradient_block=0) -> (Tensor, Tensor, Tensor) ----

namespace {

template <class Description, class Args>
void backward(Value* stack, octile_status (*initialize)(Description*, std::size_t),
              octile_status (*function)(const octile_plan*, const Args*, void*, std::size_t, void*)) {
  constexpr bool kGrouped = requires(Description d) { d.experts; };
  const Value* next = stack;
  Input dy("dy", *next++), offsets = kGrouped ? Input("offsets", *next++) : Input("", 0);
  Input weight = Input::optional("weight", *next++), weight_scale = Input::optional("weight_scale", *next++);
  Input x = Input::optional("x", *next++), x_scale = Input::optional("x_scale", *next++);
  Description description = defaults(initialize);
  description.dx = choice(*next++);
  description.dw = choice(*next++);
  description.db = boolean(*next++);
  std::int32_t dw_layout = OCTILE_LAYOUT_OUT_IN;
  bool weight_in_out = false, x_transposed = false;
  if constexpr (!kGrouped) {
    description.weight_layout = choice(*next++);
    weight_in_out = description.weight_layout == OCTILE_LAYOUT_IN_OUT;
    description.x_transposed = x_transposed = boolean(*next++);
  }
  const auto dw_dtype = static_cast<std::int32_t>(*next++);
  if constexpr (!kGrouped) dw_layout = choice(*next++);
  description.rounding = choice(*next++);
  const std::uint64_t seed = *next++;
  description.gradient_block = choice(*next);
  const bool wants_dx = description.dx != OCTILE_PRODUCT_NONE, wants_dw = description.dw != OCTILE_PRODUCT_NONE;
  const bool wants_db = description.db != 0;

  look(dy, offsets, weight, weight_scale, x, x_scale);
  dy.as_matrix();
  offsets.as_vector();
  description.m = dy.rows();
  description.n = dy.columns();
  description.dy = dtype_of(dy.torch_dtype());
  if (wants_dx) {
    if (!weight.present() || !weight_scale.present()) fail("dx needs weight and weight_scale");
    weight.as_matrix();
    weight_scale.as_vector();
    description.k = weight_in_out ? weight.rows() : weight.columns();
    if constexpr (!kGrouped) description.weight = granularity(weight_scale);
  }
  // The library would take -1 for weight_layout's.
  if (dw_layout != OCTILE_LAYOUT_OUT_IN && dw_layout != OCTILE_LAYOUT_IN_OUT) {
    fail("dw_layout is %d, expected 0 (N, K) or 1 (K, N)", dw_layout);
  }
  if (wants_dw) {
    if (!x.present() || !x_scale.present()) fail("dw needs x and x_scale");
    x.as_matrix();
    x_scale.as_vector();
    if (dtype_of(dw_dtype) < 0) fail("dw_dtype is %s", name_of(dw_dtype));
    description.k = x_transposed ? x.rows() : x.columns();
    description.dw_dtype = dtype_of(dw_dtype);
    if constexpr (!kGrouped) {
      description.dw_layout = dw_layout;
      description.activation = activation_of(x_scale);
    }
  }
  std::int64_t experts = 1;
  if constexpr (kGrouped) {
    experts = description.experts = offsets.elements() - 1;
    description.clear_rest = wants_dx;
  }
  place(dy.device(), &description);
  const std::shared_ptr<const Plan> plan = find_plan(description);

  const std::int64_t n = description.n, k = description.k;
  const Shape dx_shape = {description.m, k, k}, db_shape = {experts, n, n};
  const Shape dw_shape = dw_layout == OCTILE_LAYOUT_IN_OUT ? Shape{k, n, n} : Shape{experts * n, k, k};
  Output dx(dy.torch_dtype(), dy.device()), dw(dw_dtype, dy.device()), db(dy.torch_dtype(), dy.device());
  wants_dx ? dx.create_matrix(dx_shape) : dx.create_vector(0);
  wants_dw ? dw.create_matrix(dw_shape) : dw.create_vector(0);
  wants_db&& kGrouped ? db.create_matrix(db_shape) : db.create_vector(wants_db ? n : 0);

  Views views;
  Args args = {};
  args.seed = seed;
  args.dy = views(dy);
  args.weight = views(weight);
  args.weight_scale = views(weight_scale);
  args.x = views(x);
  args.x_scale = views(x_scale);
  if (wants_dx) args.dx = views(dx, dx_shape);
  if (wants_dw) args.dw = views(dw, dw_shape);
  if (wants_db) args.db = kGrouped ? views(db, db_shape) : views(db, n);
  if constexpr (kGrouped) args.offsets = views(offsets);
  run(function, *plan, args, dy.device());
  stack[0] = dx.release();
  stack[1] = dw.release();
  stack[2] = db.release();
}

}  // namespace

void linear_backward(Value* stack) {
  backward(stack, octile_linear_backward_description_init, octile_linear_backward_run);
}
void grouped_linear_backward(Value* stack) {
  backward(stack, octile_grouped_linear_backward_description_init, octile_grouped_linear_backward_run);
}

}  // namespace octile_torch
