"""The shard layout against files built with `struct`, the reader's errors, and the corpus folder's."""

import json
import struct

import numpy as np
import pytest

from deeploop.data import Corpus, TokenStream, get_tokenizer
from deeploop.data.prepare import prepare
from deeploop.data.shards import HEADER_BYTES, read_shard, write_shard
from deeploop.data.token_loader import read_windows, validation_windows
from deeploop.files import atomic_file

TOKENS = [0, 1, 255, 256, 50256, 65535]


def built(tokens, magic=20240520, version=1, count=None):
    """A shard from the written description of the layout."""
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens)


def test_written_shard_is_the_documented_layout(tmp_path):
    write_shard(tmp_path / "a.bin", TOKENS)
    assert (tmp_path / "a.bin").read_bytes() == built(TOKENS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_reads_a_shard_built_elsewhere(tmp_path):
    (tmp_path / "a.bin").write_bytes(built(TOKENS))
    tokens = read_shard(tmp_path / "a.bin")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == TOKENS
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_round_trip(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 2**16, 12345).astype(np.uint16)
    write_shard(tmp_path / "a.bin", tokens)
    np.testing.assert_array_equal(read_shard(tmp_path / "a.bin"), tokens)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing shard"),
        (b"", "truncated shard: 0 bytes"),
        (built(TOKENS)[:1000], "truncated shard: 1000 bytes"),
        (built(TOKENS)[:-1], "truncated shard: 1035 bytes, its header of 6 tokens .*1036"),
        (built(TOKENS) + b"\0", "damaged shard: 1037 bytes"),
        (built(TOKENS, magic=1), "not a token shard: magic 1, expected 20240520"),
        (built(TOKENS, version=2), "truncated shard: 1036 bytes, its header of 6 tokens .*1048"),
        (built(TOKENS, version=3), "shard version 3, expected one of 1, 2"),
        (built(TOKENS, count=-5), "damaged shard.*-5 tokens"),
        (built([]), "damaged shard.*0 tokens"),
    ],
)
def test_bad_shard_is_named_with_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "bad.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.bin: {message}"):
        read_shard(path)


@pytest.mark.parametrize("tokens", [[], [-1], [65536]])
def test_unwritable_tokens(tmp_path, tokens):
    with pytest.raises(ValueError, match=r"a\.bin"):
        write_shard(tmp_path / "a.bin", tokens)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")

    def write_half():
        with atomic_file(path) as file:
            file.write(b"new")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        write_half()
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_stream_slices_across_shards(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    paths = [tmp_path / f"{i}.bin" for i in range(4)]
    for path, part in zip(paths, np.split(tokens, [7, 8, 60]), strict=True):
        write_shard(path, part)
    stream = TokenStream(paths)
    assert len(stream) == 100
    for start in range(0, 101, 3):
        for stop in range(start, 101, 5):
            part = stream.slice(start, stop)
            assert part.dtype == np.uint16
            np.testing.assert_array_equal(part, tokens[start:stop])
    with pytest.raises(ValueError, match=r"90:101.*100 tokens"):
        stream.slice(90, 101)


@pytest.fixture
def corpus(tmp_path):
    documents = [f"document {i} " * (1 + i % 7) for i in range(100)]
    return prepare(
        documents,
        get_tokenizer("bytes"),
        tmp_path,
        validation_tokens=400,
        shard_tokens=1000,
        source="made up",
    )


def test_corpus_keeps_what_the_shards_cannot_say(corpus):
    assert (corpus.tokenizer_name, corpus.vocabulary, corpus.end_of_text) == ("bytes", 257, 256)
    for split, stream in (("train", corpus.train), ("validation", corpus.validation)):
        tokens = stream.slice(0, len(stream))
        np.testing.assert_array_equal(corpus.counts(split), np.bincount(tokens, minlength=257))
        assert corpus.counts(split).dtype == np.int64
        assert corpus.documents(split) == (tokens == 256).sum()
        assert corpus.bytes(split) == (tokens != 256).sum()
    corpus.verify()


@pytest.mark.parametrize("file", ["train_000001.bin", "unigram.npz"])
def test_verify_finds_a_flipped_bit(corpus, file):
    path = corpus.folder / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    Corpus.open(corpus.folder)
    with pytest.raises(ValueError, match=f"{file}: damaged: sha256"):
        corpus.verify()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_token_outside_the_vocabulary_is_refused_where_it_is_read(corpus, split):
    file = f"{split}_000000.bin"
    with (corpus.folder / file).open("r+b") as shard:
        shard.seek(HEADER_BYTES + 2 * 40)  # token 40: an input of the second window of 40, and no target
        shard.write(np.array([257], "<u2").tobytes())
    stream = getattr(Corpus.open(corpus.folder), split)
    assert len(stream.slice(0, 40)) == 40
    message = rf"{file}: damaged shard: token 257 is outside the vocabulary of 257; remove the folder"
    with pytest.raises(ValueError, match=message):
        read_windows(stream, 40, np.array([40]))
    with pytest.raises(ValueError, match=message):
        validation_windows(stream, 40, 1000)


def test_missing_and_truncated_parts_are_named(corpus):
    shard = corpus.folder / "train_000002.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"train_000002\.bin: truncated"):
        Corpus.open(corpus.folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train_000002\.bin: missing"):
        Corpus.open(corpus.folder)
    write_shard(shard, [1, 2, 3])
    with pytest.raises(ValueError, match=r"train_000002\.bin: holds 3 tokens, corpus\.json lists"):
        Corpus.open(corpus.folder)


def test_no_corpus_says_how_to_make_one(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=f"{folder}.*deeploop prepare"):
            Corpus.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: "{", "can't be read"),
        (lambda facts: json.dumps({**facts, "format": 99}), "format 99"),
        (lambda facts: json.dumps([facts]), "can't be read"),
        (lambda facts: json.dumps({**facts, "splits": {}}), "corpus.splits: no field 'train'"),
        (lambda facts: json.dumps({**facts, "splits": []}), "corpus.splits: must be an object, not "),
        (lambda facts: json.dumps({**facts, "vocabulary": "x"}), "corpus.vocabulary: must be a whole number"),
        (
            lambda facts: json.dumps({**facts, "vocabulary": True}),
            "corpus.vocabulary: must be a whole number",
        ),
        (lambda facts: json.dumps({**facts, "tokenizer": None}), "corpus.tokenizer: must be a string"),
        (lambda facts: json.dumps({**facts, "unigram": {}}), "corpus.unigram: no field 'file'"),
        (lambda facts: changed(facts, "train", shards={}), "corpus.splits.train.shards: must be a list"),
        (
            lambda facts: changed(facts, "train", documents=[]),
            "corpus.splits.train.documents: must be a whole",
        ),
        (
            lambda facts: changed(facts, "train", shards=["a"]),
            r"corpus.splits.train.shards\[0\]: must be an obj",
        ),
        (
            lambda facts: changed(facts, "validation", shards=[{"file": "a", "tokens": "x", "sha256": ""}]),
            r"corpus.splits.validation.shards\[0\].tokens: must be a whole number, not 'x'",
        ),
    ],
)
def test_bad_corpus_json(corpus, change, message):
    path = corpus.folder / "corpus.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=rf"corpus\.json: {message}") as error:
        Corpus.open(corpus.folder)
    assert "\n" not in str(error.value)


def changed(facts, split, **fields):
    facts["splits"][split] |= fields
    return json.dumps(facts)


@pytest.mark.parametrize("name", ["../other/a.bin", "/etc/a.bin", "..", ".", "", "b\\a.bin", "a.bin\n"])
def test_files_outside_the_folder_are_refused(corpus, name):
    path = corpus.folder / "corpus.json"
    whole = path.read_text()
    shards = [{"file": name, "tokens": 1, "sha256": ""}]
    for facts in (
        changed(json.loads(whole), "train", shards=shards),
        json.dumps(json.loads(whole) | {"unigram": {"file": name, "sha256": ""}}),
    ):
        path.write_text(facts)
        with pytest.raises(ValueError, match=r"corpus\.json: .*file: must be a plain file name") as error:
            Corpus.open(corpus.folder)
        assert "\n" not in str(error.value)


def test_damaged_counts_are_named(corpus):
    path = corpus.folder / "unigram.npz"
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"unigram\.npz: unreadable .*test"):
        corpus.counts("test")
    for stop in range(0, len(whole), 97):
        path.write_bytes(whole[:stop])
        with pytest.raises(ValueError, match=r"unigram\.npz: unreadable"):
            corpus.counts("train")


@pytest.mark.parametrize(
    ("name", "there", "says"),
    [
        ("stdlib", "", "no such corpus; make it with `deeploop prepare stdlib --out"),
        ("mine", "", "no such corpus; make it with `deeploop prepare text FILE… --out"),
        ("mine", ".", r"not a whole corpus \(no corpus.json\); make it with"),
        ("mine", "chat.json", r"is a chat folder, not a corpus; `deeploop prepare text FILE… --out ANOTHER`"),
        ("mine", "run.json", "is a run folder, not a corpus"),
        ("mine", "puzzles.json", "is a set of puzzles, not a corpus"),
    ],
)
def test_a_corpus_that_is_not_there_says_how_it_is_made(tmp_path, name, there, says):
    if there:
        (tmp_path / name).mkdir()
        (tmp_path / name / there).touch()
    with pytest.raises(ValueError, match=says):
        Corpus.open(tmp_path / name)


def forged(path, **arrays):
    """An archive in place of another, packed so that zeros take no room."""
    np.savez_compressed(path, **arrays)


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        (lambda c: np.zeros(10**7, np.int64), "at most 3,080 are read"),
        (lambda c: c[::-1][:5], r"\(5,\) of int64, not \(257,\)"),
        (lambda c: c.astype(np.float64), "float64, not"),
        (lambda c: c[None], r"\(1, 257\)"),
        (lambda c: c + 1, "do not add up"),
        (lambda c: np.append(c[:-1], -c[:-1].sum()), "do not add up"),
    ],
)
def test_counts_that_do_not_fit_the_corpus_are_refused(corpus, counts, why):
    forged(corpus.folder / "unigram.npz", train=counts(corpus.counts("train")))
    with pytest.raises(ValueError, match=rf"unigram\.npz: unreadable \(train: .*{why}"):
        corpus.counts("train")


@pytest.mark.parametrize(
    "change", [{"vocabulary": 2**40}, {"vocabulary": 0}, {"end_of_text": 257}, {"end_of_text": -1}]
)
def test_numbers_out_of_range_are_refused(corpus, change):
    path = corpus.folder / "corpus.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"corpus\.{next(iter(change))}: must be"):
        Corpus.open(corpus.folder)
