"""The chunked loss equals the plain one in value and gradient, and never holds the logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from deeploop.nn import linear_cross_entropy
from deeploop.nn.loss import token_losses

POSITIONS, WIDTH, WORDS = (3, 7), 5, 11


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*POSITIONS, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(WORDS, POSITIONS, generator=generator)
    targets[0, :2] = -1
    targets[2, 5] = -100
    return x, weight, targets


def some_bias(dtype=torch.float64):
    return torch.randn(WORDS, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def plain(x, weight, targets, bias=0):
    logits = (x @ weight.T + bias).flatten(0, -2)
    kept = targets.flatten() >= 0
    return F.cross_entropy(logits[kept], targets.flatten()[kept], reduction="sum")


@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1000, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_plain_loss(chunk, dtype):
    x, weight, targets = problem(dtype)
    loss, expected = linear_cross_entropy(x, weight, targets, chunk=chunk), plain(x, weight, targets)
    assert loss.dtype == dtype
    assert loss.ndim == 0
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(loss, expected, **tolerance)
    # A factor other than 1 must pass through, as the loop divides by the number of targets.
    grads = torch.autograd.grad(0.3 * loss, (x, weight))
    for grad, plain_grad in zip(grads, torch.autograd.grad(0.3 * expected, (x, weight)), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, plain_grad, **tolerance)


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_the_bias_equals_the_plain_loss(chunk):
    (x, weight, targets), bias = problem(), some_bias()
    loss, expected = linear_cross_entropy(x, weight, targets, bias, chunk=chunk), plain(*problem(), bias)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    expected = plain(x, weight, targets, bias)
    for inputs in ((x, weight, bias), (bias,)):
        grads = torch.autograd.grad(0.3 * loss, inputs, retain_graph=True)
        plain_grads = torch.autograd.grad(0.3 * expected, inputs, retain_graph=True)
        for grad, plain_grad in zip(grads, plain_grads, strict=True):
            torch.testing.assert_close(grad, plain_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [4, None])
def test_weights_multiply_the_losses_of_the_positions(chunk):
    x, weight, targets = problem()
    weights = torch.rand(POSITIONS, dtype=torch.float64).requires_grad_()
    losses = F.cross_entropy((x @ weight.T).movedim(-1, 1), targets.clamp(min=0), reduction="none")
    losses = losses * (targets >= 0)
    torch.testing.assert_close(token_losses(x, weight, targets, chunk=chunk), losses)
    loss, expected = (
        linear_cross_entropy(x, weight, targets, weights=weights, chunk=chunk),
        (losses * weights).sum(),
    )
    torch.testing.assert_close(loss, expected)
    given = (x, weight, weights)
    for ours, theirs in zip(
        *(torch.autograd.grad(one, given) for one in (3 * loss, 3 * expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_bias_alone_can_be_trained():
    (x, weight, targets), bias = problem(), some_bias()
    frozen = x.detach(), weight.detach(), targets, bias
    (grad,) = torch.autograd.grad(linear_cross_entropy(*frozen, chunk=4), bias)
    torch.testing.assert_close(grad, torch.autograd.grad(plain(*frozen), bias)[0])


def test_autocast_keeps_the_bias_exact():
    """-9.87654 in bf16 is -9.875: a log frequency must not be rounded with the products."""
    x, weight, targets = problem(torch.float32)
    bias = torch.full((WORDS,), -9.87654).index_fill_(0, torch.tensor([3]), 0.0).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(torch.zeros_like(x), weight, targets, bias, chunk=4)
    torch.testing.assert_close(loss, plain(torch.zeros_like(x), weight, targets, bias))
    assert torch.autograd.grad(loss, bias)[0].dtype == torch.float32


def test_gradcheck():
    x, weight, targets = problem()
    assert torch.autograd.gradcheck(
        lambda *inputs: linear_cross_entropy(*inputs, targets, chunk=4), (x, weight)
    )


@pytest.mark.parametrize("wanted", [0, 1])
def test_gradient_for_one_input_alone(wanted):
    inputs = problem()
    inputs[1 - wanted].requires_grad_(False)
    (grad,) = torch.autograd.grad(linear_cross_entropy(*inputs, chunk=4), inputs[wanted])
    (expected,) = torch.autograd.grad(plain(*inputs), inputs[wanted])
    torch.testing.assert_close(grad, expected)


def test_all_targets_ignored():
    x, weight, targets = problem()
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, -1), chunk=4)
    grads = torch.autograd.grad(loss, (x, weight))
    assert loss.item() == 0
    assert not any(grad.any() for grad in grads)


def test_autocast_multiplies_in_bf16_and_sums_in_fp32():
    x, weight, targets = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, chunk=4)
    grads = torch.autograd.grad(loss, (x, weight))
    expected = plain(x.bfloat16().float(), weight.bfloat16().float(), targets)
    assert loss.dtype == grads[0].dtype == grads[1].dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0)
    assert loss != expected  # the logits were rounded
    for grad, plain_grad in zip(
        grads, torch.autograd.grad(plain(x, weight, targets), (x, weight)), strict=True
    ):
        torch.testing.assert_close(grad, plain_grad, rtol=0.05, atol=0.05)


def test_chunk_below_one_is_refused():
    with pytest.raises(ValueError, match="chunk=0"):
        linear_cross_entropy(*problem(), chunk=0)


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor an operation makes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.append(tuple(result.shape))
        return result


def wide_problem():
    x = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(1024, 8, requires_grad=True)
    return x, weight, torch.randint(1024, (512,))


def test_the_whole_logits_are_never_held():
    with Shapes() as shapes:
        linear_cross_entropy(*wide_problem(), chunk=32).backward()
    assert max(map(math.prod, shapes.seen)) == 32 * 1024


def test_the_default_chunk_bounds_the_logits(monkeypatch):
    monkeypatch.setattr("deeploop.nn.loss.MAX_LOGITS", 2**16)
    with Shapes() as shapes:
        linear_cross_entropy(*wide_problem())
    assert max(map(math.prod, shapes.seen)) == 2**16


def test_no_gradient_is_made_where_none_is_wanted():
    """no_grad must save the gradients' work, not only drop them."""
    problem = wide_problem()
    with Shapes() as shapes, torch.no_grad():
        linear_cross_entropy(*problem, chunk=32)
    assert (32, 1024) in shapes.seen
    assert (1024, 8) not in shapes.seen  # the weight's gradient
