"""docs/paper.md: its commands run, its costs are those of the dry runs, the code that it names is there."""

import importlib
import json
import re
import shlex
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

import deeploop
from deeploop.cli import main
from deeploop.runs.folder import load_reasoner_config
from deeploop.runs.packed import opened, subfolders
from deeploop.sweep.grid import read_grid
from deeploop.tasks.recipes import get_recipe
from research import DOCS, ROOT

TEXT = (DOCS / "paper.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\|[^|]+\| `deeploop (sweep [^`]+|plan [^`]+)` \|$", TEXT, re.M)
COSTS = re.findall(r"^\| `([\w-]+)` \| (\d+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", TEXT, re.M)
CODE = re.findall(r"`(\w+/[\w.]+\.\w+)(?::(\w+))?`", TEXT)


def dry_run(capsys, *words):
    """The words of the last line of the table that a dry run prints."""
    assert main(["sweep", *words, "--dry-run"]) == 0
    return next(line.split() for line in capsys.readouterr().out.splitlines() if " cells " in line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command, tmp_path, capsys):
    words = shlex.split(command.replace("eval_data", str(tmp_path)))
    assert main([*words, "--dry-run"] if words[0] == "sweep" and "--dry-run" not in words else words) == 0


def test_every_table_and_figure_has_a_command():
    assert len(COMMANDS) == 10
    for name in [f"Table {n}" for n in range(1, 5)] + [
        "Figure 1",
        "Figure 2",
        "Figure 3",
        "Figures 4 and 5",
        "Figure 6",
    ]:
        assert re.search(rf"^\|[^|]*\b{name}\b[^|]*\| `deeploop ", TEXT, re.M), name


@pytest.mark.parametrize("row", COSTS, ids=lambda row: row[0])
def test_costs_are_those_of_the_dry_runs(row, capsys):
    sweep, cells, paper, papers_own, gpu, laptop = row
    own = dry_run(capsys, sweep)
    assert (own[0], own[-2], own[-1]) == (cells, paper, papers_own)
    assert dry_run(capsys, sweep, "--scale", "gpu")[-2] == gpu
    assert dry_run(capsys, sweep, "--scale", "laptop")[-1] == laptop


def test_the_row_of_table_3_has_the_papers_alpha():
    """Its runs on 6 × 6 Sudoku: N_g = 6 at C_L = 2, α = 3.46; those of the last call have 2.83."""
    folder = DOCS / "results" / "sudoku6"
    entry = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    (row,) = entry["paper"]
    (ours,) = re.findall(r"{(\w+):", row["ours"])
    pattern = entry["values"][ours]["minus"][0]["of"]
    runs = [run for run in subfolders(folder) if fnmatchcase(run.name, pattern)]
    alphas = [load_reasoner_config(opened(run)).model.scales_of("L").alpha for run in runs]
    assert alphas == pytest.approx([12**0.5] * 2)
    assert "α = 3.46" in row["what"]


def test_sudoku6_says_which_cells_have_another_alpha():
    """2 + 2 blocks: the paper's α is 3.46 at C_L = 2 and 6 at 8; 0.2.0 trained the last call at 2.83."""
    folder = DOCS / "results" / "sudoku6"
    page, found = (folder / "README.md").read_text(encoding="utf-8"), {}
    for cell in read_grid(folder / "grid.toml").cells():
        model = cell.config().model
        if model.rule == "deeploop":
            both = (
                f"{one.N}, {one.scales_of('L').alpha:.3g}"
                for one in (model, replace(model, depth_from="cycles"))
            )
            found[model.low_cycles, model.horizon] = [*both]
    assert found == {
        (2, "last_call"): ["4, 2.83", "6, 3.46"],
        (2, "last_cycle"): ["6, 3.46", "6, 3.46"],
        (8, "last_call"): ["4, 2.83", "18, 6"],
        (8, "last_cycle"): ["18, 6", "18, 6"],
    }
    for (C_L, horizon), (here, papers) in found.items():
        assert f"| {C_L} | {horizon.replace('_', ' ')} | {here} | {papers} |" in page


def words_of(path):
    return " ".join(path.read_text(encoding="utf-8").split())


def test_readme_says_of_the_gain_what_its_intervals_say():
    page = (DOCS / "results" / "gain" / "README.md").read_text(encoding="utf-8")
    growths = re.findall(r"^\| (\d to \d) \| \S+ \| (\S+) to (\S+) \|", page, re.M)
    shown = {name: float(low) > 0 for name, low, _ in growths}
    assert shown == {"1 to 3": True, "3 to 7": False, "1 to 7": True}
    said = "over pre-norm [grows](docs/results/gain) from R = 1 to 3; 3 to 7: undecided."
    assert said in words_of(ROOT / "README.md")


def test_collapses_without_the_bias_are_told_with_their_ramps():
    """Nine collapsed, at 80 to 400 times the recipes' ramp, at which ten of ten escaped."""
    recipe = get_recipe("gpt2-small").optim
    cells = read_grid(DOCS / "results" / "bias" / "grid.toml").cells()
    optims = [
        cell.config().optim for cell in cells if (cell.axes["rule"], cell.axes["bias"]) == ("deeploop", "no")
    ]
    ramp = recipe.peak_lr / recipe.warmup_steps
    assert sorted(round(one.peak_lr / one.warmup_steps / ramp) for one in optims) == [200, 200, 400, 400]
    said = "Four of these runs are DeepLoop with a warm-up 200 to 400 times as steep as the recipe's"
    assert said in words_of(DOCS / "paper.md")
    for page in ("paper.md", "rules.md", "results/bias/README.md"):
        assert "ten of ten" in words_of(DOCS / page)


def test_the_code_is_where_the_page_says():
    package = importlib.resources.files(deeploop)
    assert len(CODE) >= 8
    for path, name in CODE:
        assert package.joinpath(path).is_file(), path
        if name:
            module = importlib.import_module(f"deeploop.{path.removesuffix('.py').replace('/', '.')}")
            assert hasattr(module, name), (path, name)


def test_nothing_is_called_the_papers_that_it_does_not_state():
    """The paper has no table of hyper-parameters: rates, warm-up and optimizer are the public code's."""
    words = "rate|warm-?up|ramp|recipe|values|code|optimizer|heads|betas|decay|clip|init std|QK-norm|SwiGLU"
    never = rf"paper's (peak |learning )?({words})\b"
    files = [
        *(ROOT / "src").rglob("*.py"),
        *DOCS.rglob("*.md"),
        *DOCS.rglob("results.json"),
        ROOT / "README.md",
    ]
    found = [path.name for path in files if re.search(never, path.read_text(encoding="utf-8"), re.I)]
    assert not found
