"""The exit gate's two losses against their formulas, over logits that are held whole."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from deeploop.config.loop import GateConfig
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.models.accounting import flops_per_token, parameter_count
from deeploop.models.exit_gate import log_exits

CONFIG = GPTConfig(
    blocks=2, rounds=3, prelude=1, coda=1, injection="add", width=16, heads=2, hidden=24, vocabulary=60,
    context=12, exit_gate=True,
)  # fmt: skip


def build(config=CONFIG):
    model = LoopedGPT(config, seed=3).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.fixture
def batch():
    tokens = torch.randint(60, (3, 10), generator=torch.Generator().manual_seed(2))
    targets = tokens.roll(-1, 1)
    targets[0, :4] = -1
    return tokens, targets


def by_hand(model, tokens, targets):
    """λ_t of every round, and every token's loss there: (rounds, B, T) each."""
    context, _ = model.begin(tokens)
    x, entered = model.enter_loop(tokens, context)
    gates, losses = [], []
    for index in range(model.rounds):
        x = model.round(x, index, context, entered)
        flat = x / x.square().mean(-1, keepdim=True).sqrt()
        gates.append(torch.sigmoid(flat @ model.exit_gate.weight + model.exit_gate.bias))
        states = model.final_norm(model.once("coda", x, context))
        logits = states @ model.embedding.weight.T
        losses.append(
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
        )
    return torch.stack(gates), torch.stack(losses).view(-1, *targets.shape)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("recompute", ["off", "round"])
def test_the_joint_loss_is_that_of_the_exits_less_their_entropy(rounds, recompute, batch):
    model = build(replace(CONFIG, rounds=rounds))
    model.gate_training, model.recompute = GateConfig(entropy=0.3), recompute
    gates, losses = by_hand(model, *batch)
    q, left = [], torch.ones_like(gates[0])
    for t in range(rounds):
        q.append(left if t == rounds - 1 else left * gates[t])
        left = left * (1 - gates[t])
    q = torch.stack(q)
    torch.testing.assert_close(q.sum(0), torch.ones_like(q[0]))
    entropy = -(q * q.log() * (batch[1] >= 0)).sum()
    expected = (q * losses).sum() - 0.3 * entropy
    theirs = gradients(model, expected)
    loss = model(*batch).loss
    torch.testing.assert_close(loss, expected)
    for name, grad in gradients(model, loss).items():
        if "exit_gate" in name and rounds == 1:
            assert not grad.any()  # but there: DDP waits for every gradient
        else:
            torch.testing.assert_close(grad, theirs[name], msg=name)


def test_the_gate_alone_learns_whether_the_next_round_lowers_the_loss(batch):
    model = build()
    model.gate_training = GateConfig(stage="gate-only")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("exit_gate"))
    gates, losses = by_hand(model, *batch)
    kept = batch[1] >= 0
    expected = 0.0
    for t in range(2):
        lowers = losses[t + 1] < losses[t]
        chance = torch.where(lowers, 1 - gates[t], gates[t])
        assert 0.1 < lowers[kept].double().mean() < 0.9
        expected = expected - chance[kept].log().sum() / 2
    theirs = gradients(model, expected)
    loss = model(*batch).loss
    torch.testing.assert_close(loss, expected)
    for name, grad in gradients(model, loss).items():
        torch.testing.assert_close(grad, theirs[name], msg=name)
        assert (grad is None) == (not name.startswith("exit_gate"))


def test_a_gate_says_nothing_outside_of_training(batch):
    model, plain = build(), build(replace(CONFIG, exit_gate=False))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "exit_gate" not in k})
    model.gate_training = GateConfig()
    assert model(*batch).loss != plain(*batch).loss
    assert torch.equal(model.eval()(*batch).loss, plain.eval()(*batch).loss)


def test_exits_of_sure_gates_are_finite():
    far = [torch.tensor([200.0, -200.0])] * 3
    exits = torch.stack(log_exits(far)).exp()
    torch.testing.assert_close(exits, torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]))
    assert all(value.isfinite().all() for value in log_exits(far))


def test_a_gate_starts_undecided_and_is_counted():
    model = LoopedGPT(CONFIG)
    assert not model.exit_logits(torch.randn(2, 3, 16)).any()
    assert parameter_count(CONFIG) == sum(p.numel() for p in model.parameters())
    bare = replace(CONFIG, exit_gate=False)
    per_visit = flops_per_token(replace(bare, coda=2)) - flops_per_token(bare)
    assert flops_per_token(CONFIG) == flops_per_token(bare) + 2 * (per_visit + 6 * 64 * 16)
    with pytest.raises(ValueError, match=r"gate.entropy=-1.0: must be 0 or more"):
        GateConfig(entropy=-1.0)
