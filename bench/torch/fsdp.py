#!/usr/bin/env python3
"""Training under FSDP2: bf16, Octile's int8 with weights gathered as bf16 and as int8, torchao's fp8 gathered as fp8.

    torchrun --nproc-per-node 2 bench/torch/fsdp.py                 # 2 GPUs, within three minutes
    torchrun --nproc-per-node 2 bench/torch/fsdp.py --tiny          # CPUs, to try it out

The example's GPT (examples/gpt), its blocks compiled. For each kind and number of sequences a GPU: tokens a second and
GPU beside bf16, the bytes that a GPU's all-gathers of a step deliver, and the peak of memory. A kind ends with "alone"
where each GPU trains its own model: what sharding costs. Each step waits for the GPU.
"""

import argparse
import contextlib
import gc
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "python"), str(ROOT / "examples")]
import octile  # noqa: E402
from gpt.model import Gpt  # noqa: E402

KINDS = ["bf16", "int8", "int8-gathered-bf16", "fp8", "bf16-alone", "int8-alone"]


class Gathers:
    """Counts what all-gathers deliver to this rank: wraps torch.distributed's functions, which FSDP2 calls by name."""

    def __init__(self):
        self.bytes, self.inside = 0, False
        for name in ("all_gather_into_tensor", "all_gather_single"):
            if hasattr(dist, name):
                setattr(dist, name, self.counted(getattr(dist, name)))

    def counted(self, function):
        def gather(*arguments, **words):
            outermost, self.inside = not self.inside, True
            try:
                if outermost:
                    self.bytes += (arguments[0] if arguments else words["output_tensor"]).nbytes
                return function(*arguments, **words)
            finally:
                self.inside = not outermost

        return gather


def build(kind, a, device):
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(a.width, a.layers, max(1, a.width // 128), a.length)
    model.reset(0)
    if kind.startswith("int8"):
        linears = {id(m) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
        config = octile.Int8Training(backward=a.backward)
        octile.quantize_(model, config, filter=lambda module, name: id(module) in linears)
        if kind == "int8":
            octile.fsdp.prepare_(model)
    elif kind == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model.blocks, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    if not a.tiny:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
    if not kind.endswith("alone"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        words = {"mp_policy": policy} | ({"reshard_after_forward": False} if a.keep else {})
        for first in range(0, a.layers, a.unit):
            fully_shard(list(model.blocks[first : first + a.unit]), **words)
        fully_shard(model, **words)
    return model


def captured(step):
    """`step` as a CUDA graph, to be replayed."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        out = step()

    def replay():
        graph.replay()
        return out

    return replay


def measure(kind, model, optimizer, batch, a, device, gathers):
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    alone = kind.endswith("alone")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds, delivered = [], 0
    gc.collect()
    gc.disable()  # as torchtitan does between its collections
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    text = torch.empty(batch, a.length + 1, dtype=torch.int64, device=device)

    def step():
        with torch.autocast(device.type, torch.bfloat16) if alone else contextlib.nullcontext():
            loss = model(text[:, :-1], text[:, 1:], torch.bfloat16)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "fp8":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        return loss.detach()

    # The stream of the eager steps is the capture's, too: autograd remembers on which stream it made a node.
    side = torch.cuda.stream(torch.cuda.Stream()) if a.graph else contextlib.nullcontext()
    run = step
    with side:
        for number in range(a.warm + a.steps):
            text.random_(0, 256, generator=generator)
            gathers.bytes = 0
            if a.graph and number == a.warm - 1:
                run = captured(step)
            wait()
            begun = time.perf_counter()
            loss = run()
            wait()
            seconds.append(time.perf_counter() - begun)
            delivered = gathers.bytes or delivered
    gc.enable()
    seconds = statistics.median(seconds[a.warm :])
    # The slowest rank.
    seconds = torch.tensor(seconds, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    seconds = seconds.item()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    found = {"kind": kind, "batch": batch, "tokens_per_second": batch * a.length / seconds, "seconds": seconds}
    return found | {"gathered_bytes": delivered, "peak_gib": peak, "loss": loss.item()}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    p.add_argument("--batches", nargs="+", type=int, default=[8, 2, 1], help="sequences a GPU")
    p.add_argument("--width", type=int, default=4096)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--unit", type=int, default=1, help="blocks that FSDP2 gathers together")
    p.add_argument("--keep", action="store_true", help="weights stay gathered from forward to backward")
    p.add_argument("--graph", action="store_true", help="a step is a CUDA graph")
    p.add_argument("--backward", default="int8", help="of Octile's layers")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--warm", type=int, default=4, help="steps that are not timed")
    p.add_argument("--seconds", type=float, default=150, help="nothing more is begun after so long")
    p.add_argument("--json", type=pathlib.Path)
    p.add_argument("--tiny", action="store_true")
    a = p.parse_args()
    if a.tiny:
        a.width, a.layers, a.length, a.steps, a.warm = 128, 2, 32, 2, 1
    gpu = torch.cuda.is_available() and not a.tiny
    begun = time.monotonic()
    if gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    gathers, found = Gathers(), []

    def say(*words):
        if dist.get_rank() == 0:
            print(*words, flush=True)

    say(
        f"{dist.get_world_size()} x {torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}, octile"
    )
    say(f"{octile.__version__} ({octile.BINDING}), width {a.width}, {a.layers} blocks, {a.length} tokens a sequence")
    say(f"{'kind':20}{'batch':>6}{'tokens/s':>11}{'ms':>9}{'to bf16':>9}{'gathered':>12}{'peak':>11}{'loss':>9}")
    for kind in a.kinds:
        late = torch.tensor(float(time.monotonic() - begun > a.seconds), device=device)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late.item():
            say(f"{kind:20} left out: {a.seconds:.0f} s are over")
            continue
        torch._dynamo.reset()
        try:
            model = build(kind, a, device)
        except ImportError as error:  # the same on all ranks
            say(f"{kind:20} left out: {error}")
            continue
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=a.graph)
        for batch in a.batches:
            one = measure(kind, model, optimizer, batch, a, device, gathers)
            beside = [
                f for f in found if f["batch"] == batch and f["kind"] == "bf16" + "-alone" * kind.endswith("alone")
            ]
            ratio = one["tokens_per_second"] / beside[0]["tokens_per_second"] if beside else 1.0
            found.append(one | {"to_bf16": ratio})
            say(
                f"{kind:20}{batch:>6}{one['tokens_per_second']:>11,.0f}{one['seconds'] * 1e3:>9.1f}{ratio:>8.2f}x"
                f"{one['gathered_bytes'] / 2**20:>8.1f} MiB{one['peak_gib']:>7.1f} GiB{one['loss']:>9.4f}"
            )
        del model, optimizer
        if gpu:
            torch.cuda.empty_cache()
    say(f"{time.monotonic() - begun:.0f} s")
    if a.json and dist.get_rank() == 0:
        a.json.write_text(json.dumps({"settings": {**vars(a), "json": str(a.json)}, "runs": found}, indent=1))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's end beside gloo's threads has aborted now and then


if __name__ == "__main__":
    main()
