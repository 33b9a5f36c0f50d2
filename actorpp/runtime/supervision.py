"""Supervision: what to do when an actor crashes. The strategies are data; the Supervisor applies one to its cells.

It restarts and escalates. How an incarnation goes up and down is the Cell's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actorpp.errors import ActorStoppedError, ConfigError
from actorpp.runtime.cell import Cell

log = logging.getLogger("actorpp.runtime")


@dataclass(frozen=True)
class Strategy:
    """Restart at most ``max_restarts`` times in any ``within`` seconds; one crash more is escalated.

    The n-th restart within that time waits ``backoff * 2**(n-1)`` seconds, at most ``max_backoff``.
    """

    max_restarts: int = 3
    within: float = 60.0
    backoff: float = 0.0
    max_backoff: float = 30.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or self.within <= 0 or self.backoff < 0 or self.max_backoff < 0:
            raise ConfigError(f"{self}: max_restarts and backoffs are not negative, within is positive")

    def affected(self, cells: Sequence[Cell], crashed: Cell) -> list[Cell]:
        """The cells to restart, in the order of spawning."""
        return [crashed]


@dataclass(frozen=True)
class OneForOne(Strategy):
    """Restart the actor that crashed."""


@dataclass(frozen=True)
class OneForAll(Strategy):
    """Restart the whole group when one of it crashes."""

    def affected(self, cells: Sequence[Cell], crashed: Cell) -> list[Cell]:
        return list(cells)


@dataclass(frozen=True)
class RestForOne(Strategy):
    """Restart the actor that crashed and those spawned after it in the group."""

    def affected(self, cells: Sequence[Cell], crashed: Cell) -> list[Cell]:
        return list(cells[cells.index(crashed) :])


class Supervisor:
    """Watches over cells spawned together. Without a strategy a crash is escalated at once.

    Args:
        escalate: Called with the cell and its error when no restart will help.
    """

    def __init__(
        self, cells: list[Cell], strategy: Strategy | None, escalate: Callable[[Cell, Exception], None]
    ) -> None:
        self.cells = cells
        self._strategy = strategy
        self._escalate = escalate
        self._ends: asyncio.Queue[tuple[Cell, int]] = asyncio.Queue()
        self._restart_times: deque[float] = deque()
        self._nudged = asyncio.Event()
        for cell in cells:
            cell.ended = self._on_ended

    def _on_ended(self, cell: Cell, incarnation: int) -> None:
        self._ends.put_nowait((cell, incarnation))
        self.nudge()

    def nudge(self) -> None:
        """End those for good that were told to stop and are down, whatever restart is under way."""
        for cell in self._alive():
            if cell.stopping and cell.down:
                self._finish(cell)
        self._nudged.set()

    async def start(self) -> None:
        """Start all cells in order.

        Raises:
            Exception: What a cell's started() raised; those before it have been ended again.
        """
        try:
            for cell in self.cells:
                if cell.stopping:
                    raise ActorStoppedError(f"{cell.name} was stopped before it started")
                cell.start()
                await asyncio.wait([cell.ready])
                if cell.ready.cancelled():
                    raise cell.error() or ActorStoppedError(f"{cell.name} was stopped as it started")
        except BaseException as failure:
            for cell in reversed(self.cells):
                await self._bring_down(cell)
                if (error := cell.error()) is not None and error is not failure:
                    log.error("%s crashed while its group started", cell.name, exc_info=error)
                cell.finish()
            raise

    async def supervise(self) -> None:
        """Until all cells have ended for good."""
        while self._alive():
            try:
                await self._handle(*await self._ends.get())
            except asyncio.CancelledError:  # the loop is closing, which cancels all tasks at once
                for cell in self._alive():
                    cell.request_kill()
                self.nudge()

    async def _handle(self, cell: Cell, incarnation: int) -> None:
        if cell.terminated.done() or cell.incarnation != incarnation:
            return  # it was brought down with its group
        error = cell.error()
        if error is None:
            self._finish(cell)
        elif self._may_restart():
            await self._restart(cell, error)
        else:
            await self._give_up(cell, error)

    def _alive(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.terminated.done()]

    def _may_restart(self) -> bool:
        if self._strategy is None:
            return False
        now = asyncio.get_running_loop().time()
        while self._restart_times and self._restart_times[0] <= now - self._strategy.within:
            self._restart_times.popleft()
        return len(self._restart_times) < self._strategy.max_restarts

    async def _restart(self, crashed: Cell, error: Exception) -> None:
        strategy = self._strategy
        if strategy is None:
            return
        self._restart_times.append(asyncio.get_running_loop().time())
        delay = min(strategy.max_backoff, strategy.backoff * 2 ** (len(self._restart_times) - 1))
        alive = self._alive()
        affected = strategy.affected(alive, crashed)
        log.warning(
            "%s crashed; restarting %s in %g s",
            crashed.name, ", ".join(cell.name for cell in affected), delay, exc_info=error,
        )  # fmt: skip
        for cell in reversed(affected):
            await self._bring_down(cell)
            cell.flush(restarting=True)
            cell.errors = []  # handled: a stop that comes now is no crash
        await self._backoff(delay, affected)
        for cell in affected:
            if not cell.stopping:
                cell.restarts += 1
                cell.start()
                await asyncio.wait([cell.ready])  # one after the other; a failure is the next crash, in the queue

    async def _bring_down(self, cell: Cell) -> None:
        """End the cell's incarnation, if it has one, without ending the cell."""
        if cell.main is not None and not cell.main.done():
            cell.take_down()
            await asyncio.wait([cell.main])
            if (error := cell.error()) is not None:
                log.error("%s failed while it was brought down", cell.name, exc_info=error)

    async def _backoff(self, delay: float, cells: list[Cell]) -> None:
        """Sleep, unless all of these cells are told to stop."""
        loop = asyncio.get_running_loop()
        end = loop.time() + delay
        handle = loop.call_at(end, self._nudged.set)
        while loop.time() < end and not all(cell.stopping for cell in cells):
            self._nudged.clear()
            await self._nudged.wait()
        handle.cancel()

    async def _give_up(self, crashed: Cell, error: Exception) -> None:
        if self._strategy is not None and self._restart_times:
            count, within = len(self._restart_times), self._strategy.within
            error.add_note(f"actor {crashed.name!r} was restarted {count} times within {within:g} s: no more")
        for cell in reversed(self._alive()):
            if cell is not crashed:
                cell.request_kill()
                await self._bring_down(cell)
                self._finish(cell)
        self._finish(crashed)

    def _finish(self, cell: Cell) -> None:
        error = cell.error()
        cell.finish()
        if error is None:
            return
        if cell.stopping and self._strategy is not None:
            log.error("%s crashed while it was stopping", cell.name, exc_info=error)  # no restart is needed
        else:
            self._escalate(cell, error)
