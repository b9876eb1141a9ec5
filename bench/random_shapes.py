#!/usr/bin/env python3
"""W8A8 products of random sizes on a GPU, beside torch's f16 and _int_mm and vLLM's CUTLASS kernel, in turns, in one run.

M is log-uniform from 1 to 4,096, K and N from 64 to 20,000, of any remainder. Microseconds, the median, L2 flushed; last
the ratio of the best peer's time to Octile's. _int_mm gives bare sums and takes multiples of 8 and more than 16 rows,
CUTLASS multiples of 16; both are left out elsewhere.

Exit status: 0, or 1 if a result of Octile's is wrong, or 2 if there is no GPU.
"""

import argparse
import math
import pathlib
import random
import statistics
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench" / "peers"))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--library", type=pathlib.Path, default=ROOT / "build/cuda/liboctile.so", metavar="FILE")
    binary = "vllm/_C_stable_libtorch.abi3.so of vLLM's wheel, for CUTLASS (default: that of an installed vllm)"
    add("--vllm", metavar="FILE", help=binary)
    add("--count", type=int, default=50)
    add("--seed", type=int, default=1)
    add("--rounds", type=int, default=9)
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        import torch

        torch.cuda.init()
    except (ImportError, RuntimeError, AssertionError) as error:  # no torch, or no GPU
        print(f"random_shapes.py: {error}", file=sys.stderr)
        return 2
    import octile_c
    import octile_torch
    from gpu import peer_vllm
    from gpu.clock import Clock
    from gpu.problem import Operands

    try:
        vllm, _ = peer_vllm.load(arguments.vllm)
    except Exception as error:  # a peer that does not load is named and left out
        print(f"without CUTLASS: {error}")
        vllm = None
    library, clock, draw = octile_c.Library(arguments.library), Clock(1), random.Random(arguments.seed)
    ratios, wrong = [], 0
    for _ in range(arguments.count):
        m, k, n = (
            round(math.exp(draw.uniform(math.log(a), math.log(b)))) for a, b in ((1, 4096), (64, 20000), (64, 20000))
        )
        o = Operands(types.SimpleNamespace(m=m, k=k, n=n), seed=draw.randrange(1 << 30))
        y = torch.full((m, n), float("nan"), dtype=torch.float16, device="cuda")
        tensors = {"x": o.xq, "weight": o.w, "weight_scale": o.w_scale, "x_scale": o.x_scale, "y": y}
        run = octile_torch.linear(library, o.shape, tensors)
        run()
        exact = (o.xq.double() @ o.w.double().T * o.x_scale.double()[:, None] * o.w_scale.double()).half()
        if not torch.allclose(y.float(), exact.float(), rtol=2e-3, atol=1e-5):
            print(f"  WRONG {m}x{k}x{n}")
            wrong += 1
        half, calls = o.float_weight(torch.float16), {"Octile": run}
        calls["torch f16"] = lambda o=o, half=half: torch.nn.functional.linear(o.x, half)
        if m > 16 and k % 8 == 0 and n % 8 == 0:
            calls["_int_mm"] = lambda o=o: torch._int_mm(o.xq, o.w.t())
        if vllm and k % 16 == 0 and n % 16 == 0:
            scales = o.x_scale[:, None].contiguous(), o.w_scale[None].contiguous()
            out = torch.empty_like(y)
            calls["CUTLASS"] = lambda o=o, s=scales, y=out: vllm.cutlass_scaled_mm(y, o.xq, o.w.t(), *s, None)
        times = [statistics.median(t) * 1e6 for t in clock.rounds(list(calls.values()), arguments.rounds)]
        ratio = min(times[1:]) / times[0]
        ratios.append((ratio, f"{m}x{k}x{n}"))
        parts = [f"{name} {t:.1f}" for name, t in zip(calls, times)]
        print(f"{m:5}x{k}x{n}: " + "; ".join(parts) + f"; {ratio:.2f}  {run.plan.sku}", flush=True)
    mean = math.exp(statistics.mean(math.log(r) for r, _ in ratios))
    print(f"geometric mean {mean:.2f}; below 0.9: " + ", ".join(f"{s} {r:.2f}" for r, s in sorted(ratios) if r < 0.9))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
