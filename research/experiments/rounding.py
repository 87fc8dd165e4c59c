"""Weights rounded to the nearest of 2^b − 1 evenly spaced values: the plainest quantization."""

import torch
from torch import Tensor, nn


def round_to_nearest(weight: Tensor, bits: int, group: int | None = None) -> Tensor:
    """Round a matrix (out, in) to integers of `bits` bits times a scale, and multiply them out again.

    There is one scale for each output channel, or for each `group` of consecutive inputs of a channel: the
    group's largest magnitude over 2^(bits−1) − 1. Zero stays zero.
    """
    if bits < 2:
        raise ValueError(f"bits={bits}: must be at least 2")
    size = weight.shape[1] if group is None else group
    if size < 1 or weight.shape[1] % size:
        raise ValueError(f"group={size}: must divide the {weight.shape[1]} inputs of the matrix")
    groups = weight.reshape(len(weight), -1, size)
    scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    integers = torch.round(groups / torch.where(scale == 0, 1, scale))
    rounded: Tensor = (integers * scale).reshape(weight.shape)
    return rounded


@torch.no_grad()
def round_matrices_(module: nn.Module, bits: int, group: int | None = None) -> None:
    """Round the weights of all Linear layers inside `module`, in place."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.copy_(round_to_nearest(part.weight, bits, group))
