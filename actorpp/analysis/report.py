"""A report of one or several traces as a page: what was measured, what bounds it, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorpp.analysis import charts
from actorpp.analysis.efficiency import PipelineFigures, pipeline_figures
from actorpp.analysis.page import Card, Part, Section, page
from actorpp.analysis.prediction import Prediction, prediction
from actorpp.analysis.steps import TracedStep, traced_steps
from actorpp.analysis.trace import Trace
from actorpp.errors import ConfigError


def report(traces: Sequence[tuple[str, Trace]]) -> str:
    """The page of these traces, each with a name.

    Raises:
        ConfigError: A trace has no step that every stage computed, or plotly is not installed.
    """
    return page("Pipeline report", _overview(traces), [_part(name, trace) for name, trace in traces])


def _overview(traces: Sequence[tuple[str, Trace]]) -> list[Section]:
    lengths = {r.prompt_tokens for _, trace in traces for r in trace.requests if r.ttft_s is not None}
    settings = [_setting(trace.about) + _at_once(trace) for _, trace in traces]
    text = "Each request from its submission to its first token, over all traces given."
    if len(lengths) > 1:
        by_setting = [(setting, trace) for setting, (_, trace) in zip(settings, traces, strict=True)]
        return [Section("Time to first token by prompt length", text, charts.ttft_by_length(by_setting))]
    if lengths and len(traces) > 1:
        text += f" Every prompt has {max(lengths)} tokens. A bar is the median."
        by_trace = [(name, setting, trace) for setting, (name, trace) in zip(settings, traces, strict=True)]
        return [Section("Time to first token by trace", text, charts.ttft_by_trace(by_trace))]
    return []


def _part(name: str, trace: Trace) -> Part:
    steps = traced_steps(trace.stages)
    if not steps:
        raise ConfigError(f"{name}: no step that every stage has computed", param="trace")
    figures = pipeline_figures(steps)
    predicted = prediction(trace, steps)
    return Part(name, _facts(trace), _cards(trace, figures, predicted), _sections(steps, figures, predicted))


def _facts(trace: Trace) -> str:
    about = trace.about
    facts = [str(about["model"])] if "model" in about else []
    facts.append(_setting(about))
    if trace.requests:
        prompts = sum(request.prompt_tokens for request in trace.requests)
        outputs = sum(request.output_tokens for request in trace.requests)
        plural = "s" if len(trace.requests) > 1 else ""
        facts.append(f"{len(trace.requests)} request{plural}, {prompts} prompt and {outputs} output tokens")
    if trace.dropped:
        facts.append(f"{trace.dropped} spans did not fit the stages' buffers: figures are incomplete")
    return " · ".join(fact for fact in facts if fact)


def _setting(about: dict[str, Any]) -> str:
    """What a run was done with: traces of the same setting belong together."""
    parts = []
    if "layers" in about:
        layers = [hi - lo for lo, hi in about["layers"]]
        parts.append(f"{len(layers)} stage{'s' if len(layers) > 1 else ''} of {', '.join(map(str, layers))} layers")
    if "threads_per_stage" in about:
        parts.append(f"{about['threads_per_stage']} thread{'s' if about['threads_per_stage'] != 1 else ''} each")
    if "chunk_policy" in about:
        size = f" {about['chunk_size']}" if about["chunk_policy"] == "fixed" and "chunk_size" in about else ""
        parts.append(f"chunks: {about['chunk_policy']}{size}")
    return ", ".join(parts) or "one setting"


def _at_once(trace: Trace) -> str:
    return f", {len(trace.requests)} requests" if len(trace.requests) > 1 else ""


def _cards(trace: Trace, figures: PipelineFigures, predicted: Prediction | None) -> list[Card]:
    cards = []
    ttfts = [request.ttft_s for request in trace.requests if request.ttft_s is not None]
    if len(ttfts) == 1:
        cards.append(Card("First token after", _seconds(ttfts[0])))
    elif ttfts:
        cards.append(Card("First token after", _seconds(max(ttfts)), f"the last; the first {_seconds(min(ttfts))}"))
    over = f"all steps: {figures.over_bound:.3f} x the flow-shop bound"
    cards.append(Card("Total makespan", _seconds(figures.makespan_s), over))
    cards.append(Card("Efficiency", f"{100 * figures.efficiency:.1f}%", "busy / (stages x makespan)"))
    after = f"{100 * figures.bubble_share_after_fill:.1f}% after the first fill"
    cards.append(Card("Bubble share", f"{100 * figures.bubble_share:.1f}%", after))
    if figures.prefill_bubble_share is not None and figures.ideal_bubble_share is not None:
        ideal = f"{figures.ideal} is {100 * figures.ideal_bubble_share:.1f}%, M = {figures.num_prefill_steps} steps"
        cards.append(Card("Prefill bubbles", f"{100 * figures.prefill_bubble_share:.1f}%", ideal))
    if figures.decode_bubble_share is not None:
        alone = f"steps of decode alone: {figures.num_steps - figures.num_prefill_steps} of {figures.num_steps}"
        cards.append(Card("Decode bubbles", f"{100 * figures.decode_bubble_share:.1f}%", alone))
    if predicted is not None and predicted.makespan_s is not None and predicted.by_engine:
        expected, took = predicted.makespan_s
        said = f"one prompt; predicted {_seconds(expected)} ({100 * (expected / took - 1):+.1f}%)"
        cards.append(Card("Prefill makespan", _seconds(took), said))
    return cards


def _sections(steps: list[TracedStep], figures: PipelineFigures, predicted: Prediction | None) -> list[Section]:
    text = "A bar is a step, its number that of the chunk in the prompt. Hatched: the stage had nothing to do."
    if len(steps) > charts.MAX_BARS:
        text += f" The first {charts.MAX_BARS} of {len(steps)} steps."
    found = [Section("What every stage did", text, charts.gantt(steps))]
    text = "The share of the makespan in which a stage computed nothing."
    if figures.num_prefill_steps:
        text += (
            f" Then that of prefill in its own time, beside what its {figures.num_prefill_steps} steps, if they were "
            f"equal, could not avoid on {len(figures.busy_s)} equal stages."
        )
    if figures.decode_bubble_share is not None:
        text += " Decode is apart: a token's step waits for the token before it."
    found.append(Section("Bubbles", text, charts.bubble_shares(steps, figures)))
    if any(step.chunks for step in steps):
        text = "A chunk takes longer the more tokens stand before it; stages stay in step when chunks take equal time."
        found.append(Section("Chunks", text, charts.chunk_sizes(steps)))
    if predicted is not None:
        text = (
            "Each chunk on each stage, as the engine's cost model predicted it when the chunk was issued. "
            if predicted.by_engine
            else "The trace has no predictions of the engine: this is the cost formula, fitted to these same steps. "
        )
        chart = charts.predicted_against_measured(predicted)
        text += _quality(predicted)
        found.append(Section("Predicted against measured", text, chart, narrow=True))
        text = "What the prediction was off by. A slope or a bend would mean that the formula lacks something."
        found.append(Section("Residuals", text, charts.residuals(predicted), narrow=True))
    return found


def _quality(predicted: Prediction) -> str:
    """In words; of a single chunk there is nothing to say."""
    if len(predicted.chunks) < 2:
        return ""
    text = "R² by stage: " + ", ".join(f"{r2:.3f}" if r2 >= 0 else "below 0" for r2 in predicted.r2) + "."
    below = " Below 0: the mean of what was measured would have predicted it better."
    return text + below if min(predicted.r2) < 0 else text


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
