"""Options of `deeploop bench`."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from deeploop.config.checks import at_least
from deeploop.tasks.chat.config import ChatTrainConfig
from deeploop.tasks.puzzles.config import ReasonerTrainConfig
from deeploop.tasks.recipes import get_recipe

OF_TRAINING = {
    "micro_batch",
    "precision",
    "stream",
    "recompute",
    "round_hidden",
    "steps",
    "reference",
    "data",
}
OF_DECODING = {"batch", "prompt_tokens", "new_tokens"}
UNTIMED = 4
"""Tokens before the clock starts: the prompt's, one that compiles, one that records, one that is queued."""


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """Measure tokens per second, model FLOP/s, share of the matrix-product ceiling, compile time and peak
    memory.
    """

    recipes: tuple[str, ...] = ("gpt2-small",)
    """Recipes to time; a reasoner's needs --data."""
    rounds: tuple[int, ...] = (1, 3, 7)
    """Rounds R of each language model."""
    micro_batch: tuple[int, ...] = ()
    """Sequences per step of a language model; unset: the recipe's micro-batch. A reasoner keeps its batch."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """As --device.precision; fp8 is timed together with bf16."""
    stream: Literal["fp32", "bf16"] = "fp32"
    """As --device.stream."""
    recompute: Literal["off", "round", "block"] = "off"
    """Activations to compute again in the backward pass, as in --device.recompute."""
    round_hidden: bool = False
    """Round SwiGLU's hidden width up to a multiple of 16 (2730 → 2736), which tensor cores prefer."""
    steps: int = 10
    """Steps that are timed, after three that are not."""
    decode: bool = False
    """Time decoding instead of training: tokens per second, share of the memory bandwidth, transformers."""
    batch: tuple[int, ...] = (1, 64)
    """Sequences that are decoded together, with --decode."""
    prompt_tokens: int = 128
    """Tokens of each prompt, with --decode."""
    new_tokens: int = 128
    """Tokens that are added to each prompt, with --decode."""
    reference: Path | None = None
    """A file with a class ReferenceGPT to time too: benchmarks/reference_gpt.py. In FP8 it needs torchao."""
    data: Path | None = None
    """Corpus; unset: Python's standard library, prepared on the way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json: Path | None = None
    """Also write the results to this file."""

    def __post_init__(self) -> None:
        at_least(1, self, "steps", "micro_batch", "batch", "prompt_tokens")
        if not self.recipes or not self.rounds:
            raise ValueError("recipes, rounds: name at least one of each")
        if self.new_tokens <= UNTIMED:
            raise ValueError(f"new_tokens={self.new_tokens}: must be above {UNTIMED}, which are not timed")
        if self.json is not None and not os.access(self.json.parent, os.W_OK):
            raise ValueError(f"json={self.json}: can't be written; choose a folder that is there")
        if self.reference is not None and not self.reference.is_file():
            raise ValueError(f"reference={self.reference}: no such file; try benchmarks/reference_gpt.py")
        self._check_mode()
        self._check_recipes()

    def _check_mode(self) -> None:
        """Raise ValueError for an option that the chosen mode does not have."""
        other = OF_TRAINING if self.decode else OF_DECODING
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in other and value != option.default:
                why = "is for training; leave it out, or --decode" if self.decode else "needs --decode"
                raise ValueError(f"{option.name}={value}: {why}")

    def _check_recipes(self) -> None:
        for recipe in self.recipes:
            if isinstance(get_recipe(recipe), ChatTrainConfig):
                raise ValueError(f"recipes={recipe}: has no model of its own; time the recipe of its run")
            if isinstance(get_recipe(recipe), ReasonerTrainConfig) and self.data is None and not self.decode:
                raise ValueError(f"recipes={recipe}: is a reasoner's; give its puzzles with --data")
