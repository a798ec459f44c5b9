"""What copies behind MTP drafts would add, counted on recorded sessions. Runs no model.

    python -m benchmarks.copies_offline FILE... [--sessions N] [--mtp-rates 0.92,0.845,0.81]

A step drafts MTP tokens and behind them copies of the session's own text (agentspec/mtp/copies.py). The recorded answer
is what the target would choose, so copies are scored exactly. Whether an MTP draft is right is drawn at the given rates
(each given that all earlier ones are right), seeded, independently of the text. The draw belongs to the position, so
all settings see the same drafts. The default rates are published ones of Qwen3.5 on code.

A copy fires if all MTP drafts of its step are right and the match has at least the gate's length. What happens behind a
wrong draft can't be known here: such copies are never accepted, and they are not counted as fired. "Late by one" allows
copies only if the previous step had a match too, "late by two" if the one before that had: policies that must choose a
step's width before its match is known.

Tokens are those of a tokenizer: by default the bundled one, whose tokens are shorter than those of large models. So its
matches are longer in tokens, and its gates are weaker. Each answer's first token comes with the prompt's pass; it is
no step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentspec.engine import bundled
from agentspec.replay.encoders import find_encoder
from agentspec.replay.render import TraceRenderer
from agentspec.replay.schema import ReplayFile, Session, load
from agentspec.types import MAX_COPY_MATCH

RATES = (0.92, 0.845, 0.81)
"""InferenceX's golden acceptance lengths of Qwen3.5 without thinking: 1.92, 2.70 and 3.33 tokens a step."""
GATES, WIDTHS = (2, 3, 4, 6, 8, 12), (4, 8, 12)
LENGTHS = ((1, 2), (3, 5), (6, 8), (9, 12), (13, 20), (21, MAX_COPY_MATCH))
"""Match lengths, both ends included, that the acceptance of the first copy is reported for."""

Integers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A sequence that only grew: one or several turns of a session."""

    tokens_N: Integers
    answers: list[tuple[int, int]]
    """Half-open spans of recorded answers that are scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    """The copy rule at every position of a text: as if the position's token were the last draft."""

    length_N: Integers
    """Length of the longest match, at most MAX_COPY_MATCH; 0: none."""
    end_N: Integers
    """Position where the most recent match of that length ends; -1: none."""
    run_N: Integers
    """Number of leading copies that the text goes on with, up to the widest copy and the end of the text."""

    @classmethod
    def of(cls, tokens_N: Integers, most_copies: int) -> Matches:
        length_N, end_N = longest_matches(tokens_N)
        run_N = np.zeros_like(length_N)
        (found,) = np.nonzero(length_N)
        for i in range(most_copies):
            found = found[found + 1 + i < len(tokens_N)]
            copy = tokens_N[end_N[found] + 1 + i % (found - end_N[found])]
            found = found[copy == tokens_N[found + 1 + i]]
            run_N[found] += 1
        return cls(length_N=length_N, end_N=end_N, run_N=run_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """When copies are drafted. Width 0: never."""

    gate: int
    width: int
    late: int = 0
    """Copies only if the step so many steps before had a match too."""


@dataclass(slots=True)
class Score:
    steps: int = 0
    tokens: int = 0
    fired: int = 0
    """Steps with copies."""
    accepted: int = 0
    """Copies."""

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / max(self.steps, 1)


def longest_matches(tokens_N: Integers) -> tuple[Integers, Integers]:
    """Return (length_N, end_N) of Matches.

    Round m has the positions whose last m - 1 tokens occur elsewhere too, each with a number for these tokens. Sorting
    by that number and the token before gives the number of the last m. Positions that share it lie side by side in the
    order of the text, so each one's predecessor is its most recent match of m tokens."""
    length_N, end_N = np.zeros(len(tokens_N), np.int64), np.full(len(tokens_N), -1, np.int64)
    position = np.arange(len(tokens_N))
    number = np.zeros_like(position)
    num_tokens = int(tokens_N.max(initial=0)) + 1
    for length in range(1, MAX_COPY_MATCH + 1):
        key = number * num_tokens + tokens_N[position - length + 1]
        order = np.argsort(key, kind="stable")
        is_same = np.diff(key[order]) == 0
        later, earlier = order[1:][is_same], order[:-1][is_same]
        length_N[position[later]], end_N[position[later]] = length, position[earlier]
        number[order] = np.cumsum(np.concatenate(([True], ~is_same)))[: len(order)]
        is_shared = np.zeros(len(position), bool)
        is_shared[later] = is_shared[earlier] = True
        is_shared &= position >= length
        position, number = position[is_shared], number[is_shared]
    return length_N, end_N


def texts_of(file: ReplayFile, session: Session, renderer: TraceRenderer, *, with_calls: bool) -> Iterator[Text]:
    """Yield the session's texts. A prompt that does not begin with the sequence before it begins another text.

    with_calls: also score answers that contain tool calls."""
    tokens, answers = [0] * 0, [(0, 0)] * 0
    for turn, rendered in zip(session.turns, renderer.turns(file, session), strict=False):
        prompt = rendered.prompt_ids.tolist()
        if prompt[: len(tokens)] != tokens:
            yield Text(tokens_N=np.array(tokens, np.int64), answers=answers)
            answers = []
        tokens = prompt + rendered.output_ids.tolist()
        recorded = turn.recorded_message
        if recorded is not None and (with_calls or not recorded.tool_calls):
            answers.append((len(prompt), len(tokens)))
    yield Text(tokens_N=np.array(tokens, np.int64), answers=answers)


def scored_texts(
    file: ReplayFile, sessions: Sequence[Session], renderer: TraceRenderer, *, with_calls: bool = True
) -> Iterator[Text]:
    """Yield the sessions' texts that have answers to score."""
    for session in sessions:
        yield from (text for text in texts_of(file, session, renderer, with_calls=with_calls) if text.answers)


def draw_right_drafts(num_positions: int, rates: Sequence[float], rng: np.random.Generator) -> Integers:
    """Number of leading MTP drafts that are right, for a step at each position."""
    return np.asarray((rng.random((num_positions, len(rates))) < rates).cumprod(1).sum(1), np.int64)


def score(text: Text, matches: Matches, right_N: Integers, num_drafts: int, settings: Sequence[Setting]) -> list[Score]:
    """Decode the text's answers once for each setting. right_N: see draw_right_drafts."""
    right, length, run = right_N.tolist(), matches.length_N.tolist(), matches.run_N.tolist()
    scores = []
    for setting in settings:
        total = Score()
        for start, stop in text.answers:
            _decode(start, stop, setting, right, length, run, num_drafts, total)
        scores.append(total)
    return scores


def _decode(
    start: int,
    stop: int,
    setting: Setting,
    right: list[int],
    length: list[int],
    run: list[int],
    num_drafts: int,
    total: Score,
) -> None:
    """Add the steps of one answer. `start` is the position of its first token, which needs no step."""
    last, had_match = start, [False] * setting.late
    while last < stop - 1:
        room, num_accepted = stop - 1 - last, 0
        final_draft = last + num_drafts
        has_match = right[last] == num_drafts and num_drafts < room and length[final_draft] >= setting.gate
        had_match.append(has_match)
        if has_match and setting.width and had_match[-1 - setting.late]:
            num_accepted = min(run[final_draft], setting.width, room - num_drafts)
            total.fired += 1
            total.accepted += num_accepted
        emitted = min(right[last] + num_accepted + 1, room)
        total.steps += 1
        total.tokens += emitted
        last += emitted


@dataclass(slots=True)
class Report:
    """Sums over a file's texts."""

    settings: list[Setting]
    scores: list[Score]
    positions: list[int]
    """Number of positions of answers whose longest match has a length of LENGTHS; last, of all positions."""
    first_right: list[int]
    """Of these, how often the first copy was right."""

    @classmethod
    def empty(cls, gates: Sequence[int], widths: Sequence[int]) -> Report:
        settings = [Setting(gate=gates[0], width=0)]
        settings += [
            Setting(gate=gate, width=width, late=late) for gate in gates for width in widths for late in range(3)
        ]
        return cls(settings, [Score() for _ in settings], [0] * (len(LENGTHS) + 1), [0] * len(LENGTHS))

    def add(self, text: Text, rates: Sequence[float], rng: np.random.Generator) -> None:
        most_copies = max(setting.width for setting in self.settings)
        matches = Matches.of(text.tokens_N, max(most_copies, 1))
        right_N = draw_right_drafts(len(text.tokens_N), rates, rng)
        for sum_, new in zip(self.scores, score(text, matches, right_N, len(rates), self.settings), strict=True):
            sum_.steps, sum_.tokens = sum_.steps + new.steps, sum_.tokens + new.tokens
            sum_.fired, sum_.accepted = sum_.fired + new.fired, sum_.accepted + new.accepted
        for start, stop in text.answers:
            inside = slice(start, max(stop - 1, start))
            length, is_right = matches.length_N[inside], matches.run_N[inside] > 0
            self.positions[-1] += len(length)
            for place, (low, high) in enumerate(LENGTHS):
                is_here = (low <= length) & (length <= high)
                self.positions[place] += int(is_here.sum())
                self.first_right[place] += int((is_here & is_right).sum())

    def lines(self) -> Iterator[str]:
        scores = dict(zip(self.settings, self.scores, strict=True))
        alone = self.scores[0].tokens_a_step
        yield f"MTP alone: {alone:.2f} tokens a step, {self.scores[0].tokens:,} tokens"
        yield ""
        yield "| gate | copies | tokens a step | over MTP alone | steps that fire | accepted | late by 1 | by 2 |"
        yield "|---|---|---|---|---|---|---|---|"
        widths = sorted({setting.width for setting in self.settings if setting.width})
        gates = sorted({setting.gate for setting in self.settings})

        def cell(gate: int, value: Callable[[Score], float], form: str, late: int = 0) -> str:
            rows = [scores[Setting(gate=gate, width=width, late=late)] for width in widths]
            return " / ".join(f"{value(row):{form}}" for row in rows)

        def gain(row: Score) -> float:
            return row.tokens_a_step / alone - 1

        for gate in gates:
            cells = [
                str(gate),
                " / ".join(map(str, widths)),
                cell(gate, lambda row: row.tokens_a_step, ".2f"),
                cell(gate, gain, "+.0%"),
                cell(gate, lambda row: row.fired / max(row.steps, 1), ".0%"),
                cell(gate, lambda row: row.accepted / max(row.fired, 1), ".2f"),
                cell(gate, gain, "+.0%", late=1),
                cell(gate, gain, "+.0%", late=2),
            ]
            yield f"| {' | '.join(cells)} |"
        yield ""
        yield "| longest match | share of positions | first copy right |"
        yield "|---|---|---|"
        for place, (low, high) in enumerate(LENGTHS):
            share = self.positions[place] / max(self.positions[-1], 1)
            right = self.first_right[place] / max(self.positions[place], 1)
            yield f"| {low}-{high} | {share:.0%} | {right:.0%} |"


def report_file(path: Path, args: argparse.Namespace) -> Iterator[str]:
    file, rng = load(path), np.random.default_rng(args.seed)
    encoder = find_encoder(args.tokenizer or bundled.checkpoint_of("tiny-agent"))
    renderer = TraceRenderer(encoder, args.template)
    report, sessions = Report.empty(args.gates, args.widths), file.sessions[: args.sessions]
    num_texts = 0
    for text in scored_texts(file, sessions, renderer, with_calls=not args.without_calls):
        num_texts += 1
        report.add(text, args.mtp_rates, rng)
    yield f"## {path.name}"
    yield ""
    yield f"{len(sessions)} sessions, {num_texts} texts, tokens by {encoder.name}. MTP-{len(args.mtp_rates)}."
    yield from report.lines()
    yield ""


def numbers(kind: type[Any]) -> Any:
    return lambda text: tuple(kind(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.copies_offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="recorded sessions (agentspec.replay/1)")
    parser.add_argument("--sessions", type=int, help="the first so many of each file")
    parser.add_argument("--mtp-rates", type=numbers(float), default=RATES, help="conditional, comma-separated")
    parser.add_argument("--gates", type=numbers(int), default=GATES, help="least match lengths, comma-separated")
    parser.add_argument("--widths", type=numbers(int), default=WIDTHS, help="numbers of copies, comma-separated")
    parser.add_argument("--without-calls", action="store_true", help="score only answers without tool calls")
    parser.add_argument("--template", choices=("stable", "qwen35"), default="stable", help="how history is rendered")
    parser.add_argument("--tokenizer", help="a checkpoint directory; default: the bundled model's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for path in args.files:
        print("\n".join(report_file(path, args)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
