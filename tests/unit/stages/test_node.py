"""StageNode: what it says of epochs that fail."""

from __future__ import annotations

from collections.abc import Callable

from actorpp.errors import ActorppError, TransportError
from actorpp.stages.host import StageHost
from actorpp.stages.links import Links
from actorpp.stages.messages import StageError, StageToDriver, Topology
from actorpp.stages.node import StageNode
from actorpp.stages.spec import StageSpec
from actorpp.stages.switch import EpochSwitch
from actorpp.stages.trace import SpanRecorder


class Told:
    """A wiring that leads nowhere."""

    def __init__(self) -> None:
        self.messages: list[StageToDriver] = []

    def to_driver(self, message: StageToDriver) -> None:
        self.messages.append(message)

    async def connect(self, topology: Topology, on_failure: Callable[[ActorppError], None]) -> Links:
        raise NotImplementedError

    async def disconnect(self) -> None:
        raise NotImplementedError


def test_what_ends_an_epoch_late_does_not_end_the_next_one() -> None:
    told = Told()
    host = StageHost(StageSpec(stage=0, num_stages=1, lo=0, hi=1, model_path=""))
    node = StageNode(host, told, EpochSwitch(), SpanRecorder(False))
    node.epoch = 2
    node.epoch_failed(1, TransportError("a link of the first epoch broke"))
    assert told.messages == []
    node.epoch_failed(2, TransportError("a link broke"))
    assert told.messages == [StageError(2, "transport_error", "TransportError: a link broke")]
