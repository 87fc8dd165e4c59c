"""Sign-SGD on puzzle vectors: touched rows only, a row's gradients added up before the sign is taken."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deeploop.tasks.puzzles.sign_sgd import sign_sgd_
from deeploop.train.distributed import World
from deeploop.train.opening import open_run
from deeploop.train.steps import StepQueue
from deeploop.train.stop import StopRequest

ALONE = World(0, 1, torch.device("cpu"))


def test_a_row_moves_by_the_sign_of_its_whole_gradient():
    table = torch.full((4, 2), 2.0)
    ids = torch.tensor([3, 1, 3])
    gradient = torch.tensor([[0.1, -5.0], [0.0, 2.0], [-0.3, 1.0]])
    sign_sgd_(table, ids, gradient, lr=0.5, weight_decay=0.1, world=ALONE)
    kept = 2.0 * (1 - 0.5 * 0.1)
    expected = torch.tensor([[2.0, 2.0], [kept, kept - 0.5], [2.0, 2.0], [kept + 0.5, kept + 0.5]])
    torch.testing.assert_close(table, expected)


def test_ranks_make_one_step_together():
    """Two ranks gather the rows of one rank, in the same order."""

    class FirstOfTwo(World):
        def gather_rows(self, rows):
            return {torch.int64: ids, torch.float32: gradient}[rows.dtype]

    generator = torch.Generator().manual_seed(0)
    ids, gradient = torch.randint(0, 5, (8,), generator=generator), torch.randn(8, 6, generator=generator)
    one, two = torch.ones(5, 6), torch.ones(5, 6)
    sign_sgd_(one, ids, gradient, lr=0.1, weight_decay=1.0, world=ALONE)
    world = FirstOfTwo(0, 2, torch.device("cpu"))
    sign_sgd_(two, ids[:4], gradient[:4], lr=0.1, weight_decay=1.0, world=world)
    assert torch.equal(one, two)


def by_row(table, ids, gradient, lr, weight_decay):
    """Sign-SGD row by row, for which a GPU would have to wait to know the number of rows."""
    rows, place = ids.unique(return_inverse=True)
    owns = (place == torch.arange(len(rows)).unsqueeze(1)).double()
    sign = (owns @ gradient.double()).sign().to(table.dtype)
    table[rows] = table[rows] * (1 - lr * weight_decay) - lr * sign


@pytest.mark.parametrize("rows", [1, 5, 60])
@pytest.mark.parametrize("only_if", [None, torch.tensor(True)])
def test_slots_of_one_row_write_what_the_row_would(rows, only_if):
    """Bit for bit: the order of a sum could differ, but then its sign only if it is zero but for rounding."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, rows, (96,), generator=generator)
    gradient = torch.randn(96, 33, generator=generator)
    table = torch.randn(rows, 33, generator=generator)
    expected = table.clone()
    by_row(expected, ids, gradient, 0.1, 0.5)
    sign_sgd_(table, ids, gradient, lr=0.1, weight_decay=0.5, world=ALONE, only_if=only_if)
    assert torch.equal(table, expected)


class RoundsLater(TorchDispatchMode):
    """A product that rounds every row but the first up, as one may that computes rows in several ways."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return (
            found + 1e-30 * torch.arange(len(found)).unsqueeze(1) if function.name() == "aten::mm" else found
        )


def test_slots_of_one_row_agree_on_its_sign_however_a_product_rounds():
    table, gradient = torch.ones(1, 2), torch.tensor([[0.5, -3.0], [-0.5, 3.0], [0.0, 0.0]])
    with RoundsLater():
        sign_sgd_(table, torch.zeros(3, dtype=torch.long), gradient, lr=0.1, weight_decay=0.0, world=ALONE)
    assert torch.equal(table, torch.ones(1, 2))


@pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf")])
def test_a_step_that_is_not_taken_leaves_the_rows(bad):
    table = torch.arange(12.0).view(4, 3)
    before = table.clone()
    gradient = torch.ones(3, 3)
    gradient[1, 2] = bad
    told = {"lr": 0.5, "weight_decay": 0.1, "world": ALONE, "only_if": torch.tensor(False)}
    sign_sgd_(table, torch.tensor([3, 1, 3]), gradient, **told)
    assert torch.equal(table, before)


class Touches(TorchDispatchMode):
    """Operations that are given the memory of a table."""

    def __init__(self, table):
        super().__init__()
        self.table, self.found = table.untyped_storage().data_ptr(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        if any(tensor.untyped_storage().data_ptr() == self.table for tensor in tensors):
            self.found.add(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["hrm", "trm"])
def test_no_part_of_a_step_goes_through_the_whole_table(make_puzzle_config, tmp_path, kind):
    """Loss, backward, norm, clipping, optimizer, average, zeroing: rows are taken out and put back."""
    config = make_puzzle_config(tmp_path / kind, kind, optim={"clip": 1.0})
    run = open_run(config, ALONE)
    table = run.task.model.puzzles
    before = table.clone()
    queue = StepQueue(run, StopRequest())
    queue.take()
    with Touches(table) as touched:
        queue.take()
    assert touched.found == {"embedding", "index", "index_put_"}
    assert not torch.equal(table, before)
    assert all(state["exp_avg"].shape != table.shape for state in run.optimizer.state.values())
