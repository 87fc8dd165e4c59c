"""Metrics: one JSON object per line, numbers that JSON has, a past that can be taken back."""

import json
import math
import os
import sys
import time
import tracemalloc

import pytest
from known_peak import expected_mfu, set_peak

from deeploop.config.run import LogConfig
from deeploop.train.loop import train
from deeploop.train.metrics import (
    LONGEST_LINE,
    MetricsWriter,
    last_lines,
    read_metrics,
    rewind_metrics,
    stream_back,
    stream_lines,
)


@pytest.fixture
def write(tmp_path):
    def write(*records, config=None):
        writer = MetricsWriter(tmp_path, config or LogConfig(), {})
        for kind, step, values in records:
            writer.write(kind, step, values)
        writer.close()

    return write


def test_a_run_writes_what_plots_need(tiny_config):
    config = tiny_config(log={"every": 2})
    train(config)
    lines = (config.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == read_metrics(config.out)
    records = read_metrics(config.out, "train")
    assert [record["step"] for record in records] == [2, 4, 6]
    assert records[-1]["tokens"] == 6 * 8 * 32
    assert records[-1]["mfu"] is None  # nobody knows a CPU's peak
    assert records[-1]["tokens_per_s"] > 0
    assert records[0]["lr"] == pytest.approx(1.5e-3)  # two of four steps up the ramp
    validations = read_metrics(config.out, "validation")
    assert [record["step"] for record in validations] == [0, 4, 6]
    assert validations[0].keys() == {"kind", "step", "loss", "floor", "similarity", "verdict"}


def test_utilization_is_the_share_of_the_peak(tiny_config, monkeypatch):
    set_peak(monkeypatch.setattr)
    config = tiny_config(log={"every": 6})
    train(config)
    (record,) = read_metrics(config.out, "train")
    assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["seconds"])
    assert record["mfu"] == pytest.approx(expected_mfu(config, record, ranks=1))


def test_numbers_that_json_lacks_become_null(tmp_path, write):
    write(("train", 1, {"loss": math.nan, "lr": math.inf, "note": "x"}))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "kind": "train",
        "step": 1,
        "loss": None,
        "lr": None,
        "note": "x",
    }


def test_writers_append(tmp_path, write):
    write(("train", 1, {"loss": 2.0}))
    write(("train", 2, {"loss": 1.0}))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_rewinding_drops_the_future_and_a_broken_line(tmp_path, write):
    write(*(("train", step, {"loss": 1 / step}) for step in range(1, 6)), ("validation", 3, {"loss": 0.1}))
    kept = [record for record in read_metrics(tmp_path) if record["step"] <= 3]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    rewind_metrics(tmp_path, 3)
    assert read_metrics(tmp_path) == kept
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(kept) == 4


@pytest.mark.parametrize(
    "line", ["[1]", "7", '"kind"', '{"step": 1}', '{"kind": "train"}', '{"kind": "train", "step": "1"}']
)
def test_a_line_that_is_no_record_is_left_out(tmp_path, write, line):
    write(("train", 1, {"loss": 2.0}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    write(("train", 2, {"loss": 1.0}))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_no_metrics_is_no_records(tmp_path):
    rewind_metrics(tmp_path, 3)
    assert read_metrics(tmp_path) == []


def test_tensorboard_gets_the_same_numbers(tmp_path, write):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    values = {"loss": 2.5, "verdict": "no number", "by_rounds": [1.5, None, 3]}
    write(("train", 1, values), config=LogConfig(tensorboard=True))
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["train/loss", "train/by_rounds/0", "train/by_rounds/2"]
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 2.5)]


def test_wandb_offline_keeps_its_files_in_the_run_folder(tmp_path, write, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path.parent)
    write(("train", 1, {"loss": 2.5}), config=LogConfig(wandb="project"))
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_a_refusal_of_wandb_names_the_field(write, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**settings):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"log\.wandb=project: No API key configured"):
        write(config=LogConfig(wandb="project"))


@pytest.mark.parametrize(
    ("extra", "module", "config"),
    [
        ("tensorboard", "tensorboard", LogConfig(tensorboard=True)),
        ("wandb", "wandb", LogConfig(wandb="project")),
    ],
)
def test_a_missing_extra_says_how_to_install_it(monkeypatch, extra, module, config):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf'log\.{extra}.*pip install -c constraints.txt -e "\.\[{extra}\]"'):
        config.require_extras()


def test_an_extra_is_missed_before_there_is_a_folder(tiny_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config(log={"wandb": "project"})
    with pytest.raises(ValueError, match=r"log\.wandb=project: wandb is not installed"):
        train(config)
    assert not config.out.exists()


def test_a_verdict_of_older_files_is_read_by_its_new_name(tmp_path):
    line = '{"kind": "validation", "step": 1, "loss": 2.0, "verdict": "between"}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    found = *read_metrics(tmp_path), last_lines(tmp_path)[1], *stream_back(tmp_path)
    assert [record["verdict"] for record in found] == ["undecided"] * 3


LINE = b'{"kind": "train", "step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize(
    "bad",
    [
        b"[" * 5000 + b"\n",
        b'{"kind": "train", "step": 2, "x": ' + b"[" * 900 + b"]" * 900 + b"}\n",
        b'{"kind": "train", "step": 2, "loss": "low"}\n',
        b'{"kind": "train", "step": 2, "loss": 1e400}\n',
        b'{"kind": "train", "step": 2, "loss": ' + b"9" * 400 + b"}\n",
        b'{"kind": "train", "step": 2, "verdict": []}\n',
        b'{"kind": ["train"], "step": 2}\n',
        b'{"kind": "train", "step": -1}\n',
        b'{"kind": "train", "step": true}\n',
        b'{"kind": "train", "step": 2, "x": "' + b"x" * LONGEST_LINE + b'"}\n',
    ],
)
def test_a_line_of_other_kinds_is_damage(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_bytes(LINE + bad + LINE)
    assert [record and record["step"] for record in stream_lines(tmp_path)] == [1, None, 1]
    assert [record["step"] for record in last_lines(tmp_path, count=3)[0]] == [1, 1]


def test_a_line_without_an_end_takes_neither_time_nor_memory(tmp_path):
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(LINE)
        file.seek(60_000_000, 1)  # a hole: nothing is written, 60 MB of zeros are read
        file.write(b"\n" + LINE)
    began = time.process_time()
    tracemalloc.start()
    assert [record["step"] for record in stream_back(tmp_path)] == [1, 1]
    assert [record and record["step"] for record in stream_lines(tmp_path)] == [1, None, 1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * LONGEST_LINE
    assert time.process_time() - began < 10


def test_metrics_that_are_a_fifo_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path) == []
    assert last_lines(tmp_path) == ([], {})
