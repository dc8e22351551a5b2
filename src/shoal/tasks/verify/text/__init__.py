"""Verifiers of texts: exact and fuzzy match, instructions that can be checked, JSON of a given shape."""
