"""The table of a run, from its JSON: needs neither a GPU nor torch."""

import statistics

OURS = "Octile"
KEPT = "W kept"  # of a training step: W was quantized before
SMALL = 1e11  # operations: below this, times are shown, otherwise speeds
PARTS = {
    "product": "The product",
    "layer": "The whole layer",
}
BACKWARD = {
    "dx": "dX",
    "dw": "dW",
    "db": "dB",
    "pass": "The pass over dY",
    "backward": "The whole backward",
    "step": "The training step",
}
FORMATS = ("w8a8", "w8a16", "w4a8", "w4a16")
SERVING = {
    "w8a8": "W8A8",
    "w8a8-product": "W8A8, X given in 8 bits",
    "w8a16": "W8A16",
    "w4a8": "W4A8",
    "w4a8-product": "W4A8, X given in 8 bits",
    "w4a16": "W4A16",
}
CEILING = "plain read"  # of the weight's bytes: no peer
# Moved for an element of dY. The pass reads it twice in 16 bits, and writes it twice in 8.
BYTES = {"db": 2, "pass": 6}
PRODUCTS = {"backward": 2, "step": 3}  # of 2 M N K operations; else one
DATA = "int8 data: a normal times 30."
ABOUT = {
    "product": "X in 8 bits, scales per token and per output channel, bias, f16 out. Floats: X in 16 bits. `_int_mm` "
    "and cuBLASLt: bare s32 sums; Triton: one scale for X.",
    "layer": "From an f16 X, which the int8 layers quantize in the time: per token, Triton alone with one scale.",
}


def grid(header, rows):
    """A table in Markdown, its first column flush left."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def names(shapes, part):
    """Of the contenders in a part, ours last."""
    found = list(dict.fromkeys(name for s in shapes for name in s[part]))
    return sorted(found, key=is_ours)


def is_ours(name):
    return name.startswith(OURS)


def is_peer(name):
    return not is_ours(name) and name != CEILING


def operations(s):
    return 2 * s["m"] * s["n"] * s["k"]


def title(s):
    return f"{s['m']} x {s['k']} x {s['n']}"


def speed(s, microseconds, part="product"):
    """In the unit in which this shape is shown."""
    if part in BYTES:
        return f"{BYTES[part] * s['m'] * s['n'] / microseconds / 1e6:.2f} TB/s"
    if operations(s) < SMALL:
        return f"{microseconds:.1f} us"
    return f"{PRODUCTS.get(part, 1) * operations(s) / microseconds / 1e6:,.0f} T/s"


def best_peer(s, part):
    """(name, how many times as fast ours is: the median over the rounds), or (None, None)."""
    rows = s[part]
    theirs = [name for name in rows if is_peer(name)]
    if not theirs:
        return None, None
    best = min(theirs, key=lambda name: rows[name]["us"])
    return best, ratio(rows, best)


def ratio(rows, name, ours=OURS):
    if ours not in rows or name not in rows:
        return None
    pairs = zip(rows[name]["times"], rows[ours]["times"])
    return statistics.median(theirs / ours for theirs, ours in pairs)


def number(value):
    return "-" if value is None else f"{value:.2f}"


def verdict(s):
    """The target, and whether it is met."""
    target = s.get("target")
    if not target:
        return ""
    text = f"<= {target['us']:g} us" if "us" in target else f">= {target['tops']:,} T/s"
    if OURS not in s["product"]:
        return text
    ours = s["product"][OURS]["us"]
    met = ours <= target["us"] if "us" in target else operations(s) / ours / 1e6 >= target["tops"]
    return f"{text}: {'met' if met else 'NOT met'}"


def part_table(shapes, part):
    columns = names(shapes, part)
    against = "to torch f16" if part == "layer" else "target"
    rows = []
    for s in shapes:
        cells = [speed(s, s[part][name]["us"]) if name in s[part] else "-" for name in columns]
        best, faster = best_peer(s, part)
        last = number(ratio(s[part], "torch f16")) if part == "layer" else verdict(s)
        rows.append([title(s), *cells, best or "-", number(faster), last])
    header = ["M x K x N", *columns, "best peer", "Octile is faster by", against]
    return f"## {PARTS[part]}\n\n{ABOUT[part]}\n\n{grid(header, rows)}"


def quantizer_table(quantizers):
    copy = next((q for q in quantizers if "copy" in q["name"]), None)
    rows = []
    for q in quantizers:
        rate = q["elements"] * q["bytes_per_element"] / q["us"] / 1e6
        of_copy = f"{rate / (copy['elements'] * copy['bytes_per_element'] / copy['us'] / 1e6):.2f}" if copy else "-"
        rows.append([q["name"], f"{q['us']:.1f}", f"{rate:.2f}", of_copy, q["check"]])
    header = ["what", "us", "TB/s, read and written", "of the copy", "result"]
    about = (
        f"{quantizers[0]['rows']} x {quantizers[0]['columns']} f16. TB/s count once each element that must be moved."
    )
    return f"## Quantizers\n\n{about}\n\n{grid(header, rows)}"


def measured(sizes, curve):
    """[(batch size, microseconds)], where there are any."""
    return [(m, us) for m, us in zip(sizes, curve) if us is not None]


def sweep_table(sweep):
    """Of each weight and contender the slowest step to a neighbouring M."""
    header = ["K x N", "us at M", "largest step between neighbours", "there"]
    return f"## Every batch size\n\n{grid(header, step_rows(sweep))}"


def step_rows(sweep):
    rows = []
    for s in sweep:
        for name, curve in s["curves"].items():
            points = measured(s["m"], curve)
            steps = [(after[1] / before[1], before[0], after[0]) for before, after in zip(points, points[1:])]
            if not steps:
                continue
            worst, before, after = max(steps)
            settings = dict(zip(s["m"], s["settings"][name]))
            change = (
                settings[before] if settings[before] == settings[after] else f"{settings[before]}, {settings[after]}"
            )
            ends = f"{points[0][1]:.1f} at {points[0][0]}, {points[-1][1]:.1f} at {points[-1][0]}"
            step = f"{(worst - 1) * 100:+.0f} %, {before} to {after}"
            rows.append([f"{s['k']} x {s['n']} {name}", ends, step, change])
    return rows


def settings_list(shapes, parts=PARTS):
    lines = []
    for s in shapes:
        for part in parts:
            for name, row in s[part].items():
                text = ", ".join(text for text in (row["setting"], row["check"]) if text)
                lines.append(f"- {title(s)}, {part}, {name}: {text}")
        lines += [f"- {title(s)}: skipped: {name}: {reason}" for name, reason in s["skipped"].items()]
    return "\n".join(lines) + "\n"


def clocks_table(shapes):
    rows = []
    for s in shapes:
        c = s.get("clocks") or {}
        fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
        spans = [f"{c[name][0]:.0f} to {c[name][1]:.0f}" if name in c else "-" for name in fields]
        rows.append([title(s), *spans])
    return "## Clocks meanwhile\n\n" + grid(["M x K x N", "SM MHz", "memory MHz", "W", "degrees C"], rows)


def serving_data(facts):
    """The heading's sentence, of facts["serving"]."""
    groups = {name: f"groups of {size}" if size else "a scale per channel" for name, size in facts["group"].items()}
    listed = ", ".join(f"{SERVING[name]} {text}" for name, text in groups.items())
    zeros = "; W4A16 with zero points" if facts["zero_points"] else ""
    return (
        f"X and results {facts['dtype']}, normal data, no bias; weights: {listed}{zeros}. Octile's 4-bit weights are packed "
        "unless called plain."
    )


def heading(facts):
    versions = ", ".join(f"{name} {text}" for name, text in facts["versions"].items())
    gpu = facts["gpu"]
    limits = ", ".join(f"{n.replace('_', ' ')} {value}" for n, value in gpu.items() if n not in ("gpu", "driver"))
    lines = [
        f"# Octile beside its peers, {gpu['gpu']}",
        "",
        f"{facts['date']}, commit {facts['commit']}, `{facts['command']}`.",
        f"Driver {gpu.get('driver', '?')}, {limits or 'limits unknown'}; {versions}.",
        f"CUDA events, median of {facts['rounds']} rounds after {facts['warm_up']}. In turns: a rest of "
        f"{facts['rest']:g} times the work, a call, L2 flushed by writing 256 MB, the call that is timed. "
        f"{serving_data(facts['serving']) if 'serving' in facts else DATA} T/s: 2 M N K / time / 10^12.",
    ]
    lines += [f"\nskipped: {name}: {reason}" for name, reason in facts["missing"].items()]
    return "\n".join(lines) + "\n"


def markdown(document):
    from gpu import backward_report, serving_report  # which need what is above

    shapes, parts = document["shapes"], [heading(document["facts"])]
    if shapes:
        parts += [part_table(shapes, part) for part in PARTS if any(s[part] for s in shapes)]
    if document["quantizers"]:
        parts.append(quantizer_table(document["quantizers"]))
    if document["sweep"]:
        parts.append(sweep_table(document["sweep"]))
    gradients = document.get("backward", [])  # older files have none
    if gradients:
        parts.append(backward_report.tables(gradients))
    if document.get("serving"):
        parts.append(serving_report.tables(document["serving"]))
    if shapes or gradients:
        settings = settings_list(shapes) + settings_list(gradients, BACKWARD)
        parts += [f"## What was fastest, and whether it was right\n\n{settings}", clocks_table(shapes + gradients)]
    return "\n".join(parts)
