"""Fetching versions from upstream servers."""
