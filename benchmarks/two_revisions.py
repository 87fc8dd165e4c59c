"""Time `deeploop bench` at two revisions, in turns on one machine: what a change of the code costs in speed.

    git archive 0123abc src | tar -x -C build/old
    python benchmarks/two_revisions.py build/old/src src "gpt2-small --rounds 3 --micro-batch 32"
    python benchmarks/two_revisions.py build/old/src src "tiny --rounds 3 --device cpu --micro-batch 8"

Each of the last arguments is what follows `deeploop bench --recipes`. The two take turns in going first.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("bench", nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    sources = {"before": given.before.resolve(), "after": given.after.resolve()}
    for words in given.bench:
        rates: dict[str, list[float]] = {name: [] for name in sources}
        for turn in range(given.repeats):
            for name in list(sources)[:: -1 if turn % 2 else 1]:
                rates[name].append(steps_per_second(sources[name], shlex.split(words)))
        shown = "; ".join(f"{name} {' '.join(f'{rate:.4g}' for rate in rates[name])}" for name in sources)
        ratio = median(rates["after"]) / median(rates["before"])
        print(f"{words}: {shown} steps/s; medians {ratio:.3f}×", flush=True)


def steps_per_second(source: Path, words: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "deeploop", "bench", "--recipes", *words, "--json", str(out)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)
        (cell,) = json.loads(out.read_text())["cells"]
    rate: float = cell["steps_per_s"]
    return rate


if __name__ == "__main__":
    main()
