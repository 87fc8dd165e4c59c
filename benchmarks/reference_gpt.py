"""A looped GPT as an expert writes it in plain PyTorch: what `deeploop bench` is compared with.

Nothing of deeploop, and nothing left lying: q, k, v and SwiGLU's two inputs as one product each, cuDNN or
flash attention, bf16 autocast, all visits as one graph under `torch.compile` (beyond `WHOLE` visits, where
that takes minutes, block by block), a cross-entropy in compiled chunks that takes its gradients on the way
and never holds all logits, fused AdamW. In FP8 its products are torchao's. The same model: DeepLoop's block,
QK-norm after rotary, SwiGLU, tied embedding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WHOLE = 40  # visits: 36 compiled in 112 s, 72 in 200 s
CHUNK = 8192  # positions whose logits are held at a time
PACKED = {"attention.qkv": ("q", "k", "v"), "mlp.gate_up": ("gate", "up")}


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
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = Norm(width // heads), Norm(width // heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(rotate(q, cos, sin)), self.k_norm(rotate(k, cos, sin))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.attention, self.mlp = Attention(width, heads), SwiGLU(width, hidden)
        self.norms = nn.ModuleList(Norm(width) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.norms[1](self.alpha * x + self.attention(self.norms[0](x), cos, sin))
        return self.norms[3](self.alpha * x + self.mlp(self.norms[2](x)))


def chunk_loss(x: Tensor, weight: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of some positions times `scale`, with its gradients in x and in the weight."""
    logits = (x @ weight.T).float()
    normalizer = logits.logsumexp(-1, keepdim=True)
    loss = (normalizer - logits.gather(-1, targets[:, None])).sum() * scale
    grad = (logits - normalizer).exp() * scale
    grad = grad.scatter_add(-1, targets[:, None], torch.full_like(normalizer, -scale)).type_as(x)
    return loss, grad @ weight, grad.T @ x


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of a linear head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk_loss: Any) -> Tensor:
        narrow = weight.to(x.dtype)
        loss, grads, total = x.new_zeros((), dtype=torch.float32), [], torch.zeros_like(weight)
        for part, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
            more, grad_x, grad_weight = chunk_loss(part, narrow, wanted, 1 / len(x))
            loss += more
            total += grad_weight
            grads.append(grad_x)
        ctx.save_for_backward(torch.cat(grads), total)
        return loss

    @staticmethod
    def backward(ctx: Any, *outgoing: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = outgoing
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * scale, grad_weight * scale, None, None


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
        self.run, self.chunk_loss = self.states, chunk_loss

    def to_float8(self) -> None:
        """FP8 products by torchao, scaled by tensor, for every Linear whose sides are multiples of 16.

        On a CPU they are emulated.
        """
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def fits(module: nn.Module, name: str) -> bool:
            return isinstance(module, nn.Linear) and not any(side % 16 for side in module.weight.shape)

        config = Float8LinearConfig(emulate=not self.cos.is_cuda)
        convert_to_float8_training(self, config=config, module_filter_fn=fits)

    def compile_for_training(self) -> None:
        """All visits as one graph where that is a matter of a minute or two, else block by block."""
        self.chunk_loss = torch.compile(chunk_loss)
        if len(self.blocks) * self.rounds <= WHOLE:
            self.run = torch.compile(self.states, fullgraph=True)
        else:
            for block in self.blocks:
                block.compile(fullgraph=True)

    def load_parts(self, parts: dict[str, Tensor]) -> None:
        """Takes weights under their usual names, where q, k, v, gate and up lie apart."""
        for k in range(len(self.blocks)):
            for packed, names in PACKED.items():
                branch = packed.partition(".")[0]
                whole = [parts.pop(f"blocks.{k}.{branch}.{name}.weight") for name in names]
                parts[f"blocks.{k}.{packed}.weight"] = torch.cat(whole)
        self.load_state_dict(parts)

    def states(self, tokens: Tensor) -> Tensor:
        x = self.input_norm(self.embedding(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x, cos, sin)
        return self.final_norm(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.run(tokens).flatten(0, 1)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        loss: Tensor = ChunkedLoss.apply(x, self.embedding.weight, targets.flatten(), self.chunk_loss)
        return loss
