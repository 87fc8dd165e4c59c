"""The corpus of a config before its run is opened, for its vocabulary and size."""

from pathlib import Path
from typing import Any

from deeploop.data.bpe import vocabulary_fits
from deeploop.data.shards import Corpus
from deeploop.tasks.language.config import DataConfig


def corpus_of(config: Any) -> Corpus | None:
    """The corpus of a language model's config, unless it is a mixture or can't be opened."""
    if not isinstance(getattr(config, "data", None), DataConfig) or config.data.mix:
        return None
    return _opened(config.data.path)


def _opened(folder: Path) -> Corpus | None:
    try:
        return Corpus.open(folder)
    except (OSError, ValueError):  # reported when the run is opened
        return None


def corpus_of_other_vocabulary(config: Any) -> Corpus | None:
    """The corpus of a language model's config if its vocabulary differs from the model's; otherwise None."""
    text = isinstance(getattr(config, "data", None), DataConfig)
    corpus = _opened(config.data.folders[0]) if text and not config.init_from else None
    if corpus is None:
        return None
    fits = vocabulary_fits(corpus.tokenizer_name, corpus.vocabulary, config.model.vocabulary)
    return None if fits else corpus
