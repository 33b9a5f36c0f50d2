"""An actor inside an asyncio program of your own: here, a scorer with a compute thread behind a plain TCP server."""

from __future__ import annotations

import asyncio

import msgspec

from actorpp.runtime import Actor, ActorSystem, Address, Inbox, Request


class Stats(msgspec.Struct, frozen=True):
    """How many texts have been scored."""

    scored: int


class GetStats(Request[Stats], frozen=True, tag="get_stats"):
    """Asks for Stats; answered at once, also while a text is being scored."""


class Score(Request[float], frozen=True, tag="score"):
    """Asks for the share of distinct words in a text."""

    text: str


def distinct_share(text: str) -> float:
    """Blocking work, as a model would be."""
    words = text.lower().split()
    return len(set(words)) / len(words) if words else 0.0


class Scorer(Actor):
    """Scores texts one at a time, in a thread of its own; the event loop stays free."""

    control = Inbox[GetStats](capacity=8, priority=0)
    texts = Inbox[Score](capacity=64)

    def __init__(self) -> None:
        self.scored = 0

    @control.handler
    def on_control(self, message: GetStats) -> Stats:
        return Stats(self.scored)

    @texts.handler
    async def on_score(self, message: Score) -> float:
        share = await self.offload(distinct_share, message.text)
        self.scored += 1
        return share


async def serve_client(scorer: Address[Score], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ordinary asyncio code that asks the actor."""
    async for line in reader:
        share = await scorer.ask(Score(line.decode().strip()), timeout=10.0)
        writer.write(f"{share:.2f}\n".encode())
    writer.close()
    await writer.wait_closed()


async def main() -> None:
    async with ActorSystem("embedded") as system:
        ref = await system.spawn(Scorer, name="scorer")
        server = await asyncio.start_server(lambda r, w: serve_client(ref[Scorer.texts], r, w), "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(host, port)
            for text in ("to be or not to be", "brevity is the soul of wit"):
                writer.write(f"{text}\n".encode())
                print(f"{text!r} scores {(await reader.readline()).decode().strip()}")
            writer.close()
            await writer.wait_closed()
        print(await ref[Scorer.control].ask(GetStats(), timeout=1.0))


if __name__ == "__main__":
    asyncio.run(main())
