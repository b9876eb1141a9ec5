"""The tables of the backward and of the training step."""

import statistics

from gpu.report import BACKWARD, BYTES, KEPT, grid, names, number, operations, ratio, speed, title

INT8, KEPT_STEP = "Octile int8", f"Octile int8, {KEPT}"
TARGET_TOPS, TARGET_DB, TARGET_PASS = 1450, 3.9, 3.7
TARGET_STEP = {"torch f16": 1.8, "Triton": 2.8}
STEP_SHAPES = ("4096 x 4096 x 14336", "8192 x 8192 x 8192")  # for which the step has a target
MICRO_BATCHES = (1, 4, 8)
ABOUT = {
    "dx": "Octile f16 and bf16, and Triton: dY in 16 bits, W in 8, dequantized as it is multiplied. torch: W in 16 bits. "
    "Octile int8: the product alone, dY in 8 bits too (the pass over dY is below).",
    "dw": "As above, with X for W. Triton: one scale for X.",
    "db": "The column sums of dY alone.",
    "pass": "dY quantized for dX by rows and for dW by columns, and dB, alone. TB/s: dY is read twice and written twice in "
    "8 bits, 6 bytes an element. The last column is what the whole int8 backward takes beyond its two products.",
    "backward": "dX, dW and dB from a 16-bit dY; Octile's in one plan, in int8 with one scale of dY for a contraction, or one for "
    "each block of 256 terms. T/s: 4 M N K / time.",
    "step": "Quantize W and X, each in the orientations that are used later, forward, and the whole backward; X, W and dY "
    "come in 16 bits. Octile f16: int8 forward, 16-bit backward. torch: the three products and dB. T/s: 6 M N K / time.",
}


def met(value, target, form=".2f"):
    return "-" if value is None else f"{value:{form}} ({'met' if value >= target else 'NOT met'})"


def product_verdicts(s, part):
    rows = s[part]
    floats = [met(ratio(rows, f"torch {t}", f"Octile {t}"), 1) for t in ("f16", "bf16")]
    rate = operations(s) / rows[INT8]["us"] / 1e6 if INT8 in rows else None
    return [*floats, met(rate, TARGET_TOPS, ",.0f")]


def sums_verdicts(s, part):
    rows = s[part]
    rate = BYTES[part] * s["m"] * s["n"] / rows["Octile f16"]["us"] / 1e6 if "Octile f16" in rows else None
    return [number(ratio(rows, "torch f16", "Octile f16")), met(rate, TARGET_DB)]


def pass_verdicts(s, part):
    rate = BYTES[part] * s["m"] * s["n"] / s[part][INT8]["us"] / 1e6 if INT8 in s[part] else None
    rows, beyond = [s[p].get(INT8) for p in ("backward", "dx", "dw")], "-"
    if all(rows):
        beyond = f"{statistics.median(whole - dx - dw for whole, dx, dw in zip(*(r['times'] for r in rows))):.1f} us"
    us = f"{s[part][INT8]['us']:.1f} us" if INT8 in s[part] else "-"
    return [us, met(rate, TARGET_PASS), beyond]


def backward_verdicts(s, part):
    rows = s[part]
    floats = [number(ratio(rows, f"torch {t}", f"Octile {t}")) for t in ("f16", "bf16")]
    return [*floats, number(ratio(rows, "torch f16", INT8))]


def step_verdicts(s, part):
    rows, wanted = s[part], title(s) in STEP_SHAPES
    found = {peer: ratio(rows, peer, INT8) for peer in TARGET_STEP}
    return [met(found[p], TARGET_STEP[p]) if wanted else number(found[p]) for p in TARGET_STEP]


VERDICTS = {
    "dx": (["f16 to torch f16", "bf16 to torch bf16", f"int8, target {TARGET_TOPS:,}"], product_verdicts),
    "dw": (["f16 to torch f16", "bf16 to torch bf16", f"int8, target {TARGET_TOPS:,}"], product_verdicts),
    "db": (["to torch f16", f"target {TARGET_DB} TB/s"], sums_verdicts),
    "pass": (["us", f"target {TARGET_PASS} TB/s", "in the backward"], pass_verdicts),
    "backward": (["f16 to torch f16", "bf16 to torch bf16", "int8 to torch f16"], backward_verdicts),
    "step": ([f"int8 to {p}, target {t}" for p, t in TARGET_STEP.items()], step_verdicts),
}


def table(shapes, part):
    columns = [name for name in names(shapes, part) if name != KEPT_STEP]
    header, verdicts = VERDICTS[part]
    rows = []
    for s in shapes:
        cells = [speed(s, s[part][name]["us"], part) if name in s[part] else "-" for name in columns]
        rows.append([title(s), *cells, *verdicts(s, part)])
    return f"## {BACKWARD[part]}\n\n{ABOUT[part]}\n\n{grid(['M x K x N', *columns, *header], rows)}"


def micro_batch_table(shapes):
    """A step of n micro-batches quantizes W once."""
    rows = []
    for s in shapes:
        step = s["step"]
        if not {INT8, KEPT_STEP, "torch f16"} <= step.keys():
            continue
        whole, kept = step[INT8]["us"], step[KEPT_STEP]["us"]
        each = [kept + (whole - kept) / count for count in MICRO_BATCHES]
        cells = [f"{us:,.0f} us, {step['torch f16']['us'] / us:.2f}" for us in each]
        rows.append([title(s), f"{step['torch f16']['us']:,.0f} us", *cells])
    if not rows:
        return ""
    header = ["M x K x N", "torch f16", *(f"{n} micro-batch{'es' if n > 1 else ''}" for n in MICRO_BATCHES)]
    about = (
        "A micro-batch of the int8 step, W being quantized once for so many, and how many times as fast as torch f16 "
        "it is; from the step with and without W's quantizer."
    )
    return f"## W quantized once for several micro-batches\n\n{about}\n\n{grid(header, rows)}"


def tables(shapes):
    found = [table(shapes, part) for part in BACKWARD if any(s[part] for s in shapes)]
    return "\n".join([*found, micro_batch_table(shapes)])
