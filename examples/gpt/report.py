"""What the runs gave: JSON, tables and a chart."""

import json
import math
import os
import pathlib
import statistics
import sys

from .profiling import by_kind

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"))
from gpu.chart import MARGIN, WIDTH, Svg, ticks  # noqa: E402

BASELINE = "bf16"
NAMES = {
    "bf16": "bf16, nn.Linear",
    "octile-16bit": "Octile, 16-bit backward",
    "octile-mixed": "Octile, int8 dX, 16-bit dW",
    "octile-int8": "Octile, int8",
    "octile-int8-fused": "Octile, int8, fused activations",
    "octile-int8-fused-norms": "Octile, int8, fused norms",
    "octile-int8-128": "Octile, int8, blocks of 128",
    "octile-int8-512": "Octile, int8, blocks of 512",
    "octile-int8-whole": "Octile, int8, no blocks",
    "octile-int8-dw": "Octile, 16-bit dX, int8 dW",
    "octile-stochastic": "Octile, int8, stochastic",
}
COLORS = {
    "bf16": "#4e79a7",
    "octile-16bit": "#59a14f",
    "octile-mixed": "#edc948",
    "octile-int8": "#d62728",
    "octile-int8-fused": "#499894",
    "octile-int8-fused-norms": "#b07aa1",
    "octile-int8-128": "#e15759",
    "octile-int8-512": "#9c755f",
    "octile-int8-whole": "#f28e2b",
    "octile-int8-dw": "#76b7b2",
    "octile-stochastic": "#9467bd",
}
LAST = 0.05  # share of a run's steps whose mean is its training loss


def write(path: pathlib.Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def training_loss(run: dict) -> float | None:
    losses = run["losses"]
    count = max(1, round(LAST * len(losses)))
    return statistics.fmean(losses[-count:]) if losses else None


def validation_loss(run: dict) -> float | None:
    return run["validation"][-1][1] if run["validation"] else None


def modes(document: dict) -> list[str]:
    return list(dict.fromkeys(run["mode"] for run in document["runs"] if run["losses"]))


def of_mode(document: dict, mode: str) -> list[dict]:
    return [run for run in document["runs"] if run["mode"] == mode and run["losses"]]


def seconds_per_step(document: dict, mode: str) -> float:
    return statistics.median(s for run in of_mode(document, mode) for s in run["step_seconds"])


def peak_of(document: dict, mode: str) -> int:
    """The most bytes of GPU memory, 0 where no run told."""
    return max((run["peak"] or 0 for run in of_mode(document, mode)), default=0)


def mean(document: dict, mode: str, of) -> float | None:
    """Over the runs that went as far as the longest."""
    longest = max(len(run["losses"]) for run in document["runs"])
    values = [of(run) for run in of_mode(document, mode) if len(run["losses"]) == longest]
    return statistics.fmean(values) if values and None not in values else None


def differences(document: dict, mode: str, of) -> list[float]:
    """Of each seed that the baseline ran as long: by what share its loss is above the baseline's."""
    baseline = {run["seed"]: run for run in of_mode(document, BASELINE)}
    pairs = [(run, baseline[run["seed"]]) for run in of_mode(document, mode) if run["seed"] in baseline]
    pairs = [(of(a), of(b)) for a, b in pairs if len(a["losses"]) == len(b["losses"])]
    return [a / b - 1 for a, b in pairs if a is not None and b is not None]


def grid(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    line = lambda cells: "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths)) + " |"  # noqa: E731
    return "\n".join([line(header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])


def told_difference(values: list[float]) -> str:
    """The mean and its standard error."""
    if not values:
        return "-"
    error = f" ± {100 * statistics.stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):+.2f}{error} %"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(document: dict) -> str:
    rows = []
    tokens = document["settings"]["tokens"]
    there = modes(document)
    for mode in there:
        runs, seconds = of_mode(document, mode), seconds_per_step(document, mode)
        ratio = f"{seconds_per_step(document, BASELINE) / seconds:.2f}" if BASELINE in there else "-"
        peak = peak_of(document, mode)
        row = [NAMES[mode], f"{tokens / seconds:,.0f}", ratio, f"{1e3 * seconds:.1f}"]
        row.append(f"{peak / 2**30:.1f} GiB" if peak else "-")
        for of in (training_loss, validation_loss):
            row.append(number(mean(document, mode, of), ".4f"))
            row.append("" if mode == BASELINE else told_difference(differences(document, mode, of)))
        row.append(", ".join(f"{run['seed']}: {len(run['losses'])}" for run in runs))
        rows.append(row)
    header = ["linear layers", "tokens/s", "to bf16", "ms a step", "peak memory"]
    header += ["training loss", "to bf16", "validation loss", "to bf16", "seed: steps"]
    return grid(header, rows) if rows else "Nothing was measured."


def profile_table(document: dict) -> str:
    """Milliseconds of one step by kind of kernel, a column a mode."""
    profiles = {p["mode"]: p for p in document["profiles"] if p["kernels"]}
    if not profiles:
        return ""
    sums = {mode: by_kind(p["kernels"]) for mode, p in profiles.items()}
    kinds = sorted(
        {k for s in sums.values() for k in s}, key=lambda k: -max(s.get(k, (0, 0))[1] for s in sums.values())
    )
    tell = lambda s, k: f"{s[k][1] / 1e3:.2f} ({s[k][0]})" if k in s else ""  # noqa: E731
    rows = [[k, *(tell(s, k) for s in sums.values())] for k in kinds]
    rows.append(["all kernels", *(f"{sum(us for _, us in s.values()) / 1e3:.2f}" for s in sums.values())])
    rows.append(["the step", *(f"{1e3 * p['step_seconds']:.2f}" for p in profiles.values())])
    return grid(["ms (kernels)", *(NAMES[m] for m in profiles)], rows)


def heading(document: dict) -> str:
    f, s = document["facts"], document["settings"]
    master = {"master": "f32 parameters, bf16 autocast", "bf16": "bf16 parameters", "f32": "f32"}[s["precision"]]
    compiled = {"off": "eager", "model": "compiled", "blocks": "blocks compiled"}[s["compile"]]
    shared = {"fsdp": "FSDP2", "tp": "tensor parallelism", "2d": f"FSDP2 and, by {s.get('split')}, tensor parallelism"}
    shared = f", {shared[s['parallel']]} over {s['ranks']} processes" if s.get("parallel", "none") != "none" else ""
    if s["compile"] != "off" and s["compile_mode"] != "default":
        compiled += f" ({s['compile_mode']})"
    if s.get("graph"):
        compiled += ", in a CUDA graph"
    accumulated = f" x {s['accumulate']}" if s["accumulate"] > 1 else ""
    return (
        f"{s['architecture']}, {s['layers']} blocks of {s['width']}, {s['heads']} heads, {f['parameters'] / 1e6:,.0f} million parameters; "
        f"{s['batch']} x {s['length']}{accumulated} = {s['tokens']:,} tokens a step{shared}; {master}, {compiled}; "
        f"head {'quantized too' if s['quantize_head'] else 'in 16 bits'}{', q, k and v apart' if s.get('split_qkv') else ''}. {f['device']}, torch {f['torch']}."
    )


def text(document: dict) -> str:
    parts = [heading(document), f"Text: {document['facts']['text']}.", table(document)]
    profile = profile_table(document)
    if profile:
        parts.append(f"One step by kind of kernel, milliseconds (and how many kernels):\n\n{profile}")
    if document["failures"]:
        parts.append("Failed:\n" + "\n".join(f"- {f['mode']}: {f['error']}" for f in document["failures"]))
    if document["interrupted"]:
        parts.append("Interrupted: what was measured until then.")
    return "\n\n".join(parts) + "\n"


# ---- The chart ----


def smooth(values: list[float], over: int) -> list[tuple[float, float]]:
    """(step, mean of the `over` steps up to it), at most some 300 points."""
    over = max(1, min(over, len(values)))
    ends = range(over, len(values) + 1, max(1, len(values) // 300))
    return [(end, statistics.fmean(values[end - over : end])) for end in ends]


def mean_curve(runs: list[dict], over: int) -> list[tuple[float, float]]:
    length = min(len(run["losses"]) for run in runs)
    return smooth([statistics.fmean(run["losses"][i] for run in runs) for i in range(length)], over)


def legend(svg: Svg, shown: list[str]) -> None:
    x = MARGIN
    for mode in shown:
        svg.dot(x + 6, svg.height - 4, COLORS[mode], 5)
        svg.text(x + 16, svg.height, NAMES[mode])
        x += 34 + 7.4 * len(NAMES[mode])
    svg.height += 14


def panel(
    svg: Svg, title: str, curves: dict[str, list[tuple[float, float]]], low: float, high: float, tall: float
) -> None:
    left, right, top = MARGIN + 56, svg.width - MARGIN, svg.height + 16
    last = max(at for curve in curves.values() for at, _ in curve)
    x_of = lambda at: left + (right - left) * at / last  # noqa: E731
    y_of = lambda v: top + tall * (1 - (min(max(v, low), high) - low) / (high - low))  # noqa: E731
    svg.text(MARGIN, svg.height, title, weight="bold")
    step = ticks(high - low, 6)[1]
    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        svg.line(left, y_of(i * step), right, y_of(i * step), "#e4e4e4" if i else "#999")
        svg.text(left - 6, y_of(i * step) + 4, f"{i * step:.4g}", "end", color="#666")
    for tick in ticks(last, 8):
        svg.text(x_of(tick), top + tall + 16, f"{tick:g}", "end" if x_of(tick) > right - 10 else "middle", color="#666")
    for mode, curve in curves.items():
        svg.curve([(x_of(at), y_of(v)) for at, v in curve], COLORS[mode], 1.6)
    svg.height = top + tall + 46


def bars(svg: Svg, title: str, values: dict[str, float], tell) -> None:
    left, right, highest = MARGIN + 200, svg.width - MARGIN - 150, max(values.values())
    svg.text(MARGIN, svg.height, title, weight="bold")
    svg.height += 10
    for mode, value in values.items():
        y = svg.height + 11
        svg.text(left - 10, y + 4, NAMES[mode], "end")
        svg.line(left, y, left + (right - left) * value / highest, y, COLORS[mode], 14)
        svg.text(left + (right - left) * value / highest + 8, y + 4, tell(value))
        svg.height += 24
    svg.height += 26


def draw(document: dict) -> str:
    svg, there = Svg(WIDTH), modes(document)
    svg.height += 4
    s = document["settings"]
    svg.text(
        MARGIN,
        svg.height,
        f"GPT, {s['layers']} blocks of {s['width']}, on {document['facts']['device']}",
        weight="bold",
    )
    svg.height += 30
    speeds = {mode: s["tokens"] / seconds_per_step(document, mode) for mode in there}
    base = speeds.get(BASELINE)
    bars(svg, "Tokens per second", speeds, lambda v: f"{v:,.0f}" + (f" ({v / base:.2f})" if base else ""))
    peaks = {m: peak / 2**30 for m in there if (peak := peak_of(document, m))}
    if peaks:
        bars(svg, "Peak memory", peaks, lambda v: f"{v:.1f} GiB")
    legend(svg, there)
    svg.height += 16
    over = max(1, s["steps"] // 50)
    curves = {mode: mean_curve(of_mode(document, mode), over) for mode in there}
    low = min(v for c in curves.values() for _, v in c)
    high = max(c[min(len(c) - 1, len(c) // 10)][1] for c in curves.values())
    if high > low:
        panel(svg, f"Training loss, nats a byte, mean of {over} steps and of the seeds", curves, low, high, 300)
    apart = {}
    baseline = {run["seed"]: run for run in of_mode(document, BASELINE)}
    for mode in there:
        pairs = [(run, baseline[run["seed"]]) for run in of_mode(document, mode) if run["seed"] in baseline]
        if mode != BASELINE and pairs:
            ours, theirs = (mean_curve(list(runs), 2 * over) for runs in zip(*pairs))
            apart[mode] = [(at, 100 * (a / b - 1)) for (at, a), (_, b) in zip(ours, theirs)]
    apart = {m: c for m, c in apart.items() if c}
    if apart:
        reach = max(0.5, *(abs(v) for c in apart.values() for _, v in c[len(c) // 10 :]))
        panel(svg, "Per cent above bf16, seed by seed", apart, -reach, reach, 200)
    return svg.render()


def save(document: dict, folder: pathlib.Path) -> None:
    write(folder / "training.json", json.dumps(document, indent=1) + "\n")
    write(folder / "training.md", text(document))
    if modes(document):
        write(folder / "training.svg", draw(document))
