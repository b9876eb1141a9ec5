#!/usr/bin/env python3
"""What one layer costs: the host's time of a call, a graph beside the bare kernels, and forward with backward over M.

    python3 bench/torch/layers.py [--json FILE] [--quick]

On a GPU as on a CPU. Host time is that of a call which does not wait for the GPU; where the GPU is the slower of the two,
calls are few enough that its queue does not fill.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "python"), str(ROOT / "bench" / "peers")]
import octile  # noqa: E402
from octile import _c  # noqa: E402

sys.modules["octile_c"] = _c  # the same structures for bench/peers/octile_torch.py, which would load its own
import octile_torch  # noqa: E402
from gpu.shape import Shape  # noqa: E402

REPEATS = 15
CALLS = 100  # in a row: fewer launches than a GPU's queue holds
GRAPH_CALLS = 20
TARGET_US, TARGET_SHARE = 12.0, 1.05


class Device:
    def __init__(self, name: str):
        self.name = name
        self.gpu = name == "cuda"

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def host(self, call, calls: int = CALLS) -> float:
        """Microseconds of the host for one call: the median of several rows of calls."""
        for _ in range(20):
            call()
        rows = []
        for _ in range(REPEATS):
            self.wait()
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            rows.append((time.perf_counter() - begun) / calls)
        self.wait()
        return 1e6 * statistics.median(rows)

    def work(self, call, repeats: int = 20) -> float:
        """Microseconds from the first kernel of a call to the last; on a CPU, of the call."""
        times = []
        for i in range(3 + repeats):
            if self.gpu:
                torch.cuda._sleep(2_000_000)  # so that the host is ahead
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                end.synchronize()
                took = 1e-3 * start.elapsed_time(end)
            else:
                begun = time.perf_counter()
                call()
                took = time.perf_counter() - begun
            if i >= 3:
                times.append(took)
        return 1e6 * statistics.median(times)

    def graph(self, call) -> float:
        """Microseconds of a call within a graph of many."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(GRAPH_CALLS):
                kept = call()
        del kept
        return self.work(graph.replay) / GRAPH_CALLS


def layers(size: int, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Linear(size, size, dtype=dtype, device=device)
    trained_in_out = octile.QuantizedLinear(size, size, dtype=dtype, device=device)
    served = nn.Sequential(nn.Linear(size, size, dtype=dtype, device=device))
    octile.quantize_(served, octile.W8A8Dynamic())
    made = {"nn.Linear": plain}
    for backward in ("16bit", "int8", "int8-whole"):
        model = nn.Sequential(nn.Linear(size, size, dtype=dtype, device=device))
        octile.quantize_(model, octile.Int8Training(backward=backward))
        made[f"octile.Linear, {backward}"] = model[0]
    return made | {"octile.QuantizedLinear": trained_in_out, "octile.W8A8Linear": served[0]}


def host_times(d: Device, made: dict[str, nn.Module], m: int, size: int, dtype: torch.dtype) -> list[dict]:
    rows = []
    x = torch.randn(m, size, dtype=dtype, device=d.name)
    with_gradient = x.clone().requires_grad_()
    for name, layer in made.items():
        row, kept = {"layer": name, "m": m, "size": size}, cached(layer)
        with torch.no_grad():
            row["no_grad_us"] = d.host(lambda: layer(x))
        if any(p.requires_grad for p in layer.parameters()):
            row["grad_us"] = d.host(lambda: layer(with_gradient))
        if kept:
            kept.remove()
        rows.append(row)
    return rows


def graphs(d: Device, made: dict[str, nn.Module], m: int, size: int, dtype: torch.dtype) -> list[dict]:
    """Layers in a graph, beside the plans they should consist of, called through the C interface in the same way."""
    rows = []
    library = octile._plans.library()
    x = torch.randn(m, size, dtype=dtype, device=d.name)
    w = torch.randn(size, size, dtype=dtype, device=d.name)
    bias = torch.randn(size, dtype=dtype, device=d.name)
    wq, _, w_scale = torch.ops.octile.quantize(w, _c.PER_ROW, _c.ROW_MAJOR)

    def bare(**fields):
        def call():
            # As in a layer the output and the workspace are the allocator's.
            y = torch.empty(m, size, dtype=dtype, device=d.name)
            tensors = {"x": x, "weight": wq, "weight_scale": w_scale, "bias": bias, "y": y}
            run = octile_torch.linear(library, Shape(m, size, size), tensors, **fields)
            run()
            return run, y

        return call

    kernels = bare(activation=_c.DYNAMIC_PER_TOKEN)
    sku = kernels()[0].plan.sku
    with torch.no_grad():
        bare_us = d.graph(kernels)
        rows.append({"layer": f"the plan alone: {sku}", "m": m, "size": size, "graph_us": bare_us})
        for name, layer in made.items():
            kept = cached(layer)
            us = d.graph(lambda layer=layer: layer(x))
            rows.append({"layer": name, "m": m, "size": size, "graph_us": us, "to_plan": us / bare_us})
            if kept:
                kept.remove()
    return rows


def cached(layer: nn.Module):
    """Lets a layer keep its quantized weight; what it returns ends that."""
    return octile.cache_weights_(layer) if isinstance(layer, octile.Linear | octile.QuantizedLinear) else None


def steps(d: Device, made: dict[str, nn.Module], sizes: list[int], size: int, dtype: torch.dtype) -> list[dict]:
    """Forward and backward, the weight quantized in each, and not (cache_weights_)."""
    rows = []
    for m in sizes:
        x = torch.randn(m, size, dtype=dtype, device=d.name).requires_grad_()
        dy = torch.randn(m, size, dtype=dtype, device=d.name)
        for name, layer in made.items():
            parameters = [p for p in layer.parameters() if p.requires_grad]
            if not parameters:
                continue

            def micro_batch(layer=layer):
                layer(x).backward(dy)
                x.grad = None

            def step(layer=layer, parameters=parameters):
                micro_batch(layer)
                for p in parameters:
                    p.grad = None

            us, kept = d.work(step), cached(layer)
            row = {"layer": name, "m": m, "size": size, "step_us": us, "kept_us": d.work(micro_batch)}
            rows.append(row | {"tera": 6 * m * size * size / us * 1e-6})
            if kept:
                kept.remove()
    return rows


def told(value: float | None, form: str = ".1f") -> str:
    return "" if value is None else format(value, form)


def grid(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(document: dict) -> str:
    parts = [f"{document['device']}, torch {document['torch']}, binding {document['binding']}."]
    rows = [[r["layer"], told(r["no_grad_us"]), told(r.get("grad_us"))] for r in document["host"]]
    m, size = document["host"][0]["m"], document["host"][0]["size"]
    parts.append(
        f"Host microseconds of forward, M = {m}, {size} x {size} (the target is {TARGET_US:g}), weights cached:"
    )
    parts.append(grid(["layer", "no_grad", "with gradients"], rows))
    if document["graph"]:
        parts.append(f"Microseconds in a graph, no_grad (the target is {TARGET_SHARE:g} of the plan alone):")
        rows = [
            [f"{r['layer']}, M = {r['m']}", told(r["graph_us"]), told(r.get("to_plan"), ".3f")]
            for r in document["graph"]
        ]
        parts.append(grid(["layer", "us", "to the plan"], rows))
    base = {r["m"]: r["step_us"] for r in document["steps"] if r["layer"] == "nn.Linear"}
    rows = []
    for r in document["steps"]:
        row = [str(r["m"]), r["layer"], told(r["step_us"]), told(r["kept_us"]), told(r["tera"])]
        rows.append([*row, told(base[r["m"]] / r["step_us"], ".2f")])
    parts.append(
        "Forward and backward, microseconds: of one micro-batch per step, and of one of several, which adds to the "
        "gradients, after cache_weights_:"
    )
    parts.append(grid(["M", "layer", "us", "later", "T/s", "to nn.Linear"], rows))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=pathlib.Path, help="where to keep the numbers")
    p.add_argument("--quick", action="store_true", help="small layers, for trying this out")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    d = Device(a.device)
    size = 128 if a.quick else 4096 if d.gpu else 1024
    dtype = torch.bfloat16 if d.gpu else torch.float32
    sizes = [4, 16] if a.quick else [16, 256, 1024, 4096, 16384] if d.gpu else [16, 256]
    made = layers(size, dtype, a.device)
    document = {
        "device": torch.cuda.get_device_name() if d.gpu else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "binding": octile._ops.BINDING,
        "host": host_times(d, made, 16, size, dtype),
        "graph": [row for m in (16, 1024) for row in graphs(d, made, m, size, dtype)] if d.gpu else [],
        "steps": steps(d, made, sizes, size, dtype),
    }
    if a.json:
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps(document, indent=1) + "\n")
    print(tables(document))


if __name__ == "__main__":
    main()
