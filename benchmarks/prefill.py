"""Time to first token, and its ratio to the compute and memory floor: `python -m benchmarks.prefill`.

The engine's own loop on models of published shapes, bfloat16, with prefix cache, CUDA graphs, overlap and three drafts
a step. Parts:

- zero: 8k and 32k tokens without a cached prefix.
- append: some hundred new tokens after a long cached context, as in an agent's turn.
- fresh: a 2k prompt.
- agentic: one session with a first prompt of 50k tokens, then twelve turns of 800 tokens in and 200 out, all computed.
- pace: eight streams decode while another session's 50k prompt is computed.
- profile: the time of each kernel of an append. Only on request.
- peers: attention and recurrence alone, compared with kernels of other libraries that can be imported. Only on request.

Weights are random, the cached contexts of single prompts are random instead of computed, and drafts are accepted at a
forced rate; the output says so. benchmarks/prefill_floor.py defines the floor, which uses a matmul rate and a read
bandwidth measured in the same run.

With --tensor-parallel N, N processes on N GPUs share each model (shared_model.py); figures are the first one's, and the
floor is a GPU's part, without the sums over ranks. Several N are measured one after the other. Not with pace: beside
streams each rank would plan by its own clock.

Checks run first; without them there are no figures. A case that doesn't fit or wasn't reached stays in the report, with
the reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from agentspec.types import ModelSpec
from benchmarks import shared_model
from benchmarks.block_checks import check_blocks, wants_block_checks
from benchmarks.decode_checks import check_small_model
from benchmarks.prefill_cases import PaceCase, PromptCase, SessionCase, Shape, run_pace, run_session, time_prompts
from benchmarks.prefill_checks import check_cached_turns, check_resume_points
from benchmarks.prefill_engine import NoFigureError, PromptEngine, Room
from benchmarks.prefill_floor import measure_rates
from benchmarks.prefill_peers import compare_kernels
from benchmarks.prefill_profile import profile_prompt
from benchmarks.prefill_report import Entry, Figures, Report
from benchmarks.published import CONFIGS, KV_DTYPES, PrefilledModel, make_model
from benchmarks.running_engine import let_go, missing_for_weights
from benchmarks.shared_model import ALONE, Comparison, SharedModel

Case = PromptCase | SessionCase | PaceCase

MODELS = ("4B", "27B", "9B", "35B-A3B-FP8", "27B-FP8")
PARTS = ("zero", "append", "fresh", "agentic", "pace")
EXTRA_PARTS = ("profile", "peers")

LONG_APPEND = PromptCase(count=800, context=50_048)
CASES: dict[str, list[Case]] = {
    "zero": [PromptCase(count=8_192), PromptCase(count=32_768)],
    "append": [LONG_APPEND, PromptCase(count=890, context=16_384), PromptCase(count=890, context=25_600)],
    "fresh": [PromptCase(count=2_048)],
    "agentic": [SessionCase()],
    "pace": [PaceCase(context=50_048), PaceCase(context=2_048)],
}
FOR_ALL_MODELS: tuple[Case, ...] = (*CASES["zero"], LONG_APPEND)
"""Parts that the default run measures of every model; the other parts of the 4B only."""

WORKSPACE_BYTES = 3 * 2**30
"""Beside weights and pools: activations of the largest chunk, graphs, slots."""


def chosen_cases(options: argparse.Namespace, model: str) -> list[Case]:
    """The selected cases for one model."""
    if options.prompts:
        return list(options.prompts)
    if options.parts:
        return [case for part in options.parts if part in CASES for case in CASES[part]]
    return [case for part in PARTS for case in CASES[part] if model == MODELS[0] or case in FOR_ALL_MODELS]


class Run:
    """Measures models in sequence, within a time limit, and keeps the report up to date."""

    def __init__(
        self,
        report: Report,
        device: torch.device,
        *,
        repeats: int,
        deadline: float,
        save: Callable[[Report], None],
        fp8_pages: bool = False,
        shared: SharedModel = ALONE,
    ) -> None:
        """deadline: on time.perf_counter's clock; no case starts after it. fp8_pages: as in published.make_model.
        shared: the ranks that share every model, and agree on which cases they measure."""
        self._report = report
        self._device = device
        self._repeats = repeats
        self._deadline = deadline
        self._save = save
        self._fp8_pages = fp8_pages
        self._shared = shared

    @property
    def _time_is_up(self) -> bool:
        return self._shared.of_first(time.perf_counter() > self._deadline) > 0

    def measure(self, name: str, cases: Sequence[Case]) -> None:
        """Raises CheckFailedError when a prompt after a cached prefix gives a wrong result."""
        if self._time_is_up:
            self._miss(name, cases, "the time was up")
            return
        config = CONFIGS[name]
        let_go()  # free the previous model's memory
        rank = self._shared.rank
        missing = self._shared.largest(missing_for_weights(config, self._device, fp8_drafts=True, rank=rank))
        if missing > 0:
            self._miss(name, cases, f"does not fit: {missing / 2**30:.1f} GiB more than the device has")
            return
        if rank.count == 1:
            if wants_block_checks(config):
                self._check(check_blocks(name, config, self._device))
            self._check(check_resume_points(name, config, self._device))
        model = load(name, self._device, fp8_pages=self._fp8_pages, shared=self._shared)
        together = [case for case in cases if not isinstance(case, PaceCase)]
        if together:
            room = together[0].room
            for case in together[1:]:
                room = room.beside(case.room)
            self._measure_all(model, room, together)
        for among_streams in cases:
            if isinstance(among_streams, PaceCase):
                self._measure_all(model, among_streams.room, [among_streams])

    def _check(self, passed: str) -> None:
        print(f"checked: {passed}", flush=True)
        self._report.checks.append(passed)

    def _measure_all(self, model: PrefilledModel, room: Room, cases: Sequence[Case]) -> None:
        """Measure on a separate engine, which is freed afterwards."""
        name = model.spec.name
        missing = self._shared.largest(missing_bytes(room, model.spec, self._device))
        if missing > 0:
            self._miss(name, cases, f"does not fit: {missing / 2**30:.1f} GiB more than the device has")
            return
        engine = PromptEngine(model, self._device, room)
        self._report.engines.append(
            f"{name}, {room.max_running} slots: {engine.graphs}; started in {engine.start_seconds:.1f} s"
        )
        for number, case in enumerate(cases):
            entry = Entry(model=name, what=str(case))
            try:
                if self._time_is_up:
                    raise NoFigureError("the time was up")
                entry.figures = self._figures(engine, case)
            except NoFigureError as error:
                entry.note = str(error)
            except torch.OutOfMemoryError as error:  # out of memory during a launch: this engine is unusable now
                if self._shared.rank.count > 1:
                    raise  # the other ranks would wait for this one
                self._miss(name, cases[number:], f"out of memory: {error}".partition("\n")[0])
                break
            self._enter(entry)
        del engine
        let_go(model)

    def _figures(self, engine: PromptEngine, case: Case) -> Figures:
        if isinstance(case, PaceCase):
            return run_pace(engine, case)
        ranks = self._shared.rank.count
        shape = Shape.of(CONFIGS[engine.model.spec.name], engine.model, fp8_pages=self._fp8_pages, ranks=ranks)
        if isinstance(case, SessionCase):
            return run_session(engine, case, shape, self._report.rates)
        return time_prompts(engine, case, shape, self._report.rates, repeats=self._repeats)

    def _miss(self, model: str, cases: Sequence[Case], why: str) -> None:
        for case in cases:
            self._enter(Entry(model=model, what=str(case), note=why))

    def _enter(self, entry: Entry) -> None:
        self._report.entries.append(entry)
        if self._shared.is_first:
            self._save(self._report)
            print("\n".join(self._report.lines(entry)), flush=True)


def load(name: str, device: torch.device, *, fp8_pages: bool = False, shared: SharedModel = ALONE) -> PrefilledModel:
    """Make a model without pools, after freeing the previous one."""
    gc.collect()
    model = make_model(name, CONFIGS[name], device=device, dtype=torch.bfloat16, fp8_pages=fp8_pages, shared=shared)
    let_go(model)
    return model


def missing_bytes(room: Room, spec: ModelSpec, device: torch.device) -> int:
    """Missing bytes for an engine; 0 or less: it fits. The model is loaded, its pools are released."""
    if device.type == "cpu":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return room.num_bytes(spec) + WORKSPACE_BYTES - free


def prompt_case(text: str) -> PromptCase:
    """Parse 800@50048, or 2048 for a prompt without context."""
    count, _, context = text.partition("@")
    return PromptCase(count=int(count), context=int(context or 0))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_argument_group(
        "cases: without any of these, zero and an append for every model, and all parts of the 4B"
    )
    which.add_argument("--models", nargs="+", choices=list(CONFIGS))
    which.add_argument("--parts", nargs="+", choices=[*PARTS, *EXTRA_PARTS])
    which.add_argument(
        "--prompts",
        nargs="+",
        type=prompt_case,
        metavar="NEW[@CONTEXT]",
        help="lone prompts of these sizes, and nothing else",
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bf16", help="keys and values")
    parser.add_argument(
        "--repeats", type=int, default=5, help="measured prompts behind each figure; it is their median"
    )
    parser.add_argument("--max-seconds", type=float, default=330.0, help="begin no case after so long")
    shared_model.add_flags(parser)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="write all figures here, after every case")
    return parser.parse_args()


def measure_all(
    options: argparse.Namespace, work: Mapping[str, Sequence[Case]], device: torch.device, shared: SharedModel
) -> Report:
    """Run the checks, then every case of every model."""
    began = time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    checks = [check_cached_turns(options.device)] if shared.rank.count == 1 else []
    for check in checks:
        print(f"checked: {check}", flush=True)
    report = Report(
        machine=f"{name}, torch {torch.__version__}",
        command=" ".join(["python -m benchmarks.prefill", *sys.argv[1:]]),
        checks=checks,
        rates=measure_rates(device),
    )

    def save(report: Report) -> None:
        report.seconds = time.perf_counter() - began
        if options.json is not None and shared.is_first:
            options.json.write_text(report.as_json(), encoding="utf-8")

    run = Run(
        report,
        device,
        repeats=options.repeats,
        deadline=began + options.max_seconds,
        save=save,
        fp8_pages=options.kv_dtype == "fp8",
        shared=shared,
    )
    for model, cases in work.items():
        run.measure(model, cases)
    save(report)
    return report


def profile_all(work: Mapping[str, Sequence[Case]], device: torch.device) -> None:
    """Profile the last single prompt of each model. After all timing, because the profiler stays active."""
    with profile(activities=[ProfilerActivity.CUDA]):  # the profiler must be active before a graph is captured
        torch.cuda.synchronize()
    for name, cases in work.items():
        case = next((case for case in cases[::-1] if isinstance(case, PromptCase)), LONG_APPEND)
        model = load(name, device)
        print(f"\n{profile_prompt(PromptEngine(model, device, case.room, overlap=False), case)}", flush=True)


def main() -> int:
    options = arguments()
    if options.tensor_parallel != [1]:
        if any(part in EXTRA_PARTS for part in options.parts or ()):
            sys.exit("--tensor-parallel: profile and peers are of one GPU")
        cases = [case for model in chosen_models(options) for case in chosen_cases(options, model)]
        if any(isinstance(case, PaceCase) for case in cases):
            sys.exit("--tensor-parallel: beside streams (pace) each rank would plan by its own clock")
    return shared_model.run("benchmarks.prefill", options, measure, FIRST_TOKENS_COMPARED, check=check_small_model)


def chosen_models(options: argparse.Namespace) -> Sequence[str]:
    is_extra_only = options.parts and all(part in EXTRA_PARTS for part in options.parts)
    return options.models or (MODELS[:1] if is_extra_only else MODELS)


def measure(options: argparse.Namespace) -> int:
    shared, device = shared_model.of_options(options)
    extra = [part for part in options.parts or () if part in EXTRA_PARTS]
    models = chosen_models(options)
    work = {model: chosen_cases(options, model) for model in models}
    if any(work.values()):
        report = measure_all(options, work, device, shared)
        shared.meet()
        if shared.is_first:
            print(report.markdown(), flush=True)
    if "peers" in extra:
        for model in models:
            print(f"\n{compare_kernels(model, CONFIGS[model], device)}", flush=True)
    if "profile" in extra:
        profile_all(work, device)
    return 0


def first_token_s_of(path: Path) -> dict[str, float]:
    """Median seconds to the first token of every measured prompt of a file, and of the later turns of every session, by
    the model and the case."""
    found = {}
    for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
        if (figures := entry["figures"]) is not None:
            seconds = figures["median_s"] if "median_s" in figures else figures["later_first_token_s"]
            found[f"{entry['model']}, {entry['what']}"] = float(seconds)
    return found


FIRST_TOKENS_COMPARED = Comparison(
    read=first_token_s_of,
    figure=lambda seconds: f"{seconds * 1e3:.2f} ms to the first token",
    ratio=lambda seconds, alone: f"{alone / seconds:.3f} times as fast as",
)


if __name__ == "__main__":
    sys.exit(main())
