"""Finds tests that can't fail: changes the code in one place at a time and sees whether a test notices.

    python tools/mutate.py theory nn --count 50 --seed 0

Draws mutants from each package, at most one a line, and runs its tests in a temporary copy of the tree.
Prints the mutants that survive and how many were killed; one that exceeds the time limit counts as killed.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "mean": "sum", "zeros": "ones"}
Mutant = tuple[int, str]  # its line, the changed source


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Replacements of a node."""
    match node:
        case ast.BinOp(left=a, op=op, right=b) if type(op) in SWAPS:
            yield ast.BinOp(a, SWAPS[type(op)](), b)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.Compare(left=a, ops=[op], comparators=b) if type(op) in SWAPS:
            yield ast.Compare(a, [SWAPS[type(op)]()], b)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if name in NAMES:
            yield ast.Call(ast.Name(NAMES[name]), args, words)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))


def mutants(source: str) -> Iterator[Mutant]:
    """Every single change of a file; not of annotations, decorators, text and what is raised."""
    lines = source.encode().splitlines(keepends=True)

    def walk(node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
            return
        for new in replacements(node):
            first, last = node.lineno - 1, node.end_lineno - 1
            text = ast.unparse(ast.fix_missing_locations(new))
            text = f"({text})" if isinstance(new, ast.expr) else text
            head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            changed = b"".join([*lines[:first], head, text.encode(), tail, *lines[last + 1 :]]).decode()
            if ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)):
                yield first + 1, changed
        said = {id(getattr(node, name, None)) for name in ("annotation", "returns")}
        for child in ast.iter_child_nodes(node):
            if id(child) not in said and child not in getattr(node, "decorator_list", ()):
                yield from walk(child)

    yield from walk(ast.parse(source))


def tests_of(tree: Path, file: Path) -> list[str]:
    """The tests of the module's package, those of its name first, and all that import the module."""
    module = ".".join(file.relative_to(tree / "src").with_suffix("").parts)
    own = tree / "tests" / module.split(".")[1]
    found = [t for t in (tree / "tests").rglob("test_*.py") if own in t.parents or module in t.read_text()]
    return [str(test) for test in sorted(found, key=lambda test: (file.stem not in test.stem, test))]


def survives(tree: Path, tests: list[str]) -> bool:
    """Return True if the tests pass within the time limit."""
    env = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("packages", nargs="+")
    for option, value in (("--count", 50), ("--seed", 0)):
        parser.add_argument(option, type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
        for package in args.packages:
            files = [f for f in (tree / "src/deeploop" / package).rglob("*.py") if "kernels" not in f.parts]
            drawn = {(file, line): text for file in files for line, text in mutants(file.read_text())}
            chosen = random.Random(args.seed).sample(sorted(drawn), min(args.count, len(drawn)))
            killed = len(chosen)
            for file, line in chosen:
                whole, changed = file.read_text(), drawn[file, line]
                file.write_text(changed)
                if not (tests := tests_of(tree, file)) or survives(tree, tests):
                    killed -= 1
                    diff = difflib.unified_diff(whole.splitlines(), changed.splitlines(), lineterm="", n=0)
                    print(file.relative_to(tree), *list(diff)[2:], sep="\n", flush=True)
                file.write_text(whole)
            print(f"{package}: {killed} of {len(chosen)} killed", flush=True)


if __name__ == "__main__":
    main()
