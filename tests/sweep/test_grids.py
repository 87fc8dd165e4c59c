"""Grids: the paper's sweeps cell by cell, and grids from files."""

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deeploop.cli import main
from deeploop.config.json import differences, to_dict
from deeploop.models.accounting import parameter_count
from deeploop.paper.grids import SCALES, grids
from deeploop.rules import parse
from deeploop.sweep.arguments import SweepArgs
from deeploop.sweep.grid import Grid, along, configure, named_grid, read_grid
from deeploop.sweep.run import choose_cells
from deeploop.tasks.language.recipes import gpt2_medium, gpt2_small, tiny
from deeploop.tasks.recipes import RECIPES

METHODS, ROUNDS = ("prenorm", "deeploop"), (1, 3, 5, 7)
PAPER_P = (0.30, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60)
LANGUAGE = ("table1", "p-sweep", "downstream", "escape", "rules", "rules-search", "transfer")


def by_axes(grid):
    return {tuple(cell.axes.values()): cell for cell in grid.cells()}


# How many cells, and a hash of their names, recipes and settings: a cell that changes is another run, and
# a sweep that was begun before can't be continued.
CELLS = {
    ("table1", "paper"): (16, "b01e3148bf81"),
    ("table1", "gpu"): (16, "c15c375324b5"),
    ("table1", "laptop"): (16, "f76295438ea5"),
    ("p-sweep", "paper"): (35, "0d3959c43c2e"),
    ("p-sweep", "gpu"): (60, "d29924eb0e62"),
    ("p-sweep", "laptop"): (24, "1e71356227b3"),
    ("downstream", "paper"): (14, "12ec24cee333"),
    ("downstream", "gpu"): (14, "bed9b8243d90"),
    ("downstream", "laptop"): (14, "385fb00a7a83"),
    ("hrm-arc", "paper"): (8, "8342f657f5e6"),
    ("hrm-arc", "gpu"): (4, "28ae9d694719"),
    ("hrm-arc", "laptop"): (6, "ad64180c2270"),
    ("depth", "paper"): (22, "7c4cf9527c5c"),
    ("depth", "gpu"): (22, "7c4cf9527c5c"),
    ("depth", "laptop"): (22, "46776a2117fb"),
    ("escape", "paper"): (90, "4f6cabe96236"),
    ("escape", "gpu"): (90, "4f73d01d18e1"),
    ("escape", "laptop"): (60, "27dbeacebcbc"),
    ("rules-search", "paper"): (96, "4ceaace90b5a"),
    ("rules-search", "gpu"): (96, "46c3e915005d"),
    ("rules-search", "laptop"): (96, "41a92096f4f8"),
    ("rules", "paper"): (48, "b10e250f111e"),
    ("rules", "gpu"): (48, "5d8ae7f7c406"),
    ("rules", "laptop"): (48, "d7a39bfc4d43"),
    ("transfer", "paper"): (225, "5603ea060733"),
    ("transfer", "gpu"): (300, "791af0f8a531"),
    ("transfer", "laptop"): (225, "9ce2746140ac"),
    ("iterate-search", "paper"): (500, "8f71ec10ab91"),
    ("iterate-search", "gpu"): (500, "51c1409c4872"),
    ("iterate-search", "laptop"): (500, "39cb6ba9aa89"),
    ("iterate", "paper"): (150, "1ba534ac26b7"),
    ("iterate", "gpu"): (150, "2a798d0136ed"),
    ("iterate", "laptop"): (150, "7c832dfeb5ba"),
}


def test_every_cell_is_what_it_was():
    found = {}
    for name in grids():
        for scale in SCALES:
            cells = [[c.name, c.recipe, dict(c.settings)] for c in named_grid(name, scale).cells()]
            text = json.dumps(cells, sort_keys=True)
            found[name, scale] = len(cells), hashlib.sha256(text.encode()).hexdigest()[:12]
    assert found == CELLS


def test_table1_is_the_sixteen_cells_of_the_paper_and_nothing_else_differs():
    cells = by_axes(named_grid("table1", "paper"))
    assert set(cells) == {(s, b, r) for s in ("small", "medium") for b in METHODS for r in ROUNDS}
    for (size, block, rounds), cell in cells.items():
        recipe = {"small": gpt2_small, "medium": gpt2_medium}[size]()
        model = replace(recipe.model, rule=block, rounds=rounds, unigram_bias=False)
        assert cell.config() == replace(recipe, model=model)
    assert parameter_count(cells["small", "prenorm", 7].config().model) == 123_591_168
    assert parameter_count(cells["medium", "deeploop", 1].config().model) == 353_558_528


def test_p_sweep_changes_the_exponent_and_the_seed_alone():
    cells = by_axes(named_grid("p-sweep", "paper"))
    assert set(cells) == {(p, seed) for p in PAPER_P for seed in range(5)}
    for (p, seed), cell in cells.items():
        changed = differences(to_dict(gpt2_small()), to_dict(cell.config()))
        expected = {
            "model.rule": str(parse(f"deeploop:p={p}")),
            "model.unigram_bias": False,
            "seed": seed,
            "optim.steps": 2_700,
            "optim.floor_lr": 1e-3,
        }
        defaults = {"model.rule": "deeploop", "seed": 0}
        assert {path: new for path, _, new in changed} == {
            k: v for k, v in expected.items() if defaults.get(k) != v
        }


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["table1", "p-sweep", "downstream"])
def test_the_papers_grids_have_no_unigram_bias(name, scale):
    assert {cell.config().model.unigram_bias for cell in named_grid(name, scale).cells()} == {False}


def test_downstream_is_table1_without_the_cell_the_paper_does_not_score():
    whole = {cell.name: cell for cell in named_grid("table1", "paper").cells()}
    scored = {cell.name: cell for cell in named_grid("downstream", "paper").cells()}
    assert scored.keys() == whole.keys() - {"small-prenorm-rounds7", "small-deeploop-rounds7"}
    assert all(whole[name] == cell for name, cell in scored.items())  # no cell is trained twice


def test_the_gpu_scale_is_a_thousandth_of_the_tokens_and_has_the_size_that_was_measured():
    config = by_axes(named_grid("table1", "gpu"))["small", "deeploop", 3].config()
    tokens = config.optim.steps * config.optim.batch * config.model.context
    assert tokens * 1000 == 100_000 * 480 * 1024
    escapes = by_axes(named_grid("p-sweep", "gpu"))[600, 0.25, 0].config()
    for c in (config, escapes):
        assert (c.model.blocks, c.model.width, c.model.context, c.optim.batch) == (6, 512, 512, 64)
    assert escapes.optim.steps == 300
    assert escapes.optim.peak_lr / escapes.optim.warmup_steps == pytest.approx(1.67e-6, rel=0.01)


def test_escape_has_the_ramps_and_changes_nothing_but_the_bias_between_the_starts():
    cells = by_axes(named_grid("escape", "gpu"))
    assert len(cells) == 2 * 3 * 3 * 5
    for (start, p, ramp, seed), cell in cells.items():
        config = cell.config()
        assert (config.model.residual.p, config.seed, config.optim.peak_lr) == (p, seed, 1e-3)
        assert 1e-3 / config.optim.warmup_steps == pytest.approx(float(ramp), rel=0.02)
        changed = differences(to_dict(cells["paper", p, ramp, seed].config()), to_dict(config))
        assert {path for path, *_ in changed} == ({"model.unigram_bias"} if start == "stable" else set())


def test_rules_have_equal_tokens():
    configs = [cell.config() for cell in named_grid("rules", "gpu").cells()]
    kinds = {(c.model.rule, c.model.rounds, c.seed) for c in configs}
    assert len(kinds) == len(configs) == 6 * 4 * 2
    assert len({(c.optim, c.data, c.model.blocks, c.model.width) for c in configs}) == 1


@pytest.mark.parametrize("name", ["rules", "rules-search"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_rule_has_the_unigram_bias(name, scale):
    assert {cell.config().model.unigram_bias for cell in named_grid(name, scale).cells()} == {True}


@pytest.mark.parametrize("name", ["rules", "rules-search"])
@pytest.mark.parametrize("scale", SCALES)
def test_rules_are_compared_after_their_warm_up(name, scale):
    for cell in named_grid(name, scale).cells():
        assert cell.config().optim.warmup_steps < cell.config().optim.steps


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", LANGUAGE)
def test_no_two_cells_have_one_name(name, scale):
    cells = named_grid(name, scale).cells()
    assert len({cell.name for cell in cells}) == len(cells)


@pytest.mark.parametrize("scale", SCALES)
def test_reasoners_are_the_recipes_of_both_methods(scale):
    cells = by_axes(named_grid("hrm-arc", scale))
    assert len(cells) == {"paper": 8, "gpu": 4, "laptop": 6}[scale]
    assert named_grid("hrm-arc", scale).evaluate  # on ARC by votes
    assert {(method, cell.config().model.rule) for (method, *_), cell in cells.items()} == {
        ("hrm", "postnorm"),
        ("deeploop", "deeploop"),
    }
    if scale == "laptop":  # at the rate that is good for each
        assert cells["deeploop", 0].config() == RECIPES["hrm-sudoku4-deeploop"]()
        assert cells["hrm", 0].config() == RECIPES["hrm-sudoku4"]()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["hrm-arc", "depth"])
def test_reasoners_have_the_papers_alpha(name, scale):
    """N is N_g = K_H + C_L·K_L even if only the last calls have gradients; `full` has that C times."""
    models = [cell.config().model for cell in named_grid(name, scale).cells()]
    for model in (model for model in models if model.rule == "deeploop"):
        depth = model.high_blocks + model.low_cycles * model.low_blocks
        depth *= model.cycles if model.horizon == "full" else 1
        for module in "HL":
            assert model.scales_of(module)[:2] == pytest.approx(((2 * depth) ** 0.5, (8 * depth) ** -0.5))


@pytest.mark.parametrize("scale", SCALES)
def test_depth_has_no_graph_twice(scale):
    configs = [cell.config() for cell in named_grid("depth", scale).cells()]
    graphs = {(c.model.rule, str(c.model.schedule)) for c in configs}
    assert len(graphs) == len(configs) == 2 * (3 * 4 - 1)
    if scale == "laptop":
        assert {(c.model.rule, c.optim.peak_lr) for c in configs} == {("postnorm", 1e-3), ("deeploop", 2e-3)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.round": 3}, "model.round: not a field .* of tiny can set; perhaps you meant model.rounds"),
        ({"model": 3}, "model: not a field"),
        ({"out": "x"}, "out: not a field"),
        ({"model.rounds": "three"}, r"^model.rounds='three': not a value of the kind"),
        ({"model.rounds": 0}, "model.rounds=0: must be at least 1"),
        ({"model.heads": 3}, "model.heads=3: must be a divisor of model.width=128"),
    ],
)
def test_a_wrong_setting_names_its_field(settings, message):
    with pytest.raises(ValueError, match=message):
        configure("tiny", settings)


FILE = """
recipe = "tiny"
compare_at = 20
[settings]
"model.width" = 32
optim.steps = 40
[axes]
seed = [0, 1]
model.rounds = [2, 3]
[axes.rule]
prenorm = {model.rule = "prenorm"}
deepnorm = {"model.rule" = "deepnorm"}
"""


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "ramps.toml"
    path.write_text(FILE)
    grid = read_grid(path)
    cells = {cell.name: cell for cell in grid.cells({"optim.batch": 4})}
    assert (grid.name, grid.compare_at, len(cells)) == ("ramps", 20, 8)
    config = cells["seed1-rounds2-deepnorm"].config()
    base = tiny()
    assert config == replace(
        base,
        seed=1,
        model=replace(base.model, width=32, rounds=2, rule="deepnorm"),
        optim=replace(base.optim, steps=40, batch=4),
    )
    assert cells["seed0-rounds3-prenorm"].axes == {"seed": 0, "rounds": 3, "rule": "prenorm"}
    as_json = tmp_path / "ramps.json"
    axes = {"seed": [0, 1], "model.rounds": [2, 3]}
    rule = {"prenorm": {"model.rule": "prenorm"}, "deepnorm": {"model.rule": "deepnorm"}}
    data = {"recipe": "tiny", "compare_at": 20, "axes": {**axes, "rule": rule}}
    data["settings"] = {"model": {"width": 32}, "optim.steps": 40}
    as_json.write_text(json.dumps(data))
    assert read_grid(as_json) == grid


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe = ", "own.toml: can't be read .not TOML: Invalid value"),
        ("[axes]\nseed = [0]", "recipe: missing"),
        ('recipe = "tiny"', "axes: missing"),
        ('recipe = "tiny"\naxis = 3\n[axes]\nseed = [0]', "axis: unknown; choose from recipe"),
        ("recipe = 3\n[axes]\nseed = [0]", "recipe=3: must be a str"),
        ('recipe = "gpt3"\n[axes]\nseed = [0]', "recipe=gpt3: unknown"),
        ('recipe = "tiny"\n[axes]\nseed = 3', "axes.seed=3: must be a list"),
        ('recipe = "tiny"\n[axes]\nseed = []', r"axes.seed=\[\]: must be a list"),
        ('recipe = "tiny"\n[axes.model]', r"axes.model=\{\}: must be a list"),
        ('recipe = "tiny"\n[axes]\nseed = [0, 0]', "axes.seed=.*twice"),
        ('recipe = "tiny"\n[axes]\n"model.round" = [3]', "model.round: not a field"),
        ('recipe = "tiny"\n[axes]\nseed = [0]\n[settings]\nseeds = 3', "seeds: not a field"),
        (
            'recipe = "tiny"\n[axes]\n"model.rule" = ["flat"]\nway.a = {"model.rule" = "deepnorm"}',
            "axes.way: sets model.rule",
        ),
        ('recipe = "tiny"\n[axes]\n"model.rule" = ["a b"]', "axes.rule='a b'"),
    ],
)
def test_a_mistake_in_a_file_names_the_field(tmp_path, text, message):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_grid(path).cells()


def test_a_grid_without_end_is_refused_at_once(tmp_path, capsys):
    """808 bytes that would be 24,300,000 cells."""
    paths = ("seed", "optim.steps", "optim.batch", "model.rounds", "model.blocks")
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"recipe": "tiny", "axes": {name: list(range(1, 31)) for name in paths}}))
    began = time.perf_counter()
    assert main(["sweep", str(path), "--dry-run", "--out", str(tmp_path / "out")]) == 2
    assert time.perf_counter() - began < 5
    assert "axes: 24,300,000 cells; must be at most 10,000" in capsys.readouterr().err


def test_two_cells_of_one_name_are_refused():
    axes = {**along("model.rule", ["deeploop"]), "kind": {"a/b": {"seed": 0}, "a_b": {"seed": 1}}}
    with pytest.raises(ValueError, match="two cells would be named deeploop-a_b"):
        Grid("own", "tiny", axes).cells()


def test_the_example_is_a_grid():
    grid = read_grid(Path(__file__).parents[2] / "examples" / "three_blocks.toml")
    cells = {cell.name: cell for cell in grid.cells()}
    assert len(cells) == 24
    config = cells["rounds7-seed1-deepnorm"].config()
    assert (config.model.rounds, config.model.rule, config.optim.warmup_steps) == (7, "deepnorm", 1000)
    assert len({c.config().optim.steps * c.config().optim.batch for c in cells.values()}) == 1  # equal tokens


def test_a_part_of_a_grid_is_named_by_its_axes():
    cells = named_grid("transfer", "gpu").cells()
    part = choose_cells(cells, ("rule=flat,prenorm", "rounds=16", "peak_lr=0.004"))
    assert [cell.name for cell in part] == [
        f"{rule}-rounds16-peak_lr0.004-seed{seed}" for rule in ("flat", "prenorm") for seed in range(3)
    ]
    assert choose_cells(cells, ("rule=flat,prenorm", "rounds=16", "peak_lr=4e-3")) == part
    assert choose_cells(cells, ()) == cells
    for word in ("rule", "rule=round", "depth=3", "rounds=5"):
        with pytest.raises(ValueError, match=rf"only={word}: must be an axis .* rounds=1,4,16,64;"):
            choose_cells(cells, (word,))


def test_short_names_of_fields_in_a_file_and_on_the_command_line(tmp_path):
    (tmp_path / "short.toml").write_text(
        'recipe = "tiny"\n[settings]\nsteps = 20\ndata = "data/mine"\nrounds.sample = "uniform"\n'
        "[axes]\nrounds = [2, 4]\nlr = [1e-3]\n"
        '[axes.rule]\na = {rule = "flat"}\nb = {"model.rule" = "prenorm"}\n'
    )
    (tmp_path / "long.toml").write_text(
        'recipe = "tiny"\n[settings]\noptim.steps = 20\ndata.path = "data/mine"\nrounds.sample = "uniform"\n'
        "[axes]\nmodel.rounds = [2, 4]\noptim.peak_lr = [1e-3]\n"
        '[axes.rule]\na = {"model.rule" = "flat"}\nb = {"model.rule" = "prenorm"}\n'
    )
    short, full = (read_grid(tmp_path / f"{name}.toml").cells() for name in ("short", "long"))
    assert [cell.settings for cell in short] == [cell.settings for cell in full]
    assert len(short) == 4
    asked = SweepArgs(name="table1", set=("steps=7", "device.micro_batch=2", "lr=0.1")).overrides()
    assert asked == {"optim.steps": 7, "device.micro_batch": 2, "optim.peak_lr": 0.1}


def test_every_rule_of_a_comparison_has_the_unigram_bias():
    for name in ("rules", "rules-search", "transfer"):
        assert all(cell.config().model.unigram_bias for cell in named_grid(name, "gpu").cells())
