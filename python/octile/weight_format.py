"""How a weight is stored: one value, which layers, configs and checkpoints share. WeightFormat of octile/types.h."""

import dataclasses
import numbers

import torch

from . import _c, _ops, quantizer  # noqa: F401  (_ops registers torch.ops.octile)


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """A weight (OUT, IN) of integers of `bits`, 8 or fewer, and its float scales.

    group: None: a scale per output channel, or one for the whole weight; else a scale per `group` consecutive inputs:
    32, 64 or 128, a divisor of IN, or 0 for a whole row. Fewer than 8 bits always have groups. zero_point: integers that are
    subtracted from the levels, shaped like the scales; not with 8 bits.
    """

    bits: int = 8
    group: int | None = None
    zero_point: bool = False

    def __post_init__(self):
        whole = isinstance(self.group, numbers.Integral) and not isinstance(self.group, bool)
        known = whole and self.group in (0, 32, 64, 128)
        if not known and (self.group is not None or self.bits < 8):
            nothing = "" if self.bits < 8 else ", or None for one per channel"
            raise ValueError(f"octile: group is {self.group!r}, expected 32, 64, 128, or 0 for a whole row{nothing}")

    def check(self, in_features):
        """Raises ValueError where groups do not fit in_features."""
        if self.group is not None and in_features == 0:
            raise ValueError(f"octile: group is {self.group}, and in_features is 0")
        if self.group and in_features % self.group:
            raise ValueError(f"octile: group is {self.group}, which does not divide in_features, {in_features}")

    def fields(self):
        """Those of a plan's description."""
        return {"weight": self.code, "group": self.group or 0, "weight_zero_point": int(self.zero_point)}

    @property
    def code(self):
        """The constant OCTILE_WEIGHT_..."""
        return _c.PACKED.get(self.bits, _c.S8_PER_CHANNEL if self.group is None else _c.S8_GROUP)

    def zeros(self, n, k, scale_dtype, per_channel=True, device=None):
        """A weight of zeros: (weight, scale, zero_point or None). Several values a byte: uint8, else int8 (N, K)."""
        if self.group is None:
            shape = (n if per_channel else 1,)
        else:
            shape = (n, k // self.group if self.group else 1)
        columns, dtype = ((k * self.bits + 7) // 8, torch.uint8) if self.bits < 8 else (k, torch.int8)
        weight = torch.zeros(n, columns, device=device, dtype=dtype)
        points = torch.zeros(shape, device=device, dtype=torch.int32) if self.zero_point else None
        return weight, torch.ones(shape, device=device, dtype=scale_dtype), points

    def quantize(self, w, per_channel=True, method="nearest", second_moments=None):
        """(weight, scale) of the float weight w (N, K). Warns of rows or groups that vanish."""
        if method != "nearest":
            weight, scale = quantizer.by_the_library(w, self, method, second_moments)
        elif self.bits < 8:
            weight, scale = quantizer.nearest_packed(w, self.group, self.bits)
        else:
            weight, scale = quantizer.nearest_s8(w, self.group, per_channel)
        quantizer.warn_of_vanished(w, self.levels(weight, w.shape[1]), self.group or 0)
        return weight, scale

    def levels(self, weight, k):
        """The integers, int8 (N, K)."""
        return quantizer.unpack(weight, k) if self.bits < 8 else weight

    def dequantize(self, weight, scale, zero_point, k):
        """(N, K) in the type of the scales."""
        return torch.ops.octile.dequantize(weight, scale, zero_point, k, scale.dtype)

    def unpack(self, packed, n, k):
        """(weight, scale, zero_point or None) of packed bytes: docs/reference/packed-weights.md."""
        return quantizer.unpack_panels(packed, n, k, self)
