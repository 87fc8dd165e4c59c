"""The text that a run trains on: a corpus or a mixture, its loader, and the windows held out of it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deeploop.data.bpe import vocabulary_fits
from deeploop.data.mixture import Mixture, MixtureLoader, parse_mix
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import Loader, TokenLoader, validation_windows
from deeploop.files import naming_field
from deeploop.train.distributed import World

if TYPE_CHECKING:
    from deeploop.train.config import TrainConfig


def corpus_of_other_vocabulary(config: Any) -> Corpus | None:
    """The corpus of a language model's config, if its vocabulary is another; None where it is not known."""
    text = isinstance(getattr(config, "data", None), DataConfig)
    if not text or config.init_from:
        return None
    try:
        corpus = Corpus.open(config.data.folders[0])
    except (OSError, ValueError):  # told when the run is opened
        return None
    fits = vocabulary_fits(corpus.tokenizer_name, corpus.vocabulary, config.model.vocabulary)
    return None if fits else corpus


@dataclass(frozen=True)
class DataConfig:
    """The corpus, as `deeploop prepare` writes it."""

    path: Path = Path("data/fineweb-edu")
    """Folder of token shards."""
    mix: tuple[str, ...] = ()
    """Corpora and weights in place of `path`, such as data/a=0.7 data/b=0.3; 0 holds one back."""
    mix_last: tuple[str, ...] = ()
    """Weights of a last phase, for corpora of `mix`; one that is not named has 0."""
    mix_last_share: float = 0.2
    """Share of the steps that the last phase has, where there is one."""
    max_epochs: tuple[int, ...] = ()
    """Epochs after which a corpus of `mix` is drawn no more: one number for all, or one each; 0: no limit."""
    mask_documents: bool = False
    """Keep documents apart: no attention across the end of one, and positions that start anew in each."""
    validation_sequences: int = 2_000
    """Sequences of the fixed validation set, spread evenly over the validation split."""
    validate_every: int = 1_000
    """Steps between validations; one more comes at the end."""
    validation_rounds: tuple[int, ...] = ()
    """Rounds at which a validation is done as well, beside the mean's (model.rounds)."""

    def __post_init__(self) -> None:
        self._check_mixture()
        if any(rounds < 1 for rounds in self.validation_rounds):
            raise ValueError(f"data.validation_rounds={self.validation_rounds}: each must be at least 1")
        for name in ("validation_sequences", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)}: must be at least 1")

    def _check_mixture(self) -> None:
        folders = [folder for folder, _ in parse_mix(self.mix)]
        for folder, _ in parse_mix(self.mix_last, "mix_last"):
            if folder not in folders:
                raise ValueError(
                    f"data.mix_last={folder}: must be a corpus of data.mix; name it there, with weight 0 to "
                    "hold it back"
                )
        if not 0 < self.mix_last_share < 1:
            raise ValueError(f"data.mix_last_share={self.mix_last_share}: must be above 0 and below 1")
        asked = " ".join(map(str, self.max_epochs))
        if self.max_epochs and not self.mix:
            raise ValueError(f"data.max_epochs={asked}: must be left out without data.mix")
        if len(self.max_epochs) not in (0, 1, len(folders)) or min(self.max_epochs, default=0) < 0:
            raise ValueError(
                f"data.max_epochs={asked}: must be one number for all {len(folders)} corpora of data.mix, or "
                "one for each, 0 or more"
            )

    @property
    def epochs(self) -> tuple[int, ...]:
        """The limit of each corpus of the mixture; 0 is none."""
        return self.max_epochs if len(self.max_epochs) > 1 else (self.max_epochs or (0,)) * len(self.mix)

    @property
    def last_weights(self) -> tuple[float, ...]:
        """Those of the last phase, in the order of the mixture; nothing where there is none."""
        weights = dict(parse_mix(self.mix_last, "mix_last"))
        return tuple(weights.get(folder, 0.0) for folder, _ in parse_mix(self.mix)) if weights else ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The corpora: those of the mixture, or the one of `path`."""
        return tuple(folder for folder, _ in parse_mix(self.mix)) or (self.path,)


def open_mixture(data: DataConfig) -> Mixture:
    """The corpora of `data.mix`, or the one of `data.path`."""
    if not data.mix:
        return Mixture.of([open_corpus(data.path)], [1.0])
    parts = parse_mix(data.mix)
    corpora, weights = [open_corpus(folder, "mix") for folder, _ in parts], [weight for _, weight in parts]
    return Mixture.of(corpora, weights, data.last_weights, data.mix_last_share)


def make_loader(config: "TrainConfig", mixture: Mixture, world: World) -> Loader:
    """Batches of one corpus, or of the mixture; how often that may be gone through is looked at first."""
    streams = [corpus.train for corpus in mixture.corpora]
    settings = {
        "context": config.model.context,
        "batch": config.optim.batch,
        "seed": config.seed,
        "rank": world.rank,
        "world": world.size,
    }
    if not config.data.mix:
        return TokenLoader(streams[0], **settings)
    check_epochs(config, mixture)
    switch = mixture.switch(config.optim.steps) * config.optim.batch if mixture.last_share else None
    make = partial(
        MixtureLoader,
        streams,
        mixture.first,
        last=mixture.last,
        switch=switch,
        max_epochs=config.data.epochs,
        **settings,
    )
    if any(config.data.epochs) and mixture.last_share:
        # What the first phase leaves for the last one is up to the draws, which the seed alone decides.
        make().skip(config.optim.steps * config.optim.batch)
    return make()


def check_epochs(config: "TrainConfig", mixture: Mixture) -> None:
    """Raises where more sequences are planned, in all or in the last phase, than the epochs have."""
    steps, epochs = config.optim.steps, config.data.epochs
    for shares, own in ((mixture.shares, steps), (mixture.last, steps - mixture.switch(steps))):
        found = mixture.sequences_within(epochs, config.model.context, shares)
        if found is not None and found < (wanted := own * config.optim.batch):
            raise ValueError(
                f"data.max_epochs={' '.join(map(str, config.data.max_epochs))}: {wanted:,} sequences are "
                f"planned, and so many epochs have {found:,}; raise it, or lower optim.steps={steps}"
            )


def mixture_windows(mixture: Mixture, context: int, count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """`count` validation windows, each corpus's by its share; of one that is held back none."""
    numbers = zip(mixture.names, mixture.corpora, mixture.held_out(count), strict=True)
    return {name: validation_windows(corpus.validation, context, own) for name, corpus, own in numbers if own}


def open_corpus(path: Path, field: str = "path") -> Corpus:
    """The corpus of a folder, after sizes and counts were found to fit (all: `deeploop data --verify`)."""
    with naming_field(f"data.{field}", path):
        corpus = Corpus.open(path)
        corpus.verify_counts()
    return corpus
