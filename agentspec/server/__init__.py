"""HTTP: the APIs of OpenAI and Anthropic. Knows an engine through `wire.EngineClient` alone; no torch."""
