"""Options of `deeploop retrofit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from deeploop.config.checks import at_least


@dataclass(frozen=True, kw_only=True)
class RetrofitArgs:
    """Loop a pretrained model: write a run folder with its layers as prelude, core and coda."""

    source: Positional[Path]
    """A transformers folder (safetensors) or a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model."""
    core: str = ""
    """Layers to loop, such as 8-15, counted from 0."""
    prelude: str | None = None
    """Layers before the loop, such as 0-3, or none; unset: all before the core."""
    coda: str | None = None
    """Layers after the loop; unset: all after the core. Layers in no part are dropped."""
    out: Path = Path("runs/retrofit")
    """Run folder to write."""
    rounds: int = 4
    """Rounds R of the core: the mean in training, which is ramped up from 1."""
    injection: Literal["none", "add", "linear", "gated"] = "none"
    """Injection of the prelude's output into every round: none, or linear, which starts as the identity."""
    epsilon_exponent: float = 0.5
    """Scale the core's branches by R^-q at R rounds; 0 leaves them unchanged."""
    context: int | None = None
    """Tokens of a training sequence, at most the source's context; unset: 1024, or less if the context is."""
    data: Path = Path("data/text")
    """Corpus prepared with the source's tokenizer, to heal on or for --suggest."""
    dry_run: bool = False
    """Print parameters and FLOPs per token by R; write nothing."""
    suggest: bool = False
    """Rank all cores of --length layers by the loss at R = 1, 2, 4 without training; write nothing."""
    length: int = 8
    """Number of layers in the cores that --suggest compares."""
    tokens: int = 2048
    """Tokens of the corpus' validation split that --suggest uses."""

    def __post_init__(self) -> None:
        at_least(1, self, "tokens")
