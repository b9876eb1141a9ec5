"""Ranks that work together must match: the same version, the same layers, the same options."""

import hashlib
import json

import torch
import torch.distributed as dist


def described(layer):
    """A layer in one line: its class, sizes, types and options."""
    options = {name: value for name, value in vars(layer).items() if name in ("_options", "format", "_product")}
    tensors = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
    kind = type(layer)
    name = kind.__name__ if kind.__module__.startswith("octile.") else f"{kind.__module__}.{kind.__name__}"
    return f"{name}{ ({n: (str(t.dtype), tuple(t.shape)) for n, t in tensors}) }{options}"


def check(facts, group, device):
    """Raises ValueError on every rank of the group where `facts`, texts by their names, are not the same on all.

    What is compared first is a hash, in one small collective.
    """
    from . import BINDING, __version__

    size = dist.get_world_size(group)
    if size == 1 or dist.get_backend(group) == "fake":
        return
    facts = {"octile": __version__, "torch": torch.__version__, "binding": BINDING} | facts
    digest = hashlib.sha256(json.dumps(list(facts.items())).encode()).digest()
    mine = torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64).to(device)
    every = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(every, mine, group=group)
    if all(torch.equal(one, every[0]) for one in every):
        return
    told = [None] * size
    dist.all_gather_object(told, facts, group=group)
    ranks = dist.get_process_group_ranks(group)
    for name in dict.fromkeys(name for one in told for name in one):
        for rank, one in zip(ranks, told, strict=True):
            if one.get(name) != told[0].get(name):
                here, there = (of.get(name, "missing") for of in (told[0], one))
                raise ValueError(
                    f"octile: {name} is {here} on rank {ranks[0]} and {there} on rank {rank}; "
                    "see docs/how-to/errors.md#many-gpus"
                )
    raise ValueError("octile: ranks name their layers in different orders")
