"""cuBLASLt's int8 product, through cublaslt_peer.cpp: the heuristic's proposals, all of them timed."""

import ctypes as C

import torch
from gpu.contender import Contender, Peer


class Operands(C.Structure):
    _fields_ = [(name, C.c_int64) for name in "mnk"] + [(name, C.c_void_p) for name in ("x", "w", "y")]


class CublasLt(Peer):
    def __init__(self, folder):
        torch.ones(16, 16, device="cuda").mm(torch.ones(16, 16, device="cuda"))  # loads torch's cuBLASLt, for both
        self.c = C.CDLL(str(folder / "cublaslt.so"))
        self.c.peer_error.restype = C.c_char_p
        self.c.peer_create.restype = C.c_void_p
        self.c.peer_run.argtypes = [C.c_void_p, C.c_int, C.c_void_p]
        for name in ("peer_candidates", "peer_destroy"):
            getattr(self.c, name).argtypes = [C.c_void_p]
        number = self.c.peer_version()
        self.versions = {"cuBLASLt": f"{number // 10000}.{number // 100 % 100}.{number % 100}"}

    def contenders(self, o):
        def prepare():
            y = torch.empty(o.shape.m, o.shape.n, dtype=torch.int32, device="cuda")
            operands = Operands(o.shape.m, o.shape.n, o.shape.k, o.xq.data_ptr(), o.w.data_ptr(), y.data_ptr())
            handle = self.c.peer_create(C.byref(operands))
            if not handle:
                raise RuntimeError(self.c.peer_error().decode())
            owner = Owner(self.c.peer_destroy, handle)

            def call_of(candidate):
                stream = torch.cuda.current_stream().cuda_stream

                def call():
                    if self.c.peer_run(owner.handle, candidate, stream):
                        raise RuntimeError(self.c.peer_error().decode())
                    return y

                return call

            count = self.c.peer_candidates(handle)
            return {f"proposal {i + 1} of {count}": call_of(i) for i in range(count)}

        return [Contender("cuBLASLt", "product", "sums", prepare)]


class Owner:
    def __init__(self, destroy, handle):
        self.destroy, self.handle = destroy, handle

    def __del__(self):
        self.destroy(self.handle)
