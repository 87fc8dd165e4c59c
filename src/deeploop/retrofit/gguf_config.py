"""Read the metadata of a GGUF file as a GPTConfig, as llama.cpp would, or refuse it."""

import math
from typing import Any

from deeploop.data.gguf_file import GGUFFile
from deeploop.models.gpt_config import GPTConfig
from deeploop.retrofit.families import number, unlooped, whole

GGUF_FAMILIES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama
# Metadata that are not about the model, by the first part of their names.
ELSEWHERE = ("GGUF", "general", "imatrix", "quantize", "split", "tokenizer")
# Metadata of the model that are read here or do not affect the logits.
KNOWN = {
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.scale", "block_count", "context_length"),
    *("embedding_length", "feed_forward_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scale_linear", "rope.scaling.factor", "rope.scaling.type", "rope.scaling.finetuned"),
    *("rope.scaling.original_context_length", "tensor_data_layout", "vocab_size"),
}
# Metadata that may affect the logits, and their neutral value.
NEUTRAL = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
}


def config_of_gguf(file: GGUFFile) -> tuple[str, GPTConfig]:
    """Read family and config from the metadata of a GGUF file."""
    family = file.get("general.architecture", str)
    if family not in GGUF_FAMILIES:
        raise ValueError(
            f"architecture {family!r:.60}: unknown; what can be read is {', '.join(GGUF_FAMILIES)}"
        )
    shapes = file.shapes
    if "rope_freqs.weight" in shapes:
        raise ValueError("rope_freqs.weight: Llama 3's rope scaling is not read from GGUF; take its folder")
    own = _Metadata(file, family)
    own.check_names()
    heads = own.whole("attention.head_count")
    biased = [f"blk.0.attn_{role}.bias" in shapes for role in ("q", "output")]
    config = unlooped(
        blocks=own.whole("block_count"),
        width=own.whole("embedding_length"),
        hidden=own.whole("feed_forward_length"),
        heads=heads,
        kv_heads=own.whole("attention.head_count_kv", heads),
        head_width=own.whole("attention.key_length", 0),
        vocabulary=shapes.get("token_embd.weight", (0,))[0],
        context=own.whole("context_length"),
        norm_eps=own.number("attention.layer_norm_rms_epsilon"),
        qk_norm="before-rotary" if family == "qwen3" else "none",
        attention_bias="qkvo" if biased[1] else "qkv" if biased[0] else "none",
        tied_head="output.weight" not in shapes,
        rotary_base=own.number("rope.freq_base", 10000.0),
        rotary_scaling=own.scaling(),
    )
    own.check_heads(config.head_size)
    return family, config


class _Metadata:
    """The metadata of one family in a file, by name without the family's prefix."""

    def __init__(self, file: GGUFFile, family: str) -> None:
        self._file, self._family = file, family

    def check_names(self) -> None:
        """Refuse metadata that are unknown, or that `LoopedGPT` does not support."""
        for full in self._file.names:
            root, _, name = full.partition(".")
            if root in ELSEWHERE or (root == self._family and name in KNOWN):
                continue
            if root != self._family or name not in NEUTRAL:
                raise ValueError(f"{full:.80}: unknown, and could change what is computed")
            if (value := self._file.get(full, object)) != NEUTRAL[name]:
                raise ValueError(f"{full}={value!r:.40}: must be {NEUTRAL[name]}")

    def whole(self, name: str, default: int | None = None) -> int:
        return whole(*self._one(name, int, default))

    def number(self, name: str, default: float | None = None) -> float:
        return number(*self._one(name, (int, float), default))

    def _one(self, name: str, kind: type | tuple[type, ...], default: Any) -> tuple[dict[str, Any], str]:
        full = f"{self._family}.{name}"
        return {full: self._file.get(full, kind, default)}, full

    def scaling(self) -> tuple[float, ...]:
        """The linear factor, which applies without a type too and has an older name; 0 means none."""
        kind = self._file.get(f"{self._family}.rope.scaling.type", str, "linear")
        if kind not in ("none", "linear"):
            raise ValueError(f"{self._family}.rope.scaling.type={kind!r:.40}: must be none or linear")
        old = self.number("rope.scale_linear", 0.0)
        factor = self.number("rope.scaling.factor", old)
        if old not in (0.0, factor):
            raise ValueError(
                f"{self._family}.rope.scale_linear={old} contradicts rope.scaling.factor={factor}"
            )
        return (factor,) if kind == "linear" and factor not in (0.0, 1.0) else ()

    def check_heads(self, width: int) -> None:
        """Refuse partially rotated heads, another attention scale, and values of another width."""
        for name in ("rope.dimension_count", "attention.value_length"):
            if (found := self.whole(name, width)) != width:
                raise ValueError(f"{self._family}.{name}={found}: must be {width}, the width of a head")
        scale = self.number("attention.scale", 0.0)
        if scale and not math.isclose(scale, width**-0.5, rel_tol=1e-5):
            raise ValueError(f"{self._family}.attention.scale={scale}: must be {width**-0.5:g}")
