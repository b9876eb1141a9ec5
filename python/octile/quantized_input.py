"""Quantizes the inputs of training layers in the pass that computes them.

quantize_input       any x, once for several layers
GELU, SwiGLU         activation functions (gelu, swiglu: the same as functions)
RMSNorm, LayerNorm   norms, which may add a residual first (rms_norm, layer_norm)

Each returns a QuantizedInput, which any number of octile.Linear and QuantizedLinear layers take in place of a tensor. x is
not written in 16 bits and read again. The integers are those of the activation rounded to x's type and then
quantized, docs/reference/contract.md, "Prologues".
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from . import _c, functional
from .functional import QuantizedInput

_GELU, _SILU = _c.GELU_TANH, _c.SILU
_norm_quantize = torch.ops.octile.norm_quantize.default


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
    def backward(ctx, dh, *_):  # the other outputs have no gradient
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


class _Norm(torch.autograd.Function):
    """A norm of x, or of x + residual and that sum, as the fields of a QuantizedInput."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, orientation, eps):
        rows = functional._rows(x)
        added = None if residual is None else functional._rows(residual)
        prologue = _c.RMS_NORM if bias is None else _c.LAYER_NORM
        q, q_transposed, scale, total, mean, rstd = _norm_quantize(
            rows, weight, bias, added, prologue, orientation, eps
        )
        total = x if residual is None else torch.ops.aten._unsafe_view(total, x.shape)
        ctx.mark_non_differentiable(q, q_transposed, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.centred, ctx.added = bias is not None, residual is not None
        like = x.new_full((), math.nan).expand(x.shape)
        # Not None in between: torch.compile of torch 2.11 then counts other outputs than were marked.
        return (like, q, q_transposed, scale, total) if ctx.added else (like, q, q_transposed, scale)

    @staticmethod
    @functional.once_differentiable
    def backward(ctx, dh, *others):
        dtotal = others[3] if ctx.added else None
        total, weight, mean, rstd = ctx.saved_tensors
        need_x, need_residual, need_weight, need_bias = ctx.needs_input_grad[:4]
        needs = [need_x or need_residual, need_weight, need_bias]
        dx = dweight = dbias = None
        if dh is not None:
            # In the shape of x, not as a matrix, so that torch.compile can add the gradient of the sum in the same kernel.
            z, dh = total.float(), dh.float()
            rstd = rstd.view(*z.shape[:-1], 1)
            if ctx.centred:
                wide = weight.float()  # and of the bias, which is not read, the shape
                dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
                    dh, z, weight.shape, mean.view_as(rstd), rstd, wide, wide, needs
                )
            else:
                h = z * rstd
                if needs[0]:
                    dz = dh * weight
                    dx = (dz - h * (dz * h).mean(-1, keepdim=True)) * rstd
                if need_weight:
                    dweight = (dh * h).reshape(-1, h.shape[-1]).sum(0)
            dweight, dbias = (None if d is None else d.to(weight.dtype) for d in (dweight, dbias))
        if dtotal is not None and needs[0]:
            dx = dtotal if dx is None else dx + dtotal
        dx = None if dx is None else dx.to(total.dtype)
        return dx if need_x else None, dx if need_residual else None, dweight, dbias, None, None


def _transposed(backward):
    """Whether an int8 dW will read the transpose."""
    int8 = functional.options("out_in", True, "per_token", backward, "nearest").dw == _c.INT8
    return int8 and torch.is_grad_enabled()


def _quantized(x, up, prologue, backward):
    """As an int8 dW reads it too, if `backward` has one."""
    if not torch.compiler.is_compiling():
        functional.refuse_transforms(x, up)
    if x.dim() == 0:
        raise RuntimeError("octile: x has no dimensions")
    if up is not None and (up.shape != x.shape or up.dtype is not x.dtype):
        raise RuntimeError(
            f"octile: gate is {tuple(x.shape)} of {x.dtype}, up {tuple(up.shape)} of {up.dtype}; they must match"
        )
    if torch.compiler.is_compiling():  # autocast, as the layers do it there
        x = x.to(functional.autocast_dtype(x))
        up = None if up is None else up.to(x.dtype)
    transposed = _transposed(backward)
    like, q, q_transposed, scale = _Quantize.apply(x, up, prologue, _c.BOTH if transposed else _c.ROW_MAJOR)
    return QuantizedInput(like, q, q_transposed if transposed else None, scale)


def quantize_input(x, backward="int8"):
    """x (..., K), float, quantized per token once for several layers, such as queries, keys and values.

    backward: that of the layers; with an int8 dW the transpose is written from the same read.
    """
    functional.check_tensors(x=x)
    return _quantized(x, None, _c.NO_PROLOGUE, backward)


def gelu(x, *, approximate="tanh", backward="int8"):
    """torch.nn.functional.gelu(x, approximate="tanh") as a QuantizedInput. x (..., K), float16, bfloat16 or float32."""
    _check_approximate(approximate)
    functional.check_tensors(x=x)
    return _quantized(x, None, _GELU, backward)


def swiglu(gate, up, *, backward="int8"):
    """silu(gate) * up as a QuantizedInput. gate, up (..., K), float16, bfloat16 or float32; they may be slices."""
    functional.check_tensors(gate=gate, up=up)
    return _quantized(gate, up, _SILU, backward)


def _normalized(x, residual, weight, bias, eps, backward):
    if not torch.compiler.is_compiling():
        functional.refuse_transforms(x, residual, weight)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise RuntimeError(f"octile: x is {tuple(x.shape)}, the norm's weight {tuple(weight.shape)}, expected (K,)")
    if residual is not None:
        functional.check_tensors(residual=residual)
        if residual.shape != x.shape or residual.dtype is not x.dtype:
            raise RuntimeError(
                f"octile: x is {tuple(x.shape)} of {x.dtype}, residual {tuple(residual.shape)} of {residual.dtype}; "
                "they must match"
            )
    if weight.dtype not in (torch.float32, x.dtype) or (bias is not None and bias.dtype is not weight.dtype):
        weight, bias = weight.float(), None if bias is None else bias.float()
    transposed = _transposed(backward)
    orientation = _c.BOTH if transposed else _c.ROW_MAJOR
    eps = torch.finfo(torch.float32).eps if eps is None else eps  # torch's, for 16-bit x too
    like, q, q_transposed, scale, *total = _Norm.apply(x, residual, weight, bias, orientation, eps)
    quantized = QuantizedInput(like, q, q_transposed if transposed else None, scale)
    return (quantized, *total) if total else quantized


def rms_norm(x, weight, eps=None, *, residual=None, backward="int8"):
    """torch.nn.functional.rms_norm(x, weight.shape, weight, eps) as a QuantizedInput.

    x (..., K), float16, bfloat16 or float32; weight (K). With a residual shaped as x: of x + residual, rounded to x's type;
    returns (QuantizedInput, that sum).
    """
    functional.check_tensors(x=x, weight=weight)
    return _normalized(x, residual, weight, None, eps, backward)


def layer_norm(x, weight, bias, eps=1e-5, *, residual=None, backward="int8"):
    """torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps), likewise. bias (K) or None."""
    functional.check_tensors(x=x, weight=weight)
    bias = torch.zeros_like(weight) if bias is None else bias
    return _normalized(x, residual, weight, bias, eps, backward)


def _check_approximate(approximate):
    if approximate != "tanh":
        raise ValueError(f"octile: approximate is {approximate!r}, expected 'tanh'")


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


class RMSNorm(nn.Module):
    """torch.nn.RMSNorm over the last dimension, in front of octile.Linear: the same parameter, but it returns a
    QuantizedInput, and with a residual (QuantizedInput, x + residual). backward: that layer's.
    """

    def __init__(self, width, eps=None, *, backward="int8", device=None, dtype=None):
        super().__init__()
        functional.options("out_in", True, "per_token", backward, "nearest")
        self.eps, self.backward = eps, backward
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x, residual=None):
        return rms_norm(x, self.weight, self.eps, residual=residual, backward=self.backward)

    def extra_repr(self):
        return f"{self.weight.shape[0]}, eps={self.eps}, backward={self.backward!r}"


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm over the last dimension, likewise."""

    def __init__(self, width, eps=1e-5, *, backward="int8", device=None, dtype=None):
        super().__init__()
        functional.options("out_in", True, "per_token", backward, "nearest")
        self.eps, self.backward = eps, backward
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))

    def forward(self, x, residual=None):
        return layer_norm(x, self.weight, self.bias, self.eps, residual=residual, backward=self.backward)

    extra_repr = RMSNorm.extra_repr
