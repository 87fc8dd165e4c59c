"""Counter-based random numbers: the n-th draw of a key is the same on every machine.

A draw depends only on its key and its number, so any part of a sequence can be computed separately, in any
order, by any number of processes, and with any version of numpy.
"""

import numpy as np

FEISTEL_ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step
TEST_SHARE = 0.2  # share of generated instances that is held out, by a hash


def keys(*seeds: int, count: int = 1) -> np.ndarray:
    """`count` independent keys (uint64) derived from a tuple of seeds."""
    return np.random.SeedSequence(seeds).generate_state(count, np.uint64)


def words(key: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
    """`count` random uint64 for each of the numbered draws of a key, shape (len(numbers), count)."""
    rows = mix(key + GOLDEN * numbers.astype(np.uint64))
    return mix(rows[:, None] + GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def orders(random_words: np.ndarray) -> np.ndarray:
    """Turn random words into random permutations along the last axis."""
    return np.argsort(random_words, axis=-1, kind="stable")


def permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """The image of each index under a keyed permutation of 0 … size - 1 (int64), in O(1) memory.

    A Feistel network permutes the next power of four; a result outside the range is permuted
    again until it falls inside (cycle walking), fewer than four times on average.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    result = _feistel(index.astype(np.uint64), half, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half, keys)
    return result.astype(np.int64)


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half) | right


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: every bit of the input reaches every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
