"""What is written on a terminal: text of others without its control characters, and a line that passes."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO


def printable(text: str, keep: str = "") -> str:
    """The text with control characters, and others that show nothing, as escapes; those in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def show(text: object, file: TextIO | None = None) -> None:
    """Print text that may hold what an untrusted file says, without its control characters."""
    print(printable(str(text), keep="\n\t"), file=file, flush=True)


@contextlib.contextmanager
def passing_line(text: str) -> Iterator[None]:
    """Shows the text on stderr until the body is done; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(text), end="\r", file=sys.stderr, flush=True)
