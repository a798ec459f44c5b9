"""The recurrent mixer's kernel for slots with rings: against the reference, against itself over other windows, and
against the kernel that stores rows.

The checks take the device, so that GPU tests can run them at served shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from agentspec.kernels import reference
from agentspec.kernels.backend import DeltaRing, DeltaWeights
from agentspec.kernels.slots import LiveColumns, RingWindow
from agentspec.kernels.traffic import state_traffic
from agentspec.kernels.triton import gated_delta, gated_delta_ring
from agentspec.kernels.triton.launch import arrival_counters
from agentspec.types import SCRATCH_ROW, ZERO_ROW, RingShape
from tests.fakes.compare import relative_error
from tests.fakes.live_columns import live_columns
from tests.kernels.triton import test_gated_delta as rows_checks
from tests.kernels.triton.test_gated_delta import OUTPUT_TOLERANCES, STATE_TOLERANCE, Shape

PARTS = ("key_SCGK", "delta_SCVD", "decay_SCV", "conv_SCX")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step. The last slot is the padding slot."""

    projected_NP: Tensor
    weights: DeltaWeights
    ssm_RVDK: Tensor
    conv_R3C: Tensor
    ring: DeltaRing
    read_row_B: Tensor
    window: RingWindow
    live: LiveColumns | None = None

    def in_float32(self) -> Case:
        """The same values in float32: the reference would round intermediate results, which the kernel does not."""
        return replace(
            self,
            projected_NP=self.projected_NP.float(),
            weights=replace(self.weights, conv_C4=self.weights.conv_C4.float()),
            conv_R3C=self.conv_R3C.float(),
            ring=replace(self.ring, conv_SCX=self.ring.conv_SCX.float()),
        )

    def run(self, step: Callable[..., Tensor] = gated_delta_ring.gated_delta_ring_step) -> tuple[Tensor, Case]:
        """Run one step. Return outputs, and the case with the memory after it."""
        ring = DeltaRing(*(getattr(self.ring, part).clone() for part in PARTS))
        after = replace(self, ssm_RVDK=self.ssm_RVDK.clone(), conv_R3C=self.conv_R3C.clone(), ring=ring)
        memory = after.ssm_RVDK, after.conv_R3C, ring
        out = step(self.projected_NP, self.weights, *memory, self.read_row_B, self.window, self.live)
        return out, after

    def of_slots(self, chosen: list[int]) -> Case:
        """The step of some places of the batch, in this order."""
        num_columns = self.window.entries_BT.shape[1]
        window = RingWindow(**{field: getattr(self.window, field)[chosen] for field in RingWindow.__slots__})
        return replace(
            self,
            projected_NP=self.projected_NP.unflatten(0, (-1, num_columns))[chosen].flatten(0, 1),
            read_row_B=self.read_row_B[chosen],
            window=window,
        )

    def of_columns(self, num_columns: int) -> Case:
        """The step of a single slot's leading columns."""
        window = replace(self.window, entries_BT=self.window.entries_BT[:, :num_columns])
        return replace(self, projected_NP=self.projected_NP[:num_columns], window=window)

    def with_live(self, counts: list[int], num_rows: int) -> Case:
        """The step of each slot's leading columns; dead rows are NaN."""
        num_columns = self.window.entries_BT.shape[1]
        live = live_columns(
            counts,
            num_columns=num_columns,
            num_rows=num_rows,
            entries_BT=self.window.entries_BT,
            device=self.projected_NP.device,
        )
        projected_NP = torch.full((num_rows, self.projected_NP.shape[1]), torch.nan).to(self.projected_NP)
        projected_NP[: sum(counts)] = self.projected_NP[live.cell_N[: sum(counts)]]
        return replace(self, projected_NP=projected_NP, live=live)


def ring_window(
    slot: list[int], start: list[int], read_length: list[int], fold_row: list[int], num_columns: int, ring: RingShape
) -> RingWindow:
    """What `open_window` gives for these slots. fold_row: of each slot, if it folds."""
    start_B, read_length_B, slot_B = torch.tensor(start), torch.tensor(read_length), torch.tensor(slot)
    fold_length_B = torch.maximum(start_B // ring.fold_tokens * ring.fold_tokens, read_length_B)
    position_BT = start_B[:, None] + torch.arange(num_columns)
    return RingWindow(
        slot_B=slot_B,
        start_B=start_B,
        read_length_B=read_length_B,
        fold_length_B=fold_length_B,
        fold_row_B=torch.where(fold_length_B > read_length_B, torch.tensor(fold_row), SCRATCH_ROW),
        entries_BT=slot_B[:, None] * ring.capacity + position_BT % ring.capacity,
    )


def to_device(window: RingWindow, device: torch.device) -> RingWindow:
    return RingWindow(**{field: getattr(window, field).to(device) for field in RingWindow.__slots__})


def make_weights(shape: Shape, rng: torch.Generator, device: torch.device) -> DeltaWeights:
    return rows_checks.make_case(shape, 1, 1, device, int(torch.randint(1 << 30, (), generator=rng))).weights


def new_ring(shape: Shape, num_slots: int, ring: RingShape) -> DeltaRing:
    """Rings of NaN."""
    sizes = (num_slots, ring.capacity)
    return DeltaRing(
        torch.full((*sizes, shape.key_heads, shape.key_dim), torch.nan),
        torch.full((*sizes, shape.value_heads, shape.value_dim), torch.nan),
        torch.full((*sizes, shape.value_heads), torch.nan),
        torch.full((*sizes, shape.channels), torch.nan),
    )


def starts_of(kind: str, generator: random.Random, ring: RingShape, width: int) -> tuple[int, int]:
    """A random (start, read length): folding, not folding, with few entries or none."""
    boundary = ring.fold_tokens * generator.randrange(1, 40)
    if kind == "fold":
        return boundary + generator.randrange(width), boundary - generator.choice([1, 2, 3, 7, ring.fold_tokens])
    read_length = boundary + generator.choice([0, 0, 5])
    count = {"none": 0, "few": generator.choice([1, 2])}.get(kind) or generator.randrange(ring.fold_tokens - 5)
    return read_length + (0 if kind == "none" else count), read_length


KINDS = ("none", "few", "many", "fold", "fold in place")


def make_case(
    shape: Shape, kinds: list[str], num_columns: int, device: torch.device, seed: int, *, width: int = 0
) -> Case:
    """One place of the batch of each kind: one of KINDS, `start` (at position 0) or `padding`. Everything that must not
    be read is NaN."""
    generator, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    ring = RingShape.of(width or num_columns)
    num_slots = len(kinds) + 1
    order = generator.sample(range(num_slots - 1), num_slots - 1)
    rows = generator.sample(range(2, 2 + 2 * num_slots), 2 * len(kinds))
    slots, starts, read_lengths, read_rows, fold_rows = [], [], [], [], []
    for place, kind in enumerate(kinds):
        is_empty = kind in ("padding", "start")
        start, read_length = (0, 0) if is_empty else starts_of(kind.split()[0], generator, ring, width or num_columns)
        slots.append(num_slots - 1 if kind == "padding" else order[place])
        starts.append(start)
        read_lengths.append(read_length)
        read_rows.append(ZERO_ROW if is_empty else rows[2 * place])
        fold_rows.append(rows[2 * place] if kind == "fold in place" else rows[2 * place + 1])
    window = ring_window(slots, starts, read_lengths, fold_rows, num_columns, ring)

    ssm = torch.full((3 + 2 * num_slots, shape.value_heads, shape.value_dim, shape.key_dim), torch.nan)
    conv = torch.full((3 + 2 * num_slots, 3, shape.channels), torch.nan)
    ssm[read_rows] = torch.randn(len(kinds), *ssm.shape[1:], generator=rng)
    conv[read_rows] = torch.randn(len(kinds), *conv.shape[1:], generator=rng)
    ssm[ZERO_ROW], conv[ZERO_ROW] = 0, 0
    entries = new_ring(shape, num_slots, ring)
    for slot, start, read_length in zip(slots, starts, read_lengths, strict=True):
        for position in range(read_length, start):
            at = (slot, position % ring.capacity)
            key = torch.randn(shape.key_heads, shape.key_dim, generator=rng)
            entries.key_SCGK[at] = key / key.norm(dim=1, keepdim=True)
            entries.delta_SCVD[at] = torch.randn(shape.value_heads, shape.value_dim, generator=rng)
            entries.decay_SCV[at] = torch.rand(shape.value_heads, generator=rng)
            entries.conv_SCX[at] = torch.randn(shape.channels, generator=rng)
    on_device = DeltaRing(*(getattr(entries, part).to(device) for part in PARTS))
    return Case(
        projected_NP=(2 * torch.randn(len(kinds) * num_columns, shape.width, generator=rng)).to(device, shape.dtype),
        weights=make_weights(shape, rng, device),
        ssm_RVDK=ssm.to(device),
        conv_R3C=conv.to(device, shape.dtype),
        ring=replace(on_device, conv_SCX=on_device.conv_SCX.to(shape.dtype)),
        read_row_B=torch.tensor(read_rows, device=device),
        window=to_device(window, device),
    )


def check_against_reference(
    shape: Shape, kinds: list[str], num_columns: int, device: torch.device, seed: int, *, width: int = 0
) -> None:
    case = make_case(shape, kinds, num_columns, device, seed, width=width)
    what = f"{shape} {kinds} T={num_columns} seed={seed}"
    expected, after = case.in_float32().run(reference.gated_delta_ring_step)
    state_traffic.reset()
    # Copies by torch, which are ordinary launches, precede it: so it may read early.
    step = partial(gated_delta_ring.gated_delta_ring_step, reads_early=seed % 2 == 1)
    with rows_checks.poisoned_allocations():
        out, got = case.run(step)
    assert state_traffic.rows_read == len(kinds), what
    assert out.dtype == shape.dtype, what
    assert relative_error(out, expected) < OUTPUT_TOLERANCES[shape.dtype], what
    assert not arrival_counters(out.device).any(), what

    folded = case.window.fold_row_B[case.window.fold_row_B != SCRATCH_ROW]
    if len(folded):
        assert relative_error(got.ssm_RVDK[folded], after.ssm_RVDK[folded]) < STATE_TOLERANCE, what
    kept = torch.arange(len(case.conv_R3C), device=device) != SCRATCH_ROW
    assert same(got.conv_R3C[kept], after.conv_R3C[kept].to(shape.dtype)), f"folded inputs: {what}"
    kept[folded] = False
    assert same(got.ssm_RVDK[kept], case.ssm_RVDK[kept]), f"a row changed that is not folded to: {what}"

    # Several places may have the padding slot, and its entries are never read.
    written = case.window.entries_BT[case.window.slot_B != len(kinds)].flatten()
    for part in PARTS:
        entries, expected_entries, before = (
            getattr(ring, part)[:-1].flatten(0, 1) for ring in (got.ring, after.ring, case.ring)
        )
        if part == "conv_SCX":
            assert same(entries[written], expected_entries[written].to(shape.dtype)), f"{part}: {what}"
        elif len(written):
            error = relative_error(entries[written], expected_entries[written])
            assert error < STATE_TOLERANCE, f"{part} {error}: {what}"
        untouched = torch.ones(len(entries), dtype=torch.bool, device=device)
        untouched[written] = False
        assert same(entries[untouched], before[untouched]), f"{part} of another token changed: {what}"


def same(got: Tensor, expected: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


def check_bits(shape: Shape, num_columns: int, device: torch.device, seed: int) -> None:
    """Check that a slot's bits depend neither on the run nor on the other slots or its place in the batch."""
    case = make_case(shape, [*KINDS, "start"], num_columns, device, seed)
    out, after = case.run()
    chosen = random.Random(seed).sample(range(6), 4)
    again, after_again = case.of_slots(chosen).run()
    assert torch.equal(again.unflatten(0, (4, -1)), out.unflatten(0, (6, -1))[chosen]), seed
    written = case.window.entries_BT[chosen].flatten()
    for part in PARTS:
        entries, entries_again = (getattr(x.ring, part).flatten(0, 1)[written] for x in (after, after_again))
        assert torch.equal(entries, entries_again), (part, seed)


def check_live_columns(
    shape: Shape, num_columns: int, device: torch.device, seed: int, *, step: Callable[..., Tensor] | None = None
) -> None:
    """Check that windows of different widths in one launch have the bits of each slot alone, that a dead row's output
    is zeros, and that nothing is stored for dead columns."""
    generator = random.Random(seed)
    kinds = generator.sample([*KINDS, "start", "padding"], 7)
    counts = [0 if kind == "padding" else generator.randint(1, num_columns) for kind in kinds]
    num_rows = sum(counts) + generator.choice([0, 1, 19])
    case = make_case(shape, kinds, num_columns, device, seed)
    run = {} if step is None else {"step": step}
    out, after = case.with_live(counts, num_rows).run(**run)
    alone, first = case, 0
    for place, count in enumerate(counts):
        if count:
            expected, alone_after = alone.of_slots([place]).of_columns(count).run(**run)
            assert torch.equal(out[first : first + count], expected), (seed, kinds[place], count)
            alone = replace(alone, ssm_RVDK=alone_after.ssm_RVDK, conv_R3C=alone_after.conv_R3C, ring=alone_after.ring)
        first += count
    assert not out[first:].any(), seed
    rows = slice(3, None)  # the scratch row holds anything
    assert same(after.ssm_RVDK[rows], alone.ssm_RVDK[rows]), seed
    assert same(after.conv_R3C[rows], alone.conv_R3C[rows]), seed
    for part in PARTS:
        assert same(getattr(after.ring, part), getattr(alone.ring, part)), (part, seed)


def check_tilings(shape: Shape, num_columns: int, device: torch.device, seed: int) -> None:
    """Check that bits do not depend on how a launch divides its work."""
    case = make_case(shape, [*KINDS, "start"], num_columns, device, seed)
    with pytest.MonkeyPatch.context() as patch:
        results = []
        for tiling in sorted({one for by_heads in gated_delta_ring._TILINGS.values() for one in by_heads.values()}):
            patch.setattr(gated_delta_ring, "tiling_of", lambda *_, chosen=tiling: chosen)
            results.append(case.run())
    assert len(results) == 5
    out, after = results[0]
    for other, other_after in results[1:]:
        assert torch.equal(out, other), seed
        for part in PARTS:
            assert same(getattr(after.ring, part), getattr(other_after.ring, part)), (part, seed)
        assert same(after.ssm_RVDK[3:], other_after.ssm_RVDK[3:]), seed


class Windows:
    """Sequences that start from random states, in windows of random widths of which random leading columns are
    accepted. Rejected columns get tokens of their own."""

    def __init__(self, shape: Shape, num_slots: int, num_tokens: int, device: torch.device, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.shape, self.device, self.num_slots, self.num_tokens = shape, device, num_slots, num_tokens
        self.weights = make_weights(shape, rng, device)
        self.projected_SNP = (2 * torch.randn(num_slots, num_tokens, shape.width, generator=rng)).to(shape.dtype)
        self.ssm_SVDK = torch.randn(num_slots, shape.value_heads, shape.value_dim, shape.key_dim, generator=rng)
        self.conv_S3C = torch.randn(num_slots, 3, shape.channels, generator=rng).to(shape.dtype)
        self.first_B = [int(torch.randint(40, (), generator=rng)) for _ in range(num_slots)]

    def pools(self, rows: list[int], num_rows: int) -> tuple[Tensor, Tensor]:
        """Pools of NaN, with the slots' first states in `rows`."""
        ssm = torch.full((num_rows, *self.ssm_SVDK.shape[1:]), torch.nan)
        conv = torch.full((num_rows, *self.conv_S3C.shape[1:]), torch.nan, dtype=self.conv_S3C.dtype)
        ssm[rows], conv[rows] = self.ssm_SVDK, self.conv_S3C
        return ssm.to(self.device), conv.to(self.device)

    def play(self, step: Callable[[list[int], Tensor, list[int]], Tensor], width: int, seed: int) -> Tensor:
        """Outputs of every token. step: runs the windows (done tokens, projections, tokens to accept)."""
        generator, rng = random.Random(seed), torch.Generator().manual_seed(seed)
        done = [0] * self.num_slots
        outputs = torch.full(
            (self.num_slots, self.num_tokens, self.shape.value_heads * self.shape.value_dim), torch.nan
        )
        while min(done) < self.num_tokens:
            num_columns = generator.randint(1, width)
            accepted = [min(generator.randint(1, num_columns), self.num_tokens - n) for n in done]
            x_BTP = 2 * torch.randn(self.num_slots, num_columns, self.shape.width, generator=rng)
            x_BTP = x_BTP.to(self.projected_SNP.dtype)
            for slot, (n, count) in enumerate(zip(done, accepted, strict=True)):
                x_BTP[slot, :count] = self.projected_SNP[slot, n : n + count]
            out = step(done, x_BTP.flatten(0, 1).to(self.device), accepted).unflatten(0, x_BTP.shape[:2]).cpu().float()
            for slot, count in enumerate(accepted):
                outputs[slot, done[slot] : done[slot] + count] = out[slot, :count]
                done[slot] += count
        assert not outputs.isnan().any()
        return outputs


def play_rings(windows: Windows, width: int, seed: int, ring: RingShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, and the state rows and convolution rows at the last fold length."""
    slots, device = list(range(windows.num_slots)), windows.device
    read_rows, other_rows = [2 + 2 * slot for slot in slots], [3 + 2 * slot for slot in slots]
    ssm, conv = windows.pools(read_rows, 2 + 2 * len(slots))
    entries = new_ring(windows.shape, len(slots), ring)
    memory = DeltaRing(*(getattr(entries, part).to(device) for part in PARTS))
    memory = replace(memory, conv_SCX=memory.conv_SCX.to(conv.dtype))
    read_lengths = list(windows.first_B)

    def step(done: list[int], x_NP: Tensor, accepted: list[int]) -> Tensor:
        starts = [first + n for first, n in zip(windows.first_B, done, strict=True)]
        fold_rows = [
            read if slot % 2 else other for slot, read, other in zip(slots, read_rows, other_rows, strict=True)
        ]
        window = ring_window(slots, starts, read_lengths, fold_rows, len(x_NP) // len(slots), ring)
        out = gated_delta_ring.gated_delta_ring_step(
            x_NP, windows.weights, ssm, conv, memory, torch.tensor(read_rows, device=device), to_device(window, device)
        )
        for slot in slots:
            if int(window.fold_length_B[slot]) > read_lengths[slot]:
                read_lengths[slot] = int(window.fold_length_B[slot])
                if fold_rows[slot] != read_rows[slot]:
                    read_rows[slot], other_rows[slot] = other_rows[slot], read_rows[slot]
        return out

    outputs = windows.play(step, width, seed)
    step([windows.num_tokens] * len(slots), windows.projected_SNP[:, 0].contiguous().to(device), [0] * len(slots))
    return outputs, ssm[read_rows], conv[read_rows]


def play_rows(windows: Windows, width: int, seed: int) -> Tensor:
    slots, device = list(range(windows.num_slots)), windows.device
    rows = [[2 + 2 * width * slot + i for i in range(2 * width)] for slot in slots]
    ssm, conv = windows.pools([own[-1] for own in rows], 2 + 2 * width * len(slots))

    def step(done: list[int], x_NP: Tensor, accepted: list[int]) -> Tensor:
        num_columns = len(x_NP) // len(slots)
        out = gated_delta.gated_delta_step(
            x_NP,
            windows.weights,
            ssm,
            conv,
            torch.tensor([own[-1] for own in rows], device=device),
            torch.tensor([own[:num_columns] for own in rows], device=device),
        )
        for own, count in zip(rows, accepted, strict=True):
            if count:
                own.append(own.pop(count - 1))
        return out

    return windows.play(step, width, seed)


def check_windows(shape: Shape, width: int, num_slots: int, num_tokens: int, device: torch.device, seed: int) -> None:
    """Check that rings give what rows give, and that bits do not depend on how the tokens are split over windows: an
    entry that is replayed gives the bits of the column that stored it."""
    windows, ring = Windows(shape, num_slots, num_tokens, device, seed), RingShape.of(width)
    what = f"{shape} W={width} B={num_slots} seed={seed}"
    outputs, ssm, conv = play_rings(windows, width, seed, ring)
    expected = play_rows(windows, width, seed)
    error = relative_error(outputs, expected)
    assert error < OUTPUT_TOLERANCES[shape.dtype], f"{error} {what}"
    others = play_rings(windows, width, seed + 1, ring)
    for name, got, other in zip(("outputs", "states", "inputs"), (outputs, ssm, conv), others, strict=True):
        assert torch.equal(got, other), f"{name}: {what}"


SMALL = Shape(value_heads=4, key_heads=2, value_dim=16, key_dim=16)
ODD = Shape(value_heads=6, key_heads=2, value_dim=24, key_dim=12, gate="sigmoid")
ONE_TO_ONE = Shape(value_heads=2, key_heads=2, value_dim=32, key_dim=64)
PAIR = Shape(value_heads=2, key_heads=1, value_dim=16, key_dim=16)
MIXED = [*KINDS, "start", "padding", "padding"]


@pytest.mark.parametrize(
    ("shape", "kinds", "num_columns", "width"),
    [
        *(pytest.param(SMALL, [kind], 4, 4, id=kind) for kind in (*KINDS, "start", "padding")),
        pytest.param(SMALL, MIXED, 4, 4, id="all kinds"),
        pytest.param(SMALL, MIXED, 1, 8, id="one column of eight"),
        pytest.param(SMALL, ["fold", "few"], 2, 2, id="two columns"),
        pytest.param(SMALL, ["fold", "few"], 5, 5, id="five columns, of which eight are prepared"),
        pytest.param(SMALL, ["none", "fold in place"], 8, 16, id="eight columns of sixteen"),
        pytest.param(SMALL, ["fold", "many", "start"], 16, 16, id="sixteen columns"),
        pytest.param(replace(SMALL, dtype=torch.bfloat16), MIXED, 4, 4, id="bfloat16"),
        pytest.param(ODD, ["fold", "many"], 4, 4, id="odd sizes"),
        pytest.param(ODD, ["fold in place", "few"], 11, 11, id="odd sizes, padded columns"),
        pytest.param(ONE_TO_ONE, ["fold", "none"], 2, 3, id="a value head a key head"),
        pytest.param(replace(ONE_TO_ONE, value_heads=4, value_dim=64), ["fold"], 4, 4, id="tiny-agent"),
    ],
)
def test_gated_delta_ring_step_matches_reference(
    shape: Shape, kinds: list[str], num_columns: int, width: int, device: torch.device
) -> None:
    check_against_reference(shape, kinds, num_columns, device, seed=len(kinds) * 10 + num_columns, width=width)


def test_every_count_of_columns_and_entries_matches_reference(device: torch.device) -> None:
    generator = random.Random(17)
    for num_columns in range(1, 17):
        kinds = generator.choices([*KINDS, "start"], k=2)
        check_against_reference(PAIR, kinds, num_columns, device, seed=num_columns)


def test_bits_depend_only_on_the_slot(device: torch.device) -> None:
    check_bits(SMALL, 3, device, seed=6)
    check_bits(ODD, 5, device, seed=7)


@pytest.mark.parametrize(
    ("shape", "num_columns"),
    [(SMALL, 4), (replace(SMALL, dtype=torch.bfloat16), 16), (ODD, 7)],
    ids=["four columns", "sixteen columns", "odd sizes"],
)
def test_windows_of_different_widths_have_the_bits_of_each_slot_alone(
    shape: Shape, num_columns: int, device: torch.device
) -> None:
    for seed in range(2):
        check_live_columns(shape, num_columns, device, seed=30 + seed)


def test_reference_gives_the_live_columns_of_each_slot_alone(device: torch.device) -> None:
    check_live_columns(SMALL, 5, device, seed=40, step=reference.gated_delta_ring_step)


def test_bits_do_not_depend_on_the_tiling(device: torch.device) -> None:
    check_tilings(replace(PAIR, key_dim=64, value_dim=64), 4, device, seed=8)


@pytest.mark.parametrize("shape", [PAIR, replace(PAIR, dtype=torch.bfloat16)], ids=["float32", "bfloat16"])
def test_rings_equal_rows_over_many_windows(shape: Shape, device: torch.device) -> None:
    check_windows(shape, 4, 2, 20, device, seed=21)


def test_rings_of_odd_sizes_equal_rows(device: torch.device) -> None:
    check_windows(replace(ODD, value_heads=1, key_heads=1), 3, 2, 20, device, seed=23)


def test_rings_with_wide_windows_equal_rows(device: torch.device) -> None:
    check_windows(replace(PAIR, value_heads=1), 8, 2, 26, device, seed=22)
