"""Package shoal.config."""
