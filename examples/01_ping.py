"""Two actors play ping-pong: typed messages, a reply, and a result that is awaited."""

from __future__ import annotations

import asyncio

from actorpp.runtime import Actor, ActorSystem, Address, Inbox, Request


class Ball(Request[str], frozen=True):
    """Asks the other player to return the ball."""

    stroke: int


class Wall(Actor):
    """Returns every ball."""

    balls = Inbox[Ball](capacity=8)

    @balls.handler
    async def on_ball(self, ball: Ball) -> str:
        return f"pong {ball.stroke}"


class Player(Actor):
    """Serves three balls at an opponent. Its main task is its own; when it returns, the actor has finished."""

    def __init__(self, opponent: Address[Ball]) -> None:
        self.opponent = opponent

    async def run(self) -> None:
        for stroke in range(1, 4):
            reply = await self.opponent.ask(Ball(stroke), timeout=1.0)  # a str: type checkers know
            print(f"{self.name}: ping {stroke} -> {reply}")


async def main() -> None:
    async with ActorSystem("ping") as system:
        wall = await system.spawn(Wall, name="wall")
        player = await system.spawn(lambda: Player(wall[Wall.balls]), name="player")
        ended = await player.join()
        print(f"{player.name} has {ended.reason}")


if __name__ == "__main__":
    asyncio.run(main())
