"""The HTML around a report's charts: one file that needs nothing else, light or dark as the reader's system is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from actorpp.analysis.charts import Chart
from actorpp.errors import ConfigError


@dataclass(frozen=True)
class Section:
    """A heading, a sentence or two, and a chart. The text is plain, not HTML. Two narrow ones stand side by side."""

    title: str
    text: str
    chart: Chart
    narrow: bool = False


@dataclass(frozen=True)
class Card:
    """One figure: its name, its value, and what to compare it with."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Part:
    """Everything about one trace."""

    title: str
    facts: str
    cards: Sequence[Card]
    sections: Sequence[Section] = field(default_factory=list)


def plotly_js() -> str:
    """The source of plotly.js. Raises ConfigError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "a report needs plotly, which is not installed: pip install 'actorpp[report]'", param="report"
        ) from None
    return str(get_plotlyjs())


def page(title: str, overview: Sequence[Section], parts: Sequence[Part]) -> str:
    """The page's HTML. Raises ConfigError where plotly is not installed."""
    charts: list[Chart] = []
    body = [f"<header><h1>{escape(title)}</h1></header>"]
    body.append(_sections(overview, charts))
    for part in parts:
        cards = "".join(
            f'<div class="card"><div class="name">{escape(card.name)}</div>'
            f'<div class="value">{escape(card.value)}</div><div class="note">{escape(card.note)}</div></div>'
            for card in part.cards
        )
        body.append(f'<h2>{escape(part.title)}</h2><p class="facts">{escape(part.facts)}</p>')
        body.append(f'<div class="cards">{cards}</div>')
        body.append(_sections(part.sections, charts))
    data = json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_CSS}</style>\n'
        f"<script>{plotly_js()}</script>\n</head>\n<body>\n<main>\n" + "\n".join(body) + "\n</main>\n"
        f"<script>const charts = {data};\n{_JS}</script>\n</body>\n</html>\n"
    )


def _sections(sections: Sequence[Section], charts: list[Chart]) -> str:
    """Their HTML; the charts are drawn into it by number."""
    html = []
    for section in sections:
        html.append(
            f'<section class="{"narrow" if section.narrow else "wide"}"><h3>{escape(section.title)}</h3>'
            f'<p>{escape(section.text)}</p><div class="chart" id="chart-{len(charts)}"></div></section>'
        )
        charts.append(section.chart)
    return f'<div class="sections">{"".join(html)}</div>'


_CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --surface: #ffffff; --edge: #e2e1dc; --ink: #1b1b19; --dim: #5f5e59; --grid: #e9e8e4;
  --hatch: #a3a29c; --grey: #8b8a84; --blue: #2a78d6; --green: #178a61; --yellow: #c98a00; --violet: #5b49b8;
  --red: #d9433f; --pink: #c4508f; --teal: #0f8a96; --orange: #d96a1d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131312; --surface: #1d1d1b; --edge: #33332f; --ink: #f2f1ec; --dim: #b3b2aa; --grid: #2e2e2b;
    --hatch: #7c7b75; --grey: #97968f; --blue: #4a93ea; --green: #23a878; --yellow: #d19a1c; --violet: #9386ea;
    --red: #ec6a66; --pink: #dd77ae; --teal: #2ba9b6; --orange: #e88844;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 18px; font-weight: 650; }
h2 { font-size: 19px; margin: 38px 0 2px; font-weight: 650; overflow-wrap: anywhere; }
h3 { font-size: 15.5px; margin: 0; font-weight: 650; }
p { margin: 4px 0 10px; color: var(--dim); max-width: 88ch; }
.facts { margin-bottom: 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin-bottom: 14px; }
.card, section { background: var(--surface); border: 1px solid var(--edge); border-radius: 10px; }
.card { padding: 12px 14px; }
.card .name { color: var(--dim); font-size: 13px; }
.card .value { font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.card .note { color: var(--dim); font-size: 13px; min-height: 1.5em; }
.sections { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
section { padding: 16px 18px 8px; min-width: 0; }
section.wide { grid-column: span 2; }
@media (max-width: 800px) { section.narrow { grid-column: span 2; } }
.chart { width: 100%; }
@media print { section, .card { break-inside: avoid; } }
"""

_JS = """
const style = name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
const coloured = value =>
  typeof value === 'string' && value[0] === '@' ? style(value.slice(1))
  : Array.isArray(value) ? value.map(coloured)
  : value !== null && typeof value === 'object'
    ? Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]))
  : value;
const axis = own => ({gridcolor: style('grid'), linecolor: style('edge'), zerolinecolor: style('edge'),
  automargin: true, ...own, title: {...own.title, standoff: 8, font: {size: 13}}});
function draw() {
  charts.forEach((chart, index) => {
    const layout = coloured(chart.layout);
    for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key)) layout[key] = axis(layout[key]);
    Plotly.react('chart-' + index, coloured(chart.data), {
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', margin: {l: 56, r: 40, t: 36, b: 44},
      modebar: {orientation: 'v', bgcolor: 'rgba(0,0,0,0)', color: style('grid'), activecolor: style('dim')},
      hoverlabel: {bgcolor: style('surface'), bordercolor: style('edge'), font: {color: style('ink'), size: 13}},
      font: {family: getComputedStyle(document.body).fontFamily, color: style('dim'), size: 13}, ...layout,
    }, {responsive: true, displaylogo: false, modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d']});
  });
}
draw();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
"""
