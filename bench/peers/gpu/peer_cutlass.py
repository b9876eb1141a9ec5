"""CUTLASS, through cutlass_peer.cu: every tile that has been built, over swizzles and raster orders."""

import ctypes as C

import torch
from gpu.contender import Contender, Peer

SWIZZLES = (1, 2, 4, 8)
RASTERS = {"": 0, ", along M": 1, ", along N": 2}


class Operands(C.Structure):
    _fields_ = [(name, C.c_int64) for name in "mnk"] + [
        (name, C.c_void_p) for name in ("x", "w", "x_scale", "w_scale", "bias", "y")
    ]


class Tile:
    def __init__(self, path):
        self.name = path.stem.removeprefix("cutlass_").replace("_", " ")
        self.c = C.CDLL(str(path))
        self.c.peer_create.restype = C.c_void_p
        self.c.peer_run.argtypes = [C.c_void_p, C.c_void_p]
        self.c.peer_destroy.argtypes = [C.c_void_p]

    def settings(self, operands):
        """{text: call without a result}, for those swizzles and rasters that it accepts."""
        stream, out = torch.cuda.current_stream().cuda_stream, {}
        for swizzle in SWIZZLES:
            for text, raster in RASTERS.items():
                handle = self.c.peer_create(C.byref(operands), swizzle, raster)
                if handle:
                    out[f"{self.name}, swizzle {swizzle}{text}"] = Prepared(self.c, handle, stream)
        return out


class Prepared:
    def __init__(self, c, handle, stream):
        self.c, self.handle, self.stream = c, handle, stream

    def __call__(self):
        if self.c.peer_run(self.handle, self.stream):
            raise RuntimeError("CUTLASS could not launch its kernel")

    def __del__(self):
        self.c.peer_destroy(self.handle)


class Cutlass(Peer):
    def __init__(self, folder):
        paths = sorted(folder.glob("cutlass_*.so"))
        if not paths:
            raise RuntimeError(f"no tile is in {folder}; build.py puts them there")
        if torch.cuda.get_device_capability() != (9, 0):
            raise RuntimeError("its tiles are built for sm_90a alone")
        self.tiles = [Tile(path) for path in paths]
        number = self.tiles[0].c.peer_version()
        text = f"{number // 10000}.{number // 100 % 100}.{number % 100}, {len(paths)} tiles"
        self.versions = {"CUTLASS": text}

    def settings(self, o, xq, x_scale, y, before=lambda: None):
        pointers = [t.data_ptr() for t in (xq, o.w, x_scale, o.w_scale, o.bias, y)]
        operands = Operands(o.shape.m, o.shape.n, o.shape.k, *pointers)

        def call_of(run):
            def call():
                before()
                run()
                return y

            call.keep = (xq, x_scale)
            return call

        settings = {}
        for tile in self.tiles:
            settings |= {text: call_of(run) for text, run in tile.settings(operands).items()}
        if not settings:
            raise RuntimeError("no tile accepts this shape")
        return settings

    def contenders(self, o):
        def result():
            return torch.empty(o.shape.m, o.shape.n, dtype=torch.float16, device="cuda")

        def layer():
            # CUTLASS has no quantizer: the homework's goes first, rows with a scale each.
            from gpu import homework

            q, scale = torch.empty_like(o.xq), torch.empty_like(o.x_scale)
            return self.settings(o, q, scale, result(), lambda: homework.quantize_rows(o.x, q, scale))

        return [
            Contender("CUTLASS", "product", "product", lambda: self.settings(o, o.xq, o.x_scale, result())),
            Contender("Triton rows + CUTLASS", "layer", "layer", layer),
        ]
