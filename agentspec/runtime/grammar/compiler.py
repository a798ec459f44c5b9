"""From a request's grammar to constraints: static limits, a trial in another process, a cache.

A grammar is compiled here only after it was compiled there within every limit: a second compile takes less time than
loading what the first one made.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.errors import RequestError
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
from agentspec.wire import Grammar

CACHE_BYTES = 256 * 1024 * 1024
KNOWN_SOURCES = 256
"""Sources for which the cache is looked up without reading them again."""
JOB_SECONDS = 15.0
FIELD = "grammar"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """One grammar, for any number of requests."""

    backend: Backend
    handle: Any
    stop_token_ids: tuple[int, ...]
    after: int | None

    def constraint(self) -> GrammarConstraint:
        """A constraint at the beginning of the grammar."""
        return GrammarConstraint(
            self.backend.matcher(self.handle), self.backend.num_words, self.stop_token_ids, self.after
        )


class GrammarCompiler:
    """Thread-safe: what is cached never waits for what compiles."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        cache_bytes: int = CACHE_BYTES,
        job_seconds: float = JOB_SECONDS,
    ) -> None:
        """`vocab_size`: of the output head. `job_seconds`: how long a grammar may take on trial.

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
        self._process.start()  # it imports what takes a second beside this process, which does so now
        try:
            self._backend = Backend(vocabulary)
        except ImportError as error:
            self._process.close()
            raise RequestError(FIELD, "...", f"needs the package xgrammar: {error}") from None
        self._compiling = threading.Lock()
        self._cache_lock = threading.Lock()
        self._cache: OrderedDict[CompileJob, tuple[Any, int]] = OrderedDict()
        self._jobs: OrderedDict[tuple[str, str, str], CompileJob] = OrderedDict()
        """What the cached grammars were before they were made jobs, by kind, source and lead."""
        self._cached_bytes = 0
        self._cache_bytes = cache_bytes

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Blocks for as long as it takes, which is bounded. Raises RequestError naming what can't be served,
        EngineClosedError after `close`."""
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
        """A grammar that stands in the cache under these very words; looks nowhere else and never blocks. None for what
        `compile` would refuse."""
        if grammar.after is not None and not 0 <= grammar.after < self._vocab_size:
            return None
        with self._cache_lock:
            job = self._jobs.get(_words(grammar))
        handle = None if job is None else self._cached(job)
        return None if handle is None else CompiledGrammar(self._backend, handle, self._stop_token_ids, grammar.after)

    def close(self) -> None:
        """A compile that still runs ends with EngineClosedError."""
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
        """The least recently used make room."""
        with self._cache_lock:
            self._cache[job] = (handle, num_bytes)
            self._cached_bytes += num_bytes
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, (_, freed) = self._cache.popitem(last=False)
                self._cached_bytes -= freed


def _words(grammar: Grammar) -> tuple[str, str, str]:
    return grammar.kind, grammar.source, grammar.lead


def _job(grammar: Grammar) -> CompileJob:
    """What the process is to compile. Schemas and expressions become EBNF here: the library's own readings of them skip
    what they don't know."""
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
    """Schemas and expressions inside a structural tag would be read by the library, which skips what it doesn't
    know."""
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
