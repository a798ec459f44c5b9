"""Exchanges of two ranks that share a device, for a memory checker: `scripts/sanitize.sh` runs this under
compute-sanitizer.

    python -m tests.gpu.sanitized_exchanges [--sums]

Sums of every size in both dtypes; then winners and gathered logits, unless --sums: they allocate between two ranks'
launches, which waits for a rank that spins if each tensor is an allocation of its own. Launches are plain ones: a
checker's kernels take so many registers that programs of early launches would fill the device (two_ranks.py).
"""

from __future__ import annotations

import argparse
import faulthandler

import torch

from tests.gpu.two_ranks import TOKENS, TwoRanks, check_choices

NUM_ROUNDS = 3
PATIENCE = 240
"""Seconds until a hang is a failure. Without a checker all of it takes a few."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Exchange a few tensors between two ranks on one device.")
    parser.add_argument("--sums", action="store_true", help="only sums")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    device = torch.device("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        ranks = TwoRanks(device, overlapped=False, dtype=dtype)
        for _ in range(NUM_ROUNDS):
            for tokens in TOKENS:
                ranks.exchange(tokens, (0, 50_000))
            ranks.check()
    if not options.sums:
        check_choices(TwoRanks(device, overlapped=False), 0, [(1, 4000, 150), (4, 1000, 3), (300, 97, 1)])
    print("exchanged, every result as expected")


if __name__ == "__main__":
    main()
