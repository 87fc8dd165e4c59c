"""`deeploop data`: what a prepared folder holds, and whether it is whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from tyro.conf import Positional

from deeploop.commands.parsing import run_command
from deeploop.data.puzzles import SPLITS, PuzzleSet
from deeploop.data.scan import Scan, excerpt, scan
from deeploop.data.shards import Corpus
from deeploop.report.page import text_table
from deeploop.terminal import printable

SCANNED_TOKENS = 500_000_000  # of each split: a gigabyte, some seconds
SAMPLE_CHARACTERS = 300
COLUMNS = ("split", "documents", "tokens", "bytes", "shards", "longest", "duplicates", "bytes/token")


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """What a folder of `deeploop prepare` holds: text as tokens, or puzzles.

    Of text also the longest document, exact duplicates and a sample.
    """

    folder: Positional[Path]
    """The folder, as `deeploop prepare` writes it."""
    verify: bool = False
    """Read every file, however large, and compare its checksum."""


def run(args: DataArgs) -> str:
    """Opens the folder, which checks names and sizes; returns what to print."""
    held = (
        PuzzleSet.open(args.folder) if (args.folder / "puzzles.json").exists() else Corpus.open(args.folder)
    )
    limit = None if args.verify else SCANNED_TOKENS
    text = _puzzles(held) if isinstance(held, PuzzleSet) else _corpus(held, limit)
    if not args.verify:
        return f"{text}\n\nsizes fit; --verify reads everything and compares the checksums"
    held.verify()
    return f"{text}\n\nwhole: every checksum fits"


def _corpus(corpus: Corpus, limit: int | None) -> str:
    streams = {"train": corpus.train, "validation": corpus.validation}
    scans = {split: scan(stream, corpus.end_of_text, limit) for split, stream in streams.items()}
    rows = []
    for split, stream in streams.items():
        size, tokens, shards = corpus.bytes(split), len(stream), len(corpus.facts["splits"][split]["shards"])
        found = scans[split]
        counts = (corpus.documents(split), tokens, size, shards, found.longest, found.repeated)
        rows.append((split, *(f"{count:,}" for count in counts), f"{size / max(1, tokens):.3f}"))
    return "\n\n".join(
        [
            f"{corpus.folder}: {corpus.source}\n"
            f"{corpus.tokenizer_name} tokens, vocabulary {corpus.vocabulary:,}",
            text_table(COLUMNS, rows),
            "\n".join(_notes(scans)),
            f"a document of train begins:\n{_sample(corpus)}",
        ]
    )


def _notes(scans: dict[str, Scan]) -> Iterator[str]:
    """What the columns mean, what was left out, and what of validation was trained on."""
    yield "longest: tokens of the longest document; duplicates: documents like an earlier one of the split"
    shared = scans["validation"].shared_with(scans["train"])
    yield f"documents of validation that are in train too: {shared:,}"
    for split, found in scans.items():
        if not found.is_whole:
            yield f"of {split} the first {len(found.hashes):,} documents were looked at; --verify reads all"


def _sample(corpus: Corpus) -> str:
    """The beginning of a document, indented."""
    tokens = excerpt(corpus.train, corpus.end_of_text, SAMPLE_CHARACTERS)
    text = corpus.tokenizer().decode(tokens)[:SAMPLE_CHARACTERS]
    return indent(printable(text, keep="\n"), "    ")


def _puzzles(puzzles: PuzzleSet) -> str:
    sizes = ("groups", "puzzles", "pairs", "examples")
    rows = [(name, *(f"{puzzles.facts['splits'][name][size]:,}" for size in sizes)) for name in SPLITS]
    return (
        f"{puzzles.folder}: {puzzles.kind}, hash {puzzles.hash}\n"
        f"{puzzles.length} tokens per puzzle, vocabulary {puzzles.vocabulary:,}, "
        f"{puzzles.puzzle_ids:,} puzzle ids\n\n{text_table(('split', *sizes), rows)}"
    )


def main(arguments: list[str]) -> int:
    return run_command(DataArgs, run, arguments, prog="deeploop data")
