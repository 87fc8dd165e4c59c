"""Text of untrusted files on a terminal: no command prints the control characters that a folder holds."""

import io
import json

import pytest
from test_stranger import finished  # noqa: F401 (a fixture)

from deeploop.cli import main

TITLE = "\x1b]2;a title\x07\x1b[2J\x9b31m\u202e"


@pytest.fixture
def said(capsys):
    """The output of a command; raises for control characters in it."""

    def run(*words):
        code = main([*map(str, words)])
        captured = capsys.readouterr()
        text = captured.out + captured.err
        bad = {character for character in text if not character.isprintable()} - set("\n\t")
        assert not bad, f"{words}: {sorted(map(hex, map(ord, bad)))}"
        return code, text

    return run


def replace_source(path):
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"source": TITLE}))


def test_the_source_of_a_corpus(said, tmp_path):
    text, corpus = tmp_path / "t.txt", tmp_path / "corpus"
    text.write_text("one block again and again\n\n" * 80)
    words = ["prepare", "text", text, "--out", corpus, "--tokenizer", "bytes", "--validation-tokens", 99]
    assert said(*words)[0] == 0
    replace_source(corpus / "corpus.json")
    for again in (["data", corpus], words):
        code, printed = said(*again)
        assert (code, "\\x1b]2;a title" in printed) == (0, True)
    assert "already prepared" in printed


def test_the_source_of_conversations(said, tmp_path):
    talk, chat = tmp_path / "talk.jsonl", tmp_path / "chat"
    talk.write_text('{"prompt": "say a", "response": "a"}\n' * 6)
    words = ["prepare", "chat", talk, "--out", chat, "--tokenizer", "bytes", "--context", 64]
    assert said(*words)[0] == 0
    replace_source(chat / "chat.json")
    for again in (["data", chat], words):
        code, printed = said(*again)
        assert (code, "\\x1b]2;a title" in printed) == (0, True)


def test_a_template_that_raises(said, finished, monkeypatch):  # noqa: F811
    text = "{% if messages[0]['content'] == 'a' %}{{ raise_exception(" + repr(TITLE) + ") }}{% endif %}"
    (finished / "template.jinja").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n/quit\n"))
    code, printed = said("chat", finished, "--device", "cpu")
    assert (code, "\\x1b]2;a title" in printed) == (0, True)


def test_other_folders_in_lists(said, finished):  # noqa: F811
    config = json.loads((finished / "config.json").read_text())
    (finished / "config.json").write_text(json.dumps(config | {"out": TITLE}))
    stamp = json.loads((finished / "run.json").read_text())
    (finished / "run.json").write_text(json.dumps(stamp | {"tokenizer": TITLE, "command": TITLE}))
    for words in (
        ["runs", finished],
        ["runs", finished, "--json"],
        ["inspect", finished],
        ["train", "--resume", finished],
    ):
        said(*words)
