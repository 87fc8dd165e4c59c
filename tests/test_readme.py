"""README's blocks, top to bottom in one folder: run as written where a CPU without a network can.

`deeploop train tiny` takes a minute: it runs with fewer steps. Parsed only are cloning and `make demo`, what
trains at a GPU's size, several ranks, and `eval`, whose tasks are downloads and whose runs are of that size.
"""

import re
import shlex
from pathlib import Path

import pytest

from deeploop.cli import main
from deeploop.commands import eval as eval_command
from deeploop.commands import train as train_command

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A fenced block, or a whole command within a sentence; RECIPE and the like are placeholders.
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$|`(deeploop [a-z][^`A-Z]*)`", re.MULTILINE | re.DOTALL)
PARSED = ("train gpt2-", "eval runs/", "sweep p-sweep")
FEWER = ["--optim.steps", "12", "--optim.warmup-steps", "12", "--data.validate-every", "6"]
# What a block takes for granted: the reader's own branch, and its width.
OWN = """
from torch import nn
blocks, rounds, width, my_std = 2, 3, 16, 0.02
class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.out = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    def forward(self, x):
        return self.out(self.value(x))
my_branch = Branch()
"""


def commands(block):
    """The commands of a shell block, each as its words."""
    for line in block.splitlines():
        yield from (shlex.split(part, comments=True) for part in line.split("&&"))


def of_deeploop(words):
    """What follows `deeploop` in a command, also under torchrun; None for other programs."""
    return words[words.index("deeploop") + 1 :] if words[:1] in (["deeploop"], ["torchrun"]) else None


def run_command(words, monkeypatch):
    """Runs a command as written, or the nearest to it that is quick."""
    arguments = of_deeploop(words)
    if arguments is None:
        return check_other_program(words)
    if words[0] == "torchrun" or " ".join(arguments).startswith(PARSED):
        with monkeypatch.context() as patch:
            result = {"ended": "finished", "step": 0, "loss": 0.0}
            patch.setattr(train_command, "train", lambda config, **options: result)
            patch.setattr(eval_command, "run", lambda args: str(args.run))
            arguments += ["--dry-run"] * (arguments[0] == "sweep")
            assert main(arguments) == 0, words
        return None
    arguments += FEWER * (arguments[:2] == ["train", "tiny"])
    assert main(arguments) == 0, words
    return None


def check_other_program(words):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    else:
        assert words[0] in ("git", "cd"), f"{words}: run it here, or say why it is only parsed"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with text of the reader's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_corpus").mkdir()
    text = "A looped transformer applies its blocks again and again. " * 20
    for number in range(60):
        (tmp_path / "my_corpus" / f"{number}.txt").write_text(f"{number}. {text}")
    return tmp_path


def test_every_block_runs(place, monkeypatch, capsys):
    pytest.importorskip("transformers", reason='needs transformers: pip install ".[hf]"')
    names = {}
    exec(OWN, names)
    for kind, block, sentence in BLOCK.findall(README):
        if kind == "python":
            exec(compile(block, "README.md", "exec"), names)
        else:
            for words in filter(None, commands(block or sentence)):
                run_command(words, monkeypatch)
    assert (place / "report" / "report.html").is_file()
    assert (place / "exported" / "config.json").is_file()
    # The block's own results: logits over the bytes' vocabulary, a text, a model of transformers.
    assert names["logits"].shape == (1, len("def main("), 257)
    assert "def main(" in capsys.readouterr().out
    assert type(names["model"]).__name__ == "DeepLoopForCausalLM"
    assert names["block"].alpha == pytest.approx((2 * 6) ** 0.5)


def test_a_wrong_word_in_a_block_is_found(monkeypatch, place):
    for line in (
        "deeploop train gpt2-small --model.round 5",
        "deeploop eval runs/x --shot 1",
        "deeploop plam",
    ):
        with pytest.raises(AssertionError):
            run_command(line.split(), monkeypatch)
    with pytest.raises(AssertionError, match="run it here"):
        run_command(["curl"], monkeypatch)


def test_the_blocks_are_found():
    found = BLOCK.findall(README)
    assert sum(bool(kind) for kind, *_ in found) == README.count("\n```") // 2
    assert "deeploop export runs/tiny exported" in [sentence for *_, sentence in found]
