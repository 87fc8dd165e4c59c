"""The exit codes of `deeploop`, which a sweep decides by, and the error that has one of its own.

0    done
1    some of the work failed (cells of a sweep), or a defect of ours, with a traceback
2    a mistake in what was asked for or in a file: one line on stderr
75   a device's memory is full: one line too; beside fewer neighbours the same command may work
130  interrupted by Ctrl-C, after a training has saved; or cells of a sweep are left: run it again
143  a training was stopped by SIGTERM, and has saved (129: by SIGHUP)
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

MISTAKE = 2
OUT_OF_MEMORY = 75  # EX_TEMPFAIL of sysexits.h: worth another try
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
STOPPED = frozenset((INTERRUPTED, TERMINATED, 128 + signal.SIGHUP))
"""Exit codes of a process that was asked to stop: it has not failed, and the same command continues it."""


class OutOfDeviceMemory(RuntimeError):
    """A device has no memory left; the message says what to try."""


@contextmanager
def memory_advice(options: str) -> Iterator[None]:
    """Turns torch's errors about a full device into one line that names the options to try."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfDeviceMemory(f"the GPU's memory is full; try {options}") from None


def is_out_of_memory(error: RuntimeError) -> bool:
    """By torch's allocator, the driver or cuBLAS; the last two say so in their text alone."""
    said = any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
    return said or type(error).__name__ == "OutOfMemoryError"  # torch's, which need not be imported for this
