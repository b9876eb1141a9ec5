"""ggml, the products of llama.cpp, through its C interface: the libraries that llama-cpp-python was built with."""

import ctypes as C
import importlib.util
import pathlib

import numpy as np
from worker import Contender, Ready

F32, Q4_0, Q8_0, Q4_K = 0, 2, 8, 12  # ggml_type
BLOCK = 32  # values with one scale of Q8_0 and Q4_0
ROOM = 1 << 20  # for the descriptions of a few tensors and a graph


class InitParams(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


POINTERS = """ggml_init ggml_new_tensor_2d ggml_mul_mat ggml_new_graph ggml_get_data ggml_backend_reg_dev_get
    ggml_backend_reg_get_proc_address ggml_backend_alloc_ctx_tensors_from_buft ggml_backend_graph_plan_create
    ggml_backend_cpu_init ggml_backend_cpu_reg ggml_backend_cpu_buffer_type""".split()


class Ggml:
    def __init__(self, threads):
        folder = pathlib.Path(importlib.util.find_spec("llama_cpp").origin).parent / "lib"
        self.libraries = [C.CDLL(str(folder / f"libggml{part}.so"), C.RTLD_GLOBAL) for part in ("-base", "-cpu")]
        self.backend = self.call("ggml_backend_cpu_init")
        self.call("ggml_backend_cpu_set_n_threads", self.backend, threads)
        self.plain = self.call("ggml_backend_cpu_buffer_type")
        self.extra = self.extra_buffer_types()

    def call(self, name, *arguments):
        """Integers become int, all else has its type."""
        function = next(getattr(library, name) for library in self.libraries if hasattr(library, name))
        function.restype = C.c_void_p if name in POINTERS else C.c_size_t if name.endswith("chunk") else C.c_int
        result = function(*arguments)
        return C.c_void_p(result) if name in POINTERS else result

    def extra_buffer_types(self):
        """Where weights are kept in another order than a file has them: repacked, for AMX, for KleidiAI."""
        registry = self.call("ggml_backend_cpu_reg")
        find = self.call("ggml_backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
        types = C.CFUNCTYPE(C.POINTER(C.c_void_p), C.c_void_p)(find.value)
        at = types(self.call("ggml_backend_reg_dev_get", registry, C.c_size_t(0)))
        found = []
        while at[len(found)]:
            found.append(C.c_void_p(at[len(found)]))
        return found

    def context(self):
        return self.call("ggml_init", InitParams(ROOM, None, True))

    def matrix(self, context, kind, rows, columns):
        return self.call("ggml_new_tensor_2d", context, kind, C.c_int64(columns), C.c_int64(rows))

    def text(self, name, *arguments):
        function = getattr(self.libraries[0], name)
        function.restype = C.c_char_p
        return function(*arguments).decode()

    def quantized(self, p, kind):
        """The weight in ggml's blocks. Q8_0 and Q4_0 take our levels as they are; for Q4_K they are rounded again."""
        if kind == Q8_0:
            blocks = np.zeros((p.n, p.k // BLOCK), [("scale", "<f2"), ("levels", "i1", BLOCK)])
            blocks["scale"], blocks["levels"] = p.w_scale[:, None], p.w.reshape(p.n, -1, BLOCK)
            return blocks
        if kind == Q4_0:
            blocks = np.zeros((p.n, p.k // BLOCK), [("scale", "<f2"), ("levels", "u1", BLOCK // 2)])
            levels = (p.w4 + 8).astype(np.uint8).reshape(p.n, -1, BLOCK)
            blocks["scale"] = np.repeat(p.w4_scale, p.group // BLOCK, axis=1)
            blocks["levels"] = levels[..., : BLOCK // 2] | levels[..., BLOCK // 2 :] << 4
            return blocks
        floats = np.ascontiguousarray(p.w4 * np.repeat(p.w4_scale, p.group, axis=1))
        blocks = np.empty(floats.size // 256 * 144, np.uint8)
        rest = (C.c_int64(0), C.c_int64(p.n), C.c_int64(p.k), None)
        self.call("ggml_quantize_chunk", kind, C.c_void_p(floats.ctypes.data), C.c_void_p(blocks.ctypes.data), *rest)
        return blocks

    def prepare(self, p, kind, repacked):
        if kind == Q4_K and p.k % 256:
            raise ValueError("Q4_K has blocks of 256")
        for buffer_type in self.extra if repacked else [self.plain]:
            weights, rest = self.context(), self.context()
            w = self.matrix(weights, kind, p.n, p.k)
            self.call("ggml_backend_alloc_ctx_tensors_from_buft", weights, buffer_type)
            x = self.matrix(rest, F32, p.m, p.k)
            y = self.call("ggml_mul_mat", rest, w, x)
            self.call("ggml_backend_alloc_ctx_tensors_from_buft", rest, self.plain)
            if self.call("ggml_backend_supports_op", self.backend, y) & 0xFF:
                break
        else:
            raise ValueError("no buffer of another order takes it here")
        for tensor, array in ((w, self.quantized(p, kind)), (x, np.array(p.x))):
            size = C.c_size_t(array.nbytes)
            self.call("ggml_backend_tensor_set", tensor, C.c_void_p(array.ctypes.data), C.c_size_t(0), size)
        graph = self.call("ggml_new_graph", rest)
        self.call("ggml_build_forward_expand", graph, y)
        plan = self.call("ggml_backend_graph_plan_create", self.backend, graph)
        compute, backend = self.libraries[0].ggml_backend_graph_plan_compute, self.backend

        def call():
            if compute(backend, plan):
                raise RuntimeError("ggml failed")

        place = C.cast(self.call("ggml_get_data", y), C.POINTER(C.c_float))
        return Ready(call, lambda: np.ctypeslib.as_array(place, (p.m, p.n)), self.text("ggml_backend_buft_name", buffer_type))


def load(_, settings):
    ggml = Ggml(settings["threads"])

    def contender(name, kind, repacked):
        prepare = lambda p: ggml.prepare(p, kind, repacked)  # noqa: E731
        weights, quantizer = ("w8", "row") if kind == Q8_0 else ("w4", "")
        name = f"ggml {name}{' repacked' if repacked else ''}"
        return Contender(name, weights, prepare, "f32", "scales", quantizer=quantizer)

    kinds = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_K": Q4_K}
    contenders = [contender(name, kind, repacked) for name, kind in kinds.items() for repacked in (False, True)]
    return contenders, {"ggml": ggml.text("ggml_version")}
