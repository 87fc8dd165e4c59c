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
    text = "# API\nThe public names, by package. A name that is not listed may change between versions.\n"
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
    """The signature as a code block; a long one has a line for each parameter."""
    try:
        signature = signature_of(thing)
    except (TypeError, ValueError):
        return ""
    kind = "class " if inspect.isclass(thing) else ""
    if len(kind + name + signature) > 84:
        end = signature.rindex(")")
        lines = "".join(f"    {one.strip()},\n" for one in parameters(signature[1:end]))
        signature = f"(\n{lines}{signature[end:]}"
    return f"```python\n{kind}{name}{signature}\n```\n"


def signature_of(thing: Any) -> str:
    """The signature, with types by their names alone: Tensor, not torch.Tensor."""
    text = re.sub(
        r"<function .*? at 0x\w+>|<object object at 0x\w+>|<factory>", "…", str(inspect.signature(thing))
    )
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)


def parameters(inner: str) -> list[str]:
    """Split the inside of a signature at the commas outside of brackets."""
    found, depth = [""], 0
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


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
        shown = name if isinstance(member, property) else f"{name}{signature_of(function)}"
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
