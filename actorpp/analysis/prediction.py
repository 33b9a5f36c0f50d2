"""What a trace's chunks were predicted to take, beside what they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actorpp.analysis.steps import TracedStep
from actorpp.analysis.trace import Trace
from actorpp.coordinator.chunking.fit import StageSample, fit_profile, r_squared
from actorpp.coordinator.chunking.flowshop import in_window, makespan

MIN_FITTED = 8  # chunks: fewer say little about five coefficients


@dataclass(frozen=True)
class PredictedChunk:
    """One chunk alone in its step; seconds for each stage."""

    rid: int
    history: int
    tokens: int
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]


@dataclass(frozen=True)
class Prediction:
    """Predictions of one trace.

    Attributes:
        by_engine: True: made by the engine's cost model when it issued the chunks. False: the cost formula fitted to
            this very trace afterwards, which shows only how well the formula describes it.
        chunks: Those alone in their step.
        r2: Of each stage: coefficient of determination of the predictions; 1 is perfect.
        makespan_s: Predicted and measured seconds of the longest prompt whose chunks are all among these, from its
            first chunk's start to its last one's end; None if there is no such prompt.
    """

    by_engine: bool
    chunks: tuple[PredictedChunk, ...]
    r2: tuple[float, ...]
    makespan_s: tuple[float, float] | None


def prediction(trace: Trace, steps: Sequence[TracedStep]) -> Prediction | None:
    """The engine's predictions if the trace has them, else a fit to its own steps; None where neither is possible."""
    chunks = _by_engine(trace)
    by_engine = bool(chunks)
    if not chunks:
        chunks = _fitted(steps)
    if not chunks:
        return None
    stages = range(len(chunks[0].measured_s))
    return Prediction(
        by_engine, tuple(chunks), tuple(_r2(chunks, stage) for stage in stages), _makespan(trace, steps, chunks)
    )


def _by_engine(trace: Trace) -> list[PredictedChunk]:
    return [
        PredictedChunk(request.rid, chunk.history, chunk.tokens, chunk.predicted_s, chunk.measured_s)
        for request in trace.requests
        for chunk in request.chunks
        if chunk.alone and chunk.predicted_s is not None and chunk.measured_s is not None
    ]


def _fitted(steps: Sequence[TracedStep]) -> list[PredictedChunk]:
    alone = [step for step in steps if len(step.segments) == 1 and step.chunks]
    if len(alone) < MIN_FITTED:
        return []
    samples = [
        StageSample(step.chunks[0].start, step.chunks[0].length, step.chunks[0].sample, step.times) for step in alone
    ]
    costs = [fit.cost for fit in fit_profile(samples)]
    return [
        PredictedChunk(
            step.chunks[0].rid,
            sample.history,
            sample.tokens,
            tuple(cost.time(sample.history, sample.tokens, sample.samples) for cost in costs),
            sample.seconds,
        )
        for step, sample in zip(alone, samples, strict=True)
    ]


def _r2(chunks: Sequence[PredictedChunk], stage: int) -> float:
    measured = [chunk.measured_s[stage] for chunk in chunks]
    return r_squared(measured, [chunk.measured_s[stage] - chunk.predicted_s[stage] for chunk in chunks])


def _makespan(
    trace: Trace, steps: Sequence[TracedStep], chunks: Sequence[PredictedChunk]
) -> tuple[float, float] | None:
    by_request: dict[int, list[PredictedChunk]] = {}
    for chunk in chunks:
        by_request.setdefault(chunk.rid, []).append(chunk)
    whole = [
        (request.prompt_tokens, by_request[request.rid])
        for request in trace.requests
        if request.rid in by_request and sum(chunk.tokens for chunk in by_request[request.rid]) == request.prompt_tokens
    ]
    if not whole:
        return None
    _, longest = max(whole, key=lambda entry: entry[0])
    own = [step for step in steps if any(chunk.rid == longest[0].rid for chunk in step.chunks)]
    window = int(trace.about.get("window") or len(longest))
    predicted = makespan([chunk.predicted_s for chunk in longest], in_window(len(longest), window))
    return predicted, own[-1].ends[-1] - own[0].starts[0]
