"""The tables of layers in the formats that serving engines run."""

import itertools
import math
import statistics

from gpu.report import (
    CEILING,
    SERVING,
    best_peer,
    clocks_table,
    grid,
    is_ours,
    names,
    number,
    speed,
    step_rows,
    title,
)

FEW_ROWS = 64
STEPS_TO = 256  # rows: beyond, the time of every kernel grows with them
ABOUT = {
    "w8a8": "X in 16 bits, which all but cuBLAS quantize in the time, a scale for each row; W with one for each channel. vLLM: "
    "`dynamic_scaled_int8_quant`, then `cutlass_scaled_mm`.",
    "w8a8-product": "The product alone. torch fp8: both operands in fp8, a scale for each row of both, bf16 out. `_int_mm`: "
    "bare s32 sums, more than 16 rows.",
    "w8a16": "X and the product in 16 bits.",
    "w4a8": "As W8A8. Marlin: `dynamic_scaled_int8_quant` and its scales times a constant first.",
    "w4a8-product": "The product alone.",
    "w4a16": "X and the product in 16 bits; tinygemm: in bf16.",
}


def tables(serving):
    found = [format_table(serving, part) for part in SERVING if any(s.get(part) for s in serving)]
    return "\n".join([*found, summary(serving), steps(serving), checks(serving), skipped(serving), clocks(serving)])


def with_part(serving, part):
    return [s for s in serving if s.get(part)]


def format_table(serving, part):
    shapes = with_part(serving, part)
    columns, rows = names(shapes, part), []
    for s in shapes:
        best, faster = best_peer(s, part)
        cells = [speed(s, s[part][name]["us"]) if name in s[part] else "-" for name in columns]
        rows.append([title(s), *cells, best or "-", number(faster)])
    header = ["M x K x N", *columns, "best peer", "Octile is faster by"]
    return f"## {SERVING[part]}\n\n{ABOUT[part]}\n\n{grid(header, rows)}"


def ratios(serving, part, rows=math.inf):
    """[(how many times as fast as the best peer, where)] up to so many rows."""
    found = [(best_peer(s, part)[1], title(s)) for s in with_part(serving, part) if s["m"] <= rows]
    return [pair for pair in found if pair[0] is not None]


def summary(serving):
    lines = []
    for part in SERVING:
        cells = []
        for rows in (math.inf, FEW_ROWS):
            found = ratios(serving, part, rows)
            mean = math.exp(statistics.fmean(math.log(value) for value, _ in found)) if found else None
            cells += [number(mean), f"{min(found)[0]:.2f} at {min(found)[1]}" if found else "-"]
        if cells[0] != "-":
            lines.append([SERVING[part], *cells])
    few = f"M <= {FEW_ROWS}"
    header = ["Octile to the best peer", "geometric mean", "least", f"{few}: geometric mean", f"{few}: least"]
    return f"## Beside the best peer of each shape\n\n{grid(header, lines)}"


def sweeps(serving, part):
    """Of each layer what report.step_rows takes."""
    found = []
    layers = dict.fromkeys((s["k"], s["n"]) for s in with_part(serving, part))
    for k, n in layers:
        shapes = sorted((s for s in with_part(serving, part) if (s["k"], s["n"]) == (k, n)), key=lambda s: s["m"])

        def curve(name, field):
            return [s[part].get(name, {}).get(field) for s in shapes]

        sizes, contenders = [s["m"] for s in shapes], names(shapes, part)
        fields = {field: {name: curve(name, key) for name in contenders} for field, key in FIELDS.items()}
        found.append({"k": k, "n": n, "m": sizes, **fields})
    return found


FIELDS = {"curves": "us", "settings": "setting", "checks": "check"}


def steps(serving):
    """The largest step of ours."""
    few = [s for s in serving if s["m"] <= STEPS_TO]
    rows = []
    for part in SERVING:
        for sweep in sweeps(few, part):
            ours = {name: curve for name, curve in sweep["curves"].items() if is_ours(name)}
            rows += [[SERVING[part], *row] for row in step_rows([{**sweep, "curves": ours}])]
    header = ["format", "K x N", "us at M", "largest step between neighbours", "there"]
    return f"## From one number of rows to the next, up to {STEPS_TO}\n\n{grid(header, rows)}"


def spans(sizes, values):
    """["value (M = 1 to 16)", ...] of equal neighbours."""
    pairs = [(m, value) for m, value in zip(sizes, values) if value is not None]
    found = []
    for value, group in itertools.groupby(pairs, key=lambda pair: pair[1]):
        rows = [m for m, _ in group]
        found.append(f"{value} (M = {rows[0]}{f' to {rows[-1]}' if len(rows) > 1 else ''})".strip())
    return found


def checks(serving):
    """What ran, and whether it was right."""
    lines = []
    for part in SERVING:
        for s in sweeps(serving, part):
            for name in s["curves"]:
                if name != CEILING:
                    found = sorted(set(filter(None, s["checks"][name])))
                    settings = [text for text in s["settings"][name] if text]
                    ran = ", ".join(spans(s["m"], s["settings"][name])) if settings else ""
                    told = "; ".join(filter(None, [ran, " or ".join(found)]))
                    lines.append(f"- {s['k']} x {s['n']}, {SERVING[part]}, {name}: {told}")
    return "## What ran, and whether it was right\n\n" + "\n".join(lines) + "\n"


def skipped(serving):
    """The reasons, each with the number of shapes."""
    found = {}
    for s in serving:
        for name, reason in s["skipped"].items():
            found.setdefault((name, reason), []).append(title(s))
    lines = [f"- skipped: {name}: {reason} ({'; '.join(some(at))})" for (name, reason), at in found.items()]
    return "\n".join(lines) + "\n" if lines else ""


def some(shapes):
    return shapes if len(shapes) <= 2 else [shapes[0], f"and {len(shapes) - 1} more"]


def clocks(serving):
    """Of each layer."""
    lines = []
    for (k, n), group in itertools.groupby(serving, key=lambda s: (s["k"], s["n"])):
        group = list(group)
        found = {}
        for s in group:
            for name, (low, high) in (s.get("clocks") or {}).items():
                span = found.setdefault(name, [low, high])
                span[:] = min(span[0], low), max(span[1], high)
        sizes = sorted({s["m"] for s in group})
        lines.append({"m": " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))), "k": k, "n": n, "clocks": found})
    return clocks_table(lines)
