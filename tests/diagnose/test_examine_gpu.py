"""The diagnosis on a GPU, of a model whose blocks are compiled: the CPU's numbers."""

import pytest
import torch

from deeploop.diagnose.examine import examine
from deeploop.models import GPTConfig, LoopedGPT

pytestmark = pytest.mark.gpu


def test_a_compiled_model_is_diagnosed_as_on_the_cpu():
    config = GPTConfig(
        blocks=2, rounds=3, width=64, heads=2, hidden=96, vocabulary=200, context=32, rule="deepnorm"
    )
    tokens = torch.randint(200, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = examine(LoopedGPT(config), tokens, tokens.roll(-1, 1))
    model = LoopedGPT(config).cuda()
    for block in model.blocks:
        block.compile()
    with torch.autocast("cuda", torch.bfloat16):
        model(tokens.cuda(), tokens.cuda()).loss.backward()  # compiled once, as in training
    found = examine(model, tokens.cuda(), tokens.roll(-1, 1).cuda())
    assert found["kappa"] == pytest.approx(expected["kappa"], rel=0.02)
    for name, own in expected["sublayers"].items():
        assert found["sublayers"][name]["own_kappa"] == pytest.approx(own["own_kappa"], rel=0.02)
        assert found["stream"][name]["ratio"] == pytest.approx(expected["stream"][name]["ratio"], rel=0.02)
