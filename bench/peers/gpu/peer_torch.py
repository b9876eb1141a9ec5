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

    def quantizers(self, x):
        def copy():
            y = torch.empty_like(x)
            return lambda: y.copy_(x)

        return [Quantizer("torch copy_, f16", 4, copy)]
