"""Decoders of Transformers whose norms and activations leave as int8.

fuse_(model)   joins layers that read the same input, and puts octile.RMSNorm and SwiGLU before W8A8Linear layers
"""

import functools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from .inference import W8A8Linear
from .joined import join_
from .quantized_input import rms_norm, swiglu

# Whose decoder layers have Llama's modules and forward. Of each norm, what reads it.
MODELS = ("llama", "mistral", "qwen2", "qwen3")
_READERS = {
    "input_layernorm": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "post_attention_layernorm": ("mlp", ("gate_proj", "up_proj")),
}


class Norm(nn.Module):
    """An RMSNorm of Transformers, with the same parameter, in front of layers that take a QuantizedInput."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self.train(norm.training)

    def forward(self, x):
        return rms_norm(x, self.weight, self.variance_epsilon, backward="16bit")

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class _Mlp:
    """The forward of an MLP whose product of gate and up leaves as int8."""

    def forward(self, x):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), backward="16bit"))


@functools.cache
def _fused_kind(kind):
    return type(kind.__name__, (_Mlp, kind), {"__module__": kind.__module__})


def _is_norm(norm):
    """Whether it computes x / sqrt(mean(x^2) + variance_epsilon) * weight."""
    if not hasattr(norm, "variance_epsilon") or [*norm._parameters] != ["weight"]:
        return False
    with torch.no_grad():
        x = torch.randn(4, *norm.weight.shape, device=norm.weight.device)
        expected = F.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.variance_epsilon)
        return norm.weight.is_meta or torch.allclose(norm(x).float(), expected, rtol=1e-2, atol=1e-2)


def _take_int8(module, names):
    layers = [getattr(module, name, None) for name in names]
    return all(
        type(layer) is W8A8Linear and layer._parallel is None and layer.packed_weight is None for layer in layers
    )


def fuse_(model):
    """Makes decoding with W8A8Linear layers faster, in place; returns the names of modules that were changed.

    join_() of all, and then in Llama, Mistral, Qwen2 and Qwen3 each RMSNorm in front of W8A8Linear layers alone, and
    SiLU(gate) * up in front of another, leave as int8. state_dict and checkpoints stay. A norm rounds once where
    Transformers' own rounds twice, so that logits differ in their last bits.
    """
    done = join_(model)
    if getattr(getattr(model, "config", None), "model_type", None) not in MODELS:
        return done
    for prefix, decoder in model.named_modules():
        if not all(hasattr(decoder, name) for name in (*_READERS, "self_attn", "mlp")):
            continue
        for name, (reader, names) in _READERS.items():
            norm = getattr(decoder, name)
            if _take_int8(getattr(decoder, reader), names) and _is_norm(norm):
                setattr(decoder, name, Norm(norm))
                done.append(f"{prefix}.{name}")
        mlp = decoder.mlp
        if type(getattr(mlp, "act_fn", None)) in (nn.SiLU, _silu()) and _take_int8(mlp, ("down_proj",)):
            mlp.__class__ = _fused_kind(type(mlp))
            done.append(f"{prefix}.mlp")
    return done


def _silu():
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])
