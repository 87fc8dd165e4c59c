"""The paper's eight tasks from the harness' configs, optionally with local JSON lines instead of a download.

DIR/<task>/<split>.jsonl holds one object per line, in the format of the dataset on the Hugging Face hub.
Prompts, choices and scoring are unchanged: only the config's dataset is replaced.
"""

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeploop.files import parse_json, read_text

LARGEST_TASK = 1 << 30  # bytes of a task file; HellaSwag's 40,000 rows are 50 MB
FEWSHOT_SEED = 1234  # the harness' default: the same examples in every run


@dataclass(frozen=True)
class PaperTask:
    """A task of the paper's Table 2."""

    heading: str
    config: str
    """Path of its config in the harness."""
    fields: tuple[str, ...]
    """Required fields of a row."""


PAPER_TASKS = {
    "arc_challenge": PaperTask("ARC-C", "arc/arc_challenge.yaml", ("question", "choices", "answerKey")),
    "arc_easy": PaperTask("ARC-E", "arc/arc_easy.yaml", ("question", "choices", "answerKey")),
    "hellaswag": PaperTask(
        "HellaSwag", "hellaswag/hellaswag.yaml", ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    ),
    "openbookqa": PaperTask("OBQA", "openbookqa/openbookqa.yaml", ("question_stem", "choices", "answerKey")),
    "piqa": PaperTask("PIQA", "piqa/piqa.yaml", ("goal", "sol1", "sol2", "label")),
    "sciq": PaperTask(
        "SciQ",
        "sciq/sciq.yaml",
        ("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer"),
    ),
    "social_iqa": PaperTask(
        "SIQA", "siqa/siqa.yaml", ("context", "question", "answerA", "answerB", "answerC", "label")
    ),
    "winogrande": PaperTask("WG", "winogrande/default.yaml", ("sentence", "option1", "option2", "answer")),
}
# HellaSwag after the harness' own preprocessing; such rows are used unchanged.
CLEANED = ("query", "choices", "gold")


def load_tasks(names: Sequence[str], data: Path | None = None) -> dict[str, Any]:
    """Load the harness' tasks with these names, as its TaskManager.load does."""
    from lm_eval.tasks import TaskManager

    with quiet():
        if data is not None:
            return TaskManager(include_defaults=False).load([local_config(name, data) for name in names])
        wanted: list[Any]
        if all(name in PAPER_TASKS for name in names):  # avoids reading thousands of other configs
            manager, wanted = TaskManager(include_defaults=False), [stock_config(name) for name in names]
        else:
            manager, wanted = TaskManager(), list(names)
            for name in names:
                if name not in manager.all_tasks:
                    raise ValueError(unknown(name, manager.all_tasks, "a task of the harness"))
        try:
            return manager.load(wanted)
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"tasks: their data can't be downloaded ({reason}); "
                "without a network use local files: --data DIR"
            ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the harness' warnings and its progress bar for every task."""
    import datasets
    import lm_eval.api.task

    logger = logging.getLogger("lm_eval")
    level, bar = logger.level, lm_eval.api.task.tqdm
    had_bars = datasets.utils.are_progress_bars_disabled() is False
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = lambda documents, **_: documents
    try:
        yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm = bar
        if had_bars:
            datasets.enable_progress_bars()


def unknown(name: str, known: Sequence[str], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; perhaps you meant {close[0]}" if close else ""
    return f"tasks={name}: is not {what}{hint}"


def stock_config(name: str) -> dict[str, Any]:
    """The harness' own config of one of the eight tasks."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(Path(lm_eval.tasks.__file__).parent / PAPER_TASKS[name].config)


def local_config(name: str, data: Path) -> dict[str, Any]:
    """The harness' config with the rows in data/name as its dataset."""
    from datasets import Dataset, DatasetDict

    if name not in PAPER_TASKS:
        raise ValueError(unknown(name, tuple(PAPER_TASKS), "one of the eight tasks that --data can hold"))
    config = stock_config(name)
    scored = config.get("test_split") or config["validation_split"]
    rows = {}
    for kind in ("training_split", "validation_split", "test_split"):
        split = config.get(kind)
        path = data / name / f"{split}.jsonl"
        if split is not None and (split == scored or path.exists()):
            rows[split] = read_rows(path, PAPER_TASKS[name].fields)
        else:
            config[kind] = None  # no such file to draw from
    splits = DatasetDict({split: Dataset.from_list(content) for split, content in rows.items()})
    if (clean := config.get("process_docs")) is not None:
        config["process_docs"] = lambda docs: docs if CLEANED[0] in docs.column_names else clean(docs)
    return config | {
        "dataset_path": str(data / name),
        "dataset_name": None,
        "custom_dataset": lambda **_: splits,
    }


def read_rows(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Read the rows of a JSON-lines file, each with all required fields."""
    try:
        lines = read_text(path, LARGEST_TASK).splitlines()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such task file; --data DIR holds <task>/<split>.jsonl") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: is not JSON ({error})") from None
        rows.append(_checked(row, fields, f"{path}, line {number}"))
    if not rows:
        raise ValueError(f"{path}: holds no rows")
    return rows


def _checked(row: Any, fields: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be a JSON object")
    if "endings" in fields and all(name in row for name in CLEANED):
        return row | {"label": str(row["gold"])}
    if missing := [name for name in fields if name not in row]:
        raise ValueError(f"{where}: has no field {missing[0]!r}; a row holds {', '.join(fields)}")
    return row


def fewshot_pool(task: Any) -> tuple[str, int]:
    """The split that a task's few-shot examples are drawn from, and its number of rows."""
    config = task.config
    split = (
        config.fewshot_config.split or config.training_split or config.validation_split or config.test_split
    )
    return str(split), len(task.sampler.df)


def require_examples(tasks: dict[str, Any], data: Path, shots: int) -> None:
    """Raise for local files with fewer rows than the examples in a prompt."""
    for name, task in tasks.items():
        split, rows = fewshot_pool(task)
        # The harness draws one more where it may have to leave out the scored item itself.
        needed = shots + (task.config.fewshot_config.split == task.config.test_split)
        if shots and rows < needed:
            raise ValueError(
                f"shots={shots}: {data / name / split}.jsonl has {rows} rows, and {needed} are needed; "
                "add rows or ask for fewer shots"
            )


def deviations(tasks: dict[str, Any], data: Path | None, shots: Sequence[int]) -> list[str]:
    """Describe how local files differ from the harness' own tasks."""
    if data is None or not any(shots):
        return []
    notes = []
    pools = {name: fewshot_pool(task) for name, task in tasks.items()}
    for name, (split, _) in pools.items():
        if (stock := stock_config(name)["training_split"]) != split:
            notes.append(f"{name}: examples are drawn from {split}.jsonl, as there is no {stock}.jsonl")
    sizes = ", ".join(f"{name} {rows}" for name, (_, rows) in pools.items())
    notes.append(
        f"examples are drawn from local files, which may hold less than the stock pools: {sizes} rows"
    )
    return notes
