"""A folder that this user may only read: what writes there says so in one line, what reads works."""

import ctypes
import os
import re
import shutil
import sys

import pytest
from victims import small_config

from deeploop.cli import main
from deeploop.train.loop import train
from forked import finish, start


def obey_permissions():
    """Takes from root what lets it write everywhere; for another user there is nothing to take."""

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    class Sets(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]

    header, none = Header(0x20080522, 0), (Sets * 2)()  # version 3, of two words
    if ctypes.CDLL(None).capset(ctypes.byref(header), none):
        raise OSError("capset failed")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unprivileged")
    config = small_config(folder)
    train(config)
    shutil.copytree(config.out, folder / "sweep" / "run")
    (folder / "text.txt").write_text("words " * 400)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def ask(words, place, log):
    """Exit code and output of a command, asked by one who may write nothing there."""
    filled = [word.replace("HERE", str(place)) for word in words.split()]

    def run():
        obey_permissions()
        code = main(filled)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    code = finish(start(run, log))
    return code, log.read_text()


@pytest.mark.parametrize(
    "words",
    [
        "train --resume HERE/run --optim.steps 40",
        "train tiny --out HERE/new --data.path HERE/corpus --device.kind cpu --quiet",
        "validate HERE/run",
        "validate HERE/run --rounds 1 2",
        "diagnose HERE/run",
        "export HERE/run HERE/exported",
        "report HERE/run --out HERE/report",
        "prepare text HERE/text.txt --out HERE/words",
        "prepare maze --out HERE/maze",
    ],
)
def test_what_would_be_written_is_refused_in_one_line(words, place, tmp_path):
    before = sorted(place.rglob("*"))
    code, said = ask(words, place, tmp_path / "log")
    assert code == 2, said
    assert said.count(": error: ") == 1
    assert re.search(r"can't be written|Permission denied", said.splitlines()[-1])
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    "words", ["runs HERE", "data HERE/corpus --verify", "generate HERE/run --max-tokens 2"]
)
def test_what_only_reads_works(words, place, tmp_path):
    code, said = ask(words, place, tmp_path / "log")
    assert code == 0, said
