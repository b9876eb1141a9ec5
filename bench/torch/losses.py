#!/usr/bin/env python3
"""Losses of examples/train_gpt.py's model, kind of layer by kind and seed by seed, and what their noise allows to say.

    python3 bench/torch/losses.py --kinds bf16 octile-int8 fp8-rowwise --seeds 0 1 2 --steps 1500 --out losses.jsonl
    python3 bench/torch/losses.py --table losses.jsonl                     # means, differences to bf16, standard errors

A kind is a mode of the example ("bf16", "octile-int8", ...), a recipe of torchao's fp8 training ("fp8-tensorwise",
"fp8-rowwise"), or an emulated int8 layer (see gradients.py): "int8: forward" (the gradients exact) or "int8: RECIPE | RECIPE",
of dX and of dW. Emulation: int8 values in bf16 operands of the forward, which are exact; the backward multiplies the dequantized
gradient, rounded to bf16, so that it adds some 0.2 % to each error.

Prints a line of JSON for each run, and appends it to --out; runs that are there already are not repeated, so that several
processes, GPUs and days can share a file. Other options are the example's. The training loss is the mean of the last 5 % of the steps.
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
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "bench" / "torch")]
import gradients
import train_gpt
from gpt import data, training

CONVERT = training.convert
RECIPES = gradients.all_recipes() | {"exact": lambda d: d}


@torch.library.custom_op("recipes::mm", mutates_args=())
def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@mm.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)


class Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, recipes):
        (xq, xs), (wq, ws) = gradients.integers(x), gradients.integers(weight)
        xq, wq = xq.bfloat16(), wq.bfloat16()  # exact
        ctx.save_for_backward(xq, xs, wq, ws)
        ctx.recipes = recipes
        return (mm(xq, wq.t()) * (xs * ws.t())).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, dy):
        xq, xs, wq, ws = ctx.saved_tensors
        for_dx, for_dw = (RECIPES[r] for r in ctx.recipes)
        d1 = for_dx((dy.float() * ws.t()).t()).t().bfloat16()
        d2 = for_dw(dy.float() * xs).bfloat16()
        return (d1 @ wq), mm(d2.t(), xq), None


class EmulatedLinear(nn.Module):
    def __init__(self, of: nn.Linear, recipes: tuple[str, str]):
        super().__init__()
        self.weight, self.bias, self.recipes = of.weight, of.bias, recipes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Emulated.apply(x.flatten(0, -2).to(torch.bfloat16), self.weight, self.recipes)
        if self.bias is not None:
            y = (y + self.bias).to(y.dtype)
        return y.unflatten(0, x.shape[:-1])


def converter(kind: str):
    if kind in training.MODES:
        return CONVERT

    def convert(model: nn.Module, settings: training.Settings) -> str:
        if kind.startswith("fp8-"):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(model.blocks, config=Float8LinearConfig.from_recipe_name(kind[4:]))
        elif kind.startswith("int8: "):
            wanted = kind.removeprefix("int8: ")
            pair = ("exact", "exact") if wanted == "forward" else tuple(part.strip() for part in wanted.split("|"))
            for name, layer in list(model.blocks.named_modules()):
                if type(layer) is nn.Linear:
                    parent, _, leaf = name.rpartition(".")
                    setattr(model.blocks.get_submodule(parent), leaf, EmulatedLinear(layer, pair))
        return kind

    return convert


def read(paths: list[pathlib.Path]) -> list[dict]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines() if line]


def identity(run: dict) -> tuple:
    return tuple(run[key] for key in ("architecture", "width", "layers", "tokens", "steps", "kind", "seed"))


def difference(runs: dict[int, float], base: dict[int, float]) -> str:
    """In per cent of the base, with its standard error: of the pairs that share a seed, and of the two means."""
    cells = []
    pairs = [100 * (runs[seed] / base[seed] - 1) for seed in runs if seed in base]
    if len(pairs) > 1:
        cells.append(
            f"{statistics.fmean(pairs):+.2f} ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.2f} ({len(pairs)})"
        )
    if min(len(runs), len(base)) > 1:
        apart = 100 * (statistics.fmean(runs.values()) / statistics.fmean(base.values()) - 1)
        parts = (statistics.variance(one.values()) / len(one) for one in (runs, base))
        cells.append(f"{apart:+.2f} ± {100 * sum(parts) ** 0.5 / statistics.fmean(base.values()):.2f}")
    return "; ".join(cells) or "-"


def table(runs: list[dict]) -> str:
    """One line a kind: the means, and the differences to bf16 in per cent, first paired by seed, then of the means."""
    groups: dict[tuple, dict[str, dict[int, dict]]] = {}
    for run in runs:
        *setting, kind, seed = identity(run)
        groups.setdefault(tuple(setting), {}).setdefault(kind, {})[seed] = run
    lines = []
    for (architecture, width, layers, tokens, steps), kinds in groups.items():
        lines.append(f"\n{architecture}, {layers} blocks of {width}, {steps} steps of {tokens} tokens")
        lines.append(
            "| kind | runs | training | to bf16, % | validation | to bf16, % |\n| --- | ---: | ---: | ---: | ---: | ---: |"
        )
        for kind, of in kinds.items():
            cells = [kind.replace("|", "/"), str(len(of))]
            for loss in ("training", "validation"):
                mine = {seed: run[loss] for seed, run in of.items()}
                base = {seed: run[loss] for seed, run in kinds.get("bf16", {}).items()}
                cells.append(f"{statistics.fmean(mine.values()):.4f}")
                cells.append(difference(mine, base) if kind != "bf16" else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--kinds", nargs="+")
    what.add_argument("--table", nargs="+", type=pathlib.Path, metavar="FILE", help="print the table of such files")
    p.add_argument("--seeds", type=int, nargs="+", default=[0])
    p.add_argument("--out", type=pathlib.Path, help="a file of lines of JSON")
    p.add_argument("--tiny", action="store_true")
    a, rest = p.parse_known_args()
    if a.table:
        print(table(read(a.table)))
        return
    arguments = train_gpt.arguments(rest + (["--tiny"] if a.tiny else []))
    corpus = data.gather([], 4_000_000 if a.tiny else 64_000_000)
    texts = [torch.tensor(t, device=arguments.device) for t in (corpus.training, corpus.validation)]
    for kind in a.kinds:
        settings = train_gpt.settings_of(arguments)
        settings.mode = kind if kind in training.MODES else "bf16"
        line = {"kind": kind, "architecture": settings.architecture, "width": settings.width, "layers": settings.layers}
        line |= {"tokens": settings.tokens, "steps": settings.steps}
        done = {identity(run) for run in read([a.out] if a.out else [])}
        seeds = [seed for seed in a.seeds if identity(line | {"seed": seed}) not in done]
        if not seeds:
            continue
        training.convert = converter(kind)
        torch._dynamo.reset()
        t = training.Trainer(settings, *texts)
        t.warm_up(lambda event: None)
        for seed in seeds:
            begun, losses, paces, validation = time.time(), [], [], None
            for event in t.run(seed):
                if event["event"] == "steps":
                    losses += event["losses"]
                    paces.append(event["seconds"] / len(event["losses"]))
                validation = event["loss"] if event["event"] == "validation" else validation
            last = losses[-max(1, len(losses) // 20) :]
            run = line | {"seed": seed, "training": statistics.fmean(last), "validation": validation}
            run |= {"seconds": round(time.time() - begun, 1)}
            run["tokens_per_second"] = round(settings.tokens / statistics.median(paces))
            print(json.dumps(run), flush=True)
            if a.out:
                with a.out.open("a") as file:
                    file.write(json.dumps(run) + "\n")
        del t
        if settings.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
