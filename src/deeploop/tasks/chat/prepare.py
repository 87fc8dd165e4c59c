"""Turn conversations in JSON lines into a chat folder: `deeploop prepare chat`."""

import json
import math
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.bpe import tokenizer_files
from deeploop.data.corpora import json_lines
from deeploop.data.description import digest, require_settings
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import atomic_file, exclusive_folder, refuse_other, sha256_of, write_text
from deeploop.tasks.chat.data import CHAT_FORMAT, COUNTS, ChatSet
from deeploop.tasks.chat.template import (
    TEMPLATE_FILE,
    ChatTemplate,
    Message,
    check_messages,
    encode_segments,
    guarded,
)

# Settings that are stored as a hash → what an error calls another value.
HASHED = {"template": "another template", "text_sha256": "other text"}
Encoded = tuple[np.ndarray, np.ndarray]  # tokens, and True for those of answers


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
    if (prepared := _prepared(out, settings)) is not None:
        return prepared
    with exclusive_folder(out):
        if (prepared := _prepared(out, settings)) is not None:  # written by another process meanwhile
            return prepared
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
    """Encode the conversations of a file; return those of each split, and how many were read."""
    kept: list[Encoded] = []
    counts = dict.fromkeys(COUNTS, 0)
    for where, messages in read_conversations(file):
        counts["conversations"] += 1
        try:
            fitted = fit_turns(messages, template, tokenizer, context + 1)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if fitted is None:
            counts["left_out"] += 1
            continue
        tokens, answers, cut = fitted
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
    """Return the conversations already in the folder; refuse those with other settings."""
    if not (out / "chat.json").exists():
        refuse_other(out, "chat.json", "choose another folder with --out")
        return None
    prepared = ChatSet.open(out)
    require_settings(out, "conversations", prepared.facts["settings"], settings, HASHED)
    return prepared
