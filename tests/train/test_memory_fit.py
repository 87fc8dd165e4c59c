"""Which micro-batch and what recomputation fit a device: by a made-up need, and by the real estimate."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from deeploop.config.run import DeviceConfig
from deeploop.models import Block, GPTConfig, HRMConfig, PuzzleShape
from deeploop.models.accounting import activation_bytes, parameter_count, segment_bytes, training_bytes
from deeploop.models.reasoner import ReasonerBlock
from deeploop.nn.context import Context
from deeploop.nn.layers import rotary_table
from deeploop.train import memory
from deeploop.train.distributed import World
from deeploop.train.loop import train
from deeploop.train.memory import fit
from deeploop.train.metrics import read_metrics

NEED = {"off": 100, "round": 30, "block": 10}  # a sequence


def needs(sequences, recompute):
    return sequences * NEED[recompute]


@pytest.fixture
def gpu(monkeypatch):
    """A world whose device has this much memory to spend."""

    def make(free, ranks=1):
        monkeypatch.setattr(memory, "free_memory", lambda world: free / memory.BUDGET)
        return World(0, ranks, SimpleNamespace(type="cuda"))

    return make


@pytest.mark.parametrize(
    ("free", "chosen"),
    [
        (4_800, (48, "off")),
        (4_799, (24, "off")),
        (400, (4, "off")),
        (399, (12, "round")),
        (120, (4, "round")),
        (119, (8, "block")),
        (10, (1, "block")),
        (1, (1, "block")),
    ],
)
def test_a_gpu_takes_what_fits(gpu, free, chosen):
    assert fit(48, DeviceConfig(), gpu(free), needs) == chosen


@pytest.mark.parametrize(("free", "chosen"), [(800, "off"), (799, "round"), (239, "block"), (1, "block")])
def test_a_micro_batch_that_is_set_stays(gpu, free, chosen):
    assert fit(48, DeviceConfig(micro_batch=8), gpu(free), needs) == (8, chosen)


@pytest.mark.parametrize("device", [{"precision": "fp8"}, {"stream": "bf16"}])
def test_blocks_are_not_recomputed_one_by_one_where_they_must_be_a_chain(gpu, device):
    assert fit(48, DeviceConfig(**device), gpu(119), needs) == (3, "round")


@pytest.mark.parametrize(
    ("free", "device", "chosen"),
    [
        (4_800, {}, (48, "off")),
        (2_400, {}, (16, "off")),  # 24 would fit the memory, but have 264 tokens
        (1_599, {}, (48, "round")),
        (1, {}, (16, "round")),
        (4_800, {"micro_batch": 24}, (16, "off")),
        (4_800, {"micro_batch": 12}, (12, "off")),  # none fits: refused with the execution
    ],
)
def test_fp8_takes_splits_whose_tokens_are_a_multiple_of_16(gpu, free, device, chosen):
    assert fit(48, DeviceConfig(precision="fp8", **device), gpu(free), needs, tokens=11) == chosen


@pytest.mark.parametrize(("recompute", "size"), [("off", 6), ("round", 16), ("block", 48)])
def test_a_recomputation_that_is_set_stays(gpu, recompute, size):
    assert fit(48, DeviceConfig(recompute=recompute), gpu(600), needs) == (size, recompute)


@pytest.mark.parametrize("device", [{"precision": "fp32"}, {"compile": "off"}])
def test_blocks_that_keep_more_get_less(gpu, device):
    """Of 60 bytes for the weights and 600 to spend, 540 are left: a third of them for what is estimated."""

    def needs(sequences, recompute):
        return 60 + sequences * NEED[recompute]

    for set_, size in (("off", 1), ("round", 6), ("block", 16)):
        assert fit(48, DeviceConfig(recompute=set_, **device), gpu(600), needs) == (size, set_)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_blocks_as_they_are_written_keep_up_to_three_times_the_estimate(precision):
    config = GPTConfig(blocks=1, rounds=1, width=128, heads=2, hidden=344, vocabulary=64, context=64)
    block = Block(config)
    x = torch.randn(3, 64, 128, requires_grad=True)
    own, held = {p.data_ptr() for p in block.parameters()}, {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16),
    ):
        block(x, Context(rotary_table(64, config.head_size)))
    found = sum(tensor.untyped_storage().nbytes() for tensor in held.values()) / (3 * 64)
    assert 2 < found / activation_bytes(config) < memory.PLAIN * 1.1


def test_what_is_free_is_what_the_fullest_rank_has_and_the_reserve_of_this_process(monkeypatch):
    class World2(World):
        def gather(self, value):
            return [value + 5, value]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert memory.free_memory(World2(0, 2, torch.device("cuda"))) == 1000 + 200
    assert memory.free_memory(World(0, 1, torch.device("cpu"))) is None


def test_a_share_of_less_than_four_is_not_recomputed_for_that(gpu):
    assert fit(2, DeviceConfig(), gpu(200), needs) == (2, "off")


@pytest.mark.parametrize(("recompute", "expected"), [("auto", "off"), ("block", "block")])
def test_a_cpu_takes_its_whole_share(recompute, expected):
    world = World(0, 2, torch.device("cpu"))
    assert fit(48, DeviceConfig(recompute=recompute), world, needs) == (24, expected)


def test_the_papers_models_on_their_gpus(gpu):
    """GPT-2 small at R=7 and 32 sequences was measured at 82 GiB, with plain compiled blocks."""
    needs = partial(training_bytes, GPTConfig(rounds=7))
    assert needs(32, "off") == pytest.approx(82 * 2**30, rel=0.2)
    assert fit(480, DeviceConfig(micro_batch=32), gpu(0.8 * 140e9), needs).recompute == "off"
    assert fit(480, DeviceConfig(micro_batch=32), gpu(0.8 * 80e9), needs).recompute == "round"
    assert needs(32, "round") < 1.35 * training_bytes(GPTConfig(rounds=1), 32, "off")


@pytest.mark.parametrize(("recompute", "visits", "states"), [("off", 6, 3), ("round", 2, 5), ("block", 1, 8)])
def test_the_estimate_is_the_sum_of_its_parts(recompute, visits, states):
    """Weights without a sequence, then what each token adds; one visit more is under way in the backward."""
    config = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=128, context=16)
    parameters, matrices = parameter_count(config), 4 * 32 * 32 + 3 * 32 * 48
    fixed = training_bytes(config, 0, recompute)
    assert fixed == 16 * parameters + (visits + 1) * 2 * matrices
    a_token = (visits + 1) * activation_bytes(config) + states * 4 * 32 + 10 * 128
    assert training_bytes(config, 3, recompute) == fixed + 3 * 16 * a_token
    for ranks in (2, 4):  # a share of what is stored, and weights and gradients whole beside it
        more = training_bytes(config, 0, recompute, shards=ranks) - fixed
        assert more == 16 * parameters // ranks + 8 * parameters - 16 * parameters


@pytest.mark.parametrize("mixer", ["attention", "mlp"])
@pytest.mark.parametrize("recompute", ["off", "round", "block"])
def test_a_reasoners_weights_are_those_of_its_blocks(mixer, recompute):
    config = HRMConfig(
        width=64,
        heads=2,
        hidden=96,
        high_blocks=2,
        low_blocks=3,
        mixer=mixer,
        rule="deeploop",
        puzzle_positions=1,
    )
    shape = PuzzleShape(12, 15, 1)
    block = sum(p.numel() for p in ReasonerBlock(config, "H", 16).parameters() if p.ndim == 2)
    visits = {"off": config.schedule.N_g, "round": 3, "block": 1}[recompute] + 1
    stored = 5 * block
    for ranks, weights in ((1, 16 * stored), (2, 16 * stored), (4, 12 * stored)):
        found = segment_bytes(config, shape, 0, recompute, shards=ranks)
        assert found == weights + visits * 2 * block + 4 * 64  # one puzzle's row


def test_hrm_on_arc_fits_one_h200_at_once(gpu):
    """Half of its batch was measured at 52.3 GiB on the kernels."""
    shape = PuzzleShape(12, 900, 1)
    assert segment_bytes(HRMConfig(), shape, 384, kernels=True) == pytest.approx(52.3 * 2**30, rel=0.05)
    needs = partial(segment_bytes, HRMConfig(), shape, share=768, kernels=True)
    more = needs(384) - segment_bytes(HRMConfig(), shape, 384, kernels=True)
    assert more == 384 * 901 * 512 * 2 * 6  # the other half's carry: two states, three times
    assert fit(768, DeviceConfig(), gpu(0.8 * 139 * 2**30), needs) == (768, "off")


def test_puzzle_tables_are_counted():
    small, large = (PuzzleShape(12, 900, count) for count in (1, 876_407))
    assert segment_bytes(HRMConfig(), large, 8) - segment_bytes(HRMConfig(), small, 8) == 4 * 876_406 * 512


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["round", "block"])
def test_a_run_that_recomputes_is_the_same_run(tiny_config, recompute, precision):
    """Losses and the diagnosis, which must not take a visit that is computed again for another one."""
    diagnosis = {"every": 3, "sublayers": ("blocks.0.mlp",), "iterations": 2}
    found = []
    for way in ("off", recompute):
        device = {"recompute": way, "precision": precision}
        config = tiny_config(way, device=device, diagnose=diagnosis, optim={"steps": 3, "batch": 2})
        train(config)
        losses = [line["loss"] for line in read_metrics(config.out, "train")]
        found.append((losses, [line["kappa"] for line in read_metrics(config.out, "diagnose")]))
    assert found[0] == found[1]
