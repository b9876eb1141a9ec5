"""The reference interface: six kernels by name, and CustomLinearFunction.

Names and order of the arguments are fixed by that interface. The kernels write into the tensors that they are given. Tensors
are dense and row-major, with at least as many elements as the sizes say; block sizes and the options of
a Triton launch (num_warps, ...) are accepted and ignored. float16, bfloat16, float32 or float64; scales are
float32, for float64 float64. Each can be called directly, and launched under its Triton name:

    quantize_global(x, q, scale, rows, columns)
    _quantize_global_triton[(1,)](x, q, scale, rows, columns)

They raise TypeError or ValueError for a size or a tensor that does not fit its argument, RuntimeError for what the
library refuses. Nothing here waits for a GPU.
"""

import operator

import torch

from . import _c, _plans, functional


def _sizes(**given):
    """They may be of numpy or tensors of one element."""
    for name, size in given.items():
        if not hasattr(size, "__index__"):
            raise TypeError(f"octile: {name} is {size!r}, not a whole number")
        if operator.index(size) < 0:
            raise ValueError(f"octile: {name} is {size!r}, a size below 0")
    return [operator.index(size) for size in given.values()]


def _dense(name, t, *shape, dtype=None):
    """t as a dense tensor of this shape, at t's address."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"octile: {name} is a {type(t).__name__}, not a tensor")
    if t.device.type not in ("cpu", "cuda"):
        raise ValueError(f"octile: {name} is on {t.device}; a CPU or a CUDA GPU is needed")
    if t.is_neg():
        raise ValueError(
            f"octile: {name} is a negated view, whose memory has the other sign; resolve_neg() makes a copy"
        )
    if dtype is not None and t.dtype != dtype:
        raise TypeError(f"octile: {name} is {t.dtype}, not {dtype}")
    count, strides = 1, []
    for size in reversed(shape):
        strides.insert(0, count)
        count *= size
    if not t.is_contiguous() or t.numel() < count:
        kind = f"{tuple(t.shape)} with strides {t.stride()}"
        raise ValueError(f"octile: {name} is {kind}; dense row-major {tuple(shape)} is needed")
    return torch.as_strided(t.detach(), shape, strides)


def _run(kind, arguments, tensors, **description):
    device = next(iter(tensors.values())).device
    for name, t in tensors.items():
        if t is not None and t.device != device:
            raise ValueError(f"octile: {name} is on {t.device}, another tensor on {device}")
    views = {name: None if t is None else _plans.view(t) for name, t in tensors.items()}
    _plans.run(kind, _plans.plan(kind, device, **description), arguments, views, device)


def _float(name, t):
    if not t.is_floating_point() or t.dtype not in _plans.DTYPES:
        raise TypeError(f"octile: {name} is {t.dtype}, expected float16, bfloat16, float32 or float64")
    return _plans.DTYPES[t.dtype]


def _scale_type(t):
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def _quantize(fp, q, scale, rows, columns, granularity):
    rows, columns = _sizes(N_ROWS=rows, N_COLS=columns)
    x = _dense("fp_ptr", fp, rows, columns)
    length = 1 if granularity == _c.PER_TENSOR else rows
    tensors = {
        "x": x,
        "q": _dense("q_ptr", q, rows, columns, dtype=torch.int8),
        "scale": _dense("the scale", scale, length, dtype=_scale_type(x)),
    }
    if x.numel() == 0:
        tensors["scale"].fill_(1e-8)  # as of zeros; the library writes nothing then
    description = {"rows": rows, "cols": columns, "x": _float("fp_ptr", x), "granularity": granularity}
    _run("quantize", _c.QuantizeArguments, tensors, **description)


def quantize_global(fp_ptr, q_ptr, scale_out_ptr, N_ROWS, N_COLS, **launch):
    """q = clamp(rint(fp / s), -127, 127), s = max(max|fp| / 127, 1e-8). fp, q (N_ROWS, N_COLS), scale_out (1)."""
    _quantize(fp_ptr, q_ptr, scale_out_ptr, N_ROWS, N_COLS, _c.PER_TENSOR)


def quantize_rowwise(fp_ptr, q_ptr, scale_row_ptr, N_ROWS, N_COLS, **launch):
    """quantize_global of every row by itself: scale_row (N_ROWS)."""
    _quantize(fp_ptr, q_ptr, scale_row_ptr, N_ROWS, N_COLS, _c.PER_ROW)


def _weight_scale(w_scale, out, per_channel, dtype):
    format = _c.S8_PER_CHANNEL if per_channel else _c.S8_PER_TENSOR
    return _dense("w_scale_ptr", w_scale, out if per_channel else 1, dtype=dtype), format


def forward(
    x_q_ptr,
    x_scale_ptr,
    w_q_ptr,
    w_scale_ptr,
    b_ptr,
    y_ptr,
    B,
    IN,
    OUT,
    BLOCK_M=0,
    BLOCK_N=0,
    BLOCK_K=0,
    PER_CHANNEL=1,
    **launch,
):
    """y = (x_q @ w_q) * (x_scale * w_scale) + b, in y's type, rounded once.

    x_q (B, IN), w_q (IN, OUT) int8; x_scale (1); w_scale (OUT), or (1) where PER_CHANNEL is 0; b (OUT) in y's type,
    None or 0 for no bias; y (B, OUT).
    """
    B, IN, OUT = _sizes(B=B, IN=IN, OUT=OUT)
    y = _dense("y_ptr", y_ptr, B, OUT)
    w_scale, format = _weight_scale(w_scale_ptr, OUT, PER_CHANNEL, _scale_type(y))
    absent = b_ptr is None or (isinstance(b_ptr, int) and b_ptr == 0)
    tensors = {
        "x": _dense("x_q_ptr", x_q_ptr, B, IN, dtype=torch.int8),
        "x_scale": _dense("x_scale_ptr", x_scale_ptr, 1, dtype=_scale_type(y)),
        "weight": _dense("w_q_ptr", w_q_ptr, IN, OUT, dtype=torch.int8),
        "weight_scale": w_scale,
        "bias": None if absent else _dense("b_ptr", b_ptr, OUT, dtype=y.dtype),
        "y": y,
    }
    description = {"m": B, "n": OUT, "k": IN, "x": _c.S8, "y": _float("y_ptr", y), "bias": int(not absent)}
    description |= {"activation": _c.DYNAMIC_PER_TENSOR, "weight": format, "weight_layout": _c.IN_OUT}
    _run("linear", _c.RunArguments, tensors, **description)


def _backward(dy, sizes, tensors, **description):
    b, inputs, out = sizes
    description = {"m": b, "n": out, "k": inputs, "dy": _float("dy_ptr", dy), "weight_layout": _c.IN_OUT} | description
    products = {"dx": _c.NO_PRODUCT, "dw": _c.NO_PRODUCT, "db": 0} | description
    _run("linear_backward", _c.BackwardArguments, {"dy": dy} | tensors, **products)


def backward_dx(
    dy_ptr, w_q_ptr, w_scale_ptr, dx_ptr, B, IN, OUT, BLOCK_M=0, BLOCK_N=0, BLOCK_K=0, PER_CHANNEL=1, **launch
):
    """dx = dy @ (w_q * w_scale)^T. dy (B, OUT), w_q (IN, OUT) int8, w_scale (OUT) or (1), dx (B, IN) in dy's type."""
    B, IN, OUT = _sizes(B=B, IN=IN, OUT=OUT)
    dy = _dense("dy_ptr", dy_ptr, B, OUT)
    w_scale, format = _weight_scale(w_scale_ptr, OUT, PER_CHANNEL, _scale_type(dy))
    tensors = {
        "weight": _dense("w_q_ptr", w_q_ptr, IN, OUT, dtype=torch.int8),
        "weight_scale": w_scale,
        "dx": _dense("dx_ptr", dx_ptr, B, IN, dtype=dy.dtype),
    }
    _backward(dy, (B, IN, OUT), tensors, dx=_c.DEQUANTIZED, weight=format)


def backward_dw(x_q_ptr, x_scale_ptr, dy_ptr, dw_ptr, B, IN, OUT, BLOCK_M=0, BLOCK_N=0, BLOCK_K=0, **launch):
    """dw = (x_q * x_scale)^T @ dy. x_q (B, IN) int8, x_scale (1), dy (B, OUT), dw (IN, OUT) in dy's type or float32."""
    B, IN, OUT = _sizes(B=B, IN=IN, OUT=OUT)
    dy = _dense("dy_ptr", dy_ptr, B, OUT)
    dw = _dense("dw_ptr", dw_ptr, IN, OUT)
    tensors = {
        "x": _dense("x_q_ptr", x_q_ptr, B, IN, dtype=torch.int8),
        "x_scale": _dense("x_scale_ptr", x_scale_ptr, 1, dtype=_scale_type(dy)),
        "dw": dw,
    }
    description = {"dw_dtype": _float("dw_ptr", dw), "activation": _c.DYNAMIC_PER_TENSOR}
    _backward(dy, (B, IN, OUT), tensors, dw=_c.DEQUANTIZED, **description)


def backward_db(dy_ptr, db_ptr, B, OUT, BLOCK_N=0, BLOCK_M=0, **launch):
    """db = dy summed over its rows, in float32 until the end. dy (B, OUT), db (OUT) in dy's type."""
    B, OUT = _sizes(B=B, OUT=OUT)
    dy = _dense("dy_ptr", dy_ptr, B, OUT)
    _backward(dy, (B, 0, OUT), {"db": _dense("db_ptr", db_ptr, OUT, dtype=dy.dtype)}, db=1)


class _Launch:
    """A kernel in Triton's launch form: kernel[grid](...). The grid does not matter."""

    def __init__(self, function):
        self.function = function
        self.__doc__ = function.__doc__

    def __getitem__(self, grid):
        return self.function

    def __call__(self, *arguments, **keywords):
        raise TypeError(f"octile: launch it as kernel[grid](...), or call octile.compat.{self.function.__name__}")


_quantize_global_triton = _Launch(quantize_global)
_quantize_rowwise_triton = _Launch(quantize_rowwise)
_forward_triton = _Launch(forward)
_backward_dx_triton = _Launch(backward_dx)
_backward_dw_triton = _Launch(backward_dw)
_backward_db_triton = _Launch(backward_db)


# Functions of their own, since torch.compile takes a call of some Function.backward for something of its own.


def _function_forward(ctx, x, w, b, per_channel):
    need_x, need_w = _needed(ctx)[:2]
    o = functional.options("in_out", per_channel, "per_tensor", "16bit", "nearest")
    w_q, _, w_scale = functional.quantize_weight(w.detach(), o, False)
    y, x_q, _, x_scale = functional._quantize_and_multiply(
        x.detach(), w_q, w_scale, b, o.activation, _c.ROW_MAJOR, x.dtype
    )
    x_saved = (x_q, x_scale) if need_w else (None, None)
    w_saved = (w_q.t(), w_scale) if need_x else (None, None)
    ctx.save_for_backward(*x_saved, *w_saved, b)
    ctx.shape, ctx.per_channel, ctx.w_dtype = x.shape, per_channel, w.dtype
    return y


def _function_backward(ctx, dy):
    need_x, need_w, need_b = _needed(ctx)[:3]
    x_q, x_scale, w_q, w_scale, b = ctx.saved_tensors
    need_b = need_b and b is not None
    of_w = (w_q.t(), w_scale) if need_x else (None, None)
    of_x = (x_q, x_scale) if need_w else (None, None)
    products = _c.DEQUANTIZED if need_x else _c.NO_PRODUCT, _c.DEQUANTIZED if need_w else _c.NO_PRODUCT
    layouts = _c.OUT_IN, False, functional._dw_dtype(dy.dtype, ctx.w_dtype), _c.IN_OUT
    dx, dw, db = functional._linear_backward(functional._rows(dy), *of_w, *of_x, *products, need_b, *layouts)
    dx = dx.view(ctx.shape) if need_x else None
    return dx, dw.to(ctx.w_dtype) if need_w else None, db if need_b else None, None


def _needed(ctx):
    """needs_input_grad; everything for a context that has none, such as a test's own."""
    return getattr(ctx, "needs_input_grad", (True, True, True, False))


class _Positional(torch.autograd.Function):
    """CustomLinearFunction for PyTorch's own apply, which takes no keywords, and for torch.compile."""

    @staticmethod
    def forward(ctx, x, w, b, per_channel):
        return _function_forward(ctx, x, w, b, per_channel)

    @staticmethod
    @functional.once_differentiable
    def backward(ctx, dy):
        return _function_backward(ctx, dy)


class CustomLinearFunction(torch.autograd.Function):
    """y = x @ w + b as the reference interface defines it: int8 forward, 16-bit backward, x quantized per tensor.

    x (B, IN) or with more leading dimensions, w (IN, OUT), b (OUT) or None; float16, bfloat16, float32 or float64.
    Returns (B, OUT) in x's type.
    """

    @classmethod
    def apply(cls, x_fp16, w_fp16, b_fp16=None, *, per_channel=True):
        """torch.autograd.Function.apply, which also takes per_channel as a keyword.

        With the keyword it breaks torch.compile's graph (an error with fullgraph=True): there
        octile.linear(x, w, b, layout="in_out", activation="per_tensor") is the same function.
        """
        if cls is not CustomLinearFunction:
            raise TypeError(
                f"octile: {cls.__name__}.apply would run CustomLinearFunction; derive from Function instead"
            )
        functional.refuse_transforms(x_fp16, w_fp16, b_fp16)
        return _Positional.apply(x_fp16, w_fp16, b_fp16, bool(per_channel))

    @staticmethod
    def forward(ctx, x_fp16, w_fp16, b_fp16=None, *, per_channel=True):
        """Saves (x_q, x_scale, w_q, w_scale, b), None for what no gradient needs; w_q is a view (IN, OUT)."""
        return _function_forward(ctx, x_fp16, w_fp16, b_fp16, per_channel)

    @staticmethod
    def backward(ctx, dy):
        """(dx, dw, db, None), with None for gradients that are not needed."""
        return _function_backward(ctx, dy)
