"""Replays agent sessions against any OpenAI server and measures them: the file format, the client and the report.

Speaks HTTP only, through an `httpx.AsyncClient` that it is handed; it imports nothing of the engine (of agentspec only
errors and types), so the same replay measures every server.
"""
