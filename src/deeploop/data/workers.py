"""Work done in parallel whose results come in order, so that the output never depends on the workers."""

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
    """`map` in a pool, which it closes at the end; reads only some `ahead` items ahead of the results."""
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
    """Ends this process when its parent has gone, by SIGKILL too: it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def process_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """`map` in processes, in order; in this process if there is one worker."""
    if workers == 1:
        yield from map(function, items)
        return
    # Forking a process that has threads, as torch's have, can hang the child.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_die_with_parent)
    yield from ordered_map(pool, function, items, ahead=2 * workers)
