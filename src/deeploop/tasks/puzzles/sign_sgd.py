"""Sign-SGD on the embeddings of the puzzles in a batch, the same on all ranks."""

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
    """Sign-SGD on the rows of a table that a batch uses: row ← row·(1 − lr·wd) − lr·sign(g).

    g is the sum of a row's gradients over the batch and all ranks; ids (B,) and gradient (B, width) are this
    rank's. Every rank adds the same numbers in the same order, so the replicas stay identical; a sign would
    amplify any difference. If `only_if` is false, the rows keep their values whatever the gradients are.
    """
    ids, gradient = world.gather_rows(ids), world.gather_rows(gradient)
    # Sum per slot, as finding the distinct rows would synchronize with the host; and as a product with a 0-1
    # matrix, as scattered additions have no fixed order on a GPU.
    same = (ids.unsqueeze(1) == ids).double()  # (B, B)
    # Equal rows of a product may be rounded differently, so all slots with an id take the first one's sum.
    sums = (same @ gradient.double())[same.argmax(1)]
    rows = table[ids]
    moved = rows * (1 - lr * weight_decay) - lr * sums.sign().to(table.dtype)
    table[ids] = moved if only_if is None else torch.where(only_if, moved, rows)
