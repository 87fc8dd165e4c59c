"""`deeploop data`: what a prepared folder holds, and whether it is whole."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from deeploop.commands.parsing import run_command
from deeploop.data.puzzles import SPLITS, PuzzleSet
from deeploop.data.shards import Corpus
from deeploop.report.page import text_table


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """What a folder of `deeploop prepare` holds: text as tokens, or puzzles."""

    folder: Positional[Path]
    """The folder, as `deeploop prepare` writes it."""
    verify: bool = False
    """Also read every file and compare its checksum."""


def run(args: DataArgs) -> str:
    """Opens the folder, which checks names and sizes; returns what to print."""
    held = (
        PuzzleSet.open(args.folder) if (args.folder / "puzzles.json").exists() else Corpus.open(args.folder)
    )
    text = _puzzles(held) if isinstance(held, PuzzleSet) else _corpus(held)
    if not args.verify:
        return f"{text}\n\nsizes fit; --verify reads everything and compares the checksums"
    held.verify()
    return f"{text}\n\nwhole: every checksum fits"


def _corpus(corpus: Corpus) -> str:
    rows = []
    for split, stream in (("train", corpus.train), ("validation", corpus.validation)):
        size, tokens, shards = corpus.bytes(split), len(stream), len(corpus.facts["splits"][split]["shards"])
        counts = (corpus.documents(split), tokens, size, shards)
        rows.append((split, *(f"{count:,}" for count in counts), f"{size / max(1, tokens):.3f}"))
    return (
        f"{corpus.folder}: {corpus.source}\n"
        f"{corpus.tokenizer_name} tokens, vocabulary {corpus.vocabulary:,}\n\n"
        + text_table(("split", "documents", "tokens", "bytes", "shards", "bytes/token"), rows)
    )


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
