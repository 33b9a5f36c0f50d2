"""The report's page: what it holds, worked out by hand for a small trace; that it needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actorpp.analysis import charts
from actorpp.analysis.bubbles import Bubble, bubbles
from actorpp.analysis.efficiency import pipeline_figures
from actorpp.analysis.prediction import prediction
from actorpp.analysis.report import report
from actorpp.analysis.steps import traced_steps
from actorpp.analysis.trace import Trace, TracedRequest
from actorpp.coordinator.chunking.cost import StageCost
from actorpp.coordinator.request import ChunkTimes
from actorpp.errors import ConfigError
from tests.support.chromium import browser
from tests.unit.analysis.support import hand_made, prefill, spans_of

STEPS = traced_steps(hand_made(offset=0.0).stages)


def test_bubbles_of_the_hand_made_trace() -> None:
    assert bubbles(STEPS) == [
        Bubble(0, "wait", 4.0, 5.0),
        Bubble(0, "wait", 6.0, 8.0),
        Bubble(0, "drain", 9.0, 10.0),
        Bubble(1, "fill", 0.0, 2.0),
        Bubble(1, "wait", 7.0, 9.0),
    ]
    assert bubbles([]) == []
    total = sum(bubble.end - bubble.start for bubble in bubbles(STEPS))
    assert total == pytest.approx(pipeline_figures(STEPS).bubble_share * 2 * 10)


def test_the_time_line_has_each_step_and_each_bubble() -> None:
    request, decode, hatched = charts.gantt(STEPS)["data"]
    assert [request["name"], decode["name"], hatched["name"]] == ["request 1", "decode", "bubble"]
    assert list(zip(request["y"], request["base"], request["x"], request["text"], strict=True)) == [
        ("stage 0", 0, 2, "0"), ("stage 1", 2, 2, "0"),
        ("stage 0", 2, 2, "1"), ("stage 1", 4, 2, "1"),
        ("stage 0", 5, 1, "2"), ("stage 1", 6, 1, "2"),
    ]  # fmt: skip
    assert list(zip(decode["base"], decode["x"], strict=True)) == [(8, 1), (9, 1)]
    assert list(zip(hatched["base"], hatched["x"], strict=True)) == [(4, 1), (6, 2), (9, 1), (0, 2), (7, 2)]
    assert hatched["marker"]["pattern"]["shape"] == "/"
    assert "request 1, chunk 2: 2 tokens behind 8" in request["customdata"][-1]


def test_bubble_shares_stand_beside_the_ideal_one() -> None:
    fill, wait, drain, prefilling, ideal, decoding = charts.bubble_shares(STEPS, pipeline_figures(STEPS))["data"]
    assert fill["y"] == pytest.approx([0, 20, 10])
    assert wait["y"] == pytest.approx([30, 20, 25])
    assert drain["y"] == pytest.approx([10, 0, 5])
    assert prefilling["y"] == pytest.approx([100 * 4 / 14])
    assert ideal["y"] == pytest.approx([25])
    assert (prefilling["x"], ideal["x"], decoding["x"]) == (["prefill"], ["(P-1)/(P-1+M)"], ["decode"])
    assert decoding["y"] == pytest.approx([100 * 4 / 6])


def test_chunks_by_index() -> None:
    sizes, first, second = charts.chunk_sizes(STEPS)["data"]
    assert sizes["y"] == [4, 4, 2]
    assert first["y"] == second["y"] == [2000, 2000, 1000]


COSTS = [StageCost(c=0.01, gamma=0, b=1e-4, a=1e-8), StageCost(c=0.02, gamma=0, b=2e-4, a=2e-8)]
SIZES = [512, 384, 256, 256, 128, 128, 64, 64, 32]


def exact_trace(*, slower: float = 1.0) -> Trace:
    """A prompt whose steps take what COSTS say (times ``slower``), in a pipeline that waits for nothing else."""
    free, steps = [0.0, 0.0], []
    for segments in prefill(1, SIZES):
        at, times = 0.0, []
        for stage, cost in enumerate(COSTS):
            begin = max(at, free[stage])
            at = free[stage] = begin + slower * cost.time(segments[0].start, segments[0].length)
            times.append((begin, at))
        steps.append((segments, times))
    request = TracedRequest(1, sum(SIZES), 1, 0.0, free[1], free[1])
    return Trace({"window": 4}, spans_of(steps, 2), (request,))


def test_without_predictions_the_formula_is_fitted_to_the_trace() -> None:
    trace = exact_trace()
    found = prediction(trace, traced_steps(trace.stages))
    assert found is not None
    assert not found.by_engine
    assert found.r2 == pytest.approx((1, 1), abs=1e-6)
    for chunk in found.chunks:
        assert chunk.predicted_s == pytest.approx(chunk.measured_s, rel=1e-3)
    assert found.makespan_s is not None
    assert found.makespan_s[0] == pytest.approx(found.makespan_s[1], rel=1e-3)
    assert prediction(hand_made(), STEPS) is None  # three chunks: too few to say anything


def predicted_trace(factor: float) -> Trace:
    """A trace whose chunks the engine predicted to take ``factor`` times what they took."""
    trace = exact_trace(slower=1.25)
    times = tuple(
        ChunkTimes(
            step.chunks[0].start,
            step.chunks[0].length,
            predicted_s=tuple(factor * seconds for seconds in step.times),
            measured_s=step.times,
            alone=True,
        )
        for step in traced_steps(trace.stages)
    )
    return replace(trace, requests=(replace(trace.requests[0], chunks=times),))


def test_predictions_of_the_engine_come_before_a_fit() -> None:
    trace = predicted_trace(0.8)
    steps, times = traced_steps(trace.stages), trace.requests[0].chunks
    found = prediction(trace, steps)
    assert found is not None
    assert found.by_engine
    assert found.makespan_s is not None
    assert found.makespan_s[0] == pytest.approx(0.8 * found.makespan_s[1])
    assert all(0 < r2 < 1 for r2 in found.r2)
    dots = charts.residuals(found)["data"]
    assert [round(value, 6) for value in dots[0]["y"]] == [25] * len(SIZES)
    assert dots[0]["x"][:3] == [0, 512, 896]
    layout = charts.residuals(found)["layout"]
    assert layout["xaxis"]["range"][0] < 0 < max(dots[0]["x"]) < layout["xaxis"]["range"][1]
    assert layout["yaxis"]["range"][0] < 0 < 25 < layout["yaxis"]["range"][1]  # the line of no error is on the chart
    assert all(one["cliponaxis"] is False for one in dots)
    line, first, _ = charts.predicted_against_measured(found)["data"]
    assert line["x"] == line["y"]
    assert first["y"] == pytest.approx([1e3 * step.times[0] for step in steps])
    mixed = tuple(replace(chunk, alone=False) for chunk in times)
    again = prediction(replace(trace, requests=(replace(trace.requests[0], chunks=mixed),)), steps)
    assert again is not None
    assert not again.by_engine


def cards_of(html: str) -> dict[str, tuple[str, str]]:
    """Value and note of each figure, by its name."""
    pattern = r'<div class="name">(.*?)</div><div class="value">(.*?)</div><div class="note">(.*?)</div>'
    return {name: (value, note) for name, value, note in re.findall(pattern, html)}


def test_the_two_makespans_and_the_two_kinds_of_bubbles_stand_apart() -> None:
    cards = cards_of(report([("hand", hand_made())]))
    assert cards["Total makespan"] == ("10.00 s", "all steps: 1.111 x the flow-shop bound")
    assert cards["Efficiency"][0] == "60.0%"
    assert cards["Bubble share"] == ("40.0%", "37.5% after the first fill")
    assert cards["Prefill bubbles"] == ("28.6%", "(P-1)/(P-1+M) is 25.0%, M = 3 steps")
    assert cards["Decode bubbles"] == ("66.7%", "steps of decode alone: 1 of 4")
    assert "Prefill makespan" not in cards
    trace = predicted_trace(0.8)
    first, last = traced_steps(trace.stages)[0], traced_steps(trace.stages)[-1]
    took = 1e3 * (last.ends[-1] - first.starts[0])
    assert cards_of(report([("own", trace)]))["Prefill makespan"] == (
        f"{took:.1f} ms",
        f"one prompt; predicted {0.8 * took:.1f} ms (-20.0%)",
    )


def test_predictions_worse_than_the_mean_are_called_that() -> None:
    trace = predicted_trace(0.8)
    one = replace(trace, requests=(replace(trace.requests[0], chunks=trace.requests[0].chunks[:1]),))
    assert "R²" not in report([("one chunk", one)])
    good, bad = (report([("own", predicted_trace(factor))]) for factor in (0.99, 3.0))
    assert re.search(r"R² by stage: 0\.\d{3}, 0\.\d{3}\.</p>", good)
    assert "R² by stage: below 0, below 0. Below 0: the mean of what was measured would have predicted it" in bad


def request(rid: int, prompt_tokens: int, ttft_s: float | None) -> TracedRequest:
    return TracedRequest(rid, prompt_tokens, 1, 5.0, None if ttft_s is None else 5.0 + ttft_s, None)


def with_requests(*requests: TracedRequest, **about: Any) -> Trace:
    return replace(hand_made(), requests=requests, about=about)


def test_ttft_by_length_shows_every_request_and_a_line_through_the_medians() -> None:
    first = with_requests(request(1, 100, 1.5), request(2, 100, 0.5), request(3, 100, 0.625), request(4, 400, None))
    second = with_requests(request(1, 300, 2.25))
    other = with_requests(request(1, 100, 0.25))
    line, dots, _, others = charts.ttft_by_length([("a", first), ("a", second), ("b", other)])["data"]
    assert (line["mode"], line["x"], line["y"]) == ("lines", [100, 300], [0.625, 2.25])
    assert (dots["mode"], dots["x"], dots["y"]) == ("markers", [100, 100, 100, 300], [1.5, 0.5, 0.625, 2.25])
    assert (others["name"], others["x"], others["y"]) == ("b", [100], [0.25])
    assert others["marker"]["color"] != dots["marker"]["color"]


def test_traces_of_one_length_stand_beside_each_other_by_name() -> None:
    fixed = with_requests(request(1, 100, 1.5), request(2, 100, 0.5), chunk_policy="fixed", chunk_size=512)
    planned = with_requests(request(1, 100, 0.75), chunk_policy="planned")
    html = report([("a<b", fixed), ("a<b", planned)])
    assert "Time to first token by trace" in html
    assert "Every prompt has 100 tokens" in html
    bar, dots, second, _ = charts_of(html)[0]["data"]
    assert (bar["type"], bar["x"], bar["y"]) == ("bar", ["a&lt;b"], [1.0])
    assert (dots["mode"], dots["x"], dots["y"]) == ("markers", ["a&lt;b", "a&lt;b"], [1.5, 0.5])
    assert (second["x"], second["y"]) == (["a&lt;b (2)"], [0.75])
    assert bar["name"] == "a&lt;b: chunks: fixed 512, 2 requests"
    assert second["name"] == "a&lt;b (2): chunks: planned"


def charts_of(html: str) -> list[dict[str, Any]]:
    found = re.search(r"const charts = (\[.*\]);\n", html)
    assert found is not None
    data: list[dict[str, Any]] = json.loads(found[1].replace("<\\/", "</"))
    return data


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.links: list[str] = []
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._in in ("h2", "h3") and data.strip():
            self.titles.append(data)


def test_the_page_is_whole_and_needs_nothing_from_elsewhere() -> None:
    html = report([("a<b", exact_trace()), ("hand", hand_made())])
    parsed = Page()
    parsed.feed(html)
    assert parsed.links == []
    assert parsed.titles == [
        "Time to first token by prompt length",
        "a<b", "What every stage did", "Bubbles", "Chunks", "Predicted against measured", "Residuals",
        "hand", "What every stage did", "Bubbles", "Chunks",
    ]  # fmt: skip
    assert len(charts_of(html)) == 9
    assert "plotly.js v" in html
    assert "prefers-color-scheme: dark" in html
    assert "40.0%" in html  # the bubble share of the hand-made trace
    assert "(P-1)/(P-1+M) is 25.0%, M = 3 steps" in html
    assert "all steps: 1.111 x the flow-shop bound" in html
    ours = html.rpartition("<script>const charts")[2] + html.partition("<script>")[0]
    named = {name for name in re.findall(r"@(\w+)", json.dumps(charts_of(html)))}
    assert all(f"--{name}:" in ours for name in named)  # every colour has a value, in both themes
    assert "http" not in ours


def test_one_length_has_no_overview_and_a_trace_without_steps_is_refused() -> None:
    assert "Time to first token by" not in report([("hand", hand_made())])
    with pytest.raises(ConfigError, match="empty: no step"):
        report([("empty", replace(hand_made(), stages=((), ())))])


def test_without_plotly_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'actorpp\[report\]'"):
        report([("hand", hand_made())])


OVERLAPS = """[...document.querySelectorAll('.chart')].flatMap((chart, index) => {
  const [legend, buttons] = ['.legend', '.modebar'].map(name => chart.querySelector(name)?.getBoundingClientRect());
  const apart = !legend || legend.right <= buttons.left || legend.bottom <= buttons.top || legend.top >= buttons.bottom;
  return apart ? [] : [index];
})"""


@pytest.mark.browser
def test_in_chromium_no_button_lies_over_a_legend(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(report([("first", predicted_trace(0.8)), ("second", hand_made())]))
    with browser(tmp_path) as page:
        page.size(1100, 900)
        page.open(f"file://{tmp_path}/page.html")
        page.until("document.querySelectorAll('.chart .modebar').length == 9")
        assert page.value(OVERLAPS) == []
        assert page.value("[...document.querySelectorAll('.value')].filter(one => one.offsetHeight > 40).length") == 0
        assert page.errors == []
