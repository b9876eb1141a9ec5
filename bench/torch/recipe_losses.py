#!/usr/bin/env python3
"""Losses of examples/train_gpt.py's model with an emulated int8 layer, recipe by recipe (see gradients.py).

    python3 bench/torch/recipe_losses.py --kinds bf16 "int8: one block | one block" --seeds 0 1 2

A kind is "bf16", a recipe of torchao's fp8 training ("fp8-tensorwise", "fp8-rowwise"), "int8: forward" (the gradients
exact), or "int8: RECIPE | RECIPE", of dX and of dW. Emulation: int8 values in bf16 operands of the forward, which are
exact; the backward multiplies the dequantized gradient, rounded to bf16, so that it adds some 0.2 % to each error.
Prints a line of JSON for each run.
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
import gradients  # noqa: E402
import train_gpt  # noqa: E402
from gpt import data, training  # noqa: E402

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
    def convert(model: nn.Module, settings: training.Settings) -> str:
        if kind.startswith("fp8-"):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(model.blocks, config=Float8LinearConfig.from_recipe_name(kind[4:]))
        elif kind != "bf16":
            wanted = kind.removeprefix("int8: ")
            pair = ("exact", "exact") if wanted == "forward" else tuple(part.strip() for part in wanted.split("|"))
            for name, layer in list(model.blocks.named_modules()):
                if type(layer) is nn.Linear:
                    parent, _, leaf = name.rpartition(".")
                    setattr(model.blocks.get_submodule(parent), leaf, EmulatedLinear(layer, pair))
        return kind

    return convert


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kinds", nargs="+", required=True)
    p.add_argument("--seeds", type=int, nargs="+", default=[0])
    p.add_argument("--tiny", action="store_true")
    a, rest = p.parse_known_args()
    settings = train_gpt.settings_of(train_gpt.arguments(rest + (["--tiny"] if a.tiny else [])))
    corpus = data.gather([], 4_000_000 if a.tiny else 64_000_000)
    texts = [torch.tensor(t, device=settings.device) for t in (corpus.training, corpus.validation)]
    for kind in a.kinds:
        training.convert = converter(kind)
        torch._dynamo.reset()
        t = training.Trainer(settings, *texts)
        t.warm_up(lambda event: None)
        for seed in a.seeds:
            begun, losses, paces, validation = time.time(), [], [], None
            for event in t.run(seed):
                if event["event"] == "steps":
                    losses += event["losses"]
                    paces.append(event["seconds"] / len(event["losses"]))
                validation = event["loss"] if event["event"] == "validation" else validation
            last = losses[-max(1, len(losses) // 20) :]
            line = {"kind": kind, "architecture": settings.architecture, "seed": seed, "steps": len(losses)}
            line |= {"training": sum(last) / len(last), "validation": validation, "seconds": time.time() - begun}
            line["tokens_per_second"] = round(settings.tokens / statistics.median(paces))
            print(json.dumps(line), flush=True)
        del t
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
