"""PyTorch: the float layer with its weight stored either way, and its bare integer product."""

import torch
from gpu.contender import Contender, Quantizer


class Torch:
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
