"""The Llama family: read config.json as a GPTConfig, and map the names of tensors.

Llama (SmolLM, TinyLlama), Mistral, Qwen2 and Qwen3 are pre-norm stacks of grouped-query attention and SwiGLU.
They differ in biases, QK-norm, the head, and rotary frequencies. All are `LoopedGPT` configs with R = 1.

A config is read as transformers reads it, or refused: every key must be used here, or not affect the logits,
or have its neutral value. `tests/faults/readings.py` compares the two readings.
"""

from collections.abc import Mapping
from typing import Any

from deeploop.config.kinds import AttentionBias
from deeploop.models.gpt_config import GPTConfig

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Keys of config.json that are read for every family, and for some.
READ = {
    *("architectures", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "model_type"),
    *("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size"),
}
READ_BY = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": {"layer_types", "sliding_window", "use_sliding_window"},
    "qwen3": {"attention_bias", "layer_types", "sliding_window", "use_sliding_window"},
}
# Keys that do not affect the logits in eval mode.
HARMLESS = {
    *("_name_or_path", "_attn_implementation_autoset", "attention_dropout", "bos_token_id", "dtype"),
    *("chunk_size_feed_forward", "eos_token_id", "id2label", "initializer_range", "is_llama_config"),
    *("label2id", "max_window_layers", "output_attentions", "output_hidden_states", "pad_token_id"),
    *("pretraining_tp", "problem_type", "return_dict", "torch_dtype", "torchscript", "transformers_version"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version", "use_cache"),
}
# Keys that may affect the logits, and their neutral value. Null counts as absent.
NEUTRAL = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Defaults of transformers for absent keys; null has another meaning.
WINDOW = 4096
KEY_VALUE_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
HEAD_WIDTH = {"qwen3": 128}

# Names in a deeploop block, and in layer {} of a transformers folder and of a GGUF file.
LAYER_NAMES = {
    "attention.inner": ("model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    "attention.branch.q": ("model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    "attention.branch.k": ("model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    "attention.branch.v": ("model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    "attention.branch.o": ("model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    "attention.branch.q_norm": ("model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    "attention.branch.k_norm": ("model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    "mlp.inner": ("model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    "mlp.branch.gate": ("model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    "mlp.branch.up": ("model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    "mlp.branch.down": ("model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
}
LARGEST = 1e15  # limit of a rotary base and the like; JSON numbers may exceed any float
OUTER_NAMES = {
    "embedding": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}


def unlooped(**fields: Any) -> GPTConfig:
    """The config of a pre-norm stack with every layer applied once."""
    try:
        return GPTConfig(rounds=1, rule="prenorm", input_norm=False, **fields)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("model.")) from None


def config_of_folder(found: Mapping[str, Any]) -> tuple[str, GPTConfig]:
    """Read family and config from a transformers config.json."""
    family = _family(found)
    _check_keys(found, READ | READ_BY[family] | HARMLESS)
    if (act := found.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act={act!r:.40}: must be silu")
    heads = whole(found, "num_attention_heads")
    config = unlooped(
        blocks=whole(found, "num_hidden_layers"),
        width=whole(found, "hidden_size"),
        hidden=whole(found, "intermediate_size"),
        heads=heads,
        kv_heads=_or_absent(found, "num_key_value_heads", KEY_VALUE_HEADS.get(family, heads), heads),
        head_width=_or_absent(found, "head_dim", HEAD_WIDTH.get(family, 0), 0),
        vocabulary=whole(found, "vocab_size"),
        context=_context(found, family),
        norm_eps=number(found, "rms_norm_eps"),
        qk_norm="before-rotary" if family == "qwen3" else "none",
        attention_bias=_bias(found, family),
        mlp_bias=_flag(found, "mlp_bias"),
        tied_head=_flag(found, "tie_word_embeddings"),
        **_rotary(found),
    )
    return family, config


def _family(found: Mapping[str, Any]) -> str:
    """The family of `architectures` and `model_type`, which must agree."""
    listed = found.get("architectures") or []
    names = [*(listed if isinstance(listed, list) else [listed]), found.get("model_type")]
    names = [name for name in names if name is not None] or [None]
    known = FAMILIES | {family: family for family in FAMILIES.values()}  # a model_type is the family's name
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"architecture {name!r:.60}: unknown; what can be read is {', '.join(FAMILIES)}")
    families = {known[name] for name in names}
    if len(families) > 1:
        raise ValueError(f"architectures and model_type contradict one another: {', '.join(names)}")
    return families.pop()


def _check_keys(found: Mapping[str, Any], known: set[str]) -> None:
    for name, value in found.items():
        if name in known or value is None:
            continue
        if name not in NEUTRAL:
            raise ValueError(f"{name:.60}={value!r:.40}: unknown, and could change what is computed")
        if value != NEUTRAL[name]:
            raise ValueError(f"{name}={value!r:.40}: must be {NEUTRAL[name]}")


def whole(found: Mapping[str, Any], name: str) -> int:
    value = found.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{name}={value!r:.40}: must be a whole number")
    return value


def _or_absent(found: Mapping[str, Any], name: str, absent: int, null: int) -> int:
    if name not in found:
        return absent
    return null if found[name] is None else whole(found, name)


def number(found: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = found.get(name, default)
    if type(value) not in (int, float) or not -LARGEST < value < LARGEST:
        raise ValueError(f"{name}={value!r:.40}: must be a number")
    return float(value)


def _flag(found: Mapping[str, Any], name: str) -> bool:
    value = found.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{name}={value!r:.40}: must be true or false")
    return bool(value)


def _bias(found: Mapping[str, Any], family: str) -> AttentionBias:
    if family == "qwen2":
        return "qkv"
    return "qkvo" if _flag(found, "attention_bias") else "none"


def _context(found: Mapping[str, Any], family: str) -> int:
    """The longest sequence, or the sliding window if it is shorter: within it attention is full."""
    context = whole(found, "max_position_embeddings")
    slides = family == "mistral" or _flag(found, "use_sliding_window")
    kinds = found.get("layer_types") or []
    known = ("full_attention", "sliding_attention") if slides else ("full_attention",)
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise ValueError(f"layer_types={kinds!r:.60}: must be {' or '.join(known)}")
    window = _or_absent(found, "sliding_window", WINDOW, context)
    return min(context, window) if slides else context


def _rotary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary base and scaling of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    parameters = _agreed(found, "rope_parameters", found, "rope_scaling", {})
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters={parameters!r:.40}: must be an object")
    kind = _agreed(parameters, "rope_type", parameters, "type", "default")
    if not isinstance(kind, str) or kind not in ROPE:
        raise ValueError(f"rope_type={kind!r:.40}: must be one of {', '.join(ROPE)}")
    _check_keys(parameters, {"rope_type", "type", "rope_theta", *ROPE[kind]})
    _agreed(parameters, "rope_theta", found, "rope_theta")
    base = number(parameters if "rope_theta" in parameters else found, "rope_theta", 10000.0)
    scaling = tuple(number(parameters, name) for name in ROPE[kind])
    return {"rotary_base": base, "rotary_scaling": scaling}


def _agreed(
    one: Mapping[str, Any], name: str, other: Mapping[str, Any], second: str, default: Any = None
) -> Any:
    """The value of a setting that may be in two places, which must not contradict each other."""
    found = [value for value in (one.get(name), other.get(second)) if value is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(f"{name}={found[0]!r:.60} contradicts {second}={found[1]!r:.60}")
    return found[0] if found else default
