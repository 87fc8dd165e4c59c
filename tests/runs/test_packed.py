"""Packed runs: the same as the folders they were made from, and safe to read."""

import io
import json
import lzma
import tarfile
from pathlib import Path

import pytest

from deeploop.cli import main
from deeploop.report.runs import find_runs
from deeploop.runs import packed
from deeploop.runs.packed import PACKED, opened, subfolders, unpack
from deeploop.sweep.cells import SweepFolder
from deeploop.sweep.grid import read_grid
from deeploop.sweep.tuning import tuned
from run_folders import pack_sweep, write_mixed_sweep, write_run

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def sweep(tmp_path):
    return write_mixed_sweep(tmp_path / "here" / "sweep")


@pytest.fixture
def twin(sweep, tmp_path):
    """A packed copy of the sweep under the same name."""
    return pack_sweep(sweep, tmp_path / "there" / "sweep")


def listed(folder, capsys):
    capsys.readouterr()
    assert main(["runs", str(folder), "--json"]) == 0
    return capsys.readouterr().out.replace(str(folder), "SWEEP")


def test_runs_and_report_are_the_same(sweep, twin, tmp_path, capsys):
    before = listed(sweep, capsys)
    assert [one["state"] for one in json.loads(before)] == ["finished", "finished", "failed", "absent"]
    assert listed(twin, capsys) == before
    assert listed(twin / "b", capsys) == listed(sweep / "b", capsys)
    for folder in (sweep, twin):
        assert main(["report", str(folder), "--out", str(folder.parent / "report")]) == 0
    ours, theirs = (sweep.parent / "report", twin.parent / "report")
    tables = sorted(path.name for path in ours.glob("tables/*.csv"))
    assert {"commands.csv", "kappa.csv"} <= set(tables)  # out of eval.json and diagnose.json
    for name in [*(f"tables/{table}" for table in tables), "report.md"]:
        assert (ours / name).read_text() == (theirs / name).read_text()
    assert "deeploop eval" in (theirs / "tables" / "commands.csv").read_text()
    assert "2.5" in (theirs / "tables" / "kappa.csv").read_text()


def test_what_lies_beside_a_packed_file_comes_first(twin):
    write_run(twin / "b", seed=1, loss=1.5)
    write_run(twin / "d", seed=3, loss=2.5)
    states = {run.name: (run.state, run.validation.get("loss")) for run in find_runs([twin])}
    assert states == {
        "a": ("finished", 2.0),
        "b": ("finished", 1.5),
        "c": ("failed", None),
        "d": ("finished", 2.5),
    }
    assert [path.name for path in subfolders(twin)] == ["a", "b", "d"]
    assert opened(twin / "b") == twin / "b"


def test_tar_restores_it(sweep, twin, tmp_path):
    with tarfile.open(twin / PACKED) as tar:
        tar.extractall(tmp_path / "tar", filter="data")
    for path in (path for path in (tmp_path / "tar").rglob("*") if path.is_file()):
        assert path.read_bytes() == (sweep / path.relative_to(tmp_path / "tar")).read_bytes()


# ── A file from a stranger ──────────────────────────────────────────────────────────────────────────────
def member(name="run/config.json", data=b"{}", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def pack_of(path, *members):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(lzma.compress(raw.getvalue()))
    return path


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}
HOSTILE = {
    "above": ([member("../out.json")], "'../out.json' is not a name of a run's file"),
    "within": ([member("run/../../out.json")], "is not a name of a run's file"),
    "absolute": ([member("/out.json")], "is not a name of a run's file"),
    "hidden": ([member("run/.lock")], "is not a name of a run's file"),
    "deep": ([member("run/checkpoints/state.json")], "is not a name of a run's file"),
    "control": ([member("run/\x1b[2J.json")], "is not a name of a run's file"),
    "symlink": ([member("run", b"", type=tarfile.SYMTYPE, linkname=".."), member("run/o")], "a plain file"),
    "hardlink": ([member(data=b"", type=tarfile.LNKTYPE, linkname="/etc/passwd")], "is not a plain file"),
    "device": ([member(data=b"", type=tarfile.CHRTYPE)], "is not a plain file"),
    "fifo": ([member(data=b"", type=tarfile.FIFOTYPE)], "is not a plain file"),
    "folder": ([member("run", b"", type=tarfile.DIRTYPE)], "is not a plain file"),
    "sparse": ([member(data=b"1\n0\n1\n".ljust(512, b"\0") + b"x", pax_headers=SPARSE)], "not a plain file"),
    "twice": ([member(), member()], "File exists"),
    "file as folder": ([member("run"), member("run/config.json")], "File exists"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_only_plain_files_are_unpacked(kind, tmp_path):
    members, message = HOSTILE[kind]
    into = tmp_path / "deep" / "into"
    into.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"can't be unpacked .*{message}"):
        unpack(pack_of(tmp_path / PACKED, *members), into)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} <= {tmp_path / PACKED, *into.rglob("*")}


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "MOST_BYTES", 1 << 22)
    pack = pack_of(tmp_path / PACKED, member(data=bytes(1 << 23)))
    assert pack.stat().st_size < 1 << 12
    with pytest.raises(ValueError, match="it holds more than 4,194,304 bytes"):
        unpack(pack, tmp_path / "into")
    monkeypatch.setattr(packed, "MOST_FILES", 3)
    pack_of(pack, *(member(f"run/{i}.json") for i in range(4)))
    (tmp_path / "many").mkdir()
    with pytest.raises(ValueError, match="it holds more than 3 files"):
        unpack(pack, tmp_path / "many")
    assert not list((tmp_path / "many").iterdir())  # it is refused before anything is written
    pack.write_bytes(lzma.compress(b"x", preset=9))
    with pytest.raises(ValueError, match="needs more than 10 MiB; unpack it with tar"):
        unpack(pack, tmp_path / "into")


def test_a_damaged_file_is_one_line(twin, capsys):
    whole = (twin / PACKED).read_bytes()
    for data in (
        b"",
        b"not packed",
        whole[: len(whole) // 2],
        whole[:-1],
        lzma.compress(b"no archive" * 100),
    ):
        (twin / PACKED).write_bytes(data)
        assert main(["runs", str(twin)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"deeploop runs: error: {twin / PACKED}: can't be unpacked (")
        assert error.count("\n") == 1


def test_a_sweep_knows_its_packed_cells(tmp_path, monkeypatch, capsys):
    """A published sweep: its command prints the results and trains nothing, its trials can be taken."""
    monkeypatch.chdir(tmp_path)
    trials = {"slow": {"optim.peak_lr": 1e-3}, "fast": {"optim.peak_lr": 2e-3}}
    settings = {"optim.steps": 40, "optim.warmup_steps": 10}
    grid = {"recipe": "tiny", "settings": settings, "axes": {"trial": trials}}
    Path("grid.json").write_text(json.dumps(grid))
    read = read_grid(Path("grid.json"))
    SweepFolder(Path("whole"), read, read.cells({})).write()
    for name, loss in (("slow", 2.5), ("fast", 2.0)):
        write_run(Path("whole") / name, loss=loss)
    pack_sweep(Path("whole"), Path("small"))
    for name in ("slow", "fast"):
        (Path("whole") / name / "weights-dropped").touch()  # a packed run has none in any case
    shown = []
    for out in ("whole", "small"):
        capsys.readouterr()
        assert main(["sweep", "grid.json", "--out", out, "--no-keep-weights"]) == 0
        shown.append(capsys.readouterr().out.replace(out, "OUT"))
    assert shown[0] == shown[1]
    assert "nothing was trained" in shown[0]
    assert sorted(path.name for path in Path("small").iterdir()) == [PACKED, "sweep.json"]
    (best,) = {cell.settings["optim.peak_lr"] for cell in tuned(read.cells({}), Path("small"), {})}
    assert best == 2e-3
