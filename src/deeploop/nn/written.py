"""Detect modules that do not compute what the kernels were written for.

A subclass, a method replaced on the class or the instance, and a hook all change what a module computes. So
do LoRA and a parametrized weight, which replace a Linear by a module of another class.
"""

from collections.abc import Collection
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

Class = TypeVar("Class", bound=type[nn.Module])
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
NOT_COMPUTED = {"__init__", "reset_parameters", "extra_repr"}  # what a forward pass does not call
_methods: dict[type, dict[str, Any]] = {}


def as_written(module_class: Class) -> Class:
    """Record the methods of a class, so that later changes of them are detected."""
    _methods[module_class] = {
        name: method
        for name, method in vars(module_class).items()
        if isinstance(method, FunctionType) and name not in NOT_COMPUTED
    }
    return module_class


as_written(nn.Linear)
as_written(nn.Identity)


def difference(module: nn.Module, known: Collection[type] = (), *, own: Collection[str] = ()) -> str:
    """Describe how a module differs from the known classes as written; empty if it does not.

    By default the known classes are all that were recorded. `own`: methods that we replaced on the instance.
    """
    name = type(module).__name__
    if type(module) not in (known or _methods):
        return f"is a {name}"
    for base in type(module).__mro__:
        for method, written in _methods.get(base, {}).items():
            replaced = method in vars(module) and method not in own
            if replaced or vars(base).get(method) is not written:
                return f"is a {name} whose {method} was replaced"
    return "has a hook" if has_hooks(module) else ""


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks besides its `forward`."""
    return any(getattr(module, hooks) for hooks in HOOKS)


def is_written(module: nn.Module, method: str) -> bool:
    """Return True if a method, own or inherited, is the one that a recorded class was defined with."""
    own = getattr(type(module), method, None)
    return own is not None and any(own is _methods.get(base, {}).get(method) for base in type(module).__mro__)
