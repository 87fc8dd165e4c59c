"""Progress of a run: seconds spent in its steps, and a progress bar."""

import sys
import time
from dataclasses import dataclass, field

from tqdm import tqdm

from deeploop.terminal import printable

LINE_SECONDS = 10  # at least, between two printed lines
MOST_LINES = 100  # printed for the steps of a run
ESTIMATE_AFTER = 3  # seconds of steps before the time left is estimated
LEAST_ESTIMATE = 30  # seconds; a shorter time left is not announced
LEAST_VALIDATION = 3  # seconds; the progress of shorter validations is not shown


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
        self._began = self._line_time = self._validation_began = time.monotonic()
        self._line_step = done
        self._postfix = ""
        self._first_step_end: float | None = None
        self._has_announced = False

    def step(self, loss: float, rate: float, tokens_per_s: float | None) -> None:
        """Count a step, and show its loss if `tokens_per_s` is given, which it is where a line is logged."""
        self._bar.update()
        self._step += 1
        self._announce_time()
        if tokens_per_s is None:
            return
        parts = f"loss {loss:.3f}", f"lr {rate:.1e}", f"{_thousands(tokens_per_s)} tok/s"
        self._postfix = ", ".join(parts)
        self._bar.set_postfix_str(self._postfix, refresh=False)
        is_due = MOST_LINES * (self._step - self._line_step) >= self._total
        if is_due and self._print_line("  ".join([*parts, f"{self._time_left()} left"])):
            self._line_step = self._step

    def _announce_time(self) -> None:
        """Print once how long the run will take, from the steps after the first one, which compiles."""
        now = time.monotonic()
        if self._first_step_end is None:
            self._first_step_end = now
        elapsed = now - self._first_step_end
        if self._has_announced or elapsed < ESTIMATE_AFTER:
            return
        self._has_announced = True
        steps_left = self._total - self._step
        seconds = steps_left * elapsed / (self._step - self._first - 1)
        if seconds > LEAST_ESTIMATE:
            self.say(f"{'time:':<10} about {hours_minutes_seconds(seconds)} left for {steps_left:,} steps")

    def validating(self, share: float) -> None:
        """Show the share of a validation that is done, from 0 to 1."""
        now = time.monotonic()
        if share == 0:
            self._validation_began = now
        elapsed = now - self._validation_began
        if elapsed < LEAST_VALIDATION:
            return
        if share == 1:
            self._bar.set_postfix_str(self._postfix)
            return
        text = f"validating: {share:.0%} done, {hours_minutes_seconds(elapsed * (1 / share - 1))} left"
        self._bar.set_postfix_str(text)
        self._print_line(text)

    def _print_line(self, text: str) -> bool:
        """Print a text after the step, at most once in LINE_SECONDS; return True if printed."""
        now = time.monotonic()
        if not self._prints_steps or now - self._line_time < LINE_SECONDS:
            return False
        self._line_time = now
        self.say(f"step {self._step}/{self._total}  {text}")
        return True

    def _time_left(self) -> str:
        """Estimate the time left at the pace so far, with validations and saves."""
        pace = (time.monotonic() - self._began) / (self._step - self._first)
        return hours_minutes_seconds((self._total - self._step) * pace)

    def say(self, text: str) -> None:
        """Print a text above the bar."""
        if not self._shown:
            return
        try:
            tqdm.write(printable(text, keep="\n\t"))
            sys.stdout.flush()  # a log is read while it grows
        except BrokenPipeError:  # the reader has exited (`| head`); the run continues
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
