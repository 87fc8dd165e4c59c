"""Install the Triton kernels in a built model, for calls in bf16 on a GPU without hooks.

Everything else runs the modules as written. The kernels are tested against these, and the first block is
compared with them in its first call.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from deeploop.accelerate.known import Installed, fits_block, fits_rounds, stacks, sublayers
from deeploop.nn.context import Context
from deeploop.nn.documents import Documents
from deeploop.nn.kernels import on_hopper, products
from deeploop.nn.layers import Rotary

_eager = False
_uncompared = WeakSet[nn.Module]()
COMPARED = 2  # sequences of a batch
ROUNDING = 4  # times the error of bf16 autocast, which differs from the kernels' in its order of sums


@contextmanager
def eager_modules() -> Iterator[None]:
    """Context in which blocks run as written: hooks are called, and double backward works."""
    global _eager
    before, _eager = _eager, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _eager = before


@dataclass(frozen=True)
class LowPrecision:
    """Parts of training steps in lower precision than bf16 autocast; evaluation is always in bf16."""

    fp8: bool = False
    """The blocks' products in FP8."""
    bf16_stream: bool = False
    """The residual stream in bf16 instead of fp32."""


BF16 = LowPrecision()


def check_fp8_compiler(device: torch.device) -> None:
    """Raise if Triton's compiler miscompiles casts to FP8."""
    from deeploop.nn.kernels.fp8_stack import check_compiler  # here there is Triton to import

    check_compiler(device)


def _compare_once(blocks: Iterable[nn.Module], x: Tensor, rotary: Rotary, other: Tensor | None) -> None:
    """Compare the first block with its modules in its first call after `install`."""
    block = next(iter(blocks))
    if block in _uncompared and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        _uncompared.discard(block)
        check_block(block, x if other is None else x + other, rotary)


@torch.no_grad()
def check_block(block: nn.Module, x: Tensor, rotary: Rotary) -> None:
    """Raise if the kernels and the block's modules differ by more than bf16 rounding."""
    from deeploop.nn.kernels import stack  # here there is Triton to import

    device, narrow = x.device.type, torch.get_autocast_dtype(x.device.type)
    cos, sin = (table[:COMPARED] if table.ndim == 4 else table for table in rotary)
    modules = partial(type(block).forward, block, context=Context((cos, sin)))
    x = x.detach()[:COMPARED]
    with torch.autocast(device, enabled=False):
        exact = modules(x=x.to(next(block.parameters()).dtype))
    # Casts that were cached without a gradient would be found by calls with one.
    with torch.autocast(device, narrow, cache_enabled=False):
        rounded = modules(x=x)
    pair: Any = tuple(sublayers(block))
    found = stack.run([pair], x, (cos, sin), narrow)
    error, rounding = ((y.to(exact.dtype) - exact).norm() / exact.norm() for y in (found, rounded))
    if error > ROUNDING * rounding + 1e-3:
        raise RuntimeError(
            f"the Triton kernels compute another block than its modules: they differ by {error:.2g}, of "
            f"which rounding to {narrow} explains {rounding:.2g}; --device.compile on runs the modules"
        )


def install(block: nn.Module, low_precision: LowPrecision = BF16) -> bool:
    """Install the kernels in a block; return True if they support it."""
    if fits_block(block):
        # Bound, so that a copy of the block runs on its own weights.
        block.forward = MethodType(Installed(_forward, low_precision), block)
        _uncompared.add(block)
    return fits_block(block)


def install_rounds(model: Any, low_precision: LowPrecision = BF16) -> bool:
    """Install chains of kernels for a model's rounds or a reasoner's stacks; return True if supported."""
    if not fits_rounds(model):
        return False
    own = list(stacks(model))
    for stack in own:
        stack.forward = MethodType(Installed(_run_stack, low_precision), stack)
    if own:
        model.forward = MethodType(_run_segment, model)
    else:
        model.chain = Rounds(low_precision)
    return True


def _forward(low_precision: LowPrecision, block: nn.Module, x: Tensor, context: Context) -> Any:
    dense, documents = _split_mask(context.mask)  # in training documents at most
    if _applies(x, dense, context.cache):
        low_precision = _in_training(low_precision, block)
        return _run_kernels(low_precision, [block], x, context.rotary, documents=documents)
    return type(block).forward(block, x, context)


@dataclass(frozen=True)
class Rounds:
    """The `chain` of a looped GPT: all rounds, with the injection, as one call of the kernels."""

    low_precision: LowPrecision

    def takes(self, model: Any, context: Context, noise: Tensor | None) -> bool:
        """Return True if the kernels support a call."""
        dense, _ = _split_mask(context.mask)
        # Blocks that are recomputed one by one are called one by one.
        return _applies(context.rotary[0], dense, context.cache, noise) and model.recompute != "block"

    def __call__(
        self, model: Any, x: Tensor, rounds: range, context: Context, entered: Tensor | None
    ) -> Tensor:
        _, documents = _split_mask(context.mask)
        return _run_kernels(
            _in_training(self.low_precision, model),
            model.blocks,
            x,
            context.rotary,
            documents=documents,
            rounds=len(rounds),
            recompute=model.recompute == "round",
            ends=rounds.stop == model.rounds,
            inject=None if entered is None else partial(_inject, model.injection, entered),
        )


def _run_segment(model: Any, *args: Any, **options: Any) -> Any:
    """Run a reasoner's calls with matrices cast once for all of them."""
    with products.cast_cache():
        return type(model).forward(model, *args, **options)


def _run_stack(
    low_precision: LowPrecision,
    stack: Any,
    z: Tensor,
    other: Tensor,
    rotary: Rotary,
    recomputed: int = 0,
    positions: int | None = None,
) -> Any:
    # Blocks that are recomputed one by one are called one by one.
    if not _applies(z) or (recomputed and torch.is_grad_enabled()):
        return type(stack).forward(stack, z, other, rotary, recomputed, positions)
    from deeploop.nn.kernels import forward  # here there is Triton to import

    low_precision = _in_training(low_precision, stack)
    pairs: Any = [tuple(sublayers(block)) for block in stack.blocks]
    if _uses_forward_kernels(z) and all(map(forward.fits, pairs)):
        _compare_once(stack.blocks, z, rotary, other)
        y = forward.run(pairs, z, other, rotary, torch.bfloat16, positions, fp8=low_precision.fp8)
        return y.to(z.dtype)
    return _run_kernels(low_precision, stack.blocks, z, rotary, other, positions=positions)


def _uses_forward_kernels(x: Tensor) -> bool:
    """Return True if the kernels without a backward pass support a call: no gradient, bf16, Hopper."""
    narrow = torch.get_autocast_dtype("cuda") == torch.bfloat16
    return narrow and not torch.is_grad_enabled() and on_hopper(x)


def _inject(injection: nn.Module, entered: Tensor, x: Tensor) -> Tensor:
    out: Tensor = injection(x, entered)
    return out.to(x.dtype)  # a bf16 stream stays one, though what enters is fp32


def _in_training(low_precision: LowPrecision, module: nn.Module) -> LowPrecision:
    return low_precision if module.training else BF16


def _run_kernels(
    low_precision: LowPrecision,
    blocks: Iterable[nn.Module],
    x: Tensor,
    rotary: Rotary,
    other: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Run the blocks on x + other with the kernels."""
    from deeploop.nn.kernels import fp8_stack, stack  # here there is Triton to import

    _compare_once(blocks, x, rotary, other)
    pairs: Any = [tuple(sublayers(block)) for block in blocks]
    stream = x.to(torch.bfloat16) if low_precision.bf16_stream else x
    if low_precision.fp8:
        return fp8_stack.run(pairs, stream, rotary, other, **options).to(x.dtype)
    stream = stream if other is None else stream + other
    return stack.run(pairs, stream, rotary, torch.get_autocast_dtype("cuda"), **options).to(x.dtype)


def _split_mask(mask: Any) -> tuple[Any, Documents | None]:
    """Split a mask into an explicit one, which the kernels do not support, and documents, which they do."""
    return (None, mask) if isinstance(mask, Documents) else (mask, None)


def _applies(x: Tensor, *extras: object) -> bool:
    """Return True if the kernels support this call: bf16 on a GPU, no mask, no cache, no hooks wanted."""
    unwatched = not _eager and all(extra is None for extra in extras)
    return unwatched and x.is_cuda and torch.is_autocast_enabled("cuda")
