"""Quantised checkpoints in formats other than the family's own: one module for each, which reads its config and turns
its tensors into a form of the kernels."""
