"""State forms that mixers declare, in pools and engine: models whose layers have two and three forms of state."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from agentspec.cache.host_tier import HostMemory
from agentspec.models.protocol import VerifyBatch
from agentspec.models.state import Memory
from agentspec.types import ZERO_ROW, CheckpointKind
from tests.fakes.scalar_decay import ScalarDecay, load_decay_model
from tests.properties.real_model import CPU, EngineSetup, Scratch, Simulation, StateSpy, write_agreeing_checkpoint

NUM_ROWS, NUM_PAGES = 5, 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One decay layer and one attention layer."""
    return write_agreeing_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=2, full_attention_interval=2
    )


def test_pools_follow_state_forms_of_mixers(tmp_path: Path) -> None:
    """Layers: decay, delta rule, decay, attention; then the MTP layer."""
    model = load_decay_model(write_agreeing_checkpoint(tmp_path, num_hidden_layers=4), CPU)
    model.allocate(num_rows=NUM_ROWS, num_pages=NUM_PAGES)
    memories = [tuple(part.shape for part in memory) for memory in model.pools.layers]
    decay = ((NUM_ROWS, 6, 16, 16), (NUM_ROWS, 6), (NUM_ROWS, 160))
    attention = ((NUM_PAGES, 2, 64, 2, 32),)
    assert memories == [decay, ((NUM_ROWS, 6, 16, 16), (NUM_ROWS, 3, 160)), decay, attention, attention]
    assert [
        len(model.pools[name]) for name in ("decayed_LRVKD", "width_LRV", "ssm_LRVDK", "kv_AP2SGD", "hidden_LRH")
    ] == [2, 2, 1, 2, 1]
    assert len(model.row_tensors()) == 2 * 3 + 2 + 1
    assert sum(part[0].nbytes for part in model.row_tensors()) == model.spec.row_bytes
    assert sum(part[0].nbytes for part in model.page_tensors()) == model.spec.page_bytes
    assert not any(part[ZERO_ROW].any() for part in model.row_tensors())
    for part in model.row_tensors():
        part.zero_()
    for memory, row in zip(model.pools.layers[:3], (2, 3, 4), strict=True):
        memory[0][row] = 1.0
    assert [[bool(part[row].any()) for row in (2, 3, 4)] for part in model.row_tensors() if part.ndim == 4] == [
        [True, False, False],
        [False, False, True],
        [False, True, False],
    ], "every layer has memory of its own"


def test_custom_state_form_is_fetched_from_host(checkpoint: Path) -> None:
    setup = EngineSetup(
        seed=9,
        random_depth=True,
        max_running=2,
        spare_rows=4,
        num_pages=26,
        host_memory=HostMemory(num_rows=40, num_pages=200),
        max_context=1536,
        system_tokens=(300, 600),
        related_systems=2,
        ignoring_share=0.8,
    )
    simulation = Simulation(setup, checkpoint, num_agents=10, num_turns=4, loader=load_decay_model)
    spy = StateSpy(simulation, Scratch(checkpoint, loader=load_decay_model))
    simulation.run()
    print(spy.num_fetched, spy.num_resumed, spy.num_published)
    assert spy.num_fetched > 2
    assert spy.num_published[CheckpointKind.TURN] > 2


def forget_a_part(mixer: ScalarDecay, memory: Memory, rows: Tensor | list[int], state: Memory) -> None:
    """Store the first and third part, but not the widths."""
    for part_R, part_B in zip(memory[::2], state[::2], strict=True):
        part_R[rows] = part_B
    memory[1][rows] = 0


def step_a_column_late(mixer: ScalarDecay, projected_NP: Tensor, memory: Memory, windows: VerifyBatch) -> Tensor:
    """Column t's row gets the state after the last column."""
    rows_BT = windows.write_rows_BT
    state = tuple(part_R[windows.read_row_B] for part_R in memory)
    states, y_BTO = mixer._advance(state, projected_NP.view(*rows_BT.shape, -1))
    for t in range(rows_BT.shape[1]):
        mixer._save(memory, rows_BT[:, t], tuple(part_BT[:, -1] for part_BT in states))
    return y_BTO.flatten(0, 1)


@pytest.mark.parametrize(("method", "wrong"), [("_save", forget_a_part), ("step", step_a_column_late)])
def test_planted_mixer_bug_is_detected_at_publish(checkpoint: Path, method: str, wrong: object) -> None:
    scratch = Scratch(checkpoint, loader=load_decay_model)
    simulation = Simulation(
        EngineSetup(seed=11, random_depth=True, prefill_budget=130), checkpoint, num_agents=4, loader=load_decay_model
    )
    StateSpy(simulation, scratch)
    mixer = simulation.model._layers[0].mixer
    setattr(mixer, method, lambda *arguments: wrong(mixer, *arguments))  # type: ignore[operator]
    with pytest.raises(AssertionError, match=r"published \w+: part 1 of row|published \w+: part 0 of row"):
        simulation.run()
