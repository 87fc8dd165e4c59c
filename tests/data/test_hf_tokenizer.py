"""Our tokenizers in transformers' classes: the same ids, the same text back."""

import random
import string

import pytest

from deeploop.data.tokenizers import get_tokenizer

pytest.importorskip("transformers", reason='needs transformers: pip install -c constraints.txt -e ".[hf]"')

from transformers import AutoTokenizer

from deeploop.data.hf_tokenizer import to_transformers

TEXTS = [
    "",
    "Hello world",
    " leading, trailing  ",
    "don't WE'LL i've 'S\n\n\n\tdef f(x):\n        return x  # 12345 6.7e-8\r\n",
    "naïve Ünïcödé 日本語 العربية हिन्दी \U0001f469\u200d\U0001f680 ﬁ \u00a0\u2003\u3000 \ufeff",
    "".join(map(chr, range(0x250))),
]


@pytest.fixture(scope="module", params=["bytes", "gpt2"])
def pair(request, tmp_path_factory):
    """Ours, and theirs as it comes back from a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    ours = get_tokenizer(request.param)
    to_transformers(ours, context=128).save_pretrained(folder)
    return ours, AutoTokenizer.from_pretrained(folder)


def texts():
    draw = random.Random(0)
    ranges = [(0x20, 0x7F), (0x20, 0x3000), (0xE000, 0x110000), (0x0, 0x100)]
    for _ in range(60):
        characters = (chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(1, 200)))
        yield "".join(characters)
    for _ in range(20):  # runs of spaces and punctuation, where the pieces are cut
        yield "".join(draw.choices(" \n\t'." + string.ascii_letters + string.digits, k=200))


@pytest.mark.filterwarnings("ignore")
def test_the_same_ids_and_the_same_text(pair):
    ours, theirs = pair
    for text in [*TEXTS, *texts()]:
        ids = theirs(text, verbose=False)["input_ids"]
        assert ids == ours.encode(text), text
        assert theirs.decode(ids) == text


def test_every_token_is_the_same_piece_of_text(pair):
    ours, theirs = pair
    assert len(theirs) == ours.vocabulary
    every = list(range(ours.vocabulary))
    assert theirs.decode(every) == ours.decode(every)
    step = 1 + ours.vocabulary // 500
    for token in every[::step]:
        assert theirs.decode([token]) == ours.decode([token])


def test_nothing_is_added_and_padding_is_on_the_left(pair):
    ours, theirs = pair
    end = ours.end_of_text
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == end
    assert theirs.encode("<|endoftext|>") == [end]
    batch = theirs(["a", "a b c"], padding=True)
    assert batch["input_ids"][0] == [end] * (len(batch["input_ids"][1]) - 1) + ours.encode("a")
    assert batch["attention_mask"][0][:2] == [0, 0]
    assert theirs.model_max_length == 128
