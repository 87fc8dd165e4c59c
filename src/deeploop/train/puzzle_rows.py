"""Sign-SGD on the puzzles' vectors: only rows that a batch has touched are read, decayed or moved."""

import torch
from torch import Tensor

from deeploop.train.distributed import World


@torch.no_grad()
def sign_sgd_(
    table: Tensor, ids: Tensor, gradient: Tensor, *, lr: float, weight_decay: float, world: World
) -> None:
    """row ← row·(1 − lr·wd) − lr·sign(g), g the sum of a row's gradients over the batch and all ranks.

    ids (B,), gradient (B, width) of this rank's slots. Every rank adds the same numbers up in the same order,
    so the replicas stay the same: a sign has no small differences.
    """
    ids, gradient = world.gather_rows(ids), world.gather_rows(gradient)
    rows, place = ids.unique(return_inverse=True)
    # A product with a 0-1 matrix, for scattered additions have no fixed order on a GPU.
    owns = (place == torch.arange(len(rows), device=ids.device).unsqueeze(1)).double()  # (rows, B)
    sign = (owns @ gradient.double()).sign().to(table.dtype)
    table[rows] = table[rows] * (1 - lr * weight_decay) - lr * sign
