"""`deeploop inspect`: what a pretrained model is, and what of it can be looped."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from deeploop.commands.parsing import run_command
from deeploop.data.bpe import find_tokenizer

if TYPE_CHECKING:
    from deeploop.retrofit.source import Source


@dataclass(frozen=True, kw_only=True)
class InspectArgs:
    """Says what a pretrained model is: layers, sizes, vocabulary, tokenizer, and what can be looped."""

    source: Positional[Path]
    """A transformers folder (safetensors) or a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model."""


def run(args: InspectArgs) -> str:
    """Reads the description and the names of the tensors, not the tensors."""
    from deeploop.retrofit.source import open_source  # now: it waits for torch, --help does not

    return "\n".join(f"{name + ':':<12} {text}" for name, text in describe(open_source(args.source)).items())


def describe(source: "Source") -> dict[str, str]:
    """What there is to say of a source, line by line."""
    from deeploop.models.accounting import block_matrix_count, parameter_count

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
        "can loop": f"any consecutive layers of 0 to {config.blocks - 1}: all have one shape. Which bear it: "
        f"deeploop retrofit {source.path} --suggest --length {quarter} --data CORPUS",
    }


def _tokenizer(source: "Source") -> str:
    try:
        tokenizer = find_tokenizer(str(source.path))
    except ValueError as error:
        return f"none that can be used ({error})"
    end = tokenizer.decode([tokenizer.end_of_text])
    return f"{tokenizer.name}; {end} stands between documents"


def main(arguments: list[str]) -> int:
    return run_command(InspectArgs, run, arguments, prog="deeploop inspect")
