"""Train tiny-agent:

    python -m scripts.tiny_agent.train --tokenizer DIR --out DIR --tokens 1e9 [--resume DIR] [--minutes M]

The out directory holds the state to resume from; --transport DIR gets a copy without the optimiser's moments, in files
under 16 MiB. A run with --minutes stops in time and is gone on with by --resume of either; --tokens is the whole plan's
and sets the learning rate's schedule.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from scripts.tiny_agent.options import Options


def main() -> None:
    arguments = parse(sys.argv[1:])
    # The processes that make the data import this module too, each on its own; they must not wait for PyTorch.
    from scripts.tiny_agent.training_run import run

    run(arguments)


def parse(words: list[str]) -> argparse.Namespace:
    defaults = Options()
    parser = argparse.ArgumentParser(description="Train tiny-agent.")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="that tokenizer.py wrote")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the state to resume from, replaced at the end"
    )
    parser.add_argument("--transport", type=Path, metavar="DIR", help="a copy of the state without moments")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="a state to go on from")
    parser.add_argument("--tokens", type=float, required=True, help="of the whole plan, over all runs")
    parser.add_argument("--tokens-per-batch", type=int, default=131072, help="default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, help="stop training this long after the start; the last evaluation comes after"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=14, help="processes that make sessions; default: %(default)s")
    parser.add_argument(
        "--eval-every", type=int, default=0, metavar="STEPS", help="besides the end; default: only there"
    )
    parser.add_argument(
        "--eval-sessions", type=int, default=100, help="of known and of unseen domains each; default: %(default)s"
    )
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--muon-lr", type=float, default=defaults.muon_lr, help="default: %(default)s")
    parser.add_argument("--adamw-lr", type=float, default=defaults.adamw_lr, help="default: %(default)s")
    parser.add_argument("--warmup", type=int, default=defaults.warmup, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--decay", type=float, default=defaults.decay, help="share of the plan; default: %(default)s")
    parser.add_argument("--mtp-factor", type=float, default=defaults.mtp_factor, help="default: %(default)s")
    parser.add_argument(
        "--mtp-trunk-gradient", type=float, default=defaults.mtp_trunk_gradient, help="0 to 1; default: %(default)s"
    )
    parser.add_argument(
        "--gated-delta", choices=("fla", "plain"), default=defaults.gated_delta, help="default: %(default)s"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run without torch.compile")
    arguments = parser.parse_args(words)
    arguments.started = time.monotonic()
    return arguments


if __name__ == "__main__":
    main()
