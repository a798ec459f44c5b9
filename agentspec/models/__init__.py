"""Qwen3.5-family models behind one protocol: configuration, weights, layers, and the tensors of their state."""
