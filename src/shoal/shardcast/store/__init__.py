"""The store of versions on disk."""
