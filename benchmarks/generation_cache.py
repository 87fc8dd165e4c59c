"""Time 512 greedy tokens with and without the key-value cache, on the CPU.

    python benchmarks/generation_cache.py

The model has the shape of the recipe `tiny` (bytes, 2 blocks × 3 rounds) and a context of 640. Its weights
are fresh: the work does not depend on them. One run of each; both must give the same tokens.
"""

import time
from dataclasses import replace

import torch

from deeploop.eval.generation import generate
from deeploop.models import LoopedGPT
from deeploop.tasks.language.recipes import tiny

NEW_TOKENS, PROMPT = 512, list(b"def __init__(self, ")


@torch.inference_mode()
def generate_without_cache(model: LoopedGPT, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        states = model(torch.tensor([tokens])).states
        tokens.append(int(model.logits(states[0, -1]).argmax()))
    return tokens[len(prompt) :]


def main() -> None:
    model = LoopedGPT(replace(tiny().model, context=640)).eval()
    list(generate(model, PROMPT, max_tokens=8))  # the first calls set up threads and kernels
    started = time.perf_counter()
    cached = list(generate(model, PROMPT, max_tokens=NEW_TOKENS))
    between = time.perf_counter()
    plain = generate_without_cache(model, PROMPT, NEW_TOKENS)
    ended = time.perf_counter()
    assert cached == plain, "the cache changes the text"
    seconds = between - started, ended - between
    for name, value in zip(("with cache", "without"), seconds, strict=True):
        print(f"{name:<11}{value:8.2f} s  {NEW_TOKENS / value:8.1f} tokens/s")
    print(f"ratio      {seconds[1] / seconds[0]:8.1f}    on {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
