"""Sends, closes with a flush and ends: flush.py ENDPOINT COUNT."""

from __future__ import annotations

import asyncio
import sys

from actorpp.transport.sockets import Dealer, close_context


async def main() -> None:
    dealer = Dealer(sys.argv[1], b"stage-0#1", print, print, outbox=10_000)
    for i in range(int(sys.argv[2])):
        dealer.send([str(i).encode(), bytes(2000)])
    await dealer.close(flush_s=30)


asyncio.run(main())
close_context()
