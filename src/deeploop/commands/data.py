"""`deeploop data`: describe a prepared folder, and check that it is complete."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from tyro.conf import Positional

from deeploop.data.scan import Scan, excerpt, scan
from deeploop.data.shards import Corpus
from deeploop.report.tables import text_table
from deeploop.tasks.chat.data import ChatSet
from deeploop.tasks.puzzles.data.sets import SPLITS, PuzzleSet
from deeploop.terminal import printable

SCANNED_TOKENS = 500_000_000  # of each split: a gigabyte, some seconds
SAMPLE_CHARACTERS = 300
COLUMNS = ("split", "documents", "tokens", "bytes", "shards", "longest", "duplicates", "bytes/token")


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """Describe a folder of `deeploop prepare`: text as tokens, conversations, or puzzles.

    For text this includes the longest document, exact duplicates and a sample.
    """

    folder: Positional[Path]
    """The folder, as `deeploop prepare` writes it."""
    verify: bool = False
    """Read every file, however large, and compare its checksum."""


def run(args: DataArgs) -> str:
    """Open the folder, which checks names and sizes; return the text to print."""
    held: PuzzleSet | ChatSet | Corpus
    if (args.folder / "puzzles.json").exists():
        held = PuzzleSet.open(args.folder)
        text = _puzzles(held)
    elif (args.folder / "chat.json").exists():
        held = ChatSet.open(args.folder)
        text = _chat(held)
    else:
        held = Corpus.open(args.folder)
        text = _corpus(held, None if args.verify else SCANNED_TOKENS)
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
    """Explain the columns; report what was left out and validation documents that are in training."""
    yield "longest: tokens of the longest document; duplicates: documents like an earlier one of the split"
    shared = scans["validation"].shared_with(scans["train"])
    yield f"documents of validation that are in train too: {shared:,}"
    for split, found in scans.items():
        if not found.is_whole:
            yield f"of {split} the first {len(found.hashes):,} documents were looked at; --verify reads all"


def _sample(corpus: Corpus) -> str:
    """Return the beginning of a document, indented."""
    tokens = excerpt(corpus.train, corpus.end_of_text, SAMPLE_CHARACTERS)
    text = corpus.tokenizer().decode(tokens)[:SAMPLE_CHARACTERS]
    return indent(printable(text, keep="\n"), "    ")


def _chat(chat: ChatSet) -> str:
    rows = []
    for name, split in (("train", chat.train), ("validation", chat.validation)):
        counts = (len(split), len(split.tokens), int(split.answers.sum()), int(split.lengths.max()) + 1)
        rows.append((name, *(f"{count:,}" for count in counts)))
    counts = chat.facts["counts"]
    sample = chat.tokenizer().decode(chat.train.tokens[: chat.train.bounds[1]])[:SAMPLE_CHARACTERS]
    return "\n\n".join(
        [
            f"{chat.folder}: {counts['conversations']:,} conversations of {chat.source}\n"
            f"{chat.tokenizer_name} tokens, vocabulary {chat.vocabulary:,}",
            text_table(("split", "conversations", "tokens", "of answers", "longest"), rows),
            f"{counts['shortened']:,} were cut at the front, {counts['left_out']:,} left out as too long",
            f"a conversation of train begins:\n{indent(printable(sample, keep=chr(10)), '    ')}",
        ]
    )


def _puzzles(puzzles: PuzzleSet) -> str:
    sizes = ("groups", "puzzles", "pairs", "examples")
    rows = [(name, *(f"{puzzles.facts['splits'][name][size]:,}" for size in sizes)) for name in SPLITS]
    ids = puzzles.puzzle_ids
    return (
        f"{puzzles.folder}: {puzzles.kind}, hash {puzzles.hash}\n"
        f"{puzzles.length} tokens per puzzle, vocabulary {puzzles.vocabulary:,}, "
        f"{ids:,} puzzle id{'s' * (ids > 1)}\n\n{text_table(('split', *sizes), rows)}"
    )
