"""The ops of _ops.py for a torch without the stable C interface (2.6 to 2.10): _octile_torch.so, called over ctypes.

It is handed descriptions of tensors, and calls back for what only torch can do: struct Callbacks of csrc/torch_shim.h.
"""

import ctypes as C
import struct
import threading

import torch

from . import _c, _plans

_Sizes = C.POINTER(C.c_int64)


class _Described(C.Structure):
    _fields_ = [("data", C.c_void_p), ("dimensions", C.c_int64), ("sizes", _Sizes), ("strides", _Sizes)]
    _fields_ += [("dtype", C.c_int32), ("device_type", C.c_int32), ("device_index", C.c_int32)]


_NUMBERS = _plans.DTYPES | {torch.uint8: _c.U8, torch.int32: _c.S32, torch.bool: _c.S32 + 1}
_TYPES = {number: dtype for dtype, number in _NUMBERS.items()}
_DEVICES = {"cpu": _c.CPU, "cuda": _c.CUDA}


class _Call(threading.local):
    """Of the op that runs on this thread: its tensors by the address of their description; what a callback raised."""

    tensors, error = None, None


_call = _Call()


def _describe(t):
    """The address of its description, which lives as long as the op runs."""
    array, device = C.c_int64 * t.dim(), t.device
    described = _Described(t.data_ptr(), t.dim(), array(*t.shape), array(*t.stride()), _NUMBERS.get(t.dtype, -1))
    described.device_type, described.device_index = _DEVICES.get(device.type, 0), device.index or 0
    _call.tensors[C.addressof(described)] = t, described
    return C.addressof(described)


def _callback(*arguments):
    def decorate(function):
        def called(*values):
            try:
                function(*values)
            except BaseException as error:  # nothing passes through C++
                _call.error = error
                return 1
            return 0

        return C.CFUNCTYPE(C.c_int32, *arguments)(called)

    return decorate


_Handle, _Number = C.c_void_p, C.c_int32


@_callback(C.c_int64, _Sizes, _Sizes, _Number, _Number, _Number, C.POINTER(_Handle))
def _empty_strided(dimensions, sizes, strides, dtype, device_type, index, made):
    device = torch.device("cpu") if device_type == _c.CPU else torch.device("cuda", index)
    made[0] = _describe(
        torch.empty_strided(sizes[:dimensions], strides[:dimensions], dtype=_TYPES[dtype], device=device)
    )


@_callback(_Handle, _Handle, _Number)
def _copy(to, source, non_blocking):
    _call.tensors[to][0].copy_(_call.tensors[source][0])


@_callback(C.c_char_p, C.c_char_p, C.POINTER(C.c_uint64), C.c_uint64)
def _call_torch(name, overload, stack, version):
    assert name == b"aten::fill_"
    _call.tensors[stack[0]][0].fill_(_call.tensors[stack[1]][0])


@_callback(C.POINTER(C.c_uint32))
def _get_num_threads(threads):
    threads[0] = torch.get_num_threads()


@_callback(_Number, C.POINTER(C.c_void_p))
def _current_stream(index, stream):
    stream[0] = torch._C._cuda_getCurrentRawStream(index)


_CALLBACKS = (C.c_void_p * 5)(
    *(C.cast(f, C.c_void_p).value for f in (_empty_strided, _copy, _call_torch, _get_num_threads, _current_stream))
)


def _word(value):
    if isinstance(value, torch.Tensor):
        return _describe(value)
    if isinstance(value, torch.dtype):
        return _NUMBERS.get(value, -1) & (2**64 - 1)
    if isinstance(value, float):
        return struct.unpack("Q", struct.pack("d", value))[0]
    return value & (2**64 - 1)


def _op(binary, name, schema):
    arguments, results = schema.arguments, len(schema.returns)
    optional = [str(a.type).startswith("Optional") for a in arguments]
    defaults = [a.default_value if a.has_default_value() else None for a in arguments]
    Stack = C.c_uint64 * max(len(arguments), results)
    name_of_it = name.encode()

    def called(*given):
        outer, _call.tensors, _call.error = _call.tensors, {}, None
        try:
            kept, stack = [], Stack()  # torch leaves out defaults
            for i, value in enumerate((*given, *defaults[len(given) :])):
                if value is None:
                    continue
                stack[i] = _word(value)
                if optional[i]:
                    kept.append(C.c_uint64(stack[i]))
                    stack[i] = C.addressof(kept[-1])
            error = binary.octile_torch_call(name_of_it, stack)
            if _call.error is not None:
                raise _call.error
            if error:
                raise RuntimeError(f"octile::{name}: {error.decode()}")
            made = tuple(_call.tensors[stack[i]][0] for i in range(results))
            return made if results > 1 else made[0]
        finally:
            _call.tensors, _call.error = outer, None

    return called


def implementations(binary, names):
    """{name: function} of the ops, which are defined already. Raises ImportError where the binary cannot serve."""
    binary.octile_torch_use.restype = binary.octile_torch_call.restype = C.c_char_p
    if reason := binary.octile_torch_use(_CALLBACKS):
        raise ImportError(f"octile: {reason.decode()}")
    ops = torch.ops.octile
    return {name: _op(binary, name, getattr(ops, name).default._schema) for name in names}
