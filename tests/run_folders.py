"""Run folders written by hand, in a millisecond each: what a reader of runs must cope with."""

import json
import shutil
import tarfile

from deeploop.rules import parse

CONFIG = {
    "seed": 0,
    "model": {
        "blocks": 2,
        "rounds": 3,
        "width": 32,
        "heads": 2,
        "hidden": 64,
        "vocabulary": 50257,
        "context": 32,
    },
    "data": {"path": "data/words", "validation_sequences": 15, "validate_every": 4},
    "optim": {"steps": 40, "batch": 8, "peak_lr": 1e-3, "floor_lr": 1e-4, "warmup_steps": 10},
    "guard": {"stop": False},
}
FLOOR = 3.0


def write_run(
    folder, *, rule="deeploop", rounds=3, seed=0, loss=2.0, step=40, similarity=0.2, mfu=None,
    guard=False, stamp=None, model=None, draws=None, by_rounds=None, **optim
):  # fmt: skip
    """A run whose losses fall in a straight line to `loss`, which it reaches at `step`.

    `draws` are fields of `rounds`; `by_rounds` the last validation's losses, by rounds.
    """
    folder.mkdir(parents=True)
    config = json.loads(json.dumps(CONFIG)) | {"seed": seed, "guard": {"stop": guard}}
    config["model"] |= {"rule": str(parse(rule)), "rounds": rounds, **(model or {})}
    config["optim"] |= optim
    config |= {"rounds": draws} if draws else {}
    (folder / "config.json").write_text(json.dumps(config))
    command = ["deeploop", "train", "tiny", "--out", str(folder.name), "--seed", str(seed)]
    written = {"command": command, "written": f"2026-01-0{1 + seed}T00:00:00+00:00", "git": "abc"}
    (folder / "run.json").write_text(
        json.dumps({"format": 1, "task": "language", **written, **(stamp or {})})
    )
    lines = []
    for at in range(0, step + 1, 4):
        now = 5 + (loss - 5) * at / max(1, step)
        if at:
            speed = {"tokens": at * 256, "seconds": at * 0.9, "tokens_per_s": 900 / rounds, "mfu": mfu}
            lines.append({"kind": "train", "step": at, "loss": now + 0.1, **speed})
        off = now < FLOOR - 0.1
        verdict = (
            "escaped"
            if off and similarity < 0.95
            else "collapsed"
            if not off and similarity > 0.95
            else "undecided"
        )
        lines.append({"kind": "validation", "step": at, "loss": now, "floor": FLOOR, "similarity": similarity,
                      "verdict": verdict})  # fmt: skip
    if by_rounds:
        lines[-1] |= {"validation_rounds": [*by_rounds], "loss_by_rounds": [*by_rounds.values()]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_sweep(folder, cells, **more):
    """sweep.json over cells {name: axes}."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = {name: {"recipe": "tiny", "settings": {}, "axes": axes} for name, axes in cells.items()}
    (folder / "sweep.json").write_text(
        json.dumps({"format": 1, "sweep": "s", "scale": "own", "cells": cells} | more)
    )
    return folder


def write_mixed_sweep(folder):
    """Four cells: an escape, a collapse with a diagnosis, one that failed at once, one that never began."""
    write_run(folder / "a", seed=0, loss=2.0)
    (folder / "a" / "checkpoints" / "step-00000040").mkdir(parents=True)
    (folder / "a" / "checkpoints" / "step-00000040" / "state.json").write_text("{}")
    (folder / "a" / "depth.png").write_bytes(b"\x89PNG")
    (folder / "a" / "eval.json").write_text(json.dumps({"evaluations": [{"command": ["deeploop", "eval"]}]}))
    write_run(folder / "b", seed=1, loss=3.1, similarity=0.99, p=0.25)
    (folder / "b" / "weights-dropped").touch()
    diagnosis = {
        "step": 40,
        "rounds": 3,
        "updates": "raw",
        "kappa": 2.5,
        "kappa_raw": 2.5,
        "similarity": 0.99,
    }
    (folder / "b" / "diagnose.json").write_text(json.dumps(diagnosis))
    (folder / "c.log").write_text("Segmentation fault\n")
    (folder / "c.exit.json").write_text(json.dumps({"code": -11, "failed": True, "error": "ended with -11"}))
    (folder / "README.md").write_text("prose")
    return write_sweep(folder, {name: {"seed": i} for i, name in enumerate("abcd")}, compare_at=20)


def pack_sweep(folder, out):
    """runs.tar.xz of a sweep's files but pictures and weights, as `tar cJf` makes it, and its sweep.json."""
    out.mkdir(parents=True, exist_ok=True)
    runs = [path for path in folder.glob("*/*") if path.is_file() and path.suffix != ".png"]
    logs = [*folder.glob("*.log"), *folder.glob("*.exit.json")]
    with tarfile.open(out / "runs.tar.xz", "w:xz") as tar:
        for path in sorted(runs + logs):
            tar.add(path, str(path.relative_to(folder)))
    shutil.copy(folder / "sweep.json", out)
    return out
