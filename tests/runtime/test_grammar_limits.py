"""Grammars that would hang, explode or crash their compiler: refused within a time limit, in a process that can be
replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentspec.engine import bundled
from agentspec.errors import EngineClosedError, RequestError
from agentspec.runtime.grammar import GrammarCompiler
from agentspec.runtime.grammar.frames import CompileJob, Verdict, Vocabulary, read_message, write_message
from agentspec.runtime.grammar.process import TrialProcess
from agentspec.text.tokenizer import Tokenizer
from agentspec.wire import Grammar

SLOW = Grammar(kind="ebnf", source="root ::= ([a-z]{1,900} [^x]{1,900} [^y]{1,900}){1,100}")
"""Takes seconds, even with the bundled vocabulary."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, stop_token_ids=[0], job_seconds=0.5)
    yield compiler
    compiler.close()


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        pytest.param(SLOW, "too long", id="slow to compile"),
        pytest.param(
            Grammar(kind="ebnf", source="root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000), "Nest", id="deep groups"
        ),
        pytest.param(
            Grammar(kind="ebnf", source='root ::= "a"{1,999999999}{1,999}'), "can't", id="repetition of a repetition"
        ),
        pytest.param(
            Grammar(kind="ebnf", source='root ::= "\\"" c{0,1000} "\\""\nc ::= [^"\\\\] | "\\\\" ["\\\\]'),
            "too long|too much work",
            id="slow masks",
        ),
        pytest.param(Grammar(kind="regex", source="((a{1,40}){1,40}){1,40}"), "2000", id="exploding expression"),
        pytest.param(Grammar(kind="regex", source="(a|b)*a(a|b){12}"), "states", id="exploding automaton"),
        pytest.param(Grammar(kind="regex", source="(" * 5000), "groups", id="deep expression"),
        pytest.param(Grammar(kind="json_schema", source=nested(500)), "levels", id="deep schema"),
        pytest.param(
            Grammar(kind="json_schema", source='{"anyOf": [' + '{"type": "string"},' * 20_000 + "{}]}"),
            "values",
            id="wide schema",
        ),
        pytest.param(
            Grammar(
                kind="json_schema",
                source='{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
            ),
            "without end",
            id="references in a circle",
        ),
        pytest.param(
            Grammar(
                kind="json_schema",
                source='{"$defs": {'
                + ",".join(
                    f'"d{n}": {{"anyOf": [{{"$ref": "#/$defs/d{n + 1}"}}, {{"$ref": "#/$defs/d{n + 1}"}}]}}'
                    for n in range(30)
                )
                + ', "d30": {}}, "$ref": "#/$defs/d0"}',
            ),
            "alternatives",
            id="exploding alternatives",
        ),
    ],
)
def test_explosive_grammars_are_refused(compiler: GrammarCompiler, grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        compiler.compile(grammar)
    assert caught.value.field.startswith("grammar")


def test_dead_process_is_replaced(tokenizer: Tokenizer) -> None:
    trials = TrialProcess(
        Vocabulary(
            token_bytes=tokenizer.token_bytes, vocab_size=tokenizer.vocab_size, stop_token_ids=[0], job_seconds=60
        )
    )
    good = CompileJob(kind="ebnf", source='root ::= "a"')
    assert trials.run(good).error is None
    first = trials.pid
    assert first is not None
    os.kill(first, signal.SIGSEGV)
    while trials.run(good).error is not None:
        pass
    assert trials.pid not in (None, first)
    trials.close()
    assert trials.pid is None


def run_worker(folder: Path, *, fake: str | None = None) -> tuple[Verdict | None, set[str]]:
    """The verdict on a good grammar of a worker by itself, and its loaded libraries. fake: code that is imported in
    place of tvm_ffi."""
    if fake is not None:
        (folder / "tvm_ffi.py").write_text(fake)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    worker = [sys.executable, "-m", "agentspec.runtime.grammar.worker"]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        vocabulary = Vocabulary(token_bytes=[b"a", b""], vocab_size=2, stop_token_ids=[1], job_seconds=60)
        write_message(process.stdin, vocabulary)
        write_message(process.stdin, CompileJob(kind="ebnf", source='root ::= "a"'))
        verdict = read_message(process.stdout, Verdict)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.stdin.close()
    return verdict, {name for name in ("libtorch_cpu", "tvm_ffi") if name in maps}


def test_process_does_not_load_torch(tmp_path: Path) -> None:
    assert run_worker(tmp_path) == (Verdict(error=None), {"tvm_ffi"})


def test_process_loads_torch_if_the_library_needs_it(tmp_path: Path) -> None:
    needs_torch = (
        "import sys, torch\n"
        f"sys.path.remove({str(tmp_path)!r})\n"
        "del sys.modules['tvm_ffi']\n"
        "import tvm_ffi\n"
        "sys.modules['tvm_ffi'] = tvm_ffi\n"
    )
    assert run_worker(tmp_path, fake=needs_torch) == (Verdict(error=None), {"libtorch_cpu", "tvm_ffi"})


def test_process_can_be_started_before_its_first_job(tokenizer: Tokenizer) -> None:
    trials = TrialProcess(
        Vocabulary(
            token_bytes=tokenizer.token_bytes, vocab_size=tokenizer.vocab_size, stop_token_ids=[0], job_seconds=60
        )
    )
    before = trials.pid
    assert before is None
    trials.start()
    first = trials.pid
    assert first is not None
    trials.start()
    assert trials.run(CompileJob(kind="ebnf", source='root ::= "a"')).error is None
    assert trials.pid == first
    trials.close()
    trials.start()
    assert trials.pid is None, "no process starts after close"


def test_process_closed_during_start_is_killed(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(token_bytes=[b"x" * 100] * 100_000, vocab_size=100_000, stop_token_ids=[0], job_seconds=60)
    trials = TrialProcess(vocabulary)  # more than a pipe holds: it is being written until the process reads
    thread = threading.Thread(target=trials.start)
    thread.start()
    while (pid := trials.pid) is None:
        pass
    trials.close()
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_close_ends_a_running_trial(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, stop_token_ids=[0], job_seconds=60)
    compiler.compile(Grammar(kind="regex", source="a"))
    ended: list[BaseException] = []

    def compile_slowly() -> None:
        try:
            compiler.compile(SLOW)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    compiler.close()
    thread.join()
    assert [type(error) for error in ended] == [EngineClosedError]
