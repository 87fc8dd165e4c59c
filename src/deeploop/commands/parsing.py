"""Words of the command line into dataclasses, and one line where they do not fit."""

import contextlib
import difflib
import io
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, TypeVar

from deeploop.terminal import show

T = TypeVar("T")


def choose(what: str, arguments: list[str], choices: dict[str, str]) -> tuple[str | None, list[str]]:
    """Takes the first word as a choice; without one, or with --help, lists what there is."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, choices))
        print(f"choose a {what}; each has its own --help:\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, text in choices.items()))
        return None, []
    if arguments[0].startswith("-"):
        raise ValueError(f"{arguments[0]}: the {what} comes first; choose one of {', '.join(choices)}")
    require_known(what, arguments[0], choices)
    return arguments[0], arguments[1:]


def require_known(what: str, word: str, choices: Iterable[str]) -> None:
    """Raises where the word is none of the choices, and says which it may have been."""
    choices = list(choices)
    if word not in choices:
        close = difflib.get_close_matches(word, choices, n=3)
        advice = f"perhaps {' or '.join(close)}" if close else f"choose one of {', '.join(choices)}"
        raise ValueError(f"{what} {word!r}: unknown; {advice}")


def summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]


def parse(
    kind: type[T],
    arguments: list[str],
    *,
    prog: str,
    default: T | None = None,
    words: Mapping[str, str] = MappingProxyType({}),
    description: str | None = None,
) -> T:
    """tyro's parse, with its framed error page cut down to the one line that says what is wrong.

    `words` are names that others would use for an option, and the option that is meant; a `description`
    stands in --help in place of the dataclass's own.
    """
    import tyro

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), _whole_numbers():
            if default is None:
                return tyro.cli(kind, args=arguments, prog=prog, description=description)
            return tyro.cli(kind, args=arguments, prog=prog, default=default, description=description)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise ValueError(_one_line(stderr.getvalue(), words)) from None


def _whole_numbers() -> Any:
    """tyro's rule for int, which takes 1e9 too."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: Any) -> Any:
        if info.type is not int:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda words: whole_number(words[0]),
            is_instance=lambda value: type(value) is int,
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def whole_number(text: str) -> int:
    """An int as Python writes it, or a float that is whole, such as 1e9."""
    try:
        return int(text)
    except ValueError:
        if re.fullmatch(r"\d{1,3}(\.\d{1,9})?e\+?\d{1,2}", text) and (value := Decimal(text)) == int(value):
            return int(value)
    raise ValueError(f"{text}: must be a whole number, such as 1000 or 1e9")


def _one_line(page: str, words: Mapping[str, str]) -> str:
    """The message inside tyro's frame: the text up to the first rule, and what was meant.

    That is what `words` say of the unknown option's last part, or else tyro's own guess.
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", page)  # colours, where stdout is a terminal
    lines = [line.strip("│╭╮╰╯ ") for line in plain.splitlines()][1:]  # the first line is a title
    sections = [part for part in re.split(r"(?m)^[─-]{5,}$", "\n".join(lines)) if part.strip()]
    message = re.sub(
        r"^Error parsing ([\w.-]+: (?=\w+\.\w+=|\w+=)|\w+Args: )", "", " ".join(sections[0].split())
    )
    # Of an option that may be None too, what is wrong with the value by its own type.
    message = re.sub(r"no type matching .* Got errors: .*- <class '(int|float)'>: ", "", message)
    message = _about_value(message)
    hint = next((s for s in sections if "Perhaps you meant" in s), "")
    stray = next((s.split() for s in sections[1:] if s.strip().startswith("Unrecognized options:")), None)
    if message.startswith("Missing from") and stray:  # is one of them a missing option, misspelled?
        missing = re.findall(r"(?m)^ *(--[\w.-]+)", sections[0])
        if close := difflib.get_close_matches(stray[2], missing, n=1):
            return f"Unrecognized options: {', '.join(stray[2:])}; perhaps you meant {close[0]}"
        return f"{message}; unrecognized: {' '.join(stray[2:])}"
    unknown = re.match(r"Unrecognized options: (--(?:[\w-]+\.)*([\w-]+))", message)
    meant = words.get(unknown[2].replace("_", "-")) if unknown else None
    guesses = re.findall(r"--[\w.-]+", hint)
    if meant is None and guesses:  # tyro's first is not always the nearest
        nearest = difflib.get_close_matches(unknown[1], guesses, n=1, cutoff=0) if unknown else guesses
        meant = nearest[0]
    return message + (f"; perhaps you meant {meant}" if meant else "")


def _about_value(message: str) -> str:
    """tyro's words on a value that an option does not take, in ours; other messages as they are."""
    if choice := re.fullmatch(
        r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)\.", message
    ):
        word, option, listed = choice.groups()
        known = re.findall(r"'([^']*)'", listed)
        close = difflib.get_close_matches(word, known, n=1)
        advice = f"; perhaps {close[0]}" if close else ""
        return f"{option}={word}: must be one of {', '.join(known)}{advice}"
    message = re.sub(r"^Error parsing (--[\w.-]+): (?=\S+: must be )", r"\1=", message)
    return re.sub(
        r"^Error parsing (--[\w.-]+): could not convert string to float: '(.*)'$",
        r"\1=\2: must be a number",
        message,
    )


def run_command(
    kind: type[T],
    run: Callable[[T], str],
    arguments: list[str],
    *,
    prog: str,
    words: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Parses the arguments, runs the command, prints what it returns."""
    show(run(parse(kind, arguments, prog=prog, words=words)))
    return 0
