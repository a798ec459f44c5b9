"""The real scheduler and cache without a model: dry runs of replay files, a closed loop of sessions, measured costs of
models. No torch."""
