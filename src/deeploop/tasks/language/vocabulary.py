"""The corpus of a config before its run is opened, for its vocabulary and size."""

from pathlib import Path
from typing import Any

from deeploop.data.bpe import vocabulary_fits
from deeploop.data.shards import Corpus
from deeploop.tasks.language.config import DataConfig, parse_mix


def training_tokens(config: Any) -> int:
    """The training tokens of a language model's corpora with a weight; 0 if one of them can't be opened."""
    if not isinstance(data := getattr(config, "data", None), DataConfig):
        return 0
    parts = parse_mix(data.mix), data.last_weights or (0.0,) * len(data.mix)
    drawn = [folder for (folder, first), last in zip(*parts, strict=True) if first or last]
    corpora = [_opened(folder) for folder in drawn or data.folders]
    return sum(len(corpus.train) for corpus in corpora if corpus) if all(corpora) else 0


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
