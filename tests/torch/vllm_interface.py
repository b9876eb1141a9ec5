"""The part of vLLM that octile.vllm meets, for machines without vLLM: names, signatures and behaviour of 0.33.

vllm_test.py compares all of it with the real one, where that is installed.
"""

import dataclasses
import enum
import os
import types

import torch


@dataclasses.dataclass(frozen=True)
class ScalarType:
    exponent: int
    mantissa: int
    signed: bool
    bias: int


class scalar_types:
    int4 = ScalarType(0, 3, True, 0)
    uint4 = ScalarType(0, 4, False, 0)
    uint4b8 = ScalarType(0, 4, False, 8)
    uint8b128 = ScalarType(0, 8, False, 128)
    uint8 = ScalarType(0, 8, False, 0)


class PlatformEnum(enum.Enum):
    CUDA = enum.auto()
    ROCM = enum.auto()
    CPU = enum.auto()


class CpuPlatform:
    _enum = PlatformEnum.CPU

    def is_cpu(self):
        return self._enum is PlatformEnum.CPU

    def is_cuda(self):
        return self._enum is PlatformEnum.CUDA

    def get_device_capability(self, device_id=0):
        return None


current_platform = CpuPlatform()

environment_variables = {"VLLM_DISABLED_KERNELS": lambda: os.environ.get("VLLM_DISABLED_KERNELS", "")}


def compile_factors():
    """What the key of the compile cache has of the environment."""
    return {name: value() for name, value in environment_variables.items()}


def replace_parameter(layer, param_name, new_tensor):
    if new_tensor is None:
        setattr(layer, param_name, None)
        return
    old, new = getattr(layer, param_name, None), new_tensor.data
    if not isinstance(old, torch.nn.Parameter):
        setattr(layer, param_name, torch.nn.Parameter(new, requires_grad=False))
    elif (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device):
        old.data.copy_(new)
    else:
        old.data = new


@dataclasses.dataclass
class Int8ScaledMMLinearLayerConfig:
    is_static_input_scheme: bool
    is_channelwise: bool
    input_symmetric: bool
    is_fused_module: bool = False


@dataclasses.dataclass
class MPLinearLayerConfig:
    full_weight_shape: tuple
    partition_weight_shape: tuple
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    out_type: torch.dtype = None


class Int8ScaledMMLinearKernel:
    def __init__(self, c, layer_param_names):
        assert self.can_implement(c)[0]
        assert self.is_supported()[0]
        self.config, self.layer_param_names = c, layer_param_names

    def _get_layer_params(self, layer):
        w, w_s, *rest = self.layer_param_names
        return getattr(layer, w), getattr(layer, w_s), *(getattr(layer, name, None) for name in rest)


class MPLinearKernel:
    def __init__(self, c, w_q_param_name, w_s_param_name, w_zp_param_name=None):
        assert self.can_implement(c)
        self.config, self.w_q_name, self.w_s_name = c, w_q_param_name, w_s_param_name
        if c.zero_points:
            assert w_zp_param_name is not None
        self.w_zp_name = w_zp_param_name

    def _get_weight_params(self, layer):
        return getattr(layer, self.w_q_name), getattr(layer, self.w_s_name), getattr(layer, self.w_zp_name or "", None)


class CPUInt8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):
    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, c):
        return True, None


class CPUWNA16LinearKernel(MPLinearKernel):
    @classmethod
    def can_implement(cls, c):
        return True, None


_POSSIBLE_INT8_KERNELS = {PlatformEnum.CPU: [CPUInt8ScaledMMLinearKernel], PlatformEnum.CUDA: []}
_POSSIBLE_KERNELS = {PlatformEnum.CPU: [CPUWNA16LinearKernel], PlatformEnum.CUDA: []}


def register_linear_kernel(kernel_class, platform, kernel_type="mp"):
    lists = {"mp": _POSSIBLE_KERNELS, "int8": _POSSIBLE_INT8_KERNELS}[kernel_type]
    lists.setdefault(platform, []).append(kernel_class)


def _choose(kernels, config, supported):
    for kernel in kernels[current_platform._enum]:
        disabled = kernel.__name__ in os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
        if not disabled and (not supported or kernel.is_supported(None)[0]) and kernel.can_implement(config)[0]:
            return kernel
    raise ValueError("Failed to find a kernel")


def init_int8_linear_kernel(
    is_channelwise, is_static_input_scheme, input_symmetric, module_name, is_fused_module=False
):
    config = Int8ScaledMMLinearLayerConfig(is_static_input_scheme, is_channelwise, input_symmetric, is_fused_module)
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    return _choose(_POSSIBLE_INT8_KERNELS, config, True)(config, layer_param_names=names)


def choose_mp_linear_kernel(config, compute_capability=None):
    return _choose(_POSSIBLE_KERNELS, config, False)


_MODULES = {
    "vllm.envs": ("compile_factors", "environment_variables"),
    "vllm.platforms": ("PlatformEnum", "current_platform"),
    "vllm.scalar_type": ("scalar_types",),
    "vllm.model_executor.utils": ("replace_parameter",),
    "vllm.model_executor.kernels.linear": (
        "Int8ScaledMMLinearKernel",
        "Int8ScaledMMLinearLayerConfig",
        "MPLinearKernel",
        "MPLinearLayerConfig",
        "_POSSIBLE_INT8_KERNELS",
        "_POSSIBLE_KERNELS",
        "choose_mp_linear_kernel",
        "init_int8_linear_kernel",
        "register_linear_kernel",
    ),
}


def modules():
    """For sys.modules, as if vLLM were installed."""
    made = {}
    for name, contents in _MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in made:
                made[path] = types.ModuleType(path)
                if end > 1:
                    setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[path])
        for content in contents:
            setattr(made[name], content, globals()[content])
    made["vllm"].__version__ = "0.33.0, a part"
    return made
