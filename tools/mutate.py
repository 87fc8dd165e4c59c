"""Finds tests that cannot fail: changes the code in one place at a time and sees whether a test notices.

python tools/mutate.py --count 350 --seed 0 --record mutants.json      a new sample, or the rest of one
python tools/mutate.py --record mutants.json --retry                   the survivors again, after new tests
python tools/mutate.py --record mutants.json --show                    table and survivors of a record

In the record, `"harmless": "why"` beside a survivor says that it needs no test.

Mutants are drawn evenly over the packages and run in a temporary copy of the tree, never in place. The tests
of a mutant are those that call the changed function, found by tracing each test file once. One process: a
parent that has imported torch forks a child for each mutant, so that most cost a second or two.
"""

import argparse
import ast
import contextlib
import difflib
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Whose tests may kill a mutant: a package's own, and files elsewhere that are about it.
TESTS = {
    "theory": ["theory", "diagnose"],
    "nn": ["nn", "models"],
    "models": ["models", "test_memory_fit.py"],
    "diagnose": ["diagnose", "test_diagnosis.py", "test_diagnose_command.py"],
    "eval": [
        *("eval", "test_eval_command.py", "test_eval_reasoner.py", "test_validate_command.py"),
        "test_puzzle_task.py",
    ],
    "data": ["data"],
    "train": ["train"],
}
SKIPPED = ("nn/kernels/", "data/prepare.py", "data/prepare_puzzles.py")  # Triton; commands

# What children need and the package does not change: imported once, in the parent.
WARM = (
    *("numpy", "pytest", "torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict"),
    *(
        "torch.distributed.fsdp",
        "safetensors.torch",
        "tyro",
        "tqdm",
        "tiktoken",
        "transformers.modeling_utils",
    ),
)

SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
NAMES = {
    **{"min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin"},
    **{"any": "all", "all": "any", "floor": "ceil", "ceil": "floor", "sin": "cos", "cos": "sin"},
    **{"minimum": "maximum", "maximum": "minimum", "zeros": "ones", "ones": "zeros", "sorted": "list"},
}
METHODS = NAMES | {"mean": "sum", "sum": "mean"}  # of tensors and arrays
BUILTINS = NAMES | {"sum": "max"}
SPOKEN = {"print", "say", "warn"}  # calls whose loss is cosmetic


@dataclass(frozen=True)
class Mutant:
    path: str
    """Below src/deeploop."""
    line: int
    function: int
    """The first line of the function around it; 0 outside of any."""
    start: int
    end: int
    """What is replaced, in bytes of the file."""
    new: str

    @property
    def package(self) -> str:
        return self.path.partition("/")[0]

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line}:{self.start}-{self.end}:{self.new}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


# --- which changes there are ---


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the node's place."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS and not is_text(node):
            yield with_field(node, op=SWAPS[type(op)]())
        case ast.AugAssign(op=op) if type(op) in SWAPS:
            yield with_field(node, op=SWAPS[type(op)]())
        case ast.Compare(ops=[op, *rest]) if type(op) in SWAPS:
            yield with_field(node, ops=[SWAPS[type(op)](), *rest])
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield ast.Constant(value * 2 if value else 1.0)
        case ast.IfExp(test=test):
            yield with_field(node, test=negated(test))
        case ast.Call(func=ast.Name(id=name) as func) if name in BUILTINS:
            yield with_field(node, func=with_field(func, id=BUILTINS[name]))
        case ast.Call(func=ast.Attribute(attr=name) as func) if name in METHODS:
            yield with_field(node, func=with_field(func, attr=METHODS[name]))
        case ast.Expr(value=ast.Call(func=func)) if (
            getattr(func, "attr", getattr(func, "id", "")) not in SPOKEN
        ):
            yield ast.Pass()
        case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
    if isinstance(node, ast.Call) and node.keywords:
        for gone in node.keywords:
            yield with_field(node, keywords=[word for word in node.keywords if word is not gone])


def with_field(node: ast.AST, **fields: Any) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def is_text(node: ast.AST) -> bool:
    texts = (ast.JoinedStr, ast.Constant)
    return any(
        isinstance(n, texts) and isinstance(getattr(n, "value", ""), str) for n in ast.iter_child_nodes(node)
    )


def mutants(path: str, source: bytes) -> list[Mutant]:
    """Every single change of a file; not of annotations, decorators, text and what is raised."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def add(node: Any, new: ast.AST) -> None:
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(ast.fix_missing_locations(new))
        if isinstance(new, ast.expr) and not isinstance(new, ast.Constant | ast.Name):
            text = f"({text})"
        found.append(Mutant(path, node.lineno, function, *span, text))

    def walk(node: ast.AST, inner: int) -> None:
        nonlocal function
        function = inner
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        if isinstance(node, ast.If | ast.While):
            add(node.test, negated(node.test))
        for new in replacements(node) if hasattr(node, "lineno") else ():
            add(node, new)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(
                node, ast.TypeAlias if sys.version_info >= (3, 12) else ()
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    walk(child, inner)

    function = 0
    walk(ast.parse(source), 0)
    return found


def differs(mutant: Mutant, source: bytes) -> bool:
    """Whether it is another program, and one that can be read."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def sample(source: Path, packages: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the files below `source`, as many of each package, at most one a line."""
    chosen = []
    for index, package in enumerate(packages):
        share = count // len(packages) + (index < count % len(packages))
        files = {
            file.relative_to(source).as_posix(): file.read_bytes()
            for file in (source / package).rglob("*.py")
        }
        points = [
            m for path in sorted(files) if not path.startswith(SKIPPED) for m in mutants(path, files[path])
        ]
        random.Random(f"{seed} {package}").shuffle(points)
        lines: dict[tuple[str, int], Mutant] = {}
        for one in points:
            if len(lines) < share and (one.path, one.line) not in lines and differs(one, files[one.path]):
                lines[one.path, one.line] = one
        chosen += lines.values()
    return chosen


# --- which tests call what ---


class Tracer:
    """A pytest plugin: which functions of the package each test calls, and how long it takes."""

    def __init__(self, source: Path) -> None:
        self.prefix = str(source) + os.sep
        self.now = "setup"
        self.calls: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self.prefix):
            self.calls[self.now].add(f"{code.co_filename[len(self.prefix) :]}:{code.co_firstlineno}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_runtest_setup(self, item: Any) -> None:
        self.now = "setup"  # a fixture serves all tests of the file

    def pytest_runtest_call(self, item: Any) -> None:
        self.now = item.nodeid


class Lab:
    """A copy of the tree, and a way to run some of its tests in a child."""

    def __init__(self, place: Path) -> None:
        self.place, self.source = place, place / "src/deeploop"
        for name in ("src", "tests", "examples", "tools", "benchmarks"):
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "constraints.txt"):
            shutil.copy(ROOT / name, place / name)
        os.environ |= {
            "PYTHONPATH": str(place / "src"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        sys.path[:0] = [str(place / "src")]

    def run(
        self, tests: list[str], limit: float, *, tracer: Tracer | None = None, answer: Path | None = None
    ) -> int | None:
        """pytest's exit status, in a child of its own; None when it took too long.

        The limit is of the child's processor time, which other work on the machine does not change; a child
        that waits for something is given ten times as long.
        """
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
            self._child(tests, tracer, answer)
        deadline = time.monotonic() + 10 * limit
        while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(0.02)
        status = os.waitstatus_to_exitcode(done[1])
        return None if status == -signal.SIGXCPU else status

    def _child(self, tests: list[str], tracer: Tracer | None, answer: Path | None) -> None:
        status: int = 99
        try:
            os.setpgid(0, 0)
            os.chdir(self.place)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1), os.dup2(quiet, 2)
            sys.dont_write_bytecode = tracer is None  # a mutant's bytecode must not outlive it
            if tracer is not None:
                threading.settrace(tracer), sys.settrace(tracer)
            import pytest

            flags = ["-x"] if tracer is None else []
            status = int(
                pytest.main(
                    [*flags, "-q", "-p", "no:cacheprovider", "--tb=no", *tests],
                    plugins=[tracer] if tracer else [],
                )
            )
            if tracer is not None and answer is not None:
                sys.settrace(None)
                calls = {name: sorted(found) for name, found in tracer.calls.items()}
                answer.write_text(json.dumps({"calls": calls, "seconds": tracer.seconds, "status": status}))
        finally:
            os._exit(status)

    def outcome(self, mutant: Mutant, tests: list[str], seconds: float) -> str:
        file = self.source / mutant.path
        source = file.read_bytes()
        for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            stale.unlink()
        file.write_bytes(mutant.apply(source))
        try:
            status = self.run(tests, 15 + 2 * seconds)
        finally:
            file.write_bytes(source)
        return {None: "timeout", 0: "survived"}.get(status, "killed")


class Calls:
    """Which tests call which function: traced once for each test file, and kept."""

    def __init__(self, lab: Lab, kept: Path, most_seconds: float) -> None:
        self.lab, self.kept, self.most_seconds = lab, kept, most_seconds
        kept.mkdir(parents=True, exist_ok=True)

    @cached_property
    def source_hash(self) -> str:
        tests = self.lab.place / "tests"
        files = sorted(self.lab.source.rglob("*.py")) + sorted(tests.rglob("conftest.py"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def of(self, test: Path) -> dict[str, Any]:
        name = test.relative_to(self.lab.place).as_posix()
        key = hashlib.sha256(test.read_bytes() + self.source_hash.encode() + name.encode()).hexdigest()[:16]
        answer = self.kept / f"{key}.json"
        if not answer.exists():
            begun = time.monotonic()
            self.lab.run([name], 900, tracer=Tracer(self.lab.source), answer=answer)
            print(f"traced {name} in {time.monotonic() - begun:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(answer.read_text())
        if found["status"] not in (0, 5):
            raise SystemExit(f"{name}: fails without any change; mend it first")
        return found

    def files(self, place: str) -> list[Path]:
        """The test files of a folder; or the one of this name, wherever it is."""
        tests = self.lab.place / "tests"
        found = sorted(tests.rglob(place) if place.endswith(".py") else (tests / place).glob("test_*.py"))
        if not found:
            raise SystemExit(f"tests/{place}: no such tests; TESTS names them")
        return found

    def tests_of(self, mutant: Mutant) -> tuple[list[str], float]:
        """The tests of a mutant, the file that bears the module's name first, and the seconds they take."""
        module = "deeploop." + mutant.path.removesuffix(".py").replace("/", ".")
        stem, entry = Path(mutant.path).stem, f"{mutant.path}:{mutant.function}"
        ranked, started = [], []
        for rank, place in enumerate(TESTS[mutant.package]):
            for file in self.files(place):
                found, text = self.of(file), file.read_text()
                everything = list(found["seconds"])
                if not mutant.function:
                    names = everything if f"deeploop.{mutant.package}" in text else []
                elif entry in found["calls"].get("setup", ()):
                    names = everything
                else:
                    names = [name for name in everything if entry in found["calls"].get(name, ())]
                cost = sum(found["seconds"][name] for name in names)
                named = stem in file.stem or (not mutant.function and module in text)
                ranked.append((not named, rank, cost, names, found["seconds"]))
                if "subprocess" in text:
                    started.append((False, rank, cost, everything, found["seconds"]))
        if not any(names for *_, names, _ in ranked):  # called in no test itself: perhaps in what it starts
            ranked = started
        tests, total = [], 0.0
        for _, _, _, names, seconds in sorted(ranked, key=lambda one: one[:3]):
            for name in sorted(names, key=lambda one: seconds[one]):
                if total + seconds[name] <= self.most_seconds or not tests:
                    tests.append(name)
                    total += seconds[name]
        return tests, total


# --- the record ---


def changed_lines(mutant: Mutant, source: bytes) -> list[str]:
    old, new = source.decode().splitlines(), mutant.apply(source).decode().splitlines()
    return [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:1] in "+-"][2:]


def note(record: dict[str, Any], mutant: Mutant, source: bytes, outcome: str) -> None:
    """A survivor keeps its diff; one that a new test kills, that it had survived at first."""
    before = record["mutants"].get(mutant.key, {})
    if outcome == "survived":
        after = {**before, "outcome": outcome, "diff": changed_lines(mutant, source)}
    else:
        after = {"outcome": outcome} | ({"first": "survived"} if before else {})
    record["mutants"][mutant.key] = after


def table(record: dict[str, Any]) -> str:
    """A mutant that runs into the time limit counts as killed; a survivor with a reason as harmless."""
    lines = [
        "| package | mutants | killed at first | killed now | alive | harmless |",
        "|---|---|---|---|---|---|",
    ]
    for package in [*TESTS, "all"]:
        of = [one for key, one in record["mutants"].items() if package in (key.partition("/")[0], "all")]
        alive = [one for one in of if one["outcome"] == "survived"]
        now = len(of) - len(alive)
        first = now - sum("first" in one for one in of)
        if of:
            harmless = sum("harmless" in one for one in alive)
            counts = f"{len(of)} | {share(first, of)} | {share(now, of)} | {len(alive)} | {harmless}"
            lines.append(f"| {package} | {counts} |")
    return "\n".join(lines)


def share(count: int, of: list[Any]) -> str:
    return f"{count} ({100 * count / len(of):.0f} %)"


def survivors(record: dict[str, Any]) -> str:
    alive = {key: one for key, one in record["mutants"].items() if one["outcome"] == "survived"}
    return "\n\n".join(
        "\n".join(
            [
                ":".join(key.split(":")[:2]),
                *one["diff"],
                f"  {one.get('harmless', 'needs a test, or a reason')}",
            ]
        )
        for key, one in alive.items()
    )


def write(record: dict[str, Any], file: Path) -> None:
    file.with_suffix(".new").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    file.with_suffix(".new").replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--count", type=int, default=350, help="mutants, shared out evenly (default 350)")
    add("--seed", type=int, help="of the draw (default: the record's, or 0)")
    add("--packages", nargs="+", choices=TESTS, default=list(TESTS), help="default: all seven")
    add("--record", type=Path, default=Path("mutants.json"), help="read, and written after each mutant")
    traces = Path(tempfile.gettempdir()) / "deeploop-traces"
    add("--traces", type=Path, default=traces, help="what tests call, kept between calls")
    add("--seconds", type=float, default=60, help="of tests per mutant at most, as traced (default 60)")
    add("--retry", action="store_true", help="run the record's survivors again, but the harmless ones")
    add("--show", action="store_true", help="print the record; run nothing")
    args = parser.parse_args()
    record = {"seed": args.seed or 0, "mutants": {}}
    if args.record.exists():
        record = json.loads(args.record.read_text())
    if args.seed not in (None, record["seed"]):
        parser.error(
            f"--seed {args.seed}: {args.record} is of seed {record['seed']}; choose another --record"
        )
    if not args.show:
        run(args, record)
    print(survivors(record), table(record), sep="\n\n")


def run(args: argparse.Namespace, record: dict[str, Any]) -> None:
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as place:
        lab = Lab(Path(place).resolve())
        calls = Calls(lab, args.traces, args.seconds)
        chosen = sample(lab.source, args.packages, args.count, record["seed"])
        for index, mutant in enumerate(chosen, 1):
            known = record["mutants"].get(mutant.key)
            if known and not (args.retry and known["outcome"] == "survived" and "harmless" not in known):
                continue
            tests, seconds = calls.tests_of(mutant)
            outcome = lab.outcome(mutant, tests, seconds) if tests else "survived"
            note(record, mutant, (lab.source / mutant.path).read_bytes(), outcome)
            write(record, args.record)
            where = f"{mutant.path}:{mutant.line}"
            print(f"{index}/{len(chosen)} {outcome:8} {where} {len(tests)} tests", flush=True)


if __name__ == "__main__":
    main()
