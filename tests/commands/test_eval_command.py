"""`deeploop eval` on a run that takes a second: live, in three steps, at several depths; and its mistakes."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from deeploop.cli import main
from deeploop.eval.requests import load_scores
from deeploop.eval.tasks import PAPER_TASKS
from deeploop.models import LoopedGPT
from deeploop.report.results import read as read_results
from deeploop.tasks.language.scores import IDENTITY, accuracy_chart, averages, table
from deeploop.train.loop import train


@pytest.fixture(scope="module")
def trained(make_config, tmp_path_factory):
    out = tmp_path_factory.mktemp("eval") / "run"
    train(make_config(out, model={"context": 320}, optim={"steps": 2, "batch": 2, "warmup_steps": 1}))
    return out


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def command(task_files, capsys):
    """`command("eval", …)` with the local tasks; gives what it printed."""

    def call(*words, data=True):
        words = [*map(str, words), *(["--data", str(task_files)] if data else [])]
        assert main(["eval", *words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def test_the_eight_tasks_end_in_the_papers_table(run, command, hashed):
    out = command(run, "--limit", 3)
    assert hashed == ["model.safetensors"]
    header, _, *rows = out.split("\n\n")[1].splitlines()
    headings = ["ARC-C", "ARC-E", "HellaSwag", "OBQA", "PIQA", "SciQ", "SIQA", "WG", "Avg"]
    assert header.split() == ["acc,", "%", *headings]
    (record,) = read_results(run / "eval.json")
    assert len(record["results"]) == 16
    for shots, row in zip((0, 1), rows, strict=True):
        results = [result for result in record["results"] if result["shots"] == shots]
        assert [result["task"] for result in results] == list(PAPER_TASKS)
        accs = [result["acc"] for result in results]
        expected = [f"{100 * acc:.2f}" for acc in [*accs, sum(accs) / 8]]
        assert row.split() == [f"{shots}-shot", "R=3", *expected]
    assert "items/s" in out
    assert f"written: {run / 'eval.json'}" in out


def test_what_made_a_result_is_written_with_it(run, command, task_files):
    record = json.loads(command(run, "--tasks", "piqa", "sciq", "--shots", 1, "--limit", 2, "--json"))
    assert read_results(run / "eval.json") == [record]
    assert record["checkpoint"] == "step-00000002"
    assert (record["limit"], record["rounds"], record["shots"]) == (2, [3], [1])
    assert (record["precision"], record["device"], record["tokenizer"]) == ("fp32", "cpu", "bytes")
    assert {"lm_eval", "deeploop", "torch", "git", "command", "written"} <= record.keys()
    for result in record["results"]:
        assert (result["items"], result["version"], len(result["hash"])) == (2, 1.0, 64)
        assert 0 <= result["acc"] <= 1
        assert result["stderr"] >= 0
    notes = "; ".join(record["deviations"])
    for word in ("first 2 documents", "bytes tokens", "context 320", "fp32", "piqa 4, sciq 4 rows"):
        assert word in notes
    assert "beginning" not in notes


def test_results_of_other_settings_stay_beside_each_other(run, command):
    few = ("--tasks", "piqa", "--shots", 0)
    for words in [(), ("--limit", 2), ("--limit", 2), ("--rounds", 1)]:
        command(run, *few, *words)
    kept = [(record["limit"], record["rounds"]) for record in read_results(run / "eval.json")]
    assert kept == [(None, [3]), (2, [3]), (None, [1])]


def test_a_damaged_eval_json_is_not_overwritten(run, command, task_files, capsys):
    (run / "eval.json").write_text("{")
    words = ["eval", str(run), "--tasks", "piqa", "--shots", "0", "--data", str(task_files)]
    assert main(words) == 2
    assert "eval.json: can't be read" in capsys.readouterr().err
    assert (run / "eval.json").read_text() == "{"


SCORE_WITHOUT = """
import sys
for name in ("lm_eval", "datasets", "transformers", "tiktoken", "matplotlib", "yaml", "jinja2", "pandas"):
    sys.modules[name] = None
from deeploop.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_three_steps_on_three_machines_are_one(run, command, task_files, tmp_path):
    file = tmp_path / "requests.npz"
    out = command("--requests", file, "--tokenizer", "bytes", "--limit", 3)
    assert out.splitlines()[-1].endswith(f"deeploop eval RUN --requests {file}")
    done = subprocess.run(
        [sys.executable, "-c", SCORE_WITHOUT, "eval", str(run), "--requests", str(file), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    scores = run / "scores.npz"
    assert done.stdout.splitlines()[-1].endswith(f"deeploop eval --scores {scores} --data {task_files}")
    moved = tmp_path / "home" / "scores.npz"
    moved.parent.mkdir()
    shutil.move(scores, moved)

    replayed = json.loads(command("--scores", moved, "--json"))
    live = json.loads(command(run, "--limit", 3, "--json"))
    assert replayed["results"] == live["results"]
    for key in IDENTITY:
        assert replayed[key] == live[key]
    assert replayed["deviations"] == live["deviations"]
    assert read_results(moved.parent / "eval.json") == [replayed]


def test_scores_of_other_requests_are_refused(run, command, task_files, tmp_path, capsys):
    file = tmp_path / "requests.npz"
    command("--requests", file, "--tokenizer", "bytes", "--tasks", "piqa")
    command(run, "--requests", file, data=False)
    other = shutil.copytree(task_files, tmp_path / "other")
    path = other / "piqa" / "validation.jsonl"
    path.write_text(path.read_text().replace("loop", "block"))
    assert main(["eval", "--scores", str(run / "scores.npz"), "--data", str(other)]) == 2
    assert "scores: were computed for other requests" in capsys.readouterr().err
    assert not (run / "eval.json").exists()


def test_several_rounds_make_a_picture(run, command):
    words = ("--tasks", "piqa", "winogrande", "--rounds", 3, 1)
    out = command(run, *words)
    assert [line.split()[:2] for line in out.split("\n\n")[1].splitlines()[2:]] == [
        [f"{shots}-shot", f"R={R}"] for shots in (0, 1) for R in (1, 3)
    ]
    assert (run / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    (sweep,) = read_results(run / "eval.json")
    command(run, *words[:3], "--rounds", 1)
    alone = read_results(run / "eval.json")[-1]
    assert [row for row in sweep["results"] if row["rounds"] == 1] == alone["results"]


def test_scores_at_several_rounds_are_those_of_each_depth(run, command, tmp_path):
    file = tmp_path / "requests.npz"
    command("--requests", file, "--tokenizer", "bytes", "--tasks", "piqa")
    command(run, "--requests", file, "--rounds", 1, 3, data=False)
    _, kept = load_scores(run / "scores.npz")
    command(run, "--requests", file, "--rounds", 1, "--recompute-alpha", data=False)
    _, recomputed = load_scores(run / "scores.npz")
    assert kept.keys() == {1, 3}
    digest = next(iter(kept[1]))
    assert not np.array_equal(kept[1][digest].logprob, kept[3][digest].logprob)
    assert not np.array_equal(kept[1][digest].logprob, recomputed[1][digest].logprob)


def test_the_picture_shows_accuracy_and_loss_against_rounds():
    average = [{"shots": s, "rounds": R, "acc": 0.3 + 0.1 * s + 0.01 * R} for s in (0, 1) for R in (1, 3)]
    results = [{"task": "piqa"}, {"task": "sciq"}]
    record = {"trained_rounds": 3, "shots": [0, 1], "average": average, "results": results}
    (panel,) = accuracy_chart(record).panels
    assert panel.at == (3, "trained")
    assert [line.x for line in panel.lines] == [[1, 3], [1, 3]]
    assert panel.lines[1].y == pytest.approx([41, 43])
    loss = {
        "trained_rounds": 3,
        "rounds": [{"rounds": R, "loss": 4.0 - R, "bits_per_byte": 2.0} for R in (1, 3)],
        "recompute_alpha": False,
        "adaptive": [],
    }
    left, right = accuracy_chart(record, [loss]).panels
    assert left.lines[0].y == [3, 1]
    assert "mean of 2 tasks" in right.y


def test_tasks_without_accuracy_stand_one_below_the_other():
    rows = [
        {"rounds": 3, "task": "piqa", "shots": 0, "items": 9, "acc": 0.5, "stderr": 0.1},
        {"rounds": 3, "task": "wikitext", "shots": 0, "items": 2, "metrics": {"word_perplexity": 12.5}},
    ]
    text = table({"results": rows, "average": averages(rows)})
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["piqa", "0", "3", "9", "acc", "0.5000"],
        ["wikitext", "0", "3", "2", "word_perplexity", "12.5000"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "run: name a run folder, or write requests without one: --requests FILE"),
        ("{run}/nowhere", "no such run folder"),
        ("{empty} --data {tasks}", "holds no checkpoint"),
        ("{run} --data {tasks} --tasks pica", "tasks=pica: is not one of the eight tasks"),
        ("{run} --data {tasks} --tasks pica", "perhaps you meant piqa"),
        ("{run} --data {tasks}/none", "none/arc_challenge/test.jsonl: no such task file"),
        ("{run} --data {tasks} --limit 0", "limit=0: must be at least 1"),
        ("{run} --data {tasks} --shots -1", "shots=-1: must be at least 0"),
        ("{run} --data {tasks} --rounds 0", "model.rounds=0: must be at least 1"),
        ("{run} --data {tasks} --batch-tokens 0", "batch_tokens=0: must be at least 1"),
        ("{run} --requests {gpt2}", "holds gpt2 tokens, the run was trained on bytes; write them with --tok"),
        ("{run} --requests {tasks}/none.npz", "none.npz: no such file"),
        ("{run} --requests {gpt2} --limit 3", "limit: the file determines the requests"),
        ("--requests {gpt2} --data {tasks}", "is already there; name a run folder to score it"),
        ("--scores {gpt2}", "is not a file of deeploop scores"),
        ("{run} --scores {gpt2}", "scores: can't be combined with a run folder"),
    ],
)
def test_mistakes_end_in_one_line(trained, task_files, tmp_path_factory, capsys, words, message):
    home = trained.parent
    if not (home / "gpt2.npz").exists():
        data = str(task_files)
        assert main(["eval", "--requests", str(home / "gpt2.npz"), "--tasks", "piqa", "--data", data]) == 0
        (home / "empty").mkdir()
        for name in ("run.json", "config.json"):
            shutil.copy(trained / name, home / "empty")
        capsys.readouterr()
    places = {"run": trained, "empty": home / "empty", "tasks": task_files, "gpt2": home / "gpt2.npz"}
    assert main(["eval", *words.format(**places).split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kept", [2, 0])
def test_an_item_longer_than_the_context_is_left_out(kept, make_config, task_files, tmp_path, capsys):
    """Of four items of piqa, two or all have an answer that does not fit; the others count."""

    def evaluate(data):
        words = ["--data", str(data), "--shots", "0", "--tasks", "sciq", "piqa"]
        assert main(["eval", str(tmp_path / "run"), *words, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        return record, {row["task"]: row for row in record["results"]}

    train(make_config(tmp_path / "run", model={"context": 24}, optim={"steps": 1, "warmup_steps": 1}))
    capsys.readouterr()
    for name in ("all", "short"):
        shutil.copytree(task_files, tmp_path / name)
    split = "piqa/validation.jsonl"
    rows = [json.loads(line) for line in (task_files / split).read_text().splitlines()]
    long = [row | {"sol2": "much longer than all of the context"} for row in rows]
    rows = [rows[0], long[1], rows[2], long[3]] if kept else long
    (tmp_path / "all" / split).write_text("".join(json.dumps(row) + "\n" for row in rows))
    record, found = evaluate(tmp_path / "all")
    assert (found["piqa"]["items"], found["piqa"]["left_out"]) == (kept, 4 - kept)
    assert "left_out" not in found["sciq"]
    note = f"piqa, 0-shot: {4 - kept} of 4 items left out, with an answer longer than the context"
    assert note in record["deviations"]
    assert bool(record["average"]) == ("acc" in found["piqa"]) == bool(kept)
    if kept:
        (tmp_path / "short" / split).write_text("".join(json.dumps(rows[i]) + "\n" for i in (0, 2)))
        _, alone = evaluate(tmp_path / "short")
        assert found["piqa"]["acc"] == alone["piqa"]["acc"]
        assert found["piqa"]["hash"] == alone["piqa"]["hash"]
    assert (
        main(["eval", str(tmp_path / "run"), "--data", str(tmp_path / "all"), "--tasks", "sciq", "piqa"]) == 0
    )
    assert note in capsys.readouterr().out  # as a table too


def test_a_missing_harness_says_how_to_get_it(run, task_files, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "deeploop.eval.harness")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(run), "--data", str(task_files)]) == 2
    err = capsys.readouterr().err
    assert 'pip install -c constraints.txt -e ".[eval]"' in err
    assert err.count("\n") == 1


def test_a_full_gpu_ends_with_a_code_of_its_own(run, task_files, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LoopedGPT, "forward", full)
    words = [str(run), "--data", str(task_files), "--tasks", "piqa", "--batch-tokens", "900"]
    assert main(["eval", *words]) == 75
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "deeploop eval: error: the GPU's memory is full; try --batch-tokens 450"
