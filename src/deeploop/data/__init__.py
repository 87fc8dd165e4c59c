"""What models are trained on: text, conversations, puzzles and iterated tasks, from their source to batches.

`deeploop prepare` writes a folder; `Corpus.open`, `ChatSet.open` and `PuzzleSet.open` read it. The modules
that make batches need torch: `token_loader`, `mixture`, `chat_loader` and `puzzle_loader`.
"""

from deeploop.data.puzzles import PuzzleSet
from deeploop.data.shards import Corpus, TokenStream
from deeploop.data.tokenizers import Tokenizer, get_tokenizer

__all__ = ["Corpus", "PuzzleSet", "TokenStream", "Tokenizer", "get_tokenizer"]
