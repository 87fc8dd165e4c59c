"""κ_R of every rule against dense Jacobians by plain autograd; also with prelude, coda and injection."""

from functools import partial

import pytest
import torch
from torch.func import functional_call

from deeploop.diagnose.examine import Effort, examine, scaled_sublayers
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.rules import NAMED

EXACT = Effort(iterations=60, tolerance=1e-12, samples=1)
SHAPE = {"blocks": 2, "rounds": 3, "width": 8, "heads": 2, "hidden": 4, "vocabulary": 20, "context": 4}
AROUND = {"prelude": 1, "coda": 1}
LOOPS = {
    "plain": {},
    "add": AROUND | {"injection": "add"},
    "linear": AROUND | {"injection": "linear", "exit_gate": True},
}
NAMES = ("blocks.0.attention", "blocks.1.mlp")
torch.manual_seed(0)
TOKENS, TARGETS = torch.randint(0, 20, (2, 1, 2))


def built(rule, loop):
    net = LoopedGPT(GPTConfig(**SHAPE, rule=rule, **LOOPS[loop]), seed=1).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def visit_maps(net, sublayer, compute):
    """d compute() / d parameters as read at each visit: R dense matrices, row by row."""
    module, forward = sublayer.module, sublayer.module.forward
    own = dict(module.named_parameters())
    copies = [
        {name: own[name].detach().clone().requires_grad_() for name in sublayer.parameters}
        for _ in range(net.rounds)
    ]
    visits = iter(copies)

    def visit(*arguments, **named):
        module.forward = forward
        out = functional_call(module, own | next(visits), arguments, named)
        module.forward = visit
        return out

    module.forward = visit
    try:
        value = compute().reshape(-1)
    finally:
        module.forward = forward
    assert next(visits, None) is None
    leaves = [leaf for copy in copies for leaf in copy.values()]
    rows = [torch.autograd.grad(one, leaves, retain_graph=True) for one in value]
    whole = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    return whole.chunk(net.rounds, dim=1)


@pytest.mark.parametrize(
    ("rule", "loop"), [*((rule, "plain") for rule in NAMED), ("prenorm", "add"), ("deeploop", "linear")]
)
def test_kappa_is_that_of_dense_jacobians(rule, loop):
    """Eq. (kappa-def) from one copy of a sublayer's parameters for each visit."""
    net = built(rule, loop)
    found = examine(net, TOKENS, TARGETS, sublayers=NAMES, effort=EXACT)
    terms, u, g = {}, 0.0, 0.0
    for sublayer in scaled_sublayers(net):
        if sublayer.name not in NAMES:
            continue
        maps = visit_maps(net, sublayer, lambda: net(TOKENS).states)
        updates = visit_maps(net, sublayer, lambda: net(TOKENS, TARGETS).loss / TARGETS.numel())
        norms = [float(torch.linalg.matrix_norm(one, 2)) for one in maps]
        tied = float(torch.linalg.matrix_norm(sum(maps), 2))
        terms[sublayer.name] = tied * float(sum(updates).norm())
        u, g = max(u, *norms), max(g, *(float(one.norm()) for one in updates))
        one = found["sublayers"][sublayer.name]
        close = partial(pytest.approx, rel=1e-5)
        assert one["sensitivity_norms"] == close(norms)
        assert one["sensitivity_sum"] == close(tied)
        assert one["update_norms"] == close([float(update.norm()) for update in updates])
    kappas = {name: term / (net.rounds * u * g) for name, term in terms.items()}
    assert found["kappas"] == pytest.approx(kappas, rel=1e-5)
    assert found["kappa"] == max(found["kappas"].values())
