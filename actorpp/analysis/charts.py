"""The charts of a report, as plotly.js takes them: plain dictionaries. Nothing here needs plotly.

A colour is a name with @ before it (``@blue``); the page puts in what it is in its light or dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median
from typing import Any

from actorpp.analysis.bubbles import Bubble, bubbles
from actorpp.analysis.efficiency import PipelineFigures
from actorpp.analysis.prediction import Prediction
from actorpp.analysis.steps import TracedStep, chunk_numbers
from actorpp.analysis.trace import Trace

Chart = dict[str, Any]

COLOURS = ("@blue", "@green", "@yellow", "@violet", "@red", "@pink", "@teal", "@orange")
MAX_BARS = 3000  # steps drawn: beyond it a browser is slow, and nobody sees a bar
SEPARATE_UP_TO = 200  # steps that get a line between them


def gantt(steps: Sequence[TracedStep]) -> Chart:
    """The stages' time line: a bar for each step on each stage, coloured by request, and hatched bubbles."""
    shown = steps[:MAX_BARS]
    origin = min(step.starts[0] for step in shown)
    stages = len(shown[0].starts)
    groups: dict[str, list[TracedStep]] = {}
    for step in shown:
        groups.setdefault(f"request {step.chunks[0].rid}" if step.chunks else "decode", []).append(step)
    names = sorted((name for name in groups if name != "decode"), key=lambda name: int(name.split()[1]))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)} | {"decode": "@grey"}
    numbers = chunk_numbers(((step.epoch, step.seq), step.segments) for step in steps)
    data = [
        _bars(name, groups[name], colours[name], origin, numbers, separate=len(shown) <= SEPARATE_UP_TO)
        for name in (*names, *(["decode"] if "decode" in groups else []))
    ]
    data.append(_bubble_bars(bubbles(shown), origin))
    if len(names) > len(COLOURS):  # a legend of hundreds says nothing
        for series in data[: len(names)]:
            series["showlegend"] = False
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "bargap": 0.25,
            "height": 130 + 56 * stages,
            "xaxis": {"title": {"text": "seconds"}},
            "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": _stage_names(stages)},
            "legend": _LEGEND,
            "uniformtext": {"minsize": 8, "mode": "hide"},
        },
    }


def bubble_shares(steps: Sequence[TracedStep], figures: PipelineFigures) -> Chart:
    """For each stage the share of the makespan in each kind of bubble; the shares of prefill, beside that of an ideal
    pipeline, and of decode in their own time."""
    stages = range(len(figures.busy_s))
    seconds = {kind: [0.0 for _ in stages] for kind in ("fill", "wait", "drain")}
    for bubble in bubbles(steps):
        seconds[bubble.kind][bubble.stage] += bubble.end - bubble.start
    labels = {"fill": "before its first step", "wait": "between steps", "drain": "after its last step"}
    names = [*_stage_names(len(figures.busy_s)), "all stages"]
    data = []
    for kind, colour in (("fill", "@blue"), ("wait", "@red"), ("drain", "@yellow")):
        shares = [100 * value / figures.makespan_s for value in seconds[kind]]
        shares.append(sum(shares) / len(shares))
        data.append(_share_bars(labels[kind], names, shares, colour))
    for name, label, share, colour in (
        ("prefill", "of prefill's own time", figures.prefill_bubble_share, "@violet"),
        (figures.ideal, "equal steps that never wait", figures.ideal_bubble_share, "@grey"),
        ("decode", "of decode's own time", figures.decode_bubble_share, "@teal"),
    ):
        if share is not None:
            names.append(name)
            data.append(_share_bars(label, [name], [100 * share], colour))
    return {
        "data": data,
        "layout": {
            "barmode": "stack",
            "bargap": 0.5,
            "height": 320,
            "yaxis": {"title": {"text": "bubble share, %"}, "rangemode": "tozero"},
            "xaxis": {"categoryorder": "array", "categoryarray": names},
            "legend": _LEGEND,
        },
    }


def chunk_sizes(steps: Sequence[TracedStep]) -> Chart:
    """Size of each chunk by its index, above its time on each stage."""
    by_request: dict[int, list[tuple[int, TracedStep]]] = {}
    for step in steps:
        for chunk in step.chunks:
            by_request.setdefault(chunk.rid, []).append((chunk.length, step))
    data: list[Chart] = []
    several = len(by_request) > 1
    for number, (rid, chunks) in enumerate(by_request.items()):
        index = list(range(len(chunks)))
        colour = COLOURS[number % len(COLOURS)] if several else "@grey"
        data.append(
            {
                "type": "bar",
                "name": f"request {rid}" if several else "tokens",
                "showlegend": several and number < len(COLOURS),
                "x": index,
                "y": [length for length, _ in chunks],
                "marker": {"color": colour},
                "hovertemplate": f"request {rid}, chunk %{{x}}: %{{y}} tokens<extra></extra>",
            }
        )
        for stage in range(len(chunks[0][1].starts)) if number < MAX_REQUEST_LINES else ():
            line = colour if several else COLOURS[stage % len(COLOURS)]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"stage {stage}",
                    "showlegend": not several,
                    "x": index,
                    "y": [1e3 * step.times[stage] for _, step in chunks],
                    "yaxis": "y2",
                    "line": {"color": line, "width": 2},
                    "marker": {"size": 6},
                    "hovertemplate": f"request {rid}, chunk %{{x}}, stage {stage}: %{{y:.1f}} ms<extra></extra>",
                }
            )
    return {
        "data": data,
        "layout": {
            "height": 440,
            "barmode": "group",
            "bargap": 0.4,
            "xaxis": {
                "title": {"text": "chunk of the prompt"},
                "anchor": "y2",
                "dtick": max(1, max(map(len, by_request.values())) // 16),
                "showgrid": False,
            },
            "yaxis": {"title": {"text": "tokens"}, "domain": [0.57, 1], "rangemode": "tozero"},
            "yaxis2": {"title": {"text": "time, ms"}, "domain": [0, 0.46], "rangemode": "tozero"},
            "legend": _LEGEND,
        },
    }


MAX_REQUEST_LINES = 8


def predicted_against_measured(prediction: Prediction) -> Chart:
    """A dot for each chunk and stage; on the line a prediction was right."""
    stages = range(len(prediction.chunks[0].measured_s))
    highest = 1e3 * max(max(*chunk.measured_s, *chunk.predicted_s) for chunk in prediction.chunks)
    data: list[Chart] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "as predicted",
            "x": [0, highest],
            "y": [0, highest],
            "line": {"color": "@grey", "width": 1, "dash": "dash"},
            "hoverinfo": "skip",
        }
    ]
    for stage in stages:
        data.append(
            _dots(
                stage,
                [1e3 * chunk.predicted_s[stage] for chunk in prediction.chunks],
                [1e3 * chunk.measured_s[stage] for chunk in prediction.chunks],
                [f"{chunk.tokens} tokens behind {chunk.history}" for chunk in prediction.chunks],
                "predicted %{x:.1f} ms, measured %{y:.1f} ms",
            )
        )
    return {
        "data": data,
        "layout": {
            "height": 420,
            "xaxis": {"title": {"text": "predicted, ms"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "measured, ms"}, "rangemode": "tozero"},
            "legend": _LEGEND,
        },
    }


def residuals(prediction: Prediction) -> Chart:
    """Measured over predicted time, in percent off, by the chunk's history. The line of no error is always in it."""
    data: list[Chart] = [
        _dots(
            stage,
            [chunk.history for chunk in prediction.chunks],
            [100 * (chunk.measured_s[stage] / chunk.predicted_s[stage] - 1) for chunk in prediction.chunks],
            [f"{chunk.tokens} tokens" for chunk in prediction.chunks],
            "behind %{x}: %{y:+.1f}%",
        )
        for stage in range(len(prediction.chunks[0].measured_s))
    ]
    return {
        "data": data,
        "layout": {
            "height": 420,
            "xaxis": {"title": {"text": "tokens before the chunk"}, "range": _around_zero(data, "x")},
            "yaxis": {
                "title": {"text": "measured - predicted, %"},
                "range": _around_zero(data, "y"),
                "zerolinecolor": "@grey",
            },
            "legend": _LEGEND,
        },
    }


def ttft_by_length(traces: Sequence[tuple[str, Trace]]) -> Chart:
    """Time to first token of every request against its prompt's length; a line through the medians of each series."""
    series: dict[str, list[tuple[int, float]]] = {}
    for name, trace in traces:
        points = [(r.prompt_tokens, r.ttft_s) for r in trace.requests if r.ttft_s is not None]
        series.setdefault(name, []).extend(points)
    data = []
    for index, (name, points) in enumerate(series.items()):
        by_length: dict[int, list[float]] = {}
        for length, ttft in sorted(points):
            by_length.setdefault(length, []).append(ttft)
        line = [(length, median(ttfts)) for length, ttfts in by_length.items()]
        colour = COLOURS[index % len(COLOURS)]
        for mode, shown in (("lines", line), ("markers", points)):
            data.append(
                {
                    "type": "scatter",
                    "mode": mode,
                    "name": name,
                    "legendgroup": name,
                    "showlegend": mode == "markers",
                    "x": [length for length, _ in shown],
                    "y": [ttft for _, ttft in shown],
                    "line": {"color": colour, "width": 2},
                    "marker": {"color": colour, "size": 8},
                    "hovertemplate": "%{x} tokens: %{y:.3f} s<extra>%{fullData.name}</extra>",
                }
            )
    return {
        "data": data,
        "layout": {
            "height": 420,
            "xaxis": {"title": {"text": "prompt tokens"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "time to first token, s"}, "rangemode": "tozero"},
            "legend": _LEGEND,
        },
    }


def ttft_by_trace(traces: Sequence[tuple[str, str, Trace]]) -> Chart:
    """Time to first token of every request over a bar of their median, for traces of prompts of one length.

    Args:
        traces: Each with its name, and what to say of it.
    """
    data: list[Chart] = []
    names: list[str] = []
    for index, (name, said, trace) in enumerate(traces):
        ttfts = [request.ttft_s for request in trace.requests if request.ttft_s is not None]
        if not ttfts:
            continue
        shown = escape(name, quote=False)
        shown = f"{shown} ({index + 1})" if shown in names else shown
        names.append(shown)
        colour = COLOURS[index % len(COLOURS)]
        hover = f"{escape(said, quote=False)}<br>%{{y:.3f}} s<extra>{shown}</extra>"
        common = {"legendgroup": shown, "name": f"{shown}: {escape(said, quote=False)}", "hovertemplate": hover}
        bar = {"type": "bar", "x": [shown], "y": [median(ttfts)], "opacity": 0.45, "marker": {"color": colour}}
        dots = {"type": "scatter", "mode": "markers", "x": [shown] * len(ttfts), "y": ttfts, "showlegend": False}
        data += [{**bar, **common}, {**dots, **common, "marker": {"color": colour, "size": 8}}]
    return {
        "data": data,
        "layout": {
            "height": 420,
            "bargap": 0.6,
            "xaxis": {"type": "category", "categoryorder": "array", "categoryarray": names},
            "yaxis": {"title": {"text": "time to first token, s"}, "rangemode": "tozero"},
            "legend": _LEGEND | {"orientation": "v"},
        },
    }


_LEGEND = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0, "traceorder": "normal"}


def _stage_names(stages: int) -> list[str]:
    return [f"stage {stage}" for stage in range(stages)]


def _bars(
    name: str,
    steps: Sequence[TracedStep],
    colour: str,
    origin: float,
    numbers: dict[tuple[int, int, int], int],
    *,
    separate: bool,
) -> Chart:
    bars = [(step, stage) for step in steps for stage in range(len(step.starts))]
    texts = {step.seq: [numbers[step.epoch, step.seq, chunk.rid] for chunk in step.chunks] for step in steps}
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [f"stage {stage}" for _, stage in bars],
        "base": [step.starts[stage] - origin for step, stage in bars],
        "x": [step.times[stage] for step, stage in bars],
        "text": [", ".join(map(str, texts[step.seq])) for step, _ in bars],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": "#ffffff", "size": 11},
        "marker": {"color": colour, "line": {"color": "@surface", "width": 1 if separate else 0}},
        "customdata": [_described(step, stage, origin, numbers) for step, stage in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _described(step: TracedStep, stage: int, origin: float, numbers: dict[tuple[int, int, int], int]) -> str:
    parts = [
        f"request {c.rid}, chunk {numbers[step.epoch, step.seq, c.rid]}: {c.length} tokens behind {c.start}"
        for c in step.chunks
    ]
    decode = len(step.segments) - len(step.chunks)
    if decode:
        parts.append(f"{decode} decode token{'s' if decode > 1 else ''}")
    times = f"{step.starts[stage] - origin:.4f} to {step.ends[stage] - origin:.4f} s"
    return "<br>".join([f"step {step.seq} on stage {stage}, {1e3 * step.times[stage]:.1f} ms", *parts, times])


def _bubble_bars(found: Sequence[Bubble], origin: float) -> Chart:
    words = {"fill": "before its first step", "wait": "waits", "drain": "after its last step"}
    return {
        "type": "bar",
        "orientation": "h",
        "name": "bubble",
        "y": [f"stage {bubble.stage}" for bubble in found],
        "base": [bubble.start - origin for bubble in found],
        "x": [bubble.end - bubble.start for bubble in found],
        "marker": {
            "color": "rgba(0,0,0,0)",
            "line": {"color": "@hatch", "width": 0.5},
            "pattern": {"shape": "/", "fgcolor": "@hatch", "size": 7, "solidity": 0.25},
        },
        "customdata": [f"{words[b.kind]}: {1e3 * (b.end - b.start):.1f} ms" for b in found],
        "hovertemplate": "%{y} %{customdata}<extra></extra>",
    }


def _share_bars(name: str, names: Sequence[str], shares: Sequence[float], colour: str) -> Chart:
    return {
        "type": "bar",
        "name": name,
        "x": list(names),
        "y": list(shares),
        "marker": {"color": colour},
        "hovertemplate": "%{x}, %{fullData.name}: %{y:.1f}%<extra></extra>",
    }


def _around_zero(series: Sequence[Chart], axis: str) -> list[float]:
    """A range of an axis that has zero and all values in it, and some room beside them."""
    values = [0.0, *(value for one in series for value in one[axis])]
    room = 0.06 * (max(values) - min(values)) or 1.0
    return [min(values) - room, max(values) + room]


def _dots(stage: int, x: Sequence[float], y: Sequence[float], notes: Sequence[str], hover: str) -> Chart:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"stage {stage}",
        "x": list(x),
        "y": list(y),
        "cliponaxis": False,
        "customdata": list(notes),
        "marker": {"size": 8, "color": COLOURS[stage % len(COLOURS)], "line": {"color": "@surface", "width": 1}},
        "hovertemplate": f"%{{customdata}}<br>{hover}<extra>stage {stage}</extra>",
    }
