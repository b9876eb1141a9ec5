"""Checkpoints in the layouts of compressed-tensors, which vLLM and Transformers load too: safetensors files, and a
config.json that says how they are quantized.

    int-quantized    weight int8 (OUT, IN), weight_scale (OUT, 1), (1) or (OUT, IN / group), static: input_scale (1)
    pack-quantized   weight_packed int32 (OUT, IN * bits / 32), weight_scale (OUT, IN / group), weight_shape (2)

Weights of fewer than 8 bits are read from both; save_checkpoint() packs them.
"""

import pathlib

import torch
from torch import nn

from . import _reader, awq_gptq, experts, quantizer
from ._reader import printable
from .calibration import read_safetensors
from .convert import become
from .file_names import of_modules
from .inference import IN_WORDS, W8A8Linear, W8A8StaticLinear
from .linears import as_linear, is_conv1d, is_linear, is_plain_linear

SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
SUFFIXES += ("input_scale", "input_zero_point", "input_multiplier", "qweight", "qzeros", "scales", "g_idx", "bias")


def load_checkpoint_(model, folder):
    """Loads a quantized checkpoint into `model`, in place, and returns it. The model must be built from the same config.

    It reads the layouts of compressed-tensors, and 4-bit AWQ and GPTQ.

    folder: a folder or a single safetensors file; `octile quantize` writes the latter if its input is a single file.

    Each torch.nn.Linear (and Conv1D) that is quantized in the checkpoint becomes a W8A8Linear, W8A8StaticLinear,
    W8A16Linear, W4A16Linear or W4A8Linear. Transformers' fused experts, which the checkpoint stores one by one, become
    octile.Experts. All other tensors are loaded as by load_state_dict(), into the model's types. Names are those of the
    modules, or those that Transformers gives such a model in files. A model on the meta device moves to the CPU.

    Raises ValueError, and changes nothing, for a broken file, a scheme that no layer supports, a tensor of the wrong
    type or shape, and if the names of checkpoint and model differ.
    """
    folder = pathlib.Path(folder)
    checked = _reader.checkpoint(folder)
    tensors = {}
    for name in checked["files"]:
        tensors |= read_safetensors(folder / name if folder.is_dir() else folder)
    modules = dict(model.named_modules(remove_duplicate=False))
    names = of_modules(model, [*tensors, *(f"{name}.weight" for name in checked["layers"])])
    layers, mixtures, of_layer = {}, {}, {}
    for name, layer in checked["layers"].items():
        own_name = name if name in modules else names[f"{name}.weight"].removesuffix(".weight")
        where, part = f"{folder}: {printable(name)}", experts.in_files(modules, own_name)
        module = experts.one_linear(modules[part[0]], *part[1:]) if part else modules.get(own_name)
        linear = layer_to_fill(where, module, checked, layer)
        own = {suffix: tensors.pop(f"{name}.{suffix}") for suffix in SUFFIXES if f"{name}.{suffix}" in tensors}
        layers[name] = make_layer(where, linear, checked, layer, own)
        if not part and (other := of_layer.setdefault(own_name, name)) != name:
            raise ValueError(f"octile: {where} is the same layer as {printable(other)}")
        if part and (other := mixtures.setdefault(part[0], {}).setdefault(part[1:], name)) != name:
            raise ValueError(f"octile: {where} is the same layer of an expert as {printable(other)}")
    if not layers:
        raise ValueError(f"octile: {folder} holds no quantized layer")
    drop_zero_points_of_zero(checked, layers)
    made = {name: layers[known] for name, known in of_layer.items()}
    for name, parts in mixtures.items():
        own = {part: layers.pop(known) for part, known in parts.items()}
        made[name] = experts.join(f"{folder}: {printable(name)}", modules[name], own)
    layers = made
    own = model.state_dict(keep_vars=True)
    for name in list(tensors):
        if name not in own and names[name] not in tensors:
            tensors[names[name]] = tensors.pop(name)
    _check_names(model, folder, tensors, layers)
    for name, layer in layers.items():
        module = modules[name]
        device = module._parameters["down_proj" if name in mixtures else "weight"].device
        if device.type != "meta":
            layer.to(device)
        become(module, layer.train(module.training))
    _give_memory(model)
    model.load_state_dict(tensors, strict=False)
    return model


def _give_memory(model):
    """Moves the model's meta tensors to the CPU, without values. Shared tensors stay shared."""
    made = {}
    with torch.inference_mode(False):
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, t in held.items():
                    if t is None or not t.is_meta:
                        continue
                    if id(t) not in made:
                        new = torch.empty_like(t, device="cpu")
                        made[id(t)] = t, nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
                    held[name] = made[id(t)][1]


def layer_to_fill(where, module, checked, layer):
    """The linear layer of a model that this layer of a checkpoint is for."""
    if not is_plain_linear(module) and not (is_conv1d(module) and checked["format"] == "octile"):
        what = "no such layer" if module is None else f"a {type(module).__name__} there"
        raise ValueError(f"octile: {where} is a quantized linear layer, and the model has {what}")
    linear, shape = as_linear(module), (layer["n"], layer["k"])
    if shape != (linear.out_features, linear.in_features):
        raise ValueError(
            f"octile: {where} is {shape}, and the model's layer {(linear.out_features, linear.in_features)}"
        )
    return linear


def make_layer(where, linear, checked, layer, tensors):
    """Makes a layer that the reader has checked; refuses what none of our layers computes."""
    scheme = {} if layer["scheme"] is None else checked["schemes"][layer["scheme"]]
    if layer["kind"] in awq_gptq.KINDS:
        tensors, scheme = awq_gptq.to_compressed_tensors(checked, layer, tensors, linear)
    bias = tensors.pop("bias", None)
    if (linear.bias is None) != (bias is None):
        has, lacks = ("checkpoint", "model") if linear.bias is None else ("model", "checkpoint")
        raise ValueError(f"octile: {where}: the {has} has a bias, the {lacks} does not")
    weights, activations = scheme["weights"], scheme["input"]
    if weights["bits"] == 8 and not weights["symmetric"]:
        raise ValueError(f"octile: {where}: 8-bit weights with zero points are not supported")
    group = _group(where, weights)
    words = {"bias": False, "device": "meta", "dtype": linear.weight.dtype}
    sizes, narrow = (linear.in_features, linear.out_features), weights["bits"] < 8
    # Older files have some that are 0.
    points = tensors.get("weight_zero_point") if narrow and not weights.get("symmetric") else None
    if activations:
        _check_activations(where, weights, activations)
    with torch.inference_mode(False):
        if kind := IN_WORDS.get((weights["bits"], bool(activations))):
            words |= {"group": group or 0, "zero_point": points is not None} if narrow else {"group": group}
            layer = kind(*sizes, **words)
        elif activations["dynamic"]:
            layer = W8A8Linear(*sizes, **words, group=group)
        else:
            layer = _make_static(sizes, words, tensors)
        _fill(layer, tensors, points)
    layer.bias = None if bias is None else bias.to(linear.bias.dtype, copy=True)  # it may be a view of a file
    return layer


def drop_zero_points_of_zero(checked, layers):
    """layers: those made of a whole checkpoint, by their names in it."""
    parts = [made for name, made in layers.items() if checked["layers"][name]["kind"] in awq_gptq.KINDS]
    awq_gptq.drop_zero_points_of_zero(parts)


def _group(where, weights):
    """As WeightFormat has it; None: per channel, or one scale for all."""
    group = weights["group_size"] if weights["strategy"] == "group" else None
    if group not in (None, 32, 64, 128):
        raise ValueError(
            f"octile: {where}: {weights['bits']}-bit weights in groups of {group}, expected groups of 32, 64 or 128, or "
            "per channel"
        )
    return group


def _check_activations(where, weights, activations):
    strategy, dynamic = activations["strategy"], activations["dynamic"]
    if activations["bits"] != 8 or activations["type"] != "int":
        raise ValueError(
            f"octile: {where}: activations of {activations['bits']} bits, type "
            f"{printable(activations['type'])}, expected 8 bits, type int"
        )
    if not activations["symmetric"]:
        raise ValueError(f"octile: {where}: activations with a zero point are not supported")
    if (dynamic, strategy) not in ((True, "token"), (False, "tensor")):
        raise ValueError(
            f"octile: {where}: activations {'dynamic' if dynamic else 'static'} per {printable(strategy)}, expected "
            "dynamic per token or static per tensor"
        )
    in_groups = " in groups" if weights["strategy"] == "group" else ""
    if not dynamic and (in_groups or weights["bits"] < 8):
        raise ValueError(
            f"octile: {where}: {weights['bits']}-bit weights{in_groups} with static activations are not supported"
        )


def _make_static(sizes, words, tensors):
    layer = W8A8StaticLinear(*sizes, **words)
    dtype = layer._scale_type(layer.weight_dtype)
    layer.input_scale = tensors["input_scale"].to(dtype).reshape(1).clone()
    if "input_multiplier" in tensors:
        layer.input_multiplier = tensors["input_multiplier"].to(dtype).clone()
    return layer


def _fill(layer, tensors, points):
    """The weight, its scales and zero points."""
    bits, scale = layer.format.bits, tensors["weight_scale"].to(layer._scale_type(layer.weight_dtype))
    layer.weight_scale = (scale if layer.group is not None else scale.reshape(-1)).clone()
    if "weight_packed" in tensors:
        levels = quantizer.unpack_words(tensors["weight_packed"], layer.in_features, bits)
    else:
        levels = tensors["weight"].clone()
    layer.quantized_weight = quantizer.pack(levels, bits) if bits < 8 else levels
    if points is not None and "weight_packed" not in tensors:
        layer.weight_zero_point = points.int()
    elif points is not None:
        layer.weight_zero_point = (
            quantizer.unpack_words(points.T.contiguous(), layer.out_features, bits).T.contiguous().int()
        )
    layer._align()


def _check_names(model, folder, tensors, layers):
    """tensors: those that belong to no quantized layer."""
    own = model.state_dict(keep_vars=True)
    modules = dict(model.named_modules(remove_duplicate=False))
    replaced = {id(modules[name]) for name in layers}

    def is_made(name):  # what a user has registered in a linear layer stays there
        module, _, last = name.rpartition(".")
        module = modules.get(module)
        return id(module) in replaced and (last in ("weight", "bias") or not is_linear(module))

    rest = {name: t for name, t in own.items() if not is_made(name)}
    for name, buffer in model.named_buffers():
        if name not in own and buffer.is_meta:
            raise ValueError(
                f"octile: {folder}: {name} would stay on the meta device: no checkpoint holds it. Build the model with "
                "real buffers, as accelerate.init_empty_weights() does"
            )
        if name not in own and name in tensors:
            del tensors[name]  # older files also hold what the model makes itself
    unexpected = [name for name in tensors if name not in rest]
    loaded = {id(t) for name, t in own.items() if name in tensors}  # a tied parameter is in the file once
    missing = [name for name, t in rest.items() if name not in tensors and id(t) not in loaded]
    for kind, names in (("the model has no", unexpected), ("there is no", missing)):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ValueError(
                f"octile: {folder}: {kind} {', '.join(map(printable, names[:4]))}{more}; "
                "see docs/how-to/errors.md#checkpoints"
            )
    for name, t in tensors.items():
        if t.is_floating_point() != rest[name].is_floating_point():
            raise ValueError(f"octile: {folder}: {name} is {t.dtype}, but in the model {rest[name].dtype}")
        if t.shape != rest[name].shape:
            raise ValueError(
                f"octile: {folder}: {name} is {tuple(t.shape)}, but in the model {tuple(rest[name].shape)}"
            )
