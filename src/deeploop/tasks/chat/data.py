"""The chat folder: conversations as tokens.

    train_tokens.npy          uint16, or uint32 of a large vocabulary: conversations, end-of-text before each
    train_answers.npy         bool (tokens,): True for the tokens of answers
    train_bounds.npy          int64 (conversations + 1,): the start of each, and the end of the last
    validation_….npy          as above, for the held-out conversations
    template.jinja            the chat template
    merges.txt                a trained tokenizer; or tokenizer.json and tokenizer_config.json
    chat.json                 tokenizer, source, settings, checksums

chat.json is written last: a folder that has it is complete.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.bpe import load_tokenizer
from deeploop.data.description import digest, naming_damage, read_array, read_description
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import refuse_other
from deeploop.tasks.chat.template import TEMPLATE_FILE, ChatTemplate, read_template

CHAT_FORMAT = 1
SPLITS = ("train", "validation")
TYPES = {"tokens": ("<u2", "<u4"), "answers": ("|b1",), "bounds": ("<i8",)}
COUNTS = ("conversations", "shortened", "left_out")
FIELDS = {
    "source": str,
    "tokenizer": str,
    "vocabulary": int,
    "end_of_text": int,
    "settings": dict,
    "template": {"file": str, "sha256": str},
    "counts": dict.fromkeys(COUNTS, int),
    "arrays": {f"{split}_{name}": {"shape": [int], "sha256": str} for split in SPLITS for name in TYPES},
}


@dataclass(frozen=True)
class ChatSplit:
    """The conversations of one split, memory-mapped."""

    tokens: np.ndarray
    answers: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The number of inputs in each conversation; its last token is only a target."""
        return np.diff(self.bounds) - 1

    def scored(self) -> np.ndarray:
        """The number of answer tokens in each conversation. Its first token is never a target."""
        return np.add.reduceat(np.asarray(self.answers, dtype=np.int64), self.bounds[:-1])


@dataclass(frozen=True)
class ChatSet:
    """A prepared set of conversations."""

    folder: Path
    tokenizer_name: str
    vocabulary: int
    end_of_text: int
    source: str
    train: ChatSplit
    validation: ChatSplit
    facts: dict[str, Any]
    """chat.json, as read."""

    @classmethod
    def open(cls, folder: Path | str) -> "ChatSet":
        """Open a folder, checking names, types, shapes, bounds and tokens but not the checksums."""
        folder = Path(folder)
        facts = _read_facts(folder)
        with naming_damage(folder):
            splits = [_read_split(folder, split, facts) for split in SPLITS]
        return cls(
            folder=folder,
            tokenizer_name=facts["tokenizer"],
            vocabulary=facts["vocabulary"],
            end_of_text=facts["end_of_text"],
            source=facts["source"],
            train=splits[0],
            validation=splits[1],
            facts=facts,
        )

    @property
    def checksum(self) -> str:
        """sha256 over the checksums of the arrays, which identifies the conversations in any folder."""
        hashes = [array["sha256"] for _, array in sorted(self.facts["arrays"].items())]
        return sha256(" ".join(hashes).encode()).hexdigest()

    @property
    def tokens(self) -> int:
        return len(self.train.tokens)

    def counts(self) -> np.ndarray:
        """Count of each token of the vocabulary in the training conversations, int64."""
        return np.bincount(self.train.tokens, minlength=self.vocabulary)

    @property
    def longest(self) -> int:
        """Inputs of the longest conversation."""
        return int(max(split.lengths.max() for split in (self.train, self.validation)))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. A trained one is read from the folder."""
        return load_tokenizer(self.tokenizer_name, self.folder)

    def template(self) -> ChatTemplate:
        """The chat template that the conversations were written with."""
        path = self.folder / TEMPLATE_FILE
        template = read_template(path)
        _compare(path, sha256(template.text.encode()).hexdigest(), self.facts["template"]["sha256"])
        return template

    def verify(self) -> None:
        """Compare everything with the checksums in chat.json. ValueError names the first bad file."""
        for split, own in zip(SPLITS, (self.train, self.validation), strict=True):
            for kind in TYPES:
                wanted = self.facts["arrays"][f"{split}_{kind}"]["sha256"]
                _compare(self.folder / f"{split}_{kind}.npy", digest(getattr(own, kind)), wanted)
        self.template()
        self.tokenizer()  # a trained tokenizer has its checksum in its name


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / "chat.json"
    if not path.is_file():
        refuse_other(folder, "chat.json", "`deeploop prepare chat FILE.jsonl --out ANOTHER` makes one")
        what = "not a whole chat folder (no chat.json)" if folder.is_dir() else "no such folder"
        raise ValueError(f"{folder}: {what}; make it with `deeploop prepare chat FILE.jsonl --out {folder}`")
    facts = read_description(path, "chat", CHAT_FORMAT, FIELDS)
    if unknown := facts["arrays"].keys() - FIELDS["arrays"].keys():  # type: ignore[attr-defined]
        raise ValueError(f"{path}: chat.arrays: unknown array {min(unknown)!r:.40}")
    return facts


def _read_split(folder: Path, name: str, facts: dict[str, Any]) -> ChatSplit:
    arrays = {}
    for kind, types in TYPES.items():
        shape = facts["arrays"][f"{name}_{kind}"]["shape"]
        arrays[kind] = read_array(folder / f"{name}_{kind}.npy", "chat.json", shape, types)
    split = ChatSplit(**arrays)
    if not _are_conversations(split):
        raise ValueError(f"{name}_bounds.npy does not cut its tokens into conversations")
    if (most := int(split.tokens.max())) >= facts["vocabulary"]:
        raise ValueError(f"{name}_tokens.npy: token {most} is outside the vocabulary")
    if not split.scored().all() or split.answers[split.bounds[:-1]].any():
        raise ValueError(f"{name}_answers.npy: a conversation without an answer")
    return split


def _are_conversations(split: ChatSplit) -> bool:
    """Return True if the bounds cut the tokens into conversations of at least two."""
    bounds, tokens, answers = split.bounds, split.tokens, split.answers
    if not bounds.ndim == tokens.ndim == answers.ndim == 1 or len(bounds) < 2 or len(answers) != len(tokens):
        return False
    ends = bounds[0] == bounds.min() == 0 and bounds[-1] == bounds.max() == len(tokens)
    return bool(ends and np.diff(bounds).min() >= 2)  # with these ends, no difference overflows


def _compare(path: Path, sha256: str, wanted: str) -> None:
    if sha256 != wanted:
        raise ValueError(
            f"{path}: damaged: sha256 {sha256:.12}…, chat.json has {wanted:.12}…; prepare it again"
        )
