"""Protocol ACTORPP/1 as types and limits: headers, bodies, and how token ids travel.

docs/protocol.md explains it. No sockets and no operations here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from actorpp.errors import InvalidRequestError
from actorpp.serving.request import MAX_PROMPT_TOKENS, TokenId
from actorpp.transport.wire import Frame, Limits

VERSION, MINOR = 1, 1
WIRE_LIMITS = Limits(
    max_frames=8,
    max_header_bytes=4096,
    max_body_bytes=16 << 20,
    max_buffer_bytes=4 * MAX_PROMPT_TOKENS,
    max_depth=16,
    max_items=1 << 18,  # as many ids in a list are decoded in 20 ms; more come in a buffer
)
MAX_OUTSTANDING = 1024  # messages that are being answered, of all clients
MAX_ROUTING_FRAMES = 8  # before the empty frame: a REQ's own request id, and one for each proxy in between
MAX_WAIT_MS = 60_000
MAX_DELTAS_PER_POLL = 65_536
MAX_CREDIT = 256  # what the outbox of one peer holds
HEARTBEAT_MS = 10_000  # how often a client that waits does well to ping: sockets live on when a server hangs
IDS_BUFFERS = {"generate": "prompt_tokens_buffer", "submit": "prompt_tokens_buffer", "detokenize": "token_ids_buffer"}
LONG_LIST = 10_000  # ids that are checked one by one on the loop, at most
INLINE_BYTES = 65_536  # of body and buffers; more is decoded beside the loop

Id = Annotated[str, Meta(min_length=1, max_length=128)] | int
Status = Literal["ok", "more", "end", "error"]


class RequestHeader(msgspec.Struct, frozen=True):
    """The first map of a message to the server.

    Attributes:
        id: The client's own, comes back; for submit and generate it names the request on this server.
        op: The operation.
        deadline_ms: Milliseconds until the answer is of no use any more.
        priority: Among waiting requests lower goes first.
        credit: Of generate: how many replies may come before the client gives more; makes it a stream. Of credit: how
            many more.
        token: Shows that the client is an administrator.
    """

    id: Id
    op: Annotated[str, Meta(max_length=64)]
    deadline_ms: Annotated[int, Meta(ge=1, le=7 * 24 * 3600 * 1000)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    credit: Annotated[int, Meta(ge=1, le=MAX_CREDIT)] | None = None
    token: Annotated[str, Meta(max_length=128)] | None = None

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


class Generate(msgspec.Struct, frozen=True):
    """What a request's body has beside the request: how ids travel, and what a stream tells.

    Attributes:
        prompt_tokens_buffer: The buffer with the prompt's ids.
        raw_tokens: Ids come back in a buffer.
        progress: A stream also tells of the prefill's progress.
    """

    prompt_tokens_buffer: Annotated[int, Meta(ge=0, le=16)] | None = None
    raw_tokens: bool = False
    progress: bool = False


class Detokenize(msgspec.Struct, frozen=True):
    """Asks for the text of ids that are not in a buffer."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]


class Named(msgspec.Struct, frozen=True):
    """An operation on the request that ``submit`` or ``generate`` started under that id."""

    request: Id


class Poll(Named, frozen=True):
    """What came after ``cursor``; waits up to ``wait_ms`` for there to be something."""

    cursor: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = 0
    raw_tokens: bool = False


class Prompted(msgspec.Struct, frozen=True):
    """Asks for the plan of a prompt of so many tokens."""

    prompt_tokens: Annotated[int, Meta(ge=1, lt=2**31)]


class Reply(msgspec.Struct):
    """One message to a client."""

    body: dict[str, Any]
    status: Status = "ok"
    buffers: tuple[Frame, ...] = ()


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A message as operations get it.

    Attributes:
        fields: The body.
        ids: The ids in the buffer that the body names.
        fingerprint: Tells whether two messages ask for the same.
        peer: Who sent it, for as long as its connection lasts.
        peer_type: Its socket's type, like ``REQ``.
        send: Sends a reply before the last one. Raises TransportError when the peer takes no more.
    """

    header: RequestHeader
    fields: dict[str, Any]
    ids: array[int] | None
    fingerprint: bytes
    peer: bytes
    peer_type: str
    send: Callable[[Reply], None]


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


def ids_of(buffers: Sequence[Frame], index: int, param: str) -> array[int]:
    """The little-endian int32 ids in a buffer, in one piece: a million of them take milliseconds.

    Raises:
        InvalidRequestError: There is no such buffer, or what it holds are no ids.
    """
    if not 0 <= index < len(buffers):
        raise InvalidRequestError(f"{param}: no buffer {index}", param=param)
    if len(buffers[index]) % 4:
        raise InvalidRequestError(f"{param}: buffer {index} is not a whole number of int32", param=param)
    ids = np.frombuffer(buffers[index], dtype="<i4")
    if ids.size and ids.min() < 0:
        raise InvalidRequestError(f"{param}: buffer {index} holds a negative id", param=param)
    return array("i", ids.astype("=i4", copy=False).tobytes())


def ids_of_list(ids: object) -> array[int] | None:
    """A long list of ids in one piece; None for anything else, which is checked field by field as everything is."""
    if not isinstance(ids, list) or len(ids) <= LONG_LIST or len(ids) > MAX_PROMPT_TOKENS:
        return None
    try:
        return array("i", ids)
    except (TypeError, OverflowError):
        return None


def with_tokens(body: dict[str, Any], ids: Sequence[int], *, raw: bool) -> Reply:
    """``body``, in which ``token_ids`` is a list, or with its ids beside it as buffer 0 of little-endian int32."""
    if not raw:
        return Reply(body)
    body.pop("token_ids", None)
    body["token_ids_buffer"] = 0
    return Reply(body, buffers=(np.array(ids, dtype="<i4").tobytes(),))


def fingerprint_of(frames: list[bytes]) -> bytes:
    """Tells whether two messages ask for the same: a digest of body and buffers."""
    digest = blake2b(digest_size=16)
    for frame in frames[3:]:
        digest.update(len(frame).to_bytes(8))
        digest.update(frame)
    return digest.digest()
