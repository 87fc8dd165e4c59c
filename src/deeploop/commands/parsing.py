"""Parse the words of a command line into dataclasses, and report a mistake in one line."""

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, TypeVar

from deeploop.config.json import leaf_hints
from deeploop.config.short_names import SHORT, full_path

T = TypeVar("T")


def choose(what: str, arguments: list[str], choices: dict[str, str]) -> tuple[str | None, list[str]]:
    """Take the first word as a choice; without one, or with --help, list the choices."""
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
    """Raise ValueError for an unknown choice, suggesting a similar one."""
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
    elsewhere: Callable[[str], str | None] = lambda option: None,
    description: str | None = None,
) -> T:
    """Parse with tyro; a mistake is a ValueError of one line.

    `words` maps names that users may try to the option that they mean; `elsewhere` says where an option that
    is unknown here can be found. A `description` replaces that of the dataclass in --help.
    """
    import tyro
    from tyro import _errors

    def refuse(event: Any) -> None:
        message = _message(event, arguments, _options(kind, is_config=default is not None), words, elsewhere)
        if message is not None:  # else tyro's own page
            raise ValueError(message)

    given: Any = {} if default is None else {"default": default}
    with _errors.on_parse_error(refuse), _whole_numbers():
        return tyro.cli(kind, args=arguments, prog=prog, description=description, **given)


def _options(kind: type, *, is_config: bool) -> list[str]:
    """List the options of a dataclass, to find the one that was meant."""
    names = {*leaf_hints(kind)}
    if is_config:
        names |= {name for name in SHORT if full_path(name, names) in names}
    else:  # a command's may be without the prefix of its part
        names |= {name.rpartition(".")[2] for name in names}
    return [f"--{dashed(name)}" for name in sorted(names)]


def dashed(name: str) -> str:
    """Write a field's path as an option."""
    return name.replace("_", "-")


def _whole_numbers() -> Any:
    """Return tyro's rule for int, extended to accept 1e9."""
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
    """Parse an int, or a float that is whole, such as 1e9."""
    try:
        return int(text)
    except ValueError:
        if re.fullmatch(r"\d{1,3}(\.\d{1,9})?e\+?\d{1,2}", text) and (value := Decimal(text)) == int(value):
            return int(value)
    raise ValueError(f"{text}: must be a whole number, such as 1000 or 1e9")


# What a value must be, by tyro's name for its type.
VALUES = {"INT": "a whole number, such as 1000 or 1e9", "FLOAT": "a number", "FLOAT FLOAT": "two numbers"}


def _message(
    event: Any,
    arguments: list[str],
    known: list[str],
    words: Mapping[str, str],
    elsewhere: Callable[[str], str | None],
) -> str | None:
    """Describe in one line what tyro refuses; None for errors of subcommands and groups of options alone."""
    match type(event).__name__:
        case "UnrecognizedArgs":
            return _unknown(event.tokens[0], known, words, elsewhere)
        case "MissingArgs":
            missing = [argument.arg for argument in event.missing_arguments]
            stray = next((word for word in event.unrecognized_tokens if word.startswith("--")), None)
            if stray and difflib.get_close_matches(stray, [each.display_name() for each in missing], n=1):
                return _unknown(stray, known, words, elsewhere)
            named = ", ".join(f"{one.display_name()} {one.lowered.metavar}" for one in missing)
            return f"missing: {named}" + (f"; unknown: {stray}" if stray else "")
        case "InvalidChoice":
            close = difflib.get_close_matches(event.value, event.choices, n=1)
            advice = f"; perhaps {close[0]}" if close else ""
            listed = ", ".join(event.choices)
            return f"{_shown(event.argument)}={event.value}: must be one of {listed}{advice}"
        case "BadValue":
            named = _shown(event.argument)
            return f"{named}: a value is missing; give {named} {event.argument.lowered.metavar}"
        case "InstantiationFailure" if event.argument is None:
            return str(event.message)
        case "InstantiationFailure":
            named, kind = event.argument.display_name(), event.argument.lowered.metavar
            bounds = re.sub(r"[\[\]{}]|None\}?\||\.\.\.", "", kind).split()
            wanted = VALUES.get(kind) or VALUES.get(bounds[0] if bounds else "") or kind
            return f"{_shown(event.argument)}={_given(arguments, named)}: must be {wanted}"
    return None


def _shown(argument: Any) -> str:
    """Return the displayed name of an option: the short one, if its field has one."""
    name = str(argument.display_name())
    short = {f"--{dashed(path)}": f"--{short}" for short, path in SHORT.items()}
    return short.get(name, name)


def _unknown(
    word: str, known: list[str], words: Mapping[str, str], elsewhere: Callable[[str], str | None]
) -> str:
    """Report an unknown option, with the one that was meant."""
    option = dashed(word.partition("=")[0])
    if not option.startswith("-"):
        return f"{word}: is not expected here; options begin with --"
    if place := elsewhere(option):
        return place
    name = option.removeprefix("--")
    meant = words.get(name.rpartition(".")[2]) or _of_last_part(name, known)
    close = [meant] if meant else difflib.get_close_matches(option, known, n=1, cutoff=0.7)
    return f"{option}: unknown option" + (f"; perhaps you meant {close[0]}" if close else "; see --help")


def _of_last_part(name: str, known: list[str]) -> str | None:
    """Find the option that ends in a name, also as a flag that is switched off: no-unigram-bias."""
    plain = name.removeprefix("no-")
    found = next((option for option in known if option.endswith(f".{plain}")), None)
    return found and f"{found[: -len(plain)]}{name}"


def _given(arguments: list[str], option: str) -> str:
    """Return the words that follow the last occurrence of an option."""
    found = ""
    for at, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if dashed(name) == option:
            rest = itertools.takewhile(lambda other: not other.startswith("--"), arguments[at + 1 :])
            found = value or " ".join(rest)
    return found
