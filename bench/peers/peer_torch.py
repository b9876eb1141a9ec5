"""PyTorch: float layers, its quantized layers, and its bare integer products."""

import warnings

import numpy as np
import torch
from worker import Contender, Ready

warnings.filterwarnings("ignore")


def of(array):
    return torch.from_numpy(np.array(array))


class Inference:
    """run() without autograd, with its last result kept."""

    def __init__(self, function):
        self.function, self.result = function, None

    def __call__(self):
        with torch.inference_mode():
            self.result = self.function()

    def output(self):
        return self.result.float().numpy() if self.result.dtype == torch.bfloat16 else self.result.numpy()


def ready(function):
    run = Inference(function)
    return Ready(run, run.output)


def float_linear(dtype):
    def prepare(p):
        x, w, bias = (of(a).to(dtype) for a in (p.x, p.float_weight(), p.bias))
        return ready(lambda: torch.nn.functional.linear(x, w, bias))

    return prepare


def dynamic_linear(engine):
    """What quantize_dynamic makes of a Linear, but with X in 8 bits; it asks for 7, which takes the same time."""

    def prepare(p):
        torch.backends.quantized.engine = engine
        zero = torch.zeros(p.n, dtype=torch.int64)
        w = torch._make_per_channel_quantized_tensor(of(p.w), of(p.w_scale).double(), zero, 0)
        packed = torch.ops.quantized.linear_prepack(w, of(p.bias))
        x, linear = of(p.x), torch.ops.quantized.linear_dynamic
        return ready(lambda: linear(x, packed, reduce_range=False))

    return prepare


def int_mm(p):
    x, w = of(p.xq), of(p.w).t()
    return ready(lambda: torch._int_mm(x, w))


def qlinear(x_type):
    """The layer of the exported (PT2E) flow: X handed over quantized, its scale 1 here."""

    def prepare(p):
        x = of(p.xq) if x_type == "s8" else of(p.xu())
        packed = torch.ops.onednn.qlinear_prepack(of(p.w), list(x.shape))
        ones, zeros = torch.ones(p.n), torch.zeros(p.n, dtype=torch.int64)
        call = torch.ops.onednn.qlinear_pointwise
        rest = (ones, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return ready(lambda: call(x, 1.0, 0, packed, *rest))

    return prepare


def int4_linear(dtype):
    def prepare(p):
        w = torch.ops.aten._convert_weight_to_int4pack_for_cpu((of(p.w4).int() + 8), 1)
        scales = of(p.w4_scale).t()
        scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), 2).contiguous().to(dtype)
        x, call = of(p.x).to(dtype), torch.ops.aten._weight_int4pack_mm_for_cpu
        return ready(lambda: call(x, w, p.group, scales_and_zeros))

    return prepare


def load(_, settings):
    torch.set_num_threads(settings["threads"])
    torch.set_num_interop_threads(1)
    contenders = [
        Contender("torch f32", "float", float_linear(torch.float32), "f32", "bias"),
        Contender("torch bf16", "float", float_linear(torch.bfloat16), "bf16", "bias"),
        Contender("torch _int_mm", "w8", int_mm, "s8", "nothing"),
        Contender("torch qlinear s8 X", "w8", qlinear("s8"), "s8", "scales"),
        Contender("torch qlinear u8 X", "w8", qlinear("u8"), "u8", "scales"),
        Contender("torch int4 bf16", "w4", int4_linear(torch.bfloat16), "bf16", "scales"),
        Contender("torch int4 f32", "w4", int4_linear(torch.float32), "f32", "scales"),
    ]
    for engine in ("onednn", "x86", "fbgemm"):
        if engine in torch.backends.quantized.supported_engines:
            prepare = dynamic_linear(engine)
            contenders.append(
                Contender(f"torch dynamic {engine}", "w8", prepare, "f32", "scales, bias", quantizer="tensor")
            )
    versions = {"torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"}
    return contenders, versions
