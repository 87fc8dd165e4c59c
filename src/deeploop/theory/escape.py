"""When a looped start collapses under sign-like updates: a model of the first steps (docs/escape.md).

Adam's first steps move every entry of a matrix by the learning rate. While the gradients keep their signs,
a matrix drifts by S s s'^T, where S is the sum of the learning rates so far and s, s' are vectors of signs:
a rank-one matrix of operator norm width * S. Two such matrices in series (value, then output) turn a state
of RMS 1 into a branch of RMS b = (overlap * width * S)^2, the same at every position. N visits of attention
each turn the state by b / alpha towards that one direction:

    G = (N / alpha) (overlap * width * S)^factors,      token similarity = tanh(G)^2.

The initial beta has no part in it once width * S passes beta / 2, which takes some tens of steps.
"""

import math
from fractions import Fraction

from deeploop.theory.scaling import Real, ScalingRule, exact

OVERLAP = 0.6
"""Cosine between what a matrix reads and what it has drifted towards; fitted to five starts."""
RAMP = 3.5e-3
"""width * N / alpha times the steepest ramp that comes back; fitted to one border of 30 starts."""


def turn(N: int, rule: ScalingRule, width: int, S: float, *, factors: int = 2) -> float:
    """G: how far the visits have turned all states towards one direction, at the sum S of learning rates."""
    return N / rule.alpha(N) * math.pow(OVERLAP * width * S, factors)


def similarity(N: int, rule: ScalingRule, width: int, S: float, *, factors: int = 2) -> float:
    """Token similarity that the model predicts, of states that were orthogonal."""
    return math.tanh(turn(N, rule, width, S, factors=factors)) ** 2


def critical_sum(N: int, rule: ScalingRule, width: int, *, factors: int = 2) -> float:
    """The sum of learning rates at which G = 1: all positions are about to carry one state."""
    return math.pow(rule.alpha(N) / N, 1 / factors) / (OVERLAP * width)


def sum_exponent(p: Real, *, factors: int = 2) -> Fraction:
    """The power of R, at fixed K, with which the critical sum changes: -(1 - p) / factors."""
    return (exact(p) - 1) / factors


def critical_ramp(N: int, rule: ScalingRule, width: int) -> float:
    """The rise of the rate a step, from 0, beyond which a run does not come back from the collapse.

    Measured, not derived. That it goes with alpha / N was found over exponents (docs/escape.md); that it
    goes with 1 / width is the model's.
    """
    return RAMP * rule.alpha(N) / (N * width)


def ramp_exponent(p: Real) -> Fraction:
    """The power of R, at fixed K, with which the critical ramp changes: -(1 - p)."""
    return exact(p) - 1
