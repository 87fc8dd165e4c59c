"""FP8 products: scales that fit what they scale, and the chain of kernels against its equations."""

import math
import os
from collections import Counter
from statistics import fmean

import pytest
import torch
from torch import nn

from deeploop.accelerate import install
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.models.reasoner import Stack
from deeploop.models.reasoner_config import HRMConfig
from deeploop.nn import fp8
from deeploop.nn.context import Context
from deeploop.nn.documents import document_bounds, document_mask, document_positions, documents_of
from deeploop.nn.fp8 import E4M3, E5M2, GradientScales, Product, block_scales
from deeploop.nn.init import init_truncated_
from deeploop.nn.kernels.products import cast_cache
from deeploop.nn.layers import rotary_table
from deeploop.nn.recompute import maybe_checkpoint

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_FP8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
CONFIG = {"blocks": 2, "rounds": 2, "width": 64, "heads": 2, "hidden": 96, "vocabulary": 64, "context": 16}
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with FP8, or none")


def looped(**model):
    """A model whose gains differ from one another; its matrices are as they are drawn."""
    gpt = LoopedGPT(GPTConfig(**CONFIG | model), seed=1).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for part in (gpt.prelude, gpt.blocks, gpt.coda) for p in part.parameters()):
        if parameter.ndim == 1:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return gpt


def sublayers(gpt):
    return [(block.attention, block.mlp) for block in gpt.blocks]


def inputs():
    generator = torch.Generator().manual_seed(3)
    x, weights = (torch.randn(2, 16, 64, generator=generator).to(DEVICE) for _ in range(2))
    return x.requires_grad_(), weights / 1e6


def in_fp8(x, scale, dtype):
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype)


def fake(x, scale, dtype):
    """x rounded to FP8."""
    return in_fp8(x, scale, dtype).float() / scale


def test_a_product_and_its_gradients_are_those_of_the_matrix():
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(s, generator=generator).to(DEVICE) for s in ((32, 48), (64, 48), (32, 64)))
    scales = [torch.tensor(s, device=DEVICE) for s in (4.0, 2.0, 0.5)]
    x8, w8, dy8 = (
        (t * s).to(dtype) for t, s, dtype in zip((x, w, dy), scales, (E4M3, E4M3, E5M2), strict=True)
    )
    inverse = [1 / s for s in scales]
    product = Product(w8, w8.T.contiguous(), inverse[1], scales[0], inverse[0], scales[2], inverse[2])
    results = {
        "forward": (product.forward(x8), x @ w.T),
        "input": (product.input_gradient(dy8), dy @ w),
        "weight": (product.weight_gradient(dy8.T.contiguous(), x8.T.contiguous()), dy.T @ x),
    }
    for ours, exact in results.values():
        assert 1e-3 < (ours - exact).norm() / exact.norm() < 0.08


@pytest.mark.parametrize("kind", ["deeploop", "flat", "prenorm"])
@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_scales_bring_every_operand_near_its_place(kind, factor):
    """Measured on the modules, at matrices as they are drawn and at much larger ones."""
    gpt = looped(rule=kind)
    for parameter in gpt.blocks.parameters():
        parameter.data *= factor if parameter.ndim == 2 else 1
    seen = {}

    def watch(name):
        def see(module, args, out):
            seen.setdefault(name, args[0].detach())
            out.register_hook(lambda gradient: seen.update({f"d {name}": gradient}))

        return see

    for name, module in gpt.blocks[0].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(watch(name))
    x, weights = inputs()
    rotary = gpt.cos, gpt.sin
    scales = block_scales(sublayers(gpt))
    gradients = GradientScales(scales.gradient)
    (gradients.measure(gpt.loop(x, range(gpt.rounds), Context(rotary))) * weights).sum().backward()
    a, m = gpt.blocks[0].attention.branch, gpt.blocks[0].mlp.branch
    groups = (
        ((a.q, a.k, a.v), fp8.RMS),
        ((a.o,), fp8.RMS),
        ((m.gate, m.up), fp8.RMS),
        ((m.down,), fp8.HIDDEN_RMS),
    )
    names = {module: name for name, module in gpt.blocks[0].named_modules()}
    for j, (layers, place) in enumerate(groups):
        sizes = [(layer.weight * scales.weight[0, j]).square().mean().sqrt() for layer in layers]
        assert fp8.RMS * 0.45 < max(sizes) < fp8.RMS * 1.01, j
        for layer in layers:
            name = names[layer]
            given = (seen[name] * scales.input[0, j]).square().mean().sqrt()
            assert place * 0.2 < given < place * 0.7, name
            peak = (seen[f"d {name}"] * gradients.scale[0, j, 0]).abs().max()
            assert 2 < peak < 2**13, name
    assert torch.equal(gradients.scale * gradients.inverse, torch.ones_like(gradients.scale))


def test_zero_matrices_and_gradients_have_finite_scales():
    gpt = looped()
    for layer in (gpt.blocks[0].attention.branch.o, gpt.blocks[0].mlp.branch.down):
        nn.init.zeros_(layer.weight)
    scales = block_scales(sublayers(gpt))
    gradients = GradientScales(scales.gradient)
    x, _ = inputs()
    (gradients.measure(x) * 0).sum().backward()
    for table in (*scales, gradients.scale, gradients.inverse):
        assert table.isfinite().all()
        assert (table > 0).all()


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_same_bytes(ours, theirs):
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def assert_cast(ours, wide, scale, dtype):
    """`ours` is `wide` in FP8, but for a few that another order of sums rounds to a neighbour."""
    theirs = in_fp8(wide, scale, dtype)
    assert ours.dtype == dtype
    assert (ours.view(torch.uint8) != theirs.view(torch.uint8)).float().mean() < 0.01
    assert (ours.float() - theirs.float()).norm() < 0.02 * theirs.float().norm()


@pytest.mark.kernels
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(64, 64), (80, 272), (256, 128)])
def test_a_cast_and_its_transposed_copy(shape, dtype, given, right_rounding):
    """Byte by byte: a compiler that spoils one of them (casts.py says how) is seen here."""
    from deeploop.nn.kernels import casts

    x = draw(*shape, dtype=given)
    x[0, 0], x[1, 2] = 1e6, -1e6  # saturate
    scale = torch.tensor(16.0, device=DEVICE)
    rows = torch.zeros(shape, device=DEVICE).to(dtype)
    whole = torch.zeros(shape[1], shape[0] + 32, device=DEVICE).to(dtype)
    casts.cast_into(x, scale, rows, whole[:, 16:-16])
    expected = in_fp8(x, scale, dtype)
    assert_same_bytes(rows, expected)
    assert_same_bytes(whole[:, 16:-16].contiguous(), expected.T)
    assert not whole[:, :16].float().any()
    assert not whole[:, -16:].float().any()
    assert_same_bytes(casts.transposed(rows), expected.T)


@pytest.mark.kernels
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_compiler_that_spoils_a_copy_is_found(given, monkeypatch, right_rounding):
    from deeploop.nn.kernels import fp8_matrices, fp8_stack

    fp8_stack.check_compiler(torch.device(DEVICE))
    cast = fp8_matrices.cast_into

    def spoil(x, scale, rows, columns):
        cast(x, scale, rows, columns)
        if x.dtype == given:
            columns[3, 5] = 7.0

    monkeypatch.setattr(fp8_matrices, "cast_into", spoil)
    with pytest.raises(ValueError, match=r"device\.precision=fp8: Triton .* miscompiles casts to FP8"):
        fp8_stack.check_compiler(torch.device(DEVICE))


@pytest.mark.kernels
@pytest.mark.parametrize(("n", "hidden"), [(32, 96), (144, 272)])
def test_swiglu_writes_what_the_products_read(n, hidden, right_rounding):
    from deeploop.nn.kernels import swiglu

    sides, dhidden = draw(n, 2 * hidden, dtype=torch.bfloat16), draw(n, hidden, dtype=torch.bfloat16)
    scales = torch.tensor(64.0, device=DEVICE), torch.tensor(8.0, device=DEVICE)
    g, u = sides.float().chunk(2, dim=1)
    s = g.sigmoid()
    hidden_values = g * s * u
    dsides = torch.cat([dhidden * u * s * (1 + g * (1 - s)), dhidden * g * s], dim=1)
    ours = swiglu.swiglu_backward_fp8(sides, dhidden, (E5M2, E4M3), scales)
    assert_same_bytes(ours[1], ours[0].T)
    assert_cast(ours[0], dsides, scales[0], E5M2)
    assert_cast(ours[2].T.contiguous(), hidden_values, scales[1], E4M3)
    assert_cast(swiglu.swiglu(sides, E4M3, scales[1]), hidden_values, scales[1], E4M3)


@pytest.mark.kernels
def test_norms_and_rotary_write_what_the_products_read(right_rounding):
    """Outputs in FP8 are those in bf16, cast."""
    from deeploop.nn.kernels import norms, rotary

    x, f, dy, dh = (draw(2, 16, 64 + i)[..., :64].contiguous() for i in range(4))
    gain, after = draw(64), draw(96)[:64].contiguous()
    told = {"outer": True, "scales": (3.0, 0.5, 1e-5)}
    scale = torch.tensor(16.0, device=DEVICE)
    _, wide, saved = norms.norms_forward(x, f, gain, after, narrow=torch.float32, **told)
    _, narrow, _ = norms.norms_forward(x, f, gain, after, narrow=E4M3, scale=scale, **told)
    assert_cast(narrow, wide, scale, E4M3)
    _, wide, *_ = norms.norms_backward(saved, dy, dh, **told)
    _, narrow, *_ = norms.norms_backward(saved, dy, dh, narrow=E5M2, scale=scale, **told)
    assert_cast(narrow, wide, scale, E5M2)
    gpt = looped()
    packed, q_gain, k_gain = draw(2, 16, 192), draw(32), draw(48)[:32].contiguous()
    saved = packed, gpt.cos, gpt.sin, q_gain, k_gain
    given = [draw(2, 2, 16, 32 + i)[..., :32].contiguous() for i in range(3)]
    wide, *_ = rotary.rotary_backward(saved, *given, 2, 1e-5)
    narrow, *_ = rotary.rotary_backward(saved, *given, 2, 1e-5, E5M2, scale)
    assert_cast(narrow, wide, scale, E5M2)


class EmulatedLinear(torch.autograd.Function):
    """x @ w.T and its gradients, of operands that went through FP8."""

    @staticmethod
    def forward(ctx, x, w, scales):
        x, w = fake(x, scales[0], E4M3), fake(w, scales[1], E4M3)
        ctx.save_for_backward(x, w)
        ctx.scale = scales[2]
        return (x @ w.T).bfloat16().float()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = fake(dy, ctx.scale, E5M2)
        return (dy @ w).bfloat16().float(), dy.flatten(0, -2).T @ x.flatten(0, -2), None


def emulate(pairs, scales, gradients):
    """The modules, whose products are of operands in FP8 at the same scales."""
    for k, (attention, mlp) in enumerate(pairs):
        a, m = attention.branch, mlp.branch
        for j, layers in enumerate(((a.q, a.k, a.v), (a.o,), (m.gate, m.up), (m.down,))):
            told = scales.input[k, j], scales.weight[k, j], gradients.scale[k, j, 0]
            for layer in layers:
                layer.forward = lambda x, w=layer.weight, told=told: EmulatedLinear.apply(x, w, told)


@pytest.fixture
def multiplied(monkeypatch):
    """Counts products by the dtypes of their operands, the scales taken back, result and accumulation."""
    seen = Counter()
    multiply = fp8.multiply

    def count(a, b, a_inverse, b_inverse, dtype, *, fast):
        seen[a.dtype, b.dtype, a_inverse.item(), b_inverse.item(), dtype, fast] += 1
        return multiply(a, b, a_inverse, b_inverse, dtype, fast=fast)

    monkeypatch.setattr(fp8, "multiply", count)
    return seen


def expected_products(scales, gradients, forward, backward):
    """The count from the tables of scales and the visits to every block."""
    tables = scales.input, scales.weight, gradients.scale[..., 0]
    expected = Counter()
    for x, w, dy in zip(*(table.reciprocal().flatten().tolist() for table in tables), strict=True):
        expected[E4M3, E4M3, x, w, torch.bfloat16, True] += forward
        expected[E5M2, E4M3, dy, w, torch.bfloat16, True] += backward
        expected[E5M2, E4M3, dy, x, torch.float32, False] += backward
    return expected


def run_all(gpt, x, rotary, mask):
    """Prelude, rounds with their injection, coda."""
    context = Context(rotary, mask)
    e = gpt.once("prelude", x, context)
    entered = None if gpt.injection is None else gpt.injection.enter(e)
    x = gpt.loop(e, range(gpt.rounds), context, entered)
    return gpt.once("coda", x, context)


def places(gpt, documents):
    """Rotary tables, what keeps documents apart for the kernels, and the same for the modules."""
    if not documents:
        return (gpt.cos, gpt.sin), None, None
    starts = torch.zeros(2, 16, dtype=torch.bool)
    starts[0, 5] = starts[1, 2] = starts[1, 11] = True
    bounds = document_bounds(starts).to(DEVICE)
    at = document_positions(bounds, starts.shape)
    mask = document_mask(bounds, starts.shape, 32, torch.float32)
    return (gpt.cos[at][:, None], gpt.sin[at][:, None]), documents_of(bounds, starts.shape), mask


PARTS = {"prelude": 1, "coda": 1, "injection": "gated"}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("model", "options", "bound"),
    [
        ({}, {"recompute": "round"}, 0.25),
        ({"rule": "flat"}, {}, 0.55),
        pytest.param({"rule": "prenorm", "blocks": 1, "rounds": 1}, {}, 0.5, marks=pytest.mark.sample),
        ({"rule": "prenorm"}, {}, None),
        (PARTS, {}, 0.3),
        ({}, {"documents": True}, 0.3),
        ({}, {"bf16_stream": True}, 0.58),
    ],
    ids=str,
)
def test_the_chain_is_the_loop_with_fp8_products(
    model, options, bound, monkeypatch, multiplied, right_rounding
):
    """`bound`: of the matrices' gradients, how far kernels and emulation are apart on average, relative to
    what FP8 changes. Gradients that are not in FP8 are 0.66 to 0.74 from it. Pre-norm passes differences on
    from visit to visit: after four they are 0.56, too near to be told apart, after one 0.34.
    """
    from deeploop.nn.kernels import fp8_stack, stack

    kept = []
    make = fp8_stack.prepare
    monkeypatch.setattr(fp8_stack, "prepare", lambda *args: kept.append(args) or make(*args))
    monkeypatch.setattr(
        install, "_applies", lambda x, *extras: not install._eager and all(extra is None for extra in extras)
    )
    gpt = looped(**model)
    gpt.recompute = options.get("recompute", "off")
    rotary, documents, mask = places(gpt, "documents" in options)
    if DEVICE == "cpu":  # which has no attention of variable length
        attend = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(stack, "attend_inside", lambda q, k, v, _: attend(q, k, v, attn_mask=mask))
    low_precision = install.LowPrecision(fp8=True, bf16_stream="bf16_stream" in options)
    for block in (*gpt.prelude, *gpt.coda):
        assert install.install(block, low_precision)
    assert install.install_rounds(gpt, low_precision)
    x, weights = inputs()
    parts = (gpt.prelude, gpt.blocks, gpt.coda, gpt.injection)
    named = {n: p for part in parts if part is not None for n, p in part.named_parameters(str(id(part)))}
    wanted = [x, *named.values()]
    y = run_all(gpt, x, rotary, documents)
    ours = torch.autograd.grad((y * weights).sum(), wanted)
    assert len(kept) == 1 + len(gpt.prelude) + len(gpt.coda)  # matrices are cast once, for all rounds
    expected = Counter()
    for pairs, scales, gradients, _ in kept:
        visits = gpt.rounds if len(pairs) == len(gpt.blocks) else 1
        again = visits - 1 if gpt.recompute == "round" else 0
        expected += expected_products(scales, gradients, visits + again, visits)
    assert multiplied == expected

    def loop():
        with install.eager_modules():
            out = run_all(gpt, x, rotary, mask)
        return out, *torch.autograd.grad((out * weights).sum(), wanted)

    exact = loop()
    for told in kept:
        emulate(*told[:3])
    apart, allowed = [], 0.02 if low_precision.bf16_stream else 1e-6  # which the modules do not emulate
    for name, a, b, c in zip(("y", "x", *named), (y, *ours), loop(), exact, strict=True):
        assert a.dtype == c.dtype
        # Rounding to FP8 makes a jump of what differs in the last bit of bf16, and pre-norm passes it on.
        assert (a - b).norm() < 0.8 * (b - c).norm() + allowed * c.norm(), name
        assert (a - c).norm() < 0.25 * c.norm(), name
        if "weight" in name and a.ndim == 2:
            apart.append(((a - b).norm() / (b - c).norm()).item())
    assert bound is None or fmean(apart) < bound


def reasoner_stack(rule, blocks, width=64, hidden=96):
    """Blocks of HRM, x ← N(α·x + f(x)) without a gain, their rotary tables, and an input of two boards."""
    config = HRMConfig(width=width, heads=width // 32, hidden=hidden, low_blocks=blocks, rule=rule)
    stack = Stack(config, "L", 16).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    init_truncated_(list(stack.parameters()), std=width**-0.5, generator=generator)
    pairs = [(block.mixer, block.mlp) for block in stack.blocks]
    rotary = tuple(table.to(DEVICE) for table in rotary_table(16, 32))
    return stack, pairs, rotary, torch.randn(2, 16, width, generator=generator).to(DEVICE)


def by_hand(dy, q, k, v, y, lse):
    """Attention's gradients from its log-sum-exp, of queries that are log₂e times too large."""
    weights = (math.log(2) * q @ k.mT - lse).exp()
    dscores = math.log(2) * weights * (dy @ v.mT - (dy * y).sum(-1, keepdim=True))
    return dscores @ k, dscores.mT @ q, weights.mT @ dy


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("rule", "blocks", "rotates", "bound"),
    [
        ("deeploop", 1, False, 0.55),
        ("postnorm", 2, False, None),
        pytest.param("deeploop", 1, True, 0.55, marks=pytest.mark.sample),
        ("postnorm", 2, True, None),
    ],
)
def test_a_reasoners_chain_is_its_stack_with_fp8_products(
    rule, blocks, rotates, bound, monkeypatch, multiplied, right_rounding
):
    """Of calls with a gradient: post-normalised blocks, attention that sees all. `bound` is as above; with
    α = 1 the last bits of bf16 move so many roundings that only the size of the error can be compared.
    """
    from deeploop.nn.kernels import attention, fp8_stack

    kept = []
    make = fp8_stack.prepare
    monkeypatch.setattr(fp8_stack, "prepare", lambda *args: kept.append(args) or make(*args))
    monkeypatch.setattr(fp8_stack, "_rotates", lambda *given: rotates)
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "attend_backward", by_hand)
    width = 256 if rotates else 64
    stack, pairs, rotary, x = reasoner_stack(rule, blocks, width, 128 if rotates else 96)
    if rotates and DEVICE == "cuda":  # cuDNN's attention needs bf16, of which the interpreter has no product
        x, bound = x.bfloat16(), None  # modules do not emulate a stream in bf16
    x.requires_grad_()
    named = dict(stack.named_parameters())
    wanted, weights = [x, *named.values()], draw(2, 16, width) / 1e6
    y = fp8_stack.run(pairs, x, rotary)
    ours = torch.autograd.grad((y * weights).sum(), wanted)
    (_, scales, gradients, told), *_ = kept
    assert told == rotates
    expected = expected_products(scales, gradients, 1, 1)
    for k in range(blocks if rotates else 0):  # q, k, v are a product with its epilogue
        inverse = scales.input[k, 0].reciprocal().item(), scales.weight[k, 0].reciprocal().item()
        expected[E4M3, E4M3, *inverse, torch.bfloat16, True] -= 1
    assert multiplied == expected
    assert torch.equal(fp8_stack.run(pairs, x, rotary, positions=3), y[:, :3])
    parts = [(x.detach() / 2).requires_grad_() for _ in range(2)]
    added = fp8_stack.run(pairs, parts[0], rotary, parts[1])
    assert torch.equal(added, y)
    assert all(torch.equal(d, ours[0]) for d in torch.autograd.grad((added * weights).sum(), parts))
    recomputed = maybe_checkpoint(fp8_stack.run, pairs, x, rotary, recompute=True)
    for a, b in zip(ours, torch.autograd.grad((recomputed * weights).sum(), wanted), strict=True):
        assert torch.equal(a, b)

    def modules():
        out = stack(x.float(), torch.zeros_like(x), rotary)
        return out, *torch.autograd.grad((out * weights).sum(), wanted)

    exact = modules()
    emulate(*kept[0][:3])
    apart = []
    for name, a, b, c in zip(("y", "x", *named), (y, *ours), modules(), exact, strict=True):
        assert 0.7 * (b - c).norm() < (a - c).norm() < 1.3 * (b - c).norm(), name
        apart.append(((a - b).norm() / (b - c).norm()).item())
    assert bound is None or fmean(apart) < bound


@pytest.mark.kernels
@pytest.mark.parametrize(("positions", "rule"), [(None, "postnorm"), (2, "postnorm"), (None, "deeploop")])
def test_calls_without_a_gradient_have_fp8_products(positions, rule, right_rounding):
    """FP8's error equals that of its emulation; states are rounded before their norm."""
    from deeploop.nn.kernels import forward

    stack, pairs, rotary, x = reasoner_stack(rule, 2, width=256, hidden=128)
    assert all(map(forward.fits, pairs))
    x = x if DEVICE == "cpu" else x.bfloat16()
    narrow = torch.float32 if DEVICE == "cpu" else torch.bfloat16  # the interpreter has no bf16 product
    with torch.no_grad():
        exact = stack(x.float() / 2, x.float() / 2, rotary)[:, :positions]
        with cast_cache():
            found, again = (
                forward.run(pairs, x / 2, x / 2, rotary, narrow, positions, fp8=True) for _ in "12"
            )
        scales = block_scales(pairs)
        emulate(pairs, scales, GradientScales(scales.gradient))
        emulated = stack(x.float() / 2, x.float() / 2, rotary)[:, :positions]
    assert found.shape == exact.shape
    assert torch.equal(found, again)
    changed = (emulated - exact).norm()
    assert 0.003 * exact.norm() < changed
    assert 0.5 * changed < (found - exact).norm() < 1.5 * changed
