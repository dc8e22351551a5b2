"""The math verifier: extracts the one answer of a completion and compares it with the right one."""
