"""The loader: a bijective order, each window once an epoch, ranks that partition, exact resume."""

import json

import numpy as np
import pytest
import torch

from deeploop.data import TokenStream
from deeploop.data.draws import permute
from deeploop.data.shards import write_shard
from deeploop.data.token_loader import PrefetchLoader, TokenLoader, validation_windows


class Counting:
    """A stream whose token at place i is first + i, so that a window's first input is where it starts."""

    def __init__(self, length, first=0):
        self._length, self._first = length, first

    def __len__(self):
        return self._length

    def slice(self, start, stop):
        assert 0 <= start <= stop <= self._length
        return np.arange(self._first + start, self._first + stop)


def starts(loader, steps):
    return np.concatenate([loader.step_batch()[0][:, 0].numpy() for _ in range(steps)])


def keys(seed):
    return np.random.default_rng(seed).integers(0, 2**64, 6, dtype=np.uint64)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4096, 4097, 100_003])
def test_permutation_is_a_bijection(size):
    for seed in range(3):
        image = permute(np.arange(size), size, keys(seed))
        np.testing.assert_array_equal(np.sort(image), np.arange(size))


def test_permutation_does_not_depend_on_how_it_is_asked():
    whole = permute(np.arange(1000), 1000, keys(0))
    parts = [permute(np.arange(i, i + 8), 1000, keys(0)) for i in range(0, 1000, 8)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_permutation_mixes_and_depends_on_the_keys():
    size = 10_000
    one, other = (permute(np.arange(size), size, keys(seed)) for seed in (0, 1))
    assert abs(np.corrcoef(np.arange(size), one)[0, 1]) < 0.05
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.05
    assert (one == other).mean() < 0.01


def test_permutation_of_a_huge_range_is_quick():
    image = permute(np.arange(10**11, 10**11 + 512), 10**12, keys(0))
    assert len(np.unique(image)) == 512
    assert image.min() >= 0
    assert image.max() < 10**12


@pytest.mark.parametrize(
    ("length", "context", "batch"), [(1000, 7, 4), (1001, 10, 1), (50, 49, 3), (9, 1, 5)]
)
def test_each_epoch_visits_every_window_once(length, context, batch):
    loader = TokenLoader(Counting(length), context=context, batch=batch, seed=3)
    seen = starts(loader, 4 * length // context // batch + 4)
    for _ in range(3):
        offset = seen[0] % context
        windows = (length - 1 - offset) // context
        epoch, seen = seen[:windows], seen[windows:]
        assert sorted(epoch) == list(range(offset, length - context, context))


def test_epochs_and_seeds_differ_and_a_seed_repeats():
    def drawn(seed, count):
        return starts(TokenLoader(Counting(1001), context=7, batch=1, seed=seed), count)

    np.testing.assert_array_equal(drawn(0, 140), drawn(0, 140))
    assert (drawn(0, 140) // 7 != drawn(1, 140) // 7).mean() > 0.9
    windows = (1000 - drawn(0, 1)[0] % 7) // 7
    first, second = np.split(drawn(0, windows + 140), [windows])
    assert (first[:140] // 7 != second // 7).mean() > 0.9
    assert len({drawn(seed, 1)[0] % 7 for seed in range(30)}) > 3


def test_order_is_stable_across_versions():
    """Checkpoints resume into this order, so it must never change unnoticed."""
    loader = TokenLoader(Counting(10_000), context=10, batch=4, seed=0)
    assert starts(loader, 2).tolist() == [4164, 1174, 154, 1584, 4734, 6554, 9114, 1624]


def test_targets_are_the_inputs_shifted(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16)
    write_shard(tmp_path / "0.bin", tokens[:123])
    write_shard(tmp_path / "1.bin", tokens[123:])
    stream = TokenStream([tmp_path / "0.bin", tmp_path / "1.bin"])
    inputs, targets = TokenLoader(stream, context=16, batch=20, seed=0).step_batch()
    assert inputs.shape == targets.shape == (20, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    windows = {tuple(tokens[i : i + 17].tolist()) for i in range(500 - 16)}
    for row, last in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True):
        assert (*row, last) in windows


@pytest.mark.parametrize("world", [2, 3, 6])
def test_ranks_partition_the_one_rank_batch(world):
    def loader(rank, world):
        return TokenLoader(Counting(700), context=9, batch=6, seed=1, rank=rank, world=world)

    alone, ranks = loader(0, 1), [loader(rank, world) for rank in range(world)]
    for _ in range(30):  # two epochs and a bit
        inputs, targets = alone.step_batch()
        parts = [rank.step_batch() for rank in ranks]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)
        assert all(rank.state() == alone.state() for rank in ranks)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("done", [0, 5, 19, 40])
def test_resume_equals_uninterrupted_for_any_number_of_ranks(world, done):
    def loader(rank=0, world=1):
        return TokenLoader(Counting(700), context=9, batch=4, seed=1, rank=rank, world=world)

    uninterrupted = loader()
    for _ in range(done):
        uninterrupted.step_batch()
    state = json.loads(json.dumps(uninterrupted.state()))
    ranks = [loader(rank, world) for rank in range(world)]
    for rank in ranks:
        rank.load_state(state)
    for _ in range(25):
        together = torch.cat([rank.step_batch()[0] for rank in ranks])
        assert torch.equal(together, uninterrupted.step_batch()[0])


@pytest.mark.parametrize("change", [{"seed": 2}, {"context": 8}, {"length": 701}])
def test_state_of_another_order_is_refused(change):
    def loader(length=700, context=9, seed=1):
        return TokenLoader(Counting(length), context=context, batch=4, seed=seed)

    with pytest.raises(ValueError, match=r"loader state: (seed 1.*seed 2|context 9.*8|tokens 700.*701)"):
        loader(**change).load_state(loader().state())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 5, "world": 2}, "batch 5.*2 ranks"),
        ({"batch": 0}, "batch 0"),
        ({"rank": 2, "world": 2}, "rank 2"),
        ({"context": 0}, "context 0"),
        ({"context": 100}, "context 100.*needs 101 tokens.*has 100"),
    ],
)
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenLoader(Counting(100), **{"context": 8, "batch": 4, "seed": 0, **settings})


def test_shortest_stream_has_one_window():
    loader = TokenLoader(Counting(101), context=100, batch=3, seed=0)
    assert starts(loader, 2).tolist() == [0] * 6


def test_validation_windows_are_fixed_distinct_and_spread():
    inputs, targets = validation_windows(Counting(10_001), 10, 50)
    assert torch.equal(inputs + 1, targets)
    assert inputs[:, 0].tolist() == list(range(0, 10_000, 200))
    again, _ = validation_windows(Counting(10_001), 10, 50)
    assert torch.equal(inputs, again)


def test_validation_windows_of_a_short_stream_are_all_there_are():
    inputs, _ = validation_windows(Counting(1005), 10, 10**6)
    assert inputs[:, 0].tolist() == list(range(0, 1000, 10))
    with pytest.raises(ValueError, match="validation windows 0"):
        validation_windows(Counting(1005), 10, 0)
    with pytest.raises(ValueError, match="context 2000"):
        validation_windows(Counting(1005), 2000, 1)


def test_made_ahead_the_batches_and_the_states_are_the_same():
    """Also from a state in the middle, taken while the next batch is already made."""
    plain, ahead = (TokenLoader(Counting(500), context=4, batch=8, seed=1) for _ in range(2))
    ahead = PrefetchLoader(ahead)
    assert ahead.state() == plain.state()
    for _ in range(20):  # more than an epoch
        for mine, expected in zip(ahead.step_batch(), plain.step_batch(), strict=True):
            assert torch.equal(mine, expected)
        assert ahead.state() == plain.state()
    resumed = PrefetchLoader(TokenLoader(Counting(500), context=4, batch=8, seed=1))
    resumed.step_batch()
    resumed.load_state(ahead.state())
    assert resumed.state() == plain.state()
    assert torch.equal(resumed.step_batch()[0], plain.step_batch()[0])


def test_an_error_made_ahead_belongs_to_its_own_batch():
    class Breaking(Counting):
        reads = 0

        def slice(self, start, stop):
            self.reads += 1
            if self.reads > 8:
                raise ValueError("truncated shard")
            return super().slice(start, stop)

    ahead = PrefetchLoader(TokenLoader(Breaking(500), context=4, batch=8, seed=1))
    ahead.step_batch()
    with pytest.raises(ValueError, match="truncated shard"):
        ahead.step_batch()
