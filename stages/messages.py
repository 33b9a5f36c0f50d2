"""What the coordinator and the stages say to each other. No torch here: the driver imports this module.

Every message of an epoch's log carries ``epoch`` and ``seq``; the log of an epoch is contiguous in ``seq``. Stages
apply it in order and decide nothing. Sizes are in tokens, times in seconds.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import msgspec

from actorpp.stages.spec import StageSpec
from actorpp.stages.wiring import WiringSpec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the last stage picks a request's next token. The defaults are greedy.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it before sampling.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this.
        min_p: Keep tokens of at least this share of the most likely one's probability.
        repetition_penalty: Above 1 discourages tokens of the prompt and the output.
        presence_penalty: Subtracted from the logit of every token that the output has.
        frequency_penalty: Subtracted from a token's logit as often as the output has it.
        logit_bias: (token id, what is added to its logit), each id once.
        min_tokens: None of ``end_ids`` is sampled as one of so many first tokens of the output.
        logprobs: Alternatives wanted with each output token's log-probability; None asks for no log-probabilities.
        prompt_logprobs: The same for the prompt's tokens behind the first.
        seed: Seed of this request; randomness depends on it and on the output position alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int = 0


class FromOutput(msgspec.Struct, frozen=True, array_like=True):
    """An input id that the last stage sampled in step ``seq`` for its sampling segment number ``index``."""

    seq: int
    index: int


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one request in one step: positions ``start`` to ``start + length``.

    ``token`` says where a decode segment's single input id comes from; None means the ids of the admitted request.
    ``sample`` asks the last stage for the token after the segment's last position.
    """

    rid: int
    start: int
    length: int
    token: int | FromOutput | None = None
    sample: bool = False

    def prompt_logprob_rows(self, prompt_len: int) -> range:
        """Positions of the segment whose next token is one of the prompt: their logits give its log-probability."""
        return range(self.start, max(self.start, min(self.start + self.length, prompt_len - 1)))


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    """A request enters the log. ``tokens`` holds little-endian int32 ids for the first and last stage, else None.

    Attributes:
        prompt_len: Tokens of the client's prompt.
        tokens: Prompt ids, then ids that were delivered in an earlier epoch.
        pages: KV page ids reserved for the request, in position order; the same on every stage.
    """

    epoch: int
    seq: int
    rid: int
    prompt_len: int
    sampling: SamplingParams
    pages: tuple[int, ...]
    tokens: bytes | None = None


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One pass of packed segments through all stages.

    Attributes:
        slot: Micro-batch slot that the decode segments belong to.
        segments: At least one.
        retire: Requests whose state stages drop before they compute this step.
        watermark: Stage 0 drops stored outputs below this seq.
        feeds: Whether stage 0 needs the sampled ids, for a later FromOutput.
    """

    epoch: int
    seq: int
    slot: int
    segments: tuple[Segment, ...]
    retire: tuple[int, ...] = ()
    watermark: int = 0
    feeds: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.segments)

    @property
    def token_ranges(self) -> list[range]:
        """Where each segment's tokens lie in the packed row."""
        ends = list(accumulate(s.length for s in self.segments))
        return [range(end - s.length, end) for end, s in zip(ends, self.segments, strict=True)]

    @property
    def sampling_rows(self) -> list[int]:
        """Where in the packed row the last tokens of the sampling segments lie."""
        return [own.stop - 1 for own, s in zip(self.token_ranges, self.segments, strict=True) if s.sample]


class End(msgspec.Struct, frozen=True, tag="end"):
    """The last entry of a log that ends in order: stages finish what came before it. A Fence ends an epoch at once."""

    epoch: int
    seq: int


LogEntry = Admit | Step | End


class StageTiming(msgspec.Struct, frozen=True, array_like=True):
    """When a stage computed a step, on its own monotonic clock; the driver puts it on its own, as it does spans."""

    start: float
    end: float


class Proxy(msgspec.Struct, frozen=True, tag="proxy"):
    """Header of a hidden-state tensor that follows on the tensor link. Receives are posted in ``link_index`` order."""

    epoch: int
    seq: int
    link_index: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    timings: tuple[StageTiming, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at some places of one request, as little-endian arrays, row by row.

    Attributes:
        top: Alternatives of each row.
        ids: int32 (rows, 1 + top): the token that is there, then the likeliest, best first.
        values: float32 (rows, 1 + top), of the same tokens.
        ranks: int32 (rows,), of the token that is there; 1 is the likeliest.
    """

    top: int
    ids: bytes
    values: bytes
    ranks: bytes

    @property
    def rows(self) -> int:
        return len(self.ranks) // 4

    def after(self, count: int) -> Logprobs:
        """Without the first ``count`` rows."""
        if count <= 0:
            return self
        width = 4 * (1 + self.top)
        return Logprobs(self.top, self.ids[width * count :], self.values[width * count :], self.ranks[4 * count :])


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Exactly one per Step: the sampled ids of its sampling segments, in order. It gives the window's credit back.

    ``errors`` names requests whose own computation failed in this step (rid to reason); the others are unharmed.
    By rid, where the request asked for them: ``logprobs`` of its sampled id, ``prompt_logprobs`` of the prompt tokens
    that follow the positions of its segment.
    """

    epoch: int
    seq: int
    ids: tuple[int, ...] = ()
    timings: tuple[StageTiming, ...] = ()
    errors: dict[int, str] = {}
    logprobs: dict[int, Logprobs] = {}
    prompt_logprobs: dict[int, Logprobs] = {}


# --- outside the log: driver to stage, handled before data ---------------------------------------------------------


class Topology(msgspec.Struct, frozen=True, tag="topology"):
    """Begins an epoch on a stage: a fresh session, empty request state, new links.

    Attributes:
        num_pages: KV pages of the arena, the same on every stage.
        window: Steps in flight at most: bounds what a stage can be sent.
        inlets: Endpoint of every stage's inlet, in stage order.
        rendezvous: Where the ranks of the tensor transport meet, new in every epoch.
    """

    epoch: int
    num_pages: int
    window: int
    inlets: tuple[str, ...]
    rendezvous: str


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """Ends the epoch: the stage answers Fenced once its compute is idle."""

    epoch: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered with Pong by the stage's loop."""

    nonce: int


class GetTrace(msgspec.Struct, frozen=True, tag="get_trace"):
    """Answered with TraceSpans; the stage forgets what it has handed over."""

    nonce: int


class Become(msgspec.Struct, frozen=True, tag="become"):
    """A spare process becomes this stage. It says hello again, under the stage's routing id."""

    spec: StageSpec
    wiring: WiringSpec


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The stage process ends itself, with exit code 0."""


DriverToStage = Topology | Admit | Step | End | Fence | Ping | GetTrace | Become | Shutdown


# --- stage to driver -----------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First word of a stage process. ``inlet`` is the endpoint where its predecessor reaches it.

    A spare has no ``stage`` and no inlet yet.
    """

    stage: int | None
    incarnation: int
    pid: int
    inlet: str


class LoadProgress(msgspec.Struct, frozen=True, tag="load_progress"):
    """How much of the stage's loading is done."""

    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The weights are in memory.

    Attributes:
        weight_bytes: Bytes of the tensors that this stage materialised.
        page_bytes: Bytes of one KV page over this stage's own layers.
        max_pages: Pages that fit this stage's share of memory.
    """

    weight_bytes: int
    page_bytes: int
    max_pages: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The session of this epoch takes steps."""

    epoch: int


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """No compute of this epoch runs any more."""

    epoch: int


class StageCounters(msgspec.Struct, frozen=True):
    """What a stage counts of itself; totals run since its process started.

    Attributes:
        dead_letters: Envelopes of old epochs.
        sent_bytes: Of hidden states, whose transfer to the next stage has ended.
        mailboxes: Messages that wait in each mailbox of the running session.
    """

    dead_letters: int = 0
    sent_bytes: int = 0
    mailboxes: dict[str, int] = {}


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answers the Ping of the same nonce.

    Attributes:
        clock: The stage's own monotonic clock, of spans and timings.
        computing_s: Seconds that the step being computed has taken so far; 0 while there is none.
        counters: What the stage counts of itself.
    """

    nonce: int
    clock: float
    computing_s: float = 0.0
    counters: StageCounters = StageCounters()


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something a stage did for one step, on its own monotonic clock. Spans of one kind and lane do not overlap.

    Compute spans carry the step's segments; what else the stage did for that step has the same epoch and seq.
    """

    kind: Literal["compute", "send", "receive", "wait", "sample"]
    epoch: int
    seq: int
    start: float
    end: float
    lane: int = 0
    segments: tuple[Segment, ...] = ()


class TraceSpans(msgspec.Struct, frozen=True, tag="trace_spans"):
    """Answers GetTrace. ``dropped`` spans did not fit the stage's buffer."""

    nonce: int
    spans: tuple[Span, ...]
    dropped: int = 0


class StageError(msgspec.Struct, frozen=True, tag="stage_error"):
    """The stage cannot go on: while loading (epoch None), or in this epoch."""

    epoch: int | None
    code: str
    message: str


StageToDriver = Hello | LoadProgress | Loaded | Ready | Output | Fenced | Pong | TraceSpans | StageError

# --- stage to stage ------------------------------------------------------------------------------------------------

StageToStage = Proxy | Output
