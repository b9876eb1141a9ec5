#!/usr/bin/env python3
"""What a training step of examples/train_gpt.py should take, from operations and bytes counted by hand.

    python3 bench/torch/predict.py --width 4096 --layers 6 --tokens 16384 --length 1024

The rates below are what an H200 reached with each kind of work alone (docs/explanation/measurements.md), so a step that is slower than
told here has a reason worth looking for. The int8 backward is the one with a scale for a whole contraction.
"""

import argparse

RATES = {  # operations or bytes a second
    "bf16 product": 720e12,  # warm: 750 to 800 with rests
    "int8 product": 1500e12,  # warm: 1,650 to 1,700 with rests
    "16-bit product of int8": 715e12,
    "attention": 400e12,
    "copy": 4.0e12,
    "rows": 3.7e12,
    "both": 3.0e12,
    "dY": 3.1e12,
    "elementwise": 3.5e12,
    "optimizer": 3.5e12,
}
# Bytes a token and unit of width that norms, GELU and residual sums move in a block: LN 4 + GELU 16 + two sums with the
# next norm 16 forward; GELU 24, two norms with their sums 28 backward.
ELEMENTWISE = 36 + 52
X, DY = 7, 9  # widths of the inputs, and of the outputs, of a block's linear layers


def parts(width: int, layers: int, tokens: int, length: int, mode: str, master: bool) -> dict[str, float]:
    """Seconds by kind."""
    weights = 12 * layers * width * width
    x, dy = X * width * tokens * layers, DY * width * tokens * layers
    product = 2 * weights * tokens
    size = 4 if master else 2
    r = RATES
    out = {}
    if mode == "bf16":
        out["products"] = 3 * product / r["bf16 product"]
        out["casts of W and dW"] = weights * (12 if master else 0) / r["copy"]
        out["dB"] = 2 * dy / r["elementwise"]
    else:
        forward = product / r["int8 product"]
        both_w, both_x = mode != "octile-16bit", mode == "octile-int8-whole"
        out["quantize W"] = weights * (size + 1 + both_w) / r["both" if both_w else "rows"]
        out["quantize X"] = x * (3 + both_x) / r["both" if both_x else "rows"]
        if mode == "octile-int8-whole":
            out["products"] = forward + 2 * product / r["int8 product"]
            out["pass over dY"] = 6 * dy / r["dY"]
        elif mode == "octile-mixed":
            out["products"] = forward + product / r["int8 product"] + product / r["16-bit product of int8"]
            out["pass over dY"] = 3 * dy / r["rows"]
            out["dB"] = 2 * dy / r["elementwise"]
        else:
            out["products"] = forward + 2 * product / r["16-bit product of int8"]
            out["dB"] = 2 * dy / r["elementwise"]
    out["attention"] = 7 * layers * length * width * tokens / r["attention"]
    out["norms, GELU, sums"] = ELEMENTWISE * width * tokens * layers / r["elementwise"]
    out["optimizer"] = 7 * size * weights / r["optimizer"]
    out["clipping"] = 3 * size * weights / r["optimizer"]
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 4096), ("layers", 6), ("tokens", 16384), ("length", 1024)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--bf16", action="store_true", help="bf16 parameters instead of f32 ones under autocast")
    a = p.parse_args()
    modes = ["bf16", "octile-16bit", "octile-mixed", "octile-int8-whole"]
    times = {m: parts(a.width, a.layers, a.tokens, a.length, m, not a.bf16) for m in modes}
    kinds = list(dict.fromkeys(k for t in times.values() for k in t))
    print("| ms | " + " | ".join(modes) + " |\n|---|" + "---:|" * len(modes))
    for kind in kinds:
        print(f"| {kind} | " + " | ".join(f"{1e3 * t[kind]:.1f}" if t.get(kind) else "" for t in times.values()) + " |")
    sums = [sum(t.values()) for t in times.values()]
    print("| the step | " + " | ".join(f"{1e3 * s:.1f}" for s in sums) + " |")
    print("| to bf16 | " + " | ".join(f"{sums[0] / s:.2f}" for s in sums) + " |")


if __name__ == "__main__":
    main()
