"""Tokens a second with copies behind MTP drafts, on recorded sessions: `python -m benchmarks.copies --sessions FILE...`

Runs the engine's own loop and window policy on models of published shapes with random weights. Outputs are forced to
the recorded answers, and MTP drafts are right at the given rates, so a copy is accepted exactly where it equals what
was recorded (recorded_turns.py). copies_offline.py counts the same without a model, and so without step times.

Turns are drawn at random from a file, the same for all its cases; prompts are not computed. Tokens are those of a
tokenizer, by default the bundled one: shorter than those of large models, so matches are longer in tokens. Files are
agentspec.replay/1 with recorded answers; `agentspec import` makes them of other traces.

Checks run first: tiny-agent's tokens with copies on the device against the CPU's without drafts. Then every case must
emit the recorded tokens, with as many copies in each window as the rule gives; without that it has no figures. A case
that doesn't fit or wasn't reached stays in the table, with the reason.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from agentspec.engine import bundled
from agentspec.models.registry import resolved_config
from agentspec.replay.encoders import find_encoder
from agentspec.types import MAX_COPIES
from benchmarks.case_runs import CaseRun
from benchmarks.copies_offline import RATES, numbers
from benchmarks.copies_report import Report, Result, figures_of
from benchmarks.decode_checks import check_small_model
from benchmarks.published import CONFIGS, PrefilledModel
from benchmarks.recorded_turns import Recording, check_copies, play, read_recording
from benchmarks.running_engine import Case, missing_bytes, windows_of_one_width

TINY = "tiny"
"""The bundled model's shapes."""
SESSIONS = Path(__file__).resolve().parent.parent / "workloads" / "recorded.jsonl"


class Run(CaseRun[Result]):
    """Plays the recorded turns of each case."""

    def __init__(
        self, report: Report, device: torch.device, *, deadline: float, done: Callable[[Result], None]
    ) -> None:
        configs = CONFIGS | {TINY: resolved_config(bundled.DIRECTORY, random_weights=True)}
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        super().__init__(configs, device, deadline=deadline, done=done, dtype=dtype)
        self._report = report
        self._compiled: set[str] = set()
        """Models whose kernels are compiled."""

    def play_all(self) -> None:
        """Raises CheckFailedError when an engine emits anything else than what was recorded."""
        self.for_each(self._report.results, self._play, what="run")

    def _play(self, result: Result, model: PrefilledModel) -> None:
        case, turns, rates = result.case, result.recording.turns, self._report.rates
        self.require(missing_bytes(case, model.spec, self._device, num_steps=1))
        widest = None
        if case.model not in self._compiled:
            self._compiled.add(case.model)
            widest = max(
                (other.case for other in self._report.results if other.case.model == case.model),
                key=lambda other: (other.copies, other.batch),
            )
        with nullcontext() if case.shares else windows_of_one_width():
            played = play(
                case, turns, model, self._device, rates=rates, time_is_up=lambda: self.time_is_up, widest=widest
            )
        num_checked = check_copies(
            played, turns, len(rates), case.copies, min_match=model.spec.min_copy_match, shares=case.shares
        )
        if played.num_turns < len(turns):
            result.note = f"the time was up after {played.num_turns} of {len(turns)} turns"
        result.figures = figures_of(played, turns, num_mtp=len(rates), num_checked=num_checked)
        if result.figures is None:
            result.note = result.note or "too few steps in which every user decodes"


def chosen_cases(options: argparse.Namespace, recordings: list[Recording]) -> list[Result]:
    """By model, file and users; MTP alone first. Copies only where slots have rings."""
    return [
        Result(
            recording=recording,
            case=Case(
                model=model,
                context=recording.context,
                batch=users,
                depth=len(options.mtp_rates),
                state_form=state_form,
                copies=copies,
                shares=shares,
            ),
        )
        for model in options.models
        for recording in recordings
        for users in options.users
        for state_form in options.state_form
        for copies in sorted(options.copies)
        for shares in ((False, True) if options.one_width and copies else (True,))
        if state_form == "ring" or not copies
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.copies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", nargs="+", type=Path, default=[SESSIONS], metavar="FILE")
    parser.add_argument("--models", nargs="+", choices=[*CONFIGS, TINY], default=["4B", "27B-FP8"])
    parser.add_argument("--users", nargs="+", type=int, default=[1, 4], help="turns that are decoded at a time")
    parser.add_argument("--copies", nargs="+", type=int, default=[0, MAX_COPIES], help="most copies of a window")
    parser.add_argument(
        "--state-form", nargs="+", choices=("rows", "ring"), default=["ring"], help="as of an engine; copies need rings"
    )
    parser.add_argument(
        "--one-width", action="store_true", help="also with copies where all windows of a step have the same columns"
    )
    parser.add_argument(
        "--mtp-rates", type=numbers(float), default=RATES, help="of each draft, if those before it are right; commas"
    )
    parser.add_argument("--tokens", type=int, default=8_000, help="answer tokens of a case, about")
    parser.add_argument("--max-context", type=int, default=32_768, help="longer turns are left out")
    parser.add_argument("--tokenizer", help="a checkpoint directory; default: the bundled model's")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case and no turn after so long")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of turns")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="write all figures here, after every case")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    began = time.perf_counter()
    device, most_copies = torch.device(options.device), max(options.copies)
    encoder = find_encoder(options.tokenizer or bundled.checkpoint_of(bundled.NAME))
    read = partial(
        read_recording,
        encoder=encoder,
        max_context=options.max_context,
        num_tokens=options.tokens,
        most_copies=most_copies,
        seed=options.seed,
    )
    recordings = [read(path) for path in options.sessions]
    checks = [check_small_model(options.device, num_copies=most_copies)]
    print("\n".join([*map(str, recordings), *(f"checked: {check}" for check in checks)]), flush=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    report = Report(
        machine=f"{name}, torch {torch.__version__}",
        command=" ".join(["python -m benchmarks.copies", *sys.argv[1:]]),
        tokenizer=encoder.name,
        rates=options.mtp_rates,
        checks=checks,
        results=chosen_cases(options, recordings),
    )

    def save() -> None:
        report.seconds = time.perf_counter() - began
        if options.json is not None:
            options.json.write_text(report.as_json(), encoding="utf-8")

    def done(result: Result) -> None:
        save()
        print(report.line(result), flush=True)

    Run(report, device, deadline=began + options.minutes * 60, done=done).play_all()
    save()
    print(report.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
