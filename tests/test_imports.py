"""Imports between the packages point one way: every import statement is read and judged."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import deeploop
from deeploop.cli import COMMANDS
from deeploop.paper.grids import grids
from deeploop.rules import NAMED
from deeploop.tasks.recipes import RECIPES

SOURCE = Path(deeploop.__file__).parent

# Which packages a package may import, besides itself and the files of the root that all may import.
# "configs" are the files of `tasks` without torch: the registry, each task's config, recipes and examples.
ALLOWED = {
    "theory": set(),
    "config": {"theory"},
    "nn": {"config", "theory"},
    "models": {"nn", "config", "theory"},
    "accelerate": {"nn"},
    "data": set(),
    "configs": {"config", "models", "data", "theory"},
    "runs": {"configs", "config", "models", "data", "theory"},
    "paper": set(),
    "diagnose": {"accelerate", "models", "nn", "data", "config", "theory"},
    "eval": {"accelerate", "models", "nn", "data", "config", "theory", "diagnose"},
    "train": {"accelerate", "models", "nn", "data", "config", "configs", "runs", "theory"}
    | {"diagnose", "eval"},
    "export": {"models", "nn", "data", "config", "configs", "runs", "theory", "train", "tasks"},
    "report": {"configs", "paper", "train", "eval", "diagnose", "runs", "config", "theory"},
    "tasks": {"paper", "accelerate", "models", "nn", "data", "config", "configs", "runs", "theory"}
    | {"diagnose", "eval", "train", "report"},
    "bench": {"models", "nn", "data", "config", "configs", "runs", "theory", "diagnose", "eval", "train"}
    | {"report"},
    "retrofit": {"models", "nn", "data", "config", "configs", "runs", "theory", "eval", "train", "tasks"},
    "sweep": {"models", "nn", "data", "config", "configs", "runs", "theory", "train", "tasks"}
    | {"paper", "report"},
    "commands": {"models", "nn", "data", "config", "configs", "runs", "theory", "diagnose", "eval", "train"}
    | {"tasks", "bench", "paper", "report", "sweep", "retrofit", "export"},
}
# What a package must do without.
FORBIDDEN = {
    "theory": ["torch", "numpy"],
    "config": ["torch", "numpy"],
    "rules.py": ["torch", "numpy"],
    "models/gpt_config.py": ["torch", "numpy"],
    "models": ["torch.distributed"],
    "nn": ["torch.distributed"],
    "paper": ["torch", "numpy"],
    "report": ["torch"],
    "exits.py": ["torch", "numpy"],
    "extras.py": ["torch", "numpy"],
    "files.py": ["torch", "numpy"],
}
ROOT_FILES = {
    "__init__.py",
    "__main__.py",
    "cli.py",
    "exits.py",
    "extras.py",
    "files.py",
    "rules.py",
    "terminal.py",
}


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
    if words[:2] == ["deeploop", "tasks"] and is_config(module):
        return "configs"
    return words[1] if words[0] == "deeploop" and len(words) > 1 and words[1] in {*ALLOWED, "cli"} else None


def is_config(module):
    """Return True for the registry, a config, recipes, and what a task's examples are made of."""
    path = file_of(module)
    if path.parent.name in ("problems", "data"):
        return path.name != "loader.py"
    return path.name in ("__init__.py", "config.py", "looped.py") or path.stem.endswith("recipes")


def file_of(module):
    """The file that a module, or a name in one, is in."""
    place = SOURCE.parent.joinpath(*module.split("."))
    found = next(filter(Path.exists, (place / "__init__.py", place.with_suffix(".py"))), None)
    return found or file_of(module.rpartition(".")[0])


def module_of(path):
    return ".".join(["deeploop", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


def files(place):
    if place.endswith(".py"):
        return [SOURCE / place]
    if place in ("configs", "tasks"):
        return [
            path for path in sorted((SOURCE / "tasks").rglob("*.py")) if package_of(module_of(path)) == place
        ]
    return sorted((SOURCE / place).rglob("*.py"))


def test_every_folder_has_its_rules():
    found = {path.parent.name for path in SOURCE.glob("*/__init__.py")}  # an old folder may keep its caches
    assert found == set(ALLOWED) - {"configs"}
    assert {path.name for path in SOURCE.glob("*.py")} == ROOT_FILES


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    for path in files(package):
        reached = {package_of(module) for module in imports(path)} - {None, package}
        assert reached <= ALLOWED[package], f"{path.relative_to(SOURCE)} imports {reached - ALLOWED[package]}"


def test_the_package_does_without_research():
    for path in sorted(SOURCE.rglob("*.py")):
        named = {module.partition(".")[0] for module in imports(path)}
        assert "research" not in named, f"{path.relative_to(SOURCE)} imports research"


def test_training_names_no_task():
    """It asks the registry."""
    named = {module for path in files("train") for module in imports(path) if ".tasks" in module}
    assert named == {"deeploop.tasks", "deeploop.tasks.task_class"}


@pytest.mark.parametrize("place", FORBIDDEN)
def test_some_do_without(place):
    for path in files(place):
        for module in imports(path):
            for forbidden in FORBIDDEN[place]:
                assert not f"{module}.".startswith(f"{forbidden}."), f"{path} imports {module}"


def compared_rules(path):
    """Yield the names of rules that a file compares something with; the parts of a rule are no names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr in ("alpha", "epsilon") for side in sides):
                continue
            of_rule = any(isinstance(side, ast.Attribute) and side.attr in ("rule", "name") for side in sides)
            words = {one.value for side in sides for one in ast.walk(side) if isinstance(one, ast.Constant)}
            yield from words & {*NAMED, "sandwich"} - (
                {"deeploop"} if not of_rule else set()
            )  # the package's


def test_nothing_else_compares_the_name_of_a_rule():
    apart = {SOURCE / "rules.py", SOURCE / "config" / "old_names.py"}
    apart.add(SOURCE / "commands" / "demo_page.py")  # whose models have names of their own
    found = {path: [*compared_rules(path)] for path in {*SOURCE.rglob("*.py")} - apart}
    assert {path: words for path, words in found.items() if words} == {}


WITHOUT_TORCH = [
    module_of(path)
    for place in ("config", "configs", "runs", "paper", "report")
    for path in files(place)
    if path.name != "__init__.py"
] + [module_of(path) for path in sorted(SOURCE.rglob("options.py"))]


@pytest.mark.parametrize(
    "statement",
    [
        "import deeploop; dir(deeploop)",
        "import deeploop; deeploop.theory.DEEPLOOP",
        "import deeploop.theory",
        "import deeploop; deeploop.recommend",
        f"import {', '.join(WITHOUT_TORCH)}",
        "import deeploop; deeploop.GPTConfig(rule='flat')",
        f"from deeploop.cli import main; main(['runs', {str(SOURCE / 'assets')!r}])",
        "from deeploop.cli import main; main(['plan', '--blocks', '12', '--rounds', '3'])",
    ],
)
def test_these_do_not_wait_for_torch(statement):
    check = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


HELP = [
    *COMMANDS,
    *("prepare stdlib", "prepare chat", "prepare arc"),
    *(f"train {recipe}" for recipe in RECIPES),
    *(f"sweep {grid}" for grid in grids()),
]


def test_help_does_not_wait_for_torch_or_matplotlib():
    """One process for all: the first command that imports it is named."""
    check = (
        "import sys; from deeploop.cli import main\n"
        f"for words in {HELP}:\n"
        "    try: main([*words.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        "    if {'torch', 'matplotlib'} & {*sys.modules}: sys.exit(words)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_shows_what_there_is_and_loads_it_when_touched():
    shown = set(dir(deeploop))
    assert shown >= {"load", "generate", "recommend", "__version__"}
    assert {name for name in shown if package_of(f"deeploop.{name}")} == set(ALLOWED) - {
        "commands",
        "configs",
    }
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
