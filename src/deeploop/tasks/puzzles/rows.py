"""Sign-SGD on the puzzles' vectors: only rows that a batch has touched are read, decayed or moved."""

import torch
from torch import Tensor

from deeploop.train.distributed import World


@torch.no_grad()
def sign_sgd_(
    table: Tensor,
    ids: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    weight_decay: float,
    world: World,
    only_if: Tensor | None = None,
) -> None:
    """row ← row·(1 − lr·wd) − lr·sign(g), g the sum of a row's gradients over the batch and all ranks.

    ids (B,), gradient (B, width) of this rank's slots. Every rank adds the same numbers up in the same order,
    so the replicas stay the same: a sign has no small differences. With `only_if` the rows keep their values
    where that is false, whatever the gradients are.
    """
    ids, gradient = world.gather_rows(ids), world.gather_rows(gradient)
    # Every slot has the sum of its row, for the host would have to wait to know how many rows there are. By
    # a product with a 0-1 matrix: scattered additions have no fixed order on a GPU.
    same = (ids.unsqueeze(1) == ids).double()  # (B, B)
    # A product may round its rows differently: slots of one row all take the sum of the first of them.
    sums = (same @ gradient.double())[same.argmax(1)]
    rows = table[ids]
    moved = rows * (1 - lr * weight_decay) - lr * sums.sign().to(table.dtype)
    table[ids] = moved if only_if is None else torch.where(only_if, moved, rows)
