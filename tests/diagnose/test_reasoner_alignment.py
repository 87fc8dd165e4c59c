"""κ_g of HRM's and TRM's modules against dense Jacobians of a model with blocks of its own at every visit."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from deeploop.diagnose.examine import Effort
from deeploop.diagnose.reasoner import Probe, asked_exponent, examine_reasoner
from deeploop.models.halting import act_loss
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape, TRMConfig
from deeploop.theory import DEEPLOOP, module_bound

SHAPE = PuzzleShape(5, 3, 1)
SIZES = {"width": 4, "heads": 1, "hidden": 4, "cycles": 2, "low_cycles": 3, "puzzle_positions": 1}
SMALL = {**SIZES, "rule": "deeploop"}
HRM = HRMConfig(**SMALL, high_blocks=1, low_blocks=1)
TRM = TRMConfig(**SMALL, blocks=1)
EXACT = Effort(iterations=60, tolerance=1e-12)


def built(config):
    torch.manual_seed(0)
    model = Reasoner(config, SHAPE, seed=1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens, labels = torch.randint(0, 5, (1, 3)), torch.randint(1, 5, (1, 3))
    return model, Probe(tokens, labels, torch.randn(1, 4).double())


def unrolled(model, probe, visible):
    """The segment written out, with `visible` copies of a module's parameters for its last calls.

    Returns the parameters of one sublayer at each visit → (z_H, loss).
    """
    config = model.config
    x = config.width**0.5 * torch.cat((probe.puzzle[:, None], model.embedding(probe.tokens)), dim=1)
    roles = ["L"] * config.low_cycles + ["H"]

    def segment(name, visits):
        module = name.split(".")[1]
        keys = [key for key, _ in model.get_submodule(name).named_parameters()]
        z = dict(zip("HL", (state.clone() for state in model.initial(1)), strict=True))
        calls = roles * config.cycles
        own = [n for n, role in enumerate(calls) if config.module_of(role) == module]
        with sdpa_kernel(SDPBackend.MATH):
            for n, role in enumerate(calls):
                stack = model.stacks[config.module_of(role)]
                other = z["H"] + x if role == "L" else z["L"]
                changed = {}
                if n in own[-visible[module] :]:
                    at = own[-visible[module] :].index(n)
                    inner = ".".join(name.split(".")[2:])
                    changed = {f"{inner}.{k}": v for k, v in zip(keys, visits[at], strict=True)}
                kept = {key: value.detach() for key, value in stack.named_parameters()}
                z[role] = functional_call(stack, kept | changed, (z[role], other, (model.cos, model.sin)))
                detach = n < len(calls) - (len(roles) if visible["cycle"] else 0)
                z = {key: value.detach() if detach else value for key, value in z.items()}
            logits = model.head(z["H"])[:, config.puzzle_positions :]
            q = model.halting(z["H"][:, 0])
        return z["H"], act_loss(type("S", (), {"logits": logits, "q": q}), probe.labels, None)

    return segment


def dense_kappa(model, probe, module, R_g):
    """Eq. (kappa-def) from dense Jacobians, one parameter copy a visit."""
    segment = unrolled(model, probe, {module: R_g, "cycle": True})
    terms, u_max, g_max = [], 0.0, 0.0
    for name in (f"stacks.{module}.blocks.0.{part}" for part in ("mixer", "mlp")):
        sublayer = model.get_submodule(name)
        scaled = [
            n
            for n, (key, _) in enumerate(sublayer.named_parameters())
            if key.split(".")[-2] not in ("q", "k")
        ]
        values = [value.detach() for _, value in sublayer.named_parameters()]
        visits = tuple(tuple(values) for _ in range(R_g))
        maps, updates = ([], [])
        jacobian_f = jacrev(lambda v, name=name: segment(name, v)[0])(visits)
        jacobian_l = jacrev(lambda v, name=name: segment(name, v)[1])(visits)
        for at in range(R_g):
            maps.append(torch.cat([jacobian_f[at][n].detach().reshape(3 * 4 + 4, -1) for n in scaled], dim=1))
            updates.append(torch.cat([jacobian_l[at][n].detach().reshape(-1) for n in scaled]))
        u_max = max(u_max, *(float(torch.linalg.matrix_norm(one, 2)) for one in maps))
        g_max = max(g_max, *(float(one.norm()) for one in updates))
        terms.append(float(torch.linalg.matrix_norm(sum(maps), 2)) * float(sum(updates).norm()))
    return max(terms) / (R_g * u_max * g_max)


@pytest.mark.parametrize(("config", "module", "R_g"), [(HRM, "L", 3), (HRM, "H", 1), (TRM, "shared", 4)])
def test_kappa_of_a_module_is_that_of_dense_jacobians(config, module, R_g):
    model, probe = built(config)
    found = examine_reasoner(model, probe, horizon="last_cycle", effort=EXACT)
    own = found["modules"][module]
    assert own["R_g"] == R_g
    assert own["kappa"] == pytest.approx(dense_kappa(model, probe, module, R_g), rel=1e-6)


def test_both_horizons_of_hrm():
    """Under last_call nothing is visited twice in the graph, so κ_g is at most 1."""
    model, probe = built(HRM)
    before = model.config
    call, cycle = (
        examine_reasoner(model, probe, horizon=h, effort=EXACT) for h in ("last_call", "last_cycle")
    )
    assert model.config == before
    assert [one["R_g"] for one in call["modules"].values()] == [1, 1]
    assert all(0 < one["kappa"] <= 1 for one in call["modules"].values())
    assert (call["kappa_bar"], call["exponent"]) == (1.0, 0.25)
    kappas = {name: one["kappa"] for name, one in cycle["modules"].items()}
    assert cycle["kappa_bar"] == pytest.approx((2 + 2 * 3 * kappas["L"]) / 8)  # Eq. (hrm-cond)
    schedule = replace(HRM, horizon="last_cycle").schedule
    assert cycle["bound"] == pytest.approx(module_bound(schedule, DEEPLOOP, kappas, depth=4).value)
    bare = sum(2 * R * kappas[m] * float(Fraction(1, 16) ** 2) for m, R in (("H", 1), ("L", 3)))
    assert cycle["bound"] == pytest.approx(bare)  # β/α = 1/(4·4)


def test_the_exponent_that_one_kappa_asks_for():
    assert asked_exponent(3.0, 3) == 0.5
    assert asked_exponent(1.0, 3) == asked_exponent(0.2, 3) == asked_exponent(1.0, 1) == 0.25


def test_modules_without_the_papers_rule_have_no_bound():
    model, probe = built(replace(HRM, rule="postnorm"))
    assert examine_reasoner(model, probe, horizon="last_call")["bound"] is None
    with pytest.raises(ValueError, match=r"sublayer 'mlp': the model has stacks\.H"):
        examine_reasoner(model, probe, horizon="last_call", sublayers=["mlp"])
    with pytest.raises(ValueError, match="name at least one of module L"):
        examine_reasoner(model, probe, horizon="last_call", sublayers=["stacks.H.blocks.0.mlp"])


def test_visits_that_act_alike_reach_the_papers_worst_case():
    """Under a large α and without an input from H or the board, the three calls of L are one: κ_g is R_g."""
    model, probe = built(replace(HRM, depth=10**8, cycles=1))
    with torch.no_grad():
        for tensor in (model.embedding.weight, model.initial_high, probe.puzzle):
            tensor.mul_(1e-6)
    own = examine_reasoner(model, probe, horizon="last_cycle", effort=EXACT)["modules"]["L"]
    assert own["kappa"] == pytest.approx(dense_kappa(model, probe, "L", 3), rel=1e-5)
    assert own["kappa"] == pytest.approx(3, rel=0.01)
    assert own["exponent"] == pytest.approx(0.5, abs=0.01)
