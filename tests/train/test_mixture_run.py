"""Runs on a mixture of corpora: validation per corpus, exact resume, and a changed mixture that is named."""

import json
import shutil

import pytest
import torch

from deeploop.cli import main
from deeploop.data.mixture import Mixture
from deeploop.data.prepare import prepare
from deeploop.data.shards import Corpus
from deeploop.data.tokenizers import get_tokenizer
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.rundir import load_model


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two corpora of bytes that share no letter, one of 60 documents and one of 20; one of GPT-2 tokens."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, letters, count in (("low", "abcdefg", 60), ("high", "tuvwxyz", 20)):
        texts = [" ".join(letters[i % 7] * (1 + j % 3) for j in range(60)) for i in range(count)]
        prepare(texts, get_tokenizer("bytes"), folder / name, validation_tokens=900, source=name, workers=1)
    texts = ["some words of English " * 20] * 40
    prepare(texts, get_tokenizer("gpt2"), folder / "words", validation_tokens=200, source="w", workers=1)
    return folder


@pytest.fixture
def mixed(corpora, make_config, tmp_path):
    def make(out="run", low=0.7, high=0.3, data=None, **changes):
        mix = (f"{corpora / 'low'}={low}", f"{corpora / 'high'}={high}")
        return make_config(tmp_path / out, data={"mix": mix, **(data or {})}, **changes)

    return make


def weights(config):
    return load_model(config.out).state_dict()


def validations(config):
    return [record for record in read_metrics(config.out) if record["kind"] == "validation"]


def test_validation_per_corpus_and_in_all(mixed, corpora, capsys):
    config = mixed()
    train(config)
    last = validations(config)[-1]
    assert last["corpora"] == ["low", "high"]
    # 15 sequences by shares of 0.7 and 0.3: 10 and 4.
    low, high = last["loss_by_corpus"]
    assert last["loss"] == pytest.approx((10 * low + 4 * high) / 14, rel=1e-6)
    assert low != high
    sequences = [own * len(Corpus.open(corpora / name).train) / 32 for own, name in
                 zip(last["epochs_by_corpus"], last["corpora"], strict=True)]  # fmt: skip
    assert sum(sequences) == pytest.approx(6 * 8, rel=0.1)
    assert "low" in capsys.readouterr().out


def test_stop_and_resume_is_the_uninterrupted_run(mixed):
    whole, halves = mixed("whole", optim={"steps": 8}), mixed("halves", optim={"steps": 8})
    train(whole)
    train(mixed("halves", optim={"steps": 4}))
    train(mixed("halves", optim={"steps": 8}, resume=True))
    assert validations(whole)[-1]["loss_by_corpus"] == validations(halves)[-1]["loss_by_corpus"]
    assert all(
        torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(halves).values(), strict=True)
    )


def test_changed_weights_are_named_on_resume(mixed, capsys):
    train(mixed())
    train(mixed(low=0.2, high=0.8, optim={"steps": 8}, resume=True))
    assert "resuming with data.mix=" in capsys.readouterr().out
    changes = [record["changes"] for record in read_metrics(mixed().out) if record["kind"] == "resume"]
    assert [entry.rpartition("=")[2] for entry in changes[0]["data.mix"][1]] == ["0.2", "0.8"]


def test_other_corpora_are_refused_on_resume(mixed, corpora, make_config):
    config = mixed()
    train(config)
    swapped = make_config(config.out, data={"mix": config.data.mix[::-1]}, optim={"steps": 8}, resume=True)
    with pytest.raises(ValueError, match=r"data\.mix=.*: not the corpora, in their order, that the run was"):
        train(swapped)
    alone = make_config(config.out, data={"path": corpora / "low"}, optim={"steps": 8}, resume=True)
    with pytest.raises(ValueError, match=r"data\.path=.*low: not the corpus that the run was started on"):
        train(alone)


def test_a_mixture_of_one_is_the_run_on_that_corpus(mixed, corpora, make_config, tmp_path):
    path = make_config(tmp_path / "path", data={"path": corpora / "low"})
    mix = make_config(tmp_path / "mix", data={"mix": (f"{corpora / 'low'}=2",)})
    train(path), train(mix)
    assert all(torch.equal(a, b) for a, b in zip(weights(path).values(), weights(mix).values(), strict=True))


def test_a_path_beside_a_mixture_is_refused(mixed, corpora, capsys):
    config = mixed()
    train(config)
    resume = ["--resume", str(config.out), "--optim.steps", "9"]
    for words in (["tiny", "--data.mix", *config.data.mix], resume):
        assert main(["train", *words, "--data.path", "data/A", "--dry-run"]) == 2
        error = capsys.readouterr().err
        assert f"data.path=data/A: must be left out with data.mix={' '.join(config.data.mix)}" in error
        assert error.count("\n") == 1


def test_two_tokenizers_are_one_line(mixed, corpora, make_config, tmp_path):
    mix = (f"{corpora / 'low'}=1", f"{corpora / 'words'}=1")
    with pytest.raises(
        ValueError, match=r"low holds bytes tokens, .*words gpt2; prepare both with one"
    ) as error:
        train(make_config(tmp_path / "run", data={"mix": mix}))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_corpus_is_named(make_config, corpora, tmp_path):
    mix = (f"{corpora / 'low'}=1", f"{tmp_path / 'none'}=1")
    with pytest.raises(ValueError, match=r"data\.mix=.*none: no such corpus"):
        train(make_config(tmp_path / "run", data={"mix": mix}))


def test_more_sequences_than_the_epochs_have_are_refused_before_the_first_step(mixed):
    with pytest.raises(ValueError, match=r"data\.max_epochs=1: 4,000 sequences are planned, and so many"):
        train(mixed(data={"max_epochs": (1,)}, optim={"steps": 500}))
    train(mixed(data={"max_epochs": (1,)}))
    train(mixed("other", data={"max_epochs": (0, 1)}, optim={"steps": 3}))  # one of them has no limit


def test_a_last_phase_that_the_epochs_do_not_have_is_refused(mixed, corpora):
    data = {"mix_last": (f"{corpora / 'high'}=1",), "mix_last_share": 0.9, "max_epochs": (0, 1)}
    with pytest.raises(ValueError, match=r"data\.max_epochs=0 1: 720 sequences are planned, and so many"):
        train(mixed(data=data, optim={"steps": 100}))


def test_phases_that_the_epochs_have_only_together_are_refused_before_the_first_step(
    mixed, corpora, tmp_path
):
    """The first phase lacks windows, or leaves the last one too few."""
    data = {"mix_last": (f"{corpora / 'low'}=1",), "mix_last_share": 0.3, "max_epochs": (1,)}
    message = r"data\.max_epochs=1 1: every corpus that is drawn has had them after [\d,]+ sequences"
    with pytest.raises(ValueError, match=message):
        train(mixed(low=0, high=1, data=data, optim={"steps": 20}))
    data["mix_last"] = (f"{corpora / 'high'}=1",)
    with pytest.raises(ValueError, match=message):
        train(mixed(low=0.3, high=0.7, data=data, optim={"steps": 20}))
    assert not (tmp_path / "run").exists()


def test_a_last_phase_on_other_weights(mixed, corpora, capsys):
    data = {"mix_last": (f"{corpora / 'high'}=1",), "mix_last_share": 0.5}
    whole = mixed("a", low=1, high=0, data=data, optim={"steps": 8})
    train(whole, source="here")
    assert f"; the last 50%: {corpora / 'high'}=1" in capsys.readouterr().out
    last = validations(whole)[-1]
    assert last["corpora"] == ["low", "high"]  # by their shares of the whole run, half each
    epochs = dict(zip(last["corpora"], last["epochs_by_corpus"], strict=True))
    for name in ("low", "high"):  # four steps of eight sequences each
        windows = len(Corpus.open(corpora / name).train) / 32
        assert epochs[name] * windows == pytest.approx(32, rel=0.05)


@pytest.mark.parametrize("batch", [2, 4, 16])
def test_another_batch_on_resume_keeps_the_last_phase_at_its_steps(batch, mixed, corpora):
    data = {"mix_last": (f"{corpora / 'high'}=1",), "mix_last_share": 0.25}
    train(mixed(low=1, high=0, data=data, optim={"steps": 8, "batch": 8}, checkpoint={"every": 4, "keep": 9}))
    run = mixed().out
    shutil.rmtree(run / "checkpoints/step-00000008")
    train(mixed(low=1, high=0, data=data, optim={"steps": 8, "batch": batch}, resume=True))
    last = validations(mixed())[-1]
    epochs = dict(zip(last["corpora"], last["epochs_by_corpus"], strict=True))
    for name, sequences in (("low", 4 * 8 + 2 * batch), ("high", 2 * batch)):
        windows = len(Corpus.open(corpora / name).train) / 32
        assert epochs[name] * windows == pytest.approx(sequences, rel=0.05)


def test_a_corpus_held_back_has_no_validation(mixed):
    config = mixed(low=1, high=0)
    train(config)
    assert validations(config)[-1]["corpora"] == ["low"]


def test_the_output_bias_starts_at_the_frequencies_of_the_mixture(corpora):
    low, high = (Corpus.open(corpora / name) for name in ("low", "high"))
    counts = Mixture.of([low, high], [1, 3]).counts()
    assert counts.sum() == pytest.approx(len(low.train) + len(high.train), abs=20)
    assert counts[ord("a") : ord("h")].sum() / counts[ord("t") : ord("{")].sum() == pytest.approx(
        1 / 3, rel=0.02
    )


def test_validate_reads_the_mixture_and_each_of_its_corpora(mixed, corpora, capsys):
    config = mixed()
    train(config)
    last = validations(config)[-1]
    main(["validate", str(config.out), "--device", "cpu"])
    table = capsys.readouterr().out.split("token sim.")[2]
    assert "low" in table
    assert "high" in table
    main(["validate", str(config.out), "--device", "cpu", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["rounds"][0]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert [one["corpus"] for one in record["by_corpus"]] == ["low", "high"]
    own = [one["rounds"][0]["loss"] for one in record["by_corpus"]]
    assert own == pytest.approx(last["loss_by_corpus"], rel=1e-6)
    main(["validate", str(config.out), "--device", "cpu", "--json", "--data", str(corpora / "high")])
    assert "by_corpus" not in json.loads(capsys.readouterr().out)


def test_diagnose_takes_its_probe_from_all_corpora(mixed, capsys, undrawn):
    config = mixed()
    train(config, quiet=True)
    words = "--device cpu --sequences 2 --iterations 1 --sublayers blocks.0.mlp --json".split()  # noqa: SIM905
    main(["diagnose", str(config.out), *words])
    record = json.loads(capsys.readouterr().out)[str(config.out)]
    assert record["probe"] == " ".join(config.data.mix)
    # The corpora were prepared anew since, with another tokenizer.
    stamp = json.loads((config.out / "run.json").read_text())
    (config.out / "run.json").write_text(json.dumps(stamp | {"tokenizer": "gpt2"}))
    assert main(["diagnose", str(config.out), *words]) == 2
    assert "low: holds bytes tokens, the run was trained on gpt2; prepare it with" in capsys.readouterr().err


def test_ranks_validate_the_same_windows(mixed):
    tasks = [LanguageTask(mixed(), World(rank, 2, torch.device("cpu"))) for rank in range(2)]
    assert all(
        torch.equal(*pair) for pair in zip(tasks[0].held_out["low"], tasks[1].held_out["low"], strict=True)
    )
