"""Malformed messages: well-formed ones of protocol ACTORPP/1 and of the inner sockets, broken at random from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack

from actorpp.stages.codecs import Sender, driver_to_stage, stage_to_driver, stage_to_stage
from actorpp.stages.messages import (
    Admit,
    FromOutput,
    Hello,
    Logprobs,
    Output,
    Proxy,
    SamplingParams,
    Segment,
    Shutdown,
    StageError,
    StageTiming,
    Step,
    Topology,
)
from actorpp.transport.wire import MAGIC

OPS = (
    "hello", "ping", "generate", "credit", "submit", "poll", "abort", "stats", "stages", "trace", "drain", "models",
    "plan", "tokenize", "detokenize", "fly", "",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 255, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "x" * 300, "\x00", b"", b"\xff" * 20, [], [1], [[]], {}, {"a": {"b": [None]}}, msgpack.ExtType(5, b"abc"),
    msgpack.Timestamp(1, 2), [2**31], [-1], ["1"], {"1": 2},
)  # fmt: skip
FIELDS = (
    "prompt_tokens", "prompt", "messages", "max_tokens", "temperature", "n", "stop", "logit_bias", "logprobs",
    "request", "cursor", "wait_ms", "raw_tokens", "prompt_tokens_buffer", "progress", "priority", "seed", "min_tokens",
    "token_ids", "token_ids_buffer", "add_special_tokens",
)  # fmt: skip
HOSTILE = (
    b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x81\xa1x" * 2000, b"\x91" * 5000, b"\xc1", b"\xd9\xff",
    b"\xc6\xff\xff\xff\xff", b"\xde\xff\xff" + b"\x00" * 100, b"\xc9\xff\xff\xff\xff\x01", b"\x80\x04\x95.",
)  # fmt: skip


class Malformed:
    """An endless supply, always the same for one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._inner = _inner_messages()
        self._mutations: tuple[Callable[[list[bytes]], None], ...] = (
            self._flip, self._cut, self._grow, self._drop, self._add, self._swap, self._hostile, self._delimiter,
        )  # fmt: skip

    def client_message(self) -> list[bytes]:
        """Frames after the delimiter, for the socket of clients. Some are well-formed, with nonsense in fields."""
        choose = self.random
        header = {
            "id": choose.choice([choose.randrange(10**6), f"f{choose.randrange(10**6)}"]),
            "op": choose.choice(OPS),
        }
        body: dict[str, Any] = {"prompt_tokens": [choose.randrange(500) for _ in range(choose.randrange(1, 6))]}
        for _ in range(choose.choice((0, 0, 1, 2))):
            name = choose.choice(("id", "op", "deadline_ms", "priority", "credit", "token", "more"))
            header[name] = choose.choice(VALUES)
        for _ in range(choose.choice((0, 0, 1, 2, 4))):
            body[choose.choice(FIELDS)] = choose.choice(VALUES)
        frames = [
            MAGIC,
            _pack(header),
            _pack(body),
            *(choose.randbytes(choose.randrange(9)) for _ in range(choose.randrange(3))),
        ]
        return self._broken(frames)

    def inner_message(self) -> list[bytes]:
        """All frames of a message for the sockets between driver and stages."""
        return self._broken(list(self.random.choice(self._inner)))

    def _broken(self, frames: list[bytes]) -> list[bytes]:
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3, 8))):
            self.random.choice(self._mutations)(frames)
        return frames or [b""]

    # --- what can happen to a message ---

    def _at(self, frames: list[bytes]) -> int:
        return self.random.randrange(len(frames))

    def _flip(self, frames: list[bytes]) -> None:
        if frames and (frame := bytearray(frames[index := self._at(frames)])):
            frame[self.random.randrange(len(frame))] ^= 1 << self.random.randrange(8)
            frames[index] = bytes(frame)

    def _cut(self, frames: list[bytes]) -> None:
        if frames:
            index = self._at(frames)
            frames[index] = frames[index][: self.random.randrange(len(frames[index]) + 1)]

    def _grow(self, frames: list[bytes]) -> None:
        if frames:
            index = self._at(frames)
            place = self.random.randrange(len(frames[index]) + 1)
            frames[index] = frames[index][:place] + self.random.randbytes(8) + frames[index][place:]

    def _drop(self, frames: list[bytes]) -> None:
        if frames:
            del frames[self._at(frames)]

    def _add(self, frames: list[bytes]) -> None:
        frames.insert(self.random.randrange(len(frames) + 1), self.random.randbytes(self.random.randrange(20)))

    def _swap(self, frames: list[bytes]) -> None:
        if frames:
            a, b = self._at(frames), self._at(frames)
            frames[a], frames[b] = frames[b], frames[a]

    def _hostile(self, frames: list[bytes]) -> None:
        if frames:
            frames[self._at(frames)] = self.random.choice(HOSTILE)

    def _delimiter(self, frames: list[bytes]) -> None:
        frames[:0] = [b""] * self.random.randrange(12)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _inner_messages() -> list[list[bytes]]:
    header = Sender("stage-0#0")
    proxy = Proxy(1, 2, 3, (4, 64), "float32", 1024, (StageTiming(0.5, 1.0),))
    output = Output(1, 2, (5, 6), (StageTiming(0.5, 1.0),), {7: "x"}, {7: Logprobs(1, b"1234", b"1234", b"1234")})
    segments = (Segment(7, 0, 4), Segment(8, 4, 1, FromOutput(1, 0), True))
    to_stage = (
        Admit(1, 2, 7, 4, SamplingParams(temperature=1.0, logit_bias=((1, 2.0),)), (0, 1), b"1234" * 4),
        Step(1, 3, 0, segments, (6,), 2),
        Topology(1, 8, 4, ("ipc:///a", "ipc:///b"), "file:///c"),
        Shutdown(),
    )
    messages = [stage_to_driver().encode(message, header) for message in (output, StageError(1, "a", "b"))]
    messages.append(stage_to_driver().encode(Hello(0, 0, 1, "ipc:///x"), header))
    messages += [driver_to_stage().encode(message, header) for message in to_stage]
    messages += [stage_to_stage().encode(message, header) for message in (proxy, output)]
    return [[bytes(frame) for frame in frames] for frames in messages]
