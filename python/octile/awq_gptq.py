"""Checkpoints of AWQ and GPTQ with 4 bits, in the terms of compressed-tensors: the same levels, laid out anew.

AWQ    qweight int32 (IN, OUT / 8), qzeros int32 (IN / group, OUT / 8), scales (IN / group, OUT)
GPTQ   qweight int32 (IN / 8, OUT), qzeros and scales alike, g_idx int32 (IN)
"""

import torch

from .quantizer import pack_words, unpack_words

METHODS = ("awq", "gptq")
# Output i of eight is nibble _PLACE[i] of an AWQ word.
_PLACE = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def to_compressed_tensors(folder, config, tensors, modules):
    """(quantization_config, tensors) as load_checkpoint_() has them of a pack-quantized checkpoint.

    modules: the model's by name. Raises ValueError, with the layer's name, for what is not read.
    """
    is_awq, bits = config["quant_method"] == "awq", config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise ValueError(f"octile: {folder}: {config['quant_method']} of {bits} bits; 4 are known")
    if is_awq and str(config.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"octile: {folder}: AWQ's version {config['version']!r} has another layout; gemm is known")
    result, points = {name: t for name, t in tensors.items() if not name.endswith(_ENDINGS)}, {}
    for key in tensors:
        if not key.endswith(".qweight"):
            continue
        name = key.removesuffix(".qweight")
        layer = {ending[1:]: tensors[name + ending] for ending in _ENDINGS if name + ending in tensors}
        where = f"{folder}: {name}"
        n, k = _check(where, layer, is_awq)
        if is_awq:
            q, zeros = _awq_rows(layer["qweight"]).T.contiguous(), _awq_rows(layer["qzeros"])
        else:
            q, zeros = unpack_words(layer["qweight"].T.contiguous(), k), unpack_words(layer["qzeros"], n)
            zeros = _gptq_zeros(where, zeros, config)
            _drop_bias_of_zeros(name, result, modules)
        result[f"{name}.weight_packed"] = pack_words(q)
        result[f"{name}.weight_scale"] = layer["scales"].T.contiguous()
        result[f"{name}.weight_shape"] = torch.tensor([n, k])
        points[name] = zeros
    symmetric = not any(zeros.any() for zeros in points.values())
    if not symmetric:
        result |= {f"{name}.weight_zero_point": pack_words(zeros).T.contiguous() for name, zeros in points.items()}
    group = config.get("group_size", config.get("q_group_size", 128))
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}, result


_ENDINGS = (".qweight", ".qzeros", ".scales", ".g_idx")


def _check(where, layer, is_awq):
    """(OUT, IN) of a layer whose tensors agree with each other."""
    for name, kind in (("qweight", torch.int32), ("qzeros", torch.int32), ("scales", None)):
        t = layer.get(name)
        if t is None:
            raise ValueError(f"octile: {where} has no {name}")
        if t.dim() != 2 or (t.dtype != kind if kind else not t.is_floating_point()):
            raise ValueError(f"octile: {where}.{name} is {t.dtype} {tuple(t.shape)}")
    rows, width = layer["qweight"].shape
    groups, n = layer["scales"].shape
    k = rows if is_awq else 8 * rows
    fits = n % 8 == 0 and width == (n // 8 if is_awq else n) and tuple(layer["qzeros"].shape) == (groups, n // 8)
    if not fits or groups == 0 or k % groups:
        shapes = ", ".join(f"{name} {tuple(layer[name].shape)}" for name in ("qweight", "qzeros", "scales"))
        raise ValueError(f"octile: {where}: {shapes} do not fit each other")
    order = layer.get("g_idx")
    if order is not None and not torch.equal(order.long(), torch.arange(k) // (k // groups)):
        raise ValueError(f"octile: {where}: its columns are in the order of their activations (desc_act): not known")
    return n, k


def _awq_rows(words):
    """int32 (R, OUT / 8) -> int8 (R, OUT), each 8 less than it is stored."""
    return unpack_words(words, 8 * words.shape[1]).unflatten(1, (-1, 8))[:, :, _PLACE].flatten(1)


def _gptq_zeros(where, stored, config):
    if config.get("checkpoint_format") == "gptq_v2":
        return stored
    if (stored == 7).any():
        raise ValueError(f"octile: {where}.qzeros holds 15, which stands for 16, or for a 0 that has overflowed")
    return stored + 1


def _drop_bias_of_zeros(name, tensors, modules):
    """Older programs give a bias to each layer."""
    bias = tensors.get(f"{name}.bias")
    if bias is not None and getattr(modules.get(name), "bias", None) is None and not bias.any():
        del tensors[f"{name}.bias"]
