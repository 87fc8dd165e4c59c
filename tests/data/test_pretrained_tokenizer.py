"""Tokenizers that came with a model: read, kept, given back; and shards of large vocabularies."""

import base64
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from deeploop.data.bpe import find_tokenizer, load_tokenizer, tokenizer_files, vocabulary_fits
from deeploop.data.hf_tokenizer import to_transformers
from deeploop.data.prepare import prepare
from deeploop.data.pretrained_tokenizer import PretrainedTokenizer
from deeploop.data.shards import Corpus, read_shard, shard_layout, write_shard
from deeploop.data.tokenizer_steps import check_steps
from llama_family import save_tokenizer

TEXT = "the loops, wörld\n</s> again 東"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return find_tokenizer(str(folder))


def test_ids_are_theirs_and_special_tokens_in_a_text_are_its_characters(folder, tokenizer):
    theirs = AutoTokenizer.from_pretrained(folder)
    plain = TEXT.replace("</s>", "")
    assert tokenizer.encode(plain) == theirs(plain, add_special_tokens=False).input_ids
    assert 1 not in tokenizer.encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(TEXT))).decode() == TEXT
    assert tokenizer.end_of_text == 0
    assert tokenizer.token_bytes(0) == b""
    assert tokenizer.decode([5, tokenizer.vocabulary + 5]) == tokenizer.decode([5])


def test_it_is_kept_in_a_corpus_and_given_back(tokenizer, tmp_path):
    texts = [f"the loop of the loops {number}" for number in range(40)]
    corpus = prepare(texts, tokenizer, tmp_path / "c", validation_tokens=10, source="x")
    corpus.verify()
    kept = Corpus.open(tmp_path / "c").tokenizer()
    kept_json = json.loads(kept.text)
    assert kept.name == tokenizer.name == corpus.tokenizer_name
    to_transformers(kept, context=64).save_pretrained(tmp_path / "out")
    exported = find_tokenizer(str(tmp_path / "out"))  # which has a pad_token too
    assert exported.name != kept.name
    assert exported.reads_as(kept)
    for change in ({"added_tokens": kept_json["added_tokens"][:2]}, {"decoder": None}):
        assert not PretrainedTokenizer(json.dumps(kept_json | change), kept.settings).reads_as(kept)
    assert not PretrainedTokenizer(kept.text, {"bos_token": "</s>"}).reads_as(kept)
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found("the loops </s>").input_ids == [*tokenizer.encode("the loops "), 1]
    assert found.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "<user>the</s>"
    assert (found.eos_token, found.model_max_length) == ("</s>", 64)


def test_a_changed_file_is_not_the_tokenizer_that_was_kept(tokenizer, tmp_path):
    for name, text in tokenizer_files(tokenizer).items():
        (tmp_path / name).write_text(text)
    assert load_tokenizer(tokenizer.name, tmp_path).name == tokenizer.name
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    with pytest.raises(ValueError, match=r"tokenizer\.json: damaged: it is hf:"):
        load_tokenizer(tokenizer.name, tmp_path)


@pytest.mark.parametrize("text", ["{}", "[" * 100, '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'])
def test_a_damaged_file_is_one_line(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer that can be used") as caught:
        find_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def steps(*steps):
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
CHARSMAP = base64.b64encode(bytes(4) + b"a" * 5000 + b"\0").decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            steps(*[DOUBLE] * 40),
            r"normalizer and pre_tokenizer: could make a text 3\.3e\+12 times as long, not 100",
        ),
        (
            steps({**DOUBLE, "content": "b" * 8000}),
            "normalizer and pre_tokenizer: could make a text 2.4e.04 times as long",
        ),
        (
            steps({**DOUBLE, "pattern": {"Regex": ""}, "content": "b" * 600}),
            "normalizer and pre_tokenizer: could make",
        ),
        (
            steps(*[{"type": "Prepend", "prepend": "b" * 99}] * 3),
            "normalizer and pre_tokenizer: could make a text",
        ),
        (steps(*[{"type": "ByteLevel"}] * 30), "normalizer and pre_tokenizer: could make a text"),
        (steps(steps(*[DOUBLE] * 20)["normalizer"]), "normalizer and pre_tokenizer: could make a text"),
        (
            steps({"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
            "normalizer and pre_tokenizer: could make a text",
        ),
        (steps({"type": "Unheard"}), "a step of type 'Unheard' is not known"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}] * 9}},
            "pre_tokenizer:",
        ),
        ({"decoder": {**DOUBLE, "content": "b" * 8000}}, "decoder: could make a text"),
        ({"model": {"type": "BPE", "dropout": 0.5}}, r"model\.dropout=0\.5: would make tokens random"),
        (
            {"model": {"type": "BPE", "end_of_word_suffix": "w" * 65}},
            "model.end_of_word_suffix: must have at most 64",
        ),
    ],
)
def test_steps_that_grow_without_bound_or_are_random_are_refused(change, message, tokenizer, tmp_path):
    text = json.dumps(json.loads(tokenizer.text) | change)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_tokenizer(str(tmp_path))


def test_a_panic_of_the_engine_is_one_line(tokenizer):
    """The package tokenizers fails so where an expression matches nothing at the end of a text."""
    empty = {**DOUBLE, "pattern": {"Regex": ""}}
    odd = PretrainedTokenizer(json.dumps(json.loads(tokenizer.text) | steps(empty)), tokenizer.settings)
    with pytest.raises(ValueError, match=r"can't encode the text: index out of bounds"):
        odd.encode("the loop")


def test_a_key_that_is_there_twice_is_read_once(tokenizer):
    """Python takes the last; the engine must not take another one."""
    odd = json.dumps(steps(*[DOUBLE] * 40))[1:-1]
    twice = PretrainedTokenizer("{" + odd + "," + tokenizer.text.lstrip()[1:], tokenizer.settings)
    assert twice.encode("aa") == tokenizer.encode("aa")


def test_steps_of_known_models_are_taken(tokenizer):
    """Llama 2, Qwen2, and XLM-RoBERTa, whose table has strings of up to 33 bytes."""
    table = base64.b64encode(bytes(4) + b"a" * 33 + b"\0").decode()
    llama = steps({"type": "Prepend", "prepend": "▁"}, {**DOUBLE, "pattern": {"String": " "}, "content": "▁"})
    roberta = [{"type": "Precompiled", "precompiled_charsmap": table}]
    roberta += [{**DOUBLE, "pattern": {"Regex": " {2,}"}, "content": " "}]
    for change in (llama, {"normalizer": {"type": "NFC"}}, steps(*roberta)):
        check_steps(json.loads(tokenizer.text) | change)


def test_text_that_it_has_no_word_for_is_one_line():
    engine = Tokenizer(models.WordLevel({"<s>": 0, "the": 1}, unk_token="<unk>"))
    found = PretrainedTokenizer(engine.to_str(), {"bos_token": "<s>"})
    assert found.encode("the") == [1]
    with pytest.raises(ValueError, match=r"^tokenizer hf:2:\w+: can't encode the text: .*$"):
        found.encode("loop")


def test_pieces_of_sentencepiece_are_bytes(tmp_path):
    words = {"<s>": 0, "<0x0A>": 1, "▁the": 2, "▁": 3}
    model = {"type": "BPE", "vocab": words, "merges": [], "byte_fallback": True}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    blank = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    text = json.dumps({"version": "1.0", **blank, "added_tokens": [], "decoder": decoder, "model": model})
    found = PretrainedTokenizer(text, {"bos_token": "<s>"})
    assert [found.token_bytes(token) for token in (1, 2)] == [b"\n", b" the"]


def test_a_vocabulary_above_65536_has_shards_of_uint32(tokenizer, tmp_path):
    large = type("Large", (PretrainedTokenizer,), {})(tokenizer.text, tokenizer.settings)
    large.vocabulary = 2**16 + 100
    encode = large.encode
    large.encode = lambda text: [token + 2**16 - 300 + 100 for token in encode(text)]
    texts = [f"the loop of the loops {number}" for number in range(40)]
    corpus = prepare(texts, large, tmp_path, validation_tokens=10, source="x", shard_tokens=64)
    tokens = corpus.train.slice(0, len(corpus.train))
    assert tokens.max() > 2**16
    assert tokens.dtype == np.uint32
    assert np.array_equal(np.bincount(tokens, minlength=2**16 + 100), corpus.counts("train"))


def test_old_shards_are_read_as_before(tmp_path):
    write_shard(tmp_path / "old", [1, 2, 65535])
    assert (tmp_path / "old").read_bytes()[4:8] == b"\1\0\0\0"
    write_shard(tmp_path / "new", np.array([1, 2, 65536], dtype=np.uint32))
    assert shard_layout(tmp_path / "old") == (3, np.dtype("<u2"))
    assert shard_layout(tmp_path / "new") == (3, np.dtype("<u4"))
    assert read_shard(tmp_path / "old", 1, 2).tolist() == [2, 65535]
    assert read_shard(tmp_path / "new", 1, 2).tolist() == [2, 65536]
    with pytest.raises(ValueError, match="do not fit uint16"):
        write_shard(tmp_path / "x", [65536])


def test_a_pretrained_model_may_have_more_rows_than_its_tokenizer_has_words():
    assert vocabulary_fits("hf:300:x", 300, 304)
    assert not vocabulary_fits("hf:300:x", 300, 299)
    assert not vocabulary_fits("bytes", 257, 304)
