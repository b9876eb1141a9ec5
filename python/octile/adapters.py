"""PEFT's LoRA over the inference layers.

PEFT knows the layers of torch and of some libraries, and refuses others. install() registers ours with its LoraModel, as
soon as both are loaded, whichever comes first.
"""

import contextlib
import copy
import functools
import importlib.abc
import importlib.util
import inspect
import sys
import warnings

import torch
from torch import nn

_MODULE = "peft.tuners.lora.model"


class _OnImport(importlib.abc.MetaPathFinder):
    """Waits for PEFT: its module is imported as it would be without this, and then taught."""

    _asking = False  # the other finders

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            if module.__name__ == _MODULE and self in sys.meta_path:  # a loader may be that of other modules too
                sys.meta_path.remove(self)
                _teach(module)

        spec.loader.exec_module = exec_module
        return spec


@functools.cache
def install():
    """Runs once. Each quantized layer calls it when it is created, copied or unpickled."""
    module = sys.modules.get(_MODULE)
    if module is None:
        sys.meta_path.insert(0, _OnImport())
    else:
        _teach(module)


def _teach(module):
    """module: peft.tuners.lora.model."""
    model = module.LoraModel
    plain = model._create_new_module

    @functools.wraps(plain)
    def create_new_module(lora_config, adapter_name, target, **words):
        from .inference import _Inference

        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if not isinstance(base, _Inference) or words.get("parameter_name") is not None:
            return plain(lora_config, adapter_name, target, **words)
        return _adapted(lora_config, adapter_name, target, base, words)

    model._create_new_module = staticmethod(create_new_module)
    inject = model.inject_adapter

    @functools.wraps(inject)
    def inject_adapter(self, model, *arguments, **words):
        with _as_peft_sees(model):
            return inject(self, model, *arguments, **words)

    model.inject_adapter = inject_adapter
    _refuse_to_save_frozen()


def _refuse_to_save_frozen():
    """PEFT trains and saves a copy of each of modules_to_save. One of a frozen layer would neither train nor load."""
    from peft.utils.other import ModulesToSaveWrapper

    update = ModulesToSaveWrapper.update

    @functools.wraps(update)
    def checked(self, adapter_name, *arguments, **words):
        from .experts import Experts
        from .inference import _Inference

        update(self, adapter_name, *arguments, **words)
        for module in self.modules_to_save[adapter_name].modules():
            if isinstance(module, (_Inference, Experts)):
                raise ValueError(
                    f"octile: modules_to_save has an octile.{type(module).__name__}, whose weights are frozen. Name it in "
                    "target_modules, or leave it in float: modules_to_not_convert of OctileConfig, the filter of quantize_()"
                )

    ModulesToSaveWrapper.update = checked


@contextlib.contextmanager
def _as_peft_sees(model):
    """While it lasts, "all-linear" means our layers too, and no name means the layers inside octile.Experts.

    Those never run their own forward, in which an adapter would be. Float experts are parameters, and no target either.
    """
    from peft.tuners import tuners_utils

    from .experts import Experts
    from .inference import _Inference

    conv1d = tuners_utils.Conv1D  # "all-linear" is what is an instance of torch.nn.Linear or of this
    experts = [(module, module._modules) for module in model.modules() if isinstance(module, Experts)]
    tuners_utils.Conv1D = conv1d, _Inference
    for module, children in experts:
        module._modules = {n: child for n, child in children.items() if n not in module._names}
    try:
        yield
    finally:
        tuners_utils.Conv1D = conv1d
        for module, children in experts:
            module._modules = children


def _adapted(config, adapter_name, target, base, words):
    """The layer of PEFT's around `target`, which is `base` or has it inside."""
    if config.bias != "none" and base.bias is not None and not isinstance(base.bias, nn.Parameter):
        base.bias = nn.Parameter(base.bias.detach(), requires_grad=False)  # PEFT trains parameters alone
    kind = _lora_linear()
    if "config" in inspect.signature(kind.__mro__[1].__init__).parameters:
        config = copy.copy(config)
        config.fan_in_fan_out = base.in_out
        words = {**words, "config": config}
    else:  # until PEFT 0.18 the layers took the fields of the config one by one
        words = {**words, **config.loftq_config, "fan_in_fan_out": base.in_out}
    return kind(target, adapter_name, **words)


@functools.cache
def _lora_linear():
    from peft.tuners.lora.layer import Linear
    from peft.tuners.tuners_utils import check_adapters_to_merge

    from .inference import _Inference

    class OctileLinear(Linear):
        """LoRA over one of Octile's inference layers.

        The weight of that layer is frozen, and no float copy of it is kept. merge() quantizes the sum of weight and adapter
        again, in the layer's format, which rounds the adapter as coarsely as the weight. unmerge() restores the earlier
        integers, which stay in memory until then. Once model.dequantize() has made a float layer of it, PEFT merges as
        into any other, and unmerge() restores the earlier dequantized weight.
        """

        _before_merge = None  # (the layer as it was, its bias), while an adapter is merged into integers

        def _get_in_out_features(self, module):
            return module.in_features, module.out_features

        def merge(self, safe_merge=False, adapter_names=None):
            """Raises ValueError with safe_merge where the sum is not finite; RuntimeError where PEFT cannot add them."""
            base = self.get_base_layer()
            if not isinstance(base, _Inference):
                super().merge(safe_merge, adapter_names)
                return
            for name in check_adapters_to_merge(self, adapter_names):
                if name not in self.lora_A:
                    continue
                weight, bias = self._sum(base, name)
                if safe_merge and not all(t is None or t.isfinite().all() for t in (weight, bias)):
                    raise ValueError(f"octile: the weight with the adapter {name} is not finite")
                bits = base.format.bits
                warnings.warn(
                    f"octile: an adapter is merged into weights of {bits} bits: the sum is rounded to {bits} bits again",
                    stacklevel=2,
                )
                before = type(base).__new__(type(base))
                before.__dict__ = {**base.__getstate__(), "_buffers": dict(base._buffers)}
                base._requantize(weight)  # raises where the layer takes no other weight
                if self._before_merge is None:
                    self._before_merge = before, None if base.bias is None else base.bias.data
                if bias is not None:
                    base.bias.data = bias
                self.merged_adapters.append(name)

        def _sum(self, base, name):
            """The weight with this adapter, and the bias, or None where it stays."""
            variant = getattr(self, "lora_variant", {}).get(name)
            if variant is None and self.use_dora.get(name):
                raise RuntimeError("octile: this version of PEFT merges DoRA only into torch.nn.Linear")
            with torch.no_grad():
                weight = base._readable()
                if variant is None:
                    weight = weight + self.get_delta_weight(name).to(weight)
                else:
                    weight = variant.merge_safe(self, name, weight)
                if not getattr(self, "lora_bias", {}).get(name):
                    return weight, None
                if base.bias is None:
                    raise RuntimeError("octile: lora_bias=True cannot be merged into a layer without a bias")
                return weight, base.bias + (self.lora_B[name].bias * self.scaling[name]).to(base.bias)

        def unmerge(self):
            """Restores the integers from before the first merge(), or their values in a layer that is float now."""
            if self._before_merge is None:
                super().unmerge()
                return
            base, (before, bias) = self.get_base_layer(), self._before_merge
            if isinstance(base, _Inference):
                base._refuse_packed_as_one()
                for name in (*type(base)._KEPT, "packed_weight"):
                    buffer, held = before._buffers[name], base._buffers[name]
                    base._buffers[name] = buffer if buffer is None or held is None else buffer.to(held.device)
                base._align()
            else:
                with torch.no_grad():
                    base.weight.data = before._readable().to(base.weight).contiguous()
            if bias is not None:
                base.bias.data = bias.to(base.bias)
            for name in self.merged_adapters:
                self._caches.pop(f"{name}-weight_norm", None)
            self.merged_adapters.clear()
            self._before_merge = None

    OctileLinear.__qualname__ = "OctileLinear"
    return OctileLinear


def __getattr__(name):
    """Pickles find the class here."""
    if name == "OctileLinear":
        return _lora_linear()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
