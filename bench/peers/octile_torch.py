"""Octile through its C interface, on torch's tensors, of the CPU or a GPU."""

import ctypes as C

import octile_c
import torch

ELEMENTS = {
    torch.int8: octile_c.Element(0, 8, 1),
    torch.uint8: octile_c.Element(1, 8, 1),
    torch.int32: octile_c.Element(0, 32, 1),
    torch.float16: octile_c.Element(2, 16, 1),
    torch.bfloat16: octile_c.Element(4, 16, 1),
    torch.float32: octile_c.Element(2, 32, 1),
}
DTYPES = {
    torch.float16: octile_c.F16,
    torch.bfloat16: octile_c.BF16,
    torch.float32: octile_c.F32,
    torch.int8: octile_c.S8,
}


def device(of):
    if of.type == "cpu":
        return octile_c.Device(octile_c.CPU, 0)
    return octile_c.Device(octile_c.CUDA, of.index if of.index is not None else torch.cuda.current_device())


def tensor(t):
    """A view that keeps its tensor alive. Of a view itself."""
    return t if isinstance(t, octile_c.Tensor) else view(t, ELEMENTS[t.dtype], t.shape, t.stride())


def nibbles(t, columns):
    """A view of bytes as rows of so many s4, two a byte."""
    return view(t, octile_c.Element(0, 4, 1), (t.shape[0], columns), (columns, 1))


def view(t, element, shape, strides):
    sizes = C.c_int64 * len(shape)
    made = octile_c.Tensor(t.data_ptr(), device(t.device), len(shape), element, sizes(*shape), sizes(*strides), 0)
    made.keep = t
    return made


class Run:
    """A call of a plan's run, with all that it needs kept: what it costs the host is the call alone."""

    def __init__(self, plan, function, arguments, tensors, **more):
        self.plan, self.function = plan, function
        self.views = {name: tensor(t) for name, t in tensors.items()}
        pointers = {name: C.pointer(view) for name, view in self.views.items()}
        self.arguments = arguments(struct_size=C.sizeof(arguments), **pointers, **more)
        on = next(iter(tensors.values())).device
        # An allocation of torch's begins at a multiple of 64 on the CPU, of 512 on a GPU.
        self.workspace = torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device=on)
        stream = torch.cuda.current_stream().cuda_stream if on.type == "cuda" else None
        self.rest = (
            C.byref(self.arguments),
            C.c_void_p(self.workspace.data_ptr()),
            C.c_size_t(plan.workspace_size),
            C.c_void_p(stream),
        )

    def __call__(self):
        self.plan.library.ok(self.function(self.plan.handle, *self.rest))


def quantize(library, x, tensors, **fields):
    rows, columns = x.shape
    fields = {"rows": rows, "cols": columns, "x": DTYPES[x.dtype], "device": device(x.device), **fields}
    plan = library.plan("quantize", **fields)
    return Run(plan, library.c.octile_quantize_run, octile_c.QuantizeArguments, {"x": x, **tensors})


def linear(library, shape, tensors, **fields):
    fields = {"m": shape.m, "n": shape.n, "k": shape.k, "device": device(tensors["x"].device), **fields}
    fields |= {"x": DTYPES[tensors["x"].dtype], "y": DTYPES[tensors["y"].dtype], "bias": int("bias" in tensors)}
    return Run(library.plan("linear", **fields), library.c.octile_linear_run, octile_c.RunArguments, tensors)


def pack(library, tensors, **fields):
    """A packed weight, of CPU tensors by name, for each m and device."""
    plan = library.plan("linear", m=1, packed_weight=1, **fields)
    packed = torch.empty(plan.packed_weight_size, dtype=torch.uint8)
    library.pack(plan, packed=tensor(packed), **{name: tensor(t) for name, t in tensors.items()})
    return packed


def backward(library, shape, tensors, seed=0, **fields):
    """dX, dW and dB as there are tensors for them; dX and dW as fields["dx"] and fields["dw"] say."""
    dy = tensors["dy"]
    fields = {"m": shape.m, "n": shape.n, "k": shape.k, "device": device(dy.device), "dy": DTYPES[dy.dtype], **fields}
    fields |= {name: octile_c.NO_PRODUCT for name in ("dx", "dw") if name not in tensors}
    if "dw" in tensors:
        fields["dw_dtype"] = DTYPES[tensors["dw"].dtype]
    fields["db"] = int("db" in tensors)
    plan = library.plan("linear_backward", **fields)
    arguments = octile_c.BackwardArguments
    return Run(plan, library.c.octile_linear_backward_run, arguments, tensors, seed=seed)
