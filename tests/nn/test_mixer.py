"""The kernels of an MLP across positions against the modules in float64: forward, and every gradient.

They run on a GPU; where Triton is installed without one, set TRITON_INTERPRET=1 to run them on the CPU.
"""

import pytest
import torch

from deeploop.accelerate import known
from deeploop.models.reasoner import Stack
from deeploop.models.reasoner_config import TRMConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no bf16 product
TOLERANCE = 2e-2 if DEVICE == "cuda" else 1e-5
pytestmark = pytest.mark.kernels
B, T, WIDTH = 2, 19, 256
NO_ROTARY = torch.ones(T, 16), torch.zeros(T, 16)


@pytest.fixture(params=["postnorm", "deeploop"])
def made(request):
    """Two blocks, the same in float64, and what enters them."""
    config = TRMConfig(mixer="mlp", width=WIDTH, heads=8, hidden=256, rule=request.param)
    torch.manual_seed(0)
    stack, exact = (Stack(config, "shared", T).to(DEVICE) for _ in range(2))
    exact.load_state_dict(stack.state_dict())
    z, other = (torch.randn(B, T, WIDTH).to(DEVICE, DTYPE) for _ in range(2))
    return stack, exact.double(), z, other


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("positions", [None, 1])
def test_blocks_and_their_gradients_are_the_modules(made, positions):
    from deeploop.nn.kernels import forward
    from deeploop.nn.kernels import stack as chain

    stack, exact, z, other = made
    pairs = [tuple(known.sublayers(block)) for block in stack.blocks]
    x, wide = (z + other).requires_grad_(), (z + other).detach().double().requires_grad_()
    found = chain.run(pairs, x, NO_ROTARY, DTYPE, positions=positions)
    expected = exact(wide, torch.zeros_like(wide), NO_ROTARY, 0, positions)
    dy = torch.randn_like(found)
    found.backward(dy)
    expected.backward(dy.double())
    assert error(found, expected) < TOLERANCE
    assert error(x.grad, wide.grad) < 2 * TOLERANCE
    for (name, p), q in zip(stack.named_parameters(), exact.parameters(), strict=True):
        assert p.grad.shape == p.shape
        assert error(p.grad, q.grad) < 2 * TOLERANCE, name
    assert all(map(forward.fits, pairs))
    alone = forward.run(pairs, z, other, NO_ROTARY, DTYPE, positions)
    assert error(alone, expected.detach()) < TOLERANCE
