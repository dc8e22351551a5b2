"""Verifiers: decide whether a completion solves its task, with the same result on every machine."""
