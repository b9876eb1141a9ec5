"""Quantized checkpoints through Transformers' loader, on Octile's layers. Importing this registers the quantizer.

from_checkpoint(folder) of transformers.py loads one; use_for() has from_pretrained() load all of a method.
"""

import pathlib
import re

import torch
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import _reader, experts
from ._reader import printable
from .checkpoint import SUFFIXES, drop_zero_points_of_zero, layer_to_fill, make_layer
from .convert import become
from .transformers_quantizer import Quantizer, untie

METHOD = "octile-checkpoint"


@register_quantization_config(METHOD)
class CheckpointConfig(QuantizationConfigMixin):
    """The quantization_config of a folder whose weights are quantized: what it says is left to the reader of the files."""

    def __init__(self, quant_method=METHOD, **said):
        self.quant_method, self.said = METHOD, {"quant_method": quant_method} | said

    def to_dict(self):
        return dict(self.said)


def use_for(*methods):
    """Makes from_pretrained() load folders of these methods on Octile's layers: "compressed-tensors", "awq", "gptq".

    Returns a function that restores the libraries that Transformers loads them with. Raises ValueError for a
    method that Octile does not read.
    """
    known = ("compressed-tensors", "awq", "gptq")
    if unknown := [method for method in methods if method not in known]:
        raise ValueError(f"octile: {', '.join(map(repr, unknown))} cannot be read; {', '.join(known)} can")
    before = {method: AUTO_QUANTIZATION_CONFIG_MAPPING[method] for method in methods}
    AUTO_QUANTIZATION_CONFIG_MAPPING.update(dict.fromkeys(methods, CheckpointConfig))
    return lambda: AUTO_QUANTIZATION_CONFIG_MAPPING.update(before)


@register_quantizer(METHOD)
class CheckpointQuantizer(Quantizer):
    """Makes each layer as its tensors are read; Transformers loads and renames all others as it does those of floats."""

    def __init__(self, quantization_config, **words):
        super().__init__(quantization_config, **words)
        self.pre_quantized = True

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **words):
        super()._process_model_before_weight_loading(model)
        if not checkpoint_files:
            raise ValueError("octile: a quantized checkpoint is loaded from files, not from a state_dict")
        self._folder = pathlib.Path(checkpoint_files[0]).parent
        self._checked, self._model, self._made, self._error = _reader.checkpoint(self._folder), model, {}, None
        self._kept_wide = model._get_dtype_plan(model.dtype)

    def update_weight_conversions(self, weight_conversions, model=None):
        model = self._model
        renamings = [c for c in weight_conversions if isinstance(c, WeightRenaming)]
        own, modules = model.state_dict(), dict(model.named_modules(remove_duplicate=False))
        self._experts, mixtures = {}, []  # of a module of experts: name in the files by (expert, part)
        wide, wide_names, _ = build_glob_alternation(list(self._kept_wide)) if self._kept_wide else (None, None, None)
        self._layers, patterns = {}, []  # name in the model: name in the files
        for name, layer in self._checked["layers"].items():
            where, key = f"{self._folder}: {printable(name)}", f"{name}.weight"
            renamed = rename_source_key(key, renamings, [], model.base_model_prefix, own)[0].removesuffix(".weight")
            if part := experts.in_files(modules, renamed):
                parent, part = part[0], part[1:]
                layer_to_fill(where, experts.one_linear(modules[parent], *part), self._checked, layer)
                if parent not in self._experts:
                    known = rename_source_key(key, renamings, [])[0].removesuffix(".weight")
                    mixtures.append(re.escape(known.rsplit(".", 2)[0]))
                if (other := self._experts.setdefault(parent, {}).setdefault(part, name)) != name:
                    raise ValueError(f"octile: {where} is the same layer of an expert as {printable(other)}")
                continue
            if renamed not in modules:
                if ".experts." not in name:
                    continue  # for example of another head: Transformers reports its tensors
                raise ValueError(
                    f"octile: {where} is one of several experts, which the model holds in another way than one tensor of "
                    "all of them"
                )
            module = modules[renamed]
            layer_to_fill(where, module, self._checked, layer)
            if wide is not None and (kept := wide.search(f"{renamed}.weight")):
                module.to(self._kept_wide[wide_names[kept.lastgroup]])
            untie(model, renamed)
            self._layers[renamed] = name
            patterns.append(re.escape(rename_source_key(key, renamings, [])[0].removesuffix(".weight")))
        if not patterns and not mixtures:
            raise ValueError(f"octile: {self._folder} holds no quantized layer of a {type(model).__name__}")
        loads = []
        if patterns:
            sources = [rf"^({'|'.join(patterns)})\.{suffix}$" for suffix in SUFFIXES]
            loads.append(WeightConverter(sources, [r"\1.weight"], [_Load(self, SUFFIXES)]))
        if mixtures:
            for parent, parts in self._experts.items():
                experts.check_complete(f"{self._folder}: {printable(parent)}", modules[parent], parts)
            last = {name.rpartition(".")[2] for parts in self._experts.values() for name in parts.values()}
            keys = [(part, suffix) for part in sorted(last) for suffix in SUFFIXES]
            sources = [rf"^({'|'.join(mixtures)})\.\d+\.{part}\.{suffix}$" for part, suffix in keys]
            loads.append(WeightConverter(sources, [r"\1.down_proj"], [_Load(self, keys)]))
        return [*loads, *weight_conversions]

    def take(self, name, tensors):
        """Makes this layer of the model, of its tensors in the files."""
        known = self._layers[name]
        module, where = self._model.get_submodule(name), f"{self._folder}: {printable(known)}"
        device = next(iter(tensors.values()))[0].device
        try:
            linear = layer_to_fill(where, module, self._checked, self._checked["layers"][known])
            made = self._make(known, linear, {suffix: t[0] for suffix, t in tensors.items()})
        except ValueError as error:  # raised here, Transformers would print it and go on
            self._error = self._error or error
            return
        become(module, made.to(device).train(module.training))
        self._made[known] = module
        if module.bias is not None:
            module.bias._is_hf_initialized = True

    def take_experts(self, name, tensors):
        """Makes these experts of the model, of the tensors of all of them: lists, in the order of the experts."""
        module, where = self._model.get_submodule(name), f"{self._folder}: {printable(name)}"
        device, count = next(iter(tensors.values()))[0].device, module._parameters["down_proj"].shape[0]
        layers = {}
        try:
            for (part, suffix), values in tensors.items():
                if len(values) != count:
                    raise ValueError(f"octile: {where}: {len(values)} of {count} experts have a {part}.{suffix}")
            for (e, part), known in self._experts[name].items():
                last = known.rpartition(".")[2]
                own = {suffix: values[e] for (of, suffix), values in tensors.items() if of == last}
                layers[e, part] = self._make(known, experts.one_linear(module, e, part), own)
            made = experts.join(where, module, layers)
        except ValueError as error:
            self._error = self._error or error
            return
        become(module, made.to(device).train(module.training))
        for (e, part), known in self._experts[name].items():
            if e == 0:
                self._made[known] = module._modules[module._names[part == "down_proj"]]
        for parameter in module.parameters():
            parameter._is_hf_initialized = True

    def _make(self, known, linear, tensors):
        tensors = {suffix: t.cpu() for suffix, t in tensors.items()}
        if "weight" in tensors:
            tensors["weight"] = tensors["weight"].to(torch.int8)  # Transformers 5.17 has made it a float
        layer = self._checked["layers"][known]
        return make_layer(f"{self._folder}: {printable(known)}", linear, self._checked, layer, tensors)

    def _process_model_after_weight_loading(self, model, **words):
        if self._error is not None:
            raise self._error
        drop_zero_points_of_zero(self._checked, self._made)
        # save_pretrained() would reverse them.
        model._weight_conversions = [c for c in model._weight_conversions if not _is_ours(c)]
        self._model = self._checked = self._made = self._layers = self._experts = None
        return model


def _is_ours(conversion):
    return any(isinstance(operation, _Load) for operation in getattr(conversion, "operations", ()))


class _Load(ConversionOps):
    """Takes the tensors of quantized layers out of what is loaded.

    keys: what the source patterns stand for, SUFFIXES, or with experts (name of a part, suffix).
    """

    def __init__(self, quantizer, keys):
        self.hf_quantizer = quantizer  # this attribute tells Transformers not to cast them
        self._keys = keys

    def __deepcopy__(self, memo):
        return self  # one for each layer would copy the model

    def convert(self, input_dict, source_patterns=(), full_layer_name=None, model=None, missing_keys=None, **words):
        keys = dict(zip(source_patterns, self._keys, strict=True))
        tensors = {keys[pattern]: value for pattern, value in input_dict.items()}
        name, lasts = full_layer_name.rpartition(".")[0], ("weight", "bias")
        if self._keys is SUFFIXES:
            self.hf_quantizer.take(name, tensors)
        else:
            lasts = list(model.get_submodule(name)._parameters)
            self.hf_quantizer.take_experts(name, tensors)
        for last in lasts:
            (missing_keys if missing_keys is not None else set()).discard(f"{name}.{last}")
        return {}
