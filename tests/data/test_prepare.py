"""Preparing a corpus: what goes where, the same bytes for any workers and after SIGKILL, the commands."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import tyro

from deeploop.commands.prepare import PrepareFinewebEdu, PrepareStdlib, PrepareText, run
from deeploop.data import Corpus, get_tokenizer
from deeploop.data.corpus_writer import CorpusWriter
from deeploop.data.prepare import prepare, tokenizer_for

# Also evaluated in the process that gets killed.
DOCUMENTS_EXPRESSION = "[f'document {i}: ' + 'many words ' * (i * 37 % 101) for i in range(600)]"
DOCUMENTS = eval(DOCUMENTS_EXPRESSION)

KILLED = f"""
import sys, time
from pathlib import Path
from deeploop.data import get_tokenizer
from deeploop.data.prepare import prepare

class Slow(list):
    def __iter__(self):
        for text in super().__iter__():
            time.sleep(0.002)
            yield text

documents = Slow({DOCUMENTS_EXPRESSION})
prepare(documents, get_tokenizer("gpt2"), Path(sys.argv[1]), validation_tokens=3000, shard_tokens=5000,
        source="made up", workers=2)
"""


def prepared(out, documents=DOCUMENTS, tokenizer="gpt2", **settings):
    settings = {
        "validation_tokens": 3000,
        "shard_tokens": 5000,
        "source": "made up",
        "workers": 1,
        **settings,
    }
    tokenizer = get_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return prepare(documents, tokenizer, out, **settings)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts(corpus, split):
    """The documents of a split, in order; each is preceded by end-of-text."""
    stream = getattr(corpus, split)
    tokenizer = get_tokenizer(corpus.tokenizer_name)
    first, *documents = tokenizer.decode(stream.slice(0, len(stream))).split("<|endoftext|>")
    assert first == ""
    return documents


class Counting:
    """GPT-2's tokenizer, counting how many documents it is asked to encode."""

    def __init__(self):
        self._inner = get_tokenizer("gpt2")
        self.name, self.vocabulary = self._inner.name, self._inner.vocabulary
        self.end_of_text = self._inner.end_of_text
        self.encoded = 0

    def encode_array(self, text):
        self.encoded += 1
        return self._inner.encode_array(text)


def test_every_document_is_whole_in_exactly_one_split(tmp_path):
    corpus = prepared(tmp_path)
    train, validation = texts(corpus, "train"), texts(corpus, "validation")
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert train == [text for text in DOCUMENTS if text in set(train)]
    assert (corpus.documents("train"), corpus.documents("validation")) == (len(train), len(validation))
    assert corpus.bytes("train") == sum(len(text.encode()) for text in train)
    sizes = [shard["tokens"] for shard in corpus.facts["splits"]["train"]["shards"]]
    assert set(sizes[:-1]) == {5000}
    assert 0 < sizes[-1] <= 5000


def test_validation_is_spread_over_the_source_and_near_the_wanted_size(tmp_path):
    corpus = prepared(tmp_path)
    longest = max(len(get_tokenizer("gpt2").encode(text)) for text in DOCUMENTS)
    assert abs(len(corpus.validation) - 3000) <= 1 + longest
    held = set(texts(corpus, "validation"))
    places = np.array([i for i, text in enumerate(DOCUMENTS) if text in held]) / len(DOCUMENTS)
    assert len(np.unique(np.floor(places * 5))) == 5


def test_validation_takes_at_most_a_tenth_of_a_finite_source(tmp_path):
    corpus = prepared(tmp_path, validation_tokens=10**9)
    total = corpus.bytes("train") + corpus.bytes("validation")
    assert 0.08 * total < corpus.bytes("validation") <= 0.1 * total


@pytest.mark.parametrize("sizes", [[50, 2, 48, 3, 47], [1, 100, 100, 2, 100], [8] * 3 + [200] + [8] * 20])
@pytest.mark.parametrize("wanted", [100, 10**9])
def test_a_few_long_documents_do_not_break_the_promise(tmp_path, sizes, wanted):
    documents = ["word " * 100 * size for size in sizes]
    corpus = prepared(tmp_path, documents=documents, tokenizer="bytes", validation_tokens=wanted)
    total = corpus.bytes("train") + corpus.bytes("validation")
    assert total == sum(map(len, documents))
    assert 0 < corpus.bytes("validation") <= 0.1 * total


def test_only_long_documents_leave_nothing_to_hold_out(tmp_path):
    with pytest.raises(ValueError, match=r"nothing left for validation: 5 documents.*cut it into shorter"):
        prepared(tmp_path, documents=["word " * 100] * 5)
    assert not (tmp_path / "corpus.json").exists()


class Lost(list):
    """Documents that can be measured, and are lost at the end of their second reading."""

    readings = 0

    def __iter__(self):
        self.readings += 1
        yield from super().__iter__()
        if self.readings == 2:
            raise OSError("connection lost")


def test_damaged_progress_is_named(tmp_path):
    with pytest.raises(OSError, match="connection lost"):
        prepared(tmp_path, documents=Lost(DOCUMENTS))
    progress = tmp_path / "progress.npz"
    whole = progress.read_bytes()
    for stop in (0, 10, 1000, len(whole) - 1000, len(whole) - 1):
        progress.write_bytes(whole[:stop])
        with pytest.raises(ValueError, match=r"progress\.npz: unreadable") as error:
            prepared(tmp_path)
        assert "\n" not in str(error.value)


def test_a_stream_gives_its_first_documents_to_validation(tmp_path):
    corpus = prepared(tmp_path, documents=iter(DOCUMENTS), stream=True)
    validation = texts(corpus, "validation")
    assert validation == DOCUMENTS[: len(validation)]
    assert texts(corpus, "train") == DOCUMENTS[len(validation) :]
    last = 1 + len(get_tokenizer("gpt2").encode(validation[-1]))
    assert 0 <= len(corpus.validation) - 3000 < last


def test_limit_stops_after_the_document_that_reaches_it(tmp_path):
    corpus = prepared(tmp_path, documents=iter(DOCUMENTS), stream=True, limit_tokens=20000)
    tokens = len(corpus.train) + len(corpus.validation)
    last = 1 + len(get_tokenizer("gpt2").encode(texts(corpus, "train")[-1]))
    assert 0 <= tokens - 20000 < last


def test_empty_documents_are_left_out(tmp_path):
    corpus = prepared(tmp_path, documents=["", *DOCUMENTS, ""])
    assert corpus.documents("train") + corpus.documents("validation") == len(DOCUMENTS)


def test_same_bytes_for_one_worker_and_two(tmp_path):
    prepared(tmp_path / "one", workers=1)
    prepared(tmp_path / "two", workers=2)
    assert len(contents(tmp_path / "one")) > 5
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_killed_and_restarted_gives_the_same_bytes(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    prepared(whole)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(killed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    deadline = time.monotonic() + 60
    while not (killed / "train_000002.bin").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "corpus.json").exists()
    with pytest.raises(ValueError, match="not a whole corpus"):
        Corpus.open(killed)

    tokenizer = Counting()
    prepared(killed, tokenizer=tokenizer)
    assert contents(killed) == contents(whole)
    assert 0 < tokenizer.encoded < 0.9 * len(DOCUMENTS)


@pytest.mark.parametrize("there", ["chat.json", "puzzles.json", "run.json"])
def test_a_folder_of_something_else_is_left_as_it_is(tmp_path, there):
    (tmp_path / there).touch()
    says = "is a .*, not a corpus; choose another folder with --out"
    with pytest.raises(ValueError, match=says):
        prepared(tmp_path)
    with pytest.raises(ValueError, match=says):  # before minutes of training
        tokenizer_for("bpe:300", DOCUMENTS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [there]


STREAMED = {"stream": True, "limit_tokens": 15000, "shard_tokens": 500, "validation_tokens": 1000}


@pytest.mark.parametrize("stop", [1, 20, 100])
def test_a_source_that_fails_can_be_taken_up_again(tmp_path, stop):
    def failing():
        yield from DOCUMENTS[:stop]
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        prepared(tmp_path / "broken", documents=failing(), **STREAMED)
    prepared(tmp_path / "broken", documents=iter(DOCUMENTS), **STREAMED)
    prepared(tmp_path / "whole", documents=iter(DOCUMENTS), **STREAMED)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_stopped_at_the_limit_and_restarted_takes_nothing_more(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(CorpusWriter, "finish", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path / "broken", documents=iter(DOCUMENTS), **STREAMED)
    assert (tmp_path / "broken" / "progress.npz").exists()
    prepared(tmp_path / "broken", documents=iter(DOCUMENTS), **STREAMED)
    prepared(tmp_path / "whole", documents=iter(DOCUMENTS), **STREAMED)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_an_unfinished_corpus_is_not_continued_with_other_settings(tmp_path):
    with pytest.raises(OSError, match="connection lost"):
        prepared(tmp_path, documents=Lost(DOCUMENTS))
    with pytest.raises(ValueError, match="shard_tokens 5000, not 4000"):
        prepared(tmp_path, shard_tokens=4000)


def test_whole_corpus_is_kept_and_other_settings_are_refused(tmp_path):
    prepared(tmp_path)
    before = contents(tmp_path)
    tokenizer = Counting()
    assert len(prepared(tmp_path, tokenizer=tokenizer, workers=2).train) > 0
    assert tokenizer.encoded == 0
    for change in ({"tokenizer": "bytes"}, {"validation_tokens": 2999}, {"source": "other"}):
        (name,) = change
        with pytest.raises(ValueError, match=f"{tmp_path}.*{name}.*--out"):
            prepared(tmp_path, **change)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_tokens": 0}, "validation_tokens 0"),
        ({"shard_tokens": 0}, "shard_tokens 0"),
        ({"limit_tokens": 3000}, "limit_tokens 3000.*validation_tokens 3000"),
        ({"documents": ["alone"]}, "nothing left for validation: 1 document, 2 tokens; .*give more text"),
        ({"documents": []}, "nothing left for train"),
        ({"documents": DOCUMENTS[:2], "stream": True}, "nothing left for train.*of which 3,000 are held out"),
    ],
)
def test_impossible_settings(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, **settings)
    assert not (tmp_path / "corpus.json").exists()


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/corpus: can't be written"):
        prepared(tmp_path / "file" / "corpus")


def test_stdlib_command(tmp_path):
    args = tyro.cli(PrepareStdlib, args=["--out", str(tmp_path), "--validation-tokens", "300000"])
    summary = run(args)
    corpus = Corpus.open(tmp_path)
    assert corpus.tokenizer_name == "bytes"
    assert len(corpus.train) > 5_000_000
    assert abs(len(corpus.validation) - 300_000) < 100_000
    assert f"{len(corpus.train):,} train" in summary
    assert str(tmp_path) in summary
    assert run(args) == f"already prepared: {summary}"


def test_text_command_on_a_single_file(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {i} of the book\n" for i in range(5000)))
    args = tyro.cli(
        PrepareText, args=[str(tmp_path / "book.txt"), "--out", str(tmp_path / "out"), "--workers", "1"]
    )
    assert "book.txt" in run(args)
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.tokenizer_name == "gpt2"
    assert 0 < len(corpus.validation) < len(corpus.train) / 5


@pytest.mark.parametrize("sizes", [(20_000, 200_000), (200_000, 20_000), (70_000, 80_000, 70_000)])
def test_text_command_on_a_few_files(tmp_path, sizes):
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.txt").write_text("a line of the book\n" * (size // 19))
    options = {"--out": tmp_path / "out", "--tokenizer": "bytes", "--validation-tokens": 5000, "--workers": 1}
    run(
        tyro.cli(PrepareText, args=[str(tmp_path), *(str(part) for pair in options.items() for part in pair)])
    )
    corpus = Corpus.open(tmp_path / "out")
    piece = sum(sizes) / 64
    assert abs(len(corpus.validation) - 5000) < 1.1 * piece
    assert len(corpus.train) > 0.95 * sum(sizes)


def test_a_text_command_that_fails_leaves_no_folder(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match="--field"):
        run(PrepareText(paths=(tmp_path / "a.jsonl",), out=tmp_path / "out", tokenizer="bytes"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="nothing left for validation"):
        run(PrepareText(paths=(tmp_path / "a.jsonl",), field="body", out=tmp_path / "out", tokenizer="bytes"))
    assert not (tmp_path / "out").exists()


def test_a_text_command_says_that_files_were_cut(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("line\n" * 500)
    (tmp_path / "c.jsonl").write_text('{"text": "a line"}\n' * 20)
    common = {"out": tmp_path / "one", "tokenizer": "bytes"}
    said = run(PrepareText(paths=(tmp_path / "a.txt", tmp_path / "b.txt"), **common))
    assert re.search(r": \d\d documents \(pieces of 2 text files\) of a\.txt, b\.txt \(2 files, ", said)
    said = run(PrepareText(paths=(tmp_path / "c.jsonl",), **common | {"out": tmp_path / "two"}))
    assert "20 documents of c.jsonl" in said


def test_text_command_takes_several_paths():
    args = tyro.cli(PrepareText, args=["a.txt", "b.jsonl", "--tokenizer", "bytes"])
    assert [path.name for path in args.paths] == ["a.txt", "b.jsonl"]


def test_fineweb_edu_command_on_a_local_stand_in(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = "".join(json.dumps({"text": text, "score": 3.5}) + "\n" for text in DOCUMENTS)
    (tmp_path / "rows.jsonl").write_text(rows)
    options = {"--source": tmp_path / "rows.jsonl", "--out": tmp_path / "out", "--validation-tokens": 2000}
    options |= {"--limit-tokens": 20000, "--workers": 1}
    run(tyro.cli(PrepareFinewebEdu, args=[str(part) for option in options.items() for part in option]))
    corpus = Corpus.open(tmp_path / "out")
    documents = texts(corpus, "validation") + texts(corpus, "train")
    assert documents == DOCUMENTS[: len(documents)]
    assert len(documents) < len(DOCUMENTS)


def test_workers_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="workers=0"):
        run(PrepareStdlib(out=tmp_path, workers=0))


def test_a_document_that_occurs_twice_is_never_validated_on(tmp_path):
    """Whichever of its copies comes first; `without` shows that one was."""
    without = prepared(tmp_path / "without")
    held = texts(without, "validation")
    corpus = prepared(tmp_path / "with", [*DOCUMENTS, held[0], *held[3:5]])
    validated, trained = texts(corpus, "validation"), texts(corpus, "train")
    assert not set(validated) & set(trained)
    assert sorted([*validated, *trained]) == sorted([*DOCUMENTS, held[0], *held[3:5]])
    assert corpus.facts["repeated"] == 3
    assert without.facts["repeated"] is None


def test_files_that_are_not_utf8_are_left_out_on_request_and_named(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(70):
        (folder / f"{i:02}.txt").write_text(f"document {i} " + "word " * 200)
    (folder / "latin.txt").write_bytes("café ".encode("latin-1") * 9)
    (folder / "copy.txt").write_text((folder / "07.txt").read_text())
    asked = PrepareText(paths=(folder,), out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"latin\.txt: unreadable as UTF-8 text: .* --skip-bad"):
        run(asked)
    said = run(replace(asked, skip_bad=True))
    assert "left out, not UTF-8: 1 files (" in said
    assert str(folder / "latin.txt") in said
    assert "1 documents occur more than once" in said
    assert "little text for gpt2's 50,257 tokens" in said
    assert Corpus.open(tmp_path / "out").documents("train") > 60
    (folder / "only").mkdir()
    (folder / "only" / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="none of 1 files is UTF-8"):
        run(replace(asked, paths=(folder / "only",), skip_bad=True))
