"""Log-likelihoods of requests under a model: sorted by length, batched by tokens."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from deeploop.data.bpe import vocabulary_fits
from deeploop.eval.requests import TOO_LONG, Requests, Scores
from deeploop.models.gpt import LoopedGPT
from deeploop.nn.loss import MAX_LOGITS

STEP = 16  # padded lengths are multiples of this, so that a GPU sees few different shapes


def default_batch_tokens(device: torch.device | str) -> int:
    """A batch size that is efficient on the device: large on a GPU, within the caches on a CPU."""
    return 65536 if torch.device(device).type == "cuda" else 4096


@torch.inference_mode()
def score(
    model: LoopedGPT,
    requests: Requests,
    *,
    batch_tokens: int | None = None,
    device: torch.device | str = "cpu",
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext,
    progress: bool = False,
) -> Scores:
    """Score every request with a model in eval mode, at its current number of rounds.

    Inputs longer than the context are truncated on the left; if the continuation alone is longer, the score
    is TOO_LONG. `batch_tokens`, including padding, are computed at once.
    """
    check(model, requests)
    context = model.config.context
    lengths = np.minimum(input_lengths(requests), context)
    fits = fitting(requests, context)
    places = np.flatnonzero(fits)
    # In float64 the order of additions on a GPU has no visible effect.
    total = torch.zeros(len(requests), dtype=torch.float64, device=device)
    misses = torch.zeros(len(requests), dtype=torch.int64, device=device)
    with tqdm(total=len(places), desc="scoring", unit=" requests", disable=None if progress else True) as bar:
        for chosen, padded in batches(lengths[places], batch_tokens or default_batch_tokens(device), context):
            rows = places[chosen]
            arrays = pack(requests, rows, lengths, padded)
            tokens, positions, targets, owners = (_to(array, device) for array in arrays)
            with arithmetic():
                states = model(tokens).states.flatten(0, 1)[positions]
                logprob, is_best = _judge(model, states, targets)
            total.index_add_(0, owners, logprob.double())
            misses.index_add_(0, owners, (~is_best).long())
            bar.update(len(rows))
        # The only synchronization, inside the bar so that its rate is correct.
        logprobs, greedy = total.cpu().numpy(), misses.cpu().numpy() == 0
    return Scores(np.where(fits, logprobs, TOO_LONG), greedy & fits)


def fitting(requests: Requests, context: int) -> np.ndarray:
    """True for requests whose whole continuation fits the context."""
    return requests.continuations.lengths <= context


def input_lengths(requests: Requests) -> np.ndarray:
    """The number of tokens that a model reads for each request; the last one is only a target."""
    contexts, continuations = requests.lengths
    return contexts + continuations - 1


def check(model: LoopedGPT, requests: Requests) -> None:
    """Raise ValueError for requests with another vocabulary than the model's."""
    if not vocabulary_fits(requests.tokenizer, requests.vocabulary, model.config.vocabulary):
        raise ValueError(
            f"requests of {requests.tokenizer} tokens (vocabulary {requests.vocabulary}): the model's "
            f"vocabulary is {model.config.vocabulary}"
        )


def batches(lengths: np.ndarray, batch_tokens: int, context: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the indices of each batch and the length it is padded to, longest first.

    All batches of a padded length have the same number of rows, except the last.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        padded = min(-(-int(lengths[order[start]]) // STEP) * STEP, context)
        rows = order[start : start + max(1, batch_tokens // padded)]
        start += len(rows)
        yield rows, padded


def pack(requests: Requests, rows: np.ndarray, lengths: np.ndarray, padded: int) -> tuple[np.ndarray, ...]:
    """Pack a batch: tokens (B, T) padded on the right; for each continuation token, the position among B·T
    of the state that predicts it, the token, and its request."""
    tokens = np.zeros((len(rows), padded), dtype=np.int64)
    positions, targets, owners = [], [], []
    for b, index in enumerate(rows):
        context, continuation = requests.tokens(index)
        length, count = lengths[index], len(continuation)
        # The harness keeps the last context + 1 tokens, and reads all but the last.
        tokens[b, :length] = np.concatenate([context, continuation])[-length - 1 : -1]
        positions.append(b * padded + np.arange(length - count, length))
        targets.append(continuation)
        owners.append(np.full(count, index))
    return tokens, *(np.concatenate(part).astype(np.int64) for part in (positions, targets, owners))


def _judge(model: LoopedGPT, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target (P,), and True if it is the likeliest token; in fp32 and in chunks."""
    chunk = max(1, MAX_LOGITS // model.config.vocabulary)
    logprobs, best = [], []
    for x, target in zip(states.split(chunk), targets.split(chunk), strict=True):
        logits = model.logits(x)
        own = logits.gather(1, target[:, None])[:, 0]
        logprobs.append(own - logits.logsumexp(-1))
        best.append(logits.argmax(-1) == target)
    return torch.cat(logprobs), torch.cat(best)


def _to(array: np.ndarray, device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # the host packs the next batch meanwhile
