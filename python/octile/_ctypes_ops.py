"""The ops of _ops.py over the C interface in ctypes: the implementation where _octile_torch.so cannot be used.

Every function here takes and returns what its op does, on the CPU and on CUDA. The C++ in python/csrc does the same.
"""

import functools
import math

import torch

from . import _c
from ._plans import DTYPES, plan, run, view, view_of_levels


def _fail(message):
    raise _c.Error(message)


def _op(function):
    """Names the op in its errors."""

    @functools.wraps(function)
    def named(*arguments):
        try:
            return function(*arguments)
        except _c.Error as error:
            raise RuntimeError(f"octile::{function.__name__}: {error}") from None

    return named


def _dtype(name, of):
    try:
        return DTYPES[of]
    except KeyError:
        _fail(f"{name} is {of}, which no plan takes")


def _readable(t):
    """t (R, C), or a copy of it whose rows a plan can read. Rows may lie apart, or all be the same one."""
    rows, columns = t.shape
    row, column = t.stride()
    if (column == 1 or columns <= 1) and (row >= columns or row == 0 or rows <= 1):
        return t
    return t.contiguous()


def _vector(name, t):
    """t of one dimension, or None. A number counts as one element."""
    if t is None:
        return None
    if t.dim() > 1:
        _fail(f"{name} has {t.dim()} dimensions, expected 1")
    return t.reshape(1) if t.dim() == 0 else t


def _matrix(name, t):
    if t.dim() != 2:
        _fail(f"{name} has {t.dim()} dimensions, expected 2")
    return _readable(t)


def _rows(t):
    """t (..., K) as (M, K)."""
    if t.dim() == 2:
        return _readable(t)
    if t.dim() > 64:
        _fail(f"x has {t.dim()} dimensions, 64 is the maximum")
    if t.dim() == 0:
        _fail("x has no dimensions")
    return _readable(t.reshape(math.prod(t.shape[:-1]), t.shape[-1]))


def row_stride(columns):
    """Of q: the next multiple of 16, which TMA needs."""
    return (columns + 15) // 16 * 16


def transposed_row_stride(columns):
    """Of q_transposed, whose rows are as long as a batch: a multiple of 16 that is never `columns` itself.

    A compiler asks of every tensor whether it is dense. Here the answer is no for each batch size, and the compiler can
    prove it (the two differ by at least 128), so one compiled graph serves all of them. Where `columns` is a multiple
    of 128, which a GPU reads fastest, so is this.
    """
    return columns + (128 + -columns % 16)


def _padded(rows, columns, stride, device):
    return torch.empty_strided((rows, columns), (stride, 1), dtype=torch.int8, device=device)


@_op
def quantize(x, granularity, orientation, given_scale=None):
    x, given_scale = _matrix("x", x), _vector("given_scale", given_scale)
    rows, columns = x.shape
    scales = {_c.PER_TENSOR: 1, _c.PER_ROW: rows, _c.PER_COLUMN: columns}
    if granularity not in scales:
        _fail(f"granularity is {granularity}; 0 (tensor), 1 (row) and 2 (column) are known")
    if orientation not in (_c.ROW_MAJOR, _c.TRANSPOSED, _c.BOTH):
        _fail(f"orientation is {orientation}; 0 (row-major), 1 (transposed) and 2 (both) are known")
    fields = {"rows": rows, "cols": columns, "x": _dtype("x", x.dtype)}
    if given_scale is not None:
        fields["scale"] = _c.GIVEN
    chosen = plan("quantize", x.device, **fields, granularity=granularity, orientation=orientation)
    nothing = torch.empty((0, 0), dtype=torch.int8, device=x.device)
    q = _padded(rows, columns, row_stride(columns), x.device) if orientation != _c.TRANSPOSED else nothing
    q_transposed = (
        _padded(columns, rows, transposed_row_stride(rows), x.device)
        if orientation != _c.ROW_MAJOR
        else nothing.clone()
    )
    scale_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = torch.empty(scales[granularity], dtype=scale_dtype, device=x.device)
    if x.numel() == 0:
        scale.fill_(1e-8)  # as of zeros; the library writes nothing then
    views = {
        "x": view(x),
        "given_scale": None if given_scale is None else view(given_scale),
        "q": view(q) if orientation != _c.TRANSPOSED else None,
        "q_transposed": view(q_transposed) if orientation != _c.ROW_MAJOR else None,
        "scale": view(scale),
    }
    run("quantize", chosen, _c.QuantizeArguments, views, x.device)
    return q, q_transposed, scale


def _granularity(weight_scale):
    return _c.S8_PER_TENSOR if weight_scale.numel() == 1 else _c.S8_PER_CHANNEL


def _group(weight_scale, k):
    """How many neighbours along K share a scale of (N, groups); 0: all of them."""
    groups = weight_scale.shape[1]
    if groups < 1 or k % groups:
        _fail(f"weight_scale has {groups} columns, which do not divide {k}")
    return k // groups if groups > 1 else 0


@_op
def dequantize(weight, weight_scale, weight_zero_point, columns, dtype):
    weight = _matrix("weight", weight)
    s4, stored = weight.dtype == torch.uint8, columns // 2 + columns % 2
    if not s4 and weight.dtype != torch.int8 or weight.shape[1] != (stored if s4 else columns):
        found = f"{weight.shape[1]} columns of {weight.dtype}"
        _fail(f"weight has {found}, expected {columns} of torch.int8 or {stored} of torch.uint8")
    rows, grouped = weight.shape[0], weight_scale.dim() == 2 and columns > 0
    fields = {"rows": rows, "cols": columns, "x": _dtype("dtype", dtype), "q": _c.S4 if s4 else _c.S8}
    fields["mapping"] = _c.SYMMETRIC if weight_zero_point is None else _c.AFFINE
    if grouped:
        weight_scale = _readable(weight_scale)
        weight_zero_point = None if weight_zero_point is None else _matrix("weight_zero_point", weight_zero_point)
        fields |= {"granularity": _c.PER_GROUP, "group": _group(weight_scale, columns) or columns}
    elif columns:
        weight_scale = _vector("weight_scale", weight_scale)
        weight_zero_point = _vector("weight_zero_point", weight_zero_point)
        fields["granularity"] = _c.PER_TENSOR if weight_scale.numel() == 1 else _c.PER_ROW
    chosen = plan("dequantize", weight.device, **fields)
    x = torch.empty((rows, columns), dtype=dtype, device=weight.device)
    if x.numel():
        views = {"q": view_of_levels(weight, columns), "scale": view(weight_scale), "x": view(x)}
        views["zero_point"] = None if weight_zero_point is None else view(weight_zero_point)
        run("dequantize", chosen, _c.DequantizeArguments, views, weight.device)
    return x


def _s8_weight(weight, weight_scale, weight_layout, k):
    """The two as a plan reads them, and the fields that describe them. weight_scale: (N), (1) or (N, K / group)."""
    weight = _matrix("weight", weight)
    if weight_scale.dim() == 2:
        weight_scale = _readable(weight_scale)
        fields = {"weight": _c.S8_GROUP, "group": _group(weight_scale, k)}
    else:
        weight_scale = _vector("weight_scale", weight_scale)
        fields = {"weight": _granularity(weight_scale)}
    fields |= {"weight_layout": weight_layout, "n": weight.shape[1 if weight_layout == _c.IN_OUT else 0]}
    return weight, weight_scale, fields


def _run_linear(x, rows, tensors, dtype, **fields):
    """y (..., N) in `dtype`. rows: x as a matrix; tensors: the other arguments by name, None where absent."""
    m, k = rows.shape
    present = {name: int(tensors.get(name) is not None) for name in ("bias", "x_multiplier")}
    chosen = plan("linear", x.device, m=m, k=k, x=_dtype("x", x.dtype), y=_dtype("dtype", dtype), **present, **fields)
    y = torch.empty((*x.shape[:-1], fields["n"]), dtype=dtype, device=x.device)
    views = {name: None if t is None else view(t) for name, t in tensors.items()}
    if fields["weight"] == _c.S4_GROUP and not fields.get("packed_weight"):
        views["weight"] = view_of_levels(tensors["weight"], k)
    views |= {"x": view(rows), "y": view(y.view(m, fields["n"]))}
    run("linear", chosen, _c.RunArguments, views, x.device)
    return y


@_op
def linear(x, weight, weight_scale, bias, activation, weight_layout, x_multiplier=None, static_scale=0.0):
    rows = _rows(x)
    weight, weight_scale, fields = _s8_weight(weight, weight_scale, weight_layout, rows.shape[1])
    tensors = {"weight": weight, "weight_scale": weight_scale, "bias": _vector("bias", bias)}
    tensors["x_multiplier"] = _vector("x_multiplier", x_multiplier)
    return _run_linear(x, rows, tensors, x.dtype, activation=activation, static_scale=static_scale, **fields)


@_op
def linear_int8(x, x_scale, weight, weight_scale, bias, weight_layout, dtype):
    x, x_scale = _matrix("x", x), _vector("x_scale", x_scale)
    weight, weight_scale, fields = _s8_weight(weight, weight_scale, weight_layout, x.shape[1])
    tensors = {"weight": weight, "weight_scale": weight_scale, "bias": _vector("bias", bias), "x_scale": x_scale}
    if x.dtype != torch.int8:
        _fail(f"x is of {x.dtype}, expected torch.int8")
    activation = _c.DYNAMIC_PER_TENSOR if x_scale.numel() == 1 else _c.DYNAMIC_PER_TOKEN
    return _run_linear(x, x, tensors, dtype, activation=activation, **fields)


@_op
def linear_s4(x, weight, weight_scale, weight_zero_point, bias, activation=_c.NONE):
    rows, weight = _rows(x), _matrix("weight", weight)
    tensors = {"weight": weight, "weight_scale": _matrix("weight_scale", weight_scale), "bias": _vector("bias", bias)}
    k = rows.shape[1]
    if weight.dtype != torch.uint8 or weight.shape[1] != (k + 1) // 2:
        _fail(f"weight has {weight.shape[1]} columns of {weight.dtype}, expected {(k + 1) // 2} of torch.uint8")
    fields = {"n": weight.shape[0], "activation": activation, "weight": _c.S4_GROUP, "group": _group(weight_scale, k)}
    if weight_zero_point is not None:
        tensors["weight_zero_point"] = _matrix("weight_zero_point", weight_zero_point)
        fields["weight_zero_point"] = 1
    return _run_linear(x, rows, tensors, x.dtype, **fields)


@_op
def linear_packed(
    x, weight, bias, out_features, activation, weight_format, group, zero_point, x_multiplier, static_scale
):
    rows = _rows(x)
    tensors = {"weight": _vector("weight", weight), "bias": _vector("bias", bias)}
    tensors["x_multiplier"] = _vector("x_multiplier", x_multiplier)
    fields = {"n": out_features, "activation": activation, "weight": weight_format, "group": group}
    fields |= {"weight_zero_point": int(zero_point), "static_scale": static_scale, "packed_weight": 1}
    return _run_linear(x, rows, tensors, x.dtype, **fields)


@_op
def linear_backward(dy, weight, weight_scale, x, x_scale, dx, dw, db, *choices):
    weight_layout, x_transposed, dw_dtype, dw_layout, *defaulted = choices
    dy = _matrix("dy", dy)
    m, n = dy.shape
    k = 0
    if dx:
        if weight is None or weight_scale is None:
            _fail("dx needs weight and weight_scale")
        weight, weight_scale = _matrix("weight", weight), _vector("weight_scale", weight_scale)
        k = weight.shape[0 if weight_layout == _c.IN_OUT else 1]
    if dw_layout not in (_c.OUT_IN, _c.IN_OUT):
        _fail(f"dw_layout is {dw_layout}; 0 (N, K) and 1 (K, N) are known")
    if dw:
        if x is None or x_scale is None:
            _fail("dw needs x and x_scale")
        x, x_scale = _matrix("x", x), _vector("x_scale", x_scale)
        k = x.shape[0 if x_transposed else 1]
    fields = {"m": m, "n": n, "k": k, "dy": _dtype("dy", dy.dtype), "dx": dx, "dw": dw, "db": int(db)}
    rounding, seed, gradient_block = (*defaulted, 0, 0, 0)[:3]  # torch leaves out defaults
    fields |= {"rounding": rounding, "gradient_block": gradient_block}
    fields |= {"weight_layout": weight_layout, "x_transposed": int(x_transposed)}
    if dx:
        fields["weight"] = _granularity(weight_scale)
    if dw:
        fields |= {"dw_dtype": _dtype("dw_dtype", dw_dtype), "dw_layout": dw_layout}
        fields["activation"] = _c.DYNAMIC_PER_TENSOR if x_scale.numel() == 1 else _c.DYNAMIC_PER_TOKEN
    chosen = plan("backward", dy.device, **fields)
    dx_out = torch.empty((m, k) if dx else (0,), dtype=dy.dtype, device=dy.device)
    dw_shape = (k, n) if dw_layout == _c.IN_OUT else (n, k)
    dw_out = torch.empty(dw_shape if dw else (0,), dtype=dw_dtype, device=dy.device)
    db_out = torch.empty((n,) if db else (0,), dtype=dy.dtype, device=dy.device)
    views = {"dy": view(dy)}
    if dx:
        views |= {"weight": view(weight), "weight_scale": view(weight_scale), "dx": view(dx_out)}
    if dw:
        views |= {"x": view(x), "x_scale": view(x_scale), "dw": view(dw_out)}
    if db:
        views["db"] = view(db_out)
    run("linear_backward", chosen, _c.BackwardArguments, views, dy.device, seed)
    return dx_out, dw_out, db_out


def _clear_rows_of_nobody(offsets, t):
    if t.is_cuda:  # the host does not know which they are
        return
    t[: int(offsets[0])] = 0
    t[int(offsets[-1]) :] = 0


@_op
def grouped_linear(x, x_scale, offsets, token, weight, weight_scale, weight_zero_point, bias, place, *choices):
    router_weight, out_features, activation, weight_format, group, zero_point, dtype = choices
    x, packed = _matrix("x", x), weight.dim() < 2
    tensors = {"x": x, "weight": _vector("weight", weight) if packed else _matrix("weight", weight)}
    for name, t in (("x_scale", x_scale), ("offsets", offsets), ("token", token)):
        tensors[name] = _vector(name, t)
    matrices = {"weight_zero_point": weight_zero_point, "bias": bias, "place": place, "router_weight": router_weight}
    tensors |= {name: None if t is None else _matrix(name, t) for name, t in matrices.items()}
    grouped = weight_scale is not None and weight_scale.dim() == 2
    tensors["weight_scale"] = _readable(weight_scale) if grouped else _vector("weight_scale", weight_scale)
    rows, k = x.shape[0] if token is None else token.numel(), x.shape[1]
    tokens, slots = (0, 0) if place is None else place.shape
    fields = {"experts": offsets.numel() - 1, "m": rows, "n": out_features, "k": k, "slots": slots}
    fields |= {"tokens": tokens if token is None else max(tokens, x.shape[0]), "gather": int(token is not None)}
    fields |= {"x": _dtype("x", x.dtype), "y": _dtype("dtype", dtype), "activation": activation}
    fields |= {"weight": weight_format, "group": group, "weight_zero_point": int(zero_point)}
    fields |= {"packed_weight": int(packed), "bias": int(bias is not None)}
    chosen = plan("grouped", x.device, **fields)
    y = torch.empty((rows if place is None else tokens, out_features), dtype=dtype, device=x.device)
    views = {name: None if t is None else view(t) for name, t in tensors.items()} | {"y": view(y)}
    if weight_format == _c.S4_GROUP and not packed:
        views["weight"] = view_of_levels(tensors["weight"], k)
    run("grouped_linear", chosen, _c.GroupedArguments, views, x.device)
    if place is None:
        _clear_rows_of_nobody(offsets, y)
    return y


@_op
def grouped_linear_backward(dy, offsets, weight, weight_scale, x, x_scale, dx, dw, db, dw_dtype, *defaulted):
    rounding, seed, gradient_block = (*defaulted, *(0,) * (3 - len(defaulted)))  # torch leaves out defaults
    dy, offsets = _matrix("dy", dy), _vector("offsets", offsets)
    (m, n), experts, k = dy.shape, offsets.numel() - 1, 0
    views = {"dy": view(dy), "offsets": view(offsets)}
    fields = {"experts": experts, "m": m, "n": n, "dy": _dtype("dy", dy.dtype), "dx": dx, "dw": dw, "db": int(db)}
    fields |= {"rounding": rounding, "gradient_block": gradient_block}
    if dx:
        if weight is None or weight_scale is None:
            _fail("dx needs weight and weight_scale")
        weight, weight_scale = _matrix("weight", weight), _vector("weight_scale", weight_scale)
        k = weight.shape[1]
    if dw:
        if x is None or x_scale is None:
            _fail("dw needs x and x_scale")
        x, x_scale = _matrix("x", x), _vector("x_scale", x_scale)
        k = x.shape[1]
        fields["dw_dtype"] = _dtype("dw_dtype", dw_dtype)
    chosen = plan("grouped_backward", dy.device, k=k, **fields)
    dx_out = torch.empty((m, k) if dx else (0,), dtype=dy.dtype, device=dy.device)
    dw_out = torch.empty((experts * n, k) if dw else (0,), dtype=dw_dtype, device=dy.device)
    db_out = torch.empty((experts, n) if db else (0,), dtype=dy.dtype, device=dy.device)
    if dx:
        views |= {"weight": view(weight), "weight_scale": view(weight_scale), "dx": view(dx_out)}
    if dw:
        views |= {"x": view(x), "x_scale": view(x_scale), "dw": view(dw_out)}
    if db:
        views["db"] = view(db_out)
    run("grouped_linear_backward", chosen, _c.GroupedBackwardArguments, views, dy.device, seed)
    if dx:
        _clear_rows_of_nobody(offsets, dx_out)
    return dx_out, dw_out, db_out
