"""README's blocks, top to bottom in one folder: run as written where a CPU without a network can.

`deeploop train tiny` takes two minutes: it runs dry, and with fewer steps; others take fewer sequences.
Parsed only are `make demo`, what trains at a GPU's size, and several ranks.
"""

import random
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from deeploop.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A fenced block, or a whole command within a sentence; RECIPE and the like are placeholders.
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$|`(deeploop [a-z][^`A-Z]*)`", re.MULTILINE | re.DOTALL)
PARSED = "train gpt2-"
FEWER = ["--optim.steps", "12", "--optim.warmup-steps", "2", "--optim.batch", "4"]
FEWER += ["--data.validate-every", "12"]
SMALLER = {
    "diagnose": ["--sequences", "1", "--iterations", "1", "--sublayers", "blocks.0.mlp"],
    "validate": ["--sequences", "2"],
    "generate": ["--max-tokens", "4"],
}


def test_readme_is_short():
    assert len(README.split()) <= 700


def commands(block):
    """The commands of a shell block, each as its words."""
    for line in block.splitlines():
        yield from (shlex.split(part, comments=True) for part in line.split("&&"))


def of_deeploop(words):
    """The words after `deeploop` in a command, also under torchrun; None for other programs."""
    return words[words.index("deeploop") + 1 :] if words[:1] in (["deeploop"], ["torchrun"]) else None


def run_command(words, monkeypatch):
    """Runs a command as written, or the nearest to it that is quick."""
    arguments = of_deeploop(words)
    if arguments is None:
        return check_other_program(words)
    if words[0] == "torchrun" or " ".join(arguments).startswith(PARSED):
        with monkeypatch.context() as patch:
            result = {"ended": "finished", "step": 0, "loss": 0.0}
            patch.setattr("deeploop.train.loop.train", lambda config, **options: result)
            # The text here is too small for them, which is refused unless the steps are said.
            assert main([*arguments, "--steps", "9"]) == 0, words
        return None
    if arguments[:2] == ["train", "tiny"]:
        assert main([*arguments, "--dry-run"]) == 0, words
        arguments = [word for word in arguments if word != "--auto-lr"] + FEWER  # no rate for so few tokens
    arguments += SMALLER.get(arguments[0], [])
    assert main(arguments) == 0, words
    return None


def check_other_program(words):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    else:
        assert words == [".", ".venv/bin/activate"], f"{words}: run it here, or say why it is only parsed"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with text of the reader's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_corpus").mkdir()
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghijklmnoprstu", k=drawn.randint(2, 9))) for _ in range(4000)]
    for number in range(60):  # of enough words for a BPE of 4,096
        (tmp_path / "my_corpus" / f"{number}.txt").write_text(" ".join(drawn.choices(words, k=1500)))
    return tmp_path


def test_every_block_runs(place, monkeypatch, capsys):
    pytest.importorskip(
        "transformers", reason='needs transformers: pip install -c constraints.txt -e ".[hf]"'
    )
    names = {}
    for kind, block, sentence in BLOCK.findall(README):
        if kind == "python":
            exec(compile(block, "README.md", "exec"), names)
        else:
            for words in filter(None, commands(block or sentence)):
                run_command(words, monkeypatch)
    assert (place / "report" / "report.html").is_file()
    assert (place / "exported" / "config.json").is_file()
    assert "step     12  validation" in capsys.readouterr().out
    # The loop of README's own model: norm(α·x + branch(norm(x))) with α = √(2N), layer by layer.
    x, layer = names["x"], names["loop"][0]
    assert x.shape == (1, 16, 64)
    branch = layer.branch(F.rms_norm(x, (64,), eps=1e-5))
    assert torch.allclose(layer(x), F.rms_norm(32**0.5 * x + branch, (64,), eps=1e-5), atol=1e-6)
    drawn = 1 / (8 * 3**0.5)  # the standard deviation of torch's Linear of width 64
    assert layer.branch.weight.std().item() == pytest.approx(drawn / 128**0.5, rel=0.1)  # β = (8N)^-½


def test_a_wrong_word_in_a_block_is_found(monkeypatch, place):
    for line in (
        "deeploop train gpt2-small --model.round 5",
        "deeploop validate shipped --round 1",
        "deeploop plam",
    ):
        with pytest.raises(AssertionError):
            run_command(line.split(), monkeypatch)
    with pytest.raises(AssertionError, match="run it here"):
        run_command(["curl"], monkeypatch)


def test_the_blocks_are_found():
    found = BLOCK.findall(README)
    assert sum(bool(kind) for kind, *_ in found) == README.count("\n```") // 2
    assert "deeploop plan --blocks 12 --rounds 3" in [sentence for *_, sentence in found]


@pytest.fixture(scope="module")
def run_docs():
    return runpy.run_path(str(ROOT / "tools" / "run_docs.py"))


def test_what_is_run_of_a_page(run_docs):
    """tools/run_docs.py runs the pages of docs/, which takes too long for the suite."""
    page = """
```sh
deeploop plan --blocks 2 \\
    --rounds 3     # a comment
MODE=x deeploop runs && make demo
```
`deeploop train` names a command, `deeploop runs --json` is one.
```python
import deeploop
```
```sh
#!/bin/bash
sbatch
```
"""
    found = [(piece.kind, piece.text) for piece in run_docs["pieces"]("page.md", page)]
    assert found == [
        ("sh", "deeploop plan --blocks 2 --rounds 3"),
        ("sh", "MODE=x deeploop runs && make demo"),
        ("sh", "deeploop runs --json"),
        ("python", "import deeploop\n"),
        ("script", "#!/bin/bash\nsbatch\n"),
    ]


def test_trainings_of_a_page_are_cut(run_docs):
    line = "deeploop prepare stdlib && deeploop train tiny --steps 99 --auto-lr && deeploop runs"
    short = "--steps 8 --warmup 2"
    expected = f"deeploop prepare stdlib && deeploop train tiny {short} && deeploop runs"
    assert run_docs["shortened"](line, 8) == expected
    assert (
        run_docs["shortened"]("deeploop train --config a.toml", 8)
        == f"deeploop train {short} --config a.toml"
    )
    assert run_docs["with_options"]("deeploop sweep rules", "--dry-run") == "deeploop sweep rules --dry-run"


def test_pages_are_run_where_they_are_kept(run_docs, tmp_path, monkeypatch, capsys):
    (tmp_path / "good.md").write_text("```sh\ncommand -v deeploop | grep good/.bin\n```\n")
    (tmp_path / "bad.md").write_text("```sh\ntrue\n```\n")
    prepare = {"bad.md": (lambda folder: run_docs["deeploop"]("prepare", "nothing", folder=folder),)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(run_docs["main"].__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(run_docs["main"].__globals__, "PREPARED", prepare)
    monkeypatch.setattr("sys.argv", ["run_docs.py", "bad.md", "good.md", "--keep", "kept"])
    assert run_docs["main"]() == 1
    bad, good = capsys.readouterr().out.splitlines()[2:4]
    assert "FAILED: deeploop prepare nothing: FAILED (2): deeploop prepare: error: " in bad
    assert "| ok |" in good
    with pytest.raises(SystemExit, match="--keep kept: is there already; name a new folder"):
        run_docs["main"]()


def test_docs_name_commands_that_exist(run_docs):
    named = {}
    for path in (ROOT / "docs").glob("*.md"):
        for piece in run_docs["pieces"](path.name, path.read_text(encoding="utf-8")):
            if piece.kind == "sh":
                found = re.findall(r"(?:^|&& |\| |-m )deeploop ([a-z-]+)", piece.text)
                named |= {name: piece.text for name in found}
    assert len(named) > 10
    assert {name: text for name, text in named.items() if name not in (*COMMANDS, "--help")} == {}
