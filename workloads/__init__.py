"""Workloads as files: `agentic.jsonl` and the seeded generator that writes it. Imports nothing from agentspec."""
