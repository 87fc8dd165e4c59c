"""Conversations: templates, answers, what is cut, the chat folder and its batches."""

import json
import lzma
import time
from itertools import pairwise

import numpy as np
import pytest

from deeploop.commands.prepare import main as prepare
from deeploop.data.pretrained_tokenizer import PretrainedTokenizer
from deeploop.data.tokenizers import get_tokenizer
from deeploop.tasks.chat.data import ChatSet, ChatSplit
from deeploop.tasks.chat.loader import ChatLoader, held_out_rows, pack_rows
from deeploop.tasks.chat.prepare import cut_at_front, prepare_chat, read_conversations
from deeploop.tasks.chat.template import CHATML, END, ChatTemplate, encode_segments, find_template, guarded

BYTES = get_tokenizer("bytes")


def said(*texts, system=None):
    """Messages by turns, the user's first."""
    roles = ["user", "assistant"] * len(texts)
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path):
    rows = [{"messages": said(f"question {n}", "a" * (1 + n % 7), "more", "b")} for n in range(38)]
    rows += [{"prompt": "ask", "response": "tell"}, {"messages": said("q", "r", "left over")}]
    return write_lines(tmp_path / "talk.jsonl", rows)


def make(file, out=None, template="default", context=200, share=0.1):
    out = out or file.parent / "chat"
    return prepare_chat(file, BYTES, find_template(template), out, context=context, validation_share=share)


def answers_of(tokens, mask):
    """The text of every run of answer tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [BYTES.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", ["default", "chatml"])
def test_answers_end_with_end_of_text_and_the_rest_is_not_scored(name):
    segments = find_template(name).segments(said("hi", "hello", "bye", "later", system="be kind"))
    tokens, mask = encode_segments(segments, BYTES)
    end = "<|im_end|>" * (name == "chatml") + "<|endoftext|>"
    assert answers_of(tokens, mask) == [f"hello{end}", f"later{end}"]
    text = BYTES.decode(tokens)
    assert text.startswith("<|endoftext|><|")
    assert text.count("be kind") == text.count("hi") == 1
    assert tokens[0] == tokens[-1] == BYTES.end_of_text


def test_a_template_without_end_of_text_gets_it_before_and_behind_each_answer():
    plain = ChatTemplate(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}",
        "plain",
    )
    tokens, mask = encode_segments(plain.segments(said("x", "y", "z", "w")), BYTES)
    assert answers_of(tokens, mask) == ["y;<|endoftext|>", "w;<|endoftext|>"]
    assert BYTES.decode(tokens) == "<|endoftext|>u:x;a:y;<|endoftext|>u:z;a:w;<|endoftext|>"


def test_the_string_of_end_of_text_in_a_message_is_plain_text(tmp_path):
    (_, found), = read_lines(tmp_path, [{"messages": said(f"<|endoftext|>{END}", "yes")}])  # fmt: skip
    tokens, _ = encode_segments(find_template("default").segments(found), BYTES)
    assert (tokens == BYTES.end_of_text).sum() == 2  # before all, and behind the answer


@pytest.fixture
def pretrained():
    """A tokenizer as a pretrained model has it, of bytes, with markers that are tokens and a template."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {
        character: n for n, character in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    template = CHATML.replace("{{- bos_token -}}", "").replace("{{- eos_token if", "{{- '' if")
    return PretrainedTokenizer(engine.to_str(), {"eos_token": "<|im_end|>", "chat_template": template})


def test_markers_of_a_pretrained_tokenizer_are_tokens_but_not_in_a_message(pretrained, tmp_path):
    template = find_template("tokenizer", pretrained)
    messages = said("<|im_end|> ?", "yes<|endoftext|>", "b", "c")
    rows = [{"messages": messages}] * 4
    out = tmp_path / "chat"
    file = write_lines(tmp_path / "t.jsonl", rows)
    chat = prepare_chat(file, pretrained, template, out, context=200, validation_share=0.25)
    tokens = chat.validation.tokens
    special = pretrained.special_tokens
    found = [token for token in tokens.tolist() if token in special.values()]
    start, end, stop = (special[f"<|{word}|>"] for word in ("im_start", "im_end", "endoftext"))
    turn = [start, end, start, end, stop]
    assert found == [stop, *turn, *turn]
    assert "<|im_end|> ?" in pretrained.decode([t for t in tokens.tolist() if t not in special.values()])
    chat.verify()
    with pytest.raises(ValueError, match="template tokenizer: the tokenizer has no chat template"):
        find_template("tokenizer", BYTES)


@pytest.mark.parametrize(("words", "message"), [(["東"], "a東東b"), (["<a>", "a>x"], "<a>x<a><a>x")])
def test_short_and_overlapping_special_words_in_a_message_are_plain_text(pretrained, words, message):
    engine = pytest.importorskip("tokenizers").Tokenizer.from_str(pretrained.text)
    engine.add_special_tokens(words)
    tokenizer = PretrainedTokenizer(engine.to_str(), pretrained.settings)
    template = ChatTemplate("{% for m in messages %}" + words[0] + "{{ m.content }}{% endfor %}", "marks")
    messages = guarded(said(message, message), tokenizer)
    tokens, _ = encode_segments(template.segments(messages), tokenizer)
    special = tokenizer.special_tokens
    marks = [token for token in tokens.tolist() if token in special.values()]
    assert marks == [special["<|endoftext|>"], *[special[words[0]]] * 2, special["<|endoftext|>"]]
    assert tokenizer.decode([t for t in tokens.tolist() if t not in special.values()]) == message * 2


def read_lines(folder, rows):
    return list(read_conversations(write_lines(folder / "x.jsonl", rows)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"content": "hi"}]}, r'messages\[0\]: has no "role"; must be one of system, user'),
        ({"messages": [{"role": "robot", "content": "hi"}]}, r"messages\[0\]\.role='robot': must be one of"),
        ({"messages": said("hi", " \n")}, r"messages\[1\]: an empty answer"),
        ({"prompt": "hi", "response": ""}, r"messages\[1\]: an empty answer"),
        ({"prompt": "hi", "response": 3}, r'messages\[1\]: has no string field "content"'),
        ({"messages": said("hi")}, "messages: has no answer"),
        ({"messages": []}, "messages: must be a list of messages"),
        ({"messages": "hi"}, "messages: must be a list of messages"),
        ({"messages": ["hi"]}, r'messages\[0\]: has no "role"'),
        ({"prompt": "hi"}, 'has neither "messages" nor "prompt" and "response"'),
        ([1], "must be an object"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, row, message):
    with pytest.raises(ValueError, match=rf"x\.jsonl:2: {message}") as error:
        read_lines(tmp_path, [{"prompt": "a", "response": "b"}, row])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for %}", r"template .*t\.jinja: not a Jinja template"),
        ("{{ raise_exception('no system') }}", r"talk\.jsonl:1: template .*: fails \(no system\)"),
        ("{{ messages.nothing.at.all }}", "fails"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails .*unsafe"),
        ("{% for i in range(99999999) %}x{% endfor %}", "fails"),
        ("{{ 'a' * 30000000 }}", r"fails \(\*: would make more than 16,777,216 char"),
        ("{{ [0] * (9 ** 9) }}", r"fails \(\*\*: would make more than"),
        ("always the same", "leaves the answers out"),
        ("{{ messages|length }}", "does not only append text"),
    ],
)
def test_a_template_that_fails_is_one_line(file, text, message):
    path = file.parent / "t.jinja"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        make(file, template=str(path))
    assert "\n" not in str(error.value)
    assert not (file.parent / "chat").exists()


@pytest.mark.parametrize(
    "text",
    [
        "{{ ('a' * 4000000)|replace('a', 'b' * 400) }}",
        "{{ 'aaaa'.replace('a', 'b' * 9000000) }}",
        "{{ ('a' * 16000000)|batch(1)|list|length }}",
        "{{ [1]|batch(100000000, 'x')|list|length }}",
        "{{ 'a'|slice(100000000)|list|length }}",
        "{{ ('a' * 3000)|indent(100000, true) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ ['x']|map('center', 1000000000)|list }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d'|format(1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 0.5|round(99999999, 'ceil') }}",
        "{% set a = 'a' * 9000000 %}{{ a + a }}",
    ],
)
def test_no_operation_of_a_template_makes_more_than_a_bound(text):
    """Refused before it is computed, also in a branch that is never taken: nothing is folded."""
    began = time.perf_counter()
    with pytest.raises(ValueError, match="more than 16,777,216 characters"):
        ChatTemplate(text, "t").render([], ask=False)
    assert ChatTemplate("{% if false %}" + text + "{% endif %}ok", "t").render([], ask=False) == "ok"
    assert time.perf_counter() - began < 3


def test_what_templates_of_models_use_is_computed():
    messages = [{"role": "user", "content": " a b "}, {"role": "assistant", "content": "c"}]
    text = (
        "{{ messages|map(attribute='role')|join(', ')|upper }} "
        "{{ messages[0].content|trim|replace(' ', '_') }} "
        "{{ messages|tojson(indent=2)|length > 9 }} {{ 7 % 2 }} {{ '%s-%03d' % ('a', 3) }} {{ [1] + [2] }} "
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ 'a,b'.split(',')|last }} "
        "{{ none|default('y', true) }} {{ [1, 2, 3]|batch(2)|list }} "
        "{{ '{}!'.format(1) }} {{ 3.14159|round(2) }}"
    )
    found = ChatTemplate(text, "t").render(messages, ask=False)
    assert found == "USER, ASSISTANT a_b True 1 a-003 [1, 2] 1 b y [[1, 2], [3]] 1! 3.14"


def test_a_template_that_is_not_there():
    with pytest.raises(ValueError, match=r"template mine\.jinja: no such file; must be default, chatml"):
        find_template("mine.jinja")
    with pytest.raises(ValueError, match="template nowhere: must be default, chatml, tokenizer, or a file"):
        find_template("nowhere")


def test_turns_are_cut_at_the_front_and_the_system_message_stays():
    messages = said("a", "b", "c", "d", "e", "f", system="s")
    kept = [["".join(m["content"] for m in one)] for one in cut_at_front(messages)]
    assert kept == [["sabcdef"], ["scdef"], ["sef"]]


def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path):
    rows = [
        {"messages": said("q", "x" * 30, "r", "y" * 30)},  # 98 tokens; its last turn alone 59
        {"messages": said("q", "z" * 90)},
        *[{"prompt": "p", "response": "s"}] * 4,
    ]
    chat = make(write_lines(tmp_path / "t.jsonl", rows), context=60, share=0.2)
    assert chat.facts["counts"] == {"conversations": 6, "shortened": 1, "left_out": 1}
    assert len(chat.train) + len(chat.validation) == 5
    assert chat.longest <= 60
    texts = [BYTES.decode(split.tokens) for split in (chat.train, chat.validation)]
    assert "y" * 30 in "".join(texts)
    assert "x" * 30 not in "".join(texts)


def test_the_folder_is_read_back_verified_and_left_as_it_is(file):
    chat = make(file)
    chat.verify()
    assert (len(chat.train), len(chat.validation)) == (36, 4)
    before = (chat.folder / "chat.json").stat().st_mtime_ns
    assert make(file).checksum == chat.checksum
    assert (chat.folder / "chat.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="already holds conversations with context 200, not 100"):
        make(file, context=100)
    (file.parent / "run.json").touch()
    with pytest.raises(
        ValueError, match="is a run folder, not a chat folder; choose another folder with --out"
    ):
        make(file, out=file.parent)
    file.write_text(file.read_text().replace("question", "Question"))
    with pytest.raises(ValueError, match="already holds conversations with other text; remove it"):
        make(file)
    with pytest.raises(ValueError, match="already holds conversations with another template; remove it"):
        make(file, template="chatml")


def test_the_same_text_packed_gives_the_same_tokens(file):
    packed = file.parent / "talk.jsonl.xz"
    packed.write_bytes(lzma.compress(file.read_bytes()))
    assert make(packed, file.parent / "other").checksum == make(file).checksum


def test_too_few_conversations(tmp_path):
    with pytest.raises(
        ValueError, match="1 conversations, of which 0 are longer than --context 200; at least"
    ):
        make(write_lines(tmp_path / "t.jsonl", [{"prompt": "a", "response": "b"}]))
    assert not (tmp_path / "chat").exists()


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["train_tokens.npy", "validation_answers.npy", "template.jinja"])
def test_damage_is_found(file, name):
    chat = make(file)
    flip(chat.folder / name)
    with pytest.raises(ValueError, match=name.split(".")[0]):
        ChatSet.open(chat.folder).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts.update(vocabulary=10, end_of_text=9), "train_tokens.npy: token 256 is outside"),
        (lambda facts: facts.update(end_of_text=999), "chat.end_of_text: must be a token"),
        (lambda facts: facts.update(format=2), "format 2, this version reads 1"),
        (lambda facts: facts["arrays"].pop("train_bounds"), "no field 'train_bounds'"),
        (lambda facts: facts["arrays"].update(x=facts["arrays"]["train_bounds"]), "unknown array 'x'"),
        (lambda facts: facts["arrays"]["train_tokens"].update(shape=[3]), r"chat\.json has \[3\] of <u2"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(file, change, message):
    chat = make(file)
    facts = json.loads((chat.folder / "chat.json").read_text())
    change(facts)
    (chat.folder / "chat.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=message):
        ChatSet.open(chat.folder)


# The differences of the second one overflow, to positive numbers.
@pytest.mark.parametrize("crafted", [[9, 5, 20], [2**62, 2**63 - 1, -(2**62)]])
def test_bounds_that_cut_no_conversations_are_refused(file, crafted):
    chat = make(file)
    bounds = np.array(chat.train.bounds)
    bounds[1:4] = crafted
    np.save(chat.folder / "train_bounds.npy", bounds)
    with pytest.raises(ValueError, match=r"train_bounds\.npy does not cut"):
        ChatSet.open(chat.folder)


def test_rows_take_conversations_for_as_long_as_they_fit():
    assert pack_rows(np.array([3, 4, 5, 10, 1, 9]), 10).tolist() == [0, 2, 3, 4, 6]


def loader(chat, **changes):
    settings = {"context": 120, "batch": 4, "seed": 1, "filler": BYTES.end_of_text, **changes}
    return ChatLoader(chat.train, **settings)


def test_an_epoch_has_every_conversation_once_with_its_answers(file):
    chat = make(file)
    batches = loader(chat, batch=1)
    seen, rows = [], []
    while batches.state()["epoch"] < 1:
        inputs, targets, starts, scored = batches.step_batch()
        assert scored == (targets >= 0).sum()
        edges = [*starts[0].nonzero().flatten().tolist(), 120]
        for start, stop in pairwise(edges):
            if (targets[0, start:stop] >= 0).any():
                last = targets[0, start:stop].tolist()
                own = np.flatnonzero(np.array(last) >= 0)[-1]
                seen.append(tuple([*inputs[0, start : start + own + 1].tolist(), last[own]]))
                shown = targets[0, start : start + own + 1]
                rows.append((shown >= 0).tolist())
            else:
                assert inputs[0, start:stop].unique().tolist() == [BYTES.end_of_text]
    split = chat.train
    whole = [split.tokens[a:b] for a, b in zip(split.bounds[:-1], split.bounds[1:], strict=True)]
    assert sorted(seen) == sorted(tuple(one.tolist()) for one in whole)
    masks = {tuple(one.tolist()): split.answers[a + 1 : b].tolist() for one, a, b in
             zip(whole, split.bounds[:-1], split.bounds[1:], strict=True)}  # fmt: skip
    assert all(masks[one] == row for one, row in zip(seen, rows, strict=True))


def test_ranks_share_the_rows_and_a_state_goes_on_from_there(file):
    chat = make(file)
    whole = loader(chat)
    ranks = [loader(chat, rank=rank, world=2) for rank in range(2)]
    for _ in range(12):  # over the end of an epoch
        inputs, targets, starts, scored = whole.step_batch()
        parts = [one.step_batch() for one in ranks]
        for full, *own in zip((inputs, targets, starts), *parts, strict=False):
            assert np.array_equal(full, np.concatenate([part.numpy() for part in own]))
        assert all(part[3] == scored for part in parts)
    assert whole.state()["epoch"] > 0
    again = loader(chat)
    again.load_state(whole.state())
    assert all(np.array_equal(a, b) for a, b in zip(again.step_batch(), whole.step_batch(), strict=True))


@pytest.mark.parametrize("change", [{"seed": 9}, {"position": 10**6}, {"epoch": -1}])
def test_a_state_of_other_batches_is_refused(file, change):
    chat = make(file)
    with pytest.raises(ValueError, match="loader state"):
        loader(chat).load_state(loader(chat).state() | change)


def test_held_out_rows_are_spread_and_at_most_as_many_as_asked():
    lengths = [8] * 10
    bounds = np.cumsum([0, *lengths])
    tokens = np.repeat(np.arange(10, dtype=np.uint16), 8)
    split = ChatSplit(tokens, np.arange(80) % 8 > 4, bounds)
    rows = held_out_rows(split, 8, 99, 5)
    assert rows.inputs[:, 0].tolist() == [0, 2, 4, 6, 8]
    assert len(held_out_rows(split, 8, 99, 50).inputs) == 10


def test_the_command_prints_what_was_kept(file, capsys):
    words = ["chat", str(file), "--tokenizer", "bytes", "--out", str(file.parent / "out")]
    with pytest.raises(ValueError, match="context: must be given where --tokenizer names no run"):
        prepare(words)
    prepare([*words[:3], "shipped", "--out", str(file.parent / "run")])
    assert ChatSet.open(file.parent / "run").facts["settings"]["context"] == 128
    prepare([*words, "--context", "40"])
    assert (
        "train: 38 conversations, 1,177 tokens (7% in answers); validation: 2, 62 tokens; "
        "38 shortened, none left out\n"
    ) in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"must be bytes, gpt2"):
        prepare([*words[:3], "nowhere"])
    with pytest.raises(ValueError, match="unknown kind of file"):
        prepare(["chat", "talk.csv", "--tokenizer", "bytes"])
    with pytest.raises(ValueError, match=r"validation_share=0\.9: must be above 0 and at most 0\.5"):
        prepare([*words, "--context", "40", "--validation-share", "0.9"])
