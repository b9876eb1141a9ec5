/* The C interface, used from C against the shared library. Every number here was worked out by hand: the inputs are
 * chosen so that each scale is a power of two, and each tie falls where rounding to even and away differ. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "octile/octile.h"

static int failures = 0;

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      ++failures;                                                              \
      fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
    }                                                                          \
  } while (0)

static void expect_ok(octile_status status, int line) {
  if (status == OCTILE_OK) return;
  ++failures;
  fprintf(stderr, "%s:%d: status %d: %s\n", __FILE__, line, (int)status, octile_last_error());
}
#define OK(call) expect_ok(call, __LINE__)

/* The call fails with this status, and its text holds each of the words, separated by '|'. */
static void expect_error(octile_status status, octile_status wanted, const char* words, int line) {
  char copy[256];
  snprintf(copy, sizeof copy, "%s", words);
  if (status != wanted) {
    ++failures;
    fprintf(stderr, "%s:%d: status %d, expected %d (%s)\n", __FILE__, line, (int)status, (int)wanted,
            octile_last_error());
    return;
  }
  for (char* word = strtok(copy, "|"); word; word = strtok(NULL, "|")) {
    if (strstr(octile_last_error(), word)) continue;
    ++failures;
    fprintf(stderr, "%s:%d: no \"%s\" in: %s\n", __FILE__, line, word, octile_last_error());
  }
}
#define ERROR(call, status, words) expect_error(call, status, words, __LINE__)

static void expect_floats(const float* got, const float* wanted, size_t count, int line) {
  for (size_t i = 0; i < count; ++i) {
    if (got[i] == wanted[i]) continue;
    ++failures;
    fprintf(stderr, "%s:%d: element %zu is %.9g, expected %.9g\n", __FILE__, line, i, got[i], wanted[i]);
  }
}
#define FLOATS(got, ...) \
  expect_floats(got, (const float[]){__VA_ARGS__}, sizeof((const float[]){__VA_ARGS__}) / sizeof(float), __LINE__)

static void expect_bytes(const void* got, const void* wanted, size_t count, int line) {
  for (size_t i = 0; i < count; ++i) {
    const int g = ((const signed char*)got)[i], w = ((const signed char*)wanted)[i];
    if (g == w) continue;
    ++failures;
    fprintf(stderr, "%s:%d: byte %zu is %d, expected %d\n", __FILE__, line, i, g, w);
  }
}
#define BYTES(got, ...) \
  expect_bytes(got, (const signed char[]){__VA_ARGS__}, sizeof((const signed char[]){__VA_ARGS__}), __LINE__)

/* Tensors that own their shape. */
typedef struct {
  octile_tensor tensor;
  int64_t shape[2];
} owned;

static const octile_element kF32 = {OCTILE_CODE_FLOAT, 32, 1};
static const octile_element kS8 = {OCTILE_CODE_INT, 8, 1};
static const octile_element kU8 = {OCTILE_CODE_UINT, 8, 1};
static const octile_element kS4 = {OCTILE_CODE_INT, 4, 1};
static const octile_element kS32 = {OCTILE_CODE_INT, 32, 1};

static const octile_tensor* view(owned* o, void* data, octile_element dtype, int64_t rows, int64_t cols) {
  o->shape[0] = rows;
  o->shape[1] = cols;
  o->tensor = (octile_tensor){.data = data,
                              .device = {OCTILE_DEVICE_CPU, 0},
                              .ndim = cols < 0 ? 1 : 2, /* cols < 0: a vector */
                              .dtype = dtype,
                              .shape = o->shape};
  return &o->tensor;
}
#define MATRIX(data, dtype, rows, cols) view(&(owned){.shape = {0}}, data, dtype, rows, cols)
#define VECTOR(data, dtype, size) view(&(owned){.shape = {0}}, data, dtype, size, -1)

/* Runs with a workspace of exactly the plan's size. */
#define RUN(kind, plan, args)                                                   \
  do {                                                                          \
    const size_t bytes = octile_plan_workspace_size(plan);                      \
    void* workspace = malloc(bytes + 1);                                        \
    OK(octile_##kind##_can_implement(plan, args));                              \
    OK(octile_##kind##_run(plan, args, bytes ? workspace : NULL, bytes, NULL)); \
    free(workspace);                                                            \
  } while (0)

static octile_quantize_description quantizer(int64_t rows, int64_t cols) {
  octile_quantize_description d;
  OK(octile_quantize_description_init(&d, sizeof d));
  d.rows = rows;
  d.cols = cols;
  return d;
}

static octile_linear_description linear(int64_t m, int64_t n, int64_t k) {
  octile_linear_description d;
  OK(octile_linear_description_init(&d, sizeof d));
  d.m = m;
  d.n = n;
  d.k = k;
  return d;
}

static void test_versions(void) {
  char text[64];
  snprintf(text, sizeof text, "%d.%d.%d", OCTILE_VERSION_MAJOR, OCTILE_VERSION_MINOR, OCTILE_VERSION_PATCH);
  CHECK(strcmp(octile_version(), text) == 0);
  CHECK(octile_abi_version() == OCTILE_ABI_VERSION);
}

static void test_defaults(void) {
  octile_quantize_description q = quantizer(1, 2);
  CHECK(q.struct_size == sizeof q && q.x == OCTILE_DTYPE_F32 && q.q == OCTILE_DTYPE_S8);
  CHECK(q.granularity == OCTILE_GRANULARITY_ROW && q.scale == OCTILE_SCALE_DYNAMIC && q.kernel == NULL);
  CHECK(q.device.type == OCTILE_DEVICE_CPU && q.device.id == 0 && q.threads == 0 && q.q_min == 0 && q.q_max == 0);
  octile_linear_description l = linear(0, 0, 0);
  CHECK(l.x == OCTILE_DTYPE_F32 && l.y == OCTILE_DTYPE_F32 && l.group == 128 && l.bias == 0);
  CHECK(l.activation == OCTILE_ACTIVATION_DYNAMIC_PER_TOKEN && l.weight == OCTILE_WEIGHT_S8_PER_CHANNEL);
  octile_linear_backward_description b;
  OK(octile_linear_backward_description_init(&b, sizeof b));
  CHECK(b.dw_dtype == OCTILE_DTYPE_SAME && b.dx == OCTILE_PRODUCT_DEQUANTIZED && b.dw == OCTILE_PRODUCT_DEQUANTIZED);
  CHECK(b.rounding == OCTILE_ROUNDING_NEAREST && b.dy == OCTILE_DTYPE_F32 && b.dw_accumulate == 0 &&
        b.dw_layout == OCTILE_LAYOUT_SAME && b.gradient_block == 0);
}

static void test_quantize_rows(void) {
  octile_quantize_description d = quantizer(2, 4);
  octile_plan* plan = NULL;
  OK(octile_quantize_plan_create(&d, &plan));
  /* Row 0: s = 127 / 127. Ties: -63.5 -> -64, 0.5 -> 0, 1.5 -> 2. Row 1 is zero: the scale is the least one, 1e-8. */
  float x[8] = {127, -63.5f, 0.5f, 1.5f, 0, 0, 0, 0};
  signed char q[8];
  float scale[2];
  memset(q, 99, sizeof q);
  octile_quantize_args args = {.struct_size = sizeof args,
                               .x = MATRIX(x, kF32, 2, 4),
                               .q = MATRIX(q, kS8, 2, 4),
                               .scale = VECTOR(scale, kF32, 2)};
  RUN(quantize, plan, &args);
  BYTES(q, 127, -64, 0, 2, 0, 0, 0, 0);
  FLOATS(scale, 1, 1e-8f);
  /* Fewer rows than the description's, read at an offset with a stride of two rows. */
  float one_row[8] = {0, 0, 0, 0, 2.0f, -254, 1, 3};
  owned offset;
  view(&offset, one_row, kF32, 1, 4);
  offset.tensor.byte_offset = 4 * sizeof(float);
  args.x = &offset.tensor;
  args.q = MATRIX(q, kS8, 1, 4);
  args.scale = VECTOR(scale, kF32, 1);
  RUN(quantize, plan, &args);
  BYTES(q, 1, -127, 0, 2, 0, 0, 0, 0); /* s = 2: 1 / 2 -> 0, 3 / 2 -> 2; row 1 is as it was */
  FLOATS(scale, 2, 1e-8f);
  octile_plan_destroy(plan);
}

static void test_quantize_affine(void) {
  octile_quantize_description d = quantizer(1, 4);
  d.q = OCTILE_DTYPE_U8;
  d.granularity = OCTILE_GRANULARITY_TENSOR;
  d.mapping = OCTILE_MAPPING_AFFINE;
  octile_plan* plan = NULL;
  OK(octile_quantize_plan_create(&d, &plan));
  float x[4] = {-51, 0, 204, 102.5f}; /* s = 255 / 255, z = 51; 102.5 is a tie */
  unsigned char q[4] = {0};
  float scale[1];
  int32_t zero_point[1];
  octile_quantize_args args = {.struct_size = sizeof args,
                               .x = MATRIX(x, kF32, 1, 4),
                               .q = MATRIX(q, kU8, 1, 4),
                               .scale = VECTOR(scale, kF32, 1),
                               .zero_point = VECTOR(zero_point, kS32, 1)};
  RUN(quantize, plan, &args);
  CHECK(q[0] == 0 && q[1] == 51 && q[2] == 255 && q[3] == 153);
  FLOATS(scale, 1);
  CHECK(zero_point[0] == 51);
  octile_plan_destroy(plan);
}

static void test_quantize_s4_both(void) {
  octile_quantize_description d = quantizer(2, 3);
  d.q = OCTILE_DTYPE_S4;
  d.orientation = OCTILE_ORIENTATION_BOTH;
  octile_plan* plan = NULL;
  OK(octile_quantize_plan_create(&d, &plan));
  float x[6] = {7, -7, 3, 14, 2, -4}; /* s = 1, 2 */
  unsigned char q[4], q_transposed[3];
  float scale[2];
  octile_quantize_args args = {.struct_size = sizeof args,
                               .x = MATRIX(x, kF32, 2, 3),
                               .q = MATRIX(q, kS4, 2, 3), /* compact: rows of 4 elements, 2 bytes */
                               .q_transposed = MATRIX(q_transposed, kS4, 3, 2),
                               .scale = VECTOR(scale, kF32, 2)};
  RUN(quantize, plan, &args);
  /* (7, -7 | 3, -), (7, 1 | -2, -); -7 is nibble 9, -2 is nibble 14 */
  CHECK(q[0] == 0x97 && q[1] == 0x03 && q[2] == 0x17 && q[3] == 0x0e);
  CHECK(q_transposed[0] == 0x77 && q_transposed[1] == 0x19 && q_transposed[2] == 0xe3);
  FLOATS(scale, 1, 2);
  octile_plan_destroy(plan);
}

static void test_dequantize_and_backwards(void) {
  octile_quantize_description d = quantizer(1, 3);
  octile_plan* plan = NULL;
  float half[1] = {0.5f};
  float out[3];

  OK(octile_dequantize_plan_create(&d, &plan));
  signed char q[3] = {127, -128, 3};
  octile_dequantize_args dequantize = {.struct_size = sizeof dequantize,
                                       .q = MATRIX(q, kS8, 1, 3),
                                       .scale = VECTOR(half, kF32, 1),
                                       .x = MATRIX(out, kF32, 1, 3)};
  RUN(dequantize, plan, &dequantize);
  FLOATS(out, 63.5f, -64, 1.5f);
  octile_plan_destroy(plan);

  OK(octile_dequantize_backward_plan_create(&d, &plan));
  float dy[3] = {2, -3, 5};
  octile_dequantize_backward_args dequantize_backward = {.struct_size = sizeof dequantize_backward,
                                                         .dy = MATRIX(dy, kF32, 1, 3),
                                                         .scale = VECTOR(half, kF32, 1),
                                                         .dq = MATRIX(out, kF32, 1, 3)};
  RUN(dequantize_backward, plan, &dequantize_backward);
  FLOATS(out, 1, -1.5f, 2.5f);
  octile_plan_destroy(plan);

  float x[3] = {63.5f, 64, -63.75f}; /* x / s = 127, 128 (out of range), -127.5 -> -128 (out of range) */
  OK(octile_quantize_backward_plan_create(&d, &plan));
  octile_quantize_backward_args quantize_backward = {.struct_size = sizeof quantize_backward,
                                                     .dy = MATRIX(dy, kF32, 1, 3),
                                                     .x = MATRIX(x, kF32, 1, 3),
                                                     .scale = VECTOR(half, kF32, 1),
                                                     .dx = MATRIX(out, kF32, 1, 3)};
  RUN(quantize_backward, plan, &quantize_backward);
  FLOATS(out, 4, 0, 0);
  octile_plan_destroy(plan);

  d.q_min = -128; /* now -128 is in range */
  d.q_max = 127;
  OK(octile_fake_quantize_backward_plan_create(&d, &plan));
  octile_fake_quantize_backward_args fake_quantize_backward = {.struct_size = sizeof fake_quantize_backward,
                                                               .dy = MATRIX(dy, kF32, 1, 3),
                                                               .x = MATRIX(x, kF32, 1, 3),
                                                               .scale = VECTOR(half, kF32, 1),
                                                               .dx = MATRIX(out, kF32, 1, 3)};
  RUN(fake_quantize_backward, plan, &fake_quantize_backward);
  FLOATS(out, 2, 0, 5);
  octile_plan_destroy(plan);

  d = quantizer(1, 3);
  OK(octile_fake_quantize_plan_create(&d, &plan));
  float values[3] = {-63.5f, 0.25f, 0.75f}; /* s = 0.5: -127, 0.5 -> 0, 1.5 -> 2 */
  float scale[1];
  octile_fake_quantize_args fake_quantize = {.struct_size = sizeof fake_quantize,
                                             .x = MATRIX(values, kF32, 1, 3),
                                             .y = MATRIX(out, kF32, 1, 3),
                                             .scale = VECTOR(scale, kF32, 1)};
  RUN(fake_quantize, plan, &fake_quantize);
  FLOATS(out, -63.5f, 0, 1);
  FLOATS(scale, 0.5f);
  octile_plan_destroy(plan);
}

/* The layer of the next three tests: m = 2, n = 2, k = 3. */
static float kX[6] = {127, 1, -2, 63.5f, -31.75f, 0.25f};
static signed char kXq[6] = {127, 1, -2, 127, -64, 0}; /* scales 1, 0.5 */
static float kXScale[2] = {1, 0.5f};
static signed char kW[6] = {1, 2, 3, -4, 5, -128};
static signed char kWTransposed[6] = {1, -4, 2, 5, 3, -128};
static float kWScale[2] = {0.5f, 0.25f};
static float kBias[2] = {10, -1};

static void test_linear(void) {
  octile_linear_description d = linear(2, 2, 3);
  d.bias = 1;
  float y[4];
  octile_linear_args args = {.struct_size = sizeof args,
                             .x = MATRIX(kX, kF32, 2, 3),
                             .weight = MATRIX(kW, kS8, 2, 3),
                             .weight_scale = VECTOR(kWScale, kF32, 2),
                             .bias = VECTOR(kBias, kF32, 2),
                             .y = MATRIX(y, kF32, 2, 2)};
  octile_plan* plan = NULL;
  /* acc = 123, -247, -1, -828; scales 0.5, 0.25, 0.25, 0.125 */
  OK(octile_linear_plan_create(&d, &plan));
  RUN(linear, plan, &args);
  FLOATS(y, 71.5f, -62.75f, 9.75f, -104.5f);
  octile_plan_destroy(plan);

  d.kernel = "reference"; /* the weight as (IN, OUT), X quantized by the caller, no bias */
  d.weight_layout = OCTILE_LAYOUT_IN_OUT;
  d.bias = 0;
  d.x = OCTILE_DTYPE_S8;
  OK(octile_linear_plan_create(&d, &plan));
  args.x = MATRIX(kXq, kS8, 2, 3);
  args.x_scale = VECTOR(kXScale, kF32, 2);
  args.weight = MATRIX(kWTransposed, kS8, 3, 2);
  args.bias = NULL;
  RUN(linear, plan, &args);
  FLOATS(y, 61.5f, -61.75f, -0.25f, -103.5f);
  CHECK(strstr(octile_plan_sku(plan), "w8a8_gemm_reference") != NULL);
  CHECK(strlen(octile_plan_explain(plan)) > strlen(octile_plan_sku(plan)));
  octile_precision precision = {.struct_size = sizeof precision};
  OK(octile_plan_precision(plan, &precision));
  CHECK(precision.deterministic == 1 && precision.bit_stable == 1 && precision.accumulator == OCTILE_DTYPE_S32);
  CHECK(precision.error_bound != NULL && strlen(precision.error_bound) > 0);
  octile_plan_destroy(plan);
}

static void test_packed_weight(void) {
  octile_linear_description d = linear(2, 2, 3);
  d.bias = 1;
  d.packed_weight = 1;
  octile_plan* plan = NULL;
  OK(octile_linear_plan_create(&d, &plan));
  size_t size = 0;
  OK(octile_linear_packed_weight_size(plan, &size));
  CHECK(size == 64 * 16 + 2 * 64); /* one panel of 16 channels of 64 terms, their sums, their scales */
  signed char* packed = aligned_alloc(64, size);
  octile_linear_pack_args weight = {.struct_size = sizeof weight,
                                    .weight = MATRIX(kW, kS8, 2, 3),
                                    .weight_scale = VECTOR(kWScale, kF32, 2),
                                    .packed = VECTOR(packed, kU8, (int64_t)size)};
  OK(octile_linear_pack(plan, &weight));
  BYTES(packed, 1, 2, 3, 0, -4, 5, -128, 0, 0);
  float y[4];
  octile_linear_args args = {.struct_size = sizeof args,
                             .x = MATRIX(kX, kF32, 2, 3),
                             .weight = VECTOR(packed, kU8, (int64_t)size),
                             .bias = VECTOR(kBias, kF32, 2),
                             .y = MATRIX(y, kF32, 2, 2)};
  RUN(linear, plan, &args);
  FLOATS(y, 71.5f, -62.75f, 9.75f, -104.5f);
  ERROR(octile_linear_packed_weight_size(plan, NULL), OCTILE_INVALID_ARGUMENT, "size is NULL");
  ERROR(octile_linear_packed_weight_size(NULL, &size), OCTILE_INVALID_ARGUMENT, "plan is NULL");
  ERROR(octile_linear_pack(plan, NULL), OCTILE_INVALID_ARGUMENT, "args is NULL");
  weight.packed = VECTOR(packed, kU8, 64);
  ERROR(octile_linear_pack(plan, &weight), OCTILE_SHAPE_MISMATCH, "LinearPlan::pack|packed is u8 (64)");
  free(packed);
  octile_plan_destroy(plan);
}

static void test_linear_s4(void) {
  octile_linear_description d = linear(1, 1, 32);
  d.activation = OCTILE_ACTIVATION_NONE;
  d.weight = OCTILE_WEIGHT_S4_GROUP;
  d.group = 32;
  octile_plan* plan = NULL;
  OK(octile_linear_plan_create(&d, &plan));
  float x[32], y[1], scale[1] = {0.5f};
  unsigned char w[16];
  for (int i = 0; i < 32; ++i) x[i] = i % 2 ? 2 : 1;
  memset(w, 0xe3, sizeof w); /* 3 in the even elements, -2 in the odd ones */
  octile_linear_args args = {.struct_size = sizeof args,
                             .x = MATRIX(x, kF32, 1, 32),
                             .weight = MATRIX(w, kS4, 1, 32),
                             .weight_scale = MATRIX(scale, kF32, 1, 1),
                             .y = MATRIX(y, kF32, 1, 1)};
  RUN(linear, plan, &args);
  FLOATS(y, -8); /* 16 * (1 * 3 + 2 * -2) * 0.5 */
  octile_plan_destroy(plan);
}

/* A matrix of very many rows and no columns is empty: nobody counts its rows. */
static void test_empty(void) {
  octile_linear_description d = linear(3, (int64_t)1 << 50, 0);
  d.activation = OCTILE_ACTIVATION_NONE;
  d.weight = OCTILE_WEIGHT_S4_GROUP;
  d.group = 0;
  d.weight_zero_point = 1;
  octile_plan* plan = NULL;
  OK(octile_linear_plan_create(&d, &plan));
  octile_linear_args args = {.struct_size = sizeof args,
                             .x = MATRIX(NULL, kF32, 0, 0),
                             .weight = MATRIX(NULL, kS4, d.n, 0),
                             .weight_scale = MATRIX(NULL, kF32, d.n, 0),
                             .weight_zero_point = MATRIX(NULL, kS32, d.n, 0),
                             .y = MATRIX(NULL, kF32, 0, d.n)};
  RUN(linear, plan, &args);
  octile_plan_destroy(plan);

  d = linear(2, 2, 0); /* a sum over nothing is the bias */
  d.bias = 1;
  OK(octile_linear_plan_create(&d, &plan));
  float y[4] = {0};
  args = (octile_linear_args){.struct_size = sizeof args,
                              .x = MATRIX(NULL, kF32, 2, 0),
                              .weight = MATRIX(NULL, kS8, 2, 0),
                              .weight_scale = VECTOR(kWScale, kF32, 2),
                              .bias = VECTOR(kBias, kF32, 2),
                              .y = MATRIX(y, kF32, 2, 2)};
  RUN(linear, plan, &args);
  FLOATS(y, 10, -1, 10, -1);
  octile_plan_destroy(plan);
}

static void test_linear_backward(void) {
  octile_linear_backward_description d;
  OK(octile_linear_backward_description_init(&d, sizeof d));
  d.m = 2;
  d.n = 2;
  d.k = 3;
  d.db = 1;
  float dy[4] = {1, 2, -1, 0.5f};
  float dx[6], dw[6], db[2];
  octile_linear_backward_args args = {.struct_size = sizeof args,
                                      .dy = MATRIX(dy, kF32, 2, 2),
                                      .weight = MATRIX(kW, kS8, 2, 3),
                                      .weight_scale = VECTOR(kWScale, kF32, 2),
                                      .x = MATRIX(kXq, kS8, 2, 3),
                                      .x_scale = VECTOR(kXScale, kF32, 2),
                                      .dx = MATRIX(dx, kF32, 2, 3),
                                      .dw = MATRIX(dw, kF32, 2, 3),
                                      .db = VECTOR(db, kF32, 2)};
  octile_plan* plan = NULL;
  OK(octile_linear_backward_plan_create(&d, &plan));
  RUN(linear_backward, plan, &args);
  /* W = (0.5, 1, 1.5), (-1, 1.25, -32); X = (127, 1, -2), (63.5, -32, 0): every sum is exact in f32 */
  FLOATS(dx, -1.5f, 3.5f, -62.5f, -1, -0.375f, -17.5f);
  FLOATS(dw, 63.5f, 33, -2, 285.75f, -14, -4);
  FLOATS(db, 0, 2.5f);
  octile_plan_destroy(plan);

  /* dY * s_w = (127, -63.5), (63.5, 0.25): q1 = (127, -64), (127, 0), s1 = 1, 0.5
   * dY * s_x = (254, -254), (63.5, 0.5): q2 = (127, -127), (32, 0), s2 = 2, 2 */
  float steep[4] = {254, -254, 127, 1};
  args.dy = MATRIX(steep, kF32, 2, 2);
  d.dx = OCTILE_PRODUCT_INT8;
  d.dw = OCTILE_PRODUCT_INT8;
  d.dw_dtype = OCTILE_DTYPE_F32;
  OK(octile_linear_backward_plan_create(&d, &plan));
  RUN(linear_backward, plan, &args);
  FLOATS(dx, 383, -66, 8573, 63.5f, 127, 190.5f);
  FLOATS(dw, 40386, -3842, -508, -32258, -254, 508);
  FLOATS(db, 381, -253);
  octile_plan_destroy(plan);

  /* One block is the whole contraction */
  memset(dx, 0, sizeof dx);
  d.gradient_block = 1024;
  OK(octile_linear_backward_plan_create(&d, &plan));
  CHECK(strstr(octile_plan_explain(plan), "blocks of 1024") != NULL);
  RUN(linear_backward, plan, &args);
  FLOATS(dx, 383, -66, 8573, 63.5f, 127, 190.5f);
  FLOATS(dw, 40386, -3842, -508, -32258, -254, 508);
  FLOATS(db, 381, -253);
  octile_plan_destroy(plan);
}

/* 129 tokens, one feature: q = 127 for each, with a scale of 1 in the first 128 and of 3 in the last */
static void test_gradient_blocks(void) {
  float dy[129], x_scale[129], dw[1];
  signed char x[129];
  for (int i = 0; i < 129; ++i) {
    dy[i] = i < 128 ? 127 : 381;
    x_scale[i] = 1;
    x[i] = 1;
  }
  octile_linear_backward_description d;
  OK(octile_linear_backward_description_init(&d, sizeof d));
  d.m = 129;
  d.n = 1;
  d.k = 1;
  d.dx = OCTILE_PRODUCT_NONE;
  d.dw = OCTILE_PRODUCT_INT8;
  octile_linear_backward_args args = {.struct_size = sizeof args,
                                      .dy = MATRIX(dy, kF32, 129, 1),
                                      .x = MATRIX(x, kS8, 129, 1),
                                      .x_scale = VECTOR(x_scale, kF32, 129),
                                      .dw = MATRIX(dw, kF32, 1, 1)};
  octile_plan* plan = NULL;
  d.gradient_block = 128;
  OK(octile_linear_backward_plan_create(&d, &plan));
  RUN(linear_backward, plan, &args);
  FLOATS(dw, 128 * 127 + 381);
  octile_plan_destroy(plan);
  d.gradient_block = 0; /* with a scale of 3, 127 is 42 steps */
  OK(octile_linear_backward_plan_create(&d, &plan));
  RUN(linear_backward, plan, &args);
  FLOATS(dw, 3 * (128 * 42 + 127));
  octile_plan_destroy(plan);
}

/* Two experts with one weight each, a token that goes to both, and one that goes to the second. */
static void test_grouped_linear(void) {
  octile_grouped_linear_description d;
  OK(octile_grouped_linear_description_init(&d, sizeof d));
  CHECK(d.activation == OCTILE_ACTIVATION_DYNAMIC_PER_TOKEN && d.group == 128 && d.slots == 0);
  d.experts = 2, d.m = 3, d.n = 1, d.k = 1, d.tokens = 2, d.gather = 1, d.slots = 2, d.x = OCTILE_DTYPE_S8;
  d.packed_weight = 1;
  octile_plan* plan = NULL;
  OK(octile_grouped_linear_plan_create(&d, &plan));
  size_t size = 0;
  OK(octile_grouped_linear_packed_weight_size(plan, &size));
  CHECK(size == 2 * (64 * 16 + 2 * 64));
  signed char* packed = aligned_alloc(64, size);
  signed char weight[2] = {3, 5}, x[2] = {10, 20};
  float scale[2] = {1, 2}, x_scale[2] = {0.5f, 0.25f}, router[4] = {2, 0.5f, 4, 1};
  int32_t offsets[3] = {0, 1, 3}, token[3] = {0, 0, 1}, place[4] = {0, 1, 2, -1};
  float y[2];
  octile_linear_pack_args pack = {.struct_size = sizeof pack,
                                  .weight = MATRIX(weight, kS8, 2, 1),
                                  .weight_scale = VECTOR(scale, kF32, 2),
                                  .packed = VECTOR(packed, kU8, (int64_t)size)};
  OK(octile_grouped_linear_pack(plan, &pack));
  octile_grouped_linear_args args = {.struct_size = sizeof args,
                                     .x = MATRIX(x, kS8, 2, 1),
                                     .x_scale = VECTOR(x_scale, kF32, 2),
                                     .offsets = VECTOR(offsets, kS32, 3),
                                     .token = VECTOR(token, kS32, 3),
                                     .weight = VECTOR(packed, kU8, (int64_t)size),
                                     .place = MATRIX(place, kS32, 2, 2),
                                     .router_weight = MATRIX(router, kF32, 2, 2),
                                     .y = MATRIX(y, kF32, 2, 1)};
  RUN(grouped_linear, plan, &args);
  FLOATS(y, 2 * 15 + 0.5f * 50, 4 * 50);
  free(packed);
  octile_plan_destroy(plan);
}

/* Two experts with one weight each: the first has one row, the second two. */
static void test_grouped_linear_backward(void) {
  octile_grouped_linear_backward_description d;
  OK(octile_grouped_linear_backward_description_init(&d, sizeof d));
  CHECK(d.activation == OCTILE_ACTIVATION_DYNAMIC_PER_TOKEN && d.dx == OCTILE_PRODUCT_DEQUANTIZED && d.db == 0);
  d.experts = 2, d.m = 3, d.n = 1, d.k = 1, d.db = 1;
  signed char weight[2] = {3, 5}, x[3] = {10, 20, -4};
  float weight_scale[2] = {1, 2}, x_scale[3] = {0.5f, 0.25f, 1}, dy[3] = {2, -1, 0.5f};
  int32_t offsets[3] = {0, 1, 3};
  float dx[3], dw[2], db[2];
  octile_grouped_linear_backward_args args = {.struct_size = sizeof args,
                                              .dy = MATRIX(dy, kF32, 3, 1),
                                              .offsets = VECTOR(offsets, kS32, 3),
                                              .weight = MATRIX(weight, kS8, 2, 1),
                                              .weight_scale = VECTOR(weight_scale, kF32, 2),
                                              .x = MATRIX(x, kS8, 3, 1),
                                              .x_scale = VECTOR(x_scale, kF32, 3),
                                              .dx = MATRIX(dx, kF32, 3, 1),
                                              .dw = MATRIX(dw, kF32, 2, 1),
                                              .db = MATRIX(db, kF32, 2, 1)};
  octile_plan* plan = NULL;
  OK(octile_grouped_linear_backward_plan_create(&d, &plan));
  RUN(grouped_linear_backward, plan, &args);
  FLOATS(dx, 2 * 3, -1 * 10, 0.5f * 10);
  FLOATS(dw, 2 * 5, -1 * 5 - 0.5f * 4);
  FLOATS(db, 2, -0.5f);
  octile_plan_destroy(plan);

  offsets[2] = 2; /* the last row is nobody's */
  d.clear_rest = 1;
  OK(octile_grouped_linear_backward_plan_create(&d, &plan));
  RUN(grouped_linear_backward, plan, &args);
  FLOATS(dx, 2 * 3, -1 * 10, 0);
  octile_plan_destroy(plan);

  d.dx = OCTILE_PRODUCT_INT8, d.gradient_block = 100;
  ERROR(octile_grouped_linear_backward_plan_create(&d, &plan), OCTILE_UNSUPPORTED, "gradient_block = 100");
}

static void test_attention(void) {
  /* One sequence of two positions and a hidden one; two query heads share a KV head. Scores 0 and 0, or 0 and ln 3. */
  float query[4] = {0, 0, 1.0986123f, 0}, key[6] = {0, 5, 1, 5, 9, 9}, value[6] = {0, 4, 8, 0, 99, 99}, y[4] = {0};
  unsigned char mask[3] = {1, 1, 0};
  const int64_t queries[3] = {1, 2, 2}, cache[4] = {1, 1, 3, 2}, masks[2] = {1, 3};
  const octile_device cpu = {OCTILE_DEVICE_CPU, 0};
  octile_tensor q = {query, cpu, 3, kF32, queries, NULL, 0}, k = {key, cpu, 4, kF32, cache, NULL, 0};
  octile_tensor v = {value, cpu, 4, kF32, cache, NULL, 0}, m = {mask, cpu, 2, kU8, masks, NULL, 0};
  octile_tensor out = {y, cpu, 3, kF32, queries, NULL, 0};
  octile_attend_one_query_args args = {
      .struct_size = sizeof args, .query = &q, .key = &k, .value = &v, .mask = &m, .y = &out, .scale = 1};
  OK(octile_attend_one_query(&args));
  for (int i = 0; i < 4; ++i) {
    const float wanted[4] = {4, 2, 6, 1};
    CHECK(y[i] > wanted[i] - 1e-5f && y[i] < wanted[i] + 1e-5f);
  }
  args.key = NULL;
  ERROR(octile_attend_one_query(&args), OCTILE_INVALID_ARGUMENT, "octile_attend_one_query: key is NULL");
  CHECK(octile_attend_one_query(NULL) == OCTILE_INVALID_ARGUMENT);
}

static void test_bad_structures(void) {
  octile_plan* const untouched = (octile_plan*)&failures;
  octile_plan* plan = untouched;
  octile_linear_description d = linear(2, 2, 3);

  ERROR(octile_linear_plan_create(NULL, &plan), OCTILE_INVALID_ARGUMENT,
        "octile_linear_plan_create|description is NULL");
  ERROR(octile_linear_plan_create(&d, NULL), OCTILE_INVALID_ARGUMENT, "plan is NULL");
  ERROR(octile_linear_description_init(NULL, sizeof d), OCTILE_INVALID_ARGUMENT, "description is NULL");
  ERROR(octile_linear_description_init(&d, 5), OCTILE_INVALID_ARGUMENT, "struct_size = 5");
  d.struct_size = 0;
  ERROR(octile_linear_plan_create(&d, &plan), OCTILE_INVALID_ARGUMENT, "struct_size = 0");
  d.struct_size = sizeof d - 4;
  ERROR(octile_linear_plan_create(&d, &plan), OCTILE_INVALID_ARGUMENT, "struct_size = 100|multiple of 8");
  d.struct_size = 1u << 20;
  ERROR(octile_linear_plan_create(&d, &plan), OCTILE_INVALID_ARGUMENT, "struct_size = 1048576");
  CHECK(plan == untouched);

  /* An older, shorter description: the kernel is beyond its end and must not be read. */
  d = linear(2, 2, 3);
  d.struct_size = offsetof(octile_linear_description, kernel);
  d.kernel = (const char*)1;
  OK(octile_linear_plan_create(&d, &plan));
  octile_plan_destroy(plan);
  /* The shortest: every field is a default, so the layer is empty. */
  size_t header = sizeof header;
  OK(octile_linear_plan_create((const octile_linear_description*)(const void*)&header, &plan));
  CHECK(strstr(octile_plan_explain(plan), "linear 0 x 0 x 0") != NULL);
  octile_plan_destroy(plan);
  plan = untouched;

  /* A newer, longer one. */
  struct {
    octile_linear_description known;
    int64_t unknown[2];
  } longer = {linear(2, 2, 3), {0, 0}};
  longer.known.struct_size = sizeof longer;
  OK(octile_linear_plan_create(&longer.known, &plan));
  octile_plan_destroy(plan);
  plan = untouched;
  longer.unknown[1] = 3;
  ERROR(octile_linear_plan_create(&longer.known, &plan), OCTILE_INVALID_ARGUMENT, "byte 112 = 3|104 bytes");

  OK(octile_linear_description_init(&longer.known, sizeof longer));
  CHECK(longer.known.struct_size == sizeof longer && longer.unknown[1] == 0);
  octile_precision precision = {.struct_size = sizeof precision};
  octile_linear_backward_description backward;
  OK(octile_linear_backward_description_init(&backward, sizeof backward));
  backward.m = 4, backward.n = 8, backward.k = 8;
  backward.dx = OCTILE_PRODUCT_INT8, backward.dw = OCTILE_PRODUCT_NONE, backward.db = 1;
  octile_plan* gradients;
  OK(octile_linear_backward_plan_create(&backward, &gradients));
  OK(octile_linear_backward_precision(gradients, OCTILE_GRADIENT_DX, &precision));
  CHECK(precision.bit_stable == 1 && strcmp(precision.error_bound, "exact") == 0);
  OK(octile_linear_backward_precision(gradients, OCTILE_GRADIENT_DB, &precision));
  CHECK(precision.bit_stable == 0 && strstr(precision.error_bound, "(M + 3)") != NULL);
  OK(octile_plan_precision(gradients, &precision));
  CHECK(precision.bit_stable == 0);
  ERROR(octile_linear_backward_precision(gradients, OCTILE_GRADIENT_DW, &precision), OCTILE_INVALID_ARGUMENT,
        "does not compute dW");
  ERROR(octile_linear_backward_precision(gradients, 3, &precision), OCTILE_INVALID_ARGUMENT, "gradient = 3");
  octile_plan_destroy(gradients);
  ERROR(octile_linear_backward_precision(NULL, OCTILE_GRADIENT_DX, &precision), OCTILE_INVALID_ARGUMENT,
        "plan is NULL");
  precision.struct_size = 0;
  ERROR(octile_plan_precision(NULL, &precision), OCTILE_INVALID_ARGUMENT, "plan is NULL");
  CHECK(plan == untouched);
}

/* One field of a good description is set to a bad value. */
#define BAD_LINEAR(field, value, status, words)                   \
  do {                                                            \
    octile_plan* none = NULL;                                     \
    octile_linear_description bad = linear(2, 2, 3);              \
    bad.field = value;                                            \
    ERROR(octile_linear_plan_create(&bad, &none), status, words); \
    CHECK(none == NULL);                                          \
  } while (0)

static void test_bad_choices(void) {
  BAD_LINEAR(activation, 4, OCTILE_INVALID_ARGUMENT, "activation = 4");
  BAD_LINEAR(activation, -1, OCTILE_INVALID_ARGUMENT, "activation = -1");
  BAD_LINEAR(activation, 257, OCTILE_INVALID_ARGUMENT, "activation = 257"); /* 1 in eight bits */
  BAD_LINEAR(x, 99, OCTILE_INVALID_ARGUMENT, "99");
  BAD_LINEAR(weight, 4, OCTILE_INVALID_ARGUMENT, "weight = 4");
  BAD_LINEAR(weight_layout, 2, OCTILE_INVALID_ARGUMENT, "weight_layout = 2");
  BAD_LINEAR(bias, 2, OCTILE_INVALID_ARGUMENT, "bias = 2");
  BAD_LINEAR(x_multiplier, -1, OCTILE_INVALID_ARGUMENT, "x_multiplier = -1");
  BAD_LINEAR(packed_weight, 7, OCTILE_INVALID_ARGUMENT, "packed_weight = 7");
  BAD_LINEAR(device.type, 0, OCTILE_INVALID_ARGUMENT, "device|0|1 (CPU)|2 (CUDA)");
  BAD_LINEAR(device.type, 10, OCTILE_INVALID_ARGUMENT, "10|1 (CPU)|2 (CUDA)");
  BAD_LINEAR(m, -2, OCTILE_INVALID_ARGUMENT, "m = -2");
  BAD_LINEAR(threads, -3, OCTILE_INVALID_ARGUMENT, "threads = -3");
  BAD_LINEAR(kernel, "w8a8_gemm_abacus", OCTILE_INVALID_ARGUMENT, "w8a8_gemm_abacus");

  octile_plan* none = NULL;
  octile_linear_description overflow = linear(INT64_MAX, INT64_MAX, 3);
  ERROR(octile_linear_plan_create(&overflow, &none), OCTILE_INVALID_ARGUMENT, "9223372036854775807");
  octile_linear_description fixed = linear(2, 2, 3);
  fixed.activation = OCTILE_ACTIVATION_STATIC_PER_TENSOR;
  fixed.static_scale = -0.5;
  ERROR(octile_linear_plan_create(&fixed, &none), OCTILE_INVALID_ARGUMENT, "static_scale = -0.5");
  octile_quantize_description range = quantizer(2, 2);
  range.q_min = 5;
  range.q_max = -5;
  ERROR(octile_quantize_plan_create(&range, &none), OCTILE_INVALID_ARGUMENT, "q_min = 5|q_max = -5");
  octile_linear_backward_description backward;
  OK(octile_linear_backward_description_init(&backward, sizeof backward));
  backward.dw_dtype = -2;
  ERROR(octile_linear_backward_plan_create(&backward, &none), OCTILE_INVALID_ARGUMENT, "dw_dtype = -2");
  OK(octile_linear_backward_description_init(&backward, sizeof backward));
  backward.dx = OCTILE_PRODUCT_INT8;
  backward.gradient_block = 64;
  ERROR(octile_linear_backward_plan_create(&backward, &none), OCTILE_UNSUPPORTED,
        "gradient_block = 64|0, 128, 256, 512 or 1024");
  CHECK(none == NULL);
}

static void test_bad_arguments(void) {
  octile_linear_description d = linear(2, 2, 3);
  octile_plan* plan = NULL;
  OK(octile_linear_plan_create(&d, &plan));
  float y[4] = {-9, -9, -9, -9};
  const octile_linear_args good = {.struct_size = sizeof good,
                                   .x = MATRIX(kX, kF32, 2, 3),
                                   .weight = MATRIX(kW, kS8, 2, 3),
                                   .weight_scale = VECTOR(kWScale, kF32, 2),
                                   .y = MATRIX(y, kF32, 2, 2)};
  const size_t bytes = octile_plan_workspace_size(plan);
  CHECK(bytes > 0); /* X is quantized somewhere */
  char* workspace = malloc(bytes);
  octile_linear_args args;

/* run and can_implement say the same */
#define REFUSED(status, words)                                    \
  ERROR(octile_linear_can_implement(plan, &args), status, words); \
  ERROR(octile_linear_run(plan, &args, workspace, bytes, NULL), status, words)

  args = good;
  args.y = NULL;
  REFUSED(OCTILE_SHAPE_MISMATCH, "y|absent");
  args.struct_size = offsetof(octile_linear_args, y);
  args.y = good.y; /* beyond the end of the structure, so absent too */
  REFUSED(OCTILE_SHAPE_MISMATCH, "y|absent");
  args = good;
  args.struct_size = 0;
  REFUSED(OCTILE_INVALID_ARGUMENT, "args|struct_size = 0");
  args = good;
  args.bias = VECTOR(kBias, kF32, 2);
  REFUSED(OCTILE_SHAPE_MISMATCH, "bias");
  args = good;
  args.weight = MATRIX(kW, kS8, 3, 2);
  REFUSED(OCTILE_SHAPE_MISMATCH, "weight|(3, 2)|(2, 3)");
  args.weight = MATRIX(kW, kU8, 2, 3);
  REFUSED(OCTILE_SHAPE_MISMATCH, "weight|u8|s8");
  args.weight = MATRIX(NULL, kS8, 2, 3);
  REFUSED(OCTILE_INVALID_ARGUMENT, "weight|null");
  args = good;
  args.x = MATRIX((char*)kX + 1, kF32, 1, 1);
  REFUSED(OCTILE_SHAPE_MISMATCH, "x|(1, 1)");
  args.x = MATRIX((char*)kX + 1, kF32, 1, 3);
  args.y = MATRIX(y, kF32, 1, 2);
  REFUSED(OCTILE_MISALIGNED, "x|not a multiple of 4");

  args = good;
  owned t;
  args.x = view(&t, kX, kF32, 2, 3);
  t.tensor.ndim = 3;
  REFUSED(OCTILE_SHAPE_MISMATCH, "x has ndim = 3");
  t.tensor.ndim = 0;
  REFUSED(OCTILE_SHAPE_MISMATCH, "x has ndim = 0");
  t.tensor.ndim = 2;
  t.tensor.dtype.lanes = 4;
  REFUSED(OCTILE_INVALID_ARGUMENT, "code 2|bits 32|lanes 4");
  t.tensor.dtype = (octile_element){OCTILE_CODE_INT, 64, 1};
  REFUSED(OCTILE_INVALID_ARGUMENT, "code 0|bits 64|lanes 1");
  t.tensor.dtype = (octile_element){5, 64, 1}; /* complex */
  REFUSED(OCTILE_INVALID_ARGUMENT, "code 5|bits 64");
  t.tensor.dtype = kF32;
  t.tensor.device.type = 7;
  REFUSED(OCTILE_INVALID_ARGUMENT, "device type of x is 7");
  t.tensor.device = (octile_device){OCTILE_DEVICE_CUDA, 3};
  REFUSED(OCTILE_SHAPE_MISMATCH, "cuda:3|cpu");
  t.tensor.device = (octile_device){OCTILE_DEVICE_CPU, 0};
  t.tensor.shape = NULL;
  REFUSED(OCTILE_INVALID_ARGUMENT, "shape of x is NULL");
  t.tensor.shape = t.shape;
  t.tensor.data = NULL;
  t.tensor.byte_offset = 64;
  REFUSED(OCTILE_INVALID_ARGUMENT, "x has byte_offset = 64");
  t.tensor.data = kX;
  t.tensor.byte_offset = UINT64_MAX;
  REFUSED(OCTILE_INVALID_ARGUMENT, "x has byte_offset = 18446744073709551615");
  t.tensor.byte_offset = 0;
  t.tensor.strides = (const int64_t[]){1, 2}; /* column-major */
  REFUSED(OCTILE_SHAPE_MISMATCH, "x|strides (1, 2)");
  t.tensor.strides = NULL;
  OK(octile_linear_can_implement(plan, &args));

  args = good;
  args.y = MATRIX(kX, kF32, 2, 2); /* the output over the input */
  REFUSED(OCTILE_INVALID_ARGUMENT, "overlaps|x|y");

  ERROR(octile_linear_can_implement(NULL, &good), OCTILE_INVALID_ARGUMENT, "octile_linear_can_implement|plan is NULL");
  ERROR(octile_linear_run(NULL, &good, NULL, 0, NULL), OCTILE_INVALID_ARGUMENT, "octile_linear_run|plan is NULL");
  ERROR(octile_linear_run(plan, NULL, workspace, bytes, NULL), OCTILE_INVALID_ARGUMENT, "args is NULL");
  ERROR(octile_linear_run(plan, &good, workspace, bytes - 1, NULL), OCTILE_WORKSPACE_TOO_SMALL, "workspace|bytes");
  ERROR(octile_linear_run(plan, &good, NULL, bytes, NULL), OCTILE_WORKSPACE_TOO_SMALL, "workspace");
  octile_linear_backward_args backward = {.struct_size = sizeof backward};
  ERROR(octile_linear_backward_run(plan, &backward, NULL, 0, NULL), OCTILE_INVALID_ARGUMENT,
        "octile_linear_backward_run|another kind");
  octile_quantize_args quantize = {.struct_size = sizeof quantize};
  ERROR(octile_quantize_can_implement(plan, &quantize), OCTILE_INVALID_ARGUMENT, "another kind");

  FLOATS(y, -9, -9, -9, -9); /* no refused call wrote anything */
  OK(octile_linear_run(plan, &good, workspace, bytes, NULL));
  FLOATS(y, 61.5f, -61.75f, -0.25f, -103.5f);
  free(workspace);
  octile_plan_destroy(plan);
}

static void test_null_plan(void) {
  octile_plan_destroy(NULL);
  CHECK(octile_plan_workspace_size(NULL) == 0);
  CHECK(strcmp(octile_plan_sku(NULL), "") == 0 && strcmp(octile_plan_explain(NULL), "") == 0);
}

static void test_tuning(void) {
  octile_linear_description d = linear(4, 8, 16);
  octile_plan* plan = NULL;
  OK(octile_use_tuning("/no/such/file"));
  ERROR(octile_linear_plan_create(&d, &plan), OCTILE_INVALID_ARGUMENT, "LinearPlan::select|/no/such/file|No such file");
  OK(octile_use_tuning("off"));
  OK(octile_linear_plan_create(&d, &plan));
  CHECK(strstr(octile_plan_explain(plan), "tuning: off") != NULL);
  octile_plan_destroy(plan);
  OK(octile_use_tuning(NULL));
  OK(octile_linear_plan_create(&d, &plan));
  CHECK(strstr(octile_plan_explain(plan), "tuning: off") == NULL);
  octile_plan_destroy(plan);
  OK(octile_use_tuning("off"));
}

static int tasks_run = 0;
static void run_in_turn(int32_t tasks, octile_task task, void* context) {
  for (int32_t i = 0; i < tasks; ++i) task(context, i);
  tasks_run += tasks;
}

static float many_x[512 * 512];
static signed char many_q[512 * 512];

static void test_task_runner(void) {
  octile_quantize_description d = quantizer(512, 512);
  d.threads = 3;
  octile_plan* plan = NULL;
  OK(octile_quantize_plan_create(&d, &plan));
  for (int i = 0; i < 512 * 512; ++i) many_x[i] = (float)(i % 255 - 127);
  float scale[512];
  octile_quantize_args args = {.struct_size = sizeof args,
                               .x = MATRIX(many_x, kF32, 512, 512),
                               .q = MATRIX(many_q, kS8, 512, 512),
                               .scale = VECTOR(scale, kF32, 512)};
  OK(octile_use_task_runner(run_in_turn));
  RUN(quantize, plan, &args);
  OK(octile_use_task_runner(NULL));
  const int has_tasks =
      strstr(octile_plan_sku(plan), "reference") == NULL;  // the reference works on the calling thread
  CHECK(has_tasks ? tasks_run >= 2 : tasks_run == 0);
  int wrong = 0;
  for (int i = 0; i < 512 * 512; ++i) wrong += many_q[i] != i % 255 - 127;
  CHECK(wrong == 0);
  tasks_run = 0;
  RUN(quantize, plan, &args);
  CHECK(tasks_run == 0);
  octile_plan_destroy(plan);
}

static void test_kernels(void) {
  const size_t count = octile_kernel_count();
  CHECK(count >= 10);
  int found = 0;
  for (size_t i = 0; i < count; ++i) {
    octile_kernel kernel = {.struct_size = sizeof kernel};
    OK(octile_kernel_info(i, &kernel));
    CHECK(kernel.name && strlen(kernel.name) > 0 && kernel.operation && strlen(kernel.operation) > 0 && kernel.reason);
    CHECK(kernel.device_type == OCTILE_DEVICE_CPU || kernel.device_type == OCTILE_DEVICE_CUDA);
    found += strcmp(kernel.name, "w8a8_gemm_reference") == 0 && strcmp(kernel.operation, "w8a8_gemm") == 0 &&
             strcmp(kernel.reason, "") == 0;
  }
  CHECK(found == 1);
  octile_kernel beyond = {.struct_size = sizeof beyond};
  ERROR(octile_kernel_info(count, &beyond), OCTILE_INVALID_ARGUMENT, "octile_kernel_info|index");
  ERROR(octile_kernel_info(0, NULL), OCTILE_INVALID_ARGUMENT, "NULL");
  /* An older structure ends after the name; nothing behind it is written. */
  octile_kernel older = {.struct_size = offsetof(octile_kernel, operation), .operation = "mine"};
  OK(octile_kernel_info(0, &older));
  CHECK(older.name != NULL && strcmp(older.operation, "mine") == 0);
}

static void* fail_on_another_thread(void* first_text) {
  snprintf(first_text, 64, "%s", octile_last_error());
  octile_linear_description d = linear(-77, 2, 3);
  octile_plan* plan = NULL;
  ERROR(octile_linear_plan_create(&d, &plan), OCTILE_INVALID_ARGUMENT, "m = -77");
  return NULL;
}

static void test_last_error_per_thread(void) {
  octile_linear_description d = linear(2, -55, 3);
  octile_plan* plan = NULL;
  ERROR(octile_linear_plan_create(&d, &plan), OCTILE_INVALID_ARGUMENT, "n = -55");
  const char* mine = octile_last_error();
  char theirs[64] = "not run";
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, fail_on_another_thread, theirs) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(strcmp(theirs, "") == 0); /* a new thread has seen no error */
  CHECK(octile_last_error() == mine && strstr(mine, "n = -55"));
  d = linear(2, 2, 3);
  OK(octile_linear_plan_create(&d, &plan));
  CHECK(octile_last_error() == mine && strstr(mine, "n = -55")); /* success leaves it alone */
  octile_plan_destroy(plan);
}

/* A kernel's name and the path of a tuning file may have any bytes: of UTF-8, of nothing, cut off. */
static void test_texts_are_utf8(void) {
  octile_linear_description d = linear(2, 2, 3);
  octile_plan* plan = NULL;
  d.kernel = "\xc3\xa9\xff\xe2\x82\xac\xed\xa0\x80\xf0\x9f\x98\x80\xc0\xaf\xe2\x82";
  ERROR(octile_linear_plan_create(&d, &plan), OCTILE_INVALID_ARGUMENT,
        "no kernel is named \xc3\xa9?\xe2\x82\xac???\xf0\x9f\x98\x80????, nor");
}

static octile_kernel first_kernel = {.struct_size = sizeof first_kernel};

/* Runs after the library's own destructors, and those of the main thread. */
static void use_at_exit(void) {
  CHECK(strlen(first_kernel.name) > 0 && strstr(first_kernel.operation, "quantize"));
  octile_kernel again = {.struct_size = sizeof again};
  OK(octile_kernel_info(0, &again));
  CHECK(strcmp(again.name, first_kernel.name) == 0);
  CHECK(strcmp(octile_last_error(), "") == 0);
  for (int64_t m = -2; m < 0; ++m) {
    octile_linear_description d = linear(m, 2, 3);
    octile_plan* plan = NULL;
    ERROR(octile_linear_plan_create(&d, &plan), OCTILE_INVALID_ARGUMENT, "is negative");
  }
  if (failures != 0) _Exit(1);
}

int main(void) {
  atexit(use_at_exit);
  CHECK(strcmp(octile_last_error(), "") == 0);
  OK(octile_kernel_info(0, &first_kernel));
  test_versions();
  test_defaults();
  test_quantize_rows();
  test_quantize_affine();
  test_quantize_s4_both();
  test_dequantize_and_backwards();
  test_linear();
  test_packed_weight();
  test_linear_s4();
  test_empty();
  test_linear_backward();
  test_gradient_blocks();
  test_grouped_linear();
  test_grouped_linear_backward();
  test_attention();
  test_bad_structures();
  test_bad_choices();
  test_bad_arguments();
  test_null_plan();
  test_kernels();
  test_tuning();
  test_task_runner();
  test_last_error_per_thread();
  test_texts_are_utf8();
  if (failures != 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures != 0;
}
