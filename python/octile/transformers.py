"""Octile in Transformers: models that are quantized while they are loaded, and checkpoints on Octile's layers.

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=OctileConfig("w8a8"))
    from_checkpoint(folder)
    model.generate(**inputs, cache_implementation="static", custom_generate=Decoding())

Importing this registers OctileConfig and its quantizer with Transformers. A checkpoint is loaded by
transformers_checkpoints.py.
"""

import copy
import dataclasses
import os
import warnings

import transformers
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import experts
from ._reader import printable
from .calibration import Calibration
from .convert import W4A8, W4A16, W8A16, Int8Training, W8A8Dynamic, W8A8Static, choose, exchange, exchange_one, finite
from .decoding import Decoding
from .linears import as_linear
from .transformers_checkpoints import METHOD, use_for
from .transformers_quantizer import Quantizer, take_hooks, untie

__all__ = ["Decoding", "OctileConfig", "OctileQuantizer", "from_checkpoint", "use_for"]

_TRAINING, _STATIC = "int8-training", "w8a8-static"
_FORMATS = {"w8a8": W8A8Dynamic, _STATIC: W8A8Static, "w8a16": W8A16, "w4a16": W4A16, "w4a8": W4A8}
_FORMATS[_TRAINING] = Int8Training
# What from_pretrained() needs to find a file.
_HUB = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_HUB += ("trust_remote_code",)


@register_quantization_config("octile")
class OctileConfig(QuantizationConfigMixin):
    """Quantizes the linear layers of a model while from_pretrained() loads its float weights.

    format: "w8a8", "w8a8-static", "w8a16", "w4a16", "w4a8" or "int8-training". options: those of W8A8Dynamic, W8A8Static,
    W8A16, W4A16, W4A8 and Int8Training; `calibration` is the path of a file that Calibration.save() wrote.

    modules_to_not_convert: names to leave in float, besides a layer named lm_head and weights that several modules share, and
    with a format other than "int8-training" those that the files lack (a new head).
    modules_to_convert: names of the only layers to convert, which may include all of those. As elsewhere in
    Transformers, a name is the start of a module's full name up to a dot, or its end, or a regular expression.

    Raises ValueError for an unknown format or option and for options that do not fit.
    """

    def __init__(
        self, format, *, modules_to_convert=None, modules_to_not_convert=None, quant_method="octile", **options
    ):
        self.quant_method, self.format, self.options = quant_method, format, options
        self.modules_to_convert, self.modules_to_not_convert = modules_to_convert, modules_to_not_convert
        for word in ("modules_to_convert", "modules_to_not_convert"):
            names = getattr(self, word)
            if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)):
                raise ValueError(f"octile: {word} is {names!r}, expected a list of names")
        self.octile_config()

    def octile_config(self):
        """What quantize_() takes."""
        if self.format not in _FORMATS:
            raise ValueError(f"octile: format is {self.format!r}, expected one of {', '.join(_FORMATS)}")
        kind = _FORMATS[self.format]
        has = [field.name for field in dataclasses.fields(kind)]
        if unknown := [name for name in self.options if name not in has]:
            raise ValueError(f"octile: {self.format} has no option {', '.join(unknown)}; it has {', '.join(has)}")
        options = dict(self.options)
        if (path := options.get("calibration")) is not None:
            if not isinstance(path, (str, os.PathLike)):
                raise ValueError("octile: calibration is the path of a file that Calibration.save() wrote")
            options["calibration"] = Calibration.load(path)
        elif self.format == _STATIC:
            raise ValueError('octile: w8a8-static needs calibration="file", that of a calibration')
        return kind(**options)

    def converts(self, module, name):
        """The filter of quantize_()."""
        if self.modules_to_convert is not None and should_convert_module(name, self.modules_to_convert):
            return False
        return should_convert_module(name, self.modules_to_not_convert)

    def to_dict(self):
        lists = {word: getattr(self, word) for word in ("modules_to_convert", "modules_to_not_convert")}
        lists = {word: list(names) for word, names in lists.items() if names is not None}
        options = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in self.options.items()}
        return {"quant_method": self.quant_method, "format": self.format} | lists | options

    def __eq__(self, other):
        return isinstance(other, OctileConfig) and self.to_dict() == other.to_dict()


@register_quantizer("octile")
class OctileQuantizer(Quantizer):
    """Transformers' side of OctileConfig. The model that it has loaded has a Report, model.octile_report.

    Each weight is quantized as it is read, so that at most one of them is in memory in float. What needs the whole model
    is converted after that: shared weights, and all of them for "w8a8-static", which smooths. A format that freezes weights
    leaves those that the files lack in float, to be trained, unless modules_to_convert names them.
    """

    def __init__(self, quantization_config, **words):
        super().__init__(quantization_config, **words)
        # Where a folder's config.json has this config, its weights are floats all the same: save_pretrained() writes
        # quantized ones as compressed-tensors.
        self.pre_quantized = False
        self._layers, self._parts, self._convert, self._report = {}, {}, None, None

    @property
    def _trains(self):
        return self.quantization_config.format == _TRAINING

    @property
    def is_qat_trainable(self):
        return self._trains

    def validate_environment(self, *arguments, device_map=None, **words):
        if not self._trains:
            super().validate_environment(device_map=device_map)

    def _choose(self, model):
        config = self.quantization_config
        return choose(model, self._octile_config, config.converts, config.modules_to_convert is not None)

    def _process_model_before_weight_loading(self, model, **words):
        if not self._trains:
            super()._process_model_before_weight_loading(model)
        self._octile_config = self.quantization_config.octile_config()
        layers, self._report = self._choose(model)
        if not layers:
            self._report.count(model)
            raise ValueError(f"octile: {type(model).__name__} has no layer to convert: {self._report.why_nothing()}")
        if self._trains:
            exchange(model, self._octile_config, layers, self._report)
            return
        if self.quantization_config.format == _STATIC:
            return
        tied = model.all_tied_weights_keys
        tied = {*tied, *tied.values()}
        self._layers = {name: module for name, module in layers.items() if f"{name}.weight" not in tied}
        self._convert, _ = self._octile_config.converter(model, layers, self._report)

    def param_needs_quantization(self, model, param_name, **words):
        name, _, last = param_name.rpartition(".")
        module = self._layers.get(name)
        if module is None:
            return False
        return last in experts.names(module) if experts.is_experts(module) else last == "weight"

    def param_element_size(self, model, param_name, param):
        if not self.param_needs_quantization(model, param_name):
            return super().param_element_size(model, param_name, param)
        group = getattr(self._octile_config, "group", None)
        bits = 4 if self.quantization_config.format.startswith("w4") else 8
        return bits / 8 + (4 / group if group else 0)

    def get_quantize_ops(self):
        return _Quantize(self)

    def quantize(self, name, weight):
        """Gives the layer of this name its weight, and converts it. Returns whether it could be."""
        if name not in self._layers:
            return self._quantize_experts(*name.rpartition(".")[::2], weight)
        module = self._layers.pop(name)
        if weight.shape != module.weight.shape:
            return False  # Transformers refuses it, or makes a new one
        if module.bias is not None and module.bias.is_meta:
            return False  # it may be missing, and Transformers initializes those of float layers alone
        module.weight = nn.Parameter(weight, requires_grad=False)
        if self._octile_config.refusal(as_linear(module), name):
            return False
        exchange_one(
            name, module, self._convert(finite(as_linear(module), name, self._octile_config), name), self._report
        )
        if module.bias is not None:
            module.bias._is_hf_initialized = True
        return True

    def _quantize_experts(self, name, part, weight):
        """The same for one of the two weights of experts, which are converted with the second one."""
        module = self._layers[name]
        if weight.shape != module._parameters[part].shape:
            return False
        linear = experts.as_linear(module, part, weight)
        if self._octile_config.refusal(linear, f"{name}.{part}"):
            return False
        parts = self._parts.setdefault(name, {})
        parts[part] = self._convert(finite(linear, f"{name}.{part}", self._octile_config), f"{name}.{part}")
        if len(parts) == 2:
            del self._layers[name], self._parts[name]
            made = (parts[part] for part in experts.names(module))
            exchange_one(name, module, experts.from_module(module, *made), self._report)
        return True

    def _process_model_after_weight_loading(self, model, **words):
        for name, parts in self._parts.items():
            raise ValueError(f"octile: the checkpoint has {', '.join(parts)} of {name}, but not the other one of two")
        put_back = take_hooks(model)
        layers, rest = self._choose(model)
        if not self._trains and self.quantization_config.modules_to_convert is None:
            for name in [name for name, module in layers.items() if _is_new(module)]:  # it has yet to be trained
                del layers[name]
                rest.skipped[name] = "its weight is not from the files: modules_to_convert has to name it"
        exchange(model, self._octile_config, layers, rest)
        for name in () if self._trains else layers:
            untie(model, name)
        put_back()
        report = self._report
        report.multipliers, report.unsmoothed = rest.multipliers, rest.unsmoothed
        report.bytes_before += rest.bytes_before
        report.bytes_after += rest.bytes_after
        done = {*report.converted, *rest.converted}
        report.converted = [name for name, _ in model.named_modules() if name in done]
        report.skipped = {name: why for name, why in rest.skipped.items() if name not in done}
        report.count(model)
        self._layers, self._parts, self._convert, self._report = {}, {}, None, None
        if not report.converted:
            raise ValueError(f"octile: {type(model).__name__} has no layer to convert: {report.why_nothing()}")
        if left := [m.name for m in report.matrices if not m.quantized and m.reason.startswith("experts")]:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            warnings.warn(f"octile: experts in one tensor stay in float: {', '.join(left[:4])}{more}", stacklevel=2)
        model.octile_report = report
        if self._trains:  # its parameters are floats: to half(), to save_pretrained() and to Trainer it is any model
            self.remove_quantization_config(model)
        return model


def _is_new(module):
    """Whether Transformers has made a weight of it: the files have none, or one of another shape."""
    names = experts.names(module) if experts.is_experts(module) else ["weight"]
    return not all(getattr(module._parameters[name], "_is_hf_initialized", False) for name in names)


class _Quantize(ConversionOps):
    """Takes the weights of layers to convert out of what is loaded."""

    def __init__(self, quantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, model=None, missing_keys=None, **words):
        rest = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            taken = self.quantizer.param_needs_quantization(model, key)
            if taken and self.quantizer.quantize(key.removesuffix(".weight"), weight):
                (missing_keys if missing_keys is not None else set()).discard(key)
            else:
                rest[key] = value
        return rest


def from_checkpoint(folder, kind=transformers.AutoModelForCausalLM, *, dtype="auto", device=None, **words):
    """A model of Transformers from a quantized checkpoint, on Octile's layers.

    It reads what load_checkpoint_() reads: compressed-tensors, as save_pretrained(), `octile quantize` and
    llm-compressor write it, and 4-bit AWQ and GPTQ. Transformers' own from_pretrained() gives such a folder to
    the library that its config.json names, unless use_for() says otherwise.

    folder: a local folder, or a name on the Hub. kind: a class of Transformers, or an Auto class. dtype: of what is not
    quantized, by default as in config.json. words: for from_pretrained(); as there, `config` replaces config.json,
    values of the config may be given, and output_loading_info returns (model, info). Raises ValueError for what
    load_checkpoint_() refuses, and if the names of checkpoint and model differ.
    """
    config, dtype = words.pop("config", None), words.pop("torch_dtype", dtype)
    hub, with_info = {name: words.pop(name) for name in _HUB if name in words}, words.pop("output_loading_info", False)
    if isinstance(config, transformers.PreTrainedConfig):
        config = copy.deepcopy(config)
    else:
        config, words = transformers.AutoConfig.from_pretrained(
            folder if config is None else config, return_unused_kwargs=True, **hub, **words
        )
    said = getattr(config, "quantization_config", None)
    if said is None:
        raise ValueError(f"octile: {folder}: config.json has no quantization_config: the checkpoint is not quantized")
    said = dict(said) if isinstance(said, dict) else said.to_dict()
    config.quantization_config = {"quant_method": METHOD}
    if device is not None:
        words["device_map"] = {"": device}
    model, loaded = kind.from_pretrained(
        folder, config=config, dtype=dtype, output_loading_info=True, **{**words, **hub}
    )
    model.config.quantization_config.said = said
    for which, says in (("missing_keys", "there is no"), ("unexpected_keys", "the model has no")):
        if names := sorted(loaded[which]):
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ValueError(f"octile: {folder}: {says} {', '.join(map(printable, names[:4]))}{more}")
    return (model, loaded) if with_info else model
