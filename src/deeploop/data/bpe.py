"""Find and load tokenizers, and train byte-level BPE on your own text.

A trained tokenizer is stored as merges.txt in GPT-2's format: a version line, then one line per merge. The
corpus that it was trained for keeps a copy, and so does each run on that corpus. Its name, `bpe:4096:1f0c…`,
holds its vocabulary size and the start of the file's sha256, so tokenizers with the same name are identical.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from deeploop.data.gguf_file import GGUFFile
from deeploop.data.pretrained_tokenizer import (
    TOKENIZER,
    PretrainedTokenizer,
    read_gguf_tokenizer,
    read_pretrained,
)
from deeploop.data.tokenizers import BPETokenizer, Tokenizer, byte_characters, get_tokenizer, utf8
from deeploop.extras import require
from deeploop.files import DESCRIPTIONS, parse_json, read_object, read_text, resolve

MERGES = "merges.txt"
VERSION_LINE = "#version: 0.2"
SMALLEST, LARGEST = 258, 2**16  # 256 bytes, end-of-text and one merge; as many ids as uint16 holds
LARGEST_FILE = 2**24


def asked_vocabulary(asked: str) -> int | None:
    """Parse the vocabulary size of `bpe:4096`; None for the name of an existing tokenizer."""
    match = re.fullmatch(r"bpe:(\d{1,9})", asked)
    if match is None:
        return None
    if not SMALLEST <= (vocabulary := int(match[1])) <= LARGEST:
        raise ValueError(f"tokenizer {asked}: the vocabulary must be {SMALLEST} to {LARGEST}")
    return vocabulary


def find_tokenizer(asked: str) -> Tokenizer:
    """Find a tokenizer by name, or in a corpus, a run, a transformers folder or a GGUF file."""
    if asked in ("bytes", "gpt2"):
        return get_tokenizer(asked)
    path = resolve(asked)
    if path.is_file() and path.suffix == ".gguf":
        return read_gguf_tokenizer(GGUFFile(path))
    if not path.is_dir():
        raise ValueError(
            f"tokenizer {asked!r}: must be bytes, gpt2, or a folder or GGUF file that has a tokenizer; "
            "`deeploop prepare text FILE… --tokenizer bpe:4096 --out FOLDER` trains one into FOLDER"
        )
    for facts in [read_object(path / name) for name in DESCRIPTIONS if (path / name).exists()]:
        if isinstance(name := facts.get("tokenizer"), str):
            return load_tokenizer(name, path)
    if (path / TOKENIZER).exists():
        return read_pretrained(path)
    if (path / MERGES).exists():
        return read_bpe(path)
    raise ValueError(
        f"tokenizer {asked}: the folder holds none; name a corpus, a language model's run, or a folder with "
        f"{TOKENIZER}"
    )


def load_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Load a tokenizer by name; trained and pretrained ones are read from the folder."""
    if not is_kept(name):
        return get_tokenizer(name)
    file, read = (MERGES, read_bpe) if name.startswith("bpe:") else (TOKENIZER, read_pretrained)
    tokenizer: Tokenizer = read(folder)
    if tokenizer.name != name:
        raise ValueError(f"{folder / file}: damaged: it is {tokenizer.name}, expected {name}")
    return tokenizer


def is_kept(name: str) -> bool:
    """Return True if corpora and runs keep a copy of the tokenizer of that name."""
    return name.startswith(("bpe:", "hf:"))


def vocabulary_fits(name: str, tokens: int, rows: int) -> bool:
    """Return True if a tokenizer's vocabulary fits a model's; pretrained models may have unused rows."""
    return tokens == rows or (tokens < rows and name.startswith("hf:"))


def how_to_ask(name: str, folder: Path) -> str:
    """The value of --tokenizer that selects this tokenizer: its name, or the folder that keeps it."""
    return str(folder) if is_kept(name) else name


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Name → text of the files that store a tokenizer; none for the built-in ones."""
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.files()
    return {MERGES: _text(tokenizer.merges)} if tokenizer.name.startswith("bpe:") else {}


def train_bpe(documents: Iterable[str], vocabulary: int) -> BPETokenizer:
    """Train BPE on documents: merge the most frequent pair until the vocabulary is full.

    The result depends only on the documents: ties are broken by the order of ids.
    """
    require("tokenizers", "hf", f"tokenizer bpe:{vocabulary}")
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # splits by GPT-2's pattern
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,  # without end-of-text
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    engine.train_from_iterator((utf8(text).decode() for text in documents), trainer)
    merges = _distinct(parse_json(engine.to_str())["model"]["merges"])
    if (reached := len(merges) + SMALLEST - 1) < vocabulary:
        advice = "ask for that or fewer" if reached >= SMALLEST else "use more text, or --tokenizer bytes"
        raise ValueError(
            f"tokenizer bpe:{vocabulary}: the text is too short; no pair is left that occurs twice after "
            f"bpe:{reached}; {advice}"
        )
    return _named(merges)


def _distinct(pairs: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    """Remove merges that produce a token which an earlier merge already produces."""
    return list({left + right: (left, right) for left, right in reversed(list(pairs))}.values())[::-1]


def read_bpe(folder: Path) -> BPETokenizer:
    """Read the trained tokenizer of a folder."""
    path = folder / MERGES
    try:
        version, *lines = read_text(path, LARGEST_FILE).removesuffix("\n").split("\n")
        if version != VERSION_LINE:
            raise ValueError(f"its first line is not {VERSION_LINE!r}")
        merges = _parsed(lines)
    except FileNotFoundError:
        raise ValueError(f"{folder}: holds no trained tokenizer (no {MERGES})") from None
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a tokenizer's merges: {error}") from None
    return _named(merges)


def _parsed(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Parse the lines of merges.txt; each must merge two known tokens into a new one."""
    known, merges = set(byte_characters().values()), []
    for number, line in enumerate(lines, start=2):
        left, _, right = line.partition(" ")
        if left not in known or right not in known or left + right in known:
            raise ValueError(f"line {number}: {line!r:.40} does not merge two known tokens into a new one")
        known.add(left + right)
        merges.append((left, right))
    if len(known) >= LARGEST:
        raise ValueError(f"{len(known) + 1} tokens are more than {LARGEST}")
    return merges


def _named(merges: Sequence[tuple[str, str]]) -> BPETokenizer:
    sha256 = hashlib.sha256(_text(merges).encode()).hexdigest()
    return BPETokenizer(f"bpe:{SMALLEST - 1 + len(merges)}:{sha256:.12}", merges)


def _text(merges: Sequence[tuple[str, str]]) -> str:
    return "\n".join([VERSION_LINE, *map(" ".join, merges)]) + "\n"
