"""The live table of a sweep: redrawn in place in a terminal, a line for each event elsewhere."""

import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from deeploop.report.tables import text_table
from deeploop.runs.endings import ENDED, State
from deeploop.sweep.cells import Progress, SweepFolder

HEADER = ("cell", "state", "step", "loss", "validation", "similarity", "verdict", "tokens/s", "time left")
WORDS = {"absent": "waiting"}
# Among too many cells, those a person wants to see first.
ORDER: tuple[State, ...] = ("running", "failed", "stopped", "started", "untrained", "absent", *ENDED)


def rows(cells: Mapping[str, Progress]) -> list[tuple[str, ...]]:
    return [row(name, progress) for name, progress in cells.items()]


def row(name: str, p: Progress) -> tuple[str, ...]:
    """Return a cell's row; – for unknown values."""
    left = p.seconds_left if p.state == "running" else None
    return (
        name,
        WORDS.get(p.state, p.state),
        f"{p.step:,}/{p.steps:,}",
        _number(p.loss, ".3f"),
        _number(p.validation, ".4f"),
        _number(p.similarity, ".2f"),
        p.verdict or "–",
        _number(p.tokens_per_s, ",.0f"),
        "–" if left is None else duration(left),
    )


def summary(cells: Mapping[str, Progress], at_once: int) -> str:
    """Format `3 of 16 cells finished, 2 running; about 12 min left`."""
    states = [p.state for p in cells.values()]
    parts = [f"{sum(state in ENDED for state in states)} of {len(states)} cells finished"]
    parts += [
        f"{count} {WORDS.get(state, state)}"
        for state in ORDER
        if state not in ENDED and (count := states.count(state))
    ]
    left = _seconds_left(cells, at_once)
    return ", ".join(parts) + ("" if left is None else f"; about {duration(left)} left")


def _seconds_left(cells: Mapping[str, Progress], at_once: int) -> float | None:
    """A rough estimate: cells not begun take as long as the running ones on average."""
    running = [p for p in cells.values() if p.state == "running"]
    known = [p for p in running if p.seconds_left is not None]
    if not known:
        return None
    whole = [p.seconds_left * p.steps / max(1, p.steps - p.step) for p in known if p.seconds_left is not None]
    waiting = sum(p.state in ("absent", "untrained", "started", "stopped") for p in cells.values())
    rest = sum(p.seconds_left or 0.0 for p in known) + waiting * sum(whole) / len(whole)
    return rest / max(1, min(at_once, len(running) + waiting))


class LiveTable:
    """Show the cells of a sweep while they run."""

    def __init__(self, sweep: SweepFolder, at_once: int, stream: TextIO | None = None) -> None:
        self._sweep, self._at_once = sweep, at_once
        self._stream = stream or sys.stdout
        self.live = self._stream.isatty()
        self._drawn = 0  # lines to go up before drawing again
        self._due = 0.0
        self._headed = False
        self._said: dict[str, tuple[object, ...]] = {}

    def read(self, running: set[str]) -> dict[str, Progress]:
        return {c.name: self._sweep.progress(c, running=c.name in running) for c in self._sweep.cells}

    def show(self, running: set[str]) -> None:
        if not running:
            self._due = 0.0  # the last look
        elif time.monotonic() < self._due:
            return
        self._due = time.monotonic() + 1.0
        cells = self.read(running)
        if self.live:
            self._redraw(cells)
        else:
            self._say(cells)

    def _redraw(self, cells: dict[str, Progress]) -> None:
        size = shutil.get_terminal_size()
        chosen = sorted(cells, key=lambda name: ORDER.index(cells[name].state))[: max(1, size.lines - 5)]
        shown = {name: p for name, p in cells.items() if name in chosen}
        lines = text_table(HEADER, rows(shown)).splitlines()
        if hidden := len(cells) - len(shown):
            lines.append(f"… {hidden} more")
        lines = [line[: size.columns - 1] for line in [*lines, summary(cells, self._at_once)]]
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        self._stream.write(up + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self._stream.flush()
        self._drawn = len(lines)

    def _say(self, cells: dict[str, Progress]) -> None:
        """Print a line when a cell changes its state or was validated; the header before the first."""
        most = max(p.steps for p in cells.values())
        # Laid out with the header, so that lines printed at different times align.
        widest = row("", Progress("collapsed", most, most, loss=10.0, verdict="collapsed"))
        table = text_table(HEADER[:-1], [line[:-1] for line in (*rows(cells), widest)])
        head, rule, *lines, _ = table.splitlines()
        for line, (name, p) in zip(lines, cells.items(), strict=True):
            news = (p.state, p.validation)
            if news != self._said.get(name) and p.state != "absent":
                begin = "" if self._headed else f"{head}\n{rule}\n"
                print(begin + line, file=self._stream, flush=True)
                self._headed = True
            self._said[name] = news


def duration(seconds: float) -> str:
    """Format a duration: `45 s`, `12 min`, `3 h 20 min`, `4 days 3 h`."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{round(seconds)} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} days {hours % 24} h"


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
