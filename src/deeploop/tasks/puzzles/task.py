"""The puzzle task: train a reasoner.

One optimizer step is one segment of every slot. The loader draws a puzzle for every slot at every step; only
slots that have halted take theirs, as in the published code.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deeploop.accelerate.known import fits_reasoner, runs_mixers
from deeploop.data.draws import keys, words
from deeploop.models.accounting import flops_per_segment, segment_bytes
from deeploop.models.halting import Slots, minimum_segments, supervise
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import PuzzleShape
from deeploop.nn.kernels.products import cast_cache
from deeploop.runs.folder import puzzle_shape
from deeploop.tasks.puzzles.config import ReasonerTrainConfig
from deeploop.tasks.puzzles.data.arc import arc_differences
from deeploop.tasks.puzzles.data.loader import PuzzleLoader
from deeploop.tasks.puzzles.data.sets import open_puzzles
from deeploop.tasks.puzzles.recipes import expected_shape
from deeploop.tasks.puzzles.scoring import PuzzleScore, Solver, score, spread_rows
from deeploop.tasks.puzzles.sign_sgd import sign_sgd_
from deeploop.train.adam_atan2 import AdamATan2, averaged
from deeploop.train.checks import REAL
from deeploop.train.distributed import World, arithmetic, uses_bf16
from deeploop.train.execution import Capabilities, runs_kernels
from deeploop.train.memory import shards
from deeploop.train.optim import learning_rate, make_reasoner_optimizer
from deeploop.train.task import OnBatch, StepData, Task, ignore_batch
from deeploop.train.transfer import copy_to_device

Batch = tuple[Tensor, ...]  # the slots' tensors, and the fewest segments before each may halt


class PuzzleTask(Task):
    """A reasoner on a set of puzzles."""

    config: ReasonerTrainConfig
    model: Reasoner
    optimizer: AdamATan2

    def __init__(self, config: ReasonerTrainConfig, world: World) -> None:
        super().__init__(config, world)
        batch = config.optim.batch
        self.mine = world.rows(batch)  # this rank's slots
        self.share = batch // world.size
        self.puzzles = open_puzzles(config.data.path)
        self.shape = self.puzzles.shape
        self.positions = config.model.puzzle_positions + self.shape.length
        fits = fits_reasoner(config.model, self.positions)
        fits = fits and (config.model.mixer == "attention" or runs_mixers(world.device))
        needs = partial(
            segment_bytes,
            config.model,
            self.shape,
            share=self.share,
            shards=shards(config.device, world),
            kernels=runs_kernels(config.device, world.device, fits),
        )
        self.fit_memory(needs, self.positions)
        self.loader = PuzzleLoader(self.puzzles, seed=config.seed)
        self.test = spread_rows(self.puzzles.test, config.data.test_examples, world.rank, world.size)
        self.examples = len(self.puzzles.train)
        self.targets_per_step = batch * self.shape.length
        self.flops_per_step = batch * segment_flops(config, self.shape)
        self.segment = 0
        self._explore = keys(config.seed, 0, 2)[0]  # differs from the loader's keys
        self._left: tuple[Slots, Tensor] | None = None
        self._done: list[Slots] = []
        self._touched: list[tuple[Tensor, Tensor]] = []

    @property
    def capabilities(self) -> Capabilities:
        """Steps can be captured and queued, as only the device reads which puzzles halt.

        A bad step can't be skipped: non-finite values may already be in the carried states.
        """
        return Capabilities(recordable=True, queueable=True, tokens=self.fit.micro_batch * self.positions)

    @classmethod
    def tokens_and_flops(cls, config: ReasonerTrainConfig) -> tuple[int, float] | None:
        """Tokens are the cells of the boards, at every segment; None for boards of unknown size."""
        shape = expected_shape(config.data.path)
        if shape is None:
            return None
        tokens = config.optim.steps * config.optim.batch * shape.length
        return tokens, segment_flops(config, shape) / shape.length

    def build(self) -> Reasoner:
        """Build the model with freshly drawn weights, identical on every machine, and empty slots."""
        self.model = Reasoner(self.config.model, self.shape, seed=self.config.seed).to(self.world.device)
        self.model.recompute = self.fit.recompute
        self.slots = Slots.waiting(self.share, self.shape.length, self.model.initial(self.share))
        return self.model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.optimizer = make_reasoner_optimizer(model, self.config.optim)
        return self.optimizer

    def stamp(self) -> dict[str, Any]:
        """The task's fields in run.json."""
        return {**super().stamp(), "puzzles": self.puzzles.hash, "shape": self.shape._asdict()}

    def check_source(self, stamp: dict[str, Any], run: Path) -> None:
        """Raise ValueError for weights trained on puzzles with another number of symbols."""
        if (theirs := puzzle_shape(run).vocabulary) != self.shape.vocabulary:
            raise ValueError(
                f"init_from={run}: its puzzles have {theirs} tokens (symbols, padding and ends), those of "
                f"{self.config.data.path} {self.shape.vocabulary}; the numbers of symbols must be equal"
            )

    def state(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint."""
        return {"loader": self.loader.state(), "puzzles": self.puzzles.hash, "segment": self.segment}

    def tensors(self) -> dict[str, Tensor]:
        """The slots of all ranks, for a checkpoint."""
        return {name: self.world.gather_rows(tensor).cpu() for name, tensor in self.slots.tensors().items()}

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config = self.config
        if (started := str(state.get("puzzles"))) != self.puzzles.hash:
            raise ValueError(
                f"data.path={config.data.path}: puzzles of hash {self.puzzles.hash:.12}…, "
                f"not the puzzles that the run was started on ({started:.12}…); point data.path to those"
            )
        ids = tensors.get("ids")
        if (batch := 0 if ids is None else ids.numel()) != config.optim.batch:
            raise ValueError(f"optim.batch={config.optim.batch}: the run was started with {batch}; keep that")
        self._check_slots(tensors)
        types = {name: tensor.dtype for name, tensor in self.slots.tensors().items()}
        if uses_bf16(config.device, self.world.device):  # states computed in bf16 stay in bf16
            types |= {name: tensors[name].dtype for name in ("high", "low")}
        self.slots = Slots(
            **{name: whole[self.mine].to(self.world.device, types[name]) for name, whole in tensors.items()}
        )
        self.segment = state.get("segment", 0)
        self.loader.load_state(state.get("loader", {}))

    def _check_slots(self, tensors: dict[str, Tensor]) -> None:
        """Raise ValueError unless the slots fit these puzzles and this model."""
        for name, tensor in self.slots.tensors().items():
            saved = tensors.get(name)
            shape = (self.config.optim.batch, *tensor.shape[1:])
            if saved is None or saved.shape != shape:
                theirs = "absent" if saved is None else tuple(saved.shape)
                raise ValueError(f"task.safetensors: {name} is {theirs}, must be {shape}")
            if saved.dtype != tensor.dtype and not (tensor.is_floating_point() and saved.dtype in REAL):
                raise ValueError(f"task.safetensors: {name} is of {saved.dtype}, must be like {tensor.dtype}")
        bounds = {
            "inputs": self.shape.vocabulary,
            "labels": self.shape.vocabulary,
            "ids": self.shape.puzzle_ids,
        }
        for name, bound in bounds.items():
            if not (tensors[name].min() >= 0 and tensors[name].max() < bound):
                raise ValueError(f"task.safetensors: {name}: must be 0 to {bound - 1}")
        if unknown := tensors.keys() - self.slots.tensors().keys():
            raise ValueError(f"task.safetensors: {min(unknown)!r:.40} is not a tensor of the slots")

    def batches(self, step: int) -> StepData:
        """Put new puzzles into the slots that halted; return this rank's slots in micro-batches."""
        new = self.loader.next_batch(self.config.optim.batch, self.mine)
        inputs, labels, ids = (copy_to_device(one, self.world.device) for one in new)
        self.slots = self.slots.refill_(inputs, labels, ids, self.model.initial(1))
        columns = (*self.slots.tensors().values(), self._minimum())
        pieces = zip(*(column.split(self.fit.micro_batch) for column in columns), strict=True)
        self._done, self._touched = [], []
        return StepData(list(pieces))

    def _minimum(self) -> Tensor:
        """Draw the fewest segments before a halt, for every slot of this rank."""
        slots = np.arange(self.mine.start, self.mine.stop)
        draws = words(self._explore, self.segment * self.config.optim.batch + slots, 2)
        explore, draw = torch.from_numpy((draws >> np.uint64(11)).astype(np.float64) / 2**53).unbind(1)
        return copy_to_device(minimum_segments(explore, draw, self.config.halting), self.world.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The segment's loss summed over the micro-batch, as a share of the step's puzzles."""
        *columns, minimum = batch
        slots = Slots(*columns)
        puzzle = self.model.puzzle_rows(slots.ids).requires_grad_()
        with cast_cache():  # HRM looks one segment ahead with the same weights
            loss, after = supervise(model, slots, puzzle, minimum, self.config.halting)
        self._left = after, puzzle
        return loss / self.config.optim.batch

    def leave(self) -> Batch:
        """Return the slots' state after the segment, and the gradient of the puzzle embeddings."""
        assert self._left is not None
        after, puzzle = self._left
        self._left = None
        assert puzzle.grad is not None
        return after.high, after.low, after.steps, after.halted, puzzle.grad

    def receive(self, batch: Batch, left: Batch) -> None:
        """Keep the results of a micro-batch until all of them are done."""
        before = Slots(*batch[:-1])
        *moved, gradient = left
        names = ("high", "low", "steps", "halted")
        self._done.append(replace(before, **dict(zip(names, moved, strict=True))))
        self._touched.append((before.ids, gradient))

    def update(self, step: int, only_if: Tensor | None) -> None:
        """Update the rows of the puzzle table in the batch, and advance the slots even after a bad step."""
        optim = self.config.optim
        ids, gradients = zip(*self._touched, strict=True)
        sign_sgd_(
            self.model.puzzles,
            torch.cat(ids),
            torch.cat(gradients),
            lr=learning_rate(step, replace(optim, peak_lr=optim.puzzle_lr)),
            weight_decay=optim.puzzle_weight_decay,
            world=self.world,
            only_if=only_if,
        )
        self.slots = Slots.joined(self._done)
        self.segment += 1

    def evaluate(self, model: nn.Module, on_batch: OnBatch = ignore_batch) -> dict[str, Any]:
        """Loss, share of puzzles and of cells that are right, and segments until the model halts."""
        config, world = self.config, self.world
        with averaged(self.optimizer):
            solver = Solver(
                self.model,
                config.halting,
                self.fit.micro_batch,
                world.device,
                partial(arithmetic, config.device, world.device),
            )
            own = score(solver, self.test, before_batch=on_batch)
        sums = world.sum(torch.tensor(own, dtype=torch.float64, device=world.device))
        return PuzzleScore(*sums.tolist()).means()

    def warnings(self) -> list[str]:
        """Describe a run too short for its averaged weights, and how ARC differs from the paper's."""
        ema, steps = self.config.optim.ema, self.config.optim.steps
        found = arc_differences(self.puzzles, steps, self.config.optim.batch)
        if ema and 1 / (1 - ema) > steps:
            found.append(
                f"validations use averaged weights, which stay near the start: they average over about "
                f"{1 / (1 - ema):,.0f} steps, and the run has {steps:,}; set a smaller --optim.ema ({ema:g})"
            )
        return found

    def describe(self, result: dict[str, Any]) -> str:
        """Format an evaluation in one line."""
        return (
            f"test loss {result['loss']:.4f}  exact {result['exact']:.1%}  cells {result['cells']:.1%}  "
            f"segments wanted {result['segments']:.1f}"
        )


def segment_flops(config: ReasonerTrainConfig, shape: PuzzleShape) -> int:
    """Training FLOPs of one puzzle's segment."""
    return flops_per_segment(config.model, shape, forward_again=config.halting.bootstraps_continue)
