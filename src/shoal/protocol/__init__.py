"""Package shoal.protocol."""
