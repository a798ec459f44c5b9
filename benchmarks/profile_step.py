"""Profile a decode step by kernel: `python -m benchmarks.profile_step --model 4B --batch 1 --k 3 --context 2048`.

Prints each kernel's calls and time per step, and the idle time right before it; with --timeline, one step's kernels in
order. For finding gaps, not for figures: the profiler slows a step down, and nothing is checked.

With --tensor-parallel N, N processes on N GPUs share the model; the first one is profiled, and its exchanges contain
the waiting for the others.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import shared_model
from benchmarks.decode_timing import Steps, trace_case
from benchmarks.overlap import PLACEMENTS, overlapped
from benchmarks.published import CONFIGS, make_model
from benchmarks.running_engine import Case, let_go, missing_bytes
from benchmarks.trace import Timeline, by_name

NAME_WIDTH = 90
POINTER_KERNELS = ("_commit_window", "_publish_drafts")


def shares_table(timeline: Timeline) -> str:
    """Per step; times in microseconds. The rows' times add up to the step's busy time, the gaps to its idle time."""
    steps = timeline.num_steps
    lines = [
        f"{timeline.kernels_a_step:.1f} kernels, {timeline.step_ms:.3f} ms a step under the profiler, "
        f"{100 * timeline.idle_share:.1f} % of it idle",
        "| kernel | calls | us | us a call | share | idle before, us |",
        "|---|---|---|---|---|---|",
    ]
    for share in by_name(timeline):
        busy = 100 * share.covered_us / (timeline.busy_ms * 1e3 * steps)
        per_step = f"{share.calls / steps:.1f} | {share.covered_us / steps:.1f} | {share.covered_us / share.calls:.2f}"
        lines.append(f"| {share.name[:NAME_WIDTH]} | {per_step} | {busy:.1f} % | {share.gap_us / steps:.1f} |")
    return "\n".join(lines)


def pointers_line(timeline: Timeline) -> str:
    """The cost of moving state by pointer: the commit, with its swap of checkpoints, and the publishing of drafts."""
    spent = sum(share.covered_us for share in by_name(timeline) if share.name in POINTER_KERNELS) / timeline.num_steps
    return (
        f"commit, checkpoint swap and publish: {spent:.1f} us a step, "
        f"{100 * spent / (timeline.step_ms * 1e3):.2f} % of it"
    )


def order_table(timeline: Timeline) -> str:
    """One step's kernels in order; microseconds. A negative gap: the kernel started before the end of the previous
    one."""
    kernels = timeline.last_step()
    lines = ["| at | gap | duration | kernel |", "|---|---|---|---|"]
    reached = kernels[0].start
    for kernel in kernels:
        lines.append(
            f"| {kernel.start - kernels[0].start:.1f} | {kernel.start - reached:.1f} | {kernel.duration:.1f} | "
            f"{kernel.name[:NAME_WIDTH]} |"
        )
        reached = max(reached, kernel.end)
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=list(CONFIGS), default="4B")
    parser.add_argument("--context", type=int, default=2_048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument(
        "--sampled", action="store_true", help="temperature 0.6, top-k 20, top-p 0.95 instead of greedy"
    )
    parser.add_argument(
        "--overlap",
        choices=list(PLACEMENTS),
        help="of the shared expert with the routed ones; without: as the engine decides",
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--timeline", action="store_true", help="also print the kernels of one step in order")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="stop ranks that take longer")
    shared_model.add_flags(parser)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> int:
    options.device = "cuda"
    shared, device = shared_model.of_options(options)
    case = Case(
        model=options.model,
        context=options.context,
        batch=options.batch,
        depth=options.k,
        sampled=options.sampled,
        ranks=shared.rank.count,
    )
    steps = Steps(traced=options.steps, timed=options.steps)
    with profile(activities=[ProfilerActivity.CUDA]):  # the profiler must be active before a graph is captured
        torch.cuda.synchronize()
    model = make_model(options.model, CONFIGS[options.model], device=device, dtype=torch.bfloat16, shared=shared)
    let_go(model)
    missing = int(shared.largest(missing_bytes(case, model.spec, device, steps.total)))
    if missing > 0:
        sys.exit(f"{case} does not fit: {missing / 2**30:.1f} GiB more than the device has")
    with nullcontext() if options.overlap is None else overlapped(options.overlap):
        timeline = trace_case(case, model, device, steps)
    shared.meet()
    if shared.is_first:
        print(f"{case}\n\n{shares_table(timeline)}\n\n{pointers_line(timeline)}")
        if options.timeline:
            print(f"\n{order_table(timeline)}")
    return 0


def main() -> int:
    options = arguments()
    if len(options.tensor_parallel) > 1:
        sys.exit("--tensor-parallel: one number of GPUs")
    if options.rank is None and options.tensor_parallel != [1]:
        shared_model.run_ranks(
            "benchmarks.profile_step", sys.argv[1:], options.tensor_parallel[0], patience=options.max_seconds
        )
        return 0
    if options.rank is not None:
        shared_model.run_rank(options, measure)
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
