"""Time of decode steps, and its ratio to the memory floor: `python -m benchmarks.decode`.

Runs the engine's own loop on models of published shapes in bfloat16. Weights are random, the context's state and keys
are random instead of computed, and drafts are accepted at a forced rate; the output says so. None of this changes the
work of a step. The floor of a step is its compulsory bytes (step_bytes.StepBytes) over the read bandwidth measured in
the same run. For a mixture these are the bytes of the experts that its steps chose, counted in some of the same steps,
run eagerly. With --overlap off on, engines with and without overlap of the shared expert are measured alternately.

With --tensor-parallel N, N processes on N GPUs share each model (shared_model.py); figures are the first one's, and the
floor is that of a rank's bytes and of the sums over ranks, measured alone. Several N are measured one after the other.

Checks run first; without them there are no figures. Then every case is timed. Then the same cases are traced in
separate engines, because a profiler slows steps down. A case that doesn't fit or wasn't reached stays in the table,
with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from agentspec.mtp.draft_vocab import draft_vocab_size
from benchmarks import shared_model
from benchmarks.bandwidth import measure_bandwidth
from benchmarks.block_checks import check_blocks, wants_block_checks
from benchmarks.case_runs import CaseRun
from benchmarks.decode_checks import check_graphs, check_small_model
from benchmarks.decode_report import Report
from benchmarks.decode_timing import Result, Steps, floor_of, num_sums, summary, time_case, trace_case
from benchmarks.experts_touched import touched_experts
from benchmarks.overlap import PLACEMENTS, overlapped, read_trace, time_overlap
from benchmarks.published import CONFIGS, KV_DTYPES, MANY_GPUS, PrefilledModel
from benchmarks.running_engine import Case, let_go, missing_bytes
from benchmarks.shared_model import ALONE, Comparison, SharedModel

CONTEXTS = (2_048, 32_768, 131_072)
BATCHES = (1, 8, 32)
DEPTHS = (0, 3)
DRAFT_PRECISIONS = {"auto": None, "checkpoint": False, "fp8": True}
"""As published.make_model takes them."""


def core_cases() -> list[Case]:
    """Cases of the default run: each model's step for one user, at a longer context, and for many users; and the cases
    of the targets."""
    cases = []
    for model in ("4B", "27B", "9B"):
        cases += [Case(model=model, context=2_048, batch=1, depth=3, emitted=emitted) for emitted in (3.39, 3.0)]
        cases += [Case(model=model, context=2_048, batch=batch, depth=3) for batch in BATCHES[1:]]
        cases += [Case(model=model, context=2_048, batch=batch, depth=0) for batch in BATCHES]
        cases += [Case(model=model, context=context, batch=1, depth=3) for context in CONTEXTS[1:]]
        if model == "4B":
            cases.append(Case(model=model, context=2_048, batch=32, depth="auto"))
    for model in ("35B-A3B-FP8", "27B-FP8"):
        cases += [
            Case(model=model, context=2_048, batch=batch, depth=depth) for depth in DEPTHS[::-1] for batch in BATCHES
        ]
        cases.append(Case(model=model, context=CONTEXTS[1], batch=1, depth=3))
    cases.append(Case(model="0.8B", context=2_048, batch=1, depth=3))
    return cases


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The cases selected by the flags, by model."""
    axes: tuple[Sequence[str], Sequence[int], Sequence[int], Sequence[Any]]
    if options.all:
        axes = ([name for name in CONFIGS if name not in MANY_GPUS], CONTEXTS, BATCHES, DEPTHS)
    elif options.quick:
        axes = (["4B"], CONTEXTS[:1], BATCHES[:1], DEPTHS)
    elif any((options.models, options.context, options.batch, options.k)):
        axes = (
            options.models or ["4B"],
            options.context or CONTEXTS[:1],
            options.batch or BATCHES[:1],
            options.k or DEPTHS[1:],
        )
    else:
        return core_cases()
    return [
        Case(
            model=model,
            context=context,
            batch=batch,
            depth=depth,
            emitted=options.emitted,
            sampled=options.sampled,
            state_form=state_form,
            copies=copies,
            ranks=options.tensor_parallel[0],
            shares=shares,
        )
        for (model, context, batch, depth), copies, state_form in itertools.product(
            itertools.product(*axes), options.copies, options.state_form
        )
        for shares in ((True, False) if options.one_width and copies else (True,))
    ]


class Run(CaseRun[Result]):
    """Times and traces the cases, and keeps the report up to date."""

    def __init__(
        self,
        report: Report,
        device: torch.device,
        steps: Steps,
        *,
        deadline: float,
        save: Callable[[Report], None],
        fp8_drafts: bool | None = None,
        fp8_pages: bool = False,
        overlaps: Sequence[str] = (),
        shared: SharedModel = ALONE,
    ) -> None:
        """The rest as for CaseRun. save: called after every case. overlaps: choices to compare."""

        def done(result: Result) -> None:
            if shared.is_first:
                save(report)
                print(report.line(result), flush=True)

        super().__init__(
            CONFIGS,
            device,
            deadline=deadline,
            done=done,
            fp8_drafts=fp8_drafts,
            fp8_pages=fp8_pages,
            shared=shared,
        )
        self._report = report
        self._steps = steps
        self._overlaps = overlaps
        self._checked: set[str] = set()
        """Models whose graphs were compared with eager steps."""

    def time_all(self) -> None:
        """Raises CheckFailedError when a model's graphs are wrong."""
        self.for_each(self._report.results, self._time, what="run")

    def trace_all(self) -> None:
        """Trace the cases after all timing: the profiler stays active, and must be so before a graph is captured."""
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.cuda.synchronize()
        timed = [result for result in self._report.results if result.timing is not None]
        self.for_each(timed, self._trace, what="traced")

    def _time(self, result: Result, model: PrefilledModel) -> None:
        if result.case.model not in self._checked:
            self._report.checks.append(check_graphs(model, self._device))
            self._checked.add(result.case.model)
        case, config = result.case, CONFIGS[result.case.model]
        self.require(missing_bytes(case, model.spec, self._device, self._steps.total))
        result.timing = time_case(case, model, self._device, self._steps)
        if case.ranks > 1 and case.depth != "auto":
            num_tokens = case.batch * (case.depth + 1)
            result.exchange_us = self._shared.exchange_us(num_tokens, config.hidden_size, self._device)
            result.num_exchanges = num_sums(config, case.depth)
        if config.moe is not None and case.depth != "auto":
            let_go(model)
            result.experts = touched_experts(case, model, self._device)
        draft_vocab = draft_vocab_size(None, num_real_tokens=model.spec.num_real_tokens)
        result.floor_bytes = floor_of(
            case,
            config,
            result.timing,
            draft_vocab,
            experts=result.experts,
            fp8_drafts=model.fp8_drafts,
            fp8_pages=self._fp8_pages,
        )
        if config.moe is not None and self._overlaps:
            let_go(model)
            self.require(
                missing_bytes(case, model.spec, self._device, self._steps.total, num_engines=len(self._overlaps))
            )
            result.overlap = time_overlap(case, model, self._device, self._overlaps)

    def _trace(self, result: Result, model: PrefilledModel) -> None:
        result.traced = summary(trace_case(result.case, model, self._device, self._steps))
        for turns in result.overlap:
            let_go(model)
            with overlapped(turns.choice):
                read_trace(turns, trace_case(result.case, model, self._device, self._steps))

    def load(self, name: str) -> PrefilledModel:
        """The first time, check the blocks that tiny-agent lacks."""
        self.make_room(name)
        config = CONFIGS[name]
        if wants_block_checks(config) and name not in self._checked and self._shared.rank.count == 1:
            self._report.checks.append(check_blocks(name, config, self._device))
        return super().load(name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_argument_group("cases: without any of these, the core ones")
    which.add_argument("--models", nargs="+", choices=list(CONFIGS))
    which.add_argument("--context", nargs="+", type=int, help="tokens in each slot's state")
    which.add_argument("--batch", nargs="+", type=int)
    which.add_argument(
        "--k",
        nargs="+",
        type=lambda text: text if text == "auto" else int(text),
        help="drafts a step, or auto: the window policy chooses",
    )
    which.add_argument(
        "--emitted", type=float, default=3.39, help="tokens a step that forced acceptance gives with 3 drafts"
    )
    which.add_argument("--state-form", nargs="+", choices=("rows", "ring"), default=["ring"], help="as of an engine")
    which.add_argument(
        "--copies", nargs="+", type=int, default=[0], help="columns for copies, of which none is live: their cost"
    )
    which.add_argument(
        "--one-width", action="store_true", help="with copies, also where all columns are computed, dead or live"
    )
    which.add_argument("--sampled", action="store_true", help="temperature 0.6, top-k 20, top-p 0.95 instead of greedy")
    which.add_argument(
        "--overlap",
        nargs="+",
        choices=list(PLACEMENTS),
        help="where a shared expert runs; one: in all; several: compared in turns",
    )
    which.add_argument("--draft-precision", choices=list(DRAFT_PRECISIONS), default="auto", help="as of an engine")
    which.add_argument("--kv-dtype", choices=KV_DTYPES, default="bf16", help="keys and values")
    which.add_argument("--quick", action="store_true", help="4B, one user, 2k context, few steps")
    which.add_argument("--all", action="store_true", help="every model, context, batch and depth")
    parser.add_argument("--steps", type=int, default=100, help="timed steps a case")
    parser.add_argument("--max-seconds", type=float, default=480.0, help="begin no case after so long")
    parser.add_argument(
        "--no-trace", action="store_true", help="leave out what needs the profiler: kernels a step and idle time"
    )
    shared_model.add_flags(parser)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="write all figures here, after every case")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.tensor_parallel != [1] and "auto" in (options.k or ()):
        sys.exit("--k auto: each rank would choose by its own clock")
    return shared_model.run("benchmarks.decode", options, measure, STEPS_COMPARED, check=check_small_model)


def step_ms_of(path: Path) -> dict[str, float]:
    """Milliseconds a step of every measured case of a file, by the case without its number of GPUs."""
    found = {}
    for result in json.loads(path.read_text(encoding="utf-8"))["results"]:
        if result["timing"] is not None:
            found[str(Case(**result["case"] | {"ranks": 1}))] = float(result["timing"]["step_ms"])
    return found


STEPS_COMPARED = Comparison(
    read=step_ms_of,
    figure=lambda milliseconds: f"{milliseconds:.3f} ms a step",
    ratio=lambda milliseconds, alone: f"{milliseconds / alone:.3f} of the step",
)


def measure(options: argparse.Namespace) -> int:
    cases = chosen_cases(options)
    if options.overlap and all(CONFIGS[case.model].moe is None for case in cases):
        sys.exit("--overlap: none of these models has experts")
    began = time.perf_counter()
    shared, device = shared_model.of_options(options)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    checks = [check_small_model(options.device)] if shared.rank.count == 1 else []
    for check in checks:
        print(f"checked: {check}", flush=True)
    bandwidth = measure_bandwidth(device)
    report = Report(
        machine=f"{name}, torch {torch.__version__}",
        command=" ".join(["python -m benchmarks.decode", *sys.argv[1:]]),
        checks=checks,
        bandwidth=bandwidth,
        results=[Result(case=case) for case in cases],
    )

    def save(report: Report) -> None:
        if options.json is not None and shared.is_first:
            options.json.write_text(report.as_json(), encoding="utf-8")

    steps = Steps(timed=30 if options.quick else options.steps)
    overlaps = list(dict.fromkeys(options.overlap or ()))
    run = Run(
        report,
        device,
        steps,
        deadline=began + options.max_seconds,
        save=save,
        fp8_drafts=DRAFT_PRECISIONS[options.draft_precision],
        fp8_pages=options.kv_dtype == "fp8",
        overlaps=overlaps if len(overlaps) > 1 else (),
        shared=shared,
    )
    with overlapped(overlaps[0]) if len(overlaps) == 1 else nullcontext():
        run.time_all()
        if cuda and not options.no_trace:
            run.trace_all()
    report.seconds = time.perf_counter() - began
    save(report)
    shared.meet()
    if shared.is_first:
        print(report.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
