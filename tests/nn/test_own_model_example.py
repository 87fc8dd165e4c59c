"""The example of somebody else's model runs as its reader would run it, and learns."""

import re
import runpy
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def test_the_example_trains(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
    assert losses[0] > 2.0  # ln 10 = 2.3
    assert losses[-1] < 0.5


@torch.no_grad()
def test_beta_reaches_the_whole_branch():
    """At the start the first MLP differs from position to position: no unscaled bias drowns it."""
    torch.manual_seed(0)
    model = runpy.run_path(str(EXAMPLE))["Reverser"]()
    x = model.input_norm(model.digits(torch.randint(10, (32, 8))) + model.places.weight)
    attention, mlp, *_ = model.sublayers
    branch = mlp.branch(mlp.inner(attention(x))).flatten(0, 1)
    same = branch.mean(dim=0)
    assert same.square().mean() < 0.25 * branch.square().mean()
