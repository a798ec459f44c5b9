"""Grammars of requests: compiled on trial in a separate process, then followed token by token. The only package that
imports xgrammar."""

from __future__ import annotations

from agentspec.runtime.grammar.compiler import CompiledGrammar, GrammarCompiler, constraint_source

__all__ = ["CompiledGrammar", "GrammarCompiler", "constraint_source"]
