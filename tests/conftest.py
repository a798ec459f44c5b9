"""Shared test set-up: two cores are for the runner, so torch computes on one thread per test process."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
