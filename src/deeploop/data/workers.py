"""Parallel maps that return results in order, so that the output does not depend on the number of workers."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Generator[Result, None, None]:
    """Map in a pool, reading at most `ahead` items ahead of the results; shut the pool down at the end."""
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _die_with_parent() -> None:
    """End this process when its parent has died, even by SIGKILL. Otherwise it would wait forever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def process_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Map in processes, in order; in this process if `workers` is 1."""
    if workers == 1:
        yield from map(function, items)
        return
    # Forking a process with threads, such as torch's, can hang the child.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_die_with_parent)
    yield from ordered_map(pool, function, items, ahead=2 * workers)
