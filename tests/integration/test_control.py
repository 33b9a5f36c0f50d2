"""The sockets between driver and stages on TCP: encrypted, and closed to everybody without the run's key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.serving.api import Finished, GenerationParams, Tokens
from actorpp.transport.curve import CurveKeys
from actorpp.transport.sockets import close_context
from tests.exactness.tiny import save_llama
from tests.unit.transport.test_curve import REFUSED, handshake


@pytest.fixture(autouse=True)
def _end_of_context() -> Iterator[None]:
    """The engines' ZeroMQ context belongs to this process: its threads and descriptors go with the test."""
    yield
    close_context()


def test_control_over_tcp_is_for_those_with_the_key_of_the_run(tmp_path: Path) -> None:
    save_llama(tmp_path, layers=2)
    answers: list[tuple[int, ...]] = []

    async def main(control_host: str | None) -> None:
        config = EngineConfig(model=str(tmp_path), stages=2, kv_tokens=256, control_host=control_host, dtype="float32")
        async with Engine(config) as engine:
            ids: list[int] = []
            async for event in engine.submit([5, 6, 7, 8], GenerationParams(max_tokens=4, ignore_eos=True)):
                match event:
                    case Tokens(new):
                        ids += new
                    case Finished(reason):
                        assert reason == "length"
            answers.append(tuple(ids))
            wiring = engine._stages._ports._wiring  # type: ignore[attr-defined]
            assert wiring.driver.startswith("ipc://" if control_host is None else "tcp://127.0.0.1:")
            if control_host is not None:
                stranger = CurveKeys.generate()
                for keys in (stranger, None):
                    server = wiring.curve_client.server
                    assert await asyncio.to_thread(handshake, wiring.driver, keys, server) & REFUSED

    for control_host in (None, "127.0.0.1"):
        asyncio.run(main(control_host))
    assert answers[0] == answers[1]
