"""The ops torch.ops.octile.*: their schemas, their shapes (fake kernels), and which implementation is behind them.

    quantize         x (R, C) float -> q (R, C), q_transposed (C, R), scale (1), (R) or (C): its own or given; of a
                     prologue of x, if one is asked for, or of that times up (R, C)
    norm_quantize    quantize, with a scale for each row, of a norm of x or of x + residual: (q, q_transposed, scale, sum (R, C),
                     mean (R), rstd (R)); what was not asked for, and an rms_norm's mean, is empty
    dequantize       weight (N, columns) as floats, int8 or of 4 bits a value
    linear           y = x * dequantize(weight)^T + bias, x (..., K) float, quantized inside
    linear_int8      the same for x (M, K) that is quantized already
    linear_s4        the same for a weight of 4 bits a value, x quantized inside or not at all
    linear_packed    linear or linear_s4 with the weight and its scales packed (docs/reference/packed-weights.md)
    linear_backward  dX, dW, dB, any subset
    grouped_linear   linear, linear_int8, linear_s4 or linear_packed of each expert's rows (octile/grouped_linear.h);
                     rows that are no expert's are zeros
    grouped_linear_backward  linear_backward of each expert's rows; the same
    attend_one_query attention of one query token per sequence: query (batch, heads, 1, size), key and value
                     (batch, heads / groups, positions, size), mask (batch or 1, 1, 1, positions) bool, scale
                     1 / sqrt(size) unless given -> (batch, 1, heads, size); zeros for a sequence with no visible
                     position. On a GPU: one_query_triton.py

Choices are integers: the constants of octile.h, here under their names of _c.py. The ops are functional: outputs never
alias inputs, nothing is mutated. They know nothing of autograd, and never wait for a GPU. An invalid call is a
RuntimeError with the text of the library.

_octile_torch.so implements them. BINDING says how it meets torch: "stable" (over torch's stable C interface), or
"ctypes" (_ctypes_ops.py) where that cannot be; BINDING_REASON says why it cannot. OCTILE_TORCH_BINDING forces one of the
two.
"""

import ctypes
import functools
import os

import torch

from . import _c, _ctypes_ops, _plans

_SCHEMAS = {
    "quantize": "(Tensor x, int granularity, int orientation, Tensor? given_scale=None, int prologue=0, Tensor? up=None) "
    "-> (Tensor, Tensor, Tensor)",
    "norm_quantize": "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int prologue, int orientation, "
    "float epsilon) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "dequantize": "(Tensor weight, Tensor weight_scale, Tensor? weight_zero_point, int columns, ScalarType dtype) -> Tensor",
    "linear": "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int activation, int weight_layout, "
    "Tensor? x_multiplier=None, float static_scale=0.0) -> Tensor",
    "linear_int8": "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, int weight_layout, "
    "ScalarType dtype) -> Tensor",
    "linear_s4": "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? weight_zero_point, Tensor? bias, "
    "int activation=0) -> Tensor",
    "linear_packed": "(Tensor x, Tensor weight, Tensor? bias, int out_features, int activation, int weight_format, "
    "int group, bool zero_point, Tensor? x_multiplier, float static_scale) -> Tensor",
    "linear_backward": "(Tensor dy, Tensor? weight, Tensor? weight_scale, Tensor? x, Tensor? x_scale, int dx, int dw, "
    "bool db, int weight_layout, bool x_transposed, ScalarType dw_dtype, int dw_layout, int rounding=0, SymInt seed=0, "
    "int gradient_block=0) -> (Tensor, Tensor, Tensor)",
    "grouped_linear": "(Tensor x, Tensor? x_scale, Tensor offsets, Tensor? token, Tensor weight, Tensor? weight_scale, "
    "Tensor? weight_zero_point, Tensor? bias, Tensor? place, Tensor? router_weight, int out_features, int activation, "
    "int weight_format, int group, bool zero_point, ScalarType dtype) -> Tensor",
    "grouped_linear_backward": "(Tensor dy, Tensor offsets, Tensor? weight, Tensor? weight_scale, Tensor? x, "
    "Tensor? x_scale, int dx, int dw, bool db, ScalarType dw_dtype, int rounding=0, SymInt seed=0, int gradient_block=0) "
    "-> (Tensor, Tensor, Tensor)",
    "attend_one_query": "(Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale) -> Tensor",
}
_ON_CPUS = {"attend_one_query"}  # in _octile_torch.so


def _row_stride(columns):
    """Of q: the next multiple of 16, which TMA needs."""
    return (columns + 15) // 16 * 16


def _transposed_row_stride(columns):
    """Of q_transposed, whose rows are as long as a batch: a multiple of 16 that is never `columns` itself.

    A compiler asks of every tensor whether it is dense. Here the answer is no for each batch size, and the compiler can
    prove it (the two differ by at least 128), so one compiled graph serves all of them. Where `columns` is a multiple
    of 128, which a GPU reads fastest, so is this.
    """
    return columns + (128 + -columns % 16)


def _fake_quantize(x, granularity, orientation, given_scale=None, prologue=0, up=None):
    rows, columns = x.shape
    if up is not None and (prologue == 0 or up.shape != x.shape or up.dtype != x.dtype):
        raise RuntimeError(f"octile: up is {tuple(up.shape)} of {up.dtype}, x {tuple(x.shape)} of {x.dtype}")
    if prologue != 0 and (granularity != _c.PER_ROW or given_scale is not None or x.dtype == torch.float64):
        raise RuntimeError("octile: a prologue needs dynamic scales of rows, and x in f16, bf16 or f32")

    def make(present, rows, columns, stride):
        if not present:
            return x.new_empty((0, 0), dtype=torch.int8)
        return x.new_empty_strided((rows, columns), (stride, 1), dtype=torch.int8)

    q = make(orientation != _c.TRANSPOSED, rows, columns, _row_stride(columns))
    q_transposed = make(orientation != _c.ROW_MAJOR, columns, rows, _transposed_row_stride(rows))
    length = 1 if granularity == _c.PER_TENSOR else rows if granularity == _c.PER_ROW else columns
    scale = x.new_empty((length,), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return q, q_transposed, scale


def _fake_norm_quantize(x, weight, bias, residual, prologue, orientation, epsilon):
    rows, columns = x.shape
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise RuntimeError(
            f"octile: residual is {tuple(residual.shape)} of {residual.dtype}, x {tuple(x.shape)} of {x.dtype}"
        )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and (t.shape != (columns,) or t.dtype not in (torch.float32, x.dtype)):
            raise RuntimeError(f"octile: {name} is {tuple(t.shape)} of {t.dtype}, x {tuple(x.shape)} of {x.dtype}")
    vectors = (x.new_empty((n,), dtype=torch.float32) for n in (rows if prologue == _c.LAYER_NORM else 0, rows))
    total = x.new_empty((0, 0) if residual is None else (rows, columns))
    return *_fake_quantize(x, _c.PER_ROW, orientation), total, *vectors


def _fake_dequantize(weight, weight_scale, weight_zero_point, columns, dtype):
    return weight.new_empty((weight.shape[0], columns), dtype=dtype)


def _outputs(x, weight, weight_layout):
    """N of a weight that fits x."""
    n, k = weight.shape[::-1] if weight_layout == _c.IN_OUT else weight.shape
    if x.shape[-1] != k:
        raise RuntimeError(f"octile: x is {tuple(x.shape)}; weight {tuple(weight.shape)} multiplies (..., {k})")
    return n


def _fake_linear(x, weight, weight_scale, bias, activation, weight_layout, x_multiplier=None, static_scale=0.0):
    n = _outputs(x, weight, weight_layout)
    return x.new_empty((*x.shape[:-1], n))


def _fake_linear_int8(x, x_scale, weight, weight_scale, bias, weight_layout, dtype):
    n = _outputs(x, weight, weight_layout)
    return x.new_empty((x.shape[0], n), dtype=dtype)


def _fake_linear_s4(x, weight, weight_scale, weight_zero_point, bias, activation=_c.NONE):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_linear_packed(
    x, weight, bias, out_features, activation, weight_format, group, zero_point, x_multiplier, static_scale
):
    return x.new_empty((*x.shape[:-1], out_features))


def _fake_linear_backward(dy, weight, weight_scale, x, x_scale, dx, dw, db, *choices):
    weight_layout, x_transposed, dw_dtype, dw_layout = choices[:4]
    m, n = dy.shape
    k = 0
    if dx:
        k = weight.shape[0 if weight_layout == _c.IN_OUT else 1]
    elif dw:
        k = x.shape[0 if x_transposed else 1]
    dw_shape = (k, n) if dw_layout == _c.IN_OUT else (n, k)
    return (
        dy.new_empty((m, k) if dx else (0,)),
        dy.new_empty(dw_shape if dw else (0,), dtype=dw_dtype),
        dy.new_empty((n,) if db else (0,)),
    )


def _fake_grouped_linear(x, x_scale, offsets, token, weight, weight_scale, weight_zero_point, bias, place, *choices):
    router_weight, out_features, activation, weight_format, group, zero_point, dtype = choices
    rows = place if place is not None else token if token is not None else x
    return x.new_empty((rows.shape[0], out_features), dtype=dtype)


def _fake_grouped_linear_backward(dy, offsets, weight, weight_scale, x, x_scale, dx, dw, db, dw_dtype, *choices):
    (m, n), experts = dy.shape, offsets.shape[0] - 1
    k = weight.shape[1] if dx else x.shape[1] if dw else 0
    return (
        dy.new_empty((m, k) if dx else (0,)),
        dy.new_empty((experts * n, k) if dw else (0,), dtype=dw_dtype),
        dy.new_empty((experts, n) if db else (0,)),
    )


def _fake_attend_one_query(query, key, value, mask, scale):
    batch, heads, _, size = query.shape
    return query.new_empty((batch, 1, heads, size))


def _on_one_device(fake):
    """Torch calls the fake kernel for one tensor on meta among others too: its outputs are never written."""

    @functools.wraps(fake)
    def checked(*arguments, **more):
        devices = [a.device for a in (*arguments, *more.values()) if isinstance(a, torch.Tensor)]
        if any(device != devices[0] for device in devices):
            named = ", ".join(dict.fromkeys(map(str, devices)))
            raise RuntimeError(f"octile::{fake.__name__[6:]}: all tensors must be on one device; here are {named}")
        return fake(*arguments, **more)

    return checked


_BINARY = "_octile_torch.so"
_binary = None


def _wanted():
    wanted = os.environ.get("OCTILE_TORCH_BINDING", "")
    if wanted not in ("", "stable", "ctypes"):
        raise ImportError(f"octile: OCTILE_TORCH_BINDING is {wanted!r}, expected stable or ctypes")
    return wanted


# What can refuse comes first: torch takes the namespace once, and an import may be tried again.
_asked = _wanted()
_plans.library()

# Keeps the registrations alive.
_library = torch.library.Library("octile", "DEF")


def _define():
    # A compiler passes the strides that eager code would: the ops read what they are given, or copy it.
    tags = [torch.Tag.pt2_compliant_tag]
    tags.append(getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
    for name, schema in _SCHEMAS.items():
        _library.define(name + schema, tags=tags)
        torch.library.register_fake(f"octile::{name}", _on_one_device(globals()[f"_fake_{name}"]), lib=_library)


def _bind():
    """The binding, and why it is not the stable one."""
    global _binary
    path, folders = _c.beside(_BINARY)
    if path is None:
        searched = " or ".join(dict.fromkeys(map(str, folders)))
        return _refuse(f"there is no {_BINARY} in {searched}: build it (CMake's target octile_torch)")
    try:
        # Needs the library that _plans has loaded, by its name.
        _binary = ctypes.CDLL(str(path.resolve()))
        register = _binary.octile_torch_register
    except (OSError, AttributeError) as error:
        return _refuse(f"{path} cannot be loaded: {error}")
    register.restype = ctypes.c_char_p
    reason = "OCTILE_TORCH_BINDING is ctypes" if _asked == "ctypes" else (register() or b"").decode()
    if reason and _asked == "stable":
        return _refuse(f"OCTILE_TORCH_BINDING is stable, but {reason}")
    if reason:
        for name, function in _ctypes_ops.implementations(_binary, _SCHEMAS).items():
            for key in ("CPU",) if name in _ON_CPUS else ("CPU", "CUDA"):
                _library.impl(name, function, key)
    return ("ctypes" if reason else "stable"), reason


def _refuse(reason):
    _library._destroy()
    raise ImportError(f"octile: {reason}; {_c.SEE_IMPORT}")


def plan_counts():
    """How many plans the binding holds, and how many it has made."""
    held, made = ctypes.c_size_t(), ctypes.c_size_t()
    _binary.octile_torch_plan_counts(ctypes.byref(held), ctypes.byref(made))
    return held.value, made.value


_define()
BINDING, BINDING_REASON = _bind()
