"""Import optional packages when they are needed; name a missing one in one line. No torch."""

import importlib
from typing import Any


def how_to_install(extra: str) -> str:
    """Return the install command for a clone: the package is on no index, and -e keeps the clone's
    installation.
    """
    return f'pip install -c constraints.txt -e ".[{extra}]" in the clone'


def require(module: str, extra: str, what: str = "") -> Any:
    """Import and return a module, before anything is written. `what` is the field or file that needs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"{what}{': ' if what else ''}{module} is not installed; run: {how_to_install(extra)}"
        ) from None
