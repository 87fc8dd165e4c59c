"""Export a run in Nanbeige's format, which mlx-lm and llama.cpp read: `deeploop export --format nanbeige`.

Nanbeige is a looped pre-norm transformer: K layers of x + attention(norm(x)) and x + mlp(norm(x)), applied
`num_loops` times, then one norm. A looped GPT without outer norms computes the same once the factors of its
rule are folded into the weights: ε into the output projections, the input scale of each block into its norms,
and the input norm into the embedding.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import deeploop
from deeploop.export.folder import CARD_MARK, new_export, written
from deeploop.export.run import check_context, load_parts, save_tokenizer, template_of
from deeploop.extras import require
from deeploop.files import write_json
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.rules import OUTPUTS, Rule
from deeploop.runs.folder import require_checkpoint

# The model settings that the format can express.
FITTING: dict[str, Any] = {
    "prelude": 0,
    "coda": 0,
    "injection": "none",
    "first_state": "embedding",
    "qk_norm": "none",
    "attention_bias": "none",
    "mlp_bias": False,
    "unigram_bias": False,
    "exit_gate": False,
    "final_norm": True,
}


def export_nanbeige(run: Path, folder: Path, *, dtype: str = "float32", context: int | None = None) -> str:
    """Export the last checkpoint for mlx-lm and llama.cpp; return a summary to print."""
    require("transformers", "hf")
    checkpoint = require_checkpoint(run)
    model, tokenizer = load_parts(run, checkpoint)
    require_fitting(model.config)
    context_note = check_context(run, model.config.context, context)
    context = context or model.config.context
    settings = nanbeige_config(model) | {"max_position_embeddings": context, "torch_dtype": dtype}
    with new_export(folder) as part:
        if tokenizer is not None:
            defaults = save_tokenizer(tokenizer, part, context, template_of(run))
            defaults.save_pretrained(part)
            settings |= {name: getattr(defaults, name) for name in ("bos_token_id", "eos_token_id")}
        weights = nanbeige_weights(model, getattr(torch, dtype))
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        write_json(part / "config.json", settings)
        card = CARD.format(name=run.name, mark=CARD_MARK, version=deeploop.__version__, **settings)
        (part / "README.md").write_text(card, encoding="utf-8")
    return (
        f"{written(folder, run, checkpoint)}{context_note}\n\n"
        f'  mlx_lm.generate --model {folder} --prompt "Once upon a time"'
    )


def require_fitting(config: GPTConfig) -> None:
    """Raise ValueError for settings that the format can't express, naming flags that fit."""
    found = [] if is_prenorm(config.residual) else [("rule", "averaged")]
    found += [(name, value) for name, value in FITTING.items() if getattr(config, name) != value]
    if found:
        has = ", ".join(f"model.{name}={getattr(config, name)}" for name, _ in found)
        flags = [_flag(name, value) for name, value in found]
        if not config.unigram_bias:  # a model trained anew has it by its recipe
            flags.append(_flag("unigram_bias", False))
        raise ValueError(
            f"{has}: not in Nanbeige's format; a model that fits is trained with {' '.join(flags)}"
        )


def is_prenorm(rule: Rule) -> bool:
    """Return True if a rule is x + f(Norm(x)) up to factors that can be folded into weights."""
    return rule.inner_norm and not rule.outer_norm and not rule.has_alpha


def _flag(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--model.{'' if value else 'no-'}{option}"
    return f"--model.{option} {value}"


def nanbeige_config(model: LoopedGPT) -> dict[str, Any]:
    """Return config.json without context, dtype and special tokens."""
    config = model.config
    return {
        "architectures": ["NanbeigeForCausalLM"],
        "model_type": "nanbeige",
        "exported_by": f"deeploop {deeploop.__version__}",  # a later export may replace this folder
        "num_hidden_layers": config.blocks,
        "num_loops": model.rounds,
        "skip_loop_final_norm": True,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.grouped_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope_scaling(config.rotary_scaling),
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def rope_scaling(scaling: tuple[float, ...]) -> dict[str, Any] | None:
    """Convert `model.rotary_scaling` to transformers' `rope_scaling`."""
    if not scaling:
        return None
    if len(scaling) == 1:
        return {"rope_type": "linear", "factor": scaling[0]}
    factor, low, high, original = scaling
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }


LAYER = {
    "input_layernorm": "attention.inner",
    **{f"self_attn.{name}_proj": f"attention.branch.{name}" for name in "qkvo"},
    "post_attention_layernorm": "mlp.inner",
    **{f"mlp.{name}_proj": f"mlp.branch.{name}" for name in ("gate", "up", "down")},
}


@torch.no_grad()
def nanbeige_weights(model: LoopedGPT, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights under Nanbeige's names, with the factors of the rule and of width-µP folded in."""
    config, state, vocabulary = model.config, model.state_dict(), model.config.vocabulary
    embedding = state["embedding.weight"][:vocabulary]
    weights = {
        "model.embed_tokens": model.input_norm(embedding),
        "model.norm": state["final_norm.weight"] * config.matrix_lr_multiplier,  # width-µP
        "lm_head": embedding if config.tied_head else state["head.weight"][:vocabulary],
    }
    outputs = dict.fromkeys(OUTPUTS, config.scales.epsilon)
    for index in range(config.blocks):
        scales = {"inner": config.residual.input_scale(index + 1), **outputs}
        for theirs, ours in LAYER.items():
            weight = state[f"blocks.{index}.{ours}.weight"]
            weights[f"model.layers.{index}.{theirs}"] = weight * scales.get(ours.rpartition(".")[2], 1)
    return {f"{name}.weight": weight.to(dtype, copy=True) for name, weight in weights.items()}


CARD = """\
---
library_name: mlx
pipeline_tag: text-generation
tags:
- deeploop
- looped-transformer
---
# {name}
{mark}, in Nanbeige's format: K = {num_hidden_layers}, R = {num_loops}. Exported by deeploop {version}.

```sh
pip install mlx-lm
mlx_lm.generate --model . --prompt "Once upon a time"
```
The scale of the residual rule is in the weights, so that plain pre-norm layers compute the trained model.
The licence of the weights is for their owner to state.
"""
