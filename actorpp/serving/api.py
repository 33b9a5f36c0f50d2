"""What the engine and its front doors say to each other: parameters in, events out, figures about both.

Plain values only. No I/O, no torch, and nothing of how the coordinator keeps its own requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.plan import ChunkPlan
from actorpp.coordinator.recovery import EngineState
from actorpp.coordinator.request import ChunkTimes, StopText
from actorpp.serving.logprobs import TokenLogprob
from actorpp.stages.messages import SamplingParams

if TYPE_CHECKING:
    from actorpp.serving.activity import Activity

FinishReason = Literal["stop", "length", "abort"]


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """What one request asks for, already validated.

    Attributes:
        max_tokens: Tokens to generate at most, at least 1. Prompt and max_tokens must fit the context together. None:
            as many as context and KV cache have room for.
        sampling: How tokens are picked. The engine fills in its ``seed``, from ``seed`` below, and its ``end_ids``.
        seed: The request's seed; None asks the engine to give it one at admission.
        index: Which of several outputs of one prompt this is: its randomness follows from ``seed`` and this alone.
        ignore_eos: Go on past end-of-sequence tokens until max_tokens.
        stop_token_ids: Ids that end the request, beside end-of-sequence.
        priority: Among waiting requests lower goes first; a running one is never put back.
        deadline_s: Seconds from submission after which the request ends with DeadlineExceededError; None is never.
    """

    max_tokens: int | None = 16
    sampling: SamplingParams = SamplingParams()
    seed: int | None = None
    index: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    deadline_s: float | None = None


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one finished request. Times are in seconds and start when the request was submitted.

    Attributes:
        ttft_s: Until the first token was known; None when there was none.
        e2e_s: Until the request ended.
        prefill_tok_s: Prompt tokens over the time from admission to the first token; None when there was none.
        tpot_s: Mean time between two output tokens; None with fewer than two tokens.
        chunks: Prompt tokens of each prefill chunk, in order. They sum to the prompt. After the loss of a stage they
            are those of the replay, and sum to the prompt and what was delivered before.
        chunk_times: What each of these chunks was predicted to take on each stage, and what it took.
        stage_busy: For each stage, the share of the request's lifetime in which it computed (for any request).
    """

    ttft_s: float | None
    e2e_s: float
    prefill_tok_s: float | None
    tpot_s: float | None
    chunks: tuple[int, ...]
    stage_busy: tuple[float, ...]
    chunk_times: tuple[ChunkTimes, ...] = ()


class Progress(msgspec.Struct, frozen=True):
    """``computed`` of ``total`` prompt tokens have passed the last stage."""

    computed: int
    total: int


class Tokens(msgspec.Struct, frozen=True):
    """New output ids, in order, each delivered once. The id that stops the request is the last of them.

    ``logprobs`` has one for each id, if the request asked for them, else none.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Of the next prompt tokens, if the request asked for them. The prompt's first token has none."""

    logprobs: tuple[TokenLogprob, ...]


class Finished(msgspec.Struct, frozen=True):
    """The last event. ``stop``: end-of-sequence, a stop id or a stop string; ``length``: max_tokens; ``abort``: the
    client's own abort."""

    reason: FinishReason
    metrics: RequestMetrics


Event = Progress | PromptLogprobs | Tokens | Finished


class StageStats(msgspec.Struct, frozen=True, kw_only=True):
    """One stage since the engine started. ``layers`` is the half-open range of layers it holds.

    ``pid`` is its present process's, the one after ``restarts`` others. What the stage counts itself is as of its last
    heartbeat, a second ago at most: bytes of hidden states that have gone to the next stage, envelopes of old epochs,
    and the messages that wait in each mailbox of its session.
    """

    layers: tuple[int, int]
    pid: int
    busy: float
    weight_bytes: int
    kv_bytes: int
    restarts: int = 0
    sent_bytes: int = 0
    dead_letters: int = 0
    mailboxes: dict[str, int] = {}


class ActorStats(msgspec.Struct, frozen=True):
    """One actor of the driver: how often it was restarted, and how many messages wait in each of its inboxes."""

    name: str
    restarts: int
    depths: dict[str, int]


class PrefillStats(msgspec.Struct, frozen=True):
    """A request whose prompt is being computed: ``computed`` of ``total`` tokens, seconds since it was submitted, and
    about how many are left at its own pace, once there is one."""

    id: str
    computed: int
    total: int
    elapsed_s: float
    remaining_s: float | None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at this moment; counters run since it started.

    Attributes:
        state: ``recovering``: a stage is being brought back, and requests wait. ``failed``: it will not come back.
        epoch: Counts the pipeline's beginnings, the tried ones too.
        recoveries: How often stages were brought back.
        recovery_s: How long that took the last time.
        replays: Requests that were computed again for it, from their prompt and delivered ids.
        stalled_s: Seconds since a step has finished, or work came, while there is work; 0 without.
    """

    state: EngineState = "ready"
    uptime_s: float
    requests_running: int
    requests_waiting: int
    requests_finished: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    steps_in_flight: int
    window: int
    pages_used: int
    pages_total: int
    page_size: int
    epoch: int = 1
    recoveries: int = 0
    recovery_s: float | None = None
    replays: int = 0
    stages: tuple[StageStats, ...]
    stalled_s: float = 0.0


class StartupProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the engine's start has come. Sent at the beginning, on the way and at the end of each phase.

    Attributes:
        phase: ``download``, ``extract`` and ``convert`` (when the checkpoint is not there yet), ``load`` (weights),
            ``profile`` (for ``--chunk-policy sglang``, when none is saved).
        done, total: In ``unit``; total is None while it is not known.
    """

    phase: Literal["download", "extract", "convert", "load", "profile"]
    done: int
    total: int | None
    unit: Literal["bytes", "parts", "stages", "tokens"]


OnStartup = Callable[[StartupProgress], None]


class CheckpointInfo(Protocol):
    """What the front doors read of a checkpoint; ``actorpp.stages.checkpoint.Checkpoint`` has this shape."""

    @property
    def tokenizer(self) -> Path | None:
        """Its tokenizer.json, if it has one."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...


class RequestHandle(Protocol):
    """One submitted request. Iterating yields its events; iteration ends after Finished or raises a RequestError.

    It is iterated by one consumer, once. A consumer that stops listening calls ``abort``.
    """

    @property
    def id(self) -> str: ...
    def abort(self) -> None:
        """Ask for the end; safe at any time and any number of times. The events end with Finished("abort")."""
        ...

    def __aiter__(self) -> AsyncIterator[Event]: ...


class EngineLike(Protocol):
    """The engine as its front doors see it. ``actorpp.engine.Engine`` implements it; tests use a fake."""

    @property
    def checkpoint(self) -> CheckpointInfo: ...
    @property
    def context_length(self) -> int: ...
    @property
    def num_stages(self) -> int: ...

    def submit(
        self, prompt_ids: Sequence[int], params: GenerationParams, stop_text: StopText | None = None
    ) -> RequestHandle:
        """Ask for a completion.

        Args:
            stop_text: Looks for stop strings in the output.

        Raises:
            InvalidRequestError, ContextLengthExceededError: As from ``actorpp.serving.request.check_fits``, or it needs
                more than the KV cache ever holds.
            OverloadedError: The waiting queue is full.
        """
        ...

    def plan(self, prompt_tokens: int) -> ChunkPlan:
        """What the chunk policy would do with a prompt of so many tokens that finds the pipeline empty.

        Raises:
            ContextLengthExceededError: The context has no room for the prompt and one token.
        """
        ...

    def stats(self) -> EngineStats: ...
    def actors(self) -> list[ActorStats]: ...
    def prefills(self) -> list[PrefillStats]: ...
    def cost_model(self) -> CostModel: ...
    @property
    def activity(self) -> Activity:
        """What the pipeline has done; it has room for observers."""
        ...

    async def failed(self) -> None:
        """Wait until the engine fails as a whole, then raise the cause. Returns only by being cancelled."""
        ...

    async def write_trace(self, path: Path) -> None:
        """Write the spans of every stage as Chrome trace JSON.

        Raises:
            ConfigError: The file cannot be written.
        """
        ...
