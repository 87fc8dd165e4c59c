"""What `--diagnose.every` costs: seconds of a diagnosis against seconds of the steps between two of them.

    deeploop prepare stdlib && python benchmarks/diagnosis_cost.py

Both are taken in the same run (`tiny`, 120 steps). The target is under 10% at an interval of 500 steps.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from deeploop.config.loop import DiagnoseConfig
from deeploop.tasks.language.recipes import tiny
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics

STEPS = 120
INTERVALS = (50, 100, 200, 500, 1000)


def main() -> None:
    base = tiny()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            base,
            out=Path(folder) / "run",
            optim=replace(base.optim, steps=STEPS),
            diagnose=DiagnoseConfig(every=STEPS // 4),
        )
        seconds = train(config)["seconds"] / STEPS
        # The first one, at step 0, has no optimizer state to look at and is a little cheaper.
        diagnosis = median(line["seconds"] for line in read_metrics(config.out, "diagnose")[1:])
    print(f"a step {seconds:.3f} s, a diagnosis {diagnosis:.2f} s: that of {diagnosis / seconds:.0f} steps")
    for every in INTERVALS:
        print(f"--diagnose.every {every:<5} {diagnosis / (every * seconds):6.1%} of the training time")


if __name__ == "__main__":
    main()
