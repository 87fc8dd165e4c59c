"""Imports between the packages point one way: every import statement is read and judged."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import deeploop

SOURCE = Path(deeploop.__file__).parent

# Which packages a package may import, besides itself and the root's `exits`, `extras`, `files` and version.
ALLOWED = {
    "theory": set(),
    "nn": {"theory"},
    "models": {"nn", "theory"},
    "accelerate": {"nn"},
    "data": set(),
    "diagnose": {"accelerate", "models", "nn", "data", "theory"},
    "eval": {"accelerate", "models", "nn", "data", "theory", "diagnose"},
    "train": {"accelerate", "models", "nn", "data", "theory", "diagnose", "eval"},
    "export": {"models", "nn"},
    "tasks": {"train"},
    "recipes": {"models", "nn", "data", "theory", "train"},
    "report": {"train", "eval", "diagnose", "theory"},
    "retrofit": {"models", "nn", "data", "theory", "eval", "train"},
    "sweep": {"models", "nn", "data", "theory", "train", "recipes", "report"},
    "commands": {"models", "nn", "data", "theory", "diagnose", "eval", "train"}
    | {"recipes", "report", "sweep", "retrofit"},
}
# What a package must do without.
FORBIDDEN = {
    "theory": ["torch", "numpy"],
    "models": ["torch.distributed"],
    "nn": ["torch.distributed"],
    "report": ["torch"],
    "exits.py": ["torch", "numpy"],
    "extras.py": ["torch", "numpy"],
    "files.py": ["torch", "numpy"],
}
ROOT_FILES = {"__init__.py", "__main__.py", "cli.py", "exits.py", "extras.py", "files.py", "terminal.py"}


def imports(path):
    """Every module named by an import statement, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(module):
    """`deeploop.nn.layers` → "nn"; None for what is not a package of ours."""
    words = module.split(".")
    return words[1] if words[0] == "deeploop" and len(words) > 1 and words[1] in {*ALLOWED, "cli"} else None


def files(place):
    return [SOURCE / place] if place.endswith(".py") else sorted((SOURCE / place).rglob("*.py"))


def test_every_folder_has_its_rules():
    found = {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__", "assets"}
    assert found == set(ALLOWED)
    assert {path.name for path in SOURCE.glob("*.py")} == ROOT_FILES


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    for path in files(package):
        reached = {package_of(module) for module in imports(path)} - {None, package}
        assert reached <= ALLOWED[package], f"{path.relative_to(SOURCE)} imports {reached - ALLOWED[package]}"


@pytest.mark.parametrize("place", FORBIDDEN)
def test_some_do_without(place):
    for path in files(place):
        for module in imports(path):
            for forbidden in FORBIDDEN[place]:
                assert not f"{module}.".startswith(f"{forbidden}."), f"{path} imports {module}"


REPORT = [f"deeploop.report.{path.stem}" for path in files("report") if path.stem != "__init__"]


@pytest.mark.parametrize(
    "statement",
    [
        "import deeploop; dir(deeploop)",
        "import deeploop; deeploop.theory.DEEPLOOP",
        "import deeploop.theory",
        "import deeploop; deeploop.recommend",
        f"import {', '.join(REPORT)}",
        f"from deeploop.cli import main; main(['runs', {str(SOURCE / 'assets')!r}])",
        "from deeploop.cli import main; main(['plan', '--blocks', '12', '--rounds', '3'])",
    ],
)
def test_these_do_not_wait_for_torch(statement):
    check = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT_TORCH = (
    *("plan", "recommend", "prepare", "prepare stdlib", "prepare chat", "prepare arc", "data", "inspect"),
    *("retrofit", "validate", "eval", "generate", "chat", "diagnose", "runs", "report", "pack", "export"),
    *("bench", "demo", "doctor"),
)


def test_help_does_not_wait_for_torch_or_matplotlib():
    """One process for all: the first command that imports it is named."""
    check = (
        "import sys; from deeploop.cli import main\n"
        f"for words in {WITHOUT_TORCH}:\n"
        "    try: main([*words.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        "    if {'torch', 'matplotlib'} & {*sys.modules}: sys.exit(words)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_shows_what_there_is_and_loads_it_when_touched():
    shown = set(dir(deeploop))
    assert shown >= {"load", "generate", "recommend", "__version__"}
    assert {name for name in shown if package_of(f"deeploop.{name}")} == set(ALLOWED) - {"commands"}
    touch = "import deeploop; print(*(str(getattr(deeploop, name)) for name in dir(deeploop)), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", touch], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(shown)
    with pytest.raises(AttributeError, match="'deeploop' has no attribute 'nothing'"):
        deeploop.nothing  # noqa: B018


SCRIPTS = [
    path for place in ("benchmarks", "tools", "examples") for path in (SOURCE.parents[1] / place).glob("*.py")
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_import_what_is_there(script):
    """Nobody runs them in CI, and mypy does not read them."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deeploop"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                found = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                assert found, f"{script.name}: {node.module} has no {alias.name}"
