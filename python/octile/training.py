"""Layers that train.

Linear            a torch.nn.Linear that multiplies in int8; same parameters, same state_dict
QuantizedLinear   the layer of the reference interface: weight (IN, OUT), float16 by default
"""

import math

import torch
from torch import nn

from . import _c, _plans, fsdp, functional
from .kernels import kernels, plan_text
from .static_weights import BUFFERS


def _option(name, read, doc):
    return property(lambda self: read(self._options), lambda self, value: self._change(**{name: value}), doc=doc)


def _backward_words(o):
    int8 = next(word for word, block in functional.GRADIENT_BLOCKS.items() if block == o.gradient_block)
    dx, dw = (int8 if one == _c.INT8 else "16bit" for one in (o.dx, o.dw))
    return dx if dx == dw else (dx, dw)


class _Trainable(nn.Module):
    """What Linear and QuantizedLinear share: options, the buffers of cache_weights_(), forward."""

    _layout = "out_in"
    _parallel = None  # the parallel.Shards of a layer that is one part of several
    _weight_cache = None  # the StaticWeight of cache_weights_()

    def _configure(self, **words):
        self._options = functional.options(self._layout, **words)

    def _change(self, **words):
        current = {name: getattr(self, name) for name in ("per_channel", "activation", "backward", "rounding")}
        options = functional.options(self._layout, **(current | words))
        if self._parallel is not None:
            self._parallel.check_options(options)
        self._options = options
        if self._weight_cache is not None:
            self._weight_cache.refresh()

    per_channel = _option(
        "per_channel",
        lambda o: o.per_channel,
        "One scale per output channel of the weight (True), or one for all of it.",
    )
    activation = _option(
        "activation",
        lambda o: "per_token" if o.activation == _c.DYNAMIC_PER_TOKEN else "per_tensor",
        'Scales of x: one "per_token" or one "per_tensor".',
    )
    backward = _option(
        "backward",
        _backward_words,
        'How gradients are multiplied: "16bit", "int8", "int8-whole", "int8-128" to "int8-1024"; a pair for (dX, dW).',
    )
    rounding = _option(
        "rounding",
        lambda o: "stochastic" if o.rounding == _c.STOCHASTIC else "nearest",
        'How dY is rounded for the int8 products of the backward: "nearest" or "stochastic".',
    )

    def forward(self, x):
        """x (..., IN) float or a QuantizedInput; returns (..., OUT) in x's type, under autocast in autocast's."""
        if self._parallel is not None:
            return self._parallel.trained(self, x)
        if type(x) is functional.QuantizedInput:
            return self._of_quantized(x)
        if torch.compiler.is_compiling():
            return functional.traced(x, self.weight, self.bias, self._options, self._static_weight())
        parameters = self._parameters  # nn.Module's __getattr__ takes half a microsecond a name
        try:
            w, b = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrized, or replaced by another tensor
            w, b = self.weight, self.bias
        try:
            return functional.run(x, w, b, self._options, self._weight_cache)
        except (RuntimeError, IndexError, AttributeError):
            functional.check_input(x, self.in_features, self.weight.dtype)
            raise

    def _of_quantized(self, x):
        x.check(self.in_features, self.weight.dtype)
        prepared = None
        if torch.compiler.is_compiling():
            if (static := self._static_weight()) is not None:
                prepared = lambda both: static  # noqa: E731
        elif self._weight_cache is not None:
            prepared = lambda both: self._weight_cache.get(self.weight, self._options, both)  # noqa: E731
        return functional.run_quantized(x, self.weight, self.bias, self._options, prepared)

    def _static_weight(self):
        """The buffers of cache_weights_(), which a compiled graph reads; None without them."""
        if "weight_int8" not in self._buffers:
            return None
        return tuple(getattr(self, name) for name in BUFFERS)

    # With cache_weights_(): whatever may change the weight without changing its version counter.

    def train(self, mode=True):
        if mode != self.training and self._weight_cache is not None:
            self._weight_cache.doubt()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        if self._weight_cache is None:
            return super()._apply(fn, recurse)
        for name in BUFFERS:  # rebuilt, not converted: half() would round the scales
            self._buffers.pop(name, None)
        try:
            super()._apply(fn, recurse)
        finally:
            self._weight_cache.build(self)
        return self

    def __getstate__(self):
        """For copies and pickles: without the buffers of cache_weights_()."""
        state = self.__dict__.copy()
        state.pop("_weight_cache", None)
        state["_buffers"] = {n: b for n, b in self._buffers.items() if n not in BUFFERS}
        state["_non_persistent_buffers_set"] = self._non_persistent_buffers_set - set(BUFFERS)
        return state

    def _fields(self, rows):
        x = _plans.DTYPES[self.weight.dtype]
        o = self._options
        format = _c.S8_PER_CHANNEL if o.per_channel else _c.S8_PER_TENSOR
        n, k = self.out_features, self.in_features
        if self._parallel is not None:
            n, k = self._parallel.local_size(n, k)
        fields = {"m": rows, "n": n, "k": k, "activation": o.activation}
        return fields | {"weight": format, "x": x, "y": x, "bias": int(self.bias is not None)}

    def explain(self, rows, of="forward"):
        """Which kernels serve `rows` rows of x in the weight's type, and why, as text of several lines.

        of: "forward" or "backward" (all three gradients).
        """
        device = self.weight.device
        fields = self._fields(rows)
        if _choose(of) == "forward":
            return plan_text("explain", "linear", device, **fields)
        o = self._options
        wanted = {"dy": fields["y"], "dx": o.dx, "dw": o.dw, "db": fields["bias"], "dw_layout": o.layout}
        wanted |= {name: fields[name] for name in ("m", "n", "k", "activation", "weight")}
        wanted |= {"x_transposed": int(o.dw == _c.INT8), "rounding": o.rounding, "gradient_block": o.gradient_block}
        transposed = o.dx == _c.INT8 and not fsdp.gathers_int8(self.weight)
        wanted |= {"weight_layout": _c.IN_OUT if transposed else _c.OUT_IN}
        return plan_text("explain", "linear_backward", device, **wanted)

    def extra_repr(self):
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += f", per_channel={self.per_channel}, activation={self.activation}, backward={self.backward}"
        text += ", rounding=stochastic" if self.rounding == "stochastic" else ""
        if self.weight.dtype not in _plans.DTYPES:
            return text
        rows = (("1 row", self._fields(1)), ("4096 rows", self._fields(4096)))
        return text + kernels(self.weight.device, *rows)


def _choose(of):
    if of not in ("forward", "backward"):
        raise ValueError(f"octile: of is {of!r}, expected 'forward' or 'backward'")
    return of


class Linear(_Trainable, nn.Linear):
    """torch.nn.Linear with int8 products: x and the weight are quantized in every call.

    Parameters and state_dict are those of torch.nn.Linear: weight (OUT, IN), bias (OUT), float; the optimizer updates them.
    x (..., IN) and the weight may have different float types, but float64 only goes with float64. The gradient of the
    weight has the weight's type; for a float32 weight and a 16-bit x, the kernel writes it in float32.

    backward: "16bit" multiplies dY (M, OUT) by the dequantized operands. "int8" quantizes dY as well, with a scale for
    each block of 256 terms of the contraction: per token and 256 channels for dX (M, IN), per channel and 256 tokens for
    dW (OUT, IN); docs/reference/contract.md has the formula. "int8-128", "int8-256", "int8-512" and "int8-1024" set the block
    length, "int8-whole" has one scale for all terms. A pair chooses for (dX, dW); if both are int8, their blocks must be the
    same. docs/how-to/choose-backward.md compares them.
    activation: one scale of x "per_token" or "per_tensor". rounding: of dY in the int8 products, "nearest" or
    "stochastic". The latter draws new random numbers on every call; a compiled graph reuses the same ones in every run.

    Differentiable once; no forward mode, no torch.func transforms. Raises ValueError for an unknown choice; a call
    raises RuntimeError for shapes and types that do not fit.
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        backward="16bit",
        activation="per_token",
        per_channel=True,
        rounding="nearest",
    ):
        words = {"per_channel": per_channel, "activation": activation, "backward": backward, "rounding": rounding}
        super().__init__(in_features, out_features, bias, device, dtype)
        self._configure(**words)

    @classmethod
    def from_linear(cls, linear, *, backward="16bit", activation="per_token", per_channel=True, rounding="nearest"):
        """A layer with the parameters of a torch.nn.Linear, not copies of them, so ties and optimizers stay valid."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._configure(per_channel=per_channel, activation=activation, backward=backward, rounding=rounding)
        new.in_features, new.out_features = linear.in_features, linear.out_features
        new.weight, new.bias = linear.weight, linear.bias
        new.training = linear.training
        return new

    def to_linear(self):
        """A torch.nn.Linear with the same parameters, shared."""
        new = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        new.weight, new.bias = self.weight, self.bias
        return new.train(self.training)


class QuantizedLinear(_Trainable):
    """The layer of the reference interface, y = x @ weight + bias with int8 products: weight (IN, OUT), bias (OUT).

    By default it is on the GPU, if there is one, and in float16 (dtype: float16, bfloat16 or float32).
    Initialised as that interface defines: kaiming_uniform_ takes the second size, OUT, for the fan-in.
    The other arguments are those of Linear; activation is "per_tensor" here.
    """

    _layout = "in_out"

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        per_channel=True,
        device=None,
        dtype=None,
        backward="16bit",
        activation="per_tensor",
        rounding="nearest",
    ):
        super().__init__()
        dtype = torch.float16 if dtype is None else dtype
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"octile: dtype is {dtype}, expected float16, bfloat16 or float32")
        if device is None and torch.get_default_device().type == "cpu" and torch.cuda.is_available():
            device = "cuda"
        self._configure(per_channel=per_channel, activation=activation, backward=backward, rounding=rounding)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_linear(cls, linear, *, per_channel=True, backward="16bit", activation="per_tensor", rounding="nearest"):
        """A layer with a transposed copy of a torch.nn.Linear's weight, in its type and on its device."""
        words = {"per_channel": per_channel, "backward": backward, "activation": activation, "rounding": rounding}
        new = cls(linear.in_features, linear.out_features, False, device="meta", **words)
        w, b = linear.weight, linear.bias
        new.weight = nn.Parameter(w.detach().t().contiguous().clone(), requires_grad=w.requires_grad)
        new.bias = None if b is None else nn.Parameter(b.detach().clone(), requires_grad=b.requires_grad)
        return new.train(linear.training)

    def to_linear(self):
        """A torch.nn.Linear with a transposed copy of the weight."""
        new = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        w, b = self.weight, self.bias
        new.weight = nn.Parameter(w.detach().t().contiguous().clone(), requires_grad=w.requires_grad)
        new.bias = None if b is None else nn.Parameter(b.detach().clone(), requires_grad=b.requires_grad)
        return new.train(self.training)


def clear_weight_cache(model):
    """Immediately requantizes the weights that cache_weights_() keeps in `model`; nothing else is cached.

    The same as refresh() on the object that cache_weights_() returned, for callers that only have the model.
    """
    for module in model.modules():
        if isinstance(module, _Trainable) and module._weight_cache is not None:
            module._weight_cache.refresh()
