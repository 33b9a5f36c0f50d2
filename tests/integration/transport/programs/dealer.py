"""A process that talks to a Router: dealer.py ENDPOINT IDENTITY LOOP. Answers each message with the same frames."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import uvloop

from actorpp.transport.process import leave_with_parent
from actorpp.transport.sockets import Dealer
from actorpp.transport.wire import Frame


async def main(endpoint: str, identity: str) -> None:
    done = asyncio.Event()

    def answer(frames: list[bytes]) -> None:
        if frames == [b"stop"]:
            done.set()
        else:
            dealer.send(frames)

    def dead_letter(frames: Sequence[Frame], reason: str) -> None:
        print("dead letter", reason)

    dealer = Dealer(endpoint, identity.encode(), answer, dead_letter, outbox=1000)
    dealer.send([b"hello", str(os.getpid()).encode()])
    await done.wait()
    await dealer.close()
    print("done")


leave_with_parent()
runner = uvloop.run if sys.argv[3] == "uvloop" else asyncio.run
runner(main(sys.argv[1], sys.argv[2]))
