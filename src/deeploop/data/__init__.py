"""Text to tokens to batches: tokenizers, token shards, where text comes from, and the loader; and puzzles.

`deeploop prepare` writes a corpus folder or a puzzle folder; `Corpus.open` and `PuzzleSet.open` read them;
`token_loader.TokenLoader` and `puzzle_loader.PuzzleLoader` (the only modules here that need torch) turn
them into batches.
"""

from deeploop.data.puzzles import PuzzleSet
from deeploop.data.shards import Corpus, TokenStream
from deeploop.data.tokenizers import Tokenizer, get_tokenizer

__all__ = ["Corpus", "PuzzleSet", "TokenStream", "Tokenizer", "get_tokenizer"]
