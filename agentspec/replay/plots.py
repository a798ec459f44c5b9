"""Small plots as inline SVG: dots, bars, stacked bars and time lines. Colours and fonts are classes of the page's style sheet.

Each function returns one well-formed `<svg>` element that scales with its container. Hovering shows exact values (`<title>`). Knows numbers and
labels only, nothing of replays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 520
HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 34

_GOLDEN = 0.6180339887
"""Multiples of it, modulo 1, spread evenly: dots of one column stand beside each other without randomness."""

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Dot:
    x: int
    """Column, from 0."""
    y: float
    label: str
    kind: str = ""
    """A further class of the style sheet."""


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    """Under the bar."""
    parts: tuple[float, ...]
    """From the bottom up; their classes are part0, part1 ..."""
    note: str
    """Over the bar."""
    label: str


@dataclass(frozen=True, slots=True)
class Span:
    start: float
    end: float
    kind: str
    """Classes of the style sheet."""
    label: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values to pixels from the bottom, linear from 0 or logarithmic."""

    low: float
    high: float
    is_log: bool

    def __call__(self, value: float) -> float:
        height = HEIGHT - _TOP - _BOTTOM
        if self.is_log:
            value = max(value, self.low)
            part = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            part = value / self.high
        return HEIGHT - _BOTTOM - part * height

    def ticks(self) -> list[float]:
        if not self.is_log:
            return ticks(self.high, at_most=6)
        decades = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
        return [10.0**decade for decade in decades]


def ticks(high: float, at_most: int = 5) -> list[float]:
    """Round numbers from 0 to `high`, 1, 2 or 5 times a power of ten apart."""
    step = 10.0 ** math.floor(math.log10(high / at_most))
    step *= next(factor for factor in (1, 2, 5, 10) if high / (step * factor) <= at_most)
    return [index * step for index in range(int(high / step * (1 + 1e-9)) + 1)]


def dots(points: Sequence[Dot], medians: Sequence[float | None], *, axis: str, show: Format) -> str:
    """Points by column with a line through the columns' medians; logarithmic when they span more than a factor of fifty."""
    values = [point.y for point in points]
    least, most = min(values), max(values)
    is_log = least > 0 and most / least > 50
    scale = (
        _Scale(10.0 ** math.floor(math.log10(least)), 10.0 ** math.ceil(math.log10(most * 1.01)), True)
        if is_log
        else _Scale(0, most * 1.08 or 1, False)
    )
    place = _columns(len(medians))
    room = min(14.0, (WIDTH - _LEFT - _RIGHT) / len(medians) * 0.5)
    marks = []
    for index, point in enumerate(points):
        x = place(point.x) + (index * _GOLDEN % 1 - 0.5) * room
        marks.append(f'<circle class="{f"dot {point.kind}".strip()}" cx="{x:.1f}" cy="{scale(point.y):.1f}" r="3">{_title(point.label)}</circle>')
    line = " ".join(f"{place(index):.1f},{scale(value):.1f}" for index, value in enumerate(medians) if value is not None)
    marks.append(f'<polyline class="median" points="{line}"/>')
    return _frame(_grid(scale, show) + _names([str(index + 1) for index in range(len(medians))], place, axis) + marks)


def bars(columns: Sequence[Bar], *, axis: str, show: Format, high: float | None = None) -> str:
    """Stacked bars from 0. `high` fixes the top of the scale."""
    scale = _Scale(0, high or max(sum(column.parts) for column in columns) * 1.12 or 1, False)
    place = _columns(len(columns))
    room = (WIDTH - _LEFT - _RIGHT) / len(columns)
    width = max(1.5, min(44.0, room * 0.72))
    marks = []
    for index, column in enumerate(columns):
        below, shapes = 0.0, []
        for number, part in enumerate(column.parts):
            top, bottom = scale(below + part), scale(below)
            shapes.append(
                f'<rect class="part{number}" x="{place(index) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"/>'
            )
            below += part
        if room >= 34:
            shapes.append(f'<text class="note" x="{place(index):.1f}" y="{scale(below) - 5:.1f}">{escape(column.note)}</text>')
        marks.append(f"<g>{_title(column.label)}{''.join(shapes)}</g>")
    return _frame(_grid(scale, show) + _names([column.name for column in columns], place, axis) + marks)


def timelines(rows: Sequence[tuple[str, Sequence[Span]]], end: float, *, axis: str, show: Format) -> str:
    """One line a row, spans on a common clock from 0 to `end`, over the page's whole width."""
    width, left, step = 1080, 150, 20
    height = len(rows) * step + 44
    across = (width - left - 14) / (end or 1)
    marks = []
    for tick in ticks(end or 1, at_most=10):
        x = left + tick * across
        marks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{height - 32}"/>')
        marks.append(f'<text class="tick mid" x="{x:.1f}" y="{height - 17}">{escape(show(tick))}</text>')
    marks.append(f'<text class="axis mid" x="{left + (width - left) / 2:.0f}" y="{height - 3}">{escape(axis)}</text>')
    for number, (name, spans) in enumerate(rows):
        y = 10 + number * step
        marks.append(f'<text class="tick end" x="{left - 10}" y="{y + 10}">{escape(_short(name))}{_title(name)}</text>')
        marks.append(f'<line class="lane" x1="{left}" x2="{width - 14}" y1="{y + 6}" y2="{y + 6}"/>')
        for span in spans:
            length = max(1.0, (span.end - span.start) * across)
            shape = f'x="{left + span.start * across:.2f}" y="{y}" width="{length:.2f}" height="12" rx="1.5"'
            marks.append(f'<rect class="{span.kind}" {shape}>{_title(span.label)}</rect>')
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(marks)}</svg>'


def _frame(marks: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}</svg>'


def _grid(scale: _Scale, show: Format) -> list[str]:
    marks = []
    for tick in scale.ticks():
        y = scale(tick)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="tick end" x="{_LEFT - 7}" y="{y + 3.5:.1f}">{escape(show(tick))}</text>')
    return marks


def _columns(count: int) -> Callable[[int], float]:
    room = (WIDTH - _LEFT - _RIGHT) / max(1, count)
    return lambda index: _LEFT + room * (index + 0.5)


def _names(names: Sequence[str], place: Callable[[int], float], axis: str) -> list[str]:
    """Labels under the columns, every n-th where they are many, and the axis' own name."""
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if len(names) / step <= 16)
    marks = [
        f'<text class="tick mid" x="{place(index):.1f}" y="{HEIGHT - _BOTTOM + 15}">{escape(name)}</text>'
        for index, name in enumerate(names)
        if (index == 0 and every != 2) or (index + 1) % every == 0
    ]
    return [*marks, f'<text class="axis mid" x="{_LEFT + (WIDTH - _LEFT - _RIGHT) / 2:.0f}" y="{HEIGHT - 3}">{escape(axis)}</text>']


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _short(name: str) -> str:
    return name if len(name) <= 22 else "…" + name[-21:]
