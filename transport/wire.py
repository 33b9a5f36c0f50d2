"""The frames of every message on every socket, and the typed codec between frames and messages.

A message is ``b""``, ``b"ACTORPP1"``, a header map, a body map, then raw buffers; both maps are MessagePack. The empty
first frame lets a plain ZeroMQ REQ client talk to the same sockets. What arrives is untrusted: anything but a
well-formed message within the limits is a ``ProtocolError`` that says what was wrong. This module opens no socket, and
never builds objects other than those of the message types it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from actorpp.errors import ProtocolError

MAGIC = b"ACTORPP1"

SMALL = 1024
"""Bytes of header and body up to which a message is within all limits but that of nesting, unless they are narrower."""

Frame = bytes | memoryview

H = TypeVar("H")
M = TypeVar("M")


@dataclass(frozen=True)
class Limits:
    """What one message may cost its receiver; a message over a limit is refused before it is decoded.

    Attributes:
        max_frames: Frames of one message: delimiter, magic, header, body and buffers.
        max_header_bytes: Bytes of the header frame.
        max_body_bytes: Bytes of the body frame.
        max_buffer_bytes: Bytes of each raw buffer.
        max_depth: Maps and arrays inside one another, the outermost map being 1.
        max_items: Items of all maps and arrays of a header or body together: a decoder makes an object of each, and no
            other thread of the process runs until it has. Long lists of numbers travel as raw buffers.
    """

    max_frames: int = 16
    max_header_bytes: int = 64 * 1024
    max_body_bytes: int = 16 * 1024 * 1024
    max_buffer_bytes: int = 64 * 1024 * 1024
    max_depth: int = 16
    max_items: int = 16 * 1024 * 1024

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame any message may have: what a socket is told to refuse beyond."""
        return max(self.max_header_bytes, self.max_body_bytes, self.max_buffer_bytes)


class Envelope(msgspec.Struct, Generic[H, M], frozen=True):
    """A decoded message: its header, its body and the raw buffers that came with it."""

    header: H
    message: M
    buffers: tuple[Frame, ...] = ()


class Codec(Generic[H, M]):
    """Encodes and decodes the messages of one socket.

    Args:
        union_type: A tagged msgspec Struct or a union of them: the messages allowed on this socket.
        header_type: The Struct of the header map.
        limits: Applied in both directions, so that what one side sends the other accepts.
    """

    def __init__(self, union_type: Any, header_type: type[H], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._small = min(SMALL, self.limits.max_header_bytes, self.limits.max_body_bytes, self.limits.max_items)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_header: Callable[[Frame], H] = msgspec.msgpack.Decoder(header_type).decode
        self._decode_message: Callable[[Frame], M] = msgspec.msgpack.Decoder(union_type).decode

    def encode(self, message: M, header: H, buffers: Sequence[Frame] = ()) -> list[Frame]:
        """Returns the frames of a message. Buffers are passed on without a copy and must not change until sent.

        Raises:
            ProtocolError: If the receiver would refuse it for its size.
        """
        head, body = self._encode(header), self._encode(message)
        frames: list[Frame] = [b"", MAGIC, head, body, *buffers]
        if buffers or len(head) > self._small or len(body) > self._small:
            self._check_sizes(frames)
        return frames

    def decode(self, frames: Sequence[Frame]) -> Envelope[H, M]:
        """Returns the message in the frames of one multipart message, routing id taken off.

        Raises:
            ProtocolError: With the exact reason, for anything that is not a message of this codec.
        """
        if len(frames) == 4:  # as nearly all are: then the checks of a small message are one
            delimiter, magic, header, body = frames
            if not delimiter and magic == MAGIC and len(header) + len(body) <= self._small:
                opens = b"".join((header, body)).translate(_OPENS)
                if opens.count(_FEW) <= self.limits.max_depth and _MANY not in opens:
                    try:
                        return Envelope(self._decode_header(header), self._decode_message(body))
                    except msgspec.MsgspecError:
                        pass  # which of the two it is, and what, is said below
        return Envelope(self.decode_header(frames), self.decode_body(frames), tuple(frames[4:]))

    def decode_header(self, frames: Sequence[Frame]) -> H:
        """The header alone, after all checks but those of the body: for bodies that are decoded somewhere else.

        Raises:
            ProtocolError: As from ``decode``.
        """
        if len(frames) < 4:
            raise ProtocolError(f"a message has at least 4 frames, got {len(frames)}")
        if frames[0]:
            raise ProtocolError(f"the first frame must be empty, got {len(frames[0])} bytes")
        if frames[1] != MAGIC:
            raise ProtocolError(f"the second frame must be {MAGIC!r}, got {bytes(frames[1][:16])!r}")
        self._check_sizes(frames)
        try:
            check_items(frames[2], self.limits)
            return self._decode_header(frames[2])
        except (msgspec.MsgspecError, ProtocolError) as error:
            raise ProtocolError(f"header: {error}") from None

    def decode_body(self, frames: Sequence[Frame]) -> M:
        """The body of frames whose header was decoded. Safe in any thread.

        Raises:
            ProtocolError: As from ``decode``.
        """
        try:
            check_items(frames[3], self.limits)
            return self._decode_message(frames[3])
        except (msgspec.MsgspecError, ProtocolError) as error:
            raise ProtocolError(f"body: {error}") from None

    def _check_sizes(self, frames: Sequence[Frame]) -> None:
        limits = self.limits
        if len(frames) > limits.max_frames:
            raise ProtocolError(f"{len(frames)} frames, over the limit of {limits.max_frames}")
        if len(frames[2]) > limits.max_header_bytes:
            raise ProtocolError(f"header of {len(frames[2])} bytes, over the limit of {limits.max_header_bytes}")
        if len(frames[3]) > limits.max_body_bytes:
            raise ProtocolError(f"body of {len(frames[3])} bytes, over the limit of {limits.max_body_bytes}")
        for i, buffer in enumerate(frames[4:] if len(frames) > 4 else ()):
            size = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
            if size > limits.max_buffer_bytes:
                raise ProtocolError(f"buffer {i} of {size} bytes, over the limit of {limits.max_buffer_bytes}")


# What a byte can open, if a value of MessagePack begins with it: a map or array with up to 4 or 16 bits' count of items
# (fixmap, fixarray, array16, map16), one with 32 bits' (array32, map32), or none.
_FEW, _MANY = 1, 2
_OPENS = bytes(_MANY if b in (0xDD, 0xDF) else _FEW if 0x80 <= b < 0xA0 or b in (0xDC, 0xDE) else 0 for b in range(256))
_NOT_CONTAINERS = bytes(b for b in range(256) if not _OPENS[b])

# Payload bytes after the first byte, for the types of fixed size; one length field of 1, 2 or 4 bytes for the others.
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}


def check_items(data: Frame, limits: Limits) -> None:
    """Refuses MessagePack that nests deeper, or has more items, than the limits allow, or announces more than it holds.

    A decoder may recurse once per level and reserve memory for announced items before it reads them; this walk does
    neither. Bytes that are not MessagePack at all are left for the decoder to refuse.

    Raises:
        ProtocolError: Saying which of the three it was.
    """
    if not isinstance(data, bytes):
        data = bytes(data)
    # Nearly every message takes this way out: besides, it has not the bytes for more items than allowed.
    openers = data.translate(None, _NOT_CONTAINERS)  # for long ones faster than a table of all bytes
    few = len(openers) <= limits.max_depth and 0xDD not in openers and 0xDF not in openers
    if few and min(len(data), 0xFFFF * 2 * len(openers)) <= limits.max_items:
        return
    end = len(data)
    total = 0
    at = 0
    left = [1]  # items still to come, per open level
    while at < end:
        while not left[-1]:
            left.pop()
            if not left:
                return
        left[-1] -= 1
        first = data[at]
        at += 1
        items = -1
        if first < 0x80 or first >= 0xE0:
            continue
        if first < 0xA0:
            items = (first & 0x0F) * (1 if first >= 0x90 else 2)
        elif first < 0xC0:
            at += first & 0x1F
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _SIZED:
            width = _SIZED[first]
            at += width + int.from_bytes(data[at : at + width]) + (0xC7 <= first <= 0xC9)
        elif first >= 0xDC:
            width = 4 if first & 1 else 2
            items = int.from_bytes(data[at : at + width]) * (1 if first <= 0xDD else 2)
            at += width
        if items > end - at:
            raise ProtocolError(f"a map or array of {items} items in the {max(0, end - at)} bytes that are left")
        if items >= 0:
            left.append(items)
            total += items
            if len(left) - 1 > limits.max_depth:
                raise ProtocolError(f"nested deeper than {limits.max_depth} levels")
            if total > limits.max_items:
                raise ProtocolError(f"more than {limits.max_items} items; long lists of ids travel as raw buffers")
