"""The language modeling task: build, loss, evaluate."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from deeploop.data.bpe import how_to_ask, tokenizer_files, vocabulary_fits
from deeploop.data.mixture import Mixture
from deeploop.data.token_loader import Loader, PrefetchLoader
from deeploop.data.tokenizers import Tokenizer
from deeploop.diagnose.collapse import LOSS_MARGIN, SIMILARITY_LIMIT, judge, unigram_floor
from deeploop.eval.depth import count_bytes
from deeploop.eval.validation import validate
from deeploop.models.accounting import flops_per_token, parameter_count, training_bytes
from deeploop.models.exit_gate import GATE
from deeploop.models.gpt import LoopedGPT
from deeploop.nn.documents import causal_context, document_bounds
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.monitor import LoopMonitor, Probe, check_sublayers
from deeploop.tasks.language.text import make_loader, mixture_windows, open_mixture, shared_documents
from deeploop.tasks.rounds import FirstStateSampler, RoundsSampler
from deeploop.train.distributed import World, arithmetic, share_of_rank
from deeploop.train.execution import Capabilities
from deeploop.train.memory import shards
from deeploop.train.task import OnBatch, StepData, Task, ignore_batch, set_rounds

MANY_EPOCHS = 10
LARGE_VOCABULARY = 20_000  # tokens


@dataclass
class Watch:
    """Progress of an evaluation, reported to its caller."""

    total: int
    on_batch: OnBatch
    done: int = 0

    def at(self, more: int) -> None:
        self.on_batch((self.done + more) / self.total)


class LanguageTask(Task):
    """A looped GPT on a corpus of tokens."""

    legend: ClassVar[dict[str, str]] = {
        "floor": "best loss without context, by token frequencies; "
        "similarity 1 means one state at all positions",
        "verdict": f"escaped: loss below the floor by {LOSS_MARGIN}, and similarity below {SIMILARITY_LIMIT};"
        " collapsed: neither; undecided: only one of the two",
    }
    config: TrainConfig
    tokenizer: Tokenizer

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.law = config.rounds.law(config.model.rounds)
        needs = partial(
            training_bytes,
            replace(config.model, rounds=min(self.law.most, config.rounds.backprop or self.law.most)),
            shards=shards(config.device, world),
            muon=config.optim.kind == "muon",
        )
        self.fit_memory(needs, config.model.context)
        self.loader = PrefetchLoader(self.open_data(), pin=world.device.type == "cuda")
        # Computed from the scored tokens themselves: no constant prediction can beat their entropy.
        self.floor = unigram_floor(np.bincount(self.targets.flatten().numpy()))
        self.examples = self.corpus.tokens
        self.targets_per_step = config.optim.batch * config.model.context
        starts = self.validation[2]
        context = config.model.context if starts is None else causal_context(starts)
        self.flops_per_step = self.targets_per_step * training_flops_per_token(config, context)
        per_round = flops_per_token(config.model) / config.model.rounds / 3  # of the forward pass
        scored = self.validation_work * world.size * config.model.context
        self.validation_steps = scored * per_round / self.flops_per_step
        self.monitor = LoopMonitor(config, self.validation)
        self._parts: list[str] = []  # names of a micro-batch's tensors, in order
        self._rounds = RoundsSampler(config.seed)
        self._states: FirstStateSampler | None = None
        if config.model.first_state == "noise":
            self._states = FirstStateSampler(seed=config.seed, device=world.device)

    @property
    def capabilities(self) -> Capabilities:
        """Steps can be captured, and rounds may be drawn for each."""
        config = self.config
        return Capabilities(
            recordable=True,
            draws_rounds=(config.rounds.sample, config.rounds.ramp) != ("fixed", "off"),
            skippable=config.optim.non_finite == "skip",
            tokens=self.fit.micro_batch * config.model.context,
        )

    @classmethod
    def tokens_and_flops(cls, config: TrainConfig) -> tuple[int, float]:
        tokens = config.optim.steps * config.optim.batch * config.model.context
        return tokens, training_flops_per_token(config)

    def open_data(self) -> Loader:
        """Open the corpora and set the held-out data; return the loader of training batches."""
        config, world, context = self.config, self.world, self.config.model.context
        self.corpus: Any = open_mixture(config.data)
        self.tokenizer = self.checked_tokenizer()
        loader = make_loader(config, self.corpus, world)
        if (step := config.optim.batch * context) > self.corpus.tokens:
            raise ValueError(
                f"optim.batch={config.optim.batch}: a step of {step:,} tokens is more than the "
                f"{self.corpus.tokens:,} that {', '.join(map(str, config.data.folders))} has to train on"
            )
        self.held_out = mixture_windows(self.corpus, context, config.data.validation_sequences)
        inputs, self.targets = (torch.cat(parts) for parts in zip(*self.held_out.values(), strict=True))
        self.validation = self.own_share(inputs, self.targets, self.document_starts(inputs))
        return loader

    def checked_tokenizer(self) -> Tokenizer:
        """The data's tokenizer; its vocabulary must be the model's."""
        rows = self.config.model.vocabulary
        if not vocabulary_fits(self.corpus.tokenizer_name, self.corpus.vocabulary, rows):
            raise ValueError(
                f"model.vocabulary={rows}: {self.config.data.folders[0]} holds "
                f"{self.corpus.tokenizer_name} tokens, which need model.vocabulary={self.corpus.vocabulary}; "
                f"{self.other_vocabulary()}"
            )
        tokenizer: Tokenizer = self.corpus.tokenizer()
        return tokenizer

    def other_vocabulary(self) -> str:
        """Advice for data with another vocabulary than the model's."""
        return "set that, or prepare the text with another --tokenizer"

    def own_share(self, inputs: Tensor, targets: Tensor, starts: Tensor | None) -> Probe:
        """This rank's share of held-out windows."""
        parts = share_of_rank(inputs, self.world, 0), share_of_rank(targets, self.world, -1)
        return *parts, None if starts is None else share_of_rank(starts, self.world, 0)

    def document_starts(self, inputs: Tensor) -> Tensor | None:
        """True where documents begin; None unless `data.mask_documents`."""
        return inputs == self.tokenizer.end_of_text if self.config.data.mask_documents else None

    def build(self) -> LoopedGPT:
        """Build the model with freshly drawn weights, identical on every machine."""
        model = LoopedGPT(self.config.model, seed=self.config.seed)
        model.recompute, model.backprop = self.fit.recompute, self.config.rounds.backprop or None
        if self.config.model.exit_gate:
            model.gate_training = self.config.gate
        if self.config.gate.stage == "gate-only":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith(GATE))
        if self.config.model.unigram_bias:
            model.set_unigram_bias(torch.from_numpy(self.corpus.counts()))
        check_sublayers(self.config.diagnose, model)
        return model

    def stamp(self) -> dict[str, Any]:
        """Fields of run.json that describe the task."""
        length = count_bytes(self.tokenizer, self.targets) / self.targets.numel()
        return {**super().stamp(), "tokenizer": self.tokenizer.name, "bytes_per_token": length}

    def check_source(self, stamp: dict[str, Any], run: Path) -> None:
        """Raise ValueError for weights of another tokenizer, even if its vocabulary has the same size."""
        if (name := stamp.get("tokenizer")) != self.tokenizer.name:
            raise ValueError(
                f"init_from={run}: reads {name} tokens, {self.config.data.folders[0]} holds "
                f"{self.tokenizer.name}; prepare the text with --tokenizer {how_to_ask(str(name), run)}"
            )

    def files(self) -> dict[str, str]:
        """A trained tokenizer, so that the run folder can generate without its corpus."""
        return tokenizer_files(self.tokenizer)

    def state(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint."""
        return {"loader": self.loader.state(), "corpus": self.corpus.checksum}

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if state.get("corpus") != self.corpus.checksum:
            mix, path = self.config.data.mix, self.config.data.path
            what = "corpora, in their order, that the run was" if mix else "corpus that the run was"
            field = f"data.mix={' '.join(mix)}" if mix else f"data.path={path}"
            raise ValueError(f"{field}: not the {what} started on")
        # The last phase of a mixture is a share of the steps, which the loader does not count.
        self.loader.load_state({**state.get("loader", {}), "step": state.get("step", 0)})

    def next_batch(self) -> dict[str, Tensor]:
        """This rank's `inputs` and `targets`, and the `starts` of documents if `data.mask_documents`."""
        inputs, targets = self.loader.step_batch()
        starts = self.document_starts(inputs)
        return {"inputs": inputs, "targets": targets} | ({} if starts is None else {"starts": starts})

    def batches(self, step: int) -> StepData:
        """This rank's share of the step, in pieces that fit the device, and the step's rounds."""
        batch, size = self.next_batch(), self.fit.micro_batch
        inputs = batch["inputs"]
        pieces = {name: batch[name].split(size) for name in ("inputs", "targets")}
        if self._states is not None:
            first = self.drawn(step) + self.world.rank * len(inputs)
            mine = range(first, first + len(inputs))
            states = self._states.at(mine, (inputs.shape[1], self.config.model.width))
            pieces["state"] = states.split(size)
        if "starts" in batch:
            pieces["documents"] = tuple(map(document_bounds, batch["starts"].split(size)))
        if "scored" in batch:
            pieces["scored"] = (batch["scored"],) * len(pieces["inputs"])
        self._parts = list(pieces)
        return StepData(list(zip(*pieces.values(), strict=True)), self.rounds_at(step))

    def rounds_at(self, step: int) -> int:
        """The rounds of training step number `step` (from 0), the same on every rank."""
        config = self.config
        law = config.rounds.law_at(step, mean=config.model.rounds, steps=self.begun_with)
        return self._rounds.at(step, law)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Cross-entropy summed over the micro-batch, divided by the number of targets of the step."""
        moved = (tensor.to(self.world.device, non_blocking=True) for tensor in batch)
        tensors = dict(zip(self._parts, moved, strict=True))
        scored = tensors.pop("scored", self.targets_per_step)
        output = model(tensors.pop("inputs"), tensors.pop("targets"), **tensors)
        return output.loss / scored

    def evaluate(self, model: nn.Module, on_batch: OnBatch = ignore_batch) -> dict[str, Any]:
        """Loss, unigram floor, token similarity and verdict at the mean rounds.

        At the rounds in `data.validation_rounds`, only the loss.
        """
        watch = Watch(self.validation_work, on_batch)
        depths = sorted(set(self.config.data.validation_rounds))
        others = [self._loss_and_similarity(model, rounds, watch)[0] for rounds in depths]
        loss, similarity = self._loss_and_similarity(model, self.config.model.rounds, watch)
        by_rounds = {"validation_rounds": depths, "loss_by_rounds": others}
        return {
            "loss": loss,
            "floor": self.floor,
            "similarity": similarity,
            "verdict": judge(loss, self.floor, similarity),
            **(by_rounds if depths else {}),
            **(self._by_corpus(model, watch) if self.config.data.mix else {}),
        }

    @property
    def validation_work(self) -> int:
        """The rows × rounds that this rank computes in one validation."""
        data, mean = self.config.data, self.config.model.rounds
        mixed = 2 if data.mix else 1  # each corpus of a mixture is also scored separately
        return len(self.validation[0]) * (sum(set(data.validation_rounds)) + mean * mixed)

    def _loss_and_similarity(
        self, model: nn.Module, rounds: int, watch: "Watch", windows: Probe | None = None
    ) -> tuple[float, float]:
        """Means over all ranks of all windows or those given. The model stays at that number of rounds."""
        config, world = self.config, self.world
        set_rounds(model, rounds)
        inputs, targets, starts = windows or self.validation
        result = validate(
            model,
            inputs,
            targets,
            starts=starts,
            batch=self.fit.micro_batch,
            device=world.device,
            arithmetic=partial(arithmetic, config.device, world.device),
            before_batch=lambda row: watch.at(row * rounds),
        )
        watch.done += len(inputs) * rounds
        # A rank with only padding rows has no similarity to add.
        similarity = [result.similarity, 1] if result.targets else [0, 0]
        sums = torch.tensor([result.loss, result.targets, *similarity], dtype=torch.float64)
        loss, targets, similarity, ranks = world.sum(sums.to(world.device)).tolist()
        return loss / targets, similarity / ranks

    def _by_corpus(self, model: nn.Module, watch: "Watch") -> dict[str, Any]:
        """The loss on the held-out text of each corpus, and its number of epochs."""
        losses = []
        for inputs, targets in self.held_out.values():
            windows = self.own_share(inputs, targets, self.document_starts(inputs))
            losses.append(self._loss_and_similarity(model, self.config.model.rounds, watch, windows)[0])
        epochs = dict(zip(self.corpus.names, self.loader.state()["epochs"], strict=True))
        return {
            "corpora": list(self.held_out),
            "loss_by_corpus": losses,
            "epochs_by_corpus": [epochs[name] for name in self.held_out],
        }

    def warnings(self) -> list[str]:
        """Warn of a rule without the bias that it needs, many epochs, and costly validations."""
        config, texts = self.config, []
        rule, begins = config.model.residual, not (config.resume or config.init_from)
        if rule.has_alpha and begins and not config.model.unigram_bias:
            texts.append(
                f"without the unigram bias {rule.name} may collapse during warm-up; "
                "add --model.unigram-bias (docs/escape.md)"
            )
        for corpus in self.corpus.corpora if isinstance(self.corpus, Mixture) else ():
            if shared := shared_documents(corpus):
                texts.append(
                    f"{corpus.folder}: {shared:,} of {corpus.documents('validation'):,} validation documents "
                    "are in the training text too, so the validation loss is too low; prepare the text again"
                )
        if large := self.large_vocabulary():
            texts.append(large)
        epochs = config.optim.steps * self.targets_per_step / self.examples
        if epochs > MANY_EPOCHS:
            fewer = max(1, MANY_EPOCHS * self.examples // self.targets_per_step)
            texts.append(
                f"the corpus is repeated {epochs:,.0f} times; for {MANY_EPOCHS} epochs use --steps {fewer}"
            )
        if self.validation_steps > (every := config.data.validate_every):
            texts.append(
                f"a validation costs {self.validation_steps:,.0f} steps, and there is one every {every}; "
                "set a larger --data.validate-every or fewer --data.validation-rounds"
            )
        return texts

    def large_vocabulary(self) -> str | None:
        """Warn of a vocabulary that is most of the model, naming other tokenizers."""
        model = self.config.model
        table, whole = model.padded_vocabulary * model.width, parameter_count(model)
        if (
            self.config.init_from
            or self.config.resume
            or 2 * table < whole
            or model.vocabulary < LARGE_VOCABULARY
        ):
            return None
        return (
            f"{table:,} of {whole:,} parameters are the vocabulary of {self.tokenizer.name}; for a model of "
            "this size prepare the text with --tokenizer bytes or bpe:4096"
        )

    def describe(self, result: dict[str, Any]) -> str:
        """Format an evaluation in one line."""
        by_rounds = zip(result.get("validation_rounds", ()), result.get("loss_by_rounds", ()), strict=True)
        others = "  ".join(f"{R}: {'–' if loss is None else f'{loss:.4f}'}" for R, loss in by_rounds)
        return (
            f"validation {result['loss']:.4f}  unigram floor {result['floor']:.4f}  "
            f"token similarity {result['similarity']:.2f}  {result['verdict']}"
            + (f"  by rounds {others}" if others else "")
            + _described_corpora(result)
        )


def training_flops_per_token(config: TrainConfig, context: float | None = None) -> int:
    """Training FLOPs per token, for the mean number of rounds and the mean number in the autograd graph.

    Attention spans `context` tokens, by default the model's; fewer if documents are masked from each other.
    """
    law, most = config.rounds.law(config.model.rounds), config.rounds.backprop
    in_graph = law.expect(lambda R: min(R, most or R))
    flops = flops_per_token(config.model, float(law.mean), float(in_graph), context=context)
    frozen = config.model.exit_gate and config.gate.stage == "gate-only"
    return flops // 3 if frozen else flops  # a frozen model needs only the forward pass


def _described_corpora(result: dict[str, Any]) -> str:
    """Format the loss and epochs of each corpus in a mixture."""
    columns = (result.get(name, ()) for name in ("corpora", "loss_by_corpus", "epochs_by_corpus"))
    return "".join(
        f"  {name} {'–' if loss is None else f'{loss:.4f}'} ({epochs:.2f} epochs)"
        for name, loss, epochs in zip(*columns, strict=True)
    )
