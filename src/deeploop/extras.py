"""Optional packages: imported where they are needed, and one line where they are missing. No torch."""

import importlib
from typing import Any


def how_to_install(extra: str) -> str:
    """The command, which works in a clone: the package is on no index, and stays the clone's with -e."""
    return f'pip install -c constraints.txt -e ".[{extra}]" in the clone'


def require(module: str, extra: str, what: str = "") -> Any:
    """The module; called before anything is written. `what` asked for it: a field, a file."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"{what}{': ' if what else ''}{module} is not installed; run: {how_to_install(extra)}"
        ) from None
