"""The stream of batches contains every session once, in order, for any number of workers and after any resume."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from scripts.tiny_agent import data
from scripts.tiny_agent.data import Batch, batches, held_out, num_turns_shown
from scripts.tiny_agent.render import READ, WRITTEN, render
from scripts.tiny_agent.sessions import make_example
from scripts.tiny_agent.tokenizer import write
from tests.tiny_agent.examples import EXAMPLES, small_tokenizer

SIZE = 32768
SEED = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write(small_tokenizer(), path)
    return path


def first(
    num: int, directory: Path, *, start_example: int = 0, num_workers: int = 0, max_length: int = 8192
) -> list[Batch]:
    stream = batches(
        SEED,
        tokens_per_batch=SIZE,
        max_length=max_length,
        start_example=start_example,
        num_workers=num_workers,
        directory=directory,
    )
    try:
        return list(islice(stream, num))
    finally:
        stream.close()


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.next_example, one.num_cut) == (other.next_example, other.num_cut)
        assert all(
            np.array_equal(a, b)
            for a, b in ((one.ids, other.ids), (one.mask, other.mask), (one.cu_seqlens, other.cu_seqlens))
        )


def test_batches_hold_whole_sessions_in_order(directory: Path) -> None:
    tokenizer = small_tokenizer()
    index = 0
    for batch in first(2, directory):
        assert [str(part.dtype) for part in (batch.ids, batch.mask, batch.cu_seqlens)] == ["uint16", "uint8", "int32"]
        assert batch.ids.shape == batch.mask.shape == (SIZE,)
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == SIZE
        bounds = batch.cu_seqlens.tolist()
        for begin, end in pairwise(bounds):
            if index == batch.next_example:
                assert end == SIZE
                assert set(batch.ids[begin:].tolist()) == {tokenizer.token_to_id("<|endoftext|>")}
                assert set(batch.mask[begin:].tolist()) == {READ}
                break
            example = make_example(SEED, index, split="train")
            expected = render(example, tokenizer, num_turns_shown(example, SEED, index))
            length = min(len(expected.ids), 12288)
            assert np.array_equal(batch.ids[begin:end], expected.ids[:length]), index
            assert np.array_equal(batch.mask[begin:end], expected.mask[:length]), index
            index += 1
        assert index == batch.next_example


def test_batches_do_not_depend_on_workers_or_resuming(directory: Path) -> None:
    alone = first(4, directory)
    assert_same(first(4, directory, num_workers=2), alone)
    assert_same(first(2, directory, start_example=alone[1].next_example), alone[2:])


def test_long_sessions_are_cut_at_the_end_and_counted(directory: Path) -> None:
    (batch,) = first(1, directory, max_length=500)
    lengths = np.diff(batch.cu_seqlens)
    assert lengths.max() == 500
    assert 0 < batch.num_cut <= np.sum(lengths == 500)


def test_sessions_with_thinking_are_cut_anywhere_others_rarely() -> None:
    plain, thinks = EXAMPLES[:2]
    assert {num_turns_shown(thinks, SEED, index) for index in range(50)} == {1, 2, 3}
    drawn = [num_turns_shown(plain, SEED, index) for index in range(200)]
    assert drawn.count(3) > 140
    assert set(drawn) == {1, 2, 3}


def test_held_out_sessions_are_marked(directory: Path) -> None:
    for unseen in (False, True):
        sessions = held_out(SEED, 5, unseen, directory=directory)
        assert len(sessions) == 5
        assert all(np.any(session.mask == WRITTEN) for session in sessions)


def test_a_batch_must_have_room_for_the_longest_session(directory: Path) -> None:
    with pytest.raises(ValueError, match="tokens_per_batch: 100 is less than max_length, 12288"):
        next(batches(SEED, tokens_per_batch=100, num_workers=0, directory=directory))


def test_a_missing_tokenizer_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"scripts\.tiny_agent\.tokenizer --out"):
        data.load_tokenizer(tmp_path)
