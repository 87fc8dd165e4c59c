"""Text from a built model, streamed as it is produced.

model, tokenizer = deeploop.load("runs/tiny")
text = generate_text(model, tokenizer, "import ", max_tokens=100)
"""

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deeploop.data.tokenizers import Tokenizer
from deeploop.models.adaptive import AdaptiveDepth
from deeploop.models.gpt import LoopedGPT

LanguageModel = LoopedGPT | AdaptiveDepth
Ending = Literal["document", "max_tokens", "context"]
"""Why no more text came: the document ended, as much came as was asked for, or the context is full."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token every time."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 is off."""
    top_p: float = 1.0
    """Draw from the fewest tokens that hold this much of the probability; 1 is off."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (off) or a number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1 (off)")


GREEDY = Sampling(temperature=0)
COLDEST = 1e-6  # below it nothing but the likeliest token is ever drawn, and logits overflow


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token, from logits (V,): top-k first, then top-p of what is left."""
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite: its weights are too large for this depth")
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    # On the CPU, so that a seed means the same draws on every device.
    ranked, tokens = (logits.cpu() / sampling.temperature).sort(descending=True, stable=True)
    shares = ranked[: sampling.top_k or None].softmax(-1)
    if sampling.top_p < 1:
        shares = shares[: int((shares.cumsum(-1) < sampling.top_p).sum()) + 1]
    return int(tokens[torch.multinomial(shares, 1, generator=generator)])


def room(model: LanguageModel, prompt: Sequence[int]) -> int:
    """How many tokens can follow the prompt: the last of them is never read, so it needs no position."""
    context = model.config.context
    if not 1 <= len(prompt) <= context:
        raise ValueError(
            f"prompt of {len(prompt)} tokens: must be 1 to {context}, the model's context; shorten it"
        )
    return context - len(prompt) + 1


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling = GREEDY,
    stop: int | None = None,
) -> Iterator[int]:
    """Token after token behind the prompt, up to `max_tokens`, to a `stop` token or to a full context."""
    count = min(max_tokens, room(model, prompt))
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = model.new_cache(len(prompt) + count - 1)
    device = next(model.parameters()).device
    new = list(prompt)
    for _ in range(count):
        states = model(torch.tensor([new], device=device), cache=cache).states
        token = draw(model.logits(states[0, -1]), sampling, generator)
        yield token
        if token == stop:
            return
        new = [token]


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    write: Callable[[str], object],
    max_tokens: int,
    sampling: Sampling = GREEDY,
) -> Ending:
    """Writes the prompt and what follows it, whole characters at a time; returns why it ended."""
    # An empty prompt is end-of-text: it stands before every document.
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    # A character may be spread over several tokens: the decoder holds back what isn't whole yet.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    room(model, ids)  # refuses a prompt before anything is written
    write(b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace"))
    count, token, stop = 0, -1, tokenizer.end_of_text
    for token in generate(model, ids, max_tokens=max_tokens, sampling=sampling, stop=stop):
        count += 1
        write(decoder.decode(tokenizer.token_bytes(token)))
    write(decoder.decode(b"", final=True))
    if token == stop:
        return "document"
    return "max_tokens" if count == max_tokens else "context"


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    max_tokens: int = 200,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    top_p: float = Sampling.top_p,
    seed: int = Sampling.seed,
) -> str:
    """The prompt and what follows it, as `deeploop generate` prints it; that is `deeploop.generate`.

    The text ends after `max_tokens`, where the model ends the document, or where its context is full.
    """
    pieces: list[str] = []
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    stream_text(model, tokenizer, prompt, write=pieces.append, max_tokens=max_tokens, sampling=sampling)
    return "".join(pieces)
