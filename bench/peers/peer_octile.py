"""Octile through its C interface."""

import ctypes as C

import numpy as np
import octile_c
from octile_c import DYNAMIC_PER_TOKEN, NONE, S4_GROUP, S8, S8_PER_CHANNEL, PackArguments, RunArguments
from worker import Contender, Ready

CODES = {"int8": (0, 8), "uint8": (1, 8), "float32": (2, 32)}


def tensor(array, s4_columns=None):
    """A view that keeps its array alive. With s4_columns the bytes of `array` hold two elements each."""
    code, bits = (0, 4) if s4_columns else CODES[str(array.dtype)]
    sizes = (array.shape[0], s4_columns) if s4_columns else array.shape
    shape = (C.c_int64 * len(sizes))(*sizes)
    element, cpu = octile_c.Element(code, bits, 1), octile_c.Device(octile_c.CPU, 0)
    view = octile_c.Tensor(array.ctypes.data, cpu, len(sizes), element, shape, None, 0)
    view.keep = (array, shape)
    return view


def aligned(size):
    """Bytes on a cache line of their own, written once so that every page is there."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


class Library(octile_c.Library):
    def __init__(self, path, threads):
        super().__init__(path)
        self.threads = threads
        self.packs = hasattr(self.c, "octile_linear_pack")

    def prepare(self, problem, activation, weight, packed, x_type=None):
        p = problem
        fields = {"m": p.m, "n": p.n, "k": p.k, "group": p.group, "bias": 1, "threads": self.threads}
        fields |= {"activation": activation, "weight": weight, "packed_weight": int(packed)}
        if x_type is not None:
            fields["x"] = x_type
        plan = self.plan("linear", **fields)

        if weight == S4_GROUP:
            nibbles = p.w4.astype(np.uint8) & 15
            w = tensor(np.ascontiguousarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4), p.k)
            w_scale = tensor(np.array(p.w4_scale))
        else:
            w = tensor(np.array(p.w))
            w_scale = tensor(np.array(p.w_scale) if x_type is None else np.ones(p.n, np.float32))
        x = tensor(np.array(p.xq if x_type == S8 else p.x))
        y = tensor(np.zeros((p.m, p.n), np.float32))
        bias = tensor(np.array(p.bias))
        kept = [x, y, bias]
        a = RunArguments(struct_size=C.sizeof(RunArguments), x=C.pointer(x), bias=C.pointer(bias), y=C.pointer(y))
        if x_type == S8:
            x_scale = tensor(np.ones(p.m, np.float32))
            a.x_scale = C.pointer(x_scale)
            kept.append(x_scale)
        if packed:
            w = self.pack(plan, w, w_scale)
        else:
            a.weight_scale = C.pointer(w_scale)
        a.weight = C.pointer(w)
        kept += [w, w_scale]

        workspace = aligned(plan.workspace_size)
        handle, run, a_ref, size = plan.handle, self.c.octile_linear_run, C.byref(a), C.c_size_t(len(workspace))
        place = C.c_void_p(workspace.ctypes.data)
        self.ok(run(handle, a_ref, place, size, None))

        def call():
            if run(handle, a_ref, place, size, None):
                raise RuntimeError(self.error())

        call.keep = (a, kept, workspace, plan)
        return Ready(call, lambda: y.keep[0], plan.sku)

    def pack(self, plan, w, w_scale):
        size = C.c_size_t()
        self.ok(self.c.octile_linear_packed_weight_size(plan.handle, C.byref(size)))
        packed = tensor(aligned(size.value))
        a = PackArguments(struct_size=C.sizeof(PackArguments), weight=C.pointer(w), weight_scale=C.pointer(w_scale))
        a.packed = C.pointer(packed)
        self.ok(self.c.octile_linear_pack(plan.handle, C.byref(a)))
        return packed


def load(_, settings):
    library = Library(settings["library"], settings["threads"])

    def contender(name, activation, weight, packed, **more):
        kind = "w4" if weight == S4_GROUP else "w8"
        x_type = S8 if more.get("x") == "s8" else None
        prepare = lambda problem: library.prepare(problem, activation, weight, packed, x_type)  # noqa: E731
        return Contender(name, kind, prepare, **{"x": "f32", "fused": "scales, bias", **more})

    contenders = []
    for packed, suffix in ((True, ""), (False, " unpacked")):
        if packed and not library.packs:
            continue
        contenders += [
            contender("octile w8a8" + suffix, DYNAMIC_PER_TOKEN, S8_PER_CHANNEL, packed, quantizer="row"),
            # X passed quantized, as some peers have it: for the check, which needs -128 in X.
            contender("octile w8a8 s8 X" + suffix, DYNAMIC_PER_TOKEN, S8_PER_CHANNEL, packed, x="s8", timed=False),
            contender("octile w4a8" + suffix, DYNAMIC_PER_TOKEN, S4_GROUP, packed),
            contender("octile w4a16" + suffix, NONE, S4_GROUP, packed),
        ]
    return contenders, {"octile": library.version()}
