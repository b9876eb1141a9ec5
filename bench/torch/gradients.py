#!/usr/bin/env python3
"""What int8 does to the gradients of each layer of examples/train_gpt.py's model, as bf16 training goes on.

    python3 bench/torch/gradients.py [--steps 100 350 900] [--tiny]

Of dX and dW, per kind of layer and over all blocks: the error against the exact gradient of the same int8 X and W (f64),
rounding to nearest and stochastic; the part of the gradient that is left (its projection on the exact one); the share
of dY that is rounded to 0; and how far the largest value of a row (dX) or a column (dW) is above its root mean square.
"""

import argparse
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "python"), str(ROOT / "examples"), str(ROOT / "bench" / "peers")]
import octile  # noqa: E402, F401  (registers the operators)
import train_gpt  # noqa: E402
from gpt import data, training  # noqa: E402
from octile import _c  # noqa: E402

ops = torch.ops.octile


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


def spread(d: torch.Tensor, dim: int) -> tuple[float, float]:
    """The share of d that is rounded to 0, with a scale per row (dim 1) or column (dim 0); the largest over the rms."""
    largest = d.abs().amax(dim, keepdim=True)
    zeros = (d.abs() < 0.5 * largest / 127).float().mean().item()
    return zeros, (largest / d.pow(2).mean(dim, keepdim=True).sqrt()).nanmedian().item()


def measure(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> dict[str, float]:
    x, dy = x.flatten(0, -2).to(dy.dtype), dy.flatten(0, -2).contiguous()
    xq, xt, xs = ops.quantize(x, _c.PER_ROW, _c.BOTH)
    wq, wt, ws = ops.quantize(w, _c.PER_ROW, _c.BOTH)
    exact = {"dX": dy.double() @ (wq.double() * ws.double()[:, None])}
    exact["dW"] = dy.double().t() @ (xq.double() * xs.double()[:, None])
    out = {}
    products = (_c.INT8, _c.INT8, False, _c.IN_OUT, True, torch.float32, _c.OUT_IN)
    for rounding, word in ((_c.NEAREST, "nearest"), (_c.STOCHASTIC, "stochastic")):
        results = ops.linear_backward(dy, wt, ws, xt, xs, *products, rounding, 1)
        for (name, true), got in zip(exact.items(), results):
            out[f"{name} {word}, error %"] = 100 * ((got - true).norm() / true.norm()).item()
            out[f"{name} {word}, left %"] = 100 * ((got * true).sum() / (true * true).sum()).item()
    for name, d, dim in (("dX", dy.float() * ws, 1), ("dW", dy.float() * xs[:, None], 0)):
        zeros, above = spread(d, dim)
        out |= {f"{name}, zeros %": 100 * zeros, f"{name}, largest / rms": above}
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, nargs="+", default=[100, 350, 900], help="after how many to look")
    p.add_argument("--tiny", action="store_true", help="the example's small model")
    a = p.parse_args()
    settings = train_gpt.settings_of(train_gpt.arguments(["--tiny"] if a.tiny else ["--steps", "1500"]))
    settings.steps = max(settings.steps, max(a.steps) + 1)
    corpus = data.gather([], 4_000_000 if a.tiny else 64_000_000)
    texts = (torch.tensor(t, device=settings.device) for t in (corpus.training, corpus.validation))
    t = training.Trainer(settings, *texts)
    starts = t.begin(0)
    for number in range(max(a.steps) + 1):
        if number in a.steps:
            rows: dict[str, list[dict[str, float]]] = {}
            for name, tensors in caught(t, starts[number, 0]).items():
                rows.setdefault(name.split(".", 1)[1], []).append(measure(**tensors))
            print(f"\nAfter {number} steps, smallest to largest of {settings.layers} blocks:\n")
            print("| | " + " | ".join(rows) + " |\n| --- |" + " --- |" * len(rows))
            for what in next(iter(rows.values()))[0]:
                cells = ([r[what] for r in of] for of in rows.values())
                print(f"| {what} | " + " | ".join(f"{min(c):.4g} to {max(c):.4g}" for c in cells) + " |", flush=True)
        t.step(number, starts[number])


if __name__ == "__main__":
    main()
