"""Complete, repeatable weight initialisation, and the rule that says which matrices get β.

β is an initialisation gain (Eq. deeploop-beta-usage): a matrix is drawn once, at β·std. All draws
are made in fp32 on the CPU from one generator, so a seed gives the same model on every device and in
every dtype, and two models that differ only in their scales share the same underlying numbers.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from deeploop.rules import InitRule

# What others call the matrices that β leaves alone, by the last words of their names.
QUERY_KEY = frozenset(
    name.format(word)
    for name in ("{}", "{}_proj", "w{}", "W{}", "to_{}", "{}_lin")
    for word in ("q", "k", "query", "key")
)
GATE = frozenset({"gate", "gate_proj"})
FUSED = frozenset({"c_attn", "query_key_value"}) | frozenset(
    name.format(words) for name in ("{}", "{}_proj", "w{}", "W{}", "to_{}") for words in ("qkv", "kv", "qk")
)
MULTIHEAD = ("in_proj_weight", "in_proj_bias")  # of torch.nn.MultiheadAttention
CUT = 2.0  # where a truncated normal ends, in its own standard deviations before the cut


@torch.no_grad()
def init_residual_branch_(
    matrices: Iterable[Tensor], *, std: float, beta: float = 1.0, generator: torch.Generator | None = None
) -> None:
    """Draw every matrix from N(0, (beta·std)²), in place.

    Give it the value, output and feed-forward matrices of a residual branch; for a fused q-k-v projection
    only the value rows, as a slice of the weight. Biases in the branch must start at 0 (or be absent):
    torch's default draws them without β, and they would dominate the small weights.
    """
    for matrix in matrices:
        if not isinstance(matrix, Tensor):
            raise TypeError(f"matrices: must be tensors, not {type(matrix).__name__}; give its .weight")
        if matrix.is_meta:  # nowhere to put a draw
            continue
        draw = torch.empty(matrix.shape, dtype=torch.float32, device="cpu")
        matrix.copy_(draw.normal_(0.0, beta * std, generator=generator))


@torch.no_grad()
def init_truncated_(
    tensors: Iterable[Tensor], *, std: float, beta: float = 1.0, generator: torch.Generator | None = None
) -> None:
    """Draw every tensor from a normal truncated at ±2σ, in place; its std after truncation is beta·std."""
    # Var = 1 − 2·CUT·φ(CUT) / (Φ(CUT) − Φ(−CUT)) of a standard normal cut at ±CUT.
    density = math.exp(-(CUT**2) / 2) / math.sqrt(2 * math.pi)
    sigma = beta * std / math.sqrt(1 - 2 * CUT * density / math.erf(CUT / math.sqrt(2)))
    for tensor in tensors:
        if tensor.is_meta:
            continue
        draw = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        tensor.copy_(nn.init.trunc_normal_(draw, 0.0, sigma, -CUT * sigma, CUT * sigma, generator=generator))


@torch.no_grad()
def scale_branch_(branch: nn.Module, beta: float, *, gate: bool = True) -> None:
    """Multiply the value, output and feed-forward matrices of any branch by β, once: W ← β·W.

    Queries and keys stay as drawn; so does a gate, without `gate`. The biases of scaled matrices become 0:
    torch draws them without β, and they would dominate the small weights.
    """
    for path, parameter in branch.named_parameters():
        *owners, attribute = path.split(".")
        words = {attribute.removesuffix("_weight"), *owners[-1:]}
        if words & FUSED:
            raise ValueError(
                f"branch: {path} holds queries, keys and values in one; give init=False, and draw its "
                "values' rows by init_residual_branch_"
            )
        if words & (QUERY_KEY if gate else QUERY_KEY | GATE):
            continue
        # Of torch's own fused projection the values are the last third.
        rows = parameter[-(len(parameter) // 3) :] if attribute in MULTIHEAD else parameter
        if "bias" in attribute:
            rows.zero_()
        elif parameter.ndim > 1:
            rows.mul_(beta)


@torch.no_grad()
def init_weights_(
    model: nn.Module, rule: InitRule, seed: int, parts: Mapping[str, InitRule] | None = None
) -> None:
    """Set every parameter of `model`: gains (vectors) to 1, biases to 0, matrices drawn by `rule`.

    `parts` are the rules of submodules with a rule of their own. A module with a method `init_weights_`, such
    as an injection, sets its own weights. A parameter without a stated initial value is an error, so that
    nothing is left uninitialized.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    settled: set[nn.Parameter] = set()
    for module in model.modules():
        own = getattr(module, "init_weights_", None)
        if own is not None:
            own()
            settled.update(module.parameters())
    for name, parameter in model.named_parameters():
        *path, attribute = name.split(".")  # blocks.0.attention.branch.v.weight: role v
        if parameter in settled:
            continue
        if attribute in ("output_bias", "bias"):
            parameter.zero_()
            continue
        assert attribute == "weight", f"{name}: no initial value is stated for it"
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            part = (parts or {}).get(path[0], rule)
            init_residual_branch_([parameter], std=part.std(path[-1]), generator=generator)
