"""An endless stream of training batches: worker processes generate, render and pack sessions. The batches don't depend
on the number of workers.

    python -m scripts.tiny_agent.data --stats [--sessions 1000]

Owns the order of the sessions, their number of turns, and packing. Independent of the model.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from scripts.tiny_agent.domain import Example
from scripts.tiny_agent.render import READ, REPEATED, WRITTEN, Rendered, render_all
from scripts.tiny_agent.sessions import make_example
from scripts.tiny_agent.tokenizer import DEFAULT_DIRECTORY, END_OF_TEXT, id_of

MAX_LENGTH = 12288
SESSIONS_PER_CHUNK = 64
_CHUNKS_AHEAD = 4
"""Prefetched chunks per worker: enough to keep a batch ready, few enough to bound memory."""
_SHOW_ALL_TURNS = 0.75


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole sessions in sequence, then padding as a separate sequence."""

    ids: npt.NDArray[np.uint16]
    """[tokens_per_batch]"""
    mask: npt.NDArray[np.uint8]
    """[tokens_per_batch]: see render.py; READ for padding."""
    cu_seqlens: npt.NDArray[np.int32]
    """[sequences + 1]: where each sequence begins, then tokens_per_batch."""
    next_example: int
    """The first session after this batch: `start_example` of a stream that resumes here."""
    num_cut: int
    """Number of sessions of this batch that were cut to max_length."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Consecutive sessions for a worker."""

    seed: int
    first: int
    directory: Path


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive sessions, rendered; a few arrays rather than many objects, as they are sent between processes."""

    ids: npt.NDArray[np.uint16]
    mask: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]


def batches(
    seed: int,
    *,
    tokens_per_batch: int,
    max_length: int = MAX_LENGTH,
    start_example: int = 0,
    num_workers: int,
    directory: Path = DEFAULT_DIRECTORY,
) -> Generator[Batch]:
    """Batches of the train split's sessions in order, from `start_example` on. `directory` has the tokenizer;
    `num_workers` 0: no other processes.

    A session that doesn't fit opens the next batch. Closing the iterator ends the workers. Raises ValueError when
    `tokens_per_batch` is less than `max_length`."""
    if tokens_per_batch < max_length:
        raise ValueError(f"tokens_per_batch: {tokens_per_batch} is less than max_length, {max_length}")
    padding = id_of(load_tokenizer(directory), END_OF_TEXT)
    return _pack(
        _sessions(seed, start_example, num_workers, directory), tokens_per_batch, max_length, start_example, padding
    )


def held_out(seed: int, num_sessions: int, unseen: bool, *, directory: Path = DEFAULT_DIRECTORY) -> list[Rendered]:
    """Sessions of the held-out split, cut after as many turns as in training."""
    examples = [make_example(seed, index, split="held_out", unseen=unseen) for index in range(num_sessions)]
    return render_all(
        [(example, num_turns_shown(example, seed, index)) for index, example in enumerate(examples)],
        load_tokenizer(directory),
    )


def num_turns_shown(example: Example, seed: int, index: int) -> int:
    """After how many turns a session is cut, drawn by seed and index: any number for sessions that think, as only the
    last turn has its reasoning; mostly all for the others."""
    rng = random.Random(f"turns shown {seed} {index}")
    if not example.thinking and rng.random() < _SHOW_ALL_TURNS:
        return len(example.turns)
    return rng.randint(1, len(example.turns))


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer that tokenizer.py wrote. Raises FileNotFoundError that says how to make it."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file; python -m scripts.tiny_agent.tokenizer --out {directory} makes it"
        )
    return Tokenizer.from_file(str(file))


def _pack(sessions: Generator[Rendered], size: int, max_length: int, first: int, padding: int) -> Generator[Batch]:
    held: list[Rendered] = []
    filled = num_cut = 0
    with closing(sessions):
        for index, session in enumerate(sessions, first):
            length = min(len(session.ids), max_length)
            if filled + length > size:
                yield _batch(held, size, padding, index, num_cut)
                held, filled, num_cut = [], 0, 0
            held.append(Rendered(session.ids[:length], session.mask[:length]))
            filled += length
            num_cut += length < len(session.ids)


def _batch(sessions: list[Rendered], size: int, padding: int, next_example: int, num_cut: int) -> Batch:
    lengths = [len(session.ids) for session in sessions]
    missing = size - sum(lengths)
    ids = np.concatenate([*(session.ids for session in sessions), np.full(missing, padding, dtype=np.uint16)])
    mask = np.concatenate([*(session.mask for session in sessions), np.full(missing, READ, dtype=np.uint8)])
    cu_seqlens = np.cumsum([0, *lengths, *([missing] if missing else [])], dtype=np.int32)
    return Batch(ids, mask, cu_seqlens, next_example, num_cut)


def _sessions(seed: int, first: int, num_workers: int, directory: Path) -> Generator[Rendered]:
    work = (_Work(seed, start, directory) for start in count(first, SESSIONS_PER_CHUNK))
    with closing(_in_processes(work, num_workers) if num_workers else _in_this_process(work)) as chunks:
        for chunk in chunks:
            ends = np.cumsum(chunk.lengths).tolist()
            for begin, end in zip([0, *ends[:-1]], ends, strict=True):
                yield Rendered(chunk.ids[begin:end], chunk.mask[begin:end])


def _in_this_process(work: Iterator[_Work]) -> Generator[_Chunk]:
    for item in work:
        yield _make_chunk(item)


def _in_processes(work: Iterator[_Work], num_workers: int) -> Generator[_Chunk]:
    """Chunks in the order of the work. Processes are spawned, not forked: the trainer's has threads and a CUDA
    context."""
    executor = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        waiting: deque[Future[_Chunk]] = deque(
            executor.submit(_make_chunk, next(work)) for _ in range(_CHUNKS_AHEAD * num_workers)
        )
        while True:
            chunk = waiting.popleft().result()
            waiting.append(executor.submit(_make_chunk, next(work)))
            yield chunk
    finally:
        executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _make_chunk(work: _Work) -> _Chunk:
    indices = range(work.first, work.first + SESSIONS_PER_CHUNK)
    examples = [make_example(work.seed, index, split="train") for index in indices]
    cuts = [
        (example, num_turns_shown(example, work.seed, index)) for example, index in zip(examples, indices, strict=True)
    ]
    sessions = render_all(cuts, _cached_tokenizer(work.directory))
    return _Chunk(
        np.concatenate([session.ids for session in sessions]),
        np.concatenate([session.mask for session in sessions]),
        np.array([len(session.ids) for session in sessions], dtype=np.int32),
    )


_cached_tokenizer = lru_cache(maxsize=1)(load_tokenizer)


def print_stats(seed: int, num_sessions: int, directory: Path) -> None:
    """Print the lengths of sessions, the kinds of their tokens, and the speed of one core."""
    _start_worker()
    tokenizer = load_tokenizer(directory)
    started = time.process_time()
    examples = [make_example(seed, index, split="train") for index in range(num_sessions)]
    made = time.process_time()
    sessions = render_all(
        [(example, num_turns_shown(example, seed, index)) for index, example in enumerate(examples)], tokenizer
    )
    rendered = time.process_time()
    lengths = np.array([len(session.ids) for session in sessions])
    mask = np.concatenate([session.mask for session in sessions])
    used = len(np.unique(np.concatenate([session.ids for session in sessions])))
    percentiles = ", ".join(f"p{p} {np.percentile(lengths, p):.0f}" for p in (1, 10, 50, 90, 99, 100))
    print(f"{num_sessions} sessions, {len(mask)} tokens; length: mean {lengths.mean():.0f}, {percentiles}")
    shares = {
        name: np.mean(mask == value) for name, value in (("read", READ), ("repeated", REPEATED), ("written", WRITTEN))
    }
    print("share: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    print(
        f"longer than {MAX_LENGTH}: {np.mean(lengths > MAX_LENGTH):.2%}; thinking: "
        f"{np.mean([example.thinking for example in examples]):.1%}"
    )
    print(f"vocabulary: {used} of {tokenizer.get_vocab_size(with_added_tokens=True)} tokens used")
    print(
        f"one core: {len(mask) / (rendered - started):.0f} tokens/s; making {made - started:.2f} s, rendering "
        f"{rendered - made:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The training data of tiny-agent.")
    parser.add_argument("--stats", action="store_true", required=True, help="print statistics of the first sessions")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--sessions", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args()
    print_stats(arguments.seed, arguments.sessions, arguments.tokenizer)


if __name__ == "__main__":
    main()
