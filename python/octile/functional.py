"""The quantized linear layer as a function, and its autograd.

    y = dequantize(quantize(x)) @ dequantize(quantize(w))^T + b      x (..., K), w (N, K), b (N), y (..., N)

The products are of int8 and exact; docs/reference/contract.md has every rounding. Ops are called below autograd, inside one
autograd.Function: it saves int8 tensors and their scales, in the orientation that the backward will read, and no 16-bit
copy of x or w.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from . import _c, _ops, arrays, quantizer  # noqa: F401  (_ops registers torch.ops.octile)
from .fsdp import GatheredWeight

_quantize = torch.ops.octile.quantize.default
_dequantize = torch.ops.octile.dequantize.default
_linear = torch.ops.octile.linear.default
_linear_int8 = torch.ops.octile.linear_int8.default
_linear_s4 = torch.ops.octile.linear_s4.default
_linear_packed = torch.ops.octile.linear_packed.default
_linear_backward = torch.ops.octile.linear_backward.default

# The same ops without the Python frame around them, a third of a microsecond; torch.compile takes those above.
_linear_at_once = getattr(_linear, "_op", _linear)
_linear_s4_at_once = getattr(_linear_s4, "_op", _linear_s4)
_linear_packed_at_once = getattr(_linear_packed, "_op", _linear_packed)

_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", None) or (
    lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
)

LONGEST_SUM = 131_071  # of int8 products that 32 bits hold exactly, docs/reference/contract.md

_LAYOUTS = {"out_in": _c.OUT_IN, "in_out": _c.IN_OUT}
_ACTIVATIONS = {"per_token": _c.DYNAMIC_PER_TOKEN, "per_tensor": _c.DYNAMIC_PER_TENSOR}
_PRODUCTS = {"16bit": _c.DEQUANTIZED, "int8": _c.INT8}
GRADIENT_BLOCK = 256  # of "int8"; docs/explanation/training.md, "Which blocks"
# Of layers that train: the words for int8 products, and the blocks that they mean.
GRADIENT_BLOCKS = {"int8": GRADIENT_BLOCK, "int8-whole": 0} | {f"int8-{size}": size for size in (128, 256, 512, 1024)}
_BACKWARDS = _PRODUCTS | dict.fromkeys(GRADIENT_BLOCKS, _c.INT8)
_ROUNDINGS = {"nearest": _c.NEAREST, "stochastic": _c.STOCHASTIC}


class Options(NamedTuple):
    """How a layer quantizes; the constants are those of octile.h."""

    layout: int  # of the float weight and of its gradient
    per_channel: bool
    activation: int
    dx: int
    dw: int
    rounding: int  # of dY in the int8 products of the backward
    gradient_block: int  # terms of the contraction that share a scale of dY in them; 0: all


def _choice(name, value, known):
    try:
        return known[value]
    except (KeyError, TypeError):
        raise ValueError(f"octile: {name} is {value!r}, expected {' or '.join(map(repr, known))}") from None


def product(backward):
    """The constant of the word that says how dX of a frozen layer is computed."""
    return _choice("backward", backward, _PRODUCTS)


def options(layout, per_channel, activation, backward, rounding):
    """Options from the words that layers take. `backward`: "16bit", one of GRADIENT_BLOCKS, or a pair for (dX, dW)."""
    backward = tuple(backward) if isinstance(backward, list) else backward
    words = layout, per_channel, activation, backward, rounding
    if torch.compiler.is_compiling():
        return _options(*words)
    try:
        return _known_options(*words)
    except TypeError:  # one cannot be hashed, so it is no word: this names it
        return _options(*words)


def _options(layout, per_channel, activation, backward, rounding):
    pair = backward if isinstance(backward, tuple) else (backward, backward)
    if len(pair) != 2:
        raise ValueError(f"octile: backward is {backward!r}; a pair is for (dX, dW)")
    blocks = {GRADIENT_BLOCKS[word] for word in pair if isinstance(word, str) and word in GRADIENT_BLOCKS}
    if len(blocks) > 1:
        raise ValueError(f"octile: backward is {backward!r}; dX and dW have the same blocks, or one of them is '16bit'")
    return Options(
        _choice("layout", layout, _LAYOUTS),
        bool(per_channel),
        _choice("activation", activation, _ACTIVATIONS),
        _choice("backward", pair[0], _BACKWARDS),
        _choice("backward", pair[1], _BACKWARDS),
        _choice("rounding", rounding, _ROUNDINGS),
        max(blocks, default=0),
    )


_known_options = functools.lru_cache(maxsize=64)(_options)

# Of stochastic rounding: another one for every forward. A graph has the same in every run, since a number that changes
# would be recompiled.
_seeds = itertools.count(1)


def quantize_weight(w, o, both):
    """int8 of the float weight w: (wq (N, K), wt (K, N) or None, scale (N) or (1)).

    `both`: also make wt, which int8 dX reads. A weight (IN, OUT) is read as it is: its columns are the channels, and
    its transpose is what the forward reads. One that FSDP2 has gathered is int8 already, and has no wt.
    """
    if type(w) is GatheredWeight:
        wq, scale = w.quantized(o)
        return wq, None, scale
    if o.layout == _c.OUT_IN:
        granularity = _c.PER_ROW if o.per_channel else _c.PER_TENSOR
        wq, wt, scale = _quantize(w, granularity, _c.BOTH if both else _c.ROW_MAJOR)
    else:
        granularity = _c.PER_COLUMN if o.per_channel else _c.PER_TENSOR
        wt, wq, scale = _quantize(w, granularity, _c.BOTH if both else _c.TRANSPOSED)
    return wq, (wt if both else None), scale


def autocast_dtype(x):
    """The type that the layer's output has: x's, or autocast's where that is on (float64 stays)."""
    kind = x.device.type
    if x.dtype is torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _rows(x):
    """x (..., K) as (M, K), also where M or K is 0."""
    if x.dim() == 2:
        return x
    m = 1
    for size in x.shape[:-1]:
        m *= size
    return x.reshape(m, x.shape[-1])


def check_tensors(**arguments):
    """Raises TypeError for an argument that is no tensor."""
    for name, t in arguments.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"octile: {name} is a {type(t).__name__}, expected a tensor") from None


_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def check_input(x, in_features, dtype=None):
    """Raises if x is not (..., in_features), or does not go with a layer in `dtype`. The library would blame the weight
    instead."""
    if not isinstance(x, torch.Tensor):
        hint = "; octile.Linear and W8A8Linear that is not packed take one" if type(x) is QuantizedInput else ""
        raise TypeError(f"octile: x is a {type(x).__name__}, expected a tensor{hint}") from None
    if x.is_nested or x.is_quantized or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else "quantized by torch" if x.is_quantized else f"of {x.layout}"
        raise RuntimeError(f"octile: x is {kind}; layers take dense tensors of floats") from None
    if x.dtype not in _FLOATS:
        raise RuntimeError(f"octile: x is {x.dtype}; layers take float16, bfloat16, float32 or float64") from None
    if x.dim() == 0 or x.size(-1) != in_features:
        raise RuntimeError(
            f"octile: x is {tuple(x.shape)}; the layer's in_features, its last size, is {in_features}"
        ) from None
    if dtype is not None and (x.dtype is torch.float64) != (dtype is torch.float64):
        raise RuntimeError(f"octile: x is {x.dtype}, the layer {dtype}; float64 only goes with float64") from None


class QuantizedInput(NamedTuple):
    """The input of layers, x (..., K), quantized per token for all of them at once: what octile.quantize_input(), octile.GELU,
    octile.SwiGLU and the norms return, and octile.Linear and W8A8Linear take in place of a tensor."""

    like: torch.Tensor  # stands for x in autograd: its shape, type and gradient. Its values are NaN
    q: torch.Tensor  # int8 (M, K)
    q_transposed: torch.Tensor | None  # int8 (K, M), for an int8 dW
    scale: torch.Tensor  # (M)

    @property
    def shape(self):
        """x's."""
        return self.like.shape

    def check(self, in_features, dtype):
        """As check_input(); and raises where the scales are not what they were made as."""
        check_input(self.like, in_features, dtype)
        if self.scale.dtype is not (torch.float64 if self.like.dtype is torch.float64 else torch.float32):
            raise RuntimeError(
                f"octile: the scales of x were cast to {self.scale.dtype}. FSDP2's MixedPrecisionPolicy does that to what "
                "enters a module: shard the block, or give the layers in it cast_forward_inputs=False"
            )


def bias_in(b, dtype):
    """b as the kernel takes it: in y's type."""
    if b is None or b.dtype is dtype:
        return b
    if not b.is_floating_point() or (b.dtype is torch.float64) != (dtype is torch.float64):
        expected = "float64" if dtype is torch.float64 else "float16, bfloat16 or float32"
        raise RuntimeError(f"octile: b is {b.dtype}, expected {expected} for a y of {dtype}")
    return b.to(dtype)


def _multiply(xq, xs, wq, ws, b, dtype, leading):
    """y (*leading, N) in `dtype`."""
    y = _linear_int8(xq, xs, wq, ws, b, _c.OUT_IN, dtype)
    if len(leading) != 1:
        # Not a view for autograd, which would refuse to change it in place; nothing else refers to y.
        y = torch.ops.aten._unsafe_view(y, (*leading, wq.shape[0]))
    return y


def _quantize_and_multiply(x, wq, ws, b, activation, orientation, dtype):
    """y (..., N) in `dtype`, and x as it was quantized: (y, xq, xt, xs)."""
    granularity = _c.PER_ROW if activation == _c.DYNAMIC_PER_TOKEN else _c.PER_TENSOR
    xq, xt, xs = _quantize(_rows(x), granularity, orientation)
    return _multiply(xq, xs, wq, ws, b, dtype, x.shape[:-1]), xq, xt, xs


def _infer(x, wq, ws, b, activation, dtype):
    b = bias_in(b, dtype)
    if dtype is x.dtype:
        return _linear(x, wq, ws, b, activation, _c.OUT_IN)
    return _quantize_and_multiply(x, wq, ws, b, activation, _c.ROW_MAJOR, dtype)[0]


def _dw_dtype(dy, w):
    """The type in which the kernel writes dW: the weight's if it can, else one that loses nothing."""
    if w == dy or dy is torch.float64:
        return dy
    return torch.float32


_TWICE = (
    b"octile: a quantized layer can be differentiated once; its gradients are not functions of its inputs; "
    b"see docs/how-to/errors.md#layers"
)


def once_differentiable(backward):
    """torch's decorator of that name silently treats a gradient penalty as a constant if dY needs no gradient."""

    @functools.wraps(backward)
    def wrapper(ctx, *given):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *given)
        with torch.no_grad():
            gradients = backward(ctx, *given)
        refusing = [None if g is None else g.detach().requires_grad_() for g in gradients]
        # With dY, so that it is met as well by who differentiates by what dY was made of.
        all_of_them = [*refusing, *(g for g in given if g is not None)]
        return tuple(torch._C._functions.DelayedError(_TWICE, len(all_of_them))(*all_of_them))[: len(refusing)]

    return wrapper


class _Linear(torch.autograd.Function):
    """Positional, so that torch.compile can trace it."""

    @staticmethod
    def forward(ctx, x, w, b, wq, wt, ws, layout, activation, dx, dw, rounding, seed, dtype, gradient_block=0, *levels):
        """levels: (xq, xt, xs) of a QuantizedInput, whose `like` is x."""
        need_x, need_w = ctx.needs_input_grad[:2]
        bias = bias_in(b, dtype)
        if levels:
            xq, xt, xs = levels
            y = _multiply(xq, xs, wq, ws, bias, dtype, x.shape[:-1])
        elif need_w:
            orientation = _c.BOTH if dw == _c.INT8 else _c.ROW_MAJOR
            y, xq, xt, xs = _quantize_and_multiply(x, wq, ws, bias, activation, orientation, dtype)
        else:
            y = _infer(x, wq, ws, b, activation, dtype)
        if need_w:
            if dw == _c.INT8 and xq.shape[0] > LONGEST_SUM:
                raise ValueError(
                    f"octile: x has {xq.shape[0]} rows, and an int8 dW sums at most {LONGEST_SUM} exactly; "
                    'backward=("int8", "16bit") has no such limit'
                )
            x_saved, xs_saved = (xt if dw == _c.INT8 else xq), xs
        else:
            x_saved = xs_saved = None
        w_transposed = dx == _c.INT8 and wt is not None
        if need_x:
            ctx.save_for_backward(x_saved, xs_saved, wt if w_transposed else wq, ws)
        else:
            ctx.save_for_backward(x_saved, xs_saved, None, None)
        ctx.choices = layout, dx, dw, _c.IN_OUT if w_transposed else _c.OUT_IN
        ctx.rounding, ctx.seed = rounding, seed
        ctx.dtypes = x.dtype, w.dtype, (None if b is None else b.dtype)
        ctx.leading = x.shape[:-1]
        ctx.gradient_block = gradient_block
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        x, xs, w, ws = ctx.saved_tensors
        ws = ws.flatten() if need_x else None  # one group a row is one scale a channel
        layout, dx_product, dw_product, w_layout = ctx.choices
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        of_w = (w, ws) if need_x else (None, None)
        of_x = (x, xs) if need_w else (None, None)
        products = dx_product if need_x else _c.NO_PRODUCT, dw_product if need_w else _c.NO_PRODUCT
        layouts = w_layout, dw_product == _c.INT8, _dw_dtype(dy.dtype, w_dtype), layout
        choices = ctx.rounding, ctx.seed, ctx.gradient_block if _c.INT8 in products else 0
        dx, dw, db = _linear_backward(_rows(dy), *of_w, *of_x, *products, need_b, *layouts, *choices)
        if need_x:
            dx = dx if dx.dtype is x_dtype else dx.to(x_dtype)
            dx = dx if dy.dim() == 2 else dx.view(*ctx.leading, dx.shape[1])
        if need_w and dw.dtype is not w_dtype:
            dw = dw.to(w_dtype)
        if need_b and db.dtype is not b_dtype:
            db = db.to(b_dtype)
        gradients = (dx if need_x else None, dw if need_w else None, db if need_b else None)
        return (*gradients, *(None,) * (len(ctx.needs_input_grad) - 3))


# Function.apply without its questions about torch.func, which run() has asked already: 1.5 us.
_apply_at_once = super(torch.autograd.Function, _Linear).apply

_transforms_active = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled


def refuse_transforms(x, w=None, b=None):
    """Raises if a torch.func transform or forward-mode differentiation would go through the layer."""
    if _transforms_active():
        raise NotImplementedError(
            "octile: vmap, grad, jvp and the other transforms of torch.func do not go through a quantized layer; call it "
            "with a leading batch dimension, and take gradients with backward() or torch.autograd.grad()"
        )
    for t in (x, w, b) if forward_ad._current_level >= 0 else ():
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError("octile: a quantized layer has no forward-mode derivative; use backward()")


def traced(x, w, b, o, prepared=None):
    """run(), as torch.compile sees it. `prepared`: (wq, wt, ws) of cache_weights_(), or w is quantized in the graph."""
    dtype = autocast_dtype(x)
    # Fuses into whatever made x, which then writes half the bytes.
    x = x.to(dtype)
    need_x = w_or_b = False
    if torch.is_grad_enabled():
        need_x = x.requires_grad
        w_or_b = w.requires_grad or (b is not None and b.requires_grad)
    wq, wt, ws = prepared or quantize_weight(w.detach(), o, need_x and o.dx == _c.INT8)
    if not (need_x or w_or_b):
        return _infer(x, wq, ws, b, o.activation, dtype)
    words = o.layout, o.activation, o.dx, o.dw, o.rounding, 0
    return _Linear.apply(x, w, b, wq, wt, ws, *words, dtype, o.gradient_block)


def run(x, w, b, o, static=None):
    """The layer in eager code; at 16 rows this function's own time is a third of the layer's.

    w is quantized here, in every call: checking its content would take as long, and nothing less detects every write.
    static: the StaticWeight of cache_weights_().
    """
    if _transforms_active() or forward_ad._current_level >= 0:
        refuse_transforms(x, w, b)
    x_dtype = dtype = x.dtype
    if _any_autocast():
        dtype = autocast_dtype(x)
    if _grad_enabled():
        need_x = x.requires_grad
        if need_x or w.requires_grad or (b is not None and b.requires_grad):
            both = need_x and o.dx == _c.INT8
            wq, wt, ws = quantize_weight(w.detach(), o, both) if static is None else static.get(w, o, both)
            seed = next(_seeds) if o.rounding else 0
            words = o.layout, o.activation, o.dx, o.dw, o.rounding, seed
            return _apply_at_once(x, w, b, wq, wt, ws, *words, dtype, o.gradient_block)
    wq, _, ws = quantize_weight(w, o, False) if static is None else static.get(w, o, False)
    if dtype is x_dtype and (b is None or b.dtype is dtype):
        return _linear_at_once(x, wq, ws, b, o.activation, _c.OUT_IN)
    return _infer(x, wq, ws, b, o.activation, dtype)


def run_quantized(x, w, b, o, prepared=None):
    """run() and traced() of a QuantizedInput. `prepared`: what gives (wq, wt, ws) of cache_weights_(), if w needs dX."""
    if not torch.compiler.is_compiling():
        refuse_transforms(x.like, w, b)
    if o.activation != _c.DYNAMIC_PER_TOKEN:
        raise ValueError("octile: x is quantized per token, and this layer's activation is 'per_tensor'")
    dtype = autocast_dtype(x.like)
    need_x = w_or_b = False
    if torch.is_grad_enabled():
        need_x = x.like.requires_grad
        w_or_b = w.requires_grad or (b is not None and b.requires_grad)
        if w.requires_grad and o.dw == _c.INT8 and x.q_transposed is None:
            raise ValueError(
                "octile: x was quantized without its transpose, which the int8 dW of this layer reads: quantize it with "
                "the layer's `backward`, and with gradients enabled"
            )
    both = need_x and o.dx == _c.INT8
    wq, wt, ws = quantize_weight(w.detach(), o, both) if prepared is None else prepared(both)
    if not (need_x or w_or_b):
        return _multiply(x.q, x.scale, wq, ws, bias_in(b, dtype), dtype, x.like.shape[:-1])
    seed = next(_seeds) if o.rounding and not torch.compiler.is_compiling() else 0
    words = o.layout, o.activation, o.dx, o.dw, o.rounding, seed
    return _Linear.apply(x.like, w, b, wq, wt, ws, *words, dtype, o.gradient_block, x.q, x.q_transposed, x.scale)


def _is_per_channel(weight, scale):
    """Whether the scale of an int8 weight is one for each row, or for all of it: what linear_backward reads."""
    return weight.dtype is torch.int8 and (scale.dim() < 2 or scale.shape[1] == 1)


def _dx_and_db(dy, weight, scale, product, db):
    """dX (M, K), with a product, and dB (N), if needed, from dY (M, N)."""
    block = GRADIENT_BLOCK if product == _c.INT8 else 0
    words = _c.OUT_IN, False, dy.dtype, _c.OUT_IN, _c.NEAREST, 0, block
    dx, _, db = _linear_backward(dy, weight, scale, None, None, product, _c.NO_PRODUCT, db, *words)
    return dx, db


def _levels(weight, zero_point, k):
    """q - z of a weight with one zero point per row, int8 (N, K)."""
    if weight.dtype is torch.uint8:
        weight = quantizer.unpack(weight, k)
        return weight if zero_point is None else weight - zero_point.to(torch.int8)
    return weight


def _through_groups(dy, weight, scale, zero_point, k):
    """dX (M, K) of a weight in groups: dY times the weight, dequantized for the time of this product.

    On a CPU in float32, on a GPU in dY's type, as torch multiplies there.
    """
    dtype = dy.dtype
    if dy.device.type != "cuda" and dtype is not torch.float64:
        dtype = torch.float32
    w = _dequantize(weight, scale, zero_point, k, dtype)
    if dy.is_meta or not torch.is_autocast_enabled(dy.device.type):
        return (dy.to(dtype) @ w).to(dy.dtype)
    with torch.autocast(dy.device.type, enabled=False):
        return (dy.to(dtype) @ w).to(dy.dtype)


def _unclamped(x, multiplier, static_scale):
    """Where the contract's straight-through gradient passes: where |rint(x / s)| is at most 127 or x is not finite."""
    wide = x if x.dtype is torch.float64 else x.float()
    if multiplier is not None:
        wide = wide * multiplier
    dtype = wide.dtype
    if wide.is_cuda and torch.compiler.is_compiling():  # compiled, an f32 division is approximate; an f64 one is not
        wide = wide.double()
    # A tensor: a GPU would multiply by the inverse of a number. 127.5 is rounded to 128.
    levels = (wide / torch.full((), static_scale, dtype=wide.dtype, device=wide.device)).to(dtype)
    return (levels.abs() < 127.5) | ~x.isfinite()


class _Frozen(torch.autograd.Function):
    """A layer with a frozen weight: y by the op that it has without gradients, and dX and dB.

    If a static scale clamps x, one boolean per value is kept; otherwise nothing of x.
    """

    @staticmethod
    def forward(ctx, x, b, multiplier, weight, scale, zero_point, packed, choices):
        activation, static_scale, product, dtype, words = choices
        if packed is not None:
            y = _linear_packed(x, packed, b, *words, multiplier, static_scale)
        elif weight.dtype is torch.uint8:
            y = _linear_s4(x, weight, scale, zero_point, b, activation)
        elif dtype is not x.dtype:
            y = _infer(x, weight, scale, b, activation, dtype)
        else:
            y = _linear(x, weight, scale, b, activation, _c.OUT_IN, multiplier, static_scale)
        if ctx.needs_input_grad[0]:
            static = activation == _c.STATIC_PER_TENSOR
            unclamped = _unclamped(_rows(x), multiplier, static_scale) if static else None
            ctx.save_for_backward(weight, scale, zero_point, multiplier, unclamped)
        ctx.product, ctx.dtype, ctx.shape = product, x.dtype, x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_x, need_b = ctx.needs_input_grad[:2]
        rows = _rows(dy)
        if not need_x:
            return (None, _dx_and_db(rows, None, None, _c.NO_PRODUCT, True)[1], *(None,) * 6)
        weight, scale, zero_point, multiplier, unclamped = ctx.saved_tensors
        if ctx.product == _c.INT8:
            weight = _levels(weight, zero_point, ctx.shape[-1])
        if _is_per_channel(weight, scale):
            dx, db = _dx_and_db(rows, weight, scale.flatten(), ctx.product, need_b)
        else:
            dx = _through_groups(rows, weight, scale, zero_point, ctx.shape[-1])
            db = _dx_and_db(rows, None, None, _c.NO_PRODUCT, True)[1] if need_b else None
        if multiplier is not None:
            dx = dx * multiplier
        if unclamped is not None:
            dx = torch.where(unclamped, dx, 0)
        dx = dx.to(ctx.dtype)
        return (dx if dy.dim() == 2 else dx.view(ctx.shape), db if need_b else None, *(None,) * 6)


_frozen_at_once = super(torch.autograd.Function, _Frozen).apply


def _frozen(*arguments):
    if torch.compiler.is_compiling():
        return _Frozen.apply(*arguments)
    return _frozen_at_once(*arguments)


def _needs_gradient(x, b):
    return torch.is_grad_enabled() and (x.requires_grad or (b is not None and b.requires_grad))


def run_int8(x, wq, ws, b, product):
    """The layer with a weight stored in int8."""
    if torch.compiler.is_compiling():
        dtype = autocast_dtype(x)
        x = x.to(dtype)
    else:
        if _transforms_active() or forward_ad._current_level >= 0:
            refuse_transforms(x)
        dtype = x.dtype
        if not _any_autocast():
            if (b is None or b.dtype is dtype) and not _needs_gradient(x, b):
                return _linear_at_once(x, wq, ws, b, _c.DYNAMIC_PER_TOKEN, _c.OUT_IN)
        else:
            dtype = autocast_dtype(x)
    if _needs_gradient(x, b):
        b = bias_in(b, dtype)
        return _frozen(x, b, None, wq, ws, None, None, (_c.DYNAMIC_PER_TOKEN, 0.0, product, dtype, ()))
    return _infer(x, wq, ws, b, _c.DYNAMIC_PER_TOKEN, dtype)


def run_int8_quantized(x, wq, ws, b, product):
    """The same of a QuantizedInput."""
    dtype = autocast_dtype(x.like)
    if _needs_gradient(x.like, b):
        if not _is_per_channel(wq, ws):
            raise RuntimeError("octile: a layer with scales in groups passes no gradient on to a QuantizedInput")
        block = GRADIENT_BLOCK if product == _c.INT8 else 0
        words = _c.OUT_IN, _c.DYNAMIC_PER_TOKEN, product, _c.DEQUANTIZED, _c.NEAREST, 0, dtype, block
        return _Linear.apply(x.like, wq, b, wq, None, ws, *words, x.q, None, x.scale)
    return _multiply(x.q, x.scale, wq, ws, bias_in(b, dtype), dtype, x.shape[:-1])


def _as_it_is(x, b, in_features):
    """Whether calling the op is enough: eager code, no gradient, x and b of one type. In decoding, with one row, the
    checks of the general path take as long as the op's own overhead."""
    if torch.compiler.is_compiling() or _any_autocast() or _transforms_active() or forward_ad._current_level >= 0:
        return False
    if not isinstance(x, torch.Tensor) or x.dtype is torch.float64 or x.dtype not in _FLOATS:
        return False  # what follows says so, or asks whether the layer is in float64 too
    if b is not None and b.dtype is not x.dtype:
        return False
    if _grad_enabled() and (x.requires_grad or (b is not None and b.requires_grad)):
        return False
    return x.dim() > 0 and x.size(-1) == in_features


def _in_one_type(x, b, in_features, scale_dtype):
    """x and b in the type of y."""
    # Beforehand: a packed weight, or one of 4 bits with a scale per row, is of one size for several in_features.
    check_input(x, in_features, scale_dtype)
    if not torch.compiler.is_compiling():
        refuse_transforms(x)
    dtype = autocast_dtype(x)
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x, bias_in(b, dtype)


def run_static(x, wq, ws, b, multiplier, scale, in_features, product):
    """The layer with a weight stored in int8, and a static scale of x."""
    if _as_it_is(x, b, in_features):
        return _linear_at_once(x, wq, ws, b, _c.STATIC_PER_TENSOR, _c.OUT_IN, multiplier, scale)
    x, b = _in_one_type(x, b, in_features, ws.dtype)
    if _needs_gradient(x, b):
        return _frozen(x, b, multiplier, wq, ws, None, None, (_c.STATIC_PER_TENSOR, scale, product, x.dtype, ()))
    return _linear(x, wq, ws, b, _c.STATIC_PER_TENSOR, _c.OUT_IN, multiplier, scale)


def run_frozen(x, weight, scale, zero_point, b, in_features, activation, product):
    """The layer with a quantized weight, int8 or uint8 of several values each, and no static scale."""
    if _as_it_is(x, b, in_features):
        if weight.dtype is torch.uint8:
            return _linear_s4_at_once(x, weight, scale, zero_point, b, activation)
        return _linear_at_once(x, weight, scale, b, activation, _c.OUT_IN)
    x, b = _in_one_type(x, b, in_features, scale.dtype)
    if _needs_gradient(x, b):
        return _frozen(x, b, None, weight, scale, zero_point, None, (activation, 0.0, product, x.dtype, ()))
    if weight.dtype is torch.uint8:
        return _linear_s4(x, weight, scale, zero_point, b, activation)
    return _linear(x, weight, scale, b, activation, _c.OUT_IN)


def run_packed(x, weight, b, in_features, for_gradient, *choices):
    """Any of them with a packed weight.

    for_gradient: returns the unpacked weight, its scale and its zero points, and the product of dX.
    """
    if _as_it_is(x, b, in_features):
        return _linear_packed_at_once(x, weight, b, *choices)
    x, b = _in_one_type(x, b, in_features, torch.float32)
    if not _needs_gradient(x, b):
        return _linear_packed(x, weight, b, *choices)
    unpacked, product = for_gradient
    *words, multiplier, static_scale = choices
    plain = unpacked() if x.requires_grad else (None, None, None)
    return _frozen(x, b, multiplier, *plain, weight, (words[1], static_scale, product, x.dtype, tuple(words)))


def linear(
    x, w, b=None, *, layout="out_in", per_channel=True, activation="per_token", backward="16bit", rounding="nearest"
):
    """torch.nn.functional.linear with int8 products; both operands are quantized in the call.

    x (..., IN), w (OUT, IN), or (IN, OUT) with layout="in_out", b (OUT) or None; float16, bfloat16 or float32 (they may
    differ), or float64 throughout. Returns (..., OUT) in x's type, under autocast in autocast's.

    per_channel: one scale per output channel of w, else one. activation: one scale "per_token" (row of x) or
    "per_tensor". backward: "16bit" (dequantized operands), "int8" (dY quantized too, with a scale for each block of 256
    terms of the contraction), "int8-128" to "int8-1024" (blocks of that length), "int8-whole" (one scale for all terms), or
    a pair for (dX, dW). rounding: of dY in the int8 products, "nearest" or "stochastic".

    Differentiable once, in x, w and b. Raises ValueError for an unknown choice, RuntimeError for shapes and types that
    do not fit. Arrays of numpy, JAX and CuPy are for octile.arrays.linear(), which has no gradient.
    """
    if not isinstance(x, torch.Tensor):
        return arrays.linear(x, w, b, layout=layout, per_channel=per_channel, activation=activation)
    o = options(layout, per_channel, activation, backward, rounding)
    if torch.compiler.is_compiling():
        return traced(x, w, b, o)
    try:
        return run(x, w, b, o)
    except (RuntimeError, IndexError, AttributeError):
        _check_arguments(x, w, b, o)
        raise


def _check_arguments(x, w, b, o):
    """Raises for arguments of linear() that do not fit: an operator would name what it was given in their place."""
    check_tensors(w=w)
    if b is not None:
        check_tensors(b=b)
    in_out = o.layout == _c.IN_OUT
    if w.dim() != 2 or not w.is_floating_point():
        shape = "(IN, OUT)" if in_out else "(OUT, IN)"
        raise RuntimeError(f"octile: w is {tuple(w.shape)}, {w.dtype}; expected {shape}, floats") from None
    in_features = w.shape[0 if in_out else 1]
    if x.dim() == 0 or x.size(-1) != in_features:
        raise RuntimeError(
            f"octile: x is {tuple(x.shape)}; w {tuple(w.shape)} multiplies (..., {in_features})"
        ) from None
