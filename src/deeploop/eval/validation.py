"""Validation loss over a fixed set of sequences."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deeploop.diagnose.collapse import token_similarity
from deeploop.nn.documents import document_bounds


@dataclass(frozen=True)
class ValidationSum:
    """Sums over this process's sequences; add those of all ranks before dividing."""

    loss: float
    targets: int
    similarity: float


@torch.no_grad()
def validate(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    batch: int,
    device: torch.device | str = "cpu",
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext,
    starts: Tensor | None = None,
    before_batch: Callable[[int], None] = lambda row: None,
) -> ValidationSum:
    """Sum the cross-entropy of `model` in eval mode, and measure the token similarity of the first batch.

    Rows without targets pad a rank's share and do not count. If `starts` (bool, like the inputs) is given,
    documents begin there and are masked from each other. `before_batch` is called with a batch's first row.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    similarity = float("nan")
    for start in range(0, len(inputs), batch):
        before_batch(start)
        x = inputs[start : start + batch].to(device)
        y = targets[start : start + batch].to(device)
        own = (
            {} if starts is None else {"documents": document_bounds(starts[start : start + batch]).to(device)}
        )
        with arithmetic():
            states, loss = model(x, y, **own)
        total += loss
        if start == 0:
            similarity = token_similarity(states[(y >= 0).any(1)])
    model.train(was_training)
    return ValidationSum(total.item(), int((targets >= 0).sum()), similarity)
