"""Text to tokens to batches: tokenizers, token shards, where text comes from, and the loader.

`deeploop prepare` writes a corpus folder; `Corpus.open` reads it; `token_loader.TokenLoader` (the only
module here that needs torch) turns it into batches.
"""

from deeploop.data.shards import Corpus, TokenStream
from deeploop.data.tokenizers import Tokenizer, get_tokenizer

__all__ = ["Corpus", "TokenStream", "Tokenizer", "get_tokenizer"]
