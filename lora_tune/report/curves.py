# SPDX-License-Identifier: Apache-2.0
"""Curves as inline SVG: axes, a line, and a title for every point."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
_MOST = 300
"""Points of a curve. Of longer ones the lowest and the highest of every stretch are drawn."""

Point = tuple[int, float]


def curve(rows: Iterable[Mapping[str, Any]], key: str, *, title: str) -> str:
    """A figure with one column of the log over steps; nothing where no row has it."""
    points = [
        (row["step"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]
    if not points:
        return ""
    drawn = thinned(points)
    fewer = "" if len(drawn) == len(points) else f" ({len(drawn)} of {len(points)} points)"
    last = f"<b>{number(points[-1][1])}</b>"
    return (
        f"<figure><figcaption>{escape(title)}{fewer} {last}</figcaption>"
        f"{_svg(drawn, title)}</figure>"
    )


def thinned(points: Sequence[Point]) -> list[Point]:
    """The points; of many, the lowest and the highest of every stretch, so that no peak is lost."""
    if len(points) <= _MOST:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST)
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept |= {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
    return sorted(kept)


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Two to seven round numbers that span a range, its ends within the first and the last."""
    if high <= low:
        around = abs(low) / 10 or 1.0
        low, high = low - around if low else 0.0, high + around
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def number(value: float) -> str:
    """A number for a label: at most four digits, or in powers of ten."""
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _svg(points: Sequence[Point], title: str) -> str:
    steps, values = zip(*points, strict=True)
    up, first, last = ticks(min(values), max(values)), min(steps), max(max(steps), min(steps) + 1)
    across = [step for step in ticks(first, last, whole=True) if first <= step <= last]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(step: float) -> str:
        return f"{_LEFT + (step - first) / (last - first) * (right - _LEFT):.1f}"

    def y(value: float) -> str:
        return f"{bottom - (value - up[0]) / (up[-1] - up[0]) * (bottom - _TOP):.1f}"

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)} by step">'
    ]
    for value in up:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value)}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value)}" class="up">{number(value)}</text>')
    for step in across:
        parts.append(f'<path class="tick" d="M{x(step)} {bottom}v4"/>')
        parts.append(f'<text x="{x(step)}" y="{_HEIGHT - 8}" class="across">{step:,.0f}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    line = " ".join(f"{x(step)},{y(value)}" for step, value in points)
    parts.append(f'<polyline points="{line}"/>')
    small = ' class="many"' if len(points) > 60 else ""
    parts += [
        f'<circle cx="{x(step)}" cy="{y(value)}" r="3"{small}>'
        f"<title>step {step:,}: {value:.6g}</title></circle>"
        for step, value in points
    ]
    return "".join([*parts, "</svg>"])
