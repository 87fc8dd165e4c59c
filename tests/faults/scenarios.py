"""Every fault that is injected: how, how often, what happened, what was lost; one row of the page each.

A scenario disturbs real processes (forked or started by torchrun) and compares the end with an undisturbed
run of the same seed, bit for bit: losses, weights, moments and generators.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from interrupted import VICTIMS, kill_midway
from together import TOGETHER, train_words
from victims import STEPS, differences, small_config, undisturbed

from deeploop.data.shards import HEADER_BYTES
from deeploop.runs.folder import last_checkpoint, list_checkpoints
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.task import LanguageTask
from deeploop.train.checkpoint import read_state
from deeploop.train.loop import train
from deeploop.train.metrics import read_metrics
from forked import finish, start, wait_until

LONG = {"data.validate_every": 100, "optim.steps": 400, "checkpoint.every": 20}
QUICK = ("eval", "eval --segments", "export", "import", "prepare pairs", "report", "retrofit")


@dataclass(frozen=True)
class Row:
    """One line of the page."""

    fault: str
    injected: str
    times: int
    happened: str


def ends_as(
    reference: Path, config: TrainConfig, log: Path, work: Callable[[TrainConfig], object] = train
) -> None:
    """Train to the end, which must be that of the reference."""
    if code := finish(start(lambda: work(config), log)):
        raise AssertionError(f"exit {code}: {log.read_text()[-600:]}")
    same_end(config, reference)


def same_end(config: TrainConfig, reference: Path) -> None:
    if wrong := differences(config.out, reference):
        raise AssertionError(f"{config.out.name}: {'; '.join(wrong)}")


def step_of(config: TrainConfig) -> int:
    found = last_checkpoint(config.out)
    return int(found.name.removeprefix("step-")) if found else 0


def kills(folder: Path, times: int) -> Row:
    """SIGKILL at random moments; each resume is the next victim."""
    reference, draw = undisturbed(), random.Random(0)
    killed = in_save = runs = 0
    while killed < times:
        config = small_config(folder, f"victim-{runs}")
        runs, patience = runs + 1, 0.8
        while True:
            pid = start(lambda config=config: train(config), folder / "kills.log")
            time.sleep(draw.uniform(0.03, patience))
            patience *= 1.05  # on a machine that gets busy meanwhile nobody would come further
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            killed += 1
            in_save += any((config.out / "checkpoints").glob(".step-*"))
        same_end(config, reference)
    return Row(
        "SIGKILL",
        "at random moments of short runs, each resume the next victim",
        killed,
        f"{runs} runs ended as the undisturbed one; {in_save} kills fell inside the writing of a checkpoint",
    )


def terminations(folder: Path, times: int) -> Row:
    """SIGTERM, as SLURM sends it ahead of time: the run saves at once and leaves."""
    reference, draw = undisturbed(), random.Random(1)
    slowest = 0.0
    for index in range(times):
        config = replace(
            small_config(folder, f"term-{index}"),
            checkpoint=replace(small_config(folder).checkpoint, every=1000),
        )
        pid = start(lambda config=config: train(config), folder / "term.log")
        after = draw.randrange(1, STEPS - 5)
        wait_until(lambda config=config, after=after: len(read_metrics(config.out, "train")) >= after, pid)
        os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        if code := finish(pid):
            raise AssertionError(f"exit {code} after SIGTERM")
        slowest = max(slowest, time.monotonic() - began)
        if not 0 < step_of(config) < STEPS:
            raise AssertionError("no checkpoint was saved on SIGTERM")
        ends_as(reference, config, folder / "term.log")
    return Row(
        "SIGTERM (30 s notice)",
        "between two steps of a run that would not save by itself",
        times,
        f"saved and left within {slowest:.1f} s; resumed to the undisturbed end",
    )


def damaged_checkpoints(folder: Path, times: int) -> Row:
    """The newest checkpoint is cut, flipped or robbed of a file."""
    reference, draw = undisturbed(), random.Random(2)
    for index in range(times):
        config, log = small_config(folder, f"damaged-{index}"), folder / f"damaged-{index}.log"
        kill_at(config, STEPS // 2, log)
        checkpoint = last_checkpoint(config.out)
        assert checkpoint is not None
        while is_whole(checkpoint):  # a bit in a digit beyond a float's precision changes nothing: again
            damage(draw.choice(sorted(checkpoint.iterdir())), draw)
        ends_as(reference, config, log)
        if "moved aside; resuming from" not in log.read_text():
            raise AssertionError("nobody was told")
    return Row(
        "damaged checkpoint",
        "newest one truncated, a bit flipped, or a file removed",
        times,
        "found by its checksum, named, renamed; continued from the one before, to the undisturbed end",
    )


def is_whole(checkpoint: Path) -> bool:
    try:
        read_state(checkpoint)
        return True
    except ValueError:
        return False


def damage(path: Path, draw: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    kind = draw.choice(("cut", "flip", "remove"))
    if kind == "remove":
        path.unlink()
        return
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw[: len(raw) // 2] if kind == "cut" else raw)


def kill_at(config: TrainConfig, step: int, log: Path) -> None:
    pid = start(lambda: train(config), log)
    wait_until(lambda: step_of(config) >= step, pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def full_disk(folder: Path, times: int) -> Row:
    """No file may grow beyond a limit: the checkpoint's largest file can't be written."""
    reference = undisturbed()
    for index in range(times):
        config = small_config(folder, f"full-{index}")
        kill_at(config, 6, folder / "full.log")
        largest = max(file.stat().st_size for file in last_checkpoint(config.out).iterdir())  # type: ignore[union-attr]

        def limited(config: TrainConfig = config, limit: int = largest - 1) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            train(config)

        log = folder / f"full-{index}.log"
        before = [checkpoint.name for checkpoint in list_checkpoints(config.out)]
        if not finish(start(limited, log)):
            raise AssertionError("it went through")
        if "earlier checkpoints are whole" not in log.read_text():
            raise AssertionError(log.read_text()[-600:])
        if [checkpoint.name for checkpoint in list_checkpoints(config.out)] != before:
            raise AssertionError("a checkpoint was lost")
        ends_as(reference, config, log)
    return Row(
        "full disk",
        "a limit on file size below that of a checkpoint's file",
        times,
        "the save failed in one line, older checkpoints stayed; with room again, the undisturbed end",
    )


def shards(folder: Path, times: int) -> Row:
    """A shard is removed, cut, or filled with tokens beyond the vocabulary while a run reads it."""
    reference, draw = undisturbed(), random.Random(3)
    said = {"remove": "can't be read any more", "cut": "truncated shard", "tokens": "outside the vocabulary"}
    for index in range(times):
        kind = list(said)[index % 3]
        place = folder / f"shards-{index}"
        place.mkdir()
        config = small_config(place)
        path = next((config.data.path).glob("train_*.bin"))
        whole = path.read_bytes()
        log = place / "log"
        pid = start(lambda config=config: train(config), log)
        wait_until(lambda config=config: step_of(config) >= 4 + draw.randrange(6), pid)
        if kind == "remove":
            path.unlink()
        elif kind == "cut":
            os.truncate(path, HEADER_BYTES + 200)
        else:
            with path.open("r+b") as file:
                file.seek(HEADER_BYTES)
                file.write(np.full(len(whole) // 2, 60000, "<u2").tobytes()[: len(whole) - HEADER_BYTES])
        code = finish(pid)
        text = log.read_text()
        if code == 0 or said[kind] not in text or "last good checkpoint: " not in text:
            raise AssertionError(f"{kind}: exit {code}: {text[-600:]}")
        path.write_bytes(whole)
        ends_as(reference, config, log)
    return Row(
        "a shard vanishes or is damaged mid-run",
        "removed, truncated, or overwritten with tokens beyond the vocabulary while the run reads it",
        times,
        "ended with the shard's name and the last good checkpoint; with the shard back, the undisturbed end",
    )


def second_run(folder: Path, times: int) -> Row:
    """The first is held still while it has the folder, so that the second meets it for certain."""
    reference = undisturbed()
    for index in range(times):
        config = small_config(folder, f"twice-{index}")
        pid = start(lambda config=config: train(config), folder / "first.log")
        wait_until(lambda config=config: step_of(config) >= 2, pid)
        os.kill(pid, signal.SIGSTOP)
        log = folder / f"second-{index}.log"
        code = finish(start(lambda config=config: train(config), log))
        os.kill(pid, signal.SIGCONT)
        if code == 0 or "another run is writing there" not in log.read_text():
            raise AssertionError(f"exit {code}: {log.read_text()[-400:]}")
        if code := finish(pid):
            raise AssertionError(f"the first ended with {code}")
        same_end(config, reference)
    return Row(
        "two runs on one folder",
        "a second one started while the first holds the folder",
        times,
        "the second refused in one line; the first reached the undisturbed end",
    )


def clock(folder: Path, times: int) -> Row:
    """Clocks that jump by hours, forwards and backwards, at every reading."""
    reference = undisturbed()

    def jumping(config: TrainConfig) -> None:
        draw, real = random.Random(4), time.perf_counter
        for name in ("time", "perf_counter", "monotonic"):
            setattr(time, name, lambda: real() + draw.uniform(-1e5, 1e5))
        train(config)

    for index in range(times):
        config = small_config(folder, f"clock-{index}")
        ends_as(reference, config, folder / "clock.log", jumping)
    return Row(
        "clock jumps",
        "every clock reads up to a day too early or too late, anew each time",
        times,
        "the undisturbed end; only the times in the metrics are wrong",
    )


def non_finite(folder: Path, times: int) -> Row:
    """A NaN in one step's loss: the run stops where it can be resumed, or skips the step, as set."""
    reference = undisturbed()
    real = LanguageTask.loss

    def poison(config: TrainConfig, step: int) -> None:
        seen = iter(range(10**6))

        def loss(self: LanguageTask, *args: object) -> torch.Tensor:
            return real(self, *args) * (float("nan") if next(seen) == step else 1.0)  # type: ignore[arg-type]

        LanguageTask.loss = loss  # type: ignore[method-assign]
        train(config)

    for index in range(times):
        config = small_config(folder, f"nan-{index}")
        log = folder / f"nan-{index}.log"
        if not finish(start(lambda c=config, i=index: poison(c, 7 + i), log)):
            raise AssertionError("a NaN went through")
        if "last good checkpoint" not in log.read_text():
            raise AssertionError(log.read_text()[-600:])
        ends_as(reference, config, log)
        skipping = small_config(folder, f"skip-{index}", non_finite="skip")
        if finish(start(lambda c=skipping, i=index: poison(c, 7 + i), log)):
            raise AssertionError(log.read_text()[-600:])
        if [line["so_far"] for line in read_metrics(skipping.out, "skipped")] != [1]:
            raise AssertionError("the skipped step was not counted")
    return Row(
        "non-finite gradient",
        "NaN in one step's loss, with `optim.non_finite` stop and skip",
        2 * times,
        "stop: named, resumed to the undisturbed end; skip: left out, counted, trained on",
    )


def elastic(folder: Path, times: int) -> Row:
    """A rank killed under torchrun, which starts all of them again; --resume does the rest."""
    for index in range(times):
        place = folder / f"elastic-{index}"
        place.mkdir()
        config = small_config(place)
        common = train_words(config, place / "undisturbed", **LONG)
        subprocess.run([*launcher(), *common], check=True, capture_output=True, timeout=180)
        words = [*train_words(config, place / "run", **LONG), "--resume"]
        # Without this torchrun hands restarted ranks the store of the attempt before, and they look for one
        # another at addresses that are gone.
        fresh = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (place / "log").open("w") as log:
            process = subprocess.Popen([*launcher(restarts=2), *words], stdout=log, stderr=log, env=fresh)
        victim = wait_for_rank(process.pid, place / "run")
        os.kill(victim, signal.SIGKILL)
        if code := process.wait(timeout=180):
            raise AssertionError(f"torchrun ended with {code}")
        if wrong := differences(place / "run", place / "undisturbed"):
            raise AssertionError("; ".join(wrong))
    return Row(
        "a rank dies under torchrun",
        "SIGKILL of one of two ranks, --max-restarts 2, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        times,
        "elastic restarted both, --resume continued: the undisturbed end of two ranks",
    )


def launcher(restarts: int = 0) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", str(restarts), "-m", "deeploop"]  # fmt: skip


def wait_for_rank(agent: int, out: Path) -> int:
    """The process of a rank, once the run has saved something."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        if children and last_checkpoint(out) is not None:
            return int(children[-1])
        time.sleep(0.01)
    raise AssertionError("no rank saved anything")


def together(folder: Path, times: int) -> Row:
    """Two of everything at once, into one folder."""
    # A sweep's cells are processes that import everything anew: too slow for the short version.
    names = [name for name in TOGETHER if times > 1 or name != "sweep"]
    for name in names:
        for index in range(times):
            TOGETHER[name](folder, index)
    return Row(
        "two commands at once",
        f"{', '.join(names)}: each twice at the same time into one folder, {times} times",
        times * len(names),
        "both finished, or one was refused in one line; every file left is whole",
    )


def interrupted(folder: Path, times: int) -> Row:
    """SIGKILL of commands other than training, at random moments; the same command again."""
    names = [name for name in VICTIMS if times > 1 or name in QUICK]
    for name in names:
        kill_midway(folder, name, times)
    return Row(
        "SIGKILL of other commands",
        f"{', '.join(names)}: each killed {times} times at a random moment",
        times * len(names),
        "no worker outlived its command; the same command again reached the undisturbed end",
    )


def threads(folder: Path, times: int) -> Row:
    """Each resume computes with another number of threads."""
    reference = [record["loss"] for record in read_metrics(undisturbed(), "train")]
    furthest = 0.0
    for index in range(times):
        config, log = small_config(folder, f"threads-{index}"), folder / "threads.log"
        kill_at(config, STEPS // 2, log)

        def with_two(config: TrainConfig = config) -> None:
            torch.set_num_threads(2)
            train(config)

        if code := finish(start(with_two, log)):
            raise AssertionError(f"exit {code}: {log.read_text()[-600:]}")
        losses = [record["loss"] for record in read_metrics(config.out, "train")]
        furthest = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        if furthest > 1e-6:
            raise AssertionError(f"the losses differ by {furthest}")
    return Row(
        "another number of threads",
        "killed on one thread, resumed on two",
        times,
        f"the undisturbed losses within {1e-6:g} (here within {furthest:g})",
    )


# name → scenario, times in the short version (part of the tests), times in `make faults`
SCENARIOS: dict[str, tuple[Callable[[Path, int], Row], int, int]] = {
    "together": (together, 1, 10),
    "interrupted": (interrupted, 1, 3),
    "kills": (kills, 6, 120),
    "terminations": (terminations, 1, 10),
    "damaged checkpoints": (damaged_checkpoints, 2, 20),
    "full disk": (full_disk, 1, 5),
    "shards": (shards, 3, 12),
    "second run": (second_run, 1, 10),
    "clock": (clock, 1, 5),
    "non-finite": (non_finite, 1, 5),
    "elastic": (elastic, 0, 3),
    "threads": (threads, 1, 5),
}
