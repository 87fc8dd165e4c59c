"""Mixtures: shares, epochs with a limit, the same examples for any ranks and after a resume."""

import json
import math

import numpy as np
import pytest
import torch
from test_token_loader import Counting

from deeploop.data.mixture import MixtureLoader
from deeploop.data.token_loader import PrefetchLoader, TokenLoader
from deeploop.tasks.language.config import parse_mix

LARGE = 10**6


def mixed(lengths=(900, 500, 700), shares=(0.6, 0.1, 0.3), **settings):
    settings = {"context": 9, "batch": 12, "seed": 1, **settings}
    streams = [Counting(length, number * LARGE) for number, length in enumerate(lengths)]
    return MixtureLoader(streams, shares, **settings)


def drawn(loader, steps):
    """First tokens of the windows of so many steps."""
    return np.concatenate([loader.step_batch()[0][:, 0].numpy() for _ in range(steps)])


def test_shares_are_within_sampling_error_over_twenty_thousand_sequences():
    shares, count = (0.7, 0.25, 0.05), 20_000
    loader = mixed(shares=shares, batch=1_000)
    found = np.bincount(drawn(loader, 20) // LARGE, minlength=3) / count
    for share, own in zip(shares, found, strict=True):
        assert abs(own - share) < 4 * math.sqrt(share * (1 - share) / count)
    other = np.bincount(mixed(shares=shares, batch=1_000, seed=2).choose(1_000), minlength=3)
    assert (other != np.bincount(mixed(shares=shares, batch=1_000).choose(1_000), minlength=3)).any()


def test_neighbouring_draws_are_independent():
    chosen = mixed(shares=(0.5, 0.5, 0), batch=1).choose(100_000)
    assert abs(np.corrcoef(chosen[:-1], chosen[1:])[0, 1]) < 4 / math.sqrt(100_000)


def test_a_mixture_of_one_is_that_corpus():
    one = mixed(lengths=(900,), shares=(1.0,))
    alone = TokenLoader(Counting(900), context=9, batch=12, seed=1)
    np.testing.assert_array_equal(drawn(one, 30), drawn(alone, 30))


def test_each_corpus_goes_through_its_own_epochs():
    loader = mixed()
    seen = drawn(loader, 60)
    for number, length in enumerate((900, 500, 700)):
        own = seen[seen // LARGE == number] % LARGE
        alone = TokenLoader(Counting(length), context=9, batch=1, seed=1)
        np.testing.assert_array_equal(own, drawn(alone, len(own)))
        assert loader.epochs()[number] == alone.epochs() == pytest.approx(len(own) * 9 / length, rel=0.05)


def test_targets_are_the_inputs_shifted():
    inputs, targets = mixed().step_batch()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[:, -1] + 1, targets[:, -1])


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_epochs": (3, 3, 3)}, {"max_epochs": (0, 2, 0), "last": (0.1, 0.0, 0.9), "switch": 250}],
)
def test_the_same_examples_after_a_kill_and_over_1_2_1_ranks(settings):
    def loaders(world):
        return [mixed(rank=rank, world=world, **settings) for rank in range(world)]

    def steps(ranks, count):
        parts = [[rank.step_batch() for _ in range(count)] for rank in ranks]
        return [torch.cat([step[0] for step in one]) for one in zip(*parts, strict=True)]

    expected = steps(loaders(1), 45)
    found, state = [], None
    for world in (1, 2, 1):
        ranks = [PrefetchLoader(loader) for loader in loaders(world)]
        for rank in ranks:
            if state is not None:
                rank.load_state(json.loads(json.dumps(state)))
        found += steps(ranks, 15)
        state = ranks[0].state()
        assert all(rank.state() == state for rank in ranks)
        steps(ranks, 2)  # lost by a kill: the next ones begin at the state
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_order_is_stable_across_versions():
    """Checkpoints resume into this order, so it must never change unnoticed."""
    assert mixed().choose(16).tolist() == [2, 1, 0, 0, 0, 2, 2, 0, 0, 1, 2, 0, 0, 1, 0, 0]


def test_a_corpus_that_had_its_epochs_is_drawn_no_more_and_the_others_keep_their_proportions():
    loader = mixed(lengths=(90_000, 100, 90_000), shares=(0.4, 0.4, 0.2), max_epochs=(2, 2, 2), batch=1_000)
    seen = drawn(loader, 9) // LARGE
    windows = TokenLoader(Counting(100), context=9, batch=1, seed=1).windows_before(2, LARGE)
    assert (seen == 1).sum() == windows
    late = seen[1_000:]
    assert abs((late == 0).mean() - 2 / 3) < 4 * math.sqrt(2 / 9 / len(late))
    assert loader.epochs()[1] == 2
    at_once = mixed(lengths=(90_000, 100, 90_000), shares=(0.4, 0.4, 0.2), max_epochs=(2, 2, 2), batch=1)
    np.testing.assert_array_equal(at_once.choose(9_000), seen)


def test_all_epochs_used_up_is_one_line():
    loader = mixed(max_epochs=(1, 1, 1))
    with pytest.raises(
        ValueError, match=r"data\.max_epochs=1 1 1: every corpus .* after 2\d\d sequences; raise it"
    ):
        drawn(loader, 30)


def test_each_corpus_has_its_own_limit():
    loader = mixed(lengths=(90_000, 100, 200), shares=(0.2, 0.4, 0.4), max_epochs=(0, 1, 3), batch=100)
    drawn(loader, 30)
    assert loader.epochs()[1:] == [1, 3]
    assert loader.epochs()[0] < 1


@pytest.mark.parametrize("batch", [12, 7])
def test_the_last_phase_has_its_own_shares_from_its_sequence_on(batch):
    first, last = (0.6, 0.1, 0.3), (0.0, 0.2, 0.8)
    loader = mixed(shares=first, last=last, switch=1_000, batch=batch)
    seen = np.concatenate([drawn(loader, 1) for _ in range(3_000 // batch)]) // LARGE
    same = mixed(shares=first, batch=1_000).choose(1_000)
    np.testing.assert_array_equal(seen[:1_000], same)
    assert (seen[:1_000] == 0).any()
    late = np.bincount(seen[1_000:], minlength=3) / len(seen[1_000:])
    for share, own in zip(last, late, strict=True):
        assert abs(own - share) <= 4 * math.sqrt(share * (1 - share) / len(seen[1_000:]))


def test_a_corpus_held_back_is_never_drawn_and_may_come_later():
    loader = mixed(shares=(0.5, 0.5, 0.0))
    assert (drawn(loader, 50) < 2 * LARGE).all()
    later = mixed(shares=(0.2, 0.2, 0.6))
    later.load_state(loader.state())
    assert (drawn(later, 50) >= 2 * LARGE).mean() == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": (900, 501, 700)},
        {"lengths": (900, 500), "shares": (0.5, 0.5)},
        {"seed": 2},
        {"context": 8},
    ],
)
def test_state_of_another_order_is_refused(change):
    with pytest.raises(ValueError, match="loader state: "):
        mixed(**change).load_state(mixed().state())


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"corpora": [], "drawn": 0},
        {**mixed().state(), "drawn": -1},
        {**mixed().state(), "drawn": "1"},
    ],
)
def test_a_damaged_state_is_refused(state):
    with pytest.raises(ValueError, match="loader state: "):
        mixed().load_state(state)


def test_entries_are_folders_and_weights():
    parts = parse_mix(["data/a=0.7", "b=c=3", "late=0"])
    assert [(str(folder), weight) for folder, weight in parts] == [
        ("data/a", 0.7),
        ("b=c", 3.0),
        ("late", 0.0),
    ]
    assert parse_mix([]) == []


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["a=-0.1", "b=1"], r"data\.mix=a=-0\.1: the weight must be 0 or more"),
        (["a=inf"], "must be 0 or more, and finite"),
        (["a=1e308", "b=1e308"], r"data\.mix=a=1e308 b=1e308: the weights' sum is infinite"),
        (["a=0", "b=0"], r"data\.mix=a=0 b=0: every weight is 0"),
        (["a=1", "b"], r"data\.mix=b: must be FOLDER=WEIGHT"),
        (["a=much"], "must be FOLDER=WEIGHT"),
        (["=1"], "must be FOLDER=WEIGHT"),
        (["a=1", "a=2"], "names a folder twice"),
    ],
)
def test_bad_entries_are_one_line(entries, said):
    with pytest.raises(ValueError, match=said) as error:
        parse_mix(entries)
    assert "\n" not in str(error.value)
