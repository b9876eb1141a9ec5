"""Octile through its C interface, on CUDA tensors of torch's."""

import ctypes as C

import octile_c
import torch
from gpu.contender import Contender, Quantizer
from gpu.problem import quantize

ELEMENTS = {
    torch.int8: octile_c.Element(0, 8, 1),
    torch.float16: octile_c.Element(2, 16, 1),
    torch.float32: octile_c.Element(2, 32, 1),
}
GRANULARITIES = {"rows": octile_c.PER_ROW, "tensor": octile_c.PER_TENSOR, "columns": octile_c.PER_COLUMN}
ORIENTATIONS = {octile_c.ROW_MAJOR: "", octile_c.TRANSPOSED: ", transposed", octile_c.BOTH: ", both orientations"}


def tensor(t):
    """A view that keeps its tensor alive."""
    shape = (C.c_int64 * t.dim())(*t.shape)
    strides = (C.c_int64 * t.dim())(*t.stride())
    device = octile_c.Device(octile_c.CUDA, t.device.index)
    view = octile_c.Tensor(t.data_ptr(), device, t.dim(), ELEMENTS[t.dtype], shape, strides, 0)
    view.keep = t
    return view


class Run:
    """A call of a plan's run, with all that it needs kept: what it costs the host is the call alone."""

    def __init__(self, plan, function, arguments, tensors):
        self.plan, self.function = plan, function
        self.views = {name: tensor(t) for name, t in tensors.items()}
        self.arguments = arguments(struct_size=C.sizeof(arguments), **{n: C.pointer(v) for n, v in self.views.items()})
        self.workspace = torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device="cuda")
        self.rest = (
            C.byref(self.arguments),
            C.c_void_p(self.workspace.data_ptr()),
            C.c_size_t(plan.workspace_size),
            C.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def __call__(self):
        self.plan.library.ok(self.function(self.plan.handle, *self.rest))


class Octile:
    def __init__(self, path):
        self.library = octile_c.Library(path)
        self.device = octile_c.Device(octile_c.CUDA, torch.cuda.current_device())
        self.versions = {"octile": self.library.version()}

    def linear(self, o, x, x_scale=None):
        """{the plan's kernels: call}. With x_scale X is in 8 bits, and else quantized in the call."""
        dtype = octile_c.S8 if x_scale is not None else octile_c.F16
        fields = {"m": o.shape.m, "n": o.shape.n, "k": o.shape.k, "x": dtype, "y": octile_c.F16, "bias": 1}
        fields |= {"activation": octile_c.DYNAMIC_PER_TOKEN, "weight": octile_c.S8_PER_CHANNEL}
        plan = self.library.linear(**fields, device=self.device)
        y = torch.empty(o.shape.m, o.shape.n, dtype=torch.float16, device="cuda")
        tensors = {"x": x, "weight": o.w, "weight_scale": o.w_scale, "bias": o.bias, "y": y}
        if x_scale is not None:
            tensors["x_scale"] = x_scale
        run = Run(plan, self.library.c.octile_linear_run, octile_c.RunArguments, tensors)

        def call():
            run()
            return y

        return {plan.sku: call}

    def contenders(self, o):
        return [
            Contender("Octile", "product", "product", lambda: self.linear(o, o.xq, o.x_scale)),
            Contender("Octile", "layer", "layer", lambda: self.linear(o, o.x)),
        ]

    def quantizers(self, x):
        return [
            self.quantizer(x, "rows", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "rows", octile_c.TRANSPOSED, 3),
            self.quantizer(x, "rows", octile_c.BOTH, 4),
            self.quantizer(x, "tensor", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "tensor", octile_c.BOTH, 4),
            self.quantizer(x, "columns", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "columns", octile_c.TRANSPOSED, 3),
            self.quantizer(x, "columns", octile_c.BOTH, 4),
        ]

    def quantizer(self, x, granularity, orientation, bytes_per_element):
        (rows, columns), made = x.shape, {}

        def prepare():
            fields = {"rows": rows, "cols": columns, "x": octile_c.F16, "orientation": orientation}
            plan = self.library.quantize(**fields, granularity=GRANULARITIES[granularity], device=self.device)
            scales = {"rows": rows, "tensor": 1, "columns": columns}[granularity]
            tensors = {"x": x, "scale": torch.empty(scales, device="cuda")}
            if orientation != octile_c.TRANSPOSED:
                tensors["q"] = torch.full((rows, columns), -128, dtype=torch.int8, device="cuda")
            if orientation != octile_c.ROW_MAJOR:
                tensors["q_transposed"] = torch.full((columns, rows), -128, dtype=torch.int8, device="cuda")
            made.update(tensors, sku=plan.sku)
            return Run(plan, self.library.c.octile_quantize_run, octile_c.QuantizeArguments, tensors)

        def check():
            dimension = {"rows": 1, "tensor": (0, 1), "columns": 0}[granularity]
            q, scale = quantize(x, x.abs().amax(dimension, keepdim=True))
            q = q.to(torch.int8)
            same = torch.equal(made["scale"], scale.reshape(-1))
            same &= "q" not in made or torch.equal(made["q"], q)
            same &= "q_transposed" not in made or torch.equal(made["q_transposed"], q.T)
            if not same:
                raise RuntimeError("WRONG: not the bits of the contract")
            return f"{made['sku']}: exact"

        return Quantizer(f"Octile {granularity}{ORIENTATIONS[orientation]}", bytes_per_element, prepare, check)
