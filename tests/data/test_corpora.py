"""Sources: what is read from each kind of file, and what is said of files that cannot be read."""

import codecs
import gzip
import json
import lzma
import sys
import sysconfig
import tracemalloc
from pathlib import Path

import pytest

from deeploop.data.corpora import fineweb_edu, stdlib, text_files

DOCUMENTS = ["first\ndocument", "zweites Dokument: äöü", "третий \u2028 документ", "four"]


def json_lines(documents):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)).encode()


def write_parquet(path, documents, column="text"):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": list(range(len(documents))), column: documents}), path)


PACKS = [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]


@pytest.mark.parametrize("pack", PACKS)
def test_jsonl_plain_and_packed(tmp_path, pack):
    suffix, compress = pack
    file = tmp_path / f"a.jsonl{suffix}"
    for mark in (b"", codecs.BOM_UTF8):
        file.write_bytes(compress(mark + json_lines(DOCUMENTS) + b"\n"))
        assert list(text_files([file])) == DOCUMENTS


@pytest.mark.parametrize("pack", PACKS)
def test_txt_is_one_document_a_file(tmp_path, pack):
    suffix, compress = pack
    for i, text in enumerate(DOCUMENTS * 16):
        mark = codecs.BOM_UTF8 * (i % 2)
        (tmp_path / f"{i:02}.txt{suffix}").write_bytes(compress(mark + text.encode()))
    assert list(text_files([tmp_path])) == DOCUMENTS * 16


def test_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    assert list(text_files([tmp_path / "a.parquet"])) == DOCUMENTS


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'a\.parquet.*pip install -c constraints.txt -e "\.\[data\]"'):
        list(text_files([tmp_path / "a.parquet"]))


def test_folders_are_walked_in_order_and_other_files_left_alone(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.jsonl").write_bytes(json_lines(["third"]))
    (tmp_path / "notes.md").write_text("not text")
    source = text_files([tmp_path])
    assert list(source) == ["first", "second", "third"]
    assert list(source) == ["first", "second", "third"]
    assert list(text_files([tmp_path / "c.jsonl", tmp_path / "a.txt"])) == ["third", "first"]


@pytest.mark.parametrize("text", ["line\n" * 1000, "a\nb", "no line end " * 50, "\n\n\nx", "x" * 63 + "\n"])
def test_a_single_text_is_cut_at_line_ends(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    pieces = list(text_files([tmp_path / "a.txt"]))
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    if text.startswith("line"):
        assert 50 <= len(pieces) <= 64


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("shares", [(1, 10), (1, 2, 3), (5, 1, 5)])
def test_few_texts_are_cut_into_like_pieces(tmp_path, pack, shares):
    suffix, compress = pack
    texts = ["".join(f"{i} строка {share}\n" for i in range(1000 * share)) for share in shares]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt{suffix}").write_bytes(compress(text.encode()))
    source = text_files([tmp_path])
    pieces = list(source)
    assert list(source) == pieces
    assert "".join(pieces) == "".join(texts)
    assert all(piece.endswith("\n") for piece in pieces)
    assert 55 <= len(pieces) <= 64 + len(texts)
    total = sum(map(len, texts))
    assert max(map(len, pieces)) < 1.1 * total / 64
    for text in texts:  # no piece holds text of two files
        assert any(text.startswith(piece) for piece in pieces)


def test_a_text_beside_many_rows_is_cut_only_where_it_is_long(tmp_path):
    (tmp_path / "a.txt").write_text("short\ntext\n")
    (tmp_path / "b.jsonl").write_bytes(json_lines(["row " * 100] * 100))
    assert list(text_files([tmp_path])) == ["short\ntext\n"] + ["row " * 100] * 100


def test_a_long_text_is_never_held_whole(tmp_path):
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(b"a line of some length, many times\n" * 400_000))
    tracemalloc.start()
    longest = max(map(len, text_files([file])))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert longest < 250_000
    assert peak < 6_000_000  # of 13.6 MB


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"id": 1, "body": "x"}\n',
            r'a\.jsonl:2: no string field "text"; it has body: name one with --field$',
        ),
        ("a.jsonl", b'{"text": 3}\n', r'a\.jsonl:1: no string field "text"'),
        ("a.jsonl", b'["x"]\n', r'a\.jsonl:1: no string field "text"'),
        ("a.jsonl", b'\n{"text": \n', r"a\.jsonl:2: not JSON"),
        pytest.param("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not JSON: nested too deeply", id="deep"),
        ("a.txt", b"\xff\xfe", r"a\.txt: unreadable as UTF-8"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz: unreadable"),
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:20], r"a\.txt\.gz: unreadable"),
        ("a.jsonl.xz", lzma.compress(b"{}" * 1000)[:-8], r"a\.jsonl\.xz: unreadable"),
        ("a.csv", b"", r"a\.csv: unknown kind of file; known are \.txt"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(text_files([tmp_path / name]))


def test_the_text_may_stand_in_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "not this"}\n')
    source = text_files([tmp_path / "a.jsonl"], field="body")
    assert list(source) == ["x"]
    assert source.description == text_files([tmp_path / "a.jsonl"]).description + ", field body"
    write_parquet(tmp_path / "a.parquet", DOCUMENTS, column="body")
    assert list(text_files([tmp_path / "a.parquet"], field="body")) == DOCUMENTS


def test_bad_parquet_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", DOCUMENTS, column="body")
    with pytest.raises(
        ValueError, match=r'a\.parquet: no column "text"; it has id, body: name one with --field'
    ):
        list(text_files([tmp_path / "a.parquet"]))
    write_parquet(tmp_path / "a.parquet", ["x", None])
    with pytest.raises(ValueError, match=r"a\.parquet: row 1 of column"):
        list(text_files([tmp_path / "a.parquet"]))
    (tmp_path / "a.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"a\.parquet: not a parquet file"):
        list(text_files([tmp_path / "a.parquet"]))


def test_nothing_to_read(tmp_path):
    with pytest.raises(ValueError, match="absent: no such file or folder"):
        text_files([tmp_path / "absent"])
    with pytest.raises(ValueError, match="no files of a known kind"):
        text_files([tmp_path])
    with pytest.raises(ValueError, match="at least one"):
        text_files([])


def test_description_tells_changed_text_apart(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = text_files([file]).description
    assert before == "a.txt (1 file, 3 bytes)"
    file.write_text("three")
    assert text_files([file]).description != before


def test_stdlib_is_the_running_python():
    documents = list(stdlib())
    root = Path(sysconfig.get_path("stdlib"))
    for kept in ("this.py", "json/decoder.py", "asyncio/base_events.py"):
        assert (root / kept).read_text(encoding="utf-8") in documents
    assert 5e6 < sum(map(len, documents)) < 3e7


def test_stdlib_leaves_out_tests_bundles_and_undecodable_files(tmp_path, monkeypatch):
    kept = ["abc.py", "z.py", "email/__init__.py", "email/mime/text.py", "xml/dom.py"]
    left_out = ["test/test_abc.py", "email/tests/a.py", "site-packages/b.py", "idlelib/c.py", "lib2to3/d.py"]
    left_out += [
        "ensurepip/_bundled/e.py",
        "email/__pycache__/f.py",
        "_sysconfigdata__linux.py",
        "email/g.txt",
    ]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(stdlib()) == kept


@pytest.fixture
def offline_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("offline_datasets")
def test_fineweb_edu_from_a_local_copy(tmp_path):
    folder = tmp_path / "copy" / "sample"
    folder.mkdir(parents=True)
    write_parquet(folder / "000.parquet", DOCUMENTS[:2])
    write_parquet(folder / "001.parquet", DOCUMENTS[2:])
    (folder / "002.jsonl").write_bytes(json_lines(["in json"]))
    source = fineweb_edu(str(tmp_path / "copy"))
    assert source.stream
    assert list(source) == [*DOCUMENTS, "in json"]
    assert list(fineweb_edu(str(folder / "001.parquet"))) == DOCUMENTS[2:]


@pytest.mark.usefixtures("offline_datasets")
def test_fineweb_edu_row_without_text(tmp_path):
    write_parquet(tmp_path / "a.parquet", DOCUMENTS, column="body")
    with pytest.raises(ValueError, match=r'a\.parquet.*row 0 has no string field "text"'):
        list(fineweb_edu(str(tmp_path / "a.parquet")))


def test_fineweb_edu_on_the_hub_is_streamed_by_name(monkeypatch):
    calls = []

    class Datasets:
        @staticmethod
        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            return iter([{"text": "row"}])

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    source = fineweb_edu()
    assert source.description == "HuggingFaceFW/fineweb-edu sample-100BT"
    assert list(source) == ["row"]
    assert calls == [
        (("HuggingFaceFW/fineweb-edu",), {"name": "sample-100BT", "split": "train", "streaming": True})
    ]


def test_fineweb_edu_without_datasets_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install -c constraints.txt -e "\.\[data\]"'):
        list(fineweb_edu())
