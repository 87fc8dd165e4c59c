"""Convert weights of HRM's and TRM's public code to deeploop's names, and derive the config.

HRM and TRM save the state dict of a compiled loss head, `_orig_mod.model.inner.…`, with joined q, k, v and
gate, up. It does not determine heads, cycles and segments, which must be given.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deeploop.models.reasoner_config import HRMConfig, PuzzleShape, ReasonerConfig, TRMConfig

PREFIXES = ("_orig_mod.", "model.", "inner.")
TOP = {
    "H_init": "initial_high",
    "L_init": "initial_low",
    "embed_tokens.embedding_weight": "embedding.weight",
    "lm_head.weight": "head.weight",
    "q_head.weight": "halting.weight",
    "q_head.bias": "halting.bias",
    "puzzle_emb.weights": "puzzles",
}
# In a block: the joined matrix → its parts, in order.
PARTS = {
    "self_attn.qkv_proj": ("mixer.branch.q", "mixer.branch.k", "mixer.branch.v"),
    "self_attn.o_proj": ("mixer.branch.o",),
    "mlp_t.gate_up_proj": ("mixer.branch.gate", "mixer.branch.up"),
    "mlp_t.down_proj": ("mixer.branch.down",),
    "mlp.gate_up_proj": ("mlp.branch.gate", "mlp.branch.up"),
    "mlp.down_proj": ("mlp.branch.down",),
}


def our_names(public: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split the weights. A module H_level tells HRM from TRM."""
    bare = {_bare(name): tensor.float() for name, tensor in public.items()}
    modules = {"H_level": "H", "L_level": "L"} if is_hrm(bare) else {"L_level": "shared"}
    weights: dict[str, Tensor] = {}
    for name, tensor in bare.items():
        if name in TOP:
            weights[TOP[name]] = tensor
            continue
        level, _, number, inside = (*name.split(".", 3), "", "", "")[:4]
        parts = PARTS.get(inside.removesuffix(".weight"))
        if level not in modules or parts is None:
            raise ValueError(f"{name}: not a weight of HRM's or TRM's public code with rotary embedding")
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            weights[f"stacks.{modules[level]}.blocks.{number}.{part}.weight"] = piece.clone()
    if missing := [name for name in TOP if TOP[name] not in weights]:
        raise ValueError(f"{missing[0]}: missing; the file is not a checkpoint of HRM or TRM")
    return weights


def is_hrm(public: Mapping[str, Tensor]) -> bool:
    return any(_bare(name).startswith("H_level.") for name in public)


def config_of(weights: Mapping[str, Tensor], given: Mapping[str, Any], length: int) -> ReasonerConfig:
    """The published model with these sizes; `given` are fields that the weights do not determine."""
    blocks = {name.split(".")[1]: 0 for name in weights if name.startswith("stacks.")}
    for name in weights:
        if name.endswith("mlp.branch.down.weight"):
            blocks[name.split(".")[1]] += 1
    first = f"stacks.{next(iter(blocks))}.blocks.0"
    mlp = f"{first}.mixer.branch.down.weight"
    shape: dict[str, Any] = {
        "width": len(weights["initial_high"]),
        "hidden": weights[f"{first}.mlp.branch.down.weight"].shape[1],
        "mixer": "mlp" if mlp in weights else "attention",
        **given,
    }
    if mlp in weights:
        shape["puzzle_positions"] = len(weights[mlp]) - length
    if "shared" in blocks:
        return TRMConfig(**shape, blocks=blocks["shared"])
    return HRMConfig(**shape, high_blocks=blocks["H"], low_blocks=blocks["L"])


def check_shape(weights: Mapping[str, Tensor], shape: PuzzleShape) -> None:
    """Raise ValueError unless the weights are for puzzles of this shape."""
    for name, key, wanted in (
        ("vocabulary", "embedding.weight", shape.vocabulary),
        ("puzzle ids", "puzzles", shape.puzzle_ids),
    ):
        if (rows := len(weights[key])) != wanted:
            raise ValueError(
                f"checkpoint: has {name} {rows:,}, the puzzles have {wanted:,}; name their --data"
            )


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def read_public(path: str) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint with `weights_only`, so that no code in it is executed."""
    weights = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{path}: must be a state dict, tensors by name")
    return weights
