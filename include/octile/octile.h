/* Octile: the C interface, and the stable boundary of the library. C11, and C++.
 *
 * The same plans as in octile.hpp, where the mathematics is written down (octile/quantize.h, octile/linear.h): what
 * octile_linear_plan_create makes is an octile::LinearPlan, and every field means what the field of that name means
 * there.
 *
 *   octile_linear_description description;
 *   octile_linear_description_init(&description, sizeof description);
 *   description.m = 16, description.n = 256, description.k = 512;
 *   octile_plan* plan;
 *   if (octile_linear_plan_create(&description, &plan) != OCTILE_OK) puts(octile_last_error());
 *   void* workspace = malloc(octile_plan_workspace_size(plan));
 *   octile_linear_args args = {.struct_size = sizeof args, .x = &x, .weight = &w, .weight_scale = &s, .y = &y};
 *   if (octile_linear_run(plan, &args, workspace, octile_plan_workspace_size(plan), NULL) != OCTILE_OK) ...
 *   octile_plan_destroy(plan);
 *
 * Rules for everything below:
 *   - A function that can fail returns an octile_status and writes its result through its last parameter, which stays
 *     unchanged on failure. octile_last_error() then has the text. No C++ exception leaves the library.
 *   - Structures begin with their size, struct_size = sizeof the structure, so that fields can be added at their end.
 *     A smaller one (from an older header; a multiple of 8, at least 8) has the defaults in the fields it lacks. A
 *     larger one (from a newer header; at most 4096) is accepted if all fields that this library does not know are zero.
 *   - Booleans are 0 or 1. Choices are int32_t with the constants below; any other value is OCTILE_INVALID_ARGUMENT.
 *   - A plan is immutable: several threads may use one plan at once, each with its own workspace. A plan must not be
 *     destroyed while it is used. The library keeps no pointer that it is given beyond the call (on a GPU: beyond the
 *     work that the call puts on the stream).
 *   - Everything is computed with rounding to nearest, subnormal numbers and masked exceptions, whatever the calling
 *     thread's floating-point environment is, which is restored, including its sticky flags.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "octile/export.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OCTILE_VERSION_MAJOR 0
#define OCTILE_VERSION_MINOR 1
#define OCTILE_VERSION_PATCH 0

/* Increased when something here changes its meaning or is removed, not when something is added. */
#define OCTILE_ABI_VERSION 1

/* Of the library that is loaded: "0.1.0", and its OCTILE_ABI_VERSION. */
OCTILE_API const char* octile_version(void);
OCTILE_API int32_t octile_abi_version(void);

/* ---- Errors ---- */

typedef int32_t octile_status;
enum {
  OCTILE_OK = 0,
  OCTILE_INVALID_ARGUMENT = 1,    /* a value that no plan accepts: a negative size, an unknown choice, a NULL plan */
  OCTILE_SHAPE_MISMATCH = 2,      /* rank, shape, stride, dtype or device of a tensor differ from the description's */
  OCTILE_UNSUPPORTED = 3,         /* a valid request that no kernel on this machine supports */
  OCTILE_MISALIGNED = 4,          /* a pointer that is not a multiple of its element's size */
  OCTILE_WORKSPACE_TOO_SMALL = 5, /* fewer bytes than octile_plan_workspace_size() */
  OCTILE_CUDA_ERROR = 6,          /* a CUDA call failed; the text names the kernel */
  OCTILE_INTERNAL = 7             /* a bug in Octile, or out of memory */
};

/* The text of the last call on this thread that did not return OCTILE_OK: the function, and every value that was
 * wrong. "" before the first. Valid until the next such call on this thread. Never NULL; always UTF-8. */
OCTILE_API const char* octile_last_error(void);

/* ---- Tensors ---- */

/* DLPack's numbers. */
enum { OCTILE_DEVICE_CPU = 1, OCTILE_DEVICE_CUDA = 2 };
enum { OCTILE_CODE_INT = 0, OCTILE_CODE_UINT = 1, OCTILE_CODE_FLOAT = 2, OCTILE_CODE_BFLOAT = 4 };

typedef struct {
  int32_t type; /* OCTILE_DEVICE_... */
  int32_t id;   /* which GPU; 0 for the CPU */
} octile_device;

typedef struct {
  uint8_t code; /* OCTILE_CODE_... */
  uint8_t bits;
  uint16_t lanes; /* 1 */
} octile_element;

/* A view, laid out as DLPack's DLTensor: a DLTensor* may be cast to an octile_tensor*. It owns nothing.
 *   dtype    int 4, 8, 32; uint 8; float 16, 32, 64; bfloat 16. int 4 is packed two per byte, the even element in the
 *            low nibble, every row starting on a byte; its shape and strides count elements
 *   ndim     1 or 2; 3 and 4 only for octile_attend_one_query
 *   strides  in elements; NULL is compact row-major (int 4: rows of an even number of elements). In a matrix strides[1]
 *            is 1 and strides[0] >= shape[1] (int 4: even), or 0 to repeat one row of an input. In a vector it is >= 0,
 *            0 repeats one value of an input. For a single row or element it may be anything not negative
 *   data     the first element is at data + byte_offset. NULL only for an empty shape
 * In the argument structures below, a NULL octile_tensor* is a tensor that is absent. */
typedef struct {
  void* data;
  octile_device device;
  int32_t ndim;
  octile_element dtype;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
} octile_tensor;

/* ---- Choices, numbered as the C++ enumerations of octile/types.h ---- */

enum {
  OCTILE_DTYPE_SAME = -1, /* only for dw_dtype: the type of dy */
  OCTILE_DTYPE_F16 = 0,
  OCTILE_DTYPE_BF16 = 1,
  OCTILE_DTYPE_F32 = 2,
  OCTILE_DTYPE_F64 = 3,
  OCTILE_DTYPE_S8 = 4,
  OCTILE_DTYPE_U8 = 5,
  OCTILE_DTYPE_S4 = 6,
  OCTILE_DTYPE_S32 = 7
};
enum { OCTILE_GRANULARITY_TENSOR = 0, OCTILE_GRANULARITY_ROW, OCTILE_GRANULARITY_COLUMN, OCTILE_GRANULARITY_GROUP };
enum { OCTILE_SCALE_DYNAMIC = 0, OCTILE_SCALE_GIVEN };
enum { OCTILE_MAPPING_SYMMETRIC = 0, OCTILE_MAPPING_AFFINE };
enum { OCTILE_ROUNDING_NEAREST = 0, OCTILE_ROUNDING_STOCHASTIC };
enum { OCTILE_ORIENTATION_ROW_MAJOR = 0, OCTILE_ORIENTATION_TRANSPOSED, OCTILE_ORIENTATION_BOTH };
enum { OCTILE_MULTIPLIER_NONE = 0, OCTILE_MULTIPLIER_PER_COLUMN, OCTILE_MULTIPLIER_PER_ROW };
enum { OCTILE_MASK_INCLUSIVE = 0, OCTILE_MASK_EXCLUSIVE };
enum {
  OCTILE_ACTIVATION_NONE = 0,
  OCTILE_ACTIVATION_DYNAMIC_PER_TOKEN,
  OCTILE_ACTIVATION_DYNAMIC_PER_TENSOR,
  OCTILE_ACTIVATION_STATIC_PER_TENSOR
};
enum { OCTILE_WEIGHT_S8_PER_CHANNEL = 0, OCTILE_WEIGHT_S8_PER_TENSOR, OCTILE_WEIGHT_S4_GROUP, OCTILE_WEIGHT_S8_GROUP };
enum {
  OCTILE_LAYOUT_SAME = -1, /* only for dw_layout: weight_layout */
  OCTILE_LAYOUT_OUT_IN = 0,
  OCTILE_LAYOUT_IN_OUT
};
enum {
  OCTILE_PROLOGUE_NONE = 0,
  OCTILE_PROLOGUE_GELU_TANH,
  OCTILE_PROLOGUE_SILU,
  OCTILE_PROLOGUE_RMS_NORM,
  OCTILE_PROLOGUE_LAYER_NORM
};
enum { OCTILE_PRODUCT_NONE = 0, OCTILE_PRODUCT_DEQUANTIZED, OCTILE_PRODUCT_INT8 };
enum { OCTILE_GRADIENT_DX = 0, OCTILE_GRADIENT_DW, OCTILE_GRADIENT_DB };

/* ---- Plans ---- */

/* A plan of any of the kinds below. Use the run and can_implement of its own kind; those of other kinds reject it. */
typedef struct octile_plan octile_plan;

/* NULL is fine. */
OCTILE_API void octile_plan_destroy(octile_plan* plan);

/* Bytes of scratch that each run needs, on the plan's device; any alignment will do. A run uses this many bytes at the
 * start of its workspace, and no tensor of the call may overlap them. 0 for NULL. */
OCTILE_API size_t octile_plan_workspace_size(const octile_plan* plan);

/* The kernels chosen; and, for people, why these and not the others. Valid as long as the plan exists; "" for NULL. */
OCTILE_API const char* octile_plan_sku(const octile_plan* plan);
OCTILE_API const char* octile_plan_explain(const octile_plan* plan);

typedef struct {
  size_t struct_size;      /* set by the caller; fields beyond it are not written */
  const char* error_bound; /* in words, "exact" where every rounding is in the contract; lives as long as the plan */
  int32_t deterministic;   /* the same bits on every run on one device */
  int32_t bit_stable;      /* the same bits on every device, thread count and batch size */
  int32_t accumulator;     /* OCTILE_DTYPE_... */
  int32_t reserved;        /* written 0 */
} octile_precision;

/* What holds for all outputs of the plan. */
OCTILE_API octile_status octile_plan_precision(const octile_plan* plan, octile_precision* precision);
/* The same for one output of a linear backward plan, OCTILE_GRADIENT_...: an int8 dX is exact even if dB is a sum of
 * floats. INVALID_ARGUMENT if the plan does not compute that output. */
OCTILE_API octile_status octile_linear_backward_precision(const octile_plan* plan, int32_t gradient,
                                                          octile_precision* precision);

/* Sets the file of measured kernels (`octile tune`) that plans created from now on follow, in this process; it
 * overrides the environment variable OCTILE_TUNING. NULL or "": octile tune's own file for the plan's device, only for
 * exact sums. "off": none. A path: that file, on a GPU for sums of floats too; if it cannot be used, creating a plan
 * fails. */
OCTILE_API octile_status octile_use_tuning(const char* file);

/* Sets the threads that run CPU plans in this process: the library's own, or those of a pool that the program already
 * has, such as OpenMP's. With two pools, the idle one spins on the cores that the other uses. run(tasks, task, context)
 * calls task(context, i) once for each i from 0 to tasks - 1, in parallel as far as it has threads, and returns (or, in
 * C++, throws) when all calls have returned: a run whose runner returns earlier fails. NULL: the library's own threads
 * again, as in a child after fork(). */
typedef void (*octile_task)(void* context, int32_t index);
typedef void (*octile_task_runner)(int32_t tasks, octile_task task, void* context);
OCTILE_API octile_status octile_use_task_runner(octile_task_runner run);

/* For each kind of plan there are three functions:
 *   octile_<kind>_plan_create    chooses the kernels; the caller destroys *plan
 *   octile_<kind>_can_implement  OCTILE_OK, or the error that the run would return for these arguments, with its text
 *   octile_<kind>_run            computes. Allocates nothing on success, never waits for a GPU. Nothing has been
 *                                written when it fails. `stream` is a cudaStream_t, ignored by plans on the CPU
 * and for each description a function that sets its struct_size and the defaults; `size` is sizeof it. Argument
 * structures need no such function: {.struct_size = sizeof args} is one with every tensor absent. */

/* ---- Quantize, dequantize, fake quantize, and their straight-through gradients: octile/quantize.h ---- */

typedef struct {
  size_t struct_size;
  int64_t rows; /* maximum; run accepts fewer */
  int64_t cols;
  int64_t group;       /* with OCTILE_GRANULARITY_GROUP: its length, a divisor of cols */
  int32_t x;           /* OCTILE_DTYPE_..., float. Default F32 */
  int32_t q;           /* S8, U8 or S4. Default S8 */
  int32_t granularity; /* default ROW */
  int32_t scale;       /* default DYNAMIC */
  int32_t mapping;     /* default SYMMETRIC */
  int32_t rounding;    /* default NEAREST */
  int32_t orientation; /* default ROW_MAJOR */
  int32_t multiplier;  /* default NONE */
  int32_t mask;        /* default INCLUSIVE */
  int32_t q_min;       /* both 0: the type's own range */
  int32_t q_max;
  int32_t threads;      /* maximum number of CPU threads; 0: all */
  octile_device device; /* default the CPU */
  const char* kernel;   /* NULL or "": the fastest. A row's name, or an arch ("reference"), restricts the choice */
  union {
    double min_scale;   /* of dynamic scales, 2^-79 to 1. Default 1e-8 */
    double least_scale; /* deprecated: the old name of min_scale */
  };
  int32_t prologue;    /* OCTILE_PROLOGUE_..., only for octile_quantize_plan. Default NONE */
  int32_t gated;       /* boolean: an activation's result is multiplied by `up` */
  double epsilon;      /* of a norm. Default 1e-6 */
  int32_t norm_weight; /* OCTILE_DTYPE_... of norm_weight and norm_bias: F32 or x's. Default F32 */
  int32_t residual;    /* boolean: x + residual is normalized, and written to `sum` */
} octile_quantize_description;

OCTILE_API octile_status octile_quantize_description_init(octile_quantize_description* description, size_t size);

/* Scales and zero points, wherever they appear below: shape (1) for TENSOR, (rows) for ROW, (cols) for COLUMN,
 * (rows, cols / group) for GROUP. Scales and multipliers are F32, or F64 for an F64 x. Zero points are int 32, absent
 * when SYMMETRIC. x, y, up, residual, sum and the gradients have the description's x, q its q. */

typedef struct {
  size_t struct_size;
  const octile_tensor* x;                /* (rows, cols) */
  const octile_tensor* multiplier;       /* (cols) for PER_COLUMN, (rows) for PER_ROW */
  const octile_tensor* given_scale;      /* with GIVEN: positive and finite */
  const octile_tensor* given_zero_point; /* with GIVEN and AFFINE */
  const octile_tensor* q;                /* out (rows, cols), unless TRANSPOSED */
  const octile_tensor* q_transposed;     /* out (cols, rows), if TRANSPOSED or BOTH */
  const octile_tensor* scale;            /* out. DYNAMIC: required. GIVEN: may be absent */
  const octile_tensor* zero_point;       /* out, with DYNAMIC and AFFINE */
  uint64_t seed;                         /* of stochastic rounding */
  const octile_tensor* up;               /* (rows, cols), if gated */
  const octile_tensor* norm_weight;      /* (cols), with RMS_NORM and LAYER_NORM */
  const octile_tensor* norm_bias;        /* (cols), with LAYER_NORM */
  const octile_tensor* residual;         /* (rows, cols), if residual */
  const octile_tensor* sum;              /* out (rows, cols), if residual */
  const octile_tensor* mean;             /* out (rows), F32, with LAYER_NORM; may be absent */
  const octile_tensor* rstd;             /* out (rows), F32, of a norm: 1 / sqrt(.. + epsilon); may be absent */
} octile_quantize_args;

typedef struct {
  size_t struct_size;
  const octile_tensor* q; /* (rows, cols) */
  const octile_tensor* scale;
  const octile_tensor* zero_point; /* with AFFINE */
  const octile_tensor* x;          /* out (rows, cols) */
} octile_dequantize_args;

typedef struct {
  size_t struct_size;
  const octile_tensor* dy; /* (rows, cols) */
  const octile_tensor* x;  /* (rows, cols), as it was quantized */
  const octile_tensor* scale;
  const octile_tensor* zero_point; /* with AFFINE */
  const octile_tensor* dx;         /* out (rows, cols) */
} octile_quantize_backward_args;

typedef struct {
  size_t struct_size;
  const octile_tensor* dy; /* (rows, cols) */
  const octile_tensor* scale;
  const octile_tensor* dq; /* out (rows, cols), float */
} octile_dequantize_backward_args;

typedef struct {
  size_t struct_size;
  const octile_tensor* x;                /* (rows, cols) */
  const octile_tensor* given_scale;      /* with GIVEN: positive and finite */
  const octile_tensor* given_zero_point; /* with GIVEN and AFFINE */
  const octile_tensor* y;                /* out (rows, cols) */
  const octile_tensor* scale;            /* out, with DYNAMIC */
  const octile_tensor* zero_point;       /* out, with DYNAMIC and AFFINE */
  uint64_t seed;                         /* of stochastic rounding */
} octile_fake_quantize_args;

typedef struct {
  size_t struct_size;
  const octile_tensor* dy; /* (rows, cols) */
  const octile_tensor* x;  /* (rows, cols) */
  const octile_tensor* scale;
  const octile_tensor* zero_point; /* with AFFINE */
  const octile_tensor* dx;         /* out (rows, cols) */
} octile_fake_quantize_backward_args;

/* x -> q */
OCTILE_API octile_status octile_quantize_plan_create(const octile_quantize_description* description,
                                                     octile_plan** plan);
OCTILE_API octile_status octile_quantize_can_implement(const octile_plan* plan, const octile_quantize_args* args);
OCTILE_API octile_status octile_quantize_run(const octile_plan* plan, const octile_quantize_args* args, void* workspace,
                                             size_t workspace_size, void* stream);
/* x = (q - z) * s */
OCTILE_API octile_status octile_dequantize_plan_create(const octile_quantize_description* description,
                                                       octile_plan** plan);
OCTILE_API octile_status octile_dequantize_can_implement(const octile_plan* plan, const octile_dequantize_args* args);
OCTILE_API octile_status octile_dequantize_run(const octile_plan* plan, const octile_dequantize_args* args,
                                               void* workspace, size_t workspace_size, void* stream);
/* dx = dy / s where in range, else 0 */
OCTILE_API octile_status octile_quantize_backward_plan_create(const octile_quantize_description* description,
                                                              octile_plan** plan);
OCTILE_API octile_status octile_quantize_backward_can_implement(const octile_plan* plan,
                                                                const octile_quantize_backward_args* args);
OCTILE_API octile_status octile_quantize_backward_run(const octile_plan* plan,
                                                      const octile_quantize_backward_args* args, void* workspace,
                                                      size_t workspace_size, void* stream);
/* dq = dy * s */
OCTILE_API octile_status octile_dequantize_backward_plan_create(const octile_quantize_description* description,
                                                                octile_plan** plan);
OCTILE_API octile_status octile_dequantize_backward_can_implement(const octile_plan* plan,
                                                                  const octile_dequantize_backward_args* args);
OCTILE_API octile_status octile_dequantize_backward_run(const octile_plan* plan,
                                                        const octile_dequantize_backward_args* args, void* workspace,
                                                        size_t workspace_size, void* stream);
/* y = dequantize(quantize(x)) */
OCTILE_API octile_status octile_fake_quantize_plan_create(const octile_quantize_description* description,
                                                          octile_plan** plan);
OCTILE_API octile_status octile_fake_quantize_can_implement(const octile_plan* plan,
                                                            const octile_fake_quantize_args* args);
OCTILE_API octile_status octile_fake_quantize_run(const octile_plan* plan, const octile_fake_quantize_args* args,
                                                  void* workspace, size_t workspace_size, void* stream);
/* dx = dy where in range, else 0 */
OCTILE_API octile_status octile_fake_quantize_backward_plan_create(const octile_quantize_description* description,
                                                                   octile_plan** plan);
OCTILE_API octile_status octile_fake_quantize_backward_can_implement(const octile_plan* plan,
                                                                     const octile_fake_quantize_backward_args* args);
OCTILE_API octile_status octile_fake_quantize_backward_run(const octile_plan* plan,
                                                           const octile_fake_quantize_backward_args* args,
                                                           void* workspace, size_t workspace_size, void* stream);

/* ---- The linear layer, Y = X * W^T + bias: octile/linear.h ----
 *
 * Here and for the experts below, scales and multipliers are F32, or F64 for an F64 y (gradients: for an F64 dy).
 * Weights are int 8, or int 4 for S4_GROUP. */

typedef struct {
  size_t struct_size;
  int64_t m; /* maximum; run accepts fewer rows */
  int64_t n;
  int64_t k;
  int64_t group;             /* of weights in groups: 32, 64 or 128, a divisor of k; 0: a whole row. Default 128 */
  double static_scale;       /* with STATIC_PER_TENSOR: positive and finite */
  int32_t x;                 /* F16, BF16, F32 or F64; or S8: X is already quantized. Default F32 */
  int32_t y;                 /* default F32 */
  int32_t activation;        /* default DYNAMIC_PER_TOKEN */
  int32_t weight;            /* default S8_PER_CHANNEL */
  int32_t weight_layout;     /* default OUT_IN */
  int32_t weight_zero_point; /* boolean, only for S4_GROUP */
  int32_t bias;              /* boolean */
  int32_t x_multiplier;      /* boolean: X is multiplied per input channel before it is quantized */
  int32_t threads;           /* maximum number of CPU threads; 0: all */
  int32_t packed_weight;     /* boolean: run takes what octile_linear_pack wrote, the fastest form */
  octile_device device;      /* default the CPU */
  const char* kernel;        /* NULL or "": the fastest */
} octile_linear_description;

OCTILE_API octile_status octile_linear_description_init(octile_linear_description* description, size_t size);

typedef struct {
  size_t struct_size;
  const octile_tensor* x;                 /* (M, K) */
  const octile_tensor* x_scale;           /* if x is S8 and not static: (M), or (1) for PER_TENSOR */
  const octile_tensor* x_multiplier;      /* (K) */
  const octile_tensor* weight;            /* (N, K), or (K, N) for IN_OUT; packed: uint 8, at a multiple of 64 */
  const octile_tensor* weight_scale;      /* (N); (1) per tensor; (N, K / group) in groups; absent if packed */
  const octile_tensor* weight_zero_point; /* (N, K / group), int 32, within -8..7; absent if packed */
  const octile_tensor* bias;              /* (N), dtype of y */
  const octile_tensor* y;                 /* out (M, N) */
} octile_linear_args;

typedef struct {
  size_t struct_size;
  const octile_tensor* weight;            /* (N, K), or (K, N) for IN_OUT */
  const octile_tensor* weight_scale;      /* as in octile_linear_args */
  const octile_tensor* weight_zero_point; /* as in octile_linear_args */
  const octile_tensor* packed;            /* out, (octile_linear_packed_weight_size) uint 8 */
} octile_linear_pack_args;

OCTILE_API octile_status octile_linear_plan_create(const octile_linear_description* description, octile_plan** plan);
/* Bytes of the packed weight, the same for every m and machine; 0 without packed_weight. */
OCTILE_API octile_status octile_linear_packed_weight_size(const octile_plan* plan, size_t* size);
/* Packs a weight on the CPU, once for all runs of this and every other plan of the same n, k and format. The packed
 * bytes begin at a multiple of 64, here and in run. */
OCTILE_API octile_status octile_linear_pack(const octile_plan* plan, const octile_linear_pack_args* args);
OCTILE_API octile_status octile_linear_can_implement(const octile_plan* plan, const octile_linear_args* args);
OCTILE_API octile_status octile_linear_run(const octile_plan* plan, const octile_linear_args* args, void* workspace,
                                           size_t workspace_size, void* stream);

/* ---- Its gradients dX, dW, dB, any subset ---- */

typedef struct {
  size_t struct_size;
  int64_t m; /* maximum; run accepts fewer rows */
  int64_t n;
  int64_t k;
  double static_scale;    /* with STATIC_PER_TENSOR: positive and finite */
  int32_t dy;             /* float type of dY, dX and dB. Default F32 */
  int32_t dw_dtype;       /* of dW: SAME (the default) as dy, or F32 */
  int32_t dx;             /* OCTILE_PRODUCT_..., default DEQUANTIZED */
  int32_t dw;             /* OCTILE_PRODUCT_..., default DEQUANTIZED */
  int32_t db;             /* boolean */
  int32_t activation;     /* the scale that Xq was quantized with. Default DYNAMIC_PER_TOKEN */
  int32_t x_transposed;   /* boolean: Xq is given as (K, M) */
  int32_t weight;         /* S8_PER_CHANNEL (the default) or S8_PER_TENSOR */
  int32_t weight_layout;  /* of Wq. Default OUT_IN */
  int32_t rounding;       /* of dY in the int8 products. Default NEAREST */
  int32_t threads;        /* maximum number of CPU threads; 0: all */
  int32_t dw_accumulate;  /* boolean: dW is added to what dw holds, F32 or, for F64, F64 */
  octile_device device;   /* default the CPU */
  const char* kernel;     /* NULL or "": the fastest */
  int32_t dw_layout;      /* of dW: SAME (the default) as Wq, or the other one */
  int32_t gradient_block; /* terms that share a scale of dY in the int8 products: 0 (the default: all), 128, 256, 512,
                             1024 */
} octile_linear_backward_description;

OCTILE_API octile_status octile_linear_backward_description_init(octile_linear_backward_description* description,
                                                                 size_t size);

typedef struct {
  size_t struct_size;
  const octile_tensor* dy;           /* (M, N) */
  const octile_tensor* weight;       /* (N, K), or (K, N) for IN_OUT; for dX */
  const octile_tensor* weight_scale; /* (N) or (1); for dX */
  const octile_tensor* x;            /* (M, K), or (K, M) if transposed; for dW */
  const octile_tensor* x_scale;      /* (M), (1), or absent if static; for dW */
  const octile_tensor* dx;           /* out (M, K) */
  const octile_tensor* dw;           /* out (N, K) or (K, N) */
  const octile_tensor* db;           /* out (N) */
  uint64_t seed;                     /* of stochastic rounding */
} octile_linear_backward_args;

OCTILE_API octile_status octile_linear_backward_plan_create(const octile_linear_backward_description* description,
                                                            octile_plan** plan);
OCTILE_API octile_status octile_linear_backward_can_implement(const octile_plan* plan,
                                                              const octile_linear_backward_args* args);
OCTILE_API octile_status octile_linear_backward_run(const octile_plan* plan, const octile_linear_backward_args* args,
                                                    void* workspace, size_t workspace_size, void* stream);

/* ---- Linear layers of one shape, each for its own rows, the experts of a mixture: octile/grouped_linear.h ---- */

typedef struct {
  size_t struct_size;
  int64_t experts;
  int64_t m; /* maximum of rows of all experts together; run accepts fewer */
  int64_t n;
  int64_t k;
  int64_t tokens;            /* with gather or slots: maximum */
  int64_t slots;             /* experts of a token; 0: rows of Y are the sorted rows */
  int64_t group;             /* of weights in groups: 32, 64 or 128, a divisor of k; 0: a whole row. Default 128 */
  double static_scale;       /* with STATIC_PER_TENSOR: positive and finite */
  int32_t x;                 /* F16, BF16, F32 or F64; or S8: X is already quantized. Default F32 */
  int32_t y;                 /* default F32 */
  int32_t activation;        /* DYNAMIC_PER_TOKEN (the default), STATIC_PER_TENSOR or NONE */
  int32_t weight;            /* default S8_PER_CHANNEL */
  int32_t weight_zero_point; /* boolean, only for S4_GROUP */
  int32_t packed_weight;     /* boolean: run takes what octile_grouped_linear_pack wrote, the fastest form */
  int32_t bias;              /* boolean */
  int32_t gather;            /* boolean: rows of X are tokens */
  int32_t threads;           /* maximum number of CPU threads; 0: all */
  int32_t clear_rest;        /* boolean: rows of Y that belong to no expert become 0; without slots */
  octile_device device;      /* default the CPU */
  const char* kernel;        /* NULL or "": the fastest */
} octile_grouped_linear_description;

OCTILE_API octile_status octile_grouped_linear_description_init(octile_grouped_linear_description* description,
                                                                size_t size);

typedef struct {
  size_t struct_size;
  const octile_tensor* x;                 /* (M, K); with gather (tokens, K) */
  const octile_tensor* x_scale;           /* if x is S8 and not static: one for each row of x */
  const octile_tensor* offsets;           /* (E + 1), int 32: ascending, 0 to M */
  const octile_tensor* token;             /* (M), int 32, with gather: rows of x */
  const octile_tensor* weight;            /* (E * N, K); packed: uint 8, at a multiple of 64 */
  const octile_tensor* weight_scale;      /* (E * N); (E) per tensor; (E * N, K / group); absent if packed */
  const octile_tensor* weight_zero_point; /* (E * N, K / group), int 32, within -8..7; absent if packed */
  const octile_tensor* bias;              /* (E, N), dtype of y */
  const octile_tensor* place;             /* (tokens, slots), int 32, with slots: rows among the sorted ones */
  const octile_tensor* router_weight;     /* (tokens, slots), F32, or F64 for an F64 y, with slots */
  const octile_tensor* y;                 /* out (M, N); with slots (tokens, N) */
} octile_grouped_linear_args;

OCTILE_API octile_status octile_grouped_linear_plan_create(const octile_grouped_linear_description* description,
                                                           octile_plan** plan);
/* For all experts: the concatenation of their packed weights, each that of a linear plan. */
OCTILE_API octile_status octile_grouped_linear_packed_weight_size(const octile_plan* plan, size_t* size);
/* Tensors as in octile_grouped_linear_args. */
OCTILE_API octile_status octile_grouped_linear_pack(const octile_plan* plan, const octile_linear_pack_args* args);
OCTILE_API octile_status octile_grouped_linear_can_implement(const octile_plan* plan,
                                                             const octile_grouped_linear_args* args);
OCTILE_API octile_status octile_grouped_linear_run(const octile_plan* plan, const octile_grouped_linear_args* args,
                                                   void* workspace, size_t workspace_size, void* stream);

/* ---- Their gradients dX, dW, dB, any subset: octile/grouped_linear.h ---- */

typedef struct {
  size_t struct_size;
  int64_t experts;
  int64_t m; /* maximum of rows of all experts together; run accepts fewer */
  int64_t n;
  int64_t k;
  double static_scale;    /* with STATIC_PER_TENSOR: positive and finite */
  int32_t dy;             /* float type of dY, dX and dB. Default F32 */
  int32_t dw_dtype;       /* of dW: SAME (the default) as dy, or F32 */
  int32_t dx;             /* OCTILE_PRODUCT_..., default DEQUANTIZED */
  int32_t dw;             /* OCTILE_PRODUCT_..., default DEQUANTIZED */
  int32_t db;             /* boolean */
  int32_t activation;     /* DYNAMIC_PER_TOKEN (the default) or STATIC_PER_TENSOR: of Xq */
  int32_t weight;         /* S8_PER_CHANNEL (the default) or S8_PER_TENSOR */
  int32_t rounding;       /* of dY in the int8 products. Default NEAREST */
  int32_t gradient_block; /* as in octile_linear_backward_description */
  int32_t threads;        /* maximum number of CPU threads; 0: all */
  int32_t dw_accumulate;  /* boolean: dW is added to what dw holds, F32 or, for F64, F64 */
  int32_t clear_rest;     /* boolean: rows of dX that belong to no expert become 0 */
  octile_device device;   /* default the CPU */
  const char* kernel;     /* NULL or "": the fastest */
} octile_grouped_linear_backward_description;

OCTILE_API octile_status
octile_grouped_linear_backward_description_init(octile_grouped_linear_backward_description* description, size_t size);

typedef struct {
  size_t struct_size;
  const octile_tensor* dy;           /* (M, N) */
  const octile_tensor* offsets;      /* (E + 1), int 32: ascending, 0 to M; for an int8 dW at most 131071 apart */
  const octile_tensor* weight;       /* (E * N, K); for dX */
  const octile_tensor* weight_scale; /* (E * N), or (E) per tensor; for dX */
  const octile_tensor* x;            /* (M, K); for dW */
  const octile_tensor* x_scale;      /* (M), or absent if static; for dW */
  const octile_tensor* dx;           /* out (M, K) */
  const octile_tensor* dw;           /* out (E * N, K) */
  const octile_tensor* db;           /* out (E, N) */
  uint64_t seed;                     /* of stochastic rounding: expert e has seed + e */
} octile_grouped_linear_backward_args;

OCTILE_API octile_status octile_grouped_linear_backward_plan_create(
    const octile_grouped_linear_backward_description* description, octile_plan** plan);
OCTILE_API octile_status octile_grouped_linear_backward_can_implement(const octile_plan* plan,
                                                                      const octile_grouped_linear_backward_args* args);
OCTILE_API octile_status octile_grouped_linear_backward_run(const octile_plan* plan,
                                                            const octile_grouped_linear_backward_args* args,
                                                            void* workspace, size_t workspace_size, void* stream);

/* ---- Attention of one query token per sequence over its cache, on the CPU ---- */

typedef struct {
  size_t struct_size;
  const octile_tensor* query; /* (batch, heads, size), F16, BF16 or F32; size at most 256 */
  const octile_tensor* key;   /* (batch, kv_heads, positions, size), dtype of query; kv_heads divides heads */
  const octile_tensor* value; /* the same */
  const octile_tensor* mask;  /* (batch or 1, positions), uint 8: 0 hides a position. Absent: all are visible */
  const octile_tensor* y;     /* out (batch, heads, size), dtype of query, compact */
  double scale;               /* of query . key, -2^127 to 2^127; usually 1 / sqrt(size) */
  int32_t threads;            /* maximum number of CPU threads; 0: all */
  int32_t reserved;           /* 0 */
} octile_attend_one_query_args;

/* y = sum_p w_p value_p / sum_p w_p with w_p = exp(scale * query . key_p), over the visible positions p, with f32 sums;
 * 0 if there are none. Query head h has the keys and values of head h / (heads / kv_heads). The last dimension of
 * query, key and value is contiguous; their other strides are free. y overlaps no other tensor. Hidden positions are
 * not read. The bits depend on the instruction set, but not on the threads or on the other sequences. Allocates at most
 * size + 2 floats, with size rounded up to 16, for each query head and every 128 positions or part of them, and 8 bytes
 * for each sequence and KV head. */
OCTILE_API octile_status octile_attend_one_query(const octile_attend_one_query_args* args);

/* ---- The kernel table ---- */

typedef struct {
  size_t struct_size;    /* set by the caller; fields beyond it are not written */
  const char* name;      /* <format>_<operation>_<arch>. The strings live as long as the library is loaded */
  const char* operation; /* what it computes, the same for all rows that may stand in for each other */
  const char* reason;    /* why it cannot run on this machine; "": it can */
  int32_t device_type;   /* OCTILE_DEVICE_... */
  int32_t reserved;      /* written 0 */
} octile_kernel;

OCTILE_API size_t octile_kernel_count(void);

/* Row `index` of the table, index < octile_kernel_count(). */
OCTILE_API octile_status octile_kernel_info(size_t index, octile_kernel* kernel);

#ifdef __cplusplus
}
#endif
