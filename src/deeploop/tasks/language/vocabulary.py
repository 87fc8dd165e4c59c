"""The vocabulary of the corpus that a config names."""

from typing import Any

from deeploop.data.bpe import vocabulary_fits
from deeploop.data.shards import Corpus
from deeploop.tasks.language.config import DataConfig


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
