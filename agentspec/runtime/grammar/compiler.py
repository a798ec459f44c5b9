"""Compiles a request's grammar to a constraint: static limits, a trial in another process, a cache.

The engine compiles a grammar only after the trial process has compiled it within every limit. Compiling it a second
time is faster than transferring the first result.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.errors import RequestError
from agentspec.runtime.constraint_source import ConstraintSource
from agentspec.runtime.grammar.backend import Backend
from agentspec.runtime.grammar.constraint import GrammarConstraint
from agentspec.runtime.grammar.frames import CompileJob, Vocabulary
from agentspec.runtime.grammar.process import TrialProcess
from agentspec.text.automata import TooLargeError, add_automaton
from agentspec.text.grammar_rules import MAX_SOURCE_BYTES, Rules, literal
from agentspec.text.json_schema import SchemaReader
from agentspec.text.schema_grammar import PRETTY, SchemaGrammar
from agentspec.text.schema_patterns import ANY_TEXT, PatternError, read_pattern
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import ModelSpec
from agentspec.wire import Grammar

CACHE_BYTES = 256 * 1024 * 1024
KNOWN_SOURCES = 256
"""Grammar texts for which the cache is looked up without parsing them again."""
JOB_SECONDS = 15.0
FIELD = "grammar"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """One compiled grammar, for any number of requests."""

    backend: Backend
    handle: Any
    stop_token_ids: tuple[int, ...]
    after: int | None

    def constraint(self) -> GrammarConstraint:
        """A new constraint at the beginning of the grammar."""
        return GrammarConstraint(
            self.backend.matcher(self.handle), self.backend.num_words, self.stop_token_ids, self.after
        )


class GrammarCompiler:
    """Thread-safe: a cached grammar never waits for one that is compiling."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        cache_bytes: int = CACHE_BYTES,
        job_seconds: float = JOB_SECONDS,
    ) -> None:
        """`vocab_size`: of the output head. `job_seconds`: how long a trial compile may take.

        Raises RequestError when xgrammar isn't installed."""
        self._stop_token_ids = tuple(stop_token_ids)
        vocabulary = Vocabulary(
            token_bytes=tokenizer.token_bytes[:vocab_size],
            vocab_size=vocab_size,
            stop_token_ids=list(stop_token_ids),
            job_seconds=job_seconds,
        )
        self._vocab_size = vocab_size
        self._process = TrialProcess(vocabulary)
        self._process.start()  # its slow imports run in parallel with this process's own
        try:
            self._backend = Backend(vocabulary)
        except ImportError as error:
            self._process.close()
            raise RequestError(FIELD, "...", f"needs the package xgrammar: {error}") from None
        self._compiling = threading.Lock()
        self._cache_lock = threading.Lock()
        self._cache: OrderedDict[CompileJob, tuple[Any, int]] = OrderedDict()
        self._jobs: OrderedDict[tuple[str, str, str], CompileJob] = OrderedDict()
        """Jobs of the cached grammars, by kind, source and lead: saves converting the same text again."""
        self._cached_bytes = 0
        self._cache_bytes = cache_bytes

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or find it in the cache. Blocks for a bounded time. Raises RequestError naming what can't
        be served, EngineClosedError after `close`."""
        if grammar.after is not None and not 0 <= grammar.after < self._vocab_size:
            raise RequestError(f"{FIELD}.after", grammar.after, f"is not a token id below {self._vocab_size}")
        job = _job(grammar)
        handle = self._cached(job)
        if handle is None:
            with self._compiling:
                handle = self._cached(job) or self._compile(job, grammar)
        with self._cache_lock:
            self._jobs[_words(grammar)] = job
            while len(self._jobs) > KNOWN_SOURCES:
                self._jobs.popitem(last=False)
        return CompiledGrammar(self._backend, handle, self._stop_token_ids, grammar.after)

    def known(self, grammar: Grammar) -> CompiledGrammar | None:
        """A grammar that is cached under exactly this text; never blocks. None if it isn't cached, or if `compile`
        would refuse it."""
        if grammar.after is not None and not 0 <= grammar.after < self._vocab_size:
            return None
        with self._cache_lock:
            job = self._jobs.get(_words(grammar))
        handle = None if job is None else self._cached(job)
        return None if handle is None else CompiledGrammar(self._backend, handle, self._stop_token_ids, grammar.after)

    def close(self) -> None:
        """End the trial process. A compile that still runs raises EngineClosedError."""
        self._process.close()

    def _compile(self, job: CompileJob, grammar: Grammar) -> Any:
        verdict = self._process.run(job)
        if verdict.error is not None:
            raise RequestError(f"{FIELD}.source", grammar.source, verdict.error)
        handle = self._backend.compile(job)
        self._keep(job, handle, handle.memory_size_bytes + len(job.source))
        return handle

    def _cached(self, job: CompileJob) -> Any | None:
        with self._cache_lock:
            if (found := self._cache.get(job)) is None:
                return None
            self._cache.move_to_end(job)
            return found[0]

    def _keep(self, job: CompileJob, handle: Any, num_bytes: int) -> None:
        """Add a grammar to the cache, evicting the least recently used."""
        with self._cache_lock:
            self._cache[job] = (handle, num_bytes)
            self._cached_bytes += num_bytes
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, (_, freed) = self._cache.popitem(last=False)
                self._cached_bytes -= freed


def constraint_source(spec: ModelSpec, tokenizer: Tokenizer | None, *, forces_acceptance: bool) -> ConstraintSource:
    """A source of constraints for an engine; one that refuses with the reason where grammars can't be served.
    forces_acceptance: the engine accepts drafts that the target did not choose."""
    if tokenizer is None:
        return ConstraintSource(None, refusal="needs a tokenizer, and this checkpoint has none")
    if not spec.stop_token_ids:
        return ConstraintSource(None, refusal="ends with a stop id, and this model has none")
    if forces_acceptance:
        return ConstraintSource(None, refusal="can't be kept while acceptance is forced")
    return ConstraintSource(
        lambda: GrammarCompiler(tokenizer, vocab_size=spec.vocab_size, stop_token_ids=spec.stop_token_ids)
    )


def _words(grammar: Grammar) -> tuple[str, str, str]:
    return grammar.kind, grammar.source, grammar.lead


def _job(grammar: Grammar) -> CompileJob:
    """The grammar as a job for the trial process. Schemas and expressions become EBNF here, because the library ignores
    keywords it doesn't know in them."""
    if len(grammar.source) > MAX_SOURCE_BYTES:
        raise RequestError(f"{FIELD}.source", grammar.source, f"is longer than {MAX_SOURCE_BYTES} characters")
    for name, text in (("source", grammar.source), ("lead", grammar.lead)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{FIELD}.{name}", text, f"is not valid Unicode: {error.reason}") from None
    lead = f"root ::= {literal(grammar.lead)}?\n" if grammar.lead else ""
    match grammar.kind:
        case "json_schema":
            return CompileJob(kind="ebnf", source=_schema_source(grammar.source), lead=lead)
        case "regex":
            rules = Rules(f"{FIELD}.source")
            try:
                root = add_automaton(rules, read_pattern(grammar.source, ANY_TEXT, is_whole=True))
            except (PatternError, TooLargeError) as error:
                raise RequestError(f"{FIELD}.source", grammar.source, str(error)) from None
            return CompileJob(kind="ebnf", source=rules.source(root), lead=lead)
        case "structural_tag":
            _check_tag(grammar.source)
            return CompileJob(kind="structural_tag", source=grammar.source, lead=lead)
        case "ebnf":
            return CompileJob(kind="ebnf", source=grammar.source, lead=lead)


def _schema_source(text: str) -> str:
    field = f"{FIELD}.source"
    rules = Rules(field)
    schema = _decoded(text, field)
    return rules.source(SchemaGrammar(rules, SchemaReader(schema, field), PRETTY).value(schema, field))


def _check_tag(text: str) -> None:
    """Refuse schemas and expressions inside a structural tag: the library would parse them, and it ignores what it
    doesn't know."""
    level = [_decoded(text, f"{FIELD}.source")]
    while level:
        node = level.pop()
        if isinstance(node, dict):
            if node.get("type") in ("json_schema", "qwen_xml_parameter", "regex"):
                raise RequestError(f"{FIELD}.source", node, f"can't hold a {node['type']}: write it as a grammar")
            level += node.values()
        elif isinstance(node, list):
            level += node


def _decoded(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(field, text, f"is not JSON that can be read: {error}") from None
