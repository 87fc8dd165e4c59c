"""The Llama family: what a source's description says as a GPTConfig, and what its tensors are called.

Llama (SmolLM, TinyLlama), Mistral, Qwen2 and Qwen3 are pre-norm stacks of grouped-query attention and SwiGLU.
They differ in biases, QK-norm, the head, and rotary frequencies. All are a config of `LoopedGPT` with R = 1.
"""

from collections.abc import Mapping
from typing import Any

from deeploop.data.gguf_file import GGUFFile
from deeploop.models.gpt_config import GPTConfig
from deeploop.nn.layers import AttentionBias

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama

# Names in a block of ours, and in layer {} of a transformers folder and of a GGUF file.
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
LARGEST = 1e15  # of a rotary base and the like; JSON has numbers that no float holds
OUTER_NAMES = {
    "embedding": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}


def _common(**fields: Any) -> GPTConfig:
    """A stack of that shape as it is: every layer once, nothing of ours added to it."""
    try:
        return GPTConfig(rounds=1, block="prenorm", input_norm=False, **fields)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("model.")) from None


def config_of_folder(found: Mapping[str, Any]) -> tuple[str, GPTConfig]:
    """Family and config that a transformers config.json describes."""
    names = found.get("architectures")
    name = names[0] if isinstance(names, list) and names else found.get("model_type")
    known = FAMILIES | {family: family for family in FAMILIES.values()}  # a model_type is the family's name
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"architecture {name!r:.60}: unknown; what can be read is {', '.join(FAMILIES)}")
    family = known[name]
    if (act := found.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act={act!r:.40}: must be silu")
    heads = _whole(found, "num_attention_heads")
    config = _common(
        blocks=_whole(found, "num_hidden_layers"),
        width=_whole(found, "hidden_size"),
        hidden=_whole(found, "intermediate_size"),
        heads=heads,
        kv_heads=_whole(found, "num_key_value_heads", heads),
        head_width=_whole(found, "head_dim", 0),
        vocabulary=_whole(found, "vocab_size"),
        context=_context(found, family),
        norm_eps=_number(found, "rms_norm_eps"),
        qk_norm="before-rotary" if family == "qwen3" else "none",
        attention_bias=_bias(found, family),
        mlp_bias=bool(found.get("mlp_bias", False)),
        tied_head=bool(found.get("tie_word_embeddings", False)),
        **_rotary(found),
    )
    return family, config


def _whole(found: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = found.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{name}={value!r:.40}: must be a whole number")
    return value


def _number(found: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = found.get(name, default)
    if type(value) not in (int, float) or not -LARGEST < value < LARGEST:
        raise ValueError(f"{name}={value!r:.40}: must be a number")
    return float(value)


def _bias(found: Mapping[str, Any], family: str) -> AttentionBias:
    if family == "qwen2":
        return "qkv"
    return "qkvo" if found.get("attention_bias", False) else "none"


def _context(found: Mapping[str, Any], family: str) -> int:
    """The longest sequence, or the sliding window where it is shorter: within it attention is full."""
    context = _whole(found, "max_position_embeddings")
    window = found.get("sliding_window")
    used = family == "mistral" or found.get("use_sliding_window", False)
    return min(context, _whole(found, "sliding_window")) if used and window is not None else context


def _rotary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling, as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes them."""
    parameters = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters={parameters!r:.40}: must be an object")
    base = _number(parameters, "rope_theta", _number(found, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    names = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if not isinstance(kind, str) or kind not in names:
        raise ValueError(f"rope_type={kind!r:.40}: must be one of {', '.join(names)}")
    scaling = tuple(_number(parameters, name) for name in names[kind])
    return {"rotary_base": base, "rotary_scaling": scaling}


def config_of_gguf(file: GGUFFile) -> tuple[str, GPTConfig]:
    """Family and config that the metadata of a GGUF file describe."""
    family = file.get("general.architecture", str)
    if family not in GGUF_FAMILIES:
        raise ValueError(
            f"architecture {family!r:.60}: unknown; what can be read is {', '.join(GGUF_FAMILIES)}"
        )
    shapes = file.shapes
    if "rope_freqs.weight" in shapes:
        raise ValueError("rope_freqs.weight: Llama 3's rope scaling is not read from GGUF; take its folder")
    if file.get(f"{family}.expert_count", int, 0):
        raise ValueError(f"{family}.expert_count: mixtures of experts are not read")

    def whole(name: str, default: int | None = None) -> int:
        name = f"{family}.{name}"
        return _whole({name: file.get(name, int, default)}, name)

    def number(name: str, default: float | None = None) -> float:
        name = f"{family}.{name}"
        return _number({name: file.get(name, (int, float), default)}, name)

    heads = whole("attention.head_count")
    scaling = file.get(f"{family}.rope.scaling.type", str, "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{family}.rope.scaling.type={scaling!r:.40}: must be none or linear")
    factor = (number("rope.scaling.factor", 1.0),)
    biased = [f"blk.0.attn_{role}.bias" in shapes for role in ("q", "output")]
    config = _common(
        blocks=whole("block_count"),
        width=whole("embedding_length"),
        hidden=whole("feed_forward_length"),
        heads=heads,
        kv_heads=whole("attention.head_count_kv", heads),
        head_width=whole("attention.key_length", 0),
        vocabulary=shapes.get("token_embd.weight", (0,))[0],
        context=whole("context_length"),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        qk_norm="before-rotary" if family == "qwen3" else "none",
        attention_bias="qkvo" if biased[1] else "qkv" if biased[0] else "none",
        tied_head="output.weight" not in shapes,
        rotary_base=number("rope.freq_base", 10000.0),
        rotary_scaling=factor if scaling == "linear" else (),
    )
    return family, config
