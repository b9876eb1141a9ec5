/* Octile: calibration, SmoothQuant and the weight quantizer for C. Rules, tensors and errors are those of octile.h.
 * octile/smooth_quant.h and octile/weight_quantizer.h have the mathematics; fields mean what the fields of the same
 * names mean there. Everything runs on the CPU, with tensors in host memory.
 *
 *   octile_weight_quantizer_description description;
 *   octile_weight_quantizer_description_init(&description, sizeof description);
 *   description.n = 256, description.k = 512, description.weight = OCTILE_WEIGHT_S4_GROUP;
 *   description.method = OCTILE_METHOD_ERROR_FEEDBACK;
 *   octile_weight_quantizer_args args = {.struct_size = sizeof args, .weight = &w, .second_moments = &h, .q = &q,
 *                                        .scale = &s};
 *   if (octile_quantize_weight(&description, &args) != OCTILE_OK) puts(octile_last_error());
 */
#pragma once

#include "octile/octile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Calibration ---- */

typedef struct octile_calibrator octile_calibrator;

typedef struct {
  size_t struct_size;
  int64_t features;
  int32_t second_moments; /* boolean: keep H as well, 8 * features^2 bytes */
  int32_t threads;        /* maximum number of CPU threads; 0: all */
} octile_calibrator_description;

/* The caller destroys *calibrator. */
OCTILE_API octile_status octile_calibrator_create(const octile_calibrator_description* description,
                                                  octile_calibrator** calibrator);
/* NULL is fine. One calibrator is used by one thread at a time. */
OCTILE_API void octile_calibrator_destroy(octile_calibrator* calibrator);
/* x (rows, features): F16, BF16, F32 or F64. */
OCTILE_API octile_status octile_calibrator_observe(octile_calibrator* calibrator, const octile_tensor* x);
/* As if the rows of `other`, whose description is the same but for threads, had been observed here. */
OCTILE_API octile_status octile_calibrator_merge(octile_calibrator* calibrator, const octile_calibrator* other);
/* Rows seen, and the largest magnitude among them; 0 for NULL. */
OCTILE_API int64_t octile_calibrator_rows(const octile_calibrator* calibrator);
OCTILE_API float octile_calibrator_max(const octile_calibrator* calibrator);
/* out (features), F32. */
OCTILE_API octile_status octile_calibrator_channel_max(const octile_calibrator* calibrator, const octile_tensor* out);
/* out (2), F32: how likely and, in the mean square, how far one more row exceeds the maxima. */
OCTILE_API octile_status octile_calibrator_excess(const octile_calibrator* calibrator, const octile_tensor* out);
/* out (features, features), F32 or F64: H. UNSUPPORTED without second_moments in the description. */
OCTILE_API octile_status octile_calibrator_second_moments(const octile_calibrator* calibrator,
                                                          const octile_tensor* out);

/* ---- SmoothQuant ---- */

typedef struct {
  size_t struct_size;
  double alpha;                            /* 0 to 1 */
  const octile_tensor* input_channel_max;  /* (K), F32 */
  const octile_tensor* weight_channel_max; /* (K), F32 */
  const octile_tensor* factors;            /* out (K), F32: s */
  const octile_tensor* multiplier;         /* out (K), F32: 1 / s; may be absent */
} octile_smoothing_args;

/* *smoothed_max becomes the largest smoothed input: over 127 it is a static scale. */
OCTILE_API octile_status octile_smoothing_factors(const octile_smoothing_args* args, float* smoothed_max);

/* weight (N, K) in place: W[n, j] * s_j. */
OCTILE_API octile_status octile_smooth_weight(const octile_tensor* weight, const octile_tensor* factors);

typedef struct {
  size_t struct_size;
  const octile_tensor* factors; /* (K), F32 */
  const octile_tensor* weight;  /* in place: (K), or (K, P) */
  const octile_tensor* bias;    /* in place: (K); may be absent */
} octile_smooth_before_args;

/* Divides the preceding layer: weight[j] / s_j or row j / s_j, bias[j] / s_j. */
OCTILE_API octile_status octile_smooth_before(const octile_smooth_before_args* args);

typedef struct {
  size_t struct_size;
  int64_t n;
  int64_t k;
  int64_t group;            /* S4_GROUP, S8_GROUP: 32, 64 or 128, a divisor of k; 0: a whole row. Default 128 */
  double first_alpha;       /* default 0 */
  double last_alpha;        /* default 1 */
  int32_t x;                /* OCTILE_DTYPE_..., float. Default F32 */
  int32_t w;                /* default F32 */
  int32_t activation;       /* default STATIC_PER_TENSOR */
  int32_t weight;           /* default S8_PER_CHANNEL */
  int32_t steps;            /* default 21 */
  int32_t threads;          /* maximum number of CPU threads; 0: all */
  int64_t calibration_rows; /* behind input_channel_max; 0 (the default): unknown */
} octile_smoothing_search_description;

OCTILE_API octile_status octile_smoothing_search_description_init(octile_smoothing_search_description* description,
                                                                  size_t size);

typedef struct {
  size_t struct_size;
  const octile_tensor* weight;            /* (N, K) */
  const octile_tensor* input_channel_max; /* (K), F32 */
  const octile_tensor* x;                 /* (rows, K), or */
  const octile_tensor* second_moments;    /* (K, K), F32 or F64 */
  int64_t rows;                           /* that the second moments were summed over */
  const octile_tensor* errors;            /* out (steps), F64; may be absent */
  const octile_tensor* input_excess;      /* (2), F32: what octile_calibrator_excess gives; may be absent */
} octile_smoothing_search_args;

typedef struct {
  size_t struct_size; /* set by the caller; fields beyond it are not written */
  double alpha;
  double error;
  double unsmoothed_error;
  int32_t smooth;   /* boolean: alpha is worth it; otherwise leave the layer as it is */
  int32_t reserved; /* 0 */
} octile_smoothing_search_result;

/* Finds the alpha with the smallest error of the layer's output. */
OCTILE_API octile_status octile_search_smoothing(const octile_smoothing_search_description* description,
                                                 const octile_smoothing_search_args* args,
                                                 octile_smoothing_search_result* result);

/* ---- Quantizing weights to s8 and s4 ---- */

enum { OCTILE_METHOD_NEAREST = 0, OCTILE_METHOD_CLIP_SEARCH, OCTILE_METHOD_ERROR_FEEDBACK };
enum { OCTILE_ORDER_AS_THEY_LIE = 0, OCTILE_ORDER_BY_MOMENT };

typedef struct {
  size_t struct_size;
  int64_t n;
  int64_t k;
  int64_t group;  /* S4_GROUP, S8_GROUP: 32, 64 or 128, a divisor of k; 0: a whole row. Default 128 */
  double damping; /* default 0.05 */
  union {
    double min_clip;   /* default 0.4 */
    double clip_least; /* deprecated: the old name of min_clip */
  };
  int32_t w;          /* F16, BF16, F32 or F64. Default F32 */
  int32_t weight;     /* default S8_PER_CHANNEL */
  int32_t zero_point; /* boolean, only for S4_GROUP */
  int32_t scale;      /* F32 (the default), F16 or BF16: what scales are rounded to; they are written as F32 */
  int32_t method;     /* default NEAREST */
  int32_t order;      /* default BY_MOMENT */
  int32_t clip_steps; /* default 61 */
  int32_t threads;    /* maximum number of CPU threads; 0: all */
} octile_weight_quantizer_description;

OCTILE_API octile_status octile_weight_quantizer_description_init(octile_weight_quantizer_description* description,
                                                                  size_t size);

typedef struct {
  size_t struct_size;
  const octile_tensor* weight;         /* (N, K) */
  const octile_tensor* second_moments; /* (K, K), F32 or F64 */
  const octile_tensor* importance;     /* (K), F32 */
  const octile_tensor* q;              /* out (N, K), int 8 or int 4 */
  const octile_tensor* scale;          /* out (N); (1) for S8_PER_TENSOR; (N, K / group) in groups. F32 */
  const octile_tensor* zero_point;     /* out (N, K / group), int 32 */
} octile_weight_quantizer_args;

/* Writes q, scale and, with zero points, zero_point. */
OCTILE_API octile_status octile_quantize_weight(const octile_weight_quantizer_description* description,
                                                const octile_weight_quantizer_args* args);

typedef struct {
  size_t struct_size; /* set by the caller; fields beyond it are not written */
  double noise;
  double signal;
} octile_weight_error_result;

/* The same tensors, of which q, scale and zero_point are read: trace(E H E^T) and trace(W H W^T). */
OCTILE_API octile_status octile_weight_error(const octile_weight_quantizer_description* description,
                                             const octile_weight_quantizer_args* args,
                                             octile_weight_error_result* result);

#ifdef __cplusplus
}
#endif
