"""Mixtures of experts: octile.Experts, and its conversion from the fused experts of Transformers' models."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from . import _c, _ops, functional, quantizer  # noqa: F401  (_ops registers torch.ops.octile)
from .file_names import conversions
from .inference import W4A8Linear, W4A16Linear, W8A8Linear, W8A16Linear

_quantize = torch.ops.octile.quantize.default
_grouped_linear = torch.ops.octile.grouped_linear.default
_grouped_linear_backward = torch.ops.octile.grouped_linear_backward.default
_LAYERS = (W8A8Linear, W8A16Linear, W4A8Linear, W4A16Linear)


def sort_by_expert(experts, index):
    """The rows of a mixture, sorted by expert: (offsets, token, place), int32, on index's device, without a synchronization.

    index (tokens, slots): the expert of each token's slot; values outside 0..experts - 1 belong to no expert. The sorted rows of an
    expert are in the order of tokens, then slots. offsets (experts + 1); token (rows): whose row it is; place (tokens,
    slots): where the row lies.
    """
    flat = index.reshape(-1)
    flat = torch.where(flat < 0, experts, flat)
    sorted_index, order = torch.sort(flat, stable=True)
    bounds = torch.arange(experts + 1, device=flat.device, dtype=flat.dtype)
    offsets = torch.searchsorted(sorted_index, bounds, out_int32=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return offsets, (order // index.shape[1]).int(), place.view(index.shape).int()


def grouped_linear(x, layer, sorted_rows, bias=None, router_weight=None, exchange=None):
    """Each expert's rows through its part of `layer`, an inference layer whose channels are those of all experts.

    x (tokens, IN), sorted_rows from sort_by_expert(). Returns (rows, OUT) in x's type. With router_weight (tokens, slots) x
    is (rows, IN), and the result (tokens, OUT): each row the weighted sum of its slots' rows. x, bias and router_weight
    may require gradients; the layer has none. exchange: the expert_parallel.Exchange of experts that are split over ranks:
    tokens are this rank's, rows those of its experts.
    """
    buffers, format = layer._buffers, layer.format.fields()
    packed = buffers["packed_weight"]
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    words = layer.out_features // layer.experts, layer._ACTIVATION, format["weight"], format["group"], layer.zero_point
    asking = any(t is not None and t.requires_grad for t in (x, bias, router_weight)) and torch.is_grad_enabled()
    plain = None, None, None
    if packed is None or asking:
        weight, scale, zero_point = (
            layer._unpacked_weight() if packed is not None else (buffers[n] for n in layer._KEPT)
        )
        channels = layer.out_features
        scale = scale.expand(channels) if scale.dim() == 1 and scale.numel() == 1 else scale  # one for all
        plain = weight, scale, zero_point
    if asking:
        return _Grouped.apply(
            x, bias, router_weight, *sorted_rows, packed, *plain, (words, layer._product, layer.in_features), exchange
        )
    return _forward(x, bias, router_weight, sorted_rows, packed, plain, words, exchange)


def _forward(x, bias, router_weight, sorted_rows, packed, plain, words, exchange):
    stored, dtype, x_scale = plain if packed is None else (packed, None, None), x.dtype, None
    if exchange is not None and router_weight is None:
        x, x_scale = exchange.x, exchange.x_scale
    return _multiplied(x, x_scale, sorted_rows, stored, bias, router_weight, words, dtype, exchange)


def _multiplied(x, x_scale, sorted_rows, stored, bias, router_weight, words, dtype, exchange):
    """Rows from tokens x (the first layer), or tokens from rows x (the second one, with router_weight)."""
    offsets, token, place = sorted_rows
    if exchange is None or router_weight is None:
        token, place = (token, None) if router_weight is None else (None, place)
        return _grouped_linear(x, x_scale, offsets, token, *stored, bias, place, router_weight, *words, dtype)
    travelling = exchange.returned(dtype)
    bias = None if bias is None else bias.to(travelling)
    z = _grouped_linear(x, x_scale, offsets, None, *stored, bias, None, None, *words, travelling)
    return exchange.sum(z, router_weight, dtype)


class _Grouped(torch.autograd.Function):
    """grouped_linear() of a frozen layer, with the gradients of x, the bias and the router's weights."""

    @staticmethod
    def forward(
        ctx, x, bias, router_weight, offsets, token, place, packed, weight, scale, zero_point, choices, exchange
    ):
        again = ctx.needs_input_grad[2]
        of_router = (x, bias, packed) if again else (None, None, None)
        ctx.save_for_backward(*of_router, router_weight, offsets, token, place, weight, scale, zero_point)
        ctx.choices, ctx.exchange = choices, exchange
        plain = weight, scale, zero_point
        return _forward(x, bias, router_weight, (offsets, token, place), packed, plain, choices[0], exchange)

    @staticmethod
    @functional.once_differentiable
    def backward(ctx, dy):
        x, bias, packed, router_weight, offsets, token, place, *plain = ctx.saved_tensors
        need_x, need_bias, need_router = ctx.needs_input_grad[:3]
        words, product, in_features = ctx.choices
        d_router = None
        if router_weight is not None:
            z = None
            if need_router:
                stored = plain if packed is None else (packed, None, None)
                bias = None if bias is None else bias.to(router_weight.dtype)
                z = _grouped_linear(x, None, offsets, None, *stored, bias, None, None, *words, router_weight.dtype)
            dy, d_router = _through_sum(dy, router_weight, (offsets, token, place), z, ctx.exchange)
        dx, db = _gradients(dy, offsets, *plain, product if need_x else _c.NO_PRODUCT, need_bias, in_features)
        if need_x and router_weight is None:
            dx = _of_tokens(dx, offsets, place, ctx.exchange)
        return dx if need_x else None, db if need_bias else None, d_router, *(None,) * 9


def _through_sum(dy, router_weight, sorted_rows, z, exchange):
    """From dY (tokens, OUT): dY of the sorted rows and, given their z, the gradient of the router's weights."""
    if exchange is not None:
        return exchange.through_sum(dy, router_weight, z)
    offsets, token, place = sorted_rows
    flat, d_router = place.view(-1), None
    of_rows = dy.index_select(0, token).to(router_weight.dtype)
    if z is not None:
        of_slots = (of_rows * z).sum(1).index_select(0, flat).view(place.shape)
        d_router = torch.where(place < offsets[-1], of_slots, 0)
    weight_of_rows = torch.empty_like(of_rows[:, 0]).index_copy(0, flat.long(), router_weight.reshape(-1))
    return (of_rows * weight_of_rows[:, None]).to(dy.dtype), d_router


def _of_tokens(dx, offsets, place, exchange):
    """dX of tokens: the sum of the rows that a token went to."""
    if exchange is not None:
        return exchange.of_tokens(dx)
    of_slots = dx.index_select(0, place.view(-1)).view(*place.shape, dx.shape[1])
    return torch.where((place < offsets[-1])[..., None], of_slots, 0).sum(1)


def _gradients(dy, offsets, weight, scale, zero_point, product, need_bias, in_features):
    """dX (rows, IN), with a product, and dB (experts, OUT), if needed."""
    if product == _c.INT8:
        weight = functional._levels(weight, zero_point, in_features)
    block = functional.GRADIENT_BLOCK if product == _c.INT8 else 0
    words = _c.NO_PRODUCT, need_bias, dy.dtype, _c.NEAREST, 0, block
    if product != _c.NO_PRODUCT and functional._is_per_channel(weight, scale):
        dx, _, db = _grouped_linear_backward(dy, offsets, weight, scale.flatten(), None, None, product, *words)
        return dx, db
    db = None
    if need_bias:
        none = None, None, None, None, _c.NO_PRODUCT
        db = _grouped_linear_backward(dy, offsets, *none, *words)[2]
    if product == _c.NO_PRODUCT:
        return None, db
    if dy.is_cuda or torch.compiler.is_compiling():
        return _through_columns(dy, offsets, weight, scale, zero_point, in_features), db
    dx, n, bounds = dy.new_zeros((dy.shape[0], in_features)), dy.shape[1], offsets.tolist()
    for e, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if begin < end:
            part = (None if t is None else t[e * n : (e + 1) * n] for t in (weight, scale, zero_point))
            dx[begin:end] = functional._through_groups(dy[begin:end], *part, in_features)
    return dx, db


def _through_columns(dy, offsets, weight, scale, zero_point, k):
    """dX (rows, K) of a weight in groups, a group of all experts in one call. A graph cannot loop over the experts' rows,
    and a GPU's host does not know how many there are. On a CPU this takes two to twelve times as long as the loop."""
    levels = quantizer.unpack(weight, k) if weight.dtype is torch.uint8 else weight
    levels = levels.view(len(levels), scale.shape[1], -1)
    if zero_point is not None:
        levels = levels - zero_point.to(torch.int8)[..., None]
    words = None, None, _c.DEQUANTIZED, _c.NO_PRODUCT, False, dy.dtype
    of_group = zip(levels.unbind(1), scale.unbind(1), strict=True)
    return torch.cat([_grouped_linear_backward(dy, offsets, q, s, *words)[0] for q, s in of_group], dim=1)


def trained_linear(x, weight, sorted_rows, options, bias=None, router_weight=None, exchange=None):
    """grouped_linear() with float weights (experts, OUT, IN) that train: x and they are quantized in every call.

    options: functional.Options, with an activation per token; products and rounding as in octile.Linear.
    """
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    random = options.rounding and not torch.compiler.is_compiling()
    seed = next(functional._seeds) << 32 if random else 0  # expert e has seed + e, which no other call uses
    if random and exchange is not None:
        seed += exchange.first
    return _Trained.apply(x, weight, bias, router_weight, *sorted_rows, tuple(options), seed, exchange)


class _Trained(torch.autograd.Function):
    """trained_linear(): keeps x and the weight in int8, and gives all gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, router_weight, offsets, token, place, options, seed, exchange):
        o = functional.Options(*options)
        experts, n, k = weight.shape
        wq, _, ws = functional.quantize_weight(weight.reshape(experts * n, k), o, False)
        ws = ws.expand(experts * n) if ws.numel() == 1 else ws
        if exchange is not None and router_weight is None:
            xq, xs = exchange.x, exchange.x_scale
        else:
            xq, _, xs = _quantize(x, _c.PER_ROW, _c.ROW_MAJOR)
        ctx.words = n, _c.DYNAMIC_PER_TOKEN, _c.S8_PER_CHANNEL, 0, False
        ctx.save_for_backward(xq, xs, wq, ws, bias, router_weight, offsets, token, place)
        ctx.options, ctx.seed, ctx.weight, ctx.exchange = o, seed, (weight.shape, weight.dtype), exchange
        stored, sorted_rows = (wq, ws, None), (offsets, token, place)
        return _multiplied(xq, xs, sorted_rows, stored, bias, router_weight, ctx.words, x.dtype, exchange)

    @staticmethod
    @functional.once_differentiable
    def backward(ctx, dy):
        xq, xs, wq, ws, bias, router_weight, offsets, token, place = ctx.saved_tensors
        need_x, need_w, need_bias, need_router = ctx.needs_input_grad[:4]
        o, (shape, dtype), d_router = ctx.options, ctx.weight, None
        if router_weight is not None:
            z, wide = None, router_weight.dtype
            if need_router:
                bias = None if bias is None else bias.to(wide)
                z = _grouped_linear(xq, xs, offsets, None, wq, ws, None, bias, None, None, *ctx.words, wide)
            dy, d_router = _through_sum(dy, router_weight, (offsets, token, place), z, ctx.exchange)
        elif need_w:
            xq, xs = xq.index_select(0, token), xs.index_select(0, token)
        products = o.dx if need_x else _c.NO_PRODUCT, o.dw if need_w else _c.NO_PRODUCT
        dx, dw, db = _grouped_linear_backward(
            dy,
            offsets,
            *(wq, ws, xq, xs),
            *(*products, need_bias, functional._dw_dtype(dy.dtype, dtype)),
            *(o.rounding, ctx.seed, o.gradient_block if _c.INT8 in products else 0),
        )
        if need_x and router_weight is None:
            dx = _of_tokens(dx, offsets, place, ctx.exchange)
        dw = dw.to(dtype).view(shape) if need_w else None
        return dx if need_x else None, dw, db if need_bias else None, d_router, *(None,) * 6


class _Routed(nn.Module):
    """Experts that a router selects for each token: two layers with a gate between them."""

    _parallel = None  # the expert_parallel.ExpertShards of experts that are split over ranks

    def forward(self, x, index, weights):
        """x (..., IN) float; index, weights (tokens, slots); returns (..., OUT)."""
        if self._parallel is not None:
            return self._parallel.in_eager_code(self._computed, x, index, weights)
        return self._computed(x, index, weights)

    def _computed(self, x, index, weights):
        up, down = self._names
        functional.check_input(x, *self._input())
        tokens = math.prod(x.shape[:-1])
        _check_routing(index, weights, tokens)
        if not torch.compiler.is_compiling():
            functional.refuse_transforms(x, weights)
        rows = x.reshape(tokens, x.shape[-1])
        rows = rows.to(functional.autocast_dtype(x))
        wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
        exchange, weights = None, weights.to(wide)
        if self._parallel is None:
            sorted_rows = sort_by_expert(self.num_experts, index)
        else:
            exchange = self._parallel.exchange(self, rows, index, weights)
            sorted_rows = exchange.sorted_rows
        up_bias, down_bias = (self._here(f"{name}_bias") for name in self._names)
        inner = self._gated(self._rows(up, rows, sorted_rows, up_bias, None, exchange))
        y = self._rows(down, inner, sorted_rows, down_bias, weights, exchange)
        return y.view(*x.shape[:-1], y.shape[1])

    def _here(self, name):
        """A parameter, or what a parametrization makes of it: this rank's part."""
        parameter = getattr(self, name, None)
        return parameter if parameter is None or self._parallel is None else parameter.to_local()

    def _gated(self, up):
        if self._gate is None:
            gate, up = up.chunk(2, dim=-1)
            return F.silu(gate) * up
        return self._gate(self, up)

    def extra_repr(self):
        here = "" if self._parallel is None else f", {self._parallel.held} of them on this rank"
        return f"experts={self.num_experts}{here}"


class Experts(_Routed):
    """The experts of a mixture with quantized weights.

    up, down: inference layers (W8A8Linear, W8A16Linear, W4A8Linear or W4A16Linear) whose output channels are those of all
    experts, one expert after the other; without biases, and not packed yet. gate(module, rows) turns rows of `up`'s
    output into rows of `down`'s input, silu(a) * b of its halves by default. The biases (experts, OUT) are parameters of
    this module, or None.

    forward(x, index, weights): x (..., IN) float, index (int32 or int64) and weights (tokens, slots) as a router makes them;
    an index outside 0..experts - 1 adds nothing. It sorts the tokens by expert without waiting for a GPU, quantizes x once,
    and adds up a token's experts in the order of its slots, in float32. Returns x's shape and type.

    x, weights and the biases may require gradients, as with the inference layers; the quantized weights have none. For
    the gradient of the weights the second layer is computed once more.

    Raises ValueError for layers and biases that do not fit, and RuntimeError for arguments that do not.
    """

    def __init__(
        self, experts, up, down, gate=None, *, up_bias=None, down_bias=None, names=("gate_up_proj", "down_proj")
    ):
        super().__init__()
        self.num_experts, self._names, self._gate = experts, tuple(names), gate
        self._kind = None  # Transformers' class that it was made from
        if not isinstance(experts, int) or experts < 1:
            raise ValueError(f"octile: experts is {experts!r}, expected an integer of at least 1")
        for name, layer, bias in zip(names, (up, down), (up_bias, down_bias), strict=True):
            if reason := _unfit_layer(layer, experts, bias):
                raise ValueError(f"octile: {name}: {reason}")
        if gate is None and up.out_features != 2 * experts * down.in_features:
            raise ValueError(
                f"octile: {names[0]} gives each of {experts} experts {up.out_features // experts} values, expected twice the "
                f"{down.in_features} that {names[1]} takes"
            )
        for name, layer, bias in zip(names, (up, down), (up_bias, down_bias), strict=True):
            layer.experts = experts
            setattr(self, name, layer)
            self.register_parameter(f"{name}_bias", bias)

    def _input(self):
        layer = self._modules[self._names[0]]
        scale = layer._buffers["weight_scale"]  # None: packed, and never in float64
        return layer.in_features, torch.float32 if scale is None else scale.dtype

    def _rows(self, name, x, *more):
        return grouped_linear(x, self._modules[name], *more)


class TrainedExperts(_Routed):
    """Transformers' fused experts with int8 products, as in octile.Linear; Int8Training converts to them.

    The parameters are the same objects, in the same shapes. x and the weights are quantized in every call, x per token.
    """

    @classmethod
    def from_module(cls, module, options):
        """options: functional.Options, with an activation per token."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._options, new._names, new._kind = options, names(module), type(module)
        new._gate = new._kind._apply_gate if module.has_gate else _activate
        new._modules |= module._modules
        new._parameters |= module._parameters
        new.num_experts, new.is_transposed = len(new._parameters["down_proj"]), module.is_transposed
        return new.train(module.training)

    def _weight(self, name):
        weight = self._here(name)
        return weight.mT if self.is_transposed else weight

    def _input(self):
        weight = self._weight(self._names[0])
        return weight.shape[2], weight.dtype

    def _rows(self, name, x, sorted_rows, *more):
        return trained_linear(x, self._weight(name), sorted_rows, self._options, *more)


def _unfit_layer(layer, experts, bias=None):
    """Why octile.Experts cannot have this layer with these biases; "" if it can."""
    if not isinstance(layer, _LAYERS):
        return f"a {type(layer).__name__}, expected {', '.join(kind.__name__ for kind in _LAYERS[:-1])} or W4A16Linear"
    if layer.out_features % experts:
        return f"{layer.out_features} channels do not divide into {experts} experts"
    if layer.bias is not None:
        return "the layer has a bias; those of experts are up_bias and down_bias"
    if layer.packed_weight is not None and layer.experts != experts:
        return f"the layer is packed, but not for {experts} experts: octile.pack_() comes after octile.Experts()"
    shape = experts, layer.out_features // experts
    if bias is not None and bias.shape != shape:
        return f"its bias is {tuple(bias.shape)}, expected {shape}"
    return ""


def _check_routing(index, weights, tokens):
    """On a GPU, nothing else would notice that they do not match the tokens."""
    for name, t in (("index", index), ("weights", weights)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"octile: {name} is a {type(t).__name__}, expected a tensor")
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"octile: index is {index.dtype}, expected torch.int32 or torch.int64")
    if index.dim() != 2 or index.shape[0] != tokens or index.shape[1] == 0:
        raise RuntimeError(f"octile: index is {tuple(index.shape)}, expected ({tokens}, slots): x has {tokens} tokens")
    if weights.shape != index.shape:
        raise RuntimeError(
            f"octile: weights is {tuple(weights.shape)}, expected the shape of index, {tuple(index.shape)}"
        )


# ---- Transformers' experts ----

# What Transformers' decorator use_experts_implementation puts on a module.
_FLAGS = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "_is_expert_parallel"}


def is_experts(module):
    """Whether `module` holds fused experts as Transformers' grouped implementations compute them. Imports nothing."""
    return module.__dict__.keys() >= _FLAGS and not isinstance(module, Experts)


def unfit(module):
    """Why these experts cannot be converted; "" if they can."""
    if "forward" in module.__dict__:
        return "its forward was replaced, on the instance"
    if module.has_post_expert_norm:
        return "it normalizes the output of each expert"
    if getattr(module, "_parallel", None) is not None or module._is_expert_parallel:
        return "its experts are split among processes"
    for name in names(module):
        w = module._parameters.get(name)
        if type(w) is not nn.Parameter or w.dim() != 3:
            return f"its {name} is not a parameter with three dimensions"
        if w.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            return f"its {name} is {w.dtype}"
    return ""


def names(module):
    """Of the module's two weights."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def as_linear(module, name, weight=None):
    """A torch.nn.Linear over the weights of all experts, one expert's channels after the other's.

    weight: used instead of the module's.
    """
    weight = module._parameters[name].detach() if weight is None else weight
    if module.is_transposed:
        weight = weight.transpose(1, 2)
    experts, n, k = weight.shape
    new = nn.Linear(k, experts * n, bias=False, device="meta")
    new.weight = nn.Parameter(weight.reshape(experts * n, k), requires_grad=False)
    return new.train(module.training)


def from_module(module, up, down):
    """octile.Experts in place of Transformers' module, with its weights quantized, and its own gate and biases."""
    kind, own = getattr(module, "_kind", type(module)), names(module)
    biases = [module._parameters.get(f"{name}_bias") for name in own]
    experts = module._parameters[own[0]].shape[0]
    gate = kind._apply_gate if module.has_gate else _activate
    new = Experts(experts, up, down, gate, up_bias=biases[0], down_bias=biases[1], names=own)
    new._modules |= module._modules  # the activation
    new._kind = kind
    return new.train(module.training)


def to_module(module, dtype=None):
    """The Transformers module that these experts were made from, with dequantized weights in `dtype` or their own."""
    if module._kind is None:
        raise ValueError(
            "octile: these experts were not made from a Transformers module and cannot be converted to one"
        )
    _refuse_split(module)
    new = module._kind.__new__(module._kind)
    torch.nn.Module.__init__(new)
    for name in module._names:
        layer = module._modules[name]
        weight = layer.to_linear(dtype).weight.detach().view(module.num_experts, -1, layer.in_features)
        new.register_parameter(name, nn.Parameter(weight.mT.contiguous() if module.is_transposed else weight))
        if (bias := module._parameters[f"{name}_bias"]) is not None:
            new.register_parameter(f"{name}_bias", nn.Parameter(bias.detach().to(dtype or bias.dtype)))
    new._modules |= {name: child for name, child in module._modules.items() if name not in module._names}
    return new.train(module.training)


def _refuse_split(module):
    if module._parallel is not None:
        raise ValueError(
            "octile: these experts are split over ranks, and this rank has only a part: save their state_dict()"
        )


def _activate(module, up):
    return module.act_fn(up)


# ---- In files, where each expert has linear layers of its own ----

# Their names, as llm-compressor writes them for Transformers' models, and as in older files.
_IN_FILES = {part: part for part in ("gate_proj", "up_proj", "down_proj")}
_IN_FILES |= {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def left_random(model, mixtures):
    """The names of octile.Experts that Transformers leaves at random if files hold each expert's layers separately: for
    some models it reads only fused tensors, and it does not read W8A8 without a gate at all."""
    known = conversions(model)
    if known is None:
        return []
    targets = [t for c in known if any("experts.*." in s for s in c.source_patterns) for t in c.target_patterns]

    def is_read(name, module):
        up, down = module._names
        return f"{name}.{down}".endswith(tuple(targets)) and (
            up != "up_proj" or type(module._modules[up]) is not W8A8Linear
        )

    return [name for name, module in mixtures.items() if not is_read(name, module)]


def names_in_files(model):
    """How files name the parts of a model's experts, by gate_proj, up_proj and down_proj: as Transformers reads them."""
    known = {part: part for part in _IN_FILES.values()}
    for conversion in conversions(model) or ():
        if not any(".experts." in target for target in conversion.target_patterns):
            continue
        for source in conversion.source_patterns:
            name = source.removesuffix("$").removesuffix(".weight").rpartition(".")[2]
            if name in _IN_FILES:
                known[_IN_FILES[name]] = name
    return known


def _rows(module, experts, channels, part):
    """The channels of a module's layer that are each expert's `part`: (the layer's name, slices)."""
    up, down = module._names if isinstance(module, Experts) else names(module)
    size = channels // experts
    if part == "down_proj" or up == "up_proj":
        return (down if part == "down_proj" else up), [slice(e * size, (e + 1) * size) for e in range(experts)]
    second, half = part == "up_proj", size // 2
    if getattr(module, "is_concatenated", True):
        return up, [slice(e * size + second * half, e * size + (second + 1) * half) for e in range(experts)]
    return up, [slice(e * size + second, (e + 1) * size, 2) for e in range(experts)]


def parts(module):
    """The names in files of the layers of an expert."""
    up = (module._names if isinstance(module, Experts) else names(module))[0]
    return ("gate_proj", "up_proj", "down_proj") if up == "gate_up_proj" else ("up_proj", "down_proj")


def split(module, known):
    """The layers of octile.Experts by their names under it, "3.gate_proj": views of its buffers.

    known: names_in_files().
    """
    _refuse_split(module)
    layers, up, down = {}, *(module._modules[name] for name in module._names)
    plain = {up: up.plain_weight(), down: down.plain_weight()}
    for part in parts(module):
        layer = down if part == "down_proj" else up
        name, slices = _rows(module, module.num_experts, layer.out_features, part)
        bias = module._parameters[f"{name}_bias"]
        for e, rows in enumerate(slices):
            weight, scale, points = (t if t is None or len(t) == 1 else t[rows] for t in plain[layer])
            new = type(layer).__new__(type(layer))
            buffers = {"quantized_weight": weight, "weight_scale": scale, "weight_zero_point": points}
            buffers |= {"packed_weight": None, "bias": None if bias is None else bias.detach().flatten()[rows]}
            new.__dict__ = {**layer.__dict__, "_buffers": buffers, "out_features": weight.shape[0], "experts": 1}
            layers[f"{e}.{known[part]}"] = new
    return layers


def in_files(modules, name):
    """For a layer's name in files: the name of the Transformers experts it belongs to, the expert and its part; or None.

    Raises ValueError for experts that octile.Experts does not compute.
    """
    parent, _, part = name.rpartition(".")
    parent, _, number = parent.rpartition(".")
    if part not in _IN_FILES or not number.isdecimal() or parent not in modules or not is_experts(modules[parent]):
        return None
    if reason := unfit(modules[parent]):
        raise ValueError(f"octile: {name} belongs to quantized experts, which {parent} cannot be: {reason}")
    return parent, int(number), _IN_FILES[part]


def one_linear(module, number, part):
    """One part of an expert as a linear layer without values, or None if there is no such expert."""
    layer_name, down = names(module)
    weight = module._parameters[down if part == "down_proj" else layer_name]
    experts, n, k = weight.shape
    if module.is_transposed:
        n, k = k, n
    if number >= experts or part not in parts(module):
        return None
    name, slices = _rows(module, experts, experts * n, part)
    return nn.Linear(k, len(range(experts * n)[slices[number]]), module.has_bias, device="meta", dtype=weight.dtype)


def check_complete(where, module, layers):
    """layers: of a checkpoint, by (expert, part). Raises ValueError if one is missing."""
    for e in range(module._parameters["down_proj"].shape[0]):
        for part in parts(module):
            if (e, part) not in layers:
                raise ValueError(f"octile: {where}: there is no {e}.{part}")


def join(where, module, layers):
    """octile.Experts in place of Transformers' module, from the layers of all its experts by (expert, part)."""
    count, made, biases = module._parameters["down_proj"].shape[0], [], []
    check_complete(where, module, layers)
    for name, own in zip(names(module), (parts(module)[:-1], parts(module)[-1:]), strict=True):
        first = layers[0, own[0]]
        channels = sum(layers[e, part].out_features for e in range(count) for part in own)
        rows = {part: _rows(module, count, channels, part)[1] for part in own}
        if any(layer.format != first.format or type(layer) is not type(first) for layer in layers.values()):
            raise ValueError(f"octile: {where}: its experts are quantized in different ways")
        if not isinstance(first, _LAYERS):
            raise ValueError(
                f"octile: {where}: its experts are {type(first).__name__}, which octile.Experts does not support"
            )

        def whole(of, channels=channels, own=own, rows=rows):
            like = of(layers[0, own[0]])
            if like is None:
                return None
            t = like.new_empty((channels, *like.shape[1:]))
            for part in own:
                for e in range(count):
                    value = of(layers[e, part])
                    t[rows[part][e]] = value  # one scale for all is each channel's
            return t

        new = type(first).__new__(type(first))
        buffers = {key: whole(lambda layer, key=key: layer._buffers[key]) for key in first._KEPT}
        buffers |= {"packed_weight": None, "bias": None}
        new.__dict__ = {**first.__dict__, "_buffers": buffers, "out_features": channels}
        new._align()
        made.append(new)
        bias = whole(lambda layer: layer.bias)
        biases.append(None if bias is None else nn.Parameter(bias.view(count, -1)))
    new = from_module(module, *made)
    for name, bias in zip(names(module), biases, strict=True):
        new._parameters[f"{name}_bias"] = bias
    return new
