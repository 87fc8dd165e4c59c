"""`deeploop inspect`: describe a pretrained model, and which of its layers can be looped."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class InspectArgs:
    """Show a pretrained model's layers, sizes, vocabulary and tokenizer, and whether it can be looped."""

    source: Positional[Path]
    """A transformers folder (safetensors) or a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model."""


def run(args: InspectArgs) -> str:
    from deeploop.retrofit.describe import inspect

    return inspect(args.source)
