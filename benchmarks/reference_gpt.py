"""A looped GPT written the usual way: what `deeploop bench` is compared with.

Plain PyTorch and nothing of deeploop: nn.Linear, F.rms_norm, F.scaled_dot_product_attention, F.cross_entropy
on fp32 logits, bf16 autocast, `torch.compile` for each block, fused AdamW. The same model: sandwich block,
QK-norm after rotary, SwiGLU, tied embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, 1e-5).type_as(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = Norm(width // heads), Norm(width // heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.q_norm(rotate(q, cos, sin)), self.k_norm(rotate(k, cos, sin))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.attention, self.mlp = Attention(width, heads), SwiGLU(width, hidden)
        self.norms = nn.ModuleList(Norm(width) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.norms[1](self.alpha * x + self.attention(self.norms[0](x), cos, sin))
        return self.norms[3](self.alpha * x + self.mlp(self.norms[2](x)))


class ReferenceGPT(nn.Module):
    """`forward(tokens, targets)` is the mean cross-entropy."""

    def __init__(
        self, *, blocks: int, rounds: int, width: int, heads: int, hidden: int, vocabulary: int, context: int
    ) -> None:
        super().__init__()
        self.rounds = rounds
        alpha = (2 * blocks * rounds) ** 0.5
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, alpha) for _ in range(blocks))
        self.input_norm, self.final_norm = Norm(width), Norm(width)
        size = width // heads
        angle = torch.outer(torch.arange(context), 10000 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.apply(
            lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear | nn.Embedding) else None
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.input_norm(self.embedding(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x, cos, sin)
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
