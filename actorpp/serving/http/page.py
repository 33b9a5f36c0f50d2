"""The live page at ``/``: its files, and the events that feed it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
from fastapi import FastAPI
from starlette.responses import FileResponse, Response

from actorpp.serving.http.connection import EventStream
from actorpp.serving.http.runs import Runs
from actorpp.serving.live import Live

INTERVAL_S = 0.25
FOLDER = Path(__file__).with_name("live")
HEADERS = {
    # Nothing comes from anywhere else, and the page goes nowhere else.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, live: Live, runs: Runs) -> None:
    """Add the page's routes."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    for name in ("live.css", "live.js", "gantt.js", "charts.js"):
        path = FOLDER / name

        async def file(path: Path = path) -> Response:
            return FileResponse(path, headers=HEADERS)

        app.add_api_route(f"/live/{name}", file, methods=["GET"], include_in_schema=False)

    @app.get("/live/events", include_in_schema=False)
    async def events() -> Response:
        return EventStream(_snapshots(live, runs), keep_alive_s=0, on_end=lambda: None)


async def _snapshots(live: Live, runs: Runs) -> AsyncGenerator[bytes]:
    """First what does not change, then what does, a few times a second, until the server stops."""
    yield _event("about", live.about())
    step, since = -1, 0.0
    while not runs.stopped.is_set():
        snapshot = live.snapshot(step, since)
        if snapshot["steps"]:
            step = snapshot["steps"][-1][0]
        since = snapshot["now"] - 1.5  # the last second's rate is not whole yet: it is sent again
        yield _event("snapshot", snapshot)
        try:
            async with asyncio.timeout(INTERVAL_S):
                await runs.stopped.wait()
        except TimeoutError:
            continue


def _event(name: str, content: dict[str, object]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
