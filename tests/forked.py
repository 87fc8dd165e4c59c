"""Processes that are forked from the test's, so that nothing is imported again: to be stopped and killed."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm


def start(work: Callable[[], object], log: Path, errors: Path | None = None) -> int:
    """Run `work` in a process of its own and return its id; an int that `work` returns is the exit code.

    Its stderr goes to `errors`, or to the log.
    """
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        for path, number in ((log, 1), (errors or log, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))  # not a test's capture
        torch.set_num_threads(1)
        # Its own lock would be shared by all forks, and one killed while it holds it stops those after it.
        tqdm.set_lock(threading.RLock())
        result = work()
        code = result if isinstance(result, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(pid: int, seconds: float = 120.0) -> int:
    """Wait for a process and return its exit code, negative for a signal."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} was still running after {seconds:.0f} s")


def wait_until(holds: Callable[[], object], pid: int, seconds: float = 60) -> None:
    """Wait for something that a process does before it ends."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline or os.waitpid(pid, os.WNOHANG)[0]:
            raise AssertionError("the run ended before it could be disturbed")
        time.sleep(0.002)
