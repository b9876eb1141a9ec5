"""Tensor parallelism for torch's parallelize_module: ColumnParallel and RowParallel for octile's layers.

    parallelize_module(block, mesh, {"up": ColumnParallel(), "down": RowParallel(exact=True)})

The output of a column-parallel layer has the bits of one GPU in any case: a scale belongs to one token or one channel,
and a rank has whole ones. In a row-parallel layer, a rank has only a part of each token. With exact=True, a token's scale
is the maximum over the ranks, and sums travel in s32 and are scaled afterwards: again the bits of one GPU.
docs/reference/many-gpus.md has the rest.
"""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from . import _c, agreement, fsdp, functional
from .inference import W8A8Linear, _Inference
from .training import Linear

_quantize = torch.ops.octile.quantize.default
_linear_int8 = torch.ops.octile.linear_int8.default
_linear_backward = torch.ops.octile.linear_backward.default
_collectives = torch.ops._c10d_functional

EXACT_TERMS = 1024  # their sum of int8 products is at most 2^24, which is exact in f32
LEAST_OF_X, LEAST_OF_DY = 1e-8, 2.0**-79  # docs/reference/contract.md


# ---- Communication. `group`: a group's name; `tokens`: the dimension along which ranks have different tokens, or -1. ----


def _sum(t, tokens, group, size):
    """The sum over ranks; with `tokens`, this rank's part of it."""
    if tokens < 0:
        return _collectives.wait_tensor(_collectives.all_reduce(t.contiguous(), "sum", group))
    if t.shape[tokens] % size:
        raise ValueError(f"octile: {t.shape[tokens]} tokens do not divide into {size} ranks")
    stacked = torch.cat(t.chunk(size, tokens)) if tokens else t.contiguous()
    return _collectives.wait_tensor(_collectives.reduce_scatter_tensor(stacked, "sum", size, group))


def _gather(t, tokens, group, size):
    """All ranks' tokens."""
    stacked = _collectives.wait_tensor(_collectives.all_gather_into_tensor(t.contiguous(), size, group))
    return torch.cat(stacked.chunk(size), tokens) if tokens else stacked


def _own_scale(t, least):
    """Scales of this rank's part of rows, f32 (f64 for f64): NaN where a value is not finite."""
    if least == LEAST_OF_X:
        return _quantize(t, _c.PER_ROW, _c.ROW_MAJOR)[2]  # one kernel, which reads t once
    largest = torch.maximum(t.amax(-1), -t.amin(-1))  # much faster than a norm on a CPU
    # In f64 and then rounded: the bits of an f32 division, which compiled code on a GPU only approximates. The divisor is
    # a tensor, since a GPU would multiply by the inverse of a number.
    scale = (largest.double() / torch.full((), 127, dtype=torch.float64, device=t.device)).to(t.dtype)
    scale = torch.maximum(scale, t.new_full((), least))
    return torch.where(scale.isfinite(), scale, math.nan)


def quantize_shared(t, group, orientation=_c.ROW_MAJOR, least=LEAST_OF_X):
    """Quantizes t (R, C), a rank's columns of one matrix, by whole rows: returns what torch.ops.octile.quantize does."""
    scale = _own_scale(t, least)
    # As integers, which order positive floats alike and put NaN above them; a maximum of floats may lose NaN.
    integer = torch.int64 if scale.dtype is torch.float64 else torch.int32
    bits = scale.view(integer) & torch.iinfo(integer).max
    scale = _collectives.wait_tensor(_collectives.all_reduce(bits, "max", group)).view(scale.dtype)
    q, q_transposed, _ = _quantize(t, _c.PER_ROW, orientation, torch.where(scale.isfinite(), scale, 1))
    return q, q_transposed, scale


# ---- Exact products ----


def _integer_product(a, b, layout):
    """a (M, T) int8 times b (N, T), or (T, N) in the layout IN_OUT, in s32: parts whose sums are exact in f32."""
    one = torch.ones(1, device=a.device)
    total = None
    for first in range(0, a.shape[1], EXACT_TERMS):
        terms = slice(first, first + EXACT_TERMS)
        of_b = b[:, terms] if layout == _c.OUT_IN else b[terms]
        part = _linear_int8(a[:, terms], one, of_b, one, None, layout, torch.float32)
        total = part.to(torch.int32) if total is None else total + part.to(torch.int32)
    return total


def _fma(a, b, c):
    """a * b + c of float32, rounded once: in float64, to odd, where the sum is not exact, and then to float32."""
    product, c = a.double() * b.double(), c.double()  # 48 bits
    total = product + c
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    to_odd = (error != 0) & (total.view(torch.int64) & 1 == 0)
    other = torch.nextafter(total, torch.copysign(torch.full_like(total, math.inf), error))
    return torch.where(to_odd, other, total).float()


def _scaled(acc, x_scale, w_scale, b, dtype):
    """y from exact sums (..., N), as the kernels' epilogue computes it: contract.md, "Forward"."""
    scale, acc = x_scale[..., None] * w_scale, acc.float()
    y = acc * scale if b is None else _fma(acc, scale, b.float().expand_as(acc))
    # torch 2.11 compiles a Function that ends with a to() that does nothing into one whose gradients are 0.
    return y if y.dtype is dtype else y.to(dtype)


def _shaped(rows, lead):
    """(M, N) -> (..., N). Nothing else refers to it, so it is not a view for autograd."""
    return torch.ops.aten._unsafe_view(rows, (*lead, rows.shape[1]))


class _Sharded(torch.autograd.Function):
    """One rank's part of a layer: as functional._Linear, with collectives. Positional, so that torch.compile can trace it.

    x (..., K) has the tokens of all ranks, or of this one (column, tokens >= 0); in a row-parallel layer it has a part of
    each token. y likewise.
    """

    @staticmethod
    def forward(ctx, x, w, b, wq, wt, ws, o, seed, dtype, row, exact, sum_dx, tokens, group, size, rank):
        need_x, need_w = ctx.needs_input_grad[:2]
        lead, n = x.shape[:-1], wq.shape[0]
        rows = functional._rows(x)
        b = functional.bias_in(b, dtype)
        orientation = _c.BOTH if need_w and o.dw == _c.INT8 else _c.ROW_MAJOR
        if row and exact:
            xq, xt, xs = quantize_shared(rows, group, orientation)
            acc = _sum(_integer_product(xq, wq, _c.OUT_IN).view(*lead, n), tokens, group, size)
            mine = xs.view(lead) if tokens < 0 else xs.view(lead).chunk(size, tokens)[rank]
            y = _scaled(acc, mine, ws, b, dtype)
        elif row or tokens < 0:
            granularity = _c.PER_ROW if o.activation == _c.DYNAMIC_PER_TOKEN else _c.PER_TENSOR
            xq, xt, xs = _quantize(rows, granularity, orientation)
            y = _shaped(_linear_int8(xq, xs, wq, ws, None if row and rank else b, _c.OUT_IN, dtype), lead)
            y = _sum(y, tokens, group, size) if row else y
        else:  # int8 travels, and the product of dW makes the transpose
            orientation = _c.ROW_MAJOR
            xq, xt, xs = _quantize(rows, _c.PER_ROW, orientation)
            xq = _gather(xq.view(x.shape), tokens, group, size)
            lead = xq.shape[:-1]
            xq, xs = functional._rows(xq), _gather(xs.view(x.shape[:-1]), tokens, group, size).flatten()
            y = _shaped(_linear_int8(xq, xs, wq, ws, b, _c.OUT_IN, dtype), lead)
        if need_w and xq.shape[0] > functional.LONGEST_SUM and o.dw == _c.INT8:
            raise ValueError(f"octile: x has {xq.shape[0]} rows, and an int8 dW sums at most {functional.LONGEST_SUM}")
        x_transposed, w_transposed = orientation == _c.BOTH, o.dx == _c.INT8 and wt is not None
        ctx.save_for_backward(
            (xt if x_transposed else xq) if need_w else None,
            xs if need_w else None,
            (wt if w_transposed else wq) if need_x else None,
            ws if need_x else None,
        )
        ctx.x_transposed, ctx.w_layout = x_transposed, _c.IN_OUT if w_transposed else _c.OUT_IN
        ctx.o, ctx.seed, ctx.lead = o, seed, lead
        ctx.places = row, exact, sum_dx, tokens, group, size, rank
        ctx.dtypes = x.dtype, (None if w is None else w.dtype), (None if b is None else b.dtype)
        return y

    @staticmethod
    @functional.once_differentiable
    def backward(ctx, dy):
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        x, xs, w, ws = ctx.saved_tensors
        row, exact, sum_dx, tokens, group, size, rank = ctx.places
        o = ctx.o
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        if row and tokens >= 0:
            dy = _gather(dy, tokens, group, size)
        rows = functional._rows(dy)
        by_integers = need_x and exact and not row
        products = o.dx if need_x and not by_integers else _c.NO_PRODUCT, o.dw if need_w else _c.NO_PRODUCT
        of_w = (w, ws) if products[0] else (None, None)
        dw_dtype = functional._dw_dtype(dy.dtype, w_dtype) if need_w else dy.dtype
        layouts = ctx.w_layout, ctx.x_transposed, dw_dtype, _c.OUT_IN
        choices = o.rounding, ctx.seed, o.gradient_block if _c.INT8 in products else 0
        dx, dw, db = _linear_backward(rows, *of_w, x, xs, *products, need_b, *layouts, *choices)
        if by_integers:
            q, _, scale = quantize_shared(rows.to(ws.dtype) * ws, group, least=LEAST_OF_DY)
            # The product's layout is of a weight (OUT, IN), and here IN is what is left.
            acc = _integer_product(q, w, _c.OUT_IN if ctx.w_layout == _c.IN_OUT else _c.IN_OUT)
            acc = _sum(acc.view(*ctx.lead, acc.shape[1]), tokens, group, size)
            scale = scale.view(ctx.lead) if tokens < 0 else scale.view(ctx.lead).chunk(size, tokens)[rank]
            dx = (acc.to(scale.dtype) * scale[..., None]).to(dy.dtype)
        elif need_x:
            dx = dx.view(*ctx.lead, dx.shape[1])
            if not row and sum_dx:
                dx = _sum(dx, tokens, group, size)
        return (
            dx.to(x_dtype) if need_x else None,
            dw.to(w_dtype) if need_w else None,
            db.to(b_dtype) if need_b else None,
            *(None,) * (len(ctx.needs_input_grad) - 3),
        )


# ---- Layers ----


def _placed(layout, dimensions):
    """The layout for a tensor with so many dimensions, counted from the first."""
    return Shard(layout.dim % dimensions) if isinstance(layout, Shard) else layout


class Buffers:
    """Buffers of inference layers over the ranks of a mesh: this rank's part, which a state_dict holds as DTensors."""

    exact = False

    def __init__(self, mesh):
        self.mesh, self.size, self.rank = mesh, mesh.size(), mesh.get_local_rank()
        self.placements = {}  # by the names of buffers

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("octile: a layer that is split over ranks cannot be pickled; save its state_dict()")

    def cut(self, layer, name, dim):
        """Keeps only this rank's part of a buffer."""
        self.placements[name] = Shard(dim)
        layer._buffers[name] = self._part(layer._buffers[name], dim)

    def _part(self, t, dim):
        """This rank's part, a copy: a view would keep the whole in memory."""
        return t.chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)

    def save(self, layer, state, prefix):
        if layer.packed_weight is not None:
            raise RuntimeError("octile: a layer that is split over ranks has no state_dict once it is packed")
        for name, placement in self.placements.items():
            state[prefix + name] = DTensor.from_local(state[prefix + name], self.mesh, (placement,), run_check=False)

    def load(self, layer, state, prefix):
        """Takes this rank's part of DTensors or whole tensors."""
        for name, placement in self.placements.items():
            t, held = state.get(prefix + name), layer._buffers[name]  # None, once the layer is packed
            if isinstance(t, DTensor):
                state[prefix + name] = t.redistribute(self.mesh, (placement,)).to_local()
            elif t is not None and held is not None and t.shape != held.shape:
                state[prefix + name] = self._part(t, placement.dim)


class Shards(Buffers):
    """How a layer is split over the ranks of a mesh, and its forward there."""

    def __init__(self, style, mesh, row):
        super().__init__(mesh)
        self.row, self.exact, self.group = row, style.exact, mesh.get_group().group_name
        self.input, self.output = style.input_layouts[0], style.output_layouts[0]
        self.local_output = style.use_local_output

    def check_options(self, o):
        """Raises ValueError if a layer that is split this way cannot have these options."""
        if reason := refused_options(o, self.exact, self.row, not self.row and isinstance(self.input, Shard)):
            raise ValueError(f"octile: the layer is split over {self.size} ranks: {reason}")

    def local_size(self, n, k):
        """OUT and IN of this rank's part."""
        return (n, k // self.size) if self.row else (n // self.size, k)

    def _check(self, layer, x):
        """Refuses an x that cannot be split. Its sizes are checked once this rank has its part."""
        if type(x) is functional.QuantizedInput:
            raise NotImplementedError("octile: a layer that is split over ranks takes tensors, not a QuantizedInput")
        if not isinstance(x, torch.Tensor) or x.dim() == 0:
            functional.check_input(x, layer.in_features)

    def _enter(self, x, given, wanted, gradient):
        """x as a local tensor in the wanted layout; a plain one has the layout `given`. Its gradient has `gradient`."""
        if not isinstance(x, DTensor):
            if given == wanted == gradient:
                return x
            x = DTensor.from_local(x, self.mesh, (given,), run_check=False)
        if isinstance(wanted, Shard) and x.shape[wanted.dim] % self.size:
            raise ValueError(
                f"octile: x is {tuple(x.shape)}, and {self.size} ranks cannot share dimension {wanted.dim} evenly"
            )
        return x.redistribute(self.mesh, (wanted,)).to_local(grad_placements=(gradient,))

    def _leave(self, y, made):
        output = _placed(self.output, y.dim())
        if made == output and self.local_output:
            return y
        y = DTensor.from_local(y, self.mesh, (made,), run_check=False).redistribute(self.mesh, (output,))
        return y.to_local() if self.local_output else y

    def _multiply(self, x, w, b, wq, wt, ws, o, seed, exact):
        last = Shard(x.dim() - 1)
        given = _placed(self.input, x.dim())
        # Ranks have different tokens before a column-parallel layer, or after a row-parallel one.
        between = _placed(self.output, x.dim()) if self.row else given
        between = between if isinstance(between, Shard) and between != last else Replicate()
        wanted = gradient = last if self.row else between
        if isinstance(x, DTensor) and wanted == Replicate() and not exact:
            gradient = Partial()  # added to that of other layers with the same x, before the collective
        local = self._enter(x, given, wanted, gradient)
        functional.check_input(local, wq.shape[1], ws.dtype)
        dtype = functional.autocast_dtype(local)
        if exact and dtype is torch.float64:
            raise RuntimeError("octile: exact=True does not support float64")
        if torch.compiler.is_compiling():  # as functional.traced()
            local = local.to(dtype)
        tokens = between.dim if isinstance(between, Shard) else -1
        words = self.row, exact, gradient != Partial(), tokens, self.group, self.size, self.rank
        y = _Sharded.apply(local, w, b, wq, wt, ws, o, seed, dtype, *words)
        return self._leave(y, between if self.row else last)

    def trained(self, layer, x):
        """The forward of an octile.Linear."""
        self._check(layer, x)
        if not torch.compiler.is_compiling():
            functional.refuse_transforms(x)
        o, w, b = layer._options, layer.weight, layer.bias
        w, b = (t.to_local() if isinstance(t, DTensor) else t for t in (w, b))
        if not torch.is_grad_enabled():
            w = w.detach()  # otherwise the operands of dW would be made
        both = torch.is_grad_enabled() and x.requires_grad and o.dx == _c.INT8
        if self.row and self.exact and not isinstance(w, functional.GatheredWeight):
            wq, wt, ws = quantize_shared(w.detach(), self.group, _c.BOTH if both else _c.ROW_MAJOR)
            wt = wt if both else None
        else:
            wq, wt, ws = functional.quantize_weight(w.detach(), o, both)
        seed = next(functional._seeds) if o.rounding and not torch.compiler.is_compiling() else 0
        return self._multiply(x, w, b, wq, wt, ws, o, seed, self.exact)

    def frozen(self, layer, x):
        """The forward of a layer for inference."""
        self._check(layer, x)
        if layer._parameters:
            raise RuntimeError("octile: the bias of a layer for inference that is split over ranks is not a parameter")
        bias = layer._buffers["bias"]
        if type(layer) is W8A8Linear and layer.group is None and layer.packed_weight is None:
            block = functional.GRADIENT_BLOCK if layer._product == _c.INT8 else 0
            words = _c.DYNAMIC_PER_TOKEN, layer._product, _c.DEQUANTIZED, _c.NEAREST, block
            o = functional.Options(_c.OUT_IN, True, *words)
            stored = layer.quantized_weight, None, layer.weight_scale
            return self._multiply(x, None, bias, *stored, o, 0, self.exact)
        last = Shard(x.dim() - 1)
        wanted, gradient = (last, last) if self.row else (Replicate(), Partial())
        x = self._enter(x, _placed(self.input, x.dim()), wanted, gradient)
        if self.row:
            return self._leave(layer._run(x, None if self.rank else bias), Partial())
        return self._leave(layer._run(x, bias), last)

    def split(self, layer):
        """Keeps only this rank's part of the layer."""
        for name, t in layer._buffers.items():
            if t is None or t.numel() == 1:
                continue
            of_inputs = name == "input_multiplier" or t.dim() == 2 and t.shape[1] > 1
            if of_inputs if self.row else name != "input_multiplier":
                self.cut(layer, name, t.dim() - 1 if self.row else 0)
        if self.row:
            layer.in_features //= self.size
        else:
            layer.out_features //= self.size
        layer._align()


def refused_options(o, exact, row, tokens):
    """Why a layer with these options cannot be split, or "". tokens: whether ranks have different ones before it."""
    if not o.per_channel:
        return fsdp.ONE_SCALE
    if o.activation != _c.DYNAMIC_PER_TOKEN and (tokens or exact):
        return "it has one scale for all tokens (activation='per_tensor'), which no rank knows by itself"
    if exact and o.rounding:
        return "exact=True does not support stochastic rounding: a rank's random numbers differ from those of one GPU"
    if exact and not row and (o.dx != _c.INT8 or o.gradient_block):
        return (
            "exact=True: dX of a column-parallel layer is a sum over ranks, exact only with backward='int8-whole'; "
            "otherwise floats are summed"
        )
    return ""


def _refusal(layer, style, size, row):
    trains = isinstance(layer, Linear)
    if layer._parallel is not None:
        return "it is split already"
    if getattr(layer, "_joined", None) is not None:
        return "it is joined with others"
    name, length = ("in_features", layer.in_features) if row else ("out_features", layer.out_features)
    if length % size:
        return f"{name} is {length}, which {size} ranks cannot share evenly"
    if not isinstance(style.output_layouts[0], (Replicate, Shard)):
        return f"output_layouts is {style.output_layouts[0]}, expected Replicate or Shard"
    if trains:
        if any(type(p) is not nn.Parameter for p in layer._parameters.values() if p is not None):
            return "its parameters are not plain ones: parallelize_module() comes before octile.fsdp.prepare_() and fully_shard()"
        if layer._weight_cache is not None:
            return fsdp.CACHED
        if reason := refused_options(
            layer._options, style.exact, row, not row and isinstance(style.input_layouts[0], Shard)
        ):
            return reason
    else:
        if layer.experts > 1:
            return "its outputs are the channels of several experts"
        if layer.packed_weight is not None:
            return "it is packed: pack_() comes after parallelize_module()"
        if "bias" in layer._parameters:
            return "its bias is a parameter"
        part = layer.in_features // size
        if row and (layer.group and part % layer.group or layer.format.bits == 4 and part % 2):
            return f"a rank would have {part} of its inputs, which is not a multiple of its group, {layer.group}"
        if style.exact and not row:
            return "exact=True: its dX is a sum of floats; y has the bits of one GPU without exact=True"
        if style.exact and not (type(layer) is W8A8Linear and layer.group is None):
            return "exact=True: it sums floats; octile.Linear and W8A8Linear without groups sum integers"
    if style.exact:
        if (layer.weight.dtype if trains else layer.weight_dtype) is torch.float64:
            return "exact=True does not support float64"
        terms = layer.in_features if row else layer.out_features
        if terms > functional.LONGEST_SUM:
            return f"exact=True: a sum of {terms} int8 products does not fit into 32 bits"
    return ""


def _split(layer, style, mesh, row):
    """Splits a layer, for both styles; None if it is not one of octile's."""
    # First, so that all ranks refuse together, and also refuse a layer that only some have converted.
    facts = {"the layer to be split": f"{agreement.described(layer)}, {style!r}, exact={style.exact}"}
    agreement.check(facts, mesh.get_group(), mesh.device_type)
    if not isinstance(layer, (Linear, _Inference)):
        if type(layer).__module__.startswith("octile."):
            raise ValueError(f"octile: {type(layer).__name__} cannot be split over ranks; octile.Linear can")
        if style.exact:
            raise ValueError(f"octile: exact=True requires one of octile's layers, not {type(layer).__name__}")
        return None
    if reason := _refusal(layer, style, mesh.size(), row):
        raise ValueError(f"octile: {layer!r} cannot be split over {mesh.size()} ranks: {reason}")
    shards = Shards(style, mesh, row)
    if isinstance(layer, Linear):
        style._partition_linear_fn("", layer, mesh)
    else:
        shards.split(layer)
    layer._parallel = shards
    return layer


class ColumnParallel(ColwiseParallel):
    """torch's ColwiseParallel for octile's layers; other layers are split as torch does.

    Forward, dW and dB have the bits of one GPU. dX is a sum over ranks, in its own type. exact=True sums
    integers instead, for octile.Linear with backward="int8-whole". With input_layouts=Shard(1), tokens travel as int8.
    """

    def __init__(self, *, exact=False, **words):
        super().__init__(**words)
        self.exact = exact

    def _apply(self, module, device_mesh):
        return _split(module, self, device_mesh, row=False) or super()._apply(module, device_mesh)


class RowParallel(RowwiseParallel):
    """torch's RowwiseParallel for octile's layers; other layers are split as torch does.

    Each rank quantizes its part of each token and channel with its own scales, and y is summed over ranks in y's type. With
    exact=True, scales are maxima over ranks, and 4-byte integers are summed: y and int8 gradients have the bits of one GPU.
    exact=True supports octile.Linear and W8A8Linear without groups.
    """

    def __init__(self, *, exact=False, **words):
        super().__init__(**words)
        self.exact = exact

    def _apply(self, module, device_mesh):
        return _split(module, self, device_mesh, row=True) or super()._apply(module, device_mesh)
