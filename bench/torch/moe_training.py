#!/usr/bin/env python3
"""A GPT of experts trained on one GPU: bf16 with torch._grouped_mm, and Octile's int8 and 16-bit backward.

    python3 bench/torch/moe_training.py [--kinds bf16 16bit int8] [--width 4096] [--experts 8] [--steps 20] [--json FILE]

examples/gpt's Llama with a mixture in place of its MLP: a router in f32, --slots of --experts for each token, SwiGLU of
--hidden values. Parameters are f32 under bf16 autocast, or (--precision bf16) bf16. Experts are those of Transformers'
grouped implementation, without the package: sorted rows, two products by torch._grouped_mm, a weighted sum over the slots;
but rows move by gathers alone in the backward too, where torch's own index_select would add them up by atomics, 7 % of a step.
The same module becomes Octile's by octile.quantize_, as do the linear layers of attention. Text is the sources of the
running Python, byte by byte; a kind's loss beside another's shows only that both train.
"""

import argparse
import json
import pathlib
import statistics
import sys
import sysconfig
import time

import torch
import torch.nn.functional as F
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "python"), str(ROOT / "examples")]
import octile  # noqa: E402
from gpt.model import Gpt  # noqa: E402

KINDS = {"bf16": None, "16bit": "16bit", "int8": "int8"}


class Sort(torch.autograd.Function):
    """Tokens to sorted rows."""

    @staticmethod
    def forward(ctx, x, token, place):
        ctx.save_for_backward(place)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, dy):
        (place,) = ctx.saved_tensors
        return dy.index_select(0, place.view(-1)).view(*place.shape, -1).sum(1), None, None


class Unsort(torch.autograd.Function):
    """Sorted rows to slots (tokens, slots, width)."""

    @staticmethod
    def forward(ctx, rows, place):
        ctx.save_for_backward(place)
        return rows.index_select(0, place.view(-1)).view(*place.shape, -1)

    @staticmethod
    def backward(ctx, dy):
        place = ctx.saved_tensors[0].view(-1)
        slot = torch.empty_like(place).scatter_(0, place.long(), torch.arange(len(place), device=place.device).int())
        return dy.flatten(0, 1).index_select(0, slot), None


class Experts(nn.Module):
    """Fused experts with the names and flags that Transformers gives them."""

    def __init__(self, experts, width, hidden):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.has_gate = self.is_concatenated = True
        self.has_bias = self.has_post_expert_norm = self.is_transposed = self._is_expert_parallel = False

    def _apply_gate(self, rows):
        gate, up = rows.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x, index, weights):
        offsets, token, place = octile.experts.sort_by_expert(len(self.down_proj), index)
        x = x.to(torch.bfloat16)
        up, down = (w.to(torch.bfloat16).mT for w in (self.gate_up_proj, self.down_proj))
        inner = self._apply_gate(torch._grouped_mm(Sort.apply(x, token, place), up, offs=offsets[1:]))
        rows = torch._grouped_mm(inner, down, offs=offsets[1:])
        return (Unsort.apply(rows, place) * weights[..., None]).sum(1).to(x.dtype)


class Mixture(nn.Module):
    def __init__(self, width, hidden, experts, slots):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts, self.slots = Experts(experts, width, hidden), slots

    def forward(self, x):
        rows = x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):
            weights, index = F.linear(rows.float(), self.router.weight.float()).softmax(-1).topk(self.slots)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(rows, index, weights).view_as(x)


def make(a, kind):
    model = Gpt(a.width, a.layers, a.width // 128, a.length, architecture="llama")
    for block in model.blocks:
        block.mlp = Mixture(a.width, a.hidden, a.experts, a.slots)
    model = model.cuda()
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1) if p.dim() == 1 else p.normal_(0, 0.02, generator=generator)
    if a.precision == "bf16":
        model.bfloat16()
    if KINDS[kind] is not None:
        routers = {id(m.router) for m in model.modules() if isinstance(m, Mixture)} | {id(model.head)}
        config = octile.Int8Training(backward=KINDS[kind])
        print(octile.quantize_(model, config, filter=lambda module, name: id(module) not in routers), file=sys.stderr)
    return model


def text():
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).cuda()


def train(a, kind, data):
    model, generator = make(a, kind), torch.Generator("cuda").manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = model if a.eager else torch.compile(model)
    losses, times = [], []
    for step in range(a.warm_up + a.steps):
        at = torch.randint(0, len(data) - a.length - 1, (a.batch, 1), generator=generator, device="cuda")
        symbols = data[at + torch.arange(a.length + 1, device="cuda")].long()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=a.precision == "master"):
            loss = forward(symbols[:, :-1], symbols[:, 1:], torch.bfloat16)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step >= a.warm_up:
            times.append(time.perf_counter() - begun)
        losses.append(loss.item())
    seconds = statistics.median(times)
    return {
        "kind": kind,
        "tokens_per_second": a.batch * a.length / seconds,
        "milliseconds": 1e3 * seconds,
        "losses": losses,
        "gigabytes": torch.cuda.max_memory_allocated() / 2**30,
    }


def profile(a, kind, data):
    """Kernels by their time, of one step."""
    model = make(a, kind)
    forward = model if a.eager else torch.compile(model)
    symbols = data[: a.batch * (a.length + 1)].view(a.batch, -1).long()

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=a.precision == "master"):
            loss = forward(symbols[:, :-1], symbols[:, 1:], torch.bfloat16)
        loss.backward()

    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    for name, value in {"width": 4096, "layers": 2, "hidden": 14336, "experts": 8, "slots": 2, "length": 1024,
                        "batch": 32, "steps": 20, "warm_up": 5}.items():  # fmt: skip
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    p.add_argument("--rate", type=float, default=3e-4)
    p.add_argument("--precision", choices=("master", "bf16"), default="master")
    p.add_argument("--eager", action="store_true", help="without torch.compile")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--json", type=pathlib.Path)
    a = p.parse_args()
    data, results = text(), []
    print(torch.cuda.get_device_name(), vars(a))
    for kind in a.kinds:
        torch.cuda.reset_peak_memory_stats()
        if a.profile:
            profile(a, kind, data)
            continue
        results.append(train(a, kind, data))
        r, first = results[-1], results[0]
        print(
            f"{kind:6} {r['tokens_per_second']:9.0f} tokens/s {r['milliseconds']:8.1f} ms {r['gigabytes']:6.1f} GiB, loss "
            f"{r['losses'][0]:.3f} to {r['losses'][-1]:.3f}, {r['tokens_per_second'] / first['tokens_per_second']:.2f} x "
            f"{first['kind']}",
            flush=True,
        )
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    if a.json:
        a.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "runs": results}) + "\n")


if __name__ == "__main__":
    main()
