"""Training a reasoner: it learns, slots refill only when they halted, and a run folder knows its puzzles."""

import json
import shutil

import pytest
import torch

from deeploop.cli import main
from deeploop.config.loop import HaltingConfig
from deeploop.models.accounting import flops_per_segment
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import PuzzleShape
from deeploop.nn.kernels.products import cached_cast
from deeploop.runs.folder import last_checkpoint, list_checkpoints, load_any_config, load_config
from deeploop.tasks.puzzles.data.loader import PuzzleLoader
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku import build_sudoku
from deeploop.tasks.puzzles.load import load_reasoner
from deeploop.tasks.puzzles.scoring import Solver, score, spread_rows
from deeploop.tasks.puzzles.task import PuzzleTask
from deeploop.train.checkpoint import load_tensors
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest
from puzzle_runs import MODELS, write_boards

ALONE = World(0, 1, torch.device("cpu"))
KINDS = ["hrm", "trm"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reasoner_learns_to_copy_a_board(make_puzzle_config, tmp_path, kind):
    config = make_puzzle_config(tmp_path, kind, optim={"steps": 100}, data={"validate_every": 100})
    result = train(config)
    first = read_metrics(tmp_path, "validation")[0]
    assert first["exact"] == 0
    assert result["exact"] > 0.9
    assert result["cells"] > 0.95
    assert result["loss"] < 0.1 * first["loss"]
    assert 1 <= result["segments"] <= 3


def test_a_slot_keeps_its_puzzle_until_it_halts_and_the_stream_moves_on_all_the_same(
    make_puzzle_config, tmp_path
):
    run = open_run(make_puzzle_config(tmp_path), ALONE)
    batch, seen = run.config.optim.batch, 0
    stream = PuzzleLoader(run.task.puzzles, seed=run.config.seed)
    queue = StepQueue(run, StopRequest())
    for _ in range(8):
        before = run.task.slots
        queue.take()
        after, new = run.task.slots, stream.next_batch(batch)
        for name, rows in zip(("inputs", "labels", "ids"), new, strict=True):
            old, now = getattr(before, name), getattr(after, name)
            assert torch.equal(now[before.halted], rows[before.halted])
            assert torch.equal(now[~before.halted], old[~before.halted])
        assert torch.equal(after.steps, before.steps.masked_fill(before.halted, 0) + 1)
        seen += int(before.halted.sum())
    assert batch < seen < 8 * batch  # refilled more than once, and not every time


def test_asked_for_again_without_a_step_the_same_puzzles_go_on(make_puzzle_config, tmp_path):
    run = open_run(make_puzzle_config(tmp_path, halting={"segments": 1}), ALONE)
    StepQueue(run, StopRequest()).take()
    assert run.task.slots.halted.all()
    first, second = (run.task.batches(1).batches[0] for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("segments", "forward_again"), [(1, False), (2, True)])
def test_a_step_of_hrm_counts_the_extra_forward_pass_where_there_is_one(
    make_puzzle_config, tmp_path, segments, forward_again
):
    config = make_puzzle_config(tmp_path, halting={"segments": segments})
    task = PuzzleTask(config, ALONE)
    own = flops_per_segment(config.model, task.shape, forward_again=forward_again)
    assert task.flops_per_step == config.optim.batch * own


@pytest.mark.parametrize(("kind", "calls", "modules"), [("hrm", 12, 2), ("trm", 6, 1)])
def test_weights_are_cast_once_for_a_micro_batch(make_puzzle_config, tmp_path, kind, calls, modules):
    """HRM's second forward pass, for its Q target, included."""
    run = open_run(make_puzzle_config(tmp_path, kind), ALONE)
    make, seen = cached_cast(lambda stack: object()), []
    for stack in run.model.stacks.values():
        stack.register_forward_pre_hook(lambda own, _: seen.append(make(own)))
    queue = StepQueue(run, StopRequest())
    for _ in range(2):
        queue.advance()
    assert (len(seen), len(set(seen))) == (2 * calls, 2 * modules)


def test_fp8_knows_the_positions_at_once(make_puzzle_config, tmp_path):
    """A board's cells and the positions before it, of every micro-batch."""
    config = make_puzzle_config(tmp_path)
    task = PuzzleTask(config, ALONE)
    positions = task.shape.length + config.model.puzzle_positions
    assert task.capabilities.tokens == task.fit.micro_batch * positions
    model = task.build()
    assert positions == model.positions


def test_only_rows_of_puzzles_at_work_move(make_puzzle_config, tmp_path):
    run = open_run(make_puzzle_config(tmp_path), ALONE)
    StepQueue(run, StopRequest()).take()
    moved = run.model.puzzles.abs().sum(1).nonzero().flatten()
    assert torch.equal(moved, run.task.slots.ids.unique())
    assert run.model.puzzles[moved].abs().unique().tolist() == pytest.approx(
        [0.01 / 2]
    )  # half of the warm-up


@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_change_nothing_but_rounding(make_puzzle_config, tmp_path, size):
    whole = train(make_puzzle_config(tmp_path / "whole"))
    parts = train(make_puzzle_config(tmp_path / "parts", device={"micro_batch": size}))
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_folder_gives_the_model_that_was_validated_last(make_puzzle_config, tmp_path, boards, kind):
    config = make_puzzle_config(tmp_path, kind)
    result = train(config)
    stamp = json.loads((tmp_path / "run.json").read_text())
    assert stamp["task"] == kind
    assert stamp["puzzles"] == PuzzleSet.open(boards).hash
    assert load_any_config(tmp_path) == config
    model, found = load_reasoner(tmp_path)
    assert (found, model.training) == (config, False)
    rows = spread_rows(PuzzleSet.open(boards).test, 7)
    assert score(Solver(model, config.halting, 8), rows).means()["loss"] == result["loss"]


def test_evaluation_does_not_depend_on_batches_or_ranks(boards):
    split, config = PuzzleSet.open(boards).test, HaltingConfig(segments=2)
    model = Reasoner(MODELS["hrm"][1], PuzzleShape(5, 9, 19), seed=3)
    whole = score(Solver(model, config, 7), spread_rows(split, 7))
    shares = [score(Solver(model, config, 2), spread_rows(split, 7, rank, 2)) for rank in (0, 1)]
    assert tuple(map(sum, zip(*shares, strict=True))) == pytest.approx(tuple(whole), rel=1e-5)
    assert whole.puzzles == 7
    assert whole.scored == 7 * 8


def test_all_segments_are_run_unless_it_may_halt(boards):
    rows, config = spread_rows(PuzzleSet.open(boards).test, 7), HaltingConfig(segments=3)
    model = Reasoner(MODELS["hrm"][1], PuzzleShape(5, 9, 19), seed=3)
    with torch.no_grad():
        model.halting.bias.copy_(torch.tensor([9.0, -9.0]))  # wants to halt at once

    def loss(**asked):
        return score(Solver(model, config, 7, **asked), rows).loss

    assert loss() == loss(adaptive=False) != loss(adaptive=True)


def test_the_checkpoint_holds_the_slots(make_puzzle_config, tmp_path):
    train(make_puzzle_config(tmp_path))
    tensors = load_tensors(last_checkpoint(tmp_path))
    assert tensors.keys() == {"inputs", "labels", "ids", "high", "low", "steps", "halted"}
    assert tensors["high"].shape == (8, 10, 16)
    assert len(tensors["steps"].unique()) > 1  # at different segments of their puzzles


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_as_if_never_stopped(make_puzzle_config, tmp_path, kind):
    train(make_puzzle_config(tmp_path / "whole", kind))
    resumed = shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(list_checkpoints(resumed)[-1])
    train(make_puzzle_config(resumed, kind, resume=True))
    for name in ("model", "optimizer", "task", "rng"):
        one, two = (last_checkpoint(f) / f"{name}.safetensors" for f in (tmp_path / "whole", resumed))
        assert one.read_bytes() == two.read_bytes(), name


def test_what_a_resumed_run_may_not_change(make_puzzle_config, boards, tmp_path):
    out, own = tmp_path / "run", PuzzleSet.open(boards).hash
    train(make_puzzle_config(out))
    other = write_boards(tmp_path / "other", seed=1).folder
    wider = build_sudoku(tmp_path / "wider", size=4, train=4, test=2).folder
    for changes, message in [
        (
            {"data": {"path": other}},
            rf"of hash {PuzzleSet.open(other).hash:.12}…, not the puzzles .* started on \({own:.12}…\)",
        ),
        ({"data": {"path": wider}}, "not the puzzles that the run was started on"),  # and not a shape
        ({"optim": {"batch": 4}}, "optim.batch=4: the run was started with 8; keep that"),
        ({"model": {"horizon": "full"}}, "model.horizon=full: the run in"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(make_puzzle_config(out, resume=True, **changes))
    with pytest.raises(ValueError, match="holds a run of another kind"):
        train(make_puzzle_config(out, "trm", resume=True))
    with pytest.raises(ValueError, match=r"init_from=.*run: holds a run of another kind \(hrm\)"):
        train(make_puzzle_config(tmp_path / "new", "trm", init_from=out))
    with pytest.raises(ValueError, match=r"init_from=.*run: its puzzles have 5 tokens .*wider 6; the"):
        train(make_puzzle_config(tmp_path / "new", init_from=out, data={"path": wider}))


def test_damaged_and_absent_puzzles_are_one_line(make_puzzle_config, boards, tmp_path):
    broken = shutil.copytree(boards, tmp_path / "broken")
    content = bytearray((broken / "train_labels.npy").read_bytes())
    content[-1] ^= 1
    (broken / "train_labels.npy").write_bytes(content)
    for path, message in [
        (broken, r"train_labels\.npy has sha256"),
        (tmp_path / "none", "no such set of puzzles"),
    ]:
        with pytest.raises(ValueError, match=rf"data\.path=.*{message}"):
            train(make_puzzle_config(tmp_path / "run", data={"path": path}))
    assert not (tmp_path / "run").exists()


def test_commands_for_language_models_say_that_this_is_none(
    make_puzzle_config, tiny_config, tmp_path, capsys
):
    train(make_puzzle_config(tmp_path / "puzzle", optim={"steps": 1}))
    with pytest.raises(ValueError, match="a run of a reasoner; this is for language models"):
        load_config(tmp_path / "puzzle")
    assert main(["generate", str(tmp_path / "puzzle"), "--prompt", "x"]) == 2
    assert "a run of a reasoner" in capsys.readouterr().err
    language = tiny_config("language", optim={"steps": 1})
    train(language)
    with pytest.raises(ValueError, match="a run of a language model; this is for reasoners"):
        load_reasoner(language.out)
