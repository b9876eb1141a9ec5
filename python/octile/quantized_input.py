"""What makes the inputs of layers that train int8 in the pass that computes them.

quantize_input   of any x, once for several layers
GELU, SwiGLU     activations (gelu, swiglu: the same as functions)

Each returns a QuantizedInput, which octile.Linear and QuantizedLinear take in place of a tensor, any number of them the
same one. x is not written in 16 bits and read again. The integers are those of the activation rounded to x's type and then
quantized, docs/reference/contract.md, "Prologues".
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from . import _c, functional
from .functional import QuantizedInput

_GELU, _SILU = _c.GELU_TANH, _c.SILU


def _activated(prologue, x):
    return F.gelu(x, approximate="tanh") if prologue == _GELU else F.silu(x)


def _through(prologue, dh, x):
    if prologue == _GELU:
        return torch.ops.aten.gelu_backward(dh, x, approximate="tanh")
    return torch.ops.aten.silu_backward(dh, x)


class _Quantize(torch.autograd.Function):
    """x, or an activation of x, or that times up, as the fields of a QuantizedInput."""

    @staticmethod
    def forward(ctx, x, up, prologue, orientation):
        rows = functional._rows(x)
        of_up = None if up is None else functional._rows(up)
        q, q_transposed, scale = functional._quantize(rows, _c.PER_ROW, orientation, None, prologue, of_up)
        ctx.mark_non_differentiable(q, q_transposed, scale)
        ctx.set_materialize_grads(False)
        ctx.prologue = prologue
        ctx.save_for_backward(*((None, None) if prologue == _c.NO_PROLOGUE else (x, up)))
        return x.new_full((), math.nan).expand(x.shape), q, q_transposed, scale

    @staticmethod
    @functional.once_differentiable
    def backward(ctx, dh):
        x, up = ctx.saved_tensors
        prologue, (need_x, need_up) = ctx.prologue, ctx.needs_input_grad[:2]
        if dh is None or prologue == _c.NO_PROLOGUE:
            return dh, None, None, None
        dx = dup = None
        if need_x:
            dx = _through(prologue, dh if up is None else dh * up, x)
        if need_up:
            dup = dh * _activated(prologue, x)
        return dx, dup, None, None


def _quantized(x, up, prologue, backward):
    """As an int8 dW reads it too, if `backward` has one."""
    if not torch.compiler.is_compiling():
        functional.refuse_transforms(x, up)
    if x.dim() == 0:
        raise RuntimeError("octile: x has no dimensions")
    if up is not None and (up.shape != x.shape or up.dtype is not x.dtype):
        raise RuntimeError(
            f"octile: gate is {tuple(x.shape)} of {x.dtype}, up {tuple(up.shape)} of {up.dtype}; they have to be alike"
        )
    if torch.compiler.is_compiling():  # autocast, as the layers do it there
        x = x.to(functional.autocast_dtype(x))
        up = None if up is None else up.to(x.dtype)
    int8 = functional.options("out_in", True, "per_token", backward, "nearest").dw == _c.INT8
    transposed = int8 and torch.is_grad_enabled()
    like, q, q_transposed, scale = _Quantize.apply(x, up, prologue, _c.BOTH if transposed else _c.ROW_MAJOR)
    return QuantizedInput(like, q, q_transposed if transposed else None, scale)


def quantize_input(x, backward="int8"):
    """x (..., K), float, quantized per token once for several layers that take it: queries, keys and values, say.

    backward: the layers' own; with an int8 dW the transpose is written from the same read.
    """
    return _quantized(x, None, _c.NO_PROLOGUE, backward)


def gelu(x, *, approximate="tanh", backward="int8"):
    """torch.nn.functional.gelu(x, approximate="tanh") as a QuantizedInput. x (..., K), float16, bfloat16 or float32."""
    _check_approximate(approximate)
    return _quantized(x, None, _GELU, backward)


def swiglu(gate, up, *, backward="int8"):
    """silu(gate) * up as a QuantizedInput. gate, up (..., K), float16, bfloat16 or float32; they may be slices."""
    return _quantized(gate, up, _SILU, backward)


def _check_approximate(approximate):
    if approximate != "tanh":
        raise ValueError(f"octile: approximate is {approximate!r}; 'tanh' is known")


class GELU(nn.Module):
    """torch.nn.GELU(approximate="tanh") in front of octile.Linear: returns a QuantizedInput. backward: that layer's."""

    def __init__(self, approximate="tanh", *, backward="int8"):
        super().__init__()
        _check_approximate(approximate)
        functional.options("out_in", True, "per_token", backward, "nearest")
        self.approximate, self.backward = approximate, backward

    def forward(self, x):
        return gelu(x, approximate=self.approximate, backward=self.backward)

    def extra_repr(self):
        return f"approximate={self.approximate!r}, backward={self.backward!r}"


class SwiGLU(nn.Module):
    """silu(gate) * up in front of octile.Linear: returns a QuantizedInput. backward: that layer's."""

    def __init__(self, *, backward="int8"):
        super().__init__()
        functional.options("out_in", True, "per_token", backward, "nearest")
        self.backward = backward

    def forward(self, gate, up):
        return swiglu(gate, up, backward=self.backward)

    def extra_repr(self):
        return f"backward={self.backward!r}"
