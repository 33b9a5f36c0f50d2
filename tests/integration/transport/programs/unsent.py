"""Ends with messages unsent: to a peer that is not there, and without closing anything. unsent.py ENDPOINT."""

from __future__ import annotations

import asyncio
import sys

from actorpp.transport.sockets import Dealer


async def main() -> None:
    dealer = Dealer(sys.argv[1], b"stage-0#1", print, print, outbox=100)
    for _ in range(100):
        dealer.send([bytes(1000)])
    print("sent", dealer.backlog, flush=True)


asyncio.run(main())
print("leaving", flush=True)
