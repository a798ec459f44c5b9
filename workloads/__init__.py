"""Workload files: `agentic.jsonl` (live), `recorded.jsonl` (scripted), and the seeded generator of the second one.
Imports nothing from agentspec."""
