"""PyTorch: the float layer with its weight stored either way, its bare integer product, fp8, and 4-bit weights."""

import torch
from gpu.contender import Contender, Peer, Quantizer

TINYGEMM_ROWS = 256


class Torch(Peer):
    versions = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda}

    def contenders(self, o):
        def addmm(dtype):
            def prepare():
                x, bias, w = o.x.to(dtype), o.bias.to(dtype), o.float_weight(dtype)
                other = w.T.contiguous()
                return {
                    "W (OUT, IN)": lambda: torch.addmm(bias, x, w.T),
                    "W (IN, OUT)": lambda: torch.addmm(bias, x, other),
                }

            return prepare

        def int_mm():
            w = o.w.T
            return {"": lambda: torch._int_mm(o.xq, w)}

        floats = [("torch f16", addmm(torch.float16)), ("torch bf16", addmm(torch.bfloat16))]
        return [
            *(Contender(name, part, "float", prepare) for part in ("product", "layer") for name, prepare in floats),
            Contender("torch _int_mm", "product", "sums", int_mm),
        ]

    def backward(self, g):
        """Where the layout of W may be chosen, it is both."""

        def prepare(part, dtype):
            x, w, dy, bias = g.floats(dtype)
            other = w.T.contiguous().T  # its bytes (IN, OUT)
            ones = torch.ones(1, g.shape.m, dtype=dtype, device="cuda")

            def dx(w):
                return lambda: {"dx": torch.mm(dy, w)}

            def dw():
                return {"dw": torch.mm(dy.T, x)}

            def dw_t():
                return {"dw_t": torch.mm(x.T, dy)}

            def db():
                return {"db": dy.sum(0)}

            def all_of(w, dw):
                return lambda: {"dx": torch.mm(dy, w), **dw(), **db()}

            def step(w, dw):
                return lambda: {"y": torch.addmm(bias, x, w.T), "dx": torch.mm(dy, w), **dw(), **db()}

            return {
                "dx": {"W (OUT, IN)": dx(w), "W (IN, OUT)": dx(other)},
                "dw": {"dW (OUT, IN)": dw, "dW (IN, OUT)": dw_t},
                "db": {"sum": db, "product with ones": lambda: {"db": torch.mm(ones, dy)[0]}},
                "backward": {"dW (OUT, IN)": all_of(w, dw), "dW (IN, OUT)": all_of(w, dw_t)},
                "step": {"W (OUT, IN)": step(w, dw), "W (IN, OUT)": step(other, dw_t)},
            }[part]

        def contender(part, name, dtype):
            return Contender(name, part, "float", lambda: prepare(part, dtype))

        half, bfloat = ("torch f16", torch.float16), ("torch bf16", torch.bfloat16)
        made = [contender(part, *name) for part in ("dx", "dw", "backward", "step") for name in (half, bfloat)]
        return [*made, contender("db", *half)]

    def quantizers(self, x):
        def copy():
            y = torch.empty_like(x)
            return lambda: y.copy_(x)

        return [Quantizer("torch copy_, f16", 4, copy)]

    def serving(self, p):
        def contender(name, part, task, prepare):
            return Contender(name, part, task, lambda: {"": prepare(p)})

        name = "cuBLAS " + {torch.float16: "f16", torch.bfloat16: "bf16"}[p.weight.dtype]
        made = [contender(name, p.format, "float", linear)]
        if p.format == "w8a8":
            made.append(contender("torch fp8", "w8a8-product", "float", fp8))
            made.append(contender("torch _int_mm", "w8a8-product", "sums", int_mm))
        if p.format == "w4a16":
            made.append(contender("tinygemm", "w4a16", "float", tinygemm))
        return made


def linear(p):
    x, w = p.x, p.weight.floats
    return lambda: torch.nn.functional.linear(x, w)


def int_mm(p):
    x, w = p.quantized[0], p.weight.q.T
    return lambda: torch._int_mm(x, w)


def fp8(p):
    """Both operands given in fp8, a scale for each row of both; its result is bf16."""

    def rounded(t):
        scale = t.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
        return (t.float() / scale).to(torch.float8_e4m3fn), scale

    x, x_scale = rounded(p.x)
    w, w_scale = p.weight.once("fp8", lambda: rounded(p.weight.exact))
    w_scale = w_scale.T.contiguous()
    return lambda: torch._scaled_mm(x, w.T, x_scale, w_scale, out_dtype=torch.bfloat16)


def tinygemm(p):
    """Scales, X and result are bf16, whatever the layer's are."""
    w = p.weight
    if p.shape.m > TINYGEMM_ROWS:
        raise RuntimeError(f"takes a millisecond and more above {TINYGEMM_ROWS} rows")
    if not w.group:
        raise RuntimeError("takes groups alone")

    def pack():
        codes = w.codes.to(torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        zero = torch.zeros_like(w.scale) if w.zero is None else -w.zero * w.scale
        return packed, torch.stack([w.scale.T, zero.T], 2).to(torch.bfloat16).contiguous()

    packed, scales = w.once("tinygemm", pack)
    x = p.x.to(torch.bfloat16)
    return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, w.group, scales)
