"""Protocol ACTORPP/1 as types and limits: headers, bodies, and how token ids travel.

docs/protocol.md explains it. No sockets and no operations here.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actorpp.errors import InvalidRequestError
from actorpp.serving.request import MAX_PROMPT_TOKENS
from actorpp.transport.wire import Envelope, Frame, Limits

VERSION, MINOR = 1, 0
WIRE_LIMITS = Limits(
    max_frames=8, max_header_bytes=4096, max_body_bytes=16 << 20, max_buffer_bytes=4 * MAX_PROMPT_TOKENS, max_depth=16
)
MAX_OUTSTANDING = 1024  # messages that are being answered, of all clients
MAX_ROUTING_FRAMES = 8  # before the empty frame: a REQ's own request id, and one for each proxy in between
MAX_WAIT_MS = 60_000
MAX_DELTAS_PER_POLL = 65_536

Id = Annotated[str, Meta(min_length=1, max_length=128)] | int
Status = Literal["ok", "more", "end", "error"]


class RequestHeader(msgspec.Struct, frozen=True):
    """``id`` is the client's own and comes back; for submit and generate it names the request on this server."""

    id: Id
    op: Annotated[str, Meta(max_length=64)]
    deadline_ms: Annotated[int, Meta(ge=1, le=7 * 24 * 3600 * 1000)] | None = None

    @property
    def deadline_s(self) -> float | None:
        return None if self.deadline_ms is None else self.deadline_ms / 1000


class ReplyHeader(msgspec.Struct, frozen=True):
    """``id`` is None when the message's own could not be read; ``seq`` counts the replies to one message, from 0."""

    id: str | int | None
    status: Status
    seq: int
    boot: str


class _OnlyId(msgspec.Struct):
    id: Id


class RawTokens(msgspec.Struct, frozen=True):
    """``prompt_tokens_buffer`` is the buffer with the prompt's ids; ``raw_tokens`` asks for ids in a buffer back."""

    prompt_tokens_buffer: Annotated[int, Meta(ge=0, le=16)] | None = None
    raw_tokens: bool = False


class Named(msgspec.Struct, frozen=True):
    """An operation on the request that ``submit`` or ``generate`` started under that id."""

    request: Id


class Poll(Named, frozen=True):
    """What came after ``cursor``; waits up to ``wait_ms`` for there to be something."""

    cursor: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = 0
    raw_tokens: bool = False


class Reply(msgspec.Struct):
    """What an operation answers."""

    body: dict[str, Any]
    status: Status = "ok"
    buffers: tuple[Frame, ...] = ()


Message = Envelope[RequestHeader, dict[str, Any]]


def split_route(frames: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Routing frames, which come back as they are, and the message, which begins at the first empty frame."""
    for index, frame in enumerate(frames[: MAX_ROUTING_FRAMES + 1]):
        if not frame:
            return frames[:index], frames[index:]
    return [], frames


def id_of(frames: list[bytes]) -> str | int | None:
    """The id in a message that is otherwise broken, so that its client can tell which one that was."""
    if len(frames) < 3 or len(frames[2]) > WIRE_LIMITS.max_header_bytes:
        return None
    try:
        return msgspec.msgpack.decode(frames[2], type=_OnlyId).id
    except (msgspec.MsgspecError, RecursionError):
        return None


def ids_of(buffers: tuple[Frame, ...], index: int) -> list[int]:
    """The little-endian int32 ids in a buffer."""
    if index >= len(buffers):
        raise InvalidRequestError(f"prompt_tokens_buffer: no buffer {index}", param="prompt_tokens_buffer")
    if len(buffers[index]) % 4:
        raise InvalidRequestError(f"buffer {index}: not a whole number of int32", param="prompt_tokens_buffer")
    return _swapped(array("i", bytes(buffers[index]))).tolist()


def with_tokens(body: dict[str, Any], ids: tuple[int, ...], *, raw: bool) -> Reply:
    """``body``, in which ``token_ids`` is a list, or with its ids beside it as buffer 0 of little-endian int32."""
    if not raw:
        return Reply(body)
    body.pop("token_ids", None)
    body["token_ids_buffer"] = 0
    return Reply(body, buffers=(_swapped(array("i", ids)).tobytes(),))


def _swapped(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def fingerprint_of(frames: list[bytes]) -> bytes:
    """Tells whether two messages ask for the same: a digest of body and buffers."""
    digest = blake2b(digest_size=16)
    for frame in frames[3:]:
        digest.update(len(frame).to_bytes(8))
        digest.update(frame)
    return digest.digest()
