"""One config.json read twice, by deeploop and by transformers' own class: equal, or refused by deeploop.

A case takes a valid config of a family and adds, changes or removes keys that real files have, or that
contradict one another. A finding is a config that both accept and that they understand differently.
"""

import copy
import random
from typing import Any

import torch
import transformers
from pretrained import DESCRIPTION
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from deeploop.models.gpt_config import GPTConfig
from deeploop.nn.layers import rotary_table
from deeploop.retrofit.families import FAMILIES, config_of_folder

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [
    *(None, {}, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}),
    *({"type": "linear", "factor": 2.0, "rope_theta": 500.0}, {"rope_theta": 1e6, "rope_type": "default"}),
    *({"rope_type": "default", "type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2.0}),
    *(LLAMA3, LLAMA3 | {"original_max_position_embeddings": 16}, {"factor": 3.0}),
    {"full_attention": {"rope_type": "linear", "factor": 4.0}},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
]
VALUES: dict[str, list[Any]] = {
    "architectures": [None, *([name] for name in FAMILIES)],
    "attention_bias": [True, False, None],
    "head_dim": [None, 8, 16],
    "is_causal": [True, False],
    "layer_types": [None, ["full_attention"] * 2, ["full_attention", "sliding_attention"]],
    "max_position_embeddings": [64, 8192],
    "max_window_layers": [0, 1, 2, 28],
    "mlp_bias": [True, False],
    "model_type": [None, *FAMILIES.values()],
    "num_key_value_heads": [None, 1, 2],
    "original_max_position_embeddings": [None, 16, 32],
    "partial_rotary_factor": [None, 1.0, 0.5],
    "rms_norm_eps": [1e-5, 1e-6],
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": [500.0, 10000.0, 1e6],
    "sliding_window": [None, 16, 4096],
    "tie_word_embeddings": [True, False],
    "use_sliding_window": [True, False],
}


def odd_config(draw: random.Random) -> dict[str, Any]:
    """A valid config of some family in which a few keys are changed, added or left out."""
    name = draw.choice(list(FAMILIES))
    found = DESCRIPTION | {"architectures": [name], "model_type": FAMILIES[name]}
    for _ in range(draw.choice((1, 1, 2, 3))):
        key = draw.choice(list(VALUES))
        if draw.random() < 0.15:
            found.pop(key, None)
        else:
            found[key] = draw.choice(VALUES[key])
    return found


def compare(found: dict[str, Any]) -> None:
    """Raise AssertionError where deeploop understands a config differently from transformers."""
    family, ours = config_of_folder(found)
    config_class = transformers.CONFIG_MAPPING[family]
    copied = copy.deepcopy(found) | {"model_type": family}
    try:
        theirs = config_class.from_dict(copied)
        wanted = _read_by_transformers(theirs)
    except Exception:  # transformers refuses it
        return
    wrong = {
        name: (value, wanted[name]) for name, value in _read_by_us(ours).items() if value != wanted[name]
    }
    if wrong:
        raise AssertionError(f"{found}: ours and transformers' differ in {wrong}")
    if not getattr(theirs, "is_causal", True):
        raise AssertionError(f"{found}: attention that is not causal")
    if ours.context > (longest := _longest(theirs)):
        raise AssertionError(f"{found}: a context of {ours.context}, where attention is full for {longest}")


def _longest(config: Any) -> int:
    """The tokens over which attention is full in every layer."""
    slides = config.model_type == "mistral" or "sliding_attention" in (
        getattr(config, "layer_types", 0) or ()
    )
    window = config.sliding_window if slides else None
    return min(config.max_position_embeddings, config.max_position_embeddings if window is None else window)


def _read_by_us(config: GPTConfig) -> dict[str, Any]:
    cos, sin = rotary_table(2, config.head_size, config.rotary_base, config.rotary_scaling)
    return {
        "heads": (config.heads, config.grouped_heads, config.head_size),
        "norm_eps": config.norm_eps,
        "tied": config.tied_head,
        "biases": (config.attention_bias, config.mlp_bias),
        "angles": _rounded(torch.atan2(sin[1], cos[1])),
    }


def _read_by_transformers(config: Any) -> dict[str, Any]:
    family = config.model_type
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    both = family in ("llama", "qwen3") and config.attention_bias
    return {
        "heads": (heads, config.num_key_value_heads, width),
        "norm_eps": config.rms_norm_eps,
        "tied": config.tie_word_embeddings,
        "biases": (
            "qkv" if family == "qwen2" else "qkvo" if both else "none",
            family == "llama" and config.mlp_bias,
        ),
        "angles": _rounded(LlamaRotaryEmbedding(config).inv_freq),
    }


def _rounded(angles: torch.Tensor) -> list[float]:
    return [round(float(angle), 5) for angle in angles]


def case(draw: random.Random) -> None:
    compare(odd_config(draw))
