"""Shared fixtures: a corpus of bytes, a run of a second, small files of the eight tasks, a browser."""

import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace

# Before torch is imported, and for every process a test starts: threads gain nothing on tiny matrices,
# and where other work shares the cores they lose a factor of ten waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Containers often forbid compiled modules on disk: every process of a test would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, DeviceConfig, LogConfig
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.language.config import DataConfig, TrainConfig
from deeploop.train import checkpoint

sys.dont_write_bytecode = False
SENTENCE = "the loop visits one block again and then another until every round is done"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
)


# First, so that two workers end at the same time: these start processes, one launch for a whole file.
SLOWEST = (
    "test_two_ranks",
    "test_readme",
    "test_demo",
    "test_sweep",
    "test_faults",
    "test_torchrun",
    "test_resume",
    "test_puzzle_resume",
)


def sample_each_test(items):
    """Mark one case of each test of kernels `sample`: the one that says so, else the first."""
    of_kernels = [item for item in items if item.get_closest_marker("kernels")]
    sampled = {item.function for item in of_kernels if item.get_closest_marker("sample")}
    for item in of_kernels:
        if item.function not in sampled:
            item.add_marker("sample")
            sampled.add(item.function)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    has_gpu, has_triton = torch.cuda.is_available(), importlib.util.find_spec("triton") is not None
    runs_kernels = has_triton and (has_gpu or os.environ.get("TRITON_INTERPRET") == "1")
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("kernels"):
            item.add_marker("gpu")
            if not runs_kernels:
                reason = "needs Triton, and a CUDA device or TRITON_INTERPRET=1"
                item.add_marker(pytest.mark.skip(reason=reason))
    sample_each_test(items)
    items.sort(key=lambda item: item.path.stem not in SLOWEST)  # a stable sort: the rest stays in order


@pytest.fixture(autouse=True)
def exact_products():
    """A training run allows TF32 for its whole process: the next test has exact fp32 products again."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def with_triton(monkeypatch):
    """Kernels are chosen as if Triton was installed."""
    monkeypatch.setattr("deeploop.accelerate.known.HAS_TRITON", True)


@pytest.fixture
def hashed(monkeypatch):
    """The names of a checkpoint's files, in the order in which they are read for their checksums."""
    names, real = [], checkpoint._hash
    monkeypatch.setattr(checkpoint, "_hash", lambda path: names.append(path.name) or real(path))
    return names


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are not drawn, which takes most of a report's time: for tests of words and numbers."""
    monkeypatch.setattr("deeploop.report.plots.save_png", lambda figure, path: path.write_bytes(b"\x89PNG"))
    monkeypatch.setattr("deeploop.report.plots.inline_svg", lambda figure: "<svg></svg>")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A corpus folder of random words, as bytes; a test that damages it copies it first."""
    draw = random.Random(0)
    documents = [" ".join(draw.choices(SENTENCE.split(), k=80)) for _ in range(60)]
    folder = tmp_path_factory.mktemp("data") / "words"
    prepare(documents, get_tokenizer("bytes"), folder, validation_tokens=2_000, source="words", workers=1)
    return folder


@pytest.fixture(scope="session")
def make_config(corpus):
    """`make_config(out, model={"rounds": 1})`: a tiny run with some fields changed."""
    base = TrainConfig(
        model=GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=64, vocabulary=257, context=32),
        data=DataConfig(path=corpus, validation_sequences=15, validate_every=4),
        optim=OptimConfig(steps=6, batch=8, warmup_steps=4, peak_lr=3e-3, floor_lr=3e-4),
        checkpoint=CheckpointConfig(every=4),
        device=DeviceConfig(kind="cpu"),
        log=LogConfig(every=1),
    )

    def make(out, **changes):
        parts = {
            name: replace(getattr(base, name), **change) if isinstance(change, dict) else change
            for name, change in changes.items()
        }
        return replace(base, out=out, **parts)

    return make


@pytest.fixture
def tiny_config(make_config, tmp_path):
    """The tiny run in a folder of this test: `tiny_config("name", optim={"steps": 3})`."""

    def make(out="run", **changes):
        return make_config(tmp_path / out, **changes)

    return make


@pytest.fixture(scope="session")
def train_arguments(corpus):
    """`train_arguments(out, "--resume")`: a tiny run as words of the command line."""
    shape = "--model.width 32 --model.hidden 64 --model.context 32 --device.kind cpu --log.every 1"
    amount = "--optim.batch 8 --optim.steps 6 --optim.warmup-steps 4 --data.validation-sequences 16"

    def make(out, *more):
        where = ["--out", str(out), "--data.path", str(corpus)]
        return ["train", "tiny", *where, *shape.split(), *amount.split(), *map(str, more)]

    return make


def four(texts):
    return {"text": texts, "label": ["A", "B", "C", "D"][: len(texts)]}


def task_rows(draw):
    """A row of each task, of random words, in the layout of its data set."""

    def words(count):
        return " ".join(draw.choices(SENTENCE.split(), k=count))

    pick = draw.randrange
    arc = {"id": "x", "question": f"{words(5)}?", "choices": four([words(2) for _ in range(4)])}
    return {
        "arc_challenge": arc | {"answerKey": draw.choice("ABCD")},
        "arc_easy": arc | {"question": f"{words(4)}?", "answerKey": draw.choice("ABCD")},
        "hellaswag": {
            "ind": pick(100),
            "activity_label": words(2),
            "ctx_a": f"{words(4)}. [title] {words(2)}.",
            "ctx_b": words(1),
            "endings": [f"{words(3)} [substeps] {words(1)}." for _ in range(4)],
            "label": str(pick(4)),
        },
        "openbookqa": {
            "question_stem": words(4),
            "choices": four([words(2) for _ in range(4)]),
            "answerKey": draw.choice("ABCD"),
        },
        "piqa": {"goal": words(4), "sol1": words(3), "sol2": words(3), "label": pick(2)},
        "sciq": {
            "question": f"{words(4)}?",
            "support": f" {words(6)}." if pick(2) else "",
            "distractor1": words(1),
            "distractor2": words(2),
            "distractor3": words(1),
            "correct_answer": words(1),
        },
        "social_iqa": {
            "context": f"{words(4)}.",
            "question": f"{words(3)}?",
            "answerA": words(2),
            "answerB": words(2),
            "answerC": words(1),
            "label": str(1 + pick(3)),
        },
        "winogrande": {
            "sentence": f"{words(3)} _ {words(3)}.",
            "option1": words(1),
            "option2": words(1),
            "answer": str(1 + pick(2)),
        },
    }


def write_task_files(folder, count=4):
    """The eight tasks, `count` rows a split, for `--data`."""
    draw = random.Random(0)
    for split in ("train", "validation", "test"):
        rows = [task_rows(draw) for _ in range(count)]
        for task in rows[0]:
            (folder / task).mkdir(exist_ok=True)
            lines = "".join(json.dumps(row[task]) + "\n" for row in rows)
            (folder / task / f"{split}.jsonl").write_text(lines)


@pytest.fixture(scope="session")
def task_files(tmp_path_factory):
    """A folder of the eight tasks; a test that damages it copies it first."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task_files(folder)
    return folder


@pytest.fixture(scope="session")
def browse(tmp_path_factory):
    """`browse(page, "--dump-dom")` → what the browser prints, and its console; skips where there is none."""
    if BROWSER is None:
        pytest.skip("no chromium or google-chrome on the PATH")
    profile = tmp_path_factory.mktemp("profile")

    def go(page, *words):
        where = [f"--user-data-dir={profile}", "--enable-logging=stderr", *words, page.as_uri()]
        done = subprocess.run([BROWSER, *QUIET.split(), *where], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout, re.findall(r":CONSOLE.*", done.stderr)

    return go
