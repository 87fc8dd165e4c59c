"""Generate text with a model, streaming it as it is produced.

model, tokenizer = deeploop.load("runs/tiny")
text = generate_text(model, tokenizer, "import ", max_tokens=100)
"""

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from deeploop.data.tokenizers import Tokenizer
from deeploop.eval.decoding import Choice, Choose, Decoder
from deeploop.eval.sampling import Sampling
from deeploop.models.adaptive import AdaptiveDepth
from deeploop.models.gpt import LoopedGPT

LanguageModel = LoopedGPT | AdaptiveDepth
Ending = Literal["document", "max_tokens", "context"]
"""The reason why generation ended: end of the document, `max_tokens` reached, or the context is full."""


GREEDY = Sampling(temperature=0)
COLDEST = 1e-6  # below it, only the likeliest token would ever be drawn, and logits would overflow


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor | None = None) -> Choice:
    """Choose the next tokens (B,) from logits (B, V); also return the largest logits (NaN if there is one).

    With a temperature, each is drawn by a number from [0, 1) after top-k, then top-p: the token at which the
    cumulative probability, likeliest first, exceeds the number.
    """
    if sampling.temperature < COLDEST:
        top, tokens = logits.max(-1)
        return Choice(tokens, top)
    assert uniform is not None, "a draw for each sequence"
    ranked, tokens = (logits / sampling.temperature).sort(descending=True, stable=True)
    reached = ranked[:, : sampling.top_k or None].softmax(-1).cumsum(-1)
    # Tokens before which less than top_p was reached; always includes the first.
    kept = ((reached < sampling.top_p).sum(-1, keepdim=True) + 1).clamp(max=reached.shape[1])
    drawn = uniform[:, None] * reached.gather(-1, kept - 1)
    place = torch.minimum((reached <= drawn).sum(-1, keepdim=True), kept - 1)
    return Choice(tokens.gather(-1, place)[:, 0], ranked[:, 0])


def uniform_draws(sampling: Sampling, count: int, batch: int) -> Tensor:
    """One draw per step and sequence, (count, batch); sequence b is drawn as if alone with seed + b.

    They are made on the CPU, so that a seed gives the same draws on every device.
    """
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(batch)]
    return torch.stack([torch.rand(count, generator=generator) for generator in generators], dim=1)


def require_count(max_tokens: int) -> None:
    """Raise ValueError for a negative number of tokens."""
    if max_tokens < 0:
        raise ValueError(f"max_tokens={max_tokens}: must be 0 or more")


def require_finite(top: float) -> None:
    """Raise ValueError if the largest logit is not finite."""
    if not math.isfinite(top):
        raise ValueError("the model's logits are not finite: its weights are too large for this depth")


def room(model: LanguageModel, prompt: Sequence[int]) -> int:
    """The number of tokens that fit after the prompt; the last one is never read and needs no position."""
    context = model.config.context
    if not 1 <= len(prompt) <= context:
        raise ValueError(
            f"prompt of {len(prompt)} tokens: must be 1 to {context}, the model's context; shorten it"
        )
    return context - len(prompt) + 1


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling = GREEDY,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield tokens after the prompt, up to `max_tokens`, a `stop` token or a full context."""
    require_count(max_tokens)
    if max_tokens == 0:
        return
    if isinstance(model, LoopedGPT):
        for (token,) in generate_batch(model, [prompt], max_tokens=max_tokens, sampling=sampling, stop=stop):
            assert token is not None
            yield token
    else:
        yield from _generate_adaptively(model, prompt, max_tokens, sampling, stop)


def generate_batch(
    model: LoopedGPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = GREEDY,
    stop: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield a list per step: the next token of every prompt, or None once it has ended as in `generate`.

    Prompts may differ in length; each gives the same tokens as alone, except for bf16 rounding on a GPU.
    There, tokens are read back one step late, so that the device never waits.
    """
    require_count(max_tokens)
    if not prompts or max_tokens == 0:
        return
    left = [min(max_tokens, room(model, prompt)) for prompt in prompts]
    count = max(left)
    capacity = max(len(prompt) + most - 1 for prompt, most in zip(prompts, left, strict=True))
    chosen = _chooser(sampling, count, len(prompts), model.cos.device)
    decoder = Decoder(model, prompts, capacity=capacity, choose=chosen)
    for tokens, tops in _read_behind(decoder, count):
        for top, more in zip(tops, left, strict=True):
            require_finite(top if more else 0.0)
        pairs = [*zip(tokens, left, strict=True)]
        yield [token if more else None for token, more in pairs]
        left = [0 if token == stop else max(0, more - 1) for token, more in pairs]
        if not any(left):
            return


def _read_behind(decoder: Decoder, count: int) -> Iterator[tuple[list[int], list[float]]]:
    """Yield the choice of every step; with a graph, a step is read after the next one is launched."""
    behind: _Readback | None = None
    for step in range(count):
        ready: _Readback | None = _Readback(decoder.step() if step else decoder.start())
        if decoder.uses_graph:
            behind, ready = ready, behind
        if ready is not None:
            yield ready.wait()
    if behind is not None:
        yield behind.wait()


class _Readback:
    """A choice being copied to the host."""

    def __init__(self, choice: Choice) -> None:
        self._parts = [part.to("cpu", non_blocking=True, copy=True) for part in choice]
        self._event: torch.cuda.Event | None = None
        if choice.tokens.is_cuda:
            self._event = torch.cuda.current_stream(choice.tokens.device).record_event()

    def wait(self) -> tuple[list[int], list[float]]:
        if self._event is not None:
            self._event.synchronize()
        tokens, tops = self._parts
        return tokens.tolist(), tops.tolist()


def _chooser(sampling: Sampling, count: int, batch: int, device: torch.device) -> Choose:
    if sampling.temperature < COLDEST:
        return lambda logits: choose(logits, sampling)
    draws = uniform_draws(sampling, count, batch).to(device)
    step = torch.zeros(1, dtype=torch.long, device=device)  # on the device, as it is part of the graph

    def draw(logits: Tensor) -> Choice:
        choice = choose(logits, sampling, draws[step][0])
        step.add_(1)
        return choice

    return draw


@torch.inference_mode()
def _generate_adaptively(
    model: AdaptiveDepth, prompt: Sequence[int], max_tokens: int, sampling: Sampling, stop: int | None
) -> Iterator[int]:
    """Generate with adaptive depth, whose steps differ and can't be captured in a graph."""
    count = min(max_tokens, room(model, prompt))
    draws = uniform_draws(sampling, count, 1)
    cache = model.new_cache(len(prompt) + count - 1)
    device = next(model.parameters()).device
    new = list(prompt)
    for uniform in draws:
        states = model(torch.tensor([new], device=device), cache=cache).states
        tokens, top = choose(model.logits(states[:, -1]), sampling, uniform.to(device))
        require_finite(float(top))
        new = [int(tokens)]
        yield new[0]
        if new[0] == stop:
            return


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    write: Callable[[str], object],
    max_tokens: int,
    sampling: Sampling = GREEDY,
) -> Ending:
    """Write the prompt and its continuation in whole characters; return why it ended."""
    ids = _encoded(tokenizer, prompt)
    # A character may take several tokens: the decoder holds back incomplete ones.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    room(model, ids)  # raises for a long prompt before anything is written
    write(_decoded(tokenizer, ids))
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
    """Continue a prompt, as `deeploop generate` prints it. This is `deeploop.generate`.

    The text ends after `max_tokens`, at the end of the document, or when the context is full.
    """
    pieces: list[str] = []
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    stream_text(model, tokenizer, prompt, write=pieces.append, max_tokens=max_tokens, sampling=sampling)
    return "".join(pieces)


def generate_texts(
    model: LoopedGPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int = 200,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    top_p: float = Sampling.top_p,
    seed: int = Sampling.seed,
) -> list[str]:
    """Continue several prompts at once. This is `deeploop.generate_batch`.

    Each text is what `deeploop.generate` returns for its prompt, with seed + n for prompt n (from 0), except
    for bf16 rounding on a GPU.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts: must be a list of texts; for one text call deeploop.generate")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    every = [_encoded(tokenizer, prompt) for prompt in prompts]
    new: list[list[int]] = [[] for _ in prompts]
    stop = tokenizer.end_of_text
    for tokens in generate_batch(model, every, max_tokens=max_tokens, sampling=sampling, stop=stop):
        for row, token in zip(new, tokens, strict=True):
            row += [] if token is None else [token]
    return [_decoded(tokenizer, ids) + _decoded(tokenizer, row) for ids, row in zip(every, new, strict=True)]


def _encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    # An empty prompt becomes end-of-text, which precedes every document.
    return tokenizer.encode(prompt) or [tokenizer.end_of_text]


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
