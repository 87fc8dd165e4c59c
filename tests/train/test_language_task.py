"""The next-token task: what is scored, how it is shared over ranks, and which corpus a run belongs to."""

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import deeploop
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.distributed import World, share_of_rank
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

ALONE = World(0, 1, device=torch.device("cpu"))


def test_the_floor_is_the_entropy_of_the_targets_that_are_scored(tiny_config):
    task = LanguageTask(tiny_config(data={"validation_sequences": 3}), ALONE)
    counts = Counter(task.validation[1].flatten().tolist())
    total = sum(counts.values())
    assert total == 3 * 32
    assert task.floor == pytest.approx(-sum(n / total * math.log(n / total) for n in counts.values()))


def test_the_output_bias_starts_at_the_frequencies_of_the_training_text(tiny_config):
    task = LanguageTask(tiny_config(model={"unigram_bias": True}), ALONE)
    stream = task.corpus.corpora[0].train
    counts = torch.from_numpy(stream.slice(0, len(stream)).astype("int64")).bincount(minlength=320)
    expected = ((counts + 1.0) / (len(stream) + 320)).log()
    torch.testing.assert_close(task.build().output_bias.detach(), expected)


def test_a_run_keeps_its_output_bias(tiny_config):
    config = tiny_config(model={"unigram_bias": True})
    train(replace(config, optim=replace(config.optim, peak_lr=1e-2)))
    start, (trained, _) = LanguageTask(config, ALONE).build(), deeploop.load(config.out)
    moved = (trained.output_bias - start.output_bias).abs()
    assert 1e-3 < moved.max() < 0.1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
def test_ranks_score_every_window_once_in_equally_many_rows(ranks):
    windows = torch.arange(7 * 2).reshape(7, 2)
    shares = [share_of_rank(windows, World(r, ranks, torch.device("cpu")), -1) for r in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    rows = [tuple(row) for share in shares for row in share.tolist()]
    assert sorted(row for row in rows if row != (-1, -1)) == [tuple(row) for row in windows.tolist()]


def test_resuming_on_another_corpus_of_the_same_length_is_refused(tiny_config, tmp_path):
    draw = [chr(97 + i % 7) * 50 for i in range(60)]
    for name, documents in (("a", draw), ("b", draw[::-1])):
        prepare(documents, get_tokenizer("bytes"), tmp_path / name, validation_tokens=300, source=name)
    train(tiny_config(data={"path": tmp_path / "a"}))
    with pytest.raises(ValueError, match=r"data\.path=.*b: not the corpus that the run was started on"):
        train(tiny_config(data={"path": tmp_path / "b"}, optim={"steps": 8}, resume=True))


def test_the_corpus_may_move(tiny_config, corpus, tmp_path):
    train(tiny_config())
    shutil.copytree(corpus, tmp_path / "moved")
    result = train(tiny_config(data={"path": tmp_path / "moved"}, optim={"steps": 8}, resume=True))
    assert (result["ended"], result["step"]) == ("finished", 8)


def test_a_field_that_is_new_since_the_run_began_takes_its_default(tiny_config):
    config = tiny_config()
    train(config)
    path = config.out / "config.json"
    written = json.loads(path.read_text())
    del written["model"]["mask_padding"]
    path.write_text(json.dumps(written))
    assert train(tiny_config(optim={"steps": 8}, resume=True))["ended"] == "finished"


def test_metrics_of_a_run_without_checkpoint_are_put_aside(tiny_config):
    config = tiny_config()
    config.out.mkdir()
    (config.out / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 7.0}\n')
    train(config)
    assert read_metrics(config.out)[0]["step"] == 0
    assert "7.0" in (config.out / "metrics.previous.jsonl").read_text()


def test_a_step_larger_than_the_corpus_is_refused(tiny_config):
    """A slip of the finger in the batch must not fill the machine's memory first."""
    with pytest.raises(ValueError, match=r"optim.batch=1000000000: a step of 32,000,000,000 tokens is more"):
        train(tiny_config(optim={"batch": 10**9}))


def test_the_loss_is_the_mean_cross_entropy_of_the_targets(tiny_config):
    """Adam does not see a factor in it; whoever reads the metrics does."""
    config = tiny_config(optim={"steps": 1}, device={"micro_batch": 3})
    task = LanguageTask(config, ALONE)
    model = task.build().eval()
    batches = task.batches(0).batches
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        ours = sum(task.loss(model, batch) for batch in batches)
        logits = model.logits(model(tokens).states)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
        trained = sum(task.loss(model.train(), batch) for batch in batches)
    torch.testing.assert_close(ours, expected)
    train(config)
    (line,) = read_metrics(config.out, "train")
    assert line["loss"] == pytest.approx(float(trained), rel=1e-6)


def test_validation_documents_that_are_trained_on_are_told(tiny_config, tmp_path):
    held, rest = ["the same " * 40] * 2, [f"document {i} " * 40 for i in range(60)]
    settings = {"validation_tokens": 600, "source": "made up", "workers": 1}
    for name, stream, count in (("old", True, 1), ("new", False, 0)):
        prepare([held[0], *rest, held[1]], get_tokenizer("bytes"), tmp_path / name, stream=stream, **settings)
        task = LanguageTask(tiny_config(data={"path": tmp_path / name}), ALONE)
        found = [
            line for line in task.warnings() if "validation documents are in the training text too" in line
        ]
        assert len(found) == count
    assert (
        "1 of 2 validation documents"
        in LanguageTask(tiny_config(data={"path": tmp_path / "old"}), ALONE).warnings()[1]
    )


def test_a_vocabulary_that_is_most_of_the_model_is_told(tiny_config):
    task = LanguageTask(tiny_config(), ALONE)
    assert task.large_vocabulary() is None
    task.config = replace(task.config, model=replace(task.config.model, vocabulary=50_257))
    assert "parameters are the vocabulary of bytes" in task.large_vocabulary()
    task.config = replace(task.config, init_from=Path("runs/a"))
    assert task.large_vocabulary() is None
