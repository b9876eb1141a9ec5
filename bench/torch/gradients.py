#!/usr/bin/env python3
"""What an int8 backward does to the gradients of examples/train_gpt.py's model, for many recipes, as bf16 training goes on.

    python3 bench/torch/gradients.py [--architecture gpt] [--steps 100 350 900 1500] [--tiny]

A recipe says how the gradient operand becomes int8: d1 = dY * s_w for dX, d2 = dY * s_x for dW. Nothing here needs
Octile's kernels: a sum of int8 products is exact, so the error of a recipe is that of its dequantized operand in f64.
Of each recipe: the error of dX or dW against the exact gradient of the same int8 X and W, smallest to largest over the
blocks for each kind of layer. Then, with one block: the share of values rounded to 0, how far the largest value of a
segment is above its root mean square, and how far the terms of the contraction differ in size.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import train_gpt  # noqa: E402
from gpt import data, training  # noqa: E402

# A recipe takes d (contraction, outputs), which is quantized along the contraction, and gives the dequantized operand.
Recipe = Callable[[torch.Tensor], torch.Tensor]


def rounded(d: torch.Tensor) -> torch.Tensor:
    """int8 with one scale per column of each (..., contraction, outputs), dequantized."""
    scale = (d.abs().amax(-2, keepdim=True) / 127).clamp_min(2.0**-79)
    return (d / scale).round().clamp(-127, 127) * scale


def blocked(d: torch.Tensor, block: int) -> torch.Tensor:
    if block >= len(d):
        return rounded(d)
    whole = len(d) // block * block
    parts = [rounded(d[:whole].unflatten(0, (-1, block))).flatten(0, 1)]
    if whole < len(d):
        parts.append(rounded(d[whole:]))
    return torch.cat(parts)


def size(d: torch.Tensor) -> torch.Tensor:
    """The key of a term of the contraction: its largest value."""
    return d.abs().amax(1)


def ordered(inner: Recipe) -> Recipe:
    """The terms by ascending size."""

    def recipe(d: torch.Tensor) -> torch.Tensor:
        order = size(d).argsort()
        out = torch.empty_like(d)
        out[order] = inner(d[order])
        return out

    return recipe


def lengths(edges: Callable[[int], list[int]]) -> Recipe:
    """Blocks between the edges that are given for a length."""

    def recipe(d: torch.Tensor) -> torch.Tensor:
        cut = edges(len(d))
        return torch.cat([rounded(d[a:b]) for a, b in zip(cut, cut[1:], strict=False)])

    return recipe


def halves(least: int, longest: int) -> Callable[[int], list[int]]:
    """Blocks that halve towards the end, from the longest to the least."""

    def edges(length: int) -> list[int]:
        cut, at, step = [length], length, least
        while at > 0:
            at = max(0, at - step)
            cut.append(at)
            step = min(longest, length - at)
        return cut[::-1]

    return edges


def apart(share: int, block: int, terms: int = 2, key: Callable[[torch.Tensor], torch.Tensor] = size) -> Recipe:
    """The largest 1/share of the terms of the contraction apart, in so many int8 terms; the others in blocks."""

    def recipe(d: torch.Tensor) -> torch.Tensor:
        large = key(d).topk(max(1, len(d) // share)).indices
        rest = d.clone()
        rest[large] = 0
        out = blocked(rest, block)
        left = d[large]
        for _ in range(terms):
            part = rounded(left)
            out[large] += part
            left = left - part
        return out

    return recipe


def apart_in_blocks(share: int, block: int) -> Recipe:
    """As `apart`, the largest of each block by themselves; all of the large ones have one pair of scales."""

    def recipe(d: torch.Tensor) -> torch.Tensor:
        if len(d) % block:
            return apart(share, block)(d)
        keys = size(d).view(-1, block)
        large = (
            keys.topk(block // share).indices + torch.arange(len(keys), device=d.device)[:, None] * block
        ).flatten()
        rest = d.clone()
        rest[large] = 0
        out = blocked(rest, block)
        first = rounded(d[large])
        out[large] += first + rounded(d[large] - first)
        return out

    return recipe


def relative(d: torch.Tensor) -> torch.Tensor:
    return (d.abs() / d.pow(2).mean(0).sqrt().clamp_min(1e-300)).amax(1)


def all_recipes() -> dict[str, Recipe]:
    out: dict[str, Recipe] = {}
    for block in (1 << 30, 4096, 2048, 1024, 512, 256, 128):
        name = "one block" if block == 1 << 30 else f"blocks of {block}"
        out[name] = lambda d, block=block: blocked(d, block)
    for block in (4096, 1024, 256, 128):
        out[f"by size, blocks of {block}"] = ordered(lambda d, block=block: blocked(d, block))
    for least in (256, 128, 64, 32):
        out[f"by size, blocks that halve to {least}"] = ordered(lengths(halves(least, 1 << 30)))
        out[f"by size, blocks that halve to {least}, at most 1024"] = ordered(lengths(halves(least, 1024)))
    for share in (128, 64, 32, 16, 8):
        out[f"largest 1/{share} in two terms"] = apart(share, 1 << 30)
        out[f"largest 1/{share} in two terms, blocks of 1024"] = apart(share, 1024)
    for share in (64, 32, 16):
        out[f"largest 1/{share} in one term, blocks of 1024"] = apart(share, 1024, 1)
        out[f"relatively largest 1/{share} in two terms, blocks of 1024"] = apart(share, 1024, 2, relative)
        out[f"largest 1/{share} of each 1024 in two terms, blocks of 1024"] = apart_in_blocks(share, 1024)
    out["largest 1/32 in two terms, blocks of 2048"] = apart(32, 2048)
    out["largest 1/32 in two terms, blocks of 512"] = apart(32, 512)
    return out


def caught(t: training.Trainer, starts: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """X, W and dY of every linear layer of the blocks for one batch."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    hooks = []
    for name, layer in t.model.blocks.named_modules():
        if isinstance(layer, torch.nn.Linear):
            keep = seen.setdefault(name, {"w": layer.weight.detach()})
            hooks.append(layer.register_forward_hook(lambda m, x, y, keep=keep: keep.update(x=x[0].detach())))
            hooks.append(layer.register_full_backward_hook(lambda m, dx, dy, keep=keep: keep.update(dy=dy[0].detach())))
    symbols, following = data.windows(t.training, starts, t.settings.length)
    with t.autocast():
        t.model(symbols, following, t.residual).backward()
    for hook in hooks:
        hook.remove()
    t.model.zero_grad(set_to_none=True)
    return seen


def integers(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in int8, as f32, and their scales (rows, 1): per token of X, per output channel of W."""
    scale = (a.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
    return (a.float() / scale).round(), scale


def measure(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, recipes: dict[str, Recipe]
) -> dict[str, dict[str, float]]:
    x, dy = x.flatten(0, -2), dy.flatten(0, -2).double()
    xq, xs, wq, ws = (t.double() for t in (*integers(x), *integers(w)))
    out: dict[str, dict[str, float]] = {}
    for gradient, d, other in (("dX", (dy * ws.t()).t().contiguous(), wq), ("dW", dy * xs, xq)):
        exact = d.t() @ other
        norm = exact.norm()
        scores = out[gradient] = {}
        for name, recipe in recipes.items():
            scores[name] = 100 * ((recipe(d) - d).t() @ other).norm().div(norm).item()
        largest = d.abs().amax(0)
        scores["(zeros of one block)"] = 100 * (d.abs() < 0.5 * largest / 127).double().mean().item()
        scores["(largest / rms)"] = (largest / d.pow(2).mean(0).sqrt()).nanmedian().item()
        sizes = size(d).clamp_min(1e-300).log2()
        scores["(log2 of sizes, standard deviation)"] = sizes.std().item()
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--architecture", default="gpt")
    p.add_argument("--steps", type=int, nargs="+", default=[100, 350, 900, 1500], help="after how many to look")
    p.add_argument("--tiny", action="store_true", help="the example's small model")
    a = p.parse_args()
    given = (["--tiny"] if a.tiny else ["--steps", "1500"]) + ["--architecture", a.architecture]
    settings = train_gpt.settings_of(train_gpt.arguments(given))
    settings.steps = max(settings.steps, max(a.steps))
    corpus = data.gather([], 4_000_000 if a.tiny else 64_000_000)
    texts = (torch.tensor(t, device=settings.device) for t in (corpus.training, corpus.validation))
    t = training.Trainer(settings, *texts)
    starts = t.begin(0)
    recipes = all_recipes()
    for number in range(max(a.steps) + 1):
        if number in a.steps:
            rows: dict[str, list] = {}
            for name, tensors in caught(t, starts[min(number, len(starts) - 1), 0]).items():
                rows.setdefault(name.split(".", 1)[1], []).append(measure(**tensors, recipes=recipes))
            for gradient in ("dX", "dW"):
                print(
                    f"\n{gradient}, {a.architecture}, after {number} steps, % of its norm, over {settings.layers} blocks:\n"
                )
                print("| | " + " | ".join(rows) + " |\n| --- |" + " ---: |" * len(rows))
                for what in next(iter(rows.values()))[0][gradient]:
                    cells = ([r[gradient][what] for r in of] for of in rows.values())
                    cells = [f"{min(c):.3g} to {max(c):.3g}" for c in cells]
                    print(f"| {what} | " + " | ".join(cells) + " |", flush=True)
        if number < settings.steps:
            t.step(number, starts[number])


if __name__ == "__main__":
    main()
