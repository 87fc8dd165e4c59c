"""Which blocks run on the Triton kernels (`kernels/`), and when: in bf16 on a GPU, while nobody looks inside.

Everything else runs the modules as they are written, which is also what the kernels are tested against.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from deeploop.nn import fp8
from deeploop.nn.documents import Documents
from deeploop.nn.kernels import on_hopper, products
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, Rotary, SelfAttention, SwiGLU
from deeploop.nn.residual import ScaledResidual
from deeploop.nn.written import difference, is_written
from deeploop.rules import FORM

HAS_TRITON = importlib.util.find_spec("triton") is not None
SMALLEST_HEAD = 16
MOST_ALPHA = 128  # in FP8 without inner norms: a state of size α is cast as it is, and e4m3 ends at 448
_eager = False
_uncompared = WeakSet[nn.Module]()
COMPARED = 2  # sequences of a batch
ROUNDING = 4  # times the error of bf16 autocast, which differs from the kernels' in its order of sums


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


QK_NORMS = "q_norm", "k_norm"
LOOP = "run_rounds", "run_round", "visit"  # of a looped GPT, which a chain of kernels computes
KNOWN_FORMS = frozenset({FORM})  # of a residual rule


def fits(first: ScaledResidual, second: ScaledResidual) -> bool:
    """Whether the kernels of training know these sublayers."""
    return HAS_TRITON and not any(_against_training({"attention": first, "mlp": second}))


def fits_reasoner(mixer: str, head_size: int) -> bool:
    """What `fits` will say of a reasoner's blocks, by their config: memory is planned before they exist."""
    return HAS_TRITON and mixer == "attention" and head_size >= SMALLEST_HEAD


def fits_decoding(block: nn.Module) -> bool:
    """Whether the kernels of decoding know a block: grouped-query attention, biases and any QK-norm too."""
    if not HAS_TRITON or any(_against_block(block)):
        return False
    return isinstance(sublayers(block)[0].branch, CausalSelfAttention)


def fits_block(block: nn.Module) -> bool:
    """Whether the kernels know a block."""
    return HAS_TRITON and not obstacle(block)


def obstacle(block: nn.Module, place: str = "block") -> str:
    """Say what of a block, whose name in its model is `place`, no kernel knows; empty if they know it all.

    Needs no Triton: an edited layer is found on a CPU too.
    """
    against = chain(_against_block(block), _against_training(_named_sublayers(block)))
    where, what = next(against, ("", ""))
    return f"{'.'.join(filter(None, (place, where)))} {what}" if what else ""


Against = Iterator[tuple[str, str]]  # where in a block, and what is there


def _against_block(block: nn.Module) -> Against:
    """Attention, then SwiGLU, and RMSNorm throughout, all of them as they are written."""
    pair = _named_sublayers(block)
    if len(pair) != 2:
        yield "", f"is a {type(block).__name__}, which the Triton kernels do not know"
        return
    if not _is_sharded(block):  # FSDP has a class and hooks of its own, and calls every block by itself
        yield from _against_class(block, "", (), own=_installed(block))
    elif not is_written(block, "forward"):
        yield "", "has another forward, which the Triton kernels do not know"
    yield from _against_form(pair)


def _against_class(
    module: nn.Module, where: str, known: tuple[type, ...], own: Iterable[str] = ()
) -> Against:
    if what := difference(module, known, own=tuple(own)):
        yield where, f"{what}, which the Triton kernels do not know"


def _against_form(pair: dict[str, ScaledResidual]) -> Against:
    branches = (SelfAttention, CausalSelfAttention), (SwiGLU,)
    for (name, sublayer), known in zip(pair.items(), branches, strict=True):
        yield from _against_class(sublayer, name, (ScaledResidual,))
        if sublayer.rule.form not in KNOWN_FORMS:
            yield name, f"has rule={sublayer.rule}, which the Triton kernels do not know"
        yield from _against_class(sublayer.branch, f"{name}.branch", known)
        for part, layer in sublayer.branch.named_children():
            either = (RMSNorm, nn.Identity) if part in QK_NORMS else (nn.Linear,)
            yield from _against_class(layer, f"{name}.branch.{part}", either)
        for side in ("inner", "outer"):
            yield from _against_class(getattr(sublayer, side), f"{name}.{side}", (RMSNorm, nn.Identity))
        if isinstance(sublayer.inner, RMSNorm) and sublayer.inner.weight is None:
            yield f"{name}.inner", "has no gain, which the Triton kernels need"


def _against_training(pair: dict[str, ScaledResidual]) -> Against:
    """That form; as many keys as queries, width / heads numbers each, no bias, where causal our QK-norm."""
    against = list(_against_form(pair))
    yield from against
    if against:
        return
    (name, first), (second_name, second) = pair.items()
    attention: Any = first.branch
    mlp: Any = second.branch
    if attention.head_size < SMALLEST_HEAD:
        text = f"has heads of {attention.head_size}, the Triton kernels need {SMALLEST_HEAD} or more"
        yield f"{name}.branch", text
    if not _is_plain(attention):
        yield (
            f"{name}.branch",
            "has grouped queries, a bias or another QK-norm, which the Triton kernels lack",
        )
    if mlp.down.bias is not None:
        yield f"{second_name}.branch", "has a bias, which the Triton kernels lack"


def _is_plain(attention: SelfAttention) -> bool:
    square = attention.q.weight.shape == attention.k.weight.shape == attention.o.weight.shape
    normal = getattr(attention, "qk_norm", "after-rotary") == "after-rotary"
    return square and normal and attention.q.bias is None


def _is_sharded(block: nn.Module) -> bool:
    return type(block).__bases__[0].__module__.startswith("torch.distributed")


def fits_rounds(model: nn.Module) -> bool:
    """Whether the kernels know a model's loop: blocks they know, run by `run_rounds` or in stacks."""
    stacks = list(_stacks(model))
    blocks = [block for owner in stacks or [model] for block in getattr(owner, "blocks", ())]
    loop = all(map(_is_plain_stack, stacks)) if stacks else all(is_written(model, name) for name in LOOP)
    return loop and all(map(fits_block, blocks))


def _is_plain_stack(stack: nn.Module) -> bool:
    replaced = "forward" in vars(stack) and not _installed(stack)
    return is_written(stack, "forward") and not replaced


def _installed(module: nn.Module) -> tuple[str, ...]:
    """The method of an instance that `install` replaced."""
    forward = getattr(vars(module).get("forward"), "__func__", None)
    ours = isinstance(forward, partial) and forward.func in (_forward, _run_stack)
    return ("forward",) if ours else ()


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
        return "needs a norm before each branch, whose scale follows from it; choose another model.rule"
    if all(map(_ends_in_plain_norm, pair)) and (alpha := max(s.alpha for s in pair)) > MOST_ALPHA:
        return f"needs α of at most {MOST_ALPHA}, this model has {alpha:.4g}; change p or gain of model.rule"
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


def _compare_once(blocks: Iterable[nn.Module], x: Tensor, rotary: Rotary, other: Tensor | None) -> None:
    """Compare the first block with its modules in its first call after `install`."""
    block = next(iter(blocks))
    if block in _uncompared and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        _uncompared.discard(block)
        check_block(block, x if other is None else x + other, rotary)


@torch.no_grad()
def check_block(block: nn.Module, x: Tensor, rotary: Rotary) -> None:
    """Raise where the kernels and the block's modules differ by more than rounding to bf16 explains."""
    from deeploop.nn.kernels import stack  # here there is Triton to import

    device, narrow = x.device.type, torch.get_autocast_dtype(x.device.type)
    cos, sin = (table[:COMPARED] if table.ndim == 4 else table for table in rotary)
    modules = partial(type(block).forward, block, rotary=(cos, sin))
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
    """Lets the block run on the kernels wherever a call is one for them; whether it can."""
    if fits_block(block):
        # Bound, so that a copy of the block runs on its own weights.
        block.forward = MethodType(partial(_forward, low_precision), block)
        _uncompared.add(block)
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
    return [*_named_sublayers(block).values()]


def _named_sublayers(block: nn.Module) -> dict[str, ScaledResidual]:
    return {name: child for name, child in block.named_children() if isinstance(child, ScaledResidual)}


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
        _compare_once(stack.blocks, z, rotary, other)
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

    _compare_once(blocks, x, rotary, other)
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
