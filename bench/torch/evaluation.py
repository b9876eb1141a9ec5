#!/usr/bin/env python3
"""Evaluation of octile.Linear in eager code, per call: what quantizing the weight in every forward costs.

    python3 bench/torch/evaluation.py [--before CHECKOUT] [--device cuda] [--threads N] [--rounds N] [--best] [--quick]

Columns: nn.Linear; octile.Linear of an older checkout's package (--before, built); octile.Linear; the same after
cache_weights_(). Each round measures each package once, in a process of its own. Medians over calls and rounds, or with
--best, for a machine that is busy, minima.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS, SIZES, DTYPES = (1, 16, 256, 1024), (1024, 4096), ("float32", "bfloat16")


def measure(device: str, threads: int, sizes: list[int], of_all) -> list[dict]:
    """Microseconds of a call of each kind of layer, with the package that Python finds."""
    import octile
    import torch

    torch.set_num_threads(threads)

    def microseconds(call) -> float:
        calls, times = 1, []
        if device == "cuda":  # many in a row, and one wait: as a model's layers run
            calls = 50
        until = time.perf_counter() + 0.4
        while len(times) < 5 or time.perf_counter() < until:
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) / calls)
        return 1e6 * of_all(times)

    rows = []
    for dtype in DTYPES:
        for size in sizes:
            plain = torch.nn.Linear(size, size, device=device, dtype=getattr(torch, dtype))
            layer, cached = octile.Linear.from_linear(plain), octile.Linear.from_linear(plain)
            octile.cache_weights_(cached)
            for m in ROWS:
                x = torch.randn(m, size, device=device, dtype=getattr(torch, dtype))
                with torch.no_grad():
                    made = {"nn.Linear": plain, "octile.Linear": layer, "cached": cached}
                    times = {name: microseconds(lambda one=one, x=x: one(x)) for name, one in made.items()}
                rows.append({"dtype": dtype, "size": size, "m": m, **times})
    return rows


def package(checkout: pathlib.Path, library: str, arguments: list[str]) -> list[dict]:
    environment = os.environ | {"PYTHONPATH": str(checkout / "python"), "OCTILE_LIBRARY": library}
    command = [sys.executable, __file__, "--child", *arguments]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--before", type=pathlib.Path, help="an older checkout; it uses the same library")
    p.add_argument("--library", default=str(ROOT / "build/release/liboctile.so"))
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--quick", action="store_true", help="the smaller layer alone")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--best", action="store_true", help="minima instead of medians")
    a = p.parse_args()
    of_all = min if a.best else statistics.median
    if a.child:
        print(json.dumps(measure(a.device, a.threads, SIZES[: 1 if a.quick else None], of_all)))
        return
    arguments = ["--device", a.device, "--threads", str(a.threads), *(["--quick"] if a.quick else [])]
    arguments += ["--best"] if a.best else []
    rounds = []
    for _ in range(a.rounds):
        before = package(a.before, a.library, arguments) if a.before else None
        rounds.append((before, package(ROOT, a.library, arguments)))
    print("| weight | K = N | M | nn.Linear | before | octile.Linear | cache_weights_ |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for i, row in enumerate(rounds[0][1]):
        times = [of_all(after[i][kind] for _, after in rounds) for kind in ("nn.Linear", "octile.Linear", "cached")]
        if a.before:
            times.insert(1, of_all(before[i]["octile.Linear"] for before, _ in rounds))
        told = [f"{t:.0f}" if t >= 100 else f"{t:.1f}" for t in times]
        told = told if a.before else [told[0], "", *told[1:]]
        print("| " + " | ".join([row["dtype"], str(row["size"]), str(row["m"]), *told]) + " |")


if __name__ == "__main__":
    main()
