"""Jinja's sandbox as set up by transformers for chat templates, with a limit on the size of every result.

The size of each product, filter and string method is estimated from its operands before it is computed,
and nothing is computed while a template is compiled.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

MOST_ITEMS = 100_000  # largest number passed to a filter or method, as Jinja limits `range`
PADDED = re.compile(r"\d{6,}|\*|{[^{}]*{")  # a format width that is large or not a literal
ONE_BY_ONE = ("batch", "slice", "list")  # filters that make an object for every character


def sandbox(largest: int) -> Any:
    """A Jinja environment in which no operation produces more than about `largest` characters."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def check(name: str, operands: Iterable[Any]) -> None:
        if estimate(name, *operands) > largest:
            raise TemplateError(f"{name}: would make more than {largest:,} characters, or has a large number")

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%", "+"))  # also disables constant folding of these

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            check(operator, (left, right))
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, *args: Any, **named: Any) -> Any:
            method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
            if isinstance(text := getattr(method, "__self__", None), str):
                check(method.__name__, (text, *args, *named.values()))
            return super().call(context, function, *args, **named)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False)
    environment.globals["raise_exception"] = raise_exception
    del environment.filters["random"]  # tokens must be deterministic
    for name, function in environment.filters.items():
        environment.filters[name] = _checked(name, function, check)
    return environment


def estimate(name: str, value: Any, *others: Any) -> float:
    """Estimate the length of an operation's result; infinity if its operands are not allowed."""
    sizes = [_size(own) for own in others]
    if name == "**" or (name in ("format", "%") and isinstance(value, str) and PADDED.search(value)):
        return float("inf")
    if name == "*":
        return _size(value) * sizes[0]
    if name == "+":
        return _size(value) + sizes[0] if hasattr(value, "__len__") else 0
    if any(isinstance(own, int | float) and abs(own) > MOST_ITEMS for own in others) and name != "%":
        return float("inf")
    if name == "replace" and len(others) > 1 and isinstance(value, str):
        return len(value) + value.count(str(others[0])) * sizes[1]
    if name in ONE_BY_ONE and _size(value) > MOST_ITEMS:
        return float("inf")
    return _size(value) * max(sizes, default=1)


def _size(value: Any) -> float:
    """The length of a string or list, or the magnitude of a number; at least 1."""
    if hasattr(value, "__len__"):
        return max(1, len(value))
    return max(1, abs(value)) if isinstance(value, int | float) else 1


def _checked(name: str, function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Check a filter's operands first. Taking the context also prevents its evaluation at compile time."""
    from jinja2 import pass_context

    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    @functools.wraps(function)
    def checked(context: Any, *args: Any, **named: Any) -> Any:
        check(name, (*args, *named.values()))
        known = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        first = (known[wanted],) if wanted else ()
        return function(*first, *args, **named)

    return checked
