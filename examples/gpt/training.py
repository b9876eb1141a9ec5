"""One worker: trains one kind of layers with one or several seeds, and tells what it measures as it goes."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from . import data, profiling
from .model import Gpt

# What the linear layers of the blocks are. dX and dW of each: in 16 bits, or in int8, dY in blocks of 256 terms or with one
# scale for the whole contraction; the forward is int8 in all of Octile's. "-fused": activations are computed by the pass that
# quantizes them, and "-norms": norms and the sums before them too.
MODES = {
    "bf16": None,
    "octile-16bit": {"backward": "16bit"},
    "octile-mixed": {"backward": ("int8", "16bit")},
    "octile-int8": {"backward": "int8"},
    "octile-int8-fused": {"backward": "int8"},
    "octile-int8-fused-norms": {"backward": "int8"},
    "octile-int8-128": {"backward": "int8-128"},
    "octile-int8-512": {"backward": "int8-512"},
    "octile-int8-whole": {"backward": "int8-whole"},
    "octile-int8-dw": {"backward": ("16bit", "int8")},
    "octile-stochastic": {"backward": "int8", "rounding": "stochastic"},
}
WARM_UP = 3  # steps before a run, which compile and are not counted
EAGER = 2  # steps of a run before its CUDA graph is captured
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
LAST_RATE = 0.1  # of the highest learning rate

Emit = Callable[[dict], None]


@dataclasses.dataclass
class Settings:
    mode: str = "bf16"
    architecture: str = "gpt"
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
    width: int = 1024
    layers: int = 8
    heads: int = 16
    length: int = 512
    batch: int = 32
    accumulate: int = 1
    steps: int = 1000
    rate: float = 6e-4
    warm_steps: int = 100
    bias: bool = True
    split_qkv: bool = False
    quantize_head: bool = False
    activation: str = "per_token"
    precision: str = "master"  # f32 parameters under bf16 autocast; "bf16": everything; "f32": nothing in 16 bits
    compile: str = "model"  # "model", "blocks", "off"
    compile_mode: str = "default"
    graph: bool = False  # a step is a CUDA graph: the host launches it whole
    deterministic: bool = False
    told_every: int = 10
    validate_every: int = 500
    validation_windows: int = 1024  # rounded to whole batches
    profile: bool = False
    # What the processes of torch.distributed share. "fsdp": the parameters, and each step's sequences; "tp": each layer, and
    # the tokens between layers; "2d": groups of `split` processes do as in "tp", and these groups as in "fsdp".
    parallel: str = "none"
    ranks: int = 1  # how many processes
    split: int = 2  # in "2d": processes that share a layer
    exact: bool = False  # whether their sums are of integers, where Octile's layers can
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.batch * self.length * self.accumulate


def rate_at(step: int, settings: Settings) -> float:
    """Up in a line, then down along a cosine."""
    if step < settings.warm_steps:
        return settings.rate * (step + 1) / settings.warm_steps
    done = (step - settings.warm_steps) / max(1, settings.steps - settings.warm_steps)
    return settings.rate * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def convert(model: Gpt, settings: Settings) -> str:
    """Puts Octile's layers in place of the blocks' (and the head's, if asked), and says what was done."""
    fields = MODES[settings.mode]
    if fields is None:
        return "nn.Linear"
    import octile

    wanted = {id(m) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
    if settings.quantize_head:
        wanted.add(id(model.head))
    config = octile.Int8Training(activation=settings.activation, **fields)
    report = octile.quantize_(model, config, filter=lambda module, name: id(module) in wanted)
    llama = settings.architecture == "llama"
    if "-fused" in settings.mode:
        fused = octile.SwiGLU if llama else octile.GELU
        for block in model.blocks:
            block.mlp.activation = fused(backward=config.backward)
    if settings.mode.endswith("-norms"):
        for block in model.blocks:
            block.norms_add = True
            for name in ("norm_attention", "norm_mlp"):
                norm = getattr(block, name)
                with torch.device("meta"):
                    new = (octile.RMSNorm if llama else octile.LayerNorm)(
                        *norm.weight.shape, norm.eps, backward=config.backward
                    )
                new.load_state_dict(norm.state_dict(keep_vars=True), assign=True)
                setattr(block, name, new)
    left = [n for n, m in model.blocks.named_modules() if type(m) is nn.Linear]
    if left:
        raise RuntimeError(f"not converted: {', '.join(left)}")
    return str(report)


def meshes(settings: Settings):
    """The processes that have other sequences, and those that share layers; None: no such."""
    from torch.distributed.device_mesh import init_device_mesh

    kind, ranks = torch.device(settings.device).type, dist.get_world_size()
    if settings.parallel == "fsdp":
        return init_device_mesh(kind, (ranks,)), None
    if settings.parallel == "tp":
        return None, init_device_mesh(kind, (ranks,))
    both = init_device_mesh(kind, (ranks // settings.split, settings.split), mesh_dim_names=("replicas", "split"))
    return both["replicas"], both["split"]


def split_layers(model: Gpt, settings: Settings, mesh) -> None:
    """Tensor parallelism: a rank has some heads, some channels and, between the layers, some tokens of each sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    column, row, words = ColwiseParallel, RowwiseParallel, {}
    if MODES[settings.mode] is not None:
        from octile.parallel import ColumnParallel as column  # noqa: N813
        from octile.parallel import RowParallel as row  # noqa: N813

        words = {"exact": settings.exact}
    tokens = Shard(1)
    for block in model.blocks:
        plan = {name: SequenceParallel(use_local_output=True) for name in ("norm_attention", "norm_mlp")}
        for name in [f"attention.inputs.{i}" for i in range(len(block.attention.inputs))] + ["mlp.up"]:
            plan[name] = column(input_layouts=tokens)
        plan |= {name: row(output_layouts=tokens, **words) for name in ("attention.out", "mlp.down")}
        parallelize_module(block, mesh, plan)
        block.attention.heads //= mesh.size()
    plan = {"bytes": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)}
    plan |= {"positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))}
    plan |= {"norm": SequenceParallel(use_local_output=True)}
    plan |= {"head": column(input_layouts=tokens, output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)


def shard(model: Gpt, settings: Settings, mesh) -> None:
    """FSDP2, block by block. It gathers the weights of Octile's layers as int8."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if MODES[settings.mode] is not None:
        import octile

        octile.fsdp.prepare_(model)
    policy = MixedPrecisionPolicy()
    if settings.precision == "master":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


class Trainer:
    def __init__(self, settings: Settings, training: torch.Tensor, validation: torch.Tensor):
        self.settings, self.training, self.validation = settings, training, validation
        s = settings
        if s.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        replicas, split = meshes(s) if s.parallel != "none" else (None, None)
        self.parallel, self.sharded = s.parallel != "none", replicas is not None
        # Of the processes that have other sequences.
        self.rank, self.ranks = (replicas.get_local_rank(), replicas.size()) if replicas else (0, 1)
        self.model = self.build()
        self.converted = convert(self.model, s)
        self.cached = None
        if MODES[s.mode] and s.accumulate > 1 and not self.parallel:
            import octile

            # Otherwise each micro-batch quantizes the weights.
            self.cached = octile.cache_weights_(self.model)
        if split:
            split_layers(self.model, s, split)
        self.residual = torch.float32 if s.precision == "f32" else torch.bfloat16
        self.forward = self.model
        if s.compile == "model":
            self.forward = torch.compile(self.model, fullgraph=True, mode=s.compile_mode)
        elif s.compile == "blocks":
            for block in self.model.blocks:
                block.compile(fullgraph=True, mode=s.compile_mode)
        if replicas:
            shard(self.model, s, replicas)

    def build(self) -> Gpt:
        s = self.settings
        with torch.device(s.device):
            built = Gpt(
                s.width, s.layers, s.heads, s.length, bias=s.bias, split=s.split_qkv, architecture=s.architecture
            )
        return built.bfloat16() if s.precision == "bf16" else built

    def reset(self, seed: int) -> None:
        if not self.parallel:
            self.model.reset(seed)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        whole = self.build()
        whole.reset(seed)
        if self.sharded:
            self.model.reshard()  # a forward without a backward left the root's parameters whole
        set_model_state_dict(self.model, whole.state_dict(), options=StateDictOptions(full_state_dict=True))

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Over the ranks."""
        if self.parallel:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss

    def autocast(self):
        if self.settings.precision != "master" or self.sharded:  # FSDP2 casts by itself
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.settings.device).type, torch.bfloat16)

    def loss(self, starts: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        symbols, following = data.windows(text, starts.chunk(self.ranks)[self.rank], self.settings.length)
        with self.autocast():
            return self.forward(symbols, following, self.residual)

    def begin(self, seed: int) -> torch.Tensor:
        """A fresh model and optimizer; returns the first bytes of all windows, (steps, micro-batches, batch)."""
        s = self.settings
        self.model.zero_grad(set_to_none=True)
        self.reset(seed)
        if self.cached:
            self.cached.refresh()
        rate = torch.tensor(s.rate, device=s.device) if s.graph else s.rate
        groups = self.model.groups(DECAY)
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True, capturable=s.graph)
        self.graph = None
        return data.random_starts(self.training, (s.steps, s.accumulate, s.batch), s.length, seed)

    def step(self, number: int, starts: torch.Tensor) -> torch.Tensor:
        rate = rate_at(number, self.settings)
        for group in self.optimizer.param_groups:
            if not self.settings.graph:
                group["lr"] = rate
            else:
                group["lr"].fill_(rate)
        if not self.settings.graph or number < EAGER:
            return self.update(starts)
        if self.graph is None:
            self.capture(starts)
        self.starts.copy_(starts)
        self.graph.replay()
        return self.total.clone()

    def capture(self, starts: torch.Tensor) -> None:
        self.starts, self.graph = starts.clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # NCCL's watchdog, a thread of its own, may call CUDA meanwhile.
        mode = {"stream": torch.cuda.current_stream(), "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.graph, **mode):
            self.total = self.update(self.starts)

    def update(self, starts: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=self.training.device)
        for micro in starts:
            loss = self.loss(micro, self.training) / len(starts)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        if self.cached:
            self.cached.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        return self.mean(total)

    def validate(self) -> float:
        """By the graph that training uses, so that nothing is compiled again."""
        s = self.settings
        batches = max(1, round(s.validation_windows / s.batch))
        starts = data.even_starts(self.validation, batches * s.batch, s.length)
        losses = [self.loss(part, self.validation).detach() for part in starts.split(s.batch)]
        return self.mean(torch.stack(losses).mean()).item()

    def wait(self) -> float:
        if self.settings.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.settings.device.startswith("cuda") else None

    def warm_up(self, emit: Emit) -> None:
        begun = self.wait()
        starts = self.begin(self.settings.seeds[0])
        for number in range(WARM_UP):
            self.step(number, starts[number % len(starts)])
            if not number:
                emit({"event": "compiled", "seconds": self.wait() - begun})
        if self.settings.profile:
            emit({"event": "profile", **profiling.of(lambda: self.step(0, starts[0]), self.wait)})

    def run(self, seed: int) -> Iterator[dict]:
        s = self.settings
        starts = self.begin(seed)
        if self.settings.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        told, since = [], self.wait()
        for number in range(s.steps):
            told.append(self.step(number, starts[number]))
            last = number + 1 == s.steps
            if len(told) == s.told_every or last:
                losses = torch.stack(told).tolist()
                now = self.wait()
                yield {"event": "steps", "until": number + 1, "losses": losses, "seconds": now - since}
                told, since = [], now
            if last or (s.validate_every and (number + 1) % s.validate_every == 0):
                yield {"event": "validation", "step": number + 1, "loss": self.validate()}
                since = self.wait()
        yield {"event": "seed done", "peak": self.peak()}


def work(settings: Settings, training: torch.Tensor, validation: torch.Tensor, emit: Emit) -> None:
    if settings.parallel != "none":  # as torchrun has started it
        if settings.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
        if dist.get_rank():
            emit = lambda event: None  # noqa: E731
    if settings.graph:
        torch.cuda.set_stream(torch.cuda.Stream())  # autograd remembers the stream of the eager steps
    trainer = Trainer(settings, training.to(settings.device), validation.to(settings.device))
    emit({"event": "built", "layers": trainer.converted})
    trainer.warm_up(emit)
    for seed in settings.seeds:
        for event in trainer.run(seed):
            emit({"seed": seed, **event})
    if settings.parallel != "none":
        dist.barrier()
        trainer.graph = None  # the group would wait for a graph that has its collectives
        dist.destroy_process_group()
