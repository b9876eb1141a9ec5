"""Quantized linear layers on arrays of numpy, JAX, CuPy and every library that supports DLPack. Needs no torch.

    weight = octile.arrays.quantize(w)    # once: int8, a scale per output channel
    y = octile.linear(x, weight, b)       # an array of x's library, in x's type

On a GPU a call with CuPy arrays is enqueued on CuPy's current stream and returns at once. Other libraries do not expose
their stream; there the call returns when the result is ready.
"""

import contextlib
import ctypes as C
import functools
import math
import sys
from typing import Any, NamedTuple

from . import _c

_ELEMENTS = {
    _c.F16: (2, 16, "float16"),
    _c.BF16: (4, 16, "bfloat16"),
    _c.F32: (2, 32, "float32"),
    _c.F64: (2, 64, "float64"),
    _c.S8: (0, 8, "int8"),
    _c.U8: (1, 8, "uint8"),
    _c.S32: (0, 32, "int32"),
}
_DTYPES = {(code, bits): dtype for dtype, (code, bits, _) in _ELEMENTS.items()}
_S4 = _c.Element(0, 4, 1)
_FLOATS = (_c.F16, _c.BF16, _c.F32, _c.F64)
_DEVICES = {1: _c.CPU, 3: _c.CPU, 2: _c.CUDA, 13: _c.CUDA}  # DLPack's CPU, CUDA's host memory, CUDA, its managed memory
_LEGACY_STREAM = 1  # CUDA's default stream, in DLPack and in CUDA's own interfaces
_ACTIVATIONS = {"per_token": _c.DYNAMIC_PER_TOKEN, "per_tensor": _c.DYNAMIC_PER_TENSOR, "none": _c.NONE}
_LAYOUTS = ("out_in", "in_out")


class Weight(NamedTuple):
    """A quantized weight: three arrays. For JAX it is a pytree, so device_put() accepts it.

    levels: int8 (N, K), or uint8 (N, ceil(K / 2)) of 4 bits each, the even element in the low nibble. scale: (N), (1), or
    (N, K / group) in groups. zero_point: int32 like a scale in groups, or None.
    """

    levels: Any
    scale: Any
    zero_point: Any = None


# ---- DLPack ----


class _Managed(C.Structure):
    _fields_ = [("tensor", _c.Tensor), ("context", C.c_void_p), ("deleter", C.c_void_p)]


class _Versioned(C.Structure):
    _fields_ = [("version", C.c_uint64), ("context", C.c_void_p), ("deleter", C.c_void_p), ("flags", C.c_uint64)]
    _fields_ += [("tensor", _c.Tensor)]


_KINDS = ((b"dltensor_versioned", _Versioned), (b"dltensor", _Managed))
_is_capsule = C.pythonapi.PyCapsule_IsValid
_is_capsule.argtypes = [C.py_object, C.c_char_p]
_get_pointer = C.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes, _get_pointer.restype = [C.py_object, C.c_char_p], C.c_void_p
_new_capsule = C.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = [C.c_void_p, C.c_char_p, C.c_void_p], C.py_object
_libc = C.CDLL(None)
_libc.aligned_alloc.argtypes, _libc.aligned_alloc.restype = [C.c_size_t, C.c_size_t], C.c_void_p
_libc.free.argtypes, _libc.free.restype = [C.c_void_p], None


class _View:
    """The memory of an array of one or two dimensions, and its octile_tensor; the array may not change meanwhile."""

    def __init__(self, name, array, stream):
        device = _device(name, array)
        words = {} if device[0] == _c.CPU else {"stream": stream}
        try:
            self.capsule = array.__dlpack__(max_version=(1, 0), **words)
        except TypeError:  # from before DLPack had versions
            self.capsule = array.__dlpack__(**words)
        kind, structure = next(k for k in _KINDS if _is_capsule(self.capsule, k[0]))
        found = structure.from_address(_get_pointer(self.capsule, kind)).tensor
        self.shape = tuple(found.shape[: found.ndim])
        strides = found.strides[: found.ndim] if found.strides else _compact(self.shape)
        self.dtype = _DTYPES.get((found.dtype.code, found.dtype.bits))
        if self.dtype is None or found.dtype.lanes != 1:
            raise TypeError(f"octile: {name} is of {array.dtype}, which no plan takes")
        if len(self.shape) not in (1, 2):
            raise ValueError(f"octile: {name} has {len(self.shape)} dimensions, expected 1 or 2")
        columns, rows = self.shape[-1], self.shape[0] if len(self.shape) == 2 else 1
        row, column = strides[0], 1 if columns <= 1 else strides[-1]
        self.compact = column == 1 and (rows <= 1 or len(self.shape) == 1 or row >= columns or row == 0)
        # A single row or column may have any stride.
        strides = [columns if rows <= 1 else row, column][-len(self.shape) :]
        self.tensor = _tensor((found.data or 0) + found.byte_offset, device, self.dtype, self.shape, strides)


class _New:
    """New memory for an array library to take over by from_dlpack(), which then frees it: an array that it exports."""

    def __init__(self, device, dtype, shape):
        code, bits, _ = _ELEMENTS[dtype]
        size = math.prod(shape) * bits // 8
        gpu = device[0] == _c.CUDA
        # In front of the values: the structure, then the shape.
        self.address = _libc.aligned_alloc(64, 128 + (64 if gpu else -(-size // 64) * 64))
        if not self.address:
            raise MemoryError(f"octile: cannot allocate {size} bytes")
        self.capsule, self.device, self.shape, self.dtype = None, device, shape, dtype
        managed = _Managed.from_address(self.address)
        sizes = (C.c_int64 * 2).from_address(self.address + C.sizeof(_Managed))
        sizes[: len(shape)] = shape
        try:
            data = _gpu(device[1]).allocate(size) if gpu else self.address + 128
        except BaseException:
            _libc.free(self.address)
            self.address = None
            raise
        managed.tensor = _tensor(data, device, dtype, shape, _compact(shape))
        managed.tensor.shape, managed.tensor.strides = sizes, None
        managed.context = None
        managed.deleter = C.cast(_free_of_gpu if gpu else _libc.free, C.c_void_p)
        self.tensor = _tensor(data, device, dtype, shape, _compact(shape))

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        """What it holds has been computed, so no stream has to wait."""
        self.capsule = _new_capsule(self.address, _KINDS[1][0], None)
        return self.capsule

    def __del__(self):
        if self.address and (self.capsule is None or _is_capsule(self.capsule, _KINDS[1][0])):
            C.CFUNCTYPE(None, C.c_void_p)(_Managed.from_address(self.address).deleter)(self.address)


def _tensor(data, device, dtype, shape, strides):
    element = _c.Element(*_ELEMENTS[dtype][:2], 1)
    sizes = C.c_int64 * len(shape)
    return _c.Tensor(data, _c.Device(*device), len(shape), element, sizes(*shape), sizes(*strides), 0)


def _compact(shape):
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _device(name, array):
    try:
        kind, index = array.__dlpack_device__()
    except Exception as error:
        raise TypeError(
            f"octile: {name} is a {type(array).__name__}, which cannot be passed on by DLPack ({error}); inside jax.jit, "
            "call it through jax.pure_callback()"
        ) from None
    if int(kind) not in _DEVICES:
        raise TypeError(f"octile: {name} is on a device of DLPack's type {int(kind)}, expected a CPU or CUDA")
    return _DEVICES[int(kind)], int(index) if _DEVICES[int(kind)] == _c.CUDA else 0


class _Gpu:
    """CUDA's driver, in the context that every library shares."""

    def __init__(self, index):
        self.driver, self.context, device = C.CDLL("libcuda.so.1"), C.c_void_p(), C.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", C.byref(device), index)
        self.call("cuDevicePrimaryCtxRetain", C.byref(self.context), device)

    def call(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"octile: {name} failed, CUDA's error {status}")

    def inside(self, name, *arguments):
        self.call("cuCtxPushCurrent_v2", self.context)
        try:
            self.call(name, *arguments)
        finally:
            self.call("cuCtxPopCurrent_v2", C.byref(C.c_void_p()))

    def allocate(self, size):
        address = C.c_uint64()
        self.inside("cuMemAlloc_v2", C.byref(address), C.c_size_t(max(size, 1)))
        return address.value

    def free(self, address):  # waits until nothing on the GPU uses it
        self.inside("cuMemFree_v2", C.c_uint64(address))

    def wait(self, stream):
        self.inside("cuStreamSynchronize", C.c_void_p(stream))


_gpu = functools.cache(_Gpu)


@C.CFUNCTYPE(None, C.c_void_p)
def _free_of_gpu(address):
    tensor = _Managed.from_address(address).tensor
    with contextlib.suppress(RuntimeError):  # CUDA may be gone when a process ends
        _gpu(tensor.device.id).free(tensor.data)
    _libc.free(address)


# ---- Calls ----


class _Call:
    """What the arrays of one call have in common: the library of the first, its device, and the stream. Holds them all."""

    def __init__(self, name, array):
        self.held = []
        self.device = _device(name, array)
        module = sys.modules.get(type(array).__module__.partition(".")[0])
        self.own = getattr(module, "__name__", "") in ("numpy", "cupy")  # its arrays may be written to
        namespace = None if self.own else getattr(array, "__array_namespace__", None)
        self.namespace = module if namespace is None else namespace()
        self.stream, self.waits = None, False
        if self.device[0] == _c.CUDA:
            self.stream, self.waits = _LEGACY_STREAM, not self.own
            if self.own:
                self.stream = module.cuda.get_current_stream(self.device[1]).ptr or _LEGACY_STREAM

    def view(self, name, array):
        """The array as a plan can read it."""
        view = _View(name, array, self.stream)
        if not view.compact:
            view = _View(name, array.copy(), self.stream)
        self.held.append(view)
        return view

    def new(self, dtype, *shape):
        if not self.own:
            made = _New(self.device, dtype, shape)
        else:
            with self.namespace.cuda.Device(self.device[1]) if self.stream else contextlib.nullcontext():
                array = self.namespace.empty(shape, dtype=_ELEMENTS[dtype][2])
            made = _View("y", array, self.stream)
            made.array = array
        self.held.append(made)
        return made

    def array(self, new):
        return new.array if self.own else self.namespace.from_dlpack(new)

    def plan(self, kind, **fields):
        return _c.plan(kind, *self.device, tuple(fields.items()))

    def run(self, kind, plan, **tensors):
        library, size = _c.library(), plan.workspace_size
        arguments = library.arguments(kind, tensors)
        workspace = self.new(_c.U8, size) if size else None
        place = C.c_void_p(workspace.tensor.data) if size else None
        function = getattr(library.c, f"octile_{kind}_run")
        library.ok(function(plan.handle, C.byref(arguments), place, C.c_size_t(size), C.c_void_p(self.stream)))
        if self.waits:
            _gpu(self.device[1]).wait(self.stream)


def _s4(view, columns):
    """The octile_tensor of uint8 (N, ceil(columns / 2)) as 4-bit (N, columns)."""
    rows, stored = view.shape
    if view.dtype != _c.U8 or stored != (columns + 1) // 2:
        raise ValueError(
            f"octile: levels has {stored} columns of {_ELEMENTS[view.dtype][2]}, expected {(columns + 1) // 2} of uint8"
        )
    sizes = C.c_int64 * 2
    view.tensor.dtype = _S4
    view.tensor.shape, view.tensor.strides = sizes(rows, columns), sizes(2 * view.tensor.strides[0], 1)
    return view.tensor


def _quantize_s8(call, w, granularity, scales, **fields):
    """int8 levels (N, K), or (K, N) read as such with TRANSPOSED, and their scales, of shape `scales`."""
    rows, columns = w.shape
    transposed = fields.get("orientation") == _c.TRANSPOSED
    plan = call.plan("quantize", rows=rows, cols=columns, x=w.dtype, granularity=granularity, **fields)
    q = call.new(_c.S8, *(w.shape[::-1] if transposed else w.shape))
    scale = call.new(_c.F64 if w.dtype == _c.F64 else _c.F32, *scales)
    out = "q_transposed" if transposed else "q"
    call.run("quantize", plan, x=w.tensor, scale=scale.tensor, **{out: q.tensor})
    return q, scale


def _matrix(call, name, array, like=None):
    view = _floats(call, name, array, like)
    if len(view.shape) != 2:
        raise ValueError(f"octile: {name} is {view.shape}, expected two dimensions")
    return view


def _floats(call, name, array, like=None):
    """The view of an array of floats; like: of x's, float64 exactly where that is."""
    view = call.view(name, array)
    if view.dtype not in _FLOATS:
        raise TypeError(f"octile: {name} is of {array.dtype}, expected a float type")
    if like is not None and (view.dtype == _c.F64) != (like.dtype == _c.F64):
        x = _ELEMENTS[like.dtype][2]
        raise TypeError(f"octile: {name} is of {array.dtype} and x of {x}; float64 only goes with float64")
    return view


def quantize(w, bits=8, group=None):
    """The Weight of a float array w (N, K), in arrays of w's library; each value is rounded to the nearest level.

    bits: 8, or on a CPU 4. group: a scale per 32, 64 or 128 consecutive inputs, or 0, per row. None is a scale per output
    channel, or with 4 bits a group of 128.
    """
    if bits not in (8, 4) or group not in (None, 0, 32, 64, 128):
        raise ValueError(f"octile: bits is {bits!r} and group {group!r}, expected 8 or 4, and None, 0, 32, 64 or 128")
    call = _Call("w", w)
    view = _matrix(call, "w", w)
    n, k = view.shape
    if n == 0 or k == 0:
        raise ValueError(f"octile: w is {view.shape}; no scale can be taken from an empty weight")
    group = 128 if group is None and bits == 4 else group
    if group and k % group:
        raise ValueError(f"octile: group is {group}, which does not divide {k}")
    if bits == 8 and group is None:
        levels, scale = _quantize_s8(call, view, _c.PER_ROW, (n,))
    elif bits == 8:
        levels, scale = _quantize_s8(call, view, _c.PER_GROUP, (n, k // (group or k)), group=group or k)
    elif call.device[0] == _c.CPU:
        levels, scale = call.new(_c.U8, n, (k + 1) // 2), call.new(_c.F32, n, k // (group or k))
        fields = {"n": n, "k": k, "group": group, "weight": _c.S4_GROUP, "w": view.dtype, "method": _c.METHOD_NEAREST}
        tensors = {"weight": view.tensor, "q": _s4(levels, k), "scale": scale.tensor}
        _c.library().quantize_weight(fields, **tensors)
    else:
        raise ValueError("octile: a CPU quantizes to 4 bits; the arrays of the Weight can be moved to the GPU")
    scale = call.array(scale)
    return Weight(call.array(levels), scale.astype(w.dtype) if view.dtype == _c.F64 and bits == 4 else scale)


def _weight(call, w, k):
    """The tensors of a Weight for the product with x (..., K), and the fields that describe them."""
    levels, scale = call.view("levels", w.levels), call.view("scale", w.scale)
    tensors = {"weight": levels.tensor, "weight_scale": scale.tensor}
    s4, grouped = levels.dtype == _c.U8, len(scale.shape) == 2
    if s4:
        tensors["weight"] = _s4(levels, k)
    if w.zero_point is not None:
        tensors["weight_zero_point"] = call.view("zero_point", w.zero_point).tensor
    if grouped:
        groups = scale.shape[1]
        if groups < 1 or k % groups:
            raise ValueError(f"octile: scale has {groups} columns, which do not divide {k}")
        group = k // groups if groups > 1 else 0
        fields = {"weight": _c.S4_GROUP if s4 else _c.S8_GROUP, "group": group}
    else:
        fields = {"weight": _c.S8_PER_TENSOR if scale.shape == (1,) else _c.S8_PER_CHANNEL}
    return tensors, fields


def linear(x, w, b=None, *, layout="out_in", per_channel=True, activation="per_token"):
    """x @ w^T + b, in x's type, as an array of x's library. There is no gradient.

    x (..., K), b (N) or None. w: a Weight; or floats (N, K), or (K, N) with layout="in_out", which are quantized to int8 in
    the call, with a scale per output channel, or one scale unless per_channel. activation: x is quantized to int8 too, with
    a scale "per_token" (a row of x) or "per_tensor"; with "none" it is not, and the products are of floats.
    """
    for name, value, known in (("layout", layout, _LAYOUTS), ("activation", activation, _ACTIVATIONS)):
        if value not in known:
            raise ValueError(f"octile: {name} is {value!r}, expected {' or '.join(map(repr, known))}")
    call = _Call("x", x)
    shape = tuple(x.shape)
    if not shape:
        raise ValueError("octile: x has no dimensions")
    m, k = math.prod(shape[:-1]), shape[-1]
    rows = _floats(call, "x", x if len(shape) == 2 else x.reshape(m, k))
    if isinstance(w, Weight):
        if layout != "out_in" or not per_channel:
            raise ValueError(
                "octile: layout and per_channel apply to a float w, which is quantized in the call; w is a Weight"
            )
        tensors, fields = _weight(call, w, k)
    else:
        w = _matrix(call, "w", w, rows)
        if layout == "in_out":
            granularity, orientation, n = _c.PER_COLUMN, _c.TRANSPOSED, w.shape[1]
        else:
            granularity, orientation, n = _c.PER_ROW, _c.ROW_MAJOR, w.shape[0]
        if not per_channel:
            granularity, n = _c.PER_TENSOR, 1
        levels, scale = _quantize_s8(call, w, granularity, (n,), orientation=orientation)
        tensors = {"weight": levels.tensor, "weight_scale": scale.tensor}
        fields = {"weight": _c.S8_PER_CHANNEL if per_channel else _c.S8_PER_TENSOR}
    n, columns = tensors["weight"].shape[:2]
    if columns != k:  # which the library would blame on the weight
        raise ValueError(f"octile: x is {shape}; w multiplies (..., {columns})")
    if b is not None:
        bias = _floats(call, "b", b, rows)
        bias = bias if bias.dtype == rows.dtype else call.view("b", b.astype(x.dtype))
        tensors["bias"] = bias.tensor
    present = {"bias": int(b is not None), "weight_zero_point": int("weight_zero_point" in tensors)}
    fields |= {"m": m, "n": n, "k": k, "x": rows.dtype, "y": rows.dtype, "activation": _ACTIVATIONS[activation]}
    plan = call.plan("linear", **fields, **present)
    y = call.new(rows.dtype, m, n)
    call.run("linear", plan, x=rows.tensor, y=y.tensor, **tensors)
    array = call.array(y)
    return array if len(shape) == 2 else array.reshape(*shape[:-1], n)
