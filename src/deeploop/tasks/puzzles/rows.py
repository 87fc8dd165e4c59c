"""Sign-SGD on the puzzle embeddings: only the rows in a batch are read, decayed and updated."""

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

    ids (B,) and gradient (B, width) are those of this rank's slots. Every rank adds the same numbers in the
    same order, so the replicas stay identical; a sign would amplify any difference. If `only_if` is false,
    the rows keep their values whatever the gradients are.
    """
    ids, gradient = world.gather_rows(ids), world.gather_rows(gradient)
    # Every slot gets the sum of its row: counting distinct rows would make the host wait. The sums are a
    # product with a 0-1 matrix, as scattered additions have no fixed order on a GPU.
    same = (ids.unsqueeze(1) == ids).double()  # (B, B)
    # The rows of a product may be rounded differently: all slots of one row take the sum of the first.
    sums = (same @ gradient.double())[same.argmax(1)]
    rows = table[ids]
    moved = rows * (1 - lr * weight_decay) - lr * sums.sign().to(table.dtype)
    table[ids] = moved if only_if is None else torch.where(only_if, moved, rows)
