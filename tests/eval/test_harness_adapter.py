"""The adapter in the real harness: accuracy by hand, requests written down and replayed, generation."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from deeploop.data.tokenizers import get_tokenizer
from deeploop.eval import harness
from deeploop.eval.generation import generate
from deeploop.eval.harness import HarnessLM, Recorder, ScoreReplay, run_tasks, set_shots
from deeploop.eval.requests import Requests
from deeploop.eval.scoring import score
from deeploop.eval.tasks import PAPER_TASKS, load_tasks
from deeploop.models import GPTConfig, LoopedGPT

NAMES = list(PAPER_TASKS)
BYTES = get_tokenizer("bytes")


@pytest.fixture(scope="module")
def model():
    config = GPTConfig(blocks=1, rounds=2, width=32, heads=2, hidden=48, vocabulary=257, context=400)
    model = LoopedGPT(config, seed=5).eval()
    with torch.no_grad():
        model.embedding.weight *= 10  # predictions that differ
    return model


@pytest.fixture
def live(model):
    return HarnessLM(BYTES, partial(score, model), model)


@torch.no_grad()
def loglikelihood(model, context, continuation):
    """One request alone; the border between the two is where the context's own tokens end."""
    ids = BYTES.encode(context + continuation)
    count = len(ids) - len(BYTES.encode(context.rstrip()))
    ids = ids if context else [BYTES.end_of_text, *ids]
    logprobs = model.logits(model(torch.tensor([ids[:-1]])).states[0]).log_softmax(-1)
    return logprobs[-count:].gather(1, torch.tensor(ids[-count:])[:, None]).sum().item()


def accuracy_by_hand(model, name, row):
    """1 or 0: whether the right answer of a row is the likeliest, with the prompts written out."""
    if name.startswith("arc"):
        context = f"Question: {row['question']}\nAnswer:"
        right = "ABCD".index(row["answerKey"])
        pairs = [(context, f" {text}") for text in row["choices"]["text"]]
    elif name == "openbookqa":
        right = "ABCD".index(row["answerKey"])
        pairs = [(row["question_stem"], f" {text}") for text in row["choices"]["text"]]
    elif name == "piqa":
        right = row["label"]
        pairs = [(f"Question: {row['goal']}\nAnswer:", f" {row[key]}") for key in ("sol1", "sol2")]
    elif name == "sciq":
        right = 3
        context = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:"
        keys = ("distractor1", "distractor2", "distractor3", "correct_answer")
        pairs = [(context, f" {row[key]}") for key in keys]
    elif name == "social_iqa":
        right = int(row["label"]) - 1
        context = f"Q: {row['context']} {row['question']}\nA:"
        pairs = [(context, f" {row[key]}") for key in ("answerA", "answerB", "answerC")]
    elif name == "winogrande":
        right = int(row["answer"]) - 1
        before, after = row["sentence"].split("_")
        pairs = [(before + row[key], after) for key in ("option1", "option2")]
    scores = [loglikelihood(model, *pair) for pair in pairs]
    return int(scores.index(max(scores)) == right)


def test_accuracy_by_hand(model, live, task_files):
    names = [name for name in NAMES if name != "hellaswag"]
    rows = run_tasks(live, set_shots(load_tasks(names, task_files), 0), shots=0, limit=None)
    assert [row["task"] for row in rows] == names
    for row in rows:
        has_test = row["task"] in ("arc_challenge", "arc_easy", "openbookqa", "sciq")
        path = task_files / row["task"] / ("test.jsonl" if has_test else "validation.jsonl")
        documents = [json.loads(line) for line in path.read_text().splitlines()]
        right = [accuracy_by_hand(model, row["task"], document) for document in documents]
        assert row["acc"] == pytest.approx(sum(right) / 4)
        assert (row["items"], row["shots"]) == (4, 0)
        assert "acc_norm" not in str(row)
    assert 0 < sum(row["acc"] for row in rows) < len(rows)


def test_written_down_scored_and_replayed_is_live(model, live, task_files, tmp_path):
    recorder = Recorder()
    recording = HarnessLM(BYTES, recorder)
    expected = {}
    for shots in (0, 1):
        loaded = set_shots(load_tasks(NAMES, task_files), shots)
        expected[shots] = run_tasks(live, loaded, shots=shots, limit=3)
        run_tasks(recording, loaded, shots=shots, limit=3)
    Requests.join(recorder.asked, {}).save(tmp_path / "r.npz")
    requests = Requests.load(tmp_path / "r.npz")
    assert requests.items == 48
    parts = [requests.with_shots(shots) for shots in requests.shots]
    replay = HarnessLM(BYTES, ScoreReplay({part.digest(): score(model, part) for part in parts}))
    for shots in (0, 1):
        loaded = set_shots(load_tasks(NAMES, task_files), shots)
        assert run_tasks(replay, loaded, shots=shots, limit=3) == expected[shots]
    assert expected[0] != expected[1]
    other = set_shots(load_tasks(NAMES, task_files), 1)
    with pytest.raises(ValueError, match=r"scores: .* other requests"):
        run_tasks(replay, other, shots=1, limit=4)


def test_tasks_can_be_asked_again_at_another_depth(model, live, task_files):
    """Their requests are built once, and answered anew each time."""
    loaded = set_shots(load_tasks(["sciq", "piqa"], task_files), 0)
    at_2 = run_tasks(live, loaded, shots=0, limit=None)
    recorder = Recorder()
    run_tasks(HarnessLM(BYTES, recorder), loaded, shots=0, limit=None)
    assert run_tasks(live, loaded, shots=0, limit=None) == at_2
    run_tasks(HarnessLM(BYTES, recorder), loaded, shots=0, limit=None)
    assert recorder.asked[0].digest() == recorder.asked[1].digest()


def request(*arguments, task="task", document=0):
    return SimpleNamespace(args=arguments, task_name=task, doc_id=document, idx=0)


def test_an_empty_context_is_end_of_text(model, live):
    pairs = [("", "abc"), ("ab", "c"), ("ab ", "c")]
    scores = [logprob for logprob, _ in live.loglikelihood([request(*pair) for pair in pairs])]
    assert scores == pytest.approx([loglikelihood(model, *pair) for pair in pairs], abs=1e-4)
    # A space at the end of a context is scored with the continuation.
    assert scores[2] < loglikelihood(model, "ab", " ")


@pytest.mark.parametrize("length", [1, 399, 400, 401, 1500])
def test_a_whole_document_is_every_token_once(model, live, length):
    text = "".join(chr(97 + (i * i) % 26) for i in range(length))
    ids = [BYTES.end_of_text, *BYTES.encode(text)]
    total = 0.0
    done = 0
    with torch.no_grad():
        while done < length:  # windows of the context; the last is moved back to be full
            end = min(done + 400, length)
            start = max(0, end - 400)
            logprobs = model.logits(model(torch.tensor([ids[start:end]])).states[0]).log_softmax(-1)
            for position in range(done, end):
                total += logprobs[position - start, ids[position + 1]].item()
            done = end
    other, same = live.loglikelihood_rolling([request("other"), request(text)])
    assert same == pytest.approx(total, abs=1e-3 * max(1, length))
    assert other == pytest.approx(loglikelihood(model, "", "other"), abs=1e-4)


@pytest.mark.parametrize("before", [0, 1, 380, 399, 400, 401, 900])
def test_what_is_longer_than_the_context_scores_as_in_lm_evals_own_model(model, live, before):
    """Their model loses the beginning too; a continuation longer than the context it does not take."""
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    from deeploop.data.hf_tokenizer import to_transformers
    from deeploop.models.hf import DeepLoopForCausalLM

    tokenizer = to_transformers(BYTES, context=model.config.context)
    gpt = DeepLoopForCausalLM.from_gpt(model)
    theirs = HFLM(pretrained=gpt, tokenizer=tokenizer, max_length=400, batch_size=1, device="cpu")
    text = "".join(chr(97 + (i * i + i // 26) % 26) for i in range(1400))
    asked = [request(text[:before], text[before : before + length]) for length in (1, 2, 21, 399, 400)]
    wanted = theirs.loglikelihood(asked, disable_tqdm=True)
    for (ours, greedy), (logprob, is_greedy) in zip(live.loglikelihood(asked), wanted, strict=True):
        assert ours == pytest.approx(logprob, rel=1e-4)
        assert greedy == is_greedy


def test_generation_is_greedy_and_ends_where_it_is_told(model, live):
    ids = list(generate(model, BYTES.encode("the loop"), max_tokens=30))
    text = BYTES.decode(ids)
    options = {"until": [], "max_gen_toks": 30}
    assert live.generate_until([request("the loop", options)]) == [text]
    stop = text[10:13]
    (cut,) = live.generate_until([request("the loop", options | {"until": [stop, "never"]})])
    assert cut == text[: text.index(stop)]


def test_a_long_prompt_loses_its_beginning(live):
    options = {"until": [], "max_gen_toks": 50}
    prompt = "0123456789" * 35
    (expected,) = live.generate_until([request(prompt, options)])
    assert live.generate_until([request("lost" * 50 + prompt, options)]) == [expected]
    assert len(live.generate_until([request("", {"until": [], "max_gen_toks": 9999})])) == 1


@pytest.mark.parametrize("ask", ["loglikelihood_rolling", "generate_until"])
def test_what_cannot_be_written_down(ask):
    recording = HarnessLM(BYTES, Recorder())
    with pytest.raises(ValueError, match=r"tasks=wikitext: .*more than likelihoods"):
        getattr(recording, ask)([request("text", {}, task="wikitext")])


def test_a_task_without_accuracy_gives_its_own_metrics(live, monkeypatch):
    own = {
        "alias": "own",
        "word_perplexity,none": 12.5,
        "word_perplexity_stderr,none": "N/A",
        "f1,strict": 0.5,
    }
    results = {
        "results": {"own": own, "usual": {"acc,none": 0.25, "acc_stderr,none": 0.125, "acc_norm,none": 0.5}},
        "n-shot": {"own": 0, "usual": 5},
        "n-samples": {"own": {"effective": 2}, "usual": {"effective": 3}},
        "versions": {"own": 1.0, "usual": 2.0},
        "samples": {"own": [], "usual": []},
    }
    monkeypatch.setattr(harness, "evaluate", lambda *_, **__: results)
    first, second = run_tasks(
        live, {"tasks": dict.fromkeys(("own", "usual"), SimpleNamespace(instances=[]))}, shots=0, limit=None
    )
    assert first["metrics"] == {"word_perplexity": 12.5, "f1,strict": 0.5}
    assert (first["task"], first["shots"], first["items"], first["version"]) == ("own", 0, 2, 1.0)
    assert (second["task"], second["acc"], second["stderr"]) == ("usual", 0.25, 0.125)
    assert "metrics" not in second
