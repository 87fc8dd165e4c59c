"""Writes a corpus folder: document after document, restartable at every full shard.

After each full shard everything that is not yet on disk as a shard goes into progress.npz, and a
`CorpusWriter` made in the same folder with the same settings takes up from there.
"""

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.arrays import read_npz
from deeploop.data.shards import CORPUS_FORMAT, SPLIT_FIELDS, check_fields, write_shard
from deeploop.data.tokenizers import Tokenizer, token_dtype
from deeploop.files import atomic_file, parse_json

# Validation never takes more than this part of a finite source, however much is asked for.
LARGEST_VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Settings:
    """What decides a corpus's bytes; kept in corpus.json and compared before anything is reused."""

    source: str
    tokenizer: str
    validation_tokens: int
    shard_tokens: int
    limit_tokens: int | None
    text_sha256: str | None = None
    """Hash of the text's files, where the source has one."""

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

    def check_same(self, found: dict[str, Any], folder: Path) -> None:
        """Raises if the folder was begun with other settings, or from other text of the same description."""
        for name, value in asdict(self).items():
            if name == "text_sha256" and found.get(name) not in (value, None):
                raise ValueError(
                    f"{folder}: holds a corpus of other text, though of the same names and sizes "
                    f"({self.source}); remove it or choose another folder with --out"
                )
            if name != "text_sha256" and found.get(name) != value:
                raise ValueError(
                    f"{folder}: already holds a corpus with {name} {found.get(name)!r}, not {value!r}; "
                    "remove it or choose another folder with --out"
                )


class _Split:
    """One split on its way to disk: full shards, and a buffer that becomes the next one."""

    def __init__(self, folder: Path, name: str, shard_tokens: int, vocabulary: int) -> None:
        self.folder, self.name = folder, name
        self.documents, self.bytes, self.tokens = 0, 0, 0
        self.shards: list[dict[str, Any]] = []
        self.counts = np.zeros(vocabulary, dtype=np.int64)  # of the shards on disk
        self._buffer = np.empty(shard_tokens, dtype=token_dtype(vocabulary))  # takes memory only as it fills
        self._filled = 0

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """One document; whatever fills a shard is written."""
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
        """Writes the buffer as a shard, if there is anything in it."""
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
        """With `facts`, all that a restart needs."""
        return {f"{self.name}_pending": self._pending, f"{self.name}_counts": self.counts}

    def restore(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        pending, counts = arrays[f"{self.name}_pending"], arrays[f"{self.name}_counts"]
        if pending.ndim != 1 or pending.dtype != self._buffer.dtype or len(pending) >= len(self._buffer):
            raise ValueError(f"{self.name}: pending tokens that are none, or too many for a shard")
        if counts.shape != self.counts.shape or counts.dtype != np.int64 or counts.min() < 0:
            raise ValueError(f"{self.name}: counts that are none")
        written = sum(shard["tokens"] for shard in facts["shards"])
        if int(counts.sum()) != written or written + len(pending) != facts["tokens"]:
            raise ValueError(f"{self.name}: {facts['tokens']:,} tokens, which its shards do not add up to")
        vars(self).update({name: facts[name] for name in SPLIT_FIELDS})
        self._filled = len(pending)
        self._buffer[: self._filled] = pending
        self.counts = counts

    @property
    def _pending(self) -> np.ndarray:
        return self._buffer[: self._filled]


class CorpusWriter:
    """The corpus folder being written; begins where an interrupted run's progress.npz left off."""

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
        # Looking only at what came before keeps the choice blind to the document's own length, unless it
        # would break the promise.
        behind = held.tokens * self._size < wanted * self.bytes
        even = held.bytes < LARGEST_VALIDATION_SHARE * self.bytes
        fits = held.bytes + text_bytes <= LARGEST_VALIDATION_SHARE * self._size
        return behind and even and fits

    def finish(self) -> None:
        """Writes what is left, then corpus.json."""
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
        """What a split without a token lacks, and what to do."""
        found = f"{self.documents:,} document{'s' * (self.documents != 1)}, {self.tokens:,} tokens"
        if split is self._train:
            wanted = self._settings.validation_tokens
            return f"train: {found}, of which {wanted:,} are held out; give more text, or hold out less"
        return (
            f"validation: {found}; whole documents are held out, at most a tenth of the text; "
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
        if self._settings.text_sha256 != state["settings"].get("text_sha256"):  # of before text was hashed
            raise self._damaged(ValueError("it does not say of which text"))
        for split in self._splits:
            try:
                split.restore(state["splits"][split.name], arrays)
            except ValueError as error:
                raise self._damaged(error) from None

    def _damaged(self, error: ValueError) -> ValueError:
        return ValueError(f"{self._progress}: unreadable ({error}); remove the folder and prepare it again")
