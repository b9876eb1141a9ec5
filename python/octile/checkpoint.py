"""Checkpoints in the layouts of compressed-tensors, which vLLM and Transformers load too: safetensors files, and a
config.json that says how they are quantized.

    int-quantized    weight int8 (OUT, IN), weight_scale (OUT, 1) or (1), static: input_scale (1)
    pack-quantized   weight_packed int32 (OUT, IN / 8), weight_scale (OUT, IN / group), weight_shape (2)
"""

import json
import pathlib
import re

import torch
from torch import nn

from . import awq_gptq, quantizer
from .calibration import read_safetensors
from .convert import become
from .inference import W4A16Linear, W8A8Linear, W8A8StaticLinear
from .linears import as_linear, is_conv1d

_SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_SUFFIXES += ("input_scale", "input_zero_point", "input_multiplier", "bias")


def load_checkpoint_(model, folder):
    """Loads a quantized checkpoint into `model`, in place, and returns it; it has to be built from the same config.

    Its layouts are those of compressed-tensors, and AWQ's and GPTQ's of 4 bits.

    folder: or one safetensors file, as `octile quantize` writes it of one.

    The torch.nn.Linear (and Conv1D) that the checkpoint holds quantized become W8A8Linear, W8A8StaticLinear or W4A16Linear; all
    other tensors are loaded as load_state_dict() does. The model may be on the meta device.

    Raises ValueError, and changes nothing, for a file that is broken, a scheme that no layer here computes, a tensor of
    the wrong type or shape, and where the names of checkpoint and model differ.
    """
    folder = pathlib.Path(folder)
    config, tensors = _read_file(folder) if folder.is_file() else _read_folder(folder)
    modules = dict(model.named_modules(remove_duplicate=False))
    if config["quant_method"] in awq_gptq.METHODS:
        config, tensors = awq_gptq.to_compressed_tensors(folder, config, tensors, modules)
    layers, in_octile_format = {}, config.get("format") == "octile"
    for key in [key for key in tensors if key.endswith(".weight_scale")]:
        name = key.removesuffix(".weight_scale")
        module = modules.get(name)
        if type(module) is not nn.Linear and not (is_conv1d(module) and in_octile_format):
            what = "no such layer" if module is None else f"a {type(module).__name__} there"
            raise ValueError(f"octile: {folder}: {name} is a quantized linear layer, and the model has {what}")
        own = {suffix: tensors.pop(f"{name}.{suffix}") for suffix in _SUFFIXES if f"{name}.{suffix}" in tensors}
        layers[name] = _make_layer(f"{folder}: {name}", as_linear(module), _scheme(config, name, folder), own)
    if not layers:
        raise ValueError(f"octile: {folder} holds no quantized layer")
    _check_names(model, folder, tensors, layers)
    for name, layer in layers.items():
        module = modules[name]
        if not module.weight.is_meta:
            layer.to(module.weight.device)
        become(module, layer.train(module.training))
    meta = any(p.is_meta for p in model.parameters())
    own = model.state_dict(keep_vars=True)
    loaded_as = {id(own[name]): name for name in tensors}
    model.load_state_dict(tensors, strict=False, assign=meta)
    for name, t in own.items() if meta else ():  # a parameter that several modules share is in the file once
        if name not in tensors and t.is_meta:
            module, _, last = name.rpartition(".")
            parent, _, first = loaded_as[id(t)].rpartition(".")
            model.get_submodule(module)._parameters[last] = model.get_submodule(parent)._parameters[first]
    return model


def _read_file(path):
    """(quantization_config, tensors). Without a config.json the one is in the other's metadata."""
    tensors, metadata = read_safetensors(path)
    text = metadata.get("quantization_config")
    config = None if text is None else _json_object(text, f"the quantization_config of {path}")
    return _checked_config(config, path, f"the metadata of {path}"), tensors


def _read_folder(folder):
    config = _read_json(folder / "config.json").get("quantization_config")
    return _checked_config(config, folder, f"{folder}/config.json"), _read_tensors(folder)


def _read_json(path):
    try:
        return _json_object(path.read_bytes(), path)
    except FileNotFoundError:
        raise ValueError(f"octile: there is no {path}") from None


def _json_object(text, name):
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ValueError(f"octile: {name} is no JSON: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"octile: {name} is no JSON object")
    return read


def _checked_config(config, folder, source):
    if not isinstance(config, dict):
        raise ValueError(f"octile: {source} has no quantization_config: the checkpoint is not quantized")
    if config.get("quant_method") in awq_gptq.METHODS:
        return config
    if config.get("quant_method") != "compressed-tensors":
        raise ValueError(
            f"octile: {folder}: quant_method is {config.get('quant_method')!r}; compressed-tensors, awq and gptq are known"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"octile: {folder}: quantization_config has no config_groups")
    return config


def _read_tensors(folder):
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        if (folder / names[0]).exists():
            raise ValueError(f"octile: {folder} has both {names[0]} and {index.name}: which one holds the model?")
        of_tensors = _read_json(index).get("weight_map")
        if not isinstance(of_tensors, dict) or not all(isinstance(name, str) for name in of_tensors.values()):
            raise ValueError(f"octile: {index} has no weight_map")
        names = sorted(set(of_tensors.values()))
    tensors = {}
    for name in names:
        if pathlib.PurePath(name).name != name:
            raise ValueError(f"octile: {index}: {name!r} is no file of the same folder")
        if not (folder / name).exists():
            raise ValueError(f"octile: there is no {folder / name}")
        shard = read_safetensors(folder / name)[0]
        if twice := sorted(tensors.keys() & shard.keys()):
            raise ValueError(f"octile: {folder}: {twice[0]} is in two files")
        tensors |= shard
    return tensors


def _scheme(config, name, folder):
    """(weights, input_activations) of the group that this layer is in.

    Of several targets that mean it the most specific holds, as in compressed-tensors: its name before an expression,
    that before its class, and among equals the first of the alphabet.
    """
    groups = {}
    for group in config["config_groups"].values():
        groups |= dict.fromkeys(_names(group.get("targets", ["Linear"]), folder), group)
    ignored = [t for t in _names(config.get("ignore") or [], folder) if _specificity(t, name, folder) is not None]
    if ignored:
        raise ValueError(f"octile: {folder}: {name} is quantized, and quantization_config ignores {ignored[0]!r}")
    means = [(how, target) for target in groups if (how := _specificity(target, name, folder)) is not None]
    if not means:
        raise ValueError(f"octile: {folder}: no group of quantization_config is for {name}")
    group = groups[min(means)[1]]
    return group.get("weights") or {}, group.get("input_activations")


def _names(targets, folder):
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"octile: {folder}: {targets!r} in quantization_config is no list of names")
    return targets


def _specificity(target, name, folder):
    """0: the target is this layer's name; 1: an expression that fits it; 2: its class; None: the target is another."""
    if target == name:
        return 0
    try:
        if target.startswith("re:") and re.match(target[3:], name):
            return 1
    except re.error as error:
        raise ValueError(f"octile: {folder}: the target {target!r} is no regular expression: {error}") from None
    return 2 if target in ("Linear", "Module") else None


def _make_layer(where, linear, scheme, tensors):
    weights, activations = scheme
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric", True)
    if weights.get("type", "int") != "int" or bits not in (4, 8):
        raise ValueError(
            f"octile: {where}: weights of {bits} bits, type {weights.get('type')!r}; int of 4 and 8 are known"
        )
    if "weight_g_idx" in tensors:
        raise ValueError(f"octile: {where}: its groups are of scattered columns (weight_g_idx), which no kernel reads")
    if (linear.bias is None) != ("bias" not in tensors):
        has, lacks = ("checkpoint", "model") if linear.bias is None else ("model", "checkpoint")
        raise ValueError(f"octile: {where}: the {has} has a bias there, the {lacks} has none")
    if linear.bias is not None:
        tensors["bias"] = _take(where, tensors, "bias", None, (linear.out_features,)).to(linear.bias.dtype)
    if bits == 4:
        if activations:
            raise ValueError(f"octile: {where}: 4-bit weights with quantized activations are not known")
        layer = _make_w4a16(where, linear, weights, symmetric, tensors)
    elif not symmetric:
        raise ValueError(f"octile: {where}: 8-bit weights with zero points are not known")
    else:
        layer = _make_w8a8(where, linear, activations, tensors)
    # Older files have zero points that are zero, which compressed-tensors then subtracts. Packed ones it cannot use.
    for name, t in tensors.items():
        if not name.endswith("zero_point"):
            raise ValueError(f"octile: {where}.{name} is nothing that layers of this scheme have")
        if name == "weight_zero_point" and bits == 4:
            raise ValueError(f"octile: {where} has a weight_zero_point, and quantization_config says symmetric")
        if t.any():
            raise ValueError(
                f"octile: {where}.{name} holds {t[t != 0][0].item()}, and quantization_config says symmetric"
            )
    return layer


def _take(where, tensors, name, dtype, *shapes):
    t = tensors.pop(name, None)
    if t is None:
        raise ValueError(f"octile: {where} has no {name}")
    fits = t.is_floating_point() if dtype is None else t.dtype == dtype
    if not fits or tuple(t.shape) not in shapes:
        expected = " or ".join(str(tuple(s)) for s in shapes)
        raise ValueError(
            f"octile: {where}.{name} is {t.dtype} {tuple(t.shape)}, expected {dtype or 'a float type'} {expected}"
        )
    return t


def _scale(where, tensors, name, *shapes):
    """In float32: that is what the kernels multiply by."""
    t = _take(where, tensors, name, None, *shapes).float()
    if not (t.isfinite() & (t > 0)).all():
        raise ValueError(f"octile: {where}.{name} holds {t[~(t.isfinite() & (t > 0))][0].item()}; scales are positive")
    return t


def _make_w8a8(where, linear, activations, tensors):
    n, k = linear.out_features, linear.in_features
    if not activations:
        raise ValueError(f"octile: {where}: 8-bit weights with float activations are not known")
    strategy, dynamic = activations.get("strategy"), activations.get("dynamic", False)
    if activations.get("num_bits") != 8 or activations.get("type", "int") != "int":
        raise ValueError(f"octile: {where}: activations of {activations.get('num_bits')} bits; int of 8 is known")
    if not activations.get("symmetric", True):
        raise ValueError(f"octile: {where}: activations with a zero point are not known")
    if (dynamic, strategy) not in ((True, "token"), (False, "tensor")):
        raise ValueError(
            f"octile: {where}: activations {'dynamic' if dynamic else 'static'} per {strategy}; dynamic per token and "
            "static per tensor are known"
        )
    weight = _take(where, tensors, "weight", torch.int8, (n, k))
    scale = _scale(where, tensors, "weight_scale", (n, 1), (n,), (1,), ())
    scale = scale.reshape(-1)
    with torch.inference_mode(False):
        if dynamic:
            layer = W8A8Linear(k, n, bias=False, device="meta", dtype=linear.weight.dtype)
        else:
            layer = W8A8StaticLinear(k, n, bias=False, device="meta", dtype=linear.weight.dtype)
            layer.input_scale = _scale(where, tensors, "input_scale", (1,), ()).reshape(1).clone()
            if "input_multiplier" in tensors:
                layer.input_multiplier = _scale(where, tensors, "input_multiplier", (k,)).clone()
        layer.quantized_weight, layer.weight_scale, layer.bias = (
            weight.clone(),
            scale.clone(),
            tensors.pop("bias", None),
        )
        layer._align()
    return layer


def _make_w4a16(where, linear, weights, symmetric, tensors):
    n, k = linear.out_features, linear.in_features
    group = weights.get("group_size") if weights.get("strategy") == "group" else 0
    if weights.get("strategy") not in ("group", "channel") or group not in (0, 32, 64, 128):
        raise ValueError(
            f"octile: {where}: 4-bit weights per {weights.get('strategy')} of {group}; groups of 32, 64, 128 and per "
            "channel are known"
        )
    if group and k % group:
        raise ValueError(f"octile: {where}: groups of {group} do not divide its {k} inputs")
    shape = _take(where, tensors, "weight_shape", torch.int64, (2,)).tolist() if "weight_shape" in tensors else [n, k]
    if shape != [n, k]:
        raise ValueError(f"octile: {where}.weight_shape is {shape}, and the model's layer is {[n, k]}")
    packed = _take(where, tensors, "weight_packed", torch.int32, (n, -(-k // 8)))
    groups = k // group if group else 1
    with torch.inference_mode(False):
        layer = W4A16Linear(
            k, n, bias=False, device="meta", dtype=linear.weight.dtype, group=group, zero_point=not symmetric
        )
        layer.quantized_weight = quantizer.pack(quantizer.unpack_words(packed, k))
        layer.weight_scale = _scale(where, tensors, "weight_scale", (n, groups)).clone()
        if not symmetric:
            points = _take(where, tensors, "weight_zero_point", torch.int32, (-(-n // 8), groups))
            layer.weight_zero_point = quantizer.unpack_words(points.T.contiguous(), n).T.contiguous().int()
        layer.bias = tensors.pop("bias", None)
    return layer


def _check_names(model, folder, tensors, layers):
    """tensors: those that belong to no quantized layer."""
    own = model.state_dict(keep_vars=True)
    modules = dict(model.named_modules(remove_duplicate=False))
    replaced = {id(modules[name]) for name in layers}
    rest = {name: t for name, t in own.items() if id(modules.get(name.rpartition(".")[0])) not in replaced}
    for name, buffer in model.named_buffers():
        if name not in own and buffer.is_meta:
            raise ValueError(
                f"octile: {folder}: {name} would stay on the meta device: no checkpoint holds it. Build the model with "
                "real buffers, as accelerate.init_empty_weights() does"
            )
        if name not in own and name in tensors:
            del tensors[name]  # what the model makes itself, older files hold as well
    unexpected = [name for name in tensors if name not in rest]
    loaded = {id(t) for name, t in own.items() if name in tensors}  # a tied parameter is in the file once
    missing = [name for name, t in rest.items() if name not in tensors and id(t) not in loaded]
    for kind, names in (("the model has no", unexpected), ("there is no", missing)):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ValueError(f"octile: {folder}: {kind} {', '.join(names[:4])}{more}")
    for name, t in tensors.items():
        if t.is_floating_point() != rest[name].is_floating_point():
            raise ValueError(f"octile: {folder}: {name} is {t.dtype}, and in the model {rest[name].dtype}")
        if t.shape != rest[name].shape:
            raise ValueError(
                f"octile: {folder}: {name} is {tuple(t.shape)}, and in the model {tuple(rest[name].shape)}"
            )
