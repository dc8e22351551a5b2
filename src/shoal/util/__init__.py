"""Package shoal.util."""
