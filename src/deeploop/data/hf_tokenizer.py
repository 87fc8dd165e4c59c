"""Convert tokenizers to transformers' classes, so that an exported folder loads without deeploop."""

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from deeploop.data.pretrained_tokenizer import PretrainedTokenizer, make_engine
from deeploop.data.tokenizers import END_OF_TEXT, Tokenizer, byte_characters


def to_transformers(tokenizer: Tokenizer, *, context: int) -> PreTrainedTokenizerFast:
    """Convert a tokenizer; it gives the same ids and adds no tokens at either end.

    deeploop's own tokenizers are byte-level BPE (`bytes` has no merges). As usual in transformers, and unlike
    in deeploop, the string "<|endoftext|>" is read as the token. A pretrained tokenizer is written back
    unchanged.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        return _given_back(tokenizer, context)
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
        bos_token=END_OF_TEXT,  # precedes every document
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _given_back(tokenizer: PretrainedTokenizer, context: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a pretrained model, with its special tokens and its chat template."""
    settings = tokenizer.settings
    named = {name: word for name, word in settings.items() if name != "chat_template"}
    named.setdefault("pad_token", named.get("eos_token") or tokenizer.word(tokenizer.end_of_text))
    return PreTrainedTokenizerFast(
        tokenizer_object=make_engine(tokenizer.text),
        **named,
        chat_template=settings.get("chat_template"),
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
