"""Layers for inference: quantized weights in buffers.

W8A8Linear    int8 weight, x quantized per token
W4A16Linear   4-bit weight in groups, x as it is
"""

import torch
from torch import nn

from . import _c, _fallback, functional
from .kernels import kernels, plan_text


class _Inference(nn.Module):
    """What W8A8Linear and W4A16Linear share: buffers alone, and scales that keep their type.

    A layer made by its constructor holds zeros; from_linear() or a state_dict fills it.
    """

    def __init__(self, in_features, out_features, bias, device, dtype):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None)

    def _scale_type(self, dtype):
        return torch.float64 if dtype is torch.float64 else torch.float32

    def _apply(self, fn, recurse=True):
        # half() and to(dtype) are for activations and the bias: a rounded scale would change every weight.
        kept = {name: self._buffers.pop(name) for name in ("weight", "weight_scale")}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = fn(buffer)
            dtype = self._scale_type(moved.dtype) if name == "weight_scale" else buffer.dtype
            self._buffers[name] = moved if moved.dtype == dtype else buffer.to(moved.device, dtype)
        self._align()
        return self

    def _align(self):
        """Lays out the weight as the kernels like it, after something has made it anew."""

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        loaded = state_dict.get(prefix + "weight")
        if loaded is not None and loaded.dtype != self.weight.dtype:
            # Copied, nearly every value would become 0.
            errors.append(
                f"{prefix}weight is {loaded.dtype}, expected {self.weight.dtype}: load a float model first, and convert it "
                "with octile.quantize_() or from_linear()"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._align()

    def _to_linear(self, weight, dtype):
        dtype = dtype or (torch.get_default_dtype() if self.bias is None else self.bias.dtype)
        new = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        new.weight = nn.Parameter(weight.to(dtype))
        new.bias = None if self.bias is None else nn.Parameter(self.bias.to(dtype, copy=True))
        return new.train(self.training)

    def _fields(self, rows):
        dtype = torch.get_default_dtype() if self.bias is None else self.bias.dtype
        x = _fallback._DTYPES[dtype]
        return {"m": rows, "n": self.out_features, "k": self.in_features, "x": x, "y": x} | {
            "bias": int(self.bias is not None)
        }

    def explain(self, rows):
        """Which kernels serve `rows` rows of x in the bias's type (without one, torch's default), and why."""
        return plan_text("explain", "linear", self.weight.device, **self._fields(rows))

    def extra_repr(self):
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += self._format()
        return text + kernels(self.weight.device, ("1 row", self._fields(1)), ("4096 rows", self._fields(4096)))

    def _format(self):
        return ""


class W8A8Linear(_Inference):
    """Inference with 8-bit weights and activations: y = dequantize(quantize(x)) @ dequantize(weight)^T + bias.

    Buffers: weight int8 (OUT, IN), weight_scale float32 (OUT), or (1) unless per_channel, bias (OUT) or None. x (..., IN) of any float type is
    quantized per token in every call. to(dtype) and half() convert the bias alone: the layer answers in x's type, under
    autocast in autocast's. x may ask for a gradient (16-bit, for adapters around a frozen layer).
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, per_channel=True):
        super().__init__(in_features, out_features, bias, device, dtype)
        weight = torch.zeros(out_features, in_features, device=device, dtype=torch.int8)
        scale = torch.ones(out_features if per_channel else 1, device=device, dtype=self._scale_type(dtype))
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self._align()

    @classmethod
    def from_linear(cls, linear, *, per_channel=True):
        """Quantizes the weight of a torch.nn.Linear; the bias is copied."""
        o = functional.options("out_in", per_channel, "per_token", "16bit", "nearest")
        new = cls(linear.in_features, linear.out_features, False, device="meta")
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode cannot be loaded into
            new.weight, _, new.weight_scale = functional.quantize_weight(linear.weight, o, False)
            new.bias = None if linear.bias is None else linear.bias.detach().clone()
        return new.train(linear.training)

    def to_linear(self, dtype=None):
        """A torch.nn.Linear with the dequantized weight, in `dtype`: by default the bias's, or torch's default."""
        scale = self.weight_scale.unsqueeze(-1)
        return self._to_linear(self.weight.to(scale.dtype) * scale, dtype)

    def forward(self, x):
        """x (..., IN) float; returns (..., OUT)."""
        buffers = self._buffers
        return functional.run_int8(x, buffers["weight"], buffers["weight_scale"], buffers["bias"])

    def _align(self):
        weight = self._buffers["weight"]
        pitch = (self.in_features + 15) // 16 * 16
        if weight.stride(0) % 16 and not weight.is_meta:
            padded = weight.new_empty_strided((self.out_features, self.in_features), (pitch, 1))
            self._buffers["weight"] = padded.copy_(weight)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].contiguous()  # without the padding of _align()

    def _fields(self, rows):
        format = _c.S8_PER_TENSOR if self.weight_scale.numel() == 1 else _c.S8_PER_CHANNEL
        return super()._fields(rows) | {"activation": _c.DYNAMIC_PER_TOKEN, "weight": format}


class W4A16Linear(_Inference):
    """Inference with 4-bit weights, one scale per group of `group` neighbours along IN; x is not quantized.

    Buffers: weight uint8 (OUT, ceil(IN / 2)), two values -7..7 a byte, the even element in the low nibble;
    weight_scale float32 (OUT, IN / group); bias (OUT) or None. group: 32, 64 or 128, a divisor of IN, or 0 for a whole
    row. y is in x's type, under autocast in autocast's. No gradients.
    """

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, group=128):
        super().__init__(in_features, out_features, bias, device, dtype)
        _check_group(group, in_features)
        self.group = group
        shape = (out_features, in_features // group if group else 1)
        weight = torch.zeros(out_features, (in_features + 1) // 2, device=device, dtype=torch.uint8)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", torch.ones(shape, device=device, dtype=self._scale_type(dtype)))

    @classmethod
    def from_linear(cls, linear, *, group=128):
        """Quantizes the weight of a torch.nn.Linear; the bias is copied."""
        new = cls(linear.in_features, linear.out_features, False, device="meta", group=group)
        with torch.inference_mode(False), torch.no_grad():
            new.weight, new.weight_scale = _quantize_groups(linear.weight, group)
            new.bias = None if linear.bias is None else linear.bias.detach().clone()
        return new.train(linear.training)

    def to_linear(self, dtype=None):
        """A torch.nn.Linear with the dequantized weight, in `dtype`: by default the bias's, or torch's default."""
        low, high = self.weight & 15, self.weight >> 4
        values = torch.stack((low, high), -1).flatten(1)[:, : self.in_features].to(torch.int8)
        values = torch.where(values > 7, values - 16, values).to(self.weight_scale.dtype)
        scale = self.weight_scale.repeat_interleave(self.group or self.in_features, dim=1)
        return self._to_linear(values * scale, dtype)

    def forward(self, x):
        """x (..., IN) float; returns (..., OUT)."""
        buffers = self._buffers
        return functional.run_s4(x, buffers["weight"], buffers["weight_scale"], buffers["bias"])

    def _fields(self, rows):
        return super()._fields(rows) | {"activation": _c.NONE, "weight": _c.S4_GROUP, "group": self.group}

    def _format(self):
        return f", group={self.group}"


def _check_group(group, in_features):
    if group not in (0, 32, 64, 128):
        raise ValueError(f"octile: group is {group}; 32, 64, 128, and 0 for a whole row, are known")
    if group and in_features % group:
        raise ValueError(f"octile: group is {group}, which does not divide in_features, {in_features}")


def _quantize_groups(w, group):
    """4-bit w (N, K): bytes (N, ceil(K / 2)) and scales (N, K / group), by the rules of docs/contract.md."""
    n, k = w.shape
    values = w.to(torch.float64 if w.dtype is torch.float64 else torch.float32).reshape(n, -1, group or max(k, 1))
    largest = values.abs().amax(-1, keepdim=True)
    scale = (largest / torch.full_like(largest, 7)).clamp(min=1e-8)  # a GPU multiplies by 1 / 7 for a number's sake
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    q = (values / scale).round().clamp(-7, 7).nan_to_num(0).to(torch.int8).reshape(n, k)
    q = nn.functional.pad(q, (0, k % 2)).to(torch.uint8) & 15
    return q[:, 0::2] | (q[:, 1::2] << 4), scale.squeeze(-1)
