"""Grammars of requests: compiled in a process of their own, followed token by token. The only room that knows
xgrammar."""

from __future__ import annotations

from agentspec.runtime.grammar.compiler import CompiledGrammar, GrammarCompiler
from agentspec.runtime.grammar.source import constraint_source

__all__ = ["CompiledGrammar", "GrammarCompiler", "constraint_source"]
