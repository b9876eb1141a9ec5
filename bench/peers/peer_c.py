"""oneDNN, through onednn_peer.cpp, and OpenBLAS."""

import ctypes

import numpy as np
from worker import Contender, Ready


def address(array):
    return ctypes.c_void_p(array.ctypes.data)


class OneDnn:
    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        for name in ("peer_error", "peer_version", "peer_kernel"):
            getattr(self.c, name).restype = ctypes.c_char_p
        self.c.peer_create.restype = ctypes.c_void_p
        for name in ("peer_run", "peer_destroy", "peer_kernel"):
            getattr(self.c, name).argtypes = [ctypes.c_void_p]
        self.version = self.c.peer_version().decode()

    def prepare(self, types, problem):
        p = problem
        x = {"f32": lambda: np.array(p.x), "u8s8": p.xu, "s8s8": lambda: np.array(p.xq)}[types]()
        w = p.float_weight() if types == "f32" else np.array(p.w)
        y = np.zeros((p.m, p.n), np.float32 if types == "f32" else np.int32)
        sizes = (ctypes.c_int64 * 3)(p.m, p.k, p.n)
        op = self.c.peer_create(types.encode(), sizes, address(x), address(w), address(y))
        if not op:
            raise RuntimeError(self.c.peer_error().decode())
        run = self.c.peer_run

        def call():
            if run(op):
                raise RuntimeError(self.c.peer_error().decode())

        call.keep = (x, y, Owner(self.c.peer_destroy, op))
        return Ready(call, lambda: y, self.c.peer_kernel(op).decode())


class Owner:
    def __init__(self, destroy, handle):
        self.destroy, self.handle = destroy, handle

    def __del__(self):
        self.destroy(self.handle)


def load_onednn(path):
    library = OneDnn(path)
    title = "onednn " + library.version
    nothing = "nothing"
    return [
        Contender(title + " s8s8", "w8", lambda p: library.prepare("s8s8", p), "s8", nothing),
        Contender(title + " u8s8", "w8", lambda p: library.prepare("u8s8", p), "u8", nothing),
        Contender(title + " f32", "float", lambda p: library.prepare("f32", p), "f32", nothing),
    ], {title: library.version}


def load_openblas(path, threads):
    c = ctypes.CDLL(path)
    c.openblas_set_num_threads(threads)
    c.openblas_get_config.restype = c.openblas_get_corename.restype = ctypes.c_char_p
    row_major, no_transpose, transpose = 101, 111, 112
    one, zero = ctypes.c_float(1), ctypes.c_float(0)

    def prepare(p):
        x, w, y = np.array(p.x), p.float_weight(), np.zeros((p.m, p.n), np.float32)
        sizes = (p.m, p.n, p.k)
        tail = (one, address(x), p.k, address(w), p.k, zero, address(y), p.n)

        def call():
            c.cblas_sgemm(row_major, no_transpose, transpose, *sizes, *tail)

        call.keep = (x, w)
        return Ready(call, lambda: y)

    version = c.openblas_get_config().decode().split(" NO_")[0]
    version += ", kernels for " + c.openblas_get_corename().decode()
    return [Contender("openblas f32", "float", prepare, "f32", "nothing")], {"openblas": version}


def load(peer, settings):
    if peer == "openblas":
        return load_openblas(settings["openblas"], settings["threads"])
    return load_onednn(settings[peer])
