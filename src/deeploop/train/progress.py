"""Progress and speed of a run, and their display."""

import sys
import time
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from deeploop.terminal import printable

LINE_SECONDS = 10
PACE_SECONDS = 3  # of steps, until their speed is known
WORTH_SAYING = 30  # seconds left: of a shorter run no estimate is printed
SHORT_SECONDS = 3  # a validation that takes less is not shown
# Dense bf16 peak of the datasheets, FLOP/s: what "utilization" below is a share of.
PEAK_FLOPS = {
    "H200": 989e12,  # a GH200 too
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a device; None if unknown, as for every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def device_name(device: torch.device) -> str:
    """Return the name of a device for display."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_threads()


def cpu_threads() -> str:
    count = torch.get_num_threads()
    return f"{count} CPU thread{'s' * (count != 1)}"


@dataclass
class Clock:
    """Seconds spent in training steps, without validation and saving."""

    total: float = 0.0
    steps: int = 0
    """Steps since the last reading."""
    _since: float = 0.0
    _started: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        elapsed = time.perf_counter() - self._started
        self.total += elapsed
        self._since += elapsed
        self.steps += 1

    def read(self) -> float:
        """Return the steps per second since the last reading."""
        rate = self.steps / self._since if self._since else 0.0
        self.steps, self._since = 0, 0.0
        return rate


class Display:
    """A progress bar with lines above it; silent unless `shown`.

    If the output is not a terminal, a line is printed at intervals instead.
    """

    def __init__(self, *, total: int, done: int, shown: bool, title: str) -> None:
        self._shown = shown
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=title,
            unit="step",
            disable=None if shown else True,
            dynamic_ncols=True,
            smoothing=0.1,
        )
        self._prints_steps = shown and (self._bar.disable or not sys.stdout.isatty())
        self._total, self._first, self._step = total, done, done
        self._began = time.monotonic()
        self._last_line = self._began, done
        self._validation_began, self._postfix = self._began, ""
        self._pace_from: tuple[float, int] | None = None  # when the first step was done, which compiles
        self._has_estimate = False

    def step(self, loss: float, rate: float, tokens_per_s: float | None) -> None:
        """Show a step; the speed is given where a line is logged."""
        self._bar.update()
        self._step += 1
        self._estimate()
        if tokens_per_s is not None:
            known = f"loss {loss:.3f}", f"lr {rate:.1e}", f"{_thousands(tokens_per_s)} tok/s"
            self._postfix = ", ".join(known)
            self._bar.set_postfix_str(self._postfix, refresh=False)
            if self._prints_steps and self._is_line_due():
                self.say("  ".join([f"step {self._step}/{self._total}", *known, f"{self._time_left()} left"]))

    def _estimate(self) -> None:
        """Say once how long the run will take, as soon as steps have a pace."""
        now = time.monotonic()
        if self._pace_from is None:
            self._pace_from = now, self._step
        began, first = self._pace_from
        if self._has_estimate or now - began < PACE_SECONDS:
            return
        self._has_estimate = True
        left = (self._total - self._step) * (now - began) / (self._step - first)
        if left > WORTH_SAYING:
            rest = f"{self._total - self._step:,} steps"
            self.say(f"{'time:':<10} about {hours_minutes_seconds(left)} left for {rest}")

    def validating(self, share: float) -> None:
        """Show the share of a validation that is done, from 0 to 1."""
        now = time.monotonic()
        if share == 0:
            self._validation_began = now
        elapsed = now - self._validation_began
        if share == 0 or elapsed < SHORT_SECONDS:
            return
        if share == 1:
            self._bar.set_postfix_str(self._postfix)
            return
        known = f"validating: {share:.0%} done, {hours_minutes_seconds(elapsed * (1 / share - 1))} left"
        self._bar.set_postfix_str(known)
        if self._prints_steps and now - self._last_line[0] >= LINE_SECONDS:
            self._last_line = now, self._last_line[1]
            self.say(f"step {self._step}/{self._total}  {known}")

    def _is_line_due(self) -> bool:
        """Return True if LINE_SECONDS and a hundredth of the run have passed since the last line."""
        now, (then, step) = time.monotonic(), self._last_line
        due = now - then >= LINE_SECONDS and 100 * (self._step - step) >= self._total
        if due:
            self._last_line = now, self._step
        return due

    def _time_left(self) -> str:
        pace = (time.monotonic() - self._began) / (self._step - self._first)  # with validations and saves
        return hours_minutes_seconds((self._total - self._step) * pace)

    def say(self, text: str) -> None:
        if not self._shown:
            return
        try:
            tqdm.write(printable(text, keep="\n\t"))
            sys.stdout.flush()  # a log is read while it grows
        except BrokenPipeError:  # nobody reads any more (`| head`): the run is worth more than its lines
            self._shown = False

    def close(self) -> None:
        self._bar.close()


def hours_minutes_seconds(seconds: float) -> str:
    """Format seconds as 3:21 or 1:03:21."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _thousands(value: float) -> str:
    return f"{value / 1000:.3g}k" if value >= 1000 else f"{value:.3g}"
