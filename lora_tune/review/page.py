# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page: no script, no request, and nothing of the data is markup."""

from collections.abc import Iterator
from html import escape

from lora_tune.review.report import Piece, Report
from lora_tune.review.terminal import cells

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fff; --quiet: #6b6b70;
  --line: #d9d9de; --trained: #d3f2d9; --edge: #1f6feb; --bad: #b42318; --doubt: #935f00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #17171a; --quiet: #9a9aa2;
  --line: #3a3a40; --trained: #1d4a2a; --edge: #79b0ff; --bad: #ff8a80; --doubt: #e6b450 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } caption { text-align: left; font-weight: 600 }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left }
th { font-weight: 600; border-bottom: 1px solid var(--line) }
td.bar { width: 20rem; text-align: left }
td.bar i { display: block; height: .8rem; background: var(--edge); min-width: 1px }
.checks td { text-align: left } .warning { color: var(--doubt) } .error { color: var(--bad) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  padding: .8rem; border-radius: 4px; font: 13px/1.5 ui-monospace, monospace }
mark { background: var(--trained); color: inherit; border-radius: 2px }
.boundary { display: block; color: var(--edge); border-top: 1px solid var(--edge); margin: .5rem 0 }
.padding { display: block; color: var(--quiet) }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(report: Report) -> str:
    """The whole page."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(report.title)}</h1>"
    yield from _sources(report)
    yield from _checks(report)
    yield from _lengths(report)
    yield f"<h2>Sequences 1 to {len(report.rows)} of {report.sequences:,}</h2>"
    yield "<p><mark>Learned</mark>, and text that is read only.</p>"
    for row in report.rows:
        yield f"<pre>{''.join(map(_piece, row))}</pre>"
    yield "</body></html>"


def _sources(report: Report) -> Iterator[str]:
    names = ("source", "rows", "examples", "an epoch", "tokens", "trained", "dropped")
    yield f"<table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    lines = [cells(s, f"{n:,}") for s, n in zip(report.sources, report.taken, strict=True)]
    if len(lines) > 1:
        lines.append(["all", *cells(report.total, f"{sum(report.taken):,}")[1:]])
    if report.held_out is not None:
        lines.append(["held out", *cells(report.held_out, "")[1:]])
    for line in lines:
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>"
    yield "</table>"


def _checks(report: Report) -> Iterator[str]:
    yield '<table class="checks">'
    for check in report.checks:
        words = (check.verdict, check.name, check.text)
        line = "".join(f"<td>{escape(word)}</td>" for word in words)
        yield f'<tr class="{check.verdict}">{line}</tr>'
    yield "</table>"


def _lengths(report: Report) -> Iterator[str]:
    most = max((bar.count for bar in report.lengths), default=1)
    yield "<table><caption>Tokens of an example</caption>"
    for bar in report.lengths:
        width = 100 * bar.count / most
        yield (
            f"<tr><td>{bar.first:,} to {bar.last:,}</td><td>{bar.count:,}</td>"
            f'<td class="bar"><i style="width:{width:.1f}%"></i></td></tr>'
        )
    yield "</table>"


def _piece(piece: Piece) -> str:
    text = escape(piece.text)
    if piece.kind == "context":
        return text
    if piece.kind == "trained":
        return f"<mark>{text}</mark>"
    return f'<span class="{piece.kind}">{text}</span>'
