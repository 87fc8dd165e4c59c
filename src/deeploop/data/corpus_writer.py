"""Write a corpus folder document by document; an interrupted run continues after its last full shard.

After each full shard, everything that is not yet in a shard is saved to progress.npz. A `CorpusWriter`
made in the same folder with the same settings continues from there.
"""

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.arrays import read_npz
from deeploop.data.description import check_fields
from deeploop.data.shards import CORPUS_FORMAT, SPLIT_FIELDS, write_shard
from deeploop.data.tokenizers import Tokenizer, token_dtype
from deeploop.files import atomic_file, parse_json

# Validation never takes more than this part of a finite source, however much is asked for.
LARGEST_VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Settings:
    """The settings that determine the bytes of a corpus. They are compared before a folder is reused."""

    source: str
    tokenizer: str
    validation_tokens: int
    shard_tokens: int
    limit_tokens: int | None
    text_sha256: str | None = None
    """Hash of the text's files, if the source has files."""

    def __post_init__(self) -> None:
        if self.validation_tokens < 1:
            raise ValueError(f"validation_tokens {self.validation_tokens}: must be at least 1")
        if not 1 <= self.shard_tokens < 2**31:
            raise ValueError(f"shard_tokens {self.shard_tokens}: must be between 1 and 2^31 - 1")
        if self.limit_tokens is not None and self.limit_tokens <= self.validation_tokens:
            raise ValueError(
                f"limit_tokens {self.limit_tokens}: "
                f"must be more than validation_tokens {self.validation_tokens}"
            )

    def check_same(self, recorded: dict[str, Any], folder: Path) -> None:
        """Raise ValueError if the folder has other settings, or other text of the same description."""
        for name, value in asdict(self).items():
            if name == "text_sha256" and recorded.get(name) not in (value, None):
                raise ValueError(
                    f"{folder}: holds a corpus of other text, though of the same names and sizes "
                    f"({self.source}); remove it or choose another folder with --out"
                )
            if name != "text_sha256" and recorded.get(name) != value:
                raise ValueError(
                    f"{folder}: already holds a corpus with {name} {recorded.get(name)!r}, not {value!r}; "
                    "remove it or choose another folder with --out"
                )


class _Split:
    """A split being written: its full shards, and a buffer that becomes the next one."""

    def __init__(self, folder: Path, name: str, shard_tokens: int, vocabulary: int) -> None:
        self.folder, self.name = folder, name
        self.documents, self.bytes, self.tokens = 0, 0, 0
        self.shards: list[dict[str, Any]] = []
        self.counts = np.zeros(vocabulary, dtype=np.int64)  # of the shards on disk
        self._buffer = np.empty(shard_tokens, dtype=token_dtype(vocabulary))  # allocated as it fills
        self._filled = 0

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Add one document, and write each shard that becomes full."""
        self.documents += 1
        self.bytes += text_bytes
        self.tokens += len(tokens)
        while len(tokens):
            take = min(len(tokens), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + take] = tokens[:take]
            self._filled += take
            tokens = tokens[take:]
            if self._filled == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        """Write the buffer as a shard, unless it is empty."""
        if not self._filled:
            return
        file = f"{self.name}_{len(self.shards):06d}.bin"
        sha256 = write_shard(self.folder / file, self._pending)
        self.shards.append({"file": file, "tokens": self._filled, "sha256": sha256})
        for chunk in np.array_split(self._pending, 1 + self._filled // 2**20):  # bincount widens to int64
            self.counts += np.bincount(chunk, minlength=len(self.counts))
        self._filled = 0

    def facts(self) -> dict[str, Any]:
        """This split's part of corpus.json."""
        names = ("documents", "bytes", "tokens", "shards")
        return {name: getattr(self, name) for name in names}

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that a restart needs in addition to `facts`."""
        return {f"{self.name}_pending": self._pending, f"{self.name}_counts": self.counts}

    def restore(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        pending, counts = arrays[f"{self.name}_pending"], arrays[f"{self.name}_counts"]
        if pending.ndim != 1 or pending.dtype != self._buffer.dtype or len(pending) >= len(self._buffer):
            raise ValueError(f"{self.name}: pending tokens of the wrong type, or too many for a shard")
        if counts.shape != self.counts.shape or counts.dtype != np.int64 or counts.min() < 0:
            raise ValueError(f"{self.name}: counts that are not non-negative integers, one for each token")
        written = sum(shard["tokens"] for shard in facts["shards"])
        if int(counts.sum()) != written or written + len(pending) != facts["tokens"]:
            raise ValueError(
                f"{self.name}: {facts['tokens']:,} tokens listed, its shards hold a different number"
            )
        vars(self).update({name: facts[name] for name in SPLIT_FIELDS})
        self._filled = len(pending)
        self._buffer[: self._filled] = pending
        self.counts = counts

    @property
    def _pending(self) -> np.ndarray:
        return self._buffer[: self._filled]


class CorpusWriter:
    """A corpus folder being written. An interrupted run continues from its progress.npz."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        tokenizer: Tokenizer,
        size: int | None,
        *,
        repeated: int | None = None,
    ) -> None:
        self._folder, self._settings, self._tokenizer, self._size = folder, settings, tokenizer, size
        self._repeated = repeated
        self._train, self._validation = self._splits = [
            _Split(folder, name, settings.shard_tokens, tokenizer.vocabulary)
            for name in ("train", "validation")
        ]
        self._progress = folder / "progress.npz"
        if self._progress.exists():
            self._restore()

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self._splits)

    @property
    def bytes(self) -> int:
        return sum(split.bytes for split in self._splits)

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self._splits)

    def add(self, tokens: np.ndarray, text_bytes: int, *, may_validate: bool = True) -> None:
        split = self._validation if may_validate and self._takes_validation(text_bytes) else self._train
        shards = len(split.shards)
        split.add(tokens, text_bytes)
        if len(split.shards) > shards:
            self._save()

    def _takes_validation(self, text_bytes: int) -> bool:
        wanted, held = self._settings.validation_tokens, self._validation
        if self._size is None:
            return held.tokens < wanted
        # The choice depends only on earlier documents, so that it is independent of this document's length,
        # except where the document would exceed the largest share.
        behind = held.tokens * self._size < wanted * self.bytes
        even = held.bytes < LARGEST_VALIDATION_SHARE * self.bytes
        fits = held.bytes + text_bytes <= LARGEST_VALIDATION_SHARE * self._size
        return behind and even and fits

    def finish(self) -> None:
        """Write the remaining tokens, then corpus.json."""
        for split in self._splits:
            if not split.tokens:
                raise ValueError(f"{self._settings.source}: nothing left for {self._lacks(split)}")
        for split in self._splits:
            split.flush()
        unigram = io.BytesIO()
        np.savez(unigram, train=self._train.counts, validation=self._validation.counts)
        with atomic_file(self._folder / "unigram.npz") as file:
            file.write(unigram.getbuffer())
        self._progress.unlink(missing_ok=True)
        facts = {
            "format": CORPUS_FORMAT,
            "source": self._settings.source,
            "tokenizer": self._tokenizer.name,
            "vocabulary": self._tokenizer.vocabulary,
            "end_of_text": self._tokenizer.end_of_text,
            "settings": asdict(self._settings),
            "unigram": {"file": "unigram.npz", "sha256": hashlib.sha256(unigram.getbuffer()).hexdigest()},
            "splits": {split.name: split.facts() for split in self._splits},
            "repeated": self._repeated,
        }
        with atomic_file(self._folder / "corpus.json") as file:
            file.write(json.dumps(facts, indent=1).encode())

    def _lacks(self, split: _Split) -> str:
        """Describe why a split has no tokens, and what to do about it."""
        text = f"{self.documents:,} document{'s' * (self.documents != 1)}, {self.tokens:,} tokens"
        if not self.tokens:
            return f"train: {text}, the source has no text"
        if split is self._train:
            wanted = self._settings.validation_tokens
            return f"train: {text}, of which {wanted:,} are held out; give more text, or hold out less"
        return (
            f"validation: {text}; whole documents are held out, at most a tenth of the text; "
            "give more text, or cut it into shorter documents"
        )

    def _save(self) -> None:
        facts = {split.name: split.facts() for split in self._splits}
        state = json.dumps({"settings": asdict(self._settings), "splits": facts})
        arrays = {name: array for split in self._splits for name, array in split.arrays().items()}
        with atomic_file(self._progress) as file:
            np.savez(file, allow_pickle=False, state=np.array(state), **arrays)

    def _restore(self) -> None:
        names = [name for split in self._splits for name in split.arrays()]
        try:
            arrays = read_npz(self._progress, ["state", *names])
            state = parse_json(str(arrays["state"]))
            splits = {split.name: SPLIT_FIELDS for split in self._splits}
            check_fields(state, {"settings": dict, "splits": splits}, "progress")
        except ValueError as error:
            raise self._damaged(error) from None
        self._settings.check_same(state["settings"], self._folder)
        if self._settings.text_sha256 != state["settings"].get("text_sha256"):  # an older progress.npz
            raise self._damaged(ValueError("it does not say which text it was made from"))
        for split in self._splits:
            try:
                split.restore(state["splits"][split.name], arrays)
            except ValueError as error:
                raise self._damaged(error) from None

    def _damaged(self, error: ValueError) -> ValueError:
        return ValueError(f"{self._progress}: unreadable ({error}); remove the folder and prepare it again")
