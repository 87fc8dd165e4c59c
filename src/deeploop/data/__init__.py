"""Text: from its source to batches of tokens.

`deeploop prepare` writes a folder, and `Corpus.open` reads it. `token_loader` and `mixture`, which make
batches, need torch. Conversations, puzzles and iterated tasks are in `deeploop.tasks`.
"""

from deeploop.data.shards import Corpus, TokenStream
from deeploop.data.tokenizers import Tokenizer, get_tokenizer

__all__ = ["Corpus", "TokenStream", "Tokenizer", "get_tokenizer"]
