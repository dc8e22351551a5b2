"""Lossless deltas between versions."""
