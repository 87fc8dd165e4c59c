"""A block on the kernels against the block as it is written: values and gradients, every residual kind."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deeploop.accelerate import install, known
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.models.gpt import Block
from deeploop.models.reasoner import Reasoner, ReasonerBlock, Stack
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape
from deeploop.nn import kernels
from deeploop.nn.context import Context
from deeploop.nn.documents import document_bounds, document_mask, document_positions, documents_of
from deeploop.nn.kernels.products import cached_cast, cast_cache
from deeploop.nn.layers import RMSNorm, SwiGLU, rotary_table
from deeploop.nn.residual import ScaledResidual
from deeploop.rules import RULES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gpt(**model):
    return Block(GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, **model))


def hrm(**model):
    config = HRMConfig(width=32, heads=2, hidden=48, **model)
    block = ReasonerBlock(config, "L", 9)
    return block


BLOCKS = {
    "deeploop": gpt,
    "prenorm": partial(gpt, rule="prenorm"),
    "averaged": partial(gpt, rule="averaged"),
    "factored": partial(gpt, rule="factored"),
    "postnorm": partial(gpt, rule="postnorm"),
    "deeploop without inner norm": partial(gpt, rule="deeploop:inner_norm=off"),
    "flat": partial(gpt, rule="flat"),
    "deeploop without any gain outside": partial(gpt, rule="deeploop:inner_norm=off,outer_gain=off"),
    "hrm": hrm,
    "hrm under deeploop": partial(hrm, rule="deeploop"),
}


def test_every_rule_that_the_kernels_claim_is_tested_against_the_equation():
    assert BLOCKS.keys() >= {rule.name for rule in RULES if rule.form in known.KNOWN_FORMS} - {"deepnorm"}


def test_a_rule_of_a_form_that_the_kernels_do_not_know_is_left_to_the_modules(with_triton):
    block = gpt()
    assert known.fits_block(block)
    block.mlp.rule = replace(block.mlp.rule, form="of tomorrow")
    assert not known.fits_block(block)


def sublayers(block):
    return (block.mixer if isinstance(block, ReasonerBlock) else block.attention), block.mlp


@pytest.mark.kernels
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [pytest.param("deeploop", marks=pytest.mark.sample), *list(BLOCKS)[1:]])
def test_a_fused_block_is_the_block(kind, narrow):
    torch.manual_seed(0)
    block = BLOCKS[kind]().to(DEVICE)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim == 2 else nn.init.uniform_(parameter, 0.5, 1.5)
    assert known.fits(*sublayers(block))
    x = torch.randn(3, 9, 32, device=DEVICE, requires_grad=True)
    weights = torch.randn(3, 9, 32, device=DEVICE)
    rotary = tuple(table.to(DEVICE) for table in rotary_table(9, 16))
    inputs = [x, *block.parameters()]
    exact = torch.autograd.grad((block(x, Context(rotary)) * weights).sum(), inputs)
    from deeploop.nn.kernels.stack import run

    y = run([sublayers(block)], x, rotary, narrow)
    ours = torch.autograd.grad((y * weights).sum(), inputs)
    tolerance = 2e-5 if narrow == torch.float32 else 0.05
    for a, b in zip((y, *ours), (block(x, Context(rotary)), *exact), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() < tolerance * b.norm()


@pytest.mark.kernels
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"rule": "prenorm"},
        {"rule": "deeploop:inner_norm=off"},
        {"rule": "flat"},
        {"injection": "add"},
        {"rule": "flat", "injection": "linear"},
        {"rule": "deeploop:inner_norm=off", "injection": "gated"},
    ],
    ids=str,
)
def test_a_chain_of_rounds_is_the_loop(model, again):
    config = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=64, context=9, **model)
    gpt = LoopedGPT(config).to(DEVICE)
    for parameter in gpt.blocks.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim == 2 else nn.init.uniform_(parameter, 0.5, 1.5)
    from deeploop.nn.kernels.stack import run

    x = torch.randn(3, 9, 32, device=DEVICE, requires_grad=True)
    weights = torch.randn(3, 9, 32, device=DEVICE)
    rotary = gpt.cos, gpt.sin
    inputs, entered, inject = [x, *gpt.blocks.parameters()], None, None
    if gpt.injection is not None:
        entered = torch.randn(3, 9, 32, device=DEVICE, requires_grad=True)
        inject = partial(gpt.injection, entered=entered)
        inputs += [entered, *gpt.injection.parameters()]
    blocks = [sublayers(b) for b in gpt.blocks]
    y = run(blocks, x, rotary, torch.float32, rounds=3, recompute=again, inject=inject)
    ours = torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True)
    expected = gpt.loop(x, range(3), Context(rotary), entered)
    exact = torch.autograd.grad((expected * weights).sum(), inputs, allow_unused=True)
    for a, b in zip((y, *ours), (expected, *exact), strict=True):
        assert (a is None and b is None) or (a - b).norm() < 1e-4 * b.norm()


@pytest.mark.parametrize("positions", [None, 2])
def test_a_stack_calls_its_blocks_on_the_sum_of_both_states(positions):
    stack = Stack(HRMConfig(width=32, heads=2, hidden=48, low_blocks=2), "L", 9)
    z, other, rotary = *torch.randn(2, 3, 9, 32), rotary_table(9, 16)
    first, second = stack.blocks
    expected = second(first(z + other, Context(rotary)), Context(rotary))[:, :positions]
    assert torch.equal(stack(z, other, rotary, 0, positions), expected)
    torch.testing.assert_close(stack(z, other, rotary, 2, positions), expected)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("positions", "heads"), [(None, 4), pytest.param(2, 4, marks=pytest.mark.sample), (None, 8)]
)
def test_a_stack_is_its_blocks(positions, heads):
    """With a gradient, and by the kernels without one; of the last block only what is read."""
    from deeploop.nn.kernels import forward, stack

    # Whole tiles: 256 columns of the width and of gate and up; heads of 32 or 64.
    config = HRMConfig(width=256, heads=heads, hidden=128, low_blocks=2, rule="deeploop")
    plain = Stack(config, "L", 9).to(DEVICE)
    pairs = [sublayers(block) for block in plain.blocks]
    assert all(map(forward.fits, pairs))
    narrow = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    x, other = torch.randn(2, 3, 9, 256, device=DEVICE)
    rotary = tuple(table.to(DEVICE) for table in rotary_table(9, 256 // heads))
    for shift in (0.0, 0.02):  # a second call sees weights that have changed
        with torch.no_grad():
            for parameter in plain.parameters():
                nn.init.normal_(parameter, mean=shift, std=0.06)
        exact = plain(x, other, rotary, 0, positions)
        assert exact.shape == (3, positions or 9, 256)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE != "cpu"):
            rough = plain(x, other, rotary, 0, positions)  # weights with a mean make more of bf16's error
        allowed = 2 * (rough - exact).norm() + 1e-5 * exact.norm()
        stream = 0.0 if DEVICE == "cpu" else 0.005 * exact.norm()  # without a gradient it is bf16 too
        for found, more in (
            (stack.run(pairs, x + other, rotary, narrow, positions=positions), 0.0),
            (forward.run(pairs, x, other, rotary, narrow, positions), stream),
        ):
            assert found.shape == exact.shape
            assert (found - exact).norm() < allowed + more


@pytest.fixture
def entered(monkeypatch):
    """Functions that `install.py` installs run on a CPU too, in Triton's interpreter, as on a Hopper GPU."""
    from deeploop.nn.kernels import forward

    runs = []

    def run(*given, real=forward.run, **how):
        runs.append(given)
        if DEVICE == "cpu":  # the interpreter has no bf16 product
            given = [torch.float32 if each is torch.bfloat16 else each for each in given]
        with torch.autocast("cpu", enabled=False):
            return real(*given, **how)

    monkeypatch.setattr(forward, "run", run)
    if DEVICE == "cpu":
        monkeypatch.setattr(install, "_applies", lambda x, *extras: all(extra is None for extra in extras))
        monkeypatch.setattr(install, "on_hopper", lambda x: True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    return runs


@pytest.mark.kernels
@pytest.mark.parametrize("q_only", [False, True])
def test_a_reasoner_on_the_kernels_is_the_reasoner(entered, q_only):
    length = 100 if DEVICE == "cuda" else 9
    config = HRMConfig(width=256, heads=4, hidden=128, high_blocks=1, low_blocks=2)
    shape = PuzzleShape(6, length, 1)
    model, plain = (Reasoner(config, shape, seed=1).to(DEVICE) for _ in range(2))
    with torch.no_grad():
        for each in (model, plain):
            each.halting.weight.copy_(plain.head.weight[:2])
    assert install.install_rounds(model)
    tokens = torch.randint(6, (3, length), device=DEVICE)
    given = model.initial(3), tokens, torch.zeros(3, 256, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        for grad in (False, True):  # with a gradient the first calls still have none
            with torch.set_grad_enabled(grad):
                ours, theirs = (each(*given, q_only=q_only) for each in (model, plain))
            pairs = (
                *zip(ours.carry, theirs.carry, strict=True),
                (ours.logits, theirs.logits),
                (ours.q, theirs.q),
            )
            for a, b in pairs:
                assert a.shape == b.shape
                assert a.dtype == b.dtype
                assert (a.float() - b.float()).norm() <= 0.1 * b.float().norm()
    assert len(entered) == (6 + 4 if install.on_hopper(tokens) else 0)


@pytest.mark.kernels
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_model_on_the_kernels_is_the_model(entered, precision, right_rounding):
    """By its chain of rounds, and block by block."""
    config = GPTConfig(
        blocks=1, rounds=2, width=32, heads=2, hidden=48, vocabulary=64, context=16, injection="add"
    )
    torch.manual_seed(0)
    plain = LoopedGPT(config).to(DEVICE)
    for parameter in plain.blocks.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim == 2 else None
    chain, single = (copy.deepcopy(plain) for _ in range(2))
    low = install.LowPrecision(fp8=precision == "fp8")
    assert install.install_rounds(chain, low)
    assert all(install.install(block, low) for block in single.blocks)
    tokens = torch.randint(64, (2, 16), device=DEVICE)
    found = []
    for model in (plain, chain, single):
        with torch.autocast(DEVICE, torch.bfloat16):
            states = model(tokens).states
        found.append((states, *torch.autograd.grad(states.pow(3).sum(), list(model.blocks.parameters()))))
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert 0 < (a - b).norm() < (0.5 if low.fp8 else 0.08) * b.norm()


@pytest.mark.parametrize(("capability", "hopper"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_hopper_is_compute_capability_nine(monkeypatch, capability, hopper):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels.on_hopper(SimpleNamespace(is_cuda=True, device="cuda:0")) is hopper
    assert not kernels.on_hopper(torch.zeros(1))


def test_calls_without_a_gradient_on_hopper_have_kernels_of_their_own(monkeypatch, with_triton):
    monkeypatch.setattr(install, "_applies", lambda x, *extras: True)
    monkeypatch.setattr(install, "_run_kernels", lambda *given, **options: "with a backward pass")
    hopper, fits, narrow = [True], [True], [torch.bfloat16]
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: narrow[0])
    monkeypatch.setattr(install, "on_hopper", lambda x: hopper[0])
    run = SimpleNamespace(to=lambda dtype: "without")
    how = []
    kernel = SimpleNamespace(fits=lambda pair: fits[0], run=lambda *given, fp8: how.append(fp8) or run)
    monkeypatch.setattr(kernels, "forward", kernel, raising=False)
    stack, x = Stack(HRMConfig(width=32, heads=2, hidden=48), "L", 9), torch.zeros(2, 9, 32)
    stack.forward = partial(install._run_stack, install.LowPrecision(fp8=True), stack)
    assert stack(x, x, None) == "with a backward pass"
    with torch.no_grad():
        assert stack(x, x, None) == "without"
        assert stack.eval()(x, x, None) == "without"
        assert how == [True, False]  # evaluations are in bf16
        narrow[0] = torch.float16
        assert stack(x, x, None) == "with a backward pass"
        narrow[0], fits[0] = torch.bfloat16, False
        assert stack(x, x, None) == "with a backward pass"
        fits[0], hopper[0] = True, False
        assert stack(x, x, None) == "with a backward pass"


@pytest.mark.kernels
@pytest.mark.parametrize("size", [16, 128])
def test_a_chain_of_rounds_keeps_documents_apart(monkeypatch, size):
    """On a GPU, in bf16, by torch's kernel and, where heads have 128, by ours; else by their equations."""
    width = 2 * size
    config = GPTConfig(blocks=1, rounds=3, width=width, heads=2, hidden=48, vocabulary=64, context=9)
    gpt = LoopedGPT(config).to(DEVICE)
    torch.manual_seed(0)
    for parameter in gpt.blocks.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim == 2 else nn.init.uniform_(parameter, 0.5, 1.5)
    from deeploop.nn.kernels import stack

    starts = torch.zeros(3, 9, dtype=torch.bool)
    starts[0, 4] = starts[2, 1] = starts[2, 6] = True
    bounds = document_bounds(starts).to(DEVICE)
    at = document_positions(bounds, starts.shape)
    rotary = gpt.cos[at][:, None], gpt.sin[at][:, None]
    mask = document_mask(bounds, starts.shape, 16, torch.float32)
    if DEVICE == "cpu":
        masked = partial(F.scaled_dot_product_attention, attn_mask=mask)
        monkeypatch.setattr(stack, "attend_inside", lambda q, k, v, documents: masked(q, k, v))
    narrow = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    x = torch.randn(3, 9, width, device=DEVICE, requires_grad=True)
    weights = torch.randn(3, 9, width, device=DEVICE)
    inputs = [x, *gpt.blocks.parameters()]
    pairs = [sublayers(b) for b in gpt.blocks]
    y = stack.run(pairs, x, rotary, narrow, documents=documents_of(bounds, starts.shape), rounds=3)
    ours = torch.autograd.grad((y * weights).sum(), inputs)
    expected = gpt.loop(x, range(3), Context(rotary, mask))
    exact = torch.autograd.grad((expected * weights).sum(), inputs)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE != "cpu"):
        rounded = gpt.loop(x, range(3), Context(rotary, mask))
    rough = torch.autograd.grad((rounded * weights).sum(), inputs)
    for a, b, c in zip((y, *ours), (expected, *exact), (rounded, *rough), strict=True):
        assert (a - b).norm() < 3 * (c - b).norm() + 1e-4 * b.norm()


def test_what_the_kernels_do_not_know_is_left_alone(monkeypatch, with_triton):
    attention, mlp = sublayers(gpt())
    assert known.fits(attention, mlp)
    assert not known.fits(ScaledResidual(SwiGLU(32, 48), 32, alpha=2.0), mlp)
    assert not known.fits(attention, ScaledResidual(nn.Linear(32, 32), 32, alpha=2.0))
    assert not known.fits(attention, ScaledResidual(SwiGLU(32, 48), 32, alpha=2.0, norm=nn.LayerNorm))
    assert not known.fits(
        attention, ScaledResidual(SwiGLU(32, 48), 32, alpha=2.0, norm=partial(RMSNorm, gain=False))
    )
    monkeypatch.setattr(known, "HAS_TRITON", False)
    assert not known.fits(attention, mlp)


@pytest.mark.parametrize(
    "changes",
    [{"kv_heads": 1}, {"head_width": 32}, {"qk_norm": "none"}, {"attention_bias": "qkv"}, {"mlp_bias": True}],
)
def test_shapes_of_pretrained_models_are_left_to_the_modules(with_triton, changes):
    shape = {"blocks": 1, "width": 32, "heads": 2, "hidden": 48, "vocabulary": 64, "context": 8}
    assert known.fits_block(LoopedGPT(GPTConfig(**shape)).blocks[0])
    assert not known.fits_block(LoopedGPT(GPTConfig(**shape | changes)).blocks[0])


def test_installed_blocks_are_themselves_where_the_kernels_have_no_part(with_triton):
    """On a CPU nothing changes, and a copy computes with its own weights."""
    block, plain = gpt(), gpt()
    plain.load_state_dict(block.state_dict())
    assert install.install(block)
    x, rotary = torch.randn(2, 9, 32), rotary_table(9, 16)
    given = x, Context(rotary)
    assert torch.equal(block(*given), plain(*given))
    twin = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    assert torch.equal(twin(*given), plain(*given))
    assert not torch.equal(block(*given), plain(*given))


def test_a_loop_is_installed_where_all_its_blocks_are_known(with_triton):
    config = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=64, context=9)
    model, plain = LoopedGPT(config), LoopedGPT(config)
    assert install.install_rounds(model)
    tokens = torch.randint(64, (2, 9))
    assert torch.equal(model(tokens).states, plain(tokens).states)
    assert not install.install_rounds(nn.Linear(2, 2))
    assert not install.install_rounds(LoopedGPT(replace(config, heads=16)))  # heads of 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 4},
        {"mixer": "mlp"},
        {"mixer": "mlp", "width": 64},
        {"rule": "flat"},
        {"rule": "deeploop"},
    ],
    ids=str,
)
def test_a_reasoners_config_says_whether_its_blocks_are_known(monkeypatch, changes):
    for has_triton in (True, False):
        monkeypatch.setattr(known, "HAS_TRITON", has_triton)
        config = HRMConfig(**{"width": 32, "heads": 2, "hidden": 48} | changes)
        block = ReasonerBlock(config, "L", 9)
        assert known.fits_block(block) == known.fits_reasoner(config, 9)
    assert known.SMALLEST_HEAD == 16  # so that heads of 8 and 16 lie on both sides


def test_a_reasoners_stacks_are_installed_and_left_to_the_modules_on_a_cpu(with_triton):
    shape = PuzzleShape(vocabulary=6, length=9, puzzle_ids=1)
    model, plain = (Reasoner(HRMConfig(width=32, heads=2, hidden=48), shape) for _ in range(2))
    assert install.install_rounds(model)
    assert all("forward" in vars(own) for own in (model, *model.stacks.values()))
    given = model.initial(2), torch.randint(6, (2, 9)), torch.zeros(2, 32)
    for q_only in (False, True):
        ours, theirs = (m(*given, q_only=q_only) for m in (model, plain))
        assert torch.equal(ours.q, theirs.q)
        assert torch.equal(ours.logits, theirs.logits)
    across = Reasoner(HRMConfig(width=32, heads=2, hidden=48, mixer="mlp"), shape)
    assert not install.install_rounds(across)


def test_weights_are_cast_once_inside_a_cache():
    made = []

    @cached_cast
    def make(blocks, dtype=torch.float32):
        made.append([block.weight.to(dtype) for block in blocks])
        return made[-1]

    blocks = nn.Linear(2, 2), nn.Linear(2, 2)
    with cast_cache():
        first = make(list(blocks))
        assert make(list(blocks)) is make(list(blocks)) is first
        others = (
            make(list(blocks[:1])),
            make(list(blocks), torch.float64),
            make(list(blocks), dtype=torch.half),
        )
        assert all(other is not first for other in others)
        with cast_cache():
            assert make(list(blocks)) is first
        assert make(list(blocks)) is first
    with cast_cache():  # after an optimizer's step, say
        assert make(list(blocks)) is not first
    assert make(list(blocks)) is not make(list(blocks))
    assert len(made) == 7


def test_a_reasoners_calls_share_a_cache(with_triton):
    model = Reasoner(HRMConfig(width=32, heads=2, hidden=48), PuzzleShape(6, 9, 1))
    assert install.install_rounds(model)
    make = cached_cast(lambda blocks: object())
    seen = []
    for stack in model.stacks.values():
        stack.register_forward_pre_hook(lambda own, _: seen.append(make(list(own.blocks))))
    for _ in range(2):
        model(model.initial(2), torch.randint(6, (2, 9)), torch.zeros(2, 32))
    assert len(seen) == 2 * 6  # two cycles of two calls of L and one of H
    assert len(set(seen)) == 2 * 2  # segments, modules


def test_nobody_who_looks_inside_meets_the_kernels(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    x = SimpleNamespace(is_cuda=True)
    assert install._applies(x)
    with install.eager_modules():
        assert not install._applies(x)
        with install.eager_modules():
            pass
        assert not install._applies(x)
    assert install._applies(x)


def test_only_training_steps_are_in_low_precision(monkeypatch, with_triton):
    monkeypatch.setattr(install, "_applies", lambda x, *extras: True)
    monkeypatch.setattr(install, "_run_kernels", lambda how, *args, **options: how)
    config = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=64, context=9)
    model, fp8 = LoopedGPT(config), install.LowPrecision(fp8=True)
    install.install_rounds(model, fp8)
    install.install(model.blocks[0], fp8)
    rotary = rotary_table(9, 16)
    for training, how in ((True, fp8), (False, install.BF16)):
        model.train(training)
        assert model.loop(None, range(3), Context(rotary)) == how
        assert model.blocks[0](None, Context(rotary)) == how


def test_the_kernels_take_calls_that_are_for_them(monkeypatch, with_triton):
    """In a block and in a loop; what has a mask of its own or a cache is left to the modules."""
    monkeypatch.setattr(install, "_applies", lambda x, *extras: all(extra is None for extra in extras))
    monkeypatch.setattr(
        install, "_run_kernels", lambda how, blocks, x, rotary, **options: (list(blocks), options)
    )
    block, x, rotary = gpt(), torch.randn(2, 9, 32), rotary_table(9, 16)
    plain = block(x, Context(rotary))
    assert install.install(block)
    assert block(x, Context(rotary)) == ([block], {"documents": None})
    documents = documents_of(torch.tensor([0, 4, 9], dtype=torch.int32), torch.Size((1, 9)))
    assert block(x, Context(rotary, documents)) == ([block], {"documents": documents})
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(block(x, Context(rotary, mask)), plain)

    config = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=64, context=9)
    model = LoopedGPT(config)
    assert install.install_rounds(model)
    model.recompute = "round"

    def run(model, rounds=range(3), mask=None, entered=None):
        return model.loop(x, rounds, Context(rotary, mask), entered)

    blocks, options = run(model)
    assert blocks == list(model.blocks)
    assert options == {"documents": None, "rounds": 3, "recompute": True, "ends": True, "inject": None}
    injected = LoopedGPT(replace(config, injection="add"))
    assert install.install_rounds(injected)
    _, options = run(injected, range(1, 3), entered=2 * x)
    assert (options["rounds"], options["ends"]) == (2, True)
    assert run(injected, range(1), entered=2 * x)[1]["ends"] is False
    torch.testing.assert_close(options["inject"](x), 3 * x)
    assert options["inject"](x.bfloat16()).dtype == torch.bfloat16
    assert run(model, mask=documents)[1]["documents"] is documents
    assert isinstance(run(model, mask=mask), torch.Tensor)
    model.recompute = "block"  # each visit by itself
    assert isinstance(run(model), torch.Tensor)
