"""Which standard deviation a matrix is drawn at, and how it is drawn."""

import math

import pytest
import torch
from torch import nn

from deeploop.nn import RMSNorm, init_residual_branch_
from deeploop.nn.init import InitRule, init_weights_, scale_branch_


def test_beta_reaches_the_branch_matrices_and_no_other():
    rule, plain = InitRule(width=64, beta=0.1), InitRule(width=64)
    roles = ("q", "k", "v", "o", "gate", "up", "down", "embedding")
    scaled = {role: rule.std(role) / plain.std(role) for role in roles}
    branch = {"v", "o", "gate", "up", "down"}
    assert scaled == pytest.approx({role: 0.1 if role in branch else 1.0 for role in scaled})
    assert plain.std("down") == plain.std("q") == 0.5 / 8
    assert plain.std("embedding") == 0.02


def test_the_gate_is_switchable_and_outputs_shrink():
    rule = InitRule(width=64, beta=0.1, scale_gate=False, output_divisor=math.sqrt(12))
    assert rule.std("gate") == 0.5 / 8
    assert rule.std("up") == pytest.approx(0.05 / 8)
    assert rule.std("o") == rule.std("down") == pytest.approx(0.05 / 8 / math.sqrt(12))


def test_unknown_roles_and_parameters_are_errors():
    with pytest.raises(ValueError, match="role='w1'"):
        InitRule(width=64).std("w1")
    with pytest.raises(ValueError, match="role='w1'"):
        init_weights_(nn.ModuleDict({"w1": nn.Linear(2, 2, bias=False)}), InitRule(width=64), seed=0)
    odd = nn.ParameterDict({"weight_g": nn.Parameter(torch.empty(2))})
    with pytest.raises(AssertionError, match=r"q\.weight_g"):
        init_weights_(nn.ModuleDict({"q": odd}), InitRule(width=64), seed=0)


def test_gains_become_one():
    model = nn.ModuleDict({"norm": RMSNorm(4)})
    nn.init.constant_(model["norm"].weight, math.nan)
    init_weights_(model, InitRule(width=4), seed=0)
    assert torch.equal(model["norm"].weight, torch.ones(4))


def test_branch_is_drawn_once_at_beta_std_from_the_generator():
    a, b = nn.Parameter(torch.full((300, 200), math.nan)), torch.full((200, 300), math.nan)
    init_residual_branch_([a, b], std=0.5, beta=0.1, generator=torch.Generator().manual_seed(3))
    reference = torch.Generator().manual_seed(3)
    for matrix in (a, b):
        assert torch.equal(matrix, torch.empty(matrix.shape).normal_(0, 0.05, generator=reference))


def test_a_slice_of_a_fused_projection_can_be_drawn():
    attention = nn.MultiheadAttention(8, 2)
    before = attention.in_proj_weight.clone()
    init_residual_branch_([attention.in_proj_weight[16:]], std=1e-3, beta=0.5)
    assert torch.equal(attention.in_proj_weight[:16], before[:16])
    assert attention.in_proj_weight[16:].abs().max() < 0.01


def test_a_module_in_place_of_its_weight_is_named():
    with pytest.raises(TypeError) as error:
        init_residual_branch_([nn.Linear(8, 8)], std=1.0)
    assert str(error.value) == "matrices: must be tensors, not Linear; give its .weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_draw_does_not_depend_on_the_dtype(dtype):
    narrow, single = torch.empty(20, 30, dtype=dtype), torch.empty(20, 30)
    for matrix in (narrow, single):
        init_residual_branch_([matrix], std=1.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(narrow, single.to(dtype))


def test_the_draw_does_not_depend_on_the_default_dtype():
    plain, other = torch.empty(20, 30), torch.empty(20, 30)
    init_residual_branch_([plain], std=1.0, generator=torch.Generator().manual_seed(0))
    torch.set_default_dtype(torch.float64)
    try:
        init_residual_branch_([other], std=1.0, generator=torch.Generator().manual_seed(0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(other, plain)


@pytest.mark.parametrize("name", ["wq", "wk", "to_q", "to_k", "k_lin", "q_proj", "query"])
def test_queries_and_keys_stay_by_any_of_their_names(name):
    branch = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False), "wv": torch.nn.Linear(4, 4)})
    before, value = branch[name].weight.clone(), branch["wv"].weight.clone()
    scale_branch_(branch, 0.5)
    assert torch.equal(branch[name].weight, before)
    assert torch.equal(branch["wv"].weight, 0.5 * value)


@pytest.mark.parametrize("name", ["kv_proj", "to_kv", "wqkv", "qkv"])
def test_projections_of_several_in_one_are_refused(name):
    with pytest.raises(ValueError, match=rf"branch: {name}\.weight holds"):
        scale_branch_(torch.nn.ModuleDict({name: torch.nn.Linear(4, 8)}), 0.5)
