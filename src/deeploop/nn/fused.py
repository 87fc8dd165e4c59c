"""Which blocks run on the Triton kernels (`kernels/`), and when: in bf16 on a GPU, while nobody looks inside.

Everything else runs the modules as they are written, which is also what the kernels are tested against.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.nn import fp8
from deeploop.nn.documents import Documents
from deeploop.nn.kernels import on_hopper, products
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary, SelfAttention, SwiGLU
from deeploop.nn.residual import ScaledResidual

HAS_TRITON = importlib.util.find_spec("triton") is not None
SMALLEST_HEAD = 16
MOST_ALPHA = 128  # in FP8 without inner norms: a state of size α is cast as it is, and e4m3 ends at 448
_eager = False


@contextmanager
def eager_modules() -> Iterator[None]:
    """Inside, blocks run as they are written: hooks are called, and gradients can be differentiated again."""
    global _eager
    before, _eager = _eager, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _eager = before


# The kernels compute outer(α·x + ε·f(inner(x))). A kind of another form must not be named here.
KNOWN_KINDS = frozenset({"prenorm", "postnorm", "sandwich", "factored", "averaged", "flat"})


def fits(first: ScaledResidual, second: ScaledResidual) -> bool:
    """Whether the kernels of training know these sublayers."""
    attention: Any = first.branch
    mlp: Any = second.branch
    return (
        _fits_form(first, second)
        and attention.head_size >= SMALLEST_HEAD
        and _is_plain(attention)
        and mlp.down.bias is None
    )


def fits_reasoner(mixer: str, head_size: int) -> bool:
    """What `fits` will say of a reasoner's blocks, by their config: memory is planned before they exist."""
    return HAS_TRITON and mixer == "attention" and head_size >= SMALLEST_HEAD


def fits_decoding(block: nn.Module) -> bool:
    """Whether the kernels of decoding know a block: grouped-query attention, biases and any QK-norm too."""
    pair = sublayers(block)
    return len(pair) == 2 and _fits_form(*pair) and isinstance(pair[0].branch, CausalSelfAttention)


def _fits_form(first: ScaledResidual, second: ScaledResidual) -> bool:
    """Attention, then SwiGLU, and RMSNorm throughout."""
    norms = [norm for sublayer in (first, second) for norm in (sublayer.inner, sublayer.outer)]
    return (
        HAS_TRITON
        and {first.kind, second.kind} <= KNOWN_KINDS
        and isinstance(first.branch, SelfAttention)
        and isinstance(second.branch, SwiGLU)
        and all(isinstance(norm, RMSNorm | nn.Identity) for norm in norms)
        and all(norm.weight is not None for norm in (first.inner, second.inner) if isinstance(norm, RMSNorm))
    )


def _is_plain(attention: SelfAttention) -> bool:
    """As many keys as queries, width / heads numbers each, no bias, and where causal our QK-norm."""
    square = attention.q.weight.shape == attention.k.weight.shape == attention.o.weight.shape
    normal = getattr(attention, "qk_norm", "after-rotary") == "after-rotary"
    return square and normal and attention.q.bias is None


def fits_block(block: nn.Module) -> bool:
    """Whether the kernels know a block: two sublayers that they fit."""
    pair = sublayers(block)
    return len(pair) == 2 and fits(*pair)


def fits_rounds(model: nn.Module) -> bool:
    """Whether the kernels know a model's loop: blocks they know, run by `run_rounds` or in stacks."""
    stacks = list(_stacks(model))
    blocks = [block for owner in stacks or [model] for block in getattr(owner, "blocks", ())]
    return (hasattr(model, "run_rounds") or bool(stacks)) and all(map(fits_block, blocks))


def _stacks(model: nn.Module) -> Iterable[nn.Module]:
    """The stacks of blocks that a reasoner calls, each as a whole."""
    return getattr(model, "stacks", nn.ModuleDict()).values()


@dataclass(frozen=True)
class LowPrecision:
    """What training steps have in lower precision than bf16 autocast; evaluations are in bf16 always."""

    fp8: bool = False
    """The blocks' products in FP8."""
    bf16_stream: bool = False
    """The residual stream in bf16 in place of fp32."""


BF16 = LowPrecision()


def against_fp8(block: nn.Module, tokens: int) -> str:
    """Why products of a block that the kernels know, with so many tokens, can't be FP8; empty if they can."""
    pair = sublayers(block)
    if not (all(map(_has_inner_norm, pair)) or all(map(_ends_in_plain_norm, pair))):
        return "needs a norm before each branch, whose scale follows from it; choose another model.block"
    if all(map(_ends_in_plain_norm, pair)) and (alpha := max(s.alpha for s in pair)) > MOST_ALPHA:
        return (
            f"needs α of at most {MOST_ALPHA}, this model has {alpha:.4g}; change model.p or model.flat_gain"
        )
    mlp: Any = pair[1].branch
    for name, size in zip(("hidden", "width"), mlp.gate.weight.shape, strict=True):
        if size % fp8.MULTIPLE:
            return f"model.{name}={size} must be a multiple of {fp8.MULTIPLE}"
    return fp8.against_tokens(tokens)


def _has_inner_norm(sublayer: ScaledResidual) -> bool:
    return isinstance(sublayer.inner, RMSNorm)


def _ends_in_plain_norm(sublayer: ScaledResidual) -> bool:
    """Whether it has no norm but an outer one without a gain: the next branch reads rows of size 1.

    A call's first branch reads a sum of some such states and of the input, which is of their size.
    """
    outer = sublayer.outer
    return isinstance(sublayer.inner, nn.Identity) and isinstance(outer, RMSNorm) and outer.weight is None


def check_fp8_compiler(device: torch.device) -> None:
    """Raises where Triton's compiler does not cast to FP8 as it should."""
    from deeploop.nn.kernels.fp8_stack import check_compiler  # here there is Triton to import

    check_compiler(device)


def install(block: nn.Module, low_precision: LowPrecision = BF16) -> bool:
    """Lets the block run on the kernels wherever a call is one for them; whether it can."""
    if fits_block(block):
        # Bound, so that a copy of the block runs on its own weights.
        block.forward = MethodType(partial(_forward, low_precision), block)
    return fits_block(block)


def install_rounds(model: nn.Module, low_precision: LowPrecision = BF16) -> bool:
    """The same for a model's loop, whose rounds then are one chain; whether it can."""
    if not fits_rounds(model):
        return False
    stacks = list(_stacks(model))
    for stack in stacks:
        stack.forward = MethodType(partial(_run_stack, low_precision), stack)
    name, run = ("forward", _run_segment) if stacks else ("run_rounds", partial(_run_rounds, low_precision))
    setattr(model, name, MethodType(run, model))
    return True


def sublayers(block: nn.Module) -> list[ScaledResidual]:
    """A block's residuals, in their order."""
    return [child for child in block.children() if isinstance(child, ScaledResidual)]


def _forward(low_precision: LowPrecision, block: nn.Module, x: Tensor, rotary: Rotary, *rest: Any) -> Any:
    # What follows are a mask, a cache and its slot: in training documents at most.
    mask, *others = rest or (None,)
    dense, documents = _split_mask(mask)
    if _applies(x, dense, *others):
        return _run_kernels(_in_training(low_precision, block), [block], x, rotary, documents=documents)
    return type(block).forward(block, x, rotary, *rest)


def _run_rounds(
    low_precision: LowPrecision,
    model: Any,
    x: Tensor,
    rotary: Rotary,
    mask: Tensor | Documents | None = None,
    cache: Any = None,
    noise: Tensor | None = None,
    entered: Tensor | None = None,
    indices: range | None = None,
) -> Any:
    # Blocks that are recomputed one by one are called one by one.
    dense, documents = _split_mask(mask)
    if _applies(x, dense, cache, noise) and model.recompute != "block":
        rounds = model.rounds if indices is None else len(indices)
        inject = None if entered is None else partial(_inject, model.injection, entered)
        recompute = model.recompute == "round"
        ends = indices is None or indices.stop == model.rounds
        options = {"rounds": rounds, "recompute": recompute, "ends": ends, "inject": inject}
        low_precision = _in_training(low_precision, model)
        return _run_kernels(low_precision, model.blocks, x, rotary, documents=documents, **options)
    return type(model).run_rounds(model, x, rotary, mask, cache, noise, entered, indices)


def _run_segment(model: Any, *args: Any, **options: Any) -> Any:
    """A reasoner's calls, which share the matrices that were cast for the first of them."""
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
        y = forward.run(pairs, z, other, rotary, torch.bfloat16, positions, fp8=low_precision.fp8)
        return y.to(z.dtype)
    return _run_kernels(low_precision, stack.blocks, z, rotary, other, positions=positions)


def _uses_forward_kernels(x: Tensor) -> bool:
    """Whether the kernels without a backward pass take a call: no gradient, bf16, a GPU they are cut for."""
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
    """The blocks on x + other."""
    from deeploop.nn.kernels import fp8_stack, stack  # here there is Triton to import

    pairs: Any = [tuple(sublayers(block)) for block in blocks]
    stream = x.to(torch.bfloat16) if low_precision.bf16_stream else x
    if low_precision.fp8:
        return fp8_stack.run(pairs, stream, rotary, other, **options).to(x.dtype)
    stream = stream if other is None else stream + other
    return stack.run(pairs, stream, rotary, torch.get_autocast_dtype("cuda"), **options).to(x.dtype)


def _split_mask(mask: Any) -> tuple[Any, Documents | None]:
    """A mask that the kernels do not know, and the documents, which they do."""
    return (None, mask) if isinstance(mask, Documents) else (mask, None)


def _applies(x: Tensor, *extras: object) -> bool:
    """Whether this call is one for the kernels: in bf16 on a GPU, without a mask or a cache, unwatched."""
    unwatched = not _eager and all(extra is None for extra in extras)
    return unwatched and x.is_cuda and torch.is_autocast_enabled("cuda")
