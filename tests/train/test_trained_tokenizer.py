"""A run on a corpus with a trained tokenizer carries it: it generates and exports without the corpus."""

import re
import shutil

import pytest

pytest.importorskip("tokenizers", reason='needs tokenizers: pip install -c constraints.txt -e ".[hf]"')

import deeploop
from deeploop.cli import main
from deeploop.data.bpe import train_bpe
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.train.loop import train

SENTENCE = "the loop visits one block again and then another until every round is done"
WORDS = SENTENCE.split()
DOCUMENTS = [" ".join(WORDS[i % 7 :] + WORDS[: i % 11]) for i in range(300)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    for name, texts in (("a", DOCUMENTS), ("b", [text.upper() for text in DOCUMENTS])):
        prepare(texts, train_bpe(texts, 290), folder / name, validation_tokens=600, source=name, workers=1)
    return folder


def config_for(make_config, out, corpus, **changes):
    return make_config(out, data={"path": corpus}, model={"vocabulary": 290}, **changes)


@pytest.fixture(scope="module")
def run(corpora, make_config, tmp_path_factory):
    """The folder of a run whose corpus has gone."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(corpora / "a", folder / "corpus")
    train(config_for(make_config, folder / "run", folder / "corpus"))
    shutil.rmtree(folder / "corpus")
    return folder / "run"


def test_the_run_reads_its_own_tokenizer(run, corpora, capsys):
    _, tokenizer = deeploop.load(run)
    assert tokenizer.decode(tokenizer.encode("the loop")) == "the loop"
    assert (run / "merges.txt").read_bytes() == (corpora / "a" / "merges.txt").read_bytes()
    main(["generate", str(run), "--prompt", "the loop", "--max-tokens", "3", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("the loop")


def test_bits_per_byte_are_those_of_the_text(run, corpora, capsys):
    from deeploop.files import read_json

    stamp = read_json(run / "run.json")
    assert stamp["tokenizer"] == f"bpe:290:{stamp['tokenizer'][8:]}"
    assert 2 < stamp["bytes_per_token"] < 6
    main(["validate", str(run), "--data", str(corpora / "a"), "--device", "cpu"])
    assert "bits/byte" in capsys.readouterr().out


def test_a_corpus_of_another_tokenizer_of_the_same_size_is_refused(
    run, corpora, make_config, tmp_path, capsys
):
    moved = shutil.copytree(run, tmp_path / "moved")  # it is named as the user named it, not by its config
    for command in ("validate", "diagnose"):
        assert main([command, str(moved), "--data", str(corpora / "b"), "--device", "cpu"]) == 2
        assert re.search(rf"was trained on bpe:290:.*--tokenizer {moved}", capsys.readouterr().err)
    config = config_for(make_config, tmp_path / "next", corpora / "b", init_from=run)
    with pytest.raises(ValueError, match=rf"init_from={run}: reads bpe:290:.*--tokenizer {run}"):
        train(config)
    train(config_for(make_config, tmp_path / "same", corpora / "a", init_from=run))


@pytest.mark.filterwarnings("ignore")
def test_the_export_reads_the_same_ids(run, tmp_path):
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    main(["export", str(run), str(tmp_path / "exported")])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    _, ours = deeploop.load(run)
    assert len(theirs) == 290
    for text in [*DOCUMENTS[:20], "naïve 'll\n\n  日本語 THE", *map(chr, range(32, 300))]:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text


def test_a_run_without_its_file_says_so(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy" / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"copy: holds no trained tokenizer \(no merges\.txt\)"):
        deeploop.load(tmp_path / "copy")


def test_runs_of_other_tokenizers_keep_no_file(make_config, tmp_path):
    train(make_config(tmp_path / "bytes"))
    assert not (tmp_path / "bytes" / "merges.txt").exists()
    assert get_tokenizer("bytes").merges == ()
