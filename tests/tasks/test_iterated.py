"""Scores of iterated tasks: an oracle has all right, states between rounds are those of fewer rounds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deeploop.models.gpt import GPTOutput, LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.iterate.problems import make_task
from deeploop.tasks.iterate.problems.base import solve
from deeploop.tasks.iterate.problems.examples import Examples, held_out
from deeploop.tasks.iterate.scoring import copying, read_outs, rollout, score_sums, scores

SHAPE = {"blocks": 1, "rounds": 4, "width": 16, "heads": 2, "hidden": 32, "vocabulary": 16, "context": 32}


class Oracle(LoopedGPT):
    """Its stream is the row, and its block the automaton's rule."""

    def __init__(self, task, lies_after=1 << 30):
        super().__init__(GPTConfig(**SHAPE))
        self.task, self.lies_after, self.done = task, lies_after, 0
        self.embedding = self.input_norm = torch.nn.Identity()

    def loop(self, x, rounds, context, entered=None):
        rows = x[:, 1:].numpy()
        for _ in rounds:
            rows = self.task.advance(rows, rows)
        self.done += len(rounds)
        if self.done > self.lies_after:
            rows[:, 0] ^= 1
        return torch.cat([x[:, :1], torch.from_numpy(rows)], dim=1)

    def read_out(self, x, targets=None):
        return GPTOutput(x, None)

    def logits(self, states):
        return 1e4 * F.one_hot(states, self.config.vocabulary).float()


def test_an_oracle_has_every_cell_right_at_as_many_rounds_as_steps():
    task = make_task("automaton", 8)
    rows = held_out(task, 30)
    cells = [(R, h) for R in (1, 3, 50) for h in (1, 3, 50)]
    found = scores(score_sums(Oracle(task), Examples(task, False), rows, cells, batch=7))
    for (R, h), score in found.items():
        if h == R:
            assert (score.loss, score.cells, score.exact) == (0, 1, 1)
        else:
            truth = solve(task, rows, [R, h])
            assert score.cells == pytest.approx((truth[R] == truth[h]).mean())
            assert score.exact == pytest.approx((truth[R] == truth[h]).all(1).mean())


def test_one_wrong_cell_of_eight_is_no_exact_answer():
    task = make_task("automaton", 8)
    sums = score_sums(Oracle(task, lies_after=2), Examples(task, False), held_out(task, 10), [(2, 2), (3, 3)])
    found = scores(sums)
    assert (found[2, 2].cells, found[2, 2].exact) == (1, 1)
    assert (found[3, 3].cells, found[3, 3].exact) == (7 / 8, 0)


@pytest.mark.parametrize(
    "parts",
    [
        {"rule": "flat"},
        {"rule": "factored"},
        {"rule": "flat", "prelude": 1, "coda": 2, "injection": "gated", "first_state": "zeros"},
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_read_out_between_rounds_is_what_a_model_of_so_many_rounds_says(parts, recompute):
    model = LoopedGPT(GPTConfig(**SHAPE, **parts), seed=1).eval()
    inputs = torch.randint(16, (3, 10), generator=torch.Generator().manual_seed(0))
    for rounds, logits in read_outs(model, inputs, [7, 2, 4], recompute_alpha=recompute):
        other = LoopedGPT(GPTConfig(**SHAPE, **parts), seed=1).eval()
        other.set_rounds(rounds, recompute_alpha=recompute)
        assert torch.equal(logits, other.logits(other(inputs).states)), rounds
    assert model.rounds == 4


def test_told_steps_are_read_from_the_input():
    task = make_task("automaton", 8)
    model = LoopedGPT(GPTConfig(**SHAPE), seed=1)
    examples, rows = Examples(task, tells_steps=True), held_out(task, 6)
    found = scores(score_sums(model, examples, rows, [(4, 2), (4, 9), (2, 9)], batch=4))
    for (rounds, steps), score in found.items():
        inputs, targets = map(torch.from_numpy, examples.batch(rows, steps))
        model.set_rounds(rounds)
        logits = model.eval().logits(model(inputs).states)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        assert score.loss == pytest.approx(loss.item(), rel=1e-5)
    assert found[4, 2] != found[4, 9]


def test_a_rollout_is_one_pass_and_may_be_longer_than_the_context():
    task = make_task("automaton", 40)  # the context has 32
    rows = held_out(task, 2)
    found = rollout(Oracle(task), task, rows, 12)
    truth = solve(task, rows, range(1, 13))
    assert (found == np.stack([truth[h] for h in range(1, 13)])).all()
    model = LoopedGPT(GPTConfig(**SHAPE), seed=1)
    longer = LoopedGPT(GPTConfig(**SHAPE | {"context": 64}), seed=1)
    assert (rollout(model, task, rows, 5) == rollout(longer, task, rows, 5)).all()


def test_the_copying_baseline_is_the_best_early_state():
    task = SimpleNamespace(
        start=lambda rows: np.zeros_like(rows),
        advance=lambda rows, state: (state + 1) % 5,  # comes back after five steps
        read=lambda rows, state: np.where(np.arange(3) < 2, state, -1),
    )
    rows = np.zeros((2, 3), dtype=int)
    assert copying(task, rows, [1, 2, 3, 5, 7], trained=2) == {3: 0, 5: 1, 7: 1}
