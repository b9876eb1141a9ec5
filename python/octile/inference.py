"""Layers for inference: quantized weights in buffers, and `weight` as a read-only float view of them.

W8A8Linear         int8 weight, x quantized per token
W8A8StaticLinear   int8 weight, x quantized with one scale that is known beforehand
W4A16Linear        4-bit weight in groups, x as it is
"""

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import _c, _plans, functional, quantizer, save_pretrained
from .dequantized import DequantizedWeight, read_only
from .kernels import kernels, plan_text


class _Inference(nn.Module):
    """What the layers share: buffers alone, and scales that keep their type.

    A layer made by its constructor holds zeros; from_linear() or a state_dict fills it.

    weight_dtype: the float type of the original weight, as to(dtype) and half() have converted it since.
    """

    _KEPT = ("quantized_weight", "weight_scale")  # buffers that to(dtype) leaves in their type
    in_out = False  # whether it was transformers' Conv1D, so that `weight` is (IN, OUT)

    def __init__(self, in_features, out_features, bias, device, dtype):
        super().__init__()
        save_pretrained.install()
        self.in_features, self.out_features = in_features, out_features
        self.weight_dtype = torch.get_default_dtype() if dtype is None else dtype
        self.register_buffer("bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None)
        self.register_buffer("packed_weight", None)

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
            raise AttributeError(f"octile: {read_only(self)}")
        super().__setattr__(name, value)

    def __setstate__(self, state):
        save_pretrained.install()
        super().__setstate__(state)

    def _scale_type(self, dtype):
        return torch.float64 if dtype is torch.float64 else torch.float32

    def _apply(self, fn, recurse=True):
        # half() and to(dtype) are for activations and the bias: a rounded scale would change every weight.
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype, device=self._device())).dtype
        kept = {name: self._buffers.pop(name) for name in self._KEPT}
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
        """Lays out the weight as the kernels like it, after something has made it anew."""
        packed = self._buffers["packed_weight"]
        if packed is not None and not packed.is_meta and packed.data_ptr() % 64:
            self._buffers["packed_weight"] = packed.clone()

    def pack_(self):
        """Puts the weight and its scales into one buffer, packed_weight, in the order in which kernels read them.

        The form is that of docs/packed-weights.md, the same for all machines. The layer then computes the same, faster
        for few rows, and no gradients; its state_dict has packed_weight instead of what went into it. Returns the layer.
        Raises RuntimeError where no kernel reads it.
        """
        if self._buffers["packed_weight"] is not None:
            return self
        device, fields = self._device(), self._fields(1)
        if self.weight_scale.dtype is torch.float64:
            raise RuntimeError("octile: no kernel is meant for packed layers in float64")
        plan_text("sku", "linear", device, **fields | {"packed_weight": 1})
        weight, scale, zero_point = self.plain_weight()
        with torch.inference_mode(False), torch.no_grad():
            names = ("x", "y", "activation", "weight", "group", "weight_zero_point", "static_scale")
            fields = {name: fields[name] for name in names if name in fields}
            packed = _plans.pack(weight, scale, zero_point, self.in_features, **fields)
            self._buffers["packed_weight"] = packed.to(device)
        for name in ("quantized_weight", "weight_scale", "weight_zero_point"):
            if name in self._buffers:
                self._buffers[name] = None
        return self

    def plain_weight(self):
        """quantized_weight, weight_scale and weight_zero_point (or None), of a packed layer too."""
        if self._buffers["packed_weight"] is None:
            return self.quantized_weight, self.weight_scale, self._buffers.get("weight_zero_point")
        return self._unpacked(self._buffers["packed_weight"])

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
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
        fields = {"m": rows, "n": self.out_features, "k": self.in_features, "x": x, "y": x}
        return fields | {"bias": int(self.bias is not None), "packed_weight": int(self.packed_weight is not None)}

    def explain(self, rows):
        """Which kernels serve `rows` rows of x in weight_dtype, and why."""
        return plan_text("explain", "linear", self._device(), **self._fields(rows))

    def extra_repr(self):
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += self._format()
        text += ", packed" if self.packed_weight is not None else ""
        return text + kernels(self._device(), ("1 row", self._fields(1)), ("4096 rows", self._fields(4096)))

    def _device(self):
        packed = self._buffers["packed_weight"]
        return (self._buffers["quantized_weight"] if packed is None else packed).device

    def _format(self):
        return ""


class _Int8(_Inference):
    """Layers with an int8 weight, whose rows begin where kernels like them."""

    def _align(self):
        super()._align()
        weight = self._buffers["quantized_weight"]
        pitch = (self.in_features + 15) // 16 * 16
        if weight is not None and weight.stride(0) % 16 and not weight.is_meta:
            padded = weight.new_empty_strided((self.out_features, self.in_features), (pitch, 1))
            self._buffers["quantized_weight"] = padded.copy_(weight)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (name := prefix + "quantized_weight") in destination:
            destination[name] = destination[name].contiguous()  # without the padding of _align()

    def _weight_format(self):
        if self.packed_weight is None and self.weight_scale.numel() == 1:
            return _c.S8_PER_TENSOR
        return _c.S8_PER_CHANNEL  # packed, both are the same

    def _unpacked(self, packed):
        return *quantizer.unpack_panels(packed, self.out_features, self.in_features), None

    def _dequantized(self):
        """The weight in the type of its scales."""
        weight, scale, _ = self.plain_weight()
        return weight.to(scale.dtype) * scale.unsqueeze(-1)


class W8A8Linear(_Int8):
    """Inference with 8-bit weights and activations: y = dequantize(quantize(x)) @ dequantize(weight)^T + bias.

    Buffers: quantized_weight int8 (OUT, IN), weight_scale float32 (OUT), or (1) unless per_channel, bias (OUT) or None.
    x (..., IN) of any float type is quantized per token in every call. to(dtype) and half() convert the bias alone: the
    layer answers in x's type, under autocast in autocast's. x may ask for a gradient (16-bit), which the frozen layer
    passes on to what is before it. PEFT refuses to wrap this layer: train adapters over octile.Linear, merge them, and
    convert the result.
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, per_channel=True):
        super().__init__(in_features, out_features, bias, device, dtype)
        weight = torch.zeros(out_features, in_features, device=device, dtype=torch.int8)
        scale = torch.ones(out_features if per_channel else 1, device=device, dtype=self._scale_type(dtype))
        self.register_buffer("quantized_weight", weight)
        self.register_buffer("weight_scale", scale)
        self._align()

    @classmethod
    def from_linear(cls, linear, *, per_channel=True):
        """Quantizes the weight of a torch.nn.Linear; the bias is copied."""
        o = functional.options("out_in", per_channel, "per_token", "16bit", "nearest")
        new = cls(linear.in_features, linear.out_features, False, device="meta", dtype=linear.weight.dtype)
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode cannot be loaded into
            new.quantized_weight, _, new.weight_scale = functional.quantize_weight(linear.weight, o, False)
            quantizer.warn_of_vanished(linear.weight, new.quantized_weight)
            new.bias = None if linear.bias is None else linear.bias.detach().clone()
        return new.train(linear.training)

    def forward(self, x):
        """x (..., IN) float; returns (..., OUT)."""
        buffers = self._buffers
        if (packed := buffers["packed_weight"]) is not None:
            choices = self.out_features, _c.DYNAMIC_PER_TOKEN, _c.S8_PER_CHANNEL, 0, False, None, 0.0
            return functional.run_packed(x, packed, buffers["bias"], self.in_features, *choices)
        try:
            return functional.run_int8(x, buffers["quantized_weight"], buffers["weight_scale"], buffers["bias"])
        except (RuntimeError, IndexError):
            functional.check_input(x, self.in_features)
            raise

    def _fields(self, rows):
        return super()._fields(rows) | {"activation": _c.DYNAMIC_PER_TOKEN, "weight": self._weight_format()}


class W8A8StaticLinear(_Int8):
    """Inference with 8-bit weights and activations, and one scale for x that is known beforehand.

    Buffers: quantized_weight int8 (OUT, IN); weight_scale float32 (OUT), or (1) unless per_channel; input_scale float32
    (1); input_multiplier float32 (IN), SmoothQuant's 1 / s, or None; bias (OUT) or None. x (..., IN) of any float type
    is multiplied by input_multiplier and quantized with input_scale, where it is clamped to -127..127. y is in x's type,
    under autocast in autocast's. No gradients.

    The kernels take input_scale as a number, so the buffer stays on the CPU wherever the layer goes. Eager code reads
    it in every call. A compiled graph keeps the number that it was compiled with until the layer is filled, moved,
    loaded or called in eager code.
    """

    _KEPT = ("quantized_weight", "weight_scale", "input_scale", "input_multiplier")

    def __init__(
        self, in_features, out_features, bias=True, device=None, dtype=None, *, per_channel=True, multiplier=False
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        of_scales = {"device": device, "dtype": self._scale_type(dtype)}
        self.register_buffer(
            "quantized_weight", torch.zeros(out_features, in_features, device=device, dtype=torch.int8)
        )
        self.register_buffer("weight_scale", torch.ones(out_features if per_channel else 1, **of_scales))
        self.register_buffer("input_scale", torch.ones(1, **of_scales))
        self.register_buffer("input_multiplier", torch.ones(in_features, **of_scales) if multiplier else None)
        self._align()

    @classmethod
    def from_linear(cls, linear, input_scale, *, input_multiplier=None, weight=None, bias=None, per_channel=True):
        """Quantizes a torch.nn.Linear; the bias is copied.

        input_scale: a number, or a tensor of one. input_multiplier (IN): then `weight`, the layer's by default, has to
        be the layer's divided by it, column by column. bias: another than the layer's.
        """
        o = functional.options("out_in", per_channel, "per_token", "16bit", "nearest")
        new = cls(linear.in_features, linear.out_features, False, device="meta", dtype=linear.weight.dtype)
        with torch.inference_mode(False), torch.no_grad():
            w = linear.weight if weight is None else weight
            new.quantized_weight, _, new.weight_scale = functional.quantize_weight(w, o, False)
            quantizer.warn_of_vanished(w, new.quantized_weight)
            scale = torch.as_tensor(input_scale).reshape(1)
            new.input_scale = scale.to(new.weight_scale.device, new.weight_scale.dtype, copy=True)
            if input_multiplier is not None:
                new.input_multiplier = input_multiplier.to(new.weight_scale.device, new.weight_scale.dtype, copy=True)
            bias = linear.bias if bias is None else bias
            new.bias = None if bias is None else bias.detach().clone()
        new._align()
        return new.train(linear.training)

    def _dequantized(self):
        weight = super()._dequantized()
        return weight if self.input_multiplier is None else weight * self.input_multiplier

    def forward(self, x):
        """x (..., IN) float; returns (..., OUT)."""
        buffers, scale = self._buffers, self._static_scale()
        bias, multiplier = buffers["bias"], buffers["input_multiplier"]
        if (packed := buffers["packed_weight"]) is not None:
            choices = self.out_features, _c.STATIC_PER_TENSOR, _c.S8_PER_CHANNEL, 0, False, multiplier, scale
            return functional.run_packed(x, packed, bias, self.in_features, *choices)
        weight, weight_scale = buffers["quantized_weight"], buffers["weight_scale"]
        return functional.run_static(x, weight, weight_scale, bias, multiplier, scale, self.in_features)

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
        fields = super()._fields(rows) | {"activation": _c.STATIC_PER_TENSOR, "static_scale": self._static_scale()}
        return fields | {"weight": self._weight_format(), "x_multiplier": int(self.input_multiplier is not None)}

    def _format(self):
        return "" if self.input_multiplier is None else ", input_multiplier"


class W4A16Linear(_Inference):
    """Inference with 4-bit weights, one scale per group of `group` neighbours along IN; x is not quantized.

    Buffers: quantized_weight uint8 (OUT, ceil(IN / 2)), two values -8..7 a byte, the even element in the low nibble;
    weight_scale float32 (OUT, IN / group); weight_zero_point int32 (OUT, IN / group), -8..7, or None (others are an error
    on a CPU, and on a GPU lead to undefined results, but to no wrong access to memory); bias (OUT) or None. group: 32,
    64 or 128, a divisor of IN, or 0 for a whole row. y is in x's type, under autocast in autocast's. No
    gradients.
    """

    _KEPT = ("quantized_weight", "weight_scale", "weight_zero_point")

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, group=128, zero_point=False):
        super().__init__(in_features, out_features, bias, device, dtype)
        check_group(group, in_features)
        self.group, self.zero_point = group, zero_point
        shape = (out_features, in_features // group if group else 1)
        weight = torch.zeros(out_features, (in_features + 1) // 2, device=device, dtype=torch.uint8)
        self.register_buffer("quantized_weight", weight)
        self.register_buffer("weight_scale", torch.ones(shape, device=device, dtype=self._scale_type(dtype)))
        points = torch.zeros(shape, device=device, dtype=torch.int32) if zero_point else None
        self.register_buffer("weight_zero_point", points)

    @classmethod
    def from_linear(cls, linear, *, group=128, method="nearest", second_moments=None):
        """Quantizes the weight of a torch.nn.Linear; the bias is copied.

        method: "nearest", "clip" or "feedback"; second_moments (IN, IN) of the layer's inputs, which "feedback" needs.
        """
        new = cls(linear.in_features, linear.out_features, False, device="meta", dtype=linear.weight.dtype, group=group)
        with torch.inference_mode(False), torch.no_grad():
            new.quantized_weight, new.weight_scale = quantizer.quantize_groups(
                linear.weight, group, method, second_moments
            )
            quantizer.warn_of_vanished(linear.weight, quantizer.unpack(new.quantized_weight, linear.in_features), group)
            new.bias = None if linear.bias is None else linear.bias.detach().clone()
        return new.train(linear.training)

    def _dequantized(self):
        weight, scale, zero_point = self.plain_weight()
        values, group = quantizer.unpack(weight, self.in_features).to(scale.dtype), self.group or self.in_features
        if zero_point is not None:
            values = values - zero_point.repeat_interleave(group, dim=1)
        return values * scale.repeat_interleave(group, dim=1)

    def forward(self, x):
        """x (..., IN) float; returns (..., OUT)."""
        buffers = self._buffers
        if (packed := buffers["packed_weight"]) is not None:
            choices = self.out_features, _c.NONE, _c.S4_GROUP, self.group, self.zero_point, None, 0.0
            return functional.run_packed(x, packed, buffers["bias"], self.in_features, *choices)
        scale, zero_point = buffers["weight_scale"], buffers["weight_zero_point"]
        return functional.run_s4(x, buffers["quantized_weight"], scale, zero_point, buffers["bias"], self.in_features)

    def _fields(self, rows):
        fields = super()._fields(rows) | {"activation": _c.NONE, "weight": _c.S4_GROUP, "group": self.group}
        return fields | {"weight_zero_point": int(self.zero_point)}

    def _unpacked(self, packed):
        return quantizer.unpack_groups(packed, self.out_features, self.in_features, self.group, self.zero_point)

    def _format(self):
        return f", group={self.group}" + (", zero_point" if self.zero_point else "")


def pack_(model):
    """Packs the weights of all layers for inference in `model`, in place; returns the names of those that were.

    For serving few rows at a time: W4A16Linear gains most. Layers stay as they are on a device whose kernels read no
    packed weight.
    """
    packed = []
    for name, module in model.named_modules():
        if isinstance(module, _Inference) and module.packed_weight is None:
            try:
                module.pack_()
            except RuntimeError as error:
                if "no kernel" not in str(error):
                    raise
                continue
            packed.append(name)
    return packed


def check_group(group, in_features):
    if group not in (0, 32, 64, 128):
        raise ValueError(f"octile: group is {group}; 32, 64, 128, and 0 for a whole row, are known")
    if group and in_features % group:
        raise ValueError(f"octile: group is {group}, which does not divide in_features, {in_features}")
