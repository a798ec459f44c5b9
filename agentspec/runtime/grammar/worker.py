"""The process that compiles grammars on trial. A hang, memory explosion or crash here doesn't affect the engine.

    python -m agentspec.runtime.grammar.worker

Reads a Vocabulary, then jobs, from standard input; answers on standard output. Ends at the end of its input, or by an
alarm signal when a job takes too long.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from typing import Any

import numpy as np

from agentspec.runtime.constraint import DEAD_END
from agentspec.runtime.grammar.backend import Backend, new_rows
from agentspec.runtime.grammar.frames import CompileJob, Verdict, Vocabulary, read_message, write_message
from agentspec.runtime.grammar.imports import import_without_torch

ALL_IMPORTS = "--all-imports"
"""Argument of a process that imports everything that xgrammar asks for."""
MEMORY_BYTES = 2 * 2**30
"""Memory that a job may use beyond the idle process's."""
MAX_COMPILED_BYTES = 64 * 1024 * 1024
TRIAL_TOKENS = 48
MASK_SECONDS = 0.25
"""Processor time that one mask may take during the trial walk."""
TRIAL_SECONDS = 2.0
"""Processor time that all masks of the walk may take."""


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps the library's messages out of the answers
    if ALL_IMPORTS not in sys.argv:
        try:
            import_without_torch()
        except Exception:  # another version of the library: the process begins again, before it has read anything
            os.dup2(answers.fileno(), sys.stdout.fileno())
            os.execv(sys.executable, [sys.executable, "-m", "agentspec.runtime.grammar.worker", ALL_IMPORTS])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs = sys.stdin.buffer
    vocabulary = read_message(jobs, Vocabulary)
    if vocabulary is None:
        return
    backend = Backend(vocabulary)
    _limit_memory()
    while (job := read_message(jobs, CompileJob)) is not None:
        signal.setitimer(signal.ITIMER_REAL, vocabulary.job_seconds)
        answer = _answer(backend, vocabulary, job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(answers, answer)


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return  # not Linux: only the alarm limits a job
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))


def _answer(backend: Backend, vocabulary: Vocabulary, job: CompileJob) -> Verdict:
    try:
        compiled = backend.compile(job)
    except Exception as error:  # the library may raise anything for a grammar that it can't read
        return Verdict(error=_reason(error))
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        return Verdict(
            error=f"is too large: {compiled.memory_size_bytes} bytes when compiled, {MAX_COMPILED_BYTES} are the limit"
        )
    return Verdict(error=_objection(backend, vocabulary, compiled))


def _reason(error: Exception) -> str:
    """The library's message without its C++ source position."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        "can't be compiled: " + first.partition(".cc:")[2].partition(": ")[2]
        if ".cc:" in first
        else f"can't be compiled: {first}"
    )


def _objection(backend: Backend, vocabulary: Vocabulary, compiled: Any) -> str | None:
    """Walk the grammar at random, preferring long tokens. Returns why it can't be served: masks that take too long, or
    a dead end, where not even the end may follow."""
    rng = random.Random(0)
    matcher = backend.matcher(compiled)
    total = 0.0
    lengths = np.zeros(backend.num_words * 32, dtype=np.int64)
    lengths[: len(vocabulary.token_bytes)] = [len(token) for token in vocabulary.token_bytes]
    for _ in range(TRIAL_TOKENS):
        rows = new_rows(1, backend.num_words)
        begun = time.thread_time()
        matcher.fill(rows, 0)
        seconds = time.thread_time() - begun
        total += seconds
        if seconds > MASK_SECONDS or total > TRIAL_SECONDS:
            return "takes too much work at every token; counted repetitions of many characters are the usual cause"
        allowed = np.flatnonzero(np.unpackbits(rows.view(np.uint8), bitorder="little")[: vocabulary.vocab_size])
        if not len(allowed):
            return DEAD_END
        longer = allowed[lengths[allowed] >= np.median(lengths[allowed])]
        if not matcher.accept(int(rng.choice(longer))) or matcher.is_ended:
            break
    return None


if __name__ == "__main__":
    main()
