"""The API reference as one page of Markdown: every public name of the public packages, from its docstring."""

import ast
import importlib
import inspect
import re
import textwrap
from typing import Any

PUBLIC = ("theory", "nn", "models", "data", "diagnose", "train", "retrofit")
PACKAGES = ("deeploop", *(f"deeploop.{name}" for name in PUBLIC))


def api_page() -> str:
    """The page; ValueError names what has no docstring."""
    text = "# API\nThe public names, by package. What is not here may change between versions.\n"
    missing: list[str] = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        text += f"\n## {package}\n{module.__doc__}\n"
        for name in sorted(module.__all__, key=str.lower):
            if not name.startswith("_"):
                text += entry(f"{package}.{name}", getattr(module, name), missing)
    if missing:
        raise ValueError(f"public names without a docstring: {', '.join(missing)}")
    return text


def entry(name: str, thing: Any, missing: list[str]) -> str:
    """A heading, the signature, the docstring; of a class its fields and public methods too."""
    heading = f"\n### {name.removeprefix('deeploop.')}\n" if name.count(".") > 1 else f"\n### {name}\n"
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return f"{heading}```python\n{name.split('.')[-1]} = {short(thing)}\n```\n"
    if not own_doc(thing):
        missing.append(name)
        return heading
    text = f"{heading}{code(name.split('.')[-1], thing)}{inspect.cleandoc(own_doc(thing))}\n"
    return text + (members(thing) if inspect.isclass(thing) else "")


def own_doc(thing: Any) -> str:
    """A dataclass without a docstring has its signature for one: that is none."""
    doc = thing.__doc__ or ""
    return "" if doc.startswith(f"{getattr(thing, '__name__', '?')}(") else doc


def code(name: str, thing: Any) -> str:
    try:
        signature = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""
    signature = re.sub(r"<object object at 0x\w+>|<factory>", "…", signature)
    kind = "class " if inspect.isclass(thing) else ""
    line = f"{kind}{name}{signature}"
    if len(line) > 84:
        inner = signature[1 : signature.rindex(")")]
        wrapped = textwrap.fill(inner, 80, initial_indent="    ", subsequent_indent="    ")
        line = f"{kind}{name}(\n{wrapped}\n{signature[signature.rindex(')') :]}"
    return f"```python\n{line}\n```\n"


def short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) < 200 else f"{text[:200]}…"


def members(kind: type) -> str:
    """Fields with what is written under them, and methods and properties that have a docstring."""
    lines = [f"- `{field}`: {' '.join(doc.split())}" for field, doc in field_docs(kind).items()]
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        shown = name if isinstance(member, property) else f"{name}{inspect.signature(function)}"
        shown = re.sub(r"^(\w+)\(self(, )?", r"\1(", shown)
        lines.append(f"- `{shown}`: {' '.join(inspect.cleandoc(function.__doc__).split())}")
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a class, which Python itself does not keep."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if told and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = str(after.value.value)
    return found
