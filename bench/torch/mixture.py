#!/usr/bin/env python3
"""A little Mixtral trained on a CPU in float and with Int8Training: the loss at the end, and seconds a step.

    python3 bench/torch/mixture.py [--kinds float 16bit int8] [--seeds 3] [--steps 200]

The text is the sources of the running Python, byte by byte. A seed decides the model's values and the batches, so that
the kinds pair by seed: the difference to float is the mean over the seeds, with its standard error.
"""

import argparse
import math
import pathlib
import statistics
import sys
import sysconfig
import time

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))
import octile  # noqa: E402

KINDS = {"float": None, "16bit": octile.Int8Training(), "int8": octile.Int8Training(backward="int8")}
BATCH, LENGTH, WARMUP = 8, 128, 20


def make(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, max_position_embeddings=LENGTH, router_aux_loss_coef=0.01)
    config._experts_implementation = "grouped_mm"
    return transformers.MixtralForCausalLM(config).train()


def text():
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def train(kind, seed, steps):
    """The mean loss of the last tenth of the steps, and the median time of one."""
    model, data, g = make(seed), text(), torch.Generator().manual_seed(seed)
    if KINDS[kind] is not None:
        octile.quantize_(model, KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses, times = [], []
    for step in range(steps):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min((step + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        at = torch.randint(0, len(data) - LENGTH, (BATCH, 1), generator=g) + torch.arange(LENGTH)
        ids = data[at].long()
        out = model(ids, labels=ids, output_router_logits=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item() - 0.01 * out.aux_loss.item())
        times.append(time.perf_counter() - begun)
    return statistics.mean(losses[-max(1, steps // 10) :]), statistics.median(times)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int, default=200)
    a = p.parse_args()
    results = {kind: [] for kind in a.kinds}
    for seed in range(1, a.seeds + 1):
        for kind in a.kinds:
            results[kind].append(train(kind, seed, a.steps))
            print(
                f"seed {seed} {kind:6} loss {results[kind][-1][0]:.4f} {results[kind][-1][1]:.3f} s a step", flush=True
            )
    for kind, runs in results.items():
        losses = [loss for loss, _ in runs]
        line = f"{kind:6} loss {statistics.mean(losses):.4f}, {statistics.median(t for _, t in runs):.3f} s a step"
        if kind != "float" and "float" in results and a.seeds > 1:
            differences = [b - f for b, (f, _) in zip(losses, results["float"], strict=True)]
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            line += f", beside float {statistics.mean(differences):+.4f} +- {error:.4f}"
        print(line)


if __name__ == "__main__":
    main()
