# SPDX-License-Identifier: Apache-2.0
"""The report on a terminal, in colour where it has any."""

from rich.table import Table
from rich.text import Text

from lora_tune.console import Console
from lora_tune.data.examples import DataReport
from lora_tune.review.report import Piece, Report

_STYLES = {"trained": "bold green", "context": "", "boundary": "bold blue", "padding": "dim"}
_VERDICTS = {"ok": "green", "warning": "yellow", "error": "bold red"}
_BAR = 40


def show(report: Report, console: Console | None = None) -> None:
    """Print the report; without colours, trained text stands in «»."""
    console = console or Console()
    console.print(_sources(report))
    console.print(_lengths(report))
    for check in report.checks:
        console.print(Text(f"{check.verdict:8}", _VERDICTS[check.verdict]), end="")
        console.print(Text(f"{check.name:14} {check.text}"))
    for number, row in enumerate(report.rows, start=1):
        console.print()
        console.print(Text(f"sequence {number} of {report.sequences:,}", "bold"))
        console.print(_row(row, marked=console.color_system is None))
    if report.rows:
        console.print()
        console.print(_legend(marked=console.color_system is None))


def _sources(report: Report) -> Table:
    title = Text(report.title, "table.title")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("source", "rows", "examples", "an epoch", "tokens", "trained", "dropped"):
        left = name == "source"
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for source, taken in zip(report.sources, report.taken, strict=True):
        table.add_row(*map(Text, cells(source, f"{taken:,}")))
    if len(report.sources) > 1:
        total = cells(report.total, f"{sum(report.taken):,}")
        table.add_row("all", *total[1:], style="bold")
    if report.held_out is not None:
        table.add_row("held out", *cells(report.held_out, "")[1:])
    return table


def cells(report: DataReport, taken: str) -> list[str]:
    """A source's line of the table."""
    dropped = sum(report.drops.values())
    numbers = (report.rows, report.examples, report.tokens, report.trained_tokens, dropped)
    rows, examples, tokens, trained, drops = (f"{number:,}" for number in numbers)
    return [report.source, rows, examples, taken, tokens, trained, drops]


def _lengths(report: Report) -> Text:
    most = max((bar.count for bar in report.lengths), default=1)
    lines = [
        f"{f'{bar.first:,} to {bar.last:,}':>20} {bar.count:>10,} "
        f"{'█' * -(-bar.count * _BAR // most)}"
        for bar in report.lengths
    ]
    return Text("\n".join(["", "tokens of an example", *lines, ""]))


def _row(row: tuple[Piece, ...], *, marked: bool) -> Text:
    text = Text()
    for piece in row:
        text.append_text(_piece(piece, marked=marked))
    return text


def _piece(piece: Piece, *, marked: bool) -> Text:
    if piece.kind == "boundary":
        shown = f"\n── {piece.text} ──\n"
    elif piece.kind == "padding":
        shown = f"\n[{piece.text}]"
    else:
        shown = f"«{piece.text}»" if marked and piece.kind == "trained" else piece.text
    return Text(shown, _STYLES[piece.kind])


def _legend(*, marked: bool) -> Text:
    kinds = {"trained": "learned", "context": "read only", "padding": "padding"}
    text = Text()
    for kind, meaning in kinds.items():
        shown = f"«{meaning}»" if marked and kind == "trained" else meaning
        text.append(f"{shown}  ", _STYLES[kind])
    return text
