"""The codec: what it accepts, and the exact reason for everything that it refuses."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actorpp.errors import ProtocolError
from actorpp.transport.wire import MAGIC, Codec, Envelope, Limits, check_items


class Header(msgspec.Struct, frozen=True):
    epoch: int
    sender: str = ""


class Move(msgspec.Struct, frozen=True, tag="move"):
    x: int
    path: tuple[int, ...] = ()


class Say(msgspec.Struct, frozen=True, tag="say"):
    text: str
    data: bytes = b""
    extra: dict[str, Any] = {}


LIMITS = Limits(max_frames=6, max_header_bytes=64, max_body_bytes=4096, max_buffer_bytes=128, max_depth=5)
CODEC: Codec[Header, Move | Say] = Codec(Move | Say, Header, LIMITS)
HEADER = msgpack.packb({"epoch": 1})
BODY = msgpack.packb({"type": "move", "x": 1})


def refusal(frames: list[bytes]) -> str:
    with pytest.raises(ProtocolError) as caught:
        CODEC.decode(frames)
    return caught.value.message


def test_a_foreign_clients_frames_are_understood() -> None:
    body = msgpack.packb({"type": "say", "text": "hi", "data": b"\x00"})
    envelope = CODEC.decode([b"", b"ACTORPP1", msgpack.packb({"epoch": 3, "new_field": 1}), body, b"raw", b""])
    assert envelope == Envelope(Header(3), Say("hi", b"\x00"), (b"raw", b""))


def test_frames_are_the_documented_ones() -> None:
    frames = CODEC.encode(Move(2, (1,)), Header(1, "me"), [memoryview(b"abc")])
    assert frames[:2] == [b"", MAGIC]
    assert msgpack.unpackb(frames[2]) == {"epoch": 1, "sender": "me"}
    assert msgpack.unpackb(frames[3]) == {"type": "move", "x": 2, "path": [1]}
    assert frames[4] == b"abc"


messages = st.builds(
    Move, st.integers(-(2**63), 2**63), st.lists(st.integers(0, 2**64 - 1), max_size=50).map(tuple)
) | (
    st.builds(
        Say,
        st.text(max_size=100),
        st.binary(max_size=300),
        st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=5),
    )
)


@given(
    messages,
    st.builds(Header, st.integers(0, 2**63), st.text(max_size=8)),
    st.lists(st.binary(max_size=128), max_size=2),
)
def test_round_trip(message: Move | Say, header: Header, buffers: list[bytes]) -> None:
    assert CODEC.decode(CODEC.encode(message, header, buffers)) == Envelope(header, message, tuple(buffers))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "at least 4 frames, got 0"),
        ([b"", MAGIC, HEADER], "at least 4 frames, got 3"),
        ([b"", MAGIC, HEADER, BODY, b"", b"", b""], "7 frames, over the limit of 6"),
        ([b"x", MAGIC, HEADER, BODY], "first frame must be empty, got 1 bytes"),
        ([b"", b"ACTORPP2", HEADER, BODY], "second frame must be b'ACTORPP1', got b'ACTORPP2'"),
        ([b"", MAGIC, bytes(65), BODY], "header of 65 bytes, over the limit of 64"),
        ([b"", MAGIC, HEADER, bytes(4097)], "body of 4097 bytes, over the limit of 4096"),
        ([b"", MAGIC, HEADER, BODY, b"", bytes(129)], "buffer 1 of 129 bytes, over the limit of 128"),
        ([b"", MAGIC, HEADER, msgpack.packb({"type": "fly"})], "body: Invalid value 'fly' - at `$.type`"),
        ([b"", MAGIC, HEADER, msgpack.packb({"x": 1})], "body: Object missing required field `type`"),
        ([b"", MAGIC, HEADER, msgpack.packb({"type": "move"})], "body: Object missing required field `x`"),
        ([b"", MAGIC, HEADER, msgpack.packb({"type": "move", "x": "1"})], "body: Expected `int`, got `str` - at `$.x`"),
        ([b"", MAGIC, HEADER, msgpack.packb([1])], "body: Expected `object`, got `array`"),
        ([b"", MAGIC, HEADER, BODY + b"\x00"], "body: MessagePack data is malformed: trailing characters"),
        ([b"", MAGIC, HEADER, BODY[:-1]], "body: Input data was truncated"),
        ([b"", MAGIC, HEADER, b""], "body: Input data was truncated"),
        ([b"", MAGIC, msgpack.packb({"epoch": None}), BODY], "header: Expected `int`, got `None` - at `$.epoch`"),
        ([b"", MAGIC, HEADER, b"\x82\xa4type\xa3say\xa4text\xa1\xff"], "body: Invalid UTF-8"),
    ],
)
def test_refusals_say_why(frames: list[bytes], reason: str) -> None:
    assert reason in refusal(frames)


def test_what_would_be_refused_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="buffer 0 of 129 bytes"):
        CODEC.encode(Move(1), Header(1), [bytes(129)])
    with pytest.raises(ProtocolError, match="buffer 0 of 136 bytes"):
        CODEC.encode(Move(1), Header(1), [memoryview(bytes(136)).cast("Q")])
    with pytest.raises(ProtocolError, match="body of"):
        CODEC.encode(Say("x" * 5000), Header(1))


@pytest.mark.parametrize(
    "opener", [b"\x91", b"\x81\xa0", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01", b"\xde\x00\x01\xa0"]
)
def test_a_nesting_bomb_is_refused_before_it_is_decoded(opener: bytes) -> None:
    bomb = b"\x82\xa4type\xa3say\xa5extra\x81\xa0" + opener * 800
    assert "nested deeper than 5 levels" in refusal([b"", MAGIC, HEADER, bomb[:4096]])


def test_nesting_is_counted_exactly() -> None:
    def nested(levels: int) -> bytes:
        value: Any = {"type": "say", "text": "", "extra": {"a": 0}}
        for _ in range(levels - 2):
            value["extra"] = {"a": value["extra"], "b": [], "c": "\x92\x92\x92\x92\x92\x92"}
        return bytes(msgpack.packb(value))

    assert CODEC.decode([b"", MAGIC, HEADER, nested(5)]).message
    assert "nested deeper than 5" in refusal([b"", MAGIC, HEADER, nested(6)])


def test_many_shallow_containers_are_no_nesting() -> None:
    many = [[[1, {"k": b"\xdd" * 70000, "f": 1.5, "t": -5, "e": msgpack.ExtType(1, b"xyz")}]] * 300] * 3
    check_items(msgpack.packb(many), Limits(max_depth=5))


@pytest.mark.parametrize("size", [15, 16, 65_535, 65_536, 200_000])
def test_items_are_counted_exactly(size: int) -> None:
    for item in (1, 300, "a", [], {}):  # of one byte and of several, and containers
        body = msgpack.packb({"extra": [item] * size})
        check_items(body, Limits(max_items=size + 2))
        with pytest.raises(ProtocolError, match=f"more than {size + 1} items; long lists of ids travel as raw buffers"):
            check_items(body, Limits(max_items=size + 1))
    check_items(msgpack.packb({"text": "\u00e9" * size}), Limits(max_items=2))


@pytest.mark.parametrize("lie", [b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xdd\x00\x01\x00\x00"])
def test_announced_items_that_cannot_be_there_take_no_memory(lie: bytes) -> None:
    body = b"\x82\xa4type\xa4move\xa4path" + lie
    assert "items in the 0 bytes that are left" in refusal([b"", MAGIC, HEADER, body])


@given(st.lists(st.binary(max_size=80), max_size=8))
@example([b"", MAGIC, HEADER, b"\xc1"])
def test_random_frames_raise_nothing_else(frames: list[bytes]) -> None:
    _decode_or_refuse(frames)


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_random_maps_raise_nothing_else(body: bytes, header: bytes) -> None:
    _decode_or_refuse([b"", MAGIC, HEADER, body])
    _decode_or_refuse([b"", MAGIC, header, BODY])


@given(messages, st.data())
def test_damaged_messages_raise_nothing_else(message: Move | Say, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in CODEC.encode(message, Header(1, "me"))]
    frame = frames[data.draw(st.integers(2, 3))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse([bytes(f) for f in frames])


def _decode_or_refuse(frames: list[bytes]) -> None:
    with contextlib.suppress(ProtocolError):
        CODEC.decode(frames)


class Bomb:
    """Unpickled, it would call a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exploded.append, (1,))


exploded: list[int] = []


def test_a_pickle_is_refused_and_not_loaded() -> None:
    bomb = pickle.dumps(Bomb())
    for frames in ([bomb], [b"", MAGIC, bomb, bomb], [b"", MAGIC, HEADER, bomb], [bomb] * 4):
        refusal(frames)
    assert CODEC.decode([b"", MAGIC, HEADER, BODY, bomb[:128]]).buffers == (bomb[:128],)
    assert not exploded
