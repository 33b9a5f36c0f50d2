"""One request as the coordinator keeps it, and the sink that its client listens on."""

from __future__ import annotations

from asyncio import TimerHandle
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from actorpp.errors import RequestError
from actorpp.stages.messages import FromOutput, Logprobs, SamplingParams

EndReason = Literal["stop", "length", "abort"]


class RequestSink(Protocol):
    """Where a request's events go. Called on the coordinator's loop; must return at once and must not raise.

    ``ended`` or ``failed`` is called exactly once, and nothing after it.
    """

    def progress(self, computed: int, total: int) -> None:
        """``computed`` of ``total`` prompt tokens have passed the last stage."""
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
        issued: Prompt tokens in steps that have been sent.
        computed: Prompt tokens whose step's Output is in.
        chunks: Sizes of the prefill chunks, in order.
        source: Where the newest sampled id stands while its Output is not in.
        sampled: Sampling segments in steps that have been sent.
        output_ids: Ids delivered.
        in_flight: Segments whose Output is not in.
        deadline: Timer of ``deadline_at``, cancelled when the request ends.
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
    issued: int = 0
    computed: int = 0
    chunks: list[int] = field(default_factory=list)
    source: FromOutput | None = None
    sampled: int = 0
    output_ids: list[int] = field(default_factory=list)
    in_flight: int = 0
    deadline: TimerHandle | None = None

    @property
    def remaining(self) -> int:
        """Prompt tokens not yet in a step."""
        return self.prompt_len - self.issued

    @property
    def unprocessed(self) -> int:
        """Sampled ids that the coordinator has not seen."""
        return self.sampled - len(self.output_ids)
