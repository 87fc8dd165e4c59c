"""The examples that have no test file of their own run as their reader would run them, and learn."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(name, monkeypatch, capsys):
    """The output of an example."""
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_a_looped_gpt_from_scratch(monkeypatch, capsys):
    said = run("gpt_from_scratch.py", monkeypatch, capsys)
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", said)]
    assert losses[0] > 5  # ln 256 = 5.5
    assert losses[-1] < 3


def test_a_retrofit_heals(monkeypatch, capsys):
    pytest.importorskip(
        "transformers", reason='needs transformers: pip install -c constraints.txt -e ".[hf]"'
    )
    said = run("retrofit.py", monkeypatch, capsys)
    assert float(re.search(r"at most (\S+)", said)[1]) < 1e-4  # at R = 1 it is the source
    before, after = ([float(loss) for loss in re.findall(r"R = \d: (\S+?),?\s", line + " ")]
                     for line in said.splitlines() if "healing" in line)  # fmt: skip
    assert before[0] < before[1] < before[2]  # looping costs, before training
    assert after[2] < before[2] - 0.2
    assert abs(after[2] - after[0]) < 0.1  # healed


def test_a_task_of_reasoning_gym(monkeypatch, capsys, tmp_path):
    """With a stand-in for the package; without it, one line says so."""
    grids = {"puzzle": [[0, 1], [1, 0]], "solution": [[2, 1], [1, 2]]}
    fake = SimpleNamespace(create_dataset=lambda name, size, seed: [{"metadata": grids}] * size)
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    monkeypatch.chdir(tmp_path)
    assert "2500 pairs" in run("reasoning_gym_pairs.py", monkeypatch, capsys)
    lines = (tmp_path / "mini_sudoku.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"input": [[0, 1], [1, 0]], "output": [[2, 1], [1, 2]]}
    assert len(lines) == 2500
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit) as left:
        run("reasoning_gym_pairs.py", monkeypatch, capsys)
    assert not left.value.code
    assert capsys.readouterr().out == (
        "skipped: reasoning_gym is not installed; run: pip install reasoning-gym\n"
    )


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_without_its_extra_is_one_line(name):
    """A package that is not installed is said to be, with the command that installs it."""
    if "transformers" not in (EXAMPLES / name).read_text(encoding="utf-8"):
        pytest.skip("needs no extra")
    code = f"import runpy, sys; sys.modules['transformers'] = None; runpy.run_path({str(EXAMPLES / name)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr == 'needs transformers: pip install -c constraints.txt -e ".[hf]"\n'


def test_every_example_is_listed_and_run_by_a_test():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".toml"):
            assert f"]({path.name})" in listed
            assert path.name in tests, f"{path.name}: no test runs it"
