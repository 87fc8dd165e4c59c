"""HRM and TRM: published sizes, the recurrence against one written out, what is in the graph, α and β."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from deeploop.models.reasoner import Carry, Reasoner, swiglu_hidden
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape, TRMConfig
from deeploop.nn.residual import ScaledResidual
from deeploop.theory import HORIZONS

SMALL = {"width": 16, "heads": 2, "hidden": 24}
SHAPE = PuzzleShape(vocabulary=6, length=9, puzzle_ids=5)


def batch(rows=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 6, (rows, 9), generator=draw), torch.randn(rows, 16, generator=draw)


def run(model, rows=3):
    tokens, puzzle = batch(rows)
    return model(model.initial(rows), tokens, puzzle)


@pytest.mark.parametrize(
    ("config", "shape", "count"),
    [
        (HRMConfig(), PuzzleShape(12, 900, 1), 27_276_290),
        (HRMConfig(), PuzzleShape(11, 81, 1), 27_275_266),
        (TRMConfig(), PuzzleShape(12, 900, 1), 6_829_058),
    ],
    ids=["hrm-arc", "hrm-sudoku", "trm-arc"],
)
def test_published_parameter_counts(config, shape, count):
    with torch.device("meta"):
        model = Reasoner(config, shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model.positions == config.puzzle_positions + shape.length
    assert swiglu_hidden(config.width) == config.hidden


@pytest.mark.parametrize("ids", [[-1, 2], [0, 5]])
def test_a_puzzle_that_the_table_does_not_have_is_refused(ids):
    model = Reasoner(HRMConfig(**SMALL), SHAPE)
    with pytest.raises(ValueError, match=rf"puzzle ids {ids[0]} to {ids[1]}: the model has 0 to 4"):
        model.puzzle_rows(torch.tensor(ids))


def block_runs(model):
    """Count the runs of each module's first block, in total and in the graph."""
    runs = {name: [0, 0] for name in model.stacks}
    handles = [
        stack.blocks[0].register_forward_hook(
            lambda module, args, out, own=runs[name]: own.__setitem__(
                slice(None), [own[0] + 1, own[1] + out.requires_grad]
            )
        )
        for name, stack in model.stacks.items()
    ]
    run(model)
    for handle in handles:
        handle.remove()
    return {name: tuple(own) for name, own in runs.items()}


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        (HRMConfig(**SMALL), {"L": (4, 1), "H": (2, 1)}),
        (HRMConfig(**SMALL, horizon="last_cycle"), {"L": (4, 2), "H": (2, 1)}),
        (HRMConfig(**SMALL, horizon="full"), {"L": (4, 4), "H": (2, 2)}),
        (TRMConfig(**SMALL, low_cycles=6), {"shared": (21, 7)}),
        (TRMConfig(**SMALL, low_cycles=4), {"shared": (15, 5)}),
    ],
)
def test_blocks_run_as_often_as_the_schedule_says(config, runs):
    assert block_runs(Reasoner(config, SHAPE)) == runs
    for module, counts in runs.items():
        assert (config.schedule.R_of(module), config.schedule.R_g_of(module)) == counts


@pytest.mark.parametrize("mixer", ["attention", "mlp"])
@pytest.mark.parametrize("kind", [HRMConfig, TRMConfig])
def test_asked_for_q_alone_it_gives_the_same_q_and_no_answer(kind, mixer):
    model = Reasoner(kind(**SMALL, mixer=mixer), SHAPE)
    torch.nn.init.normal_(model.halting.weight)
    tokens, puzzle = batch()
    whole, found = (model(model.initial(3), tokens, puzzle, q_only=only) for only in (False, True))
    assert torch.equal(found.q, whole.q)
    assert torch.equal(found.carry.low, whole.carry.low)
    assert torch.equal(found.carry.high, whole.carry.high[:, :1])
    assert found.logits.shape == (3, 0, 6)


@pytest.mark.parametrize("kind", [HRMConfig, TRMConfig])
def test_values_do_not_depend_on_the_horizon_but_gradients_do(kind):
    gradients = set()
    first = None
    for horizon in HORIZONS:
        model = Reasoner(kind(**SMALL, horizon=horizon), SHAPE, seed=1)
        segment = run(model)
        first = first or segment
        assert torch.equal(segment.logits, first.logits)
        assert torch.equal(segment.q, first.q)
        assert all(torch.equal(a, b) for a, b in zip(segment.carry, first.carry, strict=True))
        segment.logits.square().mean().backward()
        assert all(
            parameter.grad is not None for name, parameter in model.named_parameters() if name[:4] != "halt"
        )
        gradients.add(float(model.embedding.weight.grad.norm()))
    assert len(gradients) == len(HORIZONS)


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def written_out(model, tokens, puzzle):
    """HRM with attention, by the published formulas: no module of this package but its weights."""
    alphas = {name: model.config.scales_of(name).alpha for name in "HL"}
    weights = model.state_dict()

    def turn(x):  # rotate-half, base 10000
        T, D = x.shape[-2:]
        angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    def block(x, at, alpha):
        w = {name: weights[f"{at}.{name}.weight"] for name in [f"mixer.branch.{n}" for n in "qkvo"]}
        w |= {n: weights[f"{at}.mlp.branch.{n}.weight"] for n in ("gate", "up", "down")}
        q, k, v = ((x @ w[f"mixer.branch.{n}"].T).unflatten(-1, (2, 8)).transpose(1, 2) for n in "qkv")
        mixed = (turn(q) @ turn(k).transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ v
        x = norm(alpha * x + mixed.transpose(1, 2).flatten(2) @ w["mixer.branch.o"].T)
        return norm(alpha * x + (F.silu(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T)

    def module(name, x):
        for index in range(model.config.blocks_of[name]):
            x = block(x, f"stacks.{name}.blocks.{index}", alphas[name])
        return x

    x = 4 * torch.cat([puzzle[:, None], weights["embedding.weight"][tokens]], 1)  # √16
    z_H, z_L = weights["initial_high"], weights["initial_low"]
    for _ in range(model.config.cycles):
        for _ in range(model.config.low_cycles):
            z_L = module("L", z_L + z_H + x)
        z_H = module("H", z_H + z_L)
    return z_H[:, 1:] @ weights["head.weight"].T, F.linear(
        z_H[:, 0], weights["halting.weight"], weights["halting.bias"]
    )


@pytest.mark.parametrize("rule", [{}, {"rule": "deeploop"}, {"rule": "flat", "horizon": "full"}], ids=str)
def test_a_segment_is_the_published_recurrence(rule):
    model = Reasoner(
        HRMConfig(**SMALL, high_blocks=1, low_blocks=2, cycles=2, low_cycles=3, **rule), SHAPE
    ).double()
    torch.nn.init.normal_(model.halting.weight)
    tokens, puzzle = batch()
    with torch.no_grad():
        found = model(model.initial(3), tokens, puzzle.double())
        logits, q = written_out(model, tokens, puzzle.double())
    torch.testing.assert_close(found.logits, logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.q, q, rtol=1e-5, atol=1e-6)


def test_the_carry_goes_on_where_it_was_and_has_no_graph():
    model = Reasoner(HRMConfig(**SMALL), SHAPE)
    tokens, puzzle = batch()
    once = run(model)
    assert not any(state.requires_grad for state in once.carry)
    twice = model(once.carry, tokens, puzzle)
    assert not torch.allclose(once.logits, twice.logits)


def test_trm_over_the_sequence_mixes_and_normalises_along_it():
    model = Reasoner(TRMConfig(**SMALL, mixer="mlp", puzzle_positions=2), SHAPE)
    block = model.stacks["shared"].blocks[0]
    x = torch.randn(3, 11, 16)
    mixed = norm((x + block.mixer.branch(x.transpose(1, 2)).transpose(1, 2)).transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(block(x, None), block.mlp(mixed))
    assert block.mixer.branch.gate.weight.shape == (swiglu_hidden(11), 11)


def test_puzzle_positions_hold_the_vector_then_zeros():
    model = Reasoner(TRMConfig(**SMALL, puzzle_positions=4), SHAPE)
    tokens, puzzle = batch()
    read = []
    with model.stacks["shared"].register_forward_pre_hook(lambda _, given: read.append(given[1])):
        model(Carry(*(torch.zeros_like(state) for state in model.initial(3))), tokens, puzzle)
    x = read[0]  # of the first call, after states of zeros
    assert x.shape == (3, 13, 16)
    assert torch.equal(x[:, 0], 4 * puzzle)
    assert x[:, 1:4].abs().max() == 0
    assert run(model).logits.shape == (3, 9, 6)


def test_init_is_total_and_repeatable():
    config = HRMConfig(**SMALL, rule="deeploop")
    model = Reasoner(config, SHAPE, seed=4)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan)
    model.init_weights(4)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
    assert (model.halting.weight.abs().max(), model.halting.bias.unique()) == (0, torch.tensor([-5.0]))
    assert model.puzzles.abs().max() == 0


def test_beta_reaches_value_output_and_feed_forward_alone():
    plain, scaled = (
        Reasoner(HRMConfig(**SMALL, rule=rule), SHAPE, seed=2).state_dict()
        for rule in ("postnorm", "deeploop")
    )
    beta = HRMConfig(**SMALL, rule="deeploop").scales_of("L").beta
    assert beta == pytest.approx(1 / math.sqrt(8 * 12))
    for name, tensor in plain.items():
        role = name.split(".")[-2] if "." in name else name
        expected = tensor * beta if role in ("v", "o", "gate", "up", "down") else tensor
        torch.testing.assert_close(scaled[name], expected, msg=name)


@pytest.mark.parametrize(
    ("config", "depth"),
    [
        (HRMConfig(rule="deeploop"), 12),
        (HRMConfig(rule="deeploop", depth_from="graph"), 8),
        (HRMConfig(rule="deeploop", high_blocks=2, low_blocks=2), 6),
        (HRMConfig(rule="deeploop", high_blocks=2, low_blocks=2, low_cycles=8), 18),
        (HRMConfig(rule="deeploop", horizon="full"), 24),
        (HRMConfig(rule="deeploop", horizon="last_cycle"), 12),
        (HRMConfig(rule="deeploop", depth=7), 7),
        (TRMConfig(rule="deeploop"), 10),
        (TRMConfig(rule="deeploop", low_cycles=6), 14),
    ],
)
def test_alpha_and_beta_follow_from_the_papers_count_or_from_the_depth_set(config, depth):
    assert depth == config.N
    for module in config.blocks_of:
        assert config.scales_of(module).alpha == pytest.approx(math.sqrt(2 * depth))
        assert config.scales_of(module).beta == pytest.approx(1 / math.sqrt(8 * depth))


@pytest.mark.parametrize(
    ("config", "alphas"),
    [
        (HRMConfig(rule="flat"), {"H": 2.0, "L": 2.0}),  # √4, each visited once in the graph
        (HRMConfig(rule="flat", horizon="last_cycle", low_cycles=3), {"H": 2.0, "L": 6.0}),
        (HRMConfig(rule="flat", horizon="full", low_blocks=9), {"H": 4.0, "L": 12.0}),
        (HRMConfig(rule="flat:gain=0.5"), {"H": 1.0, "L": 1.0}),
        (TRMConfig(rule="flat"), {"shared": 5 * math.sqrt(2)}),
        (TRMConfig(rule="flat", horizon="last_call", blocks=4), {"shared": 4.0}),
    ],
)
def test_the_flat_alpha_counts_each_modules_visits_in_the_graph(config, alphas):
    small = replace(config, width=16, heads=2, hidden=24)
    model = Reasoner(small, SHAPE, seed=2)
    for name, stack in model.stacks.items():
        assert config.scales_of(name).beta == 1.0
        for module in stack.modules():
            if isinstance(module, ScaledResidual):
                assert module.alpha == pytest.approx(alphas[name])
                assert module.outer.weight is None
    plain = Reasoner(replace(small, rule="postnorm"), SHAPE, seed=2).state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())


def test_modules_may_have_rules_of_their_own():
    config = HRMConfig(**SMALL, rule="deeploop", high_rule="deepnorm")
    model = Reasoner(config, SHAPE)
    alphas = {
        name: {module.alpha for module in stack.modules() if isinstance(module, ScaledResidual)}
        for name, stack in model.stacks.items()
    }
    assert alphas == {"L": {math.sqrt(24)}, "H": {24**0.25}}
    assert HRMConfig(**SMALL, rule="deeploop", high_rule="postnorm").scales_of("H").alpha == 1.0


def test_initial_carry_is_the_two_vectors():
    model = Reasoner(HRMConfig(**SMALL), SHAPE)
    carry = model.initial(2)
    assert isinstance(carry, Carry)
    assert carry.high.shape == (2, 10, 16)
    assert torch.equal(carry.low[1, 7], model.initial_low)
    assert not torch.equal(model.initial_low, model.initial_high)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (HRMConfig, {"heads": 3}, r"model\.heads=3: must be a divisor of model.width=16"),
        (HRMConfig, {"horizon": "half"}, r"model\.horizon=half: must be one of full, last_cycle, last_call"),
        (HRMConfig, {"low_blocks": 0}, r"model\.low_blocks=0: must be at least 1"),
        (HRMConfig, {"high_rule": "round"}, r"model\.high_rule=round: must be one of deeploop"),
        (TRMConfig, {"blocks": 0}, r"model\.blocks=0: must be at least 1"),
        (TRMConfig, {"rule": "deeploop:p=inf"}, r"model\.rule=deeploop:p=inf: p=inf: must be a positive"),
        (
            TRMConfig,
            {"rule": "prenorm"},
            r"model\.rule=prenorm: must be postnorm, deeploop, deepnorm or flat",
        ),
        (HRMConfig, {"rule": "deeploop:gate=off"}, r"model\.rule=deeploop:gate=off: must be a rule with p"),
        (HRMConfig, {"depth": 12, "rule": "flat"}, r"model\.depth=12: must be 0 with model\.rule=flat"),
        (HRMConfig, {"depth_from": "call"}, r"model\.depth_from=call: must be cycles or graph"),
        (HRMConfig, {"depth": 9, "depth_from": "graph"}, r"model\.depth_from=graph: must be cycles with"),
        (HRMConfig, {"high_rule": "averaged"}, r"model\.high_rule=averaged: must be postnorm, deeploop"),
        (TRMConfig, {"rule": "flat:gain=0"}, r"model\.rule=flat:gain=0: gain=0: must be 1e-9 to 1e9"),
    ],
)
def test_a_wrong_field_is_named(kind, change, message):
    with pytest.raises(ValueError, match=message):
        kind(**(SMALL | change))
