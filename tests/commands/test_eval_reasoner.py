"""`deeploop eval` on reasoners that took a second to train: boards, votes on ARC, and its mistakes."""

import json
import shutil

import numpy as np
import pytest
import torch

from deeploop.cli import main
from deeploop.config.loop import HaltingConfig
from deeploop.config.optim import ReasonerOptimConfig
from deeploop.config.run import DeviceConfig
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import HRMConfig, TRMConfig
from deeploop.report import results
from deeploop.report.beside_paper import arc_table
from deeploop.report.runs import find_runs
from deeploop.runs.folder import require_checkpoint
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import configure, named_grid
from deeploop.tasks.puzzles import evaluate as eval_reasoner
from deeploop.tasks.puzzles.config import HRMTrainConfig, PuzzleDataConfig, TRMTrainConfig
from deeploop.tasks.puzzles.data.arc import ArcTask, build_arc
from deeploop.tasks.puzzles.data.maze import build_maze
from deeploop.tasks.puzzles.data.pairs import PairsFile, build_pairs
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.tasks.puzzles.data.sudoku_files import SudokuFiles, build_from_files
from deeploop.tasks.puzzles.options import ReasonerOptions
from deeploop.tasks.puzzles.scoring import score
from deeploop.train.loop import train

SHAPE = {"width": 16, "heads": 2, "hidden": 32, "cycles": 1, "low_cycles": 1}


def train_run(out, kind, puzzles):
    config, model = {
        "hrm": (HRMTrainConfig, HRMConfig(**SHAPE, high_blocks=1, low_blocks=1)),
        "trm": (TRMTrainConfig, TRMConfig(**SHAPE, blocks=1, puzzle_positions=1)),
    }[kind]
    train(
        config(
            out=out,
            model=model,
            data=PuzzleDataConfig(path=puzzles),
            optim=ReasonerOptimConfig(steps=3, batch=4, warmup_steps=1, ema=0.5 if kind == "trm" else 0.0),
            halting=HaltingConfig(segments=2, learn_continue=kind == "hrm"),
            device=DeviceConfig(kind="cpu"),
        )
    )
    return out


def test_averaged_weights_that_are_near_the_start_are_said(trained, tmp_path, command):
    """The run has three steps; 1/(1 - 0.5) is two of them, 1/(1 - 0.8) five."""
    assert "near the start" not in command(trained / "trm")
    young = shutil.copytree(trained / "trm", tmp_path / "young")
    config = json.loads((young / "config.json").read_text())
    config["optim"]["ema"] = 0.8
    (young / "config.json").write_text(json.dumps(config))
    said = command(young).splitlines()[1]
    assert said == (
        "the averaged weights are still near the start: they average over about 5 steps (optim.ema=0.8), "
        "and the run has 3"
    )


def test_a_training_too_short_for_its_averaged_weights_is_warned_of(trained, tmp_path, capsys):
    words = f"train trm-sudoku4 --data {trained / 'sudoku'} --out {tmp_path / 'run'} --dry-run --device cpu"
    said = (
        "which stay near the start: they average over about 1,000 steps, and the run has 999; set a smaller"
    )
    for steps, warned in ((999, True), (1000, False)):
        assert main([*words.split(), "--steps", str(steps)]) == 0
        assert (said in capsys.readouterr().out) == warned


def test_validate_names_the_command_that_scores_a_reasoner(trained, capsys):
    run = trained / "trm"
    assert main(["validate", str(run)]) == 2
    assert capsys.readouterr().err.endswith(f"for language models; `deeploop eval {run}` scores it\n")


def write_arc(folder, seed=0):
    """Two evaluation tasks, the second with two test inputs, in six views each."""
    draw = np.random.default_rng(seed)

    def task(part, name, tests):
        pairs = [tuple(draw.integers(0, 10, (2, 2, 3)).astype(np.uint8)) for _ in range(2 + tests)]
        return ArcTask(part, name, tuple(pairs[:2]), tuple(pairs[2:]))

    tasks = [task("training", "a", 1), task("evaluation", "b", 1), task("evaluation", "c<i>", 2)]
    return build_arc(tasks, folder, augmentations=5).folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An HRM on ARC and a TRM on Sudoku, with their puzzles; a test that damages one copies it first."""
    root = tmp_path_factory.mktemp("reasoners")
    build_sudoku(root / "sudoku", size=4, train=20, test=30)
    train_run(root / "hrm", "hrm", write_arc(root / "arc"))
    train_run(root / "trm", "trm", root / "sudoku")
    return root


@pytest.fixture
def command(capsys):
    def call(*words):
        assert main(["eval", *map(str, words)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


@pytest.fixture
def mistake(capsys):
    def call(*words):
        assert main(["eval", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err.removeprefix("deeploop eval: error: ").strip()

    return call


def test_boards_are_scored_with_the_averaged_weights(trained, tmp_path, command, hashed):
    run = shutil.copytree(trained / "trm", tmp_path / "run")
    out = command(run)
    assert hashed == ["model.safetensors", "optimizer.safetensors"]  # the averages are in the second
    assert "averaged weights: 30 examples" in out
    (record,) = results.read(run / "eval.json")
    validation = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    for name in ("loss", "exact", "cells", "segments"):  # what training found at its end, over the same split
        assert record[name] == pytest.approx(validation[name], rel=1e-5)
    assert (record["model"], record["averaged"], record["most_segments"]) == ("trm", True, 2)
    assert f"{100 * record['cells']:.2f}" in out


def test_puzzles_from_files_are_scored_file_by_file(trained, tmp_path, command):
    """The files' results are those of their puzzles alone, and add up to the whole."""
    split = PuzzleSet.open(trained / "sudoku").train
    for name, part in (("a", slice(12)), ("b", slice(12, 20))):
        lines = ["".join(map(str, board)) for board in split.inputs[part] - 1]
        (tmp_path / name).write_text("\n".join(lines))
    asked = SudokuFiles((tmp_path / "a", tmp_path / "b"), size=4, train=3, test=100)
    puzzles = build_from_files(asked, tmp_path / "set")
    run = train_run(tmp_path / "run", "trm", tmp_path / "set")
    out = command(run)
    (record,) = results.read(run / "eval.json")
    assert list(record["sources"]) == ["a", "b"]
    counts = np.bincount(puzzles.test.sources).tolist()
    assert [part["examples"] for part in record["sources"].values()] == counts
    for name in ("loss", "exact", "cells"):
        parts = [part[name] for part in record["sources"].values()]
        assert record[name] == pytest.approx(np.average(parts, weights=counts))
    assert sum(f"{100 * part['cells']:.2f}" in out for part in record["sources"].values()) == 2
    with eval_reasoner.open_solver(run, ReasonerOptions(), "cpu", require_checkpoint(run)) as solver:
        rows = puzzles.test.rows(np.flatnonzero(puzzles.test.sources == 1))
        assert score(solver, rows).means()["loss"] == pytest.approx(record["sources"]["b"]["loss"])


def test_halting_is_kept_beside_and_the_same_settings_replace(trained, tmp_path, command):
    run = shutil.copytree(trained / "trm", tmp_path / "run")
    command(run)
    command(run, "--limit", 7, "--halt", "--batch", 3)
    command(run, "--limit", 7, "--halt", "--batch", 4)
    plain, halting = results.read(run / "eval.json")
    assert (plain["halt"], halting["halt"]) == (False, True)
    assert (plain["examples"], halting["examples"], halting["batch"]) == (30, 7, 4)
    assert 1 <= halting["segments"] <= 2


def test_votes_on_arc_end_in_the_papers_table(trained, tmp_path, command, hashed):
    run = shutil.copytree(trained / "hrm", tmp_path / "run")
    out = command(run)
    assert hashed == ["model.safetensors"]
    rows = [line.split() for line in out.splitlines()]
    assert ["tasks", "solved,", "%", "K=1", "K=2", "K=10", "K=100", "K=1000"] in rows
    assert ["paper,", "ARC-AGI-1:", "HRM", "31.50", "36.50", "41.50", "47.50", "50.75"] in rows
    (record,) = results.read(run / "eval.json")
    assert (record["tasks"], record["inputs"], record["examples"], record["most_views"]) == (2, 3, 18, 6)
    assert {name: len(places) for name, places in record["places"].items()} == {"b": 1, "c<i>": 2}
    assert "2 ARC tasks, not 400" in record["deviations"]
    lacks = "without ConceptARC, which --concept-arc of `deeploop prepare arc` adds"
    assert f"built from 3 tasks, not the paper's 960: {lacks}" in record["deviations"]
    assert record["deviations"][-1] == (
        "3 steps are 2 epochs of this set, not the paper's 100,000 (--steps 175000)"
    )
    page = (run / "gallery.html").read_text()
    assert page.count("<article>") == 2
    assert "c&lt;i&gt;" in page


def test_a_cell_of_hrm_arc_is_trained_then_votes(trained, tmp_path):
    """The commands that `deeploop sweep hrm-arc` starts for a cell, run here."""
    small = {f"model.{name}": value for name, value in SHAPE.items()}
    small |= {"model.high_blocks": 1, "model.low_blocks": 1, "halting.segments": 2, "data.test_examples": 2}
    small |= {"data.path": str(trained / "arc"), "optim.batch": 4, "optim.steps": 2, "device.kind": "cpu"}
    grid = named_grid("hrm-arc", "paper")
    *_, cell = grid.cells(small)
    folder = SweepFolder(tmp_path / "sweep", grid, [cell])
    folder.write()
    commands = []
    while command := folder.next_command(cell):
        commands.append(command[3])
        assert main(command[3:]) == 0
    assert (cell.name, commands) == ("deeploop-seed3", ["train", "eval"])
    (record,) = results.read(folder.files(cell) / "eval.json")
    assert record["ladder"].keys() == {"1", "2", "10", "100", "1000"}


def test_a_dry_run_of_a_sweep_says_what_is_not_the_papers(trained, capsys):
    assert main(["sweep", "hrm-arc", "--data", str(trained / "arc"), "--dry-run"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "warning: built from 3 tasks, not the paper's 960: without ConceptARC, "
        "which --concept-arc of `deeploop prepare arc` adds",
        "warning: at most 5 augmented views of a task, not the paper's 1,000",
    ]


def test_views_and_gallery_can_be_limited(trained, tmp_path, command):
    run = shutil.copytree(trained / "hrm", tmp_path / "run")
    record = json.loads(command(run, "--views", 2, "--limit", 1, "--gallery", 0, "--json"))
    assert (record["tasks"], record["examples"], record["most_views"], record["views"]) == (1, 2, 2, 2)
    assert not (run / "gallery.html").exists()


def moved_to(run, trained, puzzles):
    """A copy of the HRM's run whose config has its puzzles elsewhere."""
    shutil.copytree(trained / "hrm", run)
    config = json.loads((run / "config.json").read_text())
    config["data"]["path"] = str(puzzles)
    (run / "config.json").write_text(json.dumps(config))
    return run


def test_puzzles_may_have_moved(trained, tmp_path, command, mistake):
    run = moved_to(tmp_path / "run", trained, tmp_path / "gone")
    assert mistake(run).endswith("--data FOLDER")
    assert "2 tasks" in command(run, "--data", trained / "arc", "--views", 1)


def test_the_report_shows_the_ladder(trained, tmp_path, command):
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        command(shutil.copytree(trained / "hrm", runs / name), "--views", 1, "--gallery", 0)
    assert arc_table([]) is None
    path = runs / "two" / "eval.json"
    found = json.loads(path.read_text())
    found["evaluations"][0]["ladder"] |= {"1": 0.5, "1000": 1.0}
    path.write_text(json.dumps(found))
    row, *paper = arc_table(find_runs([runs])).rows  # our own first
    assert row == ["here", "Vanilla HRM, 2 tasks, 1 view", "25.00", "0.00", "0.00", "0.00", "50.00"]
    assert {other[0] for other in paper} == {"paper"}


def test_options_of_the_other_kind_are_refused(trained, mistake):
    run = trained / "hrm"
    said = mistake(run, "--tasks", "piqa")
    assert said == f"--tasks: for language models; {run} is another kind of run (reasoners)"
    assert mistake(run, "--batch-tokens", 99).startswith("--batch-tokens: for language models")
    assert mistake(run, "--views", 0) == "views=0: must be at least 1"
    assert mistake("shipped", "--views", 3).startswith("--views: for reasoners; shipped")
    assert mistake("shipped", "--gallery", 0).startswith("--gallery: for reasoners")
    assert mistake("--requests", "new", "--halt").startswith("--halt: for reasoners")
    assert mistake(trained / "trm", "--gallery", 3).endswith("holds puzzles of kind sudoku")
    assert mistake("shipped", "--starts", 3).startswith("--starts: for reasoners")
    assert mistake(run, "--starts", 0) == "starts=0: must be at least 1"
    assert mistake(run, "--segments", 4, 0) == "segments=0: must be at least 1"
    assert mistake(run, "--noise", 0.5).startswith("noise=0.5: the first state never has noise; add --starts")
    assert mistake(run, "--noise", 0, "--starts", 2) == "noise=0: must be above 0, and finite"


def test_more_views_than_there_are_symmetries_are_refused(trained, tmp_path, command, mistake, capsys):
    build_maze(tmp_path / "maze", size=5, min_path=2, train=4, test=2)
    run = train_run(tmp_path / "mazes", "trm", tmp_path / "maze")
    assert "2 puzzles, 16 examples" in command(run, "--views", 8)
    assert mistake(run, "--views", 9) == "views=9: a square board has 8"
    lines = [json.dumps({"input": f"{n}", "output": f"{n}"}) for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    build_pairs(PairsFile(tmp_path / "pairs.jsonl"), tmp_path / "pairs")
    run = train_run(tmp_path / "run", "trm", tmp_path / "pairs")
    capsys.readouterr()
    message = mistake(run, "--views", 2)
    assert message.endswith("of kind pairs, without known symmetries; use --starts for more answers")


def test_more_at_test_time_is_a_table_and_a_picture(trained, tmp_path, command):
    run = shutil.copytree(trained / "trm", tmp_path / "run")
    command(run, "--views", 1)
    command(run)
    asked = ("--segments", 5, 2, "--starts", 3, "--noise", 0.5, "--views", 2, "--choose", "q")
    out = command(run, *asked)
    one, plain, record = results.read(run / "eval.json")
    assert (one["test_time"], one["views"], plain["test_time"], plain["views"]) == (None, 1, None, None)
    assert "passes" not in plain
    (row,) = one["passes"]  # one view and one first state: the plain evaluation
    assert (row["exact"], row["cells"]) == (plain["exact"], plain["cells"])
    for name in ("loss", "exact", "cells", "segments"):
        assert one[name] == pytest.approx(plain[name])
    assert record["test_time"] == {"segments": [2, 5], "starts": 3, "noise": 0.5, "choose": "q"}
    assert (record["tasks"], record["examples"], record["most_segments"]) == (30, 180, 5)
    sizes = [(row["segments"], row["answers"], row["passes"]) for row in record["passes"]]
    assert sizes == [(n, k, n * k) for n in (2, 5) for k in (1, 2, 4, 6)]
    assert record["passes"][0] == row  # the first answer after the segments of training
    assert "the answer with the highest q_halt" in out
    assert out.splitlines()[-1].endswith("passes.png")
    assert (run / "passes.png").stat().st_size > 1000
    command(run, "--segments", 3)
    command(run, *asked, "--batch", 7)
    assert len(results.read(run / "eval.json")) == 4  # what was asked for is kept beside, or replaced
    assert results.read(run / "eval.json")[-1]["passes"] == record["passes"]


def test_more_at_test_time_stays_out_of_the_papers_table(trained, tmp_path, command):
    run = shutil.copytree(trained / "hrm", tmp_path / "runs" / "run")
    out = command(run, "--segments", 1, 3, "--starts", 2, "--views", 2, "--gallery", 1)
    (record,) = results.read(run / "eval.json")
    assert (record["tasks"], record["most_views"], record["examples"]) == (2, 2, 12)
    assert [(row["segments"], row["answers"]) for row in record["passes"]] == [
        (n, k) for n in (1, 3) for k in (1, 2, 4)
    ]
    assert "segments, first states or the choice are not those of the paper's evaluation" in out
    assert "from 2 first states" in (run / "gallery.html").read_text()
    assert arc_table(find_runs([tmp_path / "runs"])) is None
    assert main(["runs", str(tmp_path / "runs")]) == 0
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0


def test_what_could_not_be_kept_is_not_computed(trained, tmp_path, mistake, monkeypatch):
    """Votes on ARC take hours: an eval.json that can't be added to is named before them."""
    run = shutil.copytree(trained / "hrm", tmp_path / "hrm")
    (run / "eval.json").write_text('{"evalu')
    assert "eval.json: can't be read" in mistake(run, "--data", "nowhere")
    (run / "eval.json").unlink()
    monkeypatch.setattr("os.access", lambda path, mode: path != run)
    said = f"{run}: can't be written, and the result goes there; copy the run"
    assert mistake(run, "--data", "nowhere") == said


def test_what_is_not_the_runs_is_refused(trained, tmp_path, mistake):
    other = write_arc(tmp_path / "other", seed=1)
    message = mistake(trained / "hrm", "--data", other)
    assert "was trained on" in message
    assert message.endswith("set --data to those")

    run = shutil.copytree(trained / "hrm", tmp_path / "swapped")
    shutil.rmtree(run / "checkpoints")
    anew = f"start a new run: deeploop train --config {run / 'config.json'} --out ANOTHER"
    assert mistake(run) == f"{run}: holds no checkpoint (none yet, or none was kept); {anew}"
    shutil.copytree(trained / "trm" / "checkpoints", run / "checkpoints")
    assert "a checkpoint of other puzzles" in mistake(run)

    run = shutil.copytree(trained / "hrm", tmp_path / "ids")
    stamp = json.loads((run / "run.json").read_text())
    stamp["shape"]["puzzle_ids"] -= 1
    (run / "run.json").write_text(json.dumps(stamp))
    assert "puzzle_ids=18" in mistake(run)

    damaged = shutil.copytree(trained / "arc", tmp_path / "damaged")
    array = np.load(damaged / "test_labels.npy")
    array[0, 0] += 1
    np.save(damaged / "test_labels.npy", array)
    for words in ((trained / "hrm", "--data", damaged), (moved_to(tmp_path / "there", trained, damaged),)):
        message = mistake(*words)
        assert "test_labels.npy has sha256" in message
        assert message.endswith("delete the folder and prepare it again")


def test_a_full_gpu_ends_with_a_code_of_its_own(trained, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Reasoner, "forward", full)
    assert main(["eval", str(trained / "trm"), "--batch", "6"]) == 75
    assert capsys.readouterr().err == "deeploop eval: error: the GPU's memory is full; try --batch 3\n"


def test_an_arc_recipe_counts_its_steps_from_the_set_that_is_there(trained, capsys):
    """7 examples an epoch: 100,000 epochs at batch 8 are 87,500 steps; steps that are given stay."""
    small = "--model.width 16 --model.heads 2 --model.hidden 32 --optim.batch 8 --device.kind cpu"
    words = f"train hrm-arc1 {small} --data.path {trained / 'arc'} --out {trained / 'new'} --dry-run".split()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"steps: 87,500, 100,000 epochs of {trained / 'arc'}, as published; --steps sets" in said
    assert "warning: built from 3 tasks, not the paper's 960: without ConceptARC" in said
    assert "epochs of this set" not in said
    assert main([*words, "--optim.steps", "875"]) == 0
    assert "875 steps are 1,000 epochs of this set, not the paper's 100,000" in capsys.readouterr().out
    assert main([*words, "--steps", "518226"]) == 0  # the recipe's own number, but given
    assert "518,226 steps are 592,258 epochs of this set" in capsys.readouterr().out
    cell = configure("hrm-arc1", {"data.path": str(trained / "arc"), "optim.batch": 8})
    assert cell.optim.steps == 87_500
    assert configure("hrm-arc1", {"data.path": "nowhere"}).optim.steps == 518_226
