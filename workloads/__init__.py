"""Workloads as files: `agentic.jsonl` (live), `recorded.jsonl` (scripted), and the seeded generator of the second.
Imports nothing from agentspec."""
