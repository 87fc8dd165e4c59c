# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"
"""Cross-entropy of logits that are overwritten by their gradient, with two reads and one write of them."""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, which comes with PyTorch for CUDA") from error


@triton.jit
def _cross_entropy(
    X, BIAS, TARGET, LOSS, V: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, GRAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row)
    kept = target >= 0
    # Before the sums, whose barriers part it from the stores below: they overwrite it, from another warp.
    chosen = tl.load(X + row * V + target, mask=kept, other=0.0).to(tl.float32)
    top = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(BIAS + i, mask=i < V, other=0.0).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    if HAS_BIAS:
        chosen += tl.load(BIAS + target, mask=kept, other=0.0).to(tl.float32)
    tl.store(LOSS + row, tl.where(kept, lse - chosen, 0.0))
    if GRAD:
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(X + row * V + i, mask=i < V, other=0.0).to(tl.float32)
            if HAS_BIAS:
                x += tl.load(BIAS + i, mask=i < V, other=0.0).to(tl.float32)
            d = tl.exp(x - lse) - tl.where(i == target, 1.0, 0.0)
            tl.store(X + row * V + i, tl.where(kept, d, 0.0).to(X.dtype.element_ty), mask=i < V)


def cross_entropy_(logits: Tensor, targets: Tensor, bias: Tensor | None, *, grad: bool) -> Tensor:
    """−log softmax(logits + bias)[target] of each row, 0 where the target is below 0; in fp32.

    With `grad` the logits (n, V) are overwritten by the gradient of the sum.
    """
    n, words = logits.shape
    loss = torch.empty(n, dtype=torch.float32, device=logits.device)
    _cross_entropy[(n,)](
        logits,
        bias,
        targets,
        loss,
        V=words,
        BLOCK=4096,
        HAS_BIAS=bias is not None,
        GRAD=grad,
        num_warps=8,
    )
    return loss
