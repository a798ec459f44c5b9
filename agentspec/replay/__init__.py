"""Replay agent sessions against any OpenAI-compatible server and measure it: file format, client and report.

The only interface to the server is HTTP, through an `httpx.AsyncClient` from the caller. Of agentspec it imports errors
and types only, so that every server is measured in the same way.
"""
