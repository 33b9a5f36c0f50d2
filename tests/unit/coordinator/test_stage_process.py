"""StageProcess in virtual time, with a stage that only notes what it is sent."""

from __future__ import annotations

import asyncio

from actorpp.coordinator.stage_process import StageEnd, StageProcess
from actorpp.runtime import ActorSystem
from actorpp.stages.messages import DriverToStage, Hello, Ping, Pong, StageToDriver
from actorpp.testing import run


class Noted:
    """A port to a stage that never ends by itself."""

    def __init__(self) -> None:
        self.sent: list[DriverToStage] = []

    def send(self, message: DriverToStage) -> None:
        self.sent.append(message)

    async def exited(self) -> StageEnd:
        return await asyncio.Future()

    async def kill(self) -> None:
        pass


def process_of(port: Noted, ahead: list[float]) -> StageProcess:
    async def launch(deliver: object) -> Noted:
        return port

    return StageProcess(
        0,
        launch,
        watchdog_s=3.0,
        on_output=lambda output: None,
        on_lost=lambda error: None,
        on_epoch_lost=lambda epoch, error: None,
        on_hello=lambda hello: None,
        on_counters=lambda counters: None,
        on_progress=lambda stage, done, total: None,
        on_clock=ahead.append,
    )


def test_the_quickest_answer_says_how_far_the_clock_is_ahead_unless_it_may_be_the_same() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        for skew in (0.0, 10.0, -10.0):
            port, ahead = Noted(), list[float]()
            process = process_of(port, ahead)
            async with ActorSystem() as system:
                ref = await system.spawn(lambda process=process: process)  # type: ignore[misc]
                process.deliver(Hello(0, 0, 1, "ipc://inlet"))
                for there, back in ((0.3, 0.1), (0.01, 0.02), (0.4, 0.0)):
                    pings = len(port.sent)
                    while len(port.sent) == pings:  # noqa: ASYNC110 - virtual time: the sleep costs nothing
                        await asyncio.sleep(0.001)
                    await asyncio.sleep(there)
                    now = clock() + skew
                    await asyncio.sleep(back)
                    process.deliver(Pong(pings + 1, now))
                    await asyncio.sleep(0)
                await system.kill(ref)
            errors = [abs(told - skew) for told in ahead]
            assert [error <= bound for error, bound in zip(errors, (0.11, 0.006, 0.006), strict=True)] == [True] * 3
            assert skew or ahead == [0.0] * 3

    run(main)


def test_a_stage_is_sent_nothing_before_its_first_word() -> None:
    """Its socket is there earlier than the actor behind it."""

    async def main() -> None:
        port = Noted()

        async with ActorSystem() as system:
            process = process_of(port, [])
            ref = await system.spawn(lambda: process)
            await asyncio.sleep(60.0)
            assert port.sent == []
            hello: StageToDriver = Hello(0, 0, 1, "ipc://inlet")
            process.deliver(hello)
            await asyncio.sleep(2.5)
            assert [type(message) for message in port.sent] == [Ping, Ping]
            await system.kill(ref)

    run(main)
