"""A plain read of the weight's bytes and its scales, in Triton: below it lies no kernel that has them in memory."""

import torch
import triton
import triton.language as tl
from gpu.contender import Contender, Peer
from gpu.report import CEILING

BLOCK = 8192


@triton.jit
def _read(words, sums, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(words + at, mask=at < count, other=0, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(value, 0))


class Read(Peer):
    def serving(self, p):
        w = p.weight

        def prepare():
            count = (w.n * w.k * w.bits // 8 + 2 * w.scale.numel()) // 4
            words = w.once(
                "words", lambda: torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device="cuda")
            )
            sums = torch.empty(triton.cdiv(count, BLOCK), dtype=torch.int32, device="cuda")
            return {"": lambda: _read[(len(sums),)](words, sums, count, BLOCK=BLOCK, num_warps=8)}

        return [Contender(CEILING, p.format, "read", prepare)]
