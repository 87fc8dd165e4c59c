"""Files of tokenized evaluation requests, and of their scores.

A request asks for the log-likelihood of a continuation after a context. Scoring needs only this and a model,
so requests can be written and judged where the evaluation harness is, and scored where the GPU is. Both files
are .npz archives without pickles: reading one executes no code, and all content is checked.
"""

import hashlib
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deeploop.data.arrays import SMALL, read_npz
from deeploop.files import atomic_file, parse_json

FORMAT = 1
TOO_LONG = -math.inf  # never the log-likelihood of a finite model
COLUMNS = {"context": np.int32, "task": np.int16, "shots": np.int16, "document": np.int32, "choice": np.int16}


class Request(NamedTuple):
    """Token ids of a request, and its source."""

    context: Sequence[int] | np.ndarray
    continuation: Sequence[int] | np.ndarray
    task: str = ""
    shots: int = 0
    document: int = 0
    choice: int = 0


class Ragged(NamedTuple):
    """Rows of different lengths, concatenated."""

    values: np.ndarray
    ends: np.ndarray

    @classmethod
    def build(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> "Ragged":
        arrays = [np.asarray(row, np.uint32) for row in rows] or [np.empty(0, np.uint32)]
        return cls(np.concatenate(arrays), np.cumsum([len(row) for row in rows], dtype=np.int64))

    def row(self, index: int | np.integer) -> np.ndarray:
        return self.values[self.ends[index - 1] if index else 0 : self.ends[index]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


@dataclass(frozen=True)
class Requests:
    """Many requests; a context shared by the choices of a document is stored once."""

    tokenizer: str
    vocabulary: int
    tasks: tuple[str, ...]
    contexts: Ragged
    """The distinct contexts."""
    continuations: Ragged
    """One per request."""
    columns: dict[str, np.ndarray]
    """One value per request: index of its context, index of its task, shots, document, choice."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The arguments of the harness."""

    @classmethod
    def build(cls, requests: Iterable[Request], *, tokenizer: str, vocabulary: int) -> "Requests":
        requests = list(requests)
        contexts: dict[bytes, int] = {}
        tasks: dict[str, int] = {}
        rows = [
            (
                contexts.setdefault(np.asarray(request.context, np.uint32).tobytes(), len(contexts)),
                tasks.setdefault(request.task, len(tasks)),
                request.shots,
                request.document,
                request.choice,
            )
            for request in requests
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        return cls(
            tokenizer,
            vocabulary,
            tuple(tasks),
            Ragged.build([np.frombuffer(context, np.uint32) for context in contexts]),
            Ragged.build([request.continuation for request in requests]),
            {name: table[:, i].astype(kind) for i, (name, kind) in enumerate(COLUMNS.items())},
        )._checked()

    @classmethod
    def join(cls, parts: Sequence["Requests"], settings: dict[str, Any]) -> "Requests":
        """Concatenate sets of requests with the same tokenizer."""
        first = parts[0]
        requests = (part.request(i) for part in parts for i in range(len(part)))
        joined = cls.build(requests, tokenizer=first.tokenizer, vocabulary=first.vocabulary)
        return replace(joined, settings=settings)

    def __len__(self) -> int:
        return len(self.continuations.ends)

    def request(self, index: int) -> Request:
        task, *numbers = (self.columns[name][index].item() for name in COLUMNS if name != "context")
        return Request(*self.tokens(index), self.tasks[task], *numbers)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Context and continuation of one request."""
        return self.contexts.row(self.columns["context"][index]), self.continuations.row(index)

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of tokens in each request's context and continuation."""
        return self.contexts.lengths[self.columns["context"]], self.continuations.lengths

    @property
    def shots(self) -> list[int]:
        """The distinct numbers of few-shot examples, in order."""
        return list(dict.fromkeys(self.columns["shots"].tolist()))

    def with_shots(self, shots: int) -> "Requests":
        """The requests with that number of few-shot examples, in order."""
        kept = np.flatnonzero(self.columns["shots"] == shots)
        return replace(
            self,
            continuations=Ragged.build([self.continuations.row(i) for i in kept]),
            columns={name: column[kept] for name, column in self.columns.items()},
        )

    @property
    def items(self) -> int:
        """The number of documents, counted once for each number of shots."""
        c = self.columns
        return len(np.unique(np.stack([c["task"], c["shots"], c["document"]]), axis=1).T)

    def digest(self) -> str:
        """sha256 of the requests in order, independent of how they are stored."""
        sha = hashlib.sha256(json.dumps([self.tokenizer, self.vocabulary, len(self)]).encode())
        names = [self.tasks[task] for task in self.columns["task"]]
        sha.update(json.dumps(names).encode())
        for column in ("shots", "document", "choice"):
            sha.update(self.columns[column].astype("<i8").tobytes())
        for lengths in self.lengths:
            sha.update(lengths.astype("<i8").tobytes())
        for index in range(len(self)):
            for part in self.tokens(index):
                sha.update(part.astype("<u4").tobytes())
        return sha.hexdigest()

    def save(self, path: Path) -> None:
        meta = {
            "kind": "deeploop requests",
            "format": FORMAT,
            "tokenizer": self.tokenizer,
            "vocabulary": self.vocabulary,
            "tasks": self.tasks,
            "sha256": self.digest(),
            "settings": self.settings,
        }
        small = np.uint16 if self.vocabulary <= 2**16 else np.uint32
        arrays = {
            "contexts": self.contexts.values.astype(small),
            "context_lengths": self.contexts.lengths.astype(np.int32),
            "continuations": self.continuations.values.astype(small),
            "continuation_lengths": self.continuations.lengths.astype(np.int32),
        }
        write_archive(path, meta, arrays | self.columns)

    @classmethod
    def load(cls, path: Path) -> "Requests":
        meta, arrays = read_archive(path, "deeploop requests")
        try:
            if other := [name for name, array in arrays.items() if array.dtype.kind not in "iu"]:
                raise ValueError(f"{other[0]!r:.40} is not an array of integers")
            ragged = {
                name: Ragged(
                    arrays[f"{name}s"].astype(np.uint32), np.cumsum(arrays[f"{name}_lengths"], dtype=np.int64)
                )
                for name in ("context", "continuation")
            }
            requests = cls(
                str(meta["tokenizer"]),
                int(meta["vocabulary"]),
                tuple(map(str, meta["tasks"])),
                ragged["context"],
                ragged["continuation"],
                {name: arrays[name].astype(kind) for name, kind in COLUMNS.items()},
                dict(meta["settings"]),
            )._checked()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a file of requests ({error})") from None
        if requests.digest() != meta.get("sha256"):
            raise ValueError(f"{path}: damaged (its checksum does not match its content)")
        return requests

    def _checked(self) -> "Requests":
        def require(holds: object, what: str) -> None:
            if not holds:
                raise ValueError(what)

        count = len(self)
        require(count, "no requests")
        for ragged in (self.contexts, self.continuations):
            require(ragged.values.ndim == ragged.ends.ndim == 1 and len(ragged.ends), "no tokens")
            require((ragged.lengths > 0).all(), "an empty context or continuation")
            require(ragged.ends[-1] == len(ragged.values), "lengths that do not add up")
            require(
                ragged.values.max() < self.vocabulary, f"a token outside the vocabulary {self.vocabulary}"
            )
        for column in self.columns.values():
            require(column.shape == (count,), "columns of different lengths")
            require(column.min() >= 0, "a negative index")
        require(self.columns["context"].max() < len(self.contexts.ends), "a context out of range")
        require(self.columns["task"].max() < len(self.tasks), "a task out of range")
        return self


class Scores(NamedTuple):
    """For each request, the log-likelihood of its continuation, and True if greedy decoding gives it."""

    logprob: np.ndarray
    """TOO_LONG if the continuation does not fit the model's context."""
    greedy: np.ndarray


Answers = dict[int, dict[str, Scores]]
"""Scores by the number of rounds, then by the digest of the requests."""


def save_scores(path: Path, meta: dict[str, Any], answers: Answers) -> None:
    """Write scores; `meta` describes the run that they are from."""
    arrays = {
        f"{rounds}.{digest}.{name}": array
        for rounds, by_digest in answers.items()
        for digest, scores in by_digest.items()
        for name, array in scores._asdict().items()
    }
    write_archive(path, {"kind": "deeploop scores", "format": FORMAT, **meta}, arrays)


def load_scores(path: Path) -> tuple[dict[str, Any], Answers]:
    meta, arrays = read_archive(path, "deeploop scores")
    answers: Answers = {}
    try:
        for key in arrays:
            rounds, digest, name = key.split(".")
            if name == "logprob":
                logprob, greedy = arrays[key], arrays[f"{rounds}.{digest}.greedy"]
                if (logprob.dtype.kind, greedy.dtype.kind) != ("f", "b"):
                    raise ValueError("arrays of other types")
                scores = Scores(logprob.astype(np.float64), greedy)
                answers.setdefault(int(rounds), {})[digest] = scores
                if scores.logprob.ndim != 1 or scores.logprob.shape != scores.greedy.shape:
                    raise ValueError("arrays of different shapes")
                if not (np.isfinite(scores.logprob) | (scores.logprob == TOO_LONG)).all():
                    raise ValueError("a log-likelihood that is not a number")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of scores ({error})") from None
    return meta, answers


def write_archive(path: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write a compressed .npz atomically; `meta` is stored as the bytes of its JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = arrays | {"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8)}
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    if sum(array.nbytes for array in arrays.values()) > 9 * max(packed.tell(), SMALL // 10):
        packed = io.BytesIO()  # `read_npz` would refuse such a compression ratio
        np.savez(packed, **arrays)  # type: ignore[arg-type]
    with atomic_file(path) as file:
        file.write(packed.getbuffer())


def read_archive(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the JSON and arrays that `write_archive` wrote."""
    try:
        arrays = read_npz(path)
        meta = parse_json(arrays.pop("meta").tobytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: can't be read as {kind} ({error})") from None
    if not isinstance(meta, dict) or meta.get("kind") != kind:
        raise ValueError(f"{path}: is not a file of {kind}")
    if meta.get("format") != FORMAT:
        raise ValueError(f"{path}: {kind} of format {meta.get('format')}, this deeploop reads {FORMAT}")
    return meta, arrays
