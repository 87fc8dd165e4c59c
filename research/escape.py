"""When the token states of a looped start merge under sign-like updates: a model of the first steps.

docs/escape.md has its tests. Which starts recover from it is not derived: `critical_ramp` is a fit.

Adam's first steps move every entry of a matrix by the learning rate. While the gradients keep their signs, a
matrix drifts by S s s'^T, where S is the sum of the learning rates so far and s, s' are vectors of signs.
Attention reads the mean over positions, of which token similarity m leaves RMS sqrt(m). The value matrix
reads its signs, the output matrix writes them: two factors in series, of gain (width * S)^2. N visits of
x <- Norm(alpha x + f) multiply the share of the state that all positions have in common:

    m / (1 - m) = (2 / pi) m_0 exp(2 G),      G = (N / alpha) (width * S)^2,

where m_0 is the similarity at step 0, and 2 / pi is the squared cosine of a Gaussian vector to its signs.
Nothing is fitted. The initial beta has no part in it once width * S passes beta / 2.
"""

import math
from fractions import Fraction

from deeploop.theory.scaling import Real, ScalingRule, exact

SIGNS = 2 / math.pi
"""Squared cosine between a Gaussian vector and its signs."""
INITIAL = 0.0126
"""Token similarity at step 0, measured on GPT-2 tokens at widths 512 and 768; on bytes it is 0.08 to 0.1."""
RAMP = 3.5e-3
"""width * N / alpha times the steepest ramp that comes back; fitted to one border of 30 starts."""


def turn(N: int, rule: ScalingRule, width: int, S: float) -> float:
    """G: the logarithm by which the visits multiply what positions have in common, at the sum S of rates."""
    return N / rule.alpha(N) * math.pow(width * S, 2)


def similarity(N: int, rule: ScalingRule, width: int, S: float, *, initial: float = INITIAL) -> float:
    """Token similarity that the model predicts for the onset of the collapse, not for the recovery."""
    grown = SIGNS * math.exp(min(2 * turn(N, rule, width, S), 700.0))  # beyond 700 exp is out of range
    odds = initial * (grown + 1 - SIGNS)  # what lies beside the signs stays as it is
    return odds / (1 + odds)


def critical_sum(N: int, rule: ScalingRule, width: int, *, initial: float = INITIAL) -> float:
    """The sum of learning rates at which the predicted similarity is one half: positions have merged."""
    needed = math.log((1 / initial - 1 + SIGNS) / SIGNS) / 2
    return math.sqrt(rule.alpha(N) / N * needed) / width


def sum_exponent(p: Real) -> Fraction:
    """The power of R, at fixed K, with which the critical sum changes: -(1 - p) / 2."""
    return (exact(p) - 1) / 2


def critical_ramp(N: int, rule: ScalingRule, width: int) -> float:
    """The rise of the rate per step, from 0, beyond which a run does not come back from the collapse at once.

    Fitted, not derived: over exponents at N = 18 and width 512, within 300 steps. The dependence on N was
    checked to a factor of two at K = 4 on a CPU, that on the width is the model's. It is too low by 4 to 30
    times at K = 2 and on source code (docs/escape.md).
    """
    return RAMP * rule.alpha(N) / (N * width)


def ramp_exponent(p: Real) -> Fraction:
    """The power of R, at fixed K, with which the critical ramp changes: -(1 - p)."""
    return exact(p) - 1
