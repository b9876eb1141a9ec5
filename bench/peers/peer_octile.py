"""Octile through its C interface."""

import ctypes

import numpy as np
from worker import Contender, Ready

C = ctypes


class Device(C.Structure):
    _fields_ = [("type", C.c_int32), ("id", C.c_int32)]


class Element(C.Structure):
    _fields_ = [("code", C.c_uint8), ("bits", C.c_uint8), ("lanes", C.c_uint16)]


class Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("device", Device),
        ("ndim", C.c_int32),
        ("dtype", Element),
        ("shape", C.POINTER(C.c_int64)),
        ("strides", C.POINTER(C.c_int64)),
        ("byte_offset", C.c_uint64),
    ]


class Description(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("m", C.c_int64),
        ("n", C.c_int64),
        ("k", C.c_int64),
        ("group", C.c_int64),
        ("static_scale", C.c_double),
        ("x", C.c_int32),
        ("y", C.c_int32),
        ("activation", C.c_int32),
        ("weight", C.c_int32),
        ("weight_layout", C.c_int32),
        ("weight_zero_point", C.c_int32),
        ("bias", C.c_int32),
        ("x_multiplier", C.c_int32),
        ("threads", C.c_int32),
        ("packed_weight", C.c_int32),
        ("device", Device),
        ("kernel", C.c_char_p),
    ]


def arguments(*names):
    class Arguments(C.Structure):
        _fields_ = [("struct_size", C.c_size_t)] + [(name, C.POINTER(Tensor)) for name in names]

    return Arguments


RunArguments = arguments(
    "x", "x_scale", "x_multiplier", "weight", "weight_scale", "weight_zero_point", "bias", "y"
)
PackArguments = arguments("weight", "weight_scale", "weight_zero_point", "packed")

S8_X = 4  # OCTILE_DTYPE_S8
NONE, DYNAMIC_PER_TOKEN = 0, 1
S8_PER_CHANNEL, S4_GROUP = 0, 2
CODES = {"int8": (0, 8), "uint8": (1, 8), "float32": (2, 32)}


def tensor(array, s4_columns=None):
    """A view that keeps its array alive. With s4_columns the bytes of `array` hold two elements each."""
    code, bits = (0, 4) if s4_columns else CODES[str(array.dtype)]
    sizes = (array.shape[0], s4_columns) if s4_columns else array.shape
    shape = (C.c_int64 * len(sizes))(*sizes)
    view = Tensor(array.ctypes.data, Device(1, 0), len(sizes), Element(code, bits, 1), shape, None, 0)
    view.keep = (array, shape)
    return view


def aligned(size):
    """Bytes on a cache line of their own, written once so that every page is there."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


class Library:
    def __init__(self, path, threads):
        self.threads = threads
        self.c = C.CDLL(path)
        self.c.octile_last_error.restype = C.c_char_p
        self.c.octile_version.restype = C.c_char_p
        self.c.octile_plan_sku.restype = C.c_char_p
        self.c.octile_plan_workspace_size.restype = C.c_size_t
        for name in ("octile_plan_sku", "octile_plan_workspace_size", "octile_plan_destroy"):
            getattr(self.c, name).argtypes = [C.c_void_p]
        self.packs = hasattr(self.c, "octile_linear_pack")

    def ok(self, status):
        if status != 0:
            raise RuntimeError(self.c.octile_last_error().decode())

    def prepare(self, problem, activation, weight, packed, x_type=None):
        p = problem
        d = Description()
        self.ok(self.c.octile_linear_description_init(C.byref(d), C.c_size_t(C.sizeof(d))))
        d.m, d.n, d.k, d.group, d.bias = p.m, p.n, p.k, p.group, 1
        d.activation, d.weight, d.threads, d.packed_weight = activation, weight, self.threads, int(packed)
        if x_type is not None:
            d.x = x_type
        plan = C.c_void_p()
        self.ok(self.c.octile_linear_plan_create(C.byref(d), C.byref(plan)))

        if weight == S4_GROUP:
            nibbles = p.w4.astype(np.uint8) & 15
            w = tensor(np.ascontiguousarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4), p.k)
            w_scale = tensor(np.array(p.w4_scale))
        else:
            w = tensor(np.array(p.w))
            w_scale = tensor(np.array(p.w_scale) if x_type is None else np.ones(p.n, np.float32))
        x = tensor(np.array(p.xq if x_type == S8_X else p.x))
        y = tensor(np.zeros((p.m, p.n), np.float32))
        bias = tensor(np.array(p.bias))
        kept = [x, y, bias]
        a = RunArguments(struct_size=C.sizeof(RunArguments), x=C.pointer(x), bias=C.pointer(bias), y=C.pointer(y))
        if x_type == S8_X:
            x_scale = tensor(np.ones(p.m, np.float32))
            a.x_scale = C.pointer(x_scale)
            kept.append(x_scale)
        if packed:
            w = self.pack(plan, w, w_scale)
        else:
            a.weight_scale = C.pointer(w_scale)
        a.weight = C.pointer(w)
        kept += [w, w_scale]

        workspace = aligned(self.c.octile_plan_workspace_size(plan))
        run, a_ref, size = self.c.octile_linear_run, C.byref(a), C.c_size_t(len(workspace))
        place = C.c_void_p(workspace.ctypes.data)
        self.ok(run(plan, a_ref, place, size, None))

        def call():
            if run(plan, a_ref, place, size, None):
                raise RuntimeError(self.c.octile_last_error().decode())

        destroy = Owner(self.c.octile_plan_destroy, plan)
        call.keep = (a, kept, workspace, destroy)
        return Ready(call, lambda: y.keep[0], self.c.octile_plan_sku(plan).decode())

    def pack(self, plan, w, w_scale):
        size = C.c_size_t()
        self.ok(self.c.octile_linear_packed_weight_size(plan, C.byref(size)))
        packed = tensor(aligned(size.value))
        a = PackArguments(struct_size=C.sizeof(PackArguments), weight=C.pointer(w), weight_scale=C.pointer(w_scale))
        a.packed = C.pointer(packed)
        self.ok(self.c.octile_linear_pack(plan, C.byref(a)))
        return packed


class Owner:
    def __init__(self, destroy, handle):
        self.destroy, self.handle = destroy, handle

    def __del__(self):
        self.destroy(self.handle)


def load(_, settings):
    library = Library(settings["library"], settings["threads"])

    def contender(name, activation, weight, packed, **more):
        kind = "w4" if weight == S4_GROUP else "w8"
        x_type = S8_X if more.get("x") == "s8" else None
        prepare = lambda problem: library.prepare(problem, activation, weight, packed, x_type)  # noqa: E731
        return Contender(name, kind, prepare, **{"x": "f32", "fused": "scales, bias", **more})

    contenders = []
    for packed, suffix in ((True, ""), (False, " unpacked")):
        if packed and not library.packs:
            continue
        contenders += [
            contender("octile w8a8" + suffix, DYNAMIC_PER_TOKEN, S8_PER_CHANNEL, packed, quantizer="row"),
            # X handed over quantized, as some peers have it: for the check, which needs -128 in X.
            contender("octile w8a8 s8 X" + suffix, DYNAMIC_PER_TOKEN, S8_PER_CHANNEL, packed, x="s8", timed=False),
            contender("octile w4a8" + suffix, DYNAMIC_PER_TOKEN, S4_GROUP, packed),
            contender("octile w4a16" + suffix, NONE, S4_GROUP, packed),
        ]
    return contenders, {"octile": library.c.octile_version().decode()}
