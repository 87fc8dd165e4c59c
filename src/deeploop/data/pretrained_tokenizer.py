"""The tokenizer of a pretrained model, read from a transformers folder or a GGUF file.

tokenizer.json and the needed part of tokenizer_config.json are kept unchanged in the corpus, in the runs
on it and in their exports. Its name, `hf:49152:1f0c…`, holds its vocabulary size and the start of a sha256 of
both, so two tokenizers with the same name are identical. The engine is the package `tokenizers`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.gguf_file import GGUFFile
from deeploop.data.tokenizer_steps import check_steps
from deeploop.data.tokenizers import byte_characters, token_dtype, utf8
from deeploop.extras import require
from deeploop.files import parse_json, read_object, read_text

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Tokens that may separate documents, in order of preference, before bos_token and eos_token.
BETWEEN_DOCUMENTS = ("<|endoftext|>", "<|begin_of_text|>")
LARGEST = 2**20  # words

# Pre-tokenizer pattern of each `tokenizer.ggml.pre`; None is GPT-2's pattern.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": LLAMA3_PATTERN,
    "qwen2": LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
}
CONTROL, USER_DEFINED = 3, 4  # token types


class PretrainedTokenizer:
    """Encode text with a pretrained tokenizer, without adding tokens at either end.

    As with the other tokenizers, special tokens in a text are encoded as their characters.
    """

    merges: Sequence[tuple[str, str]] = ()

    def __init__(self, text: str, settings: dict[str, str]) -> None:
        self.text, self.settings = text, settings
        self._engine = make_engine(text)
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.encode_special_tokens = True
        words = self._engine.get_vocab(with_added_tokens=True)
        self.vocabulary = max(words.values(), default=-1) + 1
        if not 0 < self.vocabulary <= LARGEST:
            raise ValueError(f"a vocabulary of {self.vocabulary}: must be 1 to {LARGEST}")
        named = [*BETWEEN_DOCUMENTS, settings.get("bos_token"), settings.get("eos_token")]
        ends = [words[name] for name in named if name in words]
        if not ends:
            raise ValueError("has no token to separate documents (bos_token, eos_token)")
        self.end_of_text = ends[0]
        added = self._engine.get_added_tokens_decoder()
        self._special = {token for token, word in added.items() if word.special}
        self._byte_level = "ByteLevel" in json.dumps(parse_json(text).get("decoder"))
        self._byte_of = {character: byte for byte, character in byte_characters().items()}
        digest = hashlib.sha256(json.dumps([text, settings], sort_keys=True).encode()).hexdigest()
        self.name = f"hf:{self.vocabulary}:{digest:.12}"

    def encode(self, text: str) -> list[int]:
        if not text.isascii():
            text = utf8(text).decode()
        with _one_line(f"tokenizer {self.name}: can't encode the text"):
            ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=token_dtype(self.vocabulary))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids. Ids beyond the vocabulary, for which models may have rows, give no text."""
        known = np.asarray(ids, dtype=np.int64).tolist()
        with _one_line(f"tokenizer {self.name}: can't decode the tokens"):
            text: str = self._engine.decode(known, skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        word = self._engine.id_to_token(token)
        if word is None or token in self._special:
            return b""
        if self._byte_level and all(character in self._byte_of for character in word):
            return bytes(self._byte_of[character] for character in word)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", word):
            return bytes.fromhex(byte[1])
        return utf8(word.replace("▁", " "))

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special words and their tokens, longest words first."""
        words = sorted(((self.word(token), token) for token in self._special), key=lambda pair: -len(pair[0]))
        return dict(words)

    def word(self, token: int) -> str:
        """A token's string in the vocabulary."""
        return str(self._engine.id_to_token(token))

    def reads_as(self, other: "PretrainedTokenizer") -> bool:
        """True if both give the same ids; names, padding and chat template may differ, as in an export."""
        return self._reading == other._reading

    @property
    def _reading(self) -> tuple[dict[str, Any], int]:
        """The part of tokenizer.json that determines the ids of a text."""
        return parse_json(self._engine.to_str()) | {"post_processor": None}, self.end_of_text

    def files(self) -> dict[str, str]:
        """The files that keep the tokenizer in a folder."""
        return {TOKENIZER: self.text, SETTINGS: json.dumps(self.settings, indent=1) + "\n"}


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn any exception of the engine into a ValueError. A Rust panic is not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error!s:.200}") from None


def make_engine(text: str) -> Any:
    """Build the engine of a tokenizer.json after checking its steps."""
    from tokenizers import Tokenizer as Engine

    parsed = parse_json(text)
    check_steps(parsed)
    return Engine.from_str(json.dumps(parsed))  # the text as checked: the original may hold a key twice


def read_pretrained(folder: Path) -> PretrainedTokenizer:
    """Read the tokenizer of a transformers folder, or the one that a corpus or a run keeps."""
    path = folder / TOKENIZER
    require("tokenizers", "hf", str(path))
    try:
        text, settings = read_text(path), _settings(folder)
    except FileNotFoundError:
        raise ValueError(f"{folder}: holds no {TOKENIZER}") from None
    except OSError as error:
        raise ValueError(f"{error.filename or path}: can't be read ({error.strerror})") from None
    return _made(text, settings, path)


def _made(text: str, settings: dict[str, str], path: Path) -> PretrainedTokenizer:
    with _one_line(f"{path}: not a tokenizer that can be used"):
        return PretrainedTokenizer(text, settings)


def _settings(folder: Path) -> dict[str, str]:
    """Read the named tokens and the chat template, as strings."""
    written = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    settings: dict[str, str] = {}
    for name in (*TOKENS, "chat_template"):
        value = written.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            settings[name] = value
    if (folder / TEMPLATE).exists():
        settings["chat_template"] = read_text(folder / TEMPLATE)
    return settings


def read_gguf_tokenizer(file: GGUFFile) -> PretrainedTokenizer:
    """Read the byte-level BPE in a GGUF file."""
    require("tokenizers", "hf", str(file.path))
    kind, cut = (file.get(f"tokenizer.ggml.{name}", str, "") for name in ("model", "pre"))
    if kind != "gpt2" or cut not in PATTERNS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model={kind!r:.30}, pre={cut!r:.30}: must be gpt2 with one of "
            f"{', '.join(PATTERNS)}; take the tokenizer.json of the model's transformers folder"
        )
    words, merges = (file.get(f"tokenizer.ggml.{name}", list) for name in ("tokens", "merges"))
    types = file.get("tokenizer.ggml.token_type", list)
    settings = {}
    for name in TOKENS:
        word = {"unk_token": "unknown", "pad_token": "padding"}.get(name, name.removesuffix("_token"))
        token = file.get(f"tokenizer.ggml.{word}_token_id", int, -1)
        if 0 <= token < len(words):
            settings[name] = words[token]
    if template := file.get("tokenizer.chat_template", str, ""):
        settings["chat_template"] = template
    with _one_line(f"{file.path}: its tokenizer can't be used"):
        text = _engine_text(words, [tuple(merge.split(" ")) for merge in merges], types, cut)
    return _made(text, settings, file.path)


def _engine_text(words: list[str], merges: list[Any], types: list[int], cut: str) -> str:
    """Build the tokenizer.json of a byte-level BPE."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Engine

    vocabulary = {word: token for token, word in enumerate(words)}
    engine = Engine(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe"))
    pattern = PATTERNS[cut]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    engine.decoder = decoders.ByteLevel()
    for word, kind in zip(words, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            engine.add_tokens([AddedToken(word, special=kind == CONTROL, normalized=False)])
    text: str = engine.to_str()
    return text
