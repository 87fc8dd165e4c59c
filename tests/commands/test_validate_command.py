"""`deeploop validate` and `deeploop generate` on a run that takes a second."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

import deeploop
from deeploop.cli import main
from deeploop.data.prepare import prepare
from deeploop.data.tokenizers import get_tokenizer
from deeploop.eval.depth import Windows, bits_per_byte, count_bytes, score_rounds
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.report import plots, results
from deeploop.report.runs import read_run
from deeploop.tasks.language import validate as command
from deeploop.tasks.language.recipes import tiny
from deeploop.tasks.language.scores import depth_chart
from deeploop.train.checkpoint import save_weights
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A corpus of two kinds of lines, as bytes and as GPT-2 tokens, and a run over the bytes."""
    folder = tmp_path_factory.mktemp("validate")
    documents = [
        f"line {n} of the löop\n" * 3 + "another block, another round\n" * (n % 5) for n in range(200)
    ]
    for name in ("bytes", "gpt2"):
        prepare(
            documents, get_tokenizer(name), folder / name, validation_tokens=900, source="lines", workers=1
        )
    base = tiny()
    config = replace(
        base,
        out=folder / "run",
        model=replace(base.model, width=32, hidden=48, context=32),
        data=replace(base.data, path=folder / "bytes", validation_sequences=20),
        optim=replace(base.optim, steps=12, batch=8, warmup_steps=4, peak_lr=1e-2),
        device=replace(base.device, kind="cpu"),
    )
    train(config)
    return folder


@pytest.fixture
def validate(home, capsys):
    def call(*words):
        assert main(["validate", str(home / "run"), "--json", *map(str, words)]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_the_trained_depth_has_the_loss_that_training_reported(home, validate):
    reported = read_metrics(home / "run", "validation")[-1]
    (row,) = validate()["rounds"]
    assert row["rounds"] == 3
    assert row["loss"] == pytest.approx(reported["loss"], abs=1e-4)
    # run.json says how many bytes a token has, so that a list of runs has bits per byte too
    assert read_run(home / "run").bits_per_nat * row["loss"] == pytest.approx(row["bits_per_byte"])
    assert row["similarity"] == pytest.approx(reported["similarity"], abs=1e-4)
    assert results.read(home / "run" / "validation.json")[-1]["rounds"] == [row]


def test_a_sweep_is_the_model_at_each_depth(home, validate):
    record = validate("--rounds", 5, 1, 3)
    model, _ = deeploop.load(home / "run")
    inputs, targets = windows_of(home)
    for row, rounds in zip(record["rounds"], (1, 3, 5), strict=True):
        model.set_rounds(rounds)
        with torch.no_grad():
            expected = model(inputs, targets).loss / targets.numel()
        assert (row["rounds"], row["loss"]) == (rounds, pytest.approx(expected.item(), abs=1e-4))
    assert len({row["loss"] for row in record["rounds"]}) == 3
    assert record["trained_rounds"] == 3
    assert results.read(home / "run" / "depth.json")[-1] == record
    assert (home / "run" / "depth.png").read_bytes()[:4] == b"\x89PNG"


def test_a_sweep_stays_beside_those_of_another_kind(home, validate):
    """Only one that asks for the same replaces its predecessor."""
    kept = home / "run" / "depth.json"
    kept.unlink(missing_ok=True)
    rounds = ("--rounds", 1, 3)
    plain = validate(*rounds)
    others = [validate(*rounds, "--recompute-alpha"), validate(*rounds, "--adaptive", "kl")]
    more = validate(*rounds, "--sequences", 10)
    assert results.read(kept) == [plain, *others, more]
    again = validate(*rounds)
    assert results.read(kept) == [*others, more, again]
    assert results.read_depth(home / "run") == [*others, again]  # the losses of fewer windows are others


def test_a_single_record_of_before_is_kept(home, validate):
    old = validate("--rounds", 1, 3)
    kept = home / "run" / "depth.json"
    kept.write_text(json.dumps(old))
    new = validate("--rounds", 1, 3, "--recompute-alpha")
    assert results.read(kept) == [old, new]


def test_a_file_that_cannot_be_added_to_is_named_before_the_work(home, tmp_path, capsys):
    run = shutil.copytree(home / "run", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    (run / "validation.json").write_text("{")
    assert main(["validate", str(run)]) == 2
    assert "move it away" in capsys.readouterr().err  # not that there are no weights


def sweep_of(depths, **changes):
    rows = [{"rounds": R, "loss": 4.0 - R / 10, "bits_per_byte": 2.0} for R in depths]
    return {"trained_rounds": 3, "recompute_alpha": False, "rounds": rows, "adaptive": []} | changes


def test_the_picture_has_a_curve_for_each_kind_of_sweep():
    stopped = [{"criterion": "kl", "threshold": 0.1, "mean_rounds": 2.5, "loss": 3.9}]
    records = [
        sweep_of([1, 3]),
        sweep_of([2, 5]),
        sweep_of([1, 3], recompute_alpha=True),
        sweep_of([3], adaptive=stopped),
    ]
    (panel,) = depth_chart(records).panels
    curves = {line.label: line.x for line in panel.lines}
    assert curves == {
        "fixed rounds": [1, 2, 3, 5],
        "fixed rounds, α recomputed": [1, 3],
        "adaptive by kl, at most 3": [2.5],
    }


@pytest.mark.parametrize(("depths", "side"), [([1, 2, 3], "right"), ([1, 3, 8], "left")])
def test_the_word_trained_stays_off_the_edge(depths, side):
    axes = plots.draw(depth_chart([sweep_of(depths)])).axes[0]
    assert [text.get_ha() for text in axes.texts] == [side]


def windows_of(home):
    from deeploop.data.shards import Corpus
    from deeploop.data.token_loader import validation_windows

    return validation_windows(Corpus.open(home / "bytes").validation, 32, 20)


def test_bits_per_byte_counts_no_bytes_for_end_of_text(home, validate):
    _, targets = windows_of(home)
    ends = int((targets == 256).sum())
    record = validate()
    assert ends > 0
    assert record["bytes"] == targets.numel() - ends
    nats = record["rounds"][0]["loss"] * targets.numel()
    assert record["rounds"][0]["bits_per_byte"] == pytest.approx(nats / math.log(2) / record["bytes"])


def test_bytes_of_gpt2_tokens_are_those_of_the_text():
    tokenizer = get_tokenizer("gpt2")
    ids = [*tokenizer.encode("one löop → many rounds"), tokenizer.end_of_text]
    assert count_bytes(tokenizer, torch.tensor(ids)) == len("one löop → many rounds".encode())
    assert bits_per_byte(math.log(2) * 24, 8) == pytest.approx(3)


def test_alpha_is_recomputed_on_request_and_put_back():
    model = LoopedGPT(GPTConfig(blocks=2, rounds=3, width=16, heads=2, hidden=24, vocabulary=50, context=8))
    tokens = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(0))
    windows = Windows(tokens, tokens.roll(-1, 1), text_bytes=32)
    kept = score_rounds(model, windows, [3, 6])
    recomputed = score_rounds(model, windows, [3, 6], recompute_alpha=True)
    assert recomputed[3] == kept[3]
    assert recomputed[6].loss != kept[6].loss
    assert {model.blocks[0].mlp.alpha, model.blocks[1].attention.alpha} == {math.sqrt(12)}
    assert model.rounds == 3


def test_adaptive_depth_runs_from_one_round_to_all(validate):
    record = validate("--rounds", 1, 3, "--adaptive", "change", "--thresholds", 1e9, 0)
    one, three = record["rounds"]
    least, most = record["adaptive"]
    assert (least["mean_rounds"], most["mean_rounds"]) == (1, 3)
    assert least["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert most["loss"] == pytest.approx(three["loss"], abs=1e-5)


def test_the_line_has_all_depths_of_few_rounds_and_powers_of_two_of_many():
    assert command.depths_up_to(1) == [1]
    assert command.depths_up_to(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert command.depths_up_to(33) == [1, 2, 4, 8, 16, 32, 33]


def test_a_key_value_budget_is_validated_by_decoding(home, validate, capsys):
    record = validate("--cache-rounds", 1, 2, "all", 7, "--sequences", 4)
    by_budget = {row["cache_rounds"]: row for row in record["cache"]}
    assert record["sequences"] == 4
    assert [by_budget[budget]["slots"] for budget in (1, 2, None, 7)] == [2, 4, 6, 6]
    assert by_budget[None]["loss"] == pytest.approx(record["rounds"][0]["loss"], abs=1e-5)
    assert by_budget[7]["loss"] == by_budget[None]["loss"]
    assert len({by_budget[budget]["loss"] for budget in (1, 2, None)}) == 3
    assert by_budget[1]["bytes_per_token"] == 2 * 2 * 32 * 4
    assert results.read(home / "run" / "validation.json")[-1] == record
    assert main(["validate", str(home / "run"), "--cache-rounds", "1", "all", "--sequences", "1"]) == 0
    out = capsys.readouterr().out
    assert ": 1 sequence, " in out
    assert "decoded token by token, R = 3:" in out


def test_the_table_marks_the_trained_depth(home, capsys):
    assert main(["validate", str(home / "run"), "--rounds", "2", "3", "--adaptive", "kl"]) == 0
    out = capsys.readouterr().out
    assert "3 (trained)" in out
    assert "2 (trained)" not in out
    assert "mean rounds" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["validate", "{home}/nowhere"], "no such run folder"),
        (["validate", "{home}/run", "--data", "{home}/gpt2"], "prepare it with --tokenizer bytes"),
        (["validate", "{home}/run", "--data", "{home}/none"], "make it with `deeploop prepare text FILE…"),
        (["validate", "{home}/run", "--rounds", "0"], "model.rounds=0: must be at least 1"),
        (["validate", "{home}/run", "--sequences", "0"], "sequences=0: must be at least 1"),
        (["generate", "{home}/nowhere"], "no such run folder"),
        (["validate", "{home}"], "a folder of runs; name one of them: empty, run"),
        (["generate", "{home}/empty"], "holds no checkpoint"),
        (
            ["generate", "{home}/run", "--prompt", 33 * "x"],
            "must be 1 to 32, the model's context; shorten it",
        ),
        (["generate", "{home}/run", "--max-tokens", "0"], "max_tokens=0: must be at least 1"),
        (["generate", "{home}/run", "--cache-rounds", "0"], "cache_rounds=0: must be at least 1, or unset"),
        (
            ["validate", "{home}/run", "--cache-rounds", "x"],
            "cache_rounds=x: must be numbers of rounds, or all",
        ),
        (["validate", "{home}/run", "--cache-rounds", "0"], "cache_rounds=0: must be at least 1, or unset"),
        (
            ["generate", "{home}/run", "--cache-rounds", "1", "--adaptive", "kl"],
            "cache_rounds=1: must be unset with adaptive depth",
        ),
        (["generate", "{home}/run", "--top-p", "2"], "top_p=2.0: must be above 0"),
        (["generate", "{home}/run", "--adaptive", "kl", "--threshold", "-1"], "threshold=-1.0"),
        (
            ["generate", "{home}/run", "--threshold", "0.3"],
            "threshold=0.3: needs --adaptive change, kl or",
        ),
        (
            ["validate", "{home}/run", "--thresholds", "0.3", "1"],
            "thresholds=0.3 1: goes with one of --adaptive",
        ),
    ],
)
def test_mistakes_end_in_one_line(home, capsys, words, message):
    empty = home / "empty"
    empty.mkdir(exist_ok=True)
    for name in ("run.json", "config.json"):
        (empty / name).write_bytes((home / "run" / name).read_bytes())
    assert main([word.format(home=home) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_generate_prints_the_same_text_for_the_same_seed(home, capsys):
    def text(*words):
        assert main(["generate", str(home / "run"), "--prompt", "line 7", *words]) == 0
        return capsys.readouterr()

    assert text("--max-tokens", "12").out == text("--max-tokens", "12").out
    greedy = text("--temperature", "0", "--max-tokens", "99")
    assert greedy.out.startswith("line 7")
    read = f"written by {home / 'run'} at step-00000012\n"
    assert greedy.err == f"{read}stopped: the model's context of 32 tokens is full\n"
    adaptive = text("--max-tokens", "5", "--adaptive", "change", "--threshold", "1e9", "--rounds", "4")
    assert adaptive.err == f"{read}mean rounds per token: 1.00 of 4\n"
    none = text("--max-tokens", "5", "--adaptive", "change", "--threshold", "1e-6").err
    assert "mean rounds per token: 3.00 of 3; no token exited early, as the smallest change in" in none
    assert "threshold is 1e-06" in none
    every, few = (text("--temperature", "0", *words).out for words in ((), ("--cache-rounds", "1")))
    assert every == text("--temperature", "0", "--cache-rounds", "3").out
    assert few.startswith("line 7")


def test_a_loss_that_is_no_number_is_no_result(home, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(home / "run", run, ignore=shutil.ignore_patterns("checkpoints", "validation.json"))
    model, _ = deeploop.load(home / "run")
    with torch.no_grad():
        model.final_norm.weight.fill_(3e38)  # the logits overflow
    save_weights(run, model, {})
    assert main(["validate", str(run)]) == 2
    assert "rounds=3: the loss is nan; nothing was written" in capsys.readouterr().err
    assert not (run / "validation.json").exists()
