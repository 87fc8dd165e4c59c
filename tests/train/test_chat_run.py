"""Fine-tuning on conversations: the loss on answers alone, resume, and `deeploop chat` on the result."""

import io
import json
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from deeploop.cli import main
from deeploop.commands.parsing import parse
from deeploop.commands.train import words_of_source
from deeploop.data.tokenizers import get_tokenizer
from deeploop.eval.generation import GREEDY
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.report.runs import read_run
from deeploop.runs.folder import write_config
from deeploop.tasks.chat.config import ChatDataConfig, ChatTrainConfig
from deeploop.tasks.chat.conversation import Conversation
from deeploop.tasks.chat.prepare import prepare_chat
from deeploop.tasks.chat.task import ChatTask
from deeploop.tasks.chat.template import find_template
from deeploop.tasks.recipes import get_recipe
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from deeploop.train.rundir import load, load_model

WORDS = "loop block round norm scale depth stream token".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Short answers to short questions, one turn or two: a chat folder of bytes."""
    folder = tmp_path_factory.mktemp("chat")
    lines = []
    for n in range(60):
        a, b = WORDS[n % 8], WORDS[(n * 5 + 1) % 8]
        messages = [{"role": "user", "content": f"say {a}"}, {"role": "assistant", "content": f"{a}!"}]
        if n % 3:
            messages += [{"role": "user", "content": b}, {"role": "assistant", "content": f"{b}!"}]
        lines.append(json.dumps({"messages": messages}))
    file = folder / "talk.jsonl"
    file.write_text("\n".join(lines))
    template, tokenizer = find_template("default"), get_tokenizer("bytes")
    prepare_chat(file, tokenizer, template, folder / "chat", context=128, validation_share=0.15)
    return folder / "chat"


@pytest.fixture(scope="module")
def base(make_config, tmp_path_factory):
    """A run to fine-tune, which has hardly learned anything yet."""
    config = make_config(
        tmp_path_factory.mktemp("base") / "run",
        model={"context": 128, "rule": "flat"},
        optim={"steps": 2, "warmup_steps": 1},
    )
    train(config, quiet=True)
    return config.out


@pytest.fixture
def make_chat(conversations, base, make_config, tmp_path):
    def make(out="chat", **changes):
        like = make_config(tmp_path / out, model={"context": 128, "rule": "flat"})
        settings = {
            "out": tmp_path / out,
            "model": like.model,
            "data": ChatDataConfig(path=conversations, validate_every=100),
            "optim": like.optim,
            "device": like.device,
            "checkpoint": like.checkpoint,
            "log": like.log,
            "init_from": base,
            **changes,
        }
        return ChatTrainConfig(**settings)

    return make


def task_of(config, rank=0, world=1):
    task = ChatTask(config, World(rank, world, torch.device("cpu")))
    return task, task.build()


def test_positions_that_are_no_answers_have_no_gradient(make_chat):
    task, model = task_of(make_chat())
    kept = []
    model.final_norm.register_forward_hook(lambda module, args, y: y.retain_grad() or kept.append(y))
    batch = task.batches(0).batches[0]
    task.loss(model, batch).backward()
    of_position = kept[0].grad.abs().amax(-1)
    is_answer = batch[1] >= 0
    assert (of_position[~is_answer] == 0).all()
    assert (of_position[is_answer] > 0).all()
    assert 0.02 < is_answer.float().mean() < 0.5


def test_the_loss_is_the_mean_over_answers_of_conversations_alone(make_chat):
    task, model = task_of(make_chat())
    ours = sum(task.loss(model, batch) for batch in task.batches(0).batches)
    inputs, targets, starts, scored = task_of(make_chat())[0].loader.step_batch()
    total = torch.zeros(())
    for row, own in enumerate(starts):
        for start, stop in pairwise([*own.nonzero().flatten().tolist(), len(own)]):
            total = total + model(inputs[row, start:stop][None], targets[row, start:stop][None]).loss
    torch.testing.assert_close(ours, total / (targets >= 0).sum(), rtol=1e-5, atol=0)
    assert scored == (targets >= 0).sum()


def test_ranks_add_up_to_the_step(make_chat):
    task, model = task_of(make_chat())
    whole = sum(task.loss(model, batch) for batch in task.batches(0).batches)
    parts = [task_of(make_chat(), rank, 2)[0] for rank in range(2)]
    shares = [sum(part.loss(model, batch) for batch in part.batches(0).batches) for part in parts]
    torch.testing.assert_close(sum(shares), whole)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_filler_do_not_count_for_the_token_similarity(rows, make_chat):
    config = make_chat()
    config = replace(config, data=replace(config.data, validation_rows=rows))

    sums = []

    class InTurn(World):
        """The last rank knows the sum over all."""

        def sum(self, values):
            sums.append(values)
            return sum(sums)

    def measured(world):
        task = ChatTask(config, world)
        found = task.evaluate(task.build())
        return found["loss"], found["similarity"]

    alone = measured(World(0, 1, torch.device("cpu")))
    _, (loss, similarity) = (measured(InTurn(rank, 2, torch.device("cpu"))) for rank in (0, 1))
    assert loss == pytest.approx(alone[0], rel=1e-5)
    assert similarity == pytest.approx(alone[1], rel=0.05)  # pairs are those within a rank


@pytest.fixture(scope="module")
def tuned(conversations, base, tmp_path_factory):
    """A run that was fine-tuned by the command line."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    words = (
        f"train chat --init-from {base} --data.path {conversations} --out {out} --quiet --device.kind cpu "
        "--optim.steps 40 --optim.batch 4 --optim.peak-lr 1e-2 --optim.warmup-steps 5"
    )
    assert main(words.split()) == 0
    return out


def test_fine_tuning_lowers_the_loss_on_held_out_answers(tuned, capsys):
    first, *_, last = [line["loss"] for line in read_metrics(tuned) if line["kind"] == "validation"]
    assert last < first / 2
    main(["validate", str(tuned), "--device", "cpu", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["rounds"][0]["loss"] == pytest.approx(last, rel=1e-6)
    assert record["tokens"] < record["sequences"] * 128 / 2


def test_the_model_is_that_of_the_run(tuned, base):
    model, tokenizer = load(tuned)
    assert model.config == load_model(base).config
    assert tokenizer.name == "bytes"
    assert json.loads((tuned / "run.json").read_text())["task"] == "chat"
    assert read_run(tuned).unit == "token"  # of answers


def test_rounds_and_gate_are_those_of_the_run_and_the_mean_does_not_rise_anew(base, make_config, tmp_path):
    parts = {"context": 128, "injection": "add", "exit_gate": True, "rule": "flat"}
    config = make_config(
        tmp_path / "gated",
        model=parts,
        rounds={"backprop": 2, "ramp": "linear"},
        gate={"stage": "gate-only"},
        init_from=base,
    )
    config.out.mkdir()
    (config.out / "run.json").write_bytes((base / "run.json").read_bytes())
    write_config(config)
    base = get_recipe("chat")
    words = ["--init-from", str(config.out)]
    found = parse(type(base), [*words_of_source(base, "chat", words), *words], prog="", default=base)
    assert (found.model, found.gate) == (config.model, config.gate)
    assert found.rounds == replace(config.rounds, ramp="off")


def test_stop_and_resume_is_the_uninterrupted_run(make_chat):
    whole, halves = make_chat("whole"), make_chat("halves")
    train(whole, quiet=True)
    train(replace(halves, optim=replace(halves.optim, steps=3)), quiet=True)
    train(replace(halves, resume=True), quiet=True)
    ours, other = (load_model(config.out).state_dict().values() for config in (whole, halves))
    assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


def test_mistakes_are_one_line(base, tuned, conversations, tmp_path, capsys):
    start = f"train chat --out {tmp_path / 'run'} --device.kind cpu --data.path"
    file = tmp_path / "few.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n' * 3)
    for tokenizer, out in (("gpt2", "gpt2"), ("bytes", "long")):
        words = f"prepare chat {file} --tokenizer {tokenizer} --context 1024 --out {tmp_path / out}"
        assert main(words.split()) == 0
    file.write_text('{"prompt": "a", "response": "%s"}\n' % ("b" * 300) * 3)
    words = f"prepare chat {file} --tokenizer bytes --context 1024 --out {tmp_path / 'longer'}"
    assert main(words.split()) == 0
    found = {
        f"{start} {conversations}": "--init-from: names the run to fine-tune",
        f"{start} {conversations} --init-from {tmp_path}": "not a run folder",
        f"{start} {tmp_path / 'gpt2'} --init-from {base}": "conversations with the --tokenizer of",
        f"{start} {tmp_path / 'longer'} --init-from {base}": "prepare them with --context 128",
        f"{start} {conversations} --init-from {base} --optim.batch 38": "a step of 38 rows is more than the "
        f"37 that the 51 conversations of {conversations} fill; give --batch 37 or less",
        f"{start} {tmp_path / 'none'} --init-from {base}": "make it with `deeploop prepare chat",
        f"{start} {base} --init-from {base}": "is a run folder, not a chat folder",
        f"{start} {conversations} --init-from {base} --auto-lr": "--auto-lr: is for language models from",
        "bench --recipes chat": "recipes=chat: has no model of its own",
        f"prepare chat {file} --tokenizer bpe:4096": "'bpe:4096': must be bytes, gpt2, or a folder or",
        f"chat {base}": "was not trained on conversations; fine-tune it: deeploop train chat --init-from",
        f"chat {tmp_path / 'none'}": "no such run folder",
        f"chat {tuned} --device cpu --system {'x' * 200}": "leave no room for a question and an answer in",
    }
    for words, message in found.items():
        capsys.readouterr()
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def chat(run, text, monkeypatch, capsys, *more):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    capsys.readouterr()
    assert main(["chat", str(run), "--temperature", "0", "--device", "cpu", *more]) == 0
    return capsys.readouterr()


def test_the_terminal_answers_a_line_with_a_line(tuned, monkeypatch, capsys):
    said = chat(
        tuned, "say depth\n\nnorm\n/reset\n/what now\nsay loop\n/quit\nsay block\n", monkeypatch, capsys
    )
    model, tokenizer = load(tuned)
    answers = []
    for questions in (["say depth", "norm"], ["say loop"]):
        talk = Conversation(model, tokenizer, find_template("default"), sampling=GREEDY)
        answers += [talk.ask(question, write=lambda piece: None) for question in questions]
    assert said.out == "".join(f"{answer}\n" for answer in answers)
    assert said.err.splitlines() == [
        "a new conversation",
        "/what: no such command; /reset starts a new conversation, /quit ends",
    ]


def test_a_message_that_is_too_long_is_told_and_the_conversation_goes_on(tuned, monkeypatch, capsys):
    said = chat(tuned, f"{'x' * 200}\nsay loop\n", monkeypatch, capsys)
    assert said.out == chat(tuned, "say loop\n", monkeypatch, capsys).out
    assert "leave no room for an answer in the model's context of 128; shorten it" in said.err


def test_a_full_context_forgets_the_first_turns(tuned, monkeypatch, capsys):
    said = chat(tuned, "say loop\nblock\nround\nnorm\nscale\n", monkeypatch, capsys)
    assert len(said.out.splitlines()) == 5
    assert "the context was full: the first turn is forgotten" in said.err.splitlines()


def test_a_terminal_is_shown_escapes_of_the_model_wherever_the_questions_come_from(
    tuned, monkeypatch, capsys
):
    monkeypatch.setattr(Conversation, "ask", lambda self, question, *, write: write("\x1b[2J"))
    assert chat(tuned, "hi\n", monkeypatch, capsys).out == "\x1b[2J\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert chat(tuned, "hi\n", monkeypatch, capsys).out == "\\x1b[2J\n"


def test_ctrl_c_ends_cleanly(tuned, monkeypatch, capsys):
    def interrupt(self, question, *, write):
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "ask", interrupt)
    assert chat(tuned, "say loop\n", monkeypatch, capsys).err == ""


def test_the_cache_gives_what_reading_everything_anew_gives():
    model = LoopedGPT(
        GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=257, context=400), seed=3
    ).eval()
    talk = Conversation(
        model, get_tokenizer("bytes"), find_template("default"), sampling=GREEDY, max_tokens=20
    )
    read = []
    hook = model.register_forward_pre_hook(lambda module, given: read.append(given[0][0]))
    for question in ("first", "second", "third"):
        talk.ask(question, write=lambda piece: None)
    hook.remove()
    tokens, ends = torch.cat(read), torch.tensor([len(piece) for piece in read]).cumsum(0)
    best = model.logits(model(tokens[None]).states[0]).argmax(-1)
    prompts = [at for at, piece in enumerate(read) if len(piece) > 1]
    assert len(prompts) == 3  # in one piece each, and the answers token by token
    for first, last in pairwise([*prompts, len(read)]):
        drawn = slice(ends[first], ends[last - 1])
        assert len(tokens[drawn]) == 19  # of twenty the last is read with the next question
        assert torch.equal(best[ends[first] - 1 : ends[last - 1] - 1], tokens[drawn])


@pytest.mark.parametrize(
    ("drawn", "answer"),
    [
        ("hi<|im_end|>", "hi"),
        ("a<|im_b<|im_end|>", "a<|im_b"),
        ("<|im_end|>c", "<|im_end|>c"),
        ("<|im", "<|im"),
    ],
)
def test_what_the_template_writes_behind_an_answer_is_not_part_of_it(drawn, answer):
    tokenizer = get_tokenizer("bytes")
    shape = {
        "blocks": 1,
        "rounds": 1,
        "width": 16,
        "heads": 2,
        "hidden": 16,
        "vocabulary": 257,
        "context": 400,
    }
    tokens = iter([*tokenizer.encode(drawn), tokenizer.end_of_text] * 2)

    class Scripted(LoopedGPT):
        def logits(self, states):
            return F.one_hot(torch.tensor([next(tokens)]), 257).float()

    model = Scripted(GPTConfig(**shape)).eval()
    talk = Conversation(model, tokenizer, find_template("chatml"), sampling=GREEDY)
    for turn in (1, 2):
        shown = []
        assert talk.ask("q", write=shown.append) == "".join(shown) == answer
        assert talk.messages[2 * turn - 1] == {"role": "assistant", "content": answer}


def test_an_export_has_the_template_and_can_be_started_from(tuned, conversations, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    exported = tmp_path / "exported"
    assert main(["export", str(tuned), str(exported)]) == 0
    again = f"train chat --init-from {exported} --data.path {conversations} --device.kind cpu --quiet"
    again += " --optim.steps 1 --optim.peak-lr 0 --optim.floor-lr 0 --optim.batch 2 --out"
    assert main([*again.split(), str(tmp_path / "again")]) == 0
    ours, theirs = (load_model(run).state_dict().values() for run in (tmp_path / "again", tuned))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"width": 4096}))
    assert main([*again.split(), str(tmp_path / "large")]) == 2
    assert "are too few for the model of" in capsys.readouterr().err
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    messages = [{"role": "user", "content": "say loop"}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = "<|user|>\nsay loop\n<|assistant|>\n"
    assert ids == [256, *theirs(text).input_ids]
