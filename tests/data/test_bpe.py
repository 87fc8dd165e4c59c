"""A tokenizer trained on the user's text: the same file for the same text, kept, read back, lent."""

import json
import random

import pytest

pytest.importorskip("tokenizers", reason='needs tokenizers: pip install -c constraints.txt -e ".[hf]"')

from deeploop.commands.prepare import PrepareText, run
from deeploop.data import Corpus, prepare
from deeploop.data.bpe import MERGES, find_tokenizer, read_bpe, tokenizer_files, train_bpe
from deeploop.data.mixture import Mixture
from deeploop.data.tokenizers import get_tokenizer

SYLLABLES = [a + b for a in "bdfglmnprst" for b in "aeiou"]
WORDS = ["".join(random.Random(i).choices(SYLLABLES, k=1 + i % 4)) for i in range(150)]


def documents(seed=0, count=80):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=60)) + " é日'll 12\n" for _ in range(count)]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    return path


def prepared(path, out, tokenizer="bpe:300", **settings):
    run(PrepareText(paths=(path,), out=out, tokenizer=tokenizer, validation_tokens=500, **settings))
    return Corpus.open(out)


def test_bytes_come_first_then_merges_then_end_of_text():
    tokenizer = train_bpe(documents(), 300)
    assert (tokenizer.vocabulary, tokenizer.end_of_text, len(tokenizer.merges)) == (300, 299, 43)
    assert [tokenizer.token_bytes(t) for t in range(256)] == [
        get_tokenizer("gpt2").token_bytes(t) for t in range(256)
    ]
    assert tokenizer.token_bytes(256) == "".join(tokenizer.merges[0]).replace("Ġ", " ").encode()
    assert tokenizer.token_bytes(299) == b""


def test_text_comes_back_and_frequent_words_are_single_tokens():
    tokenizer = train_bpe(documents(), 600)
    for text in [*documents(seed=7, count=3), "naïve 日本語 🙂\x00<|endoftext|>  \n\n ' 's", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(f" {WORDS[0]}")) == 1
    assert tokenizer.end_of_text not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_the_same_merges_with_and_without_threads(monkeypatch):
    found = set()
    for parallel in ("false", "true"):  # the library reads it at every call
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        found.add(tokenizer_files(train_bpe(documents(), 320))[MERGES])
    assert len(found) == 1


def test_the_same_corpus_for_any_number_of_workers(text, tmp_path):
    one, three = (prepared(text, tmp_path / str(workers), workers=workers) for workers in (1, 3))
    assert one.checksum == three.checksum
    assert (one.folder / MERGES).read_bytes() == (three.folder / MERGES).read_bytes()
    assert one.tokenizer().name == one.tokenizer_name == three.tokenizer_name


def test_the_name_tells_two_tokenizers_of_one_size_apart():
    one, same, other = (
        train_bpe(texts, 300) for texts in (documents(), documents(), [text.upper() for text in documents()])
    )
    assert one.name == same.name
    assert one.name.startswith("bpe:300:")
    assert one.name != other.name


def test_corpora_of_two_tokenizers_of_one_size_are_not_mixed(text, tmp_path):
    path = tmp_path / "upper.jsonl"
    path.write_text("".join(json.dumps({"text": text.upper()}) + "\n" for text in documents()))
    corpora = [prepared(text, tmp_path / "a"), prepared(path, tmp_path / "b")]
    assert corpora[0].vocabulary == corpora[1].vocabulary == 300
    with pytest.raises(ValueError, match=r"a holds bpe:300:\w+ tokens, \S+b bpe:300:\w+; prepare both with"):
        Mixture.of(corpora, (1.0, 1.0))


def test_it_is_kept_in_the_corpus_and_serves_another(text, tmp_path):
    corpus = prepared(text, tmp_path / "a")
    tokenizer = corpus.tokenizer()
    assert corpus.vocabulary == 300
    stream = corpus.train.slice(0, len(corpus.train))
    assert documents()[-1] in tokenizer.decode(stream)
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in documents(seed=3)))
    other = prepared(tmp_path / "other.jsonl", tmp_path / "b", tokenizer=str(tmp_path / "a"))
    assert other.tokenizer_name == corpus.tokenizer_name
    assert (other.folder / MERGES).read_bytes() == (corpus.folder / MERGES).read_bytes()
    assert find_tokenizer(str(other.folder)).encode("the loop") == tokenizer.encode("the loop")


def test_a_folder_that_keeps_no_tokenizer_names_one(text, tmp_path):
    corpus = prepared(text, tmp_path / "a", tokenizer="bytes")
    for asked in (corpus.folder, "shipped"):
        assert prepared(text, tmp_path / "b", tokenizer=str(asked)).tokenizer_name == "bytes"


def test_what_is_prepared_is_not_trained_again(text, tmp_path):
    corpus = prepared(text, tmp_path / "a")
    assert prepare.tokenizer_for("bpe:300", [], tmp_path / "a").name == corpus.tokenizer_name
    with pytest.raises(ValueError, match=r"already holds a corpus with tokenizer 'bpe:300:.*not 'bpe:301'"):
        prepared(text, tmp_path / "a", tokenizer="bpe:301")


def test_text_of_more_than_the_limit_is_thinned_out_evenly_and_a_stream_is_cut(tmp_path, monkeypatch):
    texts = documents()
    limit = sum(len(text.encode()) for text in texts) // 4 + 1
    monkeypatch.setattr(prepare, "BPE_BYTES", limit)
    even = prepare.tokenizer_for("bpe:300", texts, tmp_path)
    assert even.name == train_bpe(texts[::4], 300).name
    read = iter(texts)
    first = prepare.tokenizer_for("bpe:300", read, tmp_path, stream=True)
    taken = texts[: len(texts) - len(list(read))]
    assert first.name == train_bpe(taken, 300).name != even.name
    assert sum(len(text.encode()) for text in taken[:-1]) < limit <= sum(len(t.encode()) for t in taken)


@pytest.mark.parametrize("damage", [lambda t: t[:-8], lambda t: t.replace("\n", "\nx ", 1), lambda t: "x"])
def test_damage_is_named(text, tmp_path, damage):
    corpus = prepared(text, tmp_path / "a")
    path = corpus.folder / MERGES
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=rf"{MERGES}: (damaged|not a tokenizer's merges)"):
        corpus.verify()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("bpe:257", "bpe:257: the vocabulary must be 258 to 65536"),
        ("bpe:70000", "bpe:70000: the vocabulary must be 258 to 65536"),
        ("bpe:9000", r"bpe:9000: the text is too short; .* after bpe:\d+; ask for that or fewer"),
        (
            "llama",
            "'llama': must be bytes, gpt2, or a folder or GGUF file that has a tokenizer; `deeploop prepare",
        ),
        (
            ".",
            r"tokenizer \.: the folder holds none; name a corpus, a language model's run, or a folder with",
        ),
    ],
)
def test_bad_wishes_are_one_line(text, tmp_path, asked, said):
    with pytest.raises(ValueError, match=said) as error:
        prepared(text, tmp_path / "a", tokenizer=asked)
    assert "\n" not in str(error.value)


def test_the_size_that_a_short_text_gives_can_be_had():
    with pytest.raises(ValueError) as error:
        train_bpe(documents(), 9000)
    size = int(str(error.value).split("after bpe:")[1].split(";")[0])
    assert train_bpe(documents(), size).vocabulary == size
    with pytest.raises(ValueError, match="use more text, or --tokenizer bytes"):
        train_bpe(["ab"], 300)


def test_a_folder_reads_back_the_same(tmp_path):
    tokenizer = train_bpe(documents(), 300)
    (tmp_path / MERGES).write_text(tokenizer_files(tokenizer)[MERGES])
    again = read_bpe(tmp_path)
    assert (again.name, list(again.merges)) == (tokenizer.name, list(tokenizer.merges))
