"""Reasoner: a two-speed recurrence over a puzzle: z_L ← L(z_L + z_H + x) often, z_H ← H(z_H + z_L) once.

HRM and TRM are its two configs (`reasoner_config.py`): two modules, or one in both roles. Blocks are
post-normalized without an inner norm: x ← Norm(x + f(x)) as published, x ← Norm(αx + f(x)) with a scaling
rule. Norms have no gain, so the flat rule consists of α and the standard initialization.

model = Reasoner(HRMConfig(), PuzzleShape(vocabulary=11, length=81, puzzle_ids=1), seed=1)
segment = model(model.initial(len(tokens)), tokens, model.puzzle_rows(ids))
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.models.reasoner_config import PuzzleShape, ReasonerConfig
from deeploop.nn.context import Context
from deeploop.nn.init import init_truncated_
from deeploop.nn.layers import RMSNorm, Rotary, SelfAttention, SwiGLU, rotary_table
from deeploop.nn.recompute import Recompute, maybe_checkpoint
from deeploop.nn.residual import ScaledResidual
from deeploop.nn.written import as_written
from deeploop.rules import BRANCH
from deeploop.theory.visits import recurrence

HALTING_BIAS = -5.0  # σ(−5) = 0.7%: nothing halts before training


class Carry(NamedTuple):
    """The two states (B, T, width) that a segment passes to the next, outside any graph."""

    high: Tensor
    low: Tensor


class Segment(NamedTuple):
    """The outputs of one segment."""

    carry: Carry
    logits: Tensor  # (B, length, V)
    q: Tensor  # (B, 2): q_halt and q_continue, in fp32 or wider


def swiglu_hidden(width: int) -> int:
    """8/3 of the width, rounded up to a multiple of 256."""
    return -(-round(4 * width * 2 / 3) // 256) * 256


@as_written
class ReasonerBlock(nn.Module):
    """The mixer of positions, then SwiGLU, each in its residual equation."""

    def __init__(self, config: ReasonerConfig, module: str, positions: int) -> None:
        super().__init__()
        residual = partial(
            ScaledResidual,
            rule=config.rule_of(module),
            alpha=config.scales_of(module).alpha,
            init=False,
            norm=partial(RMSNorm, gain=False),
        )
        self.across = config.mixer == "mlp"
        self.mixer = (
            residual(SwiGLU(positions, swiglu_hidden(positions)), positions)
            if self.across
            else residual(SelfAttention(config.width, config.heads), config.width)
        )
        self.mlp = residual(SwiGLU(config.width, config.hidden), config.width)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        # An MLP over the sequence has its residual and norm along the sequence as well.
        x = self.mixer(x.transpose(1, 2)).transpose(1, 2) if self.across else self.mixer(x, context.rotary)
        x = self.mlp(x)
        return x


@as_written
class Stack(nn.Module):
    """The blocks of one module."""

    def __init__(self, config: ReasonerConfig, module: str, positions: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ReasonerBlock(config, module, positions) for _ in range(config.blocks_of[module])
        )

    def forward(
        self, z: Tensor, other: Tensor, rotary: Rotary, recomputed: int = 0, positions: int | None = None
    ) -> Tensor:
        """Apply all blocks once to z + other; activations of the first `recomputed` are not kept.

        If `positions` is given, only the first ones are returned, and kernels compute no more of the last
        block.
        """
        x = z + other
        for k, block in enumerate(self.blocks):
            x = maybe_checkpoint(block, x, Context(rotary), recompute=k < recomputed)
        return x[:, :positions]


class Reasoner(nn.Module):
    """One segment of hierarchical reasoning; `halting.py` sequences segments.

    `puzzles` holds a learned embedding per puzzle id. It is a buffer, as only a batch's rows ever have a
    gradient.
    """

    cos: Tensor
    sin: Tensor
    puzzles: Tensor
    initial_high: Tensor
    initial_low: Tensor

    def __init__(self, config: ReasonerConfig, shape: PuzzleShape, *, seed: int = 0) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.recompute: Recompute = "off"
        self.positions = config.puzzle_positions + shape.length
        self.embedding = nn.Embedding(shape.vocabulary, config.width)
        self.stacks = nn.ModuleDict({name: Stack(config, name, self.positions) for name in config.blocks_of})
        self.head = nn.Linear(config.width, shape.vocabulary, bias=False)
        self.halting = nn.Linear(config.width, 2)
        self.register_buffer("puzzles", torch.empty(shape.puzzle_ids, config.width))
        for name in ("initial_high", "initial_low"):
            self.register_buffer(name, torch.empty(config.width))
        for name in ("cos", "sin"):
            table = torch.empty(self.positions, config.head_size // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter and buffer; the same seed gives the same model on every device."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            top, *middle, attribute = name.split(".")
            if top == "halting":
                parameter.fill_(HALTING_BIAS if attribute == "bias" else 0.0)
                continue
            fan_in = self.config.width if top == "embedding" else parameter.shape[1]
            scaled = bool(middle) and middle[-1] in BRANCH  # stacks.L.blocks.0.mlp.branch.up.weight
            beta = self.config.scales_of(middle[0]).beta if scaled else 1.0
            init_truncated_([parameter], std=fan_in**-0.5, beta=beta, generator=generator)
        init_truncated_([self.initial_high, self.initial_low], std=1.0, generator=generator)
        self.puzzles.zero_()
        cos, sin = rotary_table(self.positions, self.config.head_size)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def initial(self, rows: int) -> Carry:
        """The initial carry of new puzzles."""
        shape = (rows, self.positions, self.config.width)
        return Carry(self.initial_high.expand(shape), self.initial_low.expand(shape))

    def puzzle_rows(self, ids: Tensor) -> Tensor:
        """The learned embeddings (B, width) of some puzzles, as a copy whose gradient trains them."""
        try:
            return F.embedding(ids, self.puzzles)  # indexing would accept −1 as the last row
        except IndexError:
            last = self.shape.puzzle_ids - 1
            raise ValueError(f"puzzle ids {ids.min()} to {ids.max()}: the model has 0 to {last}") from None

    def forward(self, carry: Carry, tokens: Tensor, puzzle: Tensor, *, q_only: bool = False) -> Segment:
        """All cycles of a segment on tokens (B, length); `puzzle` (B, width) are their puzzles' embeddings.

        With `q_only` only q is needed: there are no logits, and z_H has only the first position.
        """
        config = self.config
        device, dtype = puzzle.device.type, puzzle.dtype
        if torch.is_autocast_enabled(device):  # the states are in bf16 too, as published
            dtype = torch.get_autocast_dtype(device)
        x = self._input(tokens, puzzle, dtype)
        z_H, z_L = (state.to(dtype) for state in carry)
        entering = z_H + x  # the input of every L in a cycle
        grad = torch.is_grad_enabled()
        *_, last = calls = list(recurrence(config.cycles, config.low_cycles, config.horizon))
        for call in calls:
            positions = 1 if q_only and call is last else None
            run = partial(self._call, config.module_of(call.role), last=call is last, positions=positions)
            with torch.set_grad_enabled(grad and call.has_grad):
                if call.role == "L":
                    z_L = run(z_L, entering)
                else:
                    z_H = run(z_H, z_L)
            if call.role == "H" and call is not last:
                entering = z_H + x
        # All positions, as the gradient of a slice would need padding. A copy, as FSDP2 warns of views.
        logits = self.head(z_H)[:, config.puzzle_positions :].clone()
        q = self.halting(z_H[:, 0])
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        return Segment(Carry(z_H.detach(), z_L.detach()), logits, q)

    def _call(self, module: str, z: Tensor, other: Tensor, *, last: bool, positions: int | None) -> Tensor:
        """One call of a module. A "round" of `recompute` is a call; the last visit is always kept."""
        blocks = self.config.blocks_of[module] - last if self.recompute == "block" else 0
        rotary = self.cos, self.sin
        again = self.recompute == "round" and not last
        return maybe_checkpoint(self.stacks[module], z, other, rotary, blocks, positions, recompute=again)

    def _input(self, tokens: Tensor, puzzle: Tensor, dtype: torch.dtype) -> Tensor:
        """x (B, T, width): the puzzle's embedding, zeros up to its positions, the tokens; of unit size."""
        size = math.sqrt(self.config.width)
        zeros = puzzle.new_zeros(len(puzzle), self.config.puzzle_positions - 1, self.config.width)
        board = F.embedding(tokens, size * self.embedding.weight)  # the table is smaller than a board
        return torch.cat([part.to(dtype) for part in (size * puzzle.unsqueeze(1), zeros, board)], dim=1)
