"""Requests to stop, made by signals: the run saves and ends between two steps."""

import signal
from types import FrameType, TracebackType

from deeploop.exits import TERMINATED


class StopRequest:
    """Turns the first SIGTERM, SIGHUP or Ctrl-C into a request that the loop reads between two batches.

    A second Ctrl-C acts as usual. A second SIGTERM is ignored: schedulers and `torchrun` both forward theirs,
    and the save must survive that.
    """

    def __init__(self) -> None:
        self.requested = False
        self.exit_code = TERMINATED
        """Exit code of a command that stops for it; under torchrun another rank may have had the signal."""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.exit_code = True, 128 + number
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])  # type: ignore[arg-type]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
