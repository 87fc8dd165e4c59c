"""Files in a folder of a stranger: no write leaves it, only regular files are read, writers keep apart."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from pkgutil import resolve_name

import pytest

import deeploop
from deeploop.files import (
    DEEPEST,
    append_file,
    atomic_file,
    is_locked,
    lock_folder,
    own_folder,
    parse_json,
    read_json,
    read_object,
    read_text,
    read_toml,
    write_json,
)


@pytest.fixture
def outside(tmp_path):
    """A file that nobody named."""
    path = tmp_path / "outside" / "target"
    path.parent.mkdir()
    path.write_text("untouched")
    yield path
    assert path.read_text() == "untouched"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    return path


def test_a_link_in_place_of_the_temporary_file_is_removed_not_followed(folder, outside):
    (folder / ".a.json.part").symlink_to(outside)
    write_json(folder / "a.json", {"a": 1})
    assert read_object(folder / "a.json") == {"a": 1}
    assert sorted(path.name for path in folder.iterdir()) == ["a.json"]


def test_a_hard_link_in_place_of_the_temporary_file_is_removed_not_written_to(folder, outside):
    os.link(outside, folder / ".a.json.part")
    write_json(folder / "a.json", {"a": 1})


def test_a_link_in_place_of_the_file_itself_is_replaced(folder, outside):
    (folder / "a.json").symlink_to(outside)
    write_json(folder / "a.json", {"a": 1})
    assert not (folder / "a.json").is_symlink()


def test_nothing_is_appended_through_a_link(folder, outside):
    (folder / "metrics.jsonl").symlink_to(outside)
    with pytest.raises(OSError, match=r"metrics\.jsonl: is a link, and nothing is written through one"):
        append_file(folder / "metrics.jsonl")


def test_a_lock_that_is_a_link_is_refused_and_one_that_holds_text_keeps_it(folder, outside):
    (folder / ".lock").symlink_to(outside)
    with pytest.raises(ValueError, match=r"\.lock is a link"):
        lock_folder(folder)
    (folder / ".lock").unlink()
    (folder / ".lock").write_text("of an older version")
    with lock_folder(folder):
        assert is_locked(folder / ".lock")
    assert (folder / ".lock").read_text() == "of an older version"


def test_a_folder_that_is_a_link_is_not_written_into(folder, outside):
    (folder / "checkpoints").symlink_to(outside.parent)
    with pytest.raises(ValueError, match="checkpoints: is a link"):
        own_folder(folder / "checkpoints")


def test_what_a_killed_writer_left_is_replaced(folder):
    (folder / ".a.json.part").write_text("half of")
    write_json(folder / "a.json", [])
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_a_failed_writer_leaves_the_file_as_it_was(folder):
    write_json(folder / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(folder / "a.json", object())
    with pytest.raises(TypeError), atomic_file(folder / "a.json") as file:
        file.write("no bytes")
    assert (folder / "a.json").read_text() == "1\n"
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_writers_at_once_each_leave_a_whole_file(folder):
    code = """
        import pathlib, sys
        from deeploop.files import atomic_file
        path, letter = pathlib.Path(sys.argv[1]), sys.argv[2].encode()
        for _ in range(200):
            with atomic_file(path) as file:
                file.write(letter * 5000); file.flush(); file.write(letter * 5000)
            found = path.read_bytes()
            assert len(found) == 10000 and len(set(found)) == 1, (len(found), set(found))
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(folder / "a")]
    writers = [subprocess.Popen([*words, letter]) for letter in "xyz"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert [path.name for path in folder.iterdir()] == ["a"]


@pytest.mark.parametrize("deep", ["[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 300 + "1" + "}" * 300])
def test_deep_nesting_is_refused(folder, deep):
    with pytest.raises(ValueError, match=r"nested|Expecting"):
        parse_json(deep)
    (folder / "a.json").write_text(deep)
    assert read_json(folder / "a.json") == {}
    (folder / "a.toml").write_text(f"a = {deep}")
    with pytest.raises(ValueError):
        read_toml(folder / "a.toml")


def test_nesting_that_is_not_deep_is_read():
    value = [[0] * 5 for _ in range(2 * DEEPEST)]
    assert parse_json(json.dumps(value)) == value


def test_a_fifo_a_device_and_a_large_file_are_not_read(folder):
    os.mkfifo(folder / "fifo")
    for path in (folder / "fifo", "/dev/zero"):
        with pytest.raises(OSError, match="Not a regular file"):
            read_text(path)
    with pytest.raises(OSError, match="Is a directory"):
        read_text(folder)
    (folder / "large").write_text("x" * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read_text(folder / "large", limit=100)
    assert not is_locked(folder / "fifo")


def test_no_other_module_parses_json_toml_or_numpy_files():
    """One reader for all files of others: what it refuses is refused everywhere."""
    source = Path(deeploop.__file__).parent
    parsers = re.compile(
        r"json\.loads?\(|import tomllib|np\.(?:load|fromfile|memmap)\(|zipfile\.|pickle\.load|torch\.load\("
    )
    found = {
        str(path.relative_to(source)) for path in source.rglob("*.py") if parsers.search(path.read_text())
    }
    # `deeploop import` reads what torch.save wrote, without the code that a pickle may hold.
    assert found == {"files.py", "data/arrays.py", "models/public_reasoner.py"}
    assert "weights_only=True" in (source / "models" / "public_reasoner.py").read_text()


def test_the_readers_that_security_md_names_are_there():
    text = (Path(__file__).parents[1] / "SECURITY.md").read_text()
    packages = "train|data|eval|report|runs(?=\\.folder)|sweep|retrofit|tasks"
    named = set(re.findall(rf"`((?:{packages})\.\w+\.[\w.]+)`", text))
    assert len(named) > 20
    for name in named:
        resolve_name(f"deeploop.{name}")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused_where_two_could_write_and_leaves_nothing(
    folder, monkeypatch, number
):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match=rf"out=.*new: can't be locked \({os.strerror(number)}\)"):
        lock_folder(folder / "new")
    assert not (folder / "new").exists()
    (folder / ".lock").touch()  # someone's: a lock that can't be had now may have been had before
    with pytest.raises(ValueError, match="can't be locked"):
        lock_folder(folder)
    assert (folder / ".lock").exists()
    write_json(folder / "a.json", 1)  # a file appears whole all the same
    write_json(folder / "a.json", 2)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "a.json"]


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_anything_follows(folder, monkeypatch):
    """Order of the calls that a power loss requires."""
    calls = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor):
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", lambda *names: (calls.append("name"), replace(*names)))
    write_json(folder / "a.json", 1)
    assert calls == ["file", "name", "folder"]
