"""Stage actors on the loop of a program that exists already: here, a line-based TCP service that completes texts.

With ``transport="inproc"`` the stages are actors of this process. They compute in threads of their own, so the loop
stays free for everything else the program does.
"""

from __future__ import annotations

import asyncio

from actorpp import Engine, EngineConfig, Gateway
from actorpp.serving.completion import Delta
from actorpp.serving.request import CompletionRequest


async def serve_client(gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Each line is a prompt; its continuation is streamed back as one line."""
    async for line in reader:
        request = CompletionRequest(prompt=line.decode().strip(), max_tokens=12)
        async for event in await gateway.complete(request):
            if isinstance(event, Delta):
                writer.write(event.text.replace("\n", " ").encode())
        writer.write(b"\n")
    writer.close()
    await writer.wait_closed()


async def count_ticks(ticks: list[float]) -> None:
    """Something else that the loop does meanwhile."""
    while True:
        await asyncio.sleep(0.02)
        ticks.append(asyncio.get_running_loop().time())


async def main() -> None:
    config = EngineConfig(stages=3, transport="inproc", threads_per_stage=1)
    async with Engine(config) as engine, Gateway(engine, "default") as gateway:
        server = await asyncio.start_server(lambda r, w: serve_client(gateway, r, w), "127.0.0.1", 0)
        ticks: list[float] = []
        ticking = asyncio.create_task(count_ticks(ticks))
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for prompt in ("The capital of France is", "One, two, three,"):
                writer.write(f"{prompt}\n".encode())
                print(prompt + (await reader.readline()).decode().rstrip())
            writer.close()
            await writer.wait_closed()
        ticking.cancel()
        busy = ", ".join(f"{stage.busy:.0%}" for stage in engine.stats().stages)
        print(f"busy per stage {busy}; the loop ticked {len(ticks)} times meanwhile")


if __name__ == "__main__":
    asyncio.run(main())
