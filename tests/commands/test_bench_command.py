"""`deeploop bench` on a CPU: the real step and the reference, and that both are the same model."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from deeploop.bench import training as bench_training
from deeploop.bench.reference import reference_model
from deeploop.bench.timing import Timing
from deeploop.cli import main
from deeploop.commands import prepare_puzzles
from deeploop.models import GPTConfig, LoopedGPT

REFERENCE = Path(__file__).parents[2] / "benchmarks" / "reference_gpt.py"


@pytest.fixture
def ceiling(monkeypatch):
    """The ceiling is not measured, which takes longer than a step."""
    monkeypatch.setattr(bench_training, "matmul_ceiling", lambda device: 1e10)


def test_the_table_and_its_file(corpus, tmp_path, capsys):
    out = tmp_path / "bench.json"
    arguments = [
        "--recipes",
        "tiny",
        "--rounds",
        "1",
        "2",
        "--micro-batch",
        "2",
        "--steps",
        "1",
        "--data",
        str(corpus),
    ]
    assert main(["bench", *arguments, "--reference", str(REFERENCE), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "tiny R=2" in text
    record = json.loads(out.read_text())
    assert [row["cell"] for row in record["cells"]] == ["tiny R=1", "tiny R=2"]
    for row in record["cells"]:
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["reference_tokens_per_s"])
        assert row["share_of_ceiling"] == pytest.approx(row["flops"] / record["ceiling_flops"])
        assert row["peak_memory"] is None


def test_fp8_is_timed_beside_bf16(corpus, tmp_path, capsys, monkeypatch, ceiling):
    words = ["bench", "--recipes", "tiny", "--rounds", "1", "--precision", "fp8", "--data", str(corpus)]
    assert main([*words, "--device", "cpu"]) == 2
    error = capsys.readouterr().err.strip()
    assert "device.precision=fp8: needs a GPU of compute capability 8.9" in error
    assert "\n" not in error

    def time_training(config, world, steps):
        return Timing({"fp8": 2.0, "bf16": 3.0}[config.device.precision], 1.0, None), 600, 10**12

    monkeypatch.setattr(bench_training, "time_training", time_training)
    out = tmp_path / "bench.json"
    assert main([*words, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["cells"]
    assert (row["tokens_per_s"], row["bf16_tokens_per_s"], row["ratio_to_bf16"]) == (300, 200, 1.5)
    table = capsys.readouterr().out.splitlines()
    header, values = (re.split(r"\s{2,}", table[i].strip()) for i in (2, -1))
    shown = dict(zip(header, values, strict=True))
    assert shown["to bf16"] == "1.50×"
    assert shown["of ceiling"] == "–"  # which is of products in bf16
    assert "share_of_ceiling" not in row


def test_a_reasoner_is_timed_on_its_puzzles(tmp_path, capsys, ceiling):
    data = tmp_path / "sudoku"
    prepare_puzzles.run(prepare_puzzles.PrepareSudoku(out=data, size=4, train=20, test=4))
    out = tmp_path / "bench.json"
    arguments = ["--recipes", "hrm-sudoku4", "--steps", "1", "--data", str(data), "--json", str(out)]
    assert main(["bench", *arguments, "--reference", str(REFERENCE)]) == 0
    (row,) = json.loads(out.read_text())["cells"]
    assert row["tokens_per_s"] == pytest.approx(128 * 16 * row["steps_per_s"])
    assert "ratio" not in row
    assert main(["bench", "--recipes", "hrm-sudoku4"]) == 2
    assert "give its puzzles with --data" in capsys.readouterr().err


def test_decoding_is_timed_beside_memory_and_transformers(tmp_path, capsys):
    out = tmp_path / "decode.json"
    sizes = ["--rounds", "2", "--batch", "3", "--prompt-tokens", "6", "--new-tokens", "8"]
    assert main(["bench", "--decode", "--recipes", "tiny", *sizes, "--json", str(out)]) == 0
    assert "tiny R=2" in capsys.readouterr().out
    record = json.loads(out.read_text())
    (row,) = record["cells"]
    bandwidth = record["copy_bytes_per_s"]
    theirs = max(row[f"transformers_{cache}_tokens_per_s"] for cache in ("dynamic", "static"))
    assert row["ratio"] == pytest.approx(row["tokens_per_s"] / theirs)
    assert row["share_of_bandwidth"] == pytest.approx(row["step_bytes"] / row["step_s"] / bandwidth)
    # 2 blocks × 2 rounds of q k v o and gate up down, the head, keys and values of 12 positions
    matrices = 4 * (4 * 128**2 + 3 * 128 * 344) + 257 * 128
    assert row["step_bytes"] == 4 * (matrices + 4 * 3 * 12 * 2 * 128)


def test_the_reference_is_the_same_model():
    """Given our weights, it computes our loss."""
    config = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=64, context=16)
    ours, theirs = LoopedGPT(config), reference_model(REFERENCE, config)
    parts = {"embedding.weight": "embedding.weight"}
    parts |= {f"{n}.weight": f"{n}.weight" for n in ("input_norm", "final_norm")}
    for k in range(2):
        for index, where in enumerate(("attention.inner", "attention.outer", "mlp.inner", "mlp.outer")):
            parts[f"blocks.{k}.norms.{index}.weight"] = f"blocks.{k}.{where}.weight"
        for name in ("q", "k", "v", "o", "q_norm", "k_norm"):
            parts[f"blocks.{k}.attention.{name}.weight"] = f"blocks.{k}.attention.branch.{name}.weight"
        for name in ("gate", "up", "down"):
            parts[f"blocks.{k}.mlp.{name}.weight"] = f"blocks.{k}.mlp.branch.{name}.weight"
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    own = ours.state_dict()
    theirs.load_parts({name: own[source] for name, source in parts.items()})
    tokens, targets = torch.randint(0, 64, (2, 2, 16))
    expected = ours(tokens, targets).loss / targets.numel()
    loss = theirs(tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (2 * loss).backward()
    (2 * expected).backward()
    torch.testing.assert_close(theirs.embedding.weight.grad, ours.embedding.weight.grad, rtol=1e-4, atol=1e-6)
    gradients = [ours.blocks[1].attention.branch.get_submodule(n).weight.grad for n in "qkv"]
    packed = theirs.blocks[1].attention.qkv.weight.grad
    torch.testing.assert_close(packed, torch.cat(gradients), rtol=1e-4, atol=1e-6)


def test_the_reference_in_fp8_has_torchaos_products():
    pytest.importorskip("torchao")
    config = GPTConfig(blocks=2, rounds=2, width=32, heads=2, hidden=40, vocabulary=64, context=16)
    model = reference_model(REFERENCE, config)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    exact = model(tokens, tokens)
    model.to_float8()
    kinds = {name: type(layer).__name__ for name, layer in model.named_modules() if hasattr(layer, "bias")}
    layers = "attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"
    assert kinds == {
        f"blocks.{k}.{layer}": "Linear" if layer == "mlp.down" else "Float8Linear"  # 40 is no multiple of 16
        for k in range(2)
        for layer in layers
    }
    loss = model(tokens, tokens)
    assert loss != exact
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    loss.backward()
    assert all(parameter.grad.norm() > 0 for parameter in model.parameters())


def test_mistakes_are_one_line(capsys, tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("")
    for arguments, message in (
        (["--recipes", "huge"], "recipe=huge: unknown"),
        (["--reference", "nowhere.py"], "reference=nowhere.py: no such file"),
        (["--steps", "0"], "steps=0: must be at least 1"),
        (["--rounds"], "bench: error: recipes, rounds: name at least one of each"),
        (["--micro-batch", "4", "0"], "micro_batch=0: must be at least 1"),
        (["--batch", "0"], "batch=0: must be at least 1"),
        (["--new-tokens", "4"], "new_tokens=4: must be above 4"),
        (["--decode", "--recipes", "tiny"], "new_tokens=128: must fit the context 128 of tiny"),
        (["--decode", "--recipes", "hrm-sudoku4"], "is no language model's"),
        (["--batch", "2"], "error: batch=(2,): needs --decode"),
        (["--decode", "--steps", "3"], "error: steps=3: is for training; leave it out, or --decode"),
        (["--decode", "--round-hidden"], "error: round_hidden=True: is for training"),
        (["--decode", "--precision", "fp8"], "error: precision=fp8: is for training"),
        (["--json", str(tmp_path / "no" / "x.json")], "x.json: can't be written"),
    ):
        assert main(["bench", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(ValueError, match="has no class ReferenceGPT"):
        reference_model(empty, GPTConfig())
    assert "ReferenceGPT" in runpy.run_path(str(REFERENCE))
