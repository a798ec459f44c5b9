"""Shared test set-up: two cores are for the runner, so torch computes on one thread per test process; kernels without a GPU are interpreted."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides at its first import, which some test module makes.
