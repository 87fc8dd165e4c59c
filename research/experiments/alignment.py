"""κ_R of looped GPTs at gpt2-small's width: at init, at the floor, after the escape, and in a collapse.

    deeploop prepare text eb09.jsonl.xz --out data/britannica
    python -m research.experiments.alignment --data data/britannica --out runs/alignment --jobs 4

Every cell is a `deeploop train … --diagnose.every N` of its own, so its metrics.jsonl holds all there is; a
cell that is finished is not run again. About 15 minutes on one H200; `--scale cpu` is the same in small, to
try it out.
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROUNDS = (1, 3, 5, 7)
SCALES = {
    # The recipe's batch, context and depth are cut: K = 6 of 12 blocks, 16 × 512 of 480 × 1024 tokens a step.
    "gpu": {
        "recipe": "gpt2-small",
        "model.blocks": 6,
        "model.context": 512,
        "optim.batch": 16,
        "device.micro-batch": 16,
        "data.validation-sequences": 64,
        "diagnose.sequences": 2,
        "diagnose.iterations": 8,
    },
    "cpu": {"recipe": "tiny", "optim.batch": 8, "diagnose.tokens": 32, "diagnose.iterations": 2},
}
RULES = {
    "deeploop": {"model.rule": "deeploop"},
    "deepnorm": {"model.rule": "deepnorm"},
    "p1": {"model.rule": "deeploop:p=1"},
    "prenorm": {"model.rule": "prenorm"},
}


def cells(steps: int) -> dict[str, dict[str, object]]:
    """Name → settings. Every ramp is peak / warm-up; the lineage's is 1e-3 over 2,000 steps, 5e-7 a step."""
    gentle = {"optim.peak-lr": 1e-3, "optim.warmup-steps": 2000}
    found: dict[str, dict[str, object]] = {}
    for seed in (0, 1):
        for rule in ("deeploop", "prenorm"):
            for R in sorted(ROUNDS, reverse=True):  # the long ones first
                found[f"{rule}-r{R}-s{seed}"] = (
                    RULES[rule]
                    | gentle
                    | {
                        "model.rounds": R,
                        "seed": seed,
                        "optim.steps": steps,
                        "diagnose.every": 100 if rule == "deeploop" else 250,
                    }
                )
    for rule, warmup in (
        ("deeploop", 2000),
        ("deeploop", 600),
        ("deeploop", 100),
        ("deepnorm", 600),
        ("p1", 100),
    ):
        found[f"start-{rule}-warmup{warmup}"] = RULES[rule] | {
            "model.rounds": 3,
            "optim.peak-lr": 1e-3,
            "optim.warmup-steps": warmup,
            "optim.steps": min(steps, 250),
            "diagnose.every": 10,
            "data.validate-every": 10,
        }
    # At init the published depth K = 12 costs one probe.
    for rule in ("deeploop", "deepnorm", "prenorm"):
        for R in sorted(ROUNDS, reverse=True):
            for seed in (0, 1):
                found[f"init-{rule}-r{R}-s{seed}"] = RULES[rule] | {
                    "model.blocks": 12,
                    "model.rounds": R,
                    "seed": seed,
                    "optim.steps": 1,
                    "diagnose.every": 10,
                    "device.compile": "off",
                }
    return found


def run(name: str, settings: dict[str, object], args: argparse.Namespace) -> str:
    scale = SCALES[args.scale]
    out = args.out / name
    if (out / "checkpoints").exists():
        return f"{name}: there already"
    base = {"data.path": args.data, "out": out, "log.every": 5, "data.validate-every": 100}
    base |= {"checkpoint.every": 10**6, "checkpoint.keep": 1}
    options = base | {k: v for k, v in scale.items() if k != "recipe"} | settings
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    began = time.perf_counter()
    with (args.out / f"{name}.log").open("w") as log:
        command = [sys.executable, "-m", "deeploop", "train", str(scale["recipe"]), *words]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    for heavy in out.glob("checkpoints/*/*.safetensors"):
        if not args.keep:
            heavy.write_bytes(b"")  # half a gigabyte a cell; the metrics are what is wanted
    return f"{name}: exit {code}, {time.perf_counter() - began:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="corpus, as `deeploop prepare` writes it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--scale", choices=SCALES, default="gpu")
    parser.add_argument("--steps", type=int, default=500, help="steps of the trained cells")
    parser.add_argument("--jobs", type=int, default=4, help="cells at a time")
    parser.add_argument("--only", default="", help="prefixes of the cells to run, separated by commas")
    parser.add_argument("--keep", action="store_true", help="keep the weights")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prefixes = tuple(args.only.split(","))
    chosen = {name: own for name, own in cells(args.steps).items() if name.startswith(prefixes)}
    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(lambda item: run(*item, args), chosen.items()):
            print(line, flush=True)


if __name__ == "__main__":
    main()
