"""4-bit AWQ and GPTQ checkpoints, converted to compressed-tensors' layout; the levels stay the same.

AWQ    qweight int32 (IN, OUT / 8), qzeros int32 (IN / group, OUT / 8), scales (IN / group, OUT)
GPTQ   qweight int32 (IN / 8, OUT), qzeros and scales alike, g_idx int32 (IN)
"""

import dataclasses

import torch

from .quantizer import pack_words, unpack_words

KINDS = ("awq", "gptq")
# Output i of eight is nibble _PLACE[i] of an AWQ word.
_PLACE = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device="cpu")


def to_compressed_tensors(checked, layer, tensors, linear):
    """(tensors, scheme) as load_checkpoint_() has them for a pack-quantized layer.

    checked, layer: what the reader reports of the checkpoint, and of this layer. linear: the model's layer.
    """
    n, k = layer["n"], layer["k"]
    if layer["kind"] == "awq":
        q, zeros = _awq_rows(tensors["qweight"]).T.contiguous(), _awq_rows(tensors["qzeros"])
    else:
        q, zeros = unpack_words(tensors["qweight"].T.contiguous(), k), unpack_words(tensors["qzeros"], n)
        zeros = zeros + (checked["format"] != "gptq_v2")
    result = {"weight_packed": pack_words(q), "weight_scale": tensors["scales"].T.contiguous()}
    result["weight_zero_point"] = pack_words(zeros).T.contiguous()
    bias = tensors.get("bias")
    # Older GPTQ programs give each layer a bias.
    if bias is not None and (layer["kind"] == "awq" or linear.bias is not None or bias.any()):
        result["bias"] = bias
    group = checked["group_size"] or layer["group"]
    strategy = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    return result, {"weights": {"bits": 4} | strategy, "input": None}


def drop_zero_points_of_zero(layers):
    """Drops the zero points of such a checkpoint's layers if all are 0: both layouts always store them."""
    if not any(layer.weight_zero_point.any() for layer in layers):
        for layer in layers:
            layer.weight_zero_point, layer.format = None, dataclasses.replace(layer.format, zero_point=False)


def _awq_rows(words):
    """int32 (R, OUT / 8) -> int8 (R, OUT), the stored values minus 8."""
    return unpack_words(words, 8 * words.shape[1]).unflatten(1, (-1, 8))[:, :, _PLACE].flatten(1)
