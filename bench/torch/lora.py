#!/usr/bin/env python3
"""LoRA over a frozen Llama-like model: tokens a second, memory and loss, by the format of the frozen weights.

    python3 bench/torch/lora.py [--kinds bf16 w8a8 ...] [--seeds 3] [--json FILE] [--tiny]

The model has random weights (1.1 billion parameters by default), the same for every kind; LoRA is on all linear layers of
its blocks, which torch.compile compiles one by one. It learns a chain of tokens in which each has three successors. A seed
decides the adapters and the text. bnb-8bit and bnb-nf4 are bitsandbytes', where that is installed.
"""

import argparse
import dataclasses
import gc
import json
import math
import pathlib
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))
import octile  # noqa: E402

KINDS = {
    "bf16": None,
    "w8a8": octile.W8A8Dynamic(),
    "w8a8-int8": octile.W8A8Dynamic(backward="int8"),
    "w4a16": octile.W4A16(),
    "w4a8": octile.W4A8(),
    "bnb-8bit": "8bit",
    "bnb-nf4": "nf4",
}
SUCCESSORS = 3


@dataclasses.dataclass
class Settings:
    width: int = 2048
    layers: int = 22
    hidden: int = 5632
    heads: int = 16
    vocabulary: int = 32000
    words: int = 256  # of the vocabulary that the text has
    batch: int = 8
    length: int = 1024
    rank: int = 16
    steps: int = 60
    warmup: int = 5  # steps that are not timed: the first ones compile
    rate: float = 1e-3


TINY = Settings(64, 2, 128, 4, 256, 32, 2, 32, 4, 8, 2)


# ---- The model ----


class LoRA(nn.Module):
    def __init__(self, base: nn.Module, sizes: tuple[int, int], rank: int):
        super().__init__()
        self.base = base
        self.down = nn.Linear(sizes[0], rank, bias=False)
        self.up = nn.Linear(rank, sizes[1], bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        self.heads = s.heads
        self.norms = nn.ModuleList(nn.RMSNorm(s.width) for _ in range(2))
        self.qkv, self.out = nn.Linear(s.width, 3 * s.width, bias=False), nn.Linear(s.width, s.width, bias=False)
        self.gate_up, self.down = nn.Linear(s.width, 2 * s.hidden, bias=False), nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = qkv.unbind(2)  # (batch, heads, length, width of a head)
        y = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions. turn (2, length, half the width of a head): cosines and sines."""
    a, b = x.chunk(2, -1)
    cos, sin = turn.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Model(nn.Module):
    """The blocks come converted, one after another, so that no more than one of them is there in floats."""

    def __init__(self, s: Settings, kind: str, device: str):
        super().__init__()
        torch.manual_seed(0)
        half = s.width // s.heads // 2
        angles = torch.arange(s.length)[:, None] * 10000 ** -(torch.arange(half) / half)
        self.register_buffer("turn", torch.stack((angles.cos(), angles.sin())).to(device))
        self.embedding = nn.Embedding(s.vocabulary, s.width, device=device, dtype=torch.bfloat16)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(adapted(s, kind, device) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width, device=device, dtype=torch.bfloat16)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False, device=device, dtype=torch.bfloat16)
        for name, p in self.named_parameters():
            p.requires_grad_(is_adapter(name))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turn)
        return self.head(self.norm(x))


def is_adapter(name: str) -> bool:
    return ".base." not in name and name.endswith((".down.weight", ".up.weight")) and "blocks." in name


def adapted(s: Settings, kind: str, device: str) -> Block:
    """A block whose linear layers are frozen, in the format of `kind`, each with a LoRA beside it."""
    with torch.device(device):
        block = Block(s)
    linears = {name: m for name, m in block.bfloat16().named_children() if isinstance(m, nn.Linear)}
    for m in linears.values():
        nn.init.normal_(m.weight, std=0.02)
    sizes = {name: (m.in_features, m.out_features) for name, m in linears.items()}
    how = KINDS[kind]
    if isinstance(how, str):
        for name, m in linears.items():
            setattr(block, name, of_bitsandbytes(m, how, device))
    elif how is not None:
        octile.quantize_(block, how)
    for name in linears:
        setattr(block, name, LoRA(getattr(block, name), sizes[name], s.rank).to(device))
    return block


def of_bitsandbytes(linear: nn.Linear, how: str, device: str) -> nn.Module:
    import bitsandbytes as bnb

    sizes, weight = (linear.in_features, linear.out_features), linear.weight.detach().cpu()
    if how == "8bit":
        new = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        new.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
    else:
        new = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    return new.to(device)  # quantizes


# ---- Training ----


def text(s: Settings, seed: int, device: str) -> torch.Tensor:
    """(steps, batch, length + 1) tokens."""
    g = torch.Generator().manual_seed(seed)
    successors = torch.randint(0, s.words, (s.words, SUCCESSORS), generator=g)
    tokens = torch.randint(0, s.words, (s.steps, s.batch, s.length + 1), generator=g)
    for i in range(1, s.length + 1):
        tokens[..., i] = successors[tokens[..., i - 1], tokens[..., i] % SUCCESSORS]
    return tokens.to(device)


def train(model: Model, s: Settings, seed: int, device: str) -> tuple[float, list[float]]:
    """The loss at the end, the mean of a tenth of the steps, and the seconds of each step that is timed."""
    torch.manual_seed(seed)
    for m in model.modules():
        if isinstance(m, LoRA):
            m.reset_parameters()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, times = torch.optim.AdamW(trained, lr=s.rate, fused=device == "cuda"), [], []
    for tokens in text(s, seed, device):
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - begun)
    return statistics.mean(losses[-max(1, s.steps // 10) :]), times[s.warmup :]


def measure(kind: str, s: Settings, a: argparse.Namespace) -> dict:
    gpu = a.device == "cuda"
    torch._dynamo.reset()
    gc.collect()
    model = Model(s, kind, a.device)
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    if a.compile:
        for block in model.blocks:
            block.compile(fullgraph=not kind.startswith("bnb"))
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    runs = [train(model, s, seed, a.device) for seed in range(1, a.seeds + 1)]
    losses, times = [loss for loss, _ in runs], [t for _, times in runs for t in times]
    return {
        "kind": kind,
        "tokens_per_second": s.batch * s.length / statistics.median(times),
        "weight_bytes": weights,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "loss": statistics.mean(losses),
        "standard_error": statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None,
        "losses": losses,
    }


def why_not(kind: str, device: str) -> str:
    if not kind.startswith("bnb"):
        return ""
    if device != "cuda":
        return "bitsandbytes is measured on a GPU alone"
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        return f"bitsandbytes is not installed ({error})"
    return ""


def row(r: dict) -> str:
    peak = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.2f}"
    error = "" if r["standard_error"] is None else f"{r['standard_error']:.4f}"
    weights = f"{r['weight_bytes'] / 2**30:.2f}"
    return f"{r['kind']:10} {r['tokens_per_second']:12,.0f} {weights:>12} {peak:>9} {r['loss']:9.4f} {error:>9}"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    p.add_argument("--seeds", type=int, default=3, help="runs of each kind (3)")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the blocks (unless --tiny)")
    p.add_argument("--tiny", action="store_true", help="a model for trying this out")
    p.add_argument("--json", type=pathlib.Path, help="a file for all numbers")
    for f in dataclasses.fields(Settings):
        p.add_argument(f"--{f.name}", type=f.type, help=f"({f.default})")
    a = p.parse_args()
    given = {f.name: getattr(a, f.name) for f in dataclasses.fields(Settings) if getattr(a, f.name) is not None}
    s = dataclasses.replace(TINY if a.tiny else Settings(), **given)
    a.compile = not a.tiny if a.compile is None else a.compile
    if s.warmup >= s.steps:
        raise SystemExit(f"lora: {s.steps} steps with a warm-up of {s.warmup} leave none to time")
    print(f"{'kind':10} {'tokens/s':>12} {'weights GiB':>12} {'peak GiB':>9} {'loss':>9} {'+-':>9}", flush=True)
    results = []
    for kind in a.kinds:
        if reason := why_not(kind, a.device):
            print(f"{kind:10} skipped: {reason}", flush=True)
            continue
        results.append(measure(kind, s, a))
        print(row(results[-1]), flush=True)
    if a.json:
        settings = dataclasses.asdict(s) | {"device": a.device, "compile": a.compile, "torch": torch.__version__}
        a.json.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
