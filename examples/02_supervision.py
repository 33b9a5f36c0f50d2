"""Let it crash: a supervised actor is restarted, and every message is delivered, failed, or a dead letter."""

from __future__ import annotations

import asyncio
import logging

from actorpp.errors import ActorRestartedError
from actorpp.runtime import Actor, ActorSystem, Inbox, OneForOne, Request, Terminated


class Divide(Request[float], frozen=True):
    """Asks for a / b."""

    a: float
    b: float


class Calculator(Actor):
    """Does not defend itself: a division by zero is a crash."""

    inbox = Inbox[Divide](capacity=8)

    async def started(self) -> None:
        print("calculator: started")

    @inbox.handler
    async def on_divide(self, message: Divide) -> float:
        return message.a / message.b


class Undertaker(Actor):
    """Is told when an actor has ended for good."""

    deaths = Inbox[Terminated](capacity=8)

    @deaths.handler
    async def on_death(self, message: Terminated) -> None:
        print(f"undertaker: {message.ref.name} has {message.reason}, last error: {message.error!r}")


async def main() -> None:
    logging.disable(logging.ERROR)  # crashes are logged with their tracebacks; here we print what we show
    async with ActorSystem("office") as system:
        undertaker = await system.spawn(Undertaker)
        calculator = await system.spawn(
            Calculator, name="calculator", supervision=OneForOne(max_restarts=1, within=60, backoff=0.01)
        )
        system.watch(calculator, undertaker[Undertaker.deaths])
        address = calculator[Calculator.inbox]

        print("6 / 3 =", await address.ask(Divide(6, 3)))
        try:
            await address.ask(Divide(1, 0))
        except ActorRestartedError as error:
            print(f"1 / 0: {error}, because of {error.__cause__!r}")
        print("8 / 2 =", await address.ask(Divide(8, 2)))

        address.tell_nowait(Divide(1, 0))  # one crash too many
        address.tell_nowait(Divide(5, 5))  # queued behind it
        await calculator.join()
    print("restarts:", calculator.restarts)
    print("dead letters:", [letter.message for letter in system.dead_letters.recent])


if __name__ == "__main__":
    asyncio.run(main())
