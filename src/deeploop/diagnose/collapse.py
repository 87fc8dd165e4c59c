"""The unigram collapse: all positions have the same state, and the loss is the unigram entropy.

If the learning rate rises too fast for the exponent, a block with outer norms collapses in its first hundred
steps. Most runs that are collapsed after warm-up never recover.
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Verdict = Literal["collapsed", "escaped", "undecided"]

LOSS_MARGIN = 0.1
"""The loss must be this much below the floor, in nats, to count as below it."""
SIMILARITY_LIMIT = 0.95
"""Mean cosine between token states above which they count as the same state."""


def unigram_floor(counts: np.ndarray) -> float:
    """Entropy of token counts in nats: the best loss of a prediction without position and context."""
    seen = counts[counts > 0].astype(np.float64)
    if seen.size == 0:
        raise ValueError("unigram counts are empty: the split holds no tokens")
    shares = seen / seen.sum()
    return float(-(shares * np.log(shares)).sum())


def token_similarity(states: Tensor) -> float:
    """Mean cosine over all pairs of different tokens of states (…, tokens, width).

    With unit vectors u_t, Σ_{s≠t} u_s·u_t = ‖Σ u_t‖² − T: one sum instead of T² products.
    """
    units = F.normalize(states.detach().float().flatten(0, -2), dim=-1)
    tokens = units.shape[0]
    total = units.sum(0, dtype=torch.float64)
    return float((total.square().sum() - tokens) / max(1, tokens * (tokens - 1)))


def judge(loss: float, floor: float, similarity: float) -> Verdict:
    """Judge a validation: collapsed, escaped, or undecided."""
    off_the_floor = loss < floor - LOSS_MARGIN
    if off_the_floor and similarity < SIMILARITY_LIMIT:
        return "escaped"
    if not off_the_floor and (similarity > SIMILARITY_LIMIT or math.isnan(similarity)):
        return "collapsed"
    return "undecided"
