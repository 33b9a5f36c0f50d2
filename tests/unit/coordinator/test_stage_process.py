"""StageProcess in virtual time, with a stage that only notes what it is sent."""

from __future__ import annotations

import asyncio

from actorpp.coordinator.stage_process import StageProcess
from actorpp.runtime import ActorSystem
from actorpp.stages.messages import DriverToStage, Hello, Ping, StageToDriver
from actorpp.testing import run


class Noted:
    """A port to a stage that never ends by itself."""

    def __init__(self) -> None:
        self.sent: list[DriverToStage] = []

    def send(self, message: DriverToStage) -> None:
        self.sent.append(message)

    async def exited(self) -> str:
        return await asyncio.Future()

    async def kill(self) -> None:
        pass


def test_a_stage_is_sent_nothing_before_its_first_word() -> None:
    """Its socket is there earlier than the actor behind it."""

    async def main() -> None:
        port = Noted()

        async def launch(deliver: object) -> Noted:
            return port

        async with ActorSystem() as system:
            process = StageProcess(
                0,
                launch,
                watchdog_s=3.0,
                on_output=lambda output: None,
                on_lost=lambda error: None,
                on_epoch_lost=lambda epoch, error: None,
                on_hello=lambda hello: None,
                on_counters=lambda counters: None,
                on_progress=lambda stage, done, total: None,
            )
            ref = await system.spawn(lambda: process)
            await asyncio.sleep(60.0)
            assert port.sent == []
            hello: StageToDriver = Hello(0, 0, 1, "ipc://inlet")
            process.deliver(hello)
            await asyncio.sleep(2.5)
            assert [type(message) for message in port.sent] == [Ping, Ping]
            await system.kill(ref)

    run(main)
