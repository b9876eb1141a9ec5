"""Layers for inference: quantized weights in buffers, and `weight` as a read-only float view of them.

W8A8Linear         int8 weight, x quantized per token
W8A8StaticLinear   int8 weight, x quantized with one static scale
W8A16Linear        int8 weight, x in float
W4A8Linear         4-bit weight in groups, x quantized per token
W4A16Linear        4-bit weight in groups, x in float

Each passes gradients on to x: dX = dY times the dequantized weight. The weight itself is frozen.
"""

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import _c, _plans, adapters, functional, quantizer, save_pretrained
from .dequantized import DequantizedWeight, read_only
from .kernels import kernels, plan_text
from .weight_format import WeightFormat


class _Inference(nn.Module):
    """What the layers share: only buffers, and scales that keep their type.

    A layer made by its constructor holds zeros; from_linear() or a state_dict fills it.

    weight_dtype: the float type of the original weight, as to(dtype) and half() have converted it since.

    x may require a gradient: dX (..., IN) in x's type is dY times the dequantized weight; it passes straight through the
    quantizer of x (0 where a static scale clamps x). The weight has none. The bias has one if it was made a
    parameter: layer.bias = torch.nn.Parameter(layer.bias). The layer saves nothing of x for the backward, except
    W8A8StaticLinear, which saves one byte per value. Differentiable once; no forward mode, no torch.func transforms.
    """

    _ACTIVATION = _c.NONE
    _product = _c.DEQUANTIZED  # of dX
    _parallel = None  # the parallel.Shards of a layer that is one part of several
    _joined = None  # (the joined.Joined of layers that are multiplied as one, which of them this is)
    _unpacked = None  # (packed_weight, its version, plain_weight()) of a packed layer that has had a gradient
    _KEPT = ("quantized_weight", "weight_scale", "weight_zero_point")  # buffers that to(dtype) leaves in their type
    in_out = False  # whether it was transformers' Conv1D, so that `weight` is (IN, OUT)
    experts = 1  # whose channels its outputs are, one's after the other's: octile.Experts

    def __init__(self, in_features, out_features, bias, device, dtype, format, per_channel=True):
        super().__init__()
        _meet_others()
        format.check(in_features)
        self.format = format
        self.in_features, self.out_features = in_features, out_features
        self.weight_dtype = torch.get_default_dtype() if dtype is None else dtype
        self.register_buffer("bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None)
        self.register_buffer("packed_weight", None)
        stored = format.zeros(out_features, in_features, self._scale_type(self.weight_dtype), per_channel, device)
        for name, buffer in zip(_Inference._KEPT, stored, strict=True):
            self.register_buffer(name, buffer)

    @classmethod
    def _quantized(cls, linear, words, weight=None, bias=None, **how):
        """A layer made with `words`, whose weight, by default the linear layer's, is quantized as `how` says."""
        new = cls(linear.in_features, linear.out_features, False, device="meta", dtype=linear.weight.dtype, **words)
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode cannot be loaded into
            weight, bias = linear.weight if weight is None else weight, linear.bias if bias is None else bias
            new.quantized_weight, new.weight_scale = new.format.quantize(weight, **how)
            new.bias = None if bias is None else bias.detach().clone()
        new._align()
        return new.train(linear.training)

    @property
    def group(self):
        """How many consecutive inputs share a scale; 0: a whole row; None: scales per channel, or one for all."""
        return self.format.group

    @property
    def zero_point(self):
        """Whether the weight has zero points."""
        return self.format.zero_point

    @property
    def weight(self):
        """The dequantized weight, (OUT, IN) in weight_dtype, for models that read a layer's weight themselves.

        Read-only. Every operation that reads its values dequantizes it; the layer's own forward never does.
        """
        return self._readable().to(self.weight_dtype) if torch.compiler.is_compiling() else DequantizedWeight(self)

    def _readable(self):
        weight = self._dequantized()
        return weight.t() if self.in_out else weight

    def __setattr__(self, name, value):
        if name == "weight":
            if isinstance(value, DequantizedWeight) and value._layer is self:
                return  # PEFT before 0.18 puts back what the layer has
            raise AttributeError(f"octile: {read_only(self)}")
        super().__setattr__(name, value)

    def __setstate__(self, state):
        _meet_others()
        super().__setstate__(state)

    def __getstate__(self):
        """For copies and pickles: without what gradients have unpacked."""
        return {name: value for name, value in self.__dict__.items() if name != "_unpacked"}

    def _scale_type(self, dtype):
        return torch.float64 if dtype is torch.float64 else torch.float32

    def _apply(self, fn, recurse=True):
        # half() and to(dtype) are for activations and the bias: a rounded scale would change every weight.
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype, device=self._device())).dtype
        kept = {
            name: self._buffers.pop(name) for name in (*self._KEPT, "packed_weight")
        }  # type() converts integers, too
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            if buffer is None:
                self._buffers[name] = None
                continue
            moved = fn(buffer)
            dtype = self._scale_type(moved.dtype) if buffer.is_floating_point() else buffer.dtype
            self._buffers[name] = moved if moved.dtype == dtype else buffer.to(moved.device, dtype)
        self._align()
        return self

    def _align(self):
        """Aligns the weight for the kernels, after something has replaced it."""
        self._unpacked = None
        packed = self._buffers["packed_weight"]
        if packed is not None and not packed.is_meta and packed.data_ptr() % 64:
            self._buffers["packed_weight"] = packed.clone()
        if self._joined is not None:
            self._joined[0].follow()
        weight = self._buffers["quantized_weight"]
        if weight is not None and weight.dtype is torch.int8:
            self._buffers["quantized_weight"] = quantizer.aligned(weight)
        self._absent_last()

    def _absent_last(self):
        """Moves absent buffers to the end: torch.export counts them in the root."""
        for name in [name for name, buffer in self._buffers.items() if buffer is None]:
            self._buffers[name] = self._buffers.pop(name)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (name := prefix + "quantized_weight") in destination:
            destination[name] = destination[name].contiguous()  # without the padding of _align()
        if self._parallel is not None:
            self._parallel.save(self, destination, prefix)

    def pack_(self):
        """Packs the weight and its scales into one buffer, packed_weight, in the order in which kernels read them.

        The form is that of docs/reference/packed-weights.md, the same for all machines. The layer computes the same, faster
        with few rows; under autocast a packed W8A8Linear quantizes x after its cast, as compiled code does. Its state_dict
        has packed_weight instead of the weight and its scales. Gradients need the unpacked weight: the first one unpacks it
        and keeps the result, and a graph compiled earlier unpacks it each time.
        Layers that join_() has joined are packed together, as one.
        Returns the layer. Raises RuntimeError if no kernel reads it.
        """
        if self._buffers["packed_weight"] is not None:
            return self
        if self._joined is not None:
            self._joined[0].pack_()
            return self
        if reason := self._reason_against_packing():
            raise RuntimeError(reason)
        with torch.inference_mode(False), torch.no_grad():
            self._buffers["packed_weight"] = self._pack(*self.plain_weight()).to(self._device())
        for name in _Inference._KEPT:
            self._buffers[name] = None
        self._absent_last()
        return self

    def _reason_against_packing(self):
        if self._parallel is not None and self._parallel.exact:
            return "octile: a packed layer has no integer sums, which exact=True adds over ranks"
        if self.weight_scale.dtype is torch.float64:
            return "octile: no kernel reads packed float64 layers"
        try:
            plan_text("sku", "linear", self._device(), **self._fields(1) | {"packed_weight": 1})
        except _c.Error as error:
            if error.status != _c.UNSUPPORTED:
                raise
            return str(error)
        return ""

    def _pack(self, weight, scale, zero_point):
        """Their packed form, on the CPU."""
        names = ("x", "y", "activation", "weight", "group", "weight_zero_point", "static_scale")
        fields = {name: value for name, value in self._fields(1).items() if name in names}
        parts = [
            [t] * self.experts if t is None or t.dim() == t.numel() == 1 else t.chunk(self.experts)
            for t in (weight, scale, zero_point)
        ]
        packed = [_plans.pack(*part, self.in_features, **fields) for part in zip(*parts, strict=True)]
        return packed[0] if len(packed) == 1 else torch.cat(packed)

    def plain_weight(self):
        """quantized_weight, weight_scale and weight_zero_point (or None), of a packed layer too."""
        if self._buffers["packed_weight"] is None:
            return self.quantized_weight, self.weight_scale, self.weight_zero_point
        if self._joined is not None:
            return self._joined[0].plain_weight(self._joined[1])
        n, packed = self.out_features // self.experts, self._buffers["packed_weight"].chunk(self.experts)
        parts = [self.format.unpack(part, n, self.in_features) for part in packed]
        if len(parts) == 1:
            return parts[0]
        return tuple(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))

    def _unpacked_weight(self):
        """plain_weight() of a packed layer, unpacked once: eager code keeps it until the weight changes."""
        packed = self._buffers["packed_weight"]
        of, version, plain = self._unpacked or (None, 0, None)
        if torch.compiler.is_compiling():
            return plain if of is packed else self.plain_weight()
        if of is not packed or version != packed._version:
            with torch.no_grad():
                plain = self.plain_weight()
            self._unpacked = packed, packed._version, plain
        return plain

    def _dequantized(self):
        """The weight in the type of its scales."""
        return self.format.dequantize(*self.plain_weight(), self.in_features)

    def _requantize(self, weight):
        """Takes another float weight, shaped as `weight` is: quantized anew, to the nearest level, in the same format.

        Zero points become 0. The tensors that were there before are left as they are.
        """
        self._refuse_split()
        self._refuse_packed_as_one()
        packed = self._buffers["packed_weight"] is not None
        _, scale, zero_point = self.plain_weight()
        weight = weight.detach().to(self._device(), scale.dtype)
        weight = self._divided((weight.t() if self.in_out else weight).contiguous())
        per_channel = scale.dim() > 1 or scale.numel() > 1
        quantized = *self.format.quantize(weight, per_channel=per_channel), zero_point
        if zero_point is not None:
            quantized = *quantized[:2], torch.zeros_like(zero_point)
        for name, buffer in zip(_Inference._KEPT, quantized, strict=True):
            self._buffers[name] = buffer
        self._buffers["packed_weight"] = None
        self._align()
        if packed:
            self.pack_()

    def _refuse_split(self):
        if self._parallel is not None:
            raise ValueError(
                "octile: a layer that is split over ranks cannot take a new weight: the ranks may share its scales"
            )

    def _refuse_packed_as_one(self):
        if self._buffers["packed_weight"] is not None and self._joined is not None:
            raise RuntimeError("octile: a layer that is joined and packed cannot take another weight; use refit_()")

    def refit_(self, weight, bias=None):
        """Quantizes the float `weight`, shaped as `weight` is, into the memory that the layer has; returns the layer.

        No buffer moves: compiled code and captured graphs compute with the new weight from then on. The
        bits are those of from_linear() with its defaults, but zero points become 0, and a layer with one scale for all
        channels keeps one (packed, it has one per channel). The backward of an earlier forward is then an error, except for a
        packed layer, which has kept its weight; layers that are joined count as one. Scales of the input stay. An int8
        weight that is not packed and has no input_multiplier is written by one kernel, without a copy. bias:
        copied, if it is given.

        Raises ValueError for another shape, device or an integer type, for a bias if the layer has none, and if
        octile.parallel has split the layer.
        """
        self._refuse_split()
        device, shape = self._device(), (self.out_features, self.in_features)
        for what, t, expected in (
            ("weight", weight, shape[::-1] if self.in_out else shape),
            ("bias", bias, None if self.bias is None else (self.out_features,)),
        ):
            if what == "bias" and t is None:
                continue
            if not isinstance(t, torch.Tensor):
                raise ValueError(f"octile: {what} is a {type(t).__name__}, expected a tensor")
            if tuple(t.shape) != expected or t.device != device or not t.is_floating_point():
                found = f"{tuple(t.shape)}, {t.dtype}, on {t.device}"
                expected = "the layer has none" if expected is None else f"expected {expected}, floats, on {device}"
                raise ValueError(f"octile: {what} is {found}; {expected}")
        with torch.no_grad():
            weight = self._divided(weight.detach().t() if self.in_out else weight.detach())
            if (packed := self._buffers["packed_weight"]) is None:
                self._refit_plain(weight, *(self._buffers[name] for name in _Inference._KEPT))
            else:
                plain = [None if t is None else t.clone() for t in self.plain_weight()]
                self._refit_plain(weight, *plain)
                if self._joined is None:
                    packed.copy_(self._pack(*plain))
                else:
                    self._joined[0].repack(self._joined[1], plain)
            if bias is not None:
                self.bias.copy_(bias)
        self._unpacked = None
        if self._joined is not None:
            self._joined[0].held = None
        return self

    def _bias(self):
        """A buffer, a parameter, what torch.nn.utils.parametrize makes of one, or None."""
        if "bias" in self._buffers:
            return self._buffers["bias"]
        return self._parameters["bias"] if "bias" in self._parameters else getattr(self, "bias", None)

    def _refit_plain(self, weight, levels, scale, zero_point):
        if torch.float64 in (weight.dtype, scale.dtype):
            weight = weight.to(scale.dtype)
        if self.format.bits == 8:
            quantizer.nearest_s8_into(weight, levels, scale, self.format.group)
            return
        new, new_scale = self.format.quantize(weight)
        levels.copy_(new)
        scale.copy_(new_scale)
        if zero_point is not None:
            zero_point.zero_()

    def _divided(self, weight):
        """`weight` as it is quantized."""
        return weight

    def forward(self, x):
        """x (..., IN) float; returns (..., OUT)."""
        if self._parallel is not None:
            return self._parallel.frozen(self, x)
        if self._joined is not None:
            return self._joined[0].output(self._joined[1], x)
        return self._run(x, self._bias())

    def _run(self, x, bias):
        buffers = self._buffers
        if (packed := buffers["packed_weight"]) is not None:
            return self._run_packed(x, packed, bias, None, 0.0)
        stored = buffers["quantized_weight"], buffers["weight_scale"], buffers["weight_zero_point"]
        return functional.run_frozen(x, *stored, bias, self.in_features, self._ACTIVATION, self._product)

    def _run_packed(self, x, packed, bias, multiplier, static_scale):  # Dynamo makes a symbol of a default float
        if self.experts > 1:
            raise RuntimeError("octile: these are the weights of several experts: octile.Experts calls them")
        format = self.format
        choices = self.out_features, self._ACTIVATION, format.code, format.group or 0, format.zero_point
        for_gradient = self._unpacked_weight, self._product
        return functional.run_packed(
            x, packed, bias, self.in_features, for_gradient, *choices, multiplier, static_scale
        )

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        if self._parallel is not None:
            self._parallel.load(self, state_dict, prefix)
        held, name = self._buffers["quantized_weight"], prefix + "quantized_weight"
        if prefix + "weight" in state_dict and name not in state_dict and held is not None:  # the name until 0.1
            name = prefix + "weight"
        loaded = state_dict.get(name)
        if loaded is not None and held is not None and loaded.dtype != held.dtype:
            # Copied, nearly every value would become 0.
            errors.append(
                f"{name} is {loaded.dtype}, expected {held.dtype}: load a float model first, and convert it "
                "with octile.quantize_() or from_linear()"
            )
            return
        if loaded is not None:
            state_dict[prefix + "quantized_weight"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._align()

    def to_linear(self, dtype=None):
        """A torch.nn.Linear with the dequantized weight, in `dtype`, by default weight_dtype."""
        dtype = dtype or self.weight_dtype
        new = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        new.weight = nn.Parameter(self._dequantized().to(dtype))
        new.bias = None if self.bias is None else nn.Parameter(self.bias.to(dtype, copy=True))
        return new.train(self.training)

    def _fields(self, rows):
        x = _plans.DTYPES[self.weight_dtype]
        fields = {"m": rows, "n": self.out_features // self.experts, "k": self.in_features, "x": x, "y": x}
        fields |= {"bias": int(self.bias is not None), "packed_weight": int(self.packed_weight is not None)}
        fields |= self.format.fields() | {"activation": self._ACTIVATION}
        scale = self._buffers["weight_scale"]
        if scale is not None and scale.dim() == scale.numel() == 1:
            fields["weight"] = _c.S8_PER_TENSOR  # packed, it is as per channel
        return fields

    def explain(self, rows):
        """Which kernels serve `rows` rows of x in weight_dtype, and why."""
        return plan_text("explain", "linear", self._device(), **self._fields(rows))

    def extra_repr(self):
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += "" if self.group is None else f", group={self.group}"
        text += ", zero_point" if self.zero_point else ""
        text += ", input_multiplier" if self._buffers.get("input_multiplier") is not None else ""
        text += ", packed" if self.packed_weight is not None else ""
        text += ", backward=int8" if self._product == _c.INT8 else ""
        return text + kernels(self._device(), ("1 row", self._fields(1)), ("4096 rows", self._fields(4096)))

    def _device(self):
        packed = self._buffers["packed_weight"]
        return (self._buffers["quantized_weight"] if packed is None else packed).device


def check_backward(backward, group=None):
    """The constant of this word. Raises ValueError for an unknown one, and for int8 with a weight in groups."""
    product = functional.product(backward)
    if product == _c.INT8 and group:
        raise ValueError(
            f"octile: backward is 'int8' and group is {group}: an int8 dX folds the weight's scales into dY, which takes "
            "one for each output channel"
        )
    return product


class _Int8(_Inference):
    """Layers with int8 products, whose dX may be one too."""

    @property
    def backward(self):
        """How dX is computed: "16bit" (dY in its own type, the weight dequantized) or "int8" (dY quantized as well)."""
        return "int8" if self._product == _c.INT8 else "16bit"

    @backward.setter
    def backward(self, value):
        self._product = check_backward(value, self.group)


class W8A8Linear(_Int8):
    """Inference with 8-bit weights and activations: y = dequantize(quantize(x)) @ dequantize(weight)^T + bias.

    Buffers: quantized_weight int8 (OUT, IN), weight_scale float32 (OUT), or (1) unless per_channel, or (OUT, IN / group)
    with a group (32, 64 or 128, a divisor of IN; 0: a whole row), bias (OUT) or None. x (..., IN) of any float type is
    quantized per token in every call. to(dtype) and half() convert only the bias: the output has x's type, or
    autocast's type under autocast.

    backward: how dX is computed, "16bit" (the default, which adds only the rounding of its type) or "int8" (dY is
    quantized too, per token and 256 channels: faster with many tokens, with less than 1 % of noise if dY is roughly
    normal; not with a group other than 0). Also an attribute.

    Raises ValueError for an unknown group and one that does not divide IN, and for an unknown backward and an int8 one
    with a group.
    """

    _ACTIVATION = _c.DYNAMIC_PER_TOKEN

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        per_channel=True,
        group=None,
        backward="16bit",
    ):
        format = WeightFormat(group=group)
        super().__init__(in_features, out_features, bias, device, dtype, format, per_channel)
        self.backward = backward
        self._align()

    @classmethod
    def from_linear(cls, linear, *, per_channel=True, group=None, backward="16bit"):
        """Quantizes the weight of a torch.nn.Linear; the bias is copied."""
        return cls._quantized(linear, {"group": group, "backward": backward}, per_channel=per_channel)

    def _run(self, x, bias):
        buffers = self._buffers
        if (packed := buffers["packed_weight"]) is not None:
            return self._run_packed(x, packed, bias, None, 0.0)
        if type(x) is functional.QuantizedInput:
            x.check(self.in_features, buffers["weight_scale"].dtype)
            stored = buffers["quantized_weight"], buffers["weight_scale"]
            return functional.run_int8_quantized(x, *stored, bias, self._product)
        try:
            return functional.run_int8(x, buffers["quantized_weight"], buffers["weight_scale"], bias, self._product)
        except (RuntimeError, IndexError, AttributeError):
            functional.check_input(x, self.in_features, buffers["weight_scale"].dtype)
            raise


class W8A8StaticLinear(_Int8):
    """Inference with 8-bit weights and activations, and one static scale for x.

    Buffers: quantized_weight int8 (OUT, IN); weight_scale float32 (OUT), or (1) unless per_channel; input_scale float32
    (1); input_multiplier float32 (IN), SmoothQuant's 1 / s, or None; bias (OUT) or None. x (..., IN) of any float type
    is multiplied by input_multiplier, quantized with input_scale and clamped to -127..127. y is in x's type,
    under autocast in autocast's. backward: as in W8A8Linear. dX includes input_multiplier, and is 0 where x is clamped.

    The kernels take input_scale as a number, so the buffer always stays on the CPU, and DDP needs
    a process group that can exchange it: backend="cpu:gloo,cuda:nccl". Eager code reads it in every call. A compiled graph
    keeps the number that it was compiled with until the layer is filled, moved, loaded or called in eager code.
    """

    _ACTIVATION = _c.STATIC_PER_TENSOR
    _KEPT = (*_Inference._KEPT, "input_scale", "input_multiplier")

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        per_channel=True,
        multiplier=False,
        backward="16bit",
    ):
        super().__init__(in_features, out_features, bias, device, dtype, WeightFormat(), per_channel)
        self.backward = backward
        of_scales = {"device": device, "dtype": self._scale_type(self.weight_dtype)}
        self.register_buffer("input_scale", torch.ones(1, **of_scales))
        self.register_buffer("input_multiplier", torch.ones(in_features, **of_scales) if multiplier else None)
        self._align()

    @classmethod
    def from_linear(
        cls,
        linear,
        input_scale,
        *,
        input_multiplier=None,
        weight=None,
        bias=None,
        per_channel=True,
        backward="16bit",
    ):
        """Quantizes a torch.nn.Linear; the bias is copied.

        input_scale: a number, or a tensor of one. input_multiplier (IN): then `weight`, the layer's by default, has to
        be the layer's divided by it, column by column. bias: another than the layer's. Raises ValueError for an
        input_scale of several numbers.
        """
        new = cls._quantized(linear, {"backward": backward}, weight, bias, per_channel=per_channel)
        with torch.inference_mode(False), torch.no_grad():
            like = {"device": new.weight_scale.device, "dtype": new.weight_scale.dtype, "copy": True}
            if not isinstance(input_scale, torch.Tensor):  # not in torch's default type, which may have fewer bits
                input_scale = torch.tensor(input_scale, dtype=like["dtype"], device="cpu")
            if input_scale.numel() != 1:
                raise ValueError(f"octile: input_scale is {tuple(input_scale.shape)}, expected one number")
            new.input_scale = input_scale.reshape(1).to(**like)
            new.input_multiplier = None if input_multiplier is None else input_multiplier.to(**like)
        new._align()
        return new

    def _dequantized(self):
        weight = super()._dequantized()
        return weight if self.input_multiplier is None else weight * self.input_multiplier

    def _divided(self, weight):
        return weight if self.input_multiplier is None else weight / self.input_multiplier

    def _run(self, x, bias):
        buffers, scale = self._buffers, self._static_scale()
        multiplier = buffers["input_multiplier"]
        if (packed := buffers["packed_weight"]) is not None:
            return self._run_packed(x, packed, bias, multiplier, scale)
        weight, weight_scale = buffers["quantized_weight"], buffers["weight_scale"]
        return functional.run_static(x, weight, weight_scale, bias, multiplier, scale, self.in_features, self._product)

    def _static_scale(self):
        """input_scale as a number, read in every call: 0.4 us, less than to ask whether the buffer has changed."""
        buffer = self._buffers["input_scale"]
        if not torch.compiler.is_compiling() and not buffer.is_meta:
            if not buffer.is_cpu:
                with torch.inference_mode(False):
                    buffer = self._buffers["input_scale"] = buffer.to("cpu", copy=True)
            if torch._C._len_torch_dispatch_stack():  # fake tensors, in which a number has no value
                with _disable_current_modes():
                    number = buffer.item()
            else:
                number = buffer.item()
            if number != self._number:
                self._number = number
        return self._number

    def _align(self):
        super()._align()
        self._number = 1.0
        self._static_scale()

    def _fields(self, rows):
        fields = super()._fields(rows) | {"static_scale": self._static_scale()}
        return fields | {"x_multiplier": int(self.input_multiplier is not None)}


class W8A16Linear(_Inference):
    """Inference with 8-bit weights; x is not quantized.

    Buffers: quantized_weight int8 (OUT, IN); weight_scale float32 (OUT), or (OUT, IN / group) with a group: 32, 64 or
    128, a divisor of IN, or 0 for a whole row; bias (OUT) or None. x (..., IN) of any float type; y is in x's type, under
    autocast in autocast's. Raises ValueError for an unknown group and one that does not divide IN.
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, group=None):
        super().__init__(in_features, out_features, bias, device, dtype, WeightFormat(group=group))
        self._align()

    @classmethod
    def from_linear(cls, linear, *, group=None, method="nearest", second_moments=None):
        """Quantizes the weight of a torch.nn.Linear; the bias is copied. The arguments are those of W4A16Linear."""
        return cls._quantized(linear, {"group": group}, method=method, second_moments=second_moments)


class W4A16Linear(_Inference):
    """Inference with 4-bit weights, one scale per group of `group` consecutive inputs; x is not quantized.

    Buffers: quantized_weight uint8 (OUT, ceil(IN / 2)), two values -8..7 a byte, the even element in the low nibble;
    weight_scale float32 (OUT, IN / group); weight_zero_point int32 (OUT, IN / group), -8..7, or None (other values are an
    error on a CPU; on a GPU the result is undefined, but no memory is accessed out of bounds); bias (OUT) or None. group:
    32, 64 or 128, a divisor of IN, or 0 for a whole row. y is in x's type, under autocast in autocast's. A gradient
    dequantizes the weight for its product: OUT * IN values of dY's type (on a CPU float32), freed immediately. Raises
    ValueError for an unknown group and one that does not divide IN.
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, group=128, zero_point=False):
        super().__init__(in_features, out_features, bias, device, dtype, WeightFormat(4, group, zero_point))

    @classmethod
    def from_linear(cls, linear, *, group=128, method="nearest", second_moments=None):
        """Quantizes the weight of a torch.nn.Linear; the bias is copied.

        method: "nearest", "clip" or "feedback"; second_moments (IN, IN) of the layer's inputs, which "feedback" needs.
        """
        return cls._quantized(linear, {"group": group}, method=method, second_moments=second_moments)


class W4A8Linear(_Int8):
    """Inference with 4-bit weights, one scale per group of `group` consecutive inputs; x is quantized per token.

    The sums of a group are exact integers, so every kernel gives the same bits. Buffers, group and zero_point are those
    of W4A16Linear. x (..., IN) of any float type is quantized in every call, under autocast after its cast; y is in its
    type. backward: as in W8A8Linear, so "int8" needs group=0; with a group dX is that of W4A16Linear.

    Raises ValueError as W4A16Linear does, and for an unknown backward and an int8 one with a group.
    """

    _ACTIVATION = _c.DYNAMIC_PER_TOKEN

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        group=128,
        zero_point=False,
        backward="16bit",
    ):
        super().__init__(in_features, out_features, bias, device, dtype, WeightFormat(4, group, zero_point))
        self.backward = backward

    @classmethod
    def from_linear(cls, linear, *, group=128, method="nearest", second_moments=None, backward="16bit"):
        """Quantizes the weight of a torch.nn.Linear as W4A16Linear does; the bias is copied."""
        words = {"group": group, "backward": backward}
        return cls._quantized(linear, words, method=method, second_moments=second_moments)


# Those whose weights files keep in words: by their bits, and whether x is quantized.
IN_WORDS = {(8, False): W8A16Linear, (4, False): W4A16Linear, (4, True): W4A8Linear}


def _meet_others():
    """Lets Transformers save such layers, and PEFT adapt them. Each layer calls it when it is created, copied or unpickled."""
    save_pretrained.install()
    adapters.install()


def pack_(model):
    """Packs the weights of all inference layers in `model`, in place; returns the names of the packed layers.

    Makes small batches faster; 4-bit layers gain the most. Layers stay as they are if no kernel of their device reads
    packed weights, and if they are split over ranks with exact=True.
    """
    plain = [(n, m) for n, m in model.named_modules() if isinstance(m, _Inference) and m.packed_weight is None]
    for _, module in plain:
        if module.packed_weight is None and not module._reason_against_packing():  # a joined one packs the others
            module.pack_()
    return [name for name, module in plain if module.packed_weight is not None]
