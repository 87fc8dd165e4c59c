"""One gradient per visit in a hierarchy: calls outside the horizon are no visits, the others add up."""

import pytest
import torch

from deeploop.diagnose.visit_grads import flat, residual_sublayers, visit_gradients
from deeploop.models.halting import act_loss
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape, TRMConfig
from deeploop.theory import HORIZONS

SMALL = {"width": 16, "heads": 2, "hidden": 24}
CONFIGS = [HRMConfig(**SMALL, high_blocks=1, low_blocks=2, horizon=h, rule="deeploop") for h in HORIZONS]
CONFIGS += [HRMConfig(**SMALL, high_blocks=1, low_blocks=1), TRMConfig(**SMALL, mixer="mlp", rule="deeploop")]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{type(c).__name__}-{c.horizon}-{c.rule}")
def test_visits_in_the_graph_add_up_to_the_parameters_gradient(config):
    torch.manual_seed(0)
    model = Reasoner(config, PuzzleShape(6, 9, 2), seed=1).double()
    tokens, labels, puzzle = (
        torch.randint(0, 6, (2, 9)),
        torch.randint(1, 6, (2, 9)),
        torch.randn(2, 16).double(),
    )

    def loss():
        return act_loss(model(model.initial(2), tokens, puzzle), labels, None)

    sublayers = residual_sublayers(model)
    found = visit_gradients(sublayers, loss)
    loss().backward()
    assert len(sublayers) == config.schedule.J
    assert sum(len(visits) for visits in found.values()) == config.schedule.M_g
    for sublayer in sublayers:
        whole = flat([model.get_parameter(f"{sublayer.name}.{name}").grad for name in sublayer.parameters])
        module = sublayer.name.split(".")[1]
        assert len(found[sublayer.name]) == config.schedule.R_g_of(module)
        torch.testing.assert_close(found[sublayer.name].sum(0), whole, rtol=1e-9, atol=1e-12)
