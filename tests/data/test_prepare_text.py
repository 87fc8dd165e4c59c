"""`prepare text` goes by the text's content, one process to a folder; `deeploop data` says what it made."""

import json
import multiprocessing
import os
import re
import signal

import pytest

from deeploop.cli import main
from deeploop.data.corpus_writer import CorpusWriter
from deeploop.data.shards import Corpus
from deeploop.files import lock_folder
from deeploop.tasks.puzzles.data.maze import build_maze

SMALL = "--tokenizer bytes --validation-tokens 200 --workers 1 --shard-tokens 300".split()  # noqa: SIM905


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(80):
        (folder / f"{number:02}.txt").write_text(f"document {number:02} of eighty\n")
    return folder


@pytest.fixture
def prepare_text(text, tmp_path, capsys):
    """Exit code, output and error of preparing the text into one folder."""

    def run():
        code = main(["prepare", "text", str(text), "--out", str(tmp_path / "out"), *SMALL])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_an_edit_of_the_same_size_is_seen(prepare_text, text):
    assert prepare_text()[0] == 0
    code, said, _ = prepare_text()
    assert (code, said[:18]) == (0, "already prepared: ")
    (text / "07.txt").write_text("document 07 of EIGHTY\n")
    code, _, error = prepare_text()
    assert code == 2
    assert "holds a corpus of other text, though of the same names and sizes" in error


def test_fewer_held_out_tokens_than_asked_for_are_explained(text, tmp_path, capsys):
    """Of 1,840 tokens at most a tenth; a document that is longer than that is not held out."""

    def held_out(wanted):
        out = tmp_path / f"{wanted}-{len([*text.iterdir()])}"
        words = ["--tokenizer", "bytes", "--validation-tokens", str(wanted), "--out", str(out)]
        assert main(["prepare", "text", str(text), *words]) == 0
        count, why = re.search(r"(\d+) validation(.*?); \d shards", capsys.readouterr().out).groups()
        return int(count), why

    how = " (whole documents spread over the text, at most a tenth of it; --validation-tokens is {})"
    assert held_out(100) == (115, "")
    assert held_out(1_000) == (184, how.format("1,000"))
    (text / "99.txt").write_text(2_000 * "z")
    assert held_out(100) == (69, how.format("100"))  # a tenth would be 384


def test_a_corpus_of_before_text_was_hashed_is_recognised_in_so_many_words(prepare_text, tmp_path):
    prepare_text()
    path = tmp_path / "out" / "corpus.json"
    facts = json.loads(path.read_text())
    del facts["settings"]["text_sha256"]
    path.write_text(json.dumps(facts))
    code, said, _ = prepare_text()
    assert code == 0
    assert said.startswith("already prepared (by name and size: it is of before text was hashed): ")


def test_a_killed_preparation_does_not_go_on_with_other_text(prepare_text, text, tmp_path):
    def die_once_saved():
        save = CorpusWriter._save
        CorpusWriter._save = lambda self: (save(self), os.kill(os.getpid(), signal.SIGKILL))
        main(["prepare", "text", str(text), "--out", str(tmp_path / "out"), *SMALL])

    killed = multiprocessing.get_context("fork").Process(target=die_once_saved)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert (tmp_path / "out" / "progress.npz").exists()
    original = (text / "07.txt").read_text()
    (text / "07.txt").write_text("document 07 of EIGHTY\n")
    assert "other text" in prepare_text()[2]
    (text / "07.txt").write_text(original)
    assert prepare_text()[0] == 0
    Corpus.open(tmp_path / "out").verify()
    assert not (tmp_path / "out" / ".lock").exists()


def test_a_second_process_is_refused(prepare_text, tmp_path):
    with lock_folder(tmp_path / "out"):
        code, _, error = prepare_text()
    assert code == 2
    assert error.endswith("out: another run is writing there; choose another --out\n")
    assert prepare_text()[0] == 0


def test_data_says_what_a_folder_holds_and_verifies_it(prepare_text, tmp_path, capsys):
    prepare_text()
    out = tmp_path / "out"
    assert main(["data", str(out)]) == 0
    said = capsys.readouterr().out
    assert "bytes tokens, vocabulary 257" in said
    train = next(line.split() for line in said.splitlines() if line.startswith("train"))
    corpus = Corpus.open(out)
    assert train[1:4] == [
        f"{n:,}" for n in (corpus.documents("train"), len(corpus.train), corpus.bytes("train"))
    ]
    assert main(["data", str(out), "--verify"]) == 0
    assert "every checksum fits" in capsys.readouterr().out
    raw = bytearray((out / "train_000001.bin").read_bytes())
    raw[-2] ^= 1
    (out / "train_000001.bin").write_bytes(raw)
    assert main(["data", str(out)]) == 0
    assert main(["data", str(out), "--verify"]) == 2
    assert "train_000001.bin: damaged" in capsys.readouterr().err


def test_data_of_puzzles(tmp_path, capsys):
    build_maze(tmp_path / "maze", size=8, train=3, test=2)
    assert main(["data", str(tmp_path / "maze"), "--verify"]) == 0
    assert "every checksum fits" in capsys.readouterr().out


def test_training_refuses_counts_that_were_exchanged(prepare_text, train_arguments, tmp_path, capsys):
    prepare_text()
    out = tmp_path / "out"
    raw = bytearray((out / "unigram.npz").read_bytes())
    raw[-1] ^= 1
    (out / "unigram.npz").write_bytes(raw)
    assert main([*train_arguments(tmp_path / "run"), "--data.path", str(out)]) == 2
    assert "unigram.npz: damaged" in capsys.readouterr().err
