"""``actorpp`` with the fake engine, as a process: python fake_main.py run … ; tells on stderr what it has reached.

FAKE_HOLD names the point at which the engine stops going on, FAKE_STUBBORN makes its end take for ever, FAKE_TOKENIZER
is a tokenizer.json, FAKE_NOISE makes a child process write to stdout.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import actorpp.cli.run
from actorpp.cli.main import main
from actorpp.config import EngineConfig
from actorpp.serving.api import OnStartup
from actorpp.serving.tokenizer import TextCodec
from tests.unit.serving.fakes import ANSWER, FakeCheckpoint, FakeEngine


class TellingEngine(FakeEngine):
    def __init__(self, config: EngineConfig, *, on_startup: OnStartup | None = None, trace: bool = False) -> None:
        tokenizer = Path(os.environ["FAKE_TOKENIZER"])
        super().__init__(config, on_startup, trace, checkpoint=FakeCheckpoint(tokenizer))
        ids = TextCodec(tokenizer).encode(ANSWER, add_special_tokens=False)
        self.answer = lambda prompt_ids: ids
        self.hold = frozenset(os.environ.get("FAKE_HOLD", "").split())

    async def at(self, name: str, or_when: asyncio.Event | None = None) -> None:
        if name in self.hold:
            print(f"reached {name}", file=sys.stderr, flush=True)
        await super().at(name, or_when)

    async def __aenter__(self) -> FakeEngine:
        if "FAKE_NOISE" in os.environ:
            subprocess.run(["echo", "noise from a child"], check=True)  # noqa: ASYNC221
            print("noise from ourselves")
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        if "FAKE_STUBBORN" in os.environ:
            print("reached end", file=sys.stderr, flush=True)
            await asyncio.shield(asyncio.Event().wait())
        await super().__aexit__(*exc_info)
        print("engine ended", file=sys.stderr, flush=True)


actorpp.cli.run.Engine = TellingEngine  # type: ignore[misc,assignment]

if __name__ == "__main__":
    main()
