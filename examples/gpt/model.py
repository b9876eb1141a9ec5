"""Byte-level transformers: pre-norm blocks of nn.Linear, so that a layer converter has something to convert.

Two architectures: "gpt" (LayerNorm, GELU, biases, learned positions) and "llama" (RMSNorm, SwiGLU, rotary positions).
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes
ARCHITECTURES = ("gpt", "llama")


def rotations(length: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary positions, (length, size), for heads of that size; base 10,000 (Su et al., RoFormer)."""
    frequencies = 10_000 ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Element i of each head turns with element i + size / 2. x: (batch, heads, length, size)."""
    left, right = x.chunk(2, -1)
    return (x * cosines + torch.cat([-right, left], -1) * sines).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, split: bool, rotary: bool = False):
        super().__init__()
        self.heads, self.size, self.rotary = heads, width // heads, rotary
        # One layer for queries, keys and values, or one for each.
        self.inputs = nn.ModuleList(
            nn.Linear(width, size, bias=bias) for size in ([width] * 3 if split else [3 * width])
        )
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The layers' sizes count: with tensor parallelism x may have fewer tokens, and there are fewer heads.
        parts = [y.unflatten(-1, (-1, self.heads, self.size)) for y in (layer(x) for layer in self.inputs)]
        # Each (batch, heads, length, width / heads).
        q, k, v = (one.transpose(1, 2) for part in parts for one in part.unbind(2))
        if self.rotary:
            turns = rotations(q.shape[2], self.size, x.device)
            q, k = rotate(q, *turns), rotate(k, *turns)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """Shazeer, GLU Variants Improve Transformer."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up


class GatedMlp(nn.Module):
    """Gate and up are one layer; 8/3 of the width, in 128s."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        hidden = math.ceil(8 * width / 3 / 128) * 128
        self.up = nn.Linear(width, 2 * hidden, bias=bias)
        self.activation = SwiGLU()
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(self.activation(gate, up))


class Block(nn.Module):
    norms_add = False  # whether norms take what is added to x, and return the sum too

    def __init__(self, width: int, heads: int, bias: bool, split: bool, architecture: str):
        super().__init__()
        llama = architecture == "llama"
        norm = functools.partial(nn.RMSNorm, eps=1e-5) if llama else nn.LayerNorm
        self.norm_attention, self.norm_mlp = norm(width), norm(width)
        self.attention = Attention(width, heads, bias, split, rotary=llama)
        self.mlp = (GatedMlp if llama else Mlp)(width, bias)

    def forward(self, x: torch.Tensor, added: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, and what the next block adds to it first: in the pass of its norm, where that can."""
        h, x = self.normalized(self.norm_attention, x, added)
        # Under autocast a norm answers in f32; the sums stay in the type of x.
        h, x = self.normalized(self.norm_mlp, x, self.attention(h).to(x.dtype))
        return x, self.mlp(h).to(x.dtype)

    def normalized(self, norm: nn.Module, x: torch.Tensor, added: torch.Tensor | None):
        if added is None:
            return norm(x), x
        if self.norms_add:
            return norm(added, x)
        x = x + added
        return norm(x), x


class Gpt(nn.Module):
    """(batch, length) bytes -> the mean cross entropy of the bytes that follow, in nats.

    Positions are learned. The head has a weight of its own: with 256 symbols a tied one would save nothing, and untied
    neither it nor the embedding asks for another precision than it has.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        length: int,
        *,
        bias: bool = True,
        split: bool = False,
        architecture: str = "gpt",
    ):
        super().__init__()
        if architecture not in ARCHITECTURES:
            raise ValueError(f"architecture is {architecture!r}; it is one of {', '.join(ARCHITECTURES)}")
        llama = architecture == "llama"
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = None if llama else nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias and not llama, split, architecture) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5) if llama else nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, symbols: torch.Tensor, following: torch.Tensor, residual: torch.dtype) -> torch.Tensor:
        x = self.bytes(symbols)
        if self.positions is not None:
            x = x + self.positions(torch.arange(symbols.shape[1], device=symbols.device))
        x = x.to(residual)
        added = None
        for block in self.blocks:
            x, added = block(x, added)
        x = x if added is None else x + added
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, VOCABULARY), following.reshape(-1))

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """The same values for the same seed, whatever class the layers are of."""
        device = self.head.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        into_the_sum = {id(p) for b in self.blocks for p in (b.attention.out.weight, b.mlp.down.weight)}
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                p.normal_(0.0, 0.02, generator=generator)
                if id(p) in into_the_sum:
                    p.mul_(1 / math.sqrt(2 * len(self.blocks)))

    def groups(self, decay: float) -> list[dict]:
        """Parameters for an optimizer: matrices decay, vectors do not."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def parameters(*arguments, **named) -> int:
    """Parameters of a Gpt of these arguments, without biases and norms."""
    with torch.device("meta"):
        return sum(p.numel() for p in Gpt(*arguments, **named).parameters() if p.dim() > 1)


def operations(width: int, layers: int, length: int) -> tuple[int, int]:
    """Operations of one token forward and backward: in the linear layers of the blocks, and in attention (causal)."""
    # A product forward and two backward. Attention: two products forward and five backward (flash), half of them masked.
    return 6 * 12 * layers * width * width, 7 * layers * length * width
