"""Runs as processes beside one another, one thread each, with their progress in the terminal."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen

from tqdm import tqdm

from deeploop.config.json import to_dict
from deeploop.exits import STOPPED
from deeploop.files import write_json
from deeploop.report.endings import log_file
from deeploop.runs.folder import changes_since, read_ending
from deeploop.sweep.launch import note_exit, start
from deeploop.tasks.iterate.config import IterateTrainConfig
from deeploop.train.metrics import last_lines
from deeploop.train.stop import StopRequest

POLL_SECONDS = 0.5
LINE_SECONDS = 15
BAR = "{desc} {percentage:3.0f}% |{bar:12}| {n:,}/{total:,}, {remaining} left{postfix}"


def is_finished(config: IterateTrainConfig) -> bool:
    """Whether a run is there and done; one with other settings is not touched."""
    if not (config.out / "run.json").exists():
        return False
    if changed := changes_since(config):
        name, old, new = changed[0]
        raise ValueError(
            f"{config.out}: holds a run with {name}={old}, this demo has {new}; choose another --out"
        )
    return (read_ending(config.out) or {}).get("how") == "finished"


def train_beside(
    configs: Mapping[str, IterateTrainConfig], meanwhile: Callable[[], None] | None = None
) -> None:
    """Trains what is not finished, all at once; `meanwhile` is done in this process.

    Ctrl-C lets all of them save; KeyboardInterrupt then ends the demo, and the same command goes on.
    """
    left = {name: config for name, config in configs.items() if not is_finished(config)}
    with StopRequest() as stop:
        working: dict[str, Popen[bytes]] = {}
        board = Progress(left)
        try:
            for name, config in left.items():
                working[name] = start_run(config)
            if meanwhile is not None:
                meanwhile()
            while any(work.poll() is None for work in working.values()):
                if stop.requested:
                    board.close()
                    _stop(working)
                    raise KeyboardInterrupt
                board.show()
                time.sleep(POLL_SECONDS)
            board.show(last=True)
        except BaseException:
            for work in working.values():
                if work.poll() is None:
                    work.kill()
            raise
        finally:
            board.close()
    for name, work in working.items():
        _check(name, configs[name].out, work)


def start_run(config: IterateTrainConfig) -> Popen[bytes]:
    """`deeploop train` of a config, with one thread; what it prints is in a log beside the run."""
    file = config.out.with_name(f"{config.out.name}.config.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, to_dict(config))
    command = [sys.executable, "-m", "deeploop", "train", "--config", str(file), "--resume"]
    try:
        return start(command, config.out, {"OMP_NUM_THREADS": "1"})
    except BlockingIOError:
        raise ValueError(f"{config.out}: another demo trains it now; wait for it, or give --out") from None


def _stop(working: Mapping[str, Popen[bytes]]) -> None:
    print("\nstopping: saving; the same command goes on from here", flush=True)
    for work in working.values():
        if work.poll() is None:
            work.terminate()
    for work in working.values():
        work.wait()


def _check(name: str, run: Path, work: Popen[bytes]) -> None:
    code = work.returncode
    failed = code not in (0, *STOPPED)
    error = note_exit(run, code, failed=failed)
    if failed:
        raise ValueError(f"{name}: {error}; its log: {log_file(run)}")
    if (read_ending(run) or {}).get("how") != "finished":
        raise KeyboardInterrupt  # told to stop by somebody else: it saved


class Progress:
    """A bar per run in a terminal, a line per run now and then elsewhere; both read the runs' metrics."""

    def __init__(self, configs: Mapping[str, IterateTrainConfig]) -> None:
        self._configs = configs
        self._width = max(map(len, configs), default=0)
        self._bars = {
            name: tqdm(
                total=config.optim.steps,
                initial=standing(config)[0],
                desc=name.ljust(self._width),
                bar_format=BAR,
                dynamic_ncols=True,
                disable=None,
            )
            for name, config in configs.items()
        }
        self._prints = any(bar.disable for bar in self._bars.values())
        self._due = time.monotonic() + LINE_SECONDS

    def show(self, *, last: bool = False) -> None:
        """The bars, or lines if they are due; the last ones have the evaluation after the last step."""
        due = self._prints and (last or time.monotonic() >= self._due)
        for name, config in self._configs.items():
            step, text = standing(config)
            bar = self._bars[name]
            if not bar.disable:
                bar.n = step
                bar.set_postfix_str(text)
            elif due:
                print(f"{name:<{self._width}}  step {step:>5}/{config.optim.steps}  {text}", flush=True)
        if due:
            self._due = time.monotonic() + LINE_SECONDS

    def close(self) -> None:
        if not self._prints:
            self.show()
        for bar in self._bars.values():
            bar.close()


def standing(config: IterateTrainConfig) -> tuple[int, str]:
    """How far a run is, and its last accuracies with their step, or its loss before there are any."""
    train, validation = last_lines(config.out)
    if not train:
        return 0, "starting"
    last = train[0]
    if not validation.get("step"):
        return last["step"], f"loss {last['loss']:.3f}"
    shares = zip(validation["steps"], validation["cells_by_steps"], strict=True)
    text = ", ".join(f"{share:.0%} after {h} steps" for h, share in shares)
    return last["step"], f"cells right at step {validation['step']}: {text}"
