"""Text verifiers: exact and fuzzy match, verifiable instructions, JSON with a given schema."""
