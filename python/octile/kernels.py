"""Which kernels a layer's calls would use, from plans that are not run."""

import functools

import torch

from . import _c, _plans


@functools.lru_cache(maxsize=1024)
def _plan_text(what, kind, device_type, device_index, fields):
    """`what` ("sku" or "explain") of a plan that is not run."""
    device = _c.Device(_c.CPU if device_type == "cpu" else _c.CUDA, device_index)
    return getattr(_plans.library().plan(kind, device=device, **dict(fields)), what)


def plan_text(what, kind, device, **fields):
    index = 0
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    return _plan_text(what, kind, device.type, index, tuple(fields.items()))


def kernels(device, *plans):
    """The kernels of plans (label, fields), for extra_repr: "kernel=..."; "" where no plan can be asked."""
    if device.type not in ("cpu", "cuda"):
        return ""
    try:
        names = [(label, plan_text("sku", "linear", device, **fields)) for label, fields in plans]
    except RuntimeError as error:
        return f", kernel=none ({error})"
    if len({name for _, name in names}) == 1:
        return f", kernel={names[0][1]}"
    return ", kernel=" + ", ".join(f"{name} ({label})" for label, name in names)
