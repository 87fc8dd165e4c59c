"""Our tokenizers in transformers' own classes, so that a folder of theirs needs none of our code."""

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from deeploop.data.tokenizers import END_OF_TEXT, Tokenizer, byte_characters


def to_transformers(tokenizer: Tokenizer, *, context: int) -> PreTrainedTokenizerFast:
    """The same ids for the same text, and nothing added before or behind it.

    All tokenizers are byte-level BPE, the one of bytes without a merge. As is usual there, and unlike ours,
    the string "<|endoftext|>" is read as the token.
    """
    characters = byte_characters()
    words = {
        "".join(characters[byte] for byte in tokenizer.token_bytes(token)) or END_OF_TEXT: token
        for token in range(tokenizer.vocabulary)
    }
    engine = Engine(BPE(vocab=words, merges=list(tokenizer.merges)))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=engine,
        bos_token=END_OF_TEXT,  # it stands before every document
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
