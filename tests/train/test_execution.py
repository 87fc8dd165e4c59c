"""The execution is chosen once: what GPU, config, model and optimizer allow, and why not more."""

import json
from types import SimpleNamespace

import pytest
import torch

from deeploop.accelerate import install, known
from deeploop.config.optim import OptimConfig, ReasonerOptimConfig
from deeploop.config.run import DeviceConfig
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.models.reasoner import Reasoner
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape
from deeploop.train import CustomTask, CustomTrainConfig, execution, opening
from deeploop.train.distributed import World
from deeploop.train.execution import Capabilities, choose_execution
from deeploop.train.loop import train
from deeploop.train.optim import make_optimizer, make_reasoner_optimizer
from iterate_runs import make_iterate_config

SHAPE = {"blocks": 2, "rounds": 3, "width": 64, "heads": 2, "hidden": 64, "vocabulary": 64, "context": 8}
GPU = SimpleNamespace(type="cuda")
LATE = "Triton kernels, bf16, loss read back 1 step behind"


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    monkeypatch.setattr(known, "HAS_TRITON", True)


def choose(
    config=None,
    *,
    ranks=1,
    device=GPU,
    kind="adamw",
    recordable=True,
    draws_rounds=False,
    tokens=32,
    recompute="off",
    **shape,
):
    model = LoopedGPT(GPTConfig(**{**SHAPE, **shape}))
    model.recompute = recompute
    optimizer = make_optimizer(model, OptimConfig(kind=kind), fused=True)
    world = World(0, ranks, device)
    told = Capabilities(recordable=recordable, draws_rounds=draws_rounds, tokens=tokens)
    return choose_execution(config or DeviceConfig(), world, model, optimizer, told)


@pytest.mark.parametrize("block", ["deeploop", "flat", "prenorm"])
def test_on_one_gpu_everything_is_on(block):
    chosen = choose(rule=block)
    assert chosen.describe() == "Triton kernels, bf16, CUDA graph, loss read back 1 step behind"
    assert chosen.chained
    assert chosen.to_json() == {"blocks": "kernels", "precision": "bf16", "graph": True, "lag": 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": DeviceConfig(compile="off")}, "eager modules, bf16 (device.compile is off)"),
        ({"config": DeviceConfig(compile="on")}, "compiled blocks, bf16 (device.compile is on)"),
        (
            {"config": DeviceConfig(precision="fp32")},
            "compiled blocks, fp32 (the Triton kernels need bf16)",
        ),
        (
            {"heads": 8},
            "compiled blocks, bf16 "
            "(blocks.0.attention.branch has heads of 8, the Triton kernels need 16 or more)",
        ),
        ({"config": DeviceConfig(graph=False)}, "Triton kernels, bf16 (device.graph is off)"),
        ({"ranks": 2}, "Triton kernels, bf16, CUDA graph, loss read back 1 step behind"),
        ({"ranks": 2, "config": DeviceConfig(parallel="fsdp")}, "Triton kernels, bf16 (fsdp: no CUDA graph)"),
        ({"recordable": False}, "Triton kernels, bf16 (batches differ in their work: no CUDA graph)"),
        ({"kind": "muon"}, "Triton kernels, bf16, CUDA graph"),
        ({"device": torch.device("cpu")}, "eager modules, fp32"),
    ],
)
def test_what_is_left_out_is_said(options, said):
    assert choose(**options).describe() == said


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_fp8_and_a_bf16_stream_are_said_and_kept(hopper, monkeypatch):
    checked = []
    monkeypatch.setattr(install, "check_fp8_compiler", checked.append)
    chosen = choose(DeviceConfig(precision="fp8", stream="bf16"))
    assert chosen.describe() == ("Triton kernels, fp8, bf16 stream, CUDA graph, loss read back 1 step behind")
    assert chosen.to_json()["precision"] == "fp8"
    assert chosen.to_json()["stream"] == "bf16"
    model = LoopedGPT(GPTConfig(**SHAPE))
    chosen.apply(model)
    assert checked == [torch.device("cpu")]
    (low_precision,) = {block.forward.__func__.args[0] for block in (*model.blocks,)}
    assert low_precision == install.LowPrecision(fp8=True, bf16_stream=True)
    assert model.chain.low_precision == low_precision


@pytest.mark.parametrize(
    ("device", "options", "said"),
    [
        ({}, {"device": torch.device("cpu")}, "needs a GPU of compute capability 8.9 or more"),
        ({"compile": "on"}, {}, "needs the Triton kernels, which are not used: device.compile is on"),
        ({"parallel": "fsdp"}, {"ranks": 2}, "is not supported with device.parallel=fsdp; use ddp"),
        ({}, {"hidden": 88}, "model.hidden=88 must be a multiple of 16"),
        ({}, {"rule": "deeploop:inner_norm=off"}, "needs a norm before each branch"),
        ({}, {"recompute": "block"}, "is not supported with device.recompute=block; use round"),
        (
            {},
            {"tokens": 24},
            "24 tokens at once must be a multiple of 16; change optim.batch, device.micro_batch or the",
        ),
    ],
)
def test_fp8_is_refused_where_it_can_not_be_had(device, options, said, hopper):
    with pytest.raises(ValueError, match=rf"device\.precision=fp8: {said}"):
        choose(DeviceConfig(precision="fp8", **device), **options)


def test_fp8_is_refused_on_an_older_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match="this is NVIDIA A100; use bf16"):
        choose(DeviceConfig(precision="fp8"))


def test_reasoners_have_fp8_and_no_other_stream(hopper, monkeypatch):
    monkeypatch.setattr(install, "check_fp8_compiler", lambda device: None)
    config = HRMConfig(width=64, heads=2, hidden=64)
    model = Reasoner(config, PuzzleShape(vocabulary=4, length=8, puzzle_ids=1))
    optimizer = torch.optim.AdamW(model.parameters())

    def choose_for(tokens=16, **device):
        return choose_execution(
            DeviceConfig(**device), World(0, 1, GPU), model, optimizer, Capabilities(tokens=tokens)
        )

    chosen = choose_for(precision="fp8")
    assert chosen.precision == "fp8"
    chosen.apply(model)
    assert model.stacks["L"].forward.__func__.args == (install.LowPrecision(fp8=True),)
    with pytest.raises(ValueError, match="18 tokens at once must be a multiple of 16"):
        choose_for(18, precision="fp8")
    model.stacks["H"].blocks[0].mlp.set_scales(129.0, 1.0)
    with pytest.raises(ValueError, match="needs α of at most 128, this model has 129"):
        choose_for(precision="fp8")
    with pytest.raises(
        ValueError, match=r"device\.stream=bf16: is not supported for a Reasoner; leave it out"
    ):
        choose_for(stream="bf16")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, f"{LATE} (batches differ in their work: no CUDA graph)"),
        ({"graph": False}, f"{LATE} (device.graph is off)"),
        ({"compile": "on"}, "compiled blocks, bf16 (device.compile is on)"),
        ({"compile": "off"}, "eager modules, bf16 (device.compile is off)"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reasoner_is_read_back_behind_without_a_graph(monkeypatch, options, said, ranks):
    model = Reasoner(HRMConfig(width=64, heads=2, hidden=64), PuzzleShape(4, 8, 1))
    optimizer = make_reasoner_optimizer(model, ReasonerOptimConfig())

    def choose_for(able=True, **told):
        monkeypatch.setattr(execution, "supports_conditional_step", lambda optimizer: able)
        return choose_execution(
            DeviceConfig(**options), World(0, ranks, GPU), model, optimizer, Capabilities(**told)
        )

    assert choose_for(queueable=True).describe() == said
    assert choose_for(queueable=True).lag == ("behind" in said)
    assert choose_for(queueable=False).lag == choose_for(able=False, queueable=True).lag == 0


def test_a_bf16_stream_needs_the_kernels():
    with pytest.raises(ValueError, match=r"device\.stream=bf16: needs the Triton kernels.*there is no GPU"):
        choose(DeviceConfig(stream="bf16"), device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"device\.stream=bf16: is not supported with device\.recompute=block"
    ):
        choose(DeviceConfig(stream="bf16"), recompute="block")


def told(monkeypatch, config, **options):
    """The arguments of the choice of an execution, before the run has a folder."""
    seen = []

    def watch(*args):
        seen.append(args[-1])
        raise ValueError("watched")

    monkeypatch.setattr(opening, "choose_execution", watch)
    with pytest.raises(ValueError, match="watched"):
        train(config, **options)
    assert not config.out.exists()
    return seen[0]


def tokens_told(monkeypatch, config, **options):
    return told(monkeypatch, config, **options).tokens


def test_only_a_reasoner_says_that_it_can_be_queued_without_a_graph(
    tiny_config, make_puzzle_config, tmp_path, monkeypatch
):
    assert told(monkeypatch, make_puzzle_config(tmp_path / "puzzles")).queueable
    assert not told(monkeypatch, tiny_config()).queueable


def test_a_run_says_how_many_tokens_it_computes_at_once(tiny_config, monkeypatch):
    config = tiny_config(optim={"steps": 1, "batch": 6}, device={"micro_batch": 3})
    assert tokens_told(monkeypatch, config) == 3 * config.model.context


@pytest.mark.parametrize("limit", [0, 5])
def test_so_does_an_iterated_run_by_its_own_sequences(tmp_path, monkeypatch, limit):
    """A begin token and ten cells, whatever model.context is."""
    config = make_iterate_config(tmp_path / "run", device={"micro_batch": limit})
    assert tokens_told(monkeypatch, config) == (4 if limit else 8) * 11


class Pairs(CustomTask):
    """Inputs and targets of 7 tokens."""

    def batch(self, step):
        return torch.zeros(8, 7), torch.zeros(8, 7)


class Images(CustomTask):
    """Tensors that do not tell how many tokens the model makes of them."""

    def batch(self, step):
        return torch.zeros(8, 3, 16, 16), torch.zeros(8)


@pytest.mark.parametrize(
    ("task", "precision", "tokens"), [(Pairs, "fp8", 28), (Images, "fp8", 0), (Pairs, "bf16", 0)]
)
def test_so_does_a_task_of_ones_own_where_its_first_batch_tells(
    tmp_path, monkeypatch, task, precision, tokens
):
    config = CustomTrainConfig(
        out=tmp_path / "run",
        model=GPTConfig(**SHAPE),
        optim=OptimConfig(batch=8),
        device=DeviceConfig(kind="cpu", precision=precision, micro_batch=4),
    )
    assert tokens_told(monkeypatch, config, task=task) == tokens


def test_what_was_trained_in_fp8_is_evaluated_anywhere():
    """Without an optimizer nothing is trained, and bf16 takes its place."""
    model = LoopedGPT(GPTConfig(**SHAPE))
    config = DeviceConfig(precision="fp8", stream="bf16")
    chosen = execution.choose_execution(config, World(0, 1, torch.device("cpu")), model)
    assert (chosen.precision, chosen.bf16_stream) == ("bf16", False)


def test_drawn_rounds_have_a_graph_for_each_number_of_them():
    parts = {"prelude": 1, "coda": 1, "injection": "linear", "first_state": "noise", "rule": "flat"}
    chosen = choose(**parts, draws_rounds=True)
    assert chosen.describe() == (
        "Triton kernels, bf16, CUDA graph for each number of rounds, at most 16, loss read back 1 step behind"
    )
    assert chosen.chained
    assert chosen.to_json()["most_graphs"] == 16
    assert choose(**parts, ranks=2, draws_rounds=True).describe() == chosen.describe()


def test_a_missing_triton_is_said(monkeypatch):
    monkeypatch.setattr(known, "HAS_TRITON", False)
    assert choose().describe() == "eager modules, bf16 (Triton is not installed)"


def test_sharded_blocks_are_called_one_by_one():
    chosen = choose(DeviceConfig(parallel="fsdp"), ranks=2)
    assert (chosen.blocks, chosen.chained, chosen.graph) == ("kernels", False, False)


def test_it_is_applied_to_the_blocks_and_to_the_loop():
    model = LoopedGPT(GPTConfig(**SHAPE))
    choose(ranks=2).apply(model)
    assert all("forward" in vars(block) for block in model.blocks)
    assert model.chain is not None
    plain = LoopedGPT(GPTConfig(**SHAPE))
    choose(DeviceConfig(compile="off")).apply(plain)
    assert not any("forward" in vars(block) for block in plain.blocks)
    assert plain.chain is None


def test_a_run_prints_it_and_keeps_it(tiny_config, capsys, monkeypatch):
    config = tiny_config(optim={"steps": 1})
    train(config)
    assert capsys.readouterr().out.splitlines()[0] == "execution: eager modules, fp32"
    kept = json.loads((config.out / "run.json").read_text())["execution"]
    assert kept == {"blocks": "eager", "precision": "fp32", "graph": False, "lag": 0}
    train(tiny_config(optim={"steps": 2}, device={"precision": "bf16"}, resume=True))
    kept = json.loads((config.out / "run.json").read_text())["execution"]
    assert kept["precision"] == "bf16"  # as steps are executed now
    assert execution.runs_fast_blocks(DeviceConfig(), GPU)
    assert not execution.runs_fast_blocks(DeviceConfig(precision="fp32"), GPU)
