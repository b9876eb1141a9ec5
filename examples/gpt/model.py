"""A byte-level GPT: pre-LN blocks of nn.Linear, so that a layer converter has something to convert."""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, split: bool):
        super().__init__()
        self.heads = heads
        # One layer for queries, keys and values, or one for each.
        self.inputs = nn.ModuleList(
            nn.Linear(width, size, bias=bias) for size in ([width] * 3 if split else [3 * width])
        )
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = [layer(x).view(batch, length, -1, self.heads, width // self.heads) for layer in self.inputs]
        # Each (batch, heads, length, width / heads).
        q, k, v = (one.transpose(1, 2) for part in parts for one in part.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, split: bool):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads, bias, split), Mlp(width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Under autocast a norm answers in f32; the sums stay in the type of x.
        x = x + self.attention(self.norm_attention(x)).to(x.dtype)
        return x + self.mlp(self.norm_mlp(x)).to(x.dtype)


class Gpt(nn.Module):
    """(batch, length) bytes -> the mean cross entropy of the bytes that follow, in nats.

    Positions are learned. The head has a weight of its own: with 256 symbols a tied one would save nothing, and untied
    neither it nor the embedding asks for another precision than it has.
    """

    def __init__(self, width: int, layers: int, heads: int, length: int, bias: bool = True, split: bool = False):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias, split) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, symbols: torch.Tensor, following: torch.Tensor, residual: torch.dtype) -> torch.Tensor:
        at = torch.arange(symbols.shape[1], device=symbols.device)
        x = (self.bytes(symbols) + self.positions(at)).to(residual)
        for block in self.blocks:
            x = block(x)
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


def parameters(width: int, layers: int, length: int) -> int:
    """Parameters without biases and norms."""
    return 12 * layers * width * width + (2 * VOCABULARY + length) * width


def operations(width: int, layers: int, length: int) -> tuple[int, int]:
    """Operations of one token forward and backward: in the linear layers of the blocks, and in attention (causal)."""
    # A product forward and two backward. Attention: two products forward and five backward (flash), half of them masked.
    return 6 * 12 * layers * width * width, 7 * layers * length * width
