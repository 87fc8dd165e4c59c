"""Find the blocks that the Triton kernels (`nn/kernels/`) support, by class, method and hook.

Needs no Triton and no GPU: an edited layer is found on a CPU too.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from deeploop.nn import fp8
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, SelfAttention, SwiGLU
from deeploop.nn.residual import ScaledResidual
from deeploop.nn.written import difference, is_written
from deeploop.rules import FORM

HAS_TRITON = importlib.util.find_spec("triton") is not None
SMALLEST_HEAD = 16
MOST_POSITIONS = 128  # that an MLP across positions can mix, as one tile holds them all
WHOLE = 64  # its width and hidden width must be multiples of this
MOST_ALPHA = 128  # in FP8 without inner norms, where a state of size α is cast unscaled; e4m3 ends at 448
QK_NORMS = "q_norm", "k_norm"
# Methods of a looped GPT that the kernels of training and decoding replace.
LOOP = "begin", "positions", "document_places", "enter_loop", "loop", "round", "visit", "once"
KNOWN_FORMS = frozenset({FORM})  # of a residual rule


def fits(first: ScaledResidual, second: ScaledResidual) -> bool:
    """Return True if the training kernels support these sublayers."""
    return HAS_TRITON and not any(_against_training({"attention": first, "mlp": second}))


def fits_reasoner(config: Any, positions: int) -> bool:
    """Predict `fits_block` for a reasoner's blocks from their config: memory is planned before they exist."""
    if config.mixer == "mlp":
        return HAS_TRITON and positions <= MOST_POSITIONS and config.width % WHOLE == 0
    return HAS_TRITON and config.head_size >= SMALLEST_HEAD


def runs_mixers(device: torch.device) -> bool:
    """Return True if this GPU is a Hopper, which the kernels of an MLP across positions need."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits_decoding(block: nn.Module) -> bool:
    """Return True if the decoding kernels support a block: also grouped queries, biases and any QK-norm."""
    if not HAS_TRITON or any(_against_block(block)):
        return False
    return isinstance(sublayers(block)[0].branch, CausalSelfAttention)


def fits_block(block: nn.Module) -> bool:
    """Return True if the kernels support a block."""
    return HAS_TRITON and not obstacle(block)


def obstacle(block: nn.Module, place: str = "block") -> str:
    """Name the first part of a block that no kernel supports; empty if all are. `place` is the block's name.

    Needs no Triton: an edited layer is found on a CPU too.
    """
    against = chain(_against_block(block), _against_training(_named_sublayers(block), mixes(block)))
    where, what = next(against, ("", ""))
    return f"{'.'.join(filter(None, (place, where)))} {what}" if what else ""


Against = Iterator[tuple[str, str]]  # where in a block, and what is there


def _against_block(block: nn.Module) -> Against:
    """Require attention, then SwiGLU, and RMSNorm throughout, all of them as written."""
    pair = _named_sublayers(block)
    if len(pair) != 2:
        yield "", f"is a {type(block).__name__}, which the Triton kernels do not know"
        return
    if not _is_sharded(block):  # FSDP has a class and hooks of its own, and calls every block by itself
        yield from _against_class(block, "", (), own=_installed(block))
    elif not is_written(block, "forward"):
        yield "", "has another forward, which the Triton kernels do not know"
    yield from _against_form(pair, mixes(block))


def mixes(block: nn.Module) -> bool:
    """Return True if a block's first sublayer is an MLP across positions."""
    return getattr(block, "across", False)


def _against_class(
    module: nn.Module, where: str, known: tuple[type, ...], own: Iterable[str] = ()
) -> Against:
    if what := difference(module, known, own=tuple(own)):
        yield where, f"{what}, which the Triton kernels do not know"


def _against_form(pair: dict[str, ScaledResidual], mixes: bool = False) -> Against:
    branches = (SwiGLU,) if mixes else (SelfAttention, CausalSelfAttention), (SwiGLU,)
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


def _against_training(pair: dict[str, ScaledResidual], mixes: bool = False) -> Against:
    """Require attention and SwiGLU as above, one key head per query head of width / heads, no bias, our
    QK-norm.
    """
    against = list(_against_form(pair, mixes))
    yield from against
    if against:
        return
    (name, first), (second_name, second) = pair.items()
    attention: Any = first.branch
    mlp: Any = second.branch
    if mixes:
        yield from _against_mixer(name, first, mlp.gate.in_features)
    elif attention.head_size < SMALLEST_HEAD:
        text = f"has heads of {attention.head_size}, the Triton kernels need {SMALLEST_HEAD} or more"
        yield f"{name}.branch", text
    if not (mixes or _is_plain(attention)):
        yield (
            f"{name}.branch",
            "has grouped queries, a bias or another QK-norm, which the Triton kernels lack",
        )
    if mlp.down.bias is not None:
        yield f"{second_name}.branch", "has a bias, which the Triton kernels lack"


def _against_mixer(name: str, sublayer: ScaledResidual, width: int) -> Against:
    """Require an MLP across the positions of a small board, with one outer norm without a gain."""
    swiglu: Any = sublayer.branch
    hidden, positions = swiglu.gate.weight.shape
    if positions > MOST_POSITIONS:
        yield f"{name}.branch", f"mixes {positions} positions, the Triton kernels at most {MOST_POSITIONS}"
    if hidden % WHOLE or width % WHOLE:
        yield f"{name}.branch", f"has sizes that are no multiples of {WHOLE}, which the Triton kernels need"
    plain = _ends_in_plain_norm(sublayer) and sublayer.epsilon == 1 and swiglu.down.bias is None
    if not plain:
        yield name, "has a gain, an inner norm, ε or a bias, which the Triton kernels lack"


def _is_plain(attention: SelfAttention) -> bool:
    square = attention.q.weight.shape == attention.k.weight.shape == attention.o.weight.shape
    normal = getattr(attention, "qk_norm", "after-rotary") == "after-rotary"
    return square and normal and attention.q.bias is None


def _is_sharded(block: nn.Module) -> bool:
    return type(block).__bases__[0].__module__.startswith("torch.distributed")


def fits_rounds(model: nn.Module) -> bool:
    """Return True if the kernels support a model's loop: supported blocks, in rounds or in stacks."""
    own = list(stacks(model))
    blocks = [block for owner in own or [model] for block in getattr(owner, "blocks", ())]
    loop = all(map(_is_plain_stack, own)) if own else has_plain_loop(model)
    return loop and all(map(fits_block, blocks))


def has_plain_loop(model: nn.Module) -> bool:
    """Return True if a looped GPT's loop and its positions are as written here."""
    return all(is_written(model, name) and name not in vars(model) for name in LOOP)


def _is_plain_stack(stack: nn.Module) -> bool:
    replaced = "forward" in vars(stack) and not _installed(stack)
    return is_written(stack, "forward") and not replaced


class Installed(partial[Any]):
    """A `forward` that `install.py` sets on an instance and that replaces its class's own."""


def _installed(module: nn.Module) -> tuple[str, ...]:
    """Return the methods of an instance that `install.py` replaced."""
    forward = vars(module).get("forward")
    return ("forward",) if isinstance(getattr(forward, "__func__", None), Installed) else ()


def stacks(model: nn.Module) -> Iterable[nn.Module]:
    """Return the stacks of blocks that a reasoner calls, each as a whole."""
    return getattr(model, "stacks", nn.ModuleDict()).values()


def against_fp8(block: nn.Module, tokens: int) -> str:
    """Return why a supported block's products can't be FP8 with this number of tokens; empty if they can."""
    pair = sublayers(block)
    if mixes(block):
        return "an MLP across positions has no FP8 products; use bf16"
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
    """Return True if its only norm is an outer one without a gain, so the next branch reads rows of RMS 1.

    A call's first branch reads a sum of such states and of the input, which has their size.
    """
    outer = sublayer.outer
    return isinstance(sublayer.inner, nn.Identity) and isinstance(outer, RMSNorm) and outer.weight is None


def sublayers(block: nn.Module) -> list[ScaledResidual]:
    """Return a block's residuals in order."""
    return [*_named_sublayers(block).values()]


def _named_sublayers(block: nn.Module) -> dict[str, ScaledResidual]:
    return {name: child for name, child in block.named_children() if isinstance(child, ScaledResidual)}
