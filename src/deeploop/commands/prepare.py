"""`deeploop prepare`: write text, conversations or puzzles as folders that training reads."""

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from deeploop.commands import prepare_chat, prepare_puzzles
from deeploop.commands.parsing import choose, parse, summary
from deeploop.config.checks import at_least
from deeploop.data.corpora import (
    FEW_FILES,
    FINEWEB_EDU,
    FINEWEB_EDU_SAMPLE,
    TEXT_SUFFIXES,
    Source,
    fineweb_edu,
    stdlib,
    text_files,
)
from deeploop.data.prepare import SHARD_TOKENS, prepare, tokenizer_for
from deeploop.data.shards import Corpus
from deeploop.terminal import show

LITTLE_TEXT = 20_000_000  # tokens of gpt2: some 80 MB


@dataclass(frozen=True, kw_only=True)
class PrepareCorpus(ABC):
    """Options of all sources of text; the first line of a subclass's docstring is its entry in --help."""

    out: Path
    """The corpus folder to write."""
    tokenizer: str
    """bytes, gpt2, bpe:4096 (trained on this text), or a corpus, run, model folder or GGUF file with one."""
    validation_tokens: int
    """Tokens to hold out."""
    shard_tokens: int = SHARD_TOKENS
    """Tokens per shard."""
    workers: int | None = None
    """Encoding threads; unset: one per core. The output does not depend on their number."""

    @abstractmethod
    def documents(self) -> Source:
        """Return the source of the text."""


@dataclass(frozen=True, kw_only=True)
class PrepareStdlib(PrepareCorpus):
    """The Python standard library's own sources: a small corpus without a download."""

    out: Path = Path("data/stdlib")
    tokenizer: str = "bytes"
    validation_tokens: int = 500_000
    """Tokens to hold out, in whole documents spread over the corpus; never more than a tenth of it."""

    def documents(self) -> Source:
        return stdlib()


@dataclass(frozen=True, kw_only=True)
class PrepareText(PrepareCorpus):
    """Your own text: .txt, .jsonl, .gz or .xz of either, .parquet."""

    paths: Positional[tuple[Path, ...]]
    """Files, or folders to be searched for them."""
    field: str = "text"
    """Field of a .jsonl line, or column of a .parquet file, that holds the text."""
    skip_bad: bool = False
    """Leave out files that are not UTF-8 text, and name them, instead of stopping at the first."""
    out: Path = Path("data/text")
    tokenizer: str = "gpt2"
    validation_tokens: int = 1_000_000
    """Tokens to hold out, in whole documents spread over the corpus; never more than a tenth of it."""

    def documents(self) -> Source:
        return text_files(self.paths, self.field, skip_bad=self.skip_bad)


@dataclass(frozen=True, kw_only=True)
class PrepareFinewebEdu(PrepareCorpus):
    """FineWeb-Edu, streamed from the Hugging Face hub."""

    out: Path = Path("data/fineweb-edu")
    tokenizer: str = "gpt2"
    source: str = FINEWEB_EDU
    """A dataset on the hub, or a local folder or file of parquet or jsonl in the same layout."""
    name: str = FINEWEB_EDU_SAMPLE
    """Which sample of the dataset on the hub."""
    limit_tokens: int | None = 50_000_000_000
    """Stop after this many tokens; the paper's runs see 49.2 billion. None takes the whole sample."""
    validation_tokens: int = 100_000_000
    """Tokens to hold out: the first documents of the stream."""

    def documents(self) -> Source:
        return fineweb_edu(self.source, self.name)


def run(args: PrepareCorpus) -> str:
    """Run a `deeploop prepare` command for text, and return the summary to print."""
    at_least(1, args, "workers")
    source = args.documents()
    found = (args.out / "corpus.json").exists()
    corpus = prepare(
        source,
        tokenizer_for(args.tokenizer, source, args.out, stream=source.stream),
        args.out,
        validation_tokens=args.validation_tokens,
        source=source.description,
        stream=source.stream,
        shard_tokens=args.shard_tokens,
        limit_tokens=getattr(args, "limit_tokens", None),  # a stream alone has one
        workers=args.workers,
        text_sha256=source.sha256(),
    )
    settings = corpus.facts["settings"]
    unknown = settings.get("text_sha256") is None and source.files
    note = " (by name and size: it is of before text was hashed)" if unknown else ""
    return (f"already prepared{note}: " if found else "") + _summary(corpus, source, args.validation_tokens)


def _summary(corpus: Corpus, source: Source, asked: int) -> str:
    splits = ("train", "validation")
    documents = sum(corpus.documents(split) for split in splits)
    shards = sum(len(corpus.facts["splits"][split]["shards"]) for split in splits)
    held_out = len(corpus.validation)
    how = "whole documents spread over the text, at most a tenth of it"
    fewer = f" ({how}; --validation-tokens is {asked:,})" if held_out < asked else ""
    return (
        f"{corpus.folder}: {documents:,} documents{_pieces(source, documents)} of {corpus.source}; "
        f"{corpus.tokenizer_name} tokens: "
        f"{len(corpus.train):,} train, {held_out:,} validation{fewer}; "
        f"{shards} shards{''.join(_notes(corpus, source))}"
    )


def _notes(corpus: Corpus, source: Source) -> Iterator[str]:
    """Notes on files that were left out, repeated documents, and a better tokenizer for a small text."""
    if source.skipped:
        named = ", ".join(map(str, source.skipped[:5])) + ", …" * (len(source.skipped) > 5)
        yield f"\nleft out, not UTF-8: {len(source.skipped):,} files ({named})"
    if again := corpus.facts.get("repeated"):
        yield f"\n{again:,} documents occur more than once; they are all in train, none is validated on"
    if corpus.tokenizer_name == "gpt2" and len(corpus.train) < LITTLE_TEXT:
        yield (
            f"\nlittle text for gpt2's {corpus.vocabulary:,} tokens; on a CPU or for a small model prepare "
            "it with --tokenizer bytes or bpe:4096, into another --out"
        )


def _pieces(source: Source, documents: int) -> str:
    """Note that files were split into pieces, as training may mask documents from each other."""
    texts = sum(file.name.endswith(TEXT_SUFFIXES) for file in source.files)
    if not texts or len(source.files) >= FEW_FILES or documents <= len(source.files):
        return ""
    return f" (pieces of {texts} text file{'s' * (texts != 1)})"


def main(arguments: list[str]) -> int:
    sources: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "stdlib": (PrepareStdlib, run),
        "text": (PrepareText, run),
        "fineweb-edu": (PrepareFinewebEdu, run),
        "chat": (prepare_chat.PrepareChat, prepare_chat.run),
        "arc": (prepare_puzzles.PrepareArc, prepare_puzzles.run),
        "sudoku": (prepare_puzzles.PrepareSudoku, prepare_puzzles.run),
        "maze": (prepare_puzzles.PrepareMaze, prepare_puzzles.run),
        "pairs": (prepare_puzzles.PreparePairs, prepare_puzzles.run),
    }
    choice, rest = choose("source", arguments, {name: summary(kind) for name, (kind, _) in sources.items()})
    if choice is not None:
        kind, build = sources[choice]
        args = parse(kind, rest, prog=f"deeploop prepare {choice}")
        # SIGTERM's default action would leave the worker processes waiting forever.
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            show(build(args))
        finally:
            signal.signal(signal.SIGTERM, previous)
    return 0
