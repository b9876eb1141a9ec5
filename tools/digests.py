#!/usr/bin/env python3
"""Digests of a fixed list of results, to compare two builds of the library bit for bit.

    tools/digests.py build/release/liboctile.so > now.txt       (or OCTILE_LIBRARY; `... | tail -1` is the total)
    tools/digests.py old/liboctile.so > before.txt; diff before.txt now.txt
    OCTILE_ISA=avx2 tools/digests.py LIBRARY                    the rows of a narrower machine
    tools/digests.py LIBRARY --only 'w4a8.*avx2'                the lines that match a regular expression
    tools/digests.py LIBRARY --device cuda                      a build with CUDA, on GPU 0, by the driver's libcuda alone

Every line is `problem/row  sha256[:16]` of all bytes that the plan wrote; the last is the digest of the lines. A problem runs
by the row that the library chooses ("chosen") and by every other row that serves it. Inputs are made of fixed seeds without
numpy. What a library refuses is a line too where it chooses for itself ("refused: STATUS"), and no line for a row.

It speaks the C interface alone, by python/octile/_c.py of this checkout (or --binding FILE), which reads the headers: libraries of
either side of a change run with one copy, since the structures only ever grow at their end.
"""

import argparse
import array
import ctypes as C
import hashlib
import importlib.util
import itertools
import os
import pathlib
import random
import re
import struct
import sys

F16, BF16, F32, F64, S8, U8, S4, S32 = range(8)
NAMES = ("f16", "bf16", "f32", "f64", "s8", "u8", "s4", "s32")
ELEMENTS = ((2, 16), (4, 16), (2, 32), (2, 64), (0, 8), (1, 8), (0, 4), (0, 32))  # DLPack's code and bits
FLOATS = (F16, BF16, F32, F64)
NONE, PER_TOKEN, PER_TENSOR, STATIC = range(4)  # OCTILE_ACTIVATION_...
PER_CHANNEL, WHOLE, GROUP = range(3)  # OCTILE_WEIGHT_...
OK, UNSUPPORTED = 0, 3

MARGIN = 64  # bytes behind each output, which must stay as they are
FILL = 0xA5


def load_binding(path):
    spec = importlib.util.spec_from_file_location("octile_c_binding", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- Memory ----


class Host:
    """Buffers in this process, at multiples of 64 bytes."""

    type, number = 1, 0

    def upload(self, data):
        memory = C.create_string_buffer(len(data) + 64)
        address = (C.addressof(memory) + 63) // 64 * 64
        C.memmove(address, bytes(data), len(data))
        return memory, address

    def download(self, address, size):
        return C.string_at(address, size)

    def free(self, memory):
        pass


class Cuda:
    """Buffers of GPU 0, through the driver."""

    type, number = 2, 0

    def __init__(self):
        self.driver = C.CDLL("libcuda.so.1")
        device, context = C.c_int(), C.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", C.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", C.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def upload(self, data):
        address = C.c_uint64()
        self.call("cuMemAlloc_v2", C.byref(address), C.c_size_t(len(data) + 64))
        self.call("cuMemcpyHtoD_v2", address, bytes(data), C.c_size_t(len(data)))
        return address, address.value

    def download(self, address, size):
        data = C.create_string_buffer(size)
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", data, C.c_uint64(address), C.c_size_t(size))
        return data.raw

    def free(self, memory):
        self.call("cuMemFree_v2", memory)


# ---- Inputs ----


class Pool:
    """Fixed random numbers, of which each input is a piece."""

    def __init__(self, count=1 << 20):
        generator = random.Random(20251122)
        self.count = count
        # About normal, with a few outliers; exact in f32, so that no libm has a say.
        uniform = array.array(
            "f", ((generator.getrandbits(16) + generator.getrandbits(16) - 65535) / 32768 for _ in range(count))
        )
        for _ in range(count // 512):
            uniform[generator.randrange(count)] *= 20
        self.floats = uniform
        self.bytes = generator.randbytes(count)
        self.place = 0

    def start(self, name):
        self.place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % self.count

    def _take(self, source, count):
        first = self.place
        self.place = (self.place + count) % self.count
        taken = source[first : first + count]
        while len(taken) < count:
            taken = taken + source[: count - len(taken)]
        return taken

    def of_type(self, dtype, count):
        if dtype in (S8, U8):
            return self._take(self.bytes, count)
        values = self._take(self.floats, count)
        return floats(dtype, values)

    def scales(self, dtype, count):
        """Positive ones, about 0.01."""
        return floats(dtype, [abs(v) / 64 + 1 / 256 for v in self._take(self.floats, count)])

    def multipliers(self, dtype, count):
        return floats(dtype, [abs(v) + 0.5 for v in self._take(self.floats, count)])

    def zero_points(self, low, high, count):
        return array.array("i", (low + b % (high - low + 1) for b in self._take(self.bytes, count))).tobytes()


def floats(dtype, values):
    if dtype == F16:
        return struct.pack(f"<{len(values)}e", *values)
    if dtype == F64:
        return array.array("d", values).tobytes()
    wide = array.array("f", values).tobytes()
    if dtype == F32:
        return wide
    narrow = bytearray(len(wide) // 2)  # bf16: cut off
    narrow[0::2], narrow[1::2] = wide[2::4], wide[3::4]
    return bytes(narrow)


# ---- Tensors of one problem ----


class Tensors:
    def __init__(self, binding, memory, pool):
        self.binding, self.memory, self.pool = binding, memory, pool
        self.kept, self.outputs = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for memory, buffer in self.kept:
            memory.free(buffer)

    def buffer(self, data, memory=None):
        memory = memory or self.memory
        buffer, address = memory.upload(data)
        self.kept.append((memory, buffer))
        return address

    def tensor(self, dtype, shape, data, stride=None, memory=None):
        result = self.binding.Tensor()
        result.data = self.buffer(data, memory)
        device = memory or self.memory
        result.device.type, result.device.id = device.type, device.number
        result.ndim = len(shape)
        result.dtype.code, result.dtype.bits = ELEMENTS[dtype]
        result.dtype.lanes = 1
        result.shape = (C.c_int64 * len(shape))(*shape)
        if len(shape) == 2:
            result.strides = (C.c_int64 * 2)(stride or self.compact(dtype, shape), 1)
        return result

    @staticmethod
    def compact(dtype, shape):
        return shape[1] + (shape[1] % 2 if dtype == S4 else 0)

    def bytes_of(self, dtype, shape, stride=None):
        elements = shape[0] if len(shape) == 1 else shape[0] * (stride or self.compact(dtype, shape))
        return (elements * ELEMENTS[dtype][1] + 7) // 8

    def input(self, dtype, shape, extra=0):
        """Random values; `extra` elements between the rows."""
        stride = self.compact(dtype, shape) + extra if len(shape) == 2 else None
        if dtype == S4:
            return self.tensor(dtype, shape, self.pool.of_type(U8, self.bytes_of(dtype, shape, stride)), stride)
        count = shape[0] * (stride or 1)
        return self.tensor(dtype, shape, self.pool.of_type(dtype, count), stride)

    def scale(self, dtype, shape):
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        return self.tensor(dtype, shape, self.pool.scales(dtype, count))

    def multiplier(self, dtype, size):
        return self.tensor(dtype, (size,), self.pool.multipliers(dtype, size))

    def zero_point(self, low, high, shape):
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        return self.tensor(S32, shape, self.pool.zero_points(low, high, count))

    def output(self, dtype, shape, extra=0, zeros=False, memory=None):
        stride = self.compact(dtype, shape) + extra if len(shape) == 2 else None
        size = self.bytes_of(dtype, shape, stride)
        data = (bytes(size) if zeros else bytes([FILL]) * size) + bytes([FILL]) * MARGIN
        result = self.tensor(dtype, shape, data, stride, memory)
        self.outputs.append((memory or self.memory, result.data, size + MARGIN))
        return result

    def digest(self):
        result = hashlib.sha256()
        for memory, address, size in self.outputs:
            result.update(memory.download(address, size))
        return result.hexdigest()[:16]


def scale_type(dtype):
    return F64 if dtype == F64 else F32


# ---- The list ----
#
# Each problem is (name, kind, description, arguments): kind names the functions octile_<kind>_plan_create and ..._run,
# `arguments` fills tensors in. Options that multiply the list are taken in turn, by a counter, rather than all with all.


class Turn:
    def __init__(self):
        self.count = 0

    def __call__(self, *options):
        """One of the options, another one in each call from one place for most."""
        self.count += 1
        return options[(self.count * 2654435761 >> 7) % len(options)]


LINEAR_SIZES = ((1, 64, 128), (3, 33, 96), (17, 80, 256), (64, 128, 512), (130, 257, 384), (5, 1, 40), (33, 7, 1))
LARGE_SIZES = ((1, 1024, 2048), (16, 512, 1024), (128, 384, 1024), (300, 520, 640), (257, 129, 1111))


def linear_problems(sizes, on_gpu):
    turn = Turn()
    formats = [
        *((activation, weight, 0) for activation in (PER_TOKEN, PER_TENSOR, STATIC) for weight in (PER_CHANNEL, WHOLE)),
        *((activation, GROUP, group) for activation in (PER_TOKEN, PER_TENSOR, STATIC, NONE) for group in (0, 32, 64, 128)),
    ]
    for (activation, weight, group), (m, n, k) in itertools.product(formats, sizes):
        if group and k % group:
            continue
        for x in (*FLOATS, S8):
            if x == S8 and activation == NONE:
                continue
            y = turn(F16, BF16, F32, F64) if x == S8 else F64 if x == F64 else turn(F16, BF16, F32)
            options = {
                "bias": turn(0, 1),
                "weight_layout": turn(0, 1) if weight != GROUP else 0,
                "weight_zero_point": turn(0, 1) if weight == GROUP else 0,
                "x_multiplier": turn(0, 0, 1) if x != S8 and activation != NONE else 0,
                "packed_weight": turn(0, 0, 1),
                "threads": turn(1, 2),
            }
            loose = turn(0, 0, 0, 2)  # elements between rows
            kind = f"w{4 if weight == GROUP else 8}a{16 if activation == NONE else 8}"
            marks = "".join(f"-{mark}" for mark, name in OPTION_MARKS if options[name])
            name = f"linear-{kind}-a{activation}-w{weight}-g{group}-{m}x{n}x{k}-{NAMES[x]}-{NAMES[y]}{marks}-e{loose}"
            description = {"m": m, "n": n, "k": k, "x": x, "y": y, "activation": activation, "weight": weight, "group": group}
            if activation == STATIC:
                description["static_scale"] = 0.0625
            yield name, "linear", {**description, **options}, (linear_tensors, loose)


OPTION_MARKS = (
    ("b", "bias"),
    ("io", "weight_layout"),
    ("z", "weight_zero_point"),
    ("mul", "x_multiplier"),
    ("packed", "packed_weight"),
)


def linear_tensors(t, d, loose, plan):
    m, n, k, scale = d["m"], d["n"], d["k"], scale_type(d["y"])
    columns = k // (d["group"] or k)
    host = Host() if d["packed_weight"] else None
    scale_shape = {PER_CHANNEL: (n,), WHOLE: (1,), GROUP: (n, columns)}[d["weight"]]
    shape = (k, n) if d["weight_layout"] else (n, k)
    dtype = S4 if d["weight"] == GROUP else S8
    extra = 0 if d["packed_weight"] else loose
    on_plan = t.memory
    if host:
        t.memory = host
    weight, weight_scale = t.input(dtype, shape, extra), t.scale(scale, scale_shape)
    zero_point = t.zero_point(-8, 7, (n, columns)) if d["weight_zero_point"] else None
    t.memory = on_plan
    if d["packed_weight"]:
        size = plan.packed_weight_size
        packed = t.output(U8, (size,), memory=host)
        plan.library.pack(plan, weight=weight, weight_scale=weight_scale, weight_zero_point=zero_point, packed=packed)
        weight = t.tensor(U8, (size,), host.download(packed.data, size))
        weight_scale = zero_point = None
    tensors = {
        "x": t.input(d["x"], (m, k), loose),
        "weight": weight,
        "weight_scale": weight_scale,
        "weight_zero_point": zero_point,
        "bias": t.input(d["y"], (n,)) if d["bias"] else None,
        "x_multiplier": t.multiplier(scale, k) if d["x_multiplier"] else None,
    }
    if d["x"] == S8 and d["activation"] in (PER_TOKEN, PER_TENSOR):
        tensors["x_scale"] = t.scale(scale, (m,) if d["activation"] == PER_TOKEN else (1,))
    tensors["y"] = t.output(d["y"], (m, n), loose)
    return tensors


def backward_problems(sizes, on_gpu):
    products = list(itertools.product((0, 1, 2), (0, 1, 2)))
    yield from backwards(itertools.product(products, FLOATS, sizes, (0,)))
    yield from backwards(itertools.product([pair for pair in products if 2 in pair], FLOATS, sizes, (128, 512)))


def backwards(problems):
    turn = Turn()
    for (dx, dw), dy, (m, n, k), block in problems:
        activation = turn(PER_TOKEN, PER_TENSOR, STATIC)
        description = {
            "m": m, "n": n, "k": k, "dy": dy, "dx": dx, "dw": dw,
            "db": 1 if dx == dw == 0 else turn(0, 1),
            "activation": activation,
            "x_transposed": turn(0, 1),
            "weight": turn(PER_CHANNEL, WHOLE),
            "weight_layout": turn(0, 1),
            "dw_layout": turn(-1, 0, 1),
            "rounding": turn(0, 1),
            "dw_dtype": turn(-1, F32) if dy != F64 else -1,
            "threads": turn(1, 2),
        }  # fmt: skip
        gradient = dy if description["dw_dtype"] == -1 else description["dw_dtype"]
        description["dw_accumulate"] = turn(0, 1) if gradient in (F32, F64) and dw else 0
        if activation == STATIC:
            description["static_scale"] = 0.0625
        if block:
            description["gradient_block"] = block
        shown = "".join(f"-{key}{value}" for key, value in description.items() if key not in ("m", "n", "k", "dy", "threads"))
        loose = turn(0, 0, 0, 3)
        yield f"backward-{m}x{n}x{k}-{NAMES[dy]}{shown}-e{loose}", "linear_backward", description, (backward_tensors, loose)


def backward_tensors(t, d, loose, plan):
    m, n, k, dy, scale = d["m"], d["n"], d["k"], d["dy"], scale_type(d["dy"])
    tensors = {"dy": t.input(dy, (m, n), loose), "seed": 77}
    if d["dx"]:
        tensors["weight"] = t.input(S8, (k, n) if d["weight_layout"] else (n, k), loose)
        tensors["weight_scale"] = t.scale(scale, (n,) if d["weight"] == PER_CHANNEL else (1,))
        tensors["dx"] = t.output(dy, (m, k), loose)
    if d["dw"]:
        tensors["x"] = t.input(S8, (k, m) if d["x_transposed"] else (m, k), loose)
        if d["activation"] != STATIC:
            tensors["x_scale"] = t.scale(scale, (m,) if d["activation"] == PER_TOKEN else (1,))
        layout = d["weight_layout"] if d["dw_layout"] == -1 else d["dw_layout"]
        dtype = dy if d["dw_dtype"] == -1 else d["dw_dtype"]
        tensors["dw"] = t.output(dtype, (k, n) if layout else (n, k), loose, zeros=True)
    if d["db"]:
        tensors["db"] = t.output(dy, (n,))
    return tensors


QUANTIZE_SIZES = ((1, 64), (3, 33), (64, 256), (130, 384), (7, 1), (19, 1000))
TENSOR, ROW, COLUMN, GROUPS = range(4)  # OCTILE_GRANULARITY_...


def quantizer_problems(sizes, on_gpu):
    """All six plans on a (rows, cols) matrix."""
    turn = Turn()
    for kind, granularity, x, (rows, cols) in itertools.product(QUANTIZERS, range(4), FLOATS, sizes):
        repeats = 3 if kind == "quantize" else 1
        for _ in range(repeats):
            lengths = turn((32, 8, 1), (128, 50, 11, 1))
            group = next(g for g in lengths if cols % g == 0) if granularity == GROUPS else 0
            mapping, q = turn(0, 1), turn(S8, U8, S4)
            description = {
                "rows": rows, "cols": cols, "x": x, "q": q, "granularity": granularity, "group": group, "mapping": mapping,
                "scale": turn(0, 1), "threads": turn(1, 2),
            }  # fmt: skip
            if kind in ("quantize", "fake_quantize"):
                description["rounding"] = turn(0, 1)
            if kind == "quantize":
                description["orientation"] = turn(0, 1, 2)
                description["multiplier"] = turn(0, 0, 1, 2)
            if kind.endswith("backward"):
                description["mask"] = turn(0, 1)
            if turn(0, 0, 0, 1):
                description["q_min"], description["q_max"] = (0, 9) if q == U8 else (-5, 6)
            if kind == "quantize" and turn(0, 0, 0, 1):
                description[min_scale_field] = 2.0**-79
            loose = turn(0, 0, 0, 4)
            shown = "".join(
                f"-{key}{value}" for key, value in description.items() if key not in ("rows", "cols", "x", "threads")
            )
            shown = shown.replace(min_scale_field, "min_scale")
            yield f"{kind}-{rows}x{cols}-{NAMES[x]}{shown}-e{loose}", kind, description, (QUANTIZERS[kind], loose)


min_scale_field = "least_scale"  # main() looks


def segments(d):
    columns = d["cols"] // d["group"] if d["group"] else 1
    return {TENSOR: (1,), ROW: (d["rows"],), COLUMN: (d["cols"],), GROUPS: (d["rows"], columns)}[d["granularity"]]


def given(t, d):
    low, high = {S8: (-128, 127), U8: (0, 255), S4: (-8, 7)}[d["q"]]
    low, high = d.get("q_min") or low, d.get("q_max") or high
    scale = t.scale(scale_type(d["x"]), segments(d))
    return scale, t.zero_point(low, high, segments(d)) if d["mapping"] else None


def written_scales(t, d):
    scale = t.output(scale_type(d["x"]), segments(d))
    return {"scale": scale, "zero_point": t.output(S32, segments(d)) if d["mapping"] and not d["scale"] else None}


def quantize_tensors(t, d, loose, plan):
    rows, cols, orientation = d["rows"], d["cols"], d["orientation"]
    tensors = {"x": t.input(d["x"], (rows, cols), loose), "seed": 5}
    if d["multiplier"]:
        tensors["multiplier"] = t.multiplier(scale_type(d["x"]), cols if d["multiplier"] == 1 else rows)
    if d["scale"]:
        tensors["given_scale"], tensors["given_zero_point"] = given(t, d)
    tensors.update(written_scales(t, d))
    if orientation != 1:
        tensors["q"] = t.output(d["q"], (rows, cols), loose)
    if orientation != 0:
        tensors["q_transposed"] = t.output(d["q"], (cols, rows), loose)
    return tensors


def fake_tensors(t, d, loose, plan):
    shape = (d["rows"], d["cols"])
    tensors = {"x": t.input(d["x"], shape, loose), "seed": 6}
    if d["scale"]:
        tensors["given_scale"], tensors["given_zero_point"] = given(t, d)
    else:
        tensors.update(written_scales(t, d))
    tensors["y"] = t.output(d["x"], shape, loose)
    return tensors


def others(*inputs, output):
    def tensors(t, d, loose, plan):
        shape = (d["rows"], d["cols"])
        result = {name: t.input(d["q"] if name == "q" else d["x"], shape, loose) for name in inputs}
        result["scale"], zero_point = given(t, d)
        if output != "dq":
            result["zero_point"] = zero_point
        result[output] = t.output(d["x"], shape, loose)
        return result

    return tensors


QUANTIZERS = {
    "quantize": quantize_tensors,
    "dequantize": others("q", output="x"),
    "fake_quantize": fake_tensors,
    "quantize_backward": others("dy", "x", output="dx"),
    "dequantize_backward": others("dy", output="dq"),
    "fake_quantize_backward": others("dy", "x", output="dx"),
}


# ---- Running ----


class Runner:
    def __init__(self, binding, library, memory):
        self.binding, self.memory, self.pool = binding, memory, Pool()
        self.library = binding.Library(library)
        self.c = self.library.c
        self.rows = self.list_rows()

    def list_rows(self):
        self.c.octile_kernel_count.restype = C.c_size_t
        rows = []
        for index in range(self.c.octile_kernel_count()):
            kernel = self.binding.STRUCTURES["octile_kernel"]()
            kernel.struct_size = C.sizeof(kernel)
            self.library.ok(self.c.octile_kernel_info(C.c_size_t(index), C.byref(kernel)))
            if kernel.device_type == self.memory.type and not kernel.reason:
                rows.append(kernel.name.decode())
        return rows

    def plan(self, kind, description, kernel):
        """A plan, or the status of the refusal."""
        described = kind if kind.startswith("linear") else "quantize"
        filled = self.binding.STRUCTURES[f"octile_{described}_description"]()
        size = C.c_size_t(C.sizeof(filled))
        self.library.ok(getattr(self.c, f"octile_{described}_description_init")(C.byref(filled), size))
        for name, value in description.items():
            setattr(filled, name, value)
        filled.device.type, filled.device.id = self.memory.type, self.memory.number
        filled.kernel = kernel.encode()
        handle = C.c_void_p()
        status = getattr(self.c, f"octile_{kind}_plan_create")(C.byref(filled), C.byref(handle))
        return self.binding.Plan(self.library, handle) if status == OK else status

    def lines(self, problem):
        name, kind, description, tensors = problem
        chosen = self.plan(kind, description, "")
        if isinstance(chosen, int):
            yield f"{name}/chosen", f"refused: {chosen}"
            if chosen != UNSUPPORTED:
                return
        else:
            yield f"{name}/chosen", self.run(name, kind, description, tensors, chosen)
        for row in self.rows:
            plan = self.plan(kind, description, row)
            if isinstance(plan, int) or row not in re.split(r"\W+", plan.sku):
                continue
            yield f"{name}/{row}", self.run(name, kind, description, tensors, plan)

    def run(self, name, kind, description, tensors, plan):
        self.pool.start(name)
        with Tensors(self.binding, self.memory, self.pool) as t:
            make, loose = tensors
            made = {key: value for key, value in make(t, description, loose, plan).items() if value is not None}
            structure = self.binding.STRUCTURES[f"octile_{kind}_args"]
            pointers = {
                key: C.pointer(value) if isinstance(value, self.binding.Tensor) else value for key, value in made.items()
            }
            arguments = structure(struct_size=C.sizeof(structure), **pointers)
            size = plan.workspace_size
            workspace = t.buffer(bytes(size))
            run = getattr(self.c, f"octile_{kind}_run")
            status = run(plan.handle, C.byref(arguments), C.c_void_p(workspace), C.c_size_t(size), None)
            if status != OK:
                return f"run: {status} {self.library.error()}"
            return t.digest()

    # ---- Calibration and the weight quantizer: on the CPU, without plans ----

    def calibration(self):
        for x, (rows, features), threads in itertools.product(FLOATS, ((1, 8), (37, 65), (300, 128)), (1, 2)):
            name = f"calibration-{rows}x{features}-{NAMES[x]}-t{threads}"
            self.pool.start(name)
            with Tensors(self.binding, self.memory, self.pool) as t:
                calibrators = [self.library.calibrator(features, True, threads) for _ in range(2)]
                for calibrator in calibrators:
                    for _ in range(2):
                        calibrator.observe(t.input(x, (rows, features), 3))
                first = calibrators[0]
                first.merge(calibrators[1])
                first.channel_max(t.output(F32, (features,)))
                first.excess(t.output(F32, (2,)))
                first.second_moments(t.output(F64, (features, features)))
                factors = t.output(F32, (features,))
                largest = self.library.smoothing_factors(
                    alpha=0.6,
                    input_channel_max=t.scale(F32, (features,)),
                    weight_channel_max=t.scale(F32, (features,)),
                    factors=factors,
                    multiplier=t.output(F32, (features,)),
                )
                numbers = struct.pack("<qff", first.rows, first.max, largest)
                yield name, hashlib.sha256(numbers + t.digest().encode()).hexdigest()[:16]

    def moments(self, t, k):
        calibrator = self.library.calibrator(k, True, 1)
        calibrator.observe(t.input(F32, (2 * k, k)))
        moments = t.output(F64, (k, k))
        calibrator.second_moments(moments)
        return calibrator, moments

    def weight_error(self, description, **tensors):
        filled = self.binding.STRUCTURES["octile_weight_quantizer_description"]()
        size = C.c_size_t(C.sizeof(filled))
        self.library.ok(self.c.octile_weight_quantizer_description_init(C.byref(filled), size))
        for name, value in description.items():
            setattr(filled, name, value)
        structure = self.binding.STRUCTURES["octile_weight_quantizer_args"]
        pointers = {name: C.pointer(value) for name, value in tensors.items()}
        arguments = structure(struct_size=C.sizeof(structure), **pointers)
        result = self.binding.STRUCTURES["octile_weight_error_result"]()
        result.struct_size = C.sizeof(result)
        self.library.ok(self.c.octile_weight_error(C.byref(filled), C.byref(arguments), C.byref(result)))
        return result.noise, result.signal

    def weight_quantizer(self):
        turn = Turn()
        for method, (weight, group), w in itertools.product(range(3), ((0, 0), (1, 0), (2, 0), (2, 32), (2, 64)), FLOATS):
            for n, k in ((5, 64), (33, 192)):
                zero_point = turn(0, 1) if weight == GROUP else 0
                description = {
                    "n": n, "k": k, "w": w, "weight": weight, "group": group, "zero_point": zero_point, "method": method,
                    "order": turn(0, 1), "scale": turn(F16, BF16, F32), "clip_steps": turn(61, 7, 1), "threads": turn(1, 2),
                }  # fmt: skip
                name = "weight-" + "-".join(f"{key}{value}" for key, value in description.items() if key != "threads")
                self.pool.start(name)
                with Tensors(self.binding, self.memory, self.pool) as t:
                    _, moments = self.moments(t, k)
                    columns = k // (group or k)
                    shape = {PER_CHANNEL: (n,), WHOLE: (1,), GROUP: (n, columns)}[weight]
                    tensors = {
                        "weight": t.input(w, (n, k), 5),
                        "q": t.output(S4 if weight == GROUP else S8, (n, k)),
                        "scale": t.output(F32, shape),
                        "zero_point": t.output(S32, shape) if zero_point else None,
                        "second_moments": moments if method else None,
                    }
                    tensors = {key: value for key, value in tensors.items() if value is not None}
                    self.library.quantize_weight(description, **tensors)
                    noise = self.weight_error(description, **{**tensors, "second_moments": moments})
                    yield name, hashlib.sha256(struct.pack("<dd", *noise) + t.digest().encode()).hexdigest()[:16]

    def smoothing_search(self):
        for activation, (weight, group) in itertools.product((PER_TOKEN, PER_TENSOR, STATIC), ((0, 0), (1, 0), (2, 32))):
            name = f"smoothing-a{activation}-w{weight}-g{group}"
            self.pool.start(name)
            with Tensors(self.binding, self.memory, self.pool) as t:
                n, k = 24, 64
                calibrator, moments = self.moments(t, k)
                largest = t.output(F32, (k,))
                calibrator.channel_max(largest)
                description = {"n": n, "k": k, "activation": activation, "weight": weight, "group": group, "steps": 5}
                result = self.library.search_smoothing(
                    description,
                    weight=t.input(F32, (n, k)),
                    input_channel_max=largest,
                    errors=t.output(F64, (5,)),
                    **({"x": t.input(F32, (50, k))} if activation == PER_TOKEN else {"second_moments": moments, "rows": 2 * k}),
                )
                numbers = struct.pack("<dddi", result.alpha, result.error, result.unsmoothed_error, result.smooth)
                yield name, hashlib.sha256(numbers + t.digest().encode()).hexdigest()[:16]

    def everything(self, only, large):
        on_gpu = self.memory.type == 2
        sizes = LINEAR_SIZES + LARGE_SIZES if on_gpu or large else LINEAR_SIZES
        for problems in (
            linear_problems(sizes, on_gpu),
            backward_problems(sizes, on_gpu),
            quantizer_problems(QUANTIZE_SIZES + (((700, 2048),) if on_gpu or large else ()), on_gpu),
        ):
            for problem in problems:
                if only.search(problem[0]) or any(only.search(f"{problem[0]}/{row}") for row in ("chosen", *self.rows)):
                    yield from self.lines(problem)
        if not on_gpu:
            yield from self.calibration()
            yield from self.weight_quantizer()
            yield from self.smoothing_search()


def main():
    here = pathlib.Path(__file__).resolve()
    parser = argparse.ArgumentParser(description="Digests of a fixed list of results, to compare two builds bit for bit.")
    parser.add_argument(
        "library", nargs="?", default=os.environ.get("OCTILE_LIBRARY"), help="liboctile.so; default: OCTILE_LIBRARY"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--large", action="store_true", help="the larger sizes on a CPU too, which take minutes")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the lines (problem/row) that match")
    parser.add_argument("--binding", metavar="FILE", help="octile/_c.py; default: this checkout's")
    arguments = parser.parse_args()
    if not arguments.library:
        parser.error("name the library, or set OCTILE_LIBRARY")
    binding = load_binding(arguments.binding or here.parents[1] / "python/octile/_c.py")
    fields = [field[0] for field in binding.STRUCTURES["octile_quantize_description"]._fields_]
    globals()["min_scale_field"] = "min_scale" if "min_scale" in fields else "least_scale"
    only = re.compile(arguments.only)
    runner = Runner(binding, arguments.library, Cuda() if arguments.device == "cuda" else Host())
    total, count = hashlib.sha256(), 0
    for name, digest in runner.everything(only, arguments.large):
        if only.search(name):
            line = f"{name}  {digest}\n"
            sys.stdout.write(line)
            total.update(line.encode())
            count += 1
    print(f"total of {count}  {total.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
