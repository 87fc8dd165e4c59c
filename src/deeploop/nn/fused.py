"""Which blocks run on the Triton kernels (`kernels/`), and when: in bf16 on a GPU, while nobody looks inside.

Everything else runs the modules as they are written, which is also what the kernels are tested against.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.nn.cache import Cache
from deeploop.nn.layers import RMSNorm, Rotary, SelfAttention, SwiGLU
from deeploop.nn.residual import ScaledResidual

HAS_TRITON = importlib.util.find_spec("triton") is not None
_plain = False


@contextmanager
def eager_modules() -> Iterator[None]:
    """Inside, blocks run as they are written: hooks are called, and gradients can be differentiated again."""
    global _plain
    before, _plain = _plain, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _plain = before


def fits(first: ScaledResidual, second: ScaledResidual) -> bool:
    """Whether the kernels know these sublayers: attention, then SwiGLU, and RMSNorm throughout."""
    norms = [norm for sublayer in (first, second) for norm in (sublayer.inner, sublayer.outer)]
    return (
        HAS_TRITON
        and isinstance(first.branch, SelfAttention)
        and isinstance(second.branch, SwiGLU)
        and all(isinstance(norm, RMSNorm | nn.Identity) for norm in norms)
        and all(norm.weight is not None for norm in (first.inner, second.inner) if isinstance(norm, RMSNorm))
        and first.branch.head_size >= 16
    )


def install(block: nn.Module) -> bool:
    """Lets the block run on the kernels wherever a call is one for them; whether it can."""
    sublayers = _sublayers(block)
    if len(sublayers) != 2 or not fits(*sublayers):
        return False
    # Bound, so that a copy of the block runs on its own weights.
    block.forward = MethodType(_forward, block)
    return True


def install_rounds(model: nn.Module) -> bool:
    """The same for a loop over `blocks` in a method `run_rounds`, which then is one chain; whether it can."""
    blocks = [_sublayers(block) for block in getattr(model, "blocks", ())]
    if not hasattr(model, "run_rounds") or not all(len(pair) == 2 and fits(*pair) for pair in blocks):
        return False
    setattr(model, "run_rounds", MethodType(_run_rounds, model))  # noqa: B010
    return True


def has_rounds(model: nn.Module) -> bool:
    """Whether its loop was given to the kernels."""
    return "run_rounds" in vars(model)


def _sublayers(block: nn.Module) -> list[ScaledResidual]:
    return [child for child in block.children() if isinstance(child, ScaledResidual)]


def _forward(block: nn.Module, x: Tensor, rotary: Rotary, *rest: Any) -> Any:
    # What follows are a mask, a cache and its slot: none of them in training.
    if _wanted(x) and all(item is None for item in rest):
        return _run([block], x, rotary)
    return type(block).forward(block, x, rotary, *rest)


def _run_rounds(model: Any, x: Tensor, rotary: Rotary, mask: Tensor | None, cache: Cache | None) -> Any:
    if _wanted(x) and mask is None and cache is None and model.recompute != "block":
        return _run(model.blocks, x, rotary, rounds=model.rounds, recompute=model.recompute == "round")
    return type(model).run_rounds(model, x, rotary, mask, cache)


def _run(blocks: Iterable[nn.Module], x: Tensor, rotary: Rotary, **options: Any) -> Tensor:
    from deeploop.nn.kernels.stack import run  # here there is Triton to import

    pairs: Any = [tuple(_sublayers(block)) for block in blocks]
    return run(pairs, x, rotary, torch.get_autocast_dtype("cuda"), **options)


def _wanted(x: Tensor) -> bool:
    """Whether this call is one for the kernels: in bf16 on a GPU, and nobody is looking inside."""
    return x.is_cuda and not _plain and torch.is_autocast_enabled("cuda")
