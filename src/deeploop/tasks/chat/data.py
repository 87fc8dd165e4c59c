"""Conversations as tokens: the chat folder, and how JSON lines become one.

    train_tokens.npy          uint16, or uint32 of a large vocabulary: conversations, end-of-text before each
    train_answers.npy         bool (tokens,): True for the tokens of answers
    train_bounds.npy          int64 (conversations + 1,): the start of each, and the end of the last
    validation_….npy          as above, for the held-out conversations
    template.jinja            the chat template
    merges.txt                a trained tokenizer; or tokenizer.json and tokenizer_config.json
    chat.json                 tokenizer, source, settings, checksums

chat.json is written last: a folder that has it is complete.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.bpe import load_tokenizer, tokenizer_files
from deeploop.data.corpora import json_lines
from deeploop.data.description import digest, naming_damage, read_array, read_description, require_settings
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import atomic_file, exclusive_folder, refuse_other, sha256_of, write_text
from deeploop.tasks.chat.template import (
    TEMPLATE_FILE,
    ChatTemplate,
    Message,
    check_messages,
    encode_segments,
    guarded,
    read_template,
)

CHAT_FORMAT = 1
SPLITS = ("train", "validation")
TYPES = {"tokens": ("<u2", "<u4"), "answers": ("|b1",), "bounds": ("<i8",)}
HASHED = {
    "template": "another template",
    "text_sha256": "other text",
}  # hashed setting → what an error calls it
COUNTS = ("conversations", "shortened", "left_out")
Encoded = tuple[np.ndarray, np.ndarray]  # tokens, and True for those of answers
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
        template = read_template(self.folder / TEMPLATE_FILE)
        _compare(
            self.folder / TEMPLATE_FILE,
            sha256(template.text.encode()).hexdigest(),
            self.facts["template"]["sha256"],
        )
        return template

    def verify(self) -> None:
        """Compare everything with the checksums in chat.json. ValueError names the first bad file."""
        for split, own in zip(SPLITS, (self.train, self.validation), strict=True):
            for kind in TYPES:
                wanted = self.facts["arrays"][f"{split}_{kind}"]["sha256"]
                _compare(self.folder / f"{split}_{kind}.npy", digest(getattr(own, kind)), wanted)
        self.template()
        self.tokenizer()  # a trained tokenizer has its checksum in its name


def prepare_chat(
    file: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    out: Path,
    *,
    context: int,
    validation_share: float,
) -> ChatSet:
    """Write a chat folder, or return the one already there with the same settings."""
    if context < 1:
        raise ValueError(f"context={context}: must be at least 1")
    if not (math.isfinite(validation_share) and 0 < validation_share <= 0.5):
        raise ValueError(f"validation_share={validation_share}: must be above 0 and at most 0.5")
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    settings = {
        "tokenizer": tokenizer.name,
        "template": sha256(template.text.encode()).hexdigest(),
        "context": context,
        "validation_share": validation_share,
        "text_sha256": sha256_of(file),
    }
    if (found := _prepared(out, settings)) is not None:
        return found
    with exclusive_folder(out):
        if (found := _prepared(out, settings)) is not None:  # written by another process meanwhile
            return found
        splits, counts = _encode(file, tokenizer, template, context, validation_share)
        _write(out, file.name, tokenizer, template, settings, splits, counts)
    return ChatSet.open(out)


def read_conversations(file: Path) -> Iterator[tuple[str, list[Message]]]:
    """Yield each line's location and conversation: `messages`, or `prompt` and `response`."""
    for where, row in json_lines(file):
        try:
            if not isinstance(row, dict):
                raise ValueError("must be an object")
            if "messages" not in row and {"prompt", "response"} <= row.keys():
                pair = {"user": row["prompt"], "assistant": row["response"]}
                row = {"messages": [{"role": role, "content": text} for role, text in pair.items()]}
            if "messages" not in row:
                raise ValueError('has neither "messages" nor "prompt" and "response"')
            yield where, check_messages(row["messages"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def fit_turns(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer, most: int
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Encode a conversation in at most `most` tokens; return tokens, answers and the number of turns dropped.

    Whole turns are dropped from the front, a question together with its answer; a system message stays.
    Return None if not even the last turn fits.
    """
    for cut, kept in enumerate(cut_at_front(messages)):
        tokens, answers = encode_segments(template.segments(guarded(kept, tokenizer)), tokenizer)
        if len(tokens) <= most:
            return tokens, answers, cut
    return None


def cut_at_front(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the whole conversation, then without its first turn, without the first two, and so on."""
    first = 1 if messages[0]["role"] == "system" else 0
    rest = messages[first:]
    starts = [index for index, message in enumerate(rest) if message["role"] == "user"]
    for start in [0, *(index for index in starts if index > 0)]:
        yield [*messages[:first], *rest[start:]]


def _encode(
    file: Path, tokenizer: Tokenizer, template: ChatTemplate, context: int, share: float
) -> tuple[dict[str, list[Encoded]], dict[str, int]]:
    kept: list[Encoded] = []
    counts = dict.fromkeys(COUNTS, 0)
    for where, messages in read_conversations(file):
        counts["conversations"] += 1
        try:
            found = fit_turns(messages, template, tokenizer, context + 1)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if found is None:
            counts["left_out"] += 1
            continue
        tokens, answers, cut = found
        counts["shortened"] += cut > 0
        kept.append((tokens, answers))
    if len(kept) < 2:
        raise ValueError(
            f"{file}: {counts['conversations']} conversations, of which {counts['left_out']} are longer than "
            f"--context {context}; at least two must be left, one of them to hold out"
        )
    # Hold out conversations spread evenly over the file.
    number = np.arange(len(kept) + 1)
    is_held = np.diff(np.ceil(number * max(share, 1 / len(kept)) - 1e-9)) > 0
    return {
        "train": [one for one, held in zip(kept, is_held, strict=True) if not held],
        "validation": [one for one, held in zip(kept, is_held, strict=True) if held],
    }, counts


def _write(
    out: Path,
    source: str,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    settings: dict[str, Any],
    splits: dict[str, list[Encoded]],
    counts: dict[str, int],
) -> None:
    arrays: dict[str, np.ndarray] = {}
    for split, conversations in splits.items():
        tokens, answers = zip(*conversations, strict=True)
        arrays[f"{split}_tokens"] = np.concatenate(tokens)
        arrays[f"{split}_answers"] = np.concatenate(answers)
        arrays[f"{split}_bounds"] = np.cumsum([0, *map(len, tokens)], dtype="<i8")
    for name, array in arrays.items():
        with atomic_file(out / f"{name}.npy") as file:
            np.save(file, array, allow_pickle=False)
    for name, text in {TEMPLATE_FILE: template.text, **tokenizer_files(tokenizer)}.items():
        write_text(out / name, text)
    facts = {
        "format": CHAT_FORMAT,
        "source": source,
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.vocabulary,
        "end_of_text": tokenizer.end_of_text,
        "settings": settings,
        "template": {"file": TEMPLATE_FILE, "sha256": settings["template"]},
        "counts": {name: int(count) for name, count in counts.items()},
        "arrays": {
            name: {"shape": list(array.shape), "sha256": digest(array)} for name, array in arrays.items()
        },
    }
    with atomic_file(out / "chat.json") as file:
        file.write(json.dumps(facts, indent=1).encode())


def _prepared(out: Path, settings: dict[str, Any]) -> ChatSet | None:
    if not (out / "chat.json").exists():
        refuse_other(out, "chat.json", "choose another folder with --out")
        return None
    found = ChatSet.open(out)
    require_settings(out, "conversations", found.facts["settings"], settings, HASHED)
    return found


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


def _compare(path: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise ValueError(
            f"{path}: damaged: sha256 {found:.12}…, chat.json has {wanted:.12}…; prepare it again"
        )
