"""The example that loops a transformers Llama: it learns, and is Llama itself where it should be."""

import re
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='needs transformers: pip install -c constraints.txt -e ".[hf]"')

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_llama.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def test_the_example_trains(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
    assert losses[0] > 2.0
    assert losses[-1] < 0.7
    assert "copied [" in said


@torch.no_grad()
def test_prenorm_in_one_round_is_llama_itself(example):
    torch.manual_seed(0)
    llama, tokens = example["make_llama"]().eval(), example["sequences"](2)
    before = llama(tokens).logits
    torch.testing.assert_close(example["loop_layers"](llama, 1, "prenorm")(tokens).logits, before)
    twice = example["loop_layers"](example["make_llama"]().eval(), 2, "prenorm")
    assert len(twice.model.layers) == 4
    assert len({id(p) for p in twice.parameters()}) == len({id(p) for p in llama.parameters()})


@torch.no_grad()
@pytest.mark.parametrize("kind", ["averaged", "flat"])
def test_every_visit_has_a_cache_slot_of_its_own(example, kind):
    torch.manual_seed(0)
    model = example["loop_layers"](example["normalise_embedding"](example["make_llama"]()), 3, kind).eval()
    tokens = example["sequences"](2)
    cache = model(tokens[:, :9], use_cache=True).past_key_values
    assert len(cache.layers) == 6
    rest = model(tokens[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(rest, model(tokens).logits[:, 9:], rtol=1e-4, atol=1e-5)
