"""The codecs of the three internal sockets: driver to stage, stage to driver, stage to stage."""

from __future__ import annotations

import msgspec

from actorpp.stages.messages import DriverToStage, StageToDriver, StageToStage
from actorpp.transport.wire import Codec, Limits

# A prompt of four million tokens in one Admit; spans of a long trace in one answer.
LIMITS = Limits(max_frames=4, max_body_bytes=16 * 1024 * 1024, max_depth=8)


class Sender(msgspec.Struct, frozen=True):
    """Header of every internal message: who sent it."""

    sender: str


def driver_to_stage() -> Codec[Sender, DriverToStage]:
    return Codec(DriverToStage, Sender, LIMITS)


def stage_to_driver() -> Codec[Sender, StageToDriver]:
    return Codec(StageToDriver, Sender, LIMITS)


def stage_to_stage() -> Codec[Sender, StageToStage]:
    return Codec(StageToStage, Sender, LIMITS)


def spare_id(number: int) -> str:
    """Routing id of a process that may become any stage; then it has that stage's."""
    return f"spare#{number}"


def routing_id(stage: int, incarnation: int) -> str:
    """A restarted stage needs a new id: a ROUTER does not hear a second connection under an old one."""
    return f"stage-{stage}#{incarnation}"
