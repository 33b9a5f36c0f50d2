"""Work on texts beside the loop: in few threads, and so that short texts never wait behind long ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

# Texts that are worked on at once, of each kind; more wait, so that many long texts leave cores to the stages.
LONG_THREADS = 2
SHORT_THREADS = 1

SHORT = 65_536  # characters or bytes: milliseconds of work

T = TypeVar("T")


class OffLoop:
    """Runs functions in its threads. ``close`` when done."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="tokenizer")
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="tokenizer-short")
        self._running: set[Future[Any]] = set()

    async def run(self, work: Callable[[], T], size: int) -> T:
        """The result of ``work()``, on about ``size`` characters. Cancelling leaves running work to itself."""
        running = (self._short if size <= SHORT else self._long).submit(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Leave no thread behind, but do not wait for a long text that nobody wants any more."""
        for threads in (self._long, self._short):
            threads.shutdown(wait=not self._running, cancel_futures=True)
