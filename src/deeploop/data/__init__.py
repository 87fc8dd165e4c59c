"""Text, from its source to batches of tokens.

`deeploop prepare` writes a folder, and `Corpus.open` reads it. The modules that make batches need torch:
`token_loader` and `mixture`. Conversations, puzzles and iterated tasks are beside what is trained on them,
in `deeploop.tasks`.
"""

from deeploop.data.shards import Corpus, TokenStream
from deeploop.data.tokenizers import Tokenizer, get_tokenizer

__all__ = ["Corpus", "TokenStream", "Tokenizer", "get_tokenizer"]
