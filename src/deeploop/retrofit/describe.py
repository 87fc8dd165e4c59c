"""Describe a pretrained model, and how it can be looped."""

from pathlib import Path

from deeploop.data.bpe import find_tokenizer
from deeploop.models.accounting import block_matrix_count, parameter_count
from deeploop.retrofit.source import Source, open_source


def inspect(path: Path) -> str:
    """Describe the model in a folder or file, without reading its tensors."""
    return "\n".join(f"{name + ':':<12} {text}" for name, text in describe(open_source(path)).items())


def describe(source: Source) -> dict[str, str]:
    """The properties of a source, by name."""
    config = source.config
    scaling = {0: "", 1: ", linear scaling", 4: ", llama3 scaling"}[len(config.rotary_scaling)]
    extras = [
        {"none": "no biases", "qkv": "biases on q, k, v", "qkvo": "biases on q, k, v, o"}[
            config.attention_bias
        ],
        *(["biases in SwiGLU"] if config.mlp_bias else []),
        *(["QK-norm"] if config.qk_norm != "none" else []),
        "tied head" if config.tied_head else "head of its own",
    ]
    quarter = max(1, config.blocks // 4)
    return {
        "source": f"{source.path} ({source.family}; {source.types})",
        "layers": f"{config.blocks} of width {config.width}, {block_matrix_count(config) / 1e6:.2f} M each",
        "attention": f"{config.heads} heads of {config.head_size}, {config.grouped_heads} of keys, values; "
        f"rotary base {config.rotary_base:g}{scaling}",
        "SwiGLU": f"hidden {config.hidden}; RMSNorm with ε = {config.norm_eps:g}",
        "with": ", ".join(extras),
        "parameters": f"{parameter_count(config):,}",
        "vocabulary": f"{config.vocabulary:,} words, context {config.context:,}",
        "tokenizer": _tokenizer(source),
        "can loop": f"any consecutive layers of 0 to {config.blocks - 1}: all have one shape. To rank them: "
        f"deeploop retrofit {source.path} --suggest --length {quarter} --data CORPUS",
    }


def _tokenizer(source: Source) -> str:
    try:
        tokenizer = find_tokenizer(str(source.path))
    except ValueError as error:
        return f"none that can be used ({error})"
    end = tokenizer.decode([tokenizer.end_of_text])
    return f"{tokenizer.name}; {end} separates documents"
