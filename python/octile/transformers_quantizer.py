"""What Octile's two quantizers for Transformers share."""

from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from .convert import become
from .experts import Experts, to_module
from .inference import _Inference
from .linears import is_linear


class Quantizer(HfQuantizer):
    is_trainable = True  # through the frozen weights, for adapters
    is_compileable = True

    def is_serializable(self):
        return True

    def validate_environment(self, *arguments, device_map=None, **words):
        devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(
                f"octile: device_map names {', '.join(sorted(devices))}: quantized weights are not offloaded. Name "
                "only accelerators, or only the CPU"
            )

    def _process_model_before_weight_loading(self, model, **words):
        plan = getattr(model.config, "distributed_config", None)
        sizes = {size: getattr(plan, size, None) or 1 for size in ("tp_size", "pp_size", "ep_size", "fsdp_size")}
        if split := [f"{size} {n}" for size, n in sizes.items() if n > 1]:
            raise ValueError(
                f"octile: distributed_config has {', '.join(split)}: quantized weights are not split among processes. vLLM "
                "splits them; octile.Int8Training of a float model takes FSDP"
            )

    def dequantize(self, model, dtype=None):
        """Without a dtype each layer has its own: to(dtype) may have changed them since config.dtype was written."""
        put_back = take_hooks(model)
        model = self._dequantize(model, dtype)
        put_back()
        self.remove_quantization_config(model)
        return model

    def _dequantize(self, model, dtype=None):
        for module in model.modules():
            if isinstance(module, Experts):
                become(module, to_module(module, dtype))
            elif isinstance(module, _Inference):
                become(module, _float_layer(module, dtype))
        return model


def take_hooks(model):
    """Removes what accelerate has put before layers of a model on several devices, since it replaces their forward.
    Returns a function that puts it back."""
    hooks = [(m, m._hf_hook) for m in model.modules() if _is_converted(m) and hasattr(m, "_hf_hook")]
    if not hooks:
        return lambda: None
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    for module, _ in hooks:
        remove_hook_from_module(module)
        if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
            del module.forward  # accelerate puts that of the class on the instance
    return lambda: [add_hook_to_module(module, hook) for module, hook in hooks]


def _is_converted(module):
    return is_linear(module) or isinstance(module, (_Inference, Experts))


def untie(model, layer):
    """A quantized head has a weight of its own."""
    model.all_tied_weights_keys.pop(f"{layer}.weight", None)


def _float_layer(layer, dtype):
    linear = layer.to_linear(dtype)
    if not layer.in_out:
        return linear
    conv = Conv1D(0, 0)
    conv.nf, conv.nx = linear.out_features, linear.in_features
    conv.weight, conv.bias = nn.Parameter(linear.weight.detach().t().contiguous()), linear.bias
    return conv.train(layer.training)
