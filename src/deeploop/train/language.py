"""The task of predicting the next token: build, loss, evaluate."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deeploop.data.shards import Corpus
from deeploop.data.token_loader import TokenLoader, validation_windows
from deeploop.diagnose.collapse import judge, unigram_floor
from deeploop.eval.validation import validate
from deeploop.models.accounting import flops_per_token
from deeploop.models.gpt import LoopedGPT
from deeploop.train.distributed import World, arithmetic

if TYPE_CHECKING:
    from deeploop.train.config import TrainConfig


@dataclass(frozen=True)
class DataConfig:
    """The corpus, as `deeploop prepare` writes it."""

    path: Path = Path("data/fineweb-edu")
    """Folder of token shards."""
    validation_sequences: int = 2_000
    """Sequences of the fixed validation set, spread evenly over the validation split."""
    validate_every: int = 1_000
    """Steps between validations; one more comes at the end."""

    def __post_init__(self) -> None:
        for name in ("validation_sequences", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)}: must be at least 1")


class LanguageTask:
    """A looped GPT on a corpus of tokens."""

    def __init__(self, config: "TrainConfig", world: World) -> None:
        self.config, self.world = config, world
        self.corpus = Corpus.open(config.data.path)
        if self.corpus.vocabulary != config.model.vocabulary:
            raise ValueError(
                f"model.vocabulary={config.model.vocabulary}: {config.data.path} holds "
                f"{self.corpus.tokenizer_name} tokens, which need model.vocabulary={self.corpus.vocabulary}"
            )
        context = config.model.context
        self.loader = TokenLoader(
            self.corpus.train,
            context=context,
            batch=config.optim.batch,
            seed=config.seed,
            rank=world.rank,
            world=world.size,
        )
        inputs, targets = validation_windows(
            self.corpus.validation, context, config.data.validation_sequences
        )
        # Every rank must make the same number of forward calls: sharded blocks meet in each of them.
        share = len(inputs) // world.size
        if share == 0:
            raise ValueError(f"data.validation_sequences={len(inputs)}: fewer than the {world.size} ranks")
        mine = slice(world.rank * share, (world.rank + 1) * share)
        self.validation = inputs[mine], targets[mine]
        self.floor = unigram_floor(self.corpus.counts("validation"))
        self.targets_per_step = config.optim.batch * context
        self.flops_per_step = self.targets_per_step * flops_per_token(config.model)

    def build(self) -> LoopedGPT:
        """The model with freshly drawn weights, the same on every machine."""
        model = LoopedGPT(self.config.model)
        model.init_weights(self.config.seed)
        return model

    def micro_batches(self) -> list[tuple[Tensor, ...]]:
        """This rank's share of the next step, in pieces that fit the device."""
        inputs, targets = self.loader.step_batch()
        size = self.config.device.micro_batch or len(inputs)
        return list(zip(inputs.split(size), targets.split(size), strict=True))

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross-entropy summed over the micro-batch, as a share of the whole step's targets."""
        inputs, targets = (tensor.to(self.world.device, non_blocking=True) for tensor in batch)
        return model(inputs, targets).loss / self.targets_per_step

    def evaluate(self, model: nn.Module) -> dict[str, float | str]:
        """Loss, distance to the unigram floor, token similarity, and what they say together."""
        config, world = self.config, self.world
        size = config.device.micro_batch or max(1, config.optim.batch // world.size)
        result = validate(
            model,
            *self.validation,
            batch=size,
            device=world.device,
            arithmetic=partial(arithmetic, config.device, world.device),
        )
        sums = torch.tensor([result.loss, result.targets, result.similarity], dtype=torch.float64)
        loss, targets, similarity = world.sum(sums.to(world.device)).tolist()
        loss, similarity = loss / targets, similarity / world.size
        return {
            "loss": loss,
            "floor": self.floor,
            "similarity": similarity,
            "verdict": judge(loss, self.floor, similarity),
        }
