/* octile_calibration.h, used from C against the shared library. Every number was worked out by hand. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "octile/octile_calibration.h"

static int failures = 0;

#define CHECK(condition)                                                                                 \
  do {                                                                                                   \
    if (!(condition)) {                                                                                  \
      ++failures;                                                                                        \
      fprintf(stderr, "%s:%d: %s is false (%s)\n", __FILE__, __LINE__, #condition, octile_last_error()); \
    }                                                                                                    \
  } while (0)
#define OK(call) CHECK((call) == OCTILE_OK)
#define ERROR(call, status, word) CHECK((call) == (status) && strstr(octile_last_error(), word))

static const octile_element kF32 = {OCTILE_CODE_FLOAT, 32, 1}, kF64 = {OCTILE_CODE_FLOAT, 64, 1};
static const octile_element kS8 = {OCTILE_CODE_INT, 8, 1};

static octile_tensor tensor(void* data, octile_element dtype, int ndim, const int64_t* shape) {
  return (octile_tensor){.data = data, .device = {OCTILE_DEVICE_CPU, 0}, .ndim = ndim, .dtype = dtype, .shape = shape};
}

static const int64_t kTwo[] = {2}, kThree[] = {3}, kOne[] = {1};
static const int64_t k2x2[] = {2, 2}, k1x3[] = {1, 3}, k3x3[] = {3, 3};

static void calibrate(void) {
  octile_calibrator_description description = {.struct_size = sizeof description, .features = 2, .second_moments = 1};
  octile_calibrator *calibrator = NULL, *other = NULL;
  OK(octile_calibrator_create(&description, &calibrator));
  OK(octile_calibrator_create(&description, &other));
  float x[] = {1, -2, 3, 0.5f}, largest[2];
  double h[4];
  const octile_tensor rows = tensor(x, kF32, 2, k2x2), out = tensor(largest, kF32, 1, kTwo);
  const octile_tensor moments = tensor(h, kF64, 2, k2x2);
  OK(octile_calibrator_observe(calibrator, &rows));
  OK(octile_calibrator_observe(other, &rows));
  OK(octile_calibrator_channel_max(calibrator, &out));
  OK(octile_calibrator_second_moments(calibrator, &moments));
  CHECK(largest[0] == 3 && largest[1] == 2 && octile_calibrator_max(calibrator) == 3);
  CHECK(h[0] == 10 && h[1] == -0.5 && h[2] == -0.5 && h[3] == 4.25);
  OK(octile_calibrator_merge(calibrator, other));
  OK(octile_calibrator_second_moments(calibrator, &moments));
  CHECK(h[0] == 20 && octile_calibrator_rows(calibrator) == 4);
  float excess[2];
  const octile_tensor expected = tensor(excess, kF32, 1, kTwo);
  OK(octile_calibrator_excess(calibrator, &expected));
  CHECK(fabsf(excess[0] - 1.0f / 5) < 1e-6f && excess[1] > 0);
  ERROR(octile_calibrator_excess(calibrator, &moments), OCTILE_SHAPE_MISMATCH, "out is f64 (2, 2)");

  ERROR(octile_calibrator_observe(NULL, &rows), OCTILE_INVALID_ARGUMENT, "calibrator is NULL");
  ERROR(octile_calibrator_observe(calibrator, NULL), OCTILE_SHAPE_MISMATCH, "x is absent");
  ERROR(octile_calibrator_merge(calibrator, NULL), OCTILE_INVALID_ARGUMENT, "calibrator is NULL");
  ERROR(octile_calibrator_channel_max(calibrator, &moments), OCTILE_SHAPE_MISMATCH, "out is f64 (2, 2)");
  ERROR(octile_calibrator_second_moments(calibrator, &out), OCTILE_SHAPE_MISMATCH, "h is f32 (2)");
  CHECK(octile_calibrator_rows(NULL) == 0 && octile_calibrator_max(NULL) == 0);
  octile_calibrator* none = NULL;
  ERROR(octile_calibrator_create(NULL, &none), OCTILE_INVALID_ARGUMENT, "description is NULL");
  ERROR(octile_calibrator_create(&description, NULL), OCTILE_INVALID_ARGUMENT, "calibrator is NULL");
  description.second_moments = 2;
  ERROR(octile_calibrator_create(&description, &none), OCTILE_INVALID_ARGUMENT, "second_moments = 2");
  description.second_moments = 0, description.features = -4;
  ERROR(octile_calibrator_create(&description, &none), OCTILE_INVALID_ARGUMENT, "features = -4");
  description.struct_size = 7;
  ERROR(octile_calibrator_create(&description, &none), OCTILE_INVALID_ARGUMENT, "struct_size = 7");
  CHECK(none == NULL);
  octile_calibrator_destroy(calibrator);
  octile_calibrator_destroy(other);
  octile_calibrator_destroy(NULL);
}

static void smooth(void) {
  float x[] = {4, 1}, w[] = {1, 4}, s[2], inverse[2], largest = 0;
  const octile_tensor inputs = tensor(x, kF32, 1, kTwo), weights = tensor(w, kF32, 1, kTwo);
  const octile_tensor factors = tensor(s, kF32, 1, kTwo), multiplier = tensor(inverse, kF32, 1, kTwo);
  octile_smoothing_args args = {.struct_size = sizeof args,
                                .alpha = 0.5,
                                .input_channel_max = &inputs,
                                .weight_channel_max = &weights,
                                .factors = &factors,
                                .multiplier = &multiplier};
  OK(octile_smoothing_factors(&args, &largest));
  CHECK(s[0] == 2 && s[1] == 0.5f && inverse[0] == 0.5f && inverse[1] == 2 && largest == 2);
  ERROR(octile_smoothing_factors(&args, NULL), OCTILE_INVALID_ARGUMENT, "smoothed_max is NULL");
  ERROR(octile_smoothing_factors(NULL, &largest), OCTILE_INVALID_ARGUMENT, "args is NULL");
  args.alpha = 2;
  ERROR(octile_smoothing_factors(&args, &largest), OCTILE_INVALID_ARGUMENT, "alpha = 2");
  CHECK(largest == 2);

  float matrix[] = {1, 1, 1, 4}, gain[] = {2, 3}, shift[] = {4, 1};
  const octile_tensor weight = tensor(matrix, kF32, 2, k2x2);
  const octile_tensor norm = tensor(gain, kF32, 1, kTwo), bias = tensor(shift, kF32, 1, kTwo);
  OK(octile_smooth_weight(&weight, &factors));
  CHECK(matrix[0] == 2 && matrix[1] == 0.5f && matrix[2] == 2 && matrix[3] == 2);
  const octile_smooth_before_args before = {
      .struct_size = sizeof before, .factors = &factors, .weight = &norm, .bias = &bias};
  OK(octile_smooth_before(&before));
  CHECK(gain[0] == 1 && gain[1] == 6 && shift[0] == 2 && shift[1] == 2);
  ERROR(octile_smooth_weight(&weight, NULL), OCTILE_SHAPE_MISMATCH, "factors is absent");
  ERROR(octile_smooth_before(NULL), OCTILE_INVALID_ARGUMENT, "args is NULL");

  octile_smoothing_search_description description;
  OK(octile_smoothing_search_description_init(&description, sizeof description));
  CHECK(description.steps == 21 && description.last_alpha == 1 && description.group == 128);
  CHECK(description.activation == OCTILE_ACTIVATION_STATIC_PER_TENSOR);
  description.n = 2, description.k = 2, description.steps = 2;
  double errors[] = {-1, -1};
  const octile_tensor each = tensor(errors, kF64, 1, kTwo);
  octile_smoothing_search_args search = {
      .struct_size = sizeof search, .weight = &weight, .input_channel_max = &inputs, .x = &weight, .errors = &each};
  octile_smoothing_search_result result = {.struct_size = sizeof result};
  ERROR(octile_search_smoothing(&description, &search, NULL), OCTILE_INVALID_ARGUMENT, "result is NULL");
  result.struct_size = 12;
  ERROR(octile_search_smoothing(&description, &search, &result), OCTILE_INVALID_ARGUMENT, "struct_size = 12");
  CHECK(errors[0] == -1 && errors[1] == -1);
  result.struct_size = sizeof result;
  OK(octile_search_smoothing(&description, &search, &result));
  CHECK(result.error == (errors[1] < errors[0] ? errors[1] : errors[0]) && result.alpha == (errors[1] < errors[0]));
  CHECK(result.error >= 0 && result.unsmoothed_error >= 0);
  CHECK(result.smooth == (result.error < 0.95 * result.unsmoothed_error) && result.reserved == 0);
  float excess[] = {0.5f, 1};
  const octile_tensor expected = tensor(excess, kF32, 1, kTwo);
  const double unclipped = errors[1];
  search.input_excess = &expected;
  OK(octile_search_smoothing(&description, &search, &result));
  CHECK(errors[1] > unclipped && result.smooth == 0);
  search.input_excess = NULL;
  description.calibration_rows = 1;
  OK(octile_search_smoothing(&description, &search, &result));
  CHECK(errors[1] > unclipped);
  description.calibration_rows = 0;
  description.activation = 300;
  ERROR(octile_search_smoothing(&description, &search, &result), OCTILE_INVALID_ARGUMENT, "activation = 300");
  ERROR(octile_smoothing_search_description_init(NULL, sizeof description), OCTILE_INVALID_ARGUMENT, "NULL");
}

static void quantize(void) {
  octile_weight_quantizer_description description;
  ERROR(octile_weight_quantizer_description_init(&description, 3), OCTILE_INVALID_ARGUMENT, "struct_size = 3");
  OK(octile_weight_quantizer_description_init(&description, sizeof description));
  CHECK(description.damping == 0.05 && description.min_clip == 0.4 && description.clip_least == 0.4 &&
        description.clip_steps == 61);
  CHECK(description.order == OCTILE_ORDER_BY_MOMENT && description.group == 128);
  CHECK(description.scale == OCTILE_DTYPE_F32 && description.method == OCTILE_METHOD_NEAREST);
  description.n = 1, description.k = 3;

  /* The scale is 127 / 127. Columns 0 and 1 go together by a half, so half of what column 0 loses is made up by column
   * 1: 20.4 + 0.4 / 2 is 20.6. */
  float w[] = {10.4f, 20.4f, 127}, s = 0;
  double h[] = {1, 0.5, 0, 0.5, 1, 0, 0, 0, 1};
  signed char q[3] = {0};
  const octile_tensor weight = tensor(w, kF32, 2, k1x3), levels = tensor(q, kS8, 2, k1x3);
  const octile_tensor scale = tensor(&s, kF32, 1, kOne), moments = tensor(h, kF64, 2, k3x3);
  octile_weight_quantizer_args args = {.struct_size = sizeof args, .weight = &weight, .q = &levels, .scale = &scale};
  OK(octile_quantize_weight(&description, &args));
  CHECK(s == 1 && q[0] == 10 && q[1] == 20 && q[2] == 127);
  description.method = OCTILE_METHOD_ERROR_FEEDBACK, description.order = OCTILE_ORDER_AS_THEY_LIE;
  description.damping = 0, description.clip_steps = 1;
  ERROR(octile_quantize_weight(&description, &args), OCTILE_INVALID_ARGUMENT, "without second_moments");
  args.second_moments = &moments;
  OK(octile_quantize_weight(&description, &args));
  CHECK(s == 1 && q[0] == 10 && q[1] == 21 && q[2] == 127);

  /* E = (-0.4, 0.6, 0): 0.16 + 0.36 - 2 * 0.24 / 2. */
  octile_weight_error_result error = {.struct_size = sizeof error};
  OK(octile_weight_error(&description, &args, &error));
  CHECK(fabs(error.noise - 0.28) < 1e-5);
  float importance[] = {1, 0, 0};
  const octile_tensor diagonal = tensor(importance, kF32, 1, kThree);
  args.second_moments = NULL, args.importance = &diagonal;
  OK(octile_weight_error(&description, &args, &error));
  CHECK(fabs(error.noise - 0.16) < 1e-5 && fabs(error.signal - 10.4 * 10.4) < 1e-4);
  ERROR(octile_weight_error(&description, &args, NULL), OCTILE_INVALID_ARGUMENT, "result is NULL");
  ERROR(octile_quantize_weight(NULL, &args), OCTILE_INVALID_ARGUMENT, "description is NULL");
  ERROR(octile_quantize_weight(&description, NULL), OCTILE_INVALID_ARGUMENT, "args is NULL");
  description.zero_point = 5;
  ERROR(octile_quantize_weight(&description, &args), OCTILE_INVALID_ARGUMENT, "zero_point = 5");
  description.zero_point = 0, description.method = -1;
  ERROR(octile_quantize_weight(&description, &args), OCTILE_INVALID_ARGUMENT, "method = -1");
}

int main(void) {
  calibrate();
  smooth();
  quantize();
  if (failures == 0) puts("ok");
  return failures != 0;
}
