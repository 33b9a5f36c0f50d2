"""One request as the coordinator keeps it, and the sink that its client listens on."""

from __future__ import annotations

from array import array
from asyncio import TimerHandle
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import msgspec

from actorpp.errors import RequestError
from actorpp.stages.messages import FromOutput, Logprobs, SamplingParams

EndReason = Literal["stop", "length", "abort"]


class ChunkTimes(msgspec.Struct, frozen=True):
    """One prefill chunk of a request: what it was predicted to take, and what it took.

    Attributes:
        history: Prompt tokens before it.
        tokens: Prompt tokens in it.
        predicted_s: Compute seconds of each stage as predicted when the chunk was issued; None: nothing was measured
            by then.
        measured_s: Compute seconds of each stage in its step; None as long as its Output is not in.
        alone: Whether the step held nothing else. Otherwise what was measured is of all together.
    """

    history: int
    tokens: int
    predicted_s: tuple[float, ...] | None = None
    measured_s: tuple[float, ...] | None = None
    alone: bool = False

    def measured(self, seconds: tuple[float, ...], *, alone: bool) -> ChunkTimes:
        """The same chunk, with its Output in."""
        return ChunkTimes(self.history, self.tokens, self.predicted_s, seconds, alone)


class RequestSink(Protocol):
    """Where a request's events go. Called on the coordinator's loop; must return at once and must not raise.

    ``ended`` or ``failed`` is called exactly once, and nothing after it.
    """

    def progress(self, computed: int, total: int) -> None:
        """``computed`` of ``total`` prompt tokens have passed the last stage. A replay before the first output token
        begins again."""
        ...

    def prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Of the next prompt tokens, if the request asked for them; the prompt's first has none."""
        ...

    def tokens(self, ids: tuple[int, ...], logprobs: Logprobs | None = None) -> None:
        """New output ids; each is delivered once, in order. ``logprobs`` are theirs, if the request asked for them."""
        ...

    def ended(self, reason: EndReason) -> None: ...

    def failed(self, error: RequestError) -> None: ...


class StopText(Protocol):
    """Reads along with the output, for stop strings. Called on the coordinator's loop."""

    def reaches_stop(self, token: int) -> bool:
        """Take the next output id; whether the request ends with it. Raises RequestError: the request fails."""
        ...


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    """Coordinator state of one request. Lengths are in tokens; positions count from the start of the prompt.

    Attributes:
        stop_ids: Output ids that end the request; they are delivered.
        stop_text: Looks for stop strings, if there are any.
        priority: Lower is admitted first; equal ones in order of arrival.
        replayed: Output ids delivered in earlier epochs: this epoch's prefill computes them behind the prompt.
        replays: Epochs that ended under it.
        issued: Prefill tokens in steps that have been sent.
        computed: Prefill tokens whose step's Output is in.
        chunks: Sizes of the prefill chunks, in order; after a replay, of that one's.
        chunk_times: Of the same chunks.
        prompt_rows: Prompt log-probabilities delivered.
        source: Where the newest sampled id stands while its Output is not in.
        source_step: Number of that step among all steps.
        sampled: Sampling segments in steps that have been sent.
        output_ids: Ids delivered.
        in_flight: Segments whose Output is not in.
        crashes: Crashes of stages in a row that met it, without its getting past what they met.
        crash_end: Where its segments under way ended at the last of them.
        deadline_at: When it must have ended, on the loop's clock.
        deadline: Timer of that, cancelled when the request ends.
    """

    rid: int
    prompt: bytes  # little-endian int32 ids
    prompt_len: int
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    sink: RequestSink
    stop_text: StopText | None = None
    priority: int = 0
    deadline_at: float | None = None
    phase: Phase = Phase.WAITING
    pages: tuple[int, ...] = ()
    slot: int | None = None
    replayed: int = 0
    replays: int = 0
    issued: int = 0
    computed: int = 0
    chunks: list[int] = field(default_factory=list)
    chunk_times: list[ChunkTimes] = field(default_factory=list)
    prompt_rows: int = 0
    source: FromOutput | None = None
    source_step: int = 0
    sampled: int = 0
    output_ids: list[int] = field(default_factory=list)
    in_flight: int = 0
    crashes: int = 0
    crash_end: int = 0
    deadline: TimerHandle | None = None

    @property
    def remaining(self) -> int:
        """Prefill tokens not yet in a step."""
        return self.prompt_len + self.replayed - self.issued

    @property
    def prefill_ids(self) -> bytes:
        """What the prefill computes, little-endian int32: the prompt, and after a replay what was delivered."""
        return self.prompt + array("i", self.output_ids[: self.replayed]).tobytes()

    @property
    def unprocessed(self) -> int:
        """Sampled ids that the coordinator has not seen."""
        return self.sampled - len(self.output_ids)

    @property
    def sent(self) -> int:
        """Positions in steps that have been sent."""
        return self.issued + max(0, self.sampled - self.replayed - 1)

    @property
    def seen(self) -> int:
        """Positions in steps whose Output is in."""
        return self.computed + max(0, len(self.output_ids) - self.replayed - 1)

    def rewind(self) -> None:
        """Its epoch has ended: it waits again, to be computed anew from its prompt and what was delivered.

        Delivered ids and log-probabilities, the reader of stop strings and the deadline stay as they are.
        """
        self.phase = Phase.WAITING
        self.pages = ()
        self.slot = self.source = None
        self.issued = self.computed = self.in_flight = 0
        self.chunks = []
        self.chunk_times = []
        self.replayed = self.sampled = len(self.output_ids)
        self.replays += 1
