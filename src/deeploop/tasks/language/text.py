"""The text of a run: its corpus or mixture, the training loader, and the held-out windows."""

from functools import partial
from pathlib import Path

from torch import Tensor

from deeploop.data.mixture import Mixture, MixtureLoader
from deeploop.data.scan import scan
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import Loader, TokenLoader, validation_windows
from deeploop.files import naming_field
from deeploop.tasks.language.config import DataConfig, TrainConfig, parse_mix
from deeploop.train.distributed import World

SCANNED_TOKENS = 20_000_000  # half a second


def open_mixture(data: DataConfig) -> Mixture:
    """Open the corpora of `data.mix`, or the one in `data.path`."""
    if not data.mix:
        return Mixture.of([open_corpus(data.path)], [1.0])
    parts = parse_mix(data.mix)
    corpora, weights = [open_corpus(folder, "mix") for folder, _ in parts], [weight for _, weight in parts]
    return Mixture.of(corpora, weights, data.last_weights, data.mix_last_share)


def make_loader(config: TrainConfig, mixture: Mixture, world: World) -> Loader:
    """Batches of one corpus or of a mixture, whose limits on epochs are checked first."""
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
        # How much the first phase leaves for the last one depends on the draws, which the seed determines.
        make().skip(config.optim.steps * config.optim.batch)
    return make()


def check_epochs(config: TrainConfig, mixture: Mixture) -> None:
    """Raise ValueError if the limits on epochs leave too few sequences, in total or in the last phase."""
    steps, epochs = config.optim.steps, config.data.epochs
    for shares, planned in ((mixture.shares, steps), (mixture.last, steps - mixture.switch(steps))):
        available = mixture.sequences_within(epochs, config.model.context, shares)
        if available is not None and available < (wanted := planned * config.optim.batch):
            raise ValueError(
                f"data.max_epochs={' '.join(map(str, config.data.max_epochs))}: {wanted:,} sequences are "
                f"planned, and so many epochs have {available:,}; raise it, or lower optim.steps={steps}"
            )


def mixture_windows(mixture: Mixture, context: int, count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """`count` validation windows, divided by weight; a corpus with weight 0 has none."""
    numbers = zip(mixture.names, mixture.corpora, mixture.held_out(count), strict=True)
    return {name: validation_windows(corpus.validation, context, own) for name, corpus, own in numbers if own}


def shared_documents(corpus: Corpus) -> int:
    """The number of validation documents that are also trained on; 0 if `prepare` excluded them, or in a
    large corpus."""
    streams = corpus.validation, corpus.train
    if corpus.facts.get("repeated") is not None or sum(map(len, streams)) > SCANNED_TOKENS:
        return 0
    held, trained = (scan(stream, corpus.end_of_text) for stream in streams)
    return held.shared_with(trained)


def open_corpus(path: Path, field: str = "path") -> Corpus:
    """Open a corpus, checking sizes and token counts (`deeploop data --verify` checks everything)."""
    with naming_field(f"data.{field}", path):
        corpus = Corpus.open(path)
        corpus.verify_counts()
    return corpus
