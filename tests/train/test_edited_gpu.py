"""An edited layer in a run on a GPU is computed as edited: the kernels leave it to the modules and say so."""

import json
from dataclasses import replace
from types import MethodType

import pytest
from torch import nn

from deeploop.models.gpt import Block
from deeploop.nn.layers import CausalSelfAttention
from deeploop.tasks.language.task import LanguageTask
from deeploop.train import train
from deeploop.train.metrics import read_metrics

pytestmark = pytest.mark.gpu


class Larger(CausalSelfAttention):
    def forward(self, *args):
        return 20 * super().forward(*args)


class LargerLinear(nn.Linear):
    def forward(self, x):
        return 20 * super().forward(x)


def assign(module):
    module.forward = MethodType(lambda self, *args: 20 * type(self).forward(self, *args), module)


# Each multiplies what attention returns by 20, in a place of its own; and what the header says of it.
EDITS = {
    "a subclass": (lambda block: setattr(block.attention.branch, "__class__", Larger), " is a Larger"),
    "an assigned forward": (
        lambda block: assign(block.attention.branch),
        " is a CausalSelfAttention whose forward was replaced",
    ),
    "a hook": (
        lambda block: block.attention.branch.register_forward_hook(lambda module, args, y: 20 * y),
        " has a hook",
    ),
    "a Linear of another class": (
        lambda block: setattr(block.attention.branch.o, "__class__", LargerLinear),
        ".o is a LargerLinear",
    ),
}


def first_losses(config, edit, monkeypatch):
    built = LanguageTask.build

    def build(task):
        model = built(task)
        for block in model.modules():
            if isinstance(block, Block):
                edit(block)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(LanguageTask, "build", build)
        train(config, source="edited")
    return [line["loss"] for line in read_metrics(config.out, "train")]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_attention_is_computed_as_edited(edit, make_config, tmp_path, monkeypatch, capsys):
    change, said = EDITS[edit]
    config = make_config(
        tmp_path / "cuda",
        model={"width": 128, "hidden": 256, "context": 64},
        optim={"steps": 3, "batch": 8},
        device={"kind": "cuda"},
        log={"every": 1},
    )
    exact = replace(config, out=tmp_path / "cpu", device=replace(config.device, kind="cpu"))
    plain = replace(config, out=tmp_path / "plain")
    got = first_losses(config, change, monkeypatch)
    printed = "".join(capsys.readouterr())
    refused = f"(blocks.0.attention.branch{said}, which the Triton kernels do not know)"
    assert f"execution: compiled blocks, bf16 {refused}" in printed
    assert got == pytest.approx(first_losses(exact, change, monkeypatch), abs=3e-2)
    assert got != pytest.approx(first_losses(plain, lambda block: None, monkeypatch), abs=1e-1)
    blocks = {
        run: json.loads((tmp_path / run / "run.json").read_text())["execution"]["blocks"]
        for run in ("cuda", "plain")
    }
    assert blocks == {"cuda": "compiled", "plain": "kernels"}
