"""SmoothQuant for a model: factors per input channel, folded into the layer before where that is known to be possible.

    y = x W^T = (x / s) (W s)^T      s_k = max|x_k|^alpha / max|W_k|^(1 - alpha)

(x / s) costs nothing where the layer before, a norm or a linear layer, can be divided instead; elsewhere the quantizer
multiplies by 1 / s.
"""

import copy
import dataclasses
import itertools

import torch
from torch import nn

from . import _fallback

# By the class of a block: which layer's output goes into which linear layers and nowhere else, and may be divided per
# channel. Of `v` to `out` too: attention mixes tokens, never channels of one head.
_LLAMA = {
    "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.up_proj": ["mlp.down_proj"],
    "self_attn.v_proj": ["self_attn.o_proj"],
}
_BERT = {"attention.self.value": ["attention.output.dense"]}
_OPT = {
    "self_attn_layer_norm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attn.v_proj": ["self_attn.out_proj"],
    "final_layer_norm": ["fc1"],
}
_BLOCKS = {
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "BertLayer": _BERT,
    "RobertaLayer": _BERT,
    "XLMRobertaLayer": _BERT,
    "OPTDecoderLayer": _OPT,
}


@dataclasses.dataclass
class Smoothed:
    """What a static layer is made of: the weight times s in float32 or wider, and the inputs as it then meets them."""

    weight: torch.Tensor
    channel_max: torch.Tensor
    multiplier: torch.Tensor | None = None  # 1 / s, where the layer before could not be divided


def known_folds(model):
    """{name of a layer: names of the linear layers that alone read its output} of the blocks that are known."""
    folds = {}
    for name, block in model.named_modules():
        prefix = f"{name}." if name else ""
        for producer, consumers in _BLOCKS.get(type(block).__name__, {}).items():
            if _fits(block, producer, consumers):
                folds[prefix + producer] = [prefix + consumer for consumer in consumers]
        if type(block) is nn.Sequential:
            steps = list(block._modules.items())  # named_children() leaves out what comes again
            once = {id(m) for _, m in steps if sum(m is n for _, n in steps) == 1}
            for (first, one), (second, other) in itertools.pairwise(steps):
                if not {id(one), id(other)} <= once:
                    continue
                if type(one) in (nn.LayerNorm, nn.RMSNorm) and isinstance(other, nn.Linear):
                    folds[prefix + first] = [prefix + second]
    return folds


def _fits(block, producer, consumers):
    """With grouped queries v has fewer channels than o; before OPT's norms comes a residual in one of its sizes."""
    if type(block).__name__ == "OPTDecoderLayer" and producer.endswith("norm") and not block.do_layer_norm_before:
        return False
    try:
        before, after = block.get_submodule(producer), [block.get_submodule(name) for name in consumers]
    except AttributeError:
        return False
    width = getattr(before, "weight", None)
    return width is not None and all(isinstance(m, nn.Linear) and m.in_features == len(width) for m in after)


def checked_folds(model, folds, layers):
    """folds with modules for names, {producer: [names]}, of `layers` alone, by name. Raises ValueError if one is none."""
    seen, checked = set(), {}
    modules = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for producer, consumers in folds.items():
        before = modules.get(producer)
        if before is None:
            raise ValueError(f"octile: fold: the model has no {producer!r}")
        weight = getattr(before, "weight", None)
        if not isinstance(weight, nn.Parameter) or not 1 <= weight.dim() <= 2:
            raise ValueError(f"octile: fold: {producer}, a {type(before).__name__}, has no weight to divide")
        if weight.dim() == 2 and not isinstance(before, nn.Linear):
            raise ValueError(f"octile: fold: {producer} is a {type(before).__name__}; norms and torch.nn.Linear can be")
        if weight.dim() == 1 and not _is_proportional(before):
            raise ValueError(
                f"octile: fold: the output of {producer}, a {type(before).__name__}, is not in proportion to its weight"
            )
        if len(owners[id(weight)]) > 1:
            raise ValueError(f"octile: fold: {producer} shares its weight with {owners[id(weight)]}")
        for consumer in consumers:
            layer = layers.get(consumer)
            if layer is None:
                raise ValueError(f"octile: fold: {consumer!r} is no layer that is converted")
            if layer.in_features != len(weight):
                raise ValueError(
                    f"octile: fold: {consumer} has {layer.in_features} inputs, and {producer} {len(weight)} outputs"
                )
            if consumer in seen:
                raise ValueError(f"octile: fold: {consumer} is there twice")
            seen.add(consumer)
        if consumers:
            checked[before] = list(consumers)
    return checked


def _is_proportional(norm):
    """Whether a norm gives 0 with a weight and bias of 0: some add 1 to their weight."""
    if type(norm) in (nn.LayerNorm, nn.RMSNorm):
        return True
    with torch.no_grad():
        silent = copy.deepcopy(norm)
        for parameter in silent.parameters():
            parameter.zero_()
        x = torch.arange(1, len(norm.weight) + 1, device=norm.weight.device, dtype=norm.weight.dtype)
        return not silent(x.reshape(1, 1, -1)).any()


def factors(channel_max, weights, alpha):
    """s and 1 / s (K), float32, on the CPU, for all layers that read an input together. weights: (N, K) each."""
    largest = torch.stack([w.abs().amax(0).float().cpu() for w in weights]).amax(0)
    s, multiplier = torch.empty_like(largest), torch.empty_like(largest)
    _fallback.library().smoothing_factors(
        alpha=alpha,
        input_channel_max=_fallback._view(channel_max),
        weight_channel_max=_fallback._view(largest),
        factors=_fallback._view(s),
        multiplier=_fallback._view(multiplier),
    )
    return s, multiplier


def divided(before, s):
    """The parameters of a norm or a linear layer with its output divided by s: [(parameter, new values)]."""
    new = []
    for parameter in (before.weight, getattr(before, "bias", None)):
        if parameter is not None:
            by = s.to(parameter.device, torch.float64).reshape(-1, *(1,) * (parameter.dim() - 1))
            new.append((parameter, (parameter.detach().double() / by).to(parameter.dtype)))
    return new


def best_alpha(statistics, channel_max, weights):
    """The alpha of the least error of the layers' output, over sample rows or by the second moments."""
    w = torch.cat([w.float().cpu() for w in weights])
    description = {"n": w.shape[0], "k": w.shape[1], "threads": torch.get_num_threads()}
    fields = {"weight": _fallback._view(w), "input_channel_max": _fallback._view(channel_max)}
    if statistics.samples is not None:
        x = statistics.samples.float().cpu()
        return _fallback.library().search_smoothing(description, x=_fallback._view(x), **fields).alpha
    moments = statistics.second_moments.cpu()
    fields |= {"second_moments": _fallback._view(moments), "rows": statistics.rows}
    return _fallback.library().search_smoothing(description, **fields).alpha


def smooth_(model, layers, config):
    """Divides the layers before where config.fold says so; returns {name: Smoothed} of `layers`, which stay as they are.

    Nothing is changed if it raises, which is ValueError for a fold that cannot be and for a search without samples.
    """
    known = config.calibration
    if config.smoothing is None:
        return {name: Smoothed(_wide(m.weight), known[name].channel_max) for name, m in layers.items()}
    folds = {}
    if config.fold == "auto":
        # What reads the producer's output has to be converted, all of it.
        folds = {p: c for p, c in known_folds(model).items() if all(name in layers for name in c)}
    elif config.fold:
        folds = config.fold
    groups = [(before, names) for before, names in checked_folds(model, folds, layers).items()]
    folded = {name for _, names in groups for name in names}
    groups += [(None, [name]) for name in layers if name not in folded]

    done, changes = {}, []
    producers = {id(before): name for name, before in layers.items()}
    weights = {name: _wide(m.weight) for name, m in layers.items()}
    # A layer may be a consumer and a producer: its columns are multiplied by one s, its rows divided by another.
    for before, names in groups:
        s, multiplier = _factors_of(known, names, [weights[name] for name in names], config.smoothing)
        for name in names:
            weights[name] *= s.to(weights[name].device)
            largest = known[name].channel_max.cpu() * multiplier
            done[name] = Smoothed(None, largest, multiplier if before is None else None)
        if before is not None:
            changes += divided(before, s)
            if id(before) in producers:
                weights[producers[id(before)]] /= s.to(weights[producers[id(before)]].device).reshape(-1, 1)
    for parameter, new in changes:
        if not new.isfinite().all():
            raise ValueError(f"octile: fold: {parameter.dtype} cannot hold a layer before, divided; use fold=None")
    with torch.no_grad():
        for parameter, new in changes:
            parameter.copy_(new)
    for name, smoothed in done.items():
        smoothed.weight = weights[name]
    return done


def _wide(weight):
    return weight.detach().to(torch.float64 if weight.dtype is torch.float64 else torch.float32, copy=True)


def _factors_of(calibration, names, weights, smoothing):
    channel_max = torch.stack([calibration[name].channel_max.cpu() for name in names]).amax(0)
    if smoothing == "search":
        statistics = calibration[names[0]]
        if statistics.samples is None and statistics.second_moments is None:
            raise ValueError(
                f'octile: smoothing="search" needs sample rows or second moments, and {names[0]} has neither: '
                "calibrate(samples=...)"
            )
        smoothing = best_alpha(statistics, channel_max, weights)
    return factors(channel_max, weights, smoothing)
