"""The unigram collapse: every position carries one state, and the loss stands at the unigram entropy.

Too fast a rise of the learning rate, at too small an exponent, drives a block with outer norms there in its
first hundred steps, and most runs that stand there after warm-up never leave.
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Verdict = Literal["collapsed", "escaped", "undecided"]

LOSS_MARGIN = 0.1
"""Nats below the floor that a loss must reach before it counts as off the floor."""
SIMILARITY_LIMIT = 0.95
"""Mean cosine between token states above which they count as one state."""


def unigram_floor(counts: np.ndarray) -> float:
    """Entropy in nats of token counts: no prediction that ignores position and context is better on them."""
    seen = counts[counts > 0].astype(np.float64)
    if seen.size == 0:
        raise ValueError("unigram counts are empty: the split holds no tokens")
    shares = seen / seen.sum()
    return float(-(shares * np.log(shares)).sum())


def token_similarity(states: Tensor) -> float:
    """Mean cosine over all pairs of different tokens of (…, tokens, width) states.

    With unit vectors u_t, Σ_{s≠t} u_s·u_t = ‖Σ u_t‖² − T: one sum in place of T² products.
    """
    units = F.normalize(states.detach().float().flatten(0, -2), dim=-1)
    tokens = units.shape[0]
    total = units.sum(0, dtype=torch.float64)
    return float((total.square().sum() - tokens) / max(1, tokens * (tokens - 1)))


def judge(loss: float, floor: float, similarity: float) -> Verdict:
    """Judge a validation: collapsed, escaped, or between."""
    off_the_floor = loss < floor - LOSS_MARGIN
    if off_the_floor and similarity < SIMILARITY_LIMIT:
        return "escaped"
    if not off_the_floor and (similarity > SIMILARITY_LIMIT or math.isnan(similarity)):
        return "collapsed"
    return "undecided"
