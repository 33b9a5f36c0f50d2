"""The server holds to its own OpenAPI document, whatever comes: requests made from it, and broken ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from actorpp.config import EngineConfig
from actorpp.serving.gateway import Gateway
from tests.unit.serving.fakes import FakeCheckpoint, FakeEngine
from tests.unit.serving.http.support import serving

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.fixture
def url(tokenizer_file: Path) -> Iterator[str]:
    """A server in a thread of its own: schemathesis is synchronous."""
    loop, ready, told = asyncio.new_event_loop(), threading.Event(), list[str]()
    end = asyncio.Event()

    async def main() -> None:
        engine = FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer_file))
        async with engine, Gateway(engine, "tiny") as gateway, serving(gateway) as address:
            told.append(address)
            ready.set()
            await end.wait()
        assert not engine.running

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait()
    yield told[0]
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "broken"])
def test_every_operation_answers_as_the_document_says(url: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/chat/completions", "/health"}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing that could be broken

        @settings(
            max_examples=6 if operation.method == "post" else 2,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def answers(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=30)

        answers()
