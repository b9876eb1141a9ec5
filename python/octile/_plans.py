"""The C interface with torch's tensors: the library, plans by their descriptions, views of tensors, runs."""

import ctypes as C
import functools

import torch

from . import _c
from ._c import library

DTYPES = {
    torch.float16: _c.F16,
    torch.bfloat16: _c.BF16,
    torch.float32: _c.F32,
    torch.float64: _c.F64,
    torch.int8: _c.S8,
}
_ELEMENTS = {
    torch.int8: _c.Element(0, 8, 1),
    torch.int32: _c.Element(0, 32, 1),
    torch.uint8: _c.Element(1, 8, 1),
    torch.float16: _c.Element(2, 16, 1),
    torch.bfloat16: _c.Element(4, 16, 1),
    torch.float32: _c.Element(2, 32, 1),
    torch.float64: _c.Element(2, 64, 1),
}
_CHOICES = {"activation", "weight", "weight_layout", "dx", "dw", "dw_layout", "rounding", "gradient_block"}


def plan(kind, device, **fields):
    """The plan of this description, from the cache. kind: as in _c.plan(); device: torch's."""
    for name in _CHOICES & fields.keys():
        fields[name] = min(max(fields[name], -(2**31)), 2**31 - 1)  # ctypes would take the low half
    if device.type == "cpu":
        return _c.plan(kind, _c.CPU, 0, tuple(fields.items()) + (("threads", torch.get_num_threads()),))
    index = torch.cuda.current_device() if device.index is None else device.index
    return _c.plan(kind, _c.CUDA, index, tuple(fields.items()))


@functools.lru_cache(maxsize=64)
def _device(of):
    return _c.Device(_c.CPU, 0) if of.type == "cpu" else _c.Device(_c.CUDA, of.index)


def readable(t):
    """t (R, C), or a copy of it whose rows a plan can read. Rows may be padded, or all be the same one."""
    rows, columns = t.shape
    row, column = t.stride()
    if (column == 1 or columns <= 1) and (row >= columns or row == 0 or rows <= 1):
        return t
    return t.contiguous()


_ONE, _TWO = C.c_int64 * 1, C.c_int64 * 2


def view(t):
    """t of one or two dimensions, which has to stay alive, for the library."""
    if t.dim() == 1:
        return _c.Tensor(t.data_ptr(), _device(t.device), 1, _ELEMENTS[t.dtype], _ONE(*t.shape), _ONE(*t.stride()), 0)
    rows, columns = t.shape
    row, column = t.stride()
    # Torch gives a single row or column any stride.
    strides = _TWO(columns if rows <= 1 else row, 1 if columns <= 1 else column)
    return _c.Tensor(t.data_ptr(), _device(t.device), t.dim(), _ELEMENTS[t.dtype], _TWO(rows, columns), strides, 0)


def view_of_levels(t, columns):
    """A weight of `columns` values a row: int8 (N, columns), or uint8 with several a byte."""
    levels = view(t)
    if t.dtype is torch.uint8:
        bits = _c.packed_bits(t.shape[1], columns)
        if bits is None:
            raise ValueError(f"octile: weight is {tuple(t.shape)} of uint8, which does not hold {columns} values a row")
        levels.dtype = _c.Element(0, bits, 1)
        levels.shape, levels.strides = _TWO(t.shape[0], columns), _TWO(8 // bits * levels.strides[0], 1)
    return levels


@functools.lru_cache(maxsize=64)
def _layout(op, arguments):
    """The function, the names of the arguments after their size, None for one that is no tensor, and the type of all
    arguments as words."""
    function = getattr(library().c, f"octile_{op}_run")
    names = [name if kind is C.POINTER(_c.Tensor) else None for name, kind in arguments._fields_[1:]]
    return function, names, C.c_uint64 * (C.sizeof(arguments) // 8)


def run(op, plan, arguments, views, device, seed=None):
    """views: octile_tensor by the name of the argument; None is absent. seed: for arguments that end with one."""
    function, names, words = _layout(op, arguments)
    filled = words(C.sizeof(words), *(C.addressof(view) if (view := views.get(name)) else 0 for name in names))
    if seed is not None:
        filled[-1] = seed & (2**64 - 1)
    size = plan.workspace_size
    # An allocation of torch's begins at a multiple of 64 on the CPU, of 512 on a GPU.
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    stream = None if device.type == "cpu" else C.c_void_p(torch._C._cuda_getCurrentRawStream(device.index))
    place = C.c_void_p(workspace.data_ptr()) if size else None
    library().ok(function(plan.handle, filled, place, C.c_size_t(size), stream))


def pack(weight, weight_scale, weight_zero_point, k, /, **fields):
    """The packed weight, uint8, on the CPU. fields: of the linear plan's description."""
    weight, scale, points = (None if t is None else t.detach().cpu() for t in (weight, weight_scale, weight_zero_point))
    chosen = plan("linear", torch.device("cpu"), m=1, n=weight.shape[0], k=k, packed_weight=1, **fields)
    packed = torch.empty(
        chosen.packed_weight_size, dtype=torch.uint8, device="cpu"
    )  # torch aligns allocations to 64 bytes
    views = {"weight": view_of_levels(weight, k), "weight_scale": view(scale), "packed": view(packed)}
    if points is not None:
        views["weight_zero_point"] = view(points)
    library().pack(chosen, **views)
    return packed
