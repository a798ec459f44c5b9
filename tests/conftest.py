"""Shared test set-up: two cores are for the runner, so torch computes on one thread in each process, those that tests start included. Kernels
without a GPU are interpreted."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides at its first import, which some test module makes.
