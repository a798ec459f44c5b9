"""An agent in a small Python repository: it lists, reads, searches, edits and runs tests until a defect is fixed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from workloads.script import Script, tool

TOOLSET = "workspace"

TOOLS = [
    tool(
        "list_files",
        "List the files below a folder of the repository, one path a line.",
        ["folder"],
        folder="Path from the repository's root",
    ),
    tool(
        "read_file",
        "Return a text file with line numbers. Long files are cut; ask for a range then.",
        ["path"],
        path="Path from the repository's root",
        first_line={"type": "integer", "description": "First line to return, from 1"},
        last_line={"type": "integer", "description": "Last line to return"},
    ),
    tool(
        "search",
        "Find a regular expression in the repository. Returns path, line number and line for each hit, at most fifty.",
        ["pattern"],
        pattern="Python regular expression",
        glob="Only in files whose path matches, such as src/**/*.py",
    ),
    tool(
        "replace_lines",
        "Replace a range of lines of a file. The rest of the file stays as it is.",
        ["path", "first_line", "last_line", "text"],
        path="Path from the repository's root",
        first_line={"type": "integer"},
        last_line={"type": "integer"},
        text="The new lines, with their indentation",
    ),
    tool(
        "run_tests",
        "Run the test suite, or a part of it, and return what it prints.",
        [],
        target="A test file or a test's name",
    ),
]

_SYSTEM = """You are the maintenance agent of a small software company. You work alone in a checkout of one \
repository, and a person reads what you \
did afterwards. Nobody can answer questions while you work, so where a request leaves something open, take the \
smallest reading that makes sense, \
and say so at the end.

How to work:
1. Look before you change. Read the code that a report points at, and its tests, and run the tests once, so that you \
know what fails already.
2. Find the cause. A change that makes a symptom go away without an explanation is worse than none; if you can't \
explain it, report what you found.
3. Change as little as possible. Keep the style of the file, keep names, keep the order of functions. Don't tidy up \
code that has nothing to do with \
the request, and never edit a test to make it pass unless the test itself is what was reported.
4. Run the tests again. Say which ones you ran and what came out.
5. Close with two or three sentences for the person who reads it: the cause, the change, and anything that looks \
wrong but was left alone.

About the tools: paths are relative to the root of the repository. Line numbers are those of the file as it is now, \
so read again after an edit \
before you edit the same file once more. Several independent calls may be made in one go. The test run has no network \
and takes up to a minute; \
prefer one test file to the whole suite while you are looking around. Nothing outside the repository can be read or \
written, and nothing is \
committed: the person does that after reading the diff.

Money is kept in integer cents throughout, times in UTC, and public functions have type hints. The oldest Python that \
must work is 3.10.
"""


@dataclass(frozen=True)
class Defect:
    group: str
    repository: str
    report: str
    pattern: str
    path: str
    code: str
    wrong: str
    """The line to fix, as in `code`."""
    right: str
    test: str
    failure: str
    cause: str


_INVOICE = Defect(
    group="invoice rounding",
    repository="billing",
    report="Customers with a {a} % discount see invoices that are a cent off from what our spreadsheet says, for "
    "instance {b} positions at 0.35. "
    "Please find out why and mend it.",
    pattern="discount",
    path="billing/invoice.py",
    code='''"""Invoices: positions, discounts and tax, all in cents."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Position:
    label: str
    quantity: int
    unit_cents: int

    @property
    def net_cents(self) -> int:
        return self.quantity * self.unit_cents


@dataclass
class Invoice:
    number: str
    discount_percent: int = 0
    tax_percent: int = 19
    positions: list[Position] = field(default_factory=list)

    def add(self, label: str, quantity: int, unit_cents: int) -> None:
        if quantity < 1:
            raise ValueError(f"quantity={quantity}: must be at least 1")
        self.positions.append(Position(label, quantity, unit_cents))

    def discounted(self, position: Position) -> int:
        return int(position.net_cents * (100 - self.discount_percent) / 100)

    def net_cents(self) -> int:
        return sum(self.discounted(position) for position in self.positions)

    def tax_cents(self) -> int:
        return round_half_up(self.net_cents() * self.tax_percent, 100)

    def gross_cents(self) -> int:
        return self.net_cents() + self.tax_cents()


def round_half_up(numerator: int, denominator: int) -> int:
    """Integer division, rounded to the nearest, halves upwards."""
    return (2 * numerator + denominator) // (2 * denominator)
''',
    wrong="        return int(position.net_cents * (100 - self.discount_percent) / 100)",
    right="        return round_half_up(position.net_cents * (100 - self.discount_percent), 100)",
    test="tests/test_invoice.py",
    failure="E       assert 1137 == 1138\nE        +  where 1137 = net_cents()",
    cause="The discount was computed as a float and cut off, so a position could lose up to a cent. It now uses "
    "round_half_up like the tax.",
)

_PAGER = Defect(
    group="missing last page",
    repository="catalogue",
    report="The product list never shows its last page when the number of products is {a} and a page holds {b}. "
    "Search results have the same fault.",
    pattern="page_size",
    path="catalogue/paging.py",
    code='''"""Pages of a list: which items a page holds, and links to its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_PAGE_SIZE = 200


@dataclass(frozen=True)
class Page(Generic[T]):
    items: Sequence[T]
    number: int
    num_pages: int

    @property
    def previous(self) -> int | None:
        return self.number - 1 if self.number > 1 else None

    @property
    def following(self) -> int | None:
        return self.number + 1 if self.number < self.num_pages else None


def count_pages(num_items: int, page_size: int) -> int:
    """Pages that a list of `num_items` fills; an empty list has one, empty page."""
    check_page_size(page_size)
    return max(1, num_items // page_size)


def take_page(items: Sequence[T], number: int, page_size: int) -> Page[T]:
    num_pages = count_pages(len(items), page_size)
    if not 1 <= number <= num_pages:
        raise LookupError(f"page {number} of {num_pages}")
    start = (number - 1) * page_size
    return Page(items[start : start + page_size], number, num_pages)


def check_page_size(page_size: int) -> None:
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size={page_size}: must be between 1 and {MAX_PAGE_SIZE}")
''',
    wrong="    return max(1, num_items // page_size)",
    right="    return max(1, -(-num_items // page_size))",
    test="tests/test_paging.py",
    failure="E       LookupError: page 5 of 4",
    cause="The number of pages was rounded down, so a last page that is not full could not be reached. It is "
    "rounded up now.",
)

_REMINDER = Defect(
    group="late reminders",
    repository="reminders",
    report="Reminders set for {a}:00 go out {b} hours late for people whose clock is not UTC. It began when we "
    "added daily repeats.",
    pattern="next_time",
    path="reminders/schedule.py",
    code='''"""When a reminder is due next. Everything is stored in UTC; a repeat keeps the wall clock of its owner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

REPEATS = {"daily": timedelta(days=1), "weekly": timedelta(days=7)}


@dataclass(frozen=True)
class Reminder:
    text: str
    due: datetime
    zone: str
    repeat: str | None = None

    def __post_init__(self) -> None:
        if self.due.tzinfo is None:
            raise ValueError("due: needs a time zone")
        if self.repeat is not None and self.repeat not in REPEATS:
            raise ValueError(f"repeat={self.repeat!r}: must be one of {', '.join(REPEATS)}")


def next_time(reminder: Reminder, now: datetime) -> Reminder | None:
    """The reminder with its next due time after `now`; None when it is over."""
    if reminder.due > now:
        return reminder
    if reminder.repeat is None:
        return None
    zone = ZoneInfo(reminder.zone)
    step = REPEATS[reminder.repeat]
    local = reminder.due.replace(tzinfo=zone)
    while local.astimezone(timezone.utc) <= now:
        local += step
    return replace(reminder, due=local.astimezone(timezone.utc))


def due_reminders(reminders: list[Reminder], now: datetime) -> list[Reminder]:
    return sorted((reminder for reminder in reminders if reminder.due <= now), key=lambda reminder: reminder.due)
''',
    wrong="    local = reminder.due.replace(tzinfo=zone)",
    right="    local = reminder.due.astimezone(zone)",
    test="tests/test_schedule.py",
    failure="E       assert datetime(2031, 5, 4, 6, 0) == datetime(2031, 5, 4, 7, 0)",
    cause="A UTC time was relabelled with the owner's zone instead of being converted, which shifted every repeat "
    "by the zone's offset.",
)

_DEFECTS = (_INVOICE, _PAGER, _REMINDER)

_FOLLOW_UPS = (
    (
        "Thanks. Is there any other place that does the same?",
        "No. The search found only the line that was changed; the other uses go through it.",
    ),
    ("Good. Could you say it in one line for the changelog?", "{cause}"),
    (
        "Which tests would have caught this earlier?",
        "One with an uneven number: every case in {test} divided without a remainder, so both forms agreed.",
    ),
)


def scripts(rng: random.Random) -> Iterator[Script]:
    for number in range(7):
        yield _script(number, _DEFECTS[number % len(_DEFECTS)], rng)


def _script(number: int, defect: Defect, rng: random.Random) -> Script:
    system = _SYSTEM + f"\nRepository: {defect.repository}. Branch: main."
    script = Script(f"coding-{number}", group=defect.group, toolset=TOOLSET, system=system, rng=rng)
    script.user(defect.report.format(a=rng.choice((11, 13, 15, 17)), b=rng.choice((4, 6, 10))))
    if rng.random() < 0.5:
        script.call(
            "First a look at the layout and at the tests as they are.",
            ("list_files", {"folder": "."}),
            ("run_tests", {"target": defect.test}),
        )
        script.results(_listing(defect, rng), _test_output(defect, rng, fixed=False))
    else:
        script.call("I'll see where this is used.", ("search", {"pattern": defect.pattern, "glob": "**/*.py"}))
        script.results(_hits(defect, rng))
    script.call(None, ("read_file", {"path": defect.path}))
    script.results(_numbered(defect.code))
    place = defect.code.split("\n").index(defect.wrong) + 1
    edit = {"path": defect.path, "first_line": place, "last_line": place, "text": defect.right}
    script.call(f"Line {place} is the cause.", ("replace_lines", edit))
    script.results("1 line replaced")
    script.call(None, ("run_tests", {"target": defect.test}))
    script.results(_test_output(defect, rng, fixed=True))
    script.say(f"{defect.cause} All tests of {defect.test} pass; nothing else was changed.")
    if rng.random() < 0.6:
        question, answer = rng.choice(_FOLLOW_UPS)
        script.user(question)
        script.say(answer.format(cause=defect.cause, test=defect.test))
    return script


def _numbered(code: str) -> str:
    return "\n".join(f"{number:4}  {line}" for number, line in enumerate(code.rstrip("\n").split("\n"), start=1))


def _listing(defect: Defect, rng: random.Random) -> str:
    names = ["__init__", "api", "cli", "config", "export", "models", "report", "store", "text", "views", "worker"]
    files = [f"{defect.repository}/{name}.py" for name in names if rng.random() < 0.8]
    tests = [f"tests/test_{name}.py" for name in names[1:] if rng.random() < 0.6]
    return "\n".join(sorted({*files, *tests, defect.path, defect.test, "README.md", "pyproject.toml", "CHANGELOG.md"}))


def _hits(defect: Defect, rng: random.Random) -> str:
    own = [
        f"{defect.path}:{number}: {line.strip()}"
        for number, line in enumerate(defect.code.split("\n"), start=1)
        if defect.pattern in line
    ]
    callers = [
        f"{defect.repository}/{name}.py:{rng.randrange(10, 240)}:     value = self.{defect.pattern}(item)"
        for name in ("api", "views", "export")
    ]
    return "\n".join(own + rng.sample(callers, rng.randrange(1, 4)))


def _test_output(defect: Defect, rng: random.Random, *, fixed: bool) -> str:
    names = (
        "empty",
        "single",
        "many",
        "limits",
        "negative",
        "large",
        "order",
        "copies",
        "zero",
        "unicode",
        "repeats",
        "errors",
    )
    chosen = rng.sample(names, rng.randrange(6, len(names)))
    lines = [
        f"{defect.test}::test_{name} PASSED [{100 * (place + 1) // (len(chosen) + 1):3}%]"
        for place, name in enumerate(chosen)
    ]
    if fixed:
        return "\n".join(
            [
                *lines,
                f"{defect.test}::test_reported PASSED [100%]",
                f"{len(chosen) + 1} passed in {rng.uniform(0.2, 3):.2f}s",
            ]
        )
    report = [f"{defect.test}::test_reported FAILED [100%]", "=" * 20 + " FAILURES " + "=" * 20, defect.failure]
    return "\n".join([*lines, *report, f"1 failed, {len(chosen)} passed in {rng.uniform(0.2, 3):.2f}s"])
