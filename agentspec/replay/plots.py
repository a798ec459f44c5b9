"""Layout of small plots: dots, stacked bars and timelines. templates/plots.svg.jinja draws them.

Coordinates are pixels from the plot's upper left corner. Knows numbers and labels only, nothing of replays or markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

WIDTH = 520
HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 34

_GOLDEN_RATIO = 0.6180339887
"""Its multiples modulo 1 are evenly spread: deterministic jitter for the dots of a column."""

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Tick:
    """A grid line, or a label under a column."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class PlacedDot:
    x: float
    y: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class PlacedPart:
    top: float
    height: float


@dataclass(frozen=True, slots=True)
class PlacedBar:
    x: float
    """Centre of the bar."""
    width: float
    parts: list[PlacedPart]
    """From bottom to top."""
    note: str
    """Text over the bar; empty when there is no room."""
    label: str


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    x: float
    width: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Row:
    y: int
    name: str
    short_name: str
    spans: list[PlacedSpan]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    kind: Literal["dots", "bars", "timelines"]
    grid: list[Tick]
    axis: str
    names: list[Tick] = field(default_factory=list)
    marks: Sequence[PlacedDot | PlacedBar] = ()
    line: list[tuple[float, float]] = field(default_factory=list)
    """Of dots: the line through the medians."""
    rows: list[Row] = field(default_factory=list)
    """Of timelines."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class Dot:
    x: int
    """Column index, from 0."""
    y: float
    label: str
    kind: str = ""
    """Additional CSS class."""


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    """Label under the bar."""
    parts: tuple[float, ...]
    """From bottom to top; CSS classes part0, part1, ..."""
    note: str
    """Text over the bar."""
    label: str


@dataclass(frozen=True, slots=True)
class Span:
    start: float
    end: float
    kind: str
    """CSS classes."""
    label: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to y coordinates, linear from 0 or logarithmic."""

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
    """Return round numbers from 0 to `high`, spaced by 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10(high / at_most))
    step *= next(factor for factor in (1, 2, 5, 10) if high / (step * factor) <= at_most)
    return [index * step for index in range(int(high / step * (1 + 1e-9)) + 1)]


def dots(points: Sequence[Dot], medians: Sequence[float | None], *, axis: str, show: Format) -> Plot:
    """Lay out points by column, and a line through the medians. The scale is logarithmic when values span more than a
    factor of 50."""
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
    marks = [
        PlacedDot(place(point.x) + (index * _GOLDEN_RATIO % 1 - 0.5) * room, scale(point.y), point.kind, point.label)
        for index, point in enumerate(points)
    ]
    line = [(place(index), scale(value)) for index, value in enumerate(medians) if value is not None]
    names = _names([str(index + 1) for index in range(len(medians))], place)
    return Plot(kind="dots", grid=_grid(scale, show), names=names, axis=axis, marks=marks, line=line)


def bars(columns: Sequence[Bar], *, axis: str, show: Format, high: float | None = None) -> Plot:
    """Lay out stacked bars from 0. `high` fixes the top of the scale."""
    scale = _Scale(0, high or max(sum(column.parts) for column in columns) * 1.12 or 1, False)
    place = _columns(len(columns))
    room = (WIDTH - _LEFT - _RIGHT) / len(columns)
    width = max(1.5, min(44.0, room * 0.72))
    marks = []
    for index, column in enumerate(columns):
        edges = [scale(level) for level in accumulate(column.parts, initial=0.0)]
        parts = [PlacedPart(top, bottom - top) for bottom, top in pairwise(edges)]
        marks.append(PlacedBar(place(index), width, parts, column.note if room >= 34 else "", column.label))
    names = _names([column.name for column in columns], place)
    return Plot(kind="bars", grid=_grid(scale, show), names=names, axis=axis, marks=marks)


def timelines(rows: Sequence[tuple[str, Sequence[Span]]], end: float, *, axis: str, show: Format) -> Plot:
    """Lay out one timeline per row, on a common clock from 0 to `end`, over the full page width."""
    width, left, step = 1080, 150, 20
    right = width - 14
    across = (right - left) / (end or 1)
    placed = [
        Row(
            10 + number * step,
            name,
            _short(name),
            [
                PlacedSpan(
                    left + span.start * across, max(1.0, (span.end - span.start) * across), span.kind, span.label
                )
                for span in spans
            ],
        )
        for number, (name, spans) in enumerate(rows)
    ]
    grid = [Tick(left + tick * across, show(tick)) for tick in ticks(end or 1, at_most=10)]
    height = len(rows) * step + 44
    return Plot(kind="timelines", grid=grid, axis=axis, rows=placed, width=width, height=height, left=left, right=right)


def _grid(scale: _Scale, show: Format) -> list[Tick]:
    return [Tick(scale(tick), show(tick)) for tick in scale.ticks()]


def _columns(count: int) -> Callable[[int], float]:
    room = (WIDTH - _LEFT - _RIGHT) / max(1, count)
    return lambda index: _LEFT + room * (index + 0.5)


def _names(names: Sequence[str], place: Callable[[int], float]) -> list[Tick]:
    """Return labels under the columns; every n-th when there are many."""
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if len(names) / step <= 16)
    return [
        Tick(place(index), name)
        for index, name in enumerate(names)
        if (index == 0 and every != 2) or (index + 1) % every == 0
    ]


def _short(name: str) -> str:
    return name if len(name) <= 22 else "…" + name[-21:]
