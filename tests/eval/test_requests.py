"""Requests and scores survive their files unchanged; what is damaged or a stranger's is refused."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from deeploop.eval.requests import (
    FORMAT,
    Request,
    Requests,
    Scores,
    load_scores,
    read_archive,
    save_scores,
    write_archive,
)

VOCABULARY = 300


@pytest.fixture
def asked():
    draw = random.Random(1)

    def tokens(most):
        return [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, most))]

    return [
        Request(context, tokens(5), task, shots, document, choice)
        for shots in (0, 1)
        for task in ("one", "two")
        for document in range(3)
        for context in [tokens(20)]
        for choice in range(4)
    ]


def build(asked):
    return Requests.build(asked, tokenizer="words", vocabulary=VOCABULARY)


def as_lists(requests):
    return [
        (list(map(int, r.context)), list(map(int, r.continuation)), *r[2:])
        for r in map(requests.request, range(len(requests)))
    ]


def test_a_file_gives_back_what_was_asked(asked, tmp_path):
    requests = replace(build(asked), settings={"limit": 3})
    requests.save(tmp_path / "r.npz")
    loaded = Requests.load(tmp_path / "r.npz")
    assert as_lists(loaded) == [tuple(request) for request in asked]
    assert (loaded.tokenizer, loaded.vocabulary, loaded.settings) == ("words", VOCABULARY, {"limit": 3})
    assert loaded.items == 12
    assert [path.name for path in tmp_path.iterdir()] == ["r.npz"]


def test_a_shared_context_is_stored_once(asked):
    requests = build(asked)
    assert len(requests.contexts.ends) == 12
    assert len(requests) == 48


def test_joined_and_split_again_they_are_the_same(asked):
    parts = [build([request for request in asked if request.shots == shots]) for shots in (0, 1)]
    joined = Requests.join(parts, {})
    assert as_lists(joined) == [tuple(request) for request in asked]
    assert joined.shots == [0, 1]
    assert [joined.with_shots(shots).digest() for shots in (0, 1)] == [part.digest() for part in parts]


@pytest.mark.parametrize(
    "change",
    [
        {"context": [7]},
        {"continuation": [7, 7, 7, 7, 7, 7]},
        {"task": "three"},
        {"shots": 2},
        {"document": 9},
        {"choice": 9},
    ],
)
def test_any_change_shows_in_the_digest(asked, change):
    changed = [asked[0]._replace(**change), *asked[1:]]
    assert build(changed).digest() != build(asked).digest()


def test_order_and_the_border_between_the_parts_show_in_the_digest(asked):
    assert build(asked[::-1]).digest() != build(asked).digest()
    assert build([Request([1, 2], [3])]).digest() != build([Request([1], [2, 3])]).digest()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], [1]), "an empty context or continuation"),
        (Request([1], []), "an empty context or continuation"),
        (Request([1], [VOCABULARY]), "a token outside the vocabulary 300"),
    ],
)
def test_a_request_nobody_can_score(request_, message):
    with pytest.raises(ValueError, match=message):
        build([Request([1], [2]), request_])


def test_at_least_one_request():
    with pytest.raises(ValueError, match="no requests"):
        build([])


def rewrite(path, **changes):
    """The archive with some arrays changed, as a stranger could."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, change in changes.items():
        arrays[name] = change(arrays[name])
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def with_meta(**changes):
    return lambda meta: np.frombuffer(json.dumps(json.loads(meta.tobytes()) | changes).encode(), np.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": lambda a: a.astype(object)}, "can't be read as deeploop requests"),
        ({"contexts": lambda a: a ^ 1}, "damaged"),
        ({"contexts": lambda a: a[:-1]}, "lengths that do not add up"),
        ({"contexts": lambda a: a + 60000}, "a token outside the vocabulary"),
        ({"continuation_lengths": lambda a: a[:-1]}, "lengths that do not add up"),
        ({"continuation_lengths": lambda a: -a}, "an empty context or continuation"),
        ({"context": lambda a: a + 1}, "a context out of range"),
        ({"context": lambda a: a - 1}, "a negative index"),
        ({"task": lambda a: a + 1}, "a task out of range"),
        ({"document": lambda a: a[1:]}, "columns of different lengths"),
        ({"choice": lambda a: None}, "'choice'"),
        ({"shots": lambda a: a + 1}, "damaged"),
        ({"meta": lambda a: None}, "can't be read as deeploop requests"),
        ({"meta": lambda a: a[:5]}, "can't be read as deeploop requests"),
        ({"meta": with_meta(kind="weights")}, "is not a file of deeploop requests"),
        ({"meta": with_meta(format=2)}, "of format 2, this deeploop reads 1"),
        ({"meta": with_meta(vocabulary="many")}, "not a file of requests"),
        ({"meta": with_meta(settings=7)}, "not a file of requests"),
    ],
)
def test_a_file_that_is_not_what_it_says(asked, tmp_path, changes, message):
    path = tmp_path / "r.npz"
    build(asked).save(path)
    rewrite(path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        Requests.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_archive(tmp_path, content):
    (tmp_path / "r.npz").write_bytes(content)
    with pytest.raises(ValueError, match="can't be read as deeploop requests"):
        Requests.load(tmp_path / "r.npz")


def test_a_single_array_and_a_missing_file(tmp_path):
    with (tmp_path / "r.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(ValueError, match="can't be read as deeploop requests"):
        Requests.load(tmp_path / "r.npz")
    with pytest.raises(ValueError, match="no such file"):
        Requests.load(tmp_path / "none.npz")


def test_scores_survive_their_file_bit_for_bit(tmp_path):
    draw = np.random.default_rng(0)
    answers = {
        R: {name: Scores(draw.normal(size=n), draw.random(n) < 0.5) for name, n in (("aa", 3), ("bb", 5))}
        for R in (1, 3)
    }
    save_scores(tmp_path / "s.npz", {"stamp": {"x": 1}}, answers)
    meta, loaded = load_scores(tmp_path / "s.npz")
    assert meta["stamp"] == {"x": 1}
    assert loaded.keys() == answers.keys()
    for R, by_digest in answers.items():
        assert loaded[R].keys() == by_digest.keys()
        for digest, scores in by_digest.items():
            np.testing.assert_array_equal(loaded[R][digest].logprob, scores.logprob)
            np.testing.assert_array_equal(loaded[R][digest].greedy, scores.greedy)


@pytest.mark.parametrize(
    ("logprob", "greedy"),
    [([np.nan], [True]), ([0.0, 1.0], [True]), ([[0.0]], [[True]]), (["x"], [True])],
)
def test_scores_that_are_none(tmp_path, logprob, greedy):
    save_scores(tmp_path / "s.npz", {}, {1: {"aa": Scores(np.array(logprob), np.array(greedy))}})
    with pytest.raises(ValueError, match="not a file of scores"):
        load_scores(tmp_path / "s.npz")
    with pytest.raises(ValueError, match="is not a file of deeploop requests"):
        Requests.load(tmp_path / "s.npz")


def test_what_packs_too_well_is_stored_as_it_is(tmp_path):
    """Examples repeated before every question: what is written can be read, however tightly it packs."""
    write_archive(tmp_path / "a.npz", {"kind": "zeros", "format": FORMAT}, {"a": np.zeros(9_000_000)})
    assert len(read_archive(tmp_path / "a.npz", "zeros")[1]["a"]) == 9_000_000
