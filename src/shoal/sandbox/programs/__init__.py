"""Programs that run in the sandbox."""
