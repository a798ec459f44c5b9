"""Draws docs/architecture.svg from the code: the rooms of agentspec/, which of them import which, and how much.

    python -m scripts.architecture            # write the picture
    python -m scripts.architecture --counts   # print the exact numbers instead

Rooms and rules are those of tests/test_architecture.py. tests/test_architecture_picture.py compares the picture in the
docs with the output of this program. Numbers in the picture are coarse (three widths, half thousands of lines), so that
it rarely changes. The package's `__init__`, which loads the public names late, and `__main__` aren't rooms and are left
out.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tests.test_architecture import FOUNDATION, ROOMS, code_lines, inner_imports, modules

PICTURE = Path(__file__).parents[1] / "docs" / "architecture.svg"
BASE = "foundation"

COLUMN: dict[str, float] = {
    "cache": 0,
    "simulate": 0,
    "runtime": 1,
    "mtp": 1,
    "models": 1,
    "kernels": 1,
    "engine": 2,
    "commands": 2,
    "server": 3.15,
    "text": 3,
    "replay": 4,
}
"""Horizontal position of each room, chosen by hand. The vertical position follows from its imports."""

FEW, SEVERAL = 3, 12
"""Maximum number of importing modules for a thin line, and for a medium one."""

CELL_WIDTH, CELL_HEIGHT, BOX_WIDTH, BOX_HEIGHT = 192, 132, 176, 98
BASE_HEIGHT = 52
LEFT, TOP = 4, 44
GRID_LEFT, GRID_STEP = 110, 30


@dataclass(frozen=True, slots=True)
class House:
    """Facts from the sources."""

    num_importing: dict[tuple[str, str], int]
    """(room, imported room) -> number of modules of the first that import the second; pairs without any are left
    out."""
    num_lines: dict[str, int]
    """Lines of code by room."""
    about: dict[str, str]
    """Description of a room: the first sentence of its docstring."""

    def imported_by(self, room: str) -> set[str]:
        return {target for source, target in self.num_importing if source == room}


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    name: str
    size: str
    about: list[str]


@dataclass(frozen=True, slots=True)
class Line:
    """An arrow from one box down to the upper edge of another one."""

    x1: float
    y1: float
    x2: float
    y2: float
    weight: int


@dataclass(frozen=True, slots=True)
class Mark:
    """One cell of the table. Weight 0: the import is allowed but unused."""

    x: float
    y: float
    weight: int
    title: str


def place_of(module: str) -> str | None:
    """The room of a module; BASE for loose modules, None for modules that are left out."""
    room = module.partition(".")[0]
    if room in ROOMS:
        return room
    return BASE if room in FOUNDATION else None


@cache
def survey() -> House:
    importing: dict[tuple[str, str], set[str]] = defaultdict(set)
    num_lines: dict[str, int] = defaultdict(int)
    for name, module in modules().items():
        room = place_of(name)
        if room is None:
            continue
        num_lines[room] += code_lines(module)
        for target, _ in inner_imports(name):
            imported = place_of(target)
            if imported not in (None, room):
                importing[room, str(imported)].add(name)
    about = {room: (ast.get_docstring(modules()[room].tree) or "").partition("\n")[0] for room in ROOMS}
    missing = [room for room, text in about.items() if not text]
    if missing or set(COLUMN) != set(ROOMS):
        raise SystemExit(
            f"{missing or sorted(set(COLUMN) ^ set(ROOMS))}: each room has a docstring in its __init__.py, and a "
            f"place in COLUMN"
        )
    return House(
        num_importing={pair: len(names) for pair, names in sorted(importing.items())},
        num_lines=dict(num_lines),
        about={room: re.split(r"[.;](?:\s|$)", text)[0] for room, text in about.items()},
    )


def levels(house: House) -> dict[str, int]:
    """Length of the longest chain of imports from each room down to the foundation, whose level is 0."""

    @cache
    def level(room: str) -> int:
        return 1 + max((level(below) for below in house.imported_by(room)), default=0) if room != BASE else 0

    return {room: level(room) for room in (*ROOMS, BASE)}


def direct(house: House) -> list[tuple[str, str]]:
    """The imports between rooms that no chain over other rooms implies (transitive reduction): these are drawn as
    arrows."""

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset().union(*({target} | below(target) for target in house.imported_by(room)))

    return [
        (room, target)
        for room, target in house.num_importing
        if target != BASE and not any(target in below(other) for other in house.imported_by(room) - {target})
    ]


def may_import(room: str) -> set[str]:
    return {str(place_of(name)) for name in ROOMS[room] if place_of(name) is not None}


def weight(num_modules: int) -> int:
    return 1 + (num_modules > FEW) + (num_modules > SEVERAL)


def size(num_lines: int) -> str:
    return f"{round(num_lines / 500) * 500:,} lines" if num_lines >= 250 else "under 250 lines"


def arrows(house: House, boxes: dict[str, Box]) -> list[Line]:
    """Arrows to the next level start at the lower edge, longer ones at the side, so that none crosses a box. They end
    at distinct points of the upper edge."""
    pairs = direct(house)
    lines = []
    for room, target in pairs:
        start, end = boxes[room], boxes[target]
        coming = sorted((source for source, name in pairs if name == target), key=lambda name: boxes[name].x)
        x2 = end.x + BOX_WIDTH * (coming.index(room) + 1) / (len(coming) + 1)
        if end.y - start.y > CELL_HEIGHT:
            x1, y1 = start.x + BOX_WIDTH * (end.x > start.x), start.y + BOX_HEIGHT * 0.6
        else:
            below = sorted(
                (name for source, name in pairs if source == room and boxes[name].y == end.y),
                key=lambda name: boxes[name].x,
            )
            x1, y1 = start.x + BOX_WIDTH * (below.index(target) + 1) / (len(below) + 1), start.y + BOX_HEIGHT
        lines.append(Line(x1, y1, x2, end.y, weight(house.num_importing[room, target])))
    return lines


def marks(house: House, rows: list[str], columns: list[str], top: float) -> list[Mark]:
    found = []
    for row, room in enumerate(rows):
        for column, target in enumerate(columns):
            number = house.num_importing.get((room, target), 0)
            if number or (room != target and target in may_import(room)):
                title = f"{room} imports {target}" if number else f"{room} may import {target}, and doesn't"
                x, y = GRID_LEFT + column * GRID_STEP, top + row * GRID_STEP
                found.append(Mark(x, y, weight(number) if number else 0, title))
    return found


def picture() -> str:
    """The whole SVG. Deterministic for the same sources."""
    house = survey()
    level = levels(house)
    highest = max(level.values())
    boxes = {
        room: Box(
            x=LEFT + COLUMN[room] * CELL_WIDTH,
            y=TOP + (highest - level[room]) * CELL_HEIGHT,
            width=BOX_WIDTH,
            height=BOX_HEIGHT,
            name=room,
            size=size(house.num_lines[room]),
            about=textwrap.wrap(house.about[room], 26, max_lines=5, placeholder=" …"),
        )
        for room in ROOMS
    }
    width = max(COLUMN.values()) * CELL_WIDTH + BOX_WIDTH
    about = f"{', '.join(FOUNDATION)}: loose modules that everyone may import, and that import nothing but each other"
    base = Box(LEFT, TOP + highest * CELL_HEIGHT, width, BASE_HEIGHT, BASE, size(house.num_lines[BASE]), [about])
    rows = sorted(ROOMS, key=lambda room: (-level[room], COLUMN[room]))
    columns = [*rows, BASE]
    top = base.y + BASE_HEIGHT + 190
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("architecture.svg.jinja").render(
        width=LEFT * 2 + width,
        height=top + len(rows) * GRID_STEP + 10,
        boxes=[*boxes.values(), base],
        arrows=arrows(house, boxes),
        rows=[(name, top + number * GRID_STEP) for number, name in enumerate(rows)],
        columns=[(name, GRID_LEFT + number * GRID_STEP) for number, name in enumerate(columns)],
        top=top,
        left=LEFT,
        marks=marks(house, rows, columns, top),
        few=FEW,
        several=SEVERAL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--counts", action="store_true", help="print how many modules of a room import another one, and lines of code"
    )
    if parser.parse_args().counts:
        house = survey()
        for (room, target), number in house.num_importing.items():
            print(f"{room:>10} imports {target:<10} in {number:3} modules")
        for room, number in house.num_lines.items():
            print(f"{room:>10} has {number:6,} lines of code")
    else:
        PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
