"""The third launch of the recurrent mixer over a prefill, for Hopper: any order in which groups of warps run, against
Triton's own kernel. In the interpreter all values are float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.errors import InterpreterError

from agentspec.kernels import PrefillBatch
from agentspec.kernels.triton import chunked_delta, chunked_delta_hopper
from agentspec.kernels.triton.launch import INTERPRETED
from tests.fakes.prompt_run import Run, batch_of
from tests.kernels.triton.gluon_warp_groups import FoldGroups
from tests.kernels.triton.test_chunked_delta import RAGGED, Case, make_case, one_run, relative_norm
from tests.kernels.triton.test_gated_delta import Shape

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests at served shapes run this kernel")
HEADS = Shape(value_heads=2, key_heads=1, value_dim=128, key_dim=128)
TOLERANCE = 1e-6


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([one_run(30, 500, read_row=4, writes=((162, 2), (470, 3)))], id="more blocks than buffers"),
        pytest.param(RAGGED, id="ragged"),
    ],
)
def test_outputs_and_states_match_the_other_kernel(
    runs: Sequence[Run], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(runs, device)
    case = make_case(HEADS, sum(len(run.token_ids) for run in runs), device, 1, [run.read_row for run in runs])
    expected = case.run(batch)
    got = []
    for seed in range(3):
        monkeypatch.setattr(chunked_delta, "chunked_delta_hopper", FoldGroups(seed))
        got.append(case.run(batch))
    out, ssm, conv = got[0]
    saved = [row for run in runs for _, row in run.state_writes]
    assert relative_norm(out, expected[0]) < TOLERANCE
    assert relative_norm(ssm[saved], expected[1][saved]) < TOLERANCE
    kept = [row for row in range(len(ssm)) if row not in saved]
    assert torch.equal(ssm[kept].nan_to_num(7.0), expected[1][kept].nan_to_num(7.0)), "a row that is not a save row"
    assert torch.equal(conv.nan_to_num(7.0), expected[2].nan_to_num(7.0)), "convolution states"
    for other in got[1:]:
        for one, two in zip(got[0], other, strict=True):
            assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0)), "other bits in another order of warp groups"


def run_in_many_orders(module: ModuleType, case: Case, batch: PrefillBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        monkeypatch.setattr(chunked_delta, "chunked_delta_hopper", FoldGroups(seed, module))
        case.run(batch)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("mbarrier.wait(state_full.index(after % _READ_STAGES), after // _READ_STAGES & 1)", "more arrivals than"),
        ("mbarrier.wait(released.index(stage), (j // _READ_STAGES & 1) ^ 1)", "more arrivals than a phase has"),
        ("mbarrier.wait(released.index(turn), (j // _READ_STAGES & 1) ^ 1)", "a deadlock|still has readers"),
        ("mbarrier.wait(state_full.index(stage), phase)", "a read of a buffer before its copy"),
        ("mbarrier.wait(empty.index(out_stage), (j // _OUT_STAGES & 1) ^ 1)", "a deadlock|still has readers"),
        ("fence_async_shared()", "not yet visible"),
    ],
)
def test_a_planted_fault_is_found(
    line: str, fault: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(str(chunked_delta_hopper.__file__)).read_text()
    assert line in source
    changed = ModuleType("changed")
    changed.__file__ = str(tmp_path / "changed.py")
    changed.__dict__.update(BLOCK_D=chunked_delta_hopper.BLOCK_D, NUM_WARPS=chunked_delta_hopper.NUM_WARPS)
    Path(changed.__file__).write_text(source.replace(line, "pass"))
    batch = batch_of([one_run(30, 500, read_row=4, writes=((470, 3),))], device)
    case = make_case(HEADS, 470, device, 1, [4])
    with pytest.raises(InterpreterError, match=fault):
        run_in_many_orders(changed, case, batch, monkeypatch)
