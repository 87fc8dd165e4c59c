"""`deeploop data`: what a corpus holds, by one reading of it."""

import re
import shutil

import numpy as np
import pytest

from deeploop.commands.data import DataArgs, run
from deeploop.data import Corpus, scan
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer

# Document i has i % 23 + 1 words. Two of them come again, one of these twice.
DISTINCT = [f"document {i}" + " and more" * (i % 23) for i in range(200)]
DOCUMENTS = [*DISTINCT, DISTINCT[5], DISTINCT[5], DISTINCT[9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards so short that documents run on from one into the next."""
    out = tmp_path_factory.mktemp("data") / "text"
    tokenizer = get_tokenizer("gpt2")
    prepare(DOCUMENTS, tokenizer, out, validation_tokens=300, shard_tokens=64, source="made up", workers=1)
    return out


def read_back(stream, end):
    return [get_tokenizer("gpt2").decode(tokens) for tokens in scan.documents(stream, end)]


@pytest.mark.parametrize("block", [1, 7, 64, 2**22])
def test_documents_are_those_that_were_prepared(folder, monkeypatch, block):
    monkeypatch.setattr(scan, "BLOCK", block)
    corpus = Corpus.open(folder)
    end = corpus.end_of_text
    found = [read_back(stream, end) for stream in (corpus.train, corpus.validation)]
    assert [len(texts) for texts in found] == [corpus.documents("train"), corpus.documents("validation")]
    assert sorted([*found[0], *found[1]]) == sorted(DOCUMENTS)
    whole = scan.scan(corpus.train, end)
    assert (len(whole.hashes), whole.is_whole) == (corpus.documents("train"), True)
    assert whole.longest == max(len(get_tokenizer("gpt2").encode(text)) for text in found[0])


def test_duplicates_are_counted_within_a_split_and_between_the_two(folder):
    corpus = Corpus.open(folder)
    train, held = (scan.scan(s, corpus.end_of_text) for s in (corpus.train, corpus.validation))
    texts = [read_back(stream, corpus.end_of_text) for stream in (corpus.train, corpus.validation)]
    assert train.repeated == len(texts[0]) - len(set(texts[0])) > 0
    assert held.repeated == 0
    assert held.shared_with(train) == sum(text in texts[0] for text in texts[1])


def test_a_held_out_document_that_is_trained_on_is_counted():
    one, other = (scan.Scan(np.array(h, dtype=np.uint64), 1, True) for h in ([1, 2, 2, 3], [2, 3, 9, 2]))
    assert (one.repeated, one.shared_with(other)) == (1, 3)


def test_what_is_printed(folder):
    text = run(DataArgs(folder=folder))
    corpus = Corpus.open(folder)
    line = next(line for line in text.splitlines() if line.startswith("train")).split()
    shards = len(corpus.facts["splits"]["train"]["shards"])
    longest = scan.scan(corpus.train, corpus.end_of_text).longest
    counts = [corpus.documents("train"), len(corpus.train), corpus.bytes("train"), shards, longest, 3]
    assert line[1:-1] == [f"{count:,}" for count in counts]
    assert float(line[-1]) == pytest.approx(corpus.bytes("train") / len(corpus.train), abs=1e-3)
    assert "documents of validation that are in train too: 0" in text
    assert "vocabulary 50,257" in text
    assert "    document " in text.split("begins:")[1]
    assert "--verify reads all" not in text


def test_a_large_corpus_is_looked_at_in_part_unless_verified(folder, monkeypatch):
    monkeypatch.setattr("deeploop.commands.data.SCANNED_TOKENS", 100)
    # Documents 0 to 10 but those held out: the one that begins within the first 100 tokens ends the look.
    assert re.search(
        r"of train the first \d documents were looked at; --verify reads all", run(DataArgs(folder=folder))
    )
    text = run(DataArgs(folder=folder, verify=True))
    assert "looked at" not in text
    assert text.endswith("whole: every checksum fits")


def test_a_sample_moves_no_cursor(tmp_path):
    documents = ["\x1b[31mred\n" * 9] * 60
    prepare(documents, get_tokenizer("bytes"), tmp_path / "a", validation_tokens=300, source="x", workers=1)
    text = run(DataArgs(folder=tmp_path / "a"))
    assert "\x1b" not in text
    assert "\\x1b[31mred\n" in text


def test_damage_is_found_by_verify(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    shard = tmp_path / "copy" / "train_000001.bin"
    raw = bytearray(shard.read_bytes())
    raw[-2] ^= 1
    shard.write_bytes(raw)
    run(DataArgs(folder=tmp_path / "copy"))
    with pytest.raises(ValueError, match=r"train_000001\.bin: damaged"):
        run(DataArgs(folder=tmp_path / "copy", verify=True))
    raw[-2:] = b"\xff\xff"
    shard.write_bytes(raw)
    with pytest.raises(ValueError, match=r"train_000001\.bin: damaged shard: token 65535 is outside the voc"):
        run(DataArgs(folder=tmp_path / "copy"))
