"""Package shoal.train."""
