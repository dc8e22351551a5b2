"""Verifiers: whether a completion solves its task, the same on every machine."""
