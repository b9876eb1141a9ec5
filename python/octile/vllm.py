"""Octile in vLLM: linear layers of quantized checkpoints on Octile's kernels, on CPUs and NVIDIA GPUs.

vLLM finds register() by its entry point, vllm.general_plugins, in each of its processes. That puts two classes in front of
vLLM's own kernels, and vLLM asks them first, for each layer:

OctileInt8LinearKernel    int8 weights and int8 activations, dynamic per token or static per tensor (W8A8)
OctileWeightLinearKernel  weights of 4 or 8 bits in int32 words (W4A16, W8A16), and of 4 bits with int8 activations (W4A8)

If one refuses a layer, it says why, and vLLM uses one of its own. OCTILE_VLLM=last puts them after vLLM's, off leaves
them out; VLLM_DISABLED_KERNELS takes their names, VLLM_PLUGINS "octile".
"""

import os
import warnings

import torch
import vllm
from vllm import envs
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

try:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, MPLinearKernel
    from vllm.model_executor.utils import replace_parameter
except ImportError as error:
    raise ImportError(
        f"octile: vLLM {vllm.__version__} has different plug-in points; 0.25, 0.32 and 0.33 were tested"
    ) from error

from . import _c, _plans, quantizer
from .kernels import plan_text
from .weight_format import WeightFormat

__all__ = ["OctileInt8LinearKernel", "OctileWeightLinearKernel", "refit_", "register"]

_PLACES = ("first", "last", "off")
# Bits of the weight, and whether it has zero points.
_WEIGHTS = {
    scalar_types.int4: (4, False),
    scalar_types.uint4b8: (4, False),
    scalar_types.uint4: (4, True),
    scalar_types.uint8b128: (8, False),
}
_FORMAT = WeightFormat()  # of W8A8: int8, a scale per output channel
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def register():
    """Offers the kernels to vLLM, once per process. Raises ValueError for an unknown OCTILE_VLLM."""
    place = os.environ.get("OCTILE_VLLM", "first")
    if place not in _PLACES:
        raise ValueError(f"octile: OCTILE_VLLM is {place!r}, expected one of {', '.join(_PLACES)}")
    if place == "off":
        return
    _enter_compile_cache_key(place)
    for kind, kernel, lists in (
        ("int8", OctileInt8LinearKernel, "_POSSIBLE_INT8_KERNELS"),
        ("mp", OctileWeightLinearKernel, "_POSSIBLE_KERNELS"),
    ):
        for platform in (PlatformEnum.CPU, PlatformEnum.CUDA):
            known = getattr(linear, lists, {})
            if kernel in known.get(platform, []):
                continue
            linear.register_linear_kernel(kernel, platform, kind)
            if place == "first" and kernel in known.get(platform, []):
                known[platform].insert(0, known[platform].pop())
            elif place == "first":
                warnings.warn(
                    f"octile: this vLLM keeps its kernels elsewhere, so {kernel.__name__} comes last", stacklevel=2
                )


def _enter_compile_cache_key(place):
    """Adds what decides which kernels are chosen to the key of vLLM's compile cache, which has only vLLM's own variables."""
    value = " ".join((place, _c.library().version(), os.environ.get("OCTILE_ISA", "")))
    try:
        envs.environment_variables["OCTILE_VLLM"] = lambda: value
    except (AttributeError, TypeError):
        warnings.warn(
            "octile: this vLLM's compile cache may not tell graphs with Octile's kernels from others; "
            "VLLM_DISABLE_COMPILE_CACHE=1 turns it off",
            stacklevel=3,
        )


def _refusal(capability=None, **fields):
    """Why the library cannot serve such a layer, or None. Without fields: why it cannot serve any layer."""
    if current_platform.is_cpu():
        device = torch.device("cpu")
    elif not current_platform.is_cuda():
        return "requires a CPU or an NVIDIA GPU"
    elif capability is not None and capability < 80:
        return f"requires compute capability 8.0, and this GPU has {capability / 10}"
    else:
        device = torch.device("cuda", torch.cuda.current_device())
    x = fields.pop("x", _c.BF16)
    wanted = {"m": 1, "n": 64, "k": 64, "x": x, "y": x, "activation": _c.DYNAMIC_PER_TOKEN} | fields
    try:
        plan_text("sku", "linear", device, **wanted)
    except RuntimeError as error:
        return str(error)
    return None


def _pack(weight, scale, points, n, k, fields):
    """The packed weight, or None if no kernel reads it."""
    if _refusal(n=n, k=k, packed_weight=1, **fields) is not None:
        return None
    return _plans.pack(weight, scale, points, k, y=fields["x"], **fields).to(weight.device)


def _answer(reason):
    return reason is None, reason


def _rows_first(parameter):
    """A two-dimensional parameter of vLLM's as (OUT, ...)."""
    return parameter.data if parameter.output_dim == 0 else parameter.data.t()


def _bias(bias, x):
    return bias if bias is None or bias.dtype is x.dtype else bias.to(x.dtype)


class OctileInt8LinearKernel(Int8ScaledMMLinearKernel):
    """W8A8 with exact sums: the bits of octile.W8A8Linear, on every device and for every number of rows."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return _answer(_refusal(compute_capability))

    @classmethod
    def can_implement(cls, c):
        return _answer(None if c.input_symmetric else "does not support a zero point of the activations")

    def process_weights_after_loading(self, layer):
        weight_name, scale_name, input_scale_name, *_ = self.layer_param_names
        weight, scale = getattr(layer, weight_name).data, getattr(layer, scale_name).data.flatten().float()
        self._n, self._k = weight.shape
        if not self.config.is_channelwise:  # one scale, or one for each of several fused layers
            widths = torch.tensor(layer.logical_widths, device=scale.device)
            scale = scale.repeat_interleave(widths, output_size=self._n)
        self._activation, self._static_scale = _c.DYNAMIC_PER_TOKEN, 0.0
        if self.config.is_static_input_scheme:
            self._activation = _c.STATIC_PER_TENSOR
            self._static_scale = getattr(layer, input_scale_name).max().item()
        packed = self._pack(weight, scale)
        self._packed = packed is not None
        replace_parameter(layer, weight_name, packed if self._packed else quantizer.aligned(weight))
        replace_parameter(layer, scale_name, None if self._packed else scale)
        layer.octile = self

    def _pack(self, weight, scale):
        fields = _FORMAT.fields() | {"activation": self._activation, "static_scale": self._static_scale}
        return _pack(weight, scale, None, self._n, self._k, fields | {"x": _c.BF16})

    def apply_weights(self, layer, x, bias=None):
        weight, scale, *_ = self._get_layer_params(layer)
        bias = _bias(bias, x)
        if self._packed:
            words = self._n, self._activation, _c.S8_PER_CHANNEL, 0, False
            return torch.ops.octile.linear_packed(x, weight, bias, *words, None, self._static_scale)
        return torch.ops.octile.linear(x, weight, scale, bias, self._activation, _c.OUT_IN, None, self._static_scale)

    def refit(self, layer, weight, row):
        """refit_(), once it has checked the layer."""
        held, scale, *_ = self._get_layer_params(layer)
        (n, k), end = (self._n, self._k), row + len(weight)
        if weight.dim() != 2 or weight.shape[1] != k or not 0 <= row <= end <= n or weight.device != held.device:
            raise ValueError(
                f"octile: weight is {tuple(weight.shape)} on {weight.device}, for channels from {row}; the layer has "
                f"{(n, k)} on {held.device}"
            )
        plain = _FORMAT.unpack(held.data, n, k)[:2] if self._packed else (held.data, scale.data)
        quantizer.nearest_s8_into(weight.detach(), plain[0][row:end], plain[1][row:end], None)
        if self._packed:
            held.data.copy_(self._pack(*plain))


class OctileWeightLinearKernel(MPLinearKernel):
    """W4A16, W4A8 and W8A16. Sums of W4A8 are exact: the bits of octile.W4A8Linear on every device."""

    @classmethod
    def get_min_capability(cls):
        return 80

    @classmethod
    def can_implement(cls, c):
        return _answer(cls._reason(c))

    @classmethod
    def _reason(cls, c):
        k, n = c.partition_weight_shape
        if c.weight_type not in _WEIGHTS:
            return f"weights of {c.weight_type}, expected int4, uint4b8, uint4 or uint8b128"
        bits, points = _WEIGHTS[c.weight_type]
        if bool(c.zero_points) is not points:
            return f"weights of {c.weight_type} must {'' if points else 'not '}have zero points"
        if c.act_type not in (*_FLOATS, torch.int8) or (bits == 8 and c.act_type is torch.int8):
            return f"does not support activations of {c.act_type} with {bits}-bit weights"
        if getattr(c, "out_type", None) not in (None, c.act_type):
            return f"outputs have the type of x, and this layer asks for {c.out_type}"
        if getattr(c, "has_g_idx", False):
            return "groups must be contiguous, and this layer reorders its inputs (g_idx)"
        if c.group_size not in (-1, 32, 64, 128, k):
            return f"groups of {c.group_size}, expected 32, 64, 128 or whole rows"
        if c.group_size > k or k % max(c.group_size, 1):
            return f"groups of {c.group_size} do not divide the {k} inputs of this shard"
        return _refusal(n=n, k=k, **cls._description(c, c.weight_type is scalar_types.int4))

    @staticmethod
    def _description(c, int8_activations):
        """Fields of a plan's description."""
        bits, points = _WEIGHTS[c.weight_type]
        group = 0 if c.group_size in (-1, c.partition_weight_shape[0]) else c.group_size
        if bits == 4:
            fields = {"weight": _c.S4_GROUP, "group": group, "weight_zero_point": int(points)}
        else:
            fields = {"weight": _c.S8_GROUP if group else _c.S8_PER_CHANNEL, "group": group, "weight_zero_point": 0}
        int8_activations = int8_activations or c.act_type is torch.int8
        x = torch.bfloat16 if c.act_type is torch.int8 else c.act_type
        activation = _c.DYNAMIC_PER_TOKEN if int8_activations else _c.NONE
        return fields | {"x": _plans.DTYPES[x], "activation": activation}

    def process_weights_after_loading(self, layer):
        c, (k, n) = self.config, self.config.partition_weight_shape
        (bits, has_points), int4 = _WEIGHTS[c.weight_type], c.weight_type is scalar_types.int4
        held = getattr(layer, self.w_q_name)
        weight, scale = _rows_first(held), _rows_first(getattr(layer, self.w_s_name))
        points = _rows_first(getattr(layer, self.w_zp_name)) if has_points else None
        self._fields = self._description(c, int4 or self._asks_for_int8(layer))

        if weight.dtype is torch.int8:
            weight = quantizer.pack(weight) if bits == 4 else weight
        else:  # int32 words of levels, each stored plus half its range
            weight = weight.contiguous().view(torch.uint8)[:, : -(-k * bits // 8)]
            weight = weight ^ 0x88 if bits == 4 else (weight ^ 0x80).view(torch.int8)
        scale = scale.float().contiguous()
        if points is not None:
            points = quantizer.unpack_words(points.t().contiguous(), n).t().int().contiguous()
        if bits == 8:
            weight, scale = quantizer.aligned(weight), scale if self._fields["group"] else scale.flatten()

        packed = _pack(weight, scale, points, n, k, self._fields)
        self._packed = packed is not None
        if self._packed:
            weight, scale, points = packed, None, None
        replace_parameter(layer, self.w_q_name, weight)
        replace_parameter(layer, self.w_s_name, scale)
        if self.w_zp_name is not None and getattr(layer, self.w_zp_name, None) is not None:
            replace_parameter(layer, self.w_zp_name, points)
        for name, parameter in layer._parameters.items():  # CompressedTensorsW4A8Int gives the weight two names
            if parameter is held:
                layer._parameters[name] = getattr(layer, self.w_q_name)

    @staticmethod
    def _asks_for_int8(layer):
        """Whether to quantize x: vLLM says so only for pack-quantized layers, after it has chosen their kernel."""
        wanted = getattr(layer, "_humming_input_quant_config", None)
        if wanted is None:
            return False
        known = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
        if any(wanted.get(name) != value for name, value in known.items()):
            raise ValueError(
                f"octile: activations are to be quantized as {wanted}, expected {known}; "
                "VLLM_DISABLED_KERNELS=OctileWeightLinearKernel leaves such a checkpoint to vLLM's kernels"
            )
        return True

    def apply_weights(self, layer, x, bias=None):
        weight, scale, points, *_ = self._get_weight_params(layer)  # 0.25 returns a fourth one
        f, bias = self._fields, _bias(bias, x)
        if self._packed:
            n = self.config.partition_weight_shape[1]
            words = n, f["activation"], f["weight"], f["group"], bool(f["weight_zero_point"])
            return torch.ops.octile.linear_packed(x, weight, bias, *words, None, 0.0)
        if f["weight"] == _c.S4_GROUP:
            return torch.ops.octile.linear_s4(x, weight, scale, points, bias, f["activation"])
        return torch.ops.octile.linear(x, weight, scale, bias, f["activation"], _c.OUT_IN)


def refit_(layer, weight, row=0):
    """Quantizes a float weight (OUT, IN) into the memory of a layer that OctileInt8LinearKernel serves.

    The bits are those of octile.W8A8Linear. No address changes, so captured graphs stay valid, and on a GPU nothing is
    allocated; on a CPU the weight is packed, which takes a copy on the way. row: the first output channel that `weight` is
    for, where a layer has several fused (q, k and v). For a sharded layer, pass the shard: a shard of the outputs gets the
    bits of the whole layer, a shard of the inputs gets its own scales.

    Raises ValueError for another layer, shape or device.
    """
    kernel = getattr(layer, "octile", None)
    if not isinstance(kernel, OctileInt8LinearKernel):
        raise ValueError(f"octile: refit_() takes a layer of OctileInt8LinearKernel, not {type(layer).__name__}")
    kernel.refit(layer, weight, row)
