"""A driver with two children, started from a thread that ends: it says their pids and waits to be killed."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

from actorpp.transport.process import ChildProcess


async def main() -> None:
    ready: asyncio.Queue[str] = asyncio.Queue()
    program = Path(__file__).with_name("child.py")
    children = [ChildProcess([sys.executable, str(program), how], on_line=ready.put_nowait) for how in sys.argv[1:]]
    for _ in children:
        await ready.get()
    print("children", *(child.pid for child in children), flush=True)


thread = threading.Thread(target=lambda: asyncio.run(main()))
thread.start()
thread.join()
print("thread ended", os.getpid(), flush=True)
threading.Event().wait()
