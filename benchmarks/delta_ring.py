"""Time the recurrent mixer of a decode window: slots that store a state row per column, and slots with rings.

    python -m benchmarks.delta_ring [--models 27B 4B] [--slots 1 8 32]

Prints microseconds per layer. A CUDA graph runs the mixer of many layers, which have their own states, so that the L2
cache does not hold them. Slots with rings have 1 to 18 entries behind their state, 9 if there is one slot; those with
16 or more fold. Before it is timed, each case is compared with the reference.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentspec.kernels import DeltaWeights, reference
from agentspec.kernels.backend import DeltaRing
from agentspec.kernels.slots import RingWindow
from agentspec.types import SCRATCH_ROW, RingShape
from benchmarks.bandwidth import median_seconds

VALUE_HEADS = {"27B": 48, "4B": 32}
KEY_HEADS, HEAD_DIM = 16, 128
LAYERS = 32
"""At 27B's sizes, one slot's states of these layers take 100 MB: twice the L2 cache of an H100."""
COLUMNS = {"rows": (4, 8), "ring": (4, 8, 16)}
ENTRIES = 18
"""Most entries behind a state: up to 15 before a fold, and the tokens of the window that crossed it."""
TOLERANCE = 2**-6
"""Outputs are rounded to bfloat16, in the reference also within."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The mixers of all layers. Layers share weights and projections, which are small."""

    form: str
    num_columns: int
    projected_NP: Tensor
    weights: DeltaWeights
    ssm_LRVDK: Tensor
    conv_LR3C: Tensor
    rings: list[DeltaRing]
    read_row_B: Tensor
    write_rows_BT: Tensor
    window: RingWindow

    def run(self, backend: Any, layer: int, ssm_RVDK: Tensor, conv_R3C: Tensor) -> Tensor:
        if self.form == "rows":
            return backend.gated_delta_step(  # type: ignore[no-any-return]
                self.projected_NP, self.weights, ssm_RVDK, conv_R3C, self.read_row_B, self.write_rows_BT
            )
        return backend.gated_delta_ring_step(  # type: ignore[no-any-return]
            self.projected_NP,
            self.weights,
            ssm_RVDK,
            conv_R3C,
            self.rings[layer],
            self.read_row_B,
            self.window,
            reads_early=True,  # as in steps: no other launch touches a layer's memory
        )

    def check(self, backend: Any) -> None:
        """Compare the outputs and states of one layer with the reference. Both store the same entries to the ring."""
        pools = [(self.ssm_LRVDK[0].clone(), self.conv_LR3C[0].clone()) for _ in range(2)]
        expected = self.run(reference, 0, *pools[0])
        pairs = [(self.run(backend, 0, *pools[1]), expected)]
        rows = torch.arange(len(pools[0][0]), device=expected.device) != SCRATCH_ROW
        pairs += [(got[rows], wanted[rows]) for got, wanted in zip(pools[1], pools[0], strict=True)]
        for got, wanted in pairs:
            error = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
            assert error < TOLERANCE, f"{self.form} T={self.num_columns}: {error}"

    def microseconds(self, backend: Any) -> float:
        """Device time of one layer."""

        def run() -> None:
            for layer in range(LAYERS):
                self.run(backend, layer, self.ssm_LRVDK[layer], self.conv_LR3C[layer])

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return median_seconds(graph.replay, self.projected_NP.device) / LAYERS * 1e6


def make_case(form: str, model: str, num_slots: int, num_columns: int, device: torch.device) -> Case:
    heads = VALUE_HEADS[model]
    channels = 2 * KEY_HEADS * HEAD_DIM + heads * HEAD_DIM
    num_rows = 2 + num_slots * (num_columns + 1 if form == "rows" else 2)
    own = torch.arange(2, num_rows, device=device).view(num_slots, -1)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    shape = RingShape.of(max(COLUMNS["ring"]))
    sizes = (num_slots if form == "ring" else 0, shape.capacity)
    rings = [
        DeltaRing(
            torch.nn.functional.normalize(normal(*sizes, KEY_HEADS, HEAD_DIM, dtype=torch.float32), dim=-1),
            normal(*sizes, heads, HEAD_DIM, dtype=torch.float32),
            torch.rand(*sizes, heads, device=device),
            normal(*sizes, channels),
        )
        for _ in range(LAYERS)
    ]
    return Case(
        form=form,
        num_columns=num_columns,
        projected_NP=normal(num_slots * num_columns, channels + heads * (HEAD_DIM + 2)),
        weights=DeltaWeights(
            conv_C4=normal(channels, 4),
            a_log_V=torch.rand(heads, device=device),
            dt_bias_V=torch.rand(heads, device=device),
            norm_D=torch.rand(HEAD_DIM, device=device),
            eps=1e-6,
            gate="silu",
        ),
        ssm_LRVDK=normal(LAYERS, num_rows, heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32),
        conv_LR3C=normal(LAYERS, num_rows, 3, channels),
        rings=rings,
        read_row_B=own[:, 0].contiguous(),
        write_rows_BT=own[:, 1:].contiguous(),
        window=_ring_window(own, shape, num_columns),
    )


def _ring_window(own_BR: Tensor, shape: RingShape, num_columns: int) -> RingWindow:
    num_slots, device = len(own_BR), own_BR.device
    slot_B = torch.arange(num_slots, device=device)
    read_length_B = shape.fold_tokens * (40 + slot_B)
    entries_B = 1 + slot_B * 7 % ENTRIES if num_slots > 1 else torch.full((1,), ENTRIES // 2, device=device)
    start_B = read_length_B + entries_B
    fold_length_B = start_B // shape.fold_tokens * shape.fold_tokens
    position_BT = start_B[:, None] + torch.arange(num_columns, device=device)
    return RingWindow(
        slot_B=slot_B,
        start_B=start_B,
        read_length_B=read_length_B,
        fold_length_B=fold_length_B,
        fold_row_B=torch.where(fold_length_B > read_length_B, own_BR[:, 1], SCRATCH_ROW),
        entries_BT=slot_B[:, None] * shape.capacity + position_BT % shape.capacity,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the recurrent mixer with rows and with rings.")
    parser.add_argument("--models", nargs="+", choices=list(VALUE_HEADS), default=list(VALUE_HEADS))
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 8, 32])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device, and torch sees none")
    # imports Triton, which may be missing on machines without a GPU
    backend, device = importlib.import_module("agentspec.kernels.triton"), torch.device("cuda")
    torch.manual_seed(0)
    print("| model | slots | form | columns | microseconds per layer |", "|---|---|---|---|---|", sep="\n")
    for model in arguments.models:
        for num_slots in arguments.slots:
            for form, columns in COLUMNS.items():
                for num_columns in columns:
                    case = make_case(form, model, num_slots, num_columns, device)
                    case.check(backend)
                    print(f"| {model} | {num_slots} | {form} | {num_columns} | {case.microseconds(backend):.1f} |")
                    del case
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
