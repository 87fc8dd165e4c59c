"""The kernels of blocks without a gradient against the published equations in float64.

They run on a GPU; where Triton is installed without one, set TRITON_INTERPRET=1 to run them on the CPU.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deeploop.nn.fp8 import E4M3, in_e4m3
from deeploop.nn.layers import apply_rotary, rotary_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.kernels
EPS = 1e-5
B, T, H, D, HIDDEN = 2, 37, 2, 32, 64
WIDTH = H * D
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no bf16 product
TOLERANCE = 2e-2 if DEVICE == "cuda" else 1e-5


@pytest.fixture
def kernels():
    from deeploop.nn.kernels import attention, epilogues

    # Two columns of tiles in every product, rows that do not fill the last tile, more tiles than programs.
    cut = epilogues.ProductTiles(rows=64 if DEVICE == "cuda" else 16, columns=32, depth=32, stages=2, warps=4)
    return SimpleNamespace(**vars(epilogues), attend=attention.attend, Keys=attention.AttentionTiles, cut=cut)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def state_of(kernels, rows, parts=2):
    return kernels.State(rows, rows.float().square().view(len(rows), parts, -1).sum(-1))


def unit(rows):
    return F.rms_norm(rows.double(), rows.shape[-1:], None, EPS)


def assert_close(found, exact):
    assert found.shape == exact.shape
    assert (found - exact).abs().max() < TOLERANCE * exact.abs().max()


def assert_cast(found, exact, scale):
    """`found` is `exact` times `scale` in FP8: three bits of mantissa, rounded."""
    assert found.dtype == E4M3
    assert (found.double() / scale - exact).abs().max() < 0.07 * exact.abs().max()
    rough = (found.double() / scale - exact).norm() / exact.norm()
    assert 0.01 < rough < 0.04


class Operands:
    """States and matrices in FP8 or not, and what they stand for in float64."""

    def __init__(self, kernels, fp8):
        self.kernels, self.fp8 = kernels, fp8

    def number(self, value):
        return torch.tensor(value, device=DEVICE)

    def state(self, rows):
        state = state_of(self.kernels, rows)
        return state._replace(fp8=in_e4m3(rows)) if self.fp8 else state

    def normalised(self, rows):
        """The input of a product from a state: FP8 rounds it before its norm."""
        read = in_e4m3(rows).double() if self.fp8 else rows.double()
        return read * (rows.double().square().mean(1, keepdim=True) + EPS).rsqrt()

    def matrix(self, w, given=1.0):
        """The matrix of a product whose other operand was multiplied by `given`."""
        if not self.fp8:
            return self.kernels.Matrix(w), w.double()
        rows = in_e4m3(16 * w)
        return self.kernels.Matrix(
            rows, self.number(given), self.number(1 / (16 * given))
        ), rows.double() / 16

    def given(self, y, scale):
        if not self.fp8:
            return y, y.double()
        narrow = in_e4m3(scale * y)
        return narrow, narrow.double() / scale


@pytest.fixture(params=[False, True], ids=["plain", "fp8"])
def operands(kernels, request):
    return Operands(kernels, request.param)


def test_gate_is_swiglu_of_the_norm(kernels, operands, right_rounding):
    rows, gate, up = 3 * normal(B * T, WIDTH), *(normal(HIDDEN, WIDTH, seed=i) / 8 for i in (1, 2))
    (_, wide_gate), (_, wide_up) = (operands.matrix(w) for w in (gate, up))
    both, _ = operands.matrix(kernels.interleaved(gate, up))
    x = operands.normalised(rows)
    exact = F.silu(x @ wide_gate.T) * (x @ wide_up.T)
    state = operands.state(rows)
    assert_close(kernels.gate(state, both, EPS, kernels.cut), exact)
    if operands.fp8:
        found = kernels.gate(state, both, EPS, kernels.cut, scale=operands.number(8.0))
        assert_cast(found, exact, 8)
        return
    as_it_is = kernels.State(x.to(DTYPE), None)
    assert_close(kernels.gate(as_it_is, both, EPS, kernels.cut), exact)


def test_join_is_the_residual_before_its_norm(kernels, operands, right_rounding):
    rows, y, w = 3 * normal(B * T, WIDTH), normal(B * T, HIDDEN, seed=1), normal(WIDTH, HIDDEN, seed=2) / 8
    matrix, wide_w = operands.matrix(w, 4.0)
    y, wide_y = operands.given(y, 4.0)
    found = kernels.join(operands.state(rows), y, matrix, 1.7, EPS, kernels.cut)
    exact = 1.7 * unit(rows) + wide_y @ wide_w.T
    assert_close(found.rows, exact)
    assert found.squares.shape == (B * T, 2)
    assert_close(found.squares.sum(1), exact.square().sum(1))
    if operands.fp8:
        assert_cast(found.fp8, exact, 1)


# Keys that fill the last tile of a sequence and that do not; a tile longer than the sequence.
@pytest.mark.parametrize(("length", "keys"), [(37, 16), (37, 64), (32, 16)])
def test_rotate_and_attend_are_attention_of_the_norm(kernels, operands, length, keys, right_rounding):
    rows = 3 * normal(B * length, WIDTH)
    q, k, v = (normal(WIDTH, WIDTH, seed=i) / 8 for i in (1, 2, 3))
    cos, sin = (table.to(DEVICE) for table in rotary_table(length, D))
    w, _ = operands.matrix(torch.cat((kernels.paired(q, D), kernels.paired(k, D), v)))
    packed = kernels.rotate(operands.state(rows), w, (cos, sin), D, EPS, kernels.cut)
    tiles = kernels.Keys(64 if DEVICE == "cuda" else 16, keys, 2, 4)
    x = operands.normalised(rows)
    heads = [(x @ operands.matrix(m)[1].T).view(B, length, H, D).transpose(1, 2) for m in (q, k, v)]
    heads[:2] = [apply_rotary(part, (cos.double(), sin.double())) for part in heads[:2]]
    exact = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, WIDTH)
    assert_close(packed[:, 2 * WIDTH :], heads[2].transpose(1, 2).reshape(-1, WIDTH))
    assert_close(kernels.attend(packed, length, H, tiles), exact)
    lse = torch.full((B, H, length), float("nan"), device=DEVICE)
    kernels.attend(packed, length, H, tiles, lse=lse)
    assert_close(lse, (heads[0] @ heads[1].mT / D**0.5).logsumexp(-1))
    if operands.fp8:
        assert_cast(kernels.attend(packed, length, H, tiles, scale=operands.number(8.0)), exact, 8)


@pytest.mark.parametrize("size", [32, 64])
def test_the_gradient_of_rotated_heads_goes_back_to_their_product(kernels, size, right_rounding):
    """Of q and k in the order of `rotate`, which multiplies q by a factor; of gradients of any layout."""
    from deeploop.nn.kernels.rotary import paired_backward

    cos, sin = (table.to(DEVICE) for table in rotary_table(T, size))
    together = normal(B, T, 3, H, size)
    given = list(together.permute(2, 0, 3, 1, 4))
    factor, scale = kernels.query_factor(size), 4.0
    more = cos, sin, factor, torch.float8_e5m2, torch.tensor(scale, device=DEVICE)
    rows = paired_backward(*given, *more)
    for layout in (torch.clone, lambda d: d.transpose(1, 2).contiguous().transpose(1, 2)):
        again = paired_backward(*map(layout, given), *more)
        assert torch.equal(again.view(torch.uint8), rows.view(torch.uint8))
    product = torch.zeros(B, T, 3, H, size, dtype=torch.float64, device=DEVICE, requires_grad=True)
    q, k, v = product.permute(2, 0, 3, 1, 4)
    pairs = torch.arange(size, device=DEVICE).view(2, -1).T.flatten()  # which number of a head stands where
    rotary = cos.double(), sin.double()
    outs = factor * apply_rotary(q, rotary)[..., pairs], apply_rotary(k, rotary)[..., pairs], v
    (exact,) = torch.autograd.grad(outs, product, [part.double() for part in given])
    exact = torch.cat((exact[:, :, :2][..., pairs], exact[:, :, 2:]), 2).view(B * T, -1)
    assert 0.01 < (rows.double() / scale - exact).norm() / exact.norm() < 0.08


def test_paired_matrices_can_be_taken_back(kernels):
    w = normal(WIDTH, 8)
    assert not torch.equal(kernels.paired(w, D), w)
    assert torch.equal(kernels.unpaired(kernels.paired(w, D), D), w)


def test_a_backward_pass_that_has_changed_is_left_alone(monkeypatch):
    from deeploop.nn.kernels import attention

    assert attention.has_backward()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not attention.has_backward()
    with monkeypatch.context() as deterministic:
        deterministic.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not attention.has_backward()
    monkeypatch.setattr(attention, "BACKWARD", f"{attention.BACKWARD} another")
    assert not attention.has_backward()


@pytest.mark.gpu
def test_attention_with_a_gradient_is_torchs():
    from deeploop.nn.kernels.attention import attend_with_gradient

    packed = normal(2, 901, 3, 4, 64)
    packed[:, :, 0] *= 0.3
    ours, theirs = (packed.to(dtype).requires_grad_() for dtype in (DTYPE, torch.float64))
    y = attend_with_gradient(*ours.permute(2, 0, 3, 1, 4).unbind())
    exact = F.scaled_dot_product_attention(*theirs.permute(2, 0, 3, 1, 4), scale=math.log(2))
    assert_close(y, exact)
    weights = normal(2, 901, 4, 64, seed=1).transpose(1, 2)
    (found,) = torch.autograd.grad(y, ours, weights)
    (wanted,) = torch.autograd.grad(exact, theirs, weights.double())
    for part in range(3):
        assert (found - wanted)[:, :, part].norm() < 0.01 * wanted[:, :, part].norm()


@pytest.mark.parametrize("beside", [False, True])
def test_added_is_the_norm_and_what_is_beside_it(kernels, beside, right_rounding):
    rows, other = 3 * normal(B * T, WIDTH), normal(B * T, WIDTH, seed=1) if beside else None
    more = 0 if other is None else other.double()
    found = kernels.added(state_of(kernels, rows), other, eps=EPS)
    assert_close(found.rows, unit(rows) + more)
    assert found.squares is found.fp8 is None
    found = kernels.added(kernels.State(rows, None), other, fp8=True)
    assert_close(found.rows, rows.double() + more)
    assert_cast(found.fp8, rows.double() + more, 1)
