"""The example of somebody else's model runs as its reader would run it, and learns."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def test_the_example_trains():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert losses[0] > 2.0  # ln 10 = 2.3
    assert losses[-1] < 0.5
