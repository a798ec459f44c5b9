"""The prompt kernels, compiled, at served shapes: the interpreter's checks on published models in bfloat16, tiny-agent
in float32.

tests/gpu/test_resume_points.py tests them in whole layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentspec.kernels import PrefillBatch, prefill_batch, reference
from agentspec.kernels.triton import chunked_delta, chunked_delta_solve_hopper, page_expansion
from agentspec.runtime.prefill_tables import PrefillSizes
from agentspec.types import ZERO_ROW
from tests.fakes.compare import relative_error
from tests.fakes.prompt_run import Run, batch_of
from tests.gpu.test_kernels_at_served_shapes import HEADS, PUBLISHED, RECURRENT, TINY
from tests.kernels.triton import test_chunked_delta as delta_checks
from tests.kernels.triton import test_hidden as hidden_checks
from tests.kernels.triton import test_prefill_attention as attention_checks
from tests.kernels.triton.poison import poison_new_memory
from tests.kernels.triton.test_attention import FP8_TOLERANCE
from tests.kernels.triton.test_prefill_attention import Case

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


# Attention

SHAPES: dict[str, dict[str, Any]] = {
    **{model: PUBLISHED | heads for model, heads in HEADS.items()},
    "27B, FP8 pages": PUBLISHED | HEADS["27B"] | {"fp8": True},
    "heads of 128, FP8 pages": PUBLISHED | HEADS["4B"] | {"head_dim": 128, "fp8": True},
    "tiny-agent": TINY,
    "tiny-agent, FP8 pages": TINY | {"fp8": True},
    "tiny-agent in bfloat16": TINY | {"dtype": torch.bfloat16},
}
SPANS: dict[str, dict[str, Any]] = {
    "one token": {"spans": ((0, 1),)},
    "a whole prompt": {"spans": ((0, 2100),)},
    "an append, filled up": {"spans": ((20_032, 890),), "padding": (6, 3)},
    "a chunk of a long context": {"spans": ((50_048, 128),)},
    "many of all lengths": {
        "spans": (
            (0, 64),
            (4096, 1),
            (63, 2),
            (0, 333),
            (1000, 24),
            (8000, 130),
            (64, 64),
            (127, 1),
            (2048, 7),
            (5, 500),
        )
    },
    "four appends, filled up": {"spans": ((640, 100), (6400, 64), (0, 17), (3000, 60)), "padding": (15, 0)},
}


def check_attention(case: Case, device: torch.device) -> None:
    """attention_checks.check_prefill with the reference on the device too, because contexts are long."""
    inputs = attention_checks.inputs_of(case)
    plain, real = inputs.to(device, torch.float32), inputs.to(device)
    num_tokens = sum(count for _, count in case.spans)
    got = attention_checks.run(real)[:num_tokens]
    want = attention_checks.attend(reference.attention_prefill, plain)[:num_tokens]
    error = relative_error(got, want)
    print(f"{case.num_heads} heads of {case.head_dim}, {case.dtype}: {error:.1e}")
    assert error < (FP8_TOLERANCE if case.fp8 else attention_checks.TOLERANCE)[case.dtype], case
    attention_checks.check_stores(case, inputs.pool, real.pool, plain.pool, inputs.batch)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_matches_reference(shape: str, spans: str, cuda: torch.device) -> None:
    check_attention(Case(**SHAPES[shape], **SPANS[spans], seed=len(spans)), cuda)


@pytest.mark.parametrize("shape", ["4B", "27B", "27B, FP8 pages"])
def test_attention_of_longest_appends_matches_reference(shape: str, cuda: torch.device) -> None:
    check_attention(Case(**SHAPES[shape], spans=((50_048, 800),), seed=1), cuda)


@pytest.mark.parametrize("spans", ["an append, filled up", "many of all lengths"])
def test_pages_written_out_before_give_the_same_bits(
    spans: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(**SHAPES["27B, FP8 pages"], **SPANS[spans], seed=3)
    num_tokens = sum(count for _, count in case.spans)
    inputs = attention_checks.inputs_of(case)
    written = attention_checks.run(inputs.to(cuda))[:num_tokens]
    monkeypatch.setattr(page_expansion, "MOST_BYTES", 0)
    decoded = attention_checks.run(inputs.to(cuda))[:num_tokens]
    assert torch.equal(written, decoded)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_bitwise_repeatable_and_store_only_matches(shape: str, cuda: torch.device) -> None:
    case = Case(**SHAPES[shape], **SPANS["four appends, filled up"], seed=2)
    attention_checks.check_same_bits(cuda, case)
    attention_checks.check_store_keys_values(cuda, case)


# The gated delta rule

APPENDS: dict[str, tuple[list[Run], PrefillSizes | None]] = {
    "ragged": (delta_checks.RAGGED, delta_checks.ROOMY),
    "a long prompt": (
        [Run(token_ids=range(2100), state_writes=((64, 5), (1088, 6), (2048, 8), (2100, 2)), page_ids=range(1, 40))],
        None,
    ),
    "an append, filled up": (
        [
            Run(
                token_ids=range(800),
                start=50_048,
                read_row=7,
                state_writes=((64, 5), (768, 9), (800, 7)),
                page_ids=range(800),
            )
        ],
        PrefillSizes(num_tokens=896, num_spans=4, num_blocks=22, num_pages=800),
    ),
    "many short ones": (
        [
            Run(
                token_ids=range(20 + 9 * i),
                start=31 * i,
                read_row=ZERO_ROW,
                state_writes=((20 + 9 * i, 2 + i),),
                page_ids=range(20),
            )
            for i in range(16)
        ],
        None,
    ),
}


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("model", RECURRENT)
def test_gated_delta_matches_reference(model: str, append: str, cuda: torch.device) -> None:
    runs, sizes = APPENDS[append]
    delta_checks.check_against_reference(RECURRENT[model], runs, cuda, seed=len(append), sizes=sizes)


@pytest.mark.parametrize("model", RECURRENT)
def test_gated_delta_with_slow_decays_matches_reference(model: str, cuda: torch.device) -> None:
    runs, sizes = APPENDS["an append, filled up"]
    delta_checks.check_against_reference(RECURRENT[model], runs, cuda, seed=1, sizes=sizes, slow=True)


@pytest.mark.parametrize("model", RECURRENT)
def test_gated_delta_is_split_and_batch_invariant(model: str, cuda: torch.device) -> None:
    delta_checks.check_bits(RECURRENT[model], cuda, seed=2)


def values_of(case: delta_checks.Case, batch: PrefillBatch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """u of every block with tokens, between the second launch and the third."""
    fold = chunked_delta._fold
    kept: list[torch.Tensor] = []

    def keep_and_fold(*args: Any) -> None:
        kept.extend(arg.values_MVTD.clone() for arg in args if isinstance(arg, chunked_delta._Scratch))
        fold(*args)

    with monkeypatch.context() as patched:
        patched.setattr(chunked_delta, "_fold", keep_and_fold)
        case.run(batch)
    (values_MVTD,) = kept
    return values_MVTD[batch.blocks_MF[:, prefill_batch.BLOCK_COUNT] > 0]


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("model", RECURRENT)
def test_values_have_the_same_bits_by_either_launch(
    model: str, append: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys, and with write strengths of 1, u is v: convolved in the second launch on Hopper, else in the
    first."""
    (runs, sizes), shape = APPENDS[append], RECURRENT[model]
    batch = batch_of(runs, cuda, sizes=sizes)
    case = delta_checks.make_case(shape, sum(len(run.token_ids) for run in runs), cuda, 3, [r.read_row for r in runs])
    num_values = shape.value_heads * shape.value_dim
    num_keys = shape.channels - num_values
    case.projected_NP[:, :num_keys], case.conv_R3C[..., :num_keys] = 0, 0
    case.projected_NP[:, shape.channels + num_values :][:, : shape.value_heads] = 100
    got = values_of(case, batch, monkeypatch)
    monkeypatch.setattr(chunked_delta_solve_hopper, "is_supported", lambda *_: False)
    expected = values_of(case, batch, monkeypatch)
    assert expected.any()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_delta_with_repeated_key_stays_accurate(dtype: torch.dtype, cuda: torch.device) -> None:
    delta_checks.test_repeated_key_stays_accurate(dtype, cuda)
    delta_checks.test_extreme_gates_stay_finite(cuda)


# Hiddens


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.bfloat16, 1024), (torch.bfloat16, 2560), (torch.bfloat16, 5120), (torch.float32, 256)],
    ids=str,
)
def test_saved_hiddens_match_reference(dtype: torch.dtype, width: int, cuda: torch.device) -> None:
    hidden_checks.test_last_hidden_of_block_is_stored_to_save_rows(width, dtype, cuda)
