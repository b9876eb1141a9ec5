"""quantize_(): whole models."""

import dataclasses
import numbers
import sys
import warnings
from typing import Literal

import torch
from torch import nn

from . import _c, _plans, experts, functional, inference, quantizer, training
from .calibration import Calibration
from .kernels import plan_text
from .linears import as_linear, is_conv1d, is_linear, is_plain_linear
from .report import Report
from .smoothing import smooth
from .weight_format import WeightFormat


def _long_sum(linear):
    if linear.in_features > functional.LONGEST_SUM:
        return f"in_features is {linear.in_features}; an exact sum has at most {functional.LONGEST_SUM} terms"
    return ""


def _long_gradient(linear, backward):
    if backward == "int8" and linear.out_features > functional.LONGEST_SUM:
        return f"out_features is {linear.out_features}; an int8 dX sums at most {functional.LONGEST_SUM} terms"
    return ""


def _no_format(linear, format, activation):
    """Why this layer cannot have its weight in this format: "" if it can."""
    try:
        format.check(linear.in_features)
    except ValueError as error:
        return str(error).removeprefix("octile: ")
    w = linear.weight
    if w.device.type in ("cpu", "cuda"):
        x = _plans.DTYPES[w.dtype]
        fields = {"m": 1, "n": linear.out_features, "k": linear.in_features, "x": x, "y": x, "activation": activation}
        try:
            plan_text("sku", "linear", w.device, **fields, **format.fields())
        except RuntimeError as error:
            return f"no kernel on {w.device.type}: {error}"
    return ""


def _not_calibrated(calibration, linear, name):
    seen = calibration.layers.get(name)
    if seen is None or seen.rows == 0:
        return "the calibration has seen no row of its inputs"
    if len(seen.channel_max) != linear.in_features:
        return f"the calibration has seen {len(seen.channel_max)} input features, and it has {linear.in_features}"
    return ""


@dataclasses.dataclass(frozen=True)
class Int8Training:
    """Converts torch.nn.Linear to octile.Linear, Conv1D to octile.conv1d.Conv1D. The parameters stay the same objects, so
    optimizers and ties stay valid.

    The options are octile.Linear's. backward="int8" quantizes dY in blocks of 256 terms of each product's contraction,
    "int8-128" to "int8-1024" in blocks of that length, "int8-whole" with one scale for the whole contraction. Raises ValueError for
    an unknown choice.
    """

    backward: str | tuple[str, str] = "16bit"
    activation: Literal["per_token", "per_tensor"] = "per_token"
    per_channel: bool = True
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self):
        if isinstance(self.backward, list):
            object.__setattr__(self, "backward", tuple(self.backward))
        self._options()  # raises for what is unknown

    def _options(self):
        return functional.options("out_in", **dataclasses.asdict(self))

    def refusal(self, linear, name):
        if reason := _long_sum(linear):
            return reason
        return _long_gradient(linear, "int8" if self._options().dx == _c.INT8 else "16bit")

    def converter(self, model, layers, report):
        words = dataclasses.asdict(self)

        def convert(linear, name):
            if is_conv1d(layers[name]):
                from .conv1d import Conv1D

                return Conv1D.from_conv1d(layers[name], **words)
            return training.Linear.from_linear(linear, **words)

        return convert, []


@dataclasses.dataclass(frozen=True)
class W8A8Dynamic:
    """Converts torch.nn.Linear to octile.W8A8Linear: int8 weights, activations quantized per token in every call.

    per_channel: one weight scale per output channel, else one for the whole weight. group: instead a scale per `group`
    consecutive inputs (32, 64, 128; 0: a whole row). backward: how dX is computed when gradients pass through the
    frozen layer, "16bit" or "int8". Raises ValueError for another group or backward, for a group without per_channel, and for
    an int8 backward with a group other than 0.
    """

    per_channel: bool = True
    group: int | None = None
    backward: Literal["16bit", "int8"] = "16bit"

    def __post_init__(self):
        inference.check_backward(self.backward, WeightFormat(group=self.group).group)
        if self.group is not None and not self.per_channel:
            raise ValueError("octile: per_channel=False is one scale for the whole weight; it has no group")

    def refusal(self, linear, name):
        if reason := _long_sum(linear) or _long_gradient(linear, self.backward):
            return reason
        if self.group is None:
            return ""
        return _no_format(linear, WeightFormat(group=self.group), _c.DYNAMIC_PER_TOKEN)

    def converter(self, model, layers, report):
        words = dataclasses.asdict(self)
        return lambda linear, name: inference.W8A8Linear.from_linear(linear, **words), []


@dataclasses.dataclass(frozen=True, eq=False)
class W8A8Static:
    """Converts torch.nn.Linear to octile.W8A8StaticLinear: int8 weights, and activations quantized with one scale per layer.

    calibration: from octile.calibrate() or octile.Calibration.load(), for this model and its names. smoothing: "search"
    finds the alpha with the smallest error for each layer, leaves it unsmoothed if the gain is too small, and needs sample
    rows or second moments; or one alpha from 0 to 1 for all layers; or None. fold: "auto" divides the preceding layers in
    known blocks; {producer: [consumers]} names them, with all linear layers that read the producer's output; None divides
    none. multipliers: all other layers multiply their inputs while quantizing them (True), or are not smoothed (False).
    backward: as in W8A8Dynamic.
    compressed-tensors has no multipliers: only Octile loads a checkpoint of a model that has them.
    """

    calibration: Calibration
    smoothing: float | Literal["search"] | None = "search"
    fold: Literal["auto"] | dict[str, list[str]] | None = "auto"
    per_channel: bool = True
    multipliers: bool = True
    backward: Literal["16bit", "int8"] = "16bit"

    def __post_init__(self):
        inference.check_backward(self.backward)
        if not isinstance(self.calibration, Calibration):
            raise TypeError(f"octile: calibration is a {type(self.calibration).__name__}, expected octile.Calibration")
        known = self.smoothing is None or self.smoothing == "search"
        number = isinstance(self.smoothing, numbers.Real) and not isinstance(self.smoothing, bool)
        if not known and not (number and 0 <= self.smoothing <= 1):
            raise ValueError(f'octile: smoothing is {self.smoothing!r}, expected None, 0 to 1 or "search"')
        if not (self.fold in ("auto", None) or isinstance(self.fold, dict)):
            raise ValueError(f'octile: fold is {self.fold!r}, expected "auto", None or a dict')
        if self.multipliers not in (True, False):
            raise ValueError(f"octile: multipliers is {self.multipliers!r}, expected True or False")
        if self.smoothing is not None and self.fold is None and not self.multipliers:
            raise ValueError("octile: fold=None with multipliers=False smooths nothing: use smoothing=None")

    def __repr__(self):
        fold = f", fold={self.fold!r}, multipliers={self.multipliers}" if self.smoothing is not None else ""
        backward = "" if self.backward == "16bit" else f", backward={self.backward!r}"
        return f"W8A8Static({self.calibration!r}, smoothing={self.smoothing!r}{fold}{backward})"

    def refusal(self, linear, name):
        if reason := _long_sum(linear) or _long_gradient(linear, self.backward):
            return reason
        return _not_calibrated(self.calibration, linear, name)

    def converter(self, model, layers, report):
        self.calibration.check(layers)
        smoothed, changes = smooth(model, layers, self)
        report.multipliers = [name for name, own in smoothed.items() if own.multiplier is not None]
        report.unsmoothed = {name: own.unsmoothed for name, own in smoothed.items() if own.unsmoothed}

        def convert(linear, name):
            own = smoothed[name]
            largest = own.channel_max.amax().to(own.weight.dtype)
            scale = largest / torch.full_like(largest, 127)
            return inference.W8A8StaticLinear.from_linear(
                linear,
                scale.clamp(min=1e-8),
                input_multiplier=own.multiplier,
                weight=own.weight,
                bias=own.bias,
                per_channel=self.per_channel,
                backward=self.backward,
            )

        return convert, changes


class _ByMethod:
    """What W4A16, W4A8 and W8A16 share; they add the fields, and the layer that they make."""

    def __post_init__(self):
        self._format()
        if not isinstance(self.method, str) or self.method not in quantizer.METHODS:
            raise ValueError(f"octile: method is {self.method!r}, expected one of {', '.join(quantizer.METHODS)}")
        if not isinstance(self.calibration, (Calibration, type(None))):
            raise TypeError(f"octile: calibration is a {type(self.calibration).__name__}, expected octile.Calibration")
        if self.method == "feedback" and self.calibration is None:
            raise ValueError(
                'octile: method="feedback" needs a calibration, with second_moments=True; '
                "see docs/how-to/serve-python.md#calibration"
            )

    def _format(self):
        return WeightFormat(self._BITS, self.group)

    def refusal(self, linear, name):
        if reason := _no_format(linear, self._format(), self._LAYER._ACTIVATION):
            return reason
        if self.method == "feedback":
            if reason := _not_calibrated(self.calibration, linear, name):
                return reason
            if self.calibration[name].second_moments is None:
                return "its calibration has no second moments: calibrate(second_moments=True)"
        return ""

    def converter(self, model, layers, report):
        if self.calibration is not None and self.method != "nearest":
            self.calibration.check(layers)

        names = (field.name for field in dataclasses.fields(self))
        words = {name: getattr(self, name) for name in names if name != "calibration"}

        def convert(linear, name):
            seen = self.calibration.layers.get(name) if self.calibration is not None else None
            moments = None if seen is None else seen.second_moments
            return self._LAYER.from_linear(linear, second_moments=moments, **words)

        return convert, []


@dataclasses.dataclass(frozen=True, eq=False)
class W8A16(_ByMethod):
    """Converts torch.nn.Linear to octile.W8A16Linear: int8 weights with a scale per output channel, or per `group`
    consecutive inputs (32, 64, 128; 0: a whole row). method and calibration: as in W4A16.
    """

    _BITS, _LAYER = 8, inference.W8A16Linear
    group: int | None = None
    method: Literal["nearest", "clip", "feedback"] = "nearest"
    calibration: Calibration | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class W4A16(_ByMethod):
    """Converts torch.nn.Linear to octile.W4A16Linear: 4-bit weights with a scale per `group` inputs (32, 64, 128; 0: a row).

    method: "nearest"; "clip" searches the range of each group for the smallest error; with "feedback" (GPTQ), later
    columns compensate for the rounding of earlier ones. "clip" weighs errors with the calibration's second moments, if it
    has any; "feedback" needs them. Raises ValueError for an unknown group or method, and for "feedback"
    without a calibration.
    """

    _BITS, _LAYER = 4, inference.W4A16Linear
    group: int = 128
    method: Literal["nearest", "clip", "feedback"] = "nearest"
    calibration: Calibration | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class W4A8(_ByMethod):
    """Converts torch.nn.Linear to octile.W4A8Linear: 4-bit weights with a scale per `group` inputs (32, 64, 128; 0: a row),
    activations quantized per token in every call.

    method and calibration: as in W4A16. backward: as in W8A8Dynamic; "int8" needs group=0.
    """

    _BITS, _LAYER = 4, inference.W4A8Linear
    group: int = 128
    method: Literal["nearest", "clip", "feedback"] = "nearest"
    calibration: Calibration | None = None
    backward: Literal["16bit", "int8"] = "16bit"

    def __post_init__(self):
        super().__post_init__()
        inference.check_backward(self.backward, self.group)

    def refusal(self, linear, name):
        return _long_sum(linear) or _long_gradient(linear, self.backward) or super().refusal(linear, name)


_CONFIGS = (Int8Training, W8A8Dynamic, W8A8Static, W8A16, W4A16, W4A8)


def _is_head(name):
    return name.rpartition(".")[2] == "lm_head"


def _unfit(module, config):
    """Why this module cannot be converted; "" if it can. A layer that was trained in int8 can, for inference."""
    if "forward" in module.__dict__:
        return "its forward was replaced, on the instance"
    kind = type(module)
    if isinstance(module, inference._Inference):
        return f"it is an octile.{kind.__name__} already"
    if isinstance(module, training._Trainable):
        if isinstance(config, Int8Training) or not _is_trained(module):
            return f"it is an octile.{_kind_of(module)} already"
        if "weight_int8" in module._buffers:
            return "its weight is cached by cache_weights_(): call remove() first"
    elif kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return f"{kind.__name__} is a subclass of torch.nn.Linear whose weight torch.nn.MultiheadAttention reads itself"
    elif is_conv1d(module):
        if kind.__module__ != "transformers.pytorch_utils":
            return f"{kind.__name__} is a subclass of transformers' Conv1D and may compute something else"
    elif not is_plain_linear(module):
        return f"{kind.__name__} is a subclass of torch.nn.Linear and may compute something else"
    w = module._parameters.get("weight")
    if w is None:
        return "its weight is not a parameter (parametrized?)"
    if type(w) is not nn.Parameter:
        return f"its weight is a {type(w).__name__}"
    if w.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"its weight is {w.dtype}"
    return ""


def _is_trained(module):
    """Whether it is what Int8Training makes, which can be converted for inference."""
    return type(module) is training.Linear or type(module).__module__ == f"{__package__}.conv1d"


def _kind_of(module):
    ours = _is_trained(module) or type(module) is training.QuantizedLinear
    return type(module).__name__ if ours else f"Linear, a {type(module).__name__},"


def _sharers(model):
    """Names of all modules that hold a parameter, by the parameter's id."""
    sharers: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                sharers.setdefault(id(parameter), []).append(name)
    return sharers


def _adapters(model):
    """Names of the modules that PEFT trains and saves: those of adapters, and its copies of modules_to_save."""
    tuners, other = (sys.modules.get(f"peft.{name}") for name in ("tuners.tuners_utils", "utils.other"))
    kinds = getattr(tuners, "BaseTunerLayer", ()), getattr(other, "ModulesToSaveWrapper", ())
    found = set()
    for module in model.modules():
        if isinstance(module, kinds):
            parts = (child for name, child in module.named_children() if name not in ("base_layer", "original_module"))
            found |= {each for part in parts for each in part.modules()}
    return {name for name, module in model.named_modules() if module in found}


def quantize_(model, config, filter=None):
    """Converts the linear layers of `model` in place, as `config` says; returns a Report.

    Linear layers are torch.nn.Linear and transformers' Conv1D; the fused experts of Transformers' models become an
    octile.Experts, or train in int8 with Int8Training; W8A8Static leaves them in float. config: Int8Training, W8A8Dynamic,
    W8A8Static, W8A16, W4A16 or W4A8.
    filter(module, name) -> bool chooses among them; without one, all are converted except those named lm_head. The modules
    remain the same objects, with another class, so references to them and their hooks stay valid.

    Training keeps the parameters, including tied ones. For inference, a weight that other modules hold too (a head tied to
    the embedding) would become a second, quantized copy: it is left alone unless `filter` asks for it. What PEFT trains,
    adapters and its copies of modules_to_save, stays in float.

    The report names every matrix that was left, and why. Warns (UserWarning) if nothing was converted. Raises TypeError
    for another kind of model or config. If it raises, the model is unchanged: the old layers are kept until all new ones are made.
    """
    layers, report = choose(model, config, filter, asked=filter is not None)
    exchange(model, config, layers, report)
    report.count(model)
    if not report.converted:
        why = f"{report.why_nothing()}; see docs/how-to/not-converted.md"
        warnings.warn(f"octile: quantize_() converted nothing: {why}", stacklevel=2)
    return report


def choose(model, config, filter, asked):
    """The layers that quantize_() converts, by name, and a Report that says why the others are not.

    asked: whether the filter may ask for a head and for a weight that other modules hold.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"octile: quantize_() converts a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(config, _CONFIGS):
        names = [kind.__name__ for kind in _CONFIGS]
        raise TypeError(f"octile: {config!r} is none of {', '.join(names[:-1])} and {names[-1]}")
    report, sharers, layers = Report(config), _sharers(model), {}
    adapters = set() if isinstance(config, Int8Training) else _adapters(model)
    for name, module in list(model.named_modules()):
        if experts.is_experts(module):
            reason = _refused_experts(module, name, config, filter, sharers)
            if reason:
                report.skipped[name] = reason
            else:
                layers[name] = module
            continue
        if not (is_linear(module) or isinstance(module, (inference._Inference, training._Trainable))):
            continue
        reason = _unfit(module, config)
        parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
        if isinstance(parent, nn.TransformerEncoderLayer) and not isinstance(config, Int8Training):
            reason = reason or "its parent, a TransformerEncoderLayer, reads the weight itself"
        if not reason and name in adapters:
            reason = "PEFT trains it"
        if not reason and not asked and _is_head(name):
            reason = "lm_head: a filter has to ask for it"
        if not reason and filter is not None and not filter(module, name):
            reason = "the filter"
        others = [] if reason else [n for n in sharers[id(module.weight)] if n != name]
        if others and not asked and not isinstance(config, Int8Training):
            reason = f"its weight is that of {', '.join(others)} too: a filter has to ask for it"
        reason = reason or config.refusal(as_linear(module), name)
        if reason:
            report.skipped[name] = reason
        else:
            layers[name] = module
    return layers, report


def _refused_experts(module, name, config, filter, sharers):
    """Why these experts are left; "" if they are not."""
    if reason := experts.unfit(module):
        return f"experts in one tensor: {reason}"
    if isinstance(config, W8A8Static):
        return "experts in one tensor, which W8A8Static leaves in float"
    training = isinstance(config, Int8Training)
    if training and isinstance(module, experts.TrainedExperts):
        return "experts that train in int8 already"
    if training and config.activation != "per_token":
        return f"experts in one tensor: activation is {config.activation!r}, and theirs are quantized per token"
    if filter is not None and not filter(module, name):
        return "the filter"
    for part in experts.names(module):
        if len(sharers[id(module._parameters[part])]) > 1 and not training:
            return "experts in one tensor, which other modules hold too"
        one = module._parameters[part].detach()[:1]  # a sum over channels is over those of one expert
        if reason := config.refusal(experts.as_linear(module, part, one), f"{name}.{part}"):
            return f"experts in one tensor: {part}: {reason}"
    return ""


def converted(convert, module, name, config):
    """The replacement of `module`, a linear layer or experts."""
    if not experts.is_experts(module):
        return convert(finite(as_linear(module), name, config), name)
    if isinstance(config, Int8Training):
        return experts.TrainedExperts.from_module(module, config._options())
    names = {part: f"{name}.{part}" for part in experts.names(module)}
    parts = [convert(finite(experts.as_linear(module, part), words, config), words) for part, words in names.items()]
    return experts.from_module(module, *parts)


def finite(linear, name, config):
    """The linear layer. Raises ValueError if its weight has a NaN or an infinity and the config quantizes it permanently."""
    if isinstance(config, Int8Training) or linear.weight.is_meta:
        return linear
    if not linear.weight.isfinite().all():
        raise ValueError(f"octile: the weight of {name or 'the model'} has values that are not finite")
    return linear


def exchange(model, config, layers, report):
    """Converts these layers of `model`."""
    convert, changes = config.converter(model, layers, report)
    made = {name: converted(convert, module, name, config) for name, module in layers.items()}
    with torch.no_grad():
        for parameter, new in changes:
            parameter.copy_(new)
    for name, module in layers.items():
        exchange_one(name, module, made.pop(name), report)


def exchange_one(name, module, new, report):
    report.bytes_before += _bytes(module)
    become(module, new)
    report.bytes_after += _bytes(module)
    report.converted.append(name)


def _bytes(module):
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


# Attributes of a module that hold hooks, which other code may have set.
_HOOKS = [name for name in nn.Module().__dict__ if "hook" in name]
# Attributes that our layers keep for themselves: another layer has its own, or the default of its class.
_OURS = {"_options", "_weight_cache", "_names", "_gate", "_kind", "format", "weight_dtype", "in_out", "experts"}
_OURS |= {"_product", "_parallel", "_joined", "_unpacked", "_number"}


def become(module, other):
    """Turns `module` into `other`, a new layer: in place, since containers, hooks and variables refer to it."""
    if isinstance(other, inference._Inference):
        other.in_out = is_conv1d(module)
    kept = {name: module.__dict__[name] for name in _HOOKS if name in module.__dict__}
    ours = isinstance(module, (inference._Inference, training._Trainable, experts._Routed))
    gone = other.__dict__.keys() | (_OURS if ours else ())
    own = {name: value for name, value in module.__dict__.items() if name not in gone}
    if is_linear(module) or isinstance(module, inference._Inference):
        internal = {"weight", "bias", "packed_weight", *getattr(module, "_KEPT", ())}
        for kind in ("_parameters", "_buffers", "_modules"):  # what a user has registered
            extra = module.__dict__[kind].items()
            other.__dict__[kind] |= {n: v for n, v in extra if n not in internal and n not in other.__dict__[kind]}
        other._non_persistent_buffers_set |= module._non_persistent_buffers_set & other._buffers.keys()
    module.__class__ = type(other)
    module.__dict__ = {**own, **other.__dict__, **kept}
