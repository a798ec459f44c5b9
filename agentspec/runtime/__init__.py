"""Scheduling and the step: what runs next, prompts, decode steps, sampling, CUDA graphs, and grammars over both."""
