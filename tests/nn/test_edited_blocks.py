"""The kernels take a block only as it is written: an edited layer is found by the check, without Triton."""

from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from deeploop.accelerate import install, known
from deeploop.config.run import DeviceConfig
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.models.gpt import Block
from deeploop.models.reasoner import Reasoner, Stack
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape
from deeploop.nn import kernels
from deeploop.nn.context import Context
from deeploop.nn.layers import CausalSelfAttention, RMSNorm, SwiGLU, rotary_table
from deeploop.nn.residual import ScaledResidual
from deeploop.train.distributed import World
from deeploop.train.execution import choose_execution

CONFIG = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=64, context=9)
GPU = SimpleNamespace(type="cuda")


def of_class(module, base, **methods):
    module.__class__ = type(f"My{base.__name__}", (base,), methods)


def lora(attention):
    class LoRALinear(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x

    attention.v = LoRALinear(32, 32, bias=False)


def twice(module, *args):
    return 2 * type(module).forward(module, *args)


def hook(*args):
    return None


BRANCH = "blocks.0.attention.branch"
LOST = "which the Triton kernels do not know"
EDITS = {
    "a subclassed attention": (
        lambda b: of_class(b.attention.branch, CausalSelfAttention),
        f"{BRANCH} is a MyCausalSelfAttention",
    ),
    "a subclassed SwiGLU": (lambda b: of_class(b.mlp.branch, SwiGLU), "blocks.0.mlp.branch is a MySwiGLU"),
    "a subclassed norm": (lambda b: of_class(b.mlp.inner, RMSNorm), "blocks.0.mlp.inner is a MyRMSNorm"),
    "a subclassed QK-norm": (
        lambda b: of_class(b.attention.branch.k_norm, RMSNorm),
        f"{BRANCH}.k_norm is a MyRMSNorm",
    ),
    "a subclassed residual": (
        lambda b: of_class(b.mlp, ScaledResidual),
        "blocks.0.mlp is a MyScaledResidual",
    ),
    "a subclassed block": (lambda b: of_class(b, Block), "blocks.0 is a MyBlock"),
    "an assigned forward": (
        lambda b: setattr(b.attention.branch, "forward", MethodType(twice, b.attention.branch)),
        f"{BRANCH} is a CausalSelfAttention whose forward was replaced",
    ),
    "an assigned forward of a block": (
        lambda b: setattr(b, "forward", MethodType(twice, b)),
        "blocks.0 is a Block whose forward was replaced",
    ),
    "an assigned forward of a Linear": (
        lambda b: setattr(b.mlp.branch.up, "forward", MethodType(twice, b.mlp.branch.up)),
        "blocks.0.mlp.branch.up is a Linear whose forward was replaced",
    ),
    "a hook": (lambda b: b.attention.branch.register_forward_hook(hook), f"{BRANCH} has a hook"),
    "a hook before a Linear": (
        lambda b: b.attention.branch.q.register_forward_pre_hook(hook),
        f"{BRANCH}.q has a hook",
    ),
    "a hook of a backward pass": (
        lambda b: b.mlp.register_full_backward_hook(hook),
        "blocks.0.mlp has a hook",
    ),
    "a hook of a block": (lambda b: b.register_forward_hook(hook), "blocks.0 has a hook"),
    "a LoRA Linear": (lambda b: lora(b.attention.branch), f"{BRANCH}.v is a LoRALinear"),
    "a parametrized weight": (
        lambda b: parametrize.register_parametrization(b.mlp.branch.down, "weight", nn.Identity()),
        "blocks.0.mlp.branch.down is a ParametrizedLinear",
    ),
}


def described(model):
    return choose_execution(DeviceConfig(), World(0, 1, GPU), model).describe()


@pytest.fixture
def model():
    return LoopedGPT(CONFIG)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_layer_is_refused_and_named(edit, model, with_triton):
    change, said = EDITS[edit]
    assert known.obstacle(model.blocks[0], "blocks.0") == ""
    change(model.blocks[0])
    assert known.obstacle(model.blocks[0], "blocks.0") == f"{said}, {LOST}"
    assert not known.fits_block(model.blocks[0])
    assert not known.fits_decoding(model.blocks[0])
    assert not known.fits_rounds(model)
    assert not install.install(model.blocks[0])
    assert known.fits_block(model.blocks[1])
    assert described(model) == f"compiled blocks, bf16 ({said}, {LOST})"


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (CausalSelfAttention, "forward"),
        (CausalSelfAttention, "_rotated"),
        (SwiGLU, "forward"),
        (RMSNorm, "forward"),
        (ScaledResidual, "forward"),
        (Block, "forward"),
        (nn.Linear, "forward"),
    ],
)
def test_a_method_replaced_on_its_class_is_refused(owner, method, model, monkeypatch):
    monkeypatch.setattr(owner, method, lambda self, x, *args: x)
    assert f"is a {owner.__name__} whose {method} was replaced" in known.obstacle(model.blocks[0])


def test_what_does_not_compute_may_be_replaced(model, monkeypatch):
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: None)
    assert known.obstacle(model.blocks[0]) == ""


@pytest.mark.parametrize("method", ["loop", "round", "visit"])
def test_another_loop_is_not_computed_as_ours(method, with_triton):
    other = type("Other", (LoopedGPT,), {method: lambda self, *args: None})(CONFIG)
    assert known.fits_block(other.blocks[0])
    assert not install.install_rounds(other)
    assert install.install_rounds(type("Same", (LoopedGPT,), {})(CONFIG))


def test_another_stack_is_not_computed_as_ours(with_triton):
    reasoner = Reasoner(HRMConfig(width=32, heads=2, hidden=48), PuzzleShape(6, 9, 1))
    assert known.fits_rounds(reasoner)
    of_class(reasoner.stacks["L"], Stack, forward=lambda self, *args: None)
    assert not install.install_rounds(reasoner)


def test_what_was_installed_is_still_known(model, with_triton):
    for _ in range(2):  # a model that is evaluated after it was trained
        choose_execution(DeviceConfig(), World(0, 1, GPU), model).apply(model)
        assert described(model) == "Triton kernels, bf16"


@pytest.fixture
def given():
    torch.manual_seed(0)
    return torch.randn(3, 9, 32), rotary_table(9, 16)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_block_that_is_computed_as_another_is_found_once(wrong, model, given, monkeypatch, with_triton):
    block, calls = model.blocks[0], []

    def run(pairs, x, rotary, narrow, **options):
        calls.append(len(x))
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x, Context(rotary)) + wrong * 0.1

    monkeypatch.setattr(kernels, "stack", SimpleNamespace(run=run), raising=False)
    monkeypatch.setattr(kernels, "fp8_stack", None, raising=False)
    monkeypatch.setattr(install, "_applies", lambda x, *extras: True)
    plain = partial(Block.forward, block)
    assert install.install(block)
    if wrong:
        with pytest.raises(
            RuntimeError, match=r"differ by 0\.\d+, of which rounding to torch.bfloat16 explain"
        ):
            block(given[0], Context(given[1]))
        return
    for _ in range(2):
        block(given[0], Context(given[1]))
    assert calls == [2, 3, 3]  # two sequences are compared, in the first call


@pytest.mark.sample
@pytest.mark.kernels
def test_the_kernels_compute_the_block_that_is_written(model, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = model.to(device).blocks[0]
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim == 2 else None
    x, rotary = torch.randn(3, 9, 32, device=device), (model.cos, model.sin)
    with torch.autocast(device, torch.bfloat16):
        install.check_block(block, x, rotary)
        monkeypatch.setattr(SwiGLU, "forward", lambda self, x: self.down(self.gate(x) * self.up(x)))
        with pytest.raises(RuntimeError, match="compute another block than its modules"):
            install.check_block(block, x, rotary)


@pytest.mark.parametrize("name", ["positions", "begin", "loop", "round"])
def test_a_loop_that_was_overridden_is_left_to_the_modules(with_triton, name):
    """A mask of one's own in `positions`, say, which no kernel would apply."""
    edited = type("Edited", (LoopedGPT,), {name: lambda self, *own, **options: None})
    assert known.has_plain_loop(LoopedGPT(CONFIG))
    assert known.fits_rounds(LoopedGPT(CONFIG))
    assert not known.has_plain_loop(edited(CONFIG))
    assert not known.fits_rounds(edited(CONFIG))
