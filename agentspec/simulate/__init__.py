"""The real scheduler and cache without a model: dry runs of replay files, closed loops of sessions, and models'
measured costs. No torch."""
