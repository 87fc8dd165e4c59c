# mypy: disable-error-code="no-untyped-call"
"""The matrices of blocks in FP8, along rows and transposed, and the scales of their operands."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeploop.nn.fp8 import E4M3, Product, Scales, spaced
from deeploop.nn.kernels.casts import cast_into
from deeploop.nn.kernels.epilogues import paired
from deeploop.nn.kernels.products import cached_cast, product_groups
from deeploop.nn.residual import ScaledResidual


class Operand(NamedTuple):
    """A `Product` without the scales of its gradient, which belong to a pass."""

    rows: Tensor
    columns: Tensor
    weight_inverse: Tensor
    scale: Tensor
    inverse: Tensor
    both_inverse: Tensor
    """One over both scales."""

    def product(self, gradient_scale: Tensor, gradient_inverse: Tensor) -> Product:
        return Product(*self[:-1], gradient_scale, gradient_inverse)


@cached_cast
@torch.no_grad()
def fp8_operands(
    blocks: Sequence[tuple[ScaledResidual, ScaledResidual]], scales: Scales, in_pairs: bool
) -> list[list[Operand]]:
    """Return every block's four: qkv, o, gate and up, down. `in_pairs`: rows of q and k as `rotate` takes
    them.
    """
    weight, given = spaced(scales.weight), spaced(scales.input)
    inverses = weight.reciprocal(), given.reciprocal()
    tables = inverses[0], given, inverses[1], inverses[0] * inverses[1]
    found: list[list[Operand]] = []
    for k, pair in enumerate(blocks):
        found.append([])
        for j, layers in enumerate(product_groups(pair)):
            matrices = [layer.weight for layer in layers]
            if in_pairs and j == 0:  # values are not rotated
                size: Any = pair[0].branch.head_size
                matrices[:2] = (paired(matrix, size) for matrix in matrices[:2])
            copies = cast_matrices(matrices, weight[k, j, 0])
            found[-1].append(Operand(*copies, *(table[k, j, 0] for table in tables)))
    return found


def cast_matrices(matrices: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Cast stacked matrices to FP8, along rows and transposed."""
    shape = sum(map(len, matrices)), matrices[0].shape[1]
    rows, columns = (
        torch.empty(size, dtype=E4M3, device=matrices[0].device) for size in (shape, shape[::-1])
    )
    start = 0
    for matrix in matrices:
        end = start + len(matrix)
        cast_into(matrix, scale, rows[start:end], columns[:, start:end])
        start = end
    return rows, columns
