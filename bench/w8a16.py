#!/usr/bin/env python3
"""Layers with 8-bit weights and 16-bit activations on a GPU, beside cuBLAS's f16 and vLLM's Marlin, in turns, in one run.

Microseconds, the median, L2 flushed. Each result of Octile's is compared with a product in f64.

Exit status: 0, or 1 if a result of Octile's is wrong, or 2 for a wrong command line or no GPU.
"""

import argparse
import pathlib
import statistics
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
BATCHES = "1,2,4,8,16,24,32,48,64,96,128,192,256,384,512,1024,4096"
BOUND = 6e-4
S8_GROUP = 3  # OCTILE_WEIGHT_S8_GROUP
# vLLM's number of the type: 8 bits, less 128.
MARLIN_TYPE = 1 << 50 | 8 << 8 | 128 << 17


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("layers", nargs="*", default=["4096x14336"], metavar="KxN", help="(default: 4096x14336)")
    add("--library", type=pathlib.Path, default=ROOT / "build/cuda/liboctile.so", metavar="FILE")
    add("--batches", default=BATCHES, metavar="M,...")
    add("--group", type=int, default=0, help="32, 64, 128, or 0 for a scale per channel (default %(default)s)")
    add("--kernels", default="", metavar="ROW,...", help="rows of the kernel table, beside what a plan chooses")
    add("--vllm", metavar="FILE", help="vllm/_C_stable_libtorch.abi3.so of vLLM's wheel, for Marlin")
    add("--rounds", type=int, default=21)
    return parser.parse_args()


def marlin_of(torch, vllm, q, scale, group):
    """Marlin's product of x by this weight."""
    torch.ops.load_library(vllm)
    ops, (n, k) = torch.ops._C, q.shape
    biased, words = (q.t().to(torch.int32) + 128).contiguous(), torch.zeros(k // 4, n, dtype=torch.int32, device="cuda")
    for i in range(4):
        words |= biased[i::4] << 8 * i
    weight = ops.gptq_marlin_repack(words, k, n, 8, False)
    # The order in which Marlin's threads read scales.
    if group:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    scales = scale.t().contiguous().half().reshape(-1, len(order))[:, order].reshape(-1, n).contiguous()
    space = torch.zeros(4 * torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int32, device="cuda")

    def run(x):
        m = x.shape[0]
        rest = (None, None, None, space, MARLIN_TYPE, m, n, k, False, True, False)
        return ops.marlin_gemm(x, None, weight, None, scales, *rest)

    return run


def main():
    arguments = parse_arguments()
    try:
        import torch

        torch.cuda.init()
    except (ImportError, RuntimeError, AssertionError) as error:  # no torch, or no GPU
        print(f"w8a16.py: {error}", file=sys.stderr)
        return 2
    import octile_c
    import octile_torch
    from gpu.clock import Clock

    library, clock, wrong, group = octile_c.Library(arguments.library), Clock(5), 0, arguments.group
    print(f"{torch.cuda.get_device_name()}, {f'groups of {group}' if group else 'a scale per channel'}, f16")
    for layer in arguments.layers:
        k, n = (int(size) for size in layer.split("x"))
        torch.manual_seed(1)
        groups = (torch.randn(n, k, device="cuda") * 0.02).view(n, -1, group or k)
        scale = (groups.abs().amax(2) / 127).contiguous()
        q = (groups / scale[..., None]).round().to(torch.int8)
        exact = (q.double() * scale[..., None].double()).view(n, k)
        q, half = q.view(n, k), exact.half()
        marlin = marlin_of(torch, arguments.vllm, q, scale, group) if arguments.vllm else None
        for m in (int(size) for size in arguments.batches.split(",")):
            x = torch.randn(m, k, device="cuda").half()
            reference, calls = x.double() @ exact.T, {}
            for kernel in ("", *filter(None, arguments.kernels.split(","))):
                y = torch.full((m, n), float("nan"), dtype=x.dtype, device="cuda")
                tensors = {"x": x, "weight": q, "weight_scale": scale if group else scale[:, 0].contiguous(), "y": y}
                fields = {"weight": S8_GROUP, "group": group} if group else {}
                fields |= {"activation": octile_c.NONE, "kernel": kernel.encode()}
                run = octile_torch.linear(library, types.SimpleNamespace(m=m, n=n, k=k), tensors, **fields)
                run()
                error = ((y.double() - reference).norm() / reference.norm()).item()
                if not error < BOUND:
                    print(f"  WRONG {run.plan.sku} at M {m}: {error:.2e}")
                    wrong += 1
                calls[run.plan.sku] = run
            if marlin:
                calls["Marlin"] = lambda x=x: marlin(x)
            calls["cuBLAS f16"] = lambda x=x: torch.nn.functional.linear(x, half)
            times = clock.rounds(list(calls.values()), arguments.rounds)
            parts = [f"{name} {statistics.median(t) * 1e6:.1f}" for name, t in zip(calls, times)]
            print(f"  {m} x {k} x {n}: " + "; ".join(parts), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
