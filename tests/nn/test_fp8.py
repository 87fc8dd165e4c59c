"""FP8 products: scales that fit what they scale, and the chain of kernels against its equations."""

import importlib.util
import os

import pytest
import torch
from torch import nn

from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn import fp8
from deeploop.nn.fp8 import E4M3, E5M2, GradientScales, Product, block_scales

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_FP8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
CONFIG = {"blocks": 2, "rounds": 3, "width": 64, "heads": 2, "hidden": 96, "vocabulary": 64, "context": 16}
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with FP8, or none")


def needs_triton(test):
    missing = importlib.util.find_spec("triton") is None or not (INTERPRET or torch.cuda.is_available())
    reason = "needs Triton, and a CUDA device or TRITON_INTERPRET=1"
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason=reason)(test))


@pytest.fixture
def right_rounding(monkeypatch):
    """Triton's interpreter loses the carry of 127 → 128 when it casts to FP8: torch's cast in its place."""
    if not INTERPRET:
        return
    from triton.runtime import interpreter

    formats = {"fp8e4nv": E4M3, "fp8e5": E5M2}
    theirs = interpreter._convert_float

    def convert(value, source, target, rounding):
        if source.name == "fp32" and target.name in formats:
            return torch.from_numpy(value.copy()).to(formats[target.name]).view(torch.uint8).numpy()
        return theirs(value, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def looped(**model):
    """A model whose gains differ from one another; its matrices are as they are drawn."""
    gpt = LoopedGPT(GPTConfig(**CONFIG | model), seed=1).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    for parameter in gpt.blocks.parameters():
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
    """What is left of x in FP8."""
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


@pytest.mark.parametrize("kind", ["sandwich", "flat", "prenorm"])
@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_scales_bring_every_operand_near_its_place(kind, factor):
    """Measured on the modules, at matrices as they are drawn and at much larger ones."""
    gpt = looped(block=kind)
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
    (gradients.measure(gpt.run_rounds(x, rotary, None, None)) * weights).sum().backward()
    names = ("attention.branch.v", "attention.branch.o", "mlp.branch.up", "mlp.branch.down")
    places = (fp8.RMS, fp8.RMS, fp8.RMS, fp8.HIDDEN_RMS)
    block = dict(gpt.blocks[0].named_modules())
    for j, (name, place) in enumerate(zip(names, places, strict=True)):
        given = (seen[name] * scales.input[0, j]).square().mean().sqrt()
        assert place / 16 < given < place * 4, name
        matrix = (block[name].weight * scales.weight[0, j]).square().mean().sqrt()
        assert fp8.RMS / 16 < matrix <= fp8.RMS * 1.01, name
        peak = (seen[f"d {name}"] * gradients.scale[0, j, 0]).abs().max()
        assert 2**-6 < peak < 2**15, name
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


@needs_triton
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


@needs_triton
def test_a_compiler_that_spoils_a_copy_is_found(monkeypatch, right_rounding):
    from deeploop.nn.kernels import fp8_stack

    fp8_stack.check_compiler(torch.device(DEVICE))
    cast = fp8_stack.cast_into

    def spoil(x, scale, rows, columns):
        cast(x, scale, rows, columns)
        columns[3, 5] = 7.0

    monkeypatch.setattr(fp8_stack, "cast_into", spoil)
    with pytest.raises(ValueError, match=r"device\.precision=fp8: Triton .* miscompiles casts to FP8"):
        fp8_stack.check_compiler(torch.device(DEVICE))


@needs_triton
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


@needs_triton
def test_norms_and_rotary_write_what_the_products_read(right_rounding):
    """What they write in FP8 is what they write in bf16, cast."""
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


def emulate(gpt, scales, gradient):
    """The modules, whose products are of operands in FP8 at the same scales."""
    for k, block in enumerate(gpt.blocks):
        a, m = block.attention.branch, block.mlp.branch
        for j, layers in enumerate(((a.q, a.k, a.v), (a.o,), (m.gate, m.up), (m.down,))):
            told = scales.input[k, j], scales.weight[k, j], gradient[k, j, 0]
            for layer in layers:
                layer.forward = lambda x, w=layer.weight, told=told: EmulatedLinear.apply(x, w, told)


@needs_triton
@pytest.mark.parametrize(
    ("model", "recompute"),
    [({}, True), ({"block": "flat"}, False), ({"block": "prenorm"}, False), ({"injection": "add"}, False)],
    ids=str,
)
def test_the_chain_is_the_loop_with_fp8_products(model, recompute, monkeypatch, right_rounding):
    from deeploop.nn.kernels import fp8_stack

    kept = []
    make = fp8_stack.prepare
    monkeypatch.setattr(fp8_stack, "prepare", lambda *args: kept.append(args) or make(*args))
    gpt = looped(**model)
    x, weights = inputs()
    inject = None if gpt.injection is None else lambda stream: stream + 1
    options = {"rounds": 3, "recompute": recompute, "inject": inject}
    rotary = gpt.cos, gpt.sin
    y = fp8_stack.run(sublayers(gpt), x, rotary, torch.bfloat16, **options)
    wanted = [x, *gpt.blocks.parameters()]
    ours = torch.autograd.grad((y * weights).sum(), wanted)
    assert len(kept) == 1  # matrices are cast once, for all rounds

    def loop():
        entered = None if inject is None else torch.ones_like(x)
        out = gpt.run_rounds(x, rotary, None, None, None, entered)
        return out, *torch.autograd.grad((out * weights).sum(), wanted)

    exact = loop()
    ((_, scales, gradients),) = kept
    emulate(gpt, scales, gradients.scale)
    for name, a, b, c in zip(
        ("y", "x", *dict(gpt.blocks.named_parameters())), (y, *ours), loop(), exact, strict=True
    ):
        assert a.dtype == c.dtype
        # Rounding to FP8 makes a jump of what differs in the last bit of bf16, and pre-norm passes it on.
        assert (a - b).norm() < 0.8 * (b - c).norm() + 1e-6 * c.norm(), name
        assert (a - c).norm() < 0.25 * c.norm(), name
