"""Attention of one query token per sequence over a cache: torch.ops.octile.attend_one_query, and which tensors it takes.

attend(query, key, value, mask, scale)

query: (batch, heads, 1, size); key and value: (batch, heads / groups, positions, size), contiguous along size, which is
256 at most; f32, bf16 or f16, on a GPU bf16 or f16. mask: bool, (batch or 1, 1, 1, positions), True where a position is
visible, or None. scale: 1 / sqrt(size) unless given. Returns (batch, 1, heads, size); zeros for a sequence with no
visible position.

Keys and values are read once for all query heads that share them. Sums are f32. A sequence has the same bits in any
batch with a cache of that size and the same padding. On a CPU it is octile_attend_one_query (octile.h), on a GPU
one_query_triton.py.
"""

import torch

from . import _ops  # noqa: F401: defines the operator

try:
    from . import one_query_triton
except ImportError:  # Triton comes with torch for GPUs alone
    one_query_triton = None

attend = torch.ops.octile.attend_one_query.default  # without autograd
_CPU_TYPES, _GPU_TYPES = (torch.float32, torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16)
_MAX_SIZE = 256
_MAX_GROUP = 32  # query heads of a KV head, on a GPU


def runs_on(device):
    """Whether attend() is for this device: a CPU, or an NVIDIA GPU from Ampere on."""
    if device.type != "cuda":
        return device.type == "cpu"
    # get_device_properties is a constant to torch.compile.
    return (
        one_query_triton is not None and not torch.version.hip and torch.cuda.get_device_properties(device).major >= 8
    )


def takes(query, key, value, mask):
    """Whether attend() takes these tensors, and none of them wants a gradient."""
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return not differentiated and _valid(query, key, value, mask)


def _valid(query, key, value, mask):
    if query.dim() != 4 or key.dim() != 4:
        return False
    batch, heads, rows, size = query.shape
    kv_heads, positions = key.shape[1:3]
    return (
        runs_on(query.device)
        and query.dtype in (_GPU_TYPES if query.is_cuda else _CPU_TYPES)
        and query.dtype == key.dtype == value.dtype
        and rows == 1
        and 0 < size <= _MAX_SIZE
        and kv_heads > 0
        and heads % kv_heads == 0
        and (not query.is_cuda or heads // kv_heads <= _MAX_GROUP)
        and key.shape == value.shape == (batch, kv_heads, positions, size)
        and all(t.stride(-1) == 1 for t in (query, key, value))
        and (
            mask is None
            or (mask.dtype is torch.bool and mask.shape in ((batch, 1, 1, positions), (1, 1, 1, positions)))
        )
    )


if one_query_triton is not None:

    @torch.library.impl("octile::attend_one_query", "cuda")
    def _on_gpu(query, key, value, mask, scale):
        if not _valid(query, key, value, mask):
            given = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in (query, key, value, mask) if t is not None)
            raise RuntimeError(
                f"octile::attend_one_query: no kernel for {given}; octile/one_query.py says what it takes"
            )
        return one_query_triton.attend(query, key, value, mask, scale)
