"""Package shoal.identity."""
