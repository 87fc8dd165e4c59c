"""Checks on the steps of a tokenizer.json: how much text they can add, and that its tokens are not random.

A normalizer or decoder may replace characters by longer ones, so a few kilobytes of steps could
turn a line into more text than fits in memory. The most that each step can add follows from its fields.
"""

import base64
import math
from collections.abc import Callable, Iterator
from typing import Any

LARGEST_GROWTH = 100  # largest ratio of output bytes to input bytes; Llama's steps have 12, XLM-RoBERTa's 88
LONGEST_AFFIX = 64  # bytes of the affix that a model adds to every piece of a word, such as ## or </w>
RANDOM = ("dropout", "alpha", "nbest_size")  # model fields that sample one of several ways to split a word

# Upper bound on the growth of a text, in bytes, by type of step. Other types are refused.
GROWTH: dict[str, int] = {
    **dict.fromkeys(("Strip", "StripAccents", "Nmt", "ByteFallback", "Fuse", "CTC", "WordPiece"), 1),
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"), 1),
    **dict.fromkeys(("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit", "BPEDecoder"), 1),
    "Lowercase": 2,
    **dict.fromkeys(("NFC", "NFD", "ByteLevel"), 3),
    "Metaspace": 4,
    "BertNormalizer": 8,
    **dict.fromkeys(("NFKC", "NFKD"), 11),  # U+FDFA: 3 bytes, then 33
}


def check_steps(tokenizer: Any) -> None:
    """Raise ValueError if a parsed tokenizer.json gives random tokens or could make a text much longer."""
    if not isinstance(tokenizer, dict):
        raise ValueError("must be an object")
    for parts in (("normalizer", "pre_tokenizer"), ("decoder",)):
        steps = [(step, part) for part in parts for step in _steps(tokenizer.get(part), part)]
        growth = math.prod(_growth(step, part) for step, part in steps)
        if growth > LARGEST_GROWTH:
            part = " and ".join(parts)
            raise ValueError(f"{part}: could make a text {growth:.3g} times as long, not {LARGEST_GROWTH}")
    model = tokenizer.get("model")
    for name in RANDOM:
        if isinstance(model, dict) and model.get(name):
            raise ValueError(f"model.{name}={model[name]!r:.40}: would make tokens random; set it to null")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model, dict) and _size(model.get(name) or "") > LONGEST_AFFIX:
            raise ValueError(f"model.{name}: must have at most {LONGEST_AFFIX} bytes")


def _steps(step: Any, part: str) -> Iterator[dict[str, Any]]:
    """The steps of a part, with every Sequence flattened."""
    if step is None:
        return
    if not isinstance(step, dict) or not isinstance(step.get("type"), str):
        raise ValueError(f"{part}: must be steps with a type")
    if step["type"] != "Sequence":
        yield step
        return
    inner = [value for value in step.values() if isinstance(value, list)]
    for one in [one for steps in inner for one in steps]:
        yield from _steps(one, part)


def _growth(step: dict[str, Any], part: str) -> float:
    kind = step["type"]
    if kind in MEASURED:
        return max(1.0, MEASURED[kind](step))
    if kind not in GROWTH:
        raise ValueError(f"{part}: a step of type {kind!r:.40} is not known")
    return GROWTH[kind]


def _replace(step: dict[str, Any]) -> float:
    """Growth of a replaced string; a regular expression may match between any two characters."""
    pattern, content = step.get("pattern"), _size(step.get("content"))
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return content / _size(text) if text else 1 + content


def _prepend(step: dict[str, Any]) -> float:
    return 1 + _size(step.get("prepend"))


def _precompiled(step: dict[str, Any]) -> float:
    """Growth by the longest string in SentencePiece's table.

    The table is the size of a trie, the trie, and strings that end with 0. In the tables of known models
    only characters of three bytes or more have long replacements, as in NFKC.
    """
    table = base64.b64decode(step.get("precompiled_charsmap") or "")
    strings = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, strings.split(b"\0"))) / 3


MEASURED: dict[str, Callable[[dict[str, Any]], float]] = {
    "Replace": _replace,
    "Prepend": _prepend,
    "Precompiled": _precompiled,
}


def _size(text: Any) -> int:
    if not isinstance(text, str):
        raise ValueError(f"{text!r:.40}: must be a string")
    return len(text.encode(errors="replace"))
