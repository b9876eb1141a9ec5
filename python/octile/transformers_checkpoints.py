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

from . import _reader
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
    """From now on from_pretrained() loads folders of these methods on Octile's layers: "compressed-tensors", "awq", "gptq".

    Returns a function that gives them back to the libraries that Transformers loads them with. Raises ValueError for a
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
        wide, wide_names, _ = build_glob_alternation(list(self._kept_wide)) if self._kept_wide else (None, None, None)
        self._layers, patterns = {}, []  # name in the model: name in the files
        for name, layer in self._checked["layers"].items():
            where, key = f"{self._folder}: {printable(name)}", f"{name}.weight"
            renamed = rename_source_key(key, renamings, [], model.base_model_prefix, own)[0].removesuffix(".weight")
            if renamed not in modules:
                if ".experts." not in name:
                    continue  # of another head, say: Transformers tells of its tensors
                raise ValueError(
                    f"octile: {where} is one of several experts, which the model holds in one tensor: quantized experts "
                    "are not loaded"
                )
            module = modules[renamed]
            layer_to_fill(where, module, self._checked, layer)
            if wide is not None and (kept := wide.search(f"{renamed}.weight")):
                module.to(self._kept_wide[wide_names[kept.lastgroup]])
            untie(model, renamed)
            self._layers[renamed] = name
            patterns.append(re.escape(rename_source_key(key, renamings, [])[0].removesuffix(".weight")))
        if not patterns:
            raise ValueError(f"octile: {self._folder} holds no quantized layer of a {type(model).__name__}")
        sources = [rf"^({'|'.join(patterns)})\.{suffix}$" for suffix in SUFFIXES]
        return [WeightConverter(sources, [r"\1.weight"], [_Load(self)]), *weight_conversions]

    def take(self, name, tensors):
        """Makes this layer of the model, of its tensors in the files."""
        known = self._layers[name]
        module, where = self._model.get_submodule(name), f"{self._folder}: {printable(known)}"
        layer, device = self._checked["layers"][known], next(iter(tensors.values())).device
        tensors = {suffix: t.cpu() for suffix, t in tensors.items()}
        if "weight" in tensors:
            tensors["weight"] = tensors["weight"].to(torch.int8)  # Transformers 5.17 has made it a float
        try:
            linear = layer_to_fill(where, module, self._checked, layer)
            made = make_layer(where, linear, self._checked, layer, tensors)
        except ValueError as error:  # raised here, Transformers would print it and go on
            self._error = self._error or error
            return
        become(module, made.to(device).train(module.training))
        self._made[known] = module
        if module.bias is not None:
            module.bias._is_hf_initialized = True

    def _process_model_after_weight_loading(self, model, **words):
        if self._error is not None:
            raise self._error
        drop_zero_points_of_zero(self._checked, self._made)
        # save_pretrained() would reverse them.
        model._weight_conversions = [c for c in model._weight_conversions if not _is_ours(c)]
        self._model = self._checked = self._made = self._layers = None
        return model


def _is_ours(conversion):
    return any(isinstance(operation, _Load) for operation in getattr(conversion, "operations", ()))


class _Load(ConversionOps):
    """Takes the tensors of quantized layers out of what is loaded."""

    def __init__(self, quantizer):
        self.hf_quantizer = quantizer  # by this name Transformers knows that it must not cast them

    def __deepcopy__(self, memo):
        return self  # one for each layer would copy the model

    def convert(self, input_dict, source_patterns=(), full_layer_name=None, missing_keys=None, **words):
        suffixes = dict(zip(source_patterns, SUFFIXES, strict=True))
        tensors = {suffixes[pattern]: value[0] for pattern, value in input_dict.items()}
        name = full_layer_name.removesuffix(".weight")
        self.hf_quantizer.take(name, tensors)
        for last in ("weight", "bias"):
            (missing_keys if missing_keys is not None else set()).discard(f"{name}.{last}")
        return {}
