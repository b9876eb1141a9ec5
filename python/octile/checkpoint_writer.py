"""Writes checkpoints in the layouts of compressed-tensors; checkpoint.py describes and reads them."""

import contextlib
import json
import pathlib
import re
import tempfile
import warnings

import torch
from torch import nn

from . import _c, quantizer
from .calibration import replacing, save_safetensors
from .experts import Experts, left_random, names_in_files, split
from .file_names import of_files
from .inference import IN_WORDS, W8A8Linear, W8A8StaticLinear
from .training import Linear

_PACKED = tuple(IN_WORDS.values())  # pack-quantized; the others are int-quantized
_LAYERS = (W8A8Linear, W8A8StaticLinear, *_PACKED)


_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def save_checkpoint(model, folder, *, force=False, max_shard_size=None):
    """Writes a model that quantize_() or load_checkpoint_() has converted: model.safetensors and config.json.

    With max_shard_size, bytes or a text such as "5GB", a larger model becomes several files, model-00001-of-00002.safetensors
    and so on, with a model.safetensors.index.json; only a tensor larger than that makes a larger file. It needs huggingface_hub.

    config.json is that of model.config, if there is one, with a quantization_config; a model of Transformers that
    generates gets a generation_config.json too. The tensors have the names that Transformers gives them in files, which
    may differ from those of modules (Mixtral's block_sparse_moe). The layers of each expert of an octile.Experts are
    written separately (experts.3.gate_proj). Layers that multiply their inputs (W8A8Static's multipliers), layers that were
    a Conv1D, and experts that Transformers does not read one by one (gpt-oss, GraniteMoE) cannot be expressed in
    compressed-tensors. `format` is then "octile": compressed-tensors and Transformers refuse it, load_checkpoint_()
    reads it, and a UserWarning names the layers. Raises ValueError for a model with no quantized layer or several kinds
    of them, and FileExistsError if one of the files exists already, or another file of weights of a checkpoint, unless
    `force`, which removes the latter.
    """
    folder = pathlib.Path(folder)
    modules = dict(model.named_modules(remove_duplicate=False))
    mixtures = {n: m for n, m in model.named_modules() if isinstance(m, Experts)}
    inner = {id(layer) for m in mixtures.values() for layer in m.children()}
    layers = {n: m for n, m in model.named_modules() if type(m) in _LAYERS and id(m) not in inner}
    known = names_in_files(model) if mixtures else {}
    for name, module in mixtures.items():
        layers |= {f"{name}.{part}": layer for part, layer in split(module, known).items()}
    # With one output, a scale per tensor is one per channel: such a layer counts as what the others are.
    per_channel = next((_per_channel(m) for m in layers.values() if m.out_features != 1), True)
    kinds = {(type(m).__name__, *_kind(m, per_channel)) for m in layers.values()}
    if not kinds and any(isinstance(m, Linear) for m in modules.values()):
        raise ValueError(
            "octile: the layers are for training, with float weights: quantize_() the model for inference first"
        )
    if not kinds:
        raise ValueError("octile: the model has no quantized layer: quantize_() it first")
    if len(kinds) > 1:
        found = sorted(kinds, key=str)
        raise ValueError(f"octile: the model has layers of several kinds, {found}: convert all of them with one config")
    if "" in layers:
        raise ValueError("octile: the model is one layer, which has no name in a file: put it into a module")
    tensors, seen, memory = {}, set(), set()
    for name, t in model.state_dict(keep_vars=True).items():
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"octile: {name} is a {type(t).__name__}, and a file can only hold tensors")
        if t.is_meta:
            raise ValueError(f"octile: {name} is on the meta device: it has no values to write")
        if _is_of_layer(modules.get(name.rpartition(".")[0]), name.rpartition(".")[2]) or id(t) in seen:
            continue
        seen.add(id(t))
        t = t.detach().contiguous()
        # Other tensors in the same memory are written too, from a copy: safetensors refuses them as they are.
        place = t.untyped_storage().data_ptr()
        tensors[name] = t.clone() if place in memory else t
        memory.add(place)
    for name, layer in layers.items():
        own = {f"{name}.{suffix}": t.contiguous() for suffix, t in _layer_tensors(layer, per_channel).items()}
        _check_scales(own)
        tensors |= own
    config = _model_config(model)
    left = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
    names = of_files(model, [*tensors, *(f"{name}.weight" for name in (*layers, *left))], layers)
    # vLLM compares `ignore` with names in files, Transformers with names of modules.
    left = [*dict.fromkeys([*left, *(names[f"{name}.weight"].removesuffix(".weight") for name in left)])]
    beyond = _beyond_compressed_tensors(model, layers, mixtures)
    config["quantization_config"] = _describe(next(iter(layers.values())), per_channel, left, beyond)
    if beyond:
        warnings.warn(
            'octile: the format of this checkpoint is "octile", which only octile.load_checkpoint_() reads, not '
            f"Transformers or vLLM: {'; '.join(beyond)}",
            stacklevel=2,
        )
    texts = {"config.json": json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"}
    texts |= _generation_config(model)
    tensors = {names[name]: t for name, t in tensors.items()}
    files, index = _files(tensors, max_shard_size)
    texts |= {_INDEX: index} if index else {}
    folder.mkdir(parents=True, exist_ok=True)
    old = [path for path in folder.glob("model-*.safetensors") if re.fullmatch(r"model-\d{5}-of-\d{5}", path.stem)]
    old += [folder / _FILE, folder / _INDEX]
    for path in (*(folder / name for name in (*files, *texts)), *old):
        if path.exists() and not force:
            raise FileExistsError(f"octile: {path} already exists; force=True overwrites it")
    with contextlib.ExitStack() as stack:  # all are complete before the first takes its place
        for name, text in texts.items():
            stack.enter_context(replacing(folder / name)).write_text(text, encoding="utf-8")
        for name, held in files.items():
            file = stack.enter_context(replacing(folder / name))
            save_safetensors({tensor: tensors[tensor] for tensor in held}, file, {"format": "pt"})
    for path in old:  # they would be read before ours, or with it
        if path.name not in files and path.name not in texts:
            path.unlink(missing_ok=True)


def _files(tensors, max_shard_size):
    """File names, each with the names of its tensors, and the text of the index if there are several."""
    if max_shard_size is None:
        return {_FILE: list(tensors)}, None
    if isinstance(max_shard_size, int) and max_shard_size <= 0:
        raise ValueError(f"octile: max_shard_size is {max_shard_size}; it is a number of bytes above 0, or a text: 5GB")
    from huggingface_hub import split_torch_state_dict_into_shards

    found = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    index = {"metadata": found.metadata, "weight_map": found.tensor_to_filename}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return found.filename_to_tensors, text if found.is_sharded else None


def _model_config(model):
    """What save_pretrained() writes of model.config, with what servers need and a model made from a config lacks."""
    if not hasattr(getattr(model, "config", None), "to_json_string"):
        return {}
    config = json.loads(model.config.to_json_string())
    if hasattr(model, "save_pretrained") or not config.get("architectures"):
        config["architectures"] = [type(model).__name__]
    if hasattr(model, "save_pretrained") or not (config.get("dtype") or config.get("torch_dtype")):
        config.pop("torch_dtype", None)  # as it is now, as Transformers writes it
        config["dtype"] = str(model.dtype).removeprefix("torch.")
    return config


def _generation_config(model):
    """{"generation_config.json": its text} of a Transformers model that generates. Raises ValueError as its own
    save_pretrained() does where values contradict each other."""
    if not (hasattr(model, "can_generate") and model.can_generate()) or model.generation_config is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        model.generation_config.save_pretrained(folder)
        return {path.name: path.read_text(encoding="utf-8") for path in pathlib.Path(folder).iterdir()}


def _kind(layer, per_channel):
    if layer.group is not None:
        return layer.group, layer.zero_point
    return (per_channel if layer.out_features == 1 else _per_channel(layer),)


def _per_channel(layer):
    return layer.plain_weight()[1].numel() != 1


def _is_of_layer(module, name):
    """Whether a quantized layer itself has this tensor: tensors that a user has registered there are written like any other."""
    if type(module) in _LAYERS:
        return name in (*module._KEPT, "packed_weight", "bias")
    return type(module) is Experts


def _layer_tensors(layer, per_channel):
    tensors = {} if layer.bias is None else {"bias": layer.bias.detach()}
    weight, scale, zero_point = layer.plain_weight()
    tensors["weight_scale"] = scale.reshape(-1, 1) if layer.group is None and per_channel else scale
    if type(layer) in _PACKED:
        q, bits = layer.format.levels(weight.cpu(), layer.in_features), layer.format.bits
        tensors["weight_packed"] = quantizer.pack_words(q, bits)
        tensors["weight_shape"] = torch.tensor([layer.out_features, layer.in_features], device="cpu")
        if zero_point is not None:
            points = zero_point.cpu().to(torch.int8)
            tensors["weight_zero_point"] = quantizer.pack_words(points.T.contiguous(), bits).T.contiguous()
        return tensors
    tensors["weight"] = weight
    if type(layer) is W8A8StaticLinear:
        tensors["input_scale"] = layer.input_scale
        if layer.input_multiplier is not None:
            tensors["input_multiplier"] = layer.input_multiplier
    return tensors


def _check_scales(tensors):
    """Refuses what the reader would refuse, in float32 as it reads them."""
    for name, t in tensors.items():
        if not name.endswith(("_scale", "_multiplier")):
            continue
        values = t.float()
        bad = values[~(values.isfinite() & (values > 0))]
        if len(bad):
            raise ValueError(f"octile: {name} holds {bad[0].item():g}; scales are finite and above 0")


def _beyond_compressed_tensors(model, layers, mixtures):
    """What compressed-tensors' layouts cannot express about these layers, in sentences."""
    multiplied = [n for n, m in layers.items() if type(m) is W8A8StaticLinear and m.input_multiplier is not None]
    transposed = [n for n, m in layers.items() if m.in_out]
    said = []
    if multiplied:
        said.append(
            f"{_some(multiplied)} multiply their inputs: W8A8Static(multipliers=False) smooths only where it folds, "
            "and smoothing=None nowhere"
        )
    if transposed:
        said.append(f"{_some(transposed)} were a Conv1D, which compressed-tensors has no layout for")
    own = {
        n for n, m in mixtures.items() if not getattr(m, "is_concatenated", True) or getattr(m, "is_transposed", False)
    }
    if own := [n for n in mixtures if n in own | {*left_random(model, mixtures)}]:
        said.append(f"{_some(own)} are experts that Transformers does not read one by one")
    return said


def _some(names):
    more = f" and {len(names) - 4} more layers" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _describe(layer, per_channel, left, beyond):
    packed, static = type(layer) in _PACKED, type(layer) is W8A8StaticLinear
    weights = {"num_bits": layer.format.bits, "type": "int", "symmetric": not layer.zero_point, "dynamic": False}
    weights["strategy"] = "channel" if per_channel or layer.group is not None else "tensor"
    if layer.group:
        weights |= {"strategy": "group", "group_size": layer.group}
    activations = None
    if layer._ACTIVATION != _c.NONE:
        activations = {"num_bits": 8, "type": "int", "symmetric": True}
        activations |= {"dynamic": not static, "strategy": "tensor" if static else "token"}
    # As a quant_method, Transformers would warn of it and go on with meaningless weights.
    layout = "octile" if beyond else "pack-quantized" if packed else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": left,
        "config_groups": {"group_0": group | {"format": layout}},
    }
