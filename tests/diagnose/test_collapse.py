"""The unigram floor, the similarity of token states, and the verdict at its borders."""

import math

import numpy as np
import pytest
import torch

from deeploop.data.shards import Corpus
from deeploop.diagnose.collapse import judge, token_similarity, unigram_floor


@pytest.mark.parametrize(
    ("counts", "floor"),
    [
        ([1, 1], math.log(2)),
        ([3, 1], 2 * math.log(2) - 0.75 * math.log(3)),
        ([2, 1, 1, 0], 1.5 * math.log(2)),  # a token that never occurs changes nothing
        ([7], 0.0),
    ],
)
def test_the_floor_by_hand(counts, floor):
    assert unigram_floor(np.array(counts)) == pytest.approx(floor, abs=1e-15)


def test_no_fixed_prediction_beats_the_floor():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 50, 20)
    floor = unigram_floor(counts)
    for _ in range(100):
        guess = rng.dirichlet(np.ones(20))
        assert -(counts * np.log(guess)).sum() / counts.sum() > floor
    assert floor < math.log(20)


def test_the_floor_of_a_corpus_is_that_of_its_own_tokens(corpus):
    opened = Corpus.open(corpus)
    tokens = opened.validation.slice(0, len(opened.validation))
    assert unigram_floor(opened.counts("validation")) == unigram_floor(np.bincount(tokens, minlength=257))


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="holds no tokens"):
        unigram_floor(np.zeros(4, dtype=np.int64))


def test_similarity_is_the_mean_over_all_pairs():
    states = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = states.flatten(0, 1)
    pairs = [
        torch.cosine_similarity(tokens[s], tokens[t], dim=0).item()
        for s in range(10)
        for t in range(10)
        if s != t
    ]
    assert token_similarity(states) == pytest.approx(np.mean(pairs), abs=1e-6)


@pytest.mark.parametrize(
    ("states", "similarity"),
    [
        (torch.randn(1, 1, 8).expand(3, 4, 8), 1.0),
        (torch.randn(1, 1, 8) * torch.arange(1.0, 13.0).reshape(3, 4, 1), 1.0),  # only direction counts
        (torch.eye(6)[None], 0.0),
        (torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]]), -1.0),
        (torch.ones(1, 1, 4), 0.0),  # one token has nobody to resemble
    ],
    ids=["identical", "collinear", "orthogonal", "opposite", "single"],
)
def test_similarity_of_known_states(states, similarity):
    assert token_similarity(states) == pytest.approx(similarity, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "similarity", "verdict"),
    [
        (3.0, 1.0, "collapsed"),
        (9.0, 1.0, "collapsed"),
        (2.95, 0.96, "collapsed"),  # less than 0.1 below the floor is still on it
        (2.89, 0.94, "escaped"),
        (2.0, 0.1, "escaped"),
        (2.89, 0.96, "undecided"),  # off the floor, but the states still agree
        (2.95, 0.94, "undecided"),  # on the floor, but the states differ
        (2.5, 0.95, "undecided"),  # exactly at the limit is on neither side
        (3.0, 0.95, "undecided"),
        (3.0 - 0.1, 0.5, "undecided"),
        (3.0 - 0.1, 0.99, "collapsed"),
        (3.5, math.nan, "collapsed"),
        (math.nan, math.nan, "collapsed"),
    ],
)
def test_the_verdict_at_its_borders(loss, similarity, verdict):
    assert judge(loss, floor=3.0, similarity=similarity) == verdict
