"""Iterate over the documents of a token stream; find their lengths and duplicates."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deeploop.data.shards import TokenStream

BLOCK = 2**22  # tokens read at once


@dataclass(frozen=True)
class Scan:
    """Document hashes and lengths of a stream."""

    hashes: np.ndarray
    """One uint64 for each document, in order."""
    longest: int
    """Tokens of the longest document, end-of-text not counted."""
    is_whole: bool
    """True if the stream was read to its end."""

    @property
    def repeated(self) -> int:
        """The number of documents that repeat an earlier one token for token."""
        return len(self.hashes) - len(np.unique(self.hashes))

    def shared_with(self, other: "Scan") -> int:
        """The number of documents that the other stream has too."""
        return int(np.isin(self.hashes, other.hashes).sum())


def scan(stream: TokenStream, end_of_text: int, limit: int | None = None) -> Scan:
    """Read the documents that begin in the first `limit` tokens, holding eight bytes for each.

    A 64-bit hash is enough: among 10^8 documents, two different ones collide with a probability of 0.03%.
    """
    hashes, longest, seen = [], 0, 0
    for tokens in documents(stream, end_of_text):
        if limit is not None and seen >= limit:
            break
        hashes.append(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest())
        longest = max(longest, len(tokens))
        seen += 1 + len(tokens)
    return Scan(np.frombuffer(b"".join(hashes), dtype="<u8"), longest, seen == len(stream))


def documents(stream: TokenStream, end_of_text: int) -> Iterator[np.ndarray]:
    """Yield each document's tokens, without the end-of-text token before it."""
    held: list[np.ndarray] = []  # the start of a document that continues in the next block
    for start in range(0, len(stream), BLOCK):
        block = stream.slice(start, min(start + BLOCK, len(stream)))
        begin = 0
        for end in np.flatnonzero(block == end_of_text).tolist():
            if start + end > 0:
                yield np.concatenate([*held, block[begin:end]])
            held, begin = [], end + 1
        held.append(block[begin:])
    if len(stream):
        yield np.concatenate(held)


def excerpt(stream: TokenStream, end_of_text: int, length: int) -> np.ndarray:
    """The first tokens, at most `length`, of a document near the middle of the stream."""
    middle = len(stream) // 2
    block = stream.slice(middle, min(middle + BLOCK, len(stream)))
    ends = np.flatnonzero(block == end_of_text)
    begin = int(ends[0]) + 1 if len(ends) else 0
    last = int(ends[1]) if len(ends) > 1 else len(block)
    return block[begin : min(last, begin + length)]
