"""SmoothQuant for a model: factors per input channel, folded into the layer before where that is known to be possible.

    y = x W^T = (x / s) (W s)^T      s_k = max|x_k|^alpha / max|W_k|^(1 - alpha)

(x / s) costs nothing where the layer before, a norm or a linear layer, can be divided instead; elsewhere the quantizer
multiplies by 1 / s.
"""

import collections
import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterable

import torch
from torch import nn

from . import _plans, _reader
from .linears import as_linear


@functools.cache
def _folds():
    """By the class of a block: which layer's output goes into which linear layers and nowhere else, and may be divided."""
    return {block: each["folds"] for each in _reader.folds() for block in each["blocks"]}


@dataclasses.dataclass
class Smoothed:
    """What a static layer is made of: the weight times s in float32 or wider, and the inputs as it then meets them."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    channel_max: torch.Tensor
    multiplier: torch.Tensor | None = None  # 1 / s, where the layer before could not be divided
    unsmoothed: str = ""  # why it is not smoothed, though it was to be


def known_folds(model):
    """{name of a layer: names of the linear layers that alone read its output} of the blocks that are known.

    Layers that stand in several places, or share a weight, are left out: who else reads them is not known.
    """
    places = collections.Counter()
    for module in model.modules():
        places.update(id(held) for held in (*module._modules.values(), *module._parameters.values()))

    def alone(layer):
        return max(places[id(layer)], places[id(layer.weight)]) == 1

    folds = {}
    for name, block in model.named_modules():
        prefix, found = f"{name}." if name else "", {}
        for fold in _folds().get(type(block).__name__, ()):
            if _fits(block, fold):
                found[fold["before"]] = fold["layers"]
        if type(block) is nn.Sequential:
            for (first, one), (second, other) in itertools.pairwise(block._modules.items()):
                if type(one) in (nn.LayerNorm, nn.RMSNorm) and one.weight is not None and isinstance(other, nn.Linear):
                    found[first] = [second]
        for producer, consumers in found.items():
            if all(alone(block.get_submodule(each)) for each in (producer, *consumers)):
                folds[prefix + producer] = [prefix + consumer for consumer in consumers]
    return folds


def _fits(block, fold):
    """With grouped queries v has fewer channels than o; before OPT's norms comes a residual in one of its sizes."""
    if fold["needs_norm_before"] and not getattr(block, "do_layer_norm_before", True):
        return False
    try:
        before, after = block.get_submodule(fold["before"]), [block.get_submodule(name) for name in fold["layers"]]
    except AttributeError:
        return False
    width = getattr(before, "weight", None)
    return width is not None and all(isinstance(m, nn.Linear) and m.in_features == len(width) for m in after)


def checked_folds(model, folds, layers):
    """folds with modules for names, {producer: [names]}, of `layers` alone, by name. Raises ValueError if one is none.

    A module may have several names: each of them means it, and `layers` has one of them.
    """
    seen, checked = set(), {}
    modules = dict(model.named_modules(remove_duplicate=False))
    name_of = {id(layer): name for name, layer in layers.items()}
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for producer, consumers in folds.items():
        if isinstance(consumers, str) or not isinstance(consumers, Iterable):
            raise ValueError(f"octile: fold: {producer!r} has {consumers!r}, expected a list of names")
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
                f"octile: fold: the output of {producer}, a {type(before).__name__}, is not proportional to its weight"
            )
        if len(owners[id(weight)]) > 1:
            raise ValueError(f"octile: fold: {producer} shares its weight with {owners[id(weight)]}")
        for consumer in consumers:
            name = name_of.get(id(modules.get(consumer)))
            if name is None:
                raise ValueError(f"octile: fold: {consumer!r} is not a layer that is converted")
            layer = as_linear(layers[name])
            if layer.in_features != len(weight):
                raise ValueError(
                    f"octile: fold: {consumer} has {layer.in_features} inputs, and {producer} {len(weight)} outputs"
                )
            if name in seen:
                raise ValueError(f"octile: fold: {name} is listed twice")
            seen.add(name)
            checked.setdefault(before, []).append(name)
    for producer in folds:
        reached = [modules[producer]]  # a consumer has one producer, so a way from it ends or returns
        for module in reached:
            reached += [layers[name] for name in checked.get(module, []) if layers[name] not in reached]
            if any(layers[name] is modules[producer] for name in checked.get(module, [])):
                raise ValueError(f"octile: fold: the output of {producer} feeds back into it")
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
    _plans.library().smoothing_factors(
        alpha=alpha,
        input_channel_max=_plans.view(channel_max),
        weight_channel_max=_plans.view(largest),
        factors=_plans.view(s),
        multiplier=_plans.view(multiplier),
    )
    return s, multiplier


def divided(parameter, s):
    """A weight or a bias with its rows divided by s, in its type, and ValueError for what that cannot hold."""
    old = parameter.detach()
    new = (old.double() / s.to(old.device, torch.float64).reshape(-1, *(1,) * (old.dim() - 1))).to(old.dtype)
    _check_held(new, old.dtype)
    return new


def _check_held(values, dtype):
    if not values.isfinite().all():
        raise ValueError(f"octile: fold: {dtype} cannot hold the divided weights of a layer before; use fold=None")


def best_alpha(statistics, channel_max, weights):
    """The alpha with the smallest error of the layers' output on unseen rows, estimated from sample rows or second
    moments and from how far unseen rows exceed the maxima. None: not smoothing is as good."""
    w = torch.cat([w.float().cpu() for w in weights])
    description = {"n": w.shape[0], "k": w.shape[1], "threads": torch.get_num_threads()}
    description["calibration_rows"] = statistics.rows
    tensors = {"weight": w, "input_channel_max": channel_max, "input_excess": statistics.excess}
    rows = {}
    if statistics.samples is not None:
        tensors["x"] = statistics.samples.float().cpu()
    else:
        tensors["second_moments"], rows = statistics.second_moments.cpu(), {"rows": statistics.rows}
    fields = {name: None if t is None else _plans.view(t) for name, t in tensors.items()}
    found = _plans.library().search_smoothing(description, **fields, **rows)
    return found.alpha if found.smooth else None


def smooth(model, layers, config):
    """{name: Smoothed} of `layers`, and [(parameter, new values)] of the other layers before, divided as config.fold says.

    Changes nothing. Raises ValueError for a fold that cannot be and for a search without samples.
    """
    known = config.calibration
    linears = {name: as_linear(module) for name, module in layers.items()}
    done = {name: Smoothed(_wide(m.weight), m.bias, known[name].channel_max) for name, m in linears.items()}
    if config.smoothing is None:
        return done, []
    known.warn_of_few_rows(layers)
    folds = {}
    if config.fold == "auto":
        # What reads the producer's output has to be converted, all of it.
        folds = {p: c for p, c in known_folds(model).items() if all(name in layers for name in c)}
    elif config.fold:
        folds = config.fold
    groups = [(before, names) for before, names in checked_folds(model, folds, layers).items()]
    folded = {name for _, names in groups for name in names}
    if config.multipliers:
        groups += [(None, [name]) for name in layers if name not in folded]
    for name, own in done.items():
        wanted = config.multipliers or name in folded
        own.unsmoothed = "no alpha is better than no smoothing" if wanted else "no layer before it takes the factors"

    changes = []
    producers = {id(before): name for name, before in layers.items()}
    # A layer may be a consumer and a producer: its columns are multiplied by one s, its rows divided by another.
    for before, names in groups:
        s, multiplier = _factors_of(known, names, [done[name].weight for name in names], config.smoothing)
        if s is None:
            continue
        if id(before) in producers:
            own = done[producers[id(before)]]
            own.weight, own.bias = divided(own.weight, s), None if own.bias is None else divided(own.bias, s)
        elif before is not None:
            new = divided(before.weight, s)
            changes.append((before.weight, new))
            if new.dim() == 1:
                # It was rounded. What it has really been divided by is what the columns are multiplied by, so that the
                # model computes what it did.
                old = before.weight.detach().double()
                s = torch.where(old == 0, s.to(old), old / new.double()).cpu()
                _check_held(s, new.dtype)  # infinite where all of a value was lost
                multiplier = (1 / s).float()
            if getattr(before, "bias", None) is not None:
                changes.append((before.bias, divided(before.bias, s)))
        for name in names:
            own = done[name]
            own.weight *= s.to(own.weight)
            own.channel_max = own.channel_max.cpu() * multiplier
            own.multiplier, own.unsmoothed = (multiplier if before is None else None), ""
    return done, changes


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
        if smoothing is None:
            return None, None
    return factors(channel_max, weights, smoothing)
