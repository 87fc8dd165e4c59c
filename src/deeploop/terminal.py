"""Write to a terminal: untrusted text without its control characters, and a line that is overwritten."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

RED, GREEN, RESET = "\x1b[31m", "\x1b[32m", "\x1b[0m"
COLOURS = re.compile("(" + "|".join(map(re.escape, (RED, GREEN, RESET))) + ")")


def printable(text: str, keep: str = "") -> str:
    """The text with control characters, and others that show nothing, as escapes; those in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def show(text: object, file: TextIO | None = None) -> None:
    """Print text that may hold what an untrusted file says, without its control characters but colours."""
    parts = COLOURS.split(str(text))  # the odd ones are colours
    parts[::2] = [printable(part, keep="\n\t") for part in parts[::2]]
    print("".join(parts), file=file, flush=True)


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


@contextlib.contextmanager
def loading_torch() -> Iterator[None]:
    """Say that torch is being imported, which takes a second, from a cold disk many; once under torchrun."""
    told = "torch" not in sys.modules and os.environ.get("RANK", "0") == "0"
    with passing_line("loading PyTorch …") if told else contextlib.nullcontext():
        yield
