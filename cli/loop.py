"""Runs an asyncio main function so that a signal always ends it, and soon.

The first SIGINT or SIGTERM cancels the main task; what has not ended after the grace, or at a second signal, is ended
with the process (stages leave by themselves when the driver is gone).
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


def run(main: Callable[[], Coroutine[Any, Any, int]], *, grace: float) -> int:
    """Run ``main()`` in a new loop. Returns its result, or 128 + N when signal N ended it within ``grace`` seconds."""
    received: list[int] = []

    async def guarded() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal(number: int, frame: FrameType | None) -> None:
            # A handler of Python's, not of the loop's: it also runs while a callback holds the loop up.
            if received:
                _leave(128 + received[0])
            received.append(number)
            timer = threading.Timer(grace, _leave, (128 + number,))
            timer.daemon = True
            timer.start()
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

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
