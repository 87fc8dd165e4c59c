"""The Triton kernels against the plain modules in float64: forward, and every gradient.

They run on a GPU; where Triton is installed without one, set TRITON_INTERPRET=1 to run them on the CPU.
"""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deeploop.nn.layers import apply_rotary, rotary_table

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.kernels
EPS = 1e-5


@pytest.fixture
def kernels(monkeypatch):
    """The functions by name; few programs share the rows of a backward pass, so that each has several."""
    from deeploop.nn.kernels import cross_entropy, norms, products, rotary, swiglu

    monkeypatch.setattr(norms, "PROGRAMS", 10)
    monkeypatch.setattr(rotary, "PROGRAMS", 2)
    monkeypatch.setattr(rotary, "TILE", 64)
    modules = (cross_entropy, norms, products, rotary, swiglu)
    return SimpleNamespace(**{name: thing for module in modules for name, thing in vars(module).items()})


def draws(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]


def assert_agree(outputs, inputs, expected, tolerance=1e-5):
    """Values and gradients, under random weights, against the same of float64 twins."""
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    theirs = expected(*wide)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(y.shape, generator=generator).to(DEVICE) for y in outputs]
    ours = torch.autograd.grad(sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)), inputs)
    exact = torch.autograd.grad(sum((y * w).sum() for y, w in zip(theirs, weights, strict=True)), wide)
    for a, b in zip((*outputs, *ours), (*theirs, *exact), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < tolerance * b.abs().max()


def norm(x, gain=None):
    return F.rms_norm(x, x.shape[-1:], gain, EPS)


# Rows that the programs of a backward pass share evenly and not; widths that fill a block and don't.
@pytest.mark.parametrize("shape", [(2, 10, 64), (1, 37, 48)])
@pytest.mark.parametrize("gain", [True, False])
def test_residual_and_its_norm(kernels, shape, gain):
    x, f = draws(shape, shape)
    g = draws(shape[-1:])[0] if gain else None
    inputs = [x, f, g] if gain else [x, f]
    for readers in ([0, 1], [0], [1]):  # y twice, and one gradient for both, or either alone
        outputs = kernels.residual(x, f, alpha=3.5, gain=g, eps=EPS)
        assert outputs[0].data_ptr() == outputs[1].data_ptr()
        read = [outputs[i] for i in readers]
        assert_agree(read, inputs, lambda x, f, g=None: [norm(3.5 * x + f, g)] * len(read))  # noqa: B023
    assert kernels.residual(x.bfloat16(), f, gain=g, eps=EPS)[1] is None


@pytest.mark.parametrize("shape", [(2, 10, 64), (1, 37, 48)])
@pytest.mark.parametrize("gain", [True, False])
def test_residual_its_norm_and_the_next(kernels, shape, gain):
    x, f, after, g = draws(shape, shape, shape[-1:], shape[-1:])
    outputs = kernels.residual(x, f, alpha=3.5, gain=g if gain else None, after=after, eps=EPS)

    def expected(x, f, after, g=None):
        y = norm(3.5 * x + f, g)
        return y, norm(y, after)

    assert_agree(outputs, [x, f, after, g] if gain else [x, f, after], expected)


def test_residual_without_a_norm_of_its_own(kernels):
    x, f, after = draws((1, 37, 48), (1, 37, 48), (48,))
    outputs = kernels.residual(x, f, epsilon=0.3, outer=False, after=after, eps=EPS)
    assert_agree(outputs, [x, f, after], lambda x, f, after: (x + 0.3 * f, norm(x + 0.3 * f, after)))
    (y,) = kernels.residual(x, f, epsilon=0.3, outer=False, eps=EPS)[:1]
    assert_agree([y], [x, f], lambda x, f: [x + 0.3 * f])


def test_prenorm_adds_up_both_gradients(kernels):
    x, gain = draws((2, 9, 48), (48,))
    y, h = kernels.prenorm(x, gain, EPS, torch.float32)
    assert_agree([y * 1, h], [x, gain], lambda x, g: (x, norm(x, g)))


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "size"), [(2, 16), (3, 32), (5, 48)])
def test_rotary(kernels, heads, size, normed, by_token):
    B, T = 2, 7
    cos, sin = (table.to(DEVICE) for table in rotary_table(T, size))
    if by_token:  # positions of two sequences that start anew at other places
        at = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4]], device=DEVICE)
        cos, sin = cos[at][:, None], sin[at][:, None]
    packed, *gains = draws((B, T, 3 * heads * size), (size,), (size,))
    gains = gains if normed else None
    outputs = kernels.rotary_qkv(packed, cos, sin, heads, gains, EPS)

    def expected(packed, *gains):
        q, k, v = packed.view(B, T, 3, heads, size).permute(2, 0, 3, 1, 4)
        q, k = (apply_rotary(each, (cos.double(), sin.double())) for each in (q, k))
        return (norm(q, gains[0]), norm(k, gains[1]), v) if gains else (q, k, v)

    assert_agree(outputs, [packed, *gains] if normed else [packed], expected)


@pytest.mark.parametrize("hidden", [64, 1030])
def test_swiglu_down(kernels, hidden):
    sides, down = draws((5, 2 * hidden), (16, hidden))
    y = kernels.swiglu_down(sides, kernels.pack([down], dtype=torch.float32)[0], down)
    silu = lambda sides: F.silu(sides[:, :hidden]) * sides[:, hidden:]  # noqa: E731
    assert_agree([y], [sides, down], lambda sides, down: [silu(sides) @ down.T], 1e-4)


def test_packed_linear(kernels):
    x, a, b = draws((6, 16), (8, 16), (24, 16))
    y = kernels.packed_linear(x, kernels.pack([a, b], dtype=torch.float32)[0], a, b)
    assert_agree([y], [x, a, b], lambda x, a, b: [x @ torch.cat([a, b]).T], 1e-4)


@pytest.mark.parametrize("biased", [pytest.param(True, marks=pytest.mark.sample), False])
def test_cross_entropy(kernels, biased):
    logits, bias = draws((9, 5000), (5000,))
    bias = bias if biased else None
    targets = torch.randint(5000, (9,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    targets[3] = -1
    wide = logits.detach().double().requires_grad_()
    shifted = wide if bias is None else wide + bias.detach().double()
    exact = F.cross_entropy(shifted, targets, ignore_index=-1, reduction="none")
    (d,) = torch.autograd.grad(exact.sum(), wide)
    scratch = logits.detach().clone()
    loss = kernels.cross_entropy_(scratch, targets, bias, grad=False)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    assert torch.equal(scratch, logits.detach())
    kernels.cross_entropy_(scratch, targets, bias, grad=True)
    torch.testing.assert_close(scratch.double(), d, rtol=1e-4, atol=1e-7)
