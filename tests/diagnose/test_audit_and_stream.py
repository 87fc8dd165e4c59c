"""Audits find what is wrong and pass what is right; the stream's ratios against a hand-made visit."""

import pytest
import torch

from deeploop.diagnose.audit import audit_alpha, audit_beta, count_visits, problems
from deeploop.diagnose.stream import branch_visits
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.nn.init import InitRule
from deeploop.theory import DEEPLOOP, DEEPNORM, flat_alpha

SHAPE = {"blocks": 2, "rounds": 3, "width": 32, "heads": 2, "hidden": 48, "vocabulary": 30, "context": 8}
TOKENS = torch.arange(16).reshape(2, 8)


@pytest.fixture
def net():
    return LoopedGPT(GPTConfig(**SHAPE))


def test_alpha_is_judged_by_the_depth_that_runs(net):
    def run():
        net(TOKENS)

    assert count_visits({"block": net.blocks[0]}, run) == {"block": 3}
    assert problems(audit_alpha(net, DEEPLOOP, run)) == []
    assert len(problems(audit_alpha(net, DEEPNORM, run))) == 4
    net.set_rounds(5)  # the trained α at another depth
    assert len(problems(audit_alpha(net, DEEPLOOP, run))) == 4
    net.set_rounds(5, recompute_alpha=True)
    assert problems(audit_alpha(net, DEEPLOOP, run)) == []
    net.blocks[1].mlp.alpha = 1.0
    (wrong,) = problems(audit_alpha(net, DEEPLOOP, run))
    assert "blocks.1.mlp" in str(wrong)
    assert str(wrong).startswith("WRONG")


def test_a_flat_alpha_is_judged_by_the_visits_of_each_block():
    net = LoopedGPT(GPTConfig(**SHAPE, rule="flat"))

    def run():
        net(TOKENS)

    assert problems(audit_alpha(net, flat_alpha, run)) == []
    net.set_rounds(5)
    (wrong, *others) = problems(audit_alpha(net, flat_alpha, run))
    assert len(others) == 3
    assert str(wrong).endswith("4.24264, must be 7.07107, which is that of K = 2, R = 5")
    net.set_rounds(5, recompute_alpha=True)
    assert problems(audit_alpha(net, flat_alpha, run)) == []


def test_a_matrix_drawn_without_beta_is_found(net):
    rule: InitRule = net.config.init_rule
    branch = net.blocks[0].mlp.branch
    matrices = {role: (getattr(branch, role).weight, rule.std(role)) for role in ("gate", "up", "down")}
    assert problems(audit_beta(matrices)) == []
    with torch.no_grad():
        branch.up.weight.div_(net.config.scales.beta)
    assert [p.what for p in problems(audit_beta(matrices))] == ["std of up"]


@torch.no_grad()
def test_ratios_of_one_visit_by_hand():
    net = LoopedGPT(GPTConfig(**(SHAPE | {"blocks": 1, "rounds": 1})))
    attention, mlp = branch_visits(net, lambda: net(TOKENS))
    x = net.input_norm(net.embedding(TOKENS))
    block = net.blocks[0]
    f = block.attention.branch(block.attention.inner(x), (net.cos[:8], net.sin[:8]))
    assert attention.name == "blocks.0.attention"
    assert attention.ratio == pytest.approx(
        [float(f.norm() / (net.config.scales.alpha * x.norm()))], rel=1e-4
    )
    common = f.flatten(0, 1).mean(0).square().sum() / f.flatten(0, 1).square().sum(-1).mean()
    assert attention.common == pytest.approx([float(common)], rel=1e-4)
    assert len(mlp.ratio) == len(mlp.similarity) == 1


def test_a_branch_that_writes_one_vector_is_all_common(net):
    class Constant(torch.nn.Module):
        def forward(self, x, *_):
            return torch.ones_like(x), None  # a tuple, as attention in torch returns

    net.blocks[0].mlp.branch = Constant()
    found = {visits.name: visits for visits in branch_visits(net, lambda: net(TOKENS))}
    assert found["blocks.0.mlp"].common == pytest.approx([1.0] * 3)
    assert found["blocks.0.mlp"].ratio == pytest.approx([1 / net.config.scales.alpha] * 3, rel=1e-3)
    assert found["blocks.1.mlp"].common[0] < 0.9
