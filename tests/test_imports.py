"""Arrows between the rooms point one way: every import in the package is read and judged."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deeploop

SOURCE = Path(deeploop.__file__).parent

# Which rooms a room may import, besides itself and the package's own version.
ALLOWED = {
    "theory": set(),
    "nn": {"theory"},
    "models": {"nn", "theory"},
    "data": set(),
    "diagnose": {"models", "nn", "data", "theory"},
    "eval": {"models", "nn", "data", "theory", "diagnose"},
    "train": {"models", "nn", "data", "theory", "diagnose", "eval"},
    "experiments": {"models", "nn", "data", "theory", "diagnose", "eval", "train"},
}
# What a room or a file must do without.
FORBIDDEN = {
    "theory": ["torch", "numpy"],
    "models": ["torch.distributed"],
    "nn": ["torch.distributed"],
}
# They read run folders and numbers only.
READERS = ("alignment_plots", "escapes", "groups", "listing", "page", "plots", "published", "report", "runs")
READERS += ("report_figures", "report_ledger", "report_tables")
FORBIDDEN |= {
    f"experiments/{name}.py": ["torch", "deeploop.train.loop", "deeploop.models"] for name in READERS
}
ROOT_FILES = {"__init__.py", "__main__.py", "cli.py"}


def imports(path):
    """Every module named by an import statement, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module):
    """`deeploop.nn.layers` → "nn"; None for what is not a room of ours."""
    words = module.split(".")
    return words[1] if words[0] == "deeploop" and len(words) > 1 and words[1] in {*ALLOWED, "cli"} else None


def files(place):
    return [SOURCE / place] if place.endswith(".py") else sorted((SOURCE / place).rglob("*.py"))


def test_every_folder_is_a_room_with_rules():
    found = {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__", "assets"}
    assert found == set(ALLOWED)
    assert {path.name for path in SOURCE.glob("*.py")} == ROOT_FILES


@pytest.mark.parametrize("room", ALLOWED)
def test_arrows_point_one_way(room):
    for path in files(room):
        reached = {room_of(module) for module in imports(path)} - {None, room}
        assert reached <= ALLOWED[room], f"{path.relative_to(SOURCE)} imports {reached - ALLOWED[room]}"


@pytest.mark.parametrize("place", FORBIDDEN)
def test_some_do_without(place):
    for path in files(place):
        for module in imports(path):
            for forbidden in FORBIDDEN[place]:
                assert not f"{module}.".startswith(f"{forbidden}."), f"{path} imports {module}"


@pytest.mark.parametrize(
    "statement",
    [
        "import deeploop",
        "import deeploop.theory",
        "import deeploop.experiments.plots",
        "import deeploop.experiments.report",
        "import deeploop.experiments.published",
        f"from deeploop.cli import main; main(['runs', {str(SOURCE / 'assets')!r}])",
        "import deeploop.experiments.escapes",
        "from deeploop.cli import main; main(['plan', '--blocks', '12', '--rounds', '3'])",
    ],
)
def test_these_do_not_wait_for_torch(statement):
    check = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
