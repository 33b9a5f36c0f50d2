"""Runs an asyncio main function so that a signal always ends it, and soon.

The first SIGINT or SIGTERM cancels the main task; what has not ended after the grace, or at a second signal, is ended
with the process (stages leave by themselves when the driver is gone). With a ``Drain``, SIGTERM asks the main function
to finish what it has begun, and cancels it when that takes too long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, NoReturn

import structlog

from actorpp.eventloop import new_event_loop

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"

_log = structlog.get_logger(__name__)


class Drain:
    """SIGTERM as a wish: ``requested`` is set, and ``timeout`` seconds later the main task is cancelled."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.requested = asyncio.Event()

    def ask(self, task: asyncio.Task[Any]) -> None:
        """Called on the loop: the task shall end by itself, and is cancelled when it has not in time."""
        self.requested.set()
        asyncio.get_running_loop().call_later(self.timeout, task.cancel)


def run(main: Callable[[], Coroutine[Any, Any, int]], *, grace: float, drain: Drain | None = None) -> int:
    """Run ``main()`` in a new loop. Returns its result, or 128 + N when signal N ended it.

    It has ended ``grace`` seconds after SIGINT, and as long after SIGTERM and the time of ``drain``.
    """
    received: list[int] = []

    async def guarded() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal(number: int, frame: FrameType | None) -> None:
            # A handler of Python's, not of the loop's: it also runs while a callback holds the loop up.
            if received:
                _leave(128 + received[0])
            received.append(number)
            wish = drain if number == signal.SIGTERM else None
            timer = threading.Timer(grace + (wish.timeout if wish else 0.0), _leave, (128 + number,))
            timer.daemon = True
            timer.start()
            if loop.is_closed():
                return
            if wish is None:
                loop.call_soon_threadsafe(task.cancel)
            else:
                loop.call_soon_threadsafe(wish.ask, task)

        for number in SIGNALS:
            signal.signal(number, on_signal)
        return await main()

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            code = runner.run(guarded())
    except BaseException as error:
        if not received:
            raise
        _log.info("ended by a signal", number=received[0], cause=repr(error))
    finally:
        if not received:  # else the next signal, or the timer, still ends what hangs on the way out
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 + received[0] if received else code


def _leave(code: int) -> NoReturn:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR.encode())  # a progress bar hides it
    os._exit(code)
