"""The verifier of math: the one answer of a completion, and whether it equals the right one."""
