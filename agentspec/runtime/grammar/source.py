"""Which engines take grammars, and their source of constraints."""

from __future__ import annotations

from agentspec.runtime.constraint_source import ConstraintSource
from agentspec.runtime.grammar.compiler import GrammarCompiler
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import ModelSpec


def constraint_source(spec: ModelSpec, tokenizer: Tokenizer | None, *, forces_acceptance: bool) -> ConstraintSource:
    """forces_acceptance: the engine accepts drafts that the target did not choose."""
    if tokenizer is None:
        return ConstraintSource(None, refusal="needs a tokenizer, and this checkpoint has none")
    if not spec.stop_token_ids:
        return ConstraintSource(None, refusal="ends with a stop id, and this model has none")
    if forces_acceptance:
        return ConstraintSource(None, refusal="can't be kept while acceptance is forced")
    return ConstraintSource(
        lambda: GrammarCompiler(tokenizer, vocab_size=spec.vocab_size, stop_token_ids=spec.stop_token_ids)
    )
