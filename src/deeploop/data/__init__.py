"""What models are trained on: text, conversations, puzzles and iterated tasks, from their source to batches.

`deeploop prepare` writes a folder; `Corpus.open`, `ChatSet.open` and `PuzzleSet.open` read it. The modules
that make batches need torch: `token_loader`, `mixture`, `chat_loader` and `puzzle_loader`.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_NAMES = {
    "Corpus": "deeploop.data.shards",
    "PuzzleSet": "deeploop.data.puzzles",
    "TokenStream": "deeploop.data.shards",
    "Tokenizer": "deeploop.data.tokenizers",
    "get_tokenizer": "deeploop.data.tokenizers",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> _Any:
    # Iterated tasks are described without what reads corpora and puzzles.
    if name not in _NAMES:
        raise AttributeError(f"module 'deeploop.data' has no attribute {name!r}")
    return getattr(_import_module(_NAMES[name]), name)
