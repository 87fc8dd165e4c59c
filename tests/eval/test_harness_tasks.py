"""Local files through the stock configs: prompts are the stock ones, mistakes are one line."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import lm_eval.tasks
import pytest

from deeploop.eval.harness import set_shots
from deeploop.eval.tasks import PAPER_TASKS, deviations, load_tasks, quiet, require_examples, stock_config

NAMES = list(PAPER_TASKS)


@pytest.fixture
def files(task_files, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(task_files, tmp_path / "tasks")


def prompts(loaded, shots):
    """(context, continuation) of every request, by task."""
    set_shots(loaded, shots)
    with quiet():
        for task in loaded["tasks"].values():
            task.build_all_requests(rank=0, world_size=1)
    return {name: [request.args for request in task.instances] for name, task in loaded["tasks"].items()}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_config_is_the_task_it_is_listed_as():
    for name in NAMES:
        config = stock_config(name)
        assert config["task"] == name
        assert "acc" in [metric["metric"] for metric in config["metric_list"]]


@pytest.mark.parametrize("shots", [0, 1])
def test_prompts_are_those_of_the_stock_configs(task_files, shots, tmp_path):
    """The rows as the harness' own loader reads them."""
    configs = []
    for name in NAMES:
        config = stock_config(name)
        splits = {
            config[kind] for kind in ("training_split", "validation_split", "test_split") if config.get(kind)
        }
        data_files = {split: str(task_files / name / f"{split}.jsonl") for split in splits}
        loading = {"data_files": data_files, "cache_dir": str(tmp_path)}
        configs.append(config | {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": loading})
    with quiet():
        stock = lm_eval.tasks.TaskManager(include_defaults=False).load(configs)
    assert prompts(load_tasks(NAMES, task_files), shots) == prompts(stock, shots)


def test_prompts_by_hand(task_files):
    made = prompts(load_tasks(NAMES, task_files), 0)
    row = read(task_files / "arc_easy" / "test.jsonl")[0]
    question = f"Question: {row['question']}\nAnswer:"
    assert made["arc_easy"][:4] == [(question, f" {text}") for text in row["choices"]["text"]]
    row = read(task_files / "winogrande" / "validation.jsonl")[0]
    before, after = row["sentence"].split("_")
    assert made["winogrande"][:2] == [(before + row[name], after) for name in ("option1", "option2")]
    row = read(task_files / "hellaswag" / "validation.jsonl")[0]
    beginning = row["ctx_a"].replace(" [title]", ". ").replace("  ", " ")
    context = f"{row['activity_label']}: {beginning} {row['ctx_b'].capitalize()}"
    assert [context_ for context_, _ in made["hellaswag"][:4]] == [context] * 4
    assert "[substeps]" not in str(made["hellaswag"])
    assert {name: len(requests) for name, requests in made.items()} == {
        **dict.fromkeys(NAMES, 16),
        "piqa": 8,
        "social_iqa": 12,
        "winogrande": 8,
    }


def test_examples_are_of_the_training_split_and_repeat(task_files):
    once, again = (prompts(load_tasks(["piqa"], task_files), 1)["piqa"] for _ in range(2))
    assert once == again
    pool = {
        f"Question: {row['goal']}\nAnswer: {row[('sol1', 'sol2')[row['label']]]}\n\n"
        for row in read(task_files / "piqa" / "train.jsonl")
    }
    assert all(context.startswith(tuple(pool)) for context, _ in once)


def test_cleaned_rows_of_hellaswag_are_taken_as_they_are(files):
    native = prompts(load_tasks(["hellaswag"], files), 1)
    clean = stock_config("hellaswag")["process_docs"].__globals__["preprocess"]
    path = files / "hellaswag" / "train.jsonl"
    rows = [
        {
            "ind": row["ind"],
            "query": clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"),
            "choices": list(map(clean, row["endings"])),
            "gold": int(row["label"]),
        }
        for row in read(path)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert prompts(load_tasks(["hellaswag"], files), 1) == native


def test_without_a_training_split_examples_come_from_validation_and_it_is_said(files):
    (files / "sciq" / "train.jsonl").unlink()
    loaded = load_tasks(["sciq"], files)
    notes = deviations(loaded["tasks"], files, [0, 1])
    assert notes[0] == "sciq: examples are drawn from validation.jsonl, as there is no train.jsonl"
    assert "sciq 4 rows" in notes[1]
    answers = [row["correct_answer"] for row in read(files / "sciq" / "validation.jsonl")]
    for context, _ in prompts(loaded, 1)["sciq"]:
        assert context.split("\n\n")[0].endswith(tuple(f"Answer: {answer}" for answer in answers))


def test_more_shots_than_rows_are_refused_where_the_harness_fails(task_files):
    """Of four rows, four examples for sciq; three for piqa, for which the harness draws one more."""
    for name, most in (("sciq", 4), ("piqa", 3)):
        for shots in (most, most + 1):
            tasks = set_shots(load_tasks([name], task_files), shots)["tasks"]
            prompt = partial(tasks[name].fewshot_context, next(iter(tasks[name].eval_docs)), shots)
            if shots == most:
                require_examples(tasks, task_files, shots)
                prompt()
                continue
            with pytest.raises(
                ValueError, match=rf"shots={shots}: .*{name}.train\.jsonl has 4 rows, and 5 are"
            ):
                require_examples(tasks, task_files, shots)
            with pytest.raises(ValueError, match="Sample larger than population"):
                prompt()


def test_what_does_not_deviate(task_files):
    tasks = load_tasks(["sciq"], task_files)["tasks"]
    assert deviations(tasks, task_files, [0]) == []
    assert deviations(tasks, None, [0, 1]) == []
    assert len(deviations(tasks, task_files, [1])) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "piqa/validation.jsonl: no such task file; --data DIR holds <task>/<split>.jsonl"),
        ("", "piqa/validation.jsonl: holds no rows"),
        ('{"goal": 1', "piqa/validation.jsonl, line 1: is not JSON"),
        pytest.param("[" * 100_000, "line 1: is not JSON (nested too deeply)", id="deep"),
        ("\n[1, 2]", "piqa/validation.jsonl, line 2: must be a JSON object"),
        ('{"goal": "x", "sol1": "y"}', "line 1: has no field 'sol2'; a row holds goal, sol1, sol2, label"),
        (b"\xff\xfe", "piqa/validation.jsonl: can't be read (not UTF-8"),
    ],
)
def test_a_file_that_is_no_task(files, content, message):
    path = files / "piqa" / "validation.jsonl"
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        load_tasks(["piqa"], files)
    assert message in str(caught.value)


def test_an_unknown_task_is_named_with_what_was_meant(task_files, monkeypatch):
    with pytest.raises(ValueError, match=r"tasks=hellaswagg: is not one of the eight .* meant hellaswag"):
        load_tasks(["hellaswagg"], task_files)

    class Manager:
        all_tasks = ("wikitext", "piqa")

    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: Manager())
    with pytest.raises(ValueError, match=r"tasks=wikitex: is not a task of the harness; .* meant wikitext"):
        load_tasks(["piqa", "wikitex"])


def test_no_network_is_one_line(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the hub\nand more")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ValueError, match=r"\(Couldn't reach the hub\); .* --data DIR$"):
        load_tasks(["piqa"])


def test_the_pages_lines_write_files_that_data_reads(task_files, tmp_path, monkeypatch):
    """docs/evaluation.md: the downloaded data sets, here the rows of files, become `--data eval_data`."""
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    original = load_tasks
    monkeypatch.setattr("deeploop.eval.tasks.load_tasks", lambda names: original(names, task_files))
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    assert sorted(path.name for path in (tmp_path / "eval_data").iterdir()) == sorted(NAMES)
    assert prompts(original(NAMES, tmp_path / "eval_data"), 1) == prompts(original(NAMES, task_files), 1)
